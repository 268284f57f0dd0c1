"""The step, compiled for several widths at once."""

import jax
import numpy as np
from jax import monitoring

from softbottle import model as models
from softbottle.data.batches import Batch
from softbottle.training import optim
from softbottle.training import step as steps
from tests import tiny


def test_widths_are_compiled_ahead_and_not_again(monkeypatch):
    config = tiny.make_config()
    model, tx = models.make(config, 11), optim.make(config.optim)
    state = jax.device_put(steps.init_state(config, model, tx), jax.devices()[0])
    step = steps.make_step(config, model, tx)
    ids_BS = np.ones((4, 5), np.int32)
    batch = Batch(ids_BS, ids_BS, np.ones((4, 5), np.float32), ids_BS)
    narrow = jax.tree.map(lambda array: array[:, :3], batch)
    with steps.compiling(step, state, batch, (3, 5)) as ahead:
        assert list(ahead) == [5, 3]
        for width in (3, 5):
            ahead[width].result()
        compiled = []

        def listen(event, *_, **__):
            compiled.extend(
                [event] if event.endswith("backend_compile_duration") else []
            )

        monitoring.register_event_duration_secs_listener(listen)
        try:
            for each, fresh in ((batch, True), (narrow, False)):
                state, measured = step(state, each, fresh)
            jax.block_until_ready(measured)
        finally:
            monitoring.unregister_event_duration_listener(listen)
    assert not compiled
