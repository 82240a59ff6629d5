"""Device meshes: local devices, many hosts with a slow network between them, compile-only ones.

Axes are Explicit: every array's type carries its layout.
"""

import dataclasses
from collections.abc import Sequence

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from meshes.axes import MeshShape


def build_mesh(
    shape: MeshShape,
    devices: Sequence[jax.Device] | None = None,
    dcn: MeshShape | None = None,
) -> Mesh:
    """Lay devices out as a mesh.

    Args:
        shape: size of each axis; one may be -1.
        devices: what to lay out, real or compile-only; None is every device of the process group.
        dcn: how many slices or hosts each axis spans over the slow network; each must divide its
            axis of `shape`. None keeps everything on the fast network.

    Returns:
        A mesh with Explicit axes.

    Raises:
        ValueError: the product of the axes is not the number of devices, or `dcn` does not divide.
    """
    devices = jax.devices() if devices is None else list(devices)
    shape = shape.resolve(len(devices))
    types = (AxisType.Explicit,) * len(shape.axis_names)
    if dcn is None or dcn.num_devices == 1:
        try:
            return jax.make_mesh(
                tuple(shape.sizes.values()), shape.axis_names, axis_types=types, devices=devices
            )
        except (NotImplementedError, AssertionError) as error:
            raise ValueError(
                f"mesh {_wide(shape)} cannot be laid on the devices' network: {error}; make each "
                "axis a product of the network's dimensions"
            ) from error
    inner = {}
    for axis, size in shape.sizes.items():
        if size % dcn.sizes[axis]:
            raise ValueError(
                f"parallel.dcn_mesh.{axis} is {dcn.sizes[axis]}, which does not divide "
                f"parallel.mesh.{axis} = {size}"
            )
        inner[axis] = size // dcn.sizes[axis]
    granules = len({getattr(device, "slice_index", device.process_index) for device in devices})
    if granules != dcn.num_devices:
        raise ValueError(
            f"parallel.dcn_mesh {_wide(dcn)} multiplies to {dcn.num_devices}, but the devices form "
            f"{granules} slices or hosts"
        )
    by_process = not hasattr(devices[0], "slice_index")
    array = mesh_utils.create_hybrid_device_mesh(
        tuple(inner.values()),
        tuple(dcn.sizes.values()),
        devices,
        process_is_granule=by_process,
    )
    return Mesh(array, shape.axis_names, axis_types=types)


def abstract_mesh(shape: MeshShape) -> AbstractMesh:
    """A mesh without devices, for tracing and lowering."""
    types = (AxisType.Explicit,) * len(shape.axis_names)
    return AbstractMesh(tuple(shape.sizes.values()), shape.axis_names, axis_types=types)


def single_device_shape(like: MeshShape) -> MeshShape:
    """The shape of the same axes, all 1: the one-device oracle of a parallel run."""
    return dataclasses.replace(like, **dict.fromkeys(like.sizes, 1))


def _wide(shape: MeshShape) -> dict[str, int]:
    return {axis: size for axis, size in shape.sizes.items() if size != 1}
