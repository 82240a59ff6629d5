"""Choosing the next token from logits.

B rows, V vocabulary. Each row has a key of its own, so that a row's text does not depend on what
else is in the batch.
"""

import jax
import jax.numpy as jnp

from paxlike.config import InferenceConfig


def sample(
    logits_BV: jax.Array, keys_B: jax.Array, config: InferenceConfig, vocab_size: int
) -> jax.Array:
    """Choose a token for each row.

    Args:
        logits_BV: float32, whole on every device.
        keys_B: one random key a row.
        config: temperature, top_k and top_p; temperature 0 takes the likeliest token.
        vocab_size: tokens that the tokenizer knows; padded rows of the embedding are never chosen.

    Returns:
        int32 [B].
    """
    padded = jnp.arange(logits_BV.shape[1]) >= vocab_size
    logits_BV = jnp.where(padded[None, :], -jnp.inf, logits_BV)
    if config.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = logits_BV / config.temperature
    if config.top_k:
        kth = jax.lax.top_k(logits_BV, min(config.top_k, vocab_size))[0][:, -1:]
        logits_BV = jnp.where(logits_BV < kth, -jnp.inf, logits_BV)
    if config.top_p < 1:
        logits_BV = jnp.where(_outside_nucleus(logits_BV, config.top_p), -jnp.inf, logits_BV)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)


def _outside_nucleus(logits_BV: jax.Array, top_p: float) -> jax.Array:
    """Tokens outside the smallest set of likeliest tokens whose probability reaches top_p."""
    ordered = jnp.sort(logits_BV, axis=-1, descending=True)
    probability = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(probability, axis=-1) - probability
    # The likeliest token is always kept, since nothing comes before it.
    last = jnp.sum(before < top_p, axis=-1, keepdims=True) - 1
    return logits_BV < jnp.take_along_axis(ordered, last, axis=-1)
