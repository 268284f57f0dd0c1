"""A mixture in the place of a softmax, where tanh contexts fail."""

import json

import numpy as np
import pytest

from softbottle import config as configs
from softbottle.data import synthetic
from softbottle.experiments import dropin


def make_config():
    config = configs.Config()
    config.data.rows, config.data.length = 8, 16
    config.data.eval_rows, config.data.eval_length = 8, 32
    config.data.synthetic.words = 64
    config.data.synthetic.train_tokens = 60_000
    config.data.synthetic.eval_tokens = 8_000
    config.model.embed_dim = config.model.hidden_dim = config.model.last_dim = 16
    config.optim.clip = 1.0
    config.train.steps = 400
    return config


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("dropin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dropin, "DEVIATIONS", (0.1,))
        patch.setattr(dropin, "TIED", (True,))
        patch.setattr(dropin, "RATES", (3e-3,))
        rivals = ["mos", "mos tanh"]
        rows = dropin.run(make_config(), workdir, rivals, seeds=2)
        again = dropin.run(make_config(), workdir, rivals, seeds=2)
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


@pytest.mark.slow
def test_the_bias_starts_where_the_config_says(tmp_path, monkeypatch):
    for name in ("DEVIATIONS", "RATES"):
        monkeypatch.setattr(dropin, name, (1e-3,))
    monkeypatch.setattr(dropin, "TIED", (True,))
    config, losses = make_config(), {}
    config.train.steps = 1
    for start in ("zero", "frequency"):
        config.model.bias_start = start
        (row,) = dropin.run(config, tmp_path / start, [], seeds=1)
        losses[start] = row["loss"]
    share_V = np.bincount(synthetic.corpus(config.data.synthetic).train) / 60_000
    entropy = -share_V @ np.log(share_V)
    assert entropy < np.log(64) - 0.03
    assert losses["zero"] == pytest.approx(np.log(64), abs=0.01)
    assert losses["frequency"] == pytest.approx(entropy, abs=0.01)


def test_a_mixture_is_judged_by_its_mean_and_the_noise_of_its_learning_rate():
    def rows(head, rate, losses):
        point = dropin.Point("awd_lstm", True, 0.1, rate)._asdict()
        return [
            {"head": head, "seed": seed, "loss": loss, **point}
            for seed, loss in enumerate(losses)
        ]

    quiet = rows("softmax", 1e-3, [5.0, 5.02]) + rows("mos", 1e-3, [5.05, 5.05])
    noisy = rows("softmax", 1e-2, [5.0, 5.1]) + rows("mos", 1e-2, [4.9, 5.3])
    assert dropin.noise(quiet + noisy, "softmax", 1e-3) == pytest.approx(0.02 / 2**0.5)
    text = dropin.report(quiet + noisy)
    assert "- mos: 0.0000 at 0.001, 0.2828 at 0.01" in text
    # 0.04 above, against twice 0.010; and 0.05, against twice 0.21.
    assert "| mos | 2 | 1 | +0.050 | +0.045 | 0 |" in text
    assert "| 0.1 | 0.01 | 5.050 | 5.100 |" in text


def test_a_rival_that_does_not_exist_is_refused_with_those_that_do(tmp_path):
    with pytest.raises(ValueError, match=r"no rival .*'mosaic'; there are \['mos', "):
        dropin.run(make_config(), tmp_path / "run", ["mosaic"], seeds=2)
    assert not (tmp_path / "run").exists()


def test_rows_of_other_settings_are_refused(tmp_path):
    row = {"head": "softmax", "fingerprint": "another"}
    (tmp_path / "dropin.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match="dropin.jsonl has rows of other settings"):
        dropin.run(make_config(), tmp_path, ["mos"], seeds=2)
