"""Update rules and learning-rate schedules, by the logical names of the parameters.

A rule gives a *direction*: moments, preconditioning and decoupled weight decay, without the
learning rate. The step scales it by the schedule at the run's step, so that a skipped update leaves
the bias correction alone and the schedule still ends with the run.

Parameters of a stack of layers share one array with a leading `layers` dimension. What is said of
a matrix (decay, orthogonalisation, RMS of an update) is said of each layer's matrix, so stacking
changes no update. Only Muon exchanges data: it gathers a matrix's dimensions (the bytes of the
momentum, moved to the layers dimension where it divides) and orthogonalises whole matrices locally.

Limit: Adafactor's two factored dimensions are the two largest (optax), so a stack of 128 layers or
more that is higher than its matrices are wide would be factored across layers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from meshes.context import current
from paxlike.training.config import OptimizerConfig

Names = tuple[str | None, ...]
Tree = Any  # a pytree of arrays (or of their abstract values) shaped like the parameters

# Newton-Schulz coefficients of Muon (Jordan et al. 2024), and the RMS that lets its updates share
# AdamW's learning rate and decay (arXiv 2502.16982, eq. 4).
_QUINTIC = (3.4445, -4.7750, 2.0315)
_MUON_RMS = 0.2
_HEADS = ("q_heads", "kv_heads")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An update rule.

    Attributes:
        direction: optax transformation of gradients into the decayed direction.
        schedule: learning rate of a 0-based step.
        clip_norm: global gradient norm above which gradients are scaled down; None is off.
    """

    direction: optax.GradientTransformation
    schedule: optax.Schedule
    clip_norm: float | None

    def gradient_scale(self, norm: jax.Array) -> jax.Array:
        """Factor that brings gradients of this global norm down to `clip_norm`."""
        if self.clip_norm is None:
            return jnp.ones_like(norm)
        return jnp.where(norm > self.clip_norm, self.clip_norm / norm, jnp.ones_like(norm))


def build_optimizer(config: OptimizerConfig, *, num_steps: int, names: Tree) -> Optimizer:
    """Build the update rule of a run.

    Args:
        config: what the user chose.
        num_steps: length of the run in steps.
        names: pytree like the parameters; a tuple of logical names for each.

    Raises:
        ValueError: warm-up and decay do not fit into the run.
    """
    steps = [_rule(config, names)]
    if config.weight_decay:
        mask = _map_names(lambda n: config.decay_mask == "all" or is_matrix(n), names)
        steps.append(optax.add_decayed_weights(config.weight_decay, mask))
    return Optimizer(
        direction=optax.chain(*steps),
        schedule=build_schedule(config, num_steps),
        clip_norm=config.clip_norm,
    )


def build_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Learning rate of 0-based steps: linear warm-up, then the configured shape.

    Warm-up step i of W has the rate peak * (i + 1) / W; the decay would reach
    final_fraction * peak at step `num_steps`.

    Raises:
        ValueError: warm-up and decay do not fit into `num_steps`.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    rest = num_steps - warmup
    decay = math.ceil(config.decay_fraction * num_steps) if config.schedule == "wsd" else 0
    if rest < max(decay, 1):
        raise ValueError(
            f"optimizer.warmup_steps is {warmup} and the decay takes {decay} steps, but "
            f"train.num_steps is {num_steps}; lengthen the run or shorten warm-up and decay"
        )
    final = peak * config.final_fraction
    match config.schedule:
        case "constant":
            main = optax.constant_schedule(peak)
        case "cosine":
            main = optax.cosine_decay_schedule(peak, rest, alpha=config.final_fraction)
        case "linear":
            main = optax.linear_schedule(peak, final, rest)
        case "wsd":
            main = optax.linear_schedule(peak, final, decay, transition_begin=rest - decay)
    if not warmup:
        return main
    return optax.join_schedules([lambda step: peak * (step + 1) / warmup, main], [warmup])


def is_matrix(names: Names) -> bool:
    """Whether a parameter maps one space to another, judged by its logical names.

    `layers` and leading `experts` count copies, and `head_dim` belongs to the heads before it: a
    bias of heads is no matrix, a router is one.
    """
    return len(matrix_dims(names)) >= 2


