"""One training step as a pure function, and the state that the first one takes.

The key of a step is a function of (seed, step). On a mesh every array of the state has
one place (sharding.py), before a step and after it, so that a step is compiled once.
"""

import contextlib
import pathlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from softbottle import config as config_lib
from softbottle import model as model_lib
from softbottle import sharding
from softbottle.data import frequency
from softbottle.data.batches import Batch
from softbottle.training import optim, programs
from softbottle.training.state import TrainState


def make_step(
    config: config_lib.Config,
    model: model_lib.Model,
    tx: optax.GradientTransformationExtraArgs,
    mesh: Mesh | None = None,
) -> jax.stages.Wrapped:
    """A compiled `step(state, batch, fresh) -> (state, metrics)`; `state` is donated.

    `fresh` says that no carry fits the batch, as a stream's `fresh` does. The learning
    rate is scaled by the batch's true length where lengths vary.
    """
    schedule = optim.learning_rate(config.optim)

    def step(state, batch, fresh):
        rows = batch.ids_BS.shape[0]
        carry = jax.tree.map(
            lambda first, last: jnp.where(fresh, first, last),
            model.initial_carry(rows),
            state.carry,
        )
        grads, loss, carry = _gradient(
            model,
            state.params,
            batch,
            carry,
            jax.random.fold_in(jax.random.key(config.seed), state.step),
            config.optim.accumulate,
            mesh,
        )
        scale = 1.0
        if config.data.variable:
            true_length = jnp.max(jnp.sum(batch.weights_BS, axis=1))
            scale = true_length / config.data.length
        updates, opt_state = tx.update(
            grads, state.opt_state, state.params, scale=scale
        )
        measured = {
            "total": loss.total,
            "count": loss.tokens,
            "penalty": loss.penalty,
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": schedule(state.step) * scale,
        }
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state, carry), measured

    if mesh is None:
        options = model.compiler_options
        return jax.jit(step, donate_argnums=0, compiler_options=options)
    # Pinned, or the second step would find other shardings and be compiled again.
    like = abstract_state(config, model, tx, mesh)
    placed = jax.tree.map(lambda leaf: leaf.sharding, like)
    return jax.jit(
        step,
        donate_argnums=0,
        in_shardings=(placed, sharding.by_rows(mesh, 0), None),
        out_shardings=(placed, sharding.everywhere(mesh, 0)),
        compiler_options=model.compiler_options,
    )


@contextlib.contextmanager
def compiling(
    step: jax.stages.Wrapped,
    state: TrainState,
    batch: Batch,
    widths: Sequence[int],
    kept: Callable[[Any], pathlib.Path] | None = None,
) -> Iterator[Callable[[int], futures.Future[jax.stages.Compiled]]]:
    """Compile a step for batches of several widths, side by side.

    Tracing and lowering are Python's. One thread does them for one width after the
    other, what was asked for first, so that who waits for a program waits for that one
    alone. A thread does not see what a context manager has set of jax in another: with
    such settings a width is lowered when it is asked for, by the thread that asks.

    Args:
        step: what `make_step` gives, without a mesh.
        state: as the first step takes it, or its shapes and places, which are read.
        batch: any; only its rows and types are read.
        widths: how many columns batches may have, what is wanted first to begin with.
        kept: the file in which the program for such arguments is kept (programs.py),
            and from which it is taken if it is there; None keeps nothing.

    Yields:
        A function from a width to the step's program, which is begun if it was not.
        The other widths follow by themselves, in their order. What is not begun when
        the context ends is left.
    """
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.weak_type
        ),
        state,
    )
    lowering = futures.ThreadPoolExecutor(1)
    # For every width one that waits or compiles, and one that writes its file.
    pool = futures.ThreadPoolExecutor(2 * len(widths))
    begun: dict[int, futures.Future[jax.stages.Compiled]] = {}
    writing: list[futures.Future[None]] = []
    lock, ended = threading.RLock(), threading.Event()
    shared = lowering.submit(_settings).result() == _settings()

    def lower(width):
        columns = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct((len(array), width), array.dtype), batch
        )
        arguments = (like, columns, True)
        path = None if kept is None else kept(arguments)
        found = None if path is None else programs.load(path)
        made = step.lower(*arguments) if found is None else None
        with lock:
            left = [each for each in widths if each not in begun]
            if shared and left and not ended.is_set():
                begin(left[0])
        return found, made, path

    def compiled(lowered):
        found, made, path = lowered.result()
        if found is not None:
            return found
        program = made.compile()
        if path is not None:
            writing.append(pool.submit(programs.save, path, program))
        return program

    def begin(width):
        with lock:
            if width not in begun:
                if shared:
                    lowered = lowering.submit(lower, width)
                else:
                    lowered = futures.Future()
                    lowered.set_result(lower(width))
                begun[width] = pool.submit(compiled, lowered)
            return begun[width]

    try:
        yield begin
    finally:
        ended.set()
        lowering.shutdown(wait=False, cancel_futures=True)
        futures.wait(writing)
        pool.shutdown(wait=False, cancel_futures=True)


