"""Move a model between machines: bfloat16 weights in files of at most 16 MiB.

python launch/export.py --workdir runs/ptb-mos --folder exported
python launch/export.py --workdir runs/moved --folder exported --read
"""

from absl import app, flags, logging

from softbottle import export

WORKDIR = flags.DEFINE_string("workdir", None, "The run.", required=True)
FOLDER = flags.DEFINE_string("folder", None, "The exported files.", required=True)
READ = flags.DEFINE_bool("read", False, "Make a run of the files, not files of a run.")


def main(arguments: list[str]) -> None:
    """Write or read the files."""
    if len(arguments) > 1:
        raise app.UsageError(f"not understood: {arguments[1:]}")
    logging.set_verbosity(logging.WARNING)
    if READ.value:
        export.read(FOLDER.value, WORKDIR.value)
        print(f"made a run in {WORKDIR.value}")
    else:
        parts = export.write(WORKDIR.value, FOLDER.value)
        print(f"wrote {parts} parts, index.json and vocab.txt to {FOLDER.value}")


if __name__ == "__main__":
    app.run(main)
