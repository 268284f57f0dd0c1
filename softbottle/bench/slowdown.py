"""Training steps of a mixture against those of a softmax on the same backbone."""

from typing import Any

from softbottle import config as config_lib
from softbottle.bench import problem, race, step, worker

Row = dict[str, Any]


def run(
    ask: worker.Ask,
    recipes: dict[str, tuple[config_lib.Config, int]],
    peers: list[str],
    *,
    seconds: float = 0.5,
) -> Row:
    """Time training steps, a mixture's against a softmax's on the same backbone.

    Beside the softmax that we have stands one whose head is the faster of ours and, if
    torch is among the peers, torch.compile's on the same sizes: the rest of our
    softmax's step plus the smaller of the two head times.

    Args:
        ask: gives the row of a module's task.
        recipes: a config and the number of its words, by name.
        peers: "torch" alone has a step of ours.
        seconds: of timing, per part.
    """
    race.check_peers(peers, ["torch"])
    machine = race.probe(ask)
    limit = race.ceiling(ask, machine, seconds)
    rows = []
    for name, (config, vocab) in recipes.items():
        length = config.data.length
        tokens = config.data.rows * length
        common = {
            "group": f"{name}: {config.data.rows} rows of {length}, V={vocab:,}",
            "kind": "step",
            "seconds": seconds,
        }
        for variant, rival in step.rivals(config).items():
            task = common | {"variant": variant, "vocab": vocab, "length": length}
            task |= {"family": "ours", "config": config_lib.to_dict(rival)}
            rows.append(race.run_and_report(ask, race.OURS, task))
        case = problem.Case(name, tokens, 1, config_lib.context_dim(config), vocab)
        if "torch" in peers:
            task = (
                race.head_task(case, "torch.compile, softmax head", "loss", 3) | common
            )
            task |= {"kind": "loss", "family": "peer", "peer": "compile"}
            rows.append(task | {"check_flop": race.check_flop(machine)})
    rows = [
        row if "status" in row else race.run_and_report(ask, race.THEIRS, row)
        for row in rows
    ]
    rows = _slowdowns(rows, limit)
    return race.summary("step", machine | {"ceiling_tflops": limit}, rows)


def _slowdowns(rows, limit):
    """Add the softmax with the faster head, and every step over each softmax."""
    for row in rows:
        if limit and "tflops" in row:
            row["of_ceiling"] = row["tflops"] / limit
    related = []
    for group in dict.fromkeys(row["group"] for row in rows):
        variants = {row["variant"]: row for row in rows if row["group"] == group}
        ours = variants["softmax"]
        heads = [row for row in variants.values() if row["family"] == "peer"]
        heads = [row["ms"] for row in heads if row["status"] == "ok"]
        if heads and ours["status"] == "ok":
            head_ms = min(ours["head_ms"], *heads)
            ms = ours["ms"] - ours["head_ms"] + head_ms
            facts = {"variant": "softmax, faster head", "ms": ms, "head_ms": head_ms}
            facts |= dict.fromkeys(("tokens_per_second", "tflops", "of_ceiling"))
            variants["softmax, faster head"] = ours | facts
        for row in variants.values():
            if row["status"] == "ok" and row["family"] == "ours":
                row["over"] = {
                    name: row["ms"] / other["ms"]
                    for name, other in variants.items()
                    if other["status"] == "ok"
                    and name in ("softmax", "one component", "softmax, faster head")
                    and other is not row
                }
        related += variants.values()
    return related
