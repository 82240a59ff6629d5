"""Table of the collectives of a compiled program, in the terms of its author.

Each row says what kind of collective runs, over which mesh axes, how often in one call of the
program, how many bytes each device sends, and which named scope asked for it. Counts are
*operands*: XLA merges independent all-reduces into one tuple operation, and packs them into one
concatenated buffer on GPU, so that the number of instructions says nothing about a scheme. Loop
trip counts are multiplied in.

Bytes are those of ring algorithms, sent per device, with G devices and X bytes of full tensor
(gathered or unreduced): all-gather and reduce-scatter (G-1)/G X, all-reduce 2(G-1)/G X,
all-to-all of a local buffer Y (G-1)/G Y, permute Y. Source: Thakur, Rabenseifner and Gropp 2005.

Limits: of a conditional's branches the one that sends most is counted. A ragged all-to-all counts
its whole buffer, since the true sizes are data. A permute's bytes are those of a device that
sends.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paxlike.analysis import hlo
from paxlike.analysis.execution import Site, callee_name, walk
from paxlike.analysis.groups import Axes, axes_of
from paxlike.analysis.hlo import Computation, Instruction, Module, Shape
from paxlike.analysis.scopes import Phase, Scope, parse_scope

KINDS = frozenset(
    {
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "all-to-all",
        "ragged-all-to-all",
        "collective-permute",
        "collective-broadcast",
    }
)
_VIEWS = frozenset({"bitcast", "copy", "reshape", "convert", "get-tuple-element"})
_SEARCH_DEPTH = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One or more equal collectives.

    Attributes:
      kind: such as `all-reduce`; asynchronous forms have the same kind.
      mesh_axes: names in mesh order; ("?",) if the groups are no product of mesh axes.
      group_size: devices in one group.
      count: operands, trip counts multiplied in.
      bytes_per_device: sent by one device in all `count`, ring algorithm.
      hidden_fraction: part of the time hidden behind computation; None if not analysed.
      payload_bytes: the X or Y of the module docstring, summed over all `count`.
      dtype: HLO element type, such as `bf16`.
      where: named scopes joined by dots; "" if none is known.
      phase: `forward`, `recompute` or `backward`.
      in_loop: whether it runs inside a while loop.
      exact: False if the trip count of an enclosing loop is unknown or assumed.
    """

    kind: str
    mesh_axes: tuple[str, ...]
    group_size: int
    count: int
    bytes_per_device: int
    payload_bytes: int
    dtype: str
    where: str
    phase: Phase
    in_loop: bool
    exact: bool
    hidden_fraction: float | None = None

    @property
    def backward(self) -> bool:
        """Whether it runs in the backward pass, recomputation included."""
        return self.phase != "forward"


def table(
    program: Module | str, mesh: Any, hidden: Mapping[str, float] | None = None
) -> list[Collective]:
    """List the collectives of a program, equal ones summed, in the order they first run.

    Args:
      program: the optimised HLO, as text or parsed.
      mesh: a `jax.sharding.Mesh` or `AbstractMesh`, or a mapping from axis name to size in mesh
        order. Its devices must be those that the program was compiled for, in the same order.
      hidden: name of a collective's instruction -> part of its time that is hidden, from
        `timeline.simulate`. A row's fraction is the mean over its bytes.

    Returns:
      Rows that differ in anything but count and bytes.

    Raises:
      ValueError: the mesh has another number of devices than the program.
    """
    module = hlo.parse(program) if isinstance(program, str) else program
    axes = mesh_axes(mesh)
    num_devices = math.prod(extent for _, extent in axes)
    if num_devices != module.num_devices:
        raise ValueError(
            f"mesh: {dict(axes)} has {num_devices} devices, but the program {module.name} was "
            f"compiled for {module.num_devices}; pass the mesh that it was compiled with"
        )
    sites = walk(module, weigh=lambda branch: _sent(module, branch, axes))
    rows: dict[Collective, Collective] = {}
    for site in sites:
        fraction = _hidden(site, hidden) if hidden is not None else None
        for row in at(module, site, axes):
            key = dataclasses.replace(row, count=0, bytes_per_device=0, payload_bytes=0)
            row = dataclasses.replace(row, hidden_fraction=fraction)
            rows[key] = _add(rows[key], row) if key in rows else row
    return list(rows.values())


def _hidden(site: Site, hidden: Mapping[str, float]) -> float | None:
    """Hidden part of a collective, which goes by the name of the operation that starts it."""
    caller = site.caller.instruction.name if site.caller else ""
    return hidden.get(site.instruction.name, hidden.get(caller))


