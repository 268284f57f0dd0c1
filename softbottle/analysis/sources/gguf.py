"""What a GGUF file says that transformers does not read."""

import collections
import pathlib
from typing import NamedTuple

from softbottle.analysis.sources.reading import first_line, imported
from softbottle.data import vocab

_MAGIC = b"GGUF"
_WHOLE = {"F16", "BF16", "F32", "F64"}  # types of weights that are not quantized
_ROTATIONS = {
    *("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"),
}


class Said(NamedTuple):
    """What was found.

    Attributes:
        bos: the token for the beginning of a text, () for none, None if nothing is said
            of it.
        facts: sentences on quantized weights, and on what transformers passes over.
    """

    bos: tuple[int, ...] | None
    facts: tuple[str, ...]


def read(path: pathlib.Path) -> Said:
    """The beginning of a text, types of weights, and whether rotations are scaled.

    The key `add_bos_token` says whether a text starts with a token of its own. Where
    the key is missing, llama.cpp adds one for SentencePiece ("llama") vocabularies.

    Raises:
        ValueError: if the file is no GGUF file, or damaged.
        ImportError: if gguf or accelerate is missing, which transformers needs for it.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}.")
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError(f"{path} is no GGUF file: it does not start with GGUF.")
    gguf, _ = imported("gguf", "gguf"), imported("accelerate", "gguf")
    try:
        reader = gguf.GGUFReader(path)
        adds, bos, kind = (
            _setting(reader, f"tokenizer.ggml.{key}")
            for key in ("add_bos_token", "bos_token_id", "model")
        )
        architecture = _setting(reader, "general.architecture")
        scaling = _setting(reader, f"{architecture}.rope.scaling.type")
        turned = sorted({tensor.name for tensor in reader.tensors} & _ROTATIONS)
        types = collections.Counter(t.tensor_type.name for t in reader.tensors)
    except Exception as error:
        # A reader of bytes, which fails in many ways where they are damaged.
        raise ValueError(
            f"{path} is cut short or damaged: {first_line(error)}"
        ) from error
    if scaling not in (None, "none") and architecture != "gpt-oss":
        turned.append(f"rope.scaling.type {vocab.printable(str(scaling)[:40])}")
    facts = []
    if not _WHOLE.issuperset(types):
        counts = ", ".join(f"{count} {name}" for name, count in types.most_common())
        facts.append(f"Quantized weights: the file's tensors are {counts}.")
    if turned:
        facts.append(
            f"Not read by transformers: {', '.join(turned)}. Positions turn as if the "
            "file had none; --hf with the model's own folder applies it."
        )
    if adds is None and kind == "llama":
        adds = True
    unknown = adds is None or (adds and bos is None)
    tokens = (int(bos),) if adds and not unknown else ()
    return Said(None if unknown else tokens, tuple(facts))


def _setting(reader, key):
    field = reader.get_field(key)
    return None if field is None else field.contents()
