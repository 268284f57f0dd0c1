"""The mixture likelihood on arrays; needs jax alone. See api.py."""

from softbottle.ops.mixture.activations import Activation
from softbottle.ops.mixture.api import log_probs, loss, nll, sample, scores, top_k

__all__ = ["Activation", "log_probs", "loss", "nll", "sample", "scores", "top_k"]
