"""Words by how often a text has them."""

import numpy as np

DECILES = 10
# Ids that are counted at a time: NumPy counts a copy of eight bytes each, and the text
# of One Billion Words would be 6 GB.
PIECE = 1 << 24


def counts(ids: np.ndarray, vocab: int) -> np.ndarray:
    """How often a text has each word, [V]."""
    count_V = np.zeros(vocab, np.int64)
    for start in range(0, len(ids), PIECE):
        count_V += np.bincount(ids[start : start + PIECE], minlength=vocab)
    return count_V


def deciles(ids: np.ndarray, vocab: int) -> np.ndarray:
    """The decile of each word, [V]: 0 has the most frequent words of the text.

    Words are sorted by frequency and cut so that each decile has a tenth of the tokens,
    as nearly as whole words allow. A word belongs where the middle of its tokens lies.
    """
    return deciles_by_count(counts(ids, vocab))


def deciles_by_count(count_V: np.ndarray) -> np.ndarray:
    """The same, of how often the text has each word."""
    order_V = np.argsort(-count_V, kind="stable")
    sorted_V = count_V[order_V]
    middle_V = (np.cumsum(sorted_V) - sorted_V / 2) / sorted_V.sum()
    decile_V = np.empty(len(count_V), np.int32)
    decile_V[order_V] = np.minimum(DECILES * middle_V, DECILES - 1).astype(np.int32)
    # Words that the text does not have are the rarest.
    return np.where(count_V > 0, decile_V, DECILES - 1)
