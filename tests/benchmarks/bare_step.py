"""The yardstick: the same small training step in plain JAX, by hand, in one file.

A Llama-shaped decoder (RMSNorm, RoPE, causal attention, SwiGLU, untied head) in float32 with AdamW:
no framework, no flax. Layers are stacked and scanned, the state is donated, and over a mesh weights
and activations carry shardings while XLA finds the collectives.

It is written as fast as is simple, since it is what the framework is measured against:

- Tokens are one dimension, [B T, D]. The gradient of a weight is then a plain product; over
  [B, T, D] XLA first transposes the wider operand, element by element, which costs half as much
  again.
- Attention takes a quarter of the queries at a time, and only the keys up to the last of them.
- A target's logit is h . head[:, target], not an element picked out of the logits, whose gradient
  would be a second array of the logits' size.

    python -m tests.benchmarks.bare_step --devices=8 --layout=fsdp
"""

import argparse
import math
import os
import statistics
import time
from typing import NamedTuple


class Dims(NamedTuple):
    layers: int = 4
    embed: int = 256
    heads: int = 8
    mlp: int = 1024
    vocab: int = 4096
    batch: int = 16
    length: int = 256


SMALL = Dims()
HUNDRED_MILLION = Dims(layers=12, embed=768, heads=12, mlp=2048, vocab=16_384, batch=8, length=256)
LEARNING_RATE = 3e-4


def build(layout: str, devices: int, dims: Dims = SMALL):
    """Return (step, state, batch): `state, loss = step(state, batch)`, compiled and donating."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,),
                         devices=jax.devices()[:devices])  # fmt: skip
    layers, embed, heads, mlp, vocab, batch, length = dims
    head_dim = embed // heads
    split = "x" if layout == "fsdp" else None
    shapes = {  # name: (shape, layout)
        "embedding": ((vocab, embed), P(None, split)),
        "query": ((layers, embed, embed), P(None, split)),
        "key": ((layers, embed, embed), P(None, split)),
        "value": ((layers, embed, embed), P(None, split)),
        "out": ((layers, embed, embed), P(None, None, split)),
        "gate": ((layers, embed, mlp), P(None, split)),
        "up": ((layers, embed, mlp), P(None, split)),
        "down": ((layers, mlp, embed), P(None, None, split)),
        "norms": ((layers, 2, embed), P()),
        "final_norm": ((embed,), P()),
        "head": ((embed, vocab), P(split)),
    }
    stacked = ("query", "key", "value", "out", "gate", "up", "down", "norms")
    rows, everywhere = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())

    def by_token(x):  # without these XLA may split activations as it likes
        return jax.lax.with_sharding_constraint(x, rows)

    def whole(w):
        return jax.lax.with_sharding_constraint(w, everywhere)

    def init():
        keys = jax.random.split(jax.random.key(0), len(shapes))
        return {
            name: jnp.ones(shape) if "norm" in name else 0.02 * jax.random.normal(key, shape)
            for key, (name, (shape, _)) in zip(keys, shapes.items(), strict=True)
        }

    def norm(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * scale

    angles = np.arange(length)[:, None] * 10_000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def rope(x):
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def attention(q, k, v):  # [B, heads, T, head_dim]
        contexts = []
        for start in range(0, length, -(-length // 4)):
            stop = min(length, start + -(-length // 4))
            causal = np.arange(start, stop)[:, None] >= np.arange(stop)
            scores = jnp.einsum("bnth,bnsh->bnts", q[:, :, start:stop], k[:, :, :stop])
            weights = jax.nn.softmax(jnp.where(causal, scores / math.sqrt(head_dim), -1e30), -1)
            contexts.append(jnp.einsum("bnts,bnsh->bnth", weights, v[:, :, :stop]))
        return jnp.concatenate(contexts, 2)

    def by_head(x):
        return x.reshape(batch, length, heads, head_dim).swapaxes(1, 2)

    def layer(x, w):
        w = jax.tree.map(whole, w)
        h = norm(x, w["norms"][0])
        q, k, v = (by_head(h @ w[name]) for name in ("query", "key", "value"))
        context = attention(rope(q), rope(k), v).swapaxes(1, 2).reshape(-1, embed)
        x = x + by_token(context) @ w["out"]
        h = norm(x, w["norms"][1])
        return by_token(x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]), None

    def loss(params, tokens, targets):
        x = by_token(whole(params["embedding"])[tokens.ravel()])
        x, _ = jax.lax.scan(layer, x, {name: params[name] for name in stacked})
        h, head = norm(x, params["final_norm"]), whole(params["head"])
        chosen = jnp.sum(h * head.T[targets.ravel()], -1)
        return jnp.mean(jax.nn.logsumexp(h @ head, -1) - chosen)

    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(LEARNING_RATE, b2=0.95, weight_decay=0.1,
                    mask=lambda p: {k: "norm" not in k for k in p}),
    )  # fmt: skip

    def step(state, batch):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    placed = {name: NamedSharding(mesh, spec) for name, (_, spec) in shapes.items()}
    params = jax.jit(init, out_shardings=placed)()
    moments = jax.tree.map(
        lambda x: x if x.ndim else jax.device_put(x, everywhere), optimizer.init(params)
    )
    state = (params, moments)
    random = np.random.default_rng(0)
    tokens, targets = (
        jax.device_put(random.integers(0, vocab, (batch, length)).astype(np.int32), rows)
        for _ in range(2)
    )
    layouts = jax.tree.map(lambda x: x.sharding, state)
    compiled = jax.jit(step, donate_argnums=0, out_shardings=(layouts, None))
    return compiled.lower(state, (tokens, targets)).compile(), state, (tokens, targets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--layout", choices=("dp", "fsdp"), default="dp")
    parser.add_argument("--large", action="store_true", help="the model of 110M parameters")
    given = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={given.devices}"
    import jax

    dims = HUNDRED_MILLION if given.large else SMALL
    step, state, batch = build(given.layout, given.devices, dims)
    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        state, loss = step(state, batch)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - start)
    print(f"{statistics.median(seconds[2:]):.3f} s a step, loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
