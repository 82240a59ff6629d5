"""The attention core against a dense float64 softmax written in numpy and differentiated by rule.

The oracle is dense and float64; float32 results may differ from it by rounding alone, about 1e-6 of
the largest element after sums of a few hundred terms: the tolerance is 1e-5 of it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import PartitionSpec as P

from layers.attention import core
from layers.attention.core import attend, attend_with_lse

TOLERANCE = 1e-5


def oracle(q, k, v, d_out, d_lse, *, q_pos, kv_pos, q_seg, kv_seg, causal, window, scale, softcap):
    """Context, lse and the three gradients, float64, one softmax over all keys."""
    q, k, v, d_out, d_lse = (np.asarray(x, np.float64) for x in (q, k, v, d_out, d_lse))
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    s = np.einsum("bnth,bnsh->bnts", q, k) * scale
    slope = 1.0
    if softcap is not None:
        slope = 1 - np.tanh(s / softcap) ** 2
        s = softcap * np.tanh(s / softcap)
    distance = q_pos[:, :, None] - kv_pos[:, None, :]
    seen = np.ones(distance.shape, bool)
    if q_seg is not None:
        seen &= q_seg[:, :, None] == kv_seg[:, None, :]
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= distance < window
    seen = np.broadcast_to(seen[:, None], s.shape)
    e = np.where(seen, np.exp(s), 0)
    total = e.sum(-1, keepdims=True)
    p = e / np.where(total > 0, total, 1)
    out = np.einsum("bnts,bnsh->bnth", p, v)
    lse = np.log(np.where(total > 0, total, 1))[..., 0]
    dp = np.einsum("bnth,bnsh->bnts", d_out, v)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True) + d_lse[..., None]) * slope * scale
    fold = lambda x: x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2)  # noqa: E731
    dq = np.einsum("bnts,bnsh->bnth", ds, k)
    dk = fold(np.einsum("bnts,bnth->bnsh", ds, q))
    dv = fold(np.einsum("bnts,bnth->bnsh", p, d_out))
    return out, lse, dq, dk, dv, total[..., 0] > 0


def operands(*, b=2, n=4, kv_heads=2, t=96, s=None, h=8, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    s = t if s is None else s
    shapes = ((b, n, t, h), (b, kv_heads, s, h), (b, kv_heads, s, h), (b, n, t, h), (b, n, t))
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def contiguous(b, t):
    return np.broadcast_to(np.arange(t, dtype=np.int32), (b, t))


def packed(lengths, b):
    """Segments 1, 2, ... of these lengths, and positions that start again in each."""
    segments = np.concatenate([np.full(x, i + 1) for i, x in enumerate(lengths)])
    positions = np.concatenate([np.arange(x) for x in lengths])
    return [np.broadcast_to(x.astype(np.int32), (b, x.size)) for x in (positions, segments)]


def check(arrays, *, q_pos, kv_pos, q_seg=None, kv_seg=None, aligned=False, causal=True,
          window=None, softcap=None, transform=jax.jit):  # fmt: skip
    q, k, v, d_out, d_lse = arrays
    rule = dict(causal=causal, window=window, scale=0.3, softcap=softcap)

    @transform
    def run(q, k, v, d_out, d_lse):
        function = functools.partial(
            attend_with_lse, q_positions_BT=q_pos, kv_positions_BS=kv_pos, q_segments_BT=q_seg,
            kv_segments_BS=kv_seg, aligned=aligned, **rule,
        )  # fmt: skip
        results, pull = jax.vjp(function, q, k, v)
        return results, pull((d_out, d_lse))

    *expected, seen = oracle(
        *arrays, q_pos=q_pos, kv_pos=kv_pos, q_seg=q_seg, kv_seg=kv_seg, **rule
    )
    (out, lse), gradients = run(q, k, v, d_out, d_lse)
    got = [out, np.where(seen, lse, 0), *gradients]
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, expected, strict=True):
        error = np.max(np.abs(np.asarray(x, np.float64) - y)) / np.max(np.abs(y))
        assert error <= TOLERANCE, f"{name} is off by {error:.1e} of its largest element"
    assert np.all(np.asarray(lse)[~seen] < -1e29)
    return (out, lse), gradients


class CoreTest(parameterized.TestCase):
    @parameterized.named_parameters(
        ("causal", dict(), {}),
        ("bidirectional", dict(), dict(causal=False)),
        ("window", dict(t=300), dict(window=20)),
        ("window_both_ways", dict(), dict(causal=False, window=7)),
        ("one_head_each", dict(kv_heads=4), {}),
        ("multi_query", dict(kv_heads=1), {}),
        ("softcap", dict(), dict(softcap=0.8)),
        ("one_tile", dict(t=40), {}),
        ("ten_tiles", dict(t=256), {}),
        ("scanned_tiles", dict(t=600, b=1, n=2, kv_heads=1), {}),
        ("last_block_short", dict(t=147), {}),
        ("last_block_short_bidirectional", dict(t=147), dict(causal=False)),
    )
    def test_aligned(self, shape, rule):
        arrays = operands(**shape)
        pos = contiguous(2, arrays[0].shape[2])[: arrays[0].shape[0]]
        with pytest.MonkeyPatch.context() as patch:
            if shape.get("t") == 600:
                patch.setattr(core, "MAX_BLOCK", 64)
            check(arrays, q_pos=pos, kv_pos=pos, aligned=True, **rule)

    @parameterized.named_parameters(
        ("causal", {}), ("window", dict(window=9)), ("bidirectional", dict(causal=False))
    )
    def test_packed_segments(self, rule):
        pos, seg = packed((70, 3, 130, 53), 2)
        arrays = operands(t=256)
        check(arrays, q_pos=pos, kv_pos=pos, q_seg=seg, kv_seg=seg, aligned=True, **rule)
        check(arrays, q_pos=pos, kv_pos=pos, q_seg=seg, kv_seg=seg, aligned=False, **rule)

    @parameterized.named_parameters(("short", 24, 150), ("decode", 1, 700), ("many_tiles", 70, 333))
    def test_queries_and_keys_of_different_lengths(self, t, s):
        """Queries are the last tokens; keys lie in any order, in several blocks."""
        arrays = operands(t=t, s=s)
        order = np.random.default_rng(1).permutation(s)
        kv_pos = contiguous(2, s)[:, order]
        q_pos = contiguous(2, s)[:, s - t :]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(core, "MAX_BLOCK", 16)
            check(arrays, q_pos=q_pos, kv_pos=kv_pos)
            check(arrays, q_pos=q_pos, kv_pos=kv_pos, causal=False)

    def test_rows_that_see_nothing_are_zero_with_zero_gradients(self):
        arrays = operands(t=80)
        q_pos, kv_pos = contiguous(2, 80), contiguous(2, 80) + 30
        seg = np.ones((2, 80), np.int32)
        q_seg = np.where(np.arange(80) % 5 == 0, 9, seg).astype(np.int32)
        (out, _), (dq, _, _) = check(arrays, q_pos=q_pos, kv_pos=kv_pos, q_seg=q_seg, kv_seg=seg)
        blind = (np.arange(80) < 30) | (np.arange(80) % 5 == 0)
        assert np.all(np.asarray(out)[:, :, blind] == 0) and np.all(
            np.asarray(dq)[:, :, blind] == 0
        )

    def test_large_scores_do_not_overflow(self):
        q, k, v, *_ = operands(t=64)
        pos = contiguous(2, 64)
        out = attend(100 * q, 100 * k, v, q_positions_BT=pos, kv_positions_BS=pos, causal=True,
                     scale=1.0, aligned=True)  # fmt: skip
        assert np.all(np.isfinite(out))

    def test_bfloat16_accumulates_in_float32(self):
        """Error of bfloat16 operands: their own rounding, 2^-8, and no growth with the keys."""
        arrays = operands(t=512, b=1)
        q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in arrays[:3])
        pos = contiguous(1, 512)
        out, lse = attend_with_lse(q, k, v, q_positions_BT=pos, kv_positions_BS=pos, causal=False,
                                   scale=0.3)  # fmt: skip
        assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
        wide = [np.asarray(x, np.float32) for x in (q, k, v)]
        want, want_lse, *_ = oracle(*wide, *arrays[3:], q_pos=pos, kv_pos=pos, q_seg=None,
                                    kv_seg=None, causal=False, window=None, scale=0.3,
                                    softcap=None)  # fmt: skip
        np.testing.assert_allclose(lse, want_lse, rtol=1e-5)
        np.testing.assert_allclose(
            np.asarray(out, np.float64), want, atol=2**-8 * np.abs(want).max()
        )

    def test_contexts_over_disjoint_keys_merge_by_lse(self):
        q, k, v, *_ = operands(t=64)
        pos = contiguous(2, 64)
        part = functools.partial(attend_with_lse, causal=True, scale=0.3, q_positions_BT=pos)

        def merged(q, k, v):
            parts = [part(q, k[:, :, x], v[:, :, x], kv_positions_BS=pos[:, x])
                     for x in (slice(0, 20), slice(20, 64))]  # fmt: skip
            lse = functools.reduce(jnp.logaddexp, (lse for _, lse in parts))
            return sum(jnp.exp(part - lse)[..., None] * out for out, part in parts)

        whole = functools.partial(attend, q_positions_BT=pos, kv_positions_BS=pos, causal=True,
                                  scale=0.3)  # fmt: skip
        weigh = lambda f: lambda *a: jnp.sum(f(*a) ** 2)  # noqa: E731
        for x, y in zip(
            jax.tree.leaves(jax.value_and_grad(weigh(merged), (0, 1, 2))(q, k, v)),
            jax.tree.leaves(jax.value_and_grad(weigh(whole), (0, 1, 2))(q, k, v)),
            strict=True,
        ):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * np.abs(y).max())

    def test_no_array_of_all_pairs_is_kept_or_made(self):
        """At 4,096 tokens [T, S] would be 64 MiB a head; a tile and the operands are far less."""
        t = 4096
        x = jax.ShapeDtypeStruct((1, 1, t, 8), jnp.float32)
        pos = jax.ShapeDtypeStruct((1, t), jnp.int32)

        def loss(q, k, v, pos):
            return jnp.sum(attend(q, k, v, q_positions_BT=pos, kv_positions_BS=pos, causal=True,
                                  scale=1.0, aligned=True))  # fmt: skip

        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x, pos).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 4 * t * t / 4

    def test_tiles_outside_the_band_are_not_computed(self):
        pos = contiguous(1, 256)
        q, k, v, *_ = operands(t=256, b=1)

        def flops(**arguments):
            run = functools.partial(attend, q_positions_BT=pos, kv_positions_BS=pos, scale=1.0,
                                    **arguments)  # fmt: skip
            return jax.jit(run).lower(q, k, v).compile().cost_analysis()["flops"]

        everything = flops(causal=True)
        assert flops(causal=True, aligned=True) < 0.7 * everything
        assert flops(causal=True, aligned=True, window=40) < 0.55 * everything

    @parameterized.named_parameters(("plain", False), ("checkpointed_scan", True))
    def test_inside_shard_map(self, scanned):
        """Batch, heads and queries split; keys and positions whole over the queries' axis."""
        mesh = jax.make_mesh(
            (2, 2, 2), ("data", "seq", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 3
        )
        arrays = operands(t=64)
        specs = (P("data", "tensor", "seq"), P("data", "tensor"), P("data", "tensor"),
                 P("data", "tensor", "seq"), P("data", "tensor", "seq"))  # fmt: skip

        def function(q, k, v, pos, kv_pos):
            def once(q):
                return attend_with_lse(q, k, v, q_positions_BT=pos, kv_positions_BS=kv_pos,
                                       causal=True, scale=0.3)  # fmt: skip

            if not scanned:
                return once(q)
            body = jax.checkpoint(lambda carry, _: (carry, once(q)))
            _, (out, lse) = jax.lax.scan(body, jnp.zeros(()), jnp.arange(2))
            return jnp.mean(out, axis=0), jnp.mean(lse, axis=0)

        def transform(_):
            def run(q, k, v, d_out, d_lse):
                pos = contiguous(2, 64)
                inner = jax.shard_map(
                    function, in_specs=(*specs[:3], P("data", "seq"), P("data")),
                    out_specs=(specs[3], specs[4]), check_vma=True,
                )  # fmt: skip
                tokens = (jax.device_put(pos, jax.NamedSharding(mesh, P("data", "seq"))),
                          jax.device_put(pos, jax.NamedSharding(mesh, P("data"))))  # fmt: skip
                results, pull = jax.vjp(lambda *a: inner(*a, *tokens), q, k, v)
                return results, pull((d_out, d_lse))

            def placed(*arrays):
                with jax.set_mesh(mesh):
                    return jax.jit(run)(*(
                        jax.device_put(x, jax.NamedSharding(mesh, spec))
                        for x, spec in zip(arrays, specs, strict=True)
                    ))  # fmt: skip

            return placed

        pos = contiguous(2, 64)
        check(arrays, q_pos=pos, kv_pos=pos, transform=transform)

    @parameterized.named_parameters(
        ("heads", dict(n=4, kv_heads=3), {}, "4 query heads must be a multiple of 3"),
        ("segments", {}, dict(q_segments_BT=contiguous(2, 96)), "of both queries and keys"),
        ("aligned", dict(s=40), dict(aligned=True), r"aligned queries \(96\) and keys \(40\)"),
    )
    def test_errors(self, shape, arguments, message):
        q, k, v, *_ = operands(**shape)
        with pytest.raises(ValueError, match=message):
            attend(q, k, v, q_positions_BT=contiguous(2, q.shape[2]),
                   kv_positions_BS=contiguous(2, k.shape[2]), causal=True, scale=1.0,
                   **arguments)  # fmt: skip
