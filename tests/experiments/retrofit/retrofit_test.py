"""Other heads on a model that exists: they start as its own, learn, and are judged."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from softbottle import heads
from softbottle.analysis.capture import Capture, Tokens
from softbottle.analysis.instruments import lowrank, rank
from softbottle.drawing import Figure
from softbottle.experiments.retrofit import arms as arms_lib
from softbottle.experiments.retrofit import data, plot, report, scores, trial
from softbottle.experiments.retrofit import run as retrofit
from softbottle.experiments.retrofit.trial import Training
from softbottle.training import lock
from tests import commands, pictures

pytestmark = pytest.mark.usefixtures("quick_keys")
STATES, DIM, VOCAB = 900, 6, 41


def make_capture(seed=0, **changes):
    """A softmax's states, with labels of two softmaxes in turn."""
    rng = np.random.default_rng(seed)
    hidden_ND = 3 * rng.normal(size=(STATES, DIM)).astype(np.float32)
    values = {
        "hidden": hidden_ND,
        "table": rng.normal(size=(VOCAB, DIM)).astype(np.float32) / 3,
        "bias": rng.normal(size=VOCAB).astype(np.float32),
        "name": "made",
    }
    logits_NV = values["hidden"] @ values["table"].T
    logits_NV[::2] = logits_NV[::2, ::-1]
    noise_NV = rng.gumbel(size=logits_NV.shape)
    values["labels"] = np.argmax(logits_NV + noise_NV, axis=1)
    return Capture.from_states(**values | changes)


@pytest.fixture(scope="module")
def problem():
    return data.make(make_capture())


def own_log_probs(capture, rows):
    """The model's own, in float64, in its own units and order of words."""
    hidden_ND = capture.tokens[0].hidden_TD[rows].astype(np.float64)
    logits_NV = hidden_ND @ capture.table_VE.T.astype(np.float64) + capture.bias_V
    return special.log_softmax(logits_NV, axis=1)


