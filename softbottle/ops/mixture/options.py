"""The choices that every operation takes, and the arithmetic they imply."""

import dataclasses
import functools
import logging
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from softbottle.ops import device as device_lib
from softbottle.ops.device import HOPPER, Device

# Each is a module of this package, imported when it is used: Pallas takes a while.
IMPLEMENTATIONS = ("blocked", "pallas_gpu", "pallas_tpu", "reference")


@dataclasses.dataclass(frozen=True)
class Options:
    """How an operation is computed; only `vocab` changes what is computed.

    Attributes:
        compute_dtype: of the matrix products' inputs, for example jnp.bfloat16 over a
            float32 table; None keeps the inputs' own. Sums are float32 or better, and
            a gradient has the dtype of its input. float16 is refused.
        vocab: how many of the table's rows are words; the rest is padding that gets
            probability zero. None means all of them.
        vocab_axis: inside `shard_map`, the mesh axis over which the table's rows are
            split; `vocab` and the labels still count the whole vocabulary.
        implementation: "blocked" (XLA, everywhere), "pallas_gpu" (a kernel for Hopper
            GPUs), "pallas_tpu" (one for TPUs), "reference" (dense: for checking), or
            "auto": the GPU kernel on a Hopper GPU and else "blocked". (The TPU kernel
            has been compiled for TPUs but not timed on one, so it is used when asked
            for.) They agree to rounding.
        budget_bytes: what one block of logits may take. None means 32 MiB, and on a
            GPU, but not in decoding, 1 GiB or, in `loss`, 4,096 rows of it if that is
            more: with fewer rows at a time the table's gradient is read and written
            too often.
        device: what the operation runs on; None until `resolve` is called.
    """

    compute_dtype: Any = None
    vocab: int | None = None
    vocab_axis: str | None = None
    implementation: str = "auto"
    budget_bytes: int | None = None
    device: Device | None = None

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """Reject an option that there is not, with those that there are."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in named:
            if name not in names:
                raise TypeError(f"no option is called {name!r}; there are {names}.")
        del values
        return super().__new__(cls)

    def __post_init__(self):
        """Reject values that no implementation could use."""
        for name in ("budget_bytes", "vocab"):
            value = getattr(self, name)
            if value is not None and not _is_count(value):
                raise ValueError(f"{name} must be a positive integer, got {value!r}.")
        if not isinstance(self.vocab_axis, str | tuple | None):
            raise ValueError(
                f"vocab_axis must be the name of a mesh axis, got {self.vocab_axis!r}."
            )
        if self.implementation not in ("auto", *IMPLEMENTATIONS):
            raise ValueError(
                f"no implementation is called {self.implementation!r}; there are "
                f"{sorted(IMPLEMENTATIONS)} and 'auto'."
            )
        if self.compute_dtype is not None:
            dtype = _floating(self.compute_dtype)
            check_range(compute_dtype=dtype)
            object.__setattr__(self, "compute_dtype", dtype)

    def resolve(self, device: Device | jax.Device | None = None) -> "Options":
        """The options with the choices made that depend on a device.

        Args:
            device: for which; None keeps the one that was chosen before, or else takes
                jax's first.
        """
        if device is None:
            if self.device is not None:
                return self
            device = device_lib.at_hand()
        if not isinstance(device, Device):
            device = Device.of(device)
        name = self.implementation
        if name == "auto":
            hopper = device.capability == HOPPER and jax.__version_info__ >= (0, 11)
            name = "pallas_gpu" if hopper else "blocked"
            note(f"The head's implementation is {name}.")
        return dataclasses.replace(self, implementation=name, device=device)

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU; raises before `resolve`."""
        if self.device is None:
            raise ValueError("the options have no device yet: call resolve first.")
        return self.device.platform == "gpu"

    @property
    def float32_bits(self) -> int | None:
        """How many bits of a float32 mantissa a product reads; None for all of them.

        Unless `jax.default_matmul_precision` says otherwise, GPUs since Ampere read
        those of TF32, and TPUs those of bfloat16.
        """
        precision = jax.config.values["jax_default_matmul_precision"]
        if precision not in (None, "default", "fastest"):
            return None
        device = self.device or device_lib.at_hand()
        return 7 if device.platform == "tpu" else 10 if device.has_tf32 else None

    @property
    def block_bytes(self) -> int:
        """What one block of logits may take on the device."""
        if self.budget_bytes is not None:
            return self.budget_bytes
        return 2**30 if self.on_gpu else 32 * 2**20

    def loss_bytes(self, row_bytes: int) -> int:
        """`block_bytes`, for a loss whose rows take `row_bytes` each."""
        if self.budget_bytes is None and self.on_gpu:
            return max(self.block_bytes, 4096 * row_bytes)
        return self.block_bytes


def _is_count(value):
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and value >= 1


def _floating(dtype):
    """The dtype of what names one; integers would round all that is multiplied."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise ValueError(
            "compute_dtype must be a floating-point dtype such as jnp.bfloat16, got "
            f"{dtype!r}."
        )
    return found


# What an operation is called with unless the caller says otherwise.
DEFAULTS = Options()


@functools.cache
def note(message: str) -> None:
    """Say something in the log, once."""
    logging.getLogger("softbottle").info(message)


def check_range(**trees: Any) -> None:
    """Raise ValueError if an array, or a dtype, is float16 or narrower.

    exp(logit) leaves float16's range when a word is 11 nats ahead, and the gradient of
    a token that weighs 1/16,384 is below its smallest number. The one would be NaN and
    the other 0 without a word.
    """
    for name, tree in trees.items():
        for dtype in map(jnp.result_type, jax.tree.leaves(tree)):
            floating = jnp.issubdtype(dtype, jnp.floating)
            if floating and jnp.finfo(dtype).maxexp < jnp.finfo(jnp.float32).maxexp:
                raise ValueError(
                    f"{name} must be float64, bfloat16 or float32, got {dtype}: "
                    "exponentials and gradients leave its range; cast it, for example "
                    "with .astype(jnp.bfloat16)."
                )


def sum_dtype(*arrays: jax.Array | jax.ShapeDtypeStruct) -> jnp.dtype:
    """The dtype of reductions: float32, or float64 when an input has it."""
    return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def product_dtype(
    options: Options, *arrays: jax.Array | jax.ShapeDtypeStruct
) -> jnp.dtype:
    """The dtype of the matrix products' inputs."""
    return options.compute_dtype or jnp.result_type(*arrays)


def chunk_count(tokens: int, bytes_per_token: int, budget_bytes: int) -> int:
    """The fewest chunks of tokens whose blocks fit the budget (at least one)."""
    per_chunk = max(1, min(tokens, budget_bytes // max(1, bytes_per_token)))
    return max(1, -(-tokens // per_chunk))
