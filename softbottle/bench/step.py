"""Where the time of a training step goes: recurrence, head, and the rest.

Each part is compiled and timed by itself, forward and backward, on the shapes that the
whole step has; the rest is what the whole step takes beyond them (embedding, dropout
masks, clipping, update, average).
"""

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from softbottle import config as config_lib
from softbottle import model as model_lib
from softbottle import variants as variants_lib
from softbottle.backbones import make as make_backbone
from softbottle.bench import kernels, timing
from softbottle.bench import measure as measuring
from softbottle.data.batches import Batch
from softbottle.training import optim
from softbottle.training import step as step_lib

Row = dict[str, Any]
# Recurrences that were timed already: heads on one backbone share its time.
_RECURRENCES: dict[str, float] = {}


def run(config: config_lib.Config, vocab: int, length: int) -> Row:
    """Time a config's training step, whole and by part, and print it as JSON.

    Args:
        config: a run's settings; the corpus is not read, the words are random.
        vocab: how many words there are.
        length: positions of a row, all of them real.
    """
    result = measure(config, vocab, length)
    del result["ms"], result["loss"]
    print(
        json.dumps(
            {k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}
        )
    )
    return result


def run_task(task: Row) -> Row:
    """Time the step of a task's "config", with its "vocab" and "length"."""
    config = config_lib.from_dict(task["config"])
    row = measure(config, task["vocab"], task["length"], task["seconds"])
    # Parameters are as they start and words are random: nothing is predictable yet. A
    # cache is sure of itself from the start, and costs more than that.
    most = 1.0 if config.cache.objective == "plain" else math.inf
    if not -1.0 < row["loss"] - math.log(task["vocab"]) < most:
        reason = f"wrong: loss {row['loss']:.3f}, not about log {task['vocab']}"
        return {"status": "wrong", "reason": reason}
    return row | {"tflops": row["flop"] / row["ms"] / 1e9}


def measure(
    config: config_lib.Config, vocab: int, length: int, seconds: float = 0.5
) -> Row:
    """Milliseconds of a training step and of its parts, and the step's memory.

    The head is timed without a cache; what an objective adds is in the rest.
    """
    config = config_lib.validate(config)
    model = model_lib.make(config, vocab)
    tx = optim.make(config.optim)
    batch = _random_batch(config, vocab, length)
    state = step_lib.init_state(config, model, tx)

    def milliseconds(function):
        return timing.milliseconds(function, jax.block_until_ready, seconds)

    head_ms = milliseconds(_head(config, model, state.params, batch))
    values = config_lib.to_dict(config)
    backbone = json.dumps([values["model"], batch.ids_BS.shape])
    if backbone not in _RECURRENCES:
        recurrence = _recurrence(config, state.params, batch, model.initial_carry)
        _RECURRENCES[backbone] = milliseconds(recurrence)
    step = step_lib.make_step(config, model, tx).lower(state, batch, False).compile()
    held = [state]

    def whole():
        held[0], measured = step(held[0], batch, False)
        return measured

    first = whole()
    loss = float(first["total"] / first["count"])
    total = milliseconds(whole)
    return {
        "head_name": config.head.name,
        "components": model.head.contexts,
        "tokens": int(batch.ids_BS.size),
        "vocab": vocab,
        "device": jax.devices()[0].device_kind,
        "loss": loss,
        "ms": total,
        "step_ms": total,
        "head_ms": head_ms,
        "recurrence_ms": _RECURRENCES[backbone],
        "rest_ms": total - head_ms - _RECURRENCES[backbone],
        "tokens_per_second": 1e3 * batch.ids_BS.size / total,
        "flop": model_lib.step_flop(config, state.params, batch.ids_BS.size),
        **measuring.memory(step),
        **kernels.of(whole),
    }


def rivals(config: config_lib.Config) -> dict[str, config_lib.Config]:
    """A mixture's recipe, and the same one with a plain softmax, in two ways.

    "softmax" reads a last layer as wide as the table, as tied models do; "one
    component" keeps the backbone as it is, with the mixture's projection in between.
    """
    softmax = variants_lib.with_head(config, "softmax", config_lib.context_dim(config))
    softmax.regularise.latent = 0.0
    single = config_lib.from_dict(config_lib.to_dict(config))
    single.head.components = 1
    return {config.head.name: config, "softmax": softmax, "one component": single}


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
    shape = (tokens, sum(model.hidden_dims))
    hidden_TD = jax.random.normal(jax.random.key(0), shape, dtype)
    labels_T, weights_T = batch.labels_BS.reshape(-1), batch.weights_BS.reshape(-1)

    def loss(output, hidden_TD):
        return model.head.loss(
            *output, hidden_TD, labels_T, weights_T, options=model.options
        )

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
    backbone_params = jax.tree.map(jnp.copy, params["backbone"])
    carry = initial_carry(config.data.rows)
    return lambda: gradient(backbone_params, embedded_BSE, carry)
