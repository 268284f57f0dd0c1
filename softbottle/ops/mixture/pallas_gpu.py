"""The mixture loss for Hopper GPUs, its first product in one kernel (hopper_kernel.py).

    z = context @ table' + bias,  E = exp(g(z) - ref) g'(z),  S = sum_v exp(g(z) - ref)

The kernel gives E, or maxima and sums, of tiles. XLA adds up the tiles, in order, and
computes the other two products, at which its library is near the machine's peak.

References are the labels' scores, as a rule near the largest. Rows whose sum shows that
theirs is too low, by `FAR` nats, are done again with their normalizers, in place and
for their tiles of rows alone. How many there are is known to the device only, and the
host need not wait for it: two more calls find nothing to do, as a rule. Scores that are
bounded by FAR need no reference; in a backward pass the normalizers are known, and are
the references of rows that are done once.

Needs jax 0.11 or newer. Activations with learned segments take the XLA path.

Axes: N classes of words; P words and Q width, both padded to whole tiles; I tiles of
rows; J tiles of words.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from softbottle.ops.mixture import (
    blocked,
    exponential,
    hopper_kernel,
    likelihood,
    shards,
)
from softbottle.ops.mixture.activations import DEAD, LOG2_E, SOFTMAX
from softbottle.ops.mixture.implementation import Choice, Implementation
from softbottle.ops.mixture.options import note, product_dtype

# exp(40) leaves as much room again, on either side, for what E is multiplied with.
FAR = 40.0


def _lse(context_TKE, vocabulary, activation, options):
    return _scores(context_TKE, vocabulary, None, activation, options).lse_TK


def _scores(context_TKE, vocabulary, labels_T, activation, options, entropies=False):
    if _refused(context_TKE, vocabulary.table_VE, activation, options):
        plain = blocked.IMPLEMENTATION
        function = plain.entropies if entropies else plain.scores
        return function(context_TKE, vocabulary, labels_T, activation, options)
    inputs = shards.varying_together(context_TKE, vocabulary, labels_T)
    return _fused_scores(activation, options, entropies, *inputs)


_entropies = functools.partial(_scores, entropies=True)


def _loss(mixture, vocabulary, targets, activation, options, elsewhere=None):
    inputs = (mixture, vocabulary, targets, activation, options, elsewhere)
    if _refused(mixture.context_TKE, vocabulary.table_VE, activation, options):
        return blocked.IMPLEMENTATION.loss(*inputs)
    return exponential.loss(ROUTE, *inputs)


def _loss_and_argmax(mixture, vocabulary, targets, activation, options):
    inputs = (mixture, vocabulary, targets, activation, options)
    if _refused(mixture.context_TKE, vocabulary.table_VE, activation, options):
        return blocked.IMPLEMENTATION.loss_and_argmax(*inputs)
    return exponential.loss_and_argmax(ROUTE, *inputs)


def _choice(context_TKE, table_VE, activation, options):
    if _refused(context_TKE, table_VE, activation, options):
        return blocked.IMPLEMENTATION.choice(context_TKE, table_VE, activation, options)
    chunks = exponential.chunks(ROUTE, context_TKE, table_VE, options)
    return Choice("pallas_gpu", -(-context_TKE.shape[0] // chunks))


def _first_product(
    context_NRQ,
    table_NPQ,
    bias_NP,
    near_R,
    tilt_2R,
    activation,
    options,
    peaks,
    settled,
):
    """E, row sums, references and peaks; sizes are multiples of the tiles'.

    Rows and words of all classes are one below the other; tiles of E are those where a
    class's rows meet its words.
    """
    count, rows, width = context_NRQ.shape
    call = functools.partial(hopper_kernel.call, activation, options, classes=count)
    tables = (
        context_NRQ.reshape(count * rows, width),
        table_NPQ.reshape(-1, width),
        bias_NP.reshape(-1),
    )

    def by_class(array_R):
        return array_R.reshape(count, rows, *array_R.shape[1:])

    def result(e_RP, total_R, ref_R):
        # E with g' in its unit is E with a reference that is higher by the unit's log.
        unit = activation.slope_unit
        return map(by_class, (e_RP, total_R / unit, ref_R + math.log(unit)))

    near_R = jnp.tile(near_R, count)
    if tilt_2R is not None:
        tilt_2R = jnp.tile(tilt_2R, (1, count))
    if settled:
        e_RP, sum_JR = call(hopper_kernel.Inputs(*tables, near_R, tilt_2R))
        return *result(e_RP, jnp.sum(sum_JR, axis=0), near_R), None
    bounded = activation.bound is not None and activation.bound <= FAR
    # What is no number stays none.
    ref_R = jnp.where(jnp.isnan(near_R), near_R, 0.0) if bounded else near_R
    e_RP, sum_JR, *key_JR = call(hopper_kernel.Inputs(*tables, ref_R), peaks=peaks)
    total_R = jnp.sum(sum_JR, axis=0)
    if not bounded:
        far_R, which = far_tiles(total_R, hopper_kernel.BLOCK_ROWS)
        # What these give for other rows was never written.
        lse_R = combined(*call(hopper_kernel.Inputs(*tables, which=which)))
        ref_R = jnp.where(far_R, lse_R, near_R)
        redone = hopper_kernel.Inputs(*tables, ref_R, which=which, e_RP=e_RP)
        e_RP, _, *new_JR = call(redone, peaks=peaks)
        # Behind their normalizers exponentials add up to 1.
        total_R = jnp.where(far_R, 1.0, total_R)
        key_JR = [
            jnp.where(far_R[None], *both) for both in zip(new_JR, key_JR, strict=True)
        ]
    peak = jax.tree.map(by_class, _peak(key_JR[0], ref_R)) if peaks else None
    return *result(e_RP, total_R, ref_R), peak


def _peak(key_JR, ref_R):
    """The largest scores and their places, from the tiles' keys."""
    value_JR = key_JR & ~hopper_kernel.PLACE
    tile_R = jnp.argmax(value_JR, axis=0)
    key_R = jnp.take_along_axis(key_JR, tile_R[None], axis=0)[0]
    ahead_R = jnp.log(
        lax.bitcast_convert_type(key_R & ~hopper_kernel.PLACE, jnp.float32)
    )
    place_R = (
        tile_R * hopper_kernel.BLOCK_WORDS
        + hopper_kernel.PLACE
        - (key_R & hopper_kernel.PLACE)
    )
    return exponential.Peak(ref_R + ahead_R, place_R.astype(jnp.int32))


