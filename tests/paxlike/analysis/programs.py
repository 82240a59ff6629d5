"""Small programs whose collectives are known by construction, for any mesh of 8 devices.

Axes: data 2, seq 2, tensor 2. Used on live compiles and for the recorded samples (`record.py`).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

AXES = {"data": 2, "seq": 2, "tensor": 2}
OUTER, INNER = 3, 5
LAYERS, BATCH, WIDTH, HIDDEN = 4, 16, 256, 512


def struct(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def nested(mesh):
    """Every kind in nested scans: outer 3 x (all-gather, reduce-scatter, inner 5 x the rest)."""

    def inner(x, _):
        with jax.named_scope("mix"):
            x = jax.lax.all_to_all(x, "tensor", 1, 0, tiled=True)
            x = jax.lax.all_to_all(jnp.sin(x), "tensor", 0, 1, tiled=True)
        with jax.named_scope("ring"):
            x = jax.lax.ppermute(jnp.cos(x), "seq", [(0, 1), (1, 0)])
        with jax.named_scope("norm"):
            total = jax.lax.psum(jnp.sin(x), ("data", "tensor"))
        return x + jnp.sin(total), None

    def outer(x, _):
        x, _ = jax.lax.scan(inner, x, None, length=INNER)
        with jax.named_scope("weights"):
            wide = jnp.tanh(jax.lax.all_gather(x, "data", axis=0, tiled=True))
            x = jax.lax.psum_scatter(wide, "data", scatter_dimension=0, tiled=True)
        return x, None

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=P(("data", "seq"), "tensor"),
        out_specs=P(("data", "seq"), "tensor"),
    )
    def program(x):
        return jax.lax.scan(outer, x, None, length=OUTER)[0]

    return program, (struct(mesh, (4 * BATCH, 2 * WIDTH), ("data", "seq"), "tensor"),)


def tensor_parallel(mesh):
    """Loss and gradient of scanned pairs of column- and row-parallel products, rematerialised."""

    def block(x, weights):
        up, down = weights
        with jax.named_scope("mlp"):
            hidden = jnp.sin(jnp.einsum("bd,df->bf", x, up))
            out = jnp.einsum("bf,fd->bd", hidden, down, out_sharding=P(("data", "seq"), None))
        return jnp.sin(x + out), None

    def loss(weights, x):
        with jax.named_scope("layers"):
            x, _ = jax.lax.scan(jax.checkpoint(block), x, weights)
        return jnp.sum(x**2, axis=1)

    def program(weights, x):
        out, pull = jax.vjp(loss, weights, x)
        return pull(jnp.ones_like(out))

    weights = (
        struct(mesh, (LAYERS, WIDTH, HIDDEN), None, None, "tensor"),
        struct(mesh, (LAYERS, HIDDEN, WIDTH), None, "tensor", None),
    )
    return program, (weights, struct(mesh, (4 * BATCH, WIDTH), ("data", "seq"), None))


def fsdp(mesh):
    """Gradient of scanned products with weights gathered over data, and gathered again backward."""

    def block(x, weight):
        with jax.named_scope("layer"):
            full = jax.lax.all_gather(weight, "data", axis=0, tiled=True)
            return jnp.sin(x @ full), None

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(None, "data"), P("data")), out_specs=P(None, "data")
    )
    def program(weights, x):
        def loss(weights):
            return jnp.sum(jax.lax.scan(jax.checkpoint(block), x, weights)[0] ** 2)

        return jax.grad(loss)(weights)

    weights = struct(mesh, (LAYERS, WIDTH, WIDTH), None, "data")
    return program, (weights, struct(mesh, (2 * BATCH, WIDTH), "data"))


def megatron_sp(mesh):
    """Gradient of scanned column- and row-parallel pairs, activations sharded between them."""

    def block(x, weights):
        up, down = weights
        with jax.named_scope("mlp"):
            full = jax.lax.all_gather(x, "tensor", axis=0, tiled=True)
            partial = jnp.sin(full @ up) @ down
            out = jax.lax.psum_scatter(partial, "tensor", scatter_dimension=0, tiled=True)
        return jnp.sin(x + out), None

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=((P(None, None, "tensor"), P(None, "tensor")), P("tensor")),
        out_specs=P("tensor"),
    )
    def program(weights, x):
        return jax.grad(lambda x: jnp.sum(jax.lax.scan(block, x, weights)[0] ** 2))(x)

    weights = (
        struct(mesh, (LAYERS, WIDTH, HIDDEN), None, None, "tensor"),
        struct(mesh, (LAYERS, HIDDEN, WIDTH), None, "tensor"),
    )
    return program, (weights, struct(mesh, (2 * BATCH, WIDTH), "tensor"))


def experts(mesh):
    """Gradient of scanned expert layers: dispatch and combine by all-to-all over tensor."""

    def layer(x_ECD, weight_EDF):
        with jax.named_scope("dispatch"):
            mine = jax.lax.all_to_all(x_ECD, "tensor", 0, 1, tiled=True)
        hidden = jnp.sin(jnp.einsum("ecd,edf->ecf", mine, weight_EDF))
        with jax.named_scope("combine"):
            return jax.lax.all_to_all(hidden, "tensor", 1, 0, tiled=True), None

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(None, "tensor"), P(None, "tensor")),
        out_specs=P(None, "tensor"),
    )
    def program(weights, x):
        return jax.grad(lambda x: jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2))(x)

    weights = struct(mesh, (LAYERS, 4, WIDTH, WIDTH), None, "tensor")
    return program, (weights, struct(mesh, (4, 2 * BATCH, WIDTH), None, "tensor"))


def merged(mesh):
    """Three independent all-reduces over data, which XLA merges, and two chained ones over seq."""

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P(("data", "seq")), out_specs=(P("seq"), P("data"))
    )
    def program(x):
        with jax.named_scope("gradients"):
            sums = [jax.lax.psum(f(x), "data") for f in (jnp.sin, jnp.cos, jnp.tanh)]
        with jax.named_scope("chain"):
            y = jax.lax.psum(jnp.sin(jax.lax.psum(x, "seq")) * x, "seq")
        return sum(jnp.sin(s) for s in sums), y

    return program, (struct(mesh, (4 * BATCH, WIDTH), ("data", "seq")),)


def resharded(mesh):
    """Tensor-parallel pairs whose weights lie sharded over data and seq, gathered by resharding.

    Wide enough that the TPU compiler gathers asynchronously and fuses the gradients' all-reduce
    with the slice that follows.
    """
    width, hidden = 1024, 2048

    def block(x, weights):
        with jax.named_scope("mlp"):
            up = jax.reshard(weights[0], P(None, "tensor"))
            down = jax.reshard(weights[1], P("tensor", None))
            inner = jnp.sin(jnp.einsum("bd,df->bf", x, up))
            out = jnp.einsum("bf,fd->bd", inner, down, out_sharding=P(("data", "seq"), None))
        return jnp.sin(x + out), None

    def program(weights, x):
        def loss(weights):
            return jax.lax.scan(jax.checkpoint(block), x, weights)[0]

        out, pull = jax.vjp(loss, weights)
        return pull(jnp.ones_like(out))[0]

    weights = (
        struct(mesh, (LAYERS, width, hidden), None, ("data", "seq"), "tensor", dtype=jnp.bfloat16),
        struct(mesh, (LAYERS, hidden, width), None, "tensor", ("data", "seq"), dtype=jnp.bfloat16),
    )
    x = struct(mesh, (8192, width), ("data", "seq"), None, dtype=jnp.bfloat16)
    return program, (weights, x)


T_LAYERS, T_BATCH, T_LENGTH, T_WIDTH, T_HEADS, T_HEAD, T_FF, T_VOCAB = 3, 8, 64, 64, 4, 32, 256, 512


def transformer(mesh):
    """Gradient of a small transformer, batch over data, heads and feed-forward over tensor."""

    def block(x_BTD, weights):
        wqkv, wo, up, down = weights
        layout = P("data", None, None)
        with jax.named_scope("attention"):
            q, k, v = jnp.einsum("btd,dcnh->cbtnh", x_BTD, wqkv)
            scores = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) / T_HEAD**0.5)
            mixed = jnp.einsum("bnts,bsnh->btnh", scores, v)
            x_BTD = x_BTD + jnp.einsum("btnh,nhd->btd", mixed, wo, out_sharding=layout)
        with jax.named_scope("mlp"):
            hidden = jax.nn.gelu(jnp.einsum("btd,df->btf", x_BTD, up))
            x_BTD = x_BTD + jnp.einsum("btf,fd->btd", hidden, down, out_sharding=layout)
        return x_BTD, None

    def program(params, tokens):
        def loss(params):
            embedding, blocks, head = params
            x = embedding.at[tokens].get(out_sharding=P("data", None, None))
            x, _ = jax.lax.scan(block, x, blocks)
            with jax.named_scope("head"):
                logits = jnp.einsum("btd,dv->btv", x, head)
                return jnp.mean(jax.nn.logsumexp(logits, axis=-1))

        return jax.grad(loss)(params)

    def stacked(*shape_and_spec):
        shape, spec = zip(*shape_and_spec, strict=True)
        return struct(mesh, (T_LAYERS, *shape), None, *spec)

    tensor_heads = (T_HEADS, "tensor")
    blocks = (
        stacked((T_WIDTH, None), (3, None), tensor_heads, (T_HEAD, None)),
        stacked(tensor_heads, (T_HEAD, None), (T_WIDTH, None)),
        stacked((T_WIDTH, None), (T_FF, "tensor")),
        stacked((T_FF, "tensor"), (T_WIDTH, None)),
    )
    params = (
        struct(mesh, (T_VOCAB, T_WIDTH)),
        blocks,
        struct(mesh, (T_WIDTH, T_VOCAB)),
    )
    return program, (params, struct(mesh, (T_BATCH, T_LENGTH), "data", dtype=jnp.int32))


def transformer_flops() -> int:
    """Analytic FLOPs of `transformer` on one device: 2 a multiply-add, backward twice forward."""
    tokens = T_BATCH * T_LENGTH // AXES["data"]
    heads = T_HEADS * T_HEAD // AXES["tensor"]
    projections = 4 * T_WIDTH * heads + 2 * T_WIDTH * T_FF // AXES["tensor"]
    attention = 2 * T_LENGTH * heads
    head = T_WIDTH * T_VOCAB
    return 3 * 2 * tokens * (T_LAYERS * (projections + attention) + head)


PROGRAMS: dict[str, Callable] = {
    "nested": nested,
    "tensor_parallel": tensor_parallel,
    "fsdp": fsdp,
    "megatron_sp": megatron_sp,
    "experts": experts,
    "merged": merged,
    "resharded": resharded,
    "transformer": transformer,
}


def compile_text(name: str, mesh) -> str:
    """Optimised HLO of a program on a mesh with the axes `AXES`."""
    # At its default precision the TPU compiler would gather float32 weights as bfloat16.
    with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
        program, arguments = PROGRAMS[name](mesh)
        return jax.jit(program).lower(*arguments).compile().as_text()
