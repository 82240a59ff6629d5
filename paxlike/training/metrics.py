"""What a run writes down: `metrics.jsonl`, TensorBoard events and, if asked, Weights & Biases.

All are continued exactly after a kill.

A row of `metrics.jsonl` is `{"step": n, name: value, ...}`; rows of training and of evaluation
(`eval_*`) are separate lines. On resuming, rows beyond the restored step are dropped, because the
run will write them again. Only process 0 writes.
"""

import hashlib
import json
import pathlib
import time
from types import TracebackType
from typing import Any

import jax

from paxlike.data.optional import optional_package

FILE = "metrics.jsonl"


class MetricLog:
    """The metrics of a run; use as a context manager.

    Args:
        workdir: the run's folder.
        step: last step that counts: 0 for a new run, else the restored one.
        wandb_project: also log to this Weights & Biases project; "" is none.

    Raises:
        ValueError: the package wandb is not installed.
    """

    def __init__(self, workdir: pathlib.Path, step: int, *, wandb_project: str = "") -> None:
        self._writes = jax.process_index() == 0
        self._wandb = _wandb_run(workdir, wandb_project) if self._writes and wandb_project else None
        # All processes must know what was evaluated, or some would evaluate alone.
        self._rows = _rows_until(workdir / FILE, step)
        if self._writes:
            _rewrite(workdir / FILE, self._rows)
            from tensorboardX import SummaryWriter

            self._file = (workdir / FILE).open("a")
            self._events = SummaryWriter(str(workdir / "tensorboard"), purge_step=step + 1)

    def __enter__(self) -> "MetricLog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._writes:
            self._file.close()
            self._events.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=0 if kind is None else 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Add a row; it survives the death of the process."""
        row = {"step": step, **values}
        self._rows.append(row)
        if self._writes:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
            for name, value in values.items():
                group = "eval" if name.startswith("eval_") else "train"
                self._events.add_scalar(f"{group}/{name.removeprefix('eval_')}", value, step)
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def newest(self) -> dict[str, float]:
        """The newest value of each metric."""
        return {name: value for row in self._rows for name, value in row.items()}

    def value(self, step: int, name: str) -> float | None:
        """A metric of a step, if it was written."""
        rows = (row for row in reversed(self._rows) if row["step"] == step and name in row)
        return next(rows, {}).get(name)


def read_metrics(workdir: pathlib.Path) -> list[dict[str, float]]:
    """The rows of a run's metrics."""
    return [json.loads(line) for line in (workdir / FILE).read_text().splitlines()]


def _wandb_run(workdir: pathlib.Path, project: str) -> Any:
    wandb = optional_package("wandb", needed_by="train.wandb_project")
    # One run a workdir: a resumed launch finds it again, and repeated steps are ignored there.
    identity = hashlib.sha1(str(workdir.resolve()).encode()).hexdigest()[:16]
    config = workdir / "config.json"
    return wandb.init(
        project=project, name=workdir.name, id=identity, resume="allow", dir=str(workdir),
        config=json.loads(config.read_text()) if config.exists() else None,
    )  # fmt: skip


def _rows_until(path: pathlib.Path, step: int) -> list[dict[str, float]]:
    """Rows up to a step, less what a kill left of a half-written line."""
    rows = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if line.endswith("\n") and row["step"] <= step:
            rows.append(row)
    return rows


def _rewrite(path: pathlib.Path, rows: list[dict[str, float]]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
    temporary.replace(path)


class StepClock:
    """Times steps by when their results arrive; what happens between steps is left out."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last: float | None = None

    def arrived(self) -> float | None:
        """A step's result is here: the seconds since the one before it, if nothing was between."""
        now, last = time.perf_counter(), self._last
        self._last = now
        if last is None:
            return None
        self.seconds.append(now - last)
        return now - last

    def interrupt(self) -> None:
        """Something else comes before the next step: it starts no interval."""
        self._last = None
