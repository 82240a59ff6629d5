"""Rotary position embedding, halves convention: dimension i turns together with i + H/2.

B batch, N heads, T length, H head dim. Elementwise: nothing is exchanged, and positions travel with
their tokens, so any placement of tokens on devices is right.
Source: RoFormer (arXiv 2104.09864); Llama 3.1's scaling as its reference code has it; YaRN (arXiv
2309.00071).
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from layers.config import RopeConfig


def frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Angular frequency of each pair of dimensions, float64 [H/2], radians a position."""
    base = config.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if config.scaling == "none":
        return base
    if config.scaling == "linear":
        return base / config.factor
    rotations = config.original_max_position * base / (2 * math.pi)
    if config.scaling == "llama3":
        low, high = config.low_freq_factor, config.high_freq_factor
        keep = np.clip((rotations - low) / (high - low), 0, 1)
        return (1 - keep) * base / config.factor + keep * base

    def dimension(turns: float) -> float:
        """The (fractional) pair that makes this many turns over the original context."""
        return (
            head_dim
            * math.log(config.original_max_position / (turns * 2 * math.pi))
            / (2 * math.log(config.theta))
        )

    first = max(math.floor(dimension(config.beta_fast)), 0)
    last = min(math.ceil(dimension(config.beta_slow)), head_dim - 1)
    ramp = (np.arange(head_dim // 2) - first) / max(last - first, 1e-3)
    keep = 1 - np.clip(ramp, 0, 1)
    return (1 - keep) * base / config.factor + keep * base


def attention_factor(config: RopeConfig) -> float:
    """YaRN's temperature on queries and keys, 0.1 ln(factor) + 1 if it is not given; else 1."""
    if config.scaling != "yarn":
        return 1.0
    given = config.attention_factor
    return 0.1 * math.log(config.factor) + 1 if given is None else given


def tables(
    config: RopeConfig, head_dim: int, positions_BT: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [B, 1, T, H/2], float32, of each token's position."""
    angular = jnp.asarray(frequencies(config, head_dim), jnp.float32)
    angles = positions_BT[:, None, :, None].astype(jnp.float32) * angular[None, None, None, :]
    factor = attention_factor(config)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(x_BNTH: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turn each pair (i, i + H/2) by its angle, in float32; result in x's dtype."""
    half = x_BNTH.shape[-1] // 2
    first, second = (part.astype(cos.dtype) for part in (x_BNTH[..., :half], x_BNTH[..., half:]))
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x_BNTH.dtype)
