"""Training steps with a cache's objectives against plain ones on the same model."""

from typing import Any

from softbottle import config as config_lib
from softbottle.bench import race, worker

Row = dict[str, Any]


def run(
    ask: worker.Ask,
    config: config_lib.Config,
    vocab: int,
    length: int,
    *,
    seconds: float = 0.5,
) -> Row:
    """Time a config's training step under every objective, with its memory.

    Args:
        ask: gives the row of a module's task.
        config: a run's settings; its own objective is one of those that are timed.
        vocab: how many words there are.
        length: positions of a row.
        seconds: of timing, per part.
    """
    machine = race.probe(ask)
    rows = []
    for objective in config_lib.OBJECTIVES:
        variant = config_lib.from_dict(config_lib.to_dict(config))
        variant.cache.objective = objective
        task = {
            "group": f"{config.data.rows} rows of {length}, V={vocab:,}",
            "kind": "step",
            "family": "ours",
            "variant": objective,
            "vocab": vocab,
            "length": length,
            "seconds": seconds,
            "config": config_lib.to_dict(variant),
        }
        rows.append(race.run_and_report(ask, race.OURS, task))
    plain, *others = rows
    for row in others:
        if row["status"] == plain["status"] == "ok":
            row["over"] = {"plain": row["ms"] / plain["ms"]}
    return race.summary("objective", machine, rows)
