"""Move a model between machines: bfloat16 weights in files of at most 16 MiB.

    softbottle export --workdir runs/ptb-mos --folder exported
    softbottle export --workdir runs/moved --folder exported --read

The first writes the files, the second makes a run of them, elsewhere.
"""

from softbottle.cli.program import flags
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
