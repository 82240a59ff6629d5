"""Feed-forward blocks of every activation, split over tensor devices, against plain formulas."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layers.config import Activation
from layers.feedforward import FeedForward
from tests import reference
from tests.helpers import by_path, disturbed, on_mesh, tiny


@pytest.mark.parametrize("activation", typing.get_args(Activation))
def test_activation(activation):
    config = tiny(activation=activation, mlp_bias=True)
    x = np.random.default_rng(0).standard_normal((2, 8, config.embed_dim)).astype(np.float32)
    with on_mesh("megatron_sp", tensor=2) as par:
        module = FeedForward(config, rngs=nnx.Rngs(params=jax.random.key(0)))
        graphdef, params = nnx.split(module)
        params = disturbed(params)
        names = ("act_batch", "act_residual_seq", "act_embed")
        placed = jax.device_put(x, jax.NamedSharding(par.mesh, par.spec(names)))
        ours = jax.jit(lambda p, x: nnx.merge(graphdef, p)(x))(params, placed)
        plain = {f"mlp.{name}": value for name, value in by_path(params).items()}
    with jax.numpy_rank_promotion("allow"):
        expected = reference.feed_forward(config, plain, jnp.asarray(x), None)
    np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=2e-5)


def test_width_that_the_mesh_does_not_divide():
    with on_mesh("tp", tensor=8):
        with pytest.raises(ValueError, match=r"mlp.gate: dimension 'mlp' of size 36 .* tensor=8"):
            FeedForward(tiny(mlp_dim=36), rngs=nnx.Rngs(0))
