"""`--mode=compile --experiment=a,b,c`: several experiments on one target, in a table and a plot.

Each is compiled as on its own, in a folder of its name inside the workdir, with its own report.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paxlike.config import Experiment
from paxlike.modes.compile import compile_
from paxlike.report import Compared, Report

PLOT = "comparison.png"


def compare(experiments: Sequence[Experiment], workdir: Path, **options: Any) -> Report:
    """Compile experiments and set them side by side.

    Args:
        experiments: what is compared; their names differ.
        workdir: folder of the comparison.
        options: as `compile_` takes them.

    Raises:
        ValueError: two experiments have one name, or one of them cannot be compiled (it is named).
    """
    names = [experiment.name for experiment in experiments]
    if len(set(names)) < len(names):
        raise ValueError(f"experiment is {','.join(names)}; expected each name once")
    reports = []
    for experiment in experiments:
        directory = workdir / experiment.name
        try:
            report = compile_(experiment, directory, **options)
        except ValueError as error:
            raise ValueError(f"experiment {experiment.name}: {error}") from error
        report.write(directory)
        reports.append(report)
    result = Report(
        experiment=",".join(names),
        mode="compile",
        target=reports[0].target,
        compared=tuple(Compared.of(report) for report in reports),
        results={"step": options.get("step") or "train"},
        notes=tuple(dict.fromkeys(note for report in reports for note in report.notes)),
        plots=(PLOT,),
    )
    _plot(reports, workdir / PLOT)
    if not options.get("quiet"):
        print(result.markdown(), end="")
    return result


def _plot(reports: Sequence[Report], path: Path) -> None:
    """Where the predicted time goes, and the memory of a device, a bar for each experiment."""
    from matplotlib.figure import Figure

    times, sizes = [], []
    for report in reports:
        breakdown = report.predicted.breakdown if report.predicted else None
        times.append(dict(breakdown.by_limit_seconds) if breakdown else {})
        assert report.memory is not None
        parts = dict(report.memory.per_device_bytes)
        parts.pop("total")
        sizes.append({name: size / 1e9 for name, size in parts.items() if size > 0})
    names = [report.experiment for report in reports]
    figure = Figure(figsize=(11, 1.6 + 0.5 * len(names)), layout="constrained")
    left, right = figure.subplots(1, 2)
    _bars(left, names, times, "predicted seconds of a step")
    _bars(right, names, sizes, "GB of a device")
    figure.suptitle(reports[0].target)
    figure.savefig(path, dpi=120)


def _bars(axes: Any, names: Sequence[str], parts: Sequence[dict[str, float]], label: str) -> None:
    """Stacked horizontal bars, the same colour for the same part of each."""
    start = [0.0] * len(names)
    for part in dict.fromkeys(part for bar in parts for part in bar):
        widths = [bar.get(part, 0.0) for bar in parts]
        axes.barh(names, widths, left=start, label=part)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.legend(fontsize="x-small")
