"""RMS and layer normalisation over the last dimension, statistics in the accumulation dtype.

The last dimension is whole on every device: a norm exchanges nothing forward; its scale's gradient
is summed over the axes that split the other dimensions.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from layers.config import DTypes, ModelConfig
from layers.linear import constant, trailing
from meshes.collectives.varying import on_each_device


class Norm(nnx.Module):
    """RMSNorm (arXiv 1910.07467) or LayerNorm (arXiv 1607.06450)."""

    def __init__(
        self, dim: int, *, kind: str, eps: float, unit_offset: bool, dtypes: DTypes, what: str
    ):
        self.kind, self.eps, self.unit_offset, self.dtypes = kind, eps, unit_offset, dtypes
        start = 0.0 if unit_offset else 1.0
        self.scale = constant((dim,), ("norm",), value=start, dtypes=dtypes, what=f"{what}.scale")
        self.bias = (
            constant((dim,), ("norm",), value=0.0, dtypes=dtypes, what=f"{what}.bias")
            if kind == "layer"
            else None
        )

    @classmethod
    def of(cls, config: ModelConfig, what: str) -> "Norm":
        """The norm of the residual stream that a model config asks for."""
        return cls(
            config.embed_dim, kind=config.norm, eps=config.norm_eps,
            unit_offset=config.norm_unit_offset, dtypes=config.dtypes, what=what,
        )  # fmt: skip

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise [..., D]; the result has x's dtype and layout.

        Raises:
            ValueError: the rules split D.
        """
        if jax.typeof(x).sharding.spec[-1] is not None:
            raise ValueError(
                f"a norm needs its last dimension whole on each device, but {x.shape} is laid out "
                f"as {jax.typeof(x).sharding.spec}; map its logical name ('act_embed') to no axis"
            )
        parameters = (self.scale[...],) + (() if self.bias is None else (self.bias[...],))
        return on_each_device(self._local, x, *parameters)

    def _local(self, x: jax.Array, scale: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        wide = x.astype(self.dtypes.accumulate)
        if self.kind == "layer":
            wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(wide * wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(variance + self.eps)
        wide = wide * (trailing(scale, x.ndim).astype(wide.dtype) + float(self.unit_offset))
        if bias is not None:
            wide = wide + trailing(bias, x.ndim).astype(wide.dtype)
        return wide.astype(x.dtype)
