"""The compiled training and evaluation steps.

One program does all of a step: gradients of the token-weighted mean loss (in parts that a scan
accumulates), their global norm, the watch for bad steps, the update and the moving average. The
update is elementwise, so that XLA fuses it into one pass over parameters and moments.

Between devices: what the model's layout asks for in forward and backward; the scalar sums of norm
and loss; with ZeRO-1 each device updates its slice and the new parameters are gathered over the
data axes (parameter bytes, once a step).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from meshes.context import current
from paxlike.config import Experiment
from paxlike.model import Model, mean_metrics
from paxlike.training.optimizers import Optimizer, moment_spec
from paxlike.training.state import Guard, TrainState

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]

# Good steps over which the running mean of the loss looks back, and those it needs to be trusted.
_MEMORY = 100
_TRUSTED = 10


def build_train_step(model: Model, optimizer: Optimizer, experiment: Experiment) -> Any:
    """Build the jitted step(state, batch) -> (state, metrics); the state is donated.

    Metrics are float32 scalars: `loss` (mean over tokens by `loss_weights`), what else the model
    reports, `weights`, `grad_norm` (before clipping), `learning_rate`, `bad` (1 where loss or
    gradients are not finite or the loss is a spike), `skipped` (so far) and `bad_streak`.

    Args:
        model: what is trained (`paxlike.model.Model`).
        optimizer: its update rule.
        experiment: the run; its micro-batches, bad-step policy and compiler options count here.
    """
    train = experiment.train

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        grads, metrics = _gradients(model, state.params, batch, train.accumulation_steps)
        with jax.named_scope("optimizer"):
            norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))
            bad = _is_bad(metrics["loss"], norm, state.guard, train.spike_factor)
            rate = jnp.asarray(optimizer.schedule(state.step))
            params, opt_state, ema = _update(
                optimizer, experiment, state, grads, rate, optimizer.gradient_scale(norm)
            )
            if train.on_bad_step == "skip":
                params, opt_state, ema = jax.tree.map(
                    lambda new, old: jnp.where(bad, old, new),
                    (params, opt_state, ema),
                    (state.params, state.opt_state, state.ema),
                )
        guard = _watch(state.guard, metrics["loss"], bad, skip=train.on_bad_step == "skip")
        metrics |= {"grad_norm": norm, "learning_rate": rate, "bad": bad}
        metrics |= {"skipped": guard.skipped, "bad_streak": guard.streak}
        metrics = {name: jnp.asarray(x, jnp.float32) for name, x in metrics.items()}
        new = TrainState(
            step=state.step + 1, params=params, opt_state=opt_state, ema=ema, guard=guard
        )
        return new, metrics

    return jax.jit(step, donate_argnums=0, compiler_options=_compiler_options(experiment))


def build_eval_step(model: Model, experiment: Experiment) -> Any:
    """Build the jitted step(params, batch) -> metrics.

    `loss` is the sum of weighted token losses and `weights` that of the weights, both float32, so
    that batches are averaged by token. The batch is cut like a training batch: evaluation needs
    no more memory than training.
    """

    def step(params: Any, batch: Batch) -> Metrics:
        def part(sums: Metrics, micro: Batch) -> tuple[Metrics, None]:
            metrics = model.loss_sum(params, micro)[1]
            return {name: sums[name] + metrics[name] for name in sums}, None

        zeros = {name: jnp.zeros((), jnp.float32) for name in ("loss", "weights")}
        return _scan_parts(part, zeros, batch, experiment.train.accumulation_steps)[0]

    return jax.jit(step, compiler_options=_compiler_options(experiment))


def abstract_batch(experiment: Experiment) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of a global batch under the active parallelism."""
    shape = (experiment.train.global_batch_size, experiment.data.sequence_length)
    sharding = jax.sharding.NamedSharding(
        current().mesh, current().spec(("act_batch", "act_seq"), shape, "batch")
    )
    integers = ("tokens", "targets", "segment_ids", "positions")
    dtypes = dict.fromkeys(integers, jnp.int32) | {"loss_weights": jnp.float32}
    return {k: jax.ShapeDtypeStruct(shape, v, sharding=sharding) for k, v in dtypes.items()}


