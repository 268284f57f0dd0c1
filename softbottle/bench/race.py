"""Ours, the peers and the bare GEMMs on the same sizes, in one run.

Every suite is a list of tasks for jax and a list for torch. Ours run first, then peers
in jax and then those in torch, in children (worker.py), so that none holds memory while
another is measured. Rows come back checked; here they only learn of each other.
"""

import importlib.util
import itertools
import sys
from collections.abc import Sequence
from typing import Any, Literal

from softbottle.bench import layer as layers
from softbottle.bench import libraries, problem, worker
from softbottle.bench import option as losses
from softbottle.ops.lstm import api as lstm_op
from softbottle.ops.mixture import options

Row = dict[str, Any]
OURS, THEIRS = "softbottle.bench.ours", libraries.TORCH
# The size of the square GEMM that is the ceiling.
GPU_PRODUCT, CPU_PRODUCT = 8192, 512
UNROLLS = (1, 4, 8)
LSTM_DTYPES = ("float32", "bfloat16", "float16")
DECODINGS = ("sample", "top_k", "log_probs")


def check_names(kind: str, names: list[str], known: list[str]) -> None:
    """Raise ValueError unless every given name is known."""
    for value in names:
        if value not in known:
            raise ValueError(f"no {kind} is called {value!r}; there are {known}.")


def check_peers(
    peers: list[str], known: Sequence[str] = tuple(libraries.PEERS)
) -> None:
    """Raise ValueError unless every peer is known, and torch installed if it is needed.

    A library that is not installed costs its own rows alone.
    """
    check_names("peer", peers, list(known))
    children = {libraries.PEERS[peer].child for peer in peers}
    if THEIRS in children and importlib.util.find_spec("torch") is None:
        raise ValueError("torch is not installed: pip install torch")


def head(
    ask: worker.Ask,
    shapes: list[str],
    implementations: list[str],
    peers: list[str],
    *,
    sweep: str | None = None,
    heads: Sequence[str] | None = None,
    asked: Sequence[str] = (),
    budget_mib: int = 0,
    seconds: float = 0.5,
) -> Row:
    """Race the mixture loss, its evaluation, the bare GEMMs and whole heads.

    Args:
        ask: gives the row of a module's task.
        shapes: names of problem.CASES; none: all of them, or `tiny` without a GPU.
        implementations: "auto" or names of ops/mixture/options.py; the first one's
            evaluation and softmax are timed as well.
        peers: names of libraries.PEERS.
        sweep: one of problem.SWEEPS instead of shapes: only losses, to be plotted.
        heads: names of layer.LAYERS, the whole heads at layer.CASES, or of option.HEADS
            if options are asked for; None is all.
        asked: names of option.OPTIONS, or "all": instead of all else, the losses with
            these beside plain ones.
        budget_mib: the operations' `budget_bytes`, in MiB; 0 leaves the default.
        seconds: of timing, per variant.

    Raises:
        ValueError: for names that there are not, and for a sweep or options beside what
            they do not go with.
    """
    _check_apart(shapes, implementations, peers, sweep, heads, asked)
    check_names("shape", shapes, list(problem.CASES))
    if heads and not asked and shapes and not {*shapes} & {*layers.CASES}:
        raise ValueError(
            f"whole heads are timed at {' and '.join(layers.CASES)}, got shapes "
            f"{shapes}."
        )
    check_names("sweep", [sweep] if sweep else [], list(problem.SWEEPS))
    check_names("implementation", implementations, ["auto", *options.IMPLEMENTATIONS])
    check_peers(peers)
    known = list(losses.HEADS if asked else layers.LAYERS)
    chosen = known if heads is None else list(heads)
    check_names("head", chosen, known)
    check_names("option", list(asked), ["all", *losses.OPTIONS])
    machine = probe(ask)
    on_gpu = machine["platform"] == "gpu"
    cases: Sequence[problem.Case]
    if sweep:
        cases = (problem.SWEEPS if on_gpu else problem.SMALL_SWEEPS)[sweep]
    else:
        names = _default(shapes, problem.CASES, machine)
        cases = [problem.CASES[name] for name in names]
    common = {
        "seconds": seconds,
        "budget_mib": budget_mib,
        "check_flop": check_flop(machine),
    }
    limit = ceiling(ask, machine, seconds)
    if asked:
        rows = [
            run_and_report(ask, OURS, common | task)
            for case in cases
            for task in _asked(case, implementations[0], asked, chosen)
        ]
        return summary("head", machine | {"ceiling_tflops": limit}, _beside(rows))
    plain = any(
        not variant.bias
        for peer in peers
        for variant in libraries.PEERS[peer].variants.values()
    )
    ours = [
        task
        for case in cases
        for task in _ours(case, implementations, sweep, chosen, plain)
    ]
    theirs = [task for case in cases for task in _theirs(case, peers, sweep)]
    rows = [run_and_report(ask, OURS, common | task) for task in ours]
    # Sorted, since each change of module starts a child.
    for child, task in sorted(theirs, key=lambda pair: pair[0]):
        rows.append(run_and_report(ask, child, common | task))
    order = {_title(case): index for index, case in enumerate(cases)}
    rows.sort(key=lambda row: order[row["group"]])
    facts = {"sweep": sweep, "ceiling_tflops": limit}
    return summary("head", machine | facts, relate(rows, limit))


