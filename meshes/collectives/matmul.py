"""Matrix products of sharded operands, with every collective derived from three layouts.

For each mesh axis, the layouts of the two operands and of the result say what must happen:

| the axis splits                                    | then                                     |
| -------------------------------------------------- | ---------------------------------------- |
| the same contracted letter of both operands        | partial sums: all-reduce, or             |
|                                                    | reduce-scatter where the result is split |
| a letter of an operand that the result splits too  | nothing                                  |
| any other letter of an operand                     | all-gather that operand                  |
| only the result                                    | each device computes its slice           |

Tensor parallelism, Megatron sequence parallelism, FSDP and data parallelism are instances:
`x[B_fsdp, T, D] w[D_fsdp, F_tensor] -> y[B_fsdp, T, F_tensor]` gathers `w` over `fsdp`; its
backward pass, the same rule on the other two products, reduce-scatters `dw` over `fsdp` and
all-reduces `dx` over `tensor`. The residuals are the operands as they came: gathered copies are
made again in the backward pass, whatever the rematerialisation policy.

Several weights that read the same input are multiplied in one call, so that the input is gathered,
and its gradient reduced, once. Bytes sent per device, on G devices and X bytes gathered or reduced:
all-gather and reduce-scatter (G-1)/G X each, all-reduce 2(G-1)/G X.

"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshes.collectives.varying import own_slice

Layout = dict[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Move:
    """A gather or a slice of one operand.

    Attributes:
        axis: mesh axis.
        letter: dimension along which the operand is gathered or sliced.
        replicates: a gather whose copies must be known to be equal, since the result is not split.
    """

    axis: str
    letter: str
    replicates: bool = False


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How partial sums become the result.

    Attributes:
        scatters: (axis, dimension) pairs to reduce-scatter over.
        sums: axes to all-reduce over.
    """

    scatters: tuple[tuple[str, int], ...] = ()
    sums: tuple[str, ...] = ()


NO_REDUCTION = Reduction()


@dataclasses.dataclass(frozen=True)
class Product:
    """A product `a, b -> c` and the collectives that its layouts ask for."""

    equation: str
    gathers: tuple[tuple[Move, ...], tuple[Move, ...]]
    slices: tuple[tuple[Move, ...], tuple[Move, ...]]
    reduction: Reduction


@dataclasses.dataclass(frozen=True)
class Projection:
    """Static description of `x, w_i -> y_i` for several weights and one input.

    Attributes:
        equations: one einsum a weight, e.g. `("btd,dnh->btnh",)`.
        x: layout of the input.
        weights: layout of each weight.
        results: layout of each result.
        accumulate: dtype of the sums inside a product, by name.
        reduce: dtype of partial sums on the wire, by name.
    """

    equations: tuple[str, ...]
    x: PartitionSpec
    weights: tuple[PartitionSpec, ...]
    results: tuple[PartitionSpec, ...]
    accumulate: str = "float32"
    reduce: str = "float32"


def _letters(equation: str) -> tuple[str, str, str]:
    operands, result = equation.split("->")
    a, b = operands.split(",")
    return a, b, result


def _layout(letters: str, spec: PartitionSpec) -> Layout:
    entries = tuple(spec) + (None,) * (len(letters) - len(spec))
    return {
        letter: () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for letter, entry in zip(letters, entries, strict=True)
    }


def _owner(layout: Layout, axis: str) -> str | None:
    return next((letter for letter, axes in layout.items() if axis in axes), None)


@functools.cache
def plan(equation: str, a: PartitionSpec, b: PartitionSpec, c: PartitionSpec) -> Product:
    """Derive the collectives of a product from the layouts of its operands and result.

    Args:
        equation: `"ab,bc->ac"`; every letter stands in at least two of the three arrays.
        a: layout of the first operand.
        b: layout of the second operand.
        c: layout of the result.

    Returns:
        The product with its collectives.

    Raises:
        ValueError: a gather or scatter would interleave blocks, because its axis is not the
            minor part of the dimension's layout.
    """
    names = _letters(equation)
    layouts = [_layout(letters, spec) for letters, spec in zip(names, (a, b, c), strict=True)]
    axes = dict.fromkeys(axis for layout in layouts for split in layout.values() for axis in split)
    gathers: tuple[list[Move], list[Move]] = ([], [])
    slices: tuple[list[Move], list[Move]] = ([], [])
    scatters: list[Move] = []
    sums: list[str] = []
    for axis in axes:
        owners = [_owner(layout, axis) for layout in layouts]
        target = owners[2]
        if owners[0] is not None and owners[0] == owners[1] and owners[0] not in names[2]:
            scatters += [Move(axis, target)] if target else []
            sums += [] if target else [axis]
            continue
        for side in (0, 1):
            letter = owners[side]
            if letter is not None and letter != target:
                gathers[side].append(Move(axis, letter, replicates=target is None))
            if target is not None and letter != target and target in names[side]:
                slices[side].append(Move(axis, target))
    for side in (0, 1):
        _check_minor(equation, layouts[side], gathers[side])
    _check_minor(equation, layouts[2], scatters)
    return Product(
        equation,
        (tuple(reversed(gathers[0])), tuple(reversed(gathers[1]))),
        (tuple(slices[0]), tuple(slices[1])),
        Reduction(
            tuple((move.axis, names[2].index(move.letter)) for move in scatters), tuple(sums)
        ),
    )


