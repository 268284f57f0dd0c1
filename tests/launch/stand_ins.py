"""Stand-ins for programs that are not here: gcloud, xpk, srun, and a slow python.

A stand-in is a small bash script of that name which writes down how it was called.
"""

import os
import pathlib
import subprocess
import sys

from tests import ROOT

PODS = ROOT / "launch" / "pods"

# A python that is real for launch/pods/finished.py and otherwise does as it is told.
TRAINING = f"""
case $1 in
*finished.py) exec {sys.executable} "$@" ;;
esac
"""


def environment(folder: pathlib.Path, **variables: str) -> dict[str, str]:
    """The environment of a script for which stand-ins are found in folder/bin."""
    return {
        **os.environ,
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "RECORDS": str(folder / "records"),
        "SETTLE": "0",
        **variables,
    }


def shell(
    script: pathlib.Path, folder: pathlib.Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess:
    """A script's result."""
    return subprocess.run(
        ["bash", script, *arguments],
        cwd=ROOT,
        env=environment(folder, **variables),
        capture_output=True,
        text=True,
        timeout=60,
    )


def stand_in(folder: pathlib.Path, name: str, body: str) -> None:
    """A program of that name that notes its arguments and does as `body` says."""
    program = folder / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/bash\necho "{name} $*" >>"$CALLS"\n{body}\n')
    program.chmod(0o755)


def calls(folder: pathlib.Path) -> list[str]:
    """The lines that the stand-ins wrote, in the order of their calls."""
    return (folder / "calls").read_text().splitlines()
