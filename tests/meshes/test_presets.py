"""Named strategies: consistent tables, which split what they claim and no array twice."""

import pytest

from layers.decoder import RESIDUAL
from meshes.axes import FSDP, SEQ, TENSOR, MeshShape
from meshes.presets import DP, FSDP_SP, PRESETS, SHARDS_PARAMETERS, for_generation, preset

ARRAYS = (
    ("vocab", "embed"), ("embed", "vocab"), ("norm",), RESIDUAL,
    ("act_batch", "act_seq", "act_mlp"),
    ("embed", "q_heads", "head_dim"), ("embed", "kv_heads", "head_dim"), ("embed", "mlp"),
    ("q_heads", "head_dim", "embed"), ("mlp", "embed"), ("experts", "embed", "mlp"),
    ("act_batch", "act_heads", "act_seq", None), ("act_batch", "act_kv_heads", "act_seq", None),
    ("act_batch", "act_seq", "act_vocab"),
)  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_no_array_is_split_twice_over_an_axis(name):
    sizes = {axis: 2 for axis in MeshShape().axis_names}
    for names in ARRAYS:
        PRESETS[name].split(names, sizes, (64,) * len(names), name)


def test_unknown_preset_lists_the_known():
    with pytest.raises(ValueError, match="unknown rule preset 'fdsp'; expected one of dp, fsdp"):
        preset("fdsp")


def test_claims_are_of_presets_and_of_axes_that_they_use():
    for name, axes in SHARDS_PARAMETERS.items():
        assert set(axes) <= PRESETS[name].used_axes


def test_generation_moves_the_sequence_to_the_batch():
    """A token a row: nothing is left that splits a sequence, and no axis is lost."""
    rules = for_generation(FSDP_SP)
    assert SEQ in rules.axes("act_batch")
    assert not rules.axes("act_seq") and not rules.axes("act_residual_seq")
    assert rules.used_axes == FSDP_SP.used_axes
    assert rules.axes("embed") == (FSDP,) and rules.axes("mlp") == (TENSOR,)
    assert for_generation(rules) == rules
    assert for_generation(DP).axes("act_batch").count(SEQ) == 1
