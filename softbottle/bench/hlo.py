"""What a compiled program sends between its devices, read from the compiler's text.

    bytes(kind) = sum over the collectives of a kind of (times it runs) * (its result)

A collective in a loop's body runs as often as the loop does, which is read from the
loop's condition: a comparison with a constant. The TPU compiler splits a collective
over several fusions to hide it behind other work, even behind a loop's; the parts share
a channel, and together they run as often as the one that runs least.
"""

import re
from typing import NamedTuple

_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
# f32 and s32 are the rest.
_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "f64": 8, "s64": 8}

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(_KINDS)})(-start)?\(")
_CALLED = re.compile(
    r"(?:body|calls|to_apply|(?:true|false)_computation)=%?([\w.\-]+)"
    r"|(?:called|branch)_computations=\{([^}]*)\}"
)
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\]")


class Sent(NamedTuple):
    """The collectives of a kind: how many run, their bytes, and the largest's."""

    runs: int
    bytes: int
    largest: int


def collectives(text: str) -> dict[str, Sent]:
    """The collectives that one run of a compiled program performs, by kind."""
    bodies, entry = _computations(text)
    times = _times(bodies, entry)
    seen: dict[tuple[str, str], tuple[int, int]] = {}
    for name, lines in bodies.items():
        for number, line in enumerate(lines):
            if (match := _COLLECTIVE.search(line)) and times[name]:
                channel = re.search(r"channel_id=(\d+)", line)
                key = (match[2], channel[1] if channel else f"{name} {number}")
                cost = (times[name], _size(match[1], match[3] and match[2]))
                seen[key] = min(seen.get(key, cost), cost)
    result = {}
    for kind in _KINDS:
        rows = [row for (other, _), row in seen.items() if other == kind]
        if rows:
            largest = max(size for _, size in rows)
            total = sum(count * size for count, size in rows)
            result[kind] = Sent(sum(count for count, _ in rows), total, largest)
    return result


def _computations(text):
    """The lines of each computation, and the name of the one that is run."""
    bodies, name, entry = {}, "", ""
    for line in text.splitlines():
        if head := _HEAD.match(line):
            name = head[2]
            bodies[name] = []
            entry = name if head[1] else entry
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _times(bodies, entry):
    """How often each computation runs."""
    times = dict.fromkeys(bodies, 0)

    def run(name, count):
        times[name] += count
        for line in bodies[name]:
            loops = _trips(bodies, line) if " while(" in line else 1
            for single, several in _CALLED.findall(line):
                for called in [single] if single else re.split(r"[,\s%]+", several):
                    if called in bodies:
                        run(called, count * loops)

    run(entry, 1)
    return times


def _trips(bodies, line):
    """How often a loop runs: the one integer constant its condition compares with."""
    condition = re.search(r"condition=%?([\w.\-]+)", line)[1]
    bounds = {
        int(bound)
        for inner in bodies[condition]
        for bound in re.findall(r" [su]32\[\]\S* constant\((\d+)\)", inner)
    }
    return bounds.pop() if len(bounds) == 1 else 1


def _size(shapes, started):
    """Bytes of a result; that of most -start operations also holds what was sent."""
    sizes = [_bytes(*shape) for shape in _SHAPE.findall(shapes)]
    pair = started and started != "all-reduce"
    return max(sizes, default=0) if pair else sum(sizes)


def _bytes(dtype, axes):
    count = 1
    for axis in filter(None, axes.split(",")):
        count *= int(axis)
    return count * _BYTES.get(dtype, 4)
