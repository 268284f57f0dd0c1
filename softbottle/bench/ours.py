"""What a child of jax serves: every kind of task, by the module that knows it."""

import importlib
from typing import Any

import jax

from softbottle.bench import kernels

Row = dict[str, Any]
MODULES = {
    "loss": "head",
    "evaluation": "head",
    "per token": "head",
    "products": "head",
    "ceiling": "head",
    "layer": "layer",
    "option": "option",
    "lstm": "recurrence",
    "step": "step",
    "sample": "decoding",
    "top_k": "decoding",
    "log_probs": "decoding",
}


def run_task(task: Row) -> Row:
    """Check and time one variant; the kind "device" only says where this runs."""
    if task["kind"] == "device":
        device = jax.devices()[0]
        facts = {"platform": device.platform, "device": device.device_kind}
        return facts | {"jax": jax.__version__}
    # Imported when needed: a step brings the whole training system along.
    module = importlib.import_module(f"softbottle.bench.{MODULES[task['kind']]}")
    with kernels.asked(task.get("trace", 0)):
        return module.run_task(task)
