"""What a run writes down: `metrics.jsonl` and TensorBoard events, continued exactly after a kill.

A row of `metrics.jsonl` is `{"step": n, name: value, ...}`; rows of training and of evaluation
(`eval_*`) are separate lines. On resuming, rows beyond the restored step are dropped, because the
run will write them again. Only process 0 writes.
"""

import json
import pathlib
import time
from types import TracebackType

import jax

FILE = "metrics.jsonl"


class MetricLog:
    """The metrics of a run; use as a context manager.

    Args:
        workdir: the run's folder.
        step: last step that counts: 0 for a new run, else the restored one.
    """

    def __init__(self, workdir: pathlib.Path, step: int) -> None:
        self._writes = jax.process_index() == 0
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

    def newest(self) -> dict[str, float]:
        """The newest value of each metric."""
        return {name: value for row in self._rows for name, value in row.items()}

    def evaluated(self, step: int) -> bool:
        """Whether this step has its evaluation."""
        return any(row["step"] == step and "eval_loss" in row for row in reversed(self._rows))


def read_metrics(workdir: pathlib.Path) -> list[dict[str, float]]:
    """The rows of a run's metrics."""
    return [json.loads(line) for line in (workdir / FILE).read_text().splitlines()]


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
