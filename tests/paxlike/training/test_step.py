"""The compiled step: accumulation, ZeRO-1, bad steps, moving average, layouts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshes.axes import MeshShape
from paxlike.model import Model
from paxlike.runtime import runtime
from paxlike.training.config import OptimizerConfig
from paxlike.training.state import abstract_state, init_state, optimizer_of
from paxlike.training.step import build_eval_step, build_train_step
from tests.paxlike.training.tiny import MODEL, batch, experiment

SGD = OptimizerConfig(name="sgd", beta1=0.0, learning_rate=0.1, schedule="constant", clip_norm=None)


def steps(config, num_steps=3, *, batches=None, model=None):
    """Run steps; returns the state and the metrics of each, on the host."""
    with runtime(config):
        model = model or Model(config.model)
        optimizer = optimizer_of(model, config)
        abstract = abstract_state(model, optimizer, config)
        state = init_state(model, optimizer, config)
        step = build_train_step(model, optimizer, config)
        history = []
        for i in range(num_steps):
            data = batch(config, i) if batches is None else batches[i]()
            state, metrics = step(state, data)
            history.append(jax.tree.map(float, metrics))
        assert step._cache_size() <= 1, "the step was traced more than once"
        same = jax.tree.map(lambda x, a: x.sharding == a.sharding, state, abstract)
        assert all(jax.tree.leaves(same)), "a layout changed"
        return state, history


def close(actual, expected, tolerance=1e-6):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance * 1e-1
        )


def test_accumulation_weighs_by_token():
    # SGD, because Adam's normalisation would hide a gradient that is wrong by a factor.
    whole, expected = steps(experiment(optimizer=SGD, accumulation_steps=1))
    parts, actual = steps(experiment(optimizer=SGD, accumulation_steps=2))
    fours, _ = steps(experiment(optimizer=SGD, mesh=MeshShape(fsdp=2, tensor=2, seq=2),
                                parallel={"rules": "fsdp_tp"}, accumulation_steps=4))  # fmt: skip
    # Gradients reach 1e-1; sums run in another order.
    close(parts.params, whole.params)
    close(fours.params, whole.params)
    close(actual, expected)


def test_gradients_are_those_of_the_plain_mean_loss():
    config = experiment(optimizer=dataclasses.replace(SGD, weight_decay=0.0), accumulation_steps=2)
    with runtime(config):
        model = Model(config.model)
        before = jax.tree.map(np.asarray, model.init(jax.random.key(0)))
        data = batch(config)
        grads = jax.jit(jax.grad(lambda p: model.loss(p, data)[0]))(model.init(jax.random.key(0)))
        expected = jax.tree.map(lambda p, g: p - 0.1 * np.asarray(g), before, grads)
    state, _ = steps(config, 1)
    close(state.params, expected)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_zero1_equals_plain_and_halves_the_moments(name):
    optimizer = OptimizerConfig(name=name, learning_rate=1e-3)
    plain, expected = steps(experiment(optimizer=optimizer, ema_decay=0.9))
    split, actual = steps(experiment(optimizer=optimizer, ema_decay=0.9, parallel={"zero1": True}))
    close(split.params, plain.params, 1e-5)
    close(split.ema, plain.ema, 1e-5)
    close(actual, expected, 1e-5)

    def device_bytes(tree):
        return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree) if x.ndim)

    assert device_bytes(split.params) == device_bytes(plain.params)
    # Some vectors of optax have one element.
    assert device_bytes(split.opt_state) <= 0.51 * device_bytes(plain.opt_state) + 64
    assert device_bytes(split.ema) <= 0.51 * device_bytes(plain.ema)


def test_moving_average():
    config = experiment(optimizer=SGD, ema_decay=0.75)
    average, params = None, []
    for n in range(1, 4):
        state, _ = steps(config, n)
        params.append(jax.tree.map(np.asarray, state.params))
        average = jax.tree.map(np.asarray, state.ema)
    start, _ = steps(config, 0)
    expected = jax.tree.map(np.asarray, start.params)
    for new in params:
        expected = jax.tree.map(lambda e, p: 0.75 * e + 0.25 * p, expected, new)
    close(average, expected)


def poisoned(config, seed, factor):
    """A batch whose loss is `factor` times what it should be."""

    def make():
        data = batch(config, seed)
        return data | {"loss_weights": data["loss_weights"] * factor}

    return make


def test_skip_keeps_everything_but_the_step():
    config = experiment(on_bad_step="skip", max_bad_steps=5, ema_decay=0.9)
    good = [poisoned(config, 0, 1.0), poisoned(config, 2, 1.0)]
    with_bad = [good[0], poisoned(config, 1, np.nan), good[1]]
    clean, _ = steps(config, 2, batches=good)
    state, history = steps(config, 3, batches=with_bad)
    assert [m["bad"] for m in history] == [0, 1, 0]
    assert [m["bad_streak"] for m in history] == [0, 1, 0]
    assert [m["skipped"] for m in history] == [0, 1, 1]
    assert int(state.step) == 3 and np.isnan(history[1]["loss"])
    after_one, _ = steps(config, 1, batches=good)
    skipped, _ = steps(config, 2, batches=with_bad)
    for name in ("params", "opt_state", "ema"):
        jax.tree.map(
            np.testing.assert_array_equal, getattr(skipped, name), getattr(after_one, name)
        )
    # The third step follows the schedule of the run, so it is near the clean run's second.
    close(state.params, clean.params, 1e-3)


def test_stop_reports_a_bad_step():
    config = experiment()
    _, history = steps(config, 2, batches=[poisoned(config, 0, 1.0), poisoned(config, 1, np.inf)])
    assert [m["bad"] for m in history] == [0, 1]


class Spiky(Model):
    """A model whose loss is the mean of the loss weights: the test says what it is."""

    def loss_sum(self, params, data):
        weights = jnp.asarray(data["tokens"].size, jnp.float32)
        loss = data["loss_weights"].sum() + 0 * sum(p.sum() for p in jax.tree.leaves(params))
        return loss, {"loss": loss, "weights": weights}


def test_spike_is_judged_by_the_running_mean():
    config = experiment(on_bad_step="skip", max_bad_steps=5, spike_factor=2.0, num_steps=20)

    def constant(value):
        def make():
            data = batch(config)
            return data | {"loss_weights": 0 * data["loss_weights"] + value}

        return make

    losses = [1.0] * 10 + [1.9, 2.5, 2.5, 1.0]
    with runtime(config):
        _, history = steps(
            config, len(losses), batches=[constant(x) for x in losses], model=Spiky(MODEL)
        )
    assert [m["bad"] for m in history] == [0] * 11 + [1, 1, 0]
    assert history[12]["bad_streak"] == 2


def test_clipping_bounds_the_update():
    clipped = dataclasses.replace(SGD, clip_norm=0.01, weight_decay=0.0)
    state, history = steps(experiment(optimizer=clipped), 1)
    start, _ = steps(experiment(optimizer=clipped), 0)
    moved = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), state.params, start.params)
    norm = np.sqrt(sum(float((x**2).sum()) for x in jax.tree.leaves(moved)))
    assert history[0]["grad_norm"] > 0.1
    np.testing.assert_allclose(norm, 0.1 * 0.01, rtol=1e-4)


@pytest.mark.parametrize("parts", [1, 4])
def test_evaluation_is_the_sum_over_tokens(parts):
    config = experiment(mesh=MeshShape(fsdp=2, seq=2, tensor=2), accumulation_steps=parts)
    with runtime(config):
        model = Model(config.model)
        params = model.init(jax.random.key(0))
        data = batch(config)
        sums = build_eval_step(model, config)(params, data)
        loss, metrics = jax.jit(model.loss)(params, data)
    np.testing.assert_allclose(sums["loss"] / sums["weights"], metrics["loss"], rtol=1e-6)
    assert sums["weights"] == np.asarray(data["loss_weights"]).sum()
