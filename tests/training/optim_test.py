import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from softbottle.config import Optim
from softbottle.training import optim

CLOSE = {"rtol": 1e-5, "atol": 1e-7}


def make_params(seed=0):
    random = np.random.default_rng(seed)
    return {"a": random.standard_normal((3, 5)), "b": random.standard_normal(7)}


def as_jax(tree):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)


def sgd(**fields):
    return Optim(name="sgd", learning_rate=0.3, **fields)


def walk(config, gradients, scales=None):
    """Parameters and optimiser states after each step."""
    tx, params = optim.make(config), as_jax(make_params())
    state = tx.init(params)
    for index, grads in enumerate(gradients):
        scale = 1.0 if scales is None else scales[index]
        updates, state = tx.update(as_jax(grads), state, params, scale=scale)
        params = optax.apply_updates(params, updates)
        yield params, state


def test_sgd_clips_and_then_decays_and_is_scaled_by_the_length():
    gradients = [make_params(seed) for seed in (1, 2, 3)]
    # The last gradient is below the bound and must not be blown up to it.
    gradients[2] = {name: 1e-3 * leaf for name, leaf in gradients[2].items()}
    scales, clip, decay = [1.0, 0.4, 1.7], 0.25, 0.01
    config = sgd(clip=clip, weight_decay=decay)
    expected = make_params()
    walked = walk(config, gradients, scales)
    for grads, scale, (params, _) in zip(gradients, scales, walked, strict=True):
        norm = math.sqrt(sum((leaf**2).sum() for leaf in grads.values()))
        shrink = min(1.0, clip / norm)
        for name, leaf in expected.items():
            step = shrink * grads[name] + decay * leaf
            expected[name] = leaf - 0.3 * scale * step
        chex.assert_trees_all_close(params, as_jax(expected), **CLOSE)


class TorchAverage:
    """`ax` of PyTorch's ASGD with lambd=0 and t0=0, as its `step` computes it."""

    def __init__(self):
        self.step, self.mu, self.ax = 0, 1.0, None

    def update(self, params):
        self.step += 1
        if self.mu != 1:
            self.ax = {
                name: self.ax[name] + (leaf - self.ax[name]) * self.mu
                for name, leaf in params.items()
            }
        else:
            self.ax = dict(params)
        self.mu = 1 / max(1, self.step - 0)


@pytest.mark.parametrize("begin", [0, 4])
def test_the_average_is_that_of_pytorch(begin):
    config = sgd(averaging="now" if begin == 0 else "nt")
    tx, params = optim.make(config), as_jax(make_params())
    state, oracle = tx.init(params), TorchAverage()
    for step in range(12):
        if begin and step == begin:
            assert not optim.is_averaging(state)
            chex.assert_trees_all_equal(optim.evaluation_params(state, params), params)
            state = optim.start_averaging(state)
        grads = as_jax(make_params(step + 1))
        updates, state = tx.update(grads, state, params, scale=1.0)
        params = optax.apply_updates(params, updates)
        if step >= begin:
            oracle.update(jax.tree.map(lambda leaf: np.asarray(leaf, float), params))
            assert optim.is_averaging(state)
            chex.assert_trees_all_close(
                optim.evaluation_params(state, params), as_jax(oracle.ax), **CLOSE
            )


def test_averaging_does_not_change_the_walk():
    gradients = [make_params(seed) for seed in (1, 2, 3)]
    plain = [params for params, _ in walk(sgd(clip=0.25), gradients)]
    mean = [params for params, _ in walk(sgd(clip=0.25, averaging="now"), gradients)]
    chex.assert_trees_all_equal(plain, mean)


def test_nothing_is_averaged_before_the_first_step_that_averages():
    config = sgd(averaging="nt")
    *_, (params, state) = walk(config, [make_params(1)])
    state = optim.start_averaging(state)
    chex.assert_trees_all_equal(optim.evaluation_params(state, params), params)


def test_without_averaging_the_parameters_themselves_are_evaluated():
    *_, (params, state) = walk(sgd(), [make_params(1)])
    assert not optim.is_averaging(state)
    assert optim.evaluation_params(state, params) is params


def authors_trigger(losses, n):
    """The index of the epoch after which salesforce/awd-lstm-lm switches, or None."""
    logs = []
    for epoch, val_loss in enumerate(losses):
        if len(logs) > n and val_loss > min(logs[:-n]):
            return epoch
        logs.append(val_loss)
    return None


LOSSES = st.lists(st.integers(0, 9).map(float), max_size=25)


@given(LOSSES, st.integers(1, 6))
def test_averaging_begins_when_the_authors_begin_it(losses, patience):
    config = sgd(averaging="nt", patience=patience)
    begins = [
        epoch
        for epoch, loss in enumerate(losses)
        if optim.should_average(config, losses[:epoch], loss, epoch + 1)
    ]
    assert next(iter(begins), None) == authors_trigger(losses, patience)


