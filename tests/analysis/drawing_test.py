"""Names are shown as they are: a `$` in one begins no formula."""

import io

import matplotlib.figure
import numpy as np
import pytest

from softbottle.analysis import capture, curves, drawing, inspection, report
from softbottle.analysis.instruments import scaling, turns

HOSTILE = r"a$b$ $\frac$"
# Matplotlib writes "\$" as a dollar.
ESCAPED = HOSTILE.replace("$", r"\$")


def image(figure):
    buffer = io.BytesIO()
    figure.savefig(buffer, format="rgba", dpi=50)
    return buffer.getvalue()


def drawn(kind, name):
    figure = kind(figsize=(5, 3), layout="constrained")
    axes = figure.subplots()
    axes.semilogy([1e-7, 1, 1e7], label=name)
    axes.set(xlabel=name, ylabel=name, title=name)
    axes.annotate(name, (1, 1))
    axes.legend(title=name)
    figure.suptitle(name)
    return figure


@pytest.mark.slow
def test_a_dollar_is_drawn_as_a_dollar_and_ticks_as_powers():
    plain = matplotlib.figure.Figure
    expected = image(drawn(plain, ESCAPED))
    assert image(drawn(drawing.Figure, HOSTILE)) == expected
    assert image(drawn(drawing.Figure, "x")) == image(drawn(plain, "x")) != expected


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
    return capture.of_softmax(
        HOSTILE,
        random.normal(size=(17, 5)).astype(np.float32),
        None,
        states,
        ids[1:],
        random.normal(size=(2, 3, 4, 8)),
        ids,
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
def test_reports_on_things_with_strange_names_are_written(name, tmp_path):
    path = tmp_path / HOSTILE
    path.write_text("a b a c a b " * 20)
    report.write(tmp_path / "out", HOSTILE, SECTIONS[name](path))
    assert HOSTILE in (tmp_path / "out" / "report.html").read_text()


def test_the_curve_of_a_run_with_a_strange_name_is_drawn():
    figure = curves.draw(make_lines([9.0, 4.0]), HOSTILE)
    assert len(image(figure)) > 1000
