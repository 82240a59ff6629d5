"""The training loop: resume, step, watch, evaluate, save, stop cleanly.

The device never waits for the host: the values of a step are read while the next one runs. Only
before a checkpoint or an evaluation does the loop wait, so that a bad state is never saved.
"""

import dataclasses
import itertools
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from meshes.context import current
from meshes.hardware import identify
from paxlike.analysis.model_flops import training_flops
from paxlike.checkpoint import CheckpointError, Checkpoints, is_full_disk
from paxlike.config import Experiment
from paxlike.model import Model
from paxlike.training.evaluation import bits_per_byte, evaluate, open_data
from paxlike.training.feed import Feed
from paxlike.training.interrupt import Interrupt
from paxlike.training.metrics import MetricLog, StepClock
from paxlike.training.profiling import Profile, Tracer
from paxlike.training.progress import Progress
from paxlike.training.state import (
    TrainState,
    abstract_state,
    averaged_params,
    init_state,
    optimizer_of,
)
from paxlike.training.step import abstract_batch, build_eval_step, build_train_step


class BadStepError(ValueError):
    """Loss or gradients went bad, and the run was told to stop then."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run did.

    Attributes:
        state: the last state.
        step: steps done, those before a resume included.
        interrupted: the signal that stopped it; None is a finished run.
        metrics: the newest value of each metric.
        step_seconds: time of each steady step of this launch.
        tokens_per_step: of all devices together, padding included.
        compile_seconds: to compile the training step; 0 if there was nothing to do.
        data: what was read.
    """

    state: TrainState
    step: int
    interrupted: str | None
    metrics: dict[str, float]
    step_seconds: list[float]
    tokens_per_step: int
    compile_seconds: float
    data: dict[str, Any]


def run(
    model: Model,
    experiment: Experiment,
    workdir: pathlib.Path,
    *,
    quiet: bool = False,
    profile: Profile | None = None,
) -> Outcome:
    """Train under the active parallelism, from the newest good checkpoint if there is one.

    Args:
        model: what is trained.
        experiment: the run.
        workdir: its folder.
        quiet: show no progress.
        profile: steps to trace.

    Raises:
        BadStepError: a bad step under `on_bad_step=stop`, or too many in a row.
        CheckpointError: a checkpoint could not be written for another reason than a full disk, or
            the last one could not be.
        ValueError: checkpoint or data position do not fit the experiment.
    """
    train = experiment.train
    with (
        Interrupt() as interrupt,
        Checkpoints(
            workdir / "checkpoints",
            keep=train.keep_checkpoints,
            keep_best=train.keep_best_checkpoints,
        ) as checkpoints,
    ):
        trainer = _Trainer(model, experiment, checkpoints, interrupt)
        with (
            MetricLog(workdir, trainer.start, wandb_project=train.wandb_project) as trainer.log,
            Progress(experiment.train.num_steps, trainer.start, quiet=quiet) as trainer.progress,
            Tracer(profile) as trainer.tracer,
        ):
            return trainer.run()