def _check_minor(equation: str, layout: Layout, moves: Sequence[Move]) -> None:
    for letter, axes in layout.items():
        moved = tuple(axis for axis in axes if any(move.axis == axis for move in moves))
        if moved and axes[-len(moved) :] != moved:
            raise ValueError(
                f"{equation}: dimension {letter!r} is split over {axes}, and {moved} must be "
                "gathered or scattered: list those axes last (minor) in its rule"
            )


def _enter(x: jax.Array, product: Product, side: int) -> jax.Array:
    """Bring one operand from its own layout to that of the local product."""
    letters = _letters(product.equation)[side]
    for move in product.gathers[side]:
        to = "invarying" if move.replicates else "varying"
        x = jax.lax.all_gather(x, move.axis, axis=letters.index(move.letter), tiled=True, to=to)
    for move in product.slices[side]:
        x = own_slice(x, move.axis, letters.index(move.letter))
    return x


def _leave(partial: jax.Array, reduction: Reduction, projection: Projection) -> jax.Array:
    """Reduce partial sums; scatter first, so that less is left to all-reduce."""
    if reduction != NO_REDUCTION:
        partial = partial.astype(projection.reduce)
    for axis, dim in reduction.scatters:
        partial = jax.lax.psum_scatter(partial, axis, scatter_dimension=dim, tiled=True)
    return jax.lax.psum(partial, reduction.sums) if reduction.sums else partial


def _multiply(product: Product, a: jax.Array, b: jax.Array, projection: Projection) -> jax.Array:
    return jnp.einsum(product.equation, a, b, preferred_element_type=projection.accumulate)


def _products(projection: Projection) -> list[Product]:
    p = projection
    return [plan(eq, p.x, w, y) for eq, w, y in zip(p.equations, p.weights, p.results, strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def project(
    projection: Projection, x: jax.Array, weights: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Multiply one sharded input by several sharded weights.

    Args:
        projection: equations and layouts.
        x: global input, laid out as `projection.x`; its dtype is the compute dtype.
        weights: global weights, laid out as `projection.weights`; cast to x's dtype before they
            are gathered.

    Returns:
        One global result a weight, in x's dtype, laid out as `projection.results`.
    """

    def local(x: jax.Array, weights: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        products = _products(projection)
        gathered = _enter(x, products[0], 0)
        results = []
        for product, w in zip(products, weights, strict=True):
            w = _enter(w.astype(x.dtype), product, 1)
            y = _multiply(product, gathered, w, projection)
            results.append(_leave(y, product.reduction, projection).astype(x.dtype))
        return tuple(results)

    return jax.shard_map(
        local, in_specs=(projection.x, projection.weights), out_specs=projection.results
    )(x, weights)


def _forward(projection: Projection, x: jax.Array, weights: tuple[jax.Array, ...]):
    return project(projection, x, weights), (x, weights)


def _backward(projection: Projection, residuals, cotangents: tuple[jax.Array, ...]):
    """Two products a weight: dx = dy w^T, summed over the weights, and dw = x^T dy."""
    p = projection

    def local(x, weights, cotangents):
        # Terms of dx that are reduced alike are summed first, and reduced once.
        terms: dict[Reduction, jax.Array] = {}
        dweights, entered = [], {}
        for i, equation in enumerate(p.equations):
            in_x, in_w, in_y = _letters(equation)
            to_x = plan(f"{in_y},{in_w}->{in_x}", p.results[i], p.weights[i], p.x)
            to_w = plan(f"{in_x},{in_y}->{in_w}", p.x, p.results[i], p.weights[i])
            dy, w = cotangents[i], weights[i].astype(x.dtype)
            term = _multiply(to_x, _enter(dy, to_x, 0), _enter(w, to_x, 1), p)
            other = terms.get(to_x.reduction)
            terms[to_x.reduction] = term if other is None else other + term
            moves = (to_w.gathers[0], to_w.slices[0])
            if moves not in entered:
                entered[moves] = _enter(x, to_w, 0)
            dw = _multiply(to_w, entered[moves], _enter(dy, to_w, 1), p)
            dweights.append(_leave(dw, to_w.reduction, p).astype(weights[i].dtype))
        reduced = [_leave(term, reduction, p) for reduction, term in terms.items()]
        return sum(reduced[1:], reduced[0]).astype(x.dtype), tuple(dweights)

    return jax.shard_map(local, in_specs=(p.x, p.weights, p.results), out_specs=(p.x, p.weights))(
        *residuals, cotangents
    )


project.defvjp(_forward, _backward)
