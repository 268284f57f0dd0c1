"""From text to ids: `load(config.data) -> Corpus`.

A corpus is encoded once and kept, memory-mapped, under `data.cache`, in a folder whose
name is a hash of the text and of the settings that shape its ids. The folder is made
under another name and renamed when it is complete, so that a crash leaves nothing that
looks like a cache; processes that encode the same text at the same time all succeed
and the first one's work is kept. What a killed one has written goes when a text is
encoded a day later. sources.py says where the text is read from; encoded.py says what
is in a cache and how it is checked.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import shutil
import sys
import time
import uuid
import warnings
from collections.abc import Mapping, Sequence
from concurrent import futures

import numpy as np
import tqdm

from softbottle import config as config_lib
from softbottle.data import encoded, sources, synthetic, templates
from softbottle.data import vocab as vocab_lib
from softbottle.data.vocab import Corpus, Vocab

SPLITS = encoded.SPLITS

_PARTIAL = "partial-"
# Nobody who still encodes has written nothing for so long.
_ABANDONED_SECONDS = 24 * 3600

# Bumped when the same text and settings give other ids, or other files.
_FORMAT = 2
_WORKERS = min(8, os.cpu_count() or 1)
_MD5 = {
    "ptb.train.txt": "f26c4b92c5fdc7b3f8c7cdcb991d8420",
    "ptb.valid.txt": "aa0affc06ff7c36e977d7cd49e3839bf",
    "ptb.test.txt": "8b80168b89c18661a38ef683c0dc3721",
    "wiki.train.tokens": "34a77ebe59551b3a3b3d8c0a2797c976",
    "wiki.valid.tokens": "d756d22ab2310e7e60c094bea5c5a8eb",
    "wiki.test.tokens": "781c9418ab9414bd09e4aad825aae752",
}


def load(config: config_lib.Data) -> Corpus:
    """The corpus that a config names, encoded now or found in the cache.

    Raises:
        FileNotFoundError: if a file of the corpus is missing.
        ValueError: if the text is not text, a split has no words, the vocabulary
            cannot express it, or the cache is damaged.
    """
    if config.name == "synthetic":
        return synthetic.corpus(config.synthetic)
    if config.name == "templates":
        return templates.corpus(config.templates)
    texts = sources.of_corpus(config)
    sums = _md5_sums(texts)
    _warn_of_changed_files(config.name, sums)
    root = pathlib.Path(config.cache or "~/.cache/softbottle").expanduser()
    folder = root / f"{config.name}-{_key(config, sums)}"
    spelling = config.lowercase, config.subwords
    if (corpus := encoded.opened(folder, *spelling)) is None:
        _encode(config, texts, folder)
        corpus = encoded.opened(folder, *spelling)
    if corpus is None:
        raise FileNotFoundError(f"{folder} was deleted as soon as it was encoded.")
    return corpus


def digest(corpus: Corpus) -> dict[str, str]:
    """What a corpus is: sha256 by `train`, `valid`, `test` and `vocab`.

    Equal for the same ids and words, wherever they came from. Of a corpus from `load`
    the hashes are known already; of one made by hand the arrays are read.
    """
    return encoded.digest(corpus)


def files(config: config_lib.Data) -> Mapping[str, list[pathlib.Path]]:
    """The files of each split, for a message; none if the text is made, not read.

    Raises:
        FileNotFoundError: if a file of the corpus is missing.
    """
    if config.name in ("synthetic", "templates"):
        return {}
    texts = sources.of_corpus(config)
    return {name: list(text.files) for name, text in texts.items()}


def read(paths: Sequence[str], vocab: Vocab) -> np.ndarray:
    """The ids of any text under a vocabulary, after the end of a line.

    Every word and every line's end is thus predicted once, and no line's start: the
    rules of the One Billion Word benchmark.

    Args:
        paths: files, plain, .gz or .xz, or folders of them.
        vocab: its `lowercase` is followed.

    Raises:
        FileNotFoundError: if a path is neither a file nor a folder.
        ValueError: if the text is not text, has no words, or has words that the
            vocabulary cannot express.
    """
    source = sources.of_paths(paths)
    numbering, parts = vocab_lib.Numbering(), []
    for chunk in vocab_lib.numbered(source.chunks(), vocab.lowercase, _WORKERS):
        parts.append(numbering.number(chunk))
    if set(numbering.lookup) <= {vocab_lib.EOS}:
        raise ValueError(f"there are no words in {', '.join(map(str, source.files))}.")
    ids = vocab.translator(list(numbering.lookup))(np.concatenate(parts))
    return np.concatenate([[vocab.eos], ids]).astype(np.int32)


def check(corpus: Corpus) -> Corpus:
    """Return a corpus whose splits are not empty and whose ids are all words.

    `load` has done this when the corpus was encoded; call it on one made by hand.

    Raises:
        ValueError: naming the split and what is wrong with it.
    """
    for name, ids in corpus.splits.items():
        if ids.ndim != 1 or not ids.size:
            raise ValueError(f"{name} must be a run of ids, got shape {ids.shape}.")
        vocab_lib.check_ids(f"the ids of {name}", ids, len(corpus.vocab))
    return corpus


def _md5_sums(texts):
    """For each split, its files' names and md5 sums."""

    def md5(path):
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "md5").hexdigest()

    with futures.ThreadPoolExecutor(_WORKERS) as pool:
        return {
            name: [
                (path.name, digest)
                for path, digest in zip(
                    source.files, pool.map(md5, source.files), strict=True
                )
            ]
            for name, source in texts.items()
        }


