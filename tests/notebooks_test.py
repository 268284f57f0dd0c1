"""Notebooks run from their sources, show what they say, and match their .ipynb.

A notebook is a pair: a .py file of cells, which is the source, and the .ipynb that
`jupytext --to ipynb --execute` makes of it, with outputs. Here the cells of the source
are run in one namespace, as a kernel would but for a few sizes, and what a cell ends
with is drawn.
"""

import ast
import json
import re
import tempfile

import jax
import pytest

from tests import ROOT, pictures

SOURCES = sorted((ROOT / "notebooks").glob("*.py"))


def cells(source):
    """(kind, text, line) of each cell in the percent format."""
    text = source.read_text()
    marks = [*re.finditer(r"^# %%( \[markdown\])?\n", text, re.M)]
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    for mark, end in zip(marks, ends, strict=True):
        body = text[mark.end() : end].strip("\n")
        line = text.count("\n", 0, mark.end())
        if mark[1]:
            body = "\n".join(row.removeprefix("#")[1:] for row in body.split("\n"))
        yield "markdown" if mark[1] else "code", body, line


# Sizes that a test takes time with and no claim depends on, and those it takes instead.
SMALLER = {
    "bottleneck": {"steps=500": "steps=250"},
    "model": {
        **{"vocab, dim = 1000": "vocab, dim = 400", "tokens=256": "tokens=64"},
        "steps = 200": "steps = 120",
    },
    "pretrained": {"most_common(800)": "most_common(300)"},
    "pretrained_head": {", 800\n": ", 300\n"},
}


def run(source):
    """The namespace after all cells; what a notebook would draw is drawn."""
    namespace = {"__name__": source.stem}
    code = [cell for cell in cells(source) if cell[0] == "code"]
    changes = SMALLER.get(source.stem, {})
    for size in changes:
        assert sum(body.count(size) for _, body, _ in code) == 1, size
    for _, body, line in code:
        for size, smaller in changes.items():
            body = body.replace(size, smaller)
        tree = ast.parse("\n" * line + body)
        last = tree.body[-1]
        shown = tree.body.pop() if isinstance(last, ast.Expr) else None
        exec(compile(tree, str(source), "exec"), namespace)
        if shown is not None:
            expression = compile(ast.Expression(shown.value), str(source), "eval")
            value = eval(expression, namespace)
            if hasattr(value, "_repr_png_"):
                assert value._repr_png_().startswith(b"\x89PNG")
    return namespace


def bottleneck(names):
    kl, ranks, bound = names["kl"], names["ranks"], names["width"] + 2
    assert kl["mos"] < kl["wide softmax"] < kl["softmax"]
    assert ranks["softmax"] == ranks["moc"] == bound < ranks["mos"] == ranks["truth"]


def model(names):
    for curve in names["losses"].values():
        assert curve[-20:].mean() < curve[:20].mean() - 1
    memory = names["memory"]
    assert memory["softbottle"] < memory["written out"] / 8


def pretrained(names):
    numbers = names["rank"].numbers
    for width in (16, 64):
        assert numbers[f"{width}-wide"]["ranks"]["ranks"]["float32"] == width + 2
    assert numbers["64-wide"]["loss"] < numbers["16-wide"]["loss"]
    assert (names["folder"] / "report.html").exists()


def pretrained_head(names):
    before, curves = names["before"], names["curves"]
    for name, curve in curves.items():
        assert before[name] == pytest.approx(before["the model"], abs=1e-5)
        assert curve[0] == pytest.approx(before["the model"], abs=1e-5)
    for name in ("mos", "partition"):
        assert curves[name][-1] < before["the model"] - 0.05


# What each says of its outputs.
CHECKS = (bottleneck, model, pretrained, pretrained_head)
CLAIMS = {check.__name__: check for check in CHECKS}


@pytest.mark.slow
@pytest.mark.usefixtures("quick_keys")
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_notebook_runs_and_shows_what_it_says(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pictures.lay_out_only(monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # What a user's own program has.
    with jax.numpy_rank_promotion("allow"):
        names = run(source)
    CLAIMS[source.stem](names)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_the_notebook_beside_a_source_has_its_cells_and_their_outputs(source):
    stored = json.loads(source.with_suffix(".ipynb").read_text())["cells"]
    pair = [(cell["cell_type"], "".join(cell["source"])) for cell in stored]
    assert pair == [(kind, body) for kind, body, _ in cells(source)]
    code = [cell for cell in stored if cell["cell_type"] == "code"]
    counts = [cell["execution_count"] for cell in code]
    assert counts == list(range(1, len(code) + 1)), "run from top to bottom, once"
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [one for one in outputs if one["output_type"] == "error"]
    assert any("image/png" in one.get("data", {}) for one in outputs)


def test_every_notebook_has_a_source():
    stored = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert stored == {source.stem for source in SOURCES} == set(CLAIMS)
