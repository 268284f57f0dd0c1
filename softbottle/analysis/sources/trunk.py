"""A pretrained model's trunk alone: what its head reads, many windows at a time.

The trunk is PyTorch's and stays there; the head is of this library. States go to jax
by DLPack, without a copy where both are on one device, and gradients come back the same
way. Only one position's logits are computed: the head's input is cut to it.

Axes: B windows of S tokens.
"""

import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from softbottle.analysis.sources import hugging_face, states, texts

DTYPES = ("float32", "bfloat16")


def load(
    hf: pathlib.Path | str | None = None, gguf: pathlib.Path | str | None = None
) -> hugging_face.Pretrained:
    """A model of `transformers`, from a folder or the hub, or from a GGUF file.

    Raises:
        ValueError: unless one of the two is given, and as `hugging_face.load_hf`.
        ImportError: as `hugging_face.load_hf`.
    """
    if gguf is not None and hf is None:
        return hugging_face.load_gguf(gguf)
    if hf is not None and gguf is None:
        return hugging_face.load_hf(hf)
    raise ValueError("a model is needed, from --hf or from --gguf.")


def device(pretrained: hugging_face.Pretrained) -> str:
    """Where PyTorch computes: "cuda" where it has a GPU, else "cpu"."""
    return "cuda" if pretrained.torch.cuda.is_available() else "cpu"


def hidden(pretrained: hugging_face.Pretrained, ids_BS: np.ndarray) -> Any:
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


def keep(
    pretrained: hugging_face.Pretrained,
    folder: pathlib.Path | str,
    train: Sequence[pathlib.Path | str],
    heldout: Sequence[pathlib.Path | str] = (),
    *,
    share: float = 0.05,
    window: int = 512,
    positions: int | None = None,
    dtype: str = "float32",
    batch: int = 8,
) -> states.Stored:
    """Compute the states of texts once, and keep them; goes on where it stopped.

    Args:
        pretrained: the model.
        folder: where they go (states.py).
        train: texts, or folders of them: files of text, plain, .gz or .xz, or of ids,
            .npy.
        heldout: texts that are held out; none holds out the end of every other.
        share: how much of its end.
        window: tokens that are read at a time.
        positions: how many tokens of each text; None for all.
        dtype: of the trunk, one of DTYPES. The head's table stays float32.
        batch: windows at a time.

    Raises:
        ValueError: as `states.write`, or for a text that cannot be read.
    """
    torch, module = pretrained.torch, pretrained.module
    named = [_ids(pretrained, paths, positions) for paths in (train, heldout)]
    first = next(iter(named[0].values()))
    model, front = pretrained.measured(first), pretrained.front(first)
    where, narrow = device(pretrained), dtype != "float32"

    def read(ids_BS):
        # Weights stay float32; autocast rounds what meets in a product.
        half = torch.autocast(where, torch.bfloat16, enabled=narrow)
        with torch.no_grad(), half:
            tensor_BSD = hidden(pretrained, ids_BS)
        return to_numpy(tensor_BSD.to(torch.bfloat16))

    settings = states.Texts(named[0], named[1], share, window)
    try:
        module.to(where)
        states.write(folder, model, front, settings, read, f"trunk: {dtype}", batch)
    finally:
        module.to("cpu")  # a GPU's memory is the heads' from here on
        if where == "cuda":
            torch.cuda.empty_cache()
    return states.read(folder)


def to_jax(tensor: Any) -> jax.Array:
    """A tensor as jax has it, without a copy on the same device."""
    return jnp.from_dlpack(tensor.detach().contiguous())


def to_torch(pretrained: hugging_face.Pretrained, array: jax.Array) -> Any:
    """An array as PyTorch has it, without a copy on the same device."""
    return pretrained.torch.from_dlpack(array)


def to_numpy(tensor: Any) -> np.ndarray:
    """A tensor of any type as NumPy has it."""
    return np.asarray(to_jax(tensor.cpu()))


def _ids(pretrained, paths, positions):
    """Texts in tokens, by the names of their files."""
    found = [file for path in paths for file in texts.files(path)]
    names = [file.name for file in found]
    if len(set(names)) < len(names):
        raise ValueError(f"the texts need different names, got {names}.")
    most = None if positions is None else positions + 1
    return {file.name: pretrained.token_ids(file)[:most] for file in found}
