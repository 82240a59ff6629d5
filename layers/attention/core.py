"""The one attention core: softmax attention of local arrays, tile by tile, with its own gradient.

B batch, T query length, S key/value length, N query heads, K key/value heads, G query heads per kv
head (N = K G), H head dim, R rows of a tile: its queries in each of the G heads.

Scores exist one tile of queries by keys at a time, under the online softmax of FlashAttention
(arXiv 2205.14135; backward as in 2307.08691, section 3.1.2): kept per query are its context and the
logarithm of its softmax denominator, never a [T, S] array. The list of tiles is data: where queries
and keys are the same tokens in order, tiles above the diagonal or beyond the window are not listed.
Query heads that share a key/value head are rows of one product, so keys are never repeated.

The backward pass lays its tiles keys first, [S, R]: dV and dK are then plain products, and only dQ
contracts the leading dimension, which XLA does at a third of the speed on CPU.

Exchanges nothing; works inside `jax.shard_map`, whatever axes its operands vary over.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from layers.attention.masking import Masking
from meshes.collectives.varying import varying, vma

# Finite, so that differences of scores are never NaN. A running maximum starts above MASKED: the
# exponential of a masked score is then 0 even in a row that sees no key.
MASKED, LOWEST = -1e30, -0.5e30
# A tile is a quarter of an aligned sequence on each side, within these sizes.
MIN_BLOCK, MAX_BLOCK = 64, 512
UNROLLED_TILES = 16
# No query has this segment; keys that only fill up the last block do.
FILLER = np.iinfo(np.int32).min

# Positions of queries and of keys, segments of queries and of keys.
_Tokens = tuple[jax.Array, jax.Array, jax.Array | None, jax.Array | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rule:
    """What a score is, which pairs see each other, and which tiles (i, j) have such pairs."""

    masking: Masking
    tiles: tuple[tuple[int, int], ...]

    def scores(self, products: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Scores of dot products, and their slope where they are soft-capped."""
        scores = products * self.masking.scale
        if self.masking.softcap is None:
            return scores, None
        bent = jnp.tanh(scores / self.masking.softcap)
        return bent * self.masking.softcap, 1 - bent * bent

    def mask(self, scores: jax.Array, tokens: _Tokens) -> jax.Array:
        """Lower the scores of pairs that do not see each other; `tokens` broadcast to scores."""
        q_positions, kv_positions, q_segments, kv_segments = tokens
        allowed = []
        if q_segments is not None:
            allowed.append(q_segments == kv_segments)
        if self.masking.causal:
            allowed.append(q_positions >= kv_positions)
        if self.masking.window is not None:
            allowed.append(q_positions - kv_positions < self.masking.window)
        if not allowed:
            return scores
        return jnp.where(functools.reduce(jnp.logical_and, allowed), scores, MASKED)

    def fold(self, body: Callable, carry):
        """Fold `body(carry, i, j)` over the tiles, written out where they are few."""
        tiles = np.asarray(self.tiles, np.int32)
        step = lambda carry, tile: (body(carry, tile[0], tile[1]), None)  # noqa: E731
        return jax.lax.scan(step, carry, tiles, unroll=len(tiles) <= UNROLLED_TILES)[0]


def attend(q_BNTH: jax.Array, k_BKSH: jax.Array, v_BKSH: jax.Array, **arguments) -> jax.Array:
    """Attend: the context of `attend_with_lse`, [B, N, T, H]."""
    return attend_with_lse(q_BNTH, k_BKSH, v_BKSH, **arguments)[0]


