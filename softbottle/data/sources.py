"""Where the text of a corpus is, and its bytes in chunks.

    ptb   ptb.train.txt         ptb.valid.txt         ptb.test.txt
    wt2   wiki.train.tokens     wiki.valid.tokens     wiki.test.tokens
    text  train.txt             valid.txt             test.txt  (plain, .gz or .xz)
          or any file, or folder of files, of which the first 90% train, the next 5%
          validate and the last 5% test
    lm1b  training-monolingual.tokenized.shuffled/, heldout-monolingual.tokenized.
          shuffled/ (shards plain, .gz or .xz), or an array_record data set from TFDS

The validation text of LM1B is held-out shards 0 and 10, its test text shards 20, 30
and 40, if all fifty are there (what the MoS paper most likely did); otherwise the
first half of the held-out shards validates and the rest tests. TFDS mixes the fifty,
so the first half of its `test` records validates and the second half tests.
"""

import codecs
import functools
import gzip
import lzma
import pathlib
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from softbottle import config as config_lib
from softbottle.data.encoded import SPLITS
from softbottle.data.vocab import Chunk, Split

CHUNK_BYTES = 1 << 23

_NAMES = {"ptb": "ptb.{}.txt", "wt2": "wiki.{}.tokens", "text": "{}.txt"}
_LM1B = "{}-monolingual.tokenized.shuffled"
_LM1B_SHARDS: dict[Split, tuple[int, ...]] = {"valid": (0, 10), "test": (20, 30, 40)}
_CUTS = (0.9, 0.95)  # where a text that is not split ends to train, and to validate
_OPENERS = {".gz": gzip.open, ".xz": lzma.open}
_SUFFIXES = ("", *_OPENERS)


class Source(NamedTuple):
    """The text of one split: the files it is in, and how to read it."""

    files: list[pathlib.Path]
    chunks: Callable[[], Iterable[Chunk]]


def of_corpus(config: config_lib.Data) -> dict[Split, Source]:
    """Where each split of a corpus on disk is to be read from.

    Raises:
        FileNotFoundError: if a file of the corpus is missing.
        ValueError: if `data.path` is not set, or a shard is there twice.
    """
    if not config.path:
        what = f"the folder of {config.name}"
        if config.name == "text":
            what = "a text file, or a folder of text files"
        raise ValueError(f"data.path must name {what}: --config.data.path=PATH.")
    folder = pathlib.Path(config.path).expanduser()
    if config.name == "text" and not _has_splits(folder):
        return _cut_in_three(of_paths([config.path]), config.unit != "stream")
    if not folder.is_dir():
        raise FileNotFoundError(f"data.path is {config.path!r}, which is no folder.")
    if config.name == "lm1b":
        return _lm1b_sources(folder)
    files = {name: folder / _NAMES[config.name].format(name) for name in SPLITS}
    if config.name == "text":
        files = {name: _as_it_is(path) for name, path in files.items()}
    missing = [str(path) for path in files.values() if not path.is_file()]
    if missing:
        raise FileNotFoundError(f"corpus {config.name} needs {', '.join(missing)}.")
    return {name: _text_source([path]) for name, path in files.items()}


def of_paths(paths: Sequence[str]) -> Source:
    """The text of some files, plain, .gz or .xz, or of folders of them.

    Raises:
        FileNotFoundError: if a path is neither a file nor a folder.
    """
    files: list[pathlib.Path] = []
    for path in (pathlib.Path(name).expanduser() for name in paths):
        if not path.exists():
            raise FileNotFoundError(f"there is no file or folder {path}.")
        files += _shards(path) if path.is_dir() else [path]
    return _text_source(files)


def _has_splits(folder):
    """Whether a folder has the file of a split; it then needs all three."""
    # By name alone: a link that leads nowhere is a split that is missing.
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    texts = {_NAMES["text"].format(name) for name in SPLITS}
    return any(text + suffix in names for text in texts for suffix in _SUFFIXES)


def _as_it_is(path):
    """A file, or the compressed one in its place.

    Raises:
        ValueError: if it is there in several ways.
    """
    files = [path.with_name(path.name + suffix) for suffix in _SUFFIXES]
    there = [file for file in files if file.is_file()] or [path]
    if len(there) > 1:
        names = " and ".join(file.name for file in there)
        raise ValueError(f"{path.parent} has {names}: which of them is the text?")
    return there[0]


