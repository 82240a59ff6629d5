"""Parameters with logical names, and matrix products that read them.

Layers write an einsum and the logical names of its operands; layouts come from the rules, and the
collectives from the layouts (`meshes.collectives.matmul`).
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from flax import nnx

from layers import schemes
from layers.config import DTypes
from meshes.collectives.matmul import Projection
from meshes.collectives.varying import on_each_device
from meshes.context import current

Names = tuple[str | None, ...]


def normal(
    rngs: nnx.Rngs, shape: tuple[int, ...], names: Names, *, std: float, dtypes: DTypes, what: str
) -> nnx.Param:
    """Create a parameter of normal noise: one of 2**16 equally likely quantiles an element.

    A look-up gives the same bits on every mesh and every backend. The arithmetic of
    `jax.random.normal` does not: a compiler may contract products and sums in the vector part of a
    loop and not in its rest, and which elements those are depends on the local shape.

    Args:
        rngs: source of the key; one is drawn.
        shape: global shape.
        names: logical name of each dimension.
        std: standard deviation.
        dtypes: the dtype policy.
        what: what the parameter is called in an error.

    Raises:
        ValueError: the rules cannot lay out this shape.
    """
    spec = current().spec(names, shape, what)
    index = jax.random.bits(rngs.params(), shape, jnp.uint16, out_sharding=spec)
    table = jnp.asarray(std * _quantiles(), jnp.dtype(dtypes.params))
    value = table.at[index].get(mode="promise_in_bounds", out_sharding=spec)
    return nnx.Param(value, out_sharding=names)


@functools.cache
def _quantiles() -> np.ndarray:
    """Quantiles of the normal distribution, float64 [2**16], which ends at 4.3 deviations."""
    return scipy.special.ndtri((np.arange(2**16) + 0.5) / 2**16)


def constant(
    shape: tuple[int, ...], names: Names, *, value: float, dtypes: DTypes, what: str
) -> nnx.Param:
    """Create a parameter that starts constant: a bias or a norm's scale; see `normal`."""
    current().spec(names, shape, what)
    return nnx.Param(jnp.full(shape, value, jnp.dtype(dtypes.params)), out_sharding=names)


def project(
    x: jax.Array,
    weights: Sequence[nnx.Param],
    equations: Sequence[str],
    *,
    x_names: Names,
    result_names: Sequence[Names],
    dtypes: DTypes,
) -> tuple[jax.Array, ...]:
    """Multiply one input by several weights, moving it once.

    Args:
        x: input, laid out as `x_names`, in the compute dtype.
        weights: parameters that read it.
        equations: one einsum a weight.
        x_names: logical names of the input.
        result_names: logical names of each result.
        dtypes: the dtype policy.

    Returns:
        One result a weight, in the compute dtype.
    """
    spec = current().spec
    projection = Projection(
        tuple(equations),
        spec(x_names, x.shape, "input"),
        tuple(spec(weight_names(w), w.shape, "weight") for w in weights),
        tuple(spec(names) for names in result_names),
        dtypes.accumulate,
        dtypes.reduce,
    )
    return schemes.active().project(projection, x, tuple(w[...] for w in weights))


def weight_names(weight: nnx.Param) -> Names:
    """Logical names of a parameter; inside the loop over layers, without the leading `layers`."""
    names = weight.get_metadata()["out_sharding"]
    return names[len(names) - weight.ndim :]


def add_bias(x: jax.Array, bias: nnx.Param | None) -> jax.Array:
    """Add a bias over the trailing dimensions of x; None adds nothing."""
    if bias is None:
        return x
    return on_each_device(lambda x, b: x + trailing(b, x.ndim).astype(x.dtype), x, bias[...])


def trailing(parameter: jax.Array, ndim: int) -> jax.Array:
    """Give a parameter of the last dimensions leading ones, for explicit broadcasting."""
    return parameter.reshape((1,) * (ndim - parameter.ndim) + parameter.shape)
