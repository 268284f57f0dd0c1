"""Lines whose last word is one of two, far apart from each other in an analogy.

Words come in pairs that relate alike, a : b as c : d (king : queen as man : woman). A
line names b and c, or a and d, and ends with either, each half of the time:

    should the page bow to the queen or to the man first ? he chose the [queen | man]

Where a relation is a direction of the table, b + c = a + d, a softmax that puts its
mass on b and c must put some on a or d as well (Chang and McCallum, 2022); a cache can
point at the two words that were named. A pair {b, c} belongs to one split alone, while
every word occurs in all of them.
"""

import itertools

import numpy as np

from softbottle import config as config_lib
from softbottle.data.vocab import EOS, Corpus, Vocab

_PEOPLE = """man woman, king queen, prince princess, father mother, son daughter,
    brother sister, uncle aunt, nephew niece, grandfather grandmother, husband wife,
    boy girl, actor actress, waiter waitress, host hostess, hero heroine, duke duchess,
    groom bride, monk nun, lord lady, wizard witch"""
_PLACES = """france paris, italy rome, spain madrid, greece athens, egypt cairo,
    japan tokyo, china beijing, russia moscow, cuba havana, peru lima, kenya nairobi,
    norway oslo, poland warsaw, austria vienna, portugal lisbon, ireland dublin"""
_ANIMALS = """cat kitten, dog puppy, cow calf, horse foal, sheep lamb, pig piglet,
    duck duckling, goose gosling, hen chick, lion cub, deer fawn, swan cygnet,
    frog tadpole, hare leveret"""

# For each list of pairs, the lines in which they stand.
_TEMPLATES = {
    _PEOPLE: """should the page bow to the {} or to the {} first ? he chose the
        the {} and the {} sat at one table and the letter was for the
        nobody knew if the {} or the {} had won until the judge named the
        i saw the {} talk with the {} by the door and then i followed the
        of the {} and the {} in this painting my teacher prefers the
        she could invite the {} or the {} but not both so she wrote to the""",
    _PLACES: """they could not agree on {} or {} and in the end they flew to
        a flight from {} was late and one from {} was not so we left for
        her book compares {} with {} and the last chapter is about
        the team has won in {} and in {} and would love to return to
        between {} and {} there is no train so he had to stay in""",
    _ANIMALS: """the child fed the {} and the {} and then went to sleep beside the
        in the story a {} meets a {} at the river and it ends with the
        we heard the {} and the {} all night but only ever saw the
        the farmer sold the {} for more than the {} and still misses the
        a {} hid behind the barn when the {} came and the dust covered the""",
}
_SHARES = (0.8, 0.1, 0.1)  # of the pairs, for training, validation and test


def corpus(config: config_lib.Templates) -> Corpus:
    """Three texts of such lines, each from pairs of its own."""
    vocab = Vocab((EOS, *sorted(nouns() | _other_words())))
    random = np.random.default_rng(config.seed)
    chosen = _pairs()
    random.shuffle(chosen)
    bounds = np.cumsum([round(share * len(chosen)) for share in _SHARES[:2]])
    train, valid, test = (
        _text(chosen[start:stop], lines, vocab, random)
        for start, stop, lines in zip(
            (0, *bounds),
            (*bounds, None),
            (config.train_lines, config.eval_lines, config.eval_lines),
            strict=True,
        )
    )
    return Corpus(train, valid, test, vocab)


def nouns() -> set[str]:
    """The words that an answer may be."""
    return {word for text in _TEMPLATES for word in text.replace(",", " ").split()}


def _other_words():
    text = " ".join(_TEMPLATES.values())
    return set(text.replace("{}", " ").split())


def _pairs():
    """All (templates, one word, another): the crossed ends of two related pairs."""
    pairs = []
    for listed, lines in _TEMPLATES.items():
        templates = [line.split() for line in lines.splitlines()]
        related = [pair.split() for pair in listed.split(",")]
        for (a, b), (c, d) in itertools.combinations(related, 2):
            pairs += [(templates, b, c), (templates, a, d)]
    return pairs


def _text(pairs, lines, vocab, random):
    """Lines of pairs drawn evenly, in either order, with either answer."""
    ids = []
    for index in random.integers(len(pairs), size=lines):
        templates, *words = pairs[index]
        template = templates[random.integers(len(templates))]
        random.shuffle(words)
        fillers = iter(words)
        line = [next(fillers) if word == "{}" else word for word in template]
        line += [words[random.integers(2)], EOS]
        ids += [vocab.lookup[word] for word in line]
    return np.array(ids, np.int32)
