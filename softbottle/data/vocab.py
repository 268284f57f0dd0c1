"""The vocabulary, and the compiled loop from words to ids.

Text is a run of words between white space (Unicode's, as in `str.split`), and each
line ends with the word `<eos>`; a line without words is `<eos>` alone, as in the
reference code for PTB and WikiText-2. Splitting and hashing are done by Arrow, which
releases the interpreter's lock; Python sees each distinct word of a chunk once.

The text is read a single time: words are numbered as they first appear, whatever the
vocabulary will be, and a table then maps these numbers to the vocabulary's.
"""

import codecs
import collections
import dataclasses
import hashlib
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from typing import Literal, NamedTuple

import numpy as np

from softbottle import files
from softbottle.data import subwords as subwords_lib

EOS, UNK = "<eos>", "<unk>"
Split = Literal["train", "valid", "test"]

# Other people's vocabulary files spell the two special words in these ways.
_EOS_SPELLINGS = (EOS, "</s>", "</S>")
_UNK_SPELLINGS = (UNK, "<UNK>")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@dataclasses.dataclass(frozen=True)
class Vocab:
    """An ordered list of distinct words.

    Attributes:
        words: the word of each id.
        lowercase: whether text is lower-cased before it is looked up.
        subwords: whether the words are pieces that text is cut into: see subwords.py.
        lookup: the id of each word.
        eos: the id of the word that ends a line.
        unk: the id of the word that stands for those out of vocabulary, or None.

    Raises:
        ValueError: for a duplicate, a word that is empty or has white space in it, or
            a list without `<eos>`.
    """

    words: tuple[str, ...]
    lowercase: bool = False
    subwords: bool = False
    lookup: dict[str, int] = dataclasses.field(init=False, repr=False, compare=False)
    eos: int = dataclasses.field(init=False)
    unk: int | None = dataclasses.field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "words", tuple(self.words))
        lookup = {word: index for index, word in enumerate(self.words)}
        _check_words(self.words, lookup)
        eos = _first_present(_EOS_SPELLINGS, lookup)
        if eos is None:
            raise ValueError(f"the vocabulary has none of {_EOS_SPELLINGS}.")
        object.__setattr__(self, "lookup", lookup)
        object.__setattr__(self, "eos", eos)
        object.__setattr__(self, "unk", _first_present(_UNK_SPELLINGS, lookup))

    def __len__(self) -> int:
        return len(self.words)

    @property
    def digest(self) -> str:
        """A hash of the words in their order; two equal vocabularies share it."""
        return hashlib.sha256(self._text()).hexdigest()

    def save(self, path: os.PathLike[str] | str) -> None:
        """Write one word per line, all of them or none; an equal file is left."""
        raw = self._text()
        # `load` takes a byte order mark for no part of the first word.
        mark = codecs.BOM_UTF8 if raw.startswith(codecs.BOM_UTF8) else b""
        files.replace(pathlib.Path(path), mark + raw)

    @classmethod
    def load(
        cls,
        path: os.PathLike[str] | str,
        lowercase: bool = False,
        subwords: bool = False,
    ) -> "Vocab":
        """Read one word per line; the inverse of `save`."""
        raw = _checked(Chunk(pathlib.Path(path).read_bytes(), str(path), 1))
        lines = (
            raw.removeprefix(codecs.BOM_UTF8).decode().removesuffix("\n").split("\n")
        )
        try:
            words = tuple(line.removesuffix("\r") for line in lines)
            return cls(words, lowercase, subwords)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def split(self, text: str) -> list[str]:
        """The words of a text, as the vocabulary sees them."""
        words = _split(text.encode(), self.lowercase).to_pylist()
        if self.subwords:
            return self.decode(self.translator(words)(np.arange(len(words))))
        return [self.words[self.eos] if word == EOS else word for word in words]

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text; each line break is an `<eos>`, and none is added.

        Raises:
            ValueError: if a word is unknown and the vocabulary has no `<unk>`.
        """
        words = _split(text.encode(), self.lowercase).to_pylist()
        return self.translator(words)(np.arange(len(words)))

    def decode(self, ids: Sequence[int] | np.ndarray) -> list[str]:
        """The words of some ids.

        Raises:
            ValueError: if an id is not in the vocabulary.
        """
        ids_T = np.asarray(ids)
        check_ids("ids", ids_T, len(self))
        return [self.words[index] for index in ids_T.tolist()]

    def spell(self, ids: Iterable[int]) -> Iterator[str]:
        """What each id adds to a text: a word and the space before it, a line break.

        A subword may end within a character, which the next ones complete.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for index in ids:
            if index == self.eos:
                yield decoder.decode(b"", final=True) + "\n"
            elif self.subwords:
                yield decoder.decode(subwords_lib.spelled(self.words[index]))
            else:
                yield f" {self.words[index]}"

    def translator(self, words: Sequence[str]) -> Callable[[np.ndarray], np.ndarray]:
        """index_T -> the ids of words[index_T[0]], words[index_T[1]], ...

        A word has one id, or, in a vocabulary of subwords, one or more.

        Raises:
            ValueError: if a word is unknown and the vocabulary has no `<unk>`.
        """
        if not self.subwords:
            return self.renumbering(words).__getitem__
        parts = subwords_lib.encode(self.words, words)
        for place, word in enumerate(words):
            if word == EOS:
                parts[place] = [self.eos]
        return subwords_lib.expander(parts)

    def renumbering(self, words: Sequence[str]) -> np.ndarray:
        """The id of each of some words, which may spell the special words our way."""
        aliases = {EOS: self.eos, UNK: self.unk}
        ids = [self.lookup.get(word, aliases.get(word, self.unk)) for word in words]
        unknown = [
            word for word, index in zip(words, ids, strict=True) if index is None
        ]
        if unknown:
            raise ValueError(
                f"the vocabulary has no {UNK}, and {len(unknown):,} words are not in "
                f"it: {unknown[:5]}."
            )
        return np.asarray(ids, np.int32)

    def _text(self):
        return "".join(f"{word}\n" for word in self.words).encode()


