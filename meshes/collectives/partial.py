"""Whole copies made of shards, and shards made of partial sums: each is the other's transpose.

Inside `jax.shard_map`, a block that splits its work over mesh axes begins by making its input whole
on every device that shares the work (`enter`), and ends by summing what each device contributed
(`leave`). Backward, the two change places. Gathers travel in the value's own dtype, sums in the
`reduce` dtype. Bytes sent per device, on G devices and X bytes gathered or reduced: all-gather and
reduce-scatter (G-1)/G X each, all-reduce 2(G-1)/G X.
"""

import dataclasses

import jax
import jax.numpy as jnp

from meshes.collectives.varying import own_slice, varying


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moves:
    """How a value is split, and over which axes the devices' contributions to it are summed.

    Attributes:
        gathers: pairs (mesh axis, dimension) over which the value is split when at home; of two
            axes that split one dimension, the minor one first.
        sums: mesh axes over which contributions differ, and are summed on the way home.
        reduce: dtype of partial sums on the wire, by name.
    """

    gathers: tuple[tuple[str, int], ...] = ()
    sums: tuple[str, ...] = ()
    reduce: str = "float32"

    def whole(self, x: jax.Array) -> jax.Array:
        """Gather the shards of a value; the copies vary over `sums`."""
        gathered = [axis for axis, _ in self.gathers]
        x = varying(x, [axis for axis in self.sums if axis not in gathered])
        for axis, dim in self.gathers:
            to = "varying" if axis in self.sums else "invarying"
            x = jax.lax.all_gather(x, axis, axis=dim, tiled=True, to=to)
        return x

    def home(self, partial: jax.Array) -> jax.Array:
        """Sum partial results and keep the own shard; scatter first, which leaves less to sum."""
        partial = partial.astype(self.reduce) if self.sums else partial
        for axis, dim in reversed(self.gathers):
            if axis in self.sums:
                partial = jax.lax.psum_scatter(partial, axis, scatter_dimension=dim, tiled=True)
            else:
                partial = own_slice(partial, axis, dim)
        gathered = [axis for axis, _ in self.gathers]
        rest = tuple(axis for axis in self.sums if axis not in gathered)
        return jax.lax.psum(partial, rest) if rest else partial


def enter(moves: Moves, x: jax.Array) -> jax.Array:
    """Make a value whole; its gradient is summed and brought home.

    Args:
        moves: how the value is split and who will use it.
        x: the local shard.

    Returns:
        The whole value, in x's dtype.
    """
    return _enter(moves, x)


_enter = jax.custom_vjp(lambda moves, x: moves.whole(x), nondiff_argnums=(0,))
_enter.defvjp(
    lambda moves, x: (moves.whole(x), None),
    lambda moves, _, cotangent: (moves.home(cotangent).astype(cotangent.dtype),),
)


def leave(moves: Moves, partial: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Sum partial results and keep the own shard; the gradient is made whole.

    Args:
        moves: how the result is split and over which axes it is summed.
        partial: this device's contribution.
        dtype: of the result, and of the gradient on the wire.

    Returns:
        The local shard of the sum.
    """
    return _leave(moves, dtype, partial.astype(moves.reduce))


_leave = jax.custom_vjp(
    lambda moves, dtype, partial: moves.home(partial).astype(dtype), nondiff_argnums=(0, 1)
)
_leave.defvjp(
    lambda moves, dtype, partial: (moves.home(partial).astype(dtype), None),
    lambda moves, dtype, _, cotangent: (moves.whole(cotangent).astype(moves.reduce),),
)