def far_tiles(
    total_R: jax.Array, tile_rows: int
) -> tuple[jax.Array, hopper_kernel.Which]:
    """The rows of tiles that are done again, and which tiles these are.

    Args:
        total_R: sums of exponentials.
        tile_rows: how many rows a tile has.
    """
    far_R = ~(total_R <= jnp.exp(FAR))
    far_I = jnp.any(far_R.reshape(-1, tile_rows), axis=1)
    # Sums over [I, I], each one kernel; a sort would be more.
    tile_I = jnp.arange(far_I.size, dtype=jnp.int32)
    upto_II = tile_I[None] <= tile_I[:, None]
    count_I = jnp.sum(far_I[None] & upto_II, axis=1, dtype=jnp.int32)
    before_II = count_I[None] <= tile_I[:, None]
    which = hopper_kernel.Which(count_I, jnp.sum(before_II, axis=1, dtype=jnp.int32))
    return jnp.repeat(far_I, tile_rows), which


def combined(top_JR: jax.Array, sum_JR: jax.Array) -> jax.Array:
    """Normalizers [R] from the maxima and sums of tiles, which are in base 2."""

    def join(one, other):
        top = jnp.maximum(one[0], other[0])
        return top, sum(part * jnp.exp2(high - top) for high, part in (one, other))

    # Both at once: one kernel, and one pass over what may be many tiles.
    none = (jnp.finfo(top_JR.dtype).min, jnp.zeros_like(sum_JR, shape=()))
    top_R, total_R = lax.reduce((top_JR, sum_JR), none, join, (0,))
    return (top_R + jnp.log2(total_R)) / LOG2_E


def _entropy(top_JR, sum_JR, moment_JR):
    """The rows' entropies, from what `_combined` takes and the tiles' moments."""
    top_R = jnp.max(top_JR, axis=0)
    behind_JR = top_JR - top_R[None]
    weight_JR = jnp.exp2(behind_JR)
    total_R = jnp.sum(sum_JR * weight_JR, axis=0)
    moment_R = jnp.sum((moment_JR + sum_JR * behind_JR) * weight_JR, axis=0)
    return (jnp.log2(total_R) - moment_R / total_R) / LOG2_E


