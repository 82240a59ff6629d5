"""Time of a collective on the links that its mesh axes lie on.

Devices are joined in levels, from the fastest: the halves of a TPU chip, the torus of a slice and
the data-centre network; or NVLink (PCIe) in a host and the network between hosts. Where a mesh axis
lies follows from the places of its devices. With X bytes of full tensor over levels of sizes e_l,
each of bandwidth b_l and with inner_l devices below it, a gather or reduce-scatter takes

    latency + sum over l of (e_l - 1) / e_l * (X / inner_l) / b_l,

the alpha-beta cost of rings one level after another; an all-reduce twice that. On GPUs the levels
are one pipeline (each GPU's network card forwards while NVLink runs), so that the slowest counts.
A torus axis that closes to a ring sends both ways; several axes together add up (Source: the JAX
scaling book). An axis of the mesh that steps over devices shares links with its neighbours.

Limits: the group of the first device stands for all; no contention with other jobs; in-network
reduction (SHARP) is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from meshes.hardware import NOMINAL_CPU, Hardware, Link
from meshes.targets import Target
from paxlike.analysis.collectives import mesh_axes
from paxlike.analysis.cost_model import DEFAULT, CostModel
from paxlike.analysis.groups import UNKNOWN, Axes

_NAMES = "xyz"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Level:
    """Members of a group that one kind of link joins.

    Attributes:
        links: names of the links, each a queue of its own.
        size: how many members (or groups of members of the level below) it joins.
        inner: members below each of them.
        bandwidth: bytes a second that a device gets through it, all links and directions together.
        one_way: bytes a second to one neighbour.
        hops: links between the two members farthest apart.
        ring_steps: steps of a ring algorithm with one message a step.
        latency: seconds of one hop.
        crossing: bytes a second of an all-to-all, all of a device's bytes counted.
    """

    links: tuple[str, ...]
    size: int
    inner: int
    bandwidth: float
    one_way: float
    hops: int
    ring_steps: int
    latency: float
    crossing: float


@dataclasses.dataclass(frozen=True)
class Network:
    """Where the devices of a mesh lie, and how fast collectives over its axes are.

    Attributes:
        hardware: of every device.
        axes: name and size of each mesh axis.
        places: for each device, along the mesh's axes: its island (slice or host), then its
            coordinates inside it (x, y, z and core of a TPU; number of a GPU in its host).
        torus: chips along x, y, z; () without a torus.
        model: the constants.
    """

    hardware: Hardware
    axes: Axes
    places: np.ndarray
    torus: tuple[int, ...] = ()
    model: CostModel = DEFAULT

    @classmethod
    def of(cls, mesh: Any, target: Target | None, model: CostModel = DEFAULT) -> Network:
        """The network of a mesh.

        Args:
            mesh: a `jax.sharding.Mesh` over the target's devices; or axis names and sizes (or an
                AbstractMesh), whose devices then stand in the order of the target.
            target: what was compiled for; None, and CPU targets, are virtual CPU devices.
            model: the constants.

        Raises:
            ValueError: the mesh has another number of devices than the target.
        """
        hardware = target.hardware if target else None
        axes = mesh_axes(mesh)
        shape = tuple(size for _, size in axes)
        if target is not None and math.prod(shape) != target.num_devices:
            raise ValueError(
                f"mesh {dict(axes)} has {math.prod(shape)} devices, but the target {target.text} "
                f"has {target.num_devices}; make them equal"
            )
        if hardware is None or target is None:
            places = np.zeros((math.prod(shape), 2), int)
            places[:, 1] = np.arange(len(places))
            return cls(NOMINAL_CPU, axes, places.reshape(*shape, 2), (), model)
        found = getattr(mesh, "devices", None)
        if isinstance(found, np.ndarray):
            places = np.array([_place(device, hardware) for device in found.flat])
        else:
            places = _in_order(target, hardware)
        torus = (*target.topology, 1, 1)[:3] if hardware.kind == "tpu" else ()
        return cls(hardware, axes, places.reshape(*shape, -1), torus, model)

    def seconds(
        self, kind: str, payload_bytes: int, names: tuple[str, ...], size: int
    ) -> tuple[tuple[str, ...], float]:
        """Return the links that one collective occupies, and how long.

        Args:
            kind: such as `all-gather`.
            payload_bytes: X or Y of `collectives`: the full tensor of gathers and reductions, the
                local buffer of all-to-alls and permutes.
            names: mesh axes of the group.
            size: devices in the group.
        """
        levels = self.levels(names, size)
        links = tuple(link for level in levels for link in level.links)
        start = {
            "gpu": self.model.gpu_collective_seconds,
            "tpu": self.model.tpu_collective_seconds,
            "cpu": 0.0,
        }[self.hardware.kind]
        times = [_level_seconds(kind, payload_bytes, level, size) for level in levels]
        moving = max(times) if self.hardware.kind == "gpu" else sum(times)
        latency = sum(_latency(kind, level) for level in levels)
        return links, start + latency + moving

    def levels(self, names: tuple[str, ...], size: int) -> tuple[Level, ...]:
        """The levels that a group over these axes spans, from the fastest."""
        return _levels(self, names, size)

    def group(self, names: tuple[str, ...], size: int) -> np.ndarray:
        """Places of the members of the first device's group."""
        if UNKNOWN in names:
            return self.places.reshape(-1, self.places.shape[-1])[:size]
        index = tuple(slice(None) if name in names else 0 for name, _ in self.axes)
        return self.places[index].reshape(-1, self.places.shape[-1])

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


