"""The bigram model against one that counts in dictionaries, and against a language it can know."""

import math
from collections import Counter

import numpy as np
import pytest

from paxlike.data.baseline import bigram_loss
from paxlike.data.config import DataConfig, SourceConfig
from paxlike.data.pipeline import build


def _reference(train, evaluation, vocab_size, k):
    pairs = Counter(pair for d in train for pair in zip(d, d[1:], strict=False))
    first, second = Counter(), Counter()
    for (a, b), count in pairs.items():
        first[a] += count
        second[b] += count
    total = sum(second.values())
    losses = []
    for document in evaluation:
        for a, b in zip(document, document[1:], strict=False):
            unigram = (second[b] + 1) / (total + vocab_size)
            losses.append(-math.log((pairs[a, b] + k * unigram) / (first[a] + k)))
    return sum(losses) / len(losses)


def test_equals_counting_by_hand(write, texts):
    config = DataConfig(source=write("text"), sequence_length=7, eval_fraction=0.3)
    train, evaluation = (
        build(config, global_batch_size=4, split=split, seed=0) for split in ("train", "eval")
    )
    from paxlike.data.corpus import document_tokens, split_of

    documents = {"train": [], "eval": []}
    for text in texts:
        tokens = document_tokens(train.tokenizer, text).tolist()
        documents[split_of(text, 0.3)].append(tokens)
    want = _reference(documents["train"], documents["eval"], 259, 4.0)
    got = bigram_loss(train.epoch(), evaluation.epoch(), vocab_size=259)
    assert got == pytest.approx(want, rel=1e-12)


def test_synthetic_language_has_the_entropy_of_four_successors():
    config = DataConfig(
        source=SourceConfig(kind="synthetic", vocab_size=64, num_documents=800),
        sequence_length=64,
        eval_fraction=0.2,
    )
    train, evaluation = (
        build(config, global_batch_size=8, split=split, seed=0) for split in ("train", "eval")
    )
    loss = bigram_loss(train.epoch(), evaluation.epoch(), vocab_size=64)
    # The repeat's first token, one in 127, is not of the chain: about log(64) for it.
    assert math.log(4) - 0.05 < loss < math.log(4) + 0.08
    assert np.isfinite(loss)
