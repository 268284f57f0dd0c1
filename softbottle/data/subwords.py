"""Pieces of words, learned from a text by byte pair encoding.

A word is encoded by itself, with the space before it, as UTF-8 bytes; punctuation is
split off, and a piece never spans two words. Each byte is written as one visible
character, as GPT-2's vocabulary has it, so a vocabulary is a list of words like any
other: `<eos>`, the 256 bytes, and the pieces in the order in which they were learned.

That order is all there is to store. Two neighbours are joined if together they are a
piece, those of the earliest piece first, so a piece tells by which pair it was made:
the two into which the pieces before it cut it.

Axes: U distinct words.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_HIDDEN = [byte for byte in range(0x100) if byte not in _VISIBLE]
# The byte that a character of a piece stands for.
BYTES = {chr(byte): byte for byte in _VISIBLE} | {
    chr(0x100 + index): byte for index, byte in enumerate(_HIDDEN)
}


def learn(counts: Mapping[str, int], size: int, eos: str) -> tuple[str, ...]:
    """The vocabulary of `size` pieces, or of fewer if the text has no more.

    Args:
        counts: how often each word of the training text occurs.
        size: with `eos` and the 256 bytes.
        eos: the word that ends a line; it is one piece.

    Raises:
        ValueError: if there is no room for the bytes.
    """
    if size <= len(BYTES):
        raise ValueError(
            f"data.vocab_size must be more than the {len(BYTES)} bytes that subwords "
            f"are made of, got {size}."
        )
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = _splitter()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size - 1,
        initial_alphabet=list(BYTES),
        show_progress=False,
    )
    # A word stands as often as it occurs, in lines of bounded length.
    lines = (
        " ".join([word] * min(1000, count - start))
        for word, count in counts.items()
        if word != eos
        for start in range(0, count, 1000)
    )
    tokenizer.train_from_iterator(lines, trainer)
    found = tokenizer.get_vocab()
    merged = sorted(found.keys() - BYTES.keys(), key=lambda piece: found[piece])
    return (eos, *BYTES, *merged)


def encode(pieces: tuple[str, ...], words: Sequence[str]) -> list[list[int]]:
    """The pieces of each word, as indices; `pieces` are those of a vocabulary."""
    encodings = _tokenizer(pieces).encode_batch(list(words), add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def expander(parts: Sequence[Sequence[int]]) -> Callable[[np.ndarray], np.ndarray]:
    """index_T -> parts[index_T[0]], parts[index_T[1]], ... one behind the other."""
    sizes_U = np.array([len(part) for part in parts], np.int64)
    flat = np.fromiter(itertools.chain.from_iterable(parts), np.int32)
    starts_U = np.cumsum(sizes_U) - sizes_U

    def expand(index_T):
        sizes_T = sizes_U[index_T]
        before_T = np.cumsum(sizes_T) - sizes_T
        offset_T = np.repeat(starts_U[index_T] - before_T, sizes_T)
        return flat[offset_T + np.arange(len(offset_T))]

    return expand


def spelled(piece: str) -> bytes:
    """What a piece stands for; it may end within a character."""
    return bytes(BYTES[character] for character in piece)


def _splitter():
    import tokenizers

    pre = tokenizers.pre_tokenizers
    # White space is Unicode's, as for words.
    return pre.Sequence([pre.WhitespaceSplit(), pre.ByteLevel(add_prefix_space=True)])


@functools.lru_cache(maxsize=2)
def _tokenizer(pieces: tuple[str, ...]) -> Any:
    import tokenizers

    ranks = {piece: index for index, piece in enumerate(pieces)}
    model = tokenizers.models.BPE(ranks, _merges(ranks))
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = _splitter()
    return tokenizer


def _merges(ranks):
    """The pair that each piece of more than one byte is made of, in their order."""
    merges = []
    for piece, rank in ranks.items():
        if len(piece) == 1 or not BYTES.keys() >= set(piece):
            continue
        parts = list(piece)
        while len(parts) > 2:
            joined = [a + b for a, b in itertools.pairwise(parts)]
            best = min(joined, key=lambda pair: ranks.get(pair, rank))
            if ranks.get(best, rank) >= rank:
                break
            place = joined.index(best)
            parts[place : place + 2] = [best]
        if len(parts) == 2:
            merges.append(tuple(parts))
    return merges
