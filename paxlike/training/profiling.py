"""A trace of a few steps for xprof: which steps, and starting and stopping it around them."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import jax


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


class Tracer:
    """Traces the window of a profile; use as a context manager around the loop."""

    def __init__(self, profile: Profile | None) -> None:
        self._profile = profile
        self._running = False

    def __enter__(self) -> "Tracer":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    @contextlib.contextmanager
    def step(self, step: int, waits_for: Any) -> Iterator[None]:
        """Mark a step; a window ends when `waits_for`, the state before the step, is there."""
        profile = self._profile
        if profile is not None and step == profile.first_step + profile.num_steps:
            jax.block_until_ready(waits_for)
            self._stop()
        if profile is not None and step == profile.first_step:
            jax.profiler.start_trace(str(profile.directory))
            self._running = True
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield

    def _stop(self) -> None:
        if self._running:
            jax.profiler.stop_trace()
        self._running = False
