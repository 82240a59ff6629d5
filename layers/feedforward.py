"""The feed-forward block: gated (SwiGLU, GEGLU) or plain (GELU, ReLU, squared ReLU).

B batch, T length, D model, F feed-forward. Tensor parallelism splits F: one reduction of [B, T, D]
forward and one backward. Source: GLU variants (arXiv 2002.05202), squared ReLU (2109.08668).
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from layers.config import ModelConfig
from layers.linear import add_bias, constant, normal, project

RESIDUAL = ("act_batch", "act_residual_seq", "act_embed")
HIDDEN = ("act_batch", "act_seq", "act_mlp")


@jax.custom_jvp
def gelu(x: jax.Array) -> jax.Array:
    """Exact GELU, x times the normal distribution function (arXiv 1606.08415).

    With a derivative of its own, because on jax 0.12 that of `erf` does not run inside shard_map.
    """
    return x * _normal_cdf(x)


def _normal_cdf(x: jax.Array) -> jax.Array:
    return 0.5 * (1 + jax.lax.erf(x * 0.5**0.5))


@gelu.defjvp
def _gelu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]):
    (x,), (dx,) = primals, tangents
    density = jnp.exp(-0.5 * x * x) * (2 * math.pi) ** -0.5
    return gelu(x), dx * (_normal_cdf(x) + x * density)


ACTIVATIONS = {
    "swiglu": jax.nn.silu,
    "geglu": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu": gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jax.nn.relu(x) ** 2,
}


class FeedForward(nnx.Module):
    """A dense feed-forward block."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        d, f, std, dtypes = config.embed_dim, config.mlp_dim, config.init_std, config.dtypes

        def inward(what: str) -> nnx.Param:
            return normal(rngs, (d, f), ("embed", "mlp"), std=std, dtypes=dtypes, what=what)

        def bias(size: int, name: str, what: str) -> nnx.Param | None:
            if not config.mlp_bias:
                return None
            return constant((size,), (name,), value=0.0, dtypes=dtypes, what=what)

        self.gate = inward("mlp.gate") if config.gated else None
        self.up = inward("mlp.up")
        self.down = normal(
            rngs, (f, d), ("mlp", "embed"),
            std=std / (2 * config.num_layers) ** 0.5, dtypes=dtypes, what="mlp.down",
        )  # fmt: skip
        self.gate_bias = bias(f, "mlp", "mlp.gate_bias") if config.gated else None
        self.up_bias = bias(f, "mlp", "mlp.up_bias")
        self.down_bias = bias(d, "norm", "mlp.down_bias")

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Map the residual stream [B, T, D] to the block's output, laid out alike."""
        config = self.config
        inward = [w for w in (self.gate, self.up) if w is not None]
        with jax.named_scope("up"):
            projected = project(
                x_BTD, inward, ("btd,df->btf",) * len(inward),
                x_names=RESIDUAL, result_names=(HIDDEN,) * len(inward), dtypes=config.dtypes,
            )  # fmt: skip
        *gate, up = projected
        up = checkpoint_name(add_bias(up, self.up_bias), "mlp_up")
        activation = ACTIVATIONS[config.activation]
        if gate:
            before = checkpoint_name(add_bias(gate[0], self.gate_bias), "mlp_gate")
            hidden = checkpoint_name(activation(before), "mlp_activation") * up
        else:
            hidden = activation(up)
        hidden = checkpoint_name(hidden, "mlp_hidden")
        with jax.named_scope("down"):
            (out,) = project(
                hidden, (self.down,), ("btf,fd->btd",),
                x_names=HIDDEN, result_names=(RESIDUAL,), dtypes=config.dtypes,
            )  # fmt: skip
        return checkpoint_name(add_bias(out, self.down_bias), "mlp_out")