class Corpus(NamedTuple):
    """Three runs of ids and what they stand for; the arrays may be memory-mapped."""

    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    vocab: Vocab

    @property
    def splits(self) -> dict[Split, np.ndarray]:
        """The three runs of ids by name."""
        return {"train": self.train, "valid": self.valid, "test": self.test}


class Chunk(NamedTuple):
    """Some of a text, cut at white space, and where it was found."""

    raw: bytes
    source: str
    line: int  # the number of its first line
    progress: int = 0  # how many bytes of the source were read to get it


class Numbered(NamedTuple):
    """The words of a chunk: distinct ones as they first appear, and which is where."""

    words: list[str]
    index_T: np.ndarray
    progress: int


class Numbering:
    """Gives words the numbers 0, 1, ... as they first appear, and counts them."""

    def __init__(self) -> None:
        self.lookup: dict[str, int] = {}
        self.counts = np.zeros(0, np.int64)

    def number(self, chunk: Numbered) -> np.ndarray:
        """The numbers of a chunk's words, which are also counted."""
        lookup = self.lookup
        numbers = [lookup.setdefault(word, len(lookup)) for word in chunk.words]
        table = np.asarray(numbers, np.int32)
        grown = np.zeros(len(lookup) - len(self.counts), np.int64)
        self.counts = np.concatenate([self.counts, grown])
        self.counts[table] += np.bincount(chunk.index_T, minlength=len(table))
        return table[chunk.index_T]


def closed(numbering: Numbering, lowercase: bool) -> Vocab:
    """The vocabulary of every word, in order of first appearance."""
    return Vocab(tuple(numbering.lookup), lowercase)


