"""Sharding as data: every wrong table or array is refused with names, values and the fix."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshes.rules import STANDARD_NAMES, Rules

SIZES = {"data": 4, "fsdp": 2, "seq": 1, "tensor": 2}


def test_names_left_out_are_replicated():
    rules = Rules.of(embed="fsdp")
    assert rules.axes("embed") == ("fsdp",)
    assert all(rules.axes(name) == () for name in STANDARD_NAMES if name != "embed")
    assert rules.axes(None) == ()


def test_replace_leaves_the_original_alone():
    rules = Rules.of(embed="fsdp")
    assert rules.replace(embed=None).axes("embed") == ()
    assert rules.replace(embed=("data", "fsdp")).axes("embed") == ("data", "fsdp")
    assert rules.axes("embed") == ("fsdp",)


def test_axes_of_size_one_split_nothing():
    rules = Rules.of(act_seq="seq", act_batch=("data", "seq", "fsdp"))
    split = rules.split(("act_batch", "act_seq", None), SIZES)
    assert split == (("data", "fsdp"), (), ())


def test_name_twice():
    """Class of complaints: repeated rules resolve to a silent choice among the candidates."""
    with pytest.raises(ValueError, match="'embed' twice; keep one row"):
        Rules((("embed", ("fsdp",)), ("mlp", ()), ("embed", ("tensor",))))


def test_axis_twice_in_a_rule():
    with pytest.raises(ValueError, match="'embed' -> .* uses a mesh axis twice"):
        Rules.of(embed=("fsdp", "fsdp"))


def test_unknown_name_in_an_array():
    with pytest.raises(ValueError, match="unknown logical name 'embd'; the rules know .*embed"):
        Rules.of().split(("embd",), SIZES)


def test_unknown_name_in_a_table():
    """A misspelt row would be a rule that no array ever asks for."""
    with pytest.raises(ValueError, match="unknown logical name 'act_hedas'.*act_heads"):
        Rules.of(act_hedas="tensor")
    with pytest.raises(ValueError, match="unknown logical name 'embd'"):
        Rules.of().replace(embd="fsdp")


def test_a_paper_adds_names_of_its_own():
    rules = Rules.of(embed="fsdp").extend(tracks="tensor")
    assert rules.axes("tracks") == ("tensor",)
    assert rules.replace(tracks=None).axes("tracks") == ()
    with pytest.raises(ValueError, match="'embed' is already"):
        rules.extend(embed="tensor")


def test_unknown_axis():
    with pytest.raises(ValueError, match="'embed' -> .* mesh axis 'fspd', but the mesh has data"):
        Rules.of(embed="fspd").split(("embed",), SIZES)


def test_axis_used_by_two_dimensions():
    """Class of complaints: one mesh axis claimed twice fails deep inside, without the names."""
    rules = Rules.of(embed="tensor", mlp="tensor")
    with pytest.raises(ValueError, match="mlp.up: logical names 'embed' and 'mlp' both .*'tensor'"):
        rules.split(("embed", "mlp"), SIZES, what="mlp.up")


def test_indivisible_dimension_says_which_sizes_would_do():
    rules = Rules.of(q_heads=("data", "tensor"))
    with pytest.raises(ValueError) as error:
        rules.split(("embed", "q_heads", None), SIZES, (16, 12, 4), "attention.query")
    message = str(error.value)
    assert "attention.query: dimension 'q_heads' of size 12" in message
    assert "data=4 x tensor=2" in message
    assert "product among [1, 2, 3, 4, 6, 12]" in message
    assert "size 16" in message


def test_number_of_names_is_the_rank():
    with pytest.raises(ValueError, match=r"head: 1 logical names \('embed',\) for \(2, 3\)"):
        Rules.of().split(("embed",), SIZES, (2, 3), "head")


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.sampled_from([*SIZES, None]), min_size=1, max_size=4),
    st.lists(st.integers(1, 12), min_size=4, max_size=4),
)
def test_split_is_right_or_refused(axes, shape):
    """Whatever the table, an answer splits each dimension evenly and uses each axis once."""
    names = ("embed", "mlp", "vocab", "experts")[: len(axes)]
    rules = Rules.of(**dict(zip(names, axes, strict=True)))
    try:
        split = rules.split(names, SIZES, shape[: len(names)])
    except ValueError:
        used = [a for a in axes if a is not None and SIZES[a] > 1]
        odd = [s % SIZES[a] for a, s in zip(axes, shape, strict=False) if a is not None]
        assert len(set(used)) < len(used) or any(odd)
        return
    flat = [axis for entry in split for axis in entry]
    assert len(set(flat)) == len(flat)
    for entry, size in zip(split, shape, strict=False):
        for axis in entry:
            assert size % SIZES[axis] == 0
