"""Initial parameters: normal noise, of the standard deviation and dtype asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import nnx

from layers.config import FLOAT32, DTypes, MoEConfig
from layers.counting import num_parameters
from layers.linear import normal
from paxlike.model import Model
from tests.helpers import on_mesh, tiny

MOE = MoEConfig(num_experts=4, num_experts_per_token=1, expert_mlp_dim=256)


def draw(seed: int, dtypes: DTypes = FLOAT32, **axes: int) -> jax.Array:
    with on_mesh("fsdp_tp", **axes):
        return jax.jit(
            lambda key: normal(
                nnx.Rngs(params=key), (512, 256), ("embed", "mlp"), std=0.02, dtypes=dtypes,
                what="weight",
            )[...]
        )(jax.random.key(seed))  # fmt: skip


def test_initial_weights_are_normal():
    value = np.asarray(draw(0)).ravel()
    assert value.std() == pytest.approx(0.02, rel=0.01)
    assert abs(value.mean()) < 4 * 0.02 / value.size**0.5
    assert scipy.stats.kstest(value / 0.02, "norm").pvalue > 0.01
    assert not np.array_equal(value, np.asarray(draw(1)).ravel())
    assert abs(np.corrcoef(value[1:], value[:-1])[0, 1]) < 4 / value.size**0.5


@pytest.mark.parametrize("mixture", [None, MOE], ids=["dense", "mixture"])
def test_they_are_born_where_they_lie(mixture):
    """No device makes more than its part, of stacked layers neither: 1/8, and the random bits."""
    config = tiny(embed_dim=128, mlp_dim=512, num_layers=4, vocab_size=2048, moe=mixture)
    with on_mesh("fsdp_tp", fsdp=4, tensor=2):
        model = Model(config)
        memory = jax.jit(model.init).lower(jax.random.key(0)).compile().memory_analysis()
    part = num_parameters(config) * 4 / 8
    assert memory.output_size_in_bytes == pytest.approx(part, rel=0.1)
    assert memory.temp_size_in_bytes < 2.5 * part


def test_dtype_of_the_parameters():
    assert draw(0, DTypes(params="bfloat16")).dtype == jnp.bfloat16
