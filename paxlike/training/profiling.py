"""A trace of a few steps for xprof: which steps, starting and stopping it around them, its summary.

Beside the trace lie the compiled step (`step.hlo.txt`: what the instructions that the trace names
belong to) and a profile of the device's memory (`memory.prof`, for pprof).
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import jax

from paxlike.analysis import xprof
from paxlike.report import Breakdown
from paxlike.workdir import write_atomically

PROGRAM = "step.hlo.txt"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
    """A window of steps whose trace is written for xprof.

    Attributes:
        directory: where the trace goes.
        first_step: first step of the window.
        num_steps: how many.
    """

    directory: pathlib.Path
    first_step: int
    num_steps: int

    def __post_init__(self) -> None:
        if self.first_step < 1 or self.num_steps < 1:
            raise ValueError(
                f"the profile's first step is {self.first_step} and its length {self.num_steps}; "
                "expected both to be at least 1"
            )


def breakdown(profile: Profile) -> Breakdown:
    """Summarise the trace that a run has left.

    Raises:
        ValueError: there is none, or it holds no event of the step.
    """
    program = profile.directory / PROGRAM
    if not program.exists():
        raise ValueError(f"no step has been traced: {program} does not exist")
    found = xprof.summarise(profile.directory, program.read_text(), profile.num_steps)
    return Breakdown(**dataclasses.asdict(found))


class Tracer:
    """Traces the window of a profile; use as a context manager around the loop."""

    def __init__(self, profile: Profile | None) -> None:
        self._profile = profile
        self._running = False

    def __enter__(self) -> "Tracer":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def keep_program(self, compiled: jax.stages.Compiled) -> None:
        """Write the compiled step beside the trace to come."""
        if self._profile is not None:
            self._profile.directory.mkdir(parents=True, exist_ok=True)
            write_atomically(self._profile.directory / PROGRAM, compiled.as_text() or "")

    @contextlib.contextmanager
    def step(self, step: int, waits_for: Any) -> Iterator[None]:
        """Mark a step; windows begin and end when `waits_for`, the state before it, is there."""
        profile = self._profile
        if profile is not None and step == profile.first_step + profile.num_steps:
            jax.block_until_ready(waits_for)
            self._stop()
        if profile is not None and step == profile.first_step:
            jax.block_until_ready(waits_for)
            jax.profiler.start_trace(str(profile.directory))
            self._running = True
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield

    def _stop(self) -> None:
        if self._running and self._profile is not None:
            jax.profiler.stop_trace()
            jax.profiler.save_device_memory_profile(str(self._profile.directory / "memory.prof"))
        self._running = False
