"""A pretrained model with another head, its trunk PyTorch's own."""

import importlib.util
import json

import jax
import numpy as np
import pytest
from scipy import special

from softbottle.analysis.capture import Capture
from softbottle.analysis.sources import trunk
from softbottle.experiments.retrofit import arms, data
from softbottle.experiments.retrofit import run as retrofit
from softbottle.experiments.retrofit.trial import Training
from softbottle.experiments.retrofit.trunk import Tuner
from softbottle.ops import Options
from tests import commands
from tests.analysis.sources import pretrained_test as tiny

pytestmark = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "transformers"))),
    reason="needs torch and transformers: pip install 'softbottle[hf]'",
)
WINDOW, COUNT = 8, 24


def make_text(folder, count=COUNT * WINDOW + 1):
    words = np.random.default_rng(2).choice(tiny.WORDS[3:], count)
    (folder / "text.txt").write_text(" ".join(words))
    return folder / "text.txt", np.array([tiny.WORDS.index(word) for word in words])


def make(folder, name="Llama", **changes):
    """A model with a tokenizer that adds a beginning, and its text."""
    model = tiny.make_model(folder / "model", name, **changes)
    tiny.make_tokenizer(folder / "model", "<bos> $A")
    text, ids = make_text(folder)
    return model, text, ids


def load(folder, text):
    pretrained = trunk.load(hf=folder / "model")
    return pretrained, trunk.encode(pretrained, [text], window=WINDOW)


@pytest.mark.parametrize("name", ["Llama", "GPT2", "OPT"])
def test_stored_states_are_what_the_model_s_own_head_reads(name, tmp_path):
    model, text, ids = make(tmp_path, name)
    pretrained, encoded = load(tmp_path, text)
    stored = trunk.keep(pretrained, encoded, tmp_path / "states", batch=5)
    held = 2 * WINDOW
    hidden_ND = np.concatenate([b.hidden_TD for b in stored.train.tokens])
    labels_N = np.concatenate([b.labels_T for b in stored.train.tokens])
    np.testing.assert_array_equal(labels_N, ids[1 : COUNT * WINDOW - held + 1])
    logits_NV = hidden_ND.astype(float) @ stored.train.table_VE.T.astype(float)
    log_p_NV = special.log_softmax(logits_NV, axis=1)
    for window in (0, 7):
        rows = slice(window * WINDOW, (window + 1) * WINDOW)
        own = tiny.log_probs(model, [1, *ids[rows]])[1:]
        # States are bfloat16: 8 bits.
        np.testing.assert_allclose(log_p_NV[rows], own, atol=2e-2)
    again = trunk.keep(pretrained, encoded, tmp_path / "states")
    assert again.digest == stored.digest
    half = trunk.keep(pretrained, encoded, tmp_path / "half", "bfloat16")
    other_ND = np.concatenate([b.hidden_TD for b in half.train.tokens])
    np.testing.assert_allclose(
        other_ND.astype(float), hidden_ND.astype(float), atol=0.2
    )
    assert "float32" in str(next(pretrained.module.parameters()).dtype)


# Phi's output table has a bias.
@pytest.mark.parametrize(
    "name, tied", [("Llama", True), ("Llama", False), ("Phi", False)]
)
def test_the_gradient_is_that_of_a_model_of_pytorch_alone(name, tied, tmp_path):
    import torch

    model, text, ids = make(tmp_path, name, tie_word_embeddings=tied)
    pretrained, encoded = load(tmp_path, text)
    stored = trunk.keep(pretrained, encoded, tmp_path / "states")
    problem = data.make(stored.train, stored.heldout)
    tuner = Tuner(pretrained, encoded, problem, 1e-3)
    windows = ids[: 3 * WINDOW].reshape(3, WINDOW)
    labels = ids[1 : 3 * WINDOW + 1].reshape(3, WINDOW)
    begun = arms.start(problem, "mos-2", None, 0)
    found = tuner.backward(begun, windows, labels, Options())
    front = np.ones((3, 1), int)
    logits = model(torch.tensor(np.concatenate([front, windows], axis=1))).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, 1:].reshape(-1, tiny.VOCAB), torch.tensor(labels.reshape(-1))
    )
    loss.backward()
    # At its start a mixture is the softmax, and so is its gradient by the trunk.
    assert float(found.loss) == pytest.approx(loss.item(), rel=1e-5)
    named = dict(pretrained.module.named_parameters())
    assert ("lm_head.weight" in named) == (not tied)
    assert ("lm_head.bias" in named) == (name == "Phi")
    for key, parameter in model.named_parameters():
        np.testing.assert_allclose(
            named[key].grad, parameter.grad, rtol=1e-3, atol=1e-6, err_msg=key
        )
    half = Options(compute_dtype="bfloat16")
    rounded = tuner.backward(begun, windows, labels, half).hidden_TD
    error = np.linalg.norm(rounded - found.hidden_TD) / np.linalg.norm(found.hidden_TD)
    assert 1e-4 < error < 3e-2


