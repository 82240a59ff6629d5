"""What a layer keeps for its backward pass: the closed form against the VJP, byte for byte.

The oracle is JAX's own: shapes of the leaves of a VJP, inside shard_map or not. A layer's share is
the difference between models of six and of three layers, less its parameters.
"""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from layers.config import DTypes, ModelConfig
from layers.remat import PRODUCTS
from layers.schemes import Schemes
from meshes.axes import MeshShape
from meshes.presets import preset
from paxlike.analysis.memory_model import Layout, MicroBatch, Widths, layer_activations
from paxlike.model import Model
from tests import helpers

# The layer of the brief's check: 118,784 bytes of twelve tensors.
MODEL = ModelConfig(
    vocab_size=64, num_layers=6, embed_dim=64, num_heads=8, num_kv_heads=2, head_dim=8,
    mlp_dim=128, dtypes=DTypes(params="bfloat16"),
)  # fmt: skip
SEQUENCES, LENGTH = 2, 32
TWELVE = (
    "attention_input", "query", "key", "value", "attention_context", "mlp_residual", "mlp_input",
    "mlp_gate", "mlp_up", "mlp_activation", "mlp_hidden",
)  # fmt: skip
NAMED12 = f"named:{','.join(TWELVE)}"
SOFTMAX = 4 * SEQUENCES * LENGTH * MODEL.num_heads
OURS = Widths(softmax=4)


def device_bytes(array: jax.ShapeDtypeStruct) -> int:
    # A constant of the trace has no layout; every device holds all of it.
    local = array.sharding.shard_shape(array.shape) if array.sharding else array.shape
    return int(np.prod(local)) * array.dtype.itemsize


def kept(remat: str, rules: str = "tp", **axes: int) -> int:
    """Bytes that one layer of a device keeps, its parameters left out."""

    def of(num_layers: int) -> int:
        with helpers.on_mesh(rules, Schemes(remat=remat), **axes) as par:
            model = Model(dataclasses.replace(MODEL, num_layers=num_layers))
            shape = (SEQUENCES, LENGTH)
            tokens = NamedSharding(par.mesh, par.spec(("act_batch", "act_seq")))
            ids = jax.ShapeDtypeStruct(shape, np.int32, sharding=tokens)
            names = ("tokens", "targets", "segment_ids", "positions")
            batch = dict.fromkeys(names, ids)
            batch["loss_weights"] = jax.ShapeDtypeStruct(shape, np.float32, sharding=tokens)

            def residuals(params, batch):
                return jax.vjp(lambda p: model.loss(p, batch)[0], params)[1]

            leaves = jax.tree.leaves(jax.eval_shape(residuals, model.abstract(), batch))
            params = jax.tree.leaves(model.abstract())
        return sum(map(device_bytes, leaves)) - sum(map(device_bytes, params))

    both = of(6) - of(3)
    assert both % 3 == 0
    return both // 3


def predicted(remat: str, rules: str = "tp", widths: Widths = OURS, **axes: int) -> int:
    layout = Layout(mesh=MeshShape(**axes), rules=preset(rules), remat=remat)
    batch = MicroBatch(sequences=SEQUENCES, length=LENGTH)
    return layer_activations(MODEL, layout, batch, widths)[0]


def test_twelve_tensors():
    """The paper's formula, and the softmax denominators that it leaves out."""
    assert predicted("none", widths=Widths()) == 118_784
    assert predicted(NAMED12) == 118_784 + SOFTMAX
    assert kept(NAMED12) == 118_784 + SOFTMAX


@pytest.mark.parametrize(
    "policy", ["full", "named:attention_context,mlp_up", "named:query,key,value,attention_out"]
)
def test_other_policies(policy):
    assert kept(policy) == predicted(policy)


def test_full_keeps_the_input():
    assert kept("full") == 2 * SEQUENCES * LENGTH * MODEL.embed_dim


def test_the_product_is_2f_over_h():
    without = f"named:{','.join(name for name in TWELVE if name != 'mlp_hidden')}"
    assert kept(NAMED12) - kept(without) == 2 * SEQUENCES * LENGTH * MODEL.mlp_dim


def test_dots():
    assert kept("dots") == predicted("dots")
    assert set(PRODUCTS) >= {"query", "key", "value", "attention_out", "mlp_gate", "mlp_up"}


def test_sequence_parallel_layers_keep_a_quarter():
    split = kept(NAMED12, "megatron_sp", tensor=2, seq=2)
    assert split == (118_784 + SOFTMAX) // 4
    assert split == predicted(NAMED12, "megatron_sp", tensor=2, seq=2)


def test_without_sequence_parallelism_residuals_are_whole():
    """Four h-sized tensors, 8 s b h, are split over the sequence alone."""
    split = kept(NAMED12, "tp", tensor=2, seq=2)
    whole = 8 * SEQUENCES * LENGTH * MODEL.embed_dim
    assert split == whole // 2 + (118_784 + SOFTMAX - whole) // 4
    assert split == predicted(NAMED12, "tp", tensor=2, seq=2)
