"""A mesh's shape says what is wrong with it before any device is asked."""

import dataclasses

import pytest

from meshes.axes import MeshShape


def test_axes_run_from_the_least_to_the_most_communication_hungry():
    assert MeshShape().axis_names == ("pipeline", "data", "expert", "fsdp", "seq", "tensor")
    assert MeshShape().num_devices == 1


@pytest.mark.parametrize(
    "axes, num_devices, expected",
    [
        (dict(data=-1), 8, 8),
        (dict(data=-1, tensor=2), 8, 4),
        (dict(data=-1, tensor=8), 8, 1),
        (dict(data=2, tensor=4), 8, 2),
    ],
)
def test_one_axis_takes_the_devices_that_are_left(axes, num_devices, expected):
    resolved = MeshShape(**axes).resolve(num_devices)
    assert resolved.data == expected
    assert resolved.num_devices == num_devices


@pytest.mark.parametrize("size", [0, -2, True, 2.0, "2", None])
def test_size_that_is_no_size(size):
    with pytest.raises(ValueError, match=r"'tensor' is .*expected a positive integer, or -1"):
        MeshShape(tensor=size)


def test_two_axes_cannot_both_take_the_rest():
    with pytest.raises(ValueError, match=r"\['data', 'tensor'\] are all -1; at most one"):
        MeshShape(data=-1, tensor=-1)


@pytest.mark.parametrize("axes", [dict(data=3), dict(data=-1, tensor=3), dict(data=16)])
def test_product_of_axes_is_not_the_number_of_devices(axes):
    with pytest.raises(ValueError, match=r"multiplies to \d+, but there are 8 devices"):
        MeshShape(**axes).resolve(8)


def test_no_axes_on_many_devices():
    with pytest.raises(ValueError, match=r"all axes 1.* multiplies to 1, .* set one axis to -1"):
        MeshShape().resolve(8)


def test_a_scheme_adds_axes_of_its_own():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Grid(MeshShape):
        seq_row: int = 1
        seq_col: int = 1

    grid = Grid(data=2, seq_row=2, seq_col=-1).resolve(8)
    assert grid.sizes["seq_col"] == 2
    assert isinstance(grid, Grid)