def _warn_of_changed_files(name, sums):
    if name not in ("ptb", "wt2"):
        return
    for file, digest in (pair for pairs in sums.values() for pair in pairs):
        if digest != _MD5[file]:
            warnings.warn(
                f"{file} is not the file that published {name} results are for: its "
                f"md5 is {digest}, expected {_MD5[file]}.",
                stacklevel=3,
            )


def _key(config, sums):
    """A hash of all that the ids depend on."""
    file = config.vocab_file
    words = pathlib.Path(file).expanduser().read_bytes() if file else b""
    settings = {
        "format": _FORMAT,
        "sums": sums,
        "vocab_size": config.vocab_size,
        "vocab_file": hashlib.sha256(words).hexdigest(),
        "lowercase": config.lowercase,
    }
    if config.name == "text" and config.unit != "stream":
        settings["lines"] = True  # which one text is cut at
    if config.subwords:
        # Else the key is that of caches that were written before there were subwords.
        settings["subwords"] = True
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]


def _encode(config, texts, folder):
    """Make a cache folder, all or nothing."""
    _remove_abandoned(folder.parent)
    partial = folder.parent / f"{_PARTIAL}{uuid.uuid4().hex}"
    partial.mkdir(parents=True)
    try:
        started = time.monotonic()
        tokens, vocab = _write_ids(config, texts, partial)
        facts = {
            "tokens": tokens,
            "vocab": vocab.digest,
            "seconds": round(time.monotonic() - started, 3),
            "files": {name: [f.name for f in texts[name].files] for name in SPLITS},
        }
        vocab.save(partial / "vocab.txt")
        encoded.seal(partial, facts)
        check(encoded.mapped(partial, config.lowercase, config.subwords))
        _log_speed(config.name, facts, len(vocab))
        try:
            partial.rename(folder)
        except OSError:
            # Another process was first, or the rename is a true failure.
            if not (folder / "manifest.json").exists():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_abandoned(cache):
    """Remove what killed processes have left of their encodings."""
    for folder in cache.glob(f"{_PARTIAL}*"):
        # Another process may remove it meanwhile.
        with contextlib.suppress(FileNotFoundError):
            written = [path.stat().st_mtime for path in (folder, *folder.iterdir())]
            if time.time() - max(written) > _ABANDONED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _write_ids(config, texts, folder):
    """Write each split's ids; return their numbers and the vocabulary."""
    numbering, vocab = vocab_lib.Numbering(), None
    if config.vocab_file:
        file = pathlib.Path(config.vocab_file).expanduser()
        vocab = Vocab.load(file, config.lowercase)
        if config.vocab_size and len(vocab) > config.vocab_size:
            raise ValueError(
                f"data.vocab_file={config.vocab_file} has {len(vocab):,} words, more "
                f"than data.vocab_size={config.vocab_size}. To take them all, set "
                "--config.data.vocab_size=none."
            )
    total = sum(file.stat().st_size for s in texts.values() for file in s.files)
    tokens = {}
    # Short texts need no bar, and a log file wants none.
    with tqdm.tqdm(
        total=total, unit="B", unit_scale=True, delay=2, disable=None, file=sys.stderr
    ) as bar:
        for name in SPLITS:
            bar.set_description(f"encoding {config.name} {name}")
            path = folder / f"{name}.int32"
            tokens[name] = _write_split(config, texts[name], path, numbering, bar)
            if vocab is None and config.vocab_size:
                # Only the training text says which words are frequent.
                make = vocab_lib.pieces if config.subwords else vocab_lib.most_frequent
                vocab = make(numbering, config.vocab_size, config.lowercase)
    if vocab is None:
        return tokens, vocab_lib.closed(numbering, config.lowercase)
    translate = vocab.translator(list(numbering.lookup))
    for name in SPLITS:
        tokens[name] = _renumber(folder / f"{name}.int32", translate)
    return tokens, vocab


def _write_split(config, source, path, numbering, bar):
    tokens, words = 0, False
    chunks = vocab_lib.numbered(source.chunks(), config.lowercase, _WORKERS)
    with open(path, "wb") as file:
        for chunk in chunks:
            words |= chunk.words not in ([], [vocab_lib.EOS])
            ids = numbering.number(chunk)
            file.write(ids.astype("<i4", copy=False).data)
            tokens += len(ids)
            bar.update(chunk.progress)
    if not words:
        names = ", ".join(str(file) for file in source.files)
        raise ValueError(f"the {path.stem} text has no words in {names}.")
    return tokens


def _renumber(path, translate):
    """Turn the numbers of words into the vocabulary's ids; return their number."""
    numbers, tokens = np.memmap(path, "<i4", "r"), 0
    renumbered = path.with_suffix(".renumbered")
    step = sources.CHUNK_BYTES // 4
    with open(renumbered, "wb") as file:
        for start in range(0, len(numbers), step):
            ids = translate(numbers[start : start + step])
            file.write(ids.astype("<i4", copy=False).data)
            tokens += len(ids)
    renumbered.replace(path)
    return tokens


def _log_speed(name, facts, vocab):
    tokens = sum(facts["tokens"].values())
    speed = tokens / max(facts["seconds"], 1e-9)
    tqdm.tqdm.write(
        f"encoded {name}: {tokens:,} tokens, {vocab:,} words in the vocabulary, "
        f"{speed / 1e6:.1f}M words/s",
        file=sys.stderr,
    )
