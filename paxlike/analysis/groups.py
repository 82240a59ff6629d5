"""Name the mesh axes over which a collective runs, from its replica groups or permute pairs.

XLA writes groups in three notations: lists `{{0,1},{2,3}}`, iotas `[4,2]<=[2,4]T(1,0)` and meshes
`mesh['a'=2,'b'=4] {'b'}` (whose axis names are often not ours). All become arrays of device
numbers; an axis belongs to the collective when coordinates along it differ inside a group.
Device number n is the n-th device of the mesh in row-major order, as `jax.jit` assigns them.
"""

from __future__ import annotations

import functools
import math
import re

import numpy as np

from paxlike.analysis.hlo import Instruction, Module

UNKNOWN = "?"
Axes = tuple[tuple[str, int], ...]

_NESTED = r"\((?:[^()]|\([^()]*\))*\)"
_GROUPS = re.compile(
    r"replica_groups=(\{\{.*?\}\}|\{\}|\[[\d,]*\]<=\[[\d,]*\](?:T\([\d,]*\))?"
    rf"|mesh\[[^\]]*\](?:, device_ids={_NESTED})? \{{[^}}]*\}})"
)
_PAIRS = re.compile(r"source_target_pairs=(\{\}|\{\{.*?\}\})")
_IOTA = re.compile(r"\[([\d,]*)\](?:T\(([\d,]*)\))?$")
_MESH = re.compile(rf"mesh\[([^\]]*)\](?:, device_ids=({_NESTED}))? \{{([^}}]*)\}}")
_AXIS = re.compile(r"'?([\w.\-]+)'?=(\d+)")
_AXIS_REF = re.compile(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?")
_REDUCTIONS = frozenset({"all-reduce", "all-gather", "reduce-scatter"})


def axes_of(instruction: Instruction, kind: str, module: Module, axes: Axes) -> tuple[Axes, int]:
    """Return the mesh axes, with sizes, over which a collective runs, and its group size.

    Args:
      instruction: the collective.
      kind: its opcode without `-start`.
      module: the program, for its numbers of partitions and replicas.
      axes: name and size of each mesh axis, in the order of the mesh.

    Returns:
      The axes in mesh order; `(("?", group size),)` if the groups are no product of mesh axes. A
      permute runs over the axes along which any source and target differ. Size 1 means that the
      collective moves nothing.
    """
    if kind == "collective-permute":
        match = _PAIRS.search(instruction.attributes)
        return _permute_axes(match.group(1) if match else "{}", axes)
    match = _GROUPS.search(instruction.attributes)
    if "use_global_device_ids=true" in instruction.attributes:
        mode = "global"
    elif "channel_id=" not in instruction.attributes:
        mode = "replicas"
    else:
        mode = "both" if kind in _REDUCTIONS else "partitions"
    text = match.group(1) if match else "{}"
    return _group_axes(text, mode, module.num_partitions, module.num_replicas, axes)


@functools.lru_cache(maxsize=4096)
def _group_axes(
    text: str, mode: str, num_partitions: int, num_replicas: int, axes: Axes
) -> tuple[Axes, int]:
    ids = {"global": num_partitions * num_replicas, "partitions": num_partitions}
    groups = _parse_groups(text, ids.get(mode, num_replicas))
    if (groups < 0).any():
        return ((UNKNOWN, groups.shape[1]),), groups.shape[1]
    groups = _device_numbers(groups, mode, num_partitions, num_replicas)
    size = groups.shape[1]
    if size <= 1:
        return (), 1
    varying = _varying(groups, groups[:, :1], axes)
    if varying is None or math.prod(extent for _, extent in varying) != size:
        return ((UNKNOWN, size),), size
    return varying, size


@functools.lru_cache(maxsize=4096)
def _permute_axes(text: str, axes: Axes) -> tuple[Axes, int]:
    pairs = np.array([int(number) for number in re.findall(r"\d+", text)]).reshape(-1, 2)
    if not len(pairs):
        return (), 1
    varying = _varying(pairs[:, 1:], pairs[:, :1], axes)
    if varying is None:
        return ((UNKNOWN, len(pairs)),), len(pairs)
    return varying, math.prod(extent for _, extent in varying)


def _varying(ids: np.ndarray, reference: np.ndarray, axes: Axes) -> Axes | None:
    """Axes along which coordinates differ from the reference's; None if ids leave the mesh."""
    shape = tuple(extent for _, extent in axes)
    if max(ids.max(), reference.max()) >= math.prod(shape):
        return None
    differs = [
        (own != other).any()
        for own, other in zip(
            np.unravel_index(ids, shape), np.unravel_index(reference, shape), strict=True
        )
    ]
    return tuple(axis for axis, different in zip(axes, differs, strict=True) if different)


def _device_numbers(
    groups: np.ndarray, mode: str, num_partitions: int, num_replicas: int
) -> np.ndarray:
    """Turn replica or partition ids into device numbers (replica * partitions + partition)."""
    if mode == "global":
        return groups
    partitions, replicas = np.arange(num_partitions), np.arange(num_replicas)
    if mode == "partitions":
        return (groups[None] + num_partitions * replicas[:, None, None]).reshape(
            -1, groups.shape[1]
        )
    expanded = groups[None] * num_partitions + partitions[:, None, None]
    if mode == "replicas":
        return expanded.reshape(-1, groups.shape[1])
    return expanded.transpose(1, 0, 2).reshape(len(groups), -1)


def _parse_groups(text: str, count: int) -> np.ndarray:
    """Return the groups as rows, unequal ones padded with -1. No groups: one of `count`."""
    if text == "{}":
        return np.arange(count)[None]
    if text.startswith("mesh"):
        return _parse_mesh(text)
    if text.startswith("["):
        shape, _, iota = text.partition("<=")
        return _parse_iota(iota).reshape(_integers(shape))
    rows = [_integers(group) for group in re.findall(r"\{([\d,]+)\}", text)]
    longest = max(len(row) for row in rows)
    return np.array([row + (-1,) * (longest - len(row)) for row in rows])


def _parse_iota(text: str) -> np.ndarray:
    match = _IOTA.match(text)
    assert match is not None, text
    dims = _integers(match.group(1))
    ids = np.arange(math.prod(dims)).reshape(dims)
    return (ids.transpose(_integers(match.group(2))) if match.group(2) else ids).reshape(-1)


def _parse_mesh(text: str) -> np.ndarray:
    """Groups of `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b':(1)2}`; the latter is optional.

    `:(m)k` is a part of an axis: the digit of size k that stands after m values of higher digits.
    """
    match = _MESH.match(text)
    assert match is not None, text
    references = _AXIS_REF.findall(match.group(3))
    dims: list[int] = []
    inside: list[bool] = []
    for axis, extent in _AXIS.findall(match.group(1)):
        parts = [
            (int(before or 1), int(before or 1) * int(size or extent))
            for name, before, size in references
            if name == axis
        ]
        cuts = sorted({1, int(extent), *(cut for part in parts for cut in part)})
        for low, high in zip(cuts, cuts[1:], strict=False):
            dims.append(high // low)
            inside.append(any(begin <= low < end for begin, end in parts))
    ids = np.arange(math.prod(dims))
    if match.group(2):
        listed = match.group(2)[1:-1]
        ids = _parse_iota(listed) if listed.startswith("[") else np.array(_integers(listed))
    order = [i for i, within in enumerate(inside) if not within]
    order += [i for i, within in enumerate(inside) if within]
    size = math.prod(dim for dim, within in zip(dims, inside, strict=True) if within)
    return ids.reshape(dims).transpose(order).reshape(-1, size)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))
