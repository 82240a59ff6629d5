"""The attention layer over split heads and sequences; its mathematics is in `tests.test_parity`."""

import jax
import pytest

from layers.attention.schemes import attention_scheme
from meshes.presets import DP, TP
from paxlike.model import Model
from tests import helpers
from tests.helpers import TINY, largest_error, on_mesh, run, tiny

HEADS = ("pipeline", "tensor")


def trace(config, rules, **axes) -> None:
    with on_mesh(rules, **axes) as par:
        model = Model(config)
        batch = helpers.put(par, helpers.random_batch())
        jax.eval_shape(model.loss, model.abstract(), batch)


def test_kv_heads_over_the_first_of_the_axes_of_the_query_heads():
    """8 query heads on 4 devices, 4 key/value heads on 2 of them: each reads its own group's."""
    rules = TP.replace(q_heads=HEADS, act_heads=HEADS, kv_heads="pipeline", act_kv_heads="pipeline")
    ours = run(TINY, rules, pipeline=2, tensor=2)
    assert ours.loss == pytest.approx(run(TINY).loss, rel=1e-5)
    assert largest_error(ours.grads, run(TINY).grads)[0] < 1e-5


def test_kv_heads_over_other_axes():
    """Class of complaints: heads that read another group's keys, silently."""
    rules = TP.replace(q_heads=HEADS, act_heads=HEADS, kv_heads="tensor", act_kv_heads="tensor")
    with pytest.raises(ValueError, match="key/value heads must be split as the query heads are"):
        trace(TINY, rules, pipeline=2, tensor=2)


def test_more_devices_than_kv_heads():
    with pytest.raises(
        ValueError, match=r"attention.key: dimension 'kv_heads' of size 4 .*tensor=8"
    ):
        trace(TINY, "tp", tensor=8)


def test_query_heads_that_straddle_groups():
    """12 query heads in groups of 3 on 6 devices: two a device, of two groups here and there."""
    config = tiny(num_heads=12, num_kv_heads=4, head_dim=2)
    rules = TP.replace(kv_heads=None, act_kv_heads=None, mlp=None, act_mlp=None)
    with pytest.raises(ValueError, match=r"12 query heads over 6 devices leave 2 .*groups of 3"):
        trace(config, rules, tensor=6)


def test_keys_that_stay_split():
    """Class of complaints: attention to a part of the sequence, silently."""
    with pytest.raises(ValueError, match="'act_kv_seq' -> .* all_gather reads all keys"):
        trace(TINY, DP.replace(act_kv_seq="seq"), seq=2)


def test_sequence_that_the_mesh_does_not_divide():
    """Class of complaints: a length that the sequence shards do not divide breaks the masks."""
    with on_mesh("dp", seq=3):
        model = Model(TINY)
        batch = {
            k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in helpers.random_batch().items()
        }
        with pytest.raises(ValueError, match="tokens: dimension 'act_seq' of size 16 .* seq=3"):
            jax.eval_shape(model.loss, model.abstract(), batch)


def test_unknown_scheme():
    with pytest.raises(ValueError, match="unknown attention scheme 'rign'; expected one of all_"):
        attention_scheme("rign")