@pytest.mark.slow
def test_the_trunk_learns_with_the_head_and_is_given_back(tmp_path):
    _, text, _ = make(tmp_path)
    pretrained, encoded = load(tmp_path, text)
    stored = trunk.keep(pretrained, encoded, tmp_path / "states")
    problem = data.make(stored.train, stored.heldout)
    tuner = Tuner(pretrained, encoded, problem, 3e-3)
    before = {
        name: tensor.clone() for name, tensor in pretrained.module.state_dict().items()
    }
    training = Training(30, 4 * WINDOW, 1e-3, freeze="none")
    how = (training, tuner.fit, None, 3e-3)
    rows = retrofit.compare(
        problem, tmp_path / "run", retrofit.Grid(["moc-2"], seeds=1), *how
    )
    own, tuned = rows
    assert tuned["train_loss"] < own["loss"] and tuned["trunk_rate"] == 3e-3
    # The trunk is another, so that even the start's small change is no rounding.
    assert tuned["kl"] > 1e-3 and tuned["start_kl"] < 1e-5
    for name, tensor in pretrained.module.state_dict().items():
        assert np.array_equal(tensor, before[name]), name
    page = (tmp_path / "run" / "retrofit.md").read_text()
    assert "Trunk and table are trained, at 0.003." in page


def test_a_factor_of_the_logits_is_kept_in_the_table_and_not_trained(tmp_path):
    _, text, _ = make(tmp_path, "Granite")
    pretrained, encoded = load(tmp_path, text)
    stored = trunk.keep(pretrained, encoded, tmp_path / "states")
    problem = data.make(stored.train, stored.heldout)
    with pytest.raises(ValueError, match="multiplies its logits by a constant"):
        Tuner(pretrained, encoded, problem, 1e-3)


@pytest.mark.slow
def test_the_command_goes_from_a_model_to_a_page(tmp_path):
    _, text, _ = make(tmp_path)
    flags = [f"--workdir={tmp_path / 'run'}", f"--window={WINDOW}", "--batch=32"]
    model = [f"--hf={tmp_path / 'model'}", f"--text={text}"]
    heads = ["--head=mos", "--components=2", "--steps=3", "--seeds=1"]
    commands.run("retrofit.py", *model, *flags, *heads)
    lines = (tmp_path / "run" / "retrofit.jsonl").read_text().splitlines()
    assert [json.loads(line)["arm"] for line in lines] == ["own", "moc-2", "mos-2"]
    page = (tmp_path / "run" / "retrofit.md").read_text()
    assert "LlamaForCausalLM" in page and "adds <bos> (1) before a text" in page


def test_tensors_of_any_kind_make_a_capture(tmp_path):
    import torch

    rng = np.random.default_rng(0)
    hidden, table = torch.randn(30, 4), torch.randn(9, 4, requires_grad=True)
    labels = torch.tensor(rng.integers(0, 9, 30))
    found = Capture.from_states(hidden.bfloat16(), table, labels=labels)
    assert found.states[-1].dtype == np.float32
    np.testing.assert_array_equal(found.states[-1], hidden.bfloat16().float().numpy())
    np.testing.assert_array_equal(found.table_VE, table.detach().numpy())
    np.testing.assert_array_equal(found.tokens[0].labels_T, labels.numpy())
    of_jax = Capture.from_states(jax.numpy.ones((30, 4)), jax.numpy.ones((9, 4)))
    assert isinstance(of_jax.table_VE, np.ndarray)
