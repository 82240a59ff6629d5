"""What differs between two reports: the effect of a change of plan, by kind, axis and scope.

Collectives are compared exactly (counts and bytes), sizes and FLOPs likewise; predicted times and
live ranges only where they differ by more than `NOTABLE`. Free of JAX.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from paxlike.report import Change, Report

NOTABLE = 0.01


def diff(before: Report, after: Report) -> tuple[Change, ...]:
    """List what changed, by section, the largest changes of a section first.

    Args:
        before: a report of compile mode.
        after: another one, of the same or another experiment.
    """
    sections = (
        _predicted(before, after),
        _collectives(before, after),
        _compute(before, after),
        _memory(before, after),
        _temporaries(before, after),
    )
    return tuple(change for section in sections for change in _ordered(section))


def _ordered(changes: Iterator[Change]) -> list[Change]:
    """By quantity, then by size; sections keep their order."""
    found = list(changes)
    quantities = list(dict.fromkeys(change.quantity for change in found))
    return sorted(
        found,
        key=lambda change: (
            quantities.index(change.quantity), -abs(change.after - change.before), change.what
        ),
    )  # fmt: skip


def _predicted(before: Report, after: Report) -> Iterator[Change]:
    old, new = before.predicted, after.predicted
    if old is None or new is None:
        return
    totals = "step_seconds", "exposed_communication_seconds", "mfu"
    for name in totals:
        yield from _changed("predicted", name, {"": getattr(old, name)}, {"": getattr(new, name)})
    if old.breakdown is None or new.breakdown is None:
        return
    for name in ("exposed_by_scope_seconds", "by_scope_seconds", "by_limit_seconds"):
        yield from _changed(
            "predicted",
            name,
            getattr(old.breakdown, name),
            getattr(new.breakdown, name),
            least=NOTABLE * max(old.step_seconds, new.step_seconds),
        )


def _collectives(before: Report, after: Report) -> Iterator[Change]:
    for name in ("count", "bytes_per_device"):
        yield from _changed(
            "collectives", name, _summed(before, name), _summed(after, name), least=0.0
        )


def _summed(report: Report, name: str) -> dict[str, float]:
    """A figure of the collectives by kind, axes, phase and scope."""
    totals: dict[str, float] = {}
    for row in report.collectives:
        axes = "+".join(row.mesh_axes)
        key = f"{row.kind} over {axes} in {row.where or '-'} ({row.phase})"
        totals[key] = totals.get(key, 0) + getattr(row, name)
    return totals


def _compute(before: Report, after: Report) -> Iterator[Change]:
    if before.compute is None or after.compute is None:
        return
    for field in dataclasses.fields(before.compute):
        old, new = getattr(before.compute, field.name), getattr(after.compute, field.name)
        yield from _changed("compute", field.name, {"": old}, {"": new}, least=0.0)


def _memory(before: Report, after: Report) -> Iterator[Change]:
    if before.memory is None or after.memory is None:
        return
    old, new = before.memory.per_device_bytes, after.memory.per_device_bytes
    yield from _changed("memory", "bytes", old, new, least=0.0)


def _temporaries(before: Report, after: Report) -> Iterator[Change]:
    old = before.memory.peak if before.memory else None
    new = after.memory.peak if after.memory else None
    if old is None or new is None:
        return
    least = NOTABLE * max(old.simulated_bytes, new.simulated_bytes)
    for name in ("by_category_bytes", "by_scope_bytes"):
        yield from _changed(
            "temporaries at the peak", name, getattr(old, name), getattr(new, name), least=least
        )


def _changed(
    section: str,
    quantity: str,
    old: Mapping[str, float],
    new: Mapping[str, float],
    least: float | None = None,
) -> Iterator[Change]:
    """Figures that differ by more than `least`; by default, than the notable part of them."""
    for what in dict.fromkeys([*old, *new]):
        before, after = old.get(what, 0), new.get(what, 0)
        bar = NOTABLE * max(abs(before), abs(after)) if least is None else least
        if abs(after - before) > bar:
            yield Change(section=section, what=what, quantity=quantity, before=before, after=after)