def heldout_rows():
    """Rows that are reported: the second half of the last twentieth."""
    count = round(0.05 * STATES)
    return np.arange(STATES - count + count // 2, STATES)[: count // 2]


def scored(problem, made, batch=16):
    options = Training(1, 1, 0.1).options
    sums = scores.evaluate(problem, made, problem.heldout, batch, options)
    count = sums.tokens_N.sum()
    return sums.nll_N.sum() / count, sums.kl / count


# Numbers of components do not matter to a start; every kind of head does.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["softmax", "affine", "moc-4", "mos-2", "partition-4", "mixtape-4", "mos-3-linear"],
)
def test_at_step_0_the_loss_is_the_model_s_own(problem, name):
    capture, rows = make_capture(), heldout_rows()
    log_p_NV = own_log_probs(capture, rows)
    expected = -log_p_NV[np.arange(len(rows)), capture.tokens[0].labels_T[rows]].mean()
    begun = arms_lib.start(problem, name, None, seed=3)
    loss, kl = scored(problem, begun)
    assert loss == pytest.approx(expected, rel=2e-6)
    assert kl == pytest.approx(0, abs=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", "mos-2"])
def test_a_narrow_table_starts_as_the_nearest_of_its_rank(problem, name):
    capture = make_capture()
    begun = arms_lib.start(problem, name, 3, seed=0)
    made = (begun.params, begun.table_VE, begun.bias_V)
    train = len(problem.sample(10**6))  # whole stretches
    hidden_TD, _ = problem.train.between(0, train)
    log_q_TV = np.asarray(jax.jit(begun.head.log_probs)(*made, hidden_TD), np.float64)
    # The best logits of rank 3, by the singular values of all of them.
    all_TV = capture.tokens[0].hidden_TD[:train].astype(float) @ capture.table_VE.T
    left, sigma, right = np.linalg.svd(all_TV, full_matrices=False)
    best_TV = (left[:, :3] * sigma[:3]) @ right[:3] + capture.bias_V
    expected_TV = special.log_softmax(best_TV, axis=1)[:, problem.order_V]
    np.testing.assert_allclose(log_q_TV, expected_TV, atol=5e-3)


def test_what_narrow_tables_share_is_computed_once(monkeypatch):
    problem, calls = data.make(make_capture()), []
    leading = lowrank.leading

    def count(*arguments):
        calls.append(arguments)
        return leading(*arguments)

    monkeypatch.setattr(lowrank, "leading", count)
    tables = [arms_lib.nearest(problem, width)[1] for width in (2, 5, 2)]
    assert [table.shape[1] for table in tables] == [2, 5, 2] and len(calls) == 1
    np.testing.assert_array_equal(tables[0], tables[2])


# Of 37 positions, or of fewer words than positions: the transpose, and not.
@pytest.mark.parametrize("positions", [37, 60])
def test_the_rank_is_that_of_the_dense_log_probabilities(
    problem, monkeypatch, positions
):
    monkeypatch.setattr(scores, "_COLUMNS", 16)
    monkeypatch.setattr(scores, "enough", lambda *_: positions)
    begun = arms_lib.start(problem, "mos-2", None, seed=0)
    rng = np.random.default_rng(1)
    params = jax.tree.map(
        lambda leaf: leaf + rng.normal(size=leaf.shape).astype(np.float32),
        begun.params,
    )
    made = begun._replace(params=params)
    found = scores.ranks(made, problem.train)
    hidden_TD, _ = problem.train.between(0, positions)
    log_p_TV = np.asarray(jax.jit(made.head.log_probs)(*made[1:], hidden_TD), float)
    dense = rank.spectrum(log_p_TV, np.float32)
    energy = np.cumsum(dense.sigma**2) / np.sum(dense.sigma**2)
    assert found["rank"] == dense.rank > DIM + 2
    assert found["effective_rank"] == 1 + np.searchsorted(energy, 1 - 1e-4)
    assert found["rank_positions"] == positions


def test_a_batch_is_scored_before_the_one_before_it_is_read(monkeypatch):
    events = []

    def score():
        for number in range(3):
            events.append(f"score {number}")
            yield number

    def read(number):
        events.append(f"read {number}")
        return number

    monkeypatch.setattr(jax, "device_get", read)
    assert list(scores._one_late(score())) == [0, 1, 2]
    first = ["score 0", "score 1", "read 0", "score 2", "read 1", "read 2"]
    assert events == first


@pytest.mark.slow
def test_what_is_lowered_is_the_dense_loss_and_the_dense_divergence(problem):
    own, begun = arms_lib.own(problem), arms_lib.start(problem, "mos-3", 4, 0)
    rng = np.random.default_rng(5)
    params = jax.tree.map(
        lambda leaf: leaf + 0.3 * rng.normal(size=leaf.shape).astype(np.float32),
        begun.params,
    )
    hidden_TD, labels_T = problem.train.between(0, 29)

    def dense(learned, own, hidden_TD):
        log_prior_TK, context_TKE = begun.head.mix(learned["params"], hidden_TD)
        logits = jnp.einsum("tke,ve->tkv", context_TKE, learned["table_VE"])
        logits += learned["bias_V"][None, None]
        log_q = jax.nn.log_softmax(logits, axis=2) + log_prior_TK[:, :, None]
        log_q_TV = jax.nn.logsumexp(log_q, axis=1)
        log_p_TV = jax.nn.log_softmax(hidden_TD @ own.table_VE.T + own.bias_V[None])
        kl = jnp.sum(jnp.exp(log_p_TV) * (log_p_TV - log_q_TV), axis=1).mean()
        nll = -log_q_TV[jnp.arange(29), labels_T].mean()
        return nll + kl, {"words": nll, "distill": kl, "both": nll + kl}

    def lowered(learned, objective):
        training = Training(1, 1, 0.1, objective, "none")
        arrays = (begun, own, hidden_TD, labels_T, training)
        return trial.loss(learned, *arrays)

    learned = {"params": params, "table_VE": begun.table_VE, "bias_V": begun.bias_V}
    with jax.enable_x64(True):
        exact = jax.tree.map(
            lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)),
            (learned, own._replace(head=None), hidden_TD),
        )
        (_, expected), by = jax.jit(jax.value_and_grad(dense, has_aux=True))(*exact)
    run = jax.jit(lowered, static_argnums=1)
    for objective in ("words", "distill"):
        value = float(run(learned, objective))
        assert value == pytest.approx(float(expected[objective]), rel=1e-5)
    value, grads = jax.jit(jax.value_and_grad(lowered), static_argnums=1)(
        learned, "both"
    )
    assert float(value) == pytest.approx(float(expected["both"]), rel=1e-5)
    jax.tree.map(
        lambda mine, theirs: np.testing.assert_allclose(
            mine, theirs, rtol=1e-4, atol=1e-6
        ),
        grads,
        jax.device_get(by),
    )


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("retrofit")
    grid = retrofit.Grid(["moc-2", "mos-2"], rates=(0.03, 1e-4))
    training = Training(60, 64, 0.0)
    facts = ("Quantized weights: made up.",)
    capture = dataclasses.replace(make_capture(), facts=facts)
    rows = retrofit.run(capture, workdir, grid, training, digest="d")
    return workdir, rows, (capture, grid, training)


