"""Parameters and optimizer state: the closed form against the shards that devices really hold."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from experiments.lm.config import llama2_7b, llama3_8b, llama3_70b
from layers.config import FLOAT32, ModelConfig, MoEConfig
from meshes.axes import MeshShape
from meshes.context import parallelism
from meshes.presets import preset
from paxlike.analysis.memory_model import PAPER, Layout, MicroBatch, estimate
from paxlike.model import Model
from paxlike.training.optimizers import moment_spec
from tests import helpers

LLAMA2_13B = ModelConfig(
    vocab_size=32_000, num_layers=40, embed_dim=5120, num_heads=40, num_kv_heads=40, head_dim=128,
    mlp_dim=13_824,
)  # fmt: skip
BATCH = MicroBatch(sequences=1, length=64)


def counted(model: ModelConfig, rules: str, **axes: int) -> int:
    """Parameters of a device, from the abstract model on a mesh that no machine here has."""
    sizes = MeshShape(**axes).sizes
    mesh = AbstractMesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes)
    )
    with parallelism(mesh, preset(rules)):
        leaves = jax.tree.leaves(Model(model).abstract())
    return sum(math.prod(x.sharding.shard_shape(x.shape)) for x in leaves)


def predicted(model: ModelConfig, rules: str, **axes: int) -> int:
    layout = Layout(mesh=MeshShape(**axes), rules=preset(rules))
    return estimate(model, layout, BATCH).params // PAPER.params


@pytest.mark.parametrize(
    ("model", "published"),
    [
        (llama3_8b().model, 8_030_261_248),
        (llama3_70b().model, 70_553_706_496),
        (llama2_7b().model, 6_738_415_616),
        (LLAMA2_13B, 13_015_864_320),
    ],
    ids=["8b", "70b", "7b", "13b"],
)
def test_parameters_of_published_models(model, published):
    assert predicted(model, "dp") == counted(model, "dp") == published
    for tensor in (2, 8):
        assert predicted(model, "tp", tensor=tensor) == counted(model, "tp", tensor=tensor)
    for axes in ({"fsdp": 16}, {"fsdp": 4, "tensor": 4, "data": 2}):
        assert predicted(model, "fsdp_tp", **axes) == counted(model, "fsdp_tp", **axes)


@pytest.mark.parametrize(
    "model",
    [
        helpers.tiny(qk_norm=True, qkv_bias=True, out_bias=True, mlp_bias=True),
        helpers.tiny(norm="layer", position="learned", tie_embeddings=True, activation="gelu"),
        helpers.tiny(moe=MoEConfig(num_experts=4, num_experts_per_token=2, expert_mlp_dim=24)),
        helpers.tiny(norm_placement="pre_post", num_kv_heads=2),
    ],
    ids=["biases", "gpt", "experts", "gemma"],
)
def test_parameters_of_other_architectures(model):
    for rules in ("dp", "fsdp", "fsdp_tp"):
        axes = {axis: 2 for axis in ("expert", "fsdp", "tensor") if axis in preset(rules).used_axes}
        assert predicted(model, rules, **axes) == counted(model, rules, **axes)


@pytest.mark.parametrize(
    ("rules", "zero1", "axes"),
    [
        ("megatron_sp", True, {"data": 4, "tensor": 2}),
        ("megatron_sp", True, {"data": 2, "seq": 2, "tensor": 2}),
        ("fsdp_tp", True, {"data": 2, "fsdp": 2, "tensor": 2}),
        ("fsdp", False, {"fsdp": 8}),
    ],
)
def test_states_on_device_0(rules, zero1, axes):
    """bfloat16 parameters, float32 gradients, and float32 master copy and moments."""
    model = helpers.tiny(embed_dim=32, num_layers=4, dtypes=FLOAT32)
    layout = Layout(mesh=MeshShape(**axes), rules=preset(rules), zero1=zero1)
    with helpers.on_mesh(rules, **axes) as par:
        abstract = Model(model).abstract()

        def born(dtype, *, moments: bool) -> int:
            total = 0
            for leaf in jax.tree.leaves(abstract):
                split = zero1 and moments
                spec = moment_spec(leaf.sharding.spec, leaf.shape, split_over_data=split)
                array = jnp.zeros(leaf.shape, dtype, device=NamedSharding(par.mesh, spec))
                shards = [s for s in array.addressable_shards if s.device == jax.devices()[0]]
                total += sum(shard.data.nbytes for shard in shards)
            return total

        params = born(jnp.bfloat16, moments=False)
        grads = born(jnp.float32, moments=False)
        optimizer = 3 * born(jnp.float32, moments=True)
    found = estimate(model, layout, MicroBatch(sequences=1, length=64))
    assert (found.params, found.grads, found.optimizer) == (params, grads, optimizer)
    if rules == "megatron_sp":
        assert params + grads + optimizer == params // 2 * (6 + 12 // axes["data"])
