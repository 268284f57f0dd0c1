"""What our own runs hold inside: states of every layer, now and along the training.

A text is read in stretches of `data.eval_length` positions, as evaluation reads it:
what the last layer gives is what the run's perplexity is made of.
"""

import pathlib
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from softbottle import backbones
from softbottle.data import batches
from softbottle.training import checkpoint, evaluate
from softbottle.training.state import Run


class Inner(NamedTuple):
    """What a trunk holds along a text.

    Attributes:
        states: [N, D] by layer, the embedded words first; the head reads the last.
        logits_LWHS: of a transformer, attention logits of the last position of each of
            W whole stretches of S positions, N = W S; or None.
    """

    states: list[np.ndarray]
    logits_LWHS: np.ndarray | None


def inner(run: Run, ids: np.ndarray) -> Inner:
    """States of every layer along a text, but for a last stretch that is not whole.

    Raises:
        ValueError: if the text is shorter than two words.
    """
    if len(ids) < 2:
        raise ValueError(f"a text of two words or more is needed, got {len(ids)}.")
    backbone, params = backbones.make(run.config), run.params
    length = min(run.config.data.eval_length, len(ids) - 1)

    @jax.jit
    def read(params, batch, carry):
        embedded_BSE = params["table_VE"][batch.ids_BS]
        trunk, kept = backbone.apply(
            {"params": params["backbone"]},
            embedded_BSE.astype(run.config.model.compute_dtype),
            carry,
            batch.segments_BS,
            train=False,
            mutable=["intermediates"],
        )
        kept = kept.get("intermediates", {})
        return (embedded_BSE, trunk.hidden_BSD, kept), trunk.carry

    parts, carry = [], backbone.initial_carry(1)
    whole = (len(ids) - 1) // length * length
    for batch in batches.evaluation(ids[: whole + 1], 1, length):
        found, carry = read(params, batch, carry)
        parts.append(_layers(*found))
    states = [
        np.concatenate(layer)
        for layer in zip(*(states for states, _ in parts), strict=True)
    ]
    logits = [logits_LHS for _, logits_LHS in parts]
    return Inner(states, None if logits[0] is None else np.stack(logits, axis=1))


def steps(workdir: pathlib.Path) -> list[int]:
    """The steps whose parameters a run kept in its series, rising."""
    return checkpoint.sealed_steps(workdir / "series")


def checkpoints(
    workdir: pathlib.Path, run: Run, ids: np.ndarray
) -> Iterator[tuple[int, np.ndarray, np.ndarray, float]]:
    """(step, output table [V, E], last states [N, D], loss on the text) of a series."""
    score = evaluate.make_evaluator(run.model)
    words, length = run.model.options["vocab"], run.config.data.eval_length
    for step in steps(workdir):
        params, _ = checkpoint.read(workdir / "series", step, run.params)
        table_VE = np.asarray(run.model.output(params)[1][:words])
        last_ND = inner(run._replace(params=params), ids).states[-1]
        yield step, table_VE, last_ND, score(params, ids, 1, length).loss


def _layers(embedded_BSE, hidden_BSD, kept):
    """States [S, D] of one stretch by layer, and its attention logits."""
    between, logits_LHS = list(kept.get("inner_BSH", ())), None
    if "entering_LBSD" in kept:
        # The first is the embedded words, projected where their width differs.
        between = list(kept["entering_LBSD"][0][1:])
        logits_LHS = np.asarray(kept["logits_LBNS"][0][:, 0], np.float32)
    layers = (embedded_BSE, *between, hidden_BSD)
    return [np.asarray(one[0], np.float32) for one in layers], logits_LHS
