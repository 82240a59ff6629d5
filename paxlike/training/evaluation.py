"""Evaluation: the mean loss over tokens of some batches, and what follows from it."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import numpy as np

from paxlike.config import Experiment
from paxlike.data.pipeline import Pipeline, build
from paxlike.training.feed import Feed


def open_data(experiment: Experiment, feed: Feed, split: Literal["train", "eval"]) -> Pipeline:
    """Open the rows that this host reads.

    Raises:
        ValueError: the data cannot be read, or its tokenizer is larger than the model's vocabulary.
    """
    pipeline = build(
        experiment.data,
        global_batch_size=experiment.train.global_batch_size,
        split=split,
        seed=experiment.seed,
        num_hosts=feed.num_hosts,
        host_index=feed.host_index,
    )
    if pipeline.tokenizer.vocab_size > experiment.model.vocab_size:
        raise ValueError(
            f"model.vocab_size is {experiment.model.vocab_size}, but the tokenizer has "
            f"{pipeline.tokenizer.vocab_size} tokens; expected at least as many"
        )
    return pipeline


def evaluate(
    eval_step: Callable[..., Any],
    params: Any,
    batches: Iterable[dict[str, np.ndarray]],
    feed: Feed,
    *,
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """Average the loss over tokens.

    Args:
        eval_step: of `build_eval_step`.
        params: parameters on the devices.
        batches: this host's rows, as the data pipeline gives them.
        feed: puts them on the devices.
        interrupted: polled before each batch; True gives up.

    Returns:
        `loss` (nats a token), `perplexity` and `tokens` (sum of the loss weights); None if
        interrupted.
    """
    loss = weights = 0.0
    pending: dict[str, jax.Array] | None = None
    for batch in batches:
        if interrupted():
            return None
        fed = feed(batch)
        with jax.transfer_guard("disallow"):
            newest = eval_step(params, fed)
        # Read one batch behind, so that the devices always have the next.
        if pending is not None:
            sums = jax.device_get(pending)
            loss, weights = loss + float(sums["loss"]), weights + float(sums["weights"])
        pending = newest
    if pending is not None:
        sums = jax.device_get(pending)
        loss, weights = loss + float(sums["loss"]), weights + float(sums["weights"])
    mean = loss / max(weights, 1)
    return {"loss": mean, "perplexity": _exp(mean), "tokens": weights}


def bits_per_byte(loss: float, info: dict[str, Any]) -> float | None:
    """Turn nats a token into bits a byte of text, which other tokenizers can be compared by.

    Args:
        loss: nats a token.
        info: of the pipeline: tokens and UTF-8 bytes of the split; unknown for streams.
    """
    if not info.get("tokens") or not info.get("bytes"):
        return None
    return loss / math.log(2) * info["tokens"] / info["bytes"]


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