def mesh_axes(mesh: Any) -> Axes:
    """Return name and size of each axis of a mesh or of a mapping."""
    shape = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
    if not isinstance(shape, Mapping):
        raise TypeError(f"mesh: expected a jax Mesh or a mapping name -> size, got {mesh!r}")
    return tuple((str(name), int(extent)) for name, extent in shape.items())


def at(module: Module, site: Site, axes: Axes) -> list[Collective]:
    """Return one row for each operand of the collective at a site; [] if there is none.

    Args:
      module: the program.
      site: from `execution.walk`.
      axes: from `mesh_axes`.
    """
    instruction = site.instruction
    kind = instruction.opcode.removesuffix("-start")
    if kind not in KINDS or (site.fused and _continues(site)):
        return []
    kind = _scattered(site, kind)
    names, size = axes_of(instruction, kind, module, axes)
    if size == 1:
        return []
    rows = []
    for shape, count, scope in _operands(module, site, kind, size):
        payload = shape.bytes * (size if kind == "all-gather" else 1)
        rows.append(
            Collective(
                kind=kind,
                mesh_axes=tuple(name for name, _ in names),
                group_size=size,
                count=count * site.times,
                bytes_per_device=_ring_bytes(kind, payload, size) * site.times,
                payload_bytes=payload * site.times,
                dtype=shape.dtype,
                where=scope.path,
                phase=scope.phase,
                in_loop=site.in_loop,
                exact=site.exact,
            )
        )
    return rows


def summary(rows: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...]], tuple[int, int]]:
    """Sum rows to `{(kind, mesh_axes): (count, bytes_per_device)}`."""
    totals: dict[tuple[str, tuple[str, ...]], tuple[int, int]] = {}
    for row in rows:
        count, sent = totals.get((row.kind, row.mesh_axes), (0, 0))
        totals[row.kind, row.mesh_axes] = (count + row.count, sent + row.bytes_per_device)
    return totals


def format_table(rows: Sequence[Collective]) -> str:
    """Format rows as plain text, the largest senders first."""
    header = ("kind", "axes", "count", "sent/device", "dtype", "phase", "where")
    lines: list[tuple[str, ...]] = [header]
    for row in sorted(rows, key=lambda row: -row.bytes_per_device):
        count = str(row.count) if row.exact else f">={row.count}"
        axes = ",".join(row.mesh_axes)
        sent = f"{row.bytes_per_device:,} B"
        lines.append((row.kind, axes, count, sent, row.dtype, row.phase, row.where or "-"))
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _add(left: Collective, right: Collective) -> Collective:
    fraction = left.hidden_fraction
    payload = left.payload_bytes + right.payload_bytes
    if fraction is not None and right.hidden_fraction is not None and payload:
        weighed = fraction * left.payload_bytes + right.hidden_fraction * right.payload_bytes
        fraction = weighed / payload
    return dataclasses.replace(
        left,
        count=left.count + right.count,
        bytes_per_device=left.bytes_per_device + right.bytes_per_device,
        payload_bytes=payload,
        hidden_fraction=fraction,
    )


def _sent(module: Module, sites: list[Site], axes: Axes) -> int:
    return sum(row.bytes_per_device for site in sites for row in at(module, site, axes))


def _ring_bytes(kind: str, payload: int, size: int) -> int:
    """Bytes that one device sends, rounded to the nearest."""
    if kind in ("collective-permute", "collective-broadcast"):
        return payload
    factor = 2 if kind == "all-reduce" else 1
    return (2 * factor * payload * (size - 1) + size) // (2 * size)


def _continues(site: Site) -> bool:
    """Whether a fused collective only continues one that another fusion started.

    The TPU compiler repeats an asynchronous collective in the fusion that starts it, in each
    fusion that runs beside it, and in the one that ends it. Only the first feeds a custom call
    `AsyncCollectiveStart`.
    """
    if "async_collective_fusion_config" not in site.instruction.backend_config:
        return False
    return not any(
        user.opcode == "custom-call" and "AsyncCollectiveStart" in user.attributes
        for user in site.computation.users(site.instruction)
    )


def _scattered(site: Site, kind: str) -> str:
    """Return the true kind: the TPU's reduce-scatter is a fused all-reduce and dynamic-slice."""
    if site.fused and kind == "all-reduce":
        caller = site.caller.instruction if site.caller else site.instruction
        if "all-reduce-scatter" in callee_name(caller):
            return "reduce-scatter"
    return kind


