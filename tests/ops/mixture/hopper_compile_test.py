"""The Hopper kernel through NVIDIA's own assembler, on a machine without a GPU.

Needs the CUDA plugin of jax (`pip install "jax[cuda13]"`), whose ptxas says how many
registers a kernel takes and what it had to spill.
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from tests import ROOT

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None
    or jax.__version_info__ < (0, 11),
    reason="needs jax[cuda13] 0.11 or newer, for its ptxas",
)
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 62914560
  clock_rate_ghz: 1.98 device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 }
device_description_str: "NVIDIA H200"
"""
PROGRAM = f'''
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import softbottle
from softbottle.ops.mixture import api, pallas_gpu
from softbottle.ops.mixture.options import Options
from tests.ops.mixture.problem import paired

topology = topologies.get_topology_desc(
    platform="cuda", target_config="""{H200}""", topology="1x1x1"
)
placed = NamedSharding(Mesh(np.array(topology.devices), ("x",)), PartitionSpec())
# Scores that are bounded by FAR would need no second reference.
settings = {{"gss": (0.5, 1.7), "softcap": (pallas_gpu.FAR + 10,)}}.get(sys.argv[1], ())
activation = getattr(softbottle, sys.argv[1])(*settings).activation({{}})


def shape(dtype, *sizes):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=placed)


options = Options(implementation="pallas_gpu").resolve(topology.devices[0])

argmax = sys.argv[2] == "argmax"


def loss(*inputs):
    if argmax:
        return api.loss_and_argmax(*paired(*inputs), activation, options)
    return api.loss(*paired(*inputs), activation, options)


tokens, components, width, vocab = 840, 1 if argmax else 15, 280, 10_000
inputs = (
    shape(jnp.float32, tokens, components),
    shape(jnp.bfloat16, tokens, components, width),
    shape(jnp.bfloat16, vocab, width),
    shape(jnp.float32, vocab),
    shape(jnp.int32, tokens),
    shape(jnp.float32, tokens),
)
if sys.argv[2] == "logits":
    rows = shape(jnp.bfloat16, tokens, width)
    both = jax.jit(pallas_gpu.IMPLEMENTATION.logits_and_lse, static_argnums=3)
    both.lower(rows, *inputs[2:4], options).compile()
    sys.exit()
function = jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=argmax)
text = jax.jit(function).lower(*inputs).compile().as_text()
# One chunk of tokens: nothing on the device decides what the host does next.
assert " while(" not in text and " conditional(" not in text
# E is written in place the second time.
assert "output_to_operand_aliasing" in text
'''


# Mixtape's loss, whose frequent words have a kernel of their own.
GATED = f'''
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import softbottle
from softbottle.ops.mixture.options import Options

topology = topologies.get_topology_desc(
    platform="cuda", target_config="""{H200}""", topology="1x1x1"
)
placed = NamedSharding(Mesh(np.array(topology.devices), ("x",)), PartitionSpec())


def shape(dtype, *sizes):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=placed)


head = softbottle.mixtape(4, frequent=1_000)
tokens, width, vocab = 840, 280, 10_000
params = jax.eval_shape(lambda key: head.init(key, width, width), jax.random.key(0))
inputs = (
    jax.tree.map(lambda leaf: shape(leaf.dtype, *leaf.shape), params),
    shape(jnp.bfloat16, vocab, width),
    shape(jnp.float32, vocab),
    shape(jnp.bfloat16, tokens, width),
    shape(jnp.int32, tokens),
)
options = Options().resolve(topology.devices[0])


def loss(*inputs):
    return head.loss(*inputs, options=options)


function = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))
text = jax.jit(function).lower(*inputs).compile().as_text()
assert " while(" not in text and " conditional(" not in text
# Both E are written in place the second time, and the labels' entries after that.
assert text.count("output_to_operand_aliasing") == 2
# Contexts lie in rows, as the kernel reads them: none is transposed.
assert f"[4,{{width}},{{tokens}}]" not in text
'''


ACTIVATIONS = ("softmax", "sigsoftmax", "gss", "softcap")
# What a program has at least: E, the normalizers of rows that need another reference,
# and E of these; or logits.
AT_LEAST = {"alone": 3, "argmax": 3, "logits": 1}
CASES = [(activation, beside) for activation in ACTIVATIONS for beside in AT_LEAST]


@pytest.mark.parametrize(
    ("activation", "beside"),
    [case for case in CASES if case[1] != "logits" or case[0] == "softmax"],
)
def test_no_registers_are_spilled(activation, beside):
    spilled = compiled(PROGRAM, activation, beside)
    assert len(spilled) >= AT_LEAST[beside]
    assert not any(spilled)


def test_the_kernel_of_frequent_words_spills_a_few_numbers_that_do_not_change():
    spilled = compiled(GATED)
    assert len(spilled) >= 6
    # Stores and loads of a thread, in bytes; a tile would be thousands.
    assert max(spilled) <= 144


def compiled(program, *arguments):
    """The bytes that each kernel of a program spills."""
    [library] = importlib.util.find_spec("nvidia").submodule_search_locations
    binaries = {path.parent for path in pathlib.Path(library).glob("*/bin/ptxas")}
    path = os.pathsep.join([*map(str, binaries), os.environ["PATH"]])
    root = str(ROOT)
    environment = os.environ | {
        "PATH": path,
        "PYTHONPATH": root,
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    stores = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill", done.stdout)
    return [int(store) + int(load) for store, load in stores]
