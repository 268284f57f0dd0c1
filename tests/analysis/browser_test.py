"""The report in a real browser, where there is one: chromium, without a window."""

import json
import os
import shutil
import subprocess

import numpy as np
import pytest

from softbottle import drawing
from softbottle.analysis import inspection, overview, pair, report
from tests.analysis import models_test

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
    None,
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="needs a browser: apt install chromium"
)
PHONE, DESK = 360, 1280


class Browser:
    """Chromium's own protocol: JSON values that end in a zero byte, through pipes."""

    def __init__(self, folder):
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        # The browser reads what it is told at 3 and answers at 4.
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        flags = ["--headless", "--remote-debugging-pipe", "--no-sandbox"]
        flags += ["--disable-gpu", "--hide-scrollbars", f"--user-data-dir={folder}"]
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash", CHROMIUM, *flags],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = os.fdopen(ours_in, "rb"), os.fdopen(ours_out, "wb")
        self._number, self._session, self._rest, self.events = 0, {}, b"", []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        found = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": found["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method, **params):
        self._number += 1
        asked = {"id": self._number, "method": method, "params": params}
        self._out.write(json.dumps(asked | self._session).encode() + b"\0")
        self._out.flush()
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self):
        while b"\0" not in self._rest:
            more = self._in.read1(1 << 20)
            assert more, "the browser has closed"
            self._rest += more
        first, _, self._rest = self._rest.partition(b"\0")
        return json.loads(first)

    def open(self, path, width, scheme="light"):
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width < DESK,
        )
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", features=media)
        self.events.clear()
        self.ask("Page.navigate", url=path.as_uri())
        while not any(
            one.get("method") == "Page.loadEventFired" for one in self.events
        ):
            self.events.append(self._next())

    def evaluate(self, expression):
        found = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    def close(self):
        self.ask("Browser.close")
        self._in.close()
        self._out.close()
        self.process.wait(timeout=30)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Wide figures, long names, and numbers nested as deep as the instruments'."""
    sections = []
    for part in range(2):
        figures = []
        for width in (7, 11):
            figure = drawing.Figure(figsize=(width, 4))
            figure.subplots().plot([1, 2, 3])
            reading = "It rises everywhere. " * 6
            figures.append(report.Figure(f"curve-{part}-{width}", figure, reading))
        long = "a-run-whose-name-goes-on-without-a-place-to-break-it" * 2
        numbers = {long: {"sigma": np.geomspace(1, 1e-9, 400), "deep": {"x": {"y": 1}}}}
        reading = f"{long}: rank 7 of at most 300, softmax stops at 5."
        sections.append(report.Section(f"Part {part}", reading, figures, numbers))
    folder = tmp_path_factory.mktemp("report")
    report.write(folder, "one-run, another-run " * 4 + long, sections)
    return folder / "report.html"


OPEN_ALL = "document.querySelectorAll('details').forEach(one => one.open = true)"


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_the_page_is_as_wide_as_the_screen_with_all_numbers_open(browser, page, width):
    browser.open(page, width)
    browser.evaluate(OPEN_ALL)
    assert browser.evaluate("innerWidth") == width
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    # Wide things scroll by themselves: nothing is cut off.
    hidden = """[...document.querySelectorAll('body *')].filter(one =>
        one.scrollWidth > one.clientWidth + 1 && one.clientWidth > 0
        && getComputedStyle(one).overflowX == 'hidden').length"""
    assert browser.evaluate(hidden) == 0


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_every_figure_is_drawn_and_large_enough_to_read(browser, page, width):
    browser.open(page, width)
    sizes = browser.evaluate(
        "[...document.images].map(one => [one.complete, one.naturalWidth, one.width])"
    )
    assert len(sizes) == 4
    for complete, natural, shown in sizes:
        assert complete and natural > 0
        # Letters of 10 points at 150 dots an inch, as high as 7 pixels or more.
        assert shown / natural * 10 / 72 * 150 >= 7


