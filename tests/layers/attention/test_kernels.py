"""JAX's Pallas kernels, interpreted on CPU, against a dense softmax and across meshes.

The oracle is one softmax over all keys in float64, differentiated by JAX. Interpreted kernels
compute in float32; 1e-5 of the largest element leaves room for sums in another order.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from layers.attention.kernels import CORE, Task
from layers.attention.masking import Masking
from layers.attention.schemes import attention_scheme
from layers.attention.splash import Splash
from layers.attention.triton import Triton
from layers.schemes import Schemes
from paxlike.runtime import attention_kernel
from tests import helpers
from tests.helpers import on_mesh

SPLASH, TRITON = Splash(interpret=True), Triton(interpret=True)
PLAIN = Masking(causal=True, window=None, scale=0.3, softcap=None)
LENGTH = 256


def masking(**changes) -> Masking:
    return dataclasses.replace(PLAIN, **changes)


def operands(heads=4, kv_heads=2, batch=2, head_dim=16):
    random = np.random.default_rng(0)
    shapes = [(batch, n, LENGTH, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    return [random.standard_normal(shape).astype(np.float32) for shape in shapes]


def packed(batch=2):
    """Documents of different lengths in each row, then padding; positions start again."""
    segments, positions = np.zeros((2, batch, LENGTH), np.int32)
    for row in range(batch):
        for number, (start, end) in enumerate([(0, 90 + row), (90 + row, 100), (100, 240)], 1):
            segments[row, start:end] = number
            positions[row, start:end] = np.arange(end - start)
    positions[:, 240:] = np.arange(LENGTH - 240)
    return positions, segments


def dense(q, k, v, d_out, rule: Masking, positions, segments):
    """Context and gradients by one softmax in float64."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        distance = positions[:, :, None] - positions[:, None, :]
        seen = segments[:, :, None] == segments[:, None, :]
        seen &= (distance >= 0) | (not rule.causal)
        seen &= distance < (LENGTH if rule.window is None else rule.window)

        def attend(q, k, v):
            k, v = (jnp.repeat(x, q.shape[1] // k.shape[1], 1) for x in (k, v))
            s = jnp.einsum("bnth,bnsh->bnts", q, k) * rule.scale
            s = s if rule.softcap is None else rule.softcap * jnp.tanh(s / rule.softcap)
            return jax.nn.softmax(jnp.where(seen[:, None], s, -1e30), -1) @ v

        wide = [jnp.asarray(x, jnp.float64) for x in (q, k, v, d_out)]
        out, pull = jax.vjp(attend, *wide[:3])
        return [np.asarray(x) for x in (out, *pull(wide[3]))]


def by_kernel(kernel, q, k, v, d_out, rule: Masking, positions, segments, **axes):
    """The same on a mesh, through the attention scheme."""
    with on_mesh("tp", Schemes(attention=attention_scheme("all_gather", kernel)), **axes) as par:
        spec = par.spec(("act_batch", "act_heads", "act_seq", None))
        q, k, v, d_out = (jax.device_put(x, spec) for x in (q, k, v, d_out))
        own = [jax.device_put(x, par.spec(("act_batch", "act_seq"))) for x in (positions, segments)]
        whole = [jax.device_put(x, P(spec[0])) for x in (positions, segments)]

        @jax.jit
        def run(q, k, v, d_out):
            def attend(q, k, v):
                return par.schemes.attention(
                    q, k, v, q_positions_BT=own[0], kv_positions_BS=whole[0],
                    q_segments_BT=own[1], kv_segments_BS=whole[1], masking=rule,
                )  # fmt: skip

            out, pull = jax.vjp(attend, q, k, v)
            return out, *pull(d_out)

        return [np.asarray(x) for x in run(q, k, v, d_out)], par


def check(kernel, rule: Masking, *, heads=4, kv_heads=2, **axes) -> None:
    arrays, (positions, segments) = operands(heads, kv_heads), packed()
    found, par = by_kernel(kernel, *arrays, rule, positions, segments, **axes)
    assert par.remarks == [r for r in par.remarks if f"{kernel.name} kernel, tiles" in r] != []
    expected = dense(*arrays, rule, positions, segments)
    for name, x, y in zip(("out", "dq", "dk", "dv"), found, expected, strict=True):
        error = np.abs(x - y).max() / np.abs(y).max()
        assert error < 1e-5, f"{name} is off by {error:.1e} of its largest element"


@pytest.mark.parametrize(
    ("rule", "heads"),
    [
        (masking(), (4, 2)),
        (masking(causal=False), (2, 2)),
        (masking(window=70), (4, 1)),
        (masking(window=150, causal=False, softcap=0.8), (2, 1)),
        (masking(softcap=0.5), (2, 2)),
    ],
    ids=["causal", "bidirectional", "window", "window_both_ways_softcap", "softcap"],
)
def test_splash_is_softmax_attention(rule, heads):
    check(SPLASH, rule, heads=heads[0], kv_heads=heads[1])


@pytest.mark.parametrize(
    ("rule", "heads"),
    [(masking(), (4, 2)), (masking(causal=False), (2, 2)), (masking(), (2, 1))],
    ids=["causal", "bidirectional", "multi_query"],
)
def test_triton_is_softmax_attention(rule, heads):
    check(TRITON, rule, heads=heads[0], kv_heads=heads[1])


@pytest.mark.parametrize("rule", [masking(), masking(window=100)], ids=["causal", "window"])
def test_splash_on_a_mesh(rule):
    """Rows, heads and the sequence are split: each device masks its own part of the queries."""
    check(SPLASH, rule, data=2, seq=2, tensor=2)


def test_triton_on_a_mesh():
    check(TRITON, masking(), data=2, tensor=2)


def test_a_layer_asks_for_the_kernel_and_gets_its_gradients():
    """The whole model, with key/value heads that the tensor axis does not divide."""
    from tests.test_parity import KV_WHOLE

    config = helpers.tiny(num_layers=1, max_position=128, num_kv_heads=2)
    random = np.random.default_rng(0)
    tokens = random.integers(0, config.vocab_size, (4, 128)).astype(np.int32)
    ones = np.ones((4, 128), np.int32)
    batch = {
        "tokens": tokens, "targets": tokens[:, ::-1].copy(), "segment_ids": ones,
        "positions": np.broadcast_to(np.arange(128, dtype=np.int32), ones.shape),
        "loss_weights": ones.astype(np.float32),
    }  # fmt: skip

    def gradients(kernel, **axes):
        scheme = Schemes(attention=attention_scheme("all_gather", kernel), remat="full")
        with on_mesh(KV_WHOLE, scheme, **axes) as par:
            model = helpers.Model(config)
            params = helpers.disturbed(model.init(jax.random.key(0)))
            step = jax.jit(jax.grad(lambda p, b: model.loss(p, b)[0]))
            return helpers.by_path(step(params, helpers.put(par, batch)))

    expected = gradients(CORE)
    assert helpers.largest_error(gradients(SPLASH, data=2, tensor=4), expected)[0] < 1e-5


def task(**changes) -> Task:
    shape = (1, 4, 512, 64)
    given = dict(q_shape=shape, kv_shape=shape, dtype="bfloat16", masking=PLAIN, shards=1)
    return Task(**(given | changes))


@pytest.mark.parametrize(
    ("kernel", "changes", "reason"),
    [
        (SPLASH, dict(shards=None), "only positions tell"),
        (SPLASH, dict(q_shape=(1, 4, 100, 64)), "not multiples of 128"),
        (SPLASH, dict(dtype="float64"), "float64"),
        (TRITON, dict(shards=None), "only positions tell"),
        (TRITON, dict(shards=2), "which is split here"),
        (TRITON, dict(masking=masking(window=8)), "neither windows nor"),
        (TRITON, dict(masking=masking(softcap=8.0)), "neither windows nor"),
        (TRITON, dict(q_shape=(1, 4, 1000, 64)), "multiples of 16"),
        (Triton(), dict(dtype="float32"), "16-bit numbers, not of float32"),
    ],
)
def test_what_a_kernel_cannot_express(kernel, changes, reason):
    assert reason in kernel.obstacle(task(**changes))
    assert kernel.obstacle(task()) is None


def test_the_core_takes_over_and_says_why():
    arrays, (positions, segments) = operands(), packed()
    rule = masking(window=9)
    found, par = by_kernel(TRITON, *arrays, rule, positions, segments)
    assert par.remarks == [
        "Attention on each device: tiled jnp core instead of the triton kernel, since it has "
        "neither windows nor soft caps."
    ]
    expected = dense(*arrays, rule, positions, segments)
    assert all(np.allclose(x, y, atol=1e-4) for x, y in zip(found, expected, strict=True))
    assert par.kernels == {}


@pytest.mark.parametrize(
    ("name", "platform", "kernel"),
    [
        ("auto", "cpu", CORE),
        ("auto", "tpu", Splash()),
        ("auto", "cuda", Triton()),
        ("jnp", "tpu", CORE),
        ("splash", "tpu", Splash()),
        ("splash", "cpu", SPLASH),
        ("triton", "cpu", TRITON),
    ],
)
def test_the_choice_by_platform(name, platform, kernel):
    assert attention_kernel(name, platform) == kernel


def pairs(length: int, kv_length: int, rule: Masking, block: int, kv_block: int) -> int:
    """Pairs in tiles that hold a visible one, by looking at every pair of the last queries."""
    distance = np.arange(kv_length - length, kv_length)[:, None] - np.arange(kv_length)
    seen = (distance >= 0) | (not rule.causal)
    seen &= distance < (kv_length if rule.window is None else rule.window)
    tiles = seen.reshape(length // block, block, kv_length // kv_block, kv_block).any((1, 3))
    return int(tiles.sum()) * block * kv_block


@pytest.mark.parametrize("rule", [masking(), masking(causal=False), masking(window=600)], ids=str)
def test_work_is_that_of_the_visited_tiles(rule):
    """2 products of 2 FLOPs a pair and head dimension forward, 5 backward (Triton: 7)."""
    long = task(q_shape=(3, 4, 2048, 64), kv_shape=(3, 2, 4096, 64), masking=rule, shards=2)
    work = SPLASH.work(long)
    unit = 2 * 3 * 4 * 64
    assert work["splash_mha_fwd"].flops == 2 * unit * pairs(2048, 4096, rule, 512, 512)
    assert work["splash_mha_dkv"].flops == 5 * unit * pairs(2048, 4096, rule, 512, 1024)
    if rule.window is None:
        square = task(q_shape=(3, 4, 1024, 64), kv_shape=(3, 2, 1024, 64), masking=rule)
        work = TRITON.work(square)
        assert work["mha_forward"].flops == 2 * unit * pairs(1024, 1024, rule, 128, 128)
        assert work["mha_backward"].flops == 7 * unit * pairs(1024, 1024, rule, 32, 32)
