"""The decoder once more, dense and naive: no mesh, no loop over tiles, no fused loss.

It reads a dictionary of parameters by path and follows the papers, not the code: rotation as a
product of complex numbers, attention head by head over a full mask, cross entropy from full logits,
in float64. Gradients are JAX's own.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from layers.config import ModelConfig

Params = dict[str, Any]


def loss_and_gradients(
    config: ModelConfig, params: dict[str, np.ndarray], batch: dict[str, np.ndarray]
) -> tuple[float, float, dict[str, np.ndarray]]:
    """Objective and cross entropy a token, and gradients of the objective by path."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        wide = {name: jnp.asarray(x, jnp.float64) for name, x in params.items()}
        function = jax.value_and_grad(lambda p: objective(config, p, batch), has_aux=True)
        (total, loss), grads = jax.jit(function)(wide)
        return float(total), float(loss), {name: np.asarray(x) for name, x in grads.items()}


def objective(config: ModelConfig, p: Params, batch: dict[str, np.ndarray]):
    """Mean over weighted tokens of the loss with z loss, and of the cross entropy alone."""
    scores = logits(config, p, batch)
    partition = jax.scipy.special.logsumexp(scores, axis=-1)
    target = jnp.take_along_axis(scores, batch["targets"][..., None], axis=-1)[..., 0]
    weights = batch["loss_weights"].astype(np.float64)
    mean = lambda x: jnp.sum(weights * x) / weights.sum()  # noqa: E731
    return mean(partition - target + config.z_loss * partition**2), mean(partition - target)


def logits(config: ModelConfig, p: Params, batch: dict[str, np.ndarray]) -> jax.Array:
    """Logits [B, T, V]."""
    x = p["embedding"][batch["tokens"]]
    if config.scale_embeddings:
        x = x * np.sqrt(config.embed_dim)
    if config.position == "learned":
        x = x + p["position_embedding"][batch["positions"]]
    for layer in range(config.num_layers):
        block = {k.removeprefix("layers."): v[layer] for k, v in p.items() if k[:7] == "layers."}
        for branch, function in (("attention", attention), ("mlp", feed_forward)):
            placement = config.norm_placement
            entering = x if placement == "post" else norm(config, block, f"{branch}_norm", x)
            out = function(config, block, entering, batch)
            if placement == "pre_post":
                out = norm(config, block, f"{branch}_post_norm", out)
            x = x + out
            if placement == "post":
                x = norm(config, block, f"{branch}_post_norm", x)
    x = norm(config, p, "final_norm", x)
    out = x @ (p["embedding"].T if config.tie_embeddings else p["head"])
    return bend(out, config.logit_softcap)


def norm(config: ModelConfig, p: Params, name: str, x: jax.Array, kind: str = "") -> jax.Array:
    if (kind or config.norm) == "layer":
        x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + config.norm_eps)
        return x * (p[f"{name}.scale"] + config.norm_unit_offset) + p[f"{name}.bias"]
    x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps)
    return x * (p[f"{name}.scale"] + config.norm_unit_offset)


def bend(x: jax.Array, cap: float | None) -> jax.Array:
    return x if cap is None else cap * jnp.tanh(x / cap)


def attention(config: ModelConfig, p: Params, x: jax.Array, batch) -> jax.Array:
    visible = mask(config, batch)
    scale = config.attention_scale or 1 / np.sqrt(config.head_dim)
    out = 0
    for head in range(config.num_heads):
        shared = head // (config.num_heads // config.num_kv_heads)
        q = project_head(config, p, "query", x, head)
        k = project_head(config, p, "key", x, shared)
        v = project_head(config, p, "value", x, shared)
        if config.position == "rope":
            q, k = turn(config, q, batch["positions"]), turn(config, k, batch["positions"])
        scores = bend(scale * jnp.einsum("bth,bsh->bts", q, k), config.attention_softcap)
        shares = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
        context = jnp.where(visible.any(-1)[..., None], shares @ v, 0)
        out = out + context @ p["attention.out"][head]
    return out + (p["attention.out_bias"] if config.out_bias else 0)


def project_head(config: ModelConfig, p: Params, name: str, x: jax.Array, head: int) -> jax.Array:
    y = x @ p[f"attention.{name}"][:, head]
    if config.qkv_bias:
        y = y + p[f"attention.{name}_bias"][head, 0]
    if config.qk_norm and name != "value":
        y = norm(config, p, f"attention.{name}_norm", y, "rms")
    return y


def turn(config: ModelConfig, x: jax.Array, positions: np.ndarray) -> jax.Array:
    """RoFormer, equation 13: the pair (i, i + H/2) is a complex number, turned by its angle."""
    half = config.head_dim // 2
    angular = config.rope.theta ** -(np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * positions[..., None] * angular)
    return jnp.concatenate([turned.real, turned.imag], axis=-1)


def mask(config: ModelConfig, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Boolean [B, T, S]: query t sees key s."""
    positions, segments = batch["positions"], batch["segment_ids"]
    rows, length = positions.shape
    visible = np.zeros((rows, length, length), bool)
    for row in range(rows):
        for t in range(length):
            for s in range(length):
                back = positions[row, t] - positions[row, s]
                visible[row, t, s] = (
                    segments[row, t] == segments[row, s]
                    and (not config.causal or back >= 0)
                    and (config.window is None or back < config.window)
                )
    return visible


def feed_forward(config: ModelConfig, p: Params, x: jax.Array, batch) -> jax.Array:
    del batch
    bias = lambda name: p[f"mlp.{name}_bias"] if config.mlp_bias else 0  # noqa: E731
    gelu_tanh = lambda x: (  # noqa: E731
        0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    )
    up = x @ p["mlp.up"] + bias("up")
    if config.gated:
        gate = x @ p["mlp.gate"] + bias("gate")
        bent = gate / (1 + jnp.exp(-gate)) if config.activation == "swiglu" else gelu_tanh(gate)
        hidden = bent * up
    elif config.activation == "gelu":
        hidden = up * 0.5 * (1 + jax.scipy.special.erf(up / np.sqrt(2)))
    elif config.activation == "gelu_tanh":
        hidden = gelu_tanh(up)
    else:
        hidden = jnp.maximum(up, 0) ** (2 if config.activation == "relu2" else 1)
    return hidden @ p["mlp.down"] + bias("down")
