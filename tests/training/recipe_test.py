import contextlib

import chex
import jax
import numpy as np
import pytest

from softbottle import config as configs
from softbottle import model as models
from softbottle.data import batches, corpus
from softbottle.data.batches import Batch, Stream
from softbottle.training import loop as train
from softbottle.training import metrics
from softbottle.training import step as step_lib
from tests import CORPORA, tiny
from tests.configs_test import load

PTB = CORPORA / "ptb"
WORDS, LINE, LINES = 13, 23, {"train": 101, "valid": 31, "test": 7}
EPOCHS, LAYERS, DROP, WIDTHS = 12, 2, 0.5, 2
RATES = ("rows", "input", "hidden", "output", "latent", "recurrent")
pytestmark = pytest.mark.usefixtures("quick_keys")


def make_config(argument="mos", **fields):
    """The recipe for PTB, all of it, at widths that a test can afford."""
    config = load("ptb").get_config(argument)
    model = config.model
    model.embed_dim, model.hidden_dim, model.last_dim = 16, 13, 32
    model.compute_dtype, config.head.components = "float32", 3
    config.data.name, config.data.length, config.data.max_delta = "text", 9, 1
    config.data.eval_length = 17
    # A narrow layer can spare few of its units.
    for name in RATES:
        setattr(config.regularise, name, getattr(config.regularise, name) / 4)
    return tiny.change(config, **fields)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Where a text is that a Markov chain wrote, and where its encoding may go."""
    folder = tmp_path_factory.mktemp("text")
    random = np.random.default_rng(0)
    p_VV = random.dirichlet(np.full(WORDS, 0.05), WORDS)
    for name, count in LINES.items():
        lines, word = [], 0
        for _ in range(count):
            words = []
            for _ in range(LINE):
                word = random.choice(WORDS, p=p_VV[word])
                words.append(f"w{word}")
            lines.append(" ".join(words))
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return {"data__path": str(folder), "data__cache": str(folder / "cache")}


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """(config, workdir, summary, programs of the step) of a run from scratch."""
    workdir = tmp_path_factory.mktemp("run")
    programs, compiling = set(), step_lib.compiling

    @contextlib.contextmanager
    def watched(*arguments):
        with compiling(*arguments) as begin:

            def watch(width):
                programs.add(begin(width).result())
                return begin(width)

            yield watch

    config = make_config(
        model__layers=1, optim__patience=1, train__epochs=EPOCHS, **text
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_lib, "compiling", watched)
        patch.setattr(batches, "WIDTHS", WIDTHS)  # each is seconds of compiling
        summary = train.run(config, workdir)
    return config, workdir, summary, len(programs)


def validations(workdir):
    return [line for line in metrics.read(workdir) if "valid_loss" in line]


def no_better(losses, patience):
    """The first index at which the authors' condition holds."""
    for index, loss in enumerate(losses):
        logs = losses[:index]
        if len(logs) > patience and loss > min(logs[:-patience]):
            return index
    return None


@pytest.mark.slow
def test_the_validation_loss_falls_steadily(trained):
    losses = [line["valid_loss"] for line in validations(trained[1])]
    assert len(losses) == EPOCHS
    # At so high a rate single epochs stray; the best of each third does not.
    thirds = [min(losses[start : start + 3]) for start in (0, 3, 6)]
    assert np.log(WORDS + 1) > losses[0] > thirds[0] > thirds[1] > thirds[2]
    assert min(losses) < losses[0] - 1
    assert trained[2]["valid_perplexity"] == pytest.approx(np.exp(min(losses)))


@pytest.mark.slow
def test_lengths_vary_and_a_step_is_compiled_for_each_padded_width_alone(trained):
    config, _, _, compiled = trained
    lengths = range(5, config.data.length + config.data.max_delta + 1)
    assert len(lengths) == 6
    assert compiled == WIDTHS < batches.WIDTHS == 4


@pytest.mark.slow
def test_averaging_begins_when_the_authors_rule_says(trained):
    lines = validations(trained[1])
    switch = no_better([line["valid_loss"] for line in lines], 1)
    assert switch is not None and switch + 1 < EPOCHS
    averaging = [line["averaging"] for line in lines]
    assert averaging == [epoch > switch for epoch in range(EPOCHS)]


