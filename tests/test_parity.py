"""A model has one loss and one gradient: on every mesh, in every way of executing it.

Two steps prove it. One device against an independent dense float64 reference (`tests.reference`),
option by option; then every mesh against one device. Float32 sums in another order differ by a few
times 1e-7 of the largest value; 1e-5 leaves room for depth, and none for a wrong term.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.config import DTypes, ModelConfig
from layers.schemes import Schemes
from meshes.presets import FSDP_SP, PRESETS, TP
from paxlike.model import Model
from tests import helpers, reference
from tests.helpers import TINY, largest_error, run, tiny

RELATIVE = 1e-5

MODELS: dict[str, ModelConfig] = {
    "llama": TINY,
    "gemma": tiny(
        tie_embeddings=True, scale_embeddings=True, attention_softcap=2.0, logit_softcap=3.0,
        window=3, norm_placement="pre_post", norm_unit_offset=True, activation="geglu",
        z_loss=0.01,
    ),
    "gpt": tiny(
        norm="layer", position="learned", qkv_bias=True, out_bias=True, mlp_bias=True,
        activation="gelu", num_kv_heads=8,
    ),
    "original": tiny(
        norm="layer", norm_placement="post", position="none", causal=False, activation="relu",
        tie_embeddings=True,
    ),
    "qwen": tiny(qkv_bias=True, qk_norm=True, mlp_bias=True, z_loss=0.1),
    "mqa": tiny(num_kv_heads=1, activation="relu2", attention_scale=0.7),
    "gelu_tanh": tiny(activation="gelu_tanh", window=1, causal=False, num_layers=1),
}  # fmt: skip

KV_WHOLE = TP.replace(kv_heads=None, act_kv_heads=None)
KV_WHOLE_SP = FSDP_SP.replace(kv_heads=None, act_kv_heads=None)

# (rules, mesh axes), each with the reason why it is here.
MESHES = {
    "all_data": ("dp", dict(data=8)),
    "all_sequence": ("dp", dict(seq=8)),
    "all_fsdp": ("fsdp", dict(fsdp=8)),
    "all_tensor_fewer_kv_heads": (KV_WHOLE, dict(tensor=8)),
    "tensor_to_the_last_kv_head": ("tp", dict(tensor=4)),
    "sequence_over_tensor": ("megatron_sp", dict(tensor=4)),
    "replicated_groups_of_shards": ("hsdp", dict(data=2, fsdp=4)),
    "shards_over_two_axes": ("fsdp_2d", dict(data=4, fsdp=2)),
    "quickstart": ("tp", dict(data=2, seq=2, tensor=2)),
    "two_dimensions_of_weights": ("fsdp_tp", dict(data=2, fsdp=2, tensor=2)),
    "residual_over_two_axes": ("megatron_sp", dict(seq=2, tensor=4)),
    "everything": ("fsdp_sp", dict(seq=2, fsdp=2, tensor=2)),
    "experts_hold_data": ("fsdp_sp", dict(expert=2, fsdp=2, tensor=2)),
}
MIXED = {
    "gemma": ["quickstart", "everything"],
    "gpt": ["two_dimensions_of_weights", "everything"],
    "original": ["quickstart", "everything"],
    "qwen": ["residual_over_two_axes", "two_dimensions_of_weights"],
}

EXECUTIONS = {
    "full_remat": Schemes(remat="full"),
    "dots_remat": Schemes(remat="dots"),
    "named_remat": Schemes(remat="named:attention_context,mlp_up"),
    "offload_remat": Schemes(remat="offload:attention_context,mlp_up"),
    "no_scan": Schemes(scan_layers=False),
    "no_scan_full_remat": Schemes(scan_layers=False, remat="full"),
    "chunk_divides": Schemes(loss_chunk=8),
    "chunk_does_not_divide": Schemes(loss_chunk=5),
    "chunk_larger_than_all": Schemes(loss_chunk=10_000),
}


def assert_same(actual: helpers.Run, expected: helpers.Run) -> None:
    assert actual.loss == pytest.approx(expected.loss, rel=RELATIVE)
    assert actual.metrics == pytest.approx(expected.metrics, rel=RELATIVE)
    error, name = largest_error(actual.grads, expected.grads)
    assert error < RELATIVE, f"gradient of {name} is off by {error:.2e}"


@pytest.mark.parametrize(
    "model, packed", [*((name, True) for name in MODELS), ("llama", False), ("gemma", False)]
)
def test_one_device_equals_a_dense_reference(model, packed):
    config = MODELS[model]
    ours = run(config, packed=packed)
    loss, cross_entropy, grads = reference.loss_and_gradients(
        config, ours.params, helpers.random_batch(packed)
    )
    assert ours.loss == pytest.approx(loss, rel=RELATIVE)
    assert ours.metrics["loss"] == pytest.approx(cross_entropy, rel=RELATIVE)
    error, name = largest_error(ours.grads, grads)
    assert error < RELATIVE, f"gradient of {name} is off by {error:.2e}"


def test_every_preset_is_covered():
    covered = {rules for rules, _ in MESHES.values() if isinstance(rules, str)}
    assert covered >= PRESETS.keys()


@pytest.mark.parametrize("mesh", MESHES)
def test_mesh_gives_the_loss_and_gradients_of_one_device(mesh):
    """Class of complaints: loss scaled by the number of sequence shards, gradients off by n,
    sum taken for mean. Weights and documents differ between devices, so each of them shows.
    """
    rules, axes = MESHES[mesh]
    assert_same(run(TINY, rules, **axes), run(TINY))


@pytest.mark.parametrize("mesh", ["all_sequence", "everything"])
def test_mesh_without_packing(mesh):
    rules, axes = MESHES[mesh]
    assert_same(run(TINY, rules, packed=False, **axes), run(TINY, packed=False))


@pytest.mark.parametrize(
    "model, mesh", [(m, mesh) for m, meshes in MIXED.items() for mesh in meshes]
)
def test_options_on_mixed_meshes(model, mesh):
    rules, axes = MESHES[mesh]
    assert_same(run(MODELS[model], rules, **axes), run(MODELS[model]))


def test_one_kv_head_on_a_mixed_mesh():
    mesh = dict(seq=2, fsdp=2, tensor=2)
    assert_same(run(MODELS["mqa"], KV_WHOLE_SP, **mesh), run(MODELS["mqa"]))


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_execution_changes_nothing(execution):
    schemes = EXECUTIONS[execution]
    rules, axes = MESHES["two_dimensions_of_weights"]
    assert_same(run(TINY, rules, schemes=schemes, **axes), run(TINY))


def test_chunks_of_the_loss_with_softcap_ties_and_z_loss():
    """The last chunk is padded: no padding may enter the z loss."""
    rules, axes = MESHES["everything"]
    ours = run(MODELS["gemma"], rules, schemes=Schemes(loss_chunk=5), **axes)
    assert_same(ours, run(MODELS["gemma"]))


@pytest.mark.parametrize("mesh", ["all_data", "all_fsdp", "quickstart", "everything"])
def test_initial_parameters_do_not_depend_on_the_mesh(mesh):
    """Class of complaints: random initialisation depends on the sharding. Bits are compared."""
    rules, axes = MESHES[mesh]
    ours, alone = run(TINY, rules, **axes).initial, run(TINY).initial
    for name, wanted in alone.items():
        np.testing.assert_array_equal(ours[name], wanted, err_msg=name)


def test_initial_parameters_differ_from_layer_to_layer():
    for name, value in run(TINY).initial.items():
        if name.startswith("layers.") and value.ndim > 2:
            assert not np.array_equal(value[0], value[1]), name


def placed(rows: np.ndarray, columns: np.ndarray) -> dict[str, np.ndarray]:
    return {k: x[rows][:, columns] for k, x in helpers.random_batch().items()}


def loss_of(batch: dict[str, np.ndarray], rules, **axes: int) -> float:
    with helpers.on_mesh(rules, **axes) as par:
        model = Model(TINY)
        params = helpers.disturbed(model.init(jax.random.key(0)))
        return float(jax.jit(model.loss)(params, helpers.put(par, batch))[0])


def test_placement_of_tokens_changes_nothing():
    """Class of complaints: packing with a split sequence changes the loss; round-robin context
    parallelism feeds wrong positions. Tokens carry their positions: any order gives the same loss.
    """
    random = np.random.default_rng(3)
    rows = random.permutation(helpers.BATCH)
    zigzag = np.concatenate([np.r_[i * 2 : i * 2 + 2, 14 - i * 2 : 16 - i * 2] for i in range(4)])
    for columns in (zigzag, random.permutation(helpers.LENGTH)):
        loss = loss_of(placed(rows, columns), "tp", data=2, seq=4)
        assert loss == pytest.approx(run(TINY).loss, rel=RELATIVE)


@pytest.mark.parametrize("axes", [dict(), dict(data=2, fsdp=2, tensor=2)], ids=["one", "mixed"])
def test_parts_of_a_batch_add_up_by_tokens(axes):
    """Class of complaints: accumulation averages parts that hold unequally many tokens."""
    with helpers.on_mesh("fsdp_tp", **axes) as par:
        model = Model(TINY)
        params = helpers.disturbed(model.init(jax.random.key(0)))
        grad = jax.jit(jax.grad(model.loss_sum, has_aux=True))
        batch = helpers.random_batch()
        parts = [
            grad(params, helpers.put(par, {k: x[half] for k, x in batch.items()}))
            for half in (slice(0, 4), slice(4, 8))
        ]
        weights = [float(sums["weights"]) for _, sums in parts]
        assert weights[0] != weights[1]
        total = jax.tree.map(lambda a, b: (a + b) / sum(weights), parts[0][0], parts[1][0])
    assert sum(weights) == pytest.approx(batch["loss_weights"].sum())
    error, name = largest_error(helpers.by_path(total), run(TINY).grads)
    assert error < RELATIVE, name


def test_a_batch_without_weights_has_loss_and_gradient_zero():
    batch = dict(helpers.random_batch(), loss_weights=np.zeros((8, 16), np.float32))
    assert loss_of(batch, "fsdp_tp", data=2, tensor=2) == 0


@pytest.mark.parametrize("mesh", ["everything", "quickstart"])
def test_bfloat16_compute_stays_close(mesh):
    """8 bits of mantissa: the loss within 2 %, gradients within 10 % of each array's norm."""
    config = dataclasses.replace(TINY, dtypes=DTypes(compute="bfloat16"))
    rules, axes = MESHES[mesh]
    ours, exact = run(config, rules, **axes), run(TINY)
    assert ours.loss == pytest.approx(exact.loss, rel=0.02)
    for name, wanted in exact.grads.items():
        assert ours.grads[name].dtype == jnp.float32
        off = np.linalg.norm(ours.grads[name] - wanted) / np.linalg.norm(wanted)
        assert off < 0.1, f"{name}: {off}"
