"""Train a model.

    python launch/train.py --config configs/quickstart.py
    python launch/train.py --config configs/ptb.py:mos --config.train.steps=1000

`file.py:arg` picks a variant, `--config.section.field=value` changes one setting.
Started again with the same --workdir, a run resumes from its newest checkpoint.

    python launch/train.py --config configs/lm1b.py:mos \
        --config.mesh.data=none --config.mesh.model=4 --distributed

uses every device of every process: on TPU pods, under Slurm and under mpirun jax finds
the others by itself; elsewhere --coordinator, --processes and --process say who is who.
--workdir must then be a folder that all of them share.
"""

import pathlib

from softbottle import command, distributed
from softbottle.command import app, config_flags, flags
from softbottle.experiments import trial

CONFIG = config_flags.DEFINE_config_file("config", help_string="A file of configs/.")
WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Where checkpoints, metrics and the summary go; by default runs/ and the config's "
    "name, as in runs/quickstart-softmax.",
)
DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "This is one of several processes that train together."
)
COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "host:port of process 0, where jax cannot find it by itself."
)
PROCESSES = flags.DEFINE_integer("processes", None, "How many there are.")
PROCESS = flags.DEFINE_integer("process", None, "Which one this is, from 0.")
HEARTBEAT = flags.DEFINE_integer(
    "heartbeat_seconds", 60, "Silence after which a process counts as dead."
)


STOPPED_STATUS = flags.DEFINE_integer(
    "stopped_status",
    0,
    "Exit status of a run that was asked to stop and has saved, for launchers that "
    "start it again.",
    lower_bound=0,
    upper_bound=125,
)


def main() -> int:
    """Train what the flags say."""
    if CONFIG.value is None:
        raise app.UsageError("--config is needed, for example configs/quickstart.py")
    explicit = (COORDINATOR.value, PROCESSES.value, PROCESS.value)
    if DISTRIBUTED.value:
        distributed.initialize(*explicit, HEARTBEAT.value)
    elif any(value is not None for value in explicit):
        raise app.UsageError("--coordinator and its kin need --distributed")
    summary = trial.run(CONFIG.value, WORKDIR.value or _default_workdir())
    return 0 if summary else STOPPED_STATUS.value


def _default_workdir():
    """runs/ptb-mos-finetune for configs/ptb.py:mos,finetune."""
    file, _, argument = flags.FLAGS["config"].config_filename.partition(":")
    parts = [pathlib.Path(file).stem, *filter(None, argument.split(","))]
    return pathlib.Path("runs", "-".join(parts))


if __name__ == "__main__":
    command.run(main)
