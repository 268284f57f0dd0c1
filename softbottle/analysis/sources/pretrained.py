"""Loading a causal language model with `transformers`: a folder, the hub, a GGUF file.

PyTorch is imported here alone, when such a model is asked for.
"""

import pathlib
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from softbottle.analysis.sources import gguf
from softbottle.analysis.sources.reading import (
    Front,
    Reading,
    first_line,
    imported,
    token_ids,
)
from softbottle.data import vocab

_PROBE = 32  # tokens on which it is found out what stands before a text


class _Source(NamedTuple):
    """Where a model is, as transformers and as people say it.

    `bos` is what a GGUF file says of its beginning-of-sequence token: its id, () for
    none, None if it says nothing. `facts` are sentences on what else it says.
    """

    name: str
    where: dict[str, Any]
    bos: tuple[int, ...] | None = None
    facts: tuple[str, ...] = ()


class Pretrained(NamedTuple):
    """A model that transformers has loaded, in float32 on the CPU.

    Attributes:
        name: of the model.
        torch: the package.
        module: the model, PyTorch's.
        tokenizer: its tokenizer, or why there is none.
        bos: as of `_Source`.
        version: of what read it.
        facts: sentences on what else its file says.
    """

    name: str
    torch: ModuleType
    module: Any
    tokenizer: Any
    bos: tuple[int, ...] | None
    version: str
    facts: tuple[str, ...]

    @property
    def head(self) -> Any:
        """The layer that has the output table.

        Raises:
            ValueError: if there is none.
        """
        head = self.module.get_output_embeddings()
        if head is None or getattr(head, "weight", None) is None:
            raise ValueError(
                f"{self.name} has no output table [V, D] that could be measured."
            )
        return head

    def token_ids(self, text: pathlib.Path | str) -> np.ndarray:
        """A text in the model's tokens: ids as they are in a .npy file, or encoded.

        Raises:
            ValueError: as `reading.token_ids`, or if there is no tokenizer.
        """

        def encode(text):
            if isinstance(self.tokenizer, str):
                raise ValueError(
                    f"{self.name} has no tokenizer that transformers can build "
                    f"({self.tokenizer}); give the text as ids in a .npy file."
                )
            return self.tokenizer(text, add_special_tokens=False)["input_ids"]

        return token_ids(Reading(text), self.head.weight.shape[0], encode)

    @property
    def words(self) -> list[str] | None:
        """What each row of the table stands for, "" if no token; None if unknown."""
        if isinstance(self.tokenizer, str):
            return None
        words = [""] * self.head.weight.shape[0]
        for word, row in self.tokenizer.get_vocab().items():
            if row < len(words):
                words[row] = word
        return words

    def front(self, ids: np.ndarray) -> Front:
        """What stands before every window of a text that begins with these tokens."""
        return _front(self.tokenizer, self.bos, ids)


def load_hf(
    name: pathlib.Path | str, attention: bool = False, revision: str | None = None
) -> Pretrained:
    """A causal language model in the format of `transformers`.

    Args:
        name: a folder, or else the name of a model on the hub, which is downloaded.
        attention: whether its attention weights will be looked at, which is slower.
        revision: of a model on the hub, a branch, tag or commit; of a folder, the
            subfolder that holds the checkpoint. None for the model itself.

    Raises:
        ValueError: if a folder holds no model, or transformers cannot read it.
        ImportError: if PyTorch or transformers is missing.
    """
    folder = pathlib.Path(name)
    where: dict[str, Any] = {}
    shown = folder.name if revision is None else f"{folder.name}@{revision}"
    if folder.is_dir():
        folder = folder / (revision or "")
        if not (folder / "config.json").exists():
            raise ValueError(f"{folder} holds no model: there is no config.json in it.")
    elif revision is not None:
        where["revision"] = revision
    where |= {
        "pretrained_model_name_or_path": str(folder),
        "local_files_only": folder.is_dir(),
    }
    return _load(_Source(shown, where), attention, use_safetensors=True)


def load_gguf(path: pathlib.Path | str, attention: bool = False) -> Pretrained:
    """A GGUF file of one of the architectures that `transformers` reads.

    Args:
        path: the file.
        attention: as of `load_hf`.

    Raises:
        ValueError: if the file is no GGUF file, and as `load_hf`.
        ImportError: if PyTorch, transformers, accelerate or gguf is missing.
    """
    path = pathlib.Path(path)
    said = gguf.read(path)
    where = {
        "pretrained_model_name_or_path": str(path.parent),
        "gguf_file": path.name,
        "local_files_only": True,
    }
    return _load(_Source(path.stem, where, *said), attention)


def _load(source, attention, **options):
    torch, transformers = imported("torch", "hf"), imported("transformers", "hf")
    # A model that brings code of its own is refused, not asked about.
    where = source.where | {"trust_remote_code": False}
    if attention:
        options["attn_implementation"] = "eager"
    module = _loaded(
        transformers.AutoModelForCausalLM, source.name, {**where, **options}
    )
    return Pretrained(
        source.name,
        torch,
        module.to(torch.float32).eval(),
        _tokenizer(transformers, where),
        source.bos,
        f"transformers {transformers.__version__}",
        source.facts,
    )


def _loaded(auto, name, settings):
    """The model; whatever transformers stumbles over is one error that names it."""
    try:
        model, told = auto.from_pretrained(**settings, output_loading_info=True)
    except (OSError, ImportError):
        raise  # a file or a package that is missing, which the message names
    except Exception as error:
        raise ValueError(
            f"transformers cannot read {name}: {first_line(error)}"
        ) from error
    missing = sorted(told["missing_keys"])
    if missing:
        # It would go on with random numbers in their place.
        raise ValueError(
            f"{name} lacks {len(missing)} of its parameters, such as "
            f"{vocab.printable(missing[0])}."
        )
    return model


def _tokenizer(transformers, where):
    """The tokenizer, or why there is none: a text in ids needs none."""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    except Exception as error:
        return first_line(error)
    return tokenizer if len(tokenizer) > len(tokenizer.all_special_ids) else "no words"


def _front(tokenizer, bos, ids):
    """What stands before a text by the tokenizer's own setting."""
    start = "Beginning of sequence: "
    if bos is not None:
        said = "the file's tokenizer"
        tokens = bos
    elif isinstance(tokenizer, str):
        return Front((), f"{start}no token, since no tokenizer was found.")
    else:
        said = "the tokenizer"
        tokens = _added(tokenizer, tokenizer.decode(ids[:_PROBE].tolist()))
    if not tokens:
        return Front(
            (), f"{start}{said} adds no token before a text; no window has one."
        )
    shown = ", ".join(map(str, tokens))
    if not isinstance(tokenizer, str):
        names = " ".join(map(str, tokenizer.convert_ids_to_tokens(list(tokens))))
        shown = f"{vocab.printable(names)} ({shown})"
    return Front(
        tokens,
        f"{start}{said} adds {shown} before a text, and so every window starts with "
        "it. It is seen by attention; no state, label or loss of it is counted.",
    )


def _added(tokenizer, text):
    """The tokens that an encoding has before those of the text itself."""
    plain = tokenizer(text, add_special_tokens=False)["input_ids"]
    whole = tokenizer(text)["input_ids"]
    for count in range(len(whole) - len(plain) + 1):
        if plain and whole[count : count + len(plain)] == plain:
            return tuple(whole[:count])
    return ()
