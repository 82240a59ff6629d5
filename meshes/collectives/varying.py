"""Small steps inside `jax.shard_map`, where types say over which axes a value varies."""

from collections.abc import Callable, Iterable

import jax


def vma(x: jax.Array) -> frozenset[str]:
    """Mesh axes over which a value varies inside `jax.shard_map`."""
    return jax.typeof(x).manual_axis_type.varying


def varying(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Mark a value as varying over these axes too; its gradient is then summed over them once."""
    new = tuple(axis for axis in axes if axis not in vma(x))
    return jax.lax.pcast(x, new, to="varying") if new else x


def own_slice(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """This device's slice along `dim` of a value that every device of an axis holds whole."""
    size = x.shape[dim] // jax.lax.axis_size(axis)
    start = jax.lax.axis_index(axis) * size
    return jax.lax.dynamic_slice_in_dim(varying(x, (axis,)), start, size, dim)


def on_each_device(
    function: Callable[..., jax.Array], x: jax.Array, *parameters: jax.Array
) -> jax.Array:
    """Apply a function that works token by token, where x and the parameters lie.

    Args:
        function: of local blocks of x and of the parameters; returns a block shaped as x's.
        x: global array of activations.
        parameters: global arrays; each is whole over the axes that split tokens, and its gradient
            is summed over them in one all-reduce.

    Returns:
        A global array, laid out as x.

    Raises:
        ValueError: a parameter is not laid out as the last dimensions of x.
    """

    def local(x: jax.Array, *parameters: jax.Array) -> jax.Array:
        return function(x, *(varying(p, vma(x)) for p in parameters))

    specs = tuple(jax.typeof(array).sharding.spec for array in (x, *parameters))
    for parameter, spec in zip(parameters, specs[1:], strict=True):
        for dim, split in enumerate(spec):
            its_own = specs[0][x.ndim - parameter.ndim + dim]
            if parameter.shape[dim] > 1 and split != its_own:
                raise ValueError(
                    f"a bias or scale of shape {parameter.shape} is laid out as {spec}, and the "
                    f"activation {x.shape} that it is applied to as {specs[0]}; map the logical "
                    "names of their last dimensions to the same mesh axes ('norm' to none)"
                )
    return jax.shard_map(local, in_specs=specs, out_specs=specs[0])(x, *parameters)