def _settings():
    return dict(jax.config.values)


def bias_start(
    config: config_lib.Model, model: model_lib.Model, ids: np.ndarray
) -> jax.Array | None:
    """What `model.bias_start` asks for, by the words of a text; None for zero."""
    if config.bias_start == "zero":
        return None
    return model.head.start_bias(frequency.counts(ids, model.vocab))


def init_state(
    config: config_lib.Config,
    model: model_lib.Model,
    tx: optax.GradientTransformationExtraArgs,
    mesh: Mesh | None = None,
    bias_V: jax.Array | None = None,
) -> TrainState:
    """The state before the first step; the words' bias is zero unless it is given."""
    build = _builder(config, model, tx, bias_V)
    # In one jit, so that no two of its arrays share a buffer: the step donates them.
    if mesh is None:
        return jax.jit(build)()
    like = abstract_state(config, model, tx, mesh)
    placed = jax.tree.map(lambda leaf: leaf.sharding, like)
    return jax.jit(build, out_shardings=placed)()


def abstract_state(
    config: config_lib.Config,
    model: model_lib.Model,
    tx: optax.GradientTransformationExtraArgs,
    mesh: Mesh | None,
) -> TrainState:
    """The shapes of the state's arrays and, on a mesh, their places."""
    shapes = jax.eval_shape(_builder(config, model, tx))
    if mesh is None:
        return shapes
    places = TrainState(
        sharding.everywhere(mesh, shapes.step),
        sharding.shardings(mesh, shapes.params),
        sharding.shardings(mesh, shapes.opt_state),
        sharding.by_rows(mesh, shapes.carry),
    )
    return sharding.with_shardings(shapes, places)


def check_memory(
    config: config_lib.Config,
    model: model_lib.Model,
    tx: optax.GradientTransformationExtraArgs,
    mesh: Mesh | None,
) -> None:
    """Raise ValueError if parameters, gradient and optimizer alone do not fit.

    Found from shapes, before anything is allocated. What a step needs beside them
    (activations, blocks of logits) is not counted: `softbottle compile` tells.
    """
    like = abstract_state(config, model, tx, mesh)
    sizes = [sharding.bytes_per_device(tree) for tree in (like.params, like.opt_state)]
    needed, capacity = 2 * sizes[0] + sizes[1], sharding.device_memory(mesh)
    if needed > capacity:
        raise ValueError(
            "the model does not fit: its parameters, their gradient and the "
            f"optimizer's state take {needed / 2**30:,.1f} GiB per device, which has "
            f"{capacity / 2**30:,.1f} GiB. Reduce head.components or the widths of "
            "model, or share it among more devices (mesh.data, mesh.model)."
        )


def _builder(config, model, tx, bias_V=None):
    def build():
        key = jax.random.fold_in(jax.random.key(config.seed), 2**31)
        params = model.init(key, bias_V)
        carry = model.initial_carry(config.data.rows)
        return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params), carry)

    return build


def _gradient(model, params, batch, carry, key, accumulate, mesh):
    """Gradient of the mean loss, accumulated over `accumulate` parts of the rows."""
    # A part's share of the batch's count, not its own count: it may be all padding.
    share = jnp.sum(batch.weights_BS) / accumulate

    def objective(params, batch, carry, key):
        loss, carry = model.loss(params, batch, carry, key)
        return loss.total / share + loss.penalty, (loss, carry)

    differentiate = jax.grad(objective, has_aux=True)
    if accumulate == 1:
        grads, (loss, carry) = differentiate(params, batch, carry, key)
        return grads, loss, carry

    def split(array):
        return array.reshape(accumulate, len(array) // accumulate, *array.shape[1:])

    def add(sums, part):
        batch, carry, key = part
        grads, (loss, carry) = differentiate(params, batch, carry, key)
        return jax.tree.map(jnp.add, sums, (grads, loss)), carry

    zeros = jax.tree.map(jnp.zeros_like, params)
    sums = (zeros, model_lib.Loss(*jnp.zeros(3)))
    parts = jax.tree.map(split, (batch, carry))
    parts = sharding.constrain(mesh, parts, P(None, *sharding.ROWS))
    parts = (*parts, jax.random.split(key, accumulate))
    (grads, loss), carry = jax.lax.scan(add, sums, parts)
    carry = jax.tree.map(
        lambda array: array.reshape(array.shape[0] * array.shape[1], *array.shape[2:]),
        carry,
    )
    grads = jax.tree.map(lambda leaf: leaf / accumulate, grads)
    return grads, loss._replace(penalty=loss.penalty / accumulate), carry
