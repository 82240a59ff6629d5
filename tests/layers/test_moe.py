"""Mixture of experts: equals a loop over experts on any mesh, and exchanges what it says."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax import nnx

from layers.config import DTypes, ModelConfig, MoEConfig
from layers.moe import MoE
from layers.moe_dispatch import block_rows, place_all, place_with_capacity
from layers.remat import rematerialise
from layers.tokens import Tokens
from meshes import presets
from meshes.axes import MeshShape
from meshes.build import abstract_mesh, build_mesh
from meshes.context import current, parallelism
from paxlike.analysis.collectives import summary, table

B, T, D, F, E = 8, 8, 16, 24, 4

# Each has a reason: no axis; tokens alone; experts with and without company; every kind of split.
MESHES = {
    "one": (MeshShape(), presets.DP),
    "data8": (MeshShape(data=8), presets.DP),
    "expert4_data2": (MeshShape(expert=4, data=2), presets.DP),
    "expert2_tensor2_fsdp2": (MeshShape(expert=2, tensor=2, fsdp=2), presets.FSDP_TP),
    "seq2_expert2_tensor2": (MeshShape(seq=2, expert=2, tensor=2), presets.TP),
    "megatron_sp": (MeshShape(expert=2, seq=2, tensor=2), presets.MEGATRON_SP),
    "fsdp2_megatron_sp": (MeshShape(fsdp=2, expert=2, tensor=2), presets.FSDP_SP),
}


def config_of(routing="dropless", k=2, *, factor=None, num_layers=1, **changes):
    moe = MoEConfig(
        num_experts=E, num_experts_per_token=k, expert_mlp_dim=F, routing=routing,
        auxiliary_loss=0.3, z_loss=0.2, **({} if factor is None else {"capacity_factor": factor}),
    )  # fmt: skip
    model = ModelConfig(
        vocab_size=8, num_layers=num_layers, embed_dim=D, num_heads=2, num_kv_heads=2, head_dim=8,
        mlp_dim=F, moe=moe, init_std=0.4, dtypes=DTypes(compute="float32"),
    )  # fmt: skip
    return dataclasses.replace(model, **changes)


def enough(routing):
    return E if routing == "capacity" else None


def inputs(padding=True):
    x, ct = (jax.random.normal(jax.random.key(i), (B, T, D)) for i in (1, 2))
    segments = np.ones((B, T), np.int32)
    if padding:
        segments[0], segments[1, 3:], segments[-1, -1:] = 0, 0, 0
    return x, ct, segments


def entered(name):
    shape, rules = MESHES[name]
    mesh = build_mesh(shape, jax.devices()[: shape.num_devices])
    return parallelism(mesh, rules)


def build(config):
    state = jax.jit(lambda: nnx.state(MoE(config, rngs=nnx.Rngs(0)), nnx.Param))()
    graph = nnx.graphdef(nnx.eval_shape(lambda: MoE(config, rngs=nnx.Rngs(0))))
    return graph, state


def put(x, *names):
    return jax.device_put(x, jax.NamedSharding(current().mesh, current().spec(names)))


RESIDUAL = ("act_batch", "act_residual_seq", "act_embed")


def call(graph, state, x, segments):
    tokens = Tokens.of(config_of(position="none"), segments, segments)
    return nnx.merge(graph, state)(x, tokens)


def objective(graph, state, x, ct, segments):
    out, auxiliary = call(graph, state, x, segments)
    total = jnp.sum(out * ct) + auxiliary["moe_balance_loss"] + auxiliary["moe_z_loss"]
    return total, (out, auxiliary)


def run(name, config, padding=True):
    """Output, auxiliary scalars, and gradients of the weights and the input, as numpy."""
    x, ct, segments = inputs(padding)
    with entered(name):
        graph, state = build(config)
        arguments = put(x, *RESIDUAL), put(ct, *RESIDUAL), put(segments, "act_batch", "act_seq")
        step = jax.jit(
            jax.value_and_grad(objective, argnums=(1, 2), has_aux=True), static_argnums=0
        )
        (_, (out, auxiliary)), grads = step(graph, state, *arguments)
        return jax.tree.map(np.asarray, (out, auxiliary, nnx.to_pure_dict(grads[0]), grads[1]))


def oracle(config, weights, x, ct, segments):
    """Every expert on every token, masked by the choice; no dispatch."""
    moe = config.moe
    real = (segments > 0)[..., None].astype(x.dtype)
    logits = jnp.einsum("btd,de->bte", x, weights["router"], precision="highest")
    probabilities = jax.nn.softmax(logits)
    kth = jnp.sort(logits, axis=-1)[..., -moe.num_experts_per_token][..., None]
    chosen = (logits >= kth).astype(x.dtype) * real
    gates = probabilities * chosen
    if moe.normalize_weights:
        gates = gates / jnp.where(real > 0, jnp.sum(gates, axis=-1, keepdims=True), 1)
    out = jnp.zeros_like(x)
    for e in range(E):
        up = x @ weights["up"][e]
        hidden = jax.nn.silu(x @ weights["gate"][e]) * up if "gate" in weights else jax.nn.relu(up)
        out = out + gates[..., e, None] * (hidden @ weights["down"][e])
    n = jnp.sum(real)
    fraction = jnp.sum(chosen, axis=(0, 1)) / (n * moe.num_experts_per_token)
    balance = E * jnp.sum(fraction * jnp.sum(probabilities * real, axis=(0, 1)) / n)
    z = jnp.sum(jax.nn.logsumexp(logits, axis=-1, keepdims=True) ** 2 * real) / n
    total = jnp.sum(out * ct) + moe.auxiliary_loss * balance + moe.z_loss * z
    return total, (out, moe.auxiliary_loss * balance, moe.z_loss * z)


@functools.cache
def expected(config, padding=True):
    x, ct, segments = inputs(padding)
    with entered("one"):
        weights = nnx.to_pure_dict(build(config)[1])
    weights = jax.tree.map(np.asarray, weights)
    step = jax.jit(jax.value_and_grad(oracle, argnums=(1, 2), has_aux=True), static_argnums=0)
    (_, (out, balance, z)), grads = step(config, weights, x, ct, segments)
    return jax.tree.map(np.asarray, (out, balance, z, *grads))


def assert_matches(name, config, padding=True):
    want_out, balance, z, want_weights, want_x = expected(config, padding)
    out, auxiliary, weights, dx = run(name, config, padding)

    def close(got, want, what):
        # Sums of up to 64 tokens and 24 hidden units in float32, in another order.
        scale = np.abs(want).max()
        np.testing.assert_allclose(got / scale, want / scale, atol=2e-6, rtol=1e-5, err_msg=what)

    close(out, want_out, "out")
    close(dx, want_x, "dx")
    assert weights.keys() == want_weights.keys()
    for key in weights:
        close(weights[key], want_weights[key], key)
    np.testing.assert_allclose(auxiliary["moe_balance_loss"], balance, rtol=2e-6)
    np.testing.assert_allclose(auxiliary["moe_z_loss"], z, rtol=2e-6)
    assert auxiliary["moe_dropped"] == 0


class Parity(parameterized.TestCase):
    @parameterized.product(name=tuple(MESHES), routing=("dropless", "capacity"))
    def test_top2_with_padding(self, name, routing):
        assert_matches(name, config_of(routing, factor=enough(routing)))

    @parameterized.product(
        name=("expert4_data2", "fsdp2_megatron_sp"), routing=("dropless", "capacity")
    )
    def test_top1_without_padding(self, name, routing):
        # Normalised, the one gate would be the constant 1, and the router would learn nothing.
        config = config_of(routing, 1, factor=enough(routing))
        moe = dataclasses.replace(config.moe, normalize_weights=False)
        assert_matches(name, dataclasses.replace(config, moe=moe), padding=False)

    def test_every_expert(self):
        assert_matches("expert2_tensor2_fsdp2", config_of(k=E))

    def test_plain_activation(self):
        assert_matches("expert2_tensor2_fsdp2", config_of(activation="relu"))

    def test_residual_sequence_split_over_an_axis_that_splits_no_weight(self):
        rules = presets.MEGATRON_SP.replace(mlp=None)
        MESHES["no_mlp"] = (MeshShape(expert=2, tensor=2, data=2), rules)
        try:
            for routing in ("dropless", "capacity"):
                assert_matches("no_mlp", config_of(routing, factor=enough(routing)))
        finally:
            del MESHES["no_mlp"]


class Dropping(parameterized.TestCase):
    @parameterized.parameters("one", "data8", "expert4_data2", "megatron_sp")
    def test_dropped_pairs_follow_the_formula(self, name):
        """max(0, pairs - capacity) of each source device and expert, capacity ceil(cf K N / E)."""
        config = config_of("capacity", factor=0.75, num_layers=3)
        x, _, segments = inputs()
        with entered(name) as par:
            graph, state = build(config)
            weights = np.asarray(nnx.to_pure_dict(state)["router"])
            x_put = put(x, *RESIDUAL)
            _, auxiliary = jax.jit(call, static_argnums=0)(
                graph, state, x_put, put(segments, "act_batch", "act_seq")
            )
            rows, columns = par.ways("act_batch"), par.ways("act_seq")
        top = np.argsort(-(np.asarray(x) @ weights), axis=-1, kind="stable")[..., :2]
        dropped = 0
        capacity = math.ceil(0.75 * 2 * (B // rows) * (T // columns) / E)
        for i in np.split(np.arange(B), rows):
            for j in np.split(np.arange(T), columns):
                chosen = top[np.ix_(i, j)][segments[np.ix_(i, j)] > 0]
                dropped += np.maximum(
                    np.bincount(chosen.reshape(-1), minlength=E) - capacity, 0
                ).sum()
        assert dropped > 0
        want = dropped / (2 * (segments > 0).sum()) / 3
        np.testing.assert_allclose(auxiliary["moe_dropped"], want, rtol=1e-6)

    def test_later_tokens_are_dropped_and_keep_only_the_residual(self):
        config = config_of("capacity", 1, factor=0.5)
        x, _, segments = inputs(padding=False)
        x = jnp.abs(x)
        with entered("one"):
            graph, state = build(config)
            to_expert_2 = jnp.zeros((D, E)).at[:, 2].set(1)
            state["router"].set_value(to_expert_2)
            out, auxiliary = jax.jit(call, static_argnums=0)(graph, state, x, segments)
        used = np.abs(np.asarray(out)).sum(axis=-1).reshape(-1) > 0
        capacity = math.ceil(0.5 * B * T / E)
        assert used[:capacity].all() and not used[capacity:].any()
        np.testing.assert_allclose(auxiliary["moe_dropped"], 1 - capacity / (B * T))

    def test_dropless_holds_any_routing(self):
        """All tokens want one expert, or an adversarial mix: no pair is lost, no row is shared."""
        rng = np.random.default_rng(0)
        for experts in ([[2] * 32], [[0] * 31 + [3]], rng.integers(0, 5, (1, 32)).tolist()):
            ids = jnp.asarray(experts)
            place = place_all(ids, E, 4, (32 + E * 3) // 4)
            rows, pairs = np.asarray(place.rows_KN).reshape(-1), np.asarray(place.pairs_R)
            kept = np.asarray(experts).reshape(-1) < E
            assert place.placed == kept.sum() and (rows[~kept] == pairs.size).all()
            np.testing.assert_array_equal(pairs[rows[kept]], np.flatnonzero(kept))
            owners = np.asarray(place.experts_B)[rows[kept] // 4]
            np.testing.assert_array_equal(owners, np.asarray(experts).reshape(-1)[kept])

    def test_first_choices_come_first(self):
        place = place_with_capacity(jnp.asarray([[1, 0], [0, 1]]), 2, 1)
        np.testing.assert_array_equal(place.rows_KN, [[1, 0], [2, 2]])


N = B * T // 8  # tokens of a device
ROWS = 2 * N * D * 4  # bytes of its pairs, capacity factor 1
STATISTICS = (2 * E + 3) * 4
GATE_UP_DOWN = 3 * D * F * 4  # of one expert


class Collectives(parameterized.TestCase):
    """Operands and bytes (gathered, unreduced, or exchanged) of one layer: these, and no others."""

    def moved(self, name, config, backward):
        x, ct, segments = inputs()
        with entered(name) as par:
            graph, state = build(config)
            x, ct, segments = (
                put(x, *RESIDUAL), put(ct, *RESIDUAL), put(segments, "act_batch", "act_seq")
            )  # fmt: skip
            if backward:
                f = jax.grad(objective, argnums=(1, 2), has_aux=True)
                lowered = jax.jit(f, static_argnums=0).lower(graph, state, x, ct, segments)
            else:
                lowered = jax.jit(call, static_argnums=0).lower(graph, state, x, segments)
            found = {}
            for row in table(lowered.compile().as_text(), par.mesh):
                count, size = found.get((row.kind, *row.mesh_axes), (0, 0))
                key = (row.kind, *row.mesh_axes)
                found[key] = (count + row.count, size + row.payload_bytes)
            return found

    def test_capacity(self):
        config = config_of("capacity", factor=1.0)
        forward = self.moved("expert4_data2", config, backward=False)
        assert forward == {
            ("all-to-all", "expert"): (2, 2 * ROWS),
            ("all-reduce", "data", "expert"): (1, STATISTICS),
        }
        both = self.moved("expert4_data2", config, backward=True)
        assert both == {
            ("all-to-all", "expert"): (4, 4 * ROWS),
            ("all-reduce", "data", "expert"): (2, STATISTICS + D * E * 4),
            ("all-reduce", "data"): (3, GATE_UP_DOWN),
        }

    def test_dropless(self):
        forward = self.moved("expert4_data2", config_of(), backward=False)
        tokens, pairs = 4 * N * D * 4, 4 * N * 2 * 4
        assert forward == {
            # Tokens, gates and choices come in; outputs go back.
            ("all-gather", "expert"): (3, tokens + 2 * pairs),
            ("reduce-scatter", "expert"): (1, tokens),
            ("all-reduce", "data", "expert"): (1, STATISTICS),
        }
        both = self.moved("expert4_data2", config_of(), backward=True)
        assert both == {
            ("all-gather", "expert"): (4, 2 * tokens + 2 * pairs),
            ("reduce-scatter", "expert"): (3, 2 * tokens + pairs),
            ("all-reduce", "data", "expert"): (2, STATISTICS + D * E * 4),
            ("all-reduce", "data"): (3, GATE_UP_DOWN),
        }

    def test_tensor_parallelism_reduces_the_combined_output_once(self):
        name = "seq2_expert2_tensor2"
        config = config_of("capacity", factor=1.0)
        output, gates = 2 * N * D * 4, 2 * N * 2 * 4
        forward = self.moved(name, config, backward=False)
        assert forward["all-reduce", "tensor"] == (1, output)
        both = self.moved(name, config, backward=True)
        assert both["all-reduce", "tensor"] == (3, 2 * output + gates)


class Model(parameterized.TestCase):
    @parameterized.parameters(
        ("dropless", "full"), ("capacity", "named:mlp_gate,mlp_up,moe_rows,moe_out")
    )
    def test_stacked_layers_rematerialised(self, routing, policy):
        """As on one device; a layer gathers each weight twice and scatters its gradient once."""
        config = config_of(routing, factor=enough(routing), num_layers=2)
        x, _, segments = inputs()

        def losses(name, policy):
            with entered(name) as par:
                keys = jax.random.split(jax.random.key(0), 2)
                make = nnx.vmap(
                    lambda key: MoE(config, rngs=nnx.Rngs(params=key)),
                    transform_metadata={nnx.PARTITION_NAME: "layers"},
                )
                state = jax.jit(lambda: nnx.state(make(keys), nnx.Param))()
                graph = nnx.graphdef(nnx.eval_shape(lambda: make(keys)))
                x_put, seg = put(x, *RESIDUAL), put(segments, "act_batch", "act_seq")

                def loss(state, x):
                    def layer(x, state):
                        out, auxiliary = call(graph, state, x, seg)
                        return x + out, auxiliary["moe_balance_loss"]

                    x, balance = jax.lax.scan(rematerialise(layer, policy, in_scan=True), x, state)
                    return jnp.sum(x**2) + jnp.sum(balance)

                step = jax.jit(jax.value_and_grad(loss)).lower(state, x_put).compile()
                value, grads = step(state, x_put)
                moved = summary(table(step.as_text(), par.mesh))
                return jax.tree.map(np.asarray, (value, nnx.to_pure_dict(grads))), moved

        want, _ = losses("one", "none")
        got, moved = losses("fsdp2_megatron_sp", policy)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6 * np.abs(b).max()),
            got,
            want,
        )
        assert moved["all-gather", ("fsdp",)][0] == 2 * 3 * 2
        assert moved["reduce-scatter", ("fsdp",)][0] == 3 * 2

    def test_gathered_weights_are_not_kept(self):
        """What the backward pass keeps holds no weight larger than its shard."""
        config = config_of()
        with entered("expert2_tensor2_fsdp2"):
            graph, state = build(config)
            x, _, segments = inputs()
            _, pull = jax.eval_shape(
                lambda s, x: jax.vjp(lambda s, x: call(graph, s, x, segments)[0], s, x),
                state, put(x, *RESIDUAL),
            )  # fmt: skip
        whole = {(E // 2, D, F // 2), (E // 2, F // 2, D), (E, D, F // 2), (E, F // 2, D)}
        kept = [r for r in jax.tree.leaves(pull) if r.shape in whole | {(E, D, F), (E, F, D)}]
        replicated = [r for r in kept if "fsdp" not in str(r.sharding.spec)]
        assert len(kept) >= 3 and not replicated, replicated

    def test_mixtral_traces_without_devices(self):
        moe = MoEConfig(num_experts=8, num_experts_per_token=2, expert_mlp_dim=14336)
        config = ModelConfig(
            vocab_size=32000, num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=8,
            head_dim=128, mlp_dim=14336, moe=moe,
        )  # fmt: skip
        mesh = abstract_mesh(MeshShape(expert=8, fsdp=8, tensor=4))
        with parallelism(mesh, presets.FSDP_SP):
            graph, state = nnx.split(nnx.eval_shape(lambda: MoE(config, rngs=nnx.Rngs(0))))
            size = sum(x.size for x in jax.tree.leaves(state))
            x = jax.ShapeDtypeStruct((64, 4096, 4096), jnp.bfloat16)
            segments = jax.ShapeDtypeStruct((64, 4096), jnp.int32)
            residual = current().spec(RESIDUAL)
            out, auxiliary = jax.eval_shape(
                lambda s, x, t: call(graph, s, jax.reshard(x, residual), jax.reshard(
                    t, current().spec(("act_batch", "act_seq")))),
                state, x, segments,
            )  # fmt: skip
        assert size == 4096 * 8 + 8 * 3 * 4096 * 14336
        assert out.shape == x.shape and out.dtype == x.dtype
        assert out.sharding.spec == residual
        assert {a.dtype for a in auxiliary.values()} == {jnp.dtype("float32")}


class Errors(parameterized.TestCase):
    def test_experts_over_an_axis_that_splits_no_tokens(self):
        rules = presets.TP.replace(experts="tensor", mlp=None)
        mesh = build_mesh(MeshShape(data=2, tensor=4))
        with parallelism(mesh, rules):
            graph, state = build(config_of())
            x, _, segments = inputs()
            with pytest.raises(ValueError, match="'experts' -> .*'tensor'.*act_batch"):
                call(graph, state, put(x, *RESIDUAL), put(segments, "act_batch", "act_seq"))

    def test_biases(self):
        with entered("one"), pytest.raises(ValueError, match="mlp_bias has no effect"):
            build(config_of(mlp_bias=True))

    def test_block_rows_stay_in_bounds(self):
        assert [block_rows(x) for x in (0.1, 32, 1024, 10**6)] == [8, 8, 256, 512]
