import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]


def test_a_race_from_the_command_line_prints_a_table_and_writes_json(tmp_path):
    started = {
        name: subprocess.Popen(
            [sys.executable, "launch/bench.py", *arguments],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, arguments in {
            "race": [
                "--suite=head",
                "--implementations=blocked",
                "--seconds=0.01",
                f"--json={tmp_path / 'out.json'}",
            ],
            "suite": ["--suite=heads"],
        }.items()
    }
    answers = {
        name: (*process.communicate(timeout=300), process.returncode)
        for name, process in started.items()
    }
    output, errors, code = answers["race"]
    assert code == 0, errors
    result = json.loads((tmp_path / "out.json").read_text())
    names = ["blocked", "blocked, evaluation", "bare products", "softmax"]
    assert [row["variant"] for row in result["rows"]] == names
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line).get("variant") for line in lines[-4:]] == names
    assert all(name in output for name in names)
    assert "tiny: N=61 K=3" in output and "blocked: " in errors
    output, errors, code = answers["suite"]
    assert code != 0 and "Traceback" not in errors
    assert "no suite is called 'heads'; there are ['head', 'lstm', 'step'" in errors
