"""Preemption: SIGTERM or SIGINT asks the run to save and stop; a second one ends it at once."""

import signal
import threading
from types import FrameType

import jax
from jax.experimental import multihost_utils

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupt:
    """Watches for signals while it is entered.

    Many processes must stop at the same step, so there the jax.distributed service takes SIGTERM
    and has them agree; `requested` must then be called equally often by all of them.

    Attributes:
        name: the signal that came; None so far.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._previous: dict[int, object] = {}
        self._polls = 0

    def __enter__(self) -> "Interrupt":
        alone = jax.process_count() == 1
        if alone and threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def requested(self) -> bool:
        """Whether to save and stop now; poll it every step."""
        if jax.process_count() > 1 and self.name is None:
            self._polls += 1
            if multihost_utils.reached_preemption_sync_point(self._polls):
                self.name = "SIGTERM"
        return self.name is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_DFL)