@pytest.mark.slow
def test_rows_say_what_was_gained_and_what_it_took(compared):
    _, rows, _ = compared
    own, *others = rows
    assert own["arm"] == "own" and own["kl"] == pytest.approx(0, abs=1e-6)
    assert len(others) == 6, "two arms at two rates, and a second seed at the best"
    for row in others:
        assert row["start_loss"] == pytest.approx(own["loss"], rel=2e-6)
        assert row["parameters"] == 2 * DIM * (DIM + 1) + 2 * DIM + VOCAB * (DIM + 1)
        tokens = [part["tokens"] for part in row["deciles"]]
        assert sum(tokens) == row["heldout_tokens"] == len(heldout_rows())
        losses = [part["loss"] or 0.0 for part in row["deciles"]]
        assert np.dot(tokens, losses) / sum(tokens) == pytest.approx(row["loss"])
        assert sum(row["prior"]) == pytest.approx(1, rel=1e-5)
    best = [row for row in others if row["seed"] == 1]
    assert {row["rate"] for row in best} == {0.03}
    assert all(row["loss"] < own["loss"] - 0.02 for row in best)
    by_arm = {row["arm"]: row for row in best}
    assert by_arm["moc-2"]["rank"] == DIM + 2 < by_arm["mos-2"]["rank"]
    assert "responsibilities" in by_arm["mos-2"]
    assert "responsibilities" not in by_arm["moc-2"]
    flop = {row["arm"]: row["flop"] for row in best}
    assert flop["mos-2"] - flop["moc-2"] == 2 * DIM * VOCAB