def matrix_dims(names: Names) -> tuple[tuple[int, ...], ...]:
    """Group the dimensions of one copy of a parameter into the spaces that it connects."""
    groups: list[tuple[int, ...]] = []
    for dim, name in enumerate(names):
        if name == "layers" or (name == "experts" and not groups):
            continue
        # A bias of heads has an unnamed dimension of size 1 between the two.
        if name in (None, "head_dim") and groups and names[groups[-1][0]] in _HEADS:
            groups[-1] += (dim,)
        else:
            groups.append((dim,))
    return tuple(groups)


def _rule(config: OptimizerConfig, names: Tree) -> optax.GradientTransformation:
    b1, b2, dtype = config.beta1, config.beta2, config.moment_dtype
    match config.name:
        case "adamw":
            return optax.scale_by_adam(b1, b2, config.epsilon, mu_dtype=dtype)
        case "lion":
            return optax.scale_by_lion(b1, b2, mu_dtype=dtype)
        case "sgd":
            return optax.trace(b1, accumulator_dtype=dtype) if b1 else optax.identity()
        case "adafactor":
            steps = [
                optax.scale_by_factored_rms(),
                _per_layer(optax.clip_by_block_rms(1.0), names),
                _per_layer(optax.scale_by_param_block_rms(), names),
            ]
            if b1:
                steps.append(optax.ema(b1, debias=False, accumulator_dtype=dtype))
            return optax.chain(*steps)
        case "muon":
            label = _map_names(lambda n: "muon" if _is_hidden_matrix(n) else "adam", names)
            muon = optax.chain(
                optax.trace(b1, nesterov=True, accumulator_dtype=dtype), _orthogonalize(names)
            )
            adam = optax.scale_by_adam(b1, b2, config.epsilon, mu_dtype=dtype)
            return optax.partition({"muon": muon, "adam": adam}, label)


def _is_hidden_matrix(names: Names) -> bool:
    # Embedding and output head are left to Adam, as in Muon's reference.
    return len(matrix_dims(names)) == 2 and "vocab" not in names


def _map_names(function: Callable[[Names], Any], names: Tree) -> Tree:
    return jax.tree.map(function, names, is_leaf=_is_names)


def _is_names(x: object) -> bool:
    return isinstance(x, tuple) and all(name is None or isinstance(name, str) for name in x)


def _stateless(function: Callable[[Tree, Tree], Tree]) -> optax.GradientTransformation:
    def update(updates: Tree, state: Any, params: Tree = None) -> tuple[Tree, Any]:
        return function(updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _per_layer(inner: optax.GradientTransformation, names: Tree) -> optax.GradientTransformation:
    """Apply a stateless transformation to each layer of a stack on its own."""

    def one(update: Any, param: Any) -> Any:
        return inner.update(update, optax.EmptyState(), param)[0]

    def each(name: Names, update: jax.Array, param: jax.Array) -> jax.Array:
        return (jax.vmap(one) if name[:1] == ("layers",) else one)(update, param)

    return _stateless(
        lambda updates, params: jax.tree.map(each, names, updates, params, is_leaf=_is_names)
    )


def _orthogonalize(names: Tree) -> optax.GradientTransformation:
    """Replace each matrix by (about) its nearest orthogonal one, scaled to a fixed RMS."""

    def each(name: Names, update: Any) -> Any:
        if isinstance(update, optax.MaskedNode):
            return update
        groups = matrix_dims(name)
        copies = tuple(d for d in range(len(name)) if not any(d in g for g in groups))
        hops = _hops_to_whole_matrices(update, copies)
        whole = functools.reduce(jax.reshard, hops, update)
        # Copies come first and the spaces' dimensions are adjacent, so this only merges them.
        rows, columns = (math.prod(update.shape[d] for d in group) for group in groups)
        shape = (*(update.shape[d] for d in copies), rows, columns)
        out = newton_schulz(whole.reshape(shape)) * (_MUON_RMS * math.sqrt(max(rows, columns)))
        return functools.reduce(jax.reshard, reversed(hops), out.reshape(update.shape))

    def is_leaf(x: object) -> bool:
        return _is_names(x) or isinstance(x, optax.MaskedNode)

    def function(updates: Tree, params: Tree) -> Tree:
        return jax.tree.map(
            lambda update, name: each(name, update), updates, names, is_leaf=is_leaf
        )

    return _stateless(function)


def _hops_to_whole_matrices(x: jax.Array, copies: Sequence[int]) -> list[PartitionSpec]:
    """Layouts on the way to whole matrices, each moving one mesh axis off a matrix dimension.

    An axis moves to a dimension of copies that it divides (an all-to-all), or else leaves (an
    all-gather). One at a time, because XLA replicates where two axes move at once.
    """
    sharding = jax.typeof(x).sharding
    sizes = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_sizes, strict=True))
    split = _axes(sharding.spec, x.ndim)
    hops = [sharding.spec]
    for dim in range(x.ndim):
        while dim not in copies and split[dim]:
            split[dim], axis = split[dim][:-1], split[dim][-1]
            for copy in copies:
                if x.shape[copy] % math.prod(sizes[a] for a in (*split[copy], axis)) == 0:
                    split[copy] = (*split[copy], axis)
                    break
            hops.append(_spec(split))
    return hops


