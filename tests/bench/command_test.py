import json

import pytest

from tests import commands


@pytest.mark.slow
def test_a_race_from_the_command_line_prints_a_table_and_writes_json(tmp_path):
    flags = ["--suite=head", "--implementations=blocked", "--seconds=0.01"]
    flags += ["--options=smoothing", "--heads=mos-4"]
    race = commands.start("bench.py", *flags, f"--json={tmp_path / 'out.json'}")
    refused = commands.finish(commands.start("bench.py", "--suite=heads"))
    unread = commands.start("bench.py", "--suite=lstm", "--vocab=3", "--heads=mos")
    code, _, errors = commands.finish(unread)
    assert code == 2 and "--suite lstm does not read --heads, --vocab; it" in errors
    code, output, errors = commands.finish(race)
    assert code == 0, errors
    result = json.loads((tmp_path / "out.json").read_text())
    names = ["mos-4, plain", "mos-4, smoothing"]
    assert [row["variant"] for row in result["rows"]] == names
    assert all(row["status"] == "ok" and row["same_bits"] for row in result["rows"])
    plain, smoothed = result["rows"]
    assert "plain" not in plain["over"]
    assert smoothed["over"]["plain"] == smoothed["ms"] / smoothed["beside_ms"]
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line).get("variant") for line in lines[-len(names) :]] == names
    assert all(name in output for name in [*names, "/ plain"])
    assert "tiny: N=61 K=1" in output and "mos-4, plain: " in errors
    assert refused.code != 0 and "Traceback" not in refused.errors
    named = "no suite is called 'heads'; there are ['head', 'lstm', 'step'"
    assert named in refused.errors
