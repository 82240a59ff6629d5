"""What a finished training run says of itself: a baseline, a sample, a curve, what to do next."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import matplotlib

from meshes.presets import for_generation
from paxlike.config import Experiment
from paxlike.data.baseline import bigram_loss
from paxlike.data.pipeline import build
from paxlike.model import Model, Params
from paxlike.modes.generate import complete
from paxlike.runtime import runtime
from paxlike.training.loop import Outcome

# A bigram model is fitted where its counts are quick to make and fit in memory.
_MOST_TOKENS = 30_000_000

CURVE = "loss.png"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Closing:
    """Results and pictures for the report."""

    results: dict[str, Any]
    plots: tuple[str, ...]


def close(experiment: Experiment, outcome: Outcome, workdir: Path) -> Closing:
    """Compare with a baseline, sample, draw and advise; every process of the run calls it.

    Args:
        experiment: what was trained.
        outcome: of the loop.
        workdir: folder of the run.
    """
    first = jax.process_index() == 0
    baseline = bigram_baseline(experiment, outcome.data) if first else None
    results: dict[str, Any] = {}
    if baseline is not None:
        results["bigram_eval_loss"] = baseline
        reached = outcome.metrics.get("eval_loss")
        if reached is not None:
            print(f"evaluation loss {reached:.3f} nats a token; a bigram model has {baseline:.3f}")
    if any(source.kind != "synthetic" for source in experiment.data.sources):
        results["sample"] = sample(experiment, outcome.state.params)
    curve = draw_curve(workdir, baseline) if first else None
    if first:
        print(next_steps(experiment, workdir), flush=True)
    return Closing(results=results, plots=(curve,) if curve else ())


def bigram_baseline(experiment: Experiment, info: dict[str, Any]) -> float | None:
    """Evaluation loss of a bigram model of the same corpus, in nats a token.

    Args:
        experiment: the run; its evaluation batches are those of the loop.
        info: what the training split said of itself.

    Returns:
        The loss; None for synthetic, streamed and large corpora.
    """
    finite = all(source.kind != "synthetic" for source in experiment.data.sources)
    if not finite or not info.get("tokens") or info["tokens"] > _MOST_TOKENS:
        return None
    batches = {
        split: build(experiment.data, global_batch_size=64, split=split, seed=experiment.seed)
        for split in ("train", "eval")
    }
    vocab_size = batches["train"].tokenizer.vocab_size
    return bigram_loss(batches["train"].epoch(), batches["eval"].epoch(), vocab_size=vocab_size)


def sample(experiment: Experiment, params: Params) -> str:
    """Continue the experiment's prompt with these parameters, printing as it comes."""
    with runtime(experiment, rules=for_generation(experiment.parallel.rule_table)):
        return complete(
            experiment, Model(experiment.model), params, experiment.inference.prompt, stream=True
        )[0]


def draw_curve(workdir: Path, baseline: float | None) -> str | None:
    """Plot training and evaluation loss against steps; return the picture's name, if any."""
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    train = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    held_out = [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row]
    if len(train) < 2:
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # after the backend is chosen

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(*zip(*train, strict=True), label="training")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", label="evaluation")
    if baseline is not None:
        axes.axhline(baseline, color="grey", linestyle="--", label="bigram model")
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(workdir / CURVE, dpi=120)
    plt.close(figure)
    return CURVE


def next_steps(experiment: Experiment, workdir: Path) -> str:
    """Commands that make sense after this run."""
    paxlike = f".venv/bin/paxlike --workdir={workdir}"
    more = 2 * experiment.train.num_steps
    return "\n".join(
        (
            "What to try next:",
            f'  {paxlike} --mode=generate --prompt="class Node:"',
            f"  {paxlike} --mode=eval",
            f"  {paxlike} --override=train.num_steps={more}    # goes on from here",
            f"  {paxlike} --mode=compile --target=cpu:8    # memory and collectives of a step",
        )
    )