def _operands(module: Module, site: Site, kind: str, size: int) -> list[tuple[Shape, int, Scope]]:
    """Payload shape, count and scope of each logical operand."""
    instruction, computation = site.instruction, site.computation
    operands = computation.operands(instruction)
    if kind == "ragged-all-to-all" or instruction.attribute("slice_sizes"):
        operands = operands[:1]  # the others are output buffers and offsets
    if kind == "all-to-all" and not instruction.attribute("dimensions"):
        return _split_operands(site, operands, size)
    rows: list[tuple[Shape, int, Scope]] = []
    for index, operand in enumerate(operands):
        pieces = _packed(module, site, operand) if kind == "all-reduce" else []
        if pieces:
            rows += [(shape, 1, scope) for shape, scope in pieces]
        else:
            position = index if len(operands) > 1 else None
            rows += [(shape, 1, _scope(site, position)) for shape in operand.shape.arrays()]
    return rows


def _split_operands(
    site: Site, operands: Sequence[Instruction], size: int
) -> list[tuple[Shape, int, Scope]]:
    """A tuple all-to-all has one operand for each peer: `size` of them are one buffer."""
    rows = []
    for start in range(0, len(operands), size):
        pieces = operands[start : start + size]
        elements = sum(piece.shape.size for piece in pieces)
        rows.append((Shape(pieces[0].shape.dtype, (elements,)), 1, _scope(site, None)))
    return rows


def _packed(module: Module, site: Site, operand: Instruction) -> list[tuple[Shape, Scope]]:
    """Return the tensors that the GPU compiler packed into one all-reduce; [] if it did not.

    It concatenates them flattened, in an operation without a source; one that the user wrote has
    `concatenate` at the end of its op name.
    """
    outer = _behind_views(site.computation, operand)
    inner_computation, inner = site.computation, outer
    if outer.opcode == "fusion":
        inner_computation = module.computations[callee_name(outer)]
        root = inner_computation.instructions[inner_computation.root]
        inner = _behind_views(inner_computation, root)
    if inner.opcode != "concatenate" or len(inner.shape.dims) != 1 or inner.op_name:
        return []
    pieces, offset = [], 0
    for source in inner_computation.operands(inner):
        shape = Shape(operand.shape.dtype, source.shape.dims)
        pieces.append((shape, _piece_scope(module, site, offset)))
        offset += shape.size
    return pieces


def _piece_scope(module: Module, site: Site, offset: int) -> Scope:
    """Return the scope of the slice that takes a packed tensor out of the result again."""
    computation = site.computation
    users = computation.users(site.instruction)
    for done in [user for user in users if user.opcode.endswith("-done")]:
        users = users + computation.users(done)
    for user in users:
        cut = user
        if user.opcode == "fusion":
            callee = module.computations[callee_name(user)]
            cut = _behind_views(callee, callee.instructions[callee.root])
        if cut.opcode == "slice" and cut.integers("slice")[0] == offset:
            found = nearest_scope(computation, user, upwards=False)
            if found:
                return found
    return _scope(site, None)


def _behind_views(computation: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode in _VIEWS and instruction.operands:
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _scope(site: Site, index: int | None) -> Scope:
    """Return the scope of operand `index` of a collective, or of the whole of it (None).

    XLA drops or truncates the op names of collectives that it makes or merges. Then the nearest
    consumer that has a scope speaks for it, else the nearest producer.
    """
    op_name = site.instruction.op_name
    if index is not None:
        for user in site.computation.users(site.instruction):
            if user.opcode == "get-tuple-element" and user.integers("index") == (index,):
                scope = parse_scope(user.op_name)
                if scope.path:
                    return scope
    while site.fused and site.caller is not None and not parse_scope(op_name).path:
        site = site.caller
        op_name = op_name or site.instruction.op_name
    own = parse_scope(op_name)
    if own.path:
        return own
    for upwards in (False, True):
        found = nearest_scope(site.computation, site.instruction, upwards)
        if found:
            return Scope(found.path, own.phase) if op_name else found
    return own


def nearest_scope(computation: Computation, start: Instruction, upwards: bool) -> Scope | None:
    """Breadth-first search for a scope among consumers, or producers if `upwards`."""
    level, seen = [start], {start.name}
    for _ in range(_SEARCH_DEPTH):
        following = []
        for instruction in level:
            if upwards:
                neighbours = computation.operands(instruction)
            else:
                neighbours = computation.users(instruction)
            for neighbour in neighbours:
                if neighbour.name in seen or neighbour.opcode in ("tuple", "while"):
                    continue
                seen.add(neighbour.name)
                scope = parse_scope(neighbour.op_name)
                if scope.path:
                    return scope
                following.append(neighbour)
        level = following
    return None