@given(LOSSES, st.integers(1, 6))
def test_finetuning_stops_when_no_better_than_all_but_the_last_losses(losses, n):
    stops = [
        epoch
        for epoch, loss in enumerate(losses)
        if optim.no_better(losses[:epoch], loss, n)
    ]
    assert next(iter(stops), None) == authors_trigger(losses, n)


def test_et_begins_at_its_epoch_whatever_the_losses():
    config = sgd(averaging="et", switch_epoch=3, patience=1)
    rising, begins = [1.0, 2.0, 3.0, 4.0], []
    for epoch in range(1, 5):
        earlier, loss = rising[: epoch - 1], rising[epoch - 1]
        begins.append(optim.should_average(config, earlier, loss, epoch))
    assert begins == [False, False, True, True]


@pytest.mark.parametrize("averaging", ["none", "now"])
def test_other_averagings_are_not_triggered(averaging):
    config = sgd(averaging=averaging, patience=1, switch_epoch=1)
    assert not optim.should_average(config, [1.0, 2.0], 3.0, 3)


@pytest.mark.parametrize("warmup", [0, 5])
def test_the_learning_rate_rises_linearly_and_falls_as_a_cosine(warmup):
    config = Optim(
        learning_rate=0.2, warmup_steps=warmup, decay_steps=17, end_factor=0.1
    )
    schedule = optim.learning_rate(config)
    for step in range(25):
        if step < warmup:
            expected = 0.2 * step / warmup
        else:
            done = min(1.0, (step - warmup) / (17 - warmup))
            expected = 0.02 + 0.18 * (1 + math.cos(math.pi * done)) / 2
        assert float(schedule(step)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_without_a_schedule_the_learning_rate_is_constant(name):
    schedule = optim.learning_rate(Optim(name=name, learning_rate=0.2))
    assert [float(schedule(step)) for step in (0, 9)] == pytest.approx([0.2, 0.2])


def test_a_warm_up_alone_ends_at_the_peak_and_stays():
    schedule = optim.learning_rate(Optim(learning_rate=0.2, warmup_steps=4))
    rates = [float(schedule(step)) for step in (0, 2, 4, 9)]
    assert rates == pytest.approx([0.0, 0.1, 0.2, 0.2])


def test_adamw_is_adam_with_decoupled_decay():
    gradients = [make_params(seed) for seed in (1, 2, 3)]
    config = Optim(name="adamw", learning_rate=0.3, weight_decay=0.01)
    expected = make_params()
    first = {name: 0 * leaf for name, leaf in expected.items()}
    second = dict(first)
    for step, (params, _) in enumerate(walk(config, gradients), start=1):
        for name, grad in gradients[step - 1].items():
            first[name] = 0.9 * first[name] + 0.1 * grad
            second[name] = 0.999 * second[name] + 0.001 * grad**2
            scaled = (first[name] / (1 - 0.9**step)) / (
                np.sqrt(second[name] / (1 - 0.999**step)) + 1e-8
            )
            decayed = scaled + 0.01 * expected[name]
            expected[name] = expected[name] - 0.3 * decayed
        chex.assert_trees_all_close(params, as_jax(expected), rtol=1e-4, atol=1e-6)


def test_tables_and_the_slopes_of_plif_may_have_their_own_learning_rates():
    names = ("table_VE", "output_VE", "bias_V")
    params = {name: jnp.ones((4, 3)) for name in names}
    params["head"] = {"slope_N": jnp.ones(5), "prior_DK": jnp.ones((3, 2))}

    def rates(config):
        tx = optim.make(config)
        updates, _ = tx.update(params, tx.init(params), params, scale=1.0)
        flat = updates | updates["head"]
        return {
            name: -float(flat[name].ravel()[0]) for name in (*names, *params["head"])
        }

    about = functools.partial(pytest.approx, rel=1e-5)
    others = {"bias_V": 0.3, "prior_DK": 0.3}
    slopes = others | {"table_VE": 0.3, "output_VE": 0.3, "slope_N": 0.003}
    tables = others | {"table_VE": 2.4, "output_VE": 2.4, "slope_N": 0.3}
    assert rates(sgd(slope_learning_rate=0.003)) == about(slopes)
    assert rates(sgd(table_learning_rate=2.4)) == about(tables)
    both = sgd(slope_learning_rate=0.003, table_learning_rate=2.4)
    assert rates(both) == about(tables | {"slope_N": 0.003})
    adamw = Optim(name="adamw", learning_rate=0.3, table_learning_rate=2.4)
    assert rates(adamw) == about(tables)  # Adam's first step is one of 1
