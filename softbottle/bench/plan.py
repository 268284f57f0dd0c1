"""What a training step takes on machines that are not here, from shapes alone.

The whole step is compiled for a named slice by that machine's own compiler. Memory and
collectives are read from the result, the flop of the GEMMs from the shapes; the time is
then arithmetic,

    max(flop / (USED * peak flop/s), bytes / memory speed) + moved bytes / link speed,

with the makers' figures for a chip (CHIPS), all of whose links are taken to work at
once, and a share USED of its peak. The largest batch is found by compiling others.

The step is what a run there would be: its choices (kernel, tokens per block, the
LSTM's recurrence) are made for the slice's devices, and told.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from softbottle import config as config_lib
from softbottle import model as model_lib
from softbottle import sharding
from softbottle.bench import hlo
from softbottle.data.batches import Batch
from softbottle.training import optim
from softbottle.training import step as step_lib


class Chip(NamedTuple):
    """A maker's figures for one chip: flop/s (bfloat16), bytes, bytes/s, bytes/s."""

    flop: float
    memory: float
    memory_speed: float
    link_speed: float


class DoesNotFitError(ValueError):
    """A step needs more memory than the chip has; `bytes` is how much, or 0."""

    def __init__(self, message: str):
        super().__init__(f"it does not fit: {message[:400]}")
        used = re.search(r"Used ([\d.]+)([KMGT]) of", message)
        self.bytes = float(used[1]) * 1024 ** (1 + "KMGT".index(used[2])) if used else 0


CHIPS = {
    "v5e": Chip(197e12, 16e9, 0.819e12, 200e9),
    "v5p": Chip(459e12, 95e9, 2.765e12, 600e9),
    "v6e": Chip(918e12, 32e9, 1.640e12, 448e9),
    "h200": Chip(989e12, 141e9, 4.8e12, 450e9),
}
# Of a chip's peak: whole steps of MoS reached 0.53 to 0.59 of an H200's, those of a
# softmax 0.44 (docs/scaling.md).
USED = 0.5
_TRIES = 5  # compilations to find the largest batch

_H200 = """
gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150754820096 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536 }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 } device_description_str: "NVIDIA H200"
"""


def devices(topology: str) -> list[jax.Device]:
    """The devices of a slice such as "v5e:16x16", or "h200", none of them here.

    Raises:
        ValueError: if there is no such slice, or no compiler for it is installed.
    """
    kind = topology.partition(":")[0]
    if kind not in CHIPS:
        raise ValueError(f"no chip is called {kind!r}; there are {list(CHIPS)}.")
    if kind != "h200" and not re.fullmatch(r"\w+:\d+x\d+(x\d+)?", topology):
        raise ValueError(f"a slice is named like {kind}:16x16, got {topology!r}.")
    try:
        if kind == "h200":
            description = topologies.get_topology_desc(
                platform="cuda", target_config=_H200, topology="1x1x1"
            )
        else:
            description = topologies.get_topology_desc(
                platform="tpu", topology_name=topology, **_host(topology)
            )
    except Exception as error:
        raise ValueError(_without_compiler(kind, error)) from error
    return list(description.devices)


def measure(
    config: config_lib.Config, topology: str, vocab: int, tokens: int
) -> dict[str, Any]:
    """Compile the step of a config for a slice, and read what it takes.

    Args:
        config: a run's settings; `data.rows` follows from `tokens`.
        topology: as of `devices`.
        vocab: how many words there are; the corpus is not read.
        tokens: of a batch, per chip; rounded up to whole rows.

    Returns:
        Bytes per chip by kind, flop per chip, collectives by kind, seconds by part.

    Raises:
        DoesNotFitError: if the step does not fit.
        ValueError: if there is no such slice or compiler.
    """
    chips = devices(topology)
    chip = CHIPS[topology.partition(":")[0]]
    config = _for_chips(config, len(chips), tokens)
    mesh = sharding.make_mesh(config.mesh, chips)
    model = model_lib.make(config, vocab, mesh)
    compiled, shapes = _compile(model)
    memory = compiled.memory_analysis()
    batch_tokens = config.data.rows * config.data.length
    flop = model_lib.step_flop(config, shapes.params, batch_tokens) / mesh.size
    sent = hlo.collectives(compiled.as_text())
    seconds = {
        "products": flop / (USED * chip.flop),
        "memory": memory.argument_size_in_bytes * 2 / chip.memory_speed,
        "links": _moved(sent) / chip.link_speed,
    }
    total = max(seconds["products"], seconds["memory"]) + seconds["links"]
    return {
        "topology": topology,
        "chips": mesh.size,
        "mesh": dict(mesh.shape),
        "choices": model.choices()._asdict(),
        "tokens_per_chip": batch_tokens // mesh.size,
        "parameters": model_lib.count_parameters(shapes.params, vocab),
        "bytes": {
            "arguments": memory.argument_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
            "program": memory.generated_code_size_in_bytes,
        },
        "limit_bytes": chip.memory,
        "flop": flop,
        "collectives": {
            kind: {"count": row.runs, "bytes": row.bytes, "largest": row.largest}
            for kind, row in sent.items()
        },
        "seconds": seconds | {"step": total},
        "tokens_per_second": batch_tokens / total,
    }


