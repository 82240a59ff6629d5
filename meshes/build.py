"""Device meshes: local devices, many hosts with a slow network between them, compile-only ones.

Axes are Explicit: every array's type carries its layout.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from meshes.axes import FILL, MeshShape

# JAX's own name is a class at run time, but no type that checkers accept.
Device = Any


def build_mesh(
    shape: MeshShape,
    devices: Sequence[Device] | None = None,
    dcn: MeshShape | None = None,
    *,
    split_torus: bool = False,
) -> Mesh:
    """Lay devices out as a mesh.

    Args:
        shape: size of each axis; one may be -1.
        devices: what to lay out, real or compile-only; None is every device of the process group.
        dcn: how many slices or hosts each axis spans over the slow network; each must divide its
            axis of `shape`. None keeps everything on the fast network.
        split_torus: let several mesh axes share one axis of a TPU's torus (always so on v5e, as
            JAX does); they then share its bandwidth, and none of them is a ring.

    Returns:
        A mesh with Explicit axes.

    Raises:
        ValueError: the product of the axes is not the number of devices, `dcn` does not divide, or
            the torus cannot hold the mesh; the message names meshes that it can.
    """
    devices = jax.devices() if devices is None else list(devices)
    shape = shape.resolve(len(devices))
    types = (AxisType.Explicit,) * len(shape.axis_names)
    split_torus |= devices[0].device_kind == "TPU v5 lite"
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if dcn is not None and FILL in dcn.sizes.values():
        raise ValueError(
            f"parallel.dcn_mesh {_wide(dcn)} leaves an axis open; say how many slices or hosts it "
            "spans"
        )
    if dcn is None or dcn.num_devices == 1:
        if slices > 1:
            raise ValueError(
                f"the devices form {slices} slices, but parallel.dcn_mesh does not say which axis "
                f"spans them; set, for example, parallel.dcn_mesh.data={slices}"
            )
        array = _on_torus(shape, devices, split_torus)
    else:
        array = _over_network(shape, devices, dcn, split_torus)
    return Mesh(array, shape.axis_names, axis_types=types)


def _on_torus(shape: MeshShape, devices: list[Device], split_torus: bool) -> np.ndarray:
    """Lay out devices that one fast network joins."""
    try:
        return mesh_utils.create_device_mesh(
            tuple(shape.sizes.values()), devices, allow_split_physical_axes=split_torus
        )
    except (NotImplementedError, AssertionError) as error:
        torus = _torus(devices)
        fits = " or ".join(str(_wide(mesh)) for mesh in _fitting(shape, torus))
        raise ValueError(
            f"mesh {_wide(shape)} cannot be laid on a torus of "
            f"{'x'.join(str(size) for size in torus)} without splitting an axis of the torus; "
            f"{fits} can"
        ) from error


def _over_network(
    shape: MeshShape, devices: list[Device], dcn: MeshShape, split_torus: bool
) -> np.ndarray:
    """Lay out slices or hosts, each of which a fast network joins."""
    inner = {}
    for axis, size in shape.sizes.items():
        if size % dcn.sizes[axis]:
            raise ValueError(
                f"parallel.dcn_mesh.{axis} is {dcn.sizes[axis]}, which does not divide "
                f"parallel.mesh.{axis} = {size}"
            )
        inner[axis] = size // dcn.sizes[axis]
    # TPU slices; hosts where, as on GPUs, all devices are one slice.
    by_slice, by_process = (
        _grouped(devices, attribute) for attribute in ("slice_index", "process_index")
    )
    groups = by_slice if len(by_slice) > 1 else by_process
    if len(groups) != dcn.num_devices:
        raise ValueError(
            f"parallel.dcn_mesh {_wide(dcn)} multiplies to {dcn.num_devices}, but the devices form "
            f"{len(groups)} slices or hosts"
        )
    within = dataclasses.replace(shape, **inner)
    blocks = np.empty(len(groups), object)
    blocks[:] = [_on_torus(within, group, split_torus) for group in groups]
    return np.block(blocks.reshape(tuple(dcn.sizes.values())).tolist())


def _grouped(devices: list[Device], attribute: str) -> list[list[Device]]:
    groups: dict[int, list[Device]] = {}
    for device in devices:
        groups.setdefault(getattr(device, attribute, 0), []).append(device)
    return [groups[key] for key in sorted(groups)]


def _torus(devices: list[Device]) -> tuple[int, ...]:
    """Sizes of the axes that mesh axes are made of; the cores of a chip are an axis too."""
    places = [(*device.coords, device.core_on_chip) for device in devices]
    sizes = tuple(max(place) - min(place) + 1 for place in zip(*places, strict=True))
    return tuple(size for size in sizes if size > 1)


def _fitting(shape: MeshShape, torus: tuple[int, ...], most: int = 3) -> list[MeshShape]:
    """Meshes with the same axes that the torus can hold, the most similar first.

    Each mesh axis is a product of whole axes of the torus.
    """
    wide = list(_wide(shape))
    found = set()
    for owners in itertools.product(range(len(wide)), repeat=len(torus)):
        sizes = [1] * len(wide)
        for owner, size in zip(owners, torus, strict=True):
            sizes[owner] *= size
        found.add(tuple(sizes))

    def distance(sizes: tuple[int, ...]) -> float:
        return sum(
            abs(math.log(size / shape.sizes[axis])) for axis, size in zip(wide, sizes, strict=True)
        )

    ranked = sorted(found, key=lambda sizes: (distance(sizes), sizes))[:most]
    return [dataclasses.replace(shape, **dict(zip(wide, sizes, strict=True))) for sizes in ranked]


def abstract_mesh(shape: MeshShape) -> AbstractMesh:
    """A mesh without devices, for tracing and lowering.

    Raises:
        ValueError: an axis is still -1.
    """
    if FILL in shape.sizes.values():
        raise ValueError(f"mesh {shape.sizes} is not resolved: no devices say what -1 stands for")
    types = (AxisType.Explicit,) * len(shape.axis_names)
    return AbstractMesh(tuple(shape.sizes.values()), shape.axis_names, axis_types=types)


def single_device_shape(like: MeshShape) -> MeshShape:
    """The shape of the same axes, all 1: the one-device oracle of a parallel run."""
    return dataclasses.replace(like, **dict.fromkeys(like.sizes, 1))


def _wide(shape: MeshShape) -> dict[str, int]:
    return {axis: size for axis, size in shape.sizes.items() if size != 1}
