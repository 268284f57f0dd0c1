"""A run's validation perplexity against its epochs."""

import pathlib
from typing import Any

import matplotlib.figure

from softbottle import metrics


def draw(lines: list[dict[str, Any]], title: str) -> matplotlib.figure.Figure:
    """Validation perplexity by epoch; where weights are averaged it is theirs.

    Args:
        lines: a run's metrics, as `metrics.read` gives them.
        title: of the picture.

    Raises:
        ValueError: if the run was never validated.
    """
    points = [line for line in lines if line.get("valid_perplexity") is not None]
    if not points:
        raise ValueError("the run has no validation to draw.")
    figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for averaged, label in ((False, "weights"), (True, "averaged weights")):
        part = [line for line in points if line["averaging"] is averaged]
        if part:
            axes.plot(
                [line["epoch"] for line in part],
                [line["valid_perplexity"] for line in part],
                marker="o" if len(part) < 20 else None,
                label=label,
            )
    last = points[-1]
    axes.annotate(
        f"{last['valid_perplexity']:.2f}",
        (last["epoch"], last["valid_perplexity"]),
        xytext=(0, 8),
        textcoords="offset points",
        ha="right",
    )
    axes.set(xlabel="epoch", ylabel="validation perplexity", title=title, yscale="log")
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.yaxis.set_minor_formatter("{x:.0f}")
    axes.legend()
    return figure


def write(workdir: pathlib.Path, title: str) -> None:
    """Draw a run's curve into its folder."""
    draw(metrics.read(workdir), title).savefig(workdir / "valid.png", dpi=150)
