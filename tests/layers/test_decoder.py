"""The decoder's parameters: how many, named how, and what a mesh cannot hold."""

import math

import jax
import pytest
from flax import nnx

from layers.counting import num_parameters
from meshes.presets import DP
from meshes.rules import STANDARD_NAMES
from paxlike.model import Model
from tests.helpers import TINY, on_mesh, tiny
from tests.test_parity import MODELS


@pytest.mark.parametrize("model", MODELS)
def test_number_of_parameters_is_that_of_the_architecture(model):
    config = MODELS[model]
    with on_mesh():
        params = Model(config).abstract()
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(params)) == num_parameters(config)


def test_every_parameter_names_each_of_its_dimensions():
    with on_mesh():
        params = Model(MODELS["gpt"]).abstract()
    for variable in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, nnx.Variable)):
        names = variable.get_metadata()["out_sharding"]
        assert len(names) == variable.ndim
        assert set(names) <= {*STANDARD_NAMES, None}


def test_abstract_layout_is_that_of_the_arrays():
    """Class of complaints: shapes without shardings, so that a restore ignores the layout."""
    with on_mesh("fsdp_tp", fsdp=2, tensor=2):
        model = Model(TINY)
        abstract, params = model.abstract(), model.init(jax.random.key(1))
    for shape, array in zip(jax.tree.leaves(abstract), jax.tree.leaves(params), strict=True):
        assert array.sharding.spec == shape.sharding.spec
        assert (array.shape, array.dtype) == (shape.shape, shape.dtype)
    assert any(x.sharding.spec[-1] is not None for x in jax.tree.leaves(abstract))


def test_layers_that_their_axis_does_not_divide():
    """Class of complaints: 30 layers on 4 stages silently become 28."""
    with on_mesh(DP.replace(layers="pipeline"), pipeline=4):
        with pytest.raises(ValueError, match=r"num_layers: dimension 'layers' of size 30 .* 32"):
            Model(tiny(num_layers=30))


@pytest.mark.parametrize(
    "changes, rules, axes, message",
    [
        (dict(embed_dim=18), "fsdp", dict(fsdp=4), "dimension 'embed' of size 18 .* fsdp=4"),
        (dict(vocab_size=50), "tp", dict(tensor=4), "embedding: dimension 'vocab' of size 50"),
        (dict(num_heads=6, num_kv_heads=2), "tp", dict(tensor=4), "query: dimension 'q_heads'"),
    ],
)
def test_what_the_mesh_does_not_divide_is_named(changes, rules, axes, message):
    with on_mesh(rules, **axes):
        with pytest.raises(ValueError, match=message):
            Model(tiny(**changes))
