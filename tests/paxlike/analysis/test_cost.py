"""FLOPs against analytic counts, bytes against what the shapes allow."""

import gzip
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxlike.analysis import cost, hlo
from tests.paxlike.analysis import programs

SAMPLES = pathlib.Path(__file__).parent / "samples"
TARGETS = ["cpu", "h100_0.10.2", "h100_0.12.0.1", "v5e_0.10.2", "v5e_0.12.0.1"]


def module_of(target, name):
    if target == "cpu":
        axis_types = (jax.sharding.AxisType.Explicit,) * 3
        shape = tuple(programs.AXES.values())
        mesh = jax.make_mesh(shape, tuple(programs.AXES), axis_types=axis_types)
        return hlo.parse(programs.compile_text(name, mesh))
    return hlo.parse(gzip.decompress((SAMPLES / f"{target}_{name}.hlo.gz").read_bytes()).decode())


def compiled(function, *arguments):
    return hlo.parse(jax.jit(function).lower(*arguments).compile().as_text())


@pytest.mark.parametrize("target", TARGETS)
def test_transformer_flops_are_analytic(target):
    """Batched attention products, as dots on CPU and GPU, as dilated convolutions on TPU."""
    counted = cost.flops(module_of(target, "transformer"))
    assert counted == pytest.approx(programs.transformer_flops(), rel=0.01)


@pytest.mark.parametrize("target", TARGETS)
def test_remat_adds_the_recomputed_products(target):
    """A pair costs 2 products forward, 4 backward, 2 again: the loss needs the last one too."""
    product = 2 * programs.BATCH * programs.WIDTH * programs.HIDDEN // 2
    counted = cost.flops(module_of(target, "tensor_parallel"))
    assert counted == 8 * programs.LAYERS * product


def test_flops_belong_to_scopes_and_phases():
    rows = cost.operations(module_of("cpu", "transformer"))
    by_scope = {}
    for row in rows:
        by_scope[row.where] = by_scope.get(row.where, 0) + row.flops
    tokens = programs.T_BATCH * programs.T_LENGTH // 2
    assert by_scope["head"] == 6 * tokens * programs.T_WIDTH * programs.T_VOCAB
    forward = sum(row.flops for row in rows if row.phase == "forward")
    assert forward * 3 == sum(row.flops for row in rows)
    assert {row.dtype for row in rows if row.flops} == {"f32"}


def test_a_loop_multiplies_flops_and_reads_one_slice_a_trip():
    layers, width = 16, 128

    def program(weights, x):
        return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, weights)[0]

    module = compiled(program, jnp.ones((layers, width, width)), jnp.ones((8, width)))
    assert cost.flops(module) == layers * 2 * 8 * width * width
    weights = layers * width * width * 4
    # Each layer's slice is read once, and perhaps written and read again as a copy.
    assert weights < cost.hbm_bytes(module) < 4 * weights


def test_update_in_place_moves_only_the_update():
    def program(cache, x):
        return jax.lax.fori_loop(
            0, 32, lambda i, c: jax.lax.dynamic_update_index_in_dim(c, x * i, i, 0), cache
        )

    cache = jnp.ones((32, 4096))
    text = jax.jit(program, donate_argnums=0).lower(cache, jnp.ones(4096)).compile().as_text()
    assert cost.hbm_bytes(hlo.parse(text)) < 4 * cache.size * 4


def test_elementwise_bytes_are_exact():
    module = compiled(lambda x, y: jnp.sin(x) * y + 1.0, jnp.ones((64, 64)), jnp.ones((64, 64)))
    assert cost.hbm_bytes(module) == 3 * 64 * 64 * 4


def brute_force_convolution(lhs, rhs, window):
    """FLOPs of a one-dimensional convolution by running over every position."""
    size, stride, low, high, spread, dilation = window
    length = (lhs - 1) * spread + 1 + low + high
    outputs = (length - (size - 1) * dilation - 1) // stride + 1
    hits = 0
    for out, k in itertools.product(range(outputs), range(size)):
        position = out * stride + k * dilation - low
        hits += 0 <= position < (lhs - 1) * spread + 1 and position % spread == 0
    return outputs, hits


