"""Rows of a race as aligned text."""

import math
from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]


def render(result: Row) -> str:
    """A line on the machine, then one table for each group of rows."""
    groups: dict[str, list[Row]] = {}
    for row in result["rows"]:
        groups.setdefault(row["group"], []).append(row)
    tables = [f"{title}\n{_table(rows)}" for title, rows in groups.items()]
    traced = [_kernels(row) for row in result["rows"] if "kernels" in row]
    return "\n\n".join([_machine(result), *tables, *traced])


def _machine(result):
    parts = [f"{result['suite']} on {result['device']}", f"jax {result['jax']}"]
    if result["torch"]:
        parts.append(f"torch {result['torch']}")
    if result.get("ceiling_tflops"):
        parts.append(f"ceiling {_digits(result['ceiling_tflops'])} TF/s")
    return ", ".join(parts)


def _table(rows):
    timed = [row for row in rows if row["status"] == "ok"]
    refused = [row for row in rows if row["status"] != "ok"]
    shown = [name for name in _columns(timed) if any(_cell(r, name) for r in timed)]
    lines = [["variant", *shown]]
    for row in timed:
        lines.append([row["variant"], *(_cell(row, name) or "-" for name in shown)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    widths[0] = max([widths[0], *(len(row["variant"]) for row in refused)])
    text = [_line(cells, widths) for cells in lines]
    text += [f"  {row['variant'].ljust(widths[0])}  {row['reason']}" for row in refused]
    return "\n".join(text)


def _kernels(row):
    """Where a variant's time goes; a trace's numbers, beside the time without one."""
    title = f"{row['group'].partition(':')[0]}, {row['variant']}: "
    if not row["kernels"]:
        return f"{title}no kernels, which only an accelerator has"
    lines = [
        f"{title}{row['launches']:.0f} kernels take {_digits(row['kernel_ms'])} ms, "
        f"{_digits(row['ms'])} without a trace",
        "        us  times  kernel",
    ]
    lines += [
        f"  {time:8.1f}  {times:5.4g}  {name[:80]}"
        for name, times, time in row["kernels"]
    ]
    return "\n".join(lines)


def _line(cells, widths):
    name, *numbers = cells
    right = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
    return "  ".join(["", name.ljust(widths[0]), *right]).rstrip()


def _columns(rows: list[Row]) -> Iterable[str]:
    rivals = dict.fromkeys(name for row in rows for name in row.get("over", {}))
    return [*_CELLS, *(f"/ {name}" for name in rivals)]


def _cell(row, name):
    if name in _CELLS:
        field, form = _CELLS[name]
        value = row.get(field)
        return "" if value is None else form(value)
    ratio = row.get("over", {}).get(name.removeprefix("/ "))
    return "" if ratio is None else f"{ratio:.2f}"


def _digits(value):
    """Three significant digits, never in exponents."""
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 2
    return f"{value:.{max(0, digits)}f}"


_CELLS = {
    "ms": ("ms", _digits),
    "TF/s": ("tflops", _digits),
    "of ceiling": ("of_ceiling", lambda value: f"{value:.3f}"),
    "GiB": ("peak_bytes", lambda value: _digits(value / 2**30)),
    "of [T,K,V]": ("of_dense", lambda value: f"{value:.3f}"),
    "loss error": ("loss_error", lambda value: f"{value:.0e}"),
    "gradient error": ("gradient_error", lambda value: f"{value:.1e}"),
    "error": ("error", lambda value: f"{value:.1e}"),
    "same bits": ("same_bits", lambda value: "yes" if value else "NO"),
    "head": ("head_ms", _digits),
    "recurrence": ("recurrence_ms", _digits),
    "rest": ("rest_ms", _digits),
    "tokens/s": ("tokens_per_second", lambda value: f"{value:,.0f}"),
    "same program as": ("same_program_as", str),
}