def most_frequent(numbering: Numbering, size: int, lowercase: bool) -> Vocab:
    """`<unk>`, `<eos>` and the most frequent other words, `size` in all.

    Words are in order of falling frequency; of two equally frequent ones the one that
    appears first comes first.

    Raises:
        ValueError: if there is no room beside the two special words.
    """
    if size < 3:
        raise ValueError(f"vocab_size must be at least 3, got {size}.")
    words = list(numbering.lookup)
    order = np.argsort(-numbering.counts, kind="stable")
    ranked = (words[index] for index in order)
    frequent = [word for word in ranked if word not in (EOS, UNK)][: size - 2]
    return Vocab((UNK, EOS, *frequent), lowercase)


def pieces(numbering: Numbering, size: int, lowercase: bool) -> Vocab:
    """`<eos>` and the pieces of words that were learned, `size` in all.

    Raises:
        ValueError: if there is no room for the bytes that pieces are made of.
    """
    counts = dict(zip(numbering.lookup, numbering.counts.tolist(), strict=True))
    return Vocab(subwords_lib.learn(counts, size, EOS), lowercase, subwords=True)


def numbered(
    chunks: Iterable[Chunk], lowercase: bool, workers: int
) -> Iterator[Numbered]:
    """Split chunks into words in `workers` threads, keeping their order.

    At most `workers + 1` chunks are in memory at a time.

    Raises:
        ValueError: if a chunk is not UTF-8 text, naming its source and the line.
    """

    def split(chunk):
        words = _split(_checked(chunk), lowercase).dictionary_encode()
        indices = words.indices.to_numpy()
        return Numbered(words.dictionary.to_pylist(), indices, chunk.progress)

    with futures.ThreadPoolExecutor(workers) as pool:
        waiting: collections.deque[futures.Future[Numbered]] = collections.deque()
        for chunk in chunks:
            waiting.append(pool.submit(split, chunk))
            if len(waiting) > workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def printable(text: str) -> str:
    r"""A text for a terminal: control characters as `\x1b`, all others as they are.

    Words come from anyone's text, and a terminal obeys the sequences that U+001B and
    U+009B begin. `repr` would do for a message, but escapes letters as well.
    """
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def check_ids(name: str, ids: np.ndarray, size: int) -> None:
    """Raise ValueError unless `ids` are integers in [0, size)."""
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{name} must be integers, got {ids.dtype}.")
    if ids.size and not (ids.min() >= 0 and ids.max() < size):
        raise ValueError(
            f"{name} must be in [0, {size}), but they span [{ids.min()}, {ids.max()}]."
        )


def _split(raw, lowercase):
    """The words of UTF-8 bytes, with the word `<eos>` for each line break."""
    # Imported here, so that reading an encoded corpus loads no text library.
    import pyarrow as pa
    import pyarrow.compute as pc

    text = pa.array([raw], pa.string())
    if lowercase:
        text = pc.utf8_lower(text)
    text = pc.replace_substring(text, "\n", f" {EOS} ")
    # Arrow would make empty words of white space at the edges.
    words = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(text)).values
    return words if words[0].as_py() else words[:0]


def _checked(chunk):
    """The bytes of a chunk, once they are known to be text."""
    if (nul := chunk.raw.find(b"\0")) >= 0:
        raise ValueError(
            f"{_place(chunk, nul)}: a NUL byte; the file is binary or not UTF-8 "
            "(UTF-16 has many)."
        )
    try:
        chunk.raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{_place(chunk, error.start)}: byte 0x{chunk.raw[error.start]:02x} is not "
            f"UTF-8 ({error.reason}): save the text as UTF-8."
        ) from error
    return chunk.raw


def _place(chunk, offset):
    line = chunk.line + chunk.raw.count(b"\n", 0, offset)
    return f"{chunk.source}, line {line}"


def _check_words(words, lookup):
    for index, word in enumerate(words):
        if lookup[word] != index:
            raise ValueError(
                f"word {word!r} is in the vocabulary twice, at positions {index} and "
                f"{lookup[word]} counting from 0."
            )
        if word.split() != [word]:
            raise ValueError(
                f"word {word!r} at position {index} is empty or has white space in it."
            )


def _first_present(spellings, lookup):
    return next((lookup[word] for word in spellings if word in lookup), None)
