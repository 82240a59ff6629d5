"""A bigram model: what a trained language model must beat.

p(b | a) = (count(a, b) + k p(b)) / (count(a) + k), with p(b) the add-one unigram distribution:
counts where there are many, the unigram where there are few.
"""

from collections.abc import Iterable

import numpy as np

from paxlike.data.packing import Batch


def bigram_loss(
    train: Iterable[Batch], evaluation: Iterable[Batch], *, vocab_size: int, strength: float = 4.0
) -> float:
    """Cross entropy of an interpolated bigram model.

    Args:
        train: batches to count in; `pipeline.epoch()` is the whole split.
        evaluation: batches to predict, weighted as the model's loss is.
        vocab_size: tokens in the vocabulary.
        strength: k, the number of counts that the unigram distribution stands for.

    Returns:
        Nats a token over the targets of weight 1 in `evaluation`.
    """
    pairs, counts = _pairs(train, vocab_size)
    first, second = np.divmod(pairs, vocab_size)
    unigram = np.bincount(second, counts, vocab_size) + 1
    unigram /= unigram.sum()
    context = np.bincount(first, counts, vocab_size)

    wanted, weight = _pairs(evaluation, vocab_size)
    first, second = np.divmod(wanted, vocab_size)
    at = np.minimum(np.searchsorted(pairs, wanted), len(pairs) - 1)
    count = np.where(pairs[at] == wanted, counts[at], 0)
    probability = (count + strength * unigram[second]) / (context[first] + strength)
    return float(-(weight * np.log(probability)).sum() / weight.sum())


def _pairs(batches: Iterable[Batch], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct (token, next token) pairs as first * vocab_size + second, and their counts."""
    codes = [
        (batch["tokens"].astype(np.int64) * vocab_size + batch["targets"])[
            batch["loss_weights"] > 0
        ]
        for batch in batches
    ]
    return np.unique(np.concatenate(codes), return_counts=True)
