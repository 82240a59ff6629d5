"""Mesh and rules are entered together, checked, and left together."""

import jax
import jax.numpy as jnp
import pytest
from flax.core import spmd
from jax.sharding import PartitionSpec as P

from meshes.axes import MeshShape
from meshes.build import abstract_mesh
from meshes.context import current, parallelism, reshard, spec
from meshes.presets import DP, FSDP_TP, MEGATRON_SP, TP
from tests.helpers import on_mesh


def test_axis_that_nothing_uses():
    """Class of complaints: devices that silently repeat each other's work."""
    with pytest.raises(ValueError, match="mesh axes tensor=4 are larger than 1, but no rule uses"):
        with on_mesh("dp", data=2, tensor=4):
            pass
    with pytest.raises(ValueError, match="pipeline=2, tensor=2 are larger"):
        with on_mesh("dp", pipeline=2, data=2, tensor=2):
            pass


def test_rule_of_an_axis_that_the_mesh_does_not_have():
    """Even where no array asks for it yet."""
    with pytest.raises(ValueError, match=r"rule 'mlp' -> \('tnesor',\) names the mesh axis"):
        with on_mesh(DP.replace(mlp="tnesor"), data=2):
            pass


def test_nothing_is_entered_outside():
    with pytest.raises(RuntimeError, match="no mesh is entered; wrap the call in"):
        current()


def test_entering_sets_the_mesh_and_both_tables_and_leaving_restores_them():
    with on_mesh("fsdp_tp", fsdp=2, tensor=4) as outer:
        assert current() is outer
        assert jax.sharding.get_abstract_mesh().shape["tensor"] == 4
        assert dict(spmd.get_logical_axis_rules())["embed"] == ("fsdp",)
        with on_mesh("dp", data=8) as inner:
            assert current() is inner
            assert spec("act_batch", "mlp") == P("data", None)
        assert current() is outer
        assert spec("act_batch", "mlp") == P("fsdp", "tensor")
        with pytest.raises(KeyError), on_mesh("dp", data=2):
            raise KeyError
        assert current() is outer
    with pytest.raises(RuntimeError):
        current()


def test_ways_are_derived_from_mesh_and_rules():
    with on_mesh(MEGATRON_SP, data=2, seq=2, tensor=2) as par:
        assert par.ways("act_residual_seq") == 4
        assert par.axes("act_residual_seq") == ("seq", "tensor")
        assert (par.ways("act_batch"), par.ways("act_embed"), par.ways(None)) == (2, 1, 1)
        assert par.spec(("act_batch", "act_residual_seq")) == P("data", ("seq", "tensor"))


def test_spec_checks_the_shape():
    with on_mesh(TP, tensor=4) as par:
        with pytest.raises(ValueError, match="head: dimension 'vocab' of size 6"):
            par.spec(("embed", "vocab"), (4, 6), "head")


def test_reshard_moves_and_keeps_the_values():
    with on_mesh(MEGATRON_SP, seq=2, tensor=4):
        x = jnp.arange(16.0).reshape(1, 16)
        moved = reshard(x, "act_batch", "act_residual_seq")
        assert moved.sharding.spec == P(None, ("seq", "tensor"))
        assert (moved == x).all()
        assert reshard(moved, "act_batch", "act_residual_seq") is moved


def test_tracing_needs_no_devices():
    mesh = abstract_mesh(MeshShape(fsdp=64, tensor=16))
    with parallelism(mesh, FSDP_TP) as par:
        assert par.ways("embed") == 64
        out = jax.eval_shape(lambda: jnp.zeros((64, 16), out_sharding=spec("embed", "mlp")))
    assert out.sharding.spec == P("fsdp", "tensor")
