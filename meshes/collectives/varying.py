"""Small steps inside `jax.shard_map`, where types say over which axes a value varies."""

from collections.abc import Iterable

import jax


def vma(x: jax.Array) -> frozenset[str]:
    """Mesh axes over which a value varies inside `jax.shard_map`."""
    return jax.typeof(x).vma


def varying(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Mark a value as varying over these axes too; its gradient is then summed over them once."""
    new = tuple(axis for axis in axes if axis not in vma(x))
    return jax.lax.pcast(x, new, to="varying") if new else x


def own_slice(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """This device's slice along `dim` of a value that every device of an axis holds whole."""
    size = x.shape[dim] // jax.lax.axis_size(axis)
    start = jax.lax.axis_index(axis) * size
    return jax.lax.dynamic_slice_in_dim(varying(x, (axis,)), start, size, dim)
