"""The state of a run: everything that the step changes, born on its devices.

`abstract_state` says shapes, dtypes and layouts without allocating anything: it is what a step is
compiled for ahead of time and what a checkpoint is restored into. `init_state` makes arrays of just
these layouts; no array is ever built in one place and then distributed.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from meshes.context import current
from paxlike.config import Experiment
from paxlike.model import Model
from paxlike.training.optimizers import (
    Optimizer,
    abstract_optimizer_state,
    build_optimizer,
    moment_spec,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Guard:
    """What the step remembers to recognise a bad step; float32 and int32 scalars.

    Attributes:
        mean_loss: running mean of the loss over (about) the last 100 good steps.
        good: good steps so far.
        skipped: updates skipped so far.
        streak: consecutive bad steps up to now.
    """

    mean_loss: jax.Array
    good: jax.Array
    skipped: jax.Array
    streak: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that a training step changes.

    Attributes:
        step: int32, steps done, skipped ones included.
        params: the parameters.
        opt_state: state of the optimizer's direction.
        ema: moving average of the parameters in float32, laid out like moments; None is off.
        guard: memory of the bad-step watch.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    ema: Any
    guard: Guard


def optimizer_of(model: Model, experiment: Experiment) -> Optimizer:
    """Build the experiment's optimizer for a model's parameters."""
    return build_optimizer(
        experiment.optimizer,
        num_steps=experiment.train.num_steps,
        names=logical_names(model.abstract()),
    )


def logical_names(params: Any) -> Any:
    """Logical names of each parameter, in a tree like the parameters."""
    variables = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable))
    names = [tuple(variable.get_metadata()["out_sharding"]) for variable in variables]
    return jax.tree.unflatten(jax.tree.structure(params), names)


def moment_params(params: Any, experiment: Experiment) -> Any:
    """Abstract parameters in the layout of their moments (ZeRO-1 splits them over the data)."""
    zero1 = experiment.parallel.zero1
    return jax.tree.map(
        lambda x: _placed(x, moment_spec(x.sharding.spec, x.shape, split_over_data=zero1)), params
    )


def concrete(abstract: Any) -> Any:
    """Lay abstract arrays out on the devices of the active mesh; tracing knows only its shape."""
    return jax.tree.map(lambda x: _placed(x, x.sharding.spec), abstract)


def _placed(x: Any, spec: PartitionSpec, dtype: Any = None) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(current().mesh, spec)
    return jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=sharding)


def abstract_state(model: Model, optimizer: Optimizer, experiment: Experiment) -> TrainState:
    """Shapes, dtypes and shardings of the state under the active parallelism.

    Args:
        model: what is trained (`paxlike.model.Model`).
        optimizer: its update rule.
        experiment: the run.
    """
    params = concrete(model.abstract())
    moments = moment_params(params, experiment)
    ema = None
    if experiment.train.ema_decay is not None:
        ema = jax.tree.map(lambda x: _placed(x, x.sharding.spec, jnp.float32), moments)

    def scalar(dtype: Any) -> Any:
        return _placed(jax.ShapeDtypeStruct((), dtype), PartitionSpec())

    return TrainState(
        step=scalar(jnp.int32),
        params=params,
        opt_state=abstract_optimizer_state(optimizer.direction, moments),
        ema=ema,
        guard=Guard(
            mean_loss=scalar(jnp.float32),
            good=scalar(jnp.int32),
            skipped=scalar(jnp.int32),
            streak=scalar(jnp.int32),
        ),
    )


def init_state(
    model: Model, optimizer: Optimizer, experiment: Experiment, *, params: Any = None
) -> TrainState:
    """Make the state of step 0.

    Args:
        model: what is trained (`paxlike.model.Model`).
        optimizer: its update rule.
        experiment: the run; its seed gives the parameters.
        params: parameters to start from instead, laid out as `model.abstract()` says.
    """
    abstract = abstract_state(model, optimizer, experiment)
    if params is None:
        params = model.init(jax.random.key(experiment.seed))

    def rest(params: Any) -> tuple[Any, ...]:
        ema = None
        if abstract.ema is not None:
            ema = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract.guard)
        return optimizer.direction.init(params), ema, zeros, jnp.zeros((), jnp.int32)

    targets = (abstract.opt_state, abstract.ema, abstract.guard, abstract.step)
    shardings = jax.tree.map(lambda x: x.sharding, targets)
    opt_state, ema, guard, step = jax.jit(rest, out_shardings=shardings)(params)
    return TrainState(step=step, params=params, opt_state=opt_state, ema=ema, guard=guard)


def averaged_params(state: TrainState, abstract: TrainState) -> Any:
    """The moving average as parameters; the parameters themselves where there is none."""
    if state.ema is None:
        return state.params
    shardings = jax.tree.map(lambda x: x.sharding, abstract.params)

    def convert(ema: Any) -> Any:
        return jax.tree.map(
            lambda x, target: jax.reshard(x.astype(target.dtype), target.sharding.spec),
            ema,
            abstract.params,
        )

    return jax.jit(convert, out_shardings=shardings)(state.ema)
