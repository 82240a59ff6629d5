"""A decoder-only transformer: embedding, a stack of blocks, final norm, output head.

B batch, T length, D model, V vocabulary, L layers. Blocks are stacked (a leading `layers` dimension
on every parameter) and looped over with `lax.scan`: one block is traced and compiled, whatever L.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from layers import schemes
from layers.attention.layer import Attention
from layers.config import ModelConfig
from layers.embedding import lookup
from layers.feedforward import FeedForward
from layers.linear import normal, project, weight_names
from layers.loss import Head, cross_entropy
from layers.moe import MoE
from layers.norm import Norm
from layers.remat import rematerialise
from layers.tokens import Cache, Tokens
from meshes.context import current

RESIDUAL = ("act_batch", "act_residual_seq", "act_embed")

# Scalars that a block adds to the loss, summed over layers.
Auxiliary = dict[str, jax.Array]


class Block(nnx.Module):
    """Attention and feed-forward, each around the residual stream."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        before = config.norm_placement in ("pre", "pre_post")
        after = config.norm_placement in ("post", "pre_post")
        self.attention = Attention(config, rngs=rngs)
        self.mlp = (FeedForward if config.moe is None else MoE)(config, rngs=rngs)
        self.attention_norm = Norm.of(config, "attention_norm") if before else None
        self.mlp_norm = Norm.of(config, "mlp_norm") if before else None
        self.attention_post_norm = Norm.of(config, "attention_post_norm") if after else None
        self.mlp_post_norm = Norm.of(config, "mlp_post_norm") if after else None

    def __call__(
        self,
        x_BTD: jax.Array,
        tokens: Tokens,
        cache: Cache | None = None,
        layer: jax.Array | int = 0,
    ) -> tuple[jax.Array, Cache | None, Auxiliary]:
        """Advance the residual stream by one layer; arguments as in `Attention`."""
        x_BTD = checkpoint_name(x_BTD, "layer_input")
        with jax.named_scope("attention"):
            entering = checkpoint_name(_maybe(self.attention_norm, x_BTD), "attention_input")
            out, cache = self.attention(entering, tokens, cache, layer)
            x_BTD = self._add(x_BTD, out, self.attention_post_norm)
            x_BTD = checkpoint_name(x_BTD, "mlp_residual")
        with jax.named_scope("mlp"):
            entering = checkpoint_name(_maybe(self.mlp_norm, x_BTD), "mlp_input")
            auxiliary: Auxiliary = {}
            if isinstance(self.mlp, MoE):
                out, auxiliary = self.mlp(entering, tokens)
            else:
                out = self.mlp(entering)
            x_BTD = self._add(x_BTD, out, self.mlp_post_norm)
        return x_BTD, cache, auxiliary

    def _add(self, x: jax.Array, out: jax.Array, post: Norm | None) -> jax.Array:
        # "post" normalises the sum (the original transformer), "pre_post" the branch (Gemma 2).
        if self.config.norm_placement == "post":
            return _maybe(post, x + out)
        return x + _maybe(post, out)


def _maybe(norm: Norm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)


