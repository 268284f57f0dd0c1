"""From a config to an optax transformation, and the averages of NT-ASGD.

    sgd     p <- p - lr (length / bptt) (clip(g) + decay p)
    adamw   clip, Adam, decoupled weight decay, linear warm-up and cosine decay
            (word tables and PLIF's slopes may have learning rates of their own)
    average mean_t = mean_{t-1} + (p_t - mean_{t-1}) / max(1, t - 1)

The average is Polyak's, with PyTorch's ASGD counting (its first two steps overwrite).
It lives in the optimizer's state and lies idle until `start_averaging`: when the
validation loss is no better than the best loss older than `patience` epochs ("nt"), at
a given epoch ("et"), or at once ("now").

Axes: N segments of PLIF.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from softbottle import config as config_lib


class Averaged(NamedTuple):
    """The state of `averaged`: the inner optimizer's, and the running mean."""

    inner: optax.OptState
    active: jax.Array
    # A tuple's method is called so too, but checkpoints have the field by this name.
    count: jax.Array  # type: ignore[assignment]
    mean: optax.Params


def make(config: config_lib.Optim) -> optax.GradientTransformationExtraArgs:
    """The optimizer of a config; its update takes `scale`, of the learning rate."""
    parts = [optax.clip_by_global_norm(config.clip)] if config.clip else []
    if config.name == "adamw":
        parts.append(optax.scale_by_adam())
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay))
    own = {
        "table_VE": config.table_learning_rate,
        "output_VE": config.table_learning_rate,
        "slope_N": config.slope_learning_rate,
    }
    factors = {name: rate / config.learning_rate for name, rate in own.items() if rate}
    if factors:
        parts.append(_scale_named(factors))
    parts += [optax.scale_by_learning_rate(learning_rate(config)), _scale_by_argument()]
    chain = optax.chain(*parts)
    return chain if config.averaging == "none" else averaged(chain, config.averaging)


def learning_rate(config: config_lib.Optim) -> optax.Schedule:
    """The learning rate as a function of the step."""
    peak, warmup = config.learning_rate, config.warmup_steps
    if config.name == "sgd" or not (warmup or config.decay_steps):
        return optax.constant_schedule(peak)
    if not config.decay_steps:
        return optax.linear_schedule(0.0, peak, warmup)
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup else peak,
        peak_value=peak,
        warmup_steps=warmup,
        decay_steps=config.decay_steps,
        end_value=peak * config.end_factor,
    )


def averaged(
    inner: optax.GradientTransformation, averaging: str
) -> optax.GradientTransformationExtraArgs:
    """`inner`, with a running mean of the parameters that can be switched on."""
    inner = optax.with_extra_args_support(inner)

    def init(params):
        return Averaged(
            inner.init(params),
            jnp.asarray(averaging == "now"),
            jnp.zeros((), jnp.int32),
            jax.tree.map(jnp.copy, params),
        )

    def update(updates, state, params=None, **extra):
        updates, inner_state = inner.update(updates, state.inner, params, **extra)
        count = state.count + state.active.astype(jnp.int32)
        weight = jnp.where(state.active, 1.0 / jnp.maximum(1, count - 1), 0.0)
        new = optax.apply_updates(params, updates)
        mean = jax.tree.map(
            lambda old, value: old + weight.astype(old.dtype) * (value - old),
            state.mean,
            new,
        )
        return updates, Averaged(inner_state, state.active, count, mean)

    return optax.GradientTransformationExtraArgs(init, update)


def start_averaging(opt_state: Averaged) -> Averaged:
    """The state from which the mean is kept."""
    return opt_state._replace(active=opt_state.active | True)


def is_averaging(opt_state: optax.OptState) -> bool:
    """Whether the mean is being kept (and is what should be evaluated)."""
    return isinstance(opt_state, Averaged) and bool(opt_state.active)


def evaluation_params(opt_state: optax.OptState, params: optax.Params) -> optax.Params:
    """The mean once it has begun, the parameters themselves before."""
    begun = is_averaging(opt_state) and int(opt_state.count) > 0
    return opt_state.mean if begun else params


def should_average(
    config: config_lib.Optim, earlier: Sequence[float], loss: float, epoch: int
) -> bool:
    """Whether averaging begins after an epoch.

    Args:
        config: `averaging`, `patience` and `switch_epoch` are read.
        earlier: validation losses of the epochs before, oldest first.
        loss: the validation loss of the epoch that has just ended.
        epoch: how many epochs are complete.
    """
    if config.averaging == "nt":
        return no_better(earlier, loss, config.patience)
    return config.averaging == "et" and epoch >= config.switch_epoch


def should_stop(patience: int | None, losses: Sequence[float]) -> bool:
    """Whether the last validation loss says so, by `train.stop_patience`."""
    return patience is not None and no_better(losses[:-1], losses[-1], patience)


def no_better(earlier: Sequence[float], loss: float, patience: int) -> bool:
    """Whether a loss exceeds the best of all but the last `patience` before it."""
    return len(earlier) > patience and loss > min(earlier[:-patience])


def _scale_by_argument():
    """Multiply the updates by the argument `scale` of `update`."""

    def update(updates, state, params=None, *, scale=1.0, **extra):
        del params, extra
        return jax.tree.map(lambda leaf: leaf * scale, updates), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def _scale_named(factors):
    """Multiply the updates of the parameters of these names."""

    def scale(path, leaf):
        return leaf * factors.get(jax.tree_util.keystr(path[-1:], simple=True), 1.0)

    return optax.stateless(lambda updates, _: jax.tree.map_with_path(scale, updates))