def _cut_in_three(source, at_lines):
    """One text as three: at the word, or line, after 90% and after 95% of its bytes."""
    total = sum(len(chunk.raw) for chunk in source.chunks())
    end = re.compile(rb"\n" if at_lines else rb"[ \n]")
    cuts = _ends(source, [round(share * total) for share in _CUTS], end)
    bounds = [0, *cuts, total]
    return {
        name: Source(source.files, functools.partial(_between, source, start, stop))
        for name, start, stop in zip(SPLITS, bounds, bounds[1:], strict=False)
    }


def _ends(source, places, end):
    """The first places of a text, in bytes, not before these, that follow an `end`."""
    found, seen = [], 0
    for chunk in source.chunks():
        stop = seen + len(chunk.raw)
        while len(found) < len(places) and places[len(found)] <= stop:
            match = end.search(chunk.raw, max(0, places[len(found)] - 1 - seen))
            if match is None:
                break
            found.append(seen + match.end())
        seen = stop
    return found + [seen] * (len(places) - len(found))


def _between(source, start, stop):
    """The chunks of a text from one byte to another."""
    seen = 0
    for chunk in source.chunks():
        first, last = (min(max(0, at - seen), len(chunk.raw)) for at in (start, stop))
        seen += len(chunk.raw)
        line = chunk.line + chunk.raw.count(b"\n", 0, first)
        yield chunk._replace(raw=chunk.raw[first:last], line=line)


def _lm1b_sources(folder):
    if any(folder.glob("**/dataset_info.json")):
        # Half a second to import, and needed only here.
        from softbottle.data import builders

        return {name: Source(*builders.source(folder, name)) for name in SPLITS}
    heldout = _shards(folder / _LM1B.format("heldout"))
    if len(heldout) < 2:
        raise FileNotFoundError(f"LM1B needs two held-out shards, found {heldout}.")
    splits = {"train": _shards(folder / _LM1B.format("training"))}
    if len(heldout) == 50:
        for name, numbers in _LM1B_SHARDS.items():
            splits[name] = [heldout[number] for number in numbers]
    else:
        half = len(heldout) // 2
        splits |= {"valid": heldout[:half], "test": heldout[half:]}
    return {name: _text_source(files) for name, files in splits.items()}


def _shards(folder):
    """The shards of a folder in the order of their names."""
    if not folder.is_dir():
        raise FileNotFoundError(f"LM1B needs the folder {folder}, or a TFDS data set.")
    seen = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    shards = [path for path in seen if path.is_file()]
    inner = ", ".join(path.name for path in seen if path.is_dir())
    if inner:
        warnings.warn(
            f"{folder} has folders in it, and their files are not read: {inner}.",
            stacklevel=2,
        )
    if not shards:
        raise FileNotFoundError(f"{folder} has no shards in it.")
    stems = [re.sub(r"\.(gz|xz)$", "", path.name) for path in shards]
    twice = sorted({stem for stem in stems if stems.count(stem) > 1})
    if twice:
        raise ValueError(f"{folder} has {twice[0]} both plain and compressed.")
    return shards


def _text_source(files):
    return Source(files, lambda: (chunk for file in files for chunk in _chunks(file)))


def _chunks(path: pathlib.Path) -> Iterator[Chunk]:
    """The text of a file in chunks cut at white space; its last line ends."""
    line, rest, seen, last = 1, b"", 0, b"\n"
    for block, position in _blocks(path):
        block = rest + block
        last = block[-1:]
        cut = max(block.rfind(b"\n"), block.rfind(b" ")) + 1
        raw, rest = block[:cut], block[cut:]
        yield Chunk(raw, str(path), line, position - seen)
        line, seen = line + raw.count(b"\n"), position
    if last != b"\n":
        yield Chunk(rest + b"\n", str(path), line)


def _blocks(path):
    """Blocks of a file's text and how far the file was read for each."""
    with open(path, "rb") as raw:
        opener = _OPENERS.get(path.suffix)
        file = opener(raw) if opener else raw
        try:
            # A byte order mark is no part of the first word.
            start = file.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8)
            while block := start + file.read(CHUNK_BYTES):
                yield block, raw.tell()
                start = b""
        except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
            raise ValueError(f"{path} is damaged or cut short: {error}") from error