def _axes(spec: PartitionSpec, ndim: int) -> list[tuple[str, ...]]:
    """Mesh axes of each dimension."""
    entries = [*spec, *[None] * (ndim - len(spec))]
    return [e if isinstance(e, tuple) else (e,) if e else () for e in entries]


def _spec(split: Sequence[tuple[str, ...]]) -> PartitionSpec:
    return PartitionSpec(*(axes if len(axes) > 1 else (*axes, None)[0] for axes in split))


def newton_schulz(x: jax.Array, steps: int = 5) -> jax.Array:
    """Push the singular values of matrices towards 1 by an odd quintic iteration.

    Args:
        x: [..., rows, columns], whole on each device.
        steps: iterations.

    Source: Jordan et al., Muon (2024), https://kellerjordan.github.io/posts/muon.
    """
    tall = x.shape[-2] > x.shape[-1]
    x = jnp.swapaxes(x, -1, -2) if tall else x
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-8)
    a, b, c = _QUINTIC
    for _ in range(steps):
        gram = x @ jnp.swapaxes(x, -1, -2)
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return jnp.swapaxes(x, -1, -2) if tall else x


def moment_spec(
    spec: PartitionSpec, shape: Sequence[int], *, split_over_data: bool
) -> PartitionSpec:
    """Layout of a parameter's moments: its own, or split further over the data axes (ZeRO-1).

    Args:
        spec: the parameter's layout.
        shape: its global shape.
        split_over_data: ZeRO-1: give the first dimension that divides the axes of `act_batch`
            that do not split the parameter yet; where none divides, keep the layout.
    """
    if not split_over_data:
        return spec
    split, sizes = _axes(spec, len(shape)), current().sizes
    free = tuple(a for a in current().axes("act_batch") if not any(a in axes for axes in split))
    for dim, axes in enumerate(split):
        if free and shape[dim] % math.prod(sizes[a] for a in (*axes, *free)) == 0:
            split[dim] = (*axes, *free)
            return _spec(split)
    return spec


def abstract_optimizer_state(direction: optax.GradientTransformation, params: Tree) -> Tree:
    """Shapes of the optimizer's state, each leaf laid out like the parameter that it belongs to.

    Args:
        direction: the optax transformation.
        params: abstract parameters with the layout of their moments.
    """
    owners = dict(jax.tree_util.tree_flatten_with_path(params)[0])
    lengths = sorted({len(path) for path in owners}, reverse=True)

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = PartitionSpec()
        for length in lengths:
            owner = owners.get(path[-length:])
            if owner is not None:
                spec = _leaf_spec(path[:-length], leaf.shape, owner)
                break
        mesh = current().mesh
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    state = jax.eval_shape(direction.init, params)
    return jax.tree_util.tree_map_with_path(place, state)


def _leaf_spec(
    field: tuple[Any, ...], shape: tuple[int, ...], owner: jax.ShapeDtypeStruct
) -> PartitionSpec:
    """Layout of one state leaf: its owner's, less the dimension that Adafactor averaged away."""
    spec = owner.sharding.spec
    if shape == owner.shape:
        return spec
    by_size = sorted(range(len(owner.shape)), key=lambda d: owner.shape[d])
    averaged = by_size[-1:] if getattr(field[-1], "name", None) == "v_row" else by_size[-2:-1]
    kept = [d for d in range(len(owner.shape)) if d not in averaged]
    if shape != tuple(owner.shape[d] for d in kept):
        return PartitionSpec(*[None] * len(shape))  # a placeholder where nothing is factored
    return PartitionSpec(*(spec[d] for d in kept))