@pytest.mark.slow
def test_finetuning_averages_from_its_first_step_and_stops_by_its_rule(
    trained, text, tmp_path
):
    _, start, before, _ = trained
    config = make_config(
        "mos,finetune",
        train__init_from=str(start),
        train__stop_patience=1,
        train__epochs=30,
        model__layers=1,
        data__variable=False,  # one shape to compile
        **text,
    )
    summary = train.run(config, tmp_path)
    lines = validations(tmp_path)
    losses = [line["valid_loss"] for line in lines]
    assert all(line["averaging"] for line in lines)
    assert len(losses) == no_better(losses, 1) + 1 < 30
    # From where the run before had come to, not from the beginning.
    assert losses[0] < validations(start)[0]["valid_loss"]
    assert summary["valid_perplexity"] < 1.1 * before["valid_perplexity"]


def make_batch(rows=3, length=5):
    ids_BS = np.random.default_rng(0).integers(0, WORDS, (rows, length + 1), np.int32)
    ones_BS = np.ones((rows, length), np.float32)
    return Batch(ids_BS[:, :-1], ids_BS[:, 1:], ones_BS, ones_BS.astype(np.int32))


class Dropped:
    """Models with weight drop and without, and no other noise."""

    def __init__(self):
        config, plain = (make_config(model__layers=LAYERS) for _ in range(2))
        config.regularise, plain.regularise = configs.Regularise(), configs.Regularise()
        config.regularise.recurrent = DROP
        self.model, self.plain = (models.make(c, WORDS) for c in (config, plain))
        self.params = tiny.draw(jax.eval_shape(self.model.init, jax.random.key(0)))
        self.batch, self.carry = make_batch(), self.model.initial_carry(3)

        @jax.jit
        def measure(params, key):
            return jax.value_and_grad(
                lambda params: (
                    self.model.loss(params, self.batch, self.carry, key)[0].total
                )
            )(params)

        self._measure = measure

    def measure(self, seed):
        """The loss in training, and its gradient."""
        return jax.device_get(self._measure(self.params, jax.random.key(seed)))


@pytest.fixture(scope="module")
def dropped():
    return Dropped()


@pytest.mark.slow
def test_weight_drop_is_on_in_training_in_every_layer(dropped):
    (one, grads), (other, _), (again, _) = map(dropped.measure, (1, 2, 1))
    assert one != other and one == again
    for layer in range(LAYERS):
        weights = grads["backbone"][f"layer_{layer}"]
        # A dropped weight has no gradient; half of them are dropped.
        dropped_share = np.mean(weights["recurrent_HG"] == 0)
        size = weights["recurrent_HG"].size
        assert abs(dropped_share - DROP) < 4 * np.sqrt(DROP * (1 - DROP) / size)
        assert np.all(weights["input_IG"] != 0)


@pytest.mark.slow
def test_weight_drop_is_off_in_evaluation(dropped):
    inputs = (dropped.params, dropped.batch, dropped.carry)
    nll_BS, after = jax.jit(dropped.model.nll)(*inputs)
    expected = jax.jit(dropped.plain.nll)(*inputs)
    chex.assert_trees_all_equal((nll_BS, after), expected)
    training, _ = dropped.measure(1)
    assert abs(training - np.sum(nll_BS)) > 1e-4 * training


@pytest.mark.skipif(not PTB.is_dir(), reason=f"there is no PTB in {PTB}")
def test_ptb_is_read_as_the_matrix_of_the_reference(tmp_path):
    config = load("ptb").get_config("mos")
    config.data.path, config.data.cache = str(PTB), str(tmp_path)
    data = configs.validate(config).data
    text = corpus.load(data)
    assert len(text.vocab) == 10_000
    assert [len(ids) for ids in text[:3]] == [929_589, 73_760, 82_430]
    stream = Stream(
        text.train,
        data.rows,
        data.length,
        variable=data.variable,
        max_delta=data.max_delta,
        seed=config.seed,
    )
    assert (stream.columns, data.rows) == (77_465, 12)
    matrix_BS = text.train[: 77_465 * 12].reshape(12, 77_465)
    batch = stream.next()
    columns = int(batch.weights_BS[0].sum())
    chex.assert_trees_all_equal(
        (batch.ids_BS[:, :columns], batch.labels_BS[:, :columns]),
        (matrix_BS[:, :columns], matrix_BS[:, 1 : columns + 1]),
    )