@functools.lru_cache(maxsize=1024)
def _levels(network: Network, names: tuple[str, ...], size: int) -> tuple[Level, ...]:
    group = network.group(names, size)
    num_islands = len(set(group[:, 0].tolist()))
    inside = group[group[:, 0] == group[0, 0]]
    levels = (_tpu_levels if network.torus else _switched)(network, inside)
    if num_islands > 1:
        link = network.hardware.network
        name = "dcn" if network.torus else "network"
        fraction = network.model.network
        levels.append(_flat(name, link, fraction, num_islands, inner=len(inside)))
    return tuple(levels)


def _switched(network: Network, inside: np.ndarray) -> list[Level]:
    """One switch joins the members: NVLink, PCIe, or the memory of virtual CPU devices."""
    if len(inside) == 1:
        return []
    hardware, model = network.hardware, network.model
    if hardware.kind == "cpu":
        return [_flat("memory", hardware.pcie, 1.0, len(inside))]
    if hardware.nvlink is not None:
        return [_flat("nvlink", hardware.nvlink, model.nvlink, len(inside))]
    return [_flat("pcie", hardware.pcie, model.pcie, len(inside))]


def _flat(name: str, link: Link, fraction: float, size: int, inner: int = 1) -> Level:
    bandwidth = fraction * link.bytes_per_second
    return Level(
        links=(name,), size=size, inner=inner, bandwidth=bandwidth, one_way=bandwidth, hops=1,
        ring_steps=size - 1, latency=link.latency_seconds, crossing=bandwidth * size / (size - 1),
    )  # fmt: skip


def _tpu_levels(network: Network, inside: np.ndarray) -> list[Level]:
    """The halves of a chip, then the torus, whose axes work at the same time."""
    hardware, model = network.hardware, network.model
    assert hardware.torus is not None
    per_link = model.ici * hardware.torus.link.bytes_per_second / hardware.devices_per_chip
    levels = []
    cores = len(set(inside[:, 4].tolist()))
    if cores > 1:
        link = dataclasses.replace(
            hardware.torus.link,
            bytes_per_second=model.chip_link * hardware.torus.link.bytes_per_second,
        )
        levels.append(_flat("chip", link, model.ici, cores))
    links, parts, one_way, crossing, hops = [], [], [], [], 0
    for dim, length in enumerate(network.torus):
        coordinates = sorted(set(inside[:, 1 + dim].tolist()))
        extent = len(coordinates)
        if extent == 1:
            continue
        stride = (coordinates[-1] - coordinates[0]) // (extent - 1)
        ring = hardware.torus.wraps(length) and extent * stride == length
        links.append(f"ici {_NAMES[dim]}")
        one_way.append(per_link / stride)
        parts.append((2 if ring else 1) * per_link / stride)
        crossing.append(4 * parts[-1] / extent)
        hops += stride * (extent // 2 if ring else extent - 1)
    chips = len(inside) // cores
    if chips > 1:
        levels.append(
            Level(
                links=tuple(links),
                size=chips,
                inner=cores,
                bandwidth=sum(parts),
                one_way=min(one_way),
                hops=hops,
                ring_steps=hops,
                latency=hardware.torus.link.latency_seconds,
                crossing=min(crossing),
            )
        )
    return levels


def _level_seconds(kind: str, payload: int, level: Level, size: int) -> float:
    """Time to move the bytes of one level."""
    if kind in ("all-to-all", "ragged-all-to-all"):
        # Of a device's buffer, the part for members that only this level reaches.
        reached = (level.size - 1) * level.inner / size
        return payload * reached / (level.crossing * (level.size - 1) / level.size)
    if kind == "collective-permute":
        return payload / level.one_way
    if kind == "collective-broadcast":
        return payload / level.bandwidth
    once = (level.size - 1) / level.size * payload / level.inner / level.bandwidth
    return 2 * once if kind == "all-reduce" else once


def _latency(kind: str, level: Level) -> float:
    if kind in ("collective-permute", "all-to-all", "ragged-all-to-all"):
        return level.latency * level.hops
    if kind == "all-reduce":
        # Long rings are left for trees, whose depth grows with the logarithm.
        steps = min(2 * level.ring_steps, 2 * math.ceil(math.log2(level.size)) + 2 * level.hops)
        return level.latency * steps
    return level.latency * level.ring_steps


def _place(device: Any, hardware: Hardware) -> tuple[int, ...]:
    if hardware.kind == "tpu":
        core = device.core_on_chip if hardware.devices_per_chip > 1 else 0
        return (getattr(device, "slice_index", None) or 0, *device.coords, core)
    return (device.process_index, device.coords[-1])


def _in_order(target: Target, hardware: Hardware) -> np.ndarray:
    """Places of a target's devices without asking its compiler: the last one runs fastest."""
    if hardware.kind == "tpu":
        sizes = (target.num_slices, *(*target.topology, 1, 1)[:3], hardware.devices_per_chip)
    else:
        sizes = target.topology
    return np.stack(np.unravel_index(np.arange(target.num_devices), sizes), axis=1)
