"""Markdown of reports: quantities with the units that their names tell, sections and tables.

Free of JAX, and of what the quantities are.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


def readable(name: str, value: Any) -> str:
    """A value with the unit that its name tells, such as 12.3 ms for `step_seconds`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")
    if "per_second" in name:
        return f"{value:,.0f} {name.partition('_per_second')[0].rpartition('.')[2]}/s"
    if "bytes" in name:
        return _scaled(value, "B")
    if "flops" in name:
        return _scaled(value, "FLOP")
    if "seconds" in name and abs(value) < 1:
        return f"{value * 1e3:.4g} ms" if abs(value) >= 1e-3 else f"{value * 1e6:.4g} us"
    if "seconds" in name:
        return f"{value:,.4g} s"
    if "fraction" in name or name.endswith("mfu"):
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def _scaled(value: float, unit: str) -> str:
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if abs(value) >= 10**power:
            return f"{value / 10**power:.4g} {prefix}{unit}"
    return f"{value:g} {unit}"


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested JSON objects as one level, names joined with a dot."""
    if not isinstance(value, dict):
        return {} if value is None else {prefix: value}
    found: dict[str, Any] = {}
    for name, item in value.items():
        found |= flat(item, f"{prefix}.{name}" if prefix else name)
    return found


def section(heading: str, body: str) -> str:
    """A heading and what stands below it; nothing, if that is empty."""
    return f"## {heading}\n\n{body}" if body else ""


def pairs(values: Mapping[str, Any]) -> str:
    """A table of names and values, nested ones joined with a dot."""
    found = {name: value for name, value in flat(dict(values)).items() if value is not None}
    lines = [f"| {title(name)} | {readable(name, value)} |" for name, value in found.items()]
    return "\n".join(["| quantity | value |", "| --- | --- |", *lines]) if lines else ""


def title(name: str) -> str:
    """A quantity's name in words, without its unit."""
    words = name.replace("_bytes", "").replace("_seconds", "")
    return words.replace("_", " ").replace(".", " ")


def table(rows: Sequence[Any], columns: Sequence[str] = ()) -> str:
    """A table of dataclasses: the columns that any row uses, of those named or of all fields."""
    named = columns or [field.name for field in (dataclasses.fields(rows[0]) if rows else ())]
    columns = [
        name for name in named if any(getattr(row, name) not in (None, "", ()) for row in rows)
    ]
    if not columns:
        return ""
    lines = ["| " + " | ".join(title(column) for column in columns) + " |"]
    lines.append("| " + " | ".join("---" for _ in columns) + " |")
    for row in rows:
        cells = (getattr(row, column) for column in columns)
        shown = (", ".join(cell) if isinstance(cell, tuple) else cell for cell in cells)
        texts = (readable(name, cell) for name, cell in zip(columns, shown, strict=True))
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines)