def test_nothing_is_complained_about_and_nothing_is_fetched(browser, page):
    browser.open(page, DESK)
    wrong = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
    assert [one for one in browser.events if one.get("method") in wrong] == []
    fetched = "performance.getEntriesByType('resource').map(one => one.name)"
    assert all(name.startswith("data:") for name in browser.evaluate(fetched))


def test_letters_stand_out_by_day_and_by_night(browser, page):
    colours = """['body', 'figcaption', 'th'].map(name => {
        const style = getComputedStyle(document.querySelector(name));
        return [style.color, getComputedStyle(document.body).backgroundColor]})"""
    papers = {}
    for scheme in ("light", "dark"):
        browser.open(page, DESK, scheme)
        browser.evaluate(OPEN_ALL)
        for ink, paper in browser.evaluate(colours):
            bright, dim = sorted((luminance(ink), luminance(paper)), reverse=True)
            # The contrast that WCAG asks of text.
            assert (bright + 0.05) / (dim + 0.05) >= 4.5, (scheme, ink, paper)
            papers[scheme] = luminance(paper)
    assert papers["dark"] < 0.1 < 0.9 < papers["light"]


def luminance(colour):
    parts = colour.removeprefix("rgb(").removesuffix(")").split(",")
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in (int(one) / 255 for one in parts)
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.fixture(scope="module")
def report_of_models(tmp_path_factory):
    """What the command writes of three models, by all instruments that do not train."""
    sources = [models_test.source(name) for name in ("small", "middle", "other/large")]
    made = inspection.inspect(sources)
    folder = tmp_path_factory.mktemp("models")
    header = overview.header(made, "softbottle analyze --hf=small", True)
    title, opening = overview.title(made), overview.opening(made)
    report.write(folder, title, made.sections, header, opening)
    return folder / "report.html"


@pytest.fixture(scope="module")
def report_of_a_pair(tmp_path_factory):
    """What the command writes of two models that are compared."""
    made = pair.inspect([models_test.source(name) for name in ("mos", "other/softmax")])
    folder = tmp_path_factory.mktemp("pair")
    header = overview.header(made, "softbottle analyze --compare", False)
    title, opening = overview.title(made), overview.opening(made)
    report.write(folder, title, made.sections, header, opening)
    return folder / "report.html"


# What is wider than the box it stands in, and would be moved sideways to be seen.
WIDER = """[...document.querySelectorAll('figure div, .scroll')].filter(one =>
    one.scrollWidth > one.clientWidth + 1).length"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, DESK])
def test_figures_and_tables_of_models_are_whole(
    browser, report_of_models, width, scheme
):
    browser.open(report_of_models, width, scheme)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(WIDER) == 0
    letters = browser.evaluate(
        "[...document.images].map(one => one.width / one.naturalWidth * 9 / 72 * 150)"
    )
    assert len(letters) > 5 and min(letters) >= 7


@pytest.mark.parametrize("width", [400, DESK])
def test_two_models_that_are_compared_are_whole(browser, report_of_a_pair, width):
    browser.open(report_of_a_pair, width)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.evaluate(WIDER) == 0
    assert browser.evaluate("document.images.length") == 6


def test_the_models_and_their_verdicts_are_on_the_first_screen(
    browser, report_of_models
):
    browser.open(report_of_models, DESK)
    ends = "document.querySelector('.verdicts').getBoundingClientRect().bottom"
    assert browser.evaluate(ends) < 800
    # On a phone a row of the table is a card, with the names of its cells.
    browser.open(report_of_models, 400)
    named = """getComputedStyle(document.querySelector('.cards td'), '::before')
        .content"""
    assert browser.evaluate(named) == '"parameters"'
    browser.open(report_of_models, DESK)
    assert browser.evaluate(named) == "none"


def test_links_lead_to_sections_of_the_page(browser, report_of_models):
    browser.open(report_of_models, DESK)
    broken = """[...document.querySelectorAll('nav a')].filter(one =>
        !document.getElementById(one.hash.slice(1))).length"""
    assert browser.evaluate(broken) == 0
    assert browser.evaluate("document.querySelectorAll('nav a').length") > 3
