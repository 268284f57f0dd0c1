"""log P of a capture along its text, in blocks: it is never held whole.

A head's own operation gives the blocks where there is one. Otherwise

    log P = g(H W' + 1 b') - s 1',    s_n = logsumexp_v g(H W' + 1 b')_nv

for states H [N, D], a table W [V, D], a bias b and a pointwise g, of a softmax the
identity. Its singular values are those of its transpose, so that a Gram matrix may be
made of the shorter side: `columns` lets the words of a large vocabulary pass by in
blocks.

Axes: N positions; C positions, or words, of a block.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import special

from softbottle.analysis.capture import Capture, bias_or_zeros, joined, present
from softbottle.analysis.settings import Precision
from softbottle.ops.mixture.activations import SOFTMAX

BLOCK = 256  # positions, or words, whose logits are held at a time


class Block(NamedTuple):
    """A stretch of text: log P, the mixture weights, and log P_k of the labels.

    A component that is not active has the log-weight -inf, and anything for log P_k.
    """

    log_p_CV: jax.Array
    log_prior_CK: jax.Array
    log_label_CK: jax.Array


def mixtures(capture: Capture, precision: Precision = "float32") -> Iterator[Block]:
    """The predictions of a capture's own head, a block of its tokens at a time.

    The states are in the backbone's precision; the head computes in the one asked for.
    That is all a rank needs: its bounds hold whatever the states are.
    """
    head, output, options = present("readout", capture.readout)
    options = dataclasses.replace(options, compute_dtype=None)

    @jax.jit
    def predict(output, hidden_CD, labels_C):
        log_p_CV = head.log_probs(*output, hidden_CD, options=options)
        log_prior_CK, score_CK, lse_CK = head.scores(
            *output, hidden_CD, labels_C, options=options
        )
        log_label_CK = score_CK - lse_CK
        place_Ck = head.components_of(output[0], hidden_CD)
        if place_Ck is not None:
            log_prior_CK = spread(log_prior_CK, place_Ck, head.contexts, -jnp.inf)
            log_label_CK = spread(log_label_CK, place_Ck, head.contexts, 0.0)
        return Block(log_p_CV[:, : options.vocab], log_prior_CK, log_label_CK)

    for hidden_CD, labels_C in present("tokens", capture.tokens):
        with jax.enable_x64(precision == "float64"):
            inputs = jax.tree.map(
                lambda leaf: jnp.asarray(leaf, precision), (output, hidden_CD)
            )
            block = predict(*inputs, labels_C)
        yield block


def spread(
    array_Tk: jax.Array, place_Tk: jax.Array, components: int, fill: float
) -> jax.Array:
    """What there is of active components, [T, k, ...], by component, [T, K, ...]."""
    tokens, _, *rest = array_Tk.shape
    whole_TK = jnp.full((tokens, components, *rest), fill, array_Tk.dtype)
    return whole_TK.at[jnp.arange(tokens)[:, None], place_Tk].set(array_Tk)


def blocks(capture: Capture, precision: Precision = "float32") -> Iterator[np.ndarray]:
    """log P of any capture, `BLOCK` of its positions at a time."""
    if capture.readout is None:
        yield from rows(capture, precision)
        return
    head, output, options = capture.readout
    options = dataclasses.replace(options, compute_dtype=None)
    log_probs = jax.jit(functools.partial(head.log_probs, options=options))
    hidden_ND = joined(present("tokens", capture.tokens)).hidden_TD
    with jax.enable_x64(precision == "float64"):
        output = jax.tree.map(lambda leaf: jnp.asarray(leaf, precision), output)
    for start in range(0, len(hidden_ND), BLOCK):
        # Not around the loop: what is done with the blocks is not ours to change.
        with jax.enable_x64(precision == "float64"):
            hidden_CD = jnp.asarray(hidden_ND[start : start + BLOCK], precision)
            log_p_CV = log_probs(*output, hidden_CD)[:, : options.vocab]
        yield np.asarray(log_p_CV)


def rows(capture: Capture, precision: Precision = "float32") -> Iterator[np.ndarray]:
    """log P without a readout in blocks of positions."""
    hidden_ND, table_VD, bias_V = _softmax(capture, precision)
    for start in range(0, len(hidden_ND), BLOCK):
        logits_CV = hidden_ND[start : start + BLOCK] @ table_VD.T + bias_V[None]
        logits_CV = _activated(capture, logits_CV)
        yield special.log_softmax(logits_CV, axis=1)


def columns(capture: Capture, precision: Precision) -> Iterator[np.ndarray]:
    """The transpose of log P without a readout in blocks of words."""
    hidden_ND, table_VD, bias_V = _softmax(capture, precision)
    lse_N = np.concatenate(
        [
            special.logsumexp(
                _activated(capture, hidden_CD @ table_VD.T + bias_V[None]), axis=1
            )
            for hidden_CD in np.split(hidden_ND, range(BLOCK, len(hidden_ND), BLOCK))
        ]
    )
    for start in range(0, len(table_VD), BLOCK):
        stop = start + BLOCK
        logits_CN = table_VD[start:stop] @ hidden_ND.T + bias_V[start:stop, None]
        yield _activated(capture, logits_CN) - lse_N[None]


def loss(capture: Capture) -> float:
    """Mean loss without a readout along the text, in nats per token.

    Raises:
        ValueError: if the words that follow the states are not known.
    """
    labels_N = present("labels_T", joined(present("tokens", capture.tokens)).labels_T)
    total, start = 0.0, 0
    for log_p_CV in rows(capture):
        labels_C = labels_N[start : start + len(log_p_CV)]
        total -= float(np.sum(log_p_CV[np.arange(len(labels_C)), labels_C]))
        start += len(labels_C)
    return total / start


def _activated(capture, logits_CV):
    """g of some logits, in their precision."""
    apply, theta = capture.activation.apply, capture.activation.theta
    if apply is SOFTMAX.apply:
        return logits_CV
    with jax.enable_x64(logits_CV.dtype == np.float64):
        return np.asarray(apply(theta, jnp.asarray(logits_CV)))


def _softmax(capture, precision):
    hidden_ND = joined(capture.tokens).hidden_TD
    arrays = hidden_ND, capture.table_VE, bias_or_zeros(capture)
    return [np.asarray(array, precision) for array in arrays]
