"""Where the time of a traced step went, in the same terms as the prediction.

The profiler's trace names the instruction that a device runs; the compiled program, written beside
the trace, says which scope and which class it belongs to. A collective's time is hidden where the
same device computes meanwhile, and exposed where it does not.

Limits: times are means over devices and steps. An asynchronous collective shows as long as the
profiler says (on GPU its kernel, waiting for the peers included). On virtual CPU devices several
operations of a device may run at a time, so that scopes can add up to more than the step.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from paxlike.analysis import hlo
from paxlike.analysis.collectives import KINDS
from paxlike.analysis.cost import cost_of
from paxlike.analysis.cost_model import op_class
from paxlike.analysis.execution import callee_name
from paxlike.analysis.scopes import parse_scope

_CONTAINERS = frozenset({"while", "conditional", "call"})


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """An instruction as it ran: nanoseconds on a device, in one of its runs of the program."""

    device: str
    run: int
    name: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """A mean step of a mean device, in seconds; the fields are those of `report.Breakdown`."""

    by_scope_seconds: dict[str, float]
    by_class_seconds: dict[str, float]
    exposed_by_scope_seconds: dict[str, float]
    hidden_communication_seconds: float
    idle_seconds: float
    between_steps_seconds: float


def can_read() -> bool:
    """Whether this JAX reads its own traces: 0.10 does, 0.12.0 aborts in `ProfileEvent.stats`."""
    return jax.__version_info__ < (0, 11)


def summarise(directory: Path, program: str, num_steps: int) -> Measurement:
    """Read the newest trace below a folder.

    Args:
        directory: what `jax.profiler.start_trace` was given.
        program: HLO text of the step.
        num_steps: steps in the trace.

    Raises:
        ValueError: there is no trace, or none of its events belongs to the program.
    """
    if not can_read():
        raise ValueError(
            f"jax {jax.__version__} aborts the process when it reads a trace's statistics; look at "
            "the trace with xprof, or use jax 0.10"
        )
    from jax.profiler import ProfileData

    traces = sorted(directory.glob("**/*.xplane.pb"))
    if not traces:
        raise ValueError(f"no trace (*.xplane.pb) below {directory}")
    module = hlo.parse(program)
    spans = list(_spans(ProfileData.from_file(str(traces[-1])), module))
    return measure(spans, module, num_steps)


def measure(spans: Sequence[Span], module: hlo.Module, num_steps: int) -> Measurement:
    """Sum spans: those of the last `num_steps` runs of each device."""
    names = _Names(module)
    devices: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        if names.opcode(span.name) not in _CONTAINERS:
            devices[span.device].append(span)
    if not devices:
        raise ValueError(f"no event of the trace belongs to the program {module.name}")
    totals: dict[str, dict[str, float]] = {
        key: defaultdict(float) for key in ("scope", "class", "exposed")
    }
    hidden = idle = between = 0.0
    num_runs = 0
    for found in devices.values():
        runs = _last_runs(found, num_steps)
        num_runs += len(runs)
        work = _union((s.start, s.end) for s in found if not names.is_collective(s.name))
        for run in runs:
            hidden += _add_run(run, work, names, totals)
            busy = _union((span.start, span.end) for span in run)
            idle += (busy[-1][1] - busy[0][0]) - sum(end - start for start, end in busy)
        ends = [(min(s.start for s in run), max(s.end for s in run)) for run in runs]
        between += sum(
            max(0.0, after[0] - before[1]) for before, after in zip(ends, ends[1:], strict=False)
        )
    scale = 1e-9 / num_runs
    ordered = {
        key: {
            name: value * scale
            for name, value in sorted(sums.items(), key=lambda item: (-item[1], item[0]))
        }
        for key, sums in totals.items()
    }
    return Measurement(
        by_scope_seconds=ordered["scope"],
        by_class_seconds=ordered["class"],
        exposed_by_scope_seconds=ordered["exposed"],
        hidden_communication_seconds=hidden * scale,
        idle_seconds=idle * scale,
        between_steps_seconds=between * scale,
    )


def _add_run(
    run: list[Span],
    work: list[tuple[float, float]],
    names: _Names,
    totals: dict[str, dict[str, float]],
) -> float:
    """Add the spans of one run to the totals; return the hidden time of its collectives."""
    hidden = 0.0
    for span in run:
        length = span.end - span.start
        scope = names.scope(span.name)
        if names.is_collective(span.name):
            covered = _overlap(span, work)
            hidden += covered
            length -= covered
            totals["exposed"][scope] += length
        totals["scope"][scope] += length
        totals["class"][names.op_class(span.name)] += length
    return hidden


class _Names:
    """What the program says of the instructions that a trace names."""

    def __init__(self, module: hlo.Module) -> None:
        self._module = module
        self._places = {
            instruction.name: (computation, instruction)
            for computation in module.computations.values()
            for instruction in computation
        }
        self._classes: dict[str, str] = {}

    def opcode(self, name: str) -> str:
        return self._places[name][1].opcode

    def scope(self, name: str) -> str:
        return parse_scope(self._places[name][1].op_name).path

    def is_collective(self, name: str) -> bool:
        return self.op_class(name) == "collective"

    def op_class(self, name: str) -> str:
        if name not in self._classes:
            self._classes[name] = self._class(*self._places[name])
        return self._classes[name]

    def _class(self, computation: hlo.Computation, instruction: hlo.Instruction) -> str:
        opcode = instruction.opcode.removesuffix("-start").removesuffix("-done")
        if opcode in KINDS:
            return "collective"
        if opcode in ("copy", "slice") and opcode != instruction.opcode:
            return "copy"
        if opcode in ("fusion", "async"):
            callee = self._module.computations.get(callee_name(instruction))
            if callee is not None and any(inner.opcode in KINDS for inner in callee):
                return "collective"
        return op_class(instruction, cost_of(self._module, computation, instruction))


def _spans(data: Any, module: hlo.Module) -> Iterator[Span]:
    """Events of a trace that are instructions of a program."""
    known = {name for c in module.computations.values() for name in c.instructions}
    for plane in data.planes:
        for line in plane.lines:
            if plane.name.startswith("/device:TPU") and line.name != "XLA Ops":
                continue  # the same operations, summed to modules and steps
            for event in line.events:
                if event.name.startswith("end: "):
                    continue
                stats = dict(event.stats)
                if stats.get("hlo_module", module.name) != module.name:
                    continue
                name = str(stats.get("hlo_op", event.name)).partition(" = ")[0].lstrip("%")
                if name in known and ("hlo_op" in stats or plane.name.startswith("/device:")):
                    device = f"{plane.name} {stats.get('device_ordinal', '')}"
                    end = event.start_ns + event.duration_ns
                    yield Span(device, int(stats.get("run_id", 0)), name, event.start_ns, end)


def _last_runs(spans: list[Span], num_steps: int) -> list[list[Span]]:
    """Spans by run, in order; the trace may begin in the middle of an earlier one."""
    runs: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        runs[span.run].append(span)
    ordered = sorted(runs.values(), key=lambda run: min(span.start for span in run))
    return ordered[-num_steps:]


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint intervals that cover the same time, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _overlap(span: Span, intervals: list[tuple[float, float]]) -> float:
    """Time of a span that disjoint intervals cover."""
    first = bisect.bisect_left(intervals, span.start, key=lambda interval: interval[1])
    covered = 0.0
    for start, end in intervals[first:]:
        if start >= span.end:
            break
        covered += min(end, span.end) - max(start, span.start)
    return covered