@pytest.mark.slow
def test_started_again_it_trains_nothing_and_reports_the_same(compared, monkeypatch):
    workdir, rows, (capture, grid, training) = compared
    for name in ("retrofit.png", "retrofit-words.png"):
        assert (workdir / name).read_bytes().startswith(b"\x89PNG")
    pictures.leave_unpainted(monkeypatch)
    lines = (workdir / "retrofit.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows
    page = (workdir / "retrofit.md").read_text()
    monkeypatch.setattr(trial, "fit", None)
    again = retrofit.run(capture, workdir, grid, training, digest="d")
    assert again == rows and (workdir / "retrofit.md").read_text() == page
    assert report.RULE in page and "contamination" in page
    assert "Quantized weights" in page and "| mos-2 | 6 | moc-2 |" in page
    with pytest.raises(ValueError, match="of other settings or of another text"):
        retrofit.run(capture, workdir, grid, training, digest="another")
    # Of files that were joined: a run is one seed, however often its line is there.
    (workdir / "retrofit.jsonl").write_text("\n".join([*lines, *lines]))
    joined = retrofit.run(capture, workdir, grid, training, digest="d")
    assert joined == rows and (workdir / "retrofit.md").read_text() == page


def test_one_process_is_at_work_in_a_workdir(tmp_path, problem):
    def fit(*arguments):
        pytest.fail("trained in a folder that another process has")

    how = (retrofit.Grid(["moc-2"]), Training(2, 64, 0.0), fit)
    with lock.Lock(tmp_path), pytest.raises(lock.LockedError, match="in use"):
        retrofit.compare(problem, tmp_path, *how)
    assert not (tmp_path / "retrofit.jsonl").exists()


@pytest.fixture
def undrawn(monkeypatch):
    """The pictures are empty, which takes no time."""
    for name in ("costs", "frequencies"):
        monkeypatch.setattr(plot, name, lambda found: Figure(figsize=(1, 1)))


@pytest.mark.slow
def test_without_time_the_page_says_what_is_missing(tmp_path, undrawn):
    grid = retrofit.Grid(["moc-2"], seeds=1)
    training = Training(2, 64, 0.0)
    rows = retrofit.run(make_capture(), tmp_path, grid, training, minutes=0)
    assert rows == [] and not (tmp_path / "retrofit.md").exists()
    own = retrofit.run(make_capture(), tmp_path, grid._replace(arms=[]), training)
    assert [row["arm"] for row in own] == ["own"]
    retrofit.run(make_capture(), tmp_path, grid, training, minutes=0)
    page = (tmp_path / "retrofit.md").read_text()
    assert page.startswith("# Other heads on made: partial")
    assert "- moc-2 at 0.001, seed 0" in page


@pytest.mark.slow
@pytest.mark.parametrize("freeze", trial.FROZEN)
def test_a_frozen_table_stays_and_another_learns(problem, freeze):
    begun = arms_lib.start(problem, "moc-2", 3, 0)
    training = Training(20, 64, 0.03, "distill", freeze)
    made, told = trial.fit(problem, begun, training, seed=0)
    same = [
        np.array_equal(made.table_VE, begun.table_VE),
        np.array_equal(made.bias_V, begun.bias_V),
    ]
    assert same == [freeze == "table"] * 2
    assert not np.array_equal(made.params["project_DE"], begun.params["project_DE"])
    assert scored(problem, made)[1] < scored(problem, begun)[1]
    assert told["step_ms"] > 0
    late = trial.fit(problem, begun, training, seed=0, deadline=-math.inf)
    assert late is None


def test_the_model_s_own_head_is_not_trained_to_be_like_itself(problem):
    # As wide as the states: the softmax whose cost is that of eight of width five.
    begun = arms_lib.start(problem, "softmax-flop:mos-8", 5, 0)
    assert begun.table_VE.shape[1] == DIM
    training = Training(20, 64, 0.03, "distill", "none")
    made, told = trial.fit(problem, begun, training, seed=0)
    np.testing.assert_array_equal(made.table_VE, problem.table_VD)
    assert told["step_ms"] is None
    words = training._replace(objective="words")
    made, told = trial.fit(problem, begun, words, seed=0)
    assert not np.array_equal(made.table_VE, problem.table_VD)
    assert told["step_ms"] > 0


def test_a_run_is_expected_to_take_what_the_last_of_its_arm_took(problem):
    flop = {
        arm: arms_lib.expected_costs(problem, arm, None).flop
        for arm in ("moc-2", "mos-4")
    }
    rows = [
        {"arm": arm, "flop": flop[arm], "elapsed": elapsed}
        for arm, elapsed in (("moc-2", 40.0), ("mos-4", 50.0), ("moc-2", 8.0))
    ]
    key = retrofit.Key("moc-2", None, 0.1, 0)
    assert retrofit._expected(problem, key, rows) == 8.0
    assert retrofit._expected(problem, key._replace(arm="mos-4"), rows) == 50.0


@pytest.mark.slow
def test_a_loss_that_is_lost_is_an_outcome(tmp_path, undrawn):
    grid = retrofit.Grid(["moc-2-linear"], seeds=1, rates=(1e30,))
    rows = retrofit.run(make_capture(), tmp_path, grid, Training(60, 64, 0.0))
    assert "the loss of step" in rows[-1]["failed"]
    page = (tmp_path / "retrofit.md").read_text()
    assert rows[-1]["failed"] in page
    assert f"log P on {rows[0]['rank_positions']:,} positions" in page


def make_rows(arm, losses, rate=0.1, valid=None, asked=None, spread=0.0):
    regions = np.linspace(-1, 1, 8) * spread
    return [
        {
            **{"arm": arm, "asked_width": asked, "width": 6, "rate": rate},
            **{
                "seed": seed,
                "loss": loss,
                "valid": loss if valid is None else valid,
            },
            **{"regions": (loss + regions).tolist(), "kl": loss / 2},
            "kl_regions": (loss / 2 + regions).tolist(),
        }
        for seed, loss in enumerate(losses)
    ]


@pytest.mark.parametrize(
    "mixture, spread, verdict",
    [
        ([2.97, 2.98], 0.0, "an effect"),
        ([2.992, 2.993], 0.0, "no effect"),  # beyond three deviations, below 0.01
        ([2.90, 3.02], 0.0, "no effect"),  # large, within three deviations of seeds
        ([2.97, 2.98], 0.1, "no effect"),  # and within three of the text
        ([3.04, 3.03], 0.0, "worse"),
        ([2.97], 0.0, "one seed decides nothing"),
    ],
)
def test_the_decision_rule(mixture, spread, verdict):
    control = make_rows("moc-4", [3.0, 3.001] if len(mixture) > 1 else [3.0])
    found = report.points(
        make_rows("own", [3.1], 0.0)
        + control
        + make_rows("mos-4", mixture, spread=spread)
    )
    (difference,) = report.differences(found)
    assert difference.nats == pytest.approx(np.mean(mixture) - 3, abs=1e-3)
    assert difference.verdict == verdict


def test_a_mixture_of_softmaxes_is_compared_with_as_many_contexts_of_its_kind():
    arms = {"moc-4-linear": 2.8, "moc-4": 3.0, "moc-8": 2.9, "softmax": 3.1}
    arms |= {"mos-8": 2.95, "mos-4": 2.97, "mos-2": 2.99, "partition-4": 3.0}
    rows = [row for arm, loss in arms.items() for row in make_rows(arm, [loss] * 2)]
    found = report.differences(report.points(rows))
    assert [(each.arm, each.control, round(each.nats, 6)) for each in found] == [
        *(("mos-8", "moc-8", 0.05), ("mos-4", "moc-4", -0.03)),
        *(("mos-2", "moc-4-linear", 0.19), ("partition-4", "moc-4-linear", 0.2)),
    ]


def test_heads_are_compared_at_the_same_rates_and_not_blindly_at_their_ends():
    def verdict(*rates, control=(0.1, 0.2, 0.4), seeds=2):
        rows = []
        for rate in control:
            rows += make_rows("moc-4", [3.0, 3.001], rate, valid=abs(rate - 0.2))
        for rate in rates:
            losses = [2.97, 2.971][:seeds]
            rows += make_rows("mos-4", losses, rate, valid=abs(rate - 0.2))
        (difference,) = report.differences(report.points(rows))
        return difference.verdict

    assert verdict(0.1, 0.2, 0.4) == "an effect"
    assert verdict(0.1, 0.2) == "undecided: not the same rates were tried"
    assert verdict(0.1, 0.2, 0.4, seeds=1) == "one seed decides nothing"
    said = verdict(0.1, 0.2, control=(0.1, 0.2))
    assert said == "an effect, at the highest rate tried"
    assert verdict(0.2, control=(0.2,)) == "an effect"


def test_heads_of_several_widths_are_lines_in_the_figure():
    rows = []
    for width, loss in ((3, 2.0), (4, 1.5)):
        costs = {"parameters": 10.0 * width, "table_bytes": width, "flop": 2.0 * width}
        for arm, more in (("softmax", 0.0), ("mos-2", 0.1), ("mos-4", 0.2)):
            made = make_rows(arm, [loss + more], asked=width)
            rows += [row | costs | {"objective": "distill"} for row in made]
    axes = plot.costs(report.points(rows)).axes[0]
    told = {text.get_text() for text in axes.get_legend().get_texts()}
    assert told == {"softmax of any rank", "mos-2", "mos-4"}
    lines = {line.get_label(): line for line in axes.get_lines()}
    np.testing.assert_allclose(lines["mos-4"].get_xdata(), [3e-5, 4e-5])
    np.testing.assert_allclose(lines["mos-4"].get_ydata(), [2.2, 1.7])
    assert lines["mos-2"].get_linestyle() != lines["mos-4"].get_linestyle()


def test_a_narrow_head_is_judged_by_softmaxes_of_its_cost():
    rows = make_rows("mos-4", [2.0, 2.002], asked=3)
    rows += make_rows("softmax-flop:mos-4", [2.2, 2.202], asked=3)
    rows += make_rows("softmax-parameters:mos-4", [1.9, 1.902], asked=3)
    rows += make_rows("softmax-flop:mos-4", [9.0, 9.002], asked=4)
    found = report.against_costs(report.points(rows))
    told = [(each.control, round(each.nats, 6), each.verdict) for each in found]
    assert told == [
        ("softmax-flop:mos-4", -0.1, "an effect"),
        ("softmax-parameters:mos-4", 0.05, "worse"),
    ]


def test_the_rate_is_chosen_by_other_regions_than_those_reported():
    rows = make_rows("mos-4", [2.0], 0.1, valid=3.0)
    rows += make_rows("mos-4", [2.5], 0.2, valid=2.9)
    assert report.best_rate(rows, "mos-4", None) == 0.2
    (point,) = report.points(rows)
    assert point.mean("loss") == 2.5
    grid = retrofit.Grid(["mos-4"], rates=(0.1, 0.2))
    keys = retrofit.missing(grid, Training(1, 1, 0.0), rows)
    assert keys == [retrofit.Key("own", None, 0.0, 0), ("mos-4", None, 0.2, 1)]


@pytest.mark.slow
def test_rows_are_read_across_blocks():
    hidden_ND = np.arange(60, dtype=np.float32).reshape(30, 2)
    labels_N = np.arange(30)
    cuts = [0, 7, 8, 21, 30]
    blocks = [
        Tokens(hidden_ND[a:b], labels_N[a:b])
        for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    rows = data.Rows(blocks, scale=2.0)
    for first, stop in ((0, 30), (6, 9), (8, 21), (20, 22), (29, 30)):
        found, labels = rows.between(first, stop)
        np.testing.assert_array_equal(found, hidden_ND[first:stop] / 2)
        np.testing.assert_array_equal(labels, labels_N[first:stop])
    # Of four rows, none across the end of a block.
    assert rows.stretches(4).tolist() == [0, 8, 12, 16, 21, 25]
    held = data.Rows(blocks, scale=2.0, on_device=True)
    for each in (rows, held):
        found, labels = each.take(np.array([12, 0]), 4)
        order = [*range(12, 16), *range(4)]
        np.testing.assert_array_equal(found, hidden_ND[order] / 2)
        np.testing.assert_array_equal(labels, order)
    halves = [data.halves(part) for part in (blocks, [Tokens(hidden_ND, labels_N)])]
    for one, other in zip(*halves, strict=True):
        joined = [np.concatenate([b.labels_T for b in each]) for each in (one, other)]
        np.testing.assert_array_equal(*joined)
        assert len(joined[0]) == 15


def test_a_pass_sees_every_stretch_once_in_an_order_of_its_own(problem):
    rows = problem.train
    steps = data.steps_per_pass(rows, 256)
    walks = [
        [labels_T.tolist() for _, labels_T in data.batches(rows, 256, n, seed)]
        for n, seed in ((2 * steps, 0), (2 * steps, 0), (2 * steps, 1))
    ]
    assert walks[0] == walks[1] != walks[2] and len(walks[0]) == 2 * steps
    once = sorted(sum(walks[0][:steps], []))
    assert once == sorted(sum(walks[0][steps:], [])) and len(once) == steps * 256
    assert walks[0][:steps] != walks[0][steps:]


def test_training_and_held_out_text_are_regions_apart(problem):
    capture = make_capture()
    labels_N = capture.tokens[0].labels_T
    # Regions of 22 in turn; the last has one.
    places = [range(855), [*range(855, 877), 899], range(877, 899)]
    for rows, place in zip(
        (problem.train, problem.valid, problem.heldout), places, strict=True
    ):
        np.testing.assert_array_equal(problem.order_V[rows.labels_N], labels_N[place])
    counts_V = np.bincount(labels_N[:855], minlength=VOCAB)
    assert np.all(np.diff(counts_V[problem.order_V]) <= 0)
    hidden_TD, _ = problem.train.between(0, 855)
    assert np.mean(np.square(hidden_TD)) == pytest.approx(1, rel=0.05)


def test_the_softmax_that_is_matched_has_the_cost_of_its_rival():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(500, 60)).astype(np.float32)
    hidden = rng.normal(size=(400, 60)).astype(np.float32)
    capture = Capture.from_states(hidden, table, None, rng.integers(0, 500, 400))
    made = data.make(capture)
    rival = arms_lib.expected_costs(made, "mos-4", 8)
    assert rival.flop == 2 * (4 * 60 * 8 + 60 * 4 + 60 * 8 + 4 * 500 * 8)
    assert rival.parameters == 4 * 61 * 8 - 0 + 60 * 4 + 60 * 8 + 500 * 9 - 4 * 8 + 32
    flop = arms_lib.expected_costs(made, "softmax-flop:mos-4", 8)
    assert flop.flop == pytest.approx(rival.flop, abs=560 * 2)
    same = arms_lib.expected_costs(made, "softmax-parameters:mos-4", 8)
    assert same.parameters == pytest.approx(rival.parameters, abs=560)
    mixtape = arms_lib.expected_costs(made, "mixtape-4", 8)
    plain = arms_lib.expected_costs(made, "moc-4", 8)
    # Three more products with a tenth of the words, and the gates.
    gates = 3 * 60 * 16 + 3 * 60 + 50 * 16
    assert mixtape.flop - plain.flop == 2 * (3 * 50 * 8 + gates - 60 * 4)
    whole = arms_lib.expected_costs(made, "softmax-flop:mos-8", 50)
    assert whole == arms_lib.costs(arms_lib.own(made))


@pytest.mark.parametrize(
    "name",
    ["mos", "mos-4-tanh", "sigsoftmax", "softmax-flop:softmax", "softmax-flop:x"],
)
def test_an_arm_that_there_is_not_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="no arm is called|matched to another"):
        retrofit.run(
            make_capture(), tmp_path / "new", retrofit.Grid([name]), Training(1, 1, 0.0)
        )
    assert not (tmp_path / "new").exists()


