import numpy as np

from softbottle.data import frequency


def test_a_text_is_counted_in_pieces(monkeypatch):
    ids = np.array([3, 0, 3, 1, 3, 0, 1], np.int32)
    for piece in (1, 3, 7, 100):
        monkeypatch.setattr(frequency, "PIECE", piece)
        count_V = frequency.counts(ids, 5)
        np.testing.assert_array_equal(count_V, [2, 2, 0, 3, 0])
    np.testing.assert_array_equal(frequency.counts(ids[:0], 2), [0, 0])
