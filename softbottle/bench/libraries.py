"""The libraries that the head is raced with: what each brings, needs and lacks.

A loss per row that takes any cotangent makes a mixture (losses_torch.py, jax_peers.py).
A library that has only the mean of all rows is raced with one component alone. One that
takes no bias is raced without, and its truth has none either.
"""

import importlib
from typing import NamedTuple

TORCH, JAX = "softbottle.bench.peers", "softbottle.bench.jax_peers"


class Variant(NamedTuple):
    """One way in which a library computes the loss.

    Attributes:
        title: what its rows are called.
        bias: whether it takes one.
        mixtures: whether it gives a loss per row.
    """

    title: str
    bias: bool = True
    mixtures: bool = True

    @property
    def name(self) -> str:
        """The title, with what is missing."""
        return self.title if self.bias else f"{self.title}, no bias"


class Library(NamedTuple):
    """What must be installed, the module whose child runs it, and its variants."""

    module: str
    package: str
    child: str
    variants: dict[str, Variant]


PEERS = {
    "torch": Library(
        "torch",
        "torch",
        TORCH,
        {"naive": Variant("torch naive"), "compile": Variant("torch.compile")},
    ),
    "cce": Library(
        "cut_cross_entropy",
        "git+https://github.com/apple/ml-cross-entropy.git",
        TORCH,
        {"cce": Variant("cut cross-entropy")},
    ),
    "tokamax": Library(
        "tokamax",
        "tokamax",
        JAX,
        {
            "xla": Variant("tokamax xla", bias=False),
            "chunked_xla": Variant("tokamax chunked_xla", bias=False),
        },
    ),
    "liger": Library(
        "liger_kernel",
        "liger-kernel",
        TORCH,
        {
            "liger": Variant("liger"),
            "liger-cute": Variant("liger CuTe", bias=False, mixtures=False),
            "liger-rows": Variant("liger, per token", bias=False),
        },
    ),
    "quack": Library(
        "quack",
        "quack-kernels",
        TORCH,
        {
            "quack": Variant("quack", bias=False, mixtures=False),
            "quack-rows": Variant("quack, per token"),
        },
    ),
}


def variant(name: str) -> Variant:
    """The variant of that name.

    Raises:
        ModuleNotFoundError: its library is not installed, or lacks a package.
    """
    library = next(one for one in PEERS.values() if name in one.variants)
    try:
        importlib.import_module(library.module)
    except ModuleNotFoundError as error:
        # What the library itself misses is told by the library.
        if error.name != library.module:
            raise
        text = f"{library.module} is not installed: pip install {library.package}"
        raise ModuleNotFoundError(text, name=library.module) from None
    return library.variants[name]
