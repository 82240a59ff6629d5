"""What a person sees of a run: a progress bar on a terminal, plain lines in a log."""

import sys
from types import TracebackType

import jax
from tqdm import tqdm


class Progress:
    """Shows a run; use as a context manager.

    Args:
        num_steps: steps of the whole run.
        start: steps done before.
        quiet: show nothing but warnings.
    """

    def __init__(self, num_steps: int, start: int, *, quiet: bool) -> None:
        first = jax.process_index() == 0
        self._shows = first and not quiet
        self._bar = tqdm(
            total=num_steps,
            initial=start,
            unit="step",
            dynamic_ncols=True,
            disable=not (self._shows and sys.stderr.isatty()),
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()

    def step(self, step: int, values: dict[str, float], *, shown: bool) -> None:
        """A step is done; `shown` says that a log gets a line."""
        if not self._shows:
            return
        speed = values.get("tokens_per_second")
        text = {"loss": f"{values['loss']:.4f}"}
        if speed:
            text["tokens/s"] = f"{speed:,.0f}"
        if "mfu" in values:
            text["MFU"] = f"{values['mfu']:.1%}"
        if not self._bar.disable:
            self._bar.set_postfix(text, refresh=False)
            self._bar.update()
        elif shown:
            line = ", ".join(f"{name} {value}" for name, value in text.items())
            print(f"step {step}/{self._bar.total}: {line}", flush=True)

    def say(self, text: str) -> None:
        """Show a line, above the bar if there is one."""
        if self._shows or "warning" in text.lower():
            self._bar.write(text, file=sys.stderr)
