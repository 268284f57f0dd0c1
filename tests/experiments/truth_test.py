import math

import jax
import numpy as np
import pytest

from softbottle.data import synthetic
from softbottle.experiments import truth
from softbottle.training import metrics
from tests import tiny

WORDS, WIDTH = 11, 3


@pytest.fixture(scope="module")
def run():
    run, corpus = tiny.make_narrow_run("softmax", 1, WORDS, WIDTH)
    return run._replace(step=5), corpus


@pytest.fixture(scope="module")
def summary(run, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run")
    writer = metrics.Writer(workdir, 0, {})
    for step in (1, 2, 3):
        writer.write(step, loss=3.0 - 0.1 * step)
    writer.close()
    return truth.summarize(*run, workdir), workdir


@pytest.mark.slow
def test_the_figure_is_drawn(summary):
    picture = (summary[1] / "quickstart.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_ranks_are_those_of_a_softmax_and_of_the_language(summary):
    found = summary[0]
    assert found["true_rank"] == WORDS
    assert found["softmax_rank_bound"] == WIDTH + 2
    # The bias starts at 0, so the head has one dimension less than it may have.
    assert found["rank"] == WIDTH + 1


def test_the_true_perplexity_is_that_of_the_test_text(run, summary):
    (trained, _, _, _, _), corpus = run
    language = synthetic.language(trained.data.synthetic)
    surprise = [
        -language.log_p_VV[word, following]
        for word, following in zip(corpus.test[:-1], corpus.test[1:], strict=True)
    ]
    expected = math.exp(sum(surprise) / len(surprise))
    assert summary[0]["true_perplexity"] == pytest.approx(expected, rel=1e-9)


def test_the_divergence_is_the_cross_entropy_less_the_entropy(run, summary):
    (trained, corpus) = run
    language = synthetic.language(trained.config.data.synthetic)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), trained.params)
    inner, outer = (params["backbone"][name] for name in ("inner", "outer"))
    states_VD = np.tanh(params["table_VE"] @ inner["kernel"] + inner["bias"])
    states_VD = states_VD @ outer["kernel"] + outer["bias"]
    logits_VV = states_VD @ params["output_VE"].T + params["bias_V"]
    log_q_VV = logits_VV - np.log(np.exp(logits_VV).sum(axis=1, keepdims=True))
    p_VV = np.exp(language.log_p_VV)
    kl_V = (p_VV * (language.log_p_VV - log_q_VV)).sum(axis=1)
    expected = kl_V[corpus.test[:-1]].mean()
    assert summary[0]["kl"] == pytest.approx(expected, rel=1e-4)


SUMMARY = {
    "context_dim": 8,
    "parameters": 12_345,
    "test_perplexity": 12.34567,
    "true_perplexity": 11.0,
    "kl": 0.12345,
    "rank": 10,
    "softmax_rank_bound": 10,
    "true_rank": 64,
    "seconds": 12.34,
}


def test_the_table_has_a_row_for_each_run_in_columns_of_one_width():
    table = truth.table({"mos": SUMMARY, "a long name": SUMMARY | {"rank": 64}})
    title, rule, *rows = table.splitlines()
    assert [row.split()[0] for row in rows] == ["mos", "a"]
    assert len({len(line) for line in (title, rule, *rows)}) == 1
    assert rows[0].split()[1:] == [
        *("8", "12,345", "12.346", "11.000", "0.1235", "10", "10", "64", "12.3")
    ]


def test_the_reading_tells_who_is_how_far_from_the_truth():
    near, far = SUMMARY | {"kl": 0.061, "context_dim": 9}, SUMMARY | {"kl": 0.37}
    text = truth.reading({"mos": SUMMARY, "narrow": far, "wide": near})
    assert "mos is at 0.12 with d = 8." in text
    assert "narrow (d = 8): 0.37, 3.0 times as far." in text
    assert "wide (d = 9): 0.06, closer." in text
    assert "rank of 10 at most; mos reached 10, and the truth has 64." in text


def test_runs_are_drawn_beside_each_other(run):
    config = run[0].config.data.synthetic
    summaries = {"mos": SUMMARY, "softmax": SUMMARY | {"kl": 0.5}}
    lines = {name: [{"step": 1, "loss": 2.0}, {"step": 1}] for name in summaries}
    loss, bars = truth.compare(config, summaries, lines).axes
    assert [bar.get_width() for bar in bars.patches] == [0.12345, 0.5]
    drawn = [line.get_ydata()[0] for line in loss.lines]
    assert drawn == [2.0, 2.0, synthetic.language(config).entropy]


def test_the_table_leaves_out_what_is_not_known():
    known = {name: SUMMARY[name] for name in ("parameters", "test_perplexity")}
    title, _, row = truth.table({"mos": known}).splitlines()
    assert title.split() == ["head", "parameters", "test", "ppl"]
    assert row.split() == ["mos", "12,345", "12.346"]