class Decoder(nnx.Module):
    """The model."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        v, d, std, dtypes = config.vocab_size, config.embed_dim, config.init_std, config.dtypes
        self.embedding = normal(
            rngs, (v, d), ("vocab", "embed"), std=std, dtypes=dtypes, what="embedding"
        )
        self.position_embedding = (
            normal(rngs, (config.max_position, d), (None, "embed"), std=std, dtypes=dtypes,
                   what="position_embedding")
            if config.position == "learned" else None
        )  # fmt: skip
        current().spec(("layers",), (config.num_layers,), "model.num_layers")
        keys = jax.random.split(rngs.params(), config.num_layers)
        self.layers = nnx.vmap(
            lambda key: Block(config, rngs=nnx.Rngs(params=key)),
            transform_metadata={nnx.PARTITION_NAME: "layers"},
        )(keys)
        self.final_norm = Norm.of(config, "final_norm")
        self.head = (
            None
            if config.tie_embeddings
            else normal(rngs, (d, v), ("embed", "vocab"), std=std, dtypes=dtypes, what="head")
        )

    def __call__(
        self,
        ids_BT: jax.Array,
        positions_BT: jax.Array,
        segments_BT: jax.Array,
        cache: Cache | None = None,
    ) -> tuple[jax.Array, Cache | None, Auxiliary]:
        """Compute the final hidden states.

        Args:
            ids_BT: int32 tokens, (act_batch, act_seq).
            positions_BT: int32 position of each token in its document.
            segments_BT: int32 document of each token; 0 is padding.
            cache: keys and values of earlier tokens.

        Returns:
            Hidden states [B, T, D] after the final norm, in the compute dtype; the cache with
            these tokens added; scalars that the blocks add to the loss.
        """
        config = self.config
        dtype = jnp.dtype(config.dtypes.compute)
        with jax.named_scope("embedding"):
            x_BTD = lookup(self.embedding, ids_BT, dtype)
            if config.scale_embeddings:
                x_BTD = x_BTD * jnp.asarray(config.embed_dim**0.5, dtype)
            if self.position_embedding is not None:
                x_BTD = x_BTD + lookup(self.position_embedding, positions_BT, dtype)
        tokens = Tokens.of(config, positions_BT, segments_BT)
        cache = None if cache is None else cache.seat(tokens)
        x_BTD, cache, auxiliary = self._blocks(x_BTD, tokens, cache)
        with jax.named_scope("final_norm"):
            return self.final_norm(x_BTD), cache, auxiliary

    def _blocks(
        self, x_BTD: jax.Array, tokens: Tokens, cache: Cache | None
    ) -> tuple[jax.Array, Cache | None, Auxiliary]:
        active = schemes.active()
        graphdef, stacked = nnx.split(self.layers)

        # The cache is carried, not stacked: each layer writes its part of it in place.
        def block(carry: tuple[jax.Array, Cache | None], inputs: tuple[Any, jax.Array | None]):
            state, layer = inputs
            with jax.named_scope("layer"):
                module = nnx.merge(graphdef, state)
                x, cache, auxiliary = module(
                    carry[0], tokens, carry[1], 0 if layer is None else layer
                )
            return (x, cache), auxiliary

        block = rematerialise(block, active.remat, in_scan=active.scan_layers)
        numbers = None if cache is None else jnp.arange(self.config.num_layers)
        carry = (x_BTD, cache)
        if active.scan_layers:
            carry, auxiliary = jax.lax.scan(block, carry, (stacked, numbers))
        else:
            outs = []
            for i in range(self.config.num_layers):
                layer = jax.tree.map(lambda a, i=i: a[i], (stacked, numbers))
                carry, out = block(carry, layer)
                outs.append(out)
            auxiliary = jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)
        x_BTD, cache = carry
        return x_BTD, cache, {name: jnp.sum(value) for name, value in auxiliary.items()}

    def loss(
        self, hidden_BTD: jax.Array, targets_BT: jax.Array, loss_weights_BT: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Sum the weighted losses, with and without z loss, and the weights; see `layers.loss`."""
        config = self.config
        table = self.embedding if self.head is None else self.head
        head = Head(
            names=weight_names(table),
            softcap=config.logit_softcap,
            z_loss=config.z_loss,
            chunk=schemes.active().loss_chunk,
            accumulate=config.dtypes.accumulate,
            reduce=config.dtypes.reduce,
        )
        with jax.named_scope("head"):
            return cross_entropy(head, hidden_BTD, table[...], targets_BT, loss_weights_BT)

    def logits(self, hidden_BTD: jax.Array) -> jax.Array:
        """Logits [B, T, V] of hidden states, (act_batch, act_seq, act_vocab), float32."""
        config = self.config
        table = self.embedding if self.head is None else self.head
        equation = "btd,dv->btv" if self.head is not None else "btd,vd->btv"
        with jax.named_scope("head"):
            (logits,) = project(
                hidden_BTD, (table,), (equation,),
                x_names=RESIDUAL, result_names=(("act_batch", "act_seq", "act_vocab"),),
                dtypes=config.dtypes,
            )  # fmt: skip
        logits = logits.astype(config.dtypes.accumulate)
        if config.logit_softcap is not None:
            logits = config.logit_softcap * jnp.tanh(logits / config.logit_softcap)
        return logits
