"""What the pages print is what runs: examples, commands and links.

The site's own links are checked by `mkdocs build --strict`, which .ci/run calls.
"""

import collections
import re
import shlex
import textwrap

import jax
import pytest

import softbottle
from tests import ROOT, commands, pictures

TOP = sorted(ROOT.glob("*.md"))
SITE = sorted((ROOT / "docs").rglob("*.md"))
# Packages that no extra brings: where one is missing, its page is not run.
OPTIONAL = ("equinox",)
# A program of launch/, or the same command by its name.
COMMAND = re.compile(r"(?:^|\s)(?:python launch/(\w+)\.py|softbottle (\w+))(?= |$)(.*)")
LOOP = re.compile(r"for (\w+) in (.*?); do")


def name(page):
    return str(page.relative_to(ROOT))


def examples(page):
    """The Python blocks of a page, each with the line at which it begins."""
    text = page.read_text()
    for match in re.finditer(r"^( *)```python\n(.*?)^\1```", text, re.M | re.S):
        yield text.count("\n", 0, match.start(2)), textwrap.dedent(match[2])


def shell_lines(page):
    """The lines of shell blocks, fenced or indented, with continued ones joined."""
    text = page.read_text()
    fenced = re.findall(r"^ *```bash\n(.*?)^ *```", text, re.M | re.S)
    rest = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.M | re.S)
    indented = re.findall(r"(?:\A|\n\n)((?: {4}.*\n|\n(?= {4}))+)", rest)
    for block in (*fenced, *indented):
        lines = re.sub(r"\\\n\s*", "", block).splitlines()
        loop = LOOP.search(block)
        values = loop[2].split() if loop else [""]
        for value in values:
            yield from (
                line.replace(f"${loop[1]}", value) if loop else line for line in lines
            )


def programs(page):
    """Each command of a page once: the program's file and its arguments."""
    found = {}
    for line in shell_lines(page):
        if match := COMMAND.search(line):
            arguments = tuple(shlex.split(match[3], comments=True))
            found[f"{match[1]}.py" if match[1] else match[2], arguments] = None
    return list(found)


# The README's example is run by packaging_test.py, where there is jax and no extra.
@pytest.mark.slow
@pytest.mark.usefixtures("quick_keys")
@pytest.mark.parametrize("page", [p for p in SITE if [*examples(p)]], ids=name)
def test_the_python_of_a_page_runs_as_printed(page, tmp_path, monkeypatch):
    text = page.read_text()
    for package in OPTIONAL:
        if f"import {package}" in text:
            pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    pictures.lay_out_only(monkeypatch)
    namespace = {"__name__": page.stem}
    # What a user's own program has.
    with jax.numpy_rank_promotion("allow"):
        for line, example in examples(page):
            code = compile("\n" * line + example, str(page), "exec")
            exec(code, namespace)


@pytest.fixture(scope="module")
def answers():
    """What the commands of all pages answer to their arguments, each asked once."""
    lines = collections.defaultdict(dict)
    for page in (*TOP, *SITE):
        for script, arguments in programs(page):
            lines[commands.command(script)][script, arguments] = None
    found = {}
    for asked in lines.values():
        found.update(zip(asked, commands.check([*asked]), strict=True))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", [*filter(programs, [*TOP, *SITE])], ids=name)
def test_the_flags_of_a_pages_commands_exist(page, answers):
    for script, arguments in programs(page):
        answer = answers[script, arguments]
        assert answer.code == 0, (script, arguments, answer.errors[-500:])


def slug(heading):
    """The anchor that GitHub and mkdocs give a heading."""
    plain = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
    return re.sub(r"\s", "-", plain)


@pytest.mark.parametrize("page", [*TOP, *SITE], ids=name)
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M)
            assert anchor in map(slug, headings), target


@pytest.mark.parametrize(
    "package, page", [(softbottle, "softbottle"), (softbottle.ops, "ops")]
)
def test_every_public_name_is_in_the_reference(package, page):
    text = (ROOT / "docs" / "reference" / f"{page}.md").read_text()
    assert not [name for name in package.__all__ if not re.search(rf"\b{name}\b", text)]
