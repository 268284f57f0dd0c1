"""Tell whether the run in a folder is finished: status 0, or 1 and one line why not.

    python launch/pods/finished.py WORKDIR

Training takes summary.json away when a run goes on and writes it last. Where steps
alone can end the run, the summary must also have reached the `train.steps` of
config.json: one that a shorter run left behind does not count. The standard library is
all that this needs, so it answers in an instant.
"""

import argparse
import json
import pathlib
import sys
import time


def unfinished(workdir: pathlib.Path) -> str:
    """Why the run is not finished; empty if it is."""
    try:
        reached = _read(workdir / "summary.json")["steps"]
        train = _read(workdir / "config.json")["train"]
        # Epochs or a stop rule may end a run before its steps do.
        steps_alone = not (train["epochs"] or train.get("stop_patience"))
        if steps_alone and reached < train["steps"]:
            return f"it ended at step {reached}, and train.steps is {train['steps']}"
    except (OSError, ValueError) as error:
        return str(error)
    except (KeyError, TypeError) as error:
        return f"{workdir}/summary.json or config.json is not a run's: {error!r}"
    return ""


def _read(path):
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error


def main() -> None:
    """Look at a folder, again and again if asked to wait."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("workdir", type=pathlib.Path)
    parser.add_argument(
        "--wait",
        type=float,
        default=0,
        metavar="SECONDS",
        help="look again until then: a share shows a new file to other hosts late",
    )
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.wait
    while (reason := unfinished(arguments.workdir)) and time.monotonic() < deadline:
        time.sleep(1)
    if reason:
        print(f"not finished: {reason}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