ROUTE = exponential.Route(
    _first_product,
    _scores,
    (hopper_kernel.BLOCK_ROWS, hopper_kernel.BLOCK_WORDS, hopper_kernel.BLOCK_WIDTH),
    32,
)


def _tile_sums(activation, options, context_TKE, vocabulary, moments):
    """Maxima and sums of every row's tiles, [J, R], and moments if asked for."""
    tokens, components, width = context_TKE.shape
    table_VE, bias_V = vocabulary
    dtype = product_dtype(options, context_TKE, table_VE)
    live_V = shards.live_rows(table_VE.shape[0], options)
    bias_V = jnp.where(live_V, bias_V.astype(jnp.float32), DEAD)
    context_RE = context_TKE.reshape(tokens * components, width).astype(dtype)
    context_RQ = _pad(context_RE, hopper_kernel.BLOCK_ROWS, hopper_kernel.BLOCK_WIDTH)
    table_PQ = _pad(
        table_VE.astype(dtype), hopper_kernel.BLOCK_WORDS, hopper_kernel.BLOCK_WIDTH
    )
    more = table_PQ.shape[0] - bias_V.size
    bias_P = jnp.pad(bias_V, (0, more), constant_values=DEAD)
    # Kernel code is one for all uses; here the references are the tiles' own maxima.
    inputs = hopper_kernel.Inputs(context_RQ, table_PQ, bias_P)
    return hopper_kernel.call(activation, options, inputs, moments=moments)


def _by_token(array_R, context_TKE):
    tokens, components, _ = context_TKE.shape
    return array_R[: tokens * components].reshape(tokens, components)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _fused_scores(activation, options, entropies, context_TKE, vocabulary, labels_T):
    sums = _tile_sums(activation, options, context_TKE, vocabulary, entropies)
    lse_TK = _by_token(combined(*sums[:2]), context_TKE)
    words = (context_TKE, vocabulary, labels_T, activation, options)
    entropy_TK = _by_token(_entropy(*sums), context_TKE) if entropies else None
    return likelihood.with_own(lse_TK, *words, entropy_TK)


def _scores_forward(activation, options, entropies, *inputs):
    found = _fused_scores(activation, options, entropies, *inputs)
    return found, (*inputs, found)


def _scores_backward(activation, options, entropies, saved, bars):
    del entropies
    return *exponential.scores_backward(ROUTE, activation, options, saved, bars), None


_fused_scores.defvjp(_scores_forward, _scores_backward)


def _logits_and_lse(context_RE, table_PE, bias_P, options):
    """z and its log-sum-exp, of any number of rows; see `Implementation`."""
    rows = len(context_RE)
    inputs = hopper_kernel.Inputs(
        _pad(context_RE, hopper_kernel.BLOCK_ROWS, hopper_kernel.BLOCK_WIDTH),
        _pad(table_PE, hopper_kernel.BLOCK_WORDS, hopper_kernel.BLOCK_WIDTH),
        jnp.pad(
            bias_P, (0, -len(bias_P) % hopper_kernel.BLOCK_WORDS), constant_values=DEAD
        ),
    )
    top_JR, sum_JR, z_RP = hopper_kernel.call(SOFTMAX, options, inputs, logits=True)
    return z_RP[:rows, : len(table_PE)], combined(top_JR, sum_JR)[:rows]


def _refused(context_TKE, table_VE, activation, options):
    """Whether the kernel cannot do this; then why not goes to the log, once."""
    dtype = product_dtype(options, context_TKE, table_VE)
    reason = None
    name = activation.apply.__name__
    if activation.params:
        reason = f"the activation {name!r} has parameters to learn"
    elif activation.base2 is None:
        reason = f"the activation {name!r} has no form in base 2"
    elif dtype != jnp.bfloat16:
        reason = f"products are in {dtype}, not bfloat16"
    if reason:
        note(f"The head takes the XLA path: {reason}.")
    return reason is not None


def _pad(array_RE, rows, width):
    more = (-array_RE.shape[0] % rows, -array_RE.shape[1] % width)
    return jnp.pad(array_RE, ((0, more[0]), (0, more[1])))


IMPLEMENTATION = Implementation(
    _lse, _loss, _loss_and_argmax, _choice, _scores, _entropies, _logits_and_lse
)