def test_models_that_others_cannot_start_from_are_refused():
    capped = heads.softcap(3.0).activation({})
    with pytest.raises(ValueError, match="no softmax"):
        data.make(make_capture(activation=capped))
    with pytest.raises(ValueError, match="no labels_T"):
        data.make(make_capture(labels=None))
    with pytest.raises(ValueError, match="mean square is 0"):
        data.make(make_capture(hidden=np.zeros((STATES, DIM), np.float32)))
    with pytest.raises(ValueError, match=r"width must lie in \[1, 6\], got 7"):
        arms_lib.start(data.make(make_capture()), "moc-2", 7, 0)


@pytest.mark.slow
def test_states_of_any_framework_are_enough_for_the_command(tmp_path):
    capture = make_capture()
    hidden_ND, labels_N = capture.tokens[0]
    arrays = {"states": hidden_ND, "labels": labels_N, "table": capture.table_VE}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
    flags = [
        f"--states={tmp_path}",
        "--width=4",
        "--objective=distill",
        "--freeze=none",
    ]
    flags += ["--arms=softmax", "--batch=64", "--steps=3", "--seeds=1", "--keep"]
    started = [
        commands.start("retrofit.py", *flags, f"--workdir={tmp_path / 'run'}"),
        commands.start("retrofit.py", *flags, f"--workdir={tmp_path}", "--unfreeze"),
    ]
    done, unfrozen = map(commands.finish, started)
    assert done.code == 0, done.errors[-2000:]
    rows = (tmp_path / "run" / "retrofit.jsonl").read_text().splitlines()
    own, softmax = map(json.loads, rows)
    assert softmax["width"] == 4 and own["width"] == DIM
    assert softmax["kl"] < softmax["start_kl"] + 0.01
    # The head that was kept says what its row says, in the model's own tokens.
    saved = np.load(tmp_path / "run" / "heads" / "softmax-4-0.001-0.npz")
    context_NE = hidden_ND[heldout_rows()] / saved["scale"] @ saved["params.project_DE"]
    log_q_NV = special.log_softmax(
        context_NE @ saved["table"].T + saved["bias"], axis=1
    )
    words_N = np.argsort(saved["order"])[labels_N[heldout_rows()]]
    loss = -log_q_NV[np.arange(len(words_N)), words_N].mean()
    assert loss == pytest.approx(softmax["loss"], rel=1e-5)
    assert unfrozen.code == 2 and "--unfreeze needs the model" in unfrozen.errors
