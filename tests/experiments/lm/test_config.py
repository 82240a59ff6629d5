"""Published models have the published numbers of parameters, exactly."""

import dataclasses

import jax
import pytest
from flax import nnx

from layers.config import FLOAT32, ModelConfig, MoEConfig
from layers.counting import num_layer_parameters, num_parameters
from layers.decoder import Decoder
from meshes.axes import MeshShape
from meshes.build import build_mesh
from meshes.context import parallelism
from meshes.presets import preset
from paxlike import registry

PUBLISHED = {
    "llama2_7b": 6_738_415_616,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "qwen3_8b": 8_190_735_360,
    "mixtral_8x7b": 46_702_792_704,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals(name):
    assert num_parameters(registry.build(name).model) == PUBLISHED[name]


def test_gpt3_agrees_with_the_formula_of_megatron():
    """Narayanan et al. 2021, equation 2: 12 l h^2 (1 + 13/(12h) + (V+s)/(12lh)).

    It leaves out the final layer norm, 2h.
    """
    layers, hidden, vocab, sequence = 96, 12_288, 50_304, 2048
    formula = layers * (12 * hidden**2 + 13 * hidden) + (vocab + sequence) * hidden
    assert num_parameters(registry.build("gpt3_175b").model) == formula + 2 * hidden


@pytest.mark.parametrize(
    ("name", "layers", "width", "rounded"),
    [("maxtext_16b", 32, 5120, 16.3e9), ("maxtext_32b", 32, 10_240, 32.5e9)],
)
def test_maxtext_scaling_runs_agree_with_their_dimensions(name, layers, width, rounded):
    """Four attention matrices over 32 heads of 256, two of the feed-forward, two norms a layer."""
    a_layer = 4 * width * 32 * 256 + 2 * width * 32_768 + 2 * width
    total = layers * a_layer + 32_768 * width + width
    assert num_parameters(registry.build(name).model) == total
    assert total == pytest.approx(rounded, rel=0.01)


TINY = ModelConfig(
    vocab_size=32, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=6,
    mlp_dim=24, max_position=8, dtypes=FLOAT32,
)  # fmt: skip
MOE = MoEConfig(num_experts=4, num_experts_per_token=2, expert_mlp_dim=12)
VARIANTS = {
    "plain": {},
    "tied": {"tie_embeddings": True},
    "learned_positions": {"position": "learned"},
    "layer_norm_and_biases": {
        "norm": "layer", "qkv_bias": True, "out_bias": True, "mlp_bias": True
    },
    "one_input_matrix": {"activation": "relu2", "mlp_bias": True},
    "pre_post_norm": {"norm_placement": "pre_post"},
    "post_norm": {"norm_placement": "post"},
    "qk_norm": {"qk_norm": True},
    "mixture": {"moe": MOE},
    "mixture_without_gate": {"moe": MOE, "activation": "gelu"},
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_closed_form_counts_the_constructed_decoder(variant):
    config = dataclasses.replace(TINY, **VARIANTS[variant])
    mesh = build_mesh(MeshShape(), jax.devices()[:1])
    with parallelism(mesh, preset("dp")):
        params = jax.eval_shape(
            lambda key: nnx.state(Decoder(config, rngs=nnx.Rngs(params=key)), nnx.Param),
            jax.random.key(0),
        )
    assert num_parameters(config) == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert num_layer_parameters(config) < num_parameters(config)


def test_every_experiment_builds_and_is_described():
    for name, description in registry.descriptions().items():
        experiment = registry.build(name)
        assert experiment.name == name
        assert experiment.description == description
        # --list shows one line each.
        assert 20 <= len(description) <= 100, f"{name}: {description!r}"
