"""A mixture in the place of a softmax, where tanh contexts fail."""

import json

import jax
import numpy as np
import pytest

import softbottle
from softbottle import config as configs
from softbottle import model
from softbottle.data import synthetic
from softbottle.experiments import dropin
from tests import tiny

pytestmark = pytest.mark.usefixtures("quick_keys")


def make_config():
    config = configs.Config()
    config.data.rows, config.data.length = 8, 16
    config.data.eval_rows, config.data.eval_length = 8, 32
    config.data.synthetic.words = 64
    config.data.synthetic.train_tokens = 60_000
    config.data.synthetic.eval_tokens = 8_000
    config.model.embed_dim = config.model.hidden_dim = config.model.last_dim = 16
    config.optim.clip = 1.0
    config.train.steps = 200
    return config


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("dropin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dropin, "DEVIATIONS", (0.1,))
        patch.setattr(dropin, "TIED", (True,))
        config, rivals = make_config(), ["mos", "mos tanh"]
        config.data.synthetic.eval_tokens = 2_000
        rows = dropin.run(config, workdir, rivals, seeds=2, rates=[6e-3])
        again = dropin.run(config, workdir, rivals, seeds=2, rates=[6e-3])
    return workdir, rows, again


@pytest.mark.slow
def test_a_mixture_is_no_worse_than_the_softmax_and_tanh_contexts_are(compared):
    _, rows, _ = compared
    first = {row["head"]: row["loss"] for row in rows if row["seed"] == 0}
    assert first["mos"] < first["softmax"] < first["mos tanh"] - 0.01
    assert not any(row.get("dead") for row in rows)


@pytest.mark.slow
def test_started_again_it_trains_nothing_and_says_the_same(compared):
    workdir, rows, again = compared
    lines = (workdir / "dropin.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == rows == again
    text = (workdir / "dropin.md").read_text()
    assert "| mos | 1 | 0 |" in text and "| mos tanh | 1 | 1 |" in text


@pytest.fixture
def one_step(monkeypatch):
    monkeypatch.setattr(dropin, "DEVIATIONS", (1e-3,))
    monkeypatch.setattr(dropin, "TIED", (True,))
    config = make_config()
    config.train.steps, config.model.backbone = 1, "window"
    return config


@pytest.mark.slow
def test_rates_that_processes_shared_join_to_what_one_would_have(tmp_path, one_step):
    whole = dropin.run(one_step, tmp_path / "whole", [], seeds=1, rates=[1e-3, 1e-2])
    parts = [
        dropin.run(one_step, tmp_path / str(rate), [], seeds=1, rates=[rate])
        for rate in (1e-3, 1e-2)
    ]
    assert [row for part in parts for row in part] == whole
    assert len({row["loss"] for row in whole}) == 2
    joined = tmp_path / "joined"
    joined.mkdir()
    texts = [(tmp_path / str(r) / "dropin.jsonl").read_text() for r in (1e-3, 1e-2)]
    (joined / "dropin.jsonl").write_text("".join(texts))
    assert dropin.run(one_step, joined, [], seeds=1, rates=[1e-3, 1e-2]) == whole
    reports = [tmp_path / name / "dropin.md" for name in ("whole", "joined")]
    assert reports[0].read_text() == reports[1].read_text()


@pytest.mark.parametrize("rates", [[], [1e-3, 0.0], [-1e-3], [float("nan")]])
def test_rates_that_train_nothing_are_refused(tmp_path, rates):
    with pytest.raises(ValueError, match="learning rates must be positive, got"):
        dropin.run(make_config(), tmp_path / "run", ["mos"], seeds=2, rates=rates)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_bias_starts_where_the_config_says(tmp_path, one_step):
    config, losses = one_step, {}
    for start in ("zero", "frequency"):
        config.model.bias_start = start
        (row,) = dropin.run(config, tmp_path / start, [], seeds=1, rates=[1e-3])
        losses[start] = row["loss"]
    share_V = np.bincount(synthetic.corpus(config.data.synthetic).train) / 60_000
    entropy = -share_V @ np.log(share_V)
    assert entropy < np.log(64) - 0.03
    assert losses["zero"] == pytest.approx(np.log(64), abs=0.01)
    assert losses["frequency"] == pytest.approx(entropy, abs=0.01)


def made_up(head, rate, losses):
    point = dropin.Point("awd_lstm", True, 0.1, rate)._asdict()
    return [
        {"head": head, "seed": seed, "loss": loss, **point}
        for seed, loss in enumerate(losses)
    ]


def test_a_mixture_is_judged_by_its_mean_and_the_noise_of_its_learning_rate():
    quiet = made_up("softmax", 1e-3, [5.0, 5.02]) + made_up("mos", 1e-3, [5.05, 5.05])
    noisy = made_up("softmax", 1e-2, [5.0, 5.1]) + made_up("mos", 1e-2, [4.9, 5.3])
    assert dropin.noise(quiet + noisy, "softmax", 1e-3) == pytest.approx(0.02 / 2**0.5)
    text = dropin.report(quiet + noisy, 2)
    assert "- mos: 0.0000 at 0.001, 0.2828 at 0.01" in text
    # 0.04 above, against twice 0.010; and 0.05, against twice 0.21.
    assert "| mos | 2 | 1 | +0.050 | +0.045 | 0 |" in text
    assert "| 0.1 | 0.01 | 5.050 | 5.100 |" in text


@pytest.mark.parametrize(
    ("softmax", "mixture", "worse"),
    [(np.nan, 4.9, 0), (4.9, np.nan, 1), (np.nan, np.nan, 0)],
)
def test_who_loses_the_loss_is_worse(softmax, mixture, worse):
    rows = made_up("softmax", 1e-3, [5.0, 5.0]) + made_up("mos", 1e-3, [4.9, 4.9])
    rows += made_up("softmax", 1e-2, 2 * [softmax]) + made_up(
        "mos", 1e-2, 2 * [mixture]
    )
    assert f"| mos | 2 | {worse} |" in dropin.report(rows, 2)


def test_heads_are_compared_on_the_seeds_that_were_asked_for():
    rows = made_up("softmax", 1e-3, [5.0, 5.0, 4.0]) + made_up("mos", 1e-3, [5.1, 5.1])
    text = dropin.report(rows, 2)
    assert "over 2 seeds" in text and "| mos | 1 | 1 | +0.100 |" in text
    alone = dropin.report(rows, 1)
    assert "| mos | 1 | - | +0.100 |" in alone and "One seed has no noise" in alone


def test_a_head_that_was_begun_by_another_call_is_named_and_not_compared():
    rows = [
        row
        for rate in (1e-3, 1e-2)
        for row in made_up("softmax", rate, [5.0, 5.0])
        + made_up("mos", rate, [5.1] * 2)
    ]
    whole = dropin.report(rows, 2)
    begun = dropin.report(rows + made_up("moc", 1e-3, [4.0, 4.0]), 2)
    line = "Left out, without all of these runs: moc.\n\n"
    assert begun.replace(line, "") == whole != begun


def test_a_rival_that_does_not_exist_is_refused_with_those_that_do(tmp_path):
    with pytest.raises(ValueError, match=r"no rival .*'mosaic'; there are \['mos', "):
        dropin.run(make_config(), tmp_path / "run", ["mosaic"], seeds=2)
    assert not (tmp_path / "run").exists()


def test_rows_of_other_settings_and_torn_ones_are_refused(tmp_path):
    point = dropin.Point("awd_lstm", True, 0.1, 1e-3)._asdict()
    row = {"head": "softmax", "seed": 0, **point, "fingerprint": "another"}
    line = json.dumps(row) + "\n"
    (tmp_path / "dropin.jsonl").write_text(line)
    with pytest.raises(ValueError, match="dropin.jsonl has rows of other settings"):
        dropin.run(make_config(), tmp_path, ["mos"], seeds=2)
    (tmp_path / "dropin.jsonl").write_text(line + line[:20])
    with pytest.raises(ValueError, match="dropin.jsonl: line 2 is not a run's row"):
        dropin.run(make_config(), tmp_path, ["mos"], seeds=2)


def test_the_configs_own_head_is_not_read():
    config = make_config()
    config.head.name, config.head.components, config.head.active = "mos", 15, 2
    config.head.context, config.head.budget_mib = "tanh", 7
    found = [
        dropin.variant(config, head, tied=False)
        for head in ({"name": "softmax"}, *dropin.RIVALS.values())
    ]
    assert [model.make_head(variant) for variant in found] == [
        softbottle.softmax(),
        softbottle.mos(4),
        softbottle.mos(4, "linear"),
        softbottle.mos(4, "tanh"),
        softbottle.moc(4),
        softbottle.partition(4),
    ]
    assert {variant.head.budget_mib for variant in found} == {7}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"train__steps": None, "train__epochs": 2}, "train.epochs=2 must be None"),
        ({"optim__weight_decay": 0.1}, "optim.weight_decay=0.1 must be 0.0"),
        ({"optim__warmup_steps": 5}, "optim.warmup_steps=5 must be 0"),
        ({"optim__name": "sgd"}, "optim.name='sgd' must be 'adamw'"),
        ({"regularise__slowness": 1.0}, "regularise.slowness=1.0 must be 0.0"),
        ({"data__unit": "packed"}, "data.unit='packed' must be 'stream'"),
        ({"data__variable": True}, "data.variable=True must be False"),
        ({"model__last_dim": 17}, "head.name=softmax: .*hidden_dim=17 .*context_dim="),
    ],
)
def test_what_is_not_followed_is_refused_before_anything_is_made(
    fields, message, monkeypatch, tmp_path
):
    monkeypatch.setattr(dropin, "_Trainer", lambda *_: pytest.fail("it trained"))
    config = tiny.change(make_config(), **fields)
    with pytest.raises(ValueError, match=message):
        dropin.run(config, tmp_path / "run", ["mos"], seeds=2)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_every_step_and_seed_has_a_dropout_mask_of_its_own():
    config = make_config()
    config.model.backbone, config.regularise.output = "window", 0.5
    config.train.steps = 3
    corpus = synthetic.corpus(config.data.synthetic)
    trainer = dropin._Trainer(dropin.variant(config, {"name": "softmax"}, True), corpus)
    params = trainer.init(jax.random.key(0))
    # The same batch at every step, from which nothing is learned.
    first = jax.tree.map(lambda array: array[[0, 0, 0]], trainer._batches(0))
    losses = [
        trainer.fit(params, 0.0, first, jax.random.key(seed))[1] for seed in (0, 1)
    ]
    assert len(np.unique(losses)) == 6
