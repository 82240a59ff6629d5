"""The signature that every attention scheme has.

B batch, T query length, S key/value length, N query heads, K key/value heads, H head dim.
"""

from typing import Protocol

import jax

from layers.attention.masking import Masking


class AttentionScheme(Protocol):
    """A function of global arrays; it finds its mesh axes through the rules."""

    def __call__(
        self,
        q_BNTH: jax.Array,
        k_BKSH: jax.Array,
        v_BKSH: jax.Array,
        *,
        q_positions_BT: jax.Array,
        kv_positions_BS: jax.Array,
        q_segments_BT: jax.Array,
        kv_segments_BS: jax.Array,
        masking: Masking,
    ) -> jax.Array:
        """Attend.

        Args:
            q_BNTH: queries, laid out as (act_batch, act_heads, act_seq, -).
            k_BKSH: keys, laid out as (act_batch, act_kv_heads, act_seq, -).
            v_BKSH: values, laid out as the keys.
            q_positions_BT: int32 position of each query in its document, (act_batch, act_seq).
            kv_positions_BS: int32 position of each key, (act_batch, act_kv_seq).
            q_segments_BT: int32 document of each query, likewise; 0 is padding.
            kv_segments_BS: int32 document of each key, likewise.
            masking: which keys a query sees.

        Returns:
            Context [B, N, T, H], laid out and typed as the queries.
        """
        ...
