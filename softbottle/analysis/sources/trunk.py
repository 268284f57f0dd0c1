"""A pretrained model's trunk alone: what its head reads, many windows at a time.

The trunk is PyTorch's and stays there; the head is of this library. States go to jax
by DLPack, without a copy where both are on one device, and gradients come back the same
way. Only one position's logits are computed: the head's input is cut to it.

Axes: B windows of S tokens.
"""

import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from softbottle.analysis.sources import hugging_face, states, texts
from softbottle.analysis.sources.pretrained import Pretrained, load_gguf, load_hf
from softbottle.analysis.sources.reading import Front, Model, imported

DTYPES = ("float32", "bfloat16")


def load(
    hf: pathlib.Path | str | None = None, gguf: pathlib.Path | str | None = None
) -> Pretrained:
    """A model of `transformers`, from a folder or the hub, or from a GGUF file.

    Raises:
        ValueError: unless one of the two is given, and as `pretrained.load_hf`.
        ImportError: as `pretrained.load_hf`.
    """
    if gguf is not None and hf is None:
        return load_gguf(gguf)
    if hf is not None and gguf is None:
        return load_hf(hf)
    raise ValueError("a model is needed, from --hf or from --gguf.")


def hidden(pretrained: Pretrained, ids_BS: np.ndarray) -> Any:
    """What the head reads, a tensor [B, S, D], with its graph unless there is no grad.

    Raises:
        ValueError: if the model does not call its output table as a layer.
    """
    read: list[Any] = []

    def keep(_, inputs):
        read.append(inputs[0])
        return (inputs[0][:, -1:], *inputs[1:])

    head = pretrained.head
    hook = head.register_forward_pre_hook(keep)
    try:
        where = next(pretrained.module.parameters()).device
        tokens = pretrained.torch.as_tensor(np.asarray(ids_BS, np.int64), device=where)
        pretrained.module(tokens, use_cache=False)
    finally:
        hook.remove()
    if not read:
        raise ValueError(
            f"{pretrained.name} does not call its output table as a layer."
        )
    return read[0]


class Texts(NamedTuple):
    """Texts as a model reads them.

    Attributes:
        texts: in its tokens.
        model: its head.
        front: what stands before every window.
    """

    texts: states.Texts
    model: Model
    front: Front


def encode(
    pretrained: Pretrained,
    train: Sequence[pathlib.Path | str],
    heldout: Sequence[pathlib.Path | str] = (),
    *,
    window: int = 512,
    positions: int | None = None,
) -> Texts:
    """Texts in a model's tokens.

    Args:
        pretrained: the model.
        train: texts, or folders of them: files of text, plain, .gz or .xz, or of ids,
            .npy.
        heldout: texts that are held out; none holds out the end of every other.
        window: tokens that are read at a time.
        positions: how many tokens of each text; None for all.

    Raises:
        ValueError: for a text that cannot be read, or if the model's logits are not
            those of a head.
    """
    named = [_ids(pretrained, paths, positions) for paths in (train, heldout)]
    if not named[0]:
        raise ValueError("a text is needed.")
    first = next(iter(named[0].values()))
    read = states.Texts(named[0], named[1], window=window)
    return Texts(
        read, hugging_face.measured(pretrained, first), pretrained.front(first)
    )


def keep(
    pretrained: Pretrained,
    encoded: Texts,
    folder: pathlib.Path | str,
    dtype: str = "float32",
    batch: int | None = None,
) -> states.Stored:
    """Compute the states of texts once, and keep them; goes on where it stopped.

    Args:
        pretrained: the model.
        encoded: what it reads.
        folder: where they go (states.py).
        dtype: of the trunk's products, one of DTYPES.
        batch: windows at a time; None is 32 on a GPU and 4 elsewhere.

    Raises:
        ValueError: as `states.write`.
    """
    torch, module = pretrained.torch, pretrained.module
    where = "cuda" if torch.cuda.is_available() else "cpu"
    batch = batch or (32 if where == "cuda" else 4)

    def read(ids_BS):
        # Weights stay float32; autocast rounds what meets in a product.
        half = torch.autocast(where, torch.bfloat16, enabled=dtype != "float32")
        with torch.no_grad(), half:
            tensor_BSD = hidden(pretrained, ids_BS)
        return to_numpy(tensor_BSD.to(torch.bfloat16))

    read_texts, model, front = encoded
    try:
        module.to(where)
        states.write(folder, model, front, read_texts, read, f"trunk: {dtype}", batch)
    finally:
        module.to("cpu")  # a GPU's memory is the heads' from here on
        if where == "cuda":
            torch.cuda.empty_cache()
    return states.read(folder)


def to_jax(tensor: Any) -> jax.Array:
    """A tensor as jax has it, without a copy on the same device."""
    return jnp.from_dlpack(tensor.detach().contiguous())


def to_torch(pretrained: Pretrained, array: jax.Array) -> Any:
    """An array as PyTorch has it, without a copy on the same device."""
    return pretrained.torch.from_dlpack(array)


def to_numpy(tensor: Any) -> np.ndarray:
    """A tensor of any type as NumPy has it.

    Not by way of jax, which would take most of a GPU's memory at its first use.
    """
    torch, tensor = imported("torch", "hf"), tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _ids(pretrained, paths, positions):
    """Texts in tokens, by the names of their files."""
    found = [file for path in paths for file in texts.files(path)]
    names = [file.name for file in found]
    if len(set(names)) < len(names):
        raise ValueError(f"the texts need different names, got {names}.")
    most = None if positions is None else positions + 1
    return {file.name: pretrained.token_ids(file)[:most] for file in found}
