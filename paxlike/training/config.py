"""How a model is trained: optimizer and run, as frozen data. Free of JAX."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer, learning-rate schedule, clipping and weight decay.

    Attributes:
        name: the update rule.
        learning_rate: peak learning rate.
        schedule: shape after warm-up: constant, cosine or linear decay over the rest of the run,
            or wsd (warm-up, stable, then linear decay over the last `decay_fraction`).
        warmup_steps: steps of linear warm-up from 0.
        final_fraction: learning rate at the end, as a fraction of the peak.
        decay_fraction: wsd: part of the run that decays.
        beta1: decay of the first moment, or momentum; 0 keeps none (adafactor, sgd).
        beta2: decay of the second moment (adamw, and muon's Adam part), or of lion's momentum.
        epsilon: floor of Adam's denominator.
        weight_decay: decoupled decay of the parameters that `decay_mask` names.
        decay_mask: `matrices` leaves norms, biases and 1-D parameters alone; `all` does not.
        clip_norm: global gradient norm above which gradients are scaled down; None is off.
        moment_dtype: dtype of the first moment; None is the parameters'.

    Raises:
        ValueError: a value is out of range, or would have no effect in this combination.
    """

    name: Literal["adamw", "adafactor", "lion", "muon", "sgd"] = "adamw"
    learning_rate: float = 3e-4
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup_steps: int = 0
    final_fraction: float = 0.1
    decay_fraction: float = 0.2
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    decay_mask: Literal["matrices", "all"] = "matrices"
    clip_norm: float | None = 1.0
    moment_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.learning_rate <= 0:
            raise ValueError(
                f"optimizer.learning_rate is {self.learning_rate}; expected a positive number"
            )
        if self.warmup_steps < 0:
            raise ValueError(f"optimizer.warmup_steps is {self.warmup_steps}; expected at least 0")
        for name in ("final_fraction", "decay_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"optimizer.{name} is {getattr(self, name)}; expected 0 to 1")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} is {getattr(self, name)}; expected [0, 1)")
        if self.weight_decay < 0 or self.epsilon <= 0:
            raise ValueError(
                f"optimizer.weight_decay is {self.weight_decay} and optimizer.epsilon "
                f"{self.epsilon}; expected a decay of at least 0 and a positive epsilon"
            )
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError(
                f"optimizer.clip_norm is {self.clip_norm}; expected a positive number, or None"
            )
        if self.moment_dtype not in (None, "float32", "bfloat16", "float16"):
            raise ValueError(
                f"optimizer.moment_dtype is {self.moment_dtype!r}; expected float32, bfloat16, "
                "float16 or None"
            )
        self._reject_fields_without_effect()

    def _reject_fields_without_effect(self) -> None:
        without_effect = {
            "beta2": self.name in ("adafactor", "sgd"),
            "epsilon": self.name in ("adafactor", "lion", "sgd"),
            "moment_dtype": self.name in ("adafactor", "sgd") and not self.beta1,
            "final_fraction": self.schedule == "constant",
            "decay_fraction": self.schedule != "wsd",
            "decay_mask": not self.weight_decay,
        }
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if without_effect.get(field.name) and value != field.default:
                raise ValueError(
                    f"optimizer.{field.name} is {value!r}, which has no effect with "
                    f"optimizer.name={self.name}, beta1={self.beta1}, schedule={self.schedule}, "
                    f"weight_decay={self.weight_decay}; leave it out"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run.

    Attributes:
        num_steps: optimizer steps.
        global_batch_size: sequences of one optimizer step, whatever the mesh.
        accumulation_steps: parts into which the batch is cut, one after another.
        log_every, eval_every, checkpoint_every: steps between; 0 is never (a checkpoint is
            written at the end all the same).
        eval_steps: batches of one evaluation.
        checkpoint_minutes: also write a checkpoint when this much time has passed since the last
            one, as seen every `log_every` steps; 0 is never.
        keep_checkpoints: newest checkpoints to keep.
        keep_best_checkpoints: checkpoints with the lowest evaluation loss to keep as well.
        ema_decay: decay of an exponential moving average of the parameters; None is off.
        on_bad_step: what to do when loss or gradients are not finite, or the loss exceeds
            `spike_factor` times its running mean: `stop`, keeping the last good checkpoint, or
            `skip` the update.
        spike_factor: see above; None only watches for what is not finite.
        max_bad_steps: consecutive skipped updates after which the run stops all the same.
        wandb_project: Weights & Biases project to log to as well; "" is none.
    """

    num_steps: int = 100
    global_batch_size: int = 8
    accumulation_steps: int = 1
    log_every: int = 10
    eval_every: int = 0
    eval_steps: int = 8
    checkpoint_every: int = 0
    checkpoint_minutes: float = 0.0
    keep_checkpoints: int = 2
    keep_best_checkpoints: int = 0
    ema_decay: float | None = None
    on_bad_step: Literal["stop", "skip"] = "stop"
    spike_factor: float | None = None
    max_bad_steps: int = 10
    wandb_project: str = ""

    def __post_init__(self) -> None:
        for name in (
            "num_steps", "global_batch_size", "accumulation_steps", "eval_steps",
            "keep_checkpoints", "max_bad_steps",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name} is {getattr(self, name)}; expected at least 1")
        for name in (
            "log_every", "eval_every", "checkpoint_every", "checkpoint_minutes",
            "keep_best_checkpoints",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise ValueError(f"train.{name} is {getattr(self, name)}; expected at least 0")
        if self.keep_best_checkpoints and not (
            self.eval_every
            and self.checkpoint_every
            and not self.checkpoint_every % self.eval_every
        ):
            raise ValueError(
                f"train.keep_best_checkpoints is {self.keep_best_checkpoints}, but checkpoints are "
                f"written every {self.checkpoint_every} steps and evaluated every "
                f"{self.eval_every}; make train.checkpoint_every a multiple of train.eval_every"
            )
        if self.checkpoint_minutes and not self.log_every:
            raise ValueError(
                f"train.checkpoint_minutes is {self.checkpoint_minutes}, but train.log_every is 0, "
                "and the clock is looked at every so many steps; set it to 1 or more"
            )
        if self.global_batch_size % self.accumulation_steps:
            raise ValueError(
                f"train.global_batch_size is {self.global_batch_size}, which "
                f"train.accumulation_steps = {self.accumulation_steps} does not divide"
            )
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ValueError(f"train.ema_decay is {self.ema_decay}; expected 0 to 1, or None")
        if self.on_bad_step == "stop" and self.max_bad_steps != type(self).max_bad_steps:
            raise ValueError(
                f"train.max_bad_steps is {self.max_bad_steps}, which has no effect with "
                "train.on_bad_step=stop; leave it out, or set train.on_bad_step=skip"
            )
        if self.spike_factor is not None and self.spike_factor <= 1:
            raise ValueError(
                f"train.spike_factor is {self.spike_factor}; expected more than 1, or None"
            )
