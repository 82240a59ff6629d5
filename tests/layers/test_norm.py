"""Norms: the formulas, statistics in float32, and no dimension that is normalised in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.config import FLOAT32, DTypes
from layers.norm import Norm
from meshes.presets import DP
from tests.helpers import on_mesh

DIM = 16


def norm(kind: str = "rms", *, unit_offset: bool = False, dtypes: DTypes = FLOAT32) -> Norm:
    return Norm(DIM, kind=kind, eps=1e-5, unit_offset=unit_offset, dtypes=dtypes, what="norm")


def inputs(mean: float = 0.0) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((4, 8, DIM)) * 3 + mean
    return x.astype(np.float32)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_formula(kind):
    x = inputs(mean=2.0)
    with on_mesh():
        ours = np.asarray(norm(kind)(jnp.asarray(x)))
    if kind == "layer":
        x = x - x.mean(-1, keepdims=True)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_unit_offset_stores_the_difference_from_one():
    with on_mesh():
        plain, offset = norm(), norm(unit_offset=True)
        assert (plain.scale[...] == 1).all() and (offset.scale[...] == 0).all()
        x = jnp.asarray(inputs())
        np.testing.assert_array_equal(plain(x), offset(x))


def test_statistics_are_float32_for_bfloat16_inputs():
    """The variance of values around 300 is lost in 8 bits of mantissa, and their squares too."""
    x = jnp.asarray(inputs(mean=300.0)).astype(jnp.bfloat16)
    with on_mesh():
        ours = norm("layer", dtypes=DTypes())(x)
    assert ours.dtype == jnp.bfloat16
    wide = np.asarray(x, np.float64)
    centred = wide - wide.mean(-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(np.asarray(ours, np.float64), expected, rtol=1e-2, atol=1e-2)


def test_a_split_dimension_is_refused():
    """Class of complaints: statistics of a part, taken for those of the whole, with no error."""
    with on_mesh(DP.replace(act_embed="tensor"), tensor=2):
        x = jax.device_put(inputs(), jax.P(None, None, "tensor"))
        with pytest.raises(ValueError, match="needs its last dimension whole .*'act_embed'"):
            norm()(x)


def test_a_split_scale_is_refused():
    with on_mesh(DP.replace(norm="fsdp"), fsdp=2):
        with pytest.raises(ValueError, match="bias or scale of shape .*'norm' to none"):
            jax.jit(norm())(jnp.asarray(inputs()))
