"""The first screen: what was read, models by key numbers, and verdicts."""

import re

import numpy as np
import pytest

from softbottle.analysis import inspection, overview
from softbottle.analysis.instruments import mixture, rank, rank_section
from tests.analysis.models_test import WIDTH, WORDS, make_capture, source


@pytest.fixture(scope="module")
def made():
    def refuse(name, parts):
        raise ValueError("it has no head.")

    wide = lambda name, parts: make_capture(name, width=7)  # noqa: E731
    sources = [source("a"), source("b", read=wide), source("bad", read=refuse)]
    return inspection.inspect(sources, ["rank", "saturation", "argmax"])


def test_models_stand_in_a_table_of_their_key_numbers(made):
    table = overview.opening(made).models
    rows = {row[0]: dict(zip(table.heads, row, strict=True)) for row in table.rows}
    assert list(rows) == ["a", "b"]
    assert rows["a"]["parameters"] == "5,000" and rows["b"]["width"] == "7"
    assert rows["a"]["vocabulary"] == str(WORDS)
    assert rows["a"]["rank of log P"] == rows["a"]["softmax's bound"] == str(WIDTH + 1)
    ranks = made.sections[0].numbers["a"]
    assert rows["a"]["loss (nats)"] == f"{ranks['loss']:.3f}"
    assert rows["a"]["effective rank"] == str(ranks["ranks"]["effective"][1e-3])
    found = made.sections[1].numbers["b"]
    assert rows["b"]["anisotropy"] == f"{found['anisotropy_L'][-1]:.2f}"


def test_each_model_has_a_verdict_and_a_refused_one_the_reason(made):
    verdicts = overview.opening(made).verdicts
    used = f"uses {WIDTH + 1} of {WIDTH + 1} dimensions: at its bottleneck"
    assert verdicts["a"].startswith(used)
    assert verdicts["bad"] == "was refused: it has no head."


def test_what_is_said_of_all_models_is_said_once(made):
    facts = {"a": ("Model: a.", "Text: t.", "No BOS."), "b": ("Model: b.", "Text: t.")}
    told = made._replace(facts=facts)
    header = overview.header(told, "softbottle analyze", False)
    assert header[0] == "Text: t." and "Command: softbottle analyze" in header
    assert re.search(r"Made: \d{4}-\d\d-\d\d .*softbottle \d.*jax \d", header[-1])
    rest = overview.opening(told).facts
    assert rest == ["Model: a.", "a: No BOS.", "Model: b."]
    alone = overview.header(told._replace(facts={"a": facts["a"]}), "c", True)
    assert alone[:3] == list(facts["a"]) and "transformers" in alone[-1]


def test_a_title_counts_what_it_cannot_name(made):
    assert overview.title(made) == "a, b"
    many = dict.fromkeys("abcde", made.shapes["a"])
    assert overview.title(made._replace(shapes=many)) == "a, b, c and 2 more"


def make_head(found, bound=9, shape=(100, 50), mixed=False):
    ranks = rank.Ranks(
        shape,
        "float32",
        np.ones(5),
        {"float32": 1e-6, "float64": 1e-12},
        {"float32": found, "float64": None},
        {loss: 3 for loss in rank.LOSSES},
    )
    mixing = mixture.mixing(np.log(np.full((4, 2), 0.5)), np.zeros((4, 2)))
    return rank.HeadRanks(ranks, bound, 1.0, mixing if mixed else None, 2.0)


@pytest.mark.parametrize(
    "head, verdict",
    [
        (make_head(9), "uses 9 of 9 dimensions: at its bottleneck"),
        (make_head(8), "uses 8 of 9 dimensions: 1 is idle"),
        (make_head(5), "uses 5 of 9 dimensions: 4 are idle"),
        (make_head(30), "has rank 30, where a softmax of its width stops at 9: no bo"),
        (make_head(8, shape=(8, 50)), "has rank 8 in a sample of 8 positions, too few"),
        (make_head(7, shape=(90, 7)), "has rank 7 of 7 words: its width is no limit"),
        (make_head(9, mixed=True), "has rank 9, within the 9 of a softmax of its"),
        (make_head(8, shape=(8, 50), mixed=True), "has rank 8 in a sample of 8 pos"),
    ],
)
def test_verdicts_are_plain(head, verdict):
    assert rank_section.verdict(head).startswith(verdict)
