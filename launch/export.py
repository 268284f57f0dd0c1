"""Move a model between machines: bfloat16 weights in files of at most 16 MiB.

python launch/export.py --workdir runs/ptb-mos --folder exported
python launch/export.py --workdir runs/moved --folder exported --read
"""

from softbottle import command
from softbottle.command import flags
from softbottle.scoring import export

WORKDIR = flags.DEFINE_string("workdir", None, "The run.", required=True)
FOLDER = flags.DEFINE_string("folder", None, "The exported files.", required=True)
READ = flags.DEFINE_bool("read", False, "Make a run of the files, not files of a run.")


def main() -> None:
    """Write or read the files."""
    if READ.value:
        export.read(FOLDER.value, WORKDIR.value)
        print(f"made a run in {WORKDIR.value}")
    else:
        parts = export.write(WORKDIR.value, FOLDER.value)
        print(f"wrote {parts} parts, index.json and vocab.txt to {FOLDER.value}")


if __name__ == "__main__":
    command.run(main)
