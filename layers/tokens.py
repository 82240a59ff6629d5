"""What travels with tokens: positions, documents, rotations; and the cache of those gone by.

B batch, T query length, S slots of the cache, L layers, K key/value heads, H head dim.
"""

import dataclasses

import jax
import jax.numpy as jnp

from layers import rotary
from layers.config import ModelConfig
from meshes.context import current, reshard

# Layouts of the cache, and of what is added to it.
_KEYS = ("layers", "act_batch", "act_kv_heads", "act_kv_seq", None)
_SLOTS = ("act_batch", "act_kv_seq")
_NEW_KEYS = ("act_batch", "act_kv_heads", "act_seq", None)
_NEW = ("act_batch", "act_seq")


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
    """Keys and values of tokens gone by, of all layers, and where those tokens stand.

    The token at position p of a row lies in slot p. All layers share one array, into which each
    writes its new tokens in place: nothing else of the cache is ever copied.

    Attributes:
        k_LBKSH: keys.
        v_LBKSH: values.
        positions_BS: int32 position of the token in each slot.
        segments_BS: int32 document of it; 0 where nothing is written.
    """

    k_LBKSH: jax.Array
    v_LBKSH: jax.Array
    positions_BS: jax.Array
    segments_BS: jax.Array

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: jnp.dtype) -> "Cache":
        """A cache of zeros [L, B, K, S, H], laid out over the batch and the key/value heads.

        Raises:
            ValueError: the rules split sequences, so that a token's slot may lie elsewhere.
        """
        par = current()
        if par.axes_of(("act_seq", "act_kv_seq")):
            raise ValueError(
                f"a cache cannot be split along the sequence, as these rules do over "
                f"{par.axes_of(('act_seq', 'act_kv_seq'))}; use meshes.presets.for_generation"
            )
        kv = par.spec(_KEYS, shape, "cache")
        slot_shape = (shape[1], shape[3])
        slots = par.spec(_SLOTS, slot_shape, "cache")
        return cls(
            k_LBKSH=jnp.zeros(shape, dtype, out_sharding=kv),
            v_LBKSH=jnp.zeros(shape, dtype, out_sharding=kv),
            positions_BS=jnp.zeros(slot_shape, jnp.int32, out_sharding=slots),
            segments_BS=jnp.zeros(slot_shape, jnp.int32, out_sharding=slots),
        )

    def seat(self, tokens: Tokens) -> "Cache":
        """Note where new tokens stand; padding (segment 0) takes no slot."""
        par = current()
        slots = par.spec(_SLOTS)

        def write(positions, segments, new_positions, new_segments):
            where = _slots(new_positions, new_segments, positions.shape[1])
            rows = jnp.arange(positions.shape[0])[:, None]
            return (
                positions.at[rows, where].set(new_positions, mode="drop"),
                segments.at[rows, where].set(new_segments, mode="drop"),
            )

        positions, segments = jax.shard_map(
            write, in_specs=(slots, slots, par.spec(_NEW), par.spec(_NEW)), out_specs=(slots, slots)
        )(self.positions_BS, self.segments_BS, tokens.positions_BT, tokens.segments_BT)
        return dataclasses.replace(self, positions_BS=positions, segments_BS=segments)

    def extend(
        self, layer: jax.Array | int, k_BKTH: jax.Array, v_BKTH: jax.Array, tokens: Tokens
    ) -> "Cache":
        """Write one layer's keys and values of new tokens into their slots; of padding, nowhere."""
        par = current()
        kv = par.spec(_KEYS, self.k_LBKSH.shape, "cache")
        new = par.spec(_NEW_KEYS, k_BKTH.shape, "keys")

        def write(k, v, layer, positions, segments, new_k, new_v):
            where = _slots(positions, segments, k.shape[3])
            rows = jnp.arange(k.shape[1])[:, None]
            return tuple(
                old.at[layer, rows, :, where].set(new.swapaxes(1, 2).astype(old.dtype), mode="drop")
                for old, new in ((k, new_k), (v, new_v))
            )

        k, v = jax.shard_map(
            write,
            in_specs=(kv, kv, jax.P(), par.spec(_NEW), par.spec(_NEW), new, new),
            out_specs=(kv, kv),
        )(
            self.k_LBKSH, self.v_LBKSH, jnp.asarray(layer, jnp.int32),
            tokens.positions_BT, tokens.segments_BT, k_BKTH, v_BKTH,
        )  # fmt: skip
        return dataclasses.replace(self, k_LBKSH=k, v_LBKSH=v)

    def of_layer(self, layer: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, K, S, H] of one layer."""
        k, v = (
            jax.lax.dynamic_index_in_dim(x, layer, keepdims=False)
            for x in (self.k_LBKSH, self.v_LBKSH)
        )
        return k, v


def _slots(positions_BT: jax.Array, segments_BT: jax.Array, num_slots: int) -> jax.Array:
    """The slot of each token; for padding one beyond the last, where nothing is written."""
    return jnp.where(segments_BT > 0, positions_BT, num_slots)
