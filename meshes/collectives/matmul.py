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
import math
from collections.abc import Callable, Sequence

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
        ValueError: blocks of a dimension would interleave, because two arrays split it over axes
            in another order, or over an axis that is not the minor part of its layout in one.
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
    # The minor part of a layout is gathered first, and sliced or scattered last.
    for side in (0, 1):
        gathers[side].sort(key=_nesting(layouts[side]), reverse=True)
        slices[side].sort(key=_nesting(layouts[2]))
    scatters.sort(key=_nesting(layouts[2]))
    _check_blocks(equation, layouts, gathers, slices, scatters)
    return Product(
        equation,
        (tuple(gathers[0]), tuple(gathers[1])),
        (tuple(slices[0]), tuple(slices[1])),
        Reduction(
            tuple((move.axis, names[2].index(move.letter)) for move in scatters), tuple(sums)
        ),
    )


def _nesting(layout: Layout) -> Callable[[Move], int]:
    return lambda move: layout[move.letter].index(move.axis)


def _check_blocks(
    equation: str,
    layouts: Sequence[Layout],
    gathers: Sequence[Sequence[Move]],
    slices: Sequence[Sequence[Move]],
    scatters: Sequence[Move],
) -> None:
    """Follow the layout of every dimension through the moves, to the one that it must have."""
    local: list[Layout] = []
    for layout, gathered, sliced in zip(layouts[:2], gathers, slices, strict=True):
        local.append(dict(layout))
        for move in gathered:
            if local[-1][move.letter][-1] != move.axis:
                raise _interleaves(equation, move.letter, layouts)
            local[-1][move.letter] = local[-1][move.letter][:-1]
        for move in sliced:
            local[-1][move.letter] += (move.axis,)
    for letter in dict.fromkeys("".join(_letters(equation))):
        held = [layout[letter] for layout in local if letter in layout]
        made = held[0] + tuple(move.axis for move in scatters if move.letter == letter)
        if held[0] != held[-1] or layouts[2].get(letter, made) != made:
            raise _interleaves(equation, letter, layouts)


def _interleaves(equation: str, letter: str, layouts: Sequence[Layout]) -> ValueError:
    split = [layout[letter] for layout in layouts if letter in layout]
    return ValueError(
        f"{equation}: dimension {letter!r} is split over {' and over '.join(map(str, split))} in "
        "the arrays that share it, which would interleave its blocks: list the axes in one order "
        "in all their rules, those that not all of them have last (minor)"
    )


def _enter(x: jax.Array, product: Product, side: int) -> jax.Array:
    """Bring one operand from its own layout to that of the local product."""
    return _slice(_gather(x, product, side, product.gathers[side]), product, side)


def _enter_all(x: jax.Array, products: Sequence[Product]) -> list[jax.Array]:
    """Bring the first operand, which the products share, to each of them; gather it once."""
    wanted = [move for product in products for move in product.gathers[0]]
    gathered: dict[tuple[Move, ...], jax.Array] = {}
    entered = []
    for product in products:
        # Copies that one product must know to be equal serve the others too.
        moves = tuple(
            dataclasses.replace(m, replicates=dataclasses.replace(m, replicates=True) in wanted)
            for m in product.gathers[0]
        )
        if moves not in gathered:
            gathered[moves] = _gather(x, product, 0, moves)
        entered.append(_slice(gathered[moves], product, 0))
    return entered


def _gather(x: jax.Array, product: Product, side: int, moves: Sequence[Move]) -> jax.Array:
    letters = _letters(product.equation)[side]
    for move in moves:
        to = "invarying" if move.replicates else "varying"
        # Gathered along its first dimension, an array arrives in one piece; along another one the
        # TPU compiler copies all of it into place (layouts follow: the transposes cost nothing).
        dim = letters.index(move.letter)
        x = jax.lax.all_gather(jnp.moveaxis(x, dim, 0), move.axis, tiled=True, to=to)
        x = jnp.moveaxis(x, 0, dim)
    return x


