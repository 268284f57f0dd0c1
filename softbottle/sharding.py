"""Where arrays live: a mesh of (data, model), and the rules that place them on it.

    rows of a batch       data parallel, over data and model together: every device
                          runs the backbone on rows of its own
    tables and biases     vocabulary parallel (Megatron-LM), their rows over model; the
                          optimizer's state of them likewise
    other large arrays    FSDP (ZeRO-3), over data: all-gathered when they are used
    everything else       replicated

A table is never gathered. To embed a word, the shard that has its row gives it, the
others give zeros, and a reduce-scatter leaves each device the rows of its own part of
the batch. In the head, each shard computes its part of the normalizers of all tokens
of its data group, and only [tokens]-sized sums are all-reduced (`vocab_axis` of
ops/mixture/options.py).

Devices are put on the mesh process by process, so that the model axis stays within a
host as long as it fits, and the rows of a process are a contiguous share of the batch.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from softbottle import config as config_lib
from softbottle.ops.mixture import rows

DATA, MODEL = "data", "model"
ROWS = P((DATA, MODEL))
# Parameters whose rows are words, by the last part of their path.
TABLES = ("table_VE", "output_VE", "bias_V")
# Of smaller arrays, fewer elements than this, every device keeps a copy.
SPLIT_ABOVE = 2**12
# A pytree of arrays, of their shapes, or of where they are.
Tree = TypeVar("Tree")


@overload
def make_mesh(config: config_lib.Mesh, devices: Sequence[jax.Device]) -> Mesh: ...


@overload
def make_mesh(config: config_lib.Mesh, devices: None = None) -> Mesh | None: ...


def make_mesh(
    config: config_lib.Mesh, devices: Sequence[jax.Device] | None = None
) -> Mesh | None:
    """The mesh of a config; None if it is one device of those at hand.

    Args:
        config: `data` and `model`; data = None takes as many as there are devices for.
        devices: all that there are; by default jax's own.

    Raises:
        ValueError: if there are too few devices, or some of a job would be left out.
    """
    at_hand = devices is None
    devices = list(jax.devices() if devices is None else devices)
    devices.sort(key=lambda device: (device.process_index, device.id))
    model = config.model
    data = len(devices) // model if config.data is None else config.data
    if not 1 <= data * model <= len(devices):
        raise ValueError(
            f"a mesh of mesh.data={config.data} by mesh.model={model} needs "
            f"{max(1, data) * model} devices; there are {len(devices)}."
        )
    if data * model < len(devices) and devices[-1].process_index > 0:
        raise ValueError(
            f"a mesh of {data} by {model} leaves out {len(devices) - data * model} of "
            f"the job's {len(devices)} devices; mesh.data=none takes all."
        )
    if data * model == 1 and at_hand:
        return None
    grid = np.array(devices[: data * model]).reshape(data, model)
    return Mesh(grid, (DATA, MODEL), axis_types=(AxisType.Auto,) * 2)


def check_rows(mesh: Mesh | None, rows: int, accumulate: int = 1) -> None:
    """Raise ValueError unless a batch can be shared out."""
    if mesh is not None and rows % (mesh.size * accumulate):
        parts = f" in {accumulate} parts" if accumulate > 1 else ""
        raise ValueError(
            f"data.rows={rows}{parts} cannot be shared by {mesh.size} devices: take a "
            f"multiple of {mesh.size * accumulate}."
        )


def shardings(mesh: Mesh, shapes: Any) -> Any:
    """The sharding of every leaf of a tree of parameters or optimizer state."""

    def rule(path, leaf):
        name = _last_name(path)
        if name in TABLES:
            if leaf.shape[0] % mesh.shape[MODEL]:
                raise ValueError(
                    f"{name} has {leaf.shape[0]} rows, which {mesh.shape[MODEL]} "
                    "devices cannot share: set model.vocab_multiple to a multiple of "
                    "mesh.model."
                )
            return P(MODEL)
        even = [size if size % mesh.shape[DATA] == 0 else 0 for size in leaf.shape]
        if leaf.size < SPLIT_ABOVE or not any(even):
            return P()
        axis = int(np.argmax(even))
        return P(*[None] * axis, DATA)

    return jax.tree.map_with_path(
        lambda path, leaf: NamedSharding(mesh, rule(path, leaf)), shapes
    )


def with_shardings(shapes: Tree, places: Tree) -> Tree:
    """Shapes with the shardings of their arrays."""
    return jax.tree.map(lambda leaf, place: leaf.update(sharding=place), shapes, places)


def bytes_per_device(shapes: Any) -> int:
    """Memory of a tree of shapes on one device; without a sharding, all of an array."""

    def size(leaf):
        shape = leaf.shape
        if leaf.sharding is not None:
            shape = leaf.sharding.shard_shape(shape)
        return math.prod(shape) * leaf.dtype.itemsize

    return sum(map(size, jax.tree.leaves(shapes)))


def device_memory(mesh: Mesh | None) -> int:
    """Bytes of memory that each device of this process has.

    Devices that are parts of the host's processor share the host's memory.
    """
    local = jax.local_devices() if mesh is None else mesh.local_devices
    limit = (local[0].memory_stats() or {}).get("bytes_limit")
    if limit is not None:
        return limit
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return host // (1 if mesh is None else len(local))


def by_rows(mesh: Mesh, tree: Any) -> Any:
    """Shardings of a tree of arrays whose first axis is a batch's rows."""
    return jax.tree.map(lambda _: NamedSharding(mesh, ROWS), tree)


