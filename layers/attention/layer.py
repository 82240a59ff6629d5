"""The attention layer: projections, rotary positions, a scheme, and the output projection.

B batch, T query length, S cache length, D model, N query heads, K key/value heads, H head dim.
Tensor parallelism splits the heads: one reduction of [B, T, D] forward (after the output
projection) and one backward (the input's gradient), as the layouts of the residual stream say.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from layers import schemes
from layers.attention.masking import Masking
from layers.config import ModelConfig
from layers.linear import add_bias, constant, normal, project
from layers.norm import Norm
from layers.rotary import rotate
from layers.tokens import Cache, Tokens

RESIDUAL = ("act_batch", "act_residual_seq", "act_embed")
QUERIES = ("act_batch", "act_heads", "act_seq", None)
KEYS = ("act_batch", "act_kv_heads", "act_seq", None)


class Attention(nnx.Module):
    """Grouped-query attention over the residual stream."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        d, n, k, h = config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim
        std, dtypes = config.init_std, config.dtypes

        def heads(count: int, name: str, what: str) -> nnx.Param:
            names = ("embed", name, "head_dim")
            return normal(rngs, (d, count, h), names, std=std, dtypes=dtypes, what=what)

        def bias(count: int, name: str, what: str) -> nnx.Param | None:
            if not config.qkv_bias:
                return None
            names = (name, None, "head_dim")
            return constant((count, 1, h), names, value=0.0, dtypes=dtypes, what=what)

        self.query = heads(n, "q_heads", "attention.query")
        self.key = heads(k, "kv_heads", "attention.key")
        self.value = heads(k, "kv_heads", "attention.value")
        self.query_bias = bias(n, "q_heads", "attention.query_bias")
        self.key_bias = bias(k, "kv_heads", "attention.key_bias")
        self.value_bias = bias(k, "kv_heads", "attention.value_bias")
        self.out = normal(
            rngs, (n, h, d), ("q_heads", "head_dim", "embed"),
            std=std / (2 * config.num_layers) ** 0.5, dtypes=dtypes, what="attention.out",
        )  # fmt: skip
        self.out_bias = (
            constant((d,), ("norm",), value=0.0, dtypes=dtypes, what="attention.out_bias")
            if config.out_bias
            else None
        )
        self.query_norm, self.key_norm = (
            Norm(h, kind="rms", eps=config.norm_eps, unit_offset=config.norm_unit_offset,
                 dtypes=dtypes, what=f"attention.{name}_norm")
            if config.qk_norm else None
            for name in ("query", "key")
        )  # fmt: skip

    def __call__(
        self,
        x_BTD: jax.Array,
        tokens: Tokens,
        cache: Cache | None = None,
        layer: jax.Array | int = 0,
    ) -> tuple[jax.Array, Cache | None]:
        """Attend.

        Args:
            x_BTD: residual stream, (act_batch, act_residual_seq, act_embed).
            tokens: positions and documents of the queries, and their rotations.
            cache: keys and values so far, in which these tokens are seated; None attends within
                `x_BTD` alone.
            layer: which layer of the cache this is.

        Returns:
            The block's output, laid out as x, and the cache with this call's tokens added.
        """
        config = self.config
        with jax.named_scope("qkv"):
            q, k, v = project(
                x_BTD,
                (self.query, self.key, self.value),
                ("btd,dnh->bnth", "btd,dkh->bkth", "btd,dkh->bkth"),
                x_names=RESIDUAL,
                result_names=(QUERIES, KEYS, KEYS),
                dtypes=config.dtypes,
            )
            q, k, v = (
                checkpoint_name(add_bias(x, bias), name)
                for x, bias, name in (
                    (q, self.query_bias, "query"),
                    (k, self.key_bias, "key"),
                    (v, self.value_bias, "value"),
                )
            )
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if tokens.cos is not None and tokens.sin is not None:
            q, k = rotate(q, tokens.cos, tokens.sin), rotate(k, tokens.cos, tokens.sin)
        positions, segments = tokens.kv_positions_BS, tokens.kv_segments_BS
        if cache is not None:
            cache = cache.extend(layer, k, v, tokens)
            k, v = cache.of_layer(layer)
            positions, segments = cache.positions_BS, cache.segments_BS
        with jax.named_scope("core"):
            context = schemes.active().attention(
                q, k.astype(q.dtype), v.astype(q.dtype),
                q_positions_BT=tokens.positions_BT, kv_positions_BS=positions,
                q_segments_BT=tokens.segments_BT, kv_segments_BS=segments,
                masking=self.masking,
            )  # fmt: skip
        with jax.named_scope("out"):
            (out,) = project(
                context, (self.out,), ("bnth,nhd->btd",),
                x_names=QUERIES, result_names=(RESIDUAL,), dtypes=config.dtypes,
            )  # fmt: skip
        return checkpoint_name(add_bias(out, self.out_bias), "attention_out"), cache

    @property
    def masking(self) -> Masking:
        config = self.config
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        return Masking(
            causal=config.causal, window=config.window, scale=scale,
            softcap=config.attention_softcap,
        )  # fmt: skip


def empty_cache(config: ModelConfig, batch: int, length: int) -> Cache:
    """An empty key/value cache of every layer: [L, B, K, S, H] in the compute dtype."""
    shape = (config.num_layers, batch, config.num_kv_heads, length, config.head_dim)
    return Cache.empty(shape, jnp.dtype(config.dtypes.compute))
