"""Update rules against optax on one device, layer by layer; schedules against their formulas."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from meshes.axes import MeshShape
from meshes.build import build_mesh
from meshes.context import current, parallelism
from meshes.presets import preset
from paxlike.training.config import OptimizerConfig
from paxlike.training.optimizers import (
    abstract_optimizer_state,
    build_optimizer,
    build_schedule,
    is_matrix,
    moment_spec,
)

SHAPES = {"embedding": (64, 128), "mlp": (2, 128, 256), "query": (2, 128, 4, 64), "norm": (2, 128)}
NAMES = {
    "embedding": ("vocab", "embed"),
    "mlp": ("layers", "embed", "mlp"),
    "query": ("layers", "embed", "q_heads", "head_dim"),
    "norm": ("layers", "norm"),
}
STACKED = ("mlp", "query", "norm")
RATE = 0.01


def arrays(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return {k: (scale * rng.standard_normal(s)).astype(np.float32) for k, s in SHAPES.items()}


def ours(config, params, gradients, *, zero1):
    """Apply the rule on 8 devices; also check that the state keeps its layout."""
    mesh = build_mesh(MeshShape(data=2, fsdp=2, tensor=2))
    with parallelism(mesh, preset("fsdp_tp")):
        rule = build_optimizer(config, num_steps=10, names=NAMES)

        def placed(tree):
            def put(x, names):
                spec = current().spec(names, x.shape)
                spec = moment_spec(spec, x.shape, split_over_data=zero1)
                return jax.device_put(x, NamedSharding(mesh, spec))

            return {k: put(tree[k], NAMES[k]) for k in tree}

        params = placed(params)
        abstract = abstract_optimizer_state(rule.direction, jax.eval_shape(lambda: params))
        born = jax.tree.map(lambda x: x.sharding, abstract)
        state = jax.jit(rule.direction.init, out_shardings=born)(params)
        step = jax.jit(rule.direction.update)
        for gradient in gradients:
            direction, state = step(placed(gradient), state, params)
            params = jax.tree.map(lambda p, d: p - RATE * d, params, direction)
        assert jax.tree.map(lambda x: x.sharding, state) == born
        return jax.tree.map(np.asarray, params)


def by_layer(tree):
    """Each layer as a parameter of its own."""
    return {
        k: [x[0], x[1]] if k in STACKED else x for k, x in jax.tree.map(jnp.asarray, tree).items()
    }


def theirs(rule, params, gradients):
    params = by_layer(params)
    state = rule.init(params)
    for gradient in gradients:
        update, state = rule.update(by_layer(gradient), state, params)
        params = optax.apply_updates(params, update)
    return {k: np.stack(x) if k in STACKED else np.asarray(x) for k, x in params.items()}


def no_norms(params):
    return {k: jax.tree.map(lambda _, k=k: k != "norm", x) for k, x in params.items()}


ORACLES = {
    "adamw": (
        OptimizerConfig(name="adamw", beta1=0.8, beta2=0.9, epsilon=1e-6, weight_decay=0.1),
        optax.adamw(RATE, 0.8, 0.9, 1e-6, weight_decay=0.1, mask=no_norms),
    ),
    "lion": (
        OptimizerConfig(name="lion", beta1=0.8, beta2=0.9, weight_decay=0.1),
        optax.lion(RATE, 0.8, 0.9, weight_decay=0.1, mask=no_norms),
    ),
    "adafactor": (
        OptimizerConfig(name="adafactor", beta1=0.5, weight_decay=0.0),
        optax.adafactor(RATE, momentum=0.5),
    ),
    "sgd": (
        OptimizerConfig(name="sgd", beta1=0.5, weight_decay=0.0),
        optax.sgd(RATE, momentum=0.5),
    ),
    "decay of all": (
        OptimizerConfig(name="sgd", beta1=0.0, weight_decay=0.1, decay_mask="all"),
        optax.chain(optax.add_decayed_weights(0.1), optax.sgd(RATE)),
    ),
}


@pytest.mark.parametrize("zero1", [False, True])
@pytest.mark.parametrize("name", ORACLES)
def test_rule_equals_optax_by_layer(name, zero1):
    config, oracle = ORACLES[name]
    params, gradients = arrays(0), [arrays(1), arrays(2, 10.0), arrays(3)]
    expected = theirs(oracle, params, gradients)
    actual = ours(config, params, gradients, zero1=zero1)
    for key in SHAPES:
        # Sums run in another order on 8 devices.
        np.testing.assert_allclose(actual[key], expected[key], rtol=1e-5, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("zero1", [False, True])
def test_muon_orthogonalizes_each_layers_momentum(zero1):
    beta = 0.9
    config = OptimizerConfig(name="muon", beta1=beta, beta2=0.9, weight_decay=0.0)
    params, gradients = arrays(0), [arrays(1), arrays(2, 10.0)]
    actual = ours(config, params, gradients, zero1=zero1)
    adam = theirs(optax.adam(RATE, beta, 0.9), params, gradients)
    for key in ("embedding", "norm"):
        np.testing.assert_allclose(actual[key], adam[key], rtol=1e-5, atol=1e-6)
    # A fresh optax Muon orthogonalises the gradient that it gets, so it is given the momentum.
    for key in ("mlp", "query"):
        expected, momentum = params[key].reshape(2, 128, -1), 0.0
        for gradient in gradients:
            momentum = beta * momentum + gradient[key].reshape(2, 128, -1)
            ahead = beta * momentum + gradient[key].reshape(2, 128, -1)
            oracle, zero = optax.contrib.muon(RATE, consistent_rms=0.2), jnp.zeros((128, 256))
            layers = [oracle.update(jnp.asarray(x), oracle.init(zero), zero)[0] for x in ahead]
            expected = expected + np.stack(layers)
        # The iteration amplifies rounding by up to 3.4 ** 5.
        np.testing.assert_allclose(
            actual[key].reshape(expected.shape), expected, rtol=1e-3, atol=2e-5
        )


def test_moments_are_kept_in_their_dtype():
    rule = build_optimizer(
        OptimizerConfig(moment_dtype="bfloat16"), num_steps=10, names=NAMES
    ).direction
    state = jax.eval_shape(rule.init, {k: jnp.zeros(s) for k, s in SHAPES.items()})
    assert {x.dtype for x in jax.tree.leaves(state[0].mu)} == {jnp.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves(state[0].nu)} == {jnp.dtype("float32")}


def test_zero1_splits_the_first_dimension_that_divides():
    with parallelism(build_mesh(MeshShape(data=2, fsdp=2, tensor=2)), preset("fsdp_tp")):

        def split(names, shape):
            spec = current().spec(names, shape)
            return tuple(moment_spec(spec, shape, split_over_data=True))

        assert split(("layers", "embed", "mlp"), (3, 8, 8)) == (None, ("fsdp", "data"), "tensor")
        assert split(("layers", "embed", "mlp"), (4, 8, 8)) == ("data", "fsdp", "tensor")
        assert split(("layers", "norm"), (3, 8)) == (None, ("data", "fsdp"))
        assert split(("norm",), (6,)) == (None,)  # 4 does not divide 6: as before


def test_matrix_is_judged_by_names():
    matrices = [
        ("vocab", "embed"), ("layers", "embed", "mlp"), ("embed", "experts"),
        ("layers", "experts", "embed", "mlp"), ("layers", "q_heads", "head_dim", "embed"),
        (None, "embed"),
    ]  # fmt: skip
    others = [
        ("norm",), ("layers", "norm"), ("layers", "q_heads", "head_dim"), ("layers", "mlp"),
        ("layers", "kv_heads", None, "head_dim"), ("layers", "experts", "mlp"), (),
    ]  # fmt: skip
    assert all(is_matrix(names) for names in matrices)
    assert not any(is_matrix(names) for names in others)


def test_schedules():
    def values(**config):
        schedule = build_schedule(OptimizerConfig(learning_rate=2.0, **config), 20)
        return [float(schedule(jnp.asarray(i))) for i in range(20)]

    warm = [2.0 * (i + 1) / 4 for i in range(4)]
    steps = range(16)
    expected = {
        "constant": [2.0] * 16,
        "linear": [2.0 - 1.6 * i / 16 for i in steps],
        "cosine": [0.4 + 1.6 * (1 + math.cos(math.pi * i / 16)) / 2 for i in steps],
        "wsd": [2.0 - 1.6 * max(0, i - 8) / 8 for i in steps],
    }
    for schedule, after in expected.items():
        config = {} if schedule == "constant" else {"final_fraction": 0.2}
        config |= {"decay_fraction": 0.4} if schedule == "wsd" else {}
        actual = values(schedule=schedule, warmup_steps=4, **config)
        np.testing.assert_allclose(actual, warm + after, rtol=1e-6, err_msg=schedule)
    assert values(schedule="constant")[0] == 2.0


@pytest.mark.parametrize(
    "config",
    [
        {"name": "sgd", "beta2": 0.9},
        {"name": "sgd", "epsilon": 1e-6},
        {"name": "sgd", "beta1": 0.0, "moment_dtype": "bfloat16"},
        {"name": "adafactor", "beta2": 0.9},
        {"name": "lion", "epsilon": 1e-6},
        {"schedule": "constant", "final_fraction": 0.5},
        {"schedule": "cosine", "decay_fraction": 0.5},
        {"weight_decay": 0.0, "decay_mask": "all"},
    ],
)
def test_setting_without_effect_is_refused(config):
    with pytest.raises(ValueError, match=f"optimizer.{list(config)[-1]} is .* no effect"):
        OptimizerConfig(**config)


def test_warmup_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="optimizer.warmup_steps is 8 and the decay takes 4"):
        build_schedule(OptimizerConfig(schedule="wsd", warmup_steps=8, decay_fraction=0.4), 10)
    with pytest.raises(ValueError, match="train.num_steps is 10"):
        build_schedule(OptimizerConfig(warmup_steps=10), 10)
