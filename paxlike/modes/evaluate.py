"""`--mode=eval`: the loss of a trained experiment on its evaluation split."""

import itertools
from pathlib import Path

import jax

from paxlike.checkpoint import load_params
from paxlike.config import Experiment
from paxlike.model import Model
from paxlike.report import Report
from paxlike.runtime import runtime
from paxlike.training.evaluation import bits_per_byte, open_data
from paxlike.training.evaluation import evaluate as run
from paxlike.training.feed import Feed
from paxlike.training.state import concrete
from paxlike.training.step import build_eval_step


def evaluate(experiment: Experiment, workdir: Path, *, quick: bool = False) -> Report:
    """Evaluate the checkpoint of `inference.checkpoint`; its moving average where it has one.

    Args:
        experiment: what was trained.
        workdir: folder of the run.
        quick: only the first `train.eval_steps` batches, instead of every document of the split.

    Raises:
        ValueError: no usable checkpoint, or one of another model.
    """
    part = "params" if experiment.train.ema_decay is None else "ema"
    with runtime(experiment):
        model = Model(experiment.model)
        step, params = load_params(
            workdir / "checkpoints", concrete(model.abstract()), prefix=part, cast=True,
            which=experiment.inference.checkpoint,
        )  # fmt: skip
        feed = Feed(experiment)
        data = open_data(experiment, feed, "eval")
        batches = itertools.islice(data.epoch(), experiment.train.eval_steps if quick else None)
        values = run(build_eval_step(model, experiment), params, batches, feed)
    results = {f"eval_{name}": value for name, value in (values or {}).items()}
    in_bits = bits_per_byte(results["eval_loss"], data.info)
    return Report(
        experiment=experiment.name,
        mode="eval",
        target=f"{jax.default_backend()}:{jax.device_count()}",
        results={"step": step, **results, "eval_bits_per_byte": in_bits, "data": data.info},
    )