def _compiler_options(experiment: Experiment) -> dict[str, str | int | bool] | None:
    return dict(experiment.parallel.compiler_options) or None


def _scan_parts(part: Callable[..., Any], init: Any, batch: Batch, num_parts: int) -> Any:
    """Scan over the parts of a batch; one part runs in line."""
    if num_parts == 1:
        return part(init, batch)

    def cut(x: jax.Array) -> jax.Array:
        # Part i holds rows i, i + num_parts, ...: the same rows on every mesh, and each device
        # cuts the rows that it holds.
        rows = x.shape[0] // num_parts
        spec = current().spec(("act_batch", None, "act_seq"), (rows, num_parts, x.shape[1]))
        return x.reshape(rows, num_parts, x.shape[1], out_sharding=spec).swapaxes(0, 1)

    return jax.lax.scan(part, init, jax.tree.map(cut, batch))


def _gradients(model: Model, params: Any, batch: Batch, num_parts: int) -> tuple[Any, Metrics]:
    """Gradients of the token-weighted mean loss of the whole batch, and its metrics."""
    if num_parts == 1:
        return jax.grad(model.loss, has_aux=True)(params, batch)
    weights = batch["loss_weights"].sum(dtype=jnp.float32)
    weights = jnp.where(weights > 0, weights, 1)

    def share(params: Any, micro: Batch) -> tuple[jax.Array, Metrics]:
        objective, sums = model.loss_sum(params, micro)
        return objective / weights, sums

    grad = jax.grad(share, has_aux=True)

    def part(total: Any, micro: Batch) -> tuple[Any, Metrics]:
        grads, sums = grad(params, micro)
        return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads), sums

    # Sums of many small terms: float32 whatever the parameters' dtype.
    zeros = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=jnp.float32), params)
    grads, sums = _scan_parts(part, zeros, batch, num_parts)
    grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
    return grads, mean_metrics(jax.tree.map(lambda m: m.sum(0), sums))


def _update(
    optimizer: Optimizer,
    experiment: Experiment,
    state: TrainState,
    grads: Any,
    rate: jax.Array,
    scale: jax.Array,
) -> tuple[Any, Any, Any]:
    """New parameters, optimizer state and moving average."""

    def to_moments(x: jax.Array) -> jax.Array:
        spec = jax.typeof(x).sharding.spec
        target = moment_spec(spec, x.shape, split_over_data=experiment.parallel.zero1)
        return x if target == spec else jax.reshard(x, target)

    def back(new: jax.Array, old: jax.Array) -> jax.Array:
        spec = jax.typeof(old).sharding.spec
        return new if jax.typeof(new).sharding.spec == spec else jax.reshard(new, spec)

    old = jax.tree.map(to_moments, state.params)
    grads = jax.tree.map(lambda g: to_moments(g) * scale.astype(g.dtype), grads)
    direction, opt_state = optimizer.direction.update(grads, state.opt_state, old)
    new = jax.tree.map(lambda p, d: (p - rate * d).astype(p.dtype), old, direction)
    ema, decay = state.ema, experiment.train.ema_decay
    if decay is not None:
        ema = jax.tree.map(lambda e, p: e + (1 - decay) * (p.astype(e.dtype) - e), ema, new)
    return jax.tree.map(back, new, state.params), opt_state, ema


def _is_bad(
    loss: jax.Array, norm: jax.Array, guard: Guard, spike_factor: float | None
) -> jax.Array:
    bad = ~(jnp.isfinite(loss) & jnp.isfinite(norm))
    if spike_factor is not None:
        bad |= (guard.good >= _TRUSTED) & (loss > spike_factor * guard.mean_loss)
    return bad


def _watch(guard: Guard, loss: jax.Array, bad: jax.Array, *, skip: bool) -> Guard:
    good = guard.good + ~bad
    mean = guard.mean_loss + (loss - guard.mean_loss) / jnp.clip(good, 1, _MEMORY)
    return Guard(
        mean_loss=jnp.where(bad, guard.mean_loss, mean),
        good=good,
        skipped=guard.skipped + (bad if skip else 0),
        streak=jnp.where(bad, guard.streak + 1, 0),
    )
