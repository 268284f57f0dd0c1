"""The mixture likelihood on arrays; needs jax alone. See api.py."""

from softbottle.ops.mixture.activations import Activation
from softbottle.ops.mixture.api import (
    argmax,
    label_score,
    log_probs,
    loss,
    loss_and_argmax,
    lse,
    nll,
    sample,
    scores,
    scores_and_entropies,
    source,
    top_k,
)
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
    "argmax",
    "label_score",
    "log_probs",
    "loss",
    "loss_and_argmax",
    "lse",
    "nll",
    "sample",
    "scores",
    "scores_and_entropies",
    "source",
    "top_k",
]
