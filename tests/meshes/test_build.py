"""Devices become a mesh: row-major on one network, hosts along the axes that may cross it."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from meshes.axes import MeshShape
from meshes.build import abstract_mesh, build_mesh, single_device_shape


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """Enough of a device to be laid out: four a host, two hosts or more."""

    id: int
    process_index: int
    platform: str = "gpu"
    device_kind: str = "fake"


def hosts(count: int) -> list[FakeDevice]:
    return [FakeDevice(id=i, process_index=i // 4) for i in range(4 * count)]


def test_every_axis_is_there_and_explicit():
    mesh = build_mesh(MeshShape(data=-1, tensor=2))
    assert mesh.axis_names == ("pipeline", "data", "expert", "fsdp", "seq", "tensor")
    assert mesh.shape["data"] == 4
    assert set(mesh.axis_types) == {AxisType.Explicit}
    assert [d.id for d in mesh.devices.ravel()] == [d.id for d in jax.devices()]


def test_product_of_axes_is_the_number_of_devices():
    with pytest.raises(ValueError, match=r"\{'data': 2, 'tensor': 2\} multiplies to 4, but .* 8"):
        build_mesh(MeshShape(data=2, tensor=2))


def test_hosts_lie_along_the_axis_that_spans_them():
    """Tensor parallelism stays on a host; a replica of the data axis is whole hosts."""
    mesh = build_mesh(MeshShape(data=4, tensor=4), hosts(4), MeshShape(data=4))
    by_host = np.vectorize(lambda d: d.process_index)(mesh.devices).reshape(4, 4)
    assert (by_host == np.arange(4)[:, None]).all()


def test_an_axis_of_hosts_and_of_their_devices():
    mesh = build_mesh(MeshShape(data=4, fsdp=4), hosts(4), MeshShape(data=2, fsdp=2))
    by_host = np.vectorize(lambda d: d.process_index)(mesh.devices).reshape(4, 4)
    assert by_host.tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 3]]


@pytest.mark.parametrize(
    "shape, dcn, message",
    [
        (dict(data=4, tensor=2), dict(data=3), r"dcn_mesh.data is 3, which does not divide .* = 4"),
        (dict(data=4, tensor=2), dict(data=4), r"multiplies to 4, but the devices form 2 slices"),
        (dict(data=4, tensor=2), dict(data=-1), r"leaves an axis open; say how many slices"),
    ],
)
def test_wrong_network(shape, dcn, message):
    with pytest.raises(ValueError, match=message):
        build_mesh(MeshShape(**shape), hosts(2), MeshShape(**dcn))


def test_the_oracle_of_one_device_has_the_same_axes():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Grid(MeshShape):
        seq_row: int = 1

    single = single_device_shape(Grid(data=2, seq_row=4))
    assert single == Grid()
    assert abstract_mesh(single).axis_names[-1] == "seq_row"


def test_an_abstract_mesh_has_no_devices_to_fill_an_axis_with():
    with pytest.raises(ValueError, match="'data': -1.* not resolved"):
        abstract_mesh(MeshShape(data=-1))
