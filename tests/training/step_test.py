"""The step, compiled for several widths at once."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from softbottle import model as models
from softbottle import sharding
from softbottle.data.batches import Batch
from softbottle.training import optim
from softbottle.training import step as steps
from tests import tiny

pytestmark = pytest.mark.usefixtures("quick_keys")


def make_batch():
    ids_BS = np.ones((4, 5), np.int32)
    return Batch(ids_BS, ids_BS, np.ones((4, 5), np.float32), ids_BS)


def make_state():
    """One for steps that are none."""
    return sharding.committed(jnp.zeros(()))


def test_widths_are_compiled_ahead_and_not_again(compiled):
    config, batch = tiny.make_config(), make_batch()
    model, tx = models.make(config, 11), optim.make(config.optim)
    state = sharding.committed(steps.init_state(config, model, tx))
    step = steps.make_step(config, model, tx)
    narrow = jax.tree.map(lambda array: array[:, :3], batch)
    with steps.compiling(step, state, batch, (3, 5)) as begin:
        begin(5).result(), begin(3).result()
        compiled.clear()
        for each, fresh in ((batch, True), (narrow, False)):
            take = begin(each.ids_BS.shape[1]).result()
            state, measured = take(state, each, fresh)
        jax.block_until_ready(measured)
    assert not compiled


def test_the_program_reads_the_settings_of_the_thread_that_asks_for_it():
    @jax.jit
    def step(state, batch, fresh):
        return batch.weights_BS @ batch.weights_BS.T + state

    with (
        jax.default_matmul_precision("highest"),
        steps.compiling(step, make_state(), make_batch(), (3, 5)) as begin,
    ):
        for width in (5, 3):
            assert "operand_precision={highest" in begin(width).result().as_text()


def test_while_one_width_is_compiled_the_next_is_lowered():
    lowered, all_lowered = [], threading.Event()

    class Slow:
        """Lowered at once; no width is compiled before all of them are lowered."""

        def lower(self, state, batch, fresh):
            lowered.append(batch.ids_BS.shape[1])
            if len(lowered) == 3:
                all_lowered.set()
            return self

        def compile(self):
            assert all_lowered.wait(60)
            return "program"

    with steps.compiling(Slow(), make_state(), make_batch(), (3, 5, 4)) as begin:
        assert begin(5).result() == "program"
    assert lowered == [5, 3, 4]