def _check_apart(shapes, implementations, peers, sweep, heads, asked):
    """Refuse what would be left out without a word."""
    if sweep and (shapes or heads or asked):
        raise ValueError(
            "a sweep has its own sizes and races losses alone: no shapes, heads or "
            "options beside it."
        )
    if asked and (peers or len(implementations) > 1):
        raise ValueError(
            "losses with options are ours, by one implementation, got "
            f"implementations {list(implementations)} and peers {list(peers)}."
        )


def lstm(
    ask: worker.Ask,
    stacks: list[str],
    implementations: list[str],
    peers: list[str],
    *,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    seconds: float = 0.5,
) -> Row:
    """Race stacked LSTM layers, forward and backward.

    Args:
        ask: gives the row of a module's task.
        stacks: names of problem.STACKS; none: all of them, or `tiny` without a GPU.
        implementations: names of ops/lstm/api.py.
        peers: "torch" alone has an LSTM; it runs in LSTM_DTYPES.
        dtype: of our products' inputs.
        seconds: of timing, per variant.

    Raises:
        ValueError: for names that there are not.
    """
    check_names("stack", stacks, list(problem.STACKS))
    check_names("implementation", implementations, list(lstm_op.IMPLEMENTATIONS))
    check_peers(peers, ["torch"])
    machine = probe(ask)
    rows = []
    for name in _default(stacks, problem.STACKS, machine):
        stack = problem.STACKS[name]
        widths = "-".join(map(str, stack.widths))
        common = {
            "group": f"{name}: {widths}, {stack.rows} rows of {stack.positions}",
            "kind": "lstm",
            "stack": name,
            "seconds": seconds,
        }
        for chosen, unroll in itertools.product(implementations, UNROLLS):
            # A kernel for all positions has no loop to unroll.
            if chosen == "persistent" and unroll != UNROLLS[0]:
                continue
            task = common | {"family": "ours", "variant": f"{chosen}, unroll {unroll}"}
            task |= {"implementation": chosen, "unroll": unroll, "dtype": dtype}
            rows.append(run_and_report(ask, OURS, task))
        rows += [
            common | {"family": "peer", "variant": f"torch {theirs}", "dtype": theirs}
            for theirs in LSTM_DTYPES
            if "torch" in peers
        ]
    rows = [
        row if "status" in row else run_and_report(ask, THEIRS, row) for row in rows
    ]
    return summary("lstm", machine | {"dtype": dtype}, relate(rows, None))


def decode(
    ask: worker.Ask,
    cases: list[str],
    implementations: list[str],
    *,
    budget_mib: int = 0,
    seconds: float = 0.5,
) -> Row:
    """Time samples, best words and log-probabilities, mixture against softmax.

    Args:
        ask: gives the row of a module's task.
        cases: names of problem.DECODING; none: all, or `tiny` without a GPU.
        implementations: "auto" or names of ops/mixture/options.py.
        budget_mib: the operations' `budget_bytes`, in MiB; 0 leaves the default.
        seconds: of timing, per operation.
    """
    check_names("case", cases, list(problem.DECODING))
    check_names("implementation", implementations, ["auto", *options.IMPLEMENTATIONS])
    machine = probe(ask)
    rows = []
    for name in _default(cases, problem.DECODING, machine):
        case = problem.DECODING[name]
        single = case._replace(components=1)
        for kind, chosen in itertools.product(DECODINGS, implementations):
            task = {"group": _title(case), "kind": kind, "implementation": chosen}
            task |= {"budget_mib": budget_mib, "seconds": seconds}
            named = f"{kind}, {chosen}"
            mixture = task | {"family": "ours", "variant": named, "case": case}
            softmax = task | {"family": "softmax", "variant": f"{named}, softmax"}
            mixture = run_and_report(ask, OURS, mixture)
            softmax = run_and_report(ask, OURS, softmax | {"case": single})
            if mixture["status"] == softmax["status"] == "ok":
                mixture["over"] = {"softmax": mixture["ms"] / softmax["ms"]}
            rows += [mixture, softmax]
    return summary("decode", machine, rows)


def probe(ask: worker.Ask) -> Row:
    """Which device jax has, and which versions there are."""
    row = ask(OURS, {"kind": "device"})
    if row["status"] != "ok":
        raise RuntimeError(f"jax finds no device: {row['reason']}")
    return {name: row[name] for name in ("platform", "device", "jax")}


def ceiling(ask: worker.Ask, machine: Row, seconds: float) -> float | None:
    """TF/s of a square bfloat16 GEMM on this machine, now."""
    size = GPU_PRODUCT if machine["platform"] == "gpu" else CPU_PRODUCT
    case = problem.Case("ceiling", 1, 1, size, 1)
    task = head_task(case, "square product", "ceiling", 0)
    task |= {"family": "bare", "group": "ceiling", "seconds": seconds}
    return run_and_report(ask, OURS, task).get("tflops")