class _Trainer:
    """One run: what its loop needs, made once."""

    log: MetricLog
    progress: Progress
    tracer: Tracer

    def __init__(
        self,
        model: Model,
        experiment: Experiment,
        checkpoints: Checkpoints,
        interrupt: Interrupt,
    ) -> None:
        self.config = experiment.train
        self.checkpoints, self.interrupt = checkpoints, interrupt
        optimizer = optimizer_of(model, experiment)
        self.abstract = abstract_state(model, optimizer, experiment)
        self.batch = abstract_batch(experiment)
        self.tokens_per_step = math.prod(self.batch["tokens"].shape)
        self.feed = Feed(experiment)
        self.data = open_data(experiment, self.feed, "train")
        restored = checkpoints.restore(self.abstract)
        if restored is None:
            self.state = init_state(model, optimizer, experiment)
        else:
            self.state = restored.tree
            self.data.set_state(restored.extra["data"])
        self.start = self.saved = restored.step if restored is not None else 0
        self.saved_at = time.monotonic()
        self.train_step = build_train_step(model, optimizer, experiment)
        self.eval_step = build_eval_step(model, experiment)
        if self.config.eval_every:
            self.eval_data = open_data(experiment, self.feed, "eval")
            self.eval_start = self.eval_data.get_state()
        self.clock = StepClock()
        self.peak_seconds = _seconds_at_peak(experiment)

    def run(self) -> Outcome:
        step, last, compile_seconds = self.start, self.config.num_steps, 0.0
        position, pending = self.data.get_state(), None
        if step < last:
            began = time.perf_counter()
            train_step = self.train_step.lower(self.abstract, self.batch).compile()
            compile_seconds = time.perf_counter() - began
            self.tracer.keep_program(train_step)
            self._evaluate(step)
            batch = self.feed(next(self.data))
        while step < last and not self.interrupt.requested():
            step += 1
            with self.tracer.step(step, self.state), jax.transfer_guard("disallow"):
                self.state, metrics = train_step(self.state, batch)
            position = self.data.get_state()
            if step < last:
                batch = self.feed(next(self.data))
            self._watch(step - 1, pending)
            pending = metrics
            saves = self._saves(step)
            if saves or self._evaluates(step):
                self._watch(step, pending)
                self.clock.interrupt()
                pending = None
                # A checkpoint is ranked by its evaluation; otherwise it does not wait for one.
                if saves and not self.config.keep_best_checkpoints:
                    self._save(step, position)
                self._evaluate(step)
                if saves and self.config.keep_best_checkpoints:
                    self._save(step, position)
            self._tolerate_full_disk(self.checkpoints.check)
        self._watch(step, pending)
        if step > self.saved:
            self._save(step, position)
        self.checkpoints.wait()
        return Outcome(
            state=self.state,
            step=step,
            interrupted=self.interrupt.name,
            metrics=self.log.newest(),
            step_seconds=self.clock.seconds,
            tokens_per_step=self.tokens_per_step,
            compile_seconds=compile_seconds,
            data=self.data.info,
        )

    def _watch(self, step: int, metrics: dict[str, jax.Array] | None) -> None:
        """Read a step's values, write them down, and stop the run if they are bad."""
        if metrics is None:
            return
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        seconds = self.clock.arrived()
        if seconds is not None:
            values["step_seconds"] = seconds
            values["tokens_per_second"] = self.tokens_per_step / seconds
            if self.peak_seconds is not None:
                values["mfu"] = self.peak_seconds / seconds
        bad = bool(values.pop("bad"))
        streak = values.pop("bad_streak")
        if _due(step, self.config.log_every) or step == self.config.num_steps or bad:
            self.log.write(step, values)
        self.progress.step(step, values, shown=_due(step, self.config.log_every))
        if not bad:
            return
        what = (
            f"step {step} is bad: loss {values['loss']:.6g}, gradient norm "
            f"{values['grad_norm']:.6g}, learning rate {values['learning_rate']:.3g}"
        )
        if self.config.on_bad_step == "skip" and streak < self.config.max_bad_steps:
            self.progress.say(f"warning: {what}; its update is skipped")
            return
        self.checkpoints.wait()
        good = self.checkpoints.steps()
        raise BadStepError(
            f"{what} ({streak:.0f} in a row). The last good checkpoint is "
            f"{f'of step {good[-1]}' if good else 'none: nothing was saved yet'}; lower "
            "optimizer.learning_rate, or set train.on_bad_step=skip, and launch again to go on "
            "from there"
        )

    def _evaluates(self, step: int) -> bool:
        every = self.config.eval_every
        due = _due(step, every) or (every > 0 and step == self.config.num_steps)
        return due and self.log.value(step, "eval_loss") is None

    def _evaluate(self, step: int) -> None:
        if not self._evaluates(step):
            return
        self.eval_data.set_state(self.eval_start)
        values = evaluate(
            self.eval_step,
            averaged_params(self.state, self.abstract),
            itertools.islice(self.eval_data, self.config.eval_steps),
            self.feed,
            interrupted=self.interrupt.requested,
        )
        if values is None:
            return
        in_bits = bits_per_byte(values["loss"], self.eval_data.info)
        if in_bits is not None:
            values["bits_per_byte"] = in_bits
        self.log.write(step, {f"eval_{name}": value for name, value in values.items()})
        self.progress.say(f"step {step}: evaluation loss {values['loss']:.4f}")

    def _saves(self, step: int) -> bool:
        minutes = self.config.checkpoint_minutes
        if _due(step, self.config.checkpoint_every) or not minutes:
            return _due(step, self.config.checkpoint_every)
        if not _due(step, self.config.log_every):
            return False
        late = time.monotonic() - self.saved_at > 60 * minutes
        if jax.process_count() > 1:  # their clocks differ, and all must save
            late = bool(multihost_utils.broadcast_one_to_all(np.asarray(late)))
        return late

    def _save(self, step: int, position: dict[str, Any]) -> None:
        self._tolerate_full_disk(self.checkpoints.wait)
        score = self.log.value(step, "eval_loss") if self.config.keep_best_checkpoints else None
        self._tolerate_full_disk(
            lambda: self.checkpoints.save(step, self.state, {"data": position}, score=score)
        )
        self.saved, self.saved_at = step, time.monotonic()

    def _tolerate_full_disk(self, action: Callable[[], None]) -> None:
        try:
            action()
        except CheckpointError as error:
            if not is_full_disk(error):
                raise
            self.progress.say(
                f"WARNING: {error}. THE DISK IS FULL: training goes on, older checkpoints are "
                "intact; make room before the next checkpoint"
            )


def _seconds_at_peak(experiment: Experiment) -> float | None:
    """Time of a step if nothing but the model's own FLOPs took any; None where no peak is known."""
    hardware = identify(jax.devices()[0].device_kind)
    if hardware is None:
        return None
    dtype = {"bfloat16": "bf16", "float16": "f16"}.get(experiment.model.dtypes.compute, "f32")
    flops = training_flops(
        experiment.model,
        sequences=experiment.train.global_batch_size,
        length=experiment.data.sequence_length,
    )
    return flops / (hardware.peak_flops(dtype) * current().mesh.size)


def _due(step: int, every: int) -> bool:
    return every > 0 and step > 0 and step % every == 0