def attend_with_lse(
    q_BNTH: jax.Array,
    k_BKSH: jax.Array,
    v_BKSH: jax.Array,
    *,
    q_positions_BT: jax.Array,
    kv_positions_BS: jax.Array,
    q_segments_BT: jax.Array | None = None,
    kv_segments_BS: jax.Array | None = None,
    causal: bool,
    window: int | None = None,
    scale: float,
    softcap: float | None = None,
    aligned: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attend from queries to keys of the same segment, by positions alone.

    A query sees a key of its own segment, at its own or an earlier position if `causal`, and fewer
    than `window` positions before it. A query that sees none gets zeros, and gives zero gradients.
    Contexts c_i over disjoint sets of keys merge by their lse l_i, with l the log of the sum of
    exp(l_i): c is the sum of exp(l_i - l) c_i. Softmax and sums are float32 (float64 of float64).

    Args:
        q_BNTH: queries.
        k_BKSH: keys, in the dtype of the queries.
        v_BKSH: values, likewise.
        q_positions_BT: int32 position of each query in its segment.
        kv_positions_BS: int32 position of each key.
        q_segments_BT: int32 segment of each query; None, for both, is one segment.
        kv_segments_BS: int32 segment of each key.
        causal: no key at a later position is seen.
        window: positions seen, the query's own included; None is unlimited.
        scale: multiplies the scores.
        softcap: scores become softcap * tanh(scores / softcap), before they are masked.
        aligned: promises that queries and keys are the same tokens, and that positions go up by one
            within a segment, so that tiles no pair of which can be seen are left out.

    Returns:
        Context [B, N, T, H] in the queries' dtype, and lse [B, N, T], the float32 logarithm of the
        softmax denominator: about -5e29 where no key is seen.

    Raises:
        ValueError: heads that do not group, segments of one side only, or aligned lengths that
            differ.
    """
    (batch, heads, length, head_dim), (_, kv_heads, kv_length, _) = q_BNTH.shape, k_BKSH.shape
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads must be a multiple of {kv_heads} key/value heads")
    if (q_segments_BT is None) != (kv_segments_BS is None):
        raise ValueError("give segments of both queries and keys, or of neither")
    if aligned and length != kv_length:
        raise ValueError(f"aligned queries ({length}) and keys ({kv_length}) must be equally many")
    block, kv_block = _blocks(length, kv_length, aligned and (causal or window is not None))
    if kv_length % kv_block and q_segments_BT is None:
        q_segments_BT = jnp.zeros_like(q_positions_BT)
        kv_segments_BS = jnp.zeros_like(kv_positions_BS)
    q = q_BNTH.reshape(batch, kv_heads, heads // kv_heads, length, head_dim)
    operands = (
        _split(q, 3, block), _split(k_BKSH, 2, kv_block), _split(v_BKSH, 2, kv_block),
        (_split(q_positions_BT, 1, block), _split(kv_positions_BS, 1, kv_block),
         _split(q_segments_BT, 1, block), _split(kv_segments_BS, 1, kv_block, fill=FILLER)),
    )  # fmt: skip
    axes = frozenset().union(*(vma(x) for x in jax.tree.leaves(operands)))
    q, k, v, tokens = jax.tree.map(lambda x: varying(x, axes), operands)
    masking = Masking(causal=causal, window=window, scale=scale, softcap=softcap)
    tiles = tuple(
        (i, j)
        for i in range(-(-length // block))
        for j in range(-(-kv_length // kv_block))
        if not aligned or masking.sees_block(i * block, block, j * kv_block, kv_block)
    )
    rule = _Rule(masking=masking, tiles=tiles)
    attended: Any = _attend(rule, q, k, v, tokens)
    out, lse = attended
    out = _join(out, 3).reshape(batch, heads, -1, head_dim)[:, :, :length]
    return out, _join(lse, 3).reshape(batch, heads, -1)[:, :, :length]


def _blocks(length: int, kv_length: int, banded: bool) -> tuple[int, int]:
    """Sizes of a tile. Only a band of tiles is worth small ones; few queries take many keys."""
    if banded:
        block = min(length, max(MIN_BLOCK, min(MAX_BLOCK, -(-length // 4))))
        return block, block
    block = min(length, MAX_BLOCK)
    return block, min(kv_length, MAX_BLOCK * (MAX_BLOCK // block))


def _split(x: jax.Array | None, dim: int, size: int, fill: int = 0) -> jax.Array | None:
    """Split a dimension into blocks, which come first; the last one is filled up."""
    if x is None:
        return None
    missing = -x.shape[dim] % size
    if missing:
        widths = [(0, missing if d == dim else 0) for d in range(x.ndim)]
        x = jnp.pad(x, widths, constant_values=fill)
    x = x.reshape(x.shape[:dim] + (-1, size) + x.shape[dim + 1 :])
    return jnp.moveaxis(x, dim, 0)


def _join(x: jax.Array, dim: int) -> jax.Array:
    """Put the blocks, which came first, back in line along a dimension."""
    x = jnp.moveaxis(x, 0, dim)
    return x.reshape(x.shape[:dim] + (-1,) + x.shape[dim + 2 :])


def _rows(x: jax.Array, i: jax.Array) -> jax.Array:
    """Block i, its queries in each of the G heads as rows: [B, K, G, T, ...] -> [B, K, R, ...]."""
    x = _block(x, i)
    return x.reshape(x.shape[:2] + (-1,) + x.shape[4:])


def _block(x: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _put(x: jax.Array, i: jax.Array, block: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, block, i, 0)


def _tile(tokens: _Tokens, i: jax.Array, j: jax.Array, q_dims, kv_dims) -> _Tokens:
    """Positions and segments of tile (i, j), with dimensions added to broadcast to its scores."""

    def side(x: jax.Array | None, index: jax.Array, dims) -> Any:
        return None if x is None else jnp.expand_dims(_block(x, index), dims)

    q_positions, kv_positions, q_segments, kv_segments = tokens
    return (
        side(q_positions, i, q_dims), side(kv_positions, j, kv_dims),
        side(q_segments, i, q_dims), side(kv_segments, j, kv_dims),
    )  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(rule: _Rule, q, k, v, tokens: _Tokens) -> tuple[jax.Array, jax.Array]:
    return _forward(rule, q, k, v, tokens)[0]


def _forward(rule: _Rule, q, k, v, tokens: _Tokens):
    """Contexts [blocks, B, K, G, T, H] and lse [blocks, B, K, G, T], of arrays in blocks."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    dot = functools.partial(jnp.einsum, preferred_element_type=wide)
    by_head = q.shape[1:5]

    def body(carry, i, j):
        context, top, total = (_block(x, i) for x in carry)
        s, _ = rule.scores(dot("bkrh,bksh->bkrs", _rows(q, i), _block(k, j)))
        here = _tile(tokens, i, j, (1, 2, 4), (1, 2, 3))
        s = rule.mask(s.reshape(by_head + s.shape[3:]), here).reshape(s.shape)
        new_top = jnp.maximum(top, jnp.max(s, axis=-1))
        p = jnp.exp(s - new_top[..., None])
        keep = jnp.exp(top - new_top)
        total = total * keep + jnp.sum(p, axis=-1)
        term = dot("bkrs,bksh->bkrh", p.astype(v.dtype), _block(v, j))
        new = (context * keep[..., None] + term, new_top, total)
        return tuple(_put(x, i, y) for x, y in zip(carry, new, strict=True))

    zero = jnp.zeros_like(q, wide).reshape(q.shape[:3] + (-1, q.shape[-1]))
    rows = zero[..., 0]
    context, top, total = rule.fold(body, (zero, rows + LOWEST, rows))
    total = jnp.where(total > 0, total, 1)
    out = (context / total[..., None]).astype(q.dtype).reshape(q.shape)
    lse = (top + jnp.log(total)).reshape(q.shape[:-1])
    # One name: kept without the other, either would be recomputed, and the whole core with it.
    out, lse = (checkpoint_name(x, "attention_context") for x in (out, lse))
    return (out, lse), (q, k, v, tokens, out, lse)


def _backward(rule: _Rule, residuals, cotangents):
    """dS = P (dP - delta), with delta the row sums of dO O, less the cotangent of lse."""
    q, k, v, tokens, out, lse = residuals
    d_out, d_lse = cotangents
    wide = lse.dtype
    dot = functools.partial(jnp.einsum, preferred_element_type=wide)
    delta = jnp.sum(d_out.astype(wide) * out.astype(wide), axis=-1) - d_lse
    by_head = q.shape[3:5]

    def body(carry, i, j):
        dq, dk, dv = carry
        q_i, do_i = _rows(q, i), _rows(d_out, i)
        lse_i, delta_i = (_rows(x, i)[:, :, None, :] for x in (lse, delta))
        k_j, v_j = _block(k, j), _block(v, j)
        s, slope = rule.scores(dot("bksh,bkrh->bksr", k_j, q_i))
        here = _tile(tokens, i, j, (1, 2, 3), (1, 3, 4))
        s = rule.mask(s.reshape(s.shape[:3] + by_head), here).reshape(s.shape)
        p = jnp.exp(s - lse_i)
        ds = p * (dot("bksh,bkrh->bksr", v_j, do_i) - delta_i) * rule.masking.scale
        ds = (ds if slope is None else ds * slope).astype(q.dtype)
        return (
            _put(dq, i, _block(dq, i) + dot("bksr,bksh->bkrh", ds, k_j)),
            _put(dk, j, _block(dk, j) + dot("bksr,bkrh->bksh", ds, q_i)),
            _put(dv, j, _block(dv, j) + dot("bksr,bkrh->bksh", p.astype(q.dtype), do_i)),
        )

    zero = jnp.zeros_like(q, wide).reshape(q.shape[:3] + (-1, q.shape[-1]))
    dq, dk, dv = rule.fold(body, (zero, jnp.zeros_like(k, wide), jnp.zeros_like(v, wide)))
    return dq.reshape(q.shape).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_attend.defvjp(_forward, _backward)
