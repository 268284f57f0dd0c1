"""The mixture likelihood on arrays; needs jax alone. See api.py."""

from softbottle.ops.mixture.activations import Activation
from softbottle.ops.mixture.api import log_probs, loss, nll, sample, scores, top_k
from softbottle.ops.mixture.arrays import Mixture, Targets, Vocabulary
from softbottle.ops.mixture.options import Options
from softbottle.ops.mixture.sampling import Sampling

__all__ = [
    "Activation",
    "Mixture",
    "Options",
    "Sampling",
    "Targets",
    "Vocabulary",
    "log_probs",
    "loss",
    "nll",
    "sample",
    "scores",
    "top_k",
]
