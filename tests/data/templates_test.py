import numpy as np
import pytest

from softbottle import config as configs
from softbottle.data import corpus, lines, templates


@pytest.fixture(scope="module")
def text():
    data = configs.Data(name="templates")
    data.templates.train_lines, data.templates.eval_lines = 3000, 300
    return corpus.load(data)


def named(text, ids):
    """(the two nouns that a line names, its last word) of every line."""
    found = []
    for line in lines.split(ids, text.vocab.eos, 20, True):
        *read, last = text.vocab.decode(line)
        found.append(([word for word in read if word in templates.nouns()], last))
    return found


def test_a_line_names_two_nouns_and_ends_with_either(text):
    first = 0
    for nouns, last in named(text, text.train):
        assert len(nouns) == len(set(nouns)) == 2 and last in nouns
        first += last == nouns[0]
    assert abs(first - 1500) < 5 * np.sqrt(3000) / 2


def test_splits_share_the_nouns_and_no_pair(text):
    pairs = [
        {frozenset(nouns) for nouns, _ in named(text, ids)}
        for ids in (text.train, text.valid, text.test)
    ]
    assert not pairs[0] & pairs[1] and not pairs[0] & pairs[2]
    assert not pairs[1] & pairs[2]
    assert set().union(*pairs[0]) == templates.nouns()


def test_the_pair_is_crossed_so_that_its_relatives_compete(text):
    pairs = {frozenset(nouns) for nouns, _ in named(text, text.train)}
    assert frozenset({"king", "queen"}) not in pairs
    # king is crossed with the women, and never stands beside another man.
    partners = {word for pair in pairs if "king" in pair for word in pair}
    assert {"woman", "aunt"} <= partners and not {"man", "uncle"} & partners


def test_the_same_settings_give_the_same_text():
    few = {"train_lines": 5, "eval_lines": 5}
    one, again, other = (
        templates.corpus(configs.Templates(**few, seed=seed)).train
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, again)
    assert one.tolist() != other.tolist()
