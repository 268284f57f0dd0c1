"""Train a model, or resume training it.

    softbottle train --config quickstart
    softbottle train --config ptb:mos --config.data.path=data/ptb --workdir runs/mine
    softbottle train --config my/own.py --config.train.steps=1000
    softbottle train --config lm1b:mos --config.mesh.data=none --distributed

Started again with the same --workdir, or with its config.json, a run resumes from its
newest checkpoint. Ctrl-C and SIGTERM save one and leave. With --distributed it uses
every device of every process, which share --workdir: on TPU pods, under Slurm and under
mpirun jax finds the others; elsewhere --coordinator, --processes and --process do.
"""

import pathlib

import jax

from softbottle import distributed
from softbottle.cli import configs, program
from softbottle.cli.program import app, flags
from softbottle.experiments import trial

CONFIG = program.define_config()
WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "The run's folder; by default runs/ and the config's name: runs/ptb-mos.",
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
program.define_compilation_cache()


def main() -> int:
    """Train what the flags say."""
    if CONFIG.value is None:
        raise app.UsageError("--config is needed, for example --config quickstart")
    explicit = (COORDINATOR.value, PROCESSES.value, PROCESS.value)
    if DISTRIBUTED.value:
        distributed.initialize(*explicit, HEARTBEAT.value)
    elif any(value is not None for value in explicit):
        raise app.UsageError("--coordinator and its kin need --distributed")
    workdir = pathlib.Path(WORKDIR.value or _default_workdir())
    if not trial.run(CONFIG.value, workdir):
        return STOPPED_STATUS.value
    if jax.process_index() == 0:
        print(f"{workdir / 'README.txt'} says what is there and what to do next.")
    return 0


def _default_workdir():
    """runs/ptb-mos-finetune for ptb:mos,finetune; a run's own for its config.json."""
    value = flags.FLAGS["config"].config_filename
    if (folder := configs.run_folder(value)) is not None:
        return folder
    file, _, argument = value.partition(":")
    parts = [pathlib.Path(file).stem, *filter(None, argument.split(","))]
    return pathlib.Path("runs", "-".join(parts))
