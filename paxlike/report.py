"""What a mode found out, as one schema: `report.json` for programs, `report.md` for people.

A section appears when the mode has it. Quantities carry their unit in the key: `_bytes`,
`_seconds`, `flops`, `_fraction`. Free of JAX.
"""

import dataclasses
import datetime
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from paxlike.analysis.collectives import Collective
from paxlike.analysis.liveness import LiveBuffer, Peak
from paxlike.analysis.memory_model import Fits
from paxlike.markdown import flat, pairs, readable, section, table, title
from paxlike.serialization import from_json, to_json
from paxlike.workdir import write_atomically

SCHEMA = 1

_COLLECTIVE_COLUMNS = (
    "kind", "mesh_axes", "count", "bytes_per_device", "dtype", "phase", "hidden_fraction", "where"
)  # fmt: skip

# Divisions of a step's time -> how their rows begin.
_DIVISIONS = {
    "by_limit_seconds": "bound by",
    "by_class_seconds": "class",
    "by_scope_seconds": "scope",
    "exposed_by_axis_seconds": "waiting for axes",
    "exposed_by_scope_seconds": "waiting in scope",
}
_MOST_ROWS = 12

How = Literal["executed", "counted", "predicted", "simulated"]
Verdict = Literal["reproduced", "differs", "not measured"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """What the temporaries are when they take most, from the live ranges of the schedule.

    Attributes:
        simulated_bytes: of all buffers that live then.
        compiler_bytes: what the compiler says of temporaries and results.
        deviation_fraction: of the simulation from the compiler.
        where: named scope that runs then.
        by_category_bytes: gradients, collectives (their results), activations, other -> bytes.
        by_scope_bytes: named scope that writes the buffers -> bytes.
        buffers: the largest.
    """

    simulated_bytes: int
    compiler_bytes: int
    deviation_fraction: float
    where: str
    by_category_bytes: Mapping[str, int]
    by_scope_bytes: Mapping[str, int]
    buffers: tuple[LiveBuffer, ...]

    @classmethod
    def of(cls, peak: Peak, compiler_bytes: int, most: int = 20) -> "PeakMemory":
        """Report a peak, with so many of its buffers, beside the compiler's number."""
        return cls(
            simulated_bytes=peak.bytes,
            compiler_bytes=compiler_bytes,
            deviation_fraction=peak.bytes / compiler_bytes - 1 if compiler_bytes else 0.0,
            where=peak.where,
            by_category_bytes=peak.by_category(),
            by_scope_bytes=peak.by_scope(),
            buffers=peak.buffers[:most],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of one device.

    Attributes:
        per_device_bytes: category (params, grads, optimizer, activations, kv_cache, temporaries,
            total) -> bytes.
        capacity_bytes: what the device has; None where it is unknown.
        fits: `safe`, `try` (close to the capacity) or `no`; None where the capacity is unknown.
        peak: what the temporaries are; None where the program is unknown.
    """

    per_device_bytes: Mapping[str, int]
    capacity_bytes: int | None = None
    fits: Fits | None = None
    peak: PeakMemory | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute:
    """Work of one execution: what a device computes, what the model needs, what memory moves."""

    flops_per_device: float
    model_flops: float
    hbm_bytes_per_device: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Where the time of a step goes on one device; predicted and measured in the same terms.

    Attributes:
        by_scope_seconds: named scope -> time, waits for its collectives included.
        by_class_seconds: matmul, kernel, other, copy, collective (exposed) -> time.
        by_limit_seconds: compute, memory, overhead, communication:<axes> -> time; not measured.
        exposed_by_axis_seconds: mesh axes -> time that the device waited for them; not measured.
        exposed_by_scope_seconds: named scope -> time that the device waited for its collectives.
        hidden_communication_seconds: collectives beside computation.
        idle_seconds: the device did nothing, in the middle of a step.
        between_steps_seconds: likewise, between two steps: it waited for the host.
    """

    by_scope_seconds: Mapping[str, float]
    by_class_seconds: Mapping[str, float]
    by_limit_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    exposed_by_axis_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    exposed_by_scope_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    hidden_communication_seconds: float = 0.0
    idle_seconds: float = 0.0
    between_steps_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Predicted:
    """A time that was not measured, and what it rests on."""

    step_seconds: float
    exposed_communication_seconds: float
    mfu: float
    bound_by: str
    basis: str
    breakdown: Breakdown | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spread:
    """Summary of repeated measurements."""

    median: float
    min: float
    max: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarise at least one value."""
        ordered = sorted(values)
        middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
        return cls(median=middle, min=ordered[0], max=ordered[-1], n=len(ordered))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What was timed here: the steady steps, the tokens of all devices together, a traced step."""

    step_seconds: Spread | None = None
    tokens_per_second: float | None = None
    breakdown: Breakdown | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """One statement of a paper, and what we found.

    Attributes:
        id: short name.
        paper_ref: section, table or figure.
        statement: what the paper says, in words.
        paper_value: its number; None if it is a statement only.
        our_value: ours; None if not measured.
        unit: of both values.
        tolerance: relative difference up to which the claim counts as reproduced.
        how: executed (ran here), counted (in the compiled program), predicted (cost model over a
            compiled schedule) or simulated (discrete events).
        verdict: reproduced, differs or not measured.
    """

    id: str
    paper_ref: str
    statement: str
    paper_value: float | str | None
    our_value: float | str | None
    unit: str = ""
    tolerance: float = 0.0
    how: How
    verdict: Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """A figure that differs between two reports (`paxlike.difference`).

    Attributes:
        section: where it stands: predicted, collectives, compute, memory, temporaries at the peak.
        what: of which collectives, category or scope; "" is the whole.
        quantity: name of the figure, with its unit.
        before: 0 where it was absent.
        after: likewise.
    """

    section: str
    what: str
    quantity: str
    before: float
    after: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """One experiment's line in a comparison of several; of one device. None where unknown."""

    experiment: str
    fits: Fits | None
    total_bytes: int
    temporaries_bytes: int
    sent_bytes: int
    flops: float | None = None
    hbm_bytes: float | None = None
    step_seconds: float | None = None
    exposed_communication_seconds: float | None = None
    mfu: float | None = None
    bound_by: str | None = None

    @classmethod
    def of(cls, report: "Report") -> "Compared":
        """The line of a report of compile mode."""
        memory, predicted, compute = report.memory, report.predicted, report.compute
        assert memory is not None
        sizes = memory.per_device_bytes
        return cls(
            experiment=report.experiment,
            fits=memory.fits,
            total_bytes=sizes["total"],
            temporaries_bytes=sizes.get("temporaries", 0),
            sent_bytes=sum(row.bytes_per_device for row in report.collectives),
            flops=compute.flops_per_device if compute else None,
            hbm_bytes=compute.hbm_bytes_per_device if compute else None,
            step_seconds=predicted.step_seconds if predicted else None,
            exposed_communication_seconds=(
                predicted.exposed_communication_seconds if predicted else None
            ),
            mfu=predicted.mfu if predicted else None,
            bound_by=predicted.bound_by if predicted else None,
        )


@dataclasses.dataclass(kw_only=True)
class Report:
    """All that one run of a mode says.

    Attributes:
        experiment: name of the experiment.
        mode: which mode ran.
        target: hardware it was for, such as `cpu:8`.
        memory, collectives, compute, predicted, measured, claims: sections of the schema.
        changes: what differs from another report.
        compared: a line for each of several experiments.
        results: further results by name, such as the final loss; units in the names.
        notes: sentences for the reader.
        plots: file names in the workdir.
        versions: package -> version; filled in.
        date: when the report was made, UTC; filled in.
        schema: version of this layout.
    """

    experiment: str
    mode: str
    target: str
    memory: Memory | None = None
    collectives: tuple[Collective, ...] = ()
    compute: Compute | None = None
    predicted: Predicted | None = None
    measured: Measured | None = None
    claims: tuple[Claim, ...] = ()
    changes: tuple[Change, ...] = ()
    compared: tuple[Compared, ...] = ()
    results: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    plots: tuple[str, ...] = ()
    versions: Mapping[str, str] = dataclasses.field(default_factory=lambda: versions())
    date: str = dataclasses.field(
        default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    )
    schema: int = SCHEMA

    def write(self, workdir: Path) -> None:
        """Write `report.json` and `report.md`; an earlier report of another mode is kept.

        It is renamed to `report_<mode>.json` and `.md`.
        """
        workdir.mkdir(parents=True, exist_ok=True)
        _keep_other_mode(workdir, self.mode)
        write_atomically(workdir / "report.json", json.dumps(self.sections(), indent=2) + "\n")
        write_atomically(workdir / "report.md", self.markdown())

    def sections(self) -> dict[str, Any]:
        """JSON values of the sections that exist."""
        return {
            name: value
            for name, value in to_json(self, Report).items()
            if value not in (None, [], {})
        }

    @classmethod
    def read(cls, workdir: Path, mode: str | None = None) -> "Report":
        """Read back the report of a workdir.

        Args:
            workdir: of the run.
            mode: whose report is wanted; None is the latest.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is damaged or of another schema.
        """
        path = workdir / "report.json"
        kept = workdir / f"report_{mode}.json"
        try:
            data = json.loads(path.read_text())
            if mode not in (None, data.get("mode")):
                path = kept
                data = json.loads(path.read_text())
            if data.get("schema") != SCHEMA:
                raise ValueError(f"schema {data.get('schema')!r} is not {SCHEMA}")
            return from_json(data, cls)
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a report of this version: {error}") from error

    def markdown(self) -> str:
        """The report as Markdown, with units a reader likes."""
        parts = [
            f"# {self.experiment}: {self.mode} on {self.target}",
            f"{self.date}; " + ", ".join(f"{name} {v}" for name, v in self.versions.items()),
            *self.notes,
            section("Results", pairs(self.results)),
            section("Measured", pairs(_without_breakdown(self.measured))),
            section("Predicted", pairs(_without_breakdown(self.predicted))),
            section("Where the time goes", self._breakdown_table()),
            section("Memory of a device", self._memory_table()),
            section("Temporaries at the peak", self._peak_table()),
            section("Compute", pairs(flat(to_json(self.compute, Compute)))),
            section("Collectives", table(self.collectives, _COLLECTIVE_COLUMNS)),
            section("Experiments side by side", table(self.compared)),
            section("Changes", _changes_table(self.changes)),
            section("Claims", table(self.claims)),
            "\n\n".join(f"![{Path(plot).stem}]({plot})" for plot in self.plots),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _breakdown_table(self) -> str:
        """Predicted and measured time side by side, the longest first, of each division."""
        sides = {
            side: part.breakdown
            for side, part in (("predicted", self.predicted), ("measured", self.measured))
            if part is not None and part.breakdown is not None
        }
        lines = ["| | " + " | ".join(sides) + " |", "| --- " * (len(sides) + 1) + "|"]
        for field in _DIVISIONS:
            columns = [getattr(breakdown, field) for breakdown in sides.values()]
            names = sorted(
                {name for column in columns for name in column},
                key=lambda name: (-max(column.get(name, 0) for column in columns), name),
            )
            shown = [name for name in names if any(column.get(name) for column in columns)]
            for name in shown[:_MOST_ROWS]:
                times = (readable("seconds", column.get(name, 0.0)) for column in columns)
                lines.append(f"| {_DIVISIONS[field]} {name or '-'} | " + " | ".join(times) + " |")
        for field in ("hidden_communication_seconds", "idle_seconds", "between_steps_seconds"):
            times = [getattr(breakdown, field) for breakdown in sides.values()]
            if any(times):
                shown = (readable(field, time) for time in times)
                lines.append(f"| {title(field)} | " + " | ".join(shown) + " |")
        return "\n".join(lines) if sides and len(lines) > 2 else ""

    def _memory_table(self) -> str:
        if self.memory is None:
            return ""
        rows: dict[str, Any] = {
            f"{category}_bytes": size for category, size in self.memory.per_device_bytes.items()
        }
        if self.memory.capacity_bytes is not None:
            rows["capacity_bytes"] = self.memory.capacity_bytes
        if self.memory.fits is not None:
            rows["fits"] = self.memory.fits
        return pairs(rows)

    def _peak_table(self) -> str:
        peak = self.memory.peak if self.memory is not None else None
        if peak is None:
            return ""
        rows = {
            "live ranges_bytes": peak.simulated_bytes,
            "compiler_bytes": peak.compiler_bytes,
            "deviation fraction": peak.deviation_fraction,
            "running then": peak.where or "-",
        }
        rows |= {f"of it {name}_bytes": size for name, size in peak.by_category_bytes.items()}
        scopes = list(peak.by_scope_bytes.items())[:_MOST_ROWS]
        rows |= {f"written by {name or '-'}_bytes": size for name, size in scopes}
        lines = [
            f"| {name.replace('_bytes', '')} | {readable(name, x)} |" for name, x in rows.items()
        ]
        return "\n".join(
            ["| quantity | value |", "| --- | --- |", *lines, "", "The largest buffers:", "",
             table(peak.buffers[:_MOST_ROWS])]
        )  # fmt: skip


def versions() -> dict[str, str]:
    """Versions of the packages that a result depends on."""
    found = {}
    for package in ("paxlike", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _keep_other_mode(workdir: Path, mode: str) -> None:
    """Move another mode's report out of the way of ours."""
    try:
        other = json.loads((workdir / "report.json").read_text())["mode"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if other != mode and str(other).isidentifier():
        for suffix in ("json", "md"):
            old = workdir / f"report.{suffix}"
            if old.exists():
                old.replace(workdir / f"report_{other}.{suffix}")


def _changes_table(changes: Sequence[Change]) -> str:
    """Before and after of each figure, with the change in per cent where it existed before."""
    lines = ["| section | what | quantity | before | after | change |", "| --- " * 6 + "|"]
    for change in changes:
        before, after = (readable(change.quantity, x) for x in (change.before, change.after))
        share = f"{change.after / change.before - 1:+.1%}" if change.before else "new"
        cells = (change.section, change.what, title(change.quantity), before, after, share)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) if changes else ""


def _without_breakdown(part: Predicted | Measured | None) -> dict[str, Any]:
    if part is None:
        return {}
    plain = dataclasses.replace(part, breakdown=None)
    return flat(to_json(plain, type(plain)))
