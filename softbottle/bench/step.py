"""Where the time of a training step goes: recurrence, head, and the rest.

Each part is compiled and timed by itself, forward and backward, on the shapes that the
whole step has; the rest is what the whole step takes beyond them (embedding, dropout
masks, clipping, update, average).
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from softbottle import config as config_lib
from softbottle import model as model_lib
from softbottle import optim, train
from softbottle.backbones import make as make_backbone
from softbottle.data.batches import Batch


def milliseconds(
    function: Callable[[], Any], rounds: int = 5, calls: int = 20
) -> float:
    """Median over rounds of the mean time of a call, the device included."""
    jax.block_until_ready(function())
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            result = function()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / calls)
    return 1e3 * statistics.median(times)


def run(config: config_lib.Config, vocab: int, length: int) -> dict[str, Any]:
    """Time a config's training step, whole and by part.

    Args:
        config: a run's settings; the corpus is not read, the words are random.
        vocab: how many words there are.
        length: positions of a row, all of them real.
    """
    config = config_lib.validate(config)
    model = model_lib.make(config, vocab)
    tx = optim.make(config.optim)
    batch = _random_batch(config, vocab, length)
    state = train.init_state(config, model, tx)
    head = _head(config, model, state.params, batch)
    recurrence = _recurrence(config, state.params, batch, model.initial_carry)
    parts = {"head": milliseconds(head), "recurrence": milliseconds(recurrence)}
    step, held = train.make_step(config, model, tx), [state]

    def whole():
        held[0], measured = step(held[0], batch, False)
        return measured

    total = milliseconds(whole)
    rest = total - sum(parts.values())
    result = {
        "head_name": config.head.name,
        "components": config.head.components,
        "tokens": int(batch.ids_BS.size),
        "vocab": vocab,
        "device": jax.devices()[0].device_kind,
        "step_ms": total,
        **{f"{name}_ms": value for name, value in parts.items()},
        "rest_ms": rest,
        "tokens_per_second": 1e3 * batch.ids_BS.size / total,
    }
    print(
        json.dumps(
            {k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}
        )
    )
    return result


def _random_batch(config, vocab, length):
    random = np.random.default_rng(0)
    shape = (config.data.rows, length)
    ids_BS = random.integers(0, vocab, shape, np.int32)
    labels_BS = random.integers(0, vocab, shape, np.int32)
    weights_BS, segments_BS = np.ones(shape, np.float32), np.ones(shape, np.int32)
    return jax.device_put(Batch(ids_BS, labels_BS, weights_BS, segments_BS))


def _head(config, model, params, batch):
    """Forward and backward of the head on random hidden states."""
    dtype = config.model.compute_dtype
    tokens = batch.ids_BS.size
    hidden_TD = jax.random.normal(
        jax.random.key(0), (tokens, config.model.last_dim), dtype
    )
    labels_T, weights_T = batch.labels_BS.reshape(-1), batch.weights_BS.reshape(-1)

    def loss(output, hidden_TD):
        return model.head.loss(*output, hidden_TD, labels_T, weights_T, **model.options)

    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    output = jax.tree.map(jnp.copy, model.output(params))
    return lambda: gradient(output, hidden_TD)


def _recurrence(config, params, batch, initial_carry):
    """Forward and backward of the backbone on random embedded words."""
    backbone = make_backbone(config)
    shape = (*batch.ids_BS.shape, config.model.embed_dim)
    embedded_BSE = jax.random.normal(
        jax.random.key(0), shape, config.model.compute_dtype
    )

    def objective(params, embedded_BSE, carry):
        states = backbone.apply(
            {"params": params}, embedded_BSE, carry, batch.segments_BS, train=False
        )
        return jnp.sum(jnp.square(states.hidden_BSD.astype(jnp.float32)))

    gradient = jax.jit(jax.grad(objective, argnums=(0, 1)))
    mine = jax.tree.map(jnp.copy, params["backbone"])
    carry = initial_carry(config.data.rows)
    return lambda: gradient(mine, embedded_BSE, carry)
