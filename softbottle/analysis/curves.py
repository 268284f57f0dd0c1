"""Validation perplexity along the training: of one run, or of several."""

import pathlib
from typing import Any

from softbottle import drawing
from softbottle.analysis import report
from softbottle.analysis.capture import Capture, present
from softbottle.analysis.settings import Settings
from softbottle.training import metrics

ABOUT = report.About(
    "Perplexity on the validation text along the training: the number of equally "
    "likely words between which one would be as unsure as the model.",
    "Compare runs where their curves have flattened; where one turns up again, stop "
    "earlier or regularize more.",
    "Loss and perplexity",
)


def validations(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of a run's metrics that tell a finite validation perplexity."""
    return [line for line in lines if line.get("valid_perplexity") is not None]


def draw(lines: list[dict[str, Any]], title: str) -> drawing.Figure:
    """Validation perplexity by epoch; where weights are averaged it is theirs.

    It is by step where an epoch has several validations (`train.eval_every`).

    Args:
        lines: a run's metrics, as `metrics.read` gives them.
        title: of the picture.

    Raises:
        ValueError: if the run was never validated.
    """
    points = validations(lines)
    if not points:
        raise ValueError("the run has no validation to draw.")
    figure = drawing.Figure()
    axes = figure.subplots()
    # Epochs are whole numbers: several validations in one would lie above each other.
    distinct = len({line["epoch"] for line in points}) == len(points)
    place = "epoch" if distinct else "step"
    for averaged, name in ((False, "weights"), (True, "averaged weights")):
        part = [line for line in points if line["averaging"] is averaged]
        if part:
            axes.plot(
                [line[place] for line in part],
                [line["valid_perplexity"] for line in part],
                marker="o" if len(part) < 20 else None,
                label=f"{name}: {part[-1]['valid_perplexity']:.2f}",
            )
    axes.set(xlabel=place, ylabel="validation perplexity", title=title, yscale="log")
    drawing.plain(axes.yaxis)
    drawing.label(axes)
    return figure


def compare(runs: dict[str, list[dict[str, Any]]]) -> drawing.Figure:
    """Validation perplexity of several runs against the tokens they have seen.

    Args:
        runs: by name, a run's metrics, with a validation or more; padding counts
            among the tokens.
    """
    figure = drawing.Figure(figsize=(6.4, 4.0))
    axes = figure.subplots()
    measured = {name: validations(lines) for name, lines in runs.items()}
    if all(len(points) < 2 for points in measured.values()):
        # Single points are an empty plane.
        last = {name: p[-1]["valid_perplexity"] for name, p in measured.items()}
        drawing.bars(axes, last, "{:.2f}")
        axes.set(xlabel="validation perplexity")
        return figure
    for name, lines in runs.items():
        data = lines[0]["start"]["config"]["data"]
        points = measured[name]
        axes.plot(
            [line["step"] * data["rows"] * data["length"] / 1e6 for line in points],
            [line["valid_perplexity"] for line in points],
            marker="o" if len(points) < 20 else None,
            markersize=4,
            label=f"{name}: {points[-1]['valid_perplexity']:.2f}",
        )
    axes.set(xlabel="million tokens", ylabel="validation perplexity", yscale="log")
    drawing.plain(axes.yaxis)
    drawing.label(axes)
    return figure


def section(runs: dict[str, list[dict[str, Any]]]) -> report.Section:
    """Runs side by side, with the last and the best perplexity of each."""
    perplexity = {
        name: [line["valid_perplexity"] for line in validations(lines)]
        for name, lines in runs.items()
    }
    numbers = {
        name: {"last": values[-1], "best": min(values)}
        for name, values in perplexity.items()
    }
    ends = "; ".join(
        f"{name} {values['last']:.2f} at its end, {values['best']:.2f} at its best"
        for name, values in numbers.items()
    )
    reading = (
        "Where a curve turns up again, the model learns its training text by heart."
    )
    if all(len(values) < 2 for values in perplexity.values()):
        reading = "The only validation of each run."
    figures = [report.Figure("validation", compare(runs), reading)]
    table = report.Table(
        ("run", "at its end", "at its best"),
        [
            (name, f"{values['last']:.2f}", f"{values['best']:.2f}")
            for name, values in numbers.items()
        ],
    )
    key = {
        name: {"validation perplexity": f"{values['best']:.2f}"}
        for name, values in numbers.items()
    }
    return report.Section(
        "Validation perplexity",
        f"{ends}.",
        figures,
        numbers,
        tables=[table],
        remarks="",
        key=key,
    )


def of_capture(capture: Capture, settings: Settings) -> list[dict[str, Any]]:
    """The metrics of a run that was validated."""
    del settings
    return present("validations", capture.validations)


def write(workdir: pathlib.Path, title: str) -> None:
    """Draw a run's curve into its folder."""
    draw(metrics.read(workdir), title).save(workdir / "valid.png")