@pytest.mark.parametrize(
    "window",
    [
        (1, 1, 0, 0, 1, 1),
        (3, 1, 1, 1, 1, 1),
        (3, 2, 0, 1, 1, 2),
        (4, 3, 0, 0, 4, 1),  # a batch of 4, as the TPU compiler writes a batched product
        (2, 1, 3, 2, 3, 2),
    ],
)
def test_convolution_counts_only_real_elements(window):
    size, stride, low, high, spread, dilation = window
    lhs, batch, features, channels = 4, 5, 6, 7
    outputs, hits = brute_force_convolution(lhs, size, window)
    text = f"""HloModule c

ENTRY %main (x: f32[{batch},{lhs},{features}], w: f32[{size},{features},{channels}]) -> f32[1] {{
  %x = f32[{batch},{lhs},{features}] parameter(0)
  %w = f32[{size},{features},{channels}] parameter(1)
  ROOT %c = f32[{batch},{outputs},{channels}] convolution(%x, %w), window={{size={size} \
stride={stride} pad={low}_{high} lhs_dilate={spread} rhs_dilate={dilation}}}, \
dim_labels=b0f_0io->b0f
}}
"""
    assert cost.flops(hlo.parse(text)) == 2 * batch * features * channels * hits


def test_live_grouped_convolution():
    def convolve(x, w):
        return jax.lax.conv_general_dilated(x, w, (1,), "VALID", feature_group_count=4)

    x, w = jnp.ones((2, 8, 16)), jnp.ones((12, 2, 5))
    module = compiled(convolve, x, w)
    assert cost.flops(module) == 2 * 2 * 12 * 2 * (12 * 5)


def test_batch_groups_divide_the_work():
    """As in the gradient of a grouped convolution: an output feature sees its share of batch."""
    text = """HloModule c

ENTRY %main (x: f32[8,6,16], w: f32[3,6,4]) -> f32[4,4,14] {
  %x = f32[8,6,16] parameter(0)
  %w = f32[3,6,4] parameter(1)
  ROOT %c = f32[4,4,14] convolution(%x, %w), window={size=3}, dim_labels=bf0_0io->bf0, \
batch_group_count=2
}
"""
    outputs, multiply_adds_each = 4 * 4 * 14, 6 * 3
    assert cost.flops(hlo.parse(text)) == 2 * outputs * multiply_adds_each


CALL = """HloModule c

ENTRY %main (x: bf16[3,8,16], w: bf16[3,16,32]) -> bf16[3,8,32] {{
  %x = bf16[3,8,16] parameter(0)
  %w = bf16[3,16,32] parameter(1)
  ROOT %c = (bf16[3,8,32], s8[100]) custom-call(%x, %w), custom_call_target="{target}", \
metadata={{op_name="jit(f)/attention/splash_mha"}}{config}
}}
"""


@pytest.mark.parametrize(
    "target, config",
    [
        ("__onednn$matmul", ""),
        ("__cublas$lt$matmul", ""),
        (
            "__cublas$gemm",
            ', backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
            '{"lhs_contracting_dimensions":["2"]}}}',
        ),
        (
            "tpu_custom_call",
            ', backend_config={"custom_call_config":{"cost_estimate":{"flops":"24576"}}}',
        ),
    ],
)
def test_library_calls_and_estimates(target, config):
    module = hlo.parse(CALL.format(target=target, config=config))
    (row,) = cost.operations(module)
    assert (row.flops, row.dtype) == (2 * 3 * 8 * 16 * 32, "bf16")
    assert row.bytes == 2 * 3 * (8 * 16 + 16 * 32 + 8 * 32) + 100


def test_kernels_state_their_cost():
    module = hlo.parse(CALL.format(target="tpu_custom_call", config=""))
    assert cost.flops(module) == 0

    def splash(operands, result):
        query = operands[0]
        assert result.elements is not None
        return cost.Cost(flops=2 * query.size, bytes=query.bytes, dtype=query.dtype)

    (row,) = cost.operations(module, {"splash_mha": splash})
    assert (row.flops, row.bytes, row.where) == (2 * 384, 768, "attention")


def test_on_chip_arrays_cost_no_memory_traffic():
    text = """HloModule c

ENTRY %main (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  %s = (f32[64]{0:S(1)}, f32[64]{0}, u32[]{:S(2)}) copy-start(%x)
  %d = f32[64]{0:S(1)} copy-done(%s)
  %e = f32[64]{0:S(1)} sine(%d)
  ROOT %f = f32[64]{0} cosine(%e)
}
"""
    rows = {row.name: row.bytes for row in cost.operations(hlo.parse(text))}
    assert rows == {"s": 256, "f": 256}


def test_oracle_of_the_analytic_count():
    """The analytic count itself, by hand for one layer of the small transformer's forward."""
    tokens, width = 256, 64
    qkv = 2 * tokens * width * 3 * 64
    scores = 2 * np.prod([4, 2, 64, 64, 32]) * 2
    out = 2 * tokens * 64 * width
    mlp = 2 * 2 * tokens * width * 128
    head = 2 * tokens * width * 512
    assert programs.transformer_flops() == 3 * (3 * (qkv + scores + out + mlp) + head)
