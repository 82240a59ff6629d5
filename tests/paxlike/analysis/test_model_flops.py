"""Model FLOPs against figures that others published, and against a compiled program."""

import dataclasses

import pytest

from experiments.lm.config import llama2_7b, llama3_70b, llama3_405b
from layers.config import ModelConfig, MoEConfig
from paxlike.analysis.model_flops import forward_flops, mean_context, training_flops

# MaxText's scale models of December 2023: ReLU, two matrices, tied embeddings.
MAXTEXT_16B = ModelConfig(
    vocab_size=32_768, num_layers=32, embed_dim=5120, num_heads=32, num_kv_heads=32, head_dim=256,
    mlp_dim=32_768, activation="relu", tie_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "length", "gigaflops"),
    [
        (llama2_7b().model, 4096, 43.65 - 6 * 32_000 * 4096 / 1e9),  # it counts the look-up too
        (llama3_70b().model, 8192, 449.2),
        (llama3_405b().model, 8192, 2524),
        (MAXTEXT_16B, 2048, 100.86),
    ],
)
def test_a_training_token_costs_what_was_published(config, length, gigaflops):
    flops = training_flops(config, sequences=3, length=length) / (3 * length)
    assert flops / 1e9 == pytest.approx(gigaflops, rel=2e-3)


def test_idle_experts_cost_nothing():
    moe = MoEConfig(num_experts=8, num_experts_per_token=2, expert_mlp_dim=14_336)
    dense = llama2_7b().model
    sparse = dataclasses.replace(dense, moe=moe)
    twice = dataclasses.replace(dense, mlp_dim=2 * 14_336)
    router = 2 * dense.num_layers * dense.embed_dim * 8
    cost = forward_flops(sparse, tokens=1, context=1)
    assert cost == forward_flops(twice, tokens=1, context=1) + router


def test_a_window_bounds_the_context():
    config = dataclasses.replace(MAXTEXT_16B, window=256)
    exact = sum(min(position + 0.5, 256) for position in range(2048)) / 2048
    assert mean_context(config, 2048) == pytest.approx(exact, rel=1e-3)
    assert mean_context(MAXTEXT_16B, 2048) == 1024
    assert mean_context(dataclasses.replace(MAXTEXT_16B, causal=False), 2048) == 2048