def everywhere(mesh: Mesh, tree: Any) -> Any:
    """Shardings of a tree that is replicated."""
    return jax.tree.map(lambda _: NamedSharding(mesh, P()), tree)


def to_mesh(mesh: Mesh | None, batch: Tree, rows: int) -> Tree:
    """A batch of `rows` rows on the mesh, from the rows that this process read."""
    if mesh is None:
        return batch
    sharding = NamedSharding(mesh, ROWS)
    return jax.tree.map(
        lambda array: jax.make_array_from_process_local_data(
            sharding, array, (rows, *array.shape[1:])
        ),
        batch,
    )


def committed(tree: Tree) -> Tree:
    """The tree's arrays on this process's first device, as a program's results are.

    jax compiles a program once for arrays that could be on any device and again for
    those that it gave back.
    """
    return jax.device_put(tree, jax.local_devices()[0])


def on_first_device(shapes: Tree) -> Tree:
    """The shapes of what `committed` gives."""
    place = SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda leaf: leaf.update(sharding=place), shapes)


def padded(mesh: Mesh | None, batch: Tree) -> Tree:
    """A batch that every process has, on the mesh; rows of zeros fill it up."""
    if mesh is None:
        return committed(batch)
    sharding = NamedSharding(mesh, ROWS)

    def move(array):
        beyond = ((0, -len(array) % mesh.size), *((0, 0),) * (array.ndim - 1))
        array = np.pad(array, beyond)
        return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

    return jax.tree.map(move, batch)


def gather(tree: Tree) -> Tree:
    """The tree's arrays on the host, gathered from all processes."""
    if jax.process_count() == 1:
        return jax.tree.map(np.asarray, tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def lookup(mesh: Mesh, table_VE: jax.Array, ids_BS: jax.Array) -> jax.Array:
    """table_VE[ids_BS] of a vocabulary-parallel table, [B, S, E], by rows."""

    def local(local_VE, ids_BS):
        row_BS = ids_BS - jax.lax.axis_index(MODEL) * local_VE.shape[0]
        mine_BS = (row_BS >= 0) & (row_BS < local_VE.shape[0])
        row_T = jnp.where(mine_BS, row_BS, 0).reshape(-1)
        embedded_BSE = rows.lookup(local_VE, row_T).reshape(*ids_BS.shape, -1)
        embedded_BSE = jnp.where(mine_BS[:, :, None], embedded_BSE, 0.0)
        return jax.lax.psum_scatter(
            embedded_BSE, MODEL, scatter_dimension=0, tiled=True
        )

    return jax.shard_map(
        local, mesh=mesh, in_specs=(P(MODEL), P(DATA)), out_specs=ROWS
    )(table_VE, ids_BS)


def vocabulary_parallel(
    mesh: Mesh | None, function: Callable[..., jax.Array], *, total: bool
) -> Callable[..., jax.Array]:
    """A head's function of (params, table_VE, bias_V, *tokens), vocabulary parallel.

    The tokens' arrays, and `latent_mask`, have tokens or rows as their first axis. A
    `key` becomes another one for each share of the tokens.

    Args:
        mesh: None gives the function itself.
        function: of heads/base.py or heads/cache.py.
        total: whether it returns a sum over tokens, not an array of them.
    """
    if mesh is None:
        return function

    def call(params, table_VE, bias_V, *tokens, options, latent_mask=None, key=None):
        split_options = dataclasses.replace(options, vocab_axis=MODEL)

        def local(params, table_VE, bias_V, tokens, latent_mask):
            named = {} if latent_mask is None else {"latent_mask": latent_mask}
            if key is not None:
                named["key"] = jax.random.fold_in(key, jax.lax.axis_index(DATA))
            value = function(
                params, table_VE, bias_V, *tokens, options=split_options, **named
            )
            return jax.lax.psum(value, DATA) if total else value

        split = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), P(MODEL), P(MODEL), P(DATA), P(DATA)),
            out_specs=P() if total else P(DATA),
        )
        return split(params, table_VE, bias_V, tokens, latent_mask)

    return call


def constrain(mesh: Mesh | None, tree: Tree, spec: P) -> Tree:
    """The tree with a sharding constraint on every array, inside jit."""
    if mesh is None:
        return tree
    return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, spec))


def _last_name(path):
    names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    return names[-1] if names else ""
