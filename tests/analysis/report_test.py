"""The report: one page that holds everything, and the numbers beside it."""

import json
import math
import re
import urllib.parse

import numpy as np
import pytest

from softbottle import drawing
from softbottle.analysis import report
from tests import ROOT


def make_section(name="a-curve", numbers=None):
    figure = drawing.Figure()
    figure.subplots().plot([1, 2, 3])
    reading = "It rises <always> & everywhere."
    numbers = {"slope": 1.5} if numbers is None else numbers
    return report.Section(
        "Slopes", reading, [report.Figure(name, figure, reading)], numbers
    )


def test_the_page_is_self_contained_and_escapes_what_it_is_told(tmp_path):
    report.write(tmp_path, "A <run>", [make_section()])
    page = (tmp_path / "report.html").read_text()
    assert "<h1>A &lt;run&gt;</h1>" in page
    assert "It rises &lt;always&gt; &amp; everywhere." in page
    assert 'src="data:image/png;base64,' in page
    assert "http" not in page.replace("http-equiv", "")
    assert (tmp_path / "a-curve.png").read_bytes().startswith(b"\x89PNG")


def test_an_instrument_explains_itself_before_it_tells_what_it_found(tmp_path):
    about = report.About("How steep <it> is.", "Mind your step.")
    bare = make_section("other")._replace(title="Bare")
    report.write(tmp_path, "A run", [make_section()._replace(about=about), bare])
    page = (tmp_path / "report.html").read_text()
    first, second = page.split("<h2>Bare</h2>")
    assert first.index("How steep &lt;it&gt; is.") < first.index("It rises")
    assert "What it means for you:</strong> Mind your step." in first
    assert "What it means for you" not in second


def test_the_numbers_are_json_whatever_numpy_calls_them(tmp_path):
    numbers = {"rank": np.int64(3), "sigma": np.arange(2.0), "gap": math.inf}
    report.write(tmp_path, "A run", [make_section(numbers=numbers)])
    stored = json.loads((tmp_path / "report.json").read_text())
    assert stored == {"Slopes": {"rank": 3, "sigma": [0.0, 1.0], "gap": None}}


def test_a_long_list_is_cut_on_the_page_and_whole_in_the_file(tmp_path):
    report.write(tmp_path, "A run", [make_section(numbers={"all": list(range(40))})])
    assert "(28 more)" in (tmp_path / "report.html").read_text()
    assert (
        len(json.loads((tmp_path / "report.json").read_text())["Slopes"]["all"]) == 40
    )


def test_what_was_read_stands_beneath_the_title(tmp_path):
    report.write(tmp_path, "A run", [make_section()], ["Text: <a>.", "No token."])
    page = (tmp_path / "report.html").read_text()
    header = page[page.index("</h1>") : page.index("<section>")]
    assert "<li>Text: &lt;a&gt;.</li><li>No token.</li>" in header
    stored = json.loads((tmp_path / "report.json").read_text())
    assert stored["header"] == ["Text: <a>.", "No token."]


def test_figures_of_one_name_and_bad_names_are_errors(tmp_path):
    with pytest.raises(ValueError, match="different names"):
        report.write(tmp_path, "A run", [make_section(), make_section()])
    with pytest.raises(ValueError, match="letters, digits"):
        report.write(tmp_path, "A run", [make_section("../escape")])
    with pytest.raises(ValueError, match="needs sections"):
        report.write(tmp_path, "A run", [])


def make_opening():
    table = report.Table(("model", "width", "loss"), [("a <b>", "7", "3.10")])
    return report.Opening(table, {"a <b>": "uses 9 of 9 dimensions."}, ["Only <one>."])


def test_the_page_opens_with_models_verdicts_and_links_to_its_sections(tmp_path):
    sections = [
        make_section(f"figure-{at}")._replace(title=title)
        for at, title in enumerate(("Rank", "What can be on top", "Left out"))
    ]
    report.write(tmp_path, "Models", sections, ["Text: a."], make_opening())
    page = (tmp_path / "report.html").read_text()
    first = page[page.index("</h1>") : page.index("<section>")]
    assert first.index("Text: a.") < first.index("<td") < first.index("uses 9 of 9")
    assert '<th data-head="model">a &lt;b&gt;</th>' in first
    assert '<td data-head="loss">3.10</td>' in first
    assert "<strong>a &lt;b&gt;</strong> uses 9 of 9 dimensions." in first
    assert "Only &lt;one&gt;." in first
    for anchor in ("rank", "what-can-be-on-top", "left-out"):
        assert f'href="#{anchor}"' in first and f'id="{anchor}"' in page
    stored = json.loads((tmp_path / "report.json").read_text())
    assert stored["models"] == {
        "a <b>": {"width": "7", "loss": "3.10", "verdict": "uses 9 of 9 dimensions."}
    }


def test_tables_stand_where_sentences_would_run_together(tmp_path):
    rows = [(f"model {at}", str(at)) for at in range(30)]
    tables = [report.Table(("model", "rank"), some) for some in (rows[:2], rows)]
    section = make_section()._replace(tables=tables, remarks="In short.")
    report.write(tmp_path, "Models", [section])
    page = (tmp_path / "report.html").read_text()
    body = page[page.index("<h2>Slopes") :]
    assert "<p>In short.</p>" in body and body.count("model 1<") == 2
    # The reading is for the terminal; a long table is no row of cards.
    assert "<p>It rises" not in body
    assert body.count('class="cells cards"') == 1 and body.count('class="cells"') == 1


def test_an_instrument_is_linked_to_the_theory_that_explains_it(tmp_path):
    about = report.About("How steep.", "Mind.", "What a softmax head's sums span")
    folder = tmp_path / "a b" / "out"
    report.write(folder, "A run", [make_section()._replace(about=about)])
    page = (folder / "report.html").read_text()
    (found,) = re.findall(r'href="([^"#]*)#what-a-softmax-heads-sums-span"', page)
    linked = folder / urllib.parse.unquote(found)
    assert linked.resolve() == (ROOT / "docs" / "theory.md").resolve()


def test_without_docs_the_theory_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "__file__", str(tmp_path / "a" / "b" / "report.py"))
    about = report.About("How steep.", "Mind.", "Slopes")
    report.write(tmp_path, "A run", [make_section()._replace(about=about)])
    page = (tmp_path / "report.html").read_text()
    assert "Why: <em>Slopes</em> in docs/theory.md." in page
