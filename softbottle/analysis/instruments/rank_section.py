"""The section on ranks: spectra, what limits them, and what to make of it."""

import numpy as np

from softbottle import drawing
from softbottle.analysis import report
from softbottle.analysis.instruments import mixture, rank

ABOUT = report.About(
    "The log-probabilities of every word at every position are a matrix, and its rank "
    "counts the independent directions in which the predictions differ.",
    "A rank that equals the softmax's bound says that the output layer is the limit, "
    "and a head without that bound has room; how much of it pays, only training "
    "tells.",
    "What a softmax head's log-probabilities span",
)
_LIFTED = "its logits are no single product with the table, which lifts that bound; "
_LIMITED = {
    None: "",
    "positions": "the sample is the limit here, not the head: {:,} positions can show "
    "no more, and a larger sample would (--positions); ",
    "words": "the vocabulary is the limit here, not the head: {:,} words can show no "
    "more; ",
}


def section(heads: dict[str, rank.HeadRanks]) -> report.Section:
    """Heads side by side: their ranks, spectra, divergences and mixtures."""
    lines = [
        f"{name}: rank {head.rank:,} of at most "
        f"{min(head.ranks.shape):,}, where a softmax of its width stops at "
        f"{head.bound:,}; {_LIFTED if head.lifted else ''}"
        f"{_LIMITED[head.limit].format(min(head.ranks.shape))}two contexts differ by "
        f"{head.kl:.2f} nats on average."
        for name, head in heads.items()
    ]
    remarks = (
        "Go by the tolerance of the precision the entries were computed in: a finer "
        "one counts rounding, a coarser one overlooks. Rank is room, not quality."
    )
    lines.append(remarks)
    numbers = {name: _numbers(head) for name, head in heads.items()}
    figures = [_draw_spectra(heads)]
    mixed = {name: head.mixing for name, head in heads.items() if head.mixing}
    if mixed:
        figures.append(mixture.draw(mixed))
    for name, head in heads.items():
        if head.loss is not None:
            whose = "Its loss" if len(heads) == 1 else f"The loss of {name}"
            lines.append(f"{whose} on this text is {head.loss:.3f} nats per token.")
    return report.Section(
        "Rank",
        " ".join(lines),
        figures,
        numbers,
        tables=[_table(heads)],
        remarks=remarks,
        key={name: _key(head) for name, head in heads.items()},
        verdicts={name: verdict(head) for name, head in heads.items()},
    )


def verdict(head: rank.HeadRanks) -> str:
    """What the rank says of a model, in one clause."""
    if head.rank > head.bound:
        return (
            f"has rank {head.rank:,}, where a softmax of its width stops at "
            f"{head.bound:,}: no bottleneck of rank"
        )
    least = min(head.ranks.shape)
    if head.limit == "positions":
        return (
            f"has rank {head.rank:,} in a sample of {least:,} positions, too few to "
            f"tell whether it would reach the {head.bound:,} of a softmax of its width"
        )
    if head.limit == "words":
        return f"has rank {head.rank:,} of {least:,} words: its width is no limit here"
    if head.mixing is not None or head.lifted:
        return (
            f"has rank {head.rank:,}, within the {head.bound:,} of a softmax of its "
            "width: its head does not use the room that it has"
        )
    used = f"uses {head.rank:,} of {head.bound:,} dimensions"
    if head.rank == head.bound:
        return f"{used}: at its bottleneck"
    idle = head.bound - head.rank
    return f"{used}: {idle:,} {'is' if idle == 1 else 'are'} idle"


def _key(head):
    """Cells of the table of models."""
    loss = {} if head.loss is None else {"loss (nats)": f"{head.loss:.3f}"}
    return loss | {
        "rank of log P": f"{head.rank:,}",
        "softmax's bound": f"{head.bound:,}",
        "effective rank": f"{head.ranks.effective[rank.LOSSES[0]]:,}",
    }


def _table(heads):
    """What the sentences tell, and what limits a rank before the head does."""
    limits = {None: "its head", "positions": "the sample", "words": "the vocabulary"}
    return report.Table(
        (
            *("model", "rank of log P", "a softmax of its width stops at"),
            *(f"directions with {100 * (1 - loss):g}% of it" for loss in rank.LOSSES),
            *("limited by", "two contexts differ by (nats)", "loss (nats)"),
        ),
        [
            (
                *(name, f"{head.rank:,}", f"{head.bound:,}"),
                *(f"{head.ranks.effective[loss]:,}" for loss in rank.LOSSES),
                limits[head.limit],
                f"{head.kl:.2f}",
                "–" if head.loss is None else f"{head.loss:.3f}",
            )
            for name, head in heads.items()
        ],
    )


def _numbers(head):
    numbers = head._asdict() | {"ranks": head.ranks._asdict(), "limit": head.limit}
    if head.mixing:
        numbers["mixing"] = head.mixing._asdict()
    if head.loss is None:
        del numbers["loss"]
    return numbers


def _draw_spectra(heads):
    figure = drawing.Figure(figsize=(6.4, 4.2))
    axes = figure.subplots()
    lowest = max(rank.floor(head.ranks) for head in heads.values())
    for name, head in heads.items():
        relative = head.ranks.sigma / head.ranks.sigma[0]
        relative = relative[relative > lowest]
        if len(relative) < len(head.ranks.sigma):
            relative = np.append(relative, lowest)  # a fall out of sight, and no more
        label = name if len(heads) > 1 else None
        (line,) = axes.loglog(np.arange(1, len(relative) + 1), relative, label=label)
        tolerance = head.ranks.tolerances[head.ranks.precision] / head.ranks.sigma[0]
        axes.axhline(tolerance, color=line.get_color(), linestyle=":")
    for bound in sorted({head.bound for head in heads.values()}):
        axes.axvline(bound, color=drawing.GRAY, linestyle="--", lw=1)
        axes.annotate(
            f"{bound:,}",
            (bound, 1.0),
            (3, -3),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            va="top",
            fontsize=drawing.SMALL,
            color=drawing.GRAY,
        )
    axes.set(xlabel="index, from 1", ylabel="singular value over the largest")
    axes.set_ylim(lowest, 2)
    drawing.plain(axes.xaxis)
    drawing.label(axes)
    reading = (
        "Dashed: the rank at which a softmax of this width stops. A cliff there is the "
        "bottleneck. Dotted: the tolerance, below which there is rounding. The axis "
        "ends where singular values are no longer resolved."
    )
    return report.Figure("rank-spectrum", figure, reading)
