"""The yardstick on TPUs: a fully sharded training step of a large model in plain JAX, in one file.

A decoder as MaxText trained it in December 2023 (RMSNorm, RoPE, multi-head causal attention by
JAX's splash kernel, two matrices around a ReLU, tied embeddings), float32 parameters, bfloat16
products, AdamW. Layers are scanned and recomputed; weights are split over all chips along the width
of the residual stream, and XLA finds the collectives. Compiled from shapes alone, never run.

    python -m tests.benchmarks.bare_tpu_step --target=v5e:16x16 --model=16b
"""

from typing import Any, NamedTuple

LEARNING_RATE = 3e-4
LOSS_CHUNK = 2048


class Dims(NamedTuple):
    layers: int
    embed: int
    heads: int
    head_dim: int
    mlp: int
    vocab: int
    rows: int  # sequences of one chip
    length: int


MODELS = {
    "16b": Dims(32, 5120, 32, 256, 32_768, 32_768, 6, 2048),
    "32b": Dims(32, 10_240, 32, 256, 32_768, 32_768, 4, 2048),
}


def lower(dims: Dims, devices: list[Any]):
    """Lower `state, loss = step(state, batch)` for these devices; the state is donated."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.experimental.pallas.ops.tpu import splash_attention as splash
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    layers, embed, heads, head_dim, mlp, vocab, rows, length = dims
    mesh = jax.make_mesh((len(devices),), ("fsdp",), axis_types=(AxisType.Auto,), devices=devices)
    batch = rows * len(devices)
    shapes = {  # name: (shape, layout)
        "embedding": ((vocab, embed), P(None, "fsdp")),
        "qkv": ((layers, 3, embed, heads * head_dim), P(None, None, "fsdp")),
        "out": ((layers, heads * head_dim, embed), P(None, None, "fsdp")),
        "up": ((layers, embed, mlp), P(None, "fsdp")),
        "down": ((layers, mlp, embed), P(None, None, "fsdp")),
        "norms": ((layers, 2, embed), P()),
        "final_norm": ((embed,), P()),
    }
    stacked = ("qkv", "out", "up", "down", "norms")

    def laid_out(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def whole(w):
        return laid_out(w.astype(jnp.bfloat16))

    def norm(x, scale):
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
        return (wide * scale).astype(x.dtype)

    angles = np.arange(length)[:, None] * 10_000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def rope(x):
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    block = min(512, length)
    sizes = splash.BlockSizes(
        block_q=block, block_kv=block, block_q_dkv=block, block_kv_dkv=2 * block,
        block_kv_dkv_compute=block, use_fused_bwd_kernel=True,
    )  # fmt: skip

    def local_attention(q, k, v):  # [B, heads, T, head_dim] of one chip
        mask = splash.MultiHeadMask([splash.CausalMask((length, length))])
        kernel = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
        return jax.vmap(kernel)(q * jnp.bfloat16(head_dim**-0.5), k, v)

    attention = jax.shard_map(
        local_attention, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False
    )

    def layer(x, w):
        h = norm(x, w["norms"][0])
        q, k, v = jnp.einsum("btd,xdf->xbtf", h, whole(w["qkv"]))
        by_head = lambda y: y.reshape(batch, length, heads, head_dim).swapaxes(1, 2)  # noqa: E731
        context = attention(rope(by_head(q)), rope(by_head(k)), by_head(v))
        context = context.swapaxes(1, 2).reshape(batch, length, heads * head_dim)
        x = laid_out(x + context @ whole(w["out"]), "fsdp")
        h = norm(x, w["norms"][1])
        return laid_out(x + jax.nn.relu(h @ whole(w["up"])) @ whole(w["down"]), "fsdp"), None

    def chunk_loss(head, h, targets):
        logits = jnp.einsum("btd,vd->btv", h, head, preferred_element_type=jnp.float32)
        chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
        return jnp.sum(jax.nn.logsumexp(logits, -1) - chosen)

    def loss(params, tokens, targets):
        table = whole(params["embedding"])
        x = laid_out(table[tokens], "fsdp")
        step = jax.checkpoint(layer, policy=jax.checkpoint_policies.nothing_saveable,
                              prevent_cse=False)  # fmt: skip
        x, _ = jax.lax.scan(step, x, {name: params[name] for name in stacked})
        h = norm(x, params["final_norm"])
        chunks = rows * length // LOSS_CHUNK

        def add(total, piece):
            return total + jax.checkpoint(chunk_loss)(table, *piece), None

        def cut(y):  # [B, T, ...] -> chunks of every chip's tokens
            y = y.reshape(len(devices), chunks, LOSS_CHUNK, *y.shape[2:]).swapaxes(0, 1)
            return laid_out(y, None, "fsdp")

        total, _ = jax.lax.scan(add, jnp.float32(0), (cut(h), cut(targets)))
        return total / (batch * length)

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

    def abstract(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    params = {k: abstract(shape, jnp.float32, spec) for k, (shape, spec) in shapes.items()}
    layout = {x: spec for x, spec in shapes.values()}
    moments = jax.tree.map(
        lambda x: abstract(x.shape, x.dtype, layout.get(x.shape, P())),
        jax.eval_shape(optimizer.init, params),
    )
    state = (params, moments)
    tokens = abstract((batch, length), jnp.int32, P("fsdp"))
    layouts = jax.tree.map(lambda x: x.sharding, state)
    compiled = jax.jit(step, donate_argnums=0, out_shardings=(layouts, None))
    return compiled.lower(state, (tokens, tokens))
