"""What travels with tokens: positions, documents, rotations; and the cache of those gone by.

B batch, T query length, S cache length, L layers, K key/value heads, H head dim.
"""

import dataclasses

import jax
import jax.numpy as jnp

from layers import rotary
from layers.config import ModelConfig
from meshes.context import current, reshard


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """Where the tokens of a batch stand, laid out as (act_batch, act_seq).

    Attributes:
        positions_BT: int32 position in its document.
        segments_BT: int32 document; 0 is padding, which nothing attends to.
        kv_positions_BS: the same positions, laid out as (act_batch, act_kv_seq): what attention
            needs to know of the keys, moved once for all layers.
        kv_segments_BS: the same documents, likewise.
        cos: float32 [B, 1, T, H/2] rotation of each token, or None without rotary positions.
        sin: as cos.
    """

    positions_BT: jax.Array
    segments_BT: jax.Array
    kv_positions_BS: jax.Array
    kv_segments_BS: jax.Array
    cos: jax.Array | None = None
    sin: jax.Array | None = None

    @classmethod
    def of(cls, config: ModelConfig, positions_BT: jax.Array, segments_BT: jax.Array) -> "Tokens":
        """Compute the rotations once for all layers."""
        cos = sin = None
        if config.position == "rope":
            cos, sin = rotary.tables(config.rope, config.head_dim, positions_BT)
        return cls(
            positions_BT=positions_BT,
            segments_BT=segments_BT,
            kv_positions_BS=reshard(positions_BT, "act_batch", "act_kv_seq"),
            kv_segments_BS=reshard(segments_BT, "act_batch", "act_kv_seq"),
            cos=cos,
            sin=sin,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
    """Keys and values of tokens gone by; a slot's segment is 0 until it is written.

    Attributes:
        k_BKSH: keys; [L, B, K, S, H] for all layers together.
        v_BKSH: values, likewise.
        positions: int32 [B, S] (or [L, B, S]) position of each slot.
        segments: int32 of the same shape, 0 where nothing is written.
    """

    k_BKSH: jax.Array
    v_BKSH: jax.Array
    positions: jax.Array
    segments: jax.Array

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: jnp.dtype) -> "Cache":
        """A cache of zeros, laid out over the batch and the key/value heads."""
        par = current()
        kv = par.spec(("layers", "act_batch", "act_kv_heads", "act_kv_seq", None), shape, "cache")
        slot_shape = (shape[0], shape[1], shape[3])
        slots = par.spec(("layers", "act_batch", "act_kv_seq"), slot_shape, "cache")
        return cls(
            k_BKSH=jnp.zeros(shape, dtype, out_sharding=kv),
            v_BKSH=jnp.zeros(shape, dtype, out_sharding=kv),
            positions=jnp.zeros(slot_shape, jnp.int32, out_sharding=slots),
            segments=jnp.zeros(slot_shape, jnp.int32, out_sharding=slots),
        )


def write_cache(cache: Cache, k_BKTH: jax.Array, v_BKTH: jax.Array, tokens: Tokens) -> Cache:
    """Write the keys and values of T consecutive tokens a row at their positions.

    Padding tokens (segment 0) leave their slots unwritten, whatever lies there.
    """
    par = current()
    kv = par.spec(("act_batch", "act_kv_heads", "act_kv_seq", None), cache.k_BKSH.shape)
    slots = par.spec(("act_batch", "act_kv_seq"))

    def row(k, v, positions, segments, new_k, new_v, new_positions, new_segments):
        start = new_positions[0]
        real = new_segments > 0

        def put(old: jax.Array, new: jax.Array, dim: int) -> jax.Array:
            held = jax.lax.dynamic_slice_in_dim(old, start, new.shape[dim], dim)
            mask = real.reshape((1,) * dim + (-1,) + (1,) * (new.ndim - dim - 1))
            new = jnp.where(mask, new.astype(old.dtype), held)
            return jax.lax.dynamic_update_slice_in_dim(old, new, start, dim)

        return (
            put(k, new_k, 1), put(v, new_v, 1),
            put(positions, new_positions, 0), put(segments, new_segments, 0),
        )  # fmt: skip

    written = jax.shard_map(
        jax.vmap(row),
        in_specs=(kv, kv, slots, slots, kv, kv, slots, slots),
        out_specs=(kv, kv, slots, slots),
    )(
        cache.k_BKSH, cache.v_BKSH, cache.positions, cache.segments,
        k_BKTH, v_BKTH, tokens.positions_BT, tokens.segments_BT,
    )  # fmt: skip
    return Cache(k_BKSH=written[0], v_BKSH=written[1], positions=written[2], segments=written[3])
