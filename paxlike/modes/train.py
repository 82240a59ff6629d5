"""`--mode=train`: train an experiment in its workdir, from where it stopped if it was started."""

import dataclasses
from pathlib import Path

import jax

from paxlike.config import Experiment
from paxlike.describe import describe
from paxlike.model import build_model
from paxlike.modes.closing import Closing, close
from paxlike.report import Measured, Report, Spread
from paxlike.runtime import runtime
from paxlike.training.loop import Outcome, run
from paxlike.training.profiling import Profile, breakdown


def train(
    experiment: Experiment,
    workdir: Path,
    *,
    quiet: bool = False,
    profile_first_step: int | None = None,
    profile_steps: int | None = None,
    profile_dir: str | None = None,
) -> Report:
    """Train.

    Args:
        experiment: what is trained.
        workdir: folder of the run; a second call with it resumes.
        quiet: show no progress.
        profile_first_step: first step of an xprof trace; None with the other two is no trace.
        profile_steps: steps of the trace.
        profile_dir: folder of the trace.

    Raises:
        ValueError: experiment, devices, data or checkpoint do not fit each other, or a step was bad
            (`paxlike.training.loop.BadStepError`).
    """
    profile = None
    if (profile_first_step, profile_steps, profile_dir) != (None, None, None):
        profile = Profile(
            directory=Path(profile_dir) if profile_dir is not None else workdir / "trace",
            first_step=3 if profile_first_step is None else profile_first_step,
            num_steps=3 if profile_steps is None else profile_steps,
        )
    workdir.mkdir(parents=True, exist_ok=True)
    with runtime(experiment):
        model = build_model(experiment)
        if not quiet and jax.process_index() == 0:
            print(describe(model.abstract()), flush=True)
        traced = profile if jax.process_index() == 0 else None
        outcome = run(model, experiment, workdir, quiet=quiet, profile=traced)
    if outcome.interrupted and not quiet and jax.process_index() == 0:
        print(
            f"stopped by {outcome.interrupted} after step {outcome.step} of "
            f"{experiment.train.num_steps}; the state is saved in {workdir / 'checkpoints'}: run "
            "the same command again to go on",
            flush=True,
        )
    closing = None
    if not quiet and not outcome.interrupted:
        closing = close(experiment, outcome, workdir)
    report = _report(experiment, outcome, closing)
    if traced is not None:
        _add_breakdown(report, traced)
    return report


def _add_breakdown(report: Report, profile: Profile) -> None:
    """Say where the traced steps' time went, or why that is unknown."""
    try:
        found = breakdown(profile)
    except ValueError as error:
        report.notes += (f"The profile has no summary: {error}.",)
    else:
        report.measured = dataclasses.replace(report.measured or Measured(), breakdown=found)


def _report(experiment: Experiment, outcome: Outcome, closing: Closing | None) -> Report:
    measured = None
    if outcome.step_seconds:
        spread = Spread.of(outcome.step_seconds)
        measured = Measured(
            step_seconds=spread, tokens_per_second=outcome.tokens_per_step / spread.median
        )
    notes = ()
    if outcome.interrupted:
        notes = (f"Stopped by {outcome.interrupted}; launch again to go on.",)
    timing = ("step_seconds", "tokens_per_second")
    results = {name: x for name, x in outcome.metrics.items() if name not in timing}
    return Report(
        experiment=experiment.name,
        mode="train",
        target=f"{jax.default_backend()}:{jax.device_count()}",
        measured=measured,
        results=results
        | {"compile_seconds": outcome.compile_seconds, "data": outcome.data}
        | (closing.results if closing else {}),
        notes=notes,
        plots=closing.plots if closing else (),
    )