def relate(rows: list[Row], limit: float | None) -> list[Row]:
    """Give each row its share of the ceiling and its time over those of peers.

    Over a softmax: over that which was timed in turn with it, where one was.
    """
    for row in rows:
        errors = [row[name] for name in row if name.startswith("error_")]
        row |= {"gradient_error": max(errors)} if errors else {}
        if row["status"] != "ok":
            continue
        if limit and "tflops" in row:
            row["of_ceiling"] = row["tflops"] / limit
        if row["family"] in ("ours", "bare") and row["kind"] != "evaluation":
            row["over"] = {
                other["variant"]: row["ms"] / _beside_ms(row, other)
                for other in rows
                if other["family"] in ("peer", "softmax")
                and other["status"] == "ok"
                and other["group"] == row["group"]
            }
    return rows


def summary(suite: str, facts: Row, rows: list[Row]) -> Row:
    """What goes to JSON: where it ran, and all rows."""
    versions = [row["torch"] for row in rows if "torch" in row]
    facts |= {"torch": versions[0] if versions else None}
    return {"suite": suite, **facts, "rows": rows}


def run_and_report(ask: worker.Ask, module: str, task: Row) -> Row:
    """The task's row, also printed as a line on stderr."""
    row = ask(module, task)
    text = f"{row['ms']:.3f} ms" if "ms" in row else row.get("reason", "")
    text += f", {row['tflops']:.4g} TF/s" if "tflops" in row else ""
    print(f"{row['group']}: {row['variant']}: {text}", file=sys.stderr, flush=True)
    return row


def _default(names, known, machine):
    """The names, or those that suit the machine if there are none."""
    on_gpu = machine["platform"] == "gpu"
    return names or ([name for name in known if name != "tiny"] if on_gpu else ["tiny"])


def check_flop(machine: Row) -> float:
    """What a float64 check may cost; an H200 does about 50 TF/s of it."""
    return 2e14 if machine["platform"] == "gpu" else 2e10


def _title(case):
    tokens, components, dim, vocab = case[1:]
    return f"{case.name}: N={tokens:,} K={components} d={dim:,} V={vocab:,}"


def head_task(case: problem.Case, variant: str, kind: str, products: int) -> Row:
    """A task for head.py or peers.py; `products` of 2RdV flop each."""
    return {
        "group": _title(case),
        "case": case,
        "variant": variant,
        "kind": kind,
        "products": products,
    }


def _asked(case, implementation, asked, heads):
    """Tasks for option.py; the plain losses are always among them."""
    names = [
        name for name in losses.OPTIONS if name in ("plain", *asked) or "all" in asked
    ]
    return [
        head_task(case._replace(components=1), f"{head}, {name}", "option", 3)
        | {"family": "ours", "head": head, "option": name}
        | {"implementation": implementation}
        for head, name in itertools.product(heads, names)
        # A cap is an activation, timed once.
        if head == "softmax" or name != "soft-cap"
    ]


def _beside(rows):
    """The rows with their times over the plain loss timed in turn with them."""
    rows = relate(rows, None)
    for row in rows:
        base = row.get("beside_ms")
        row["over"] = {"plain": row["ms"] / base} if base else {}
    return rows


def _beside_ms(row, other):
    softmax = other["family"] == "softmax" and "beside_ms" in row
    return row["beside_ms"] if softmax else other["ms"]


def _ours(case, implementations, sweep, heads, plain):
    """Our tasks for a case; `plain` asks for the loss without a bias as well."""

    def ours(variant, kind, products, family="ours", **fields):
        return head_task(case, variant, kind, products) | {"family": family, **fields}

    tasks = [ours(name, "loss", 3, implementation=name) for name in implementations]
    if sweep:
        return tasks
    first = {"implementation": implementations[0]}
    tasks.append(ours(f"{implementations[0]}, evaluation", "evaluation", 1, **first))
    # It takes four products; three are what the gradient needs.
    tasks.append(ours(f"{implementations[0]}, per token", "per token", 3, **first))
    if plain:
        fields = first | {"bias": False}
        name = f"{implementations[0]}, no bias"
        tasks.append(ours(name, "loss", 3, **fields))
        name = f"{implementations[0]}, per token, no bias"
        tasks.append(ours(name, "per token", 3, **fields))
    tasks.append(ours("bare products", "products", 3, "bare"))
    if case.components > 1:
        single = case._replace(components=1)
        tasks.append(ours("softmax", "loss", 3, "softmax", case=single, **first))
    if case.name in layers.CASES:
        tasks += [
            ours(name, "layer", 3, head=layers.LAYERS[name], **first) for name in heads
        ]
    return tasks


def _theirs(case, peers, sweep):
    """Tasks of the peers' variants, each with the module that serves it."""
    return [
        (
            library.child,
            head_task(case, variant.name, "loss", 3) | {"family": "peer", "peer": name},
        )
        for library in (libraries.PEERS[peer] for peer in peers)
        for name, variant in library.variants.items()
        if (variant.mixtures or case.components == 1)
        and (not sweep or name == "compile")
    ]
