"""Losses of a mixture in torch, by torch itself and by libraries.

    naive      softmax of every component in full, mixed, then the logarithm: what the
               MoS authors' own code does
    compile    log-sum-exp in log space, the label's logit gathered, torch.compile
    cce        Cut Cross-Entropy on all rows, mixed afterwards
    liger      Liger's fused linear cross-entropy in Triton: its own mean of one
               component, else a loss per row, mixed afterwards
    liger-cute, liger-rows   those that Liger has for Hopper in CuTe: the mean of one
               component; a loss per row, mixed afterwards
    quack      QuACK's chunked linear cross-entropy: the mean of one component
    quack-rows torch's product and QuACK's cross-entropy of each row, mixed afterwards

Libraries are imported where they are called: one that is missing, or that refuses the
device or the sizes, costs its own rows.

Axes: R rows of a GEMM.
"""

import functools
import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F


def make_loss(peer: str) -> Callable[..., torch.Tensor]:
    """(log_prior, context, table, bias, labels) -> mean nll, a variant's way."""
    if peer == "compile":
        torch._dynamo.reset()
        return torch.compile(_log_space, dynamic=False)
    return LOSSES[peer]


def _naive(log_prior_TK, context_TKE, table_VE, bias_V, labels_T):
    logit_TKV = F.linear(context_TKE, table_VE, bias_V)
    prior_TK = log_prior_TK.exp().to(logit_TKV.dtype)
    p_TV = (F.softmax(logit_TKV, -1) * prior_TK[:, :, None]).sum(1)
    # The authors' guard against log 0; it flattens words less likely than 1e-8.
    return F.nll_loss(torch.log(p_TV + 1e-8).float(), labels_T)


def _log_space(log_prior_TK, context_TKE, table_VE, bias_V, labels_T):
    logit_TKV = F.linear(context_TKE, table_VE, bias_V)
    lse_TK = torch.logsumexp(logit_TKV.float(), -1)
    index_TK1 = labels_T[:, None, None].expand(*log_prior_TK.shape, 1)
    score_TK = logit_TKV.gather(2, index_TK1).squeeze(2).float()
    return -torch.logsumexp(log_prior_TK + score_TK - lse_TK, -1).mean()


def _cut_cross_entropy(log_prior_TK, context_TKE, table_VE, bias_V, labels_T):
    from cut_cross_entropy import linear_cross_entropy

    def nll(context_RE, labels_R):
        table, options = table_VE, {}
        if "bias" in inspect.signature(linear_cross_entropy).parameters:
            options["bias"] = bias_V
        else:
            # Releases before the bias: it is one more column, in a block of zeros.
            table = F.pad(torch.cat([table_VE, bias_V[:, None]], 1), (0, 15))
            context_RE = F.pad(F.pad(context_RE, (0, 1), value=1.0), (0, 15))
        return linear_cross_entropy(
            context_RE, table, labels_R, reduction="none", **options
        )

    return _mixed(log_prior_TK, context_TKE, labels_T, nll)


def _liger(log_prior_TK, context_TKE, table_VE, bias_V, labels_T):
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    def nll(context_RE, labels_R, reduction="none"):
        return liger_fused_linear_cross_entropy(
            context_RE, table_VE, labels_R, bias_V, reduction=reduction
        )

    if log_prior_TK.shape[1] > 1:
        return _mixed(log_prior_TK, context_TKE, labels_T, nll)
    # The gradient of a mean is computed in the forward pass, without a second look.
    mean = functools.partial(nll, reduction="mean")
    return _single(log_prior_TK, context_TKE, labels_T, mean)


def _liger_cute(log_prior_TK, context_TKE, table_VE, _, labels_T):
    from liger_kernel.ops.cutedsl.ops import fused_linear_cross_entropy_sm90 as hopper

    def mean(context_TE, labels_T):
        return hopper.liger_fused_linear_cross_entropy_sm90(
            context_TE, table_VE, labels_T, reduction="mean"
        )

    return _single(log_prior_TK, context_TKE, labels_T, mean)


def _liger_rows(log_prior_TK, context_TKE, table_VE, _, labels_T):
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as function

    def nll(context_RE, labels_R):
        return function.apply(context_RE, table_VE, labels_R)

    return _mixed(log_prior_TK, context_TKE, labels_T, nll)


def _quack(log_prior_TK, context_TKE, table_VE, _, labels_T):
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def mean(context_TE, labels_T):
        return chunked_linear_cross_entropy(
            context_TE, table_VE, labels_T, reduction="mean"
        )

    return _single(log_prior_TK, context_TKE, labels_T, mean)


def _quack_rows(log_prior_TK, context_TKE, table_VE, bias_V, labels_T):
    from quack.linear_cross_entropy import linear_cross_entropy_func

    def nll(context_RE, labels_R):
        # In place: the logits' gradient takes the place of the logits.
        return linear_cross_entropy_func(
            context_RE,
            table_VE,
            bias_V,
            labels_R,
            reduction="none",
            inplace_backward=True,
        )

    return _mixed(log_prior_TK, context_TKE, labels_T, nll)


def _mixed(log_prior_TK, context_TKE, labels_T, nll):
    """The mean nll of a mixture from the losses of its rows (token, component).

    nll[t] = -logsumexp_k(log_prior[t, k] - nll[t, k]): the cotangent that reaches a row
    is the posterior of its component.
    """
    tokens, components = log_prior_TK.shape
    context_RE = context_TKE.reshape(tokens * components, -1)
    nll_R = nll(context_RE, labels_T.repeat_interleave(components))
    nll_TK = nll_R.reshape(tokens, components).float()
    return -torch.logsumexp(log_prior_TK - nll_TK, -1).mean()


def _single(log_prior_TK, context_TKE, labels_T, mean):
    """The mean nll of one component, by a mean that a library takes itself."""
    return mean(context_TKE.squeeze(1), labels_T).float() - log_prior_TK.mean()


LOSSES = {
    "naive": _naive,
    "cce": _cut_cross_entropy,
    "liger": _liger,
    "liger-cute": _liger_cute,
    "liger-rows": _liger_rows,
    "quack": _quack,
    "quack-rows": _quack_rows,
}
