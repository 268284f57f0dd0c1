"""Names are shown as they are: a `$` in one begins no formula."""

import io

import matplotlib.figure
import matplotlib.text
import numpy as np
import pytest

from softbottle import drawing
from softbottle.analysis import capture, curves, inspection, report
from softbottle.analysis.instruments import scaling, turns
from tests import pictures

HOSTILE = r"a$b$ $\frac$"
# Matplotlib writes "\$" as a dollar.
ESCAPED = HOSTILE.replace("$", r"\$")


def image(figure):
    buffer = io.BytesIO()
    figure.savefig(buffer, format="rgba", dpi=50)
    return buffer.getvalue()


def drawn(kind, name):
    figure = kind(figsize=(5, 3))
    axes = figure.subplots()
    axes.semilogy([1e-7, 1, 1e7], label=name)
    axes.set(xlabel=name, ylabel=name)
    axes.annotate(name, (1, 1))
    axes.legend(title=name)
    figure.suptitle(name)
    return figure


class Formulas(drawing.Figure):
    """The same style, with what Matplotlib makes of a `$`."""

    draw = matplotlib.figure.Figure.draw


@pytest.mark.slow
def test_a_dollar_is_drawn_as_a_dollar_and_ticks_as_powers():
    expected = image(drawn(Formulas, ESCAPED))
    assert image(drawn(drawing.Figure, HOSTILE)) == expected
    assert image(drawn(drawing.Figure, "x")) == image(drawn(Formulas, "x")) != expected


def names_of(axes):
    figure = axes.figure
    figure.draw_without_rendering()
    extent = matplotlib.text.Text.get_window_extent  # an annotation adds its leader
    boxes = {text.get_text(): extent(text) for text in axes.texts}
    return boxes, axes.get_window_extent()


def test_few_lines_are_named_at_their_ends_apart_and_in_their_colors():
    axes = drawing.Figure().subplots()
    for name, end in (("upper", 1.001), ("lower", 1.0), ("third", 3.0)):
        axes.plot([0, 1], [0, end], label=name)
    axes.plot([0, 0.5], [2.0, 2.5], label="short")
    axes.plot([0, 1], [1, 2])
    drawing.label(axes)
    assert axes.get_legend() is None
    boxes, frame = names_of(axes)
    assert set(boxes) == {"upper", "lower", "third", "short"}
    assert boxes["lower"].y1 <= boxes["upper"].y0 < boxes["third"].y0
    assert boxes["upper"].x0 > frame.x1 > boxes["short"].x1
    assert boxes["upper"].x1 < axes.figure.bbox.x1, "constrained layout made room"
    colors = {text.get_text(): text.get_color() for text in axes.texts}
    for line in axes.lines[:4]:
        assert colors[line.get_label()] == line.get_color()


@pytest.mark.parametrize("names", [list("abcdefg"), ["x" * 31]])
def test_many_lines_or_a_long_name_get_a_legend(names):
    axes = drawing.Figure().subplots()
    for name in names:
        axes.plot([0, 1], [0, 1], label=name)
    drawing.label(axes)
    shown = [text.get_text() for text in axes.get_legend().get_texts()]
    assert shown == names and not axes.texts


def test_how_many_lines_are_few_can_be_said():
    axes = drawing.Figure().subplots()
    for place, name in enumerate("abcdefg"):
        axes.plot([0, 1], [0, place], label=name)
    drawing.label(axes, most=7)
    assert axes.get_legend() is None and len(axes.texts) == 7


def test_bars_get_a_legend_and_lines_out_of_view_no_name():
    bars, lines = drawing.Figure().subplots(1, 2)
    bars.bar([0, 1], [1, 2], label="bars")
    drawing.label(bars)
    assert bars.get_legend()
    lines.plot([0, 1], [5, 6], label="out")
    lines.plot([0, 1, 2], [0, 1, np.nan], label="ends early")
    lines.set(ylim=(0, 2), xlim=(0, 1.1))
    drawing.label(lines)
    assert [text.get_text() for text in lines.texts] == ["ends early"]


def test_a_notebook_shows_the_figure():
    figure = drawing.Figure(figsize=(1, 1))
    assert figure._repr_png_() == figure.png()


def make_lines(perplexities):
    data = {"rows": 2, "length": 5}
    lines = [{"start": {"config": {"data": data}}}]
    return lines + [
        {"step": at, "epoch": at, "averaging": False, "valid_perplexity": value}
        for at, value in enumerate(perplexities)
    ]


def make_capture():
    random = np.random.default_rng(0)
    states = [random.normal(size=(24, 5)).astype(np.float32) for _ in range(3)]
    ids = random.integers(0, 17, 25)
    return capture.Capture.from_states(
        states,
        random.normal(size=(17, 5)).astype(np.float32),
        labels=ids[1:],
        name=HOSTILE,
        logits_LWHS=random.normal(size=(2, 3, 4, 8)),
        ids=ids,
    )


def run_section():
    steps = np.arange(0.0, 12.0)
    found = turns.Curves(*np.abs(np.stack([steps, *3 * [np.cos(steps)]])))
    return turns.section({HOSTILE: found})


SECTIONS = {
    "curves": lambda path: [curves.section({HOSTILE: make_lines([9.0, 4.0])})],
    "captured": lambda path: inspection.of_pretrained(make_capture()),
    "texts": lambda path: inspection.of_texts([path], vocab=9),
    "training": lambda path: [run_section()],
    "scaling": lambda path: [
        scaling.of_models(
            np.array([1e7, 3e7, 1e9, 3e9]),
            np.full(4, 1e11),
            np.array([3.0, 2.8, 2.5, 2.4]),
            [HOSTILE, "b", "c", "d"],
        )
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SECTIONS)
def test_reports_on_things_with_strange_names_are_written(name, tmp_path, monkeypatch):
    pictures.lay_out_only(monkeypatch)
    path = tmp_path / HOSTILE
    path.write_text("a b a c a b " * 20)
    report.write(tmp_path / "out", HOSTILE, SECTIONS[name](path))
    assert HOSTILE in (tmp_path / "out" / "report.html").read_text()


def test_the_curve_of_a_run_with_a_strange_name_is_drawn():
    figure = curves.draw(make_lines([9.0, 4.0]), HOSTILE)
    assert len(image(figure)) > 1000


def test_no_two_of_many_lines_are_alike():
    axes = drawing.Figure().subplots()
    lines = [axes.plot([0, 1], [n, n])[0] for n in range(14)]
    looks = {(line.get_color(), line.get_linestyle()) for line in lines}
    assert len(looks) == len(lines)
    assert all(line.get_linestyle() == "-" for line in lines[:7])


def test_numbers_between_decades_are_shown_where_there_is_one():
    figure = drawing.Figure()
    short, long = figure.subplots(1, 2)
    labels = []
    for axes, low, high in ((short, 2, 6), (long, 0.9, 12_000)):
        axes.set(yscale="log", ylim=(low, high))
        drawing.plain(axes.yaxis)
        figure.png()
        labels.append(
            {
                text.get_text()
                for text in axes.yaxis.get_ticklabels(which="both")
                if low <= text.get_position()[1] <= high and text.get_text()
            }
        )
    assert labels[0] == {"2", "3", "4", "5", "6"}
    assert {"1", "10,000"} <= labels[1] <= {"1", "10", "100", "1,000", "10,000"}