def largest(
    measure_at: Callable[[int], dict[str, Any]], first: dict[str, Any]
) -> dict[str, Any] | None:
    """The largest batch that was found to fit, by compiling larger ones.

    Memory rises with the tokens, at least as steeply as at first: where the line
    through `first` and a larger batch meets the chip's memory is the next to be tried.
    None if `first` itself does not fit: a compiler may be content with what the chip
    has not.

    Args:
        measure_at: gives the measurement at some tokens per chip, or raises
            `DoesNotFitError`.
        first: the measurement to begin with.
    """
    limit, start, size = first["limit_bytes"], first["tokens_per_chip"], total(first)
    if size > limit:
        return None
    best, guess = first, 2 * start
    for _ in range(_TRIES):
        try:
            row = measure_at(guess)
            tried, needs = row["tokens_per_chip"], total(row)
        except DoesNotFitError as error:
            row, tried, needs = None, guess, max(error.bytes, 1.01 * limit)
        if row and needs <= limit and tried > best["tokens_per_chip"]:
            best = row
        slope = max(needs - size, 1.0) / (tried - start)
        # Not beyond sixteen times what was tried: a flat line says little.
        guess = min(int(start + (limit - size) / slope), 16 * tried)
        if best["tokens_per_chip"] >= 0.9 * guess:
            break
    return best


def total(result: dict[str, Any]) -> float:
    """Bytes per chip that a measured step holds."""
    return sum(result["bytes"].values())


def render(result: dict[str, Any]) -> str:
    """A measurement as aligned text."""
    size, seconds = result["bytes"], result["seconds"]
    lines = [
        f"{result['topology']}: {result['chips']} chips as {result['mesh']}, "
        f"{result['parameters']:,} parameters, {result['tokens_per_chip']:,} tokens "
        "per chip and step",
        f"  {model_lib.Choices(**result['choices'])}",
        *(f"  {name:<12}{_gib(value)}" for name, value in size.items()),
        f"  {'in all':<12}{_gib(total(result))} of {_gib(result['limit_bytes'])}",
        f"  GEMMs       {result['flop'] / 1e12:9.2f} Tflop per chip",
        *(
            f"  {kind:<20}{row['count']:4d}, {row['bytes'] / 2**20:10.2f} MiB, largest "
            f"{row['largest'] / 2**20:.2f}"
            for kind, row in result["collectives"].items()
        ),
        f"  predicted   {1e3 * seconds['step']:9.2f} ms per step: GEMMs "
        f"{1e3 * seconds['products']:.2f} at {USED} of the peak, state "
        f"{1e3 * seconds['memory']:.2f}, links {1e3 * seconds['links']:.2f}",
        f"  predicted   {result['tokens_per_second']:12,.0f} tokens/s, not measured",
    ]
    return "\n".join(lines)


def render_largest(result: dict[str, Any] | None) -> str:
    """What `largest` found, as a line."""
    if result is None:
        return "  largest     none was looked for: the first does not fit, take fewer"
    return (
        f"  largest     {result['tokens_per_chip']:12,} tokens per chip, compiled, "
        f"take {_gib(total(result)).strip()}: the most that was found to fit"
    )


def _compile(model):
    config, mesh = model.config, model.mesh
    tx = optim.make(config.optim)
    step = step_lib.make_step(config, model, tx, mesh)
    state = step_lib.abstract_state(config, model, tx, mesh)
    placed = sharding.by_rows(mesh, 0)
    shape = (config.data.rows, config.data.length)
    batch = Batch(
        *(
            jax.ShapeDtypeStruct(shape, dtype, sharding=placed)
            for dtype in (jnp.int32, jnp.int32, jnp.float32, jnp.int32)
        )
    )
    try:
        return step.lower(state, batch, False).compile(), state
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise DoesNotFitError(str(error)) from error


def _for_chips(config, chips, tokens):
    """The config with the rows of a slice."""
    config = config_lib.from_dict(config_lib.to_dict(config))
    needed = chips * config.optim.accumulate
    rows = math.ceil(tokens * chips / config.data.length)
    config.data.rows = needed * math.ceil(rows / needed)
    return config_lib.validate(config)


def _moved(sent):
    """Bytes that pass a chip's links: a sum is scattered and then gathered again."""
    return sum((1 + (kind == "all-reduce")) * row.bytes for kind, row in sent.items())


def _gib(count):
    return f"{count / 2**30:9.3f} GiB"


def _host(topology):
    """How many chips a host of a slice has, where it is less than the usual 2 x 2."""
    sides = topology.partition(":")[2].split("x")
    bounds = [min(int(side), 2) for side in sides[:2]]
    return {} if bounds == [2, 2] else {"chips_per_host_bounds": [*bounds, 1]}


def _without_compiler(kind, error):
    if kind == "h200":
        needs = (
            "jax[cuda13] on Python 3.12 or newer, with "
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 where there is no driver"
        )
    else:
        needs = (
            "libtpu (pip install 'jax[tpu]'), whose wheels are for x86-64 alone; "
            "elsewhere it runs in an emulator, slowly"
        )
    reason = str(error).splitlines()[0][:200] if str(error) else repr(error)
    return f"this machine cannot compile for {kind}: {reason}. It takes {needs}."