def _slice(x: jax.Array, product: Product, side: int) -> jax.Array:
    letters = _letters(product.equation)[side]
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
    """Multiply local blocks as one product of matrices.

    Letters that move together are merged first. Left as several dimensions, XLA's CPU backend
    transposes the wider operand of a weight's gradient element by element, which costs half as
    much again as the product itself.
    """
    in_a, in_b, in_c = _letters(product.equation)
    inner = [letter for letter in in_a if letter in in_b]
    if any(letter in in_c for letter in inner):  # a batch letter
        return jnp.einsum(product.equation, a, b, preferred_element_type=projection.accumulate)
    rows = [letter for letter in in_a if letter in in_c]
    columns = [letter for letter in in_b if letter in in_c]
    (left, left_dim), (right, right_dim) = (
        _as_matrix(a, in_a, rows, inner),
        _as_matrix(b, in_b, columns, inner),
    )
    c = jax.lax.dot_general(
        left,
        right,
        (((left_dim,), (right_dim,)), ((), ())),
        preferred_element_type=jnp.dtype(projection.accumulate),
    )
    sizes = dict(zip(in_a + in_b, a.shape + b.shape, strict=True))
    c = c.reshape([sizes[letter] for letter in rows + columns])
    return c.transpose([(rows + columns).index(letter) for letter in in_c])


def _as_matrix(
    x: jax.Array, letters: str, outer: list[str], inner: list[str]
) -> tuple[jax.Array, int]:
    """Merge dimensions into a matrix, and say which of its two is the contracted one."""
    contracted_first = list(letters) == inner + outer
    order = inner + outer if contracted_first else outer + inner
    x = x.transpose([letters.index(letter) for letter in order])
    count = len(inner) if contracted_first else len(outer)
    shape = (math.prod(x.shape[:count]), math.prod(x.shape[count:]))
    return x.reshape(shape), 0 if contracted_first else 1


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
        results = []
        for product, own_x, w in zip(products, _enter_all(x, products), weights, strict=True):
            w = _enter(w.astype(x.dtype), product, 1)
            y = _multiply(product, own_x, w, projection)
            results.append(_leave(y, product.reduction, projection).astype(x.dtype))
        return tuple(results)

    return jax.shard_map(
        local, in_specs=(projection.x, projection.weights), out_specs=projection.results
    )(x, weights)


def _forward(projection: Projection, x: jax.Array, weights: tuple[jax.Array, ...]):
    return project(projection, x, weights), (x, weights)


def _transposed(p: Projection, i: int) -> tuple[Product, Product]:
    """The products that make dx and dw of weight i."""
    in_x, in_w, in_y = _letters(p.equations[i])
    return (
        plan(f"{in_y},{in_w}->{in_x}", p.results[i], p.weights[i], p.x),
        plan(f"{in_x},{in_y}->{in_w}", p.x, p.results[i], p.weights[i]),
    )


def _backward(projection: Projection, residuals, cotangents: tuple[jax.Array, ...]):
    """Two products a weight: dx = dy w^T, summed over the weights, and dw = x^T dy."""
    p = projection
    x, weights = residuals

    def local(x, weights, cotangents):
        # Terms of dx that are reduced alike are summed first, and reduced once.
        terms: dict[Reduction, jax.Array] = {}
        dweights = []
        transposed = [_transposed(p, i) for i in range(len(p.equations))]
        own_xs = _enter_all(x, [to_w for _, to_w in transposed])
        for (to_x, to_w), own_x, dy, weight in zip(
            transposed, own_xs, cotangents, weights, strict=True
        ):
            w = weight.astype(x.dtype)
            term = _multiply(to_x, _enter(dy, to_x, 0), _enter(w, to_x, 1), p)
            other = terms.get(to_x.reduction)
            terms[to_x.reduction] = term if other is None else other + term
            dw = _multiply(to_w, own_x, _enter(dy, to_w, 1), p)
            dweights.append(_leave(dw, to_w.reduction, p).astype(weight.dtype))
        reduced = [_leave(term, reduction, p) for reduction, term in terms.items()]
        return functools.reduce(jnp.add, reduced).astype(x.dtype), tuple(dweights)

    return jax.shard_map(local, in_specs=(p.x, p.weights, p.results), out_specs=(p.x, p.weights))(
        x, weights, cotangents
    )


project.defvjp(_forward, _backward)
