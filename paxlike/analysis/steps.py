"""A scheduled computation as the steps that a timeline runs: work, transfers, waits, loops.

Each instruction that takes time becomes one step with its duration, worked out once; what a loop
repeats is thereby priced once. Durations are whole picoseconds, so that sums are exact and two
states of the simulation are equal or not.

An asynchronous start and its done are matched by the value that flows between them, through
tuples, through the state of loops (a done may wait for the start of the previous trip), and through
the fusions in which the TPU compiler carries a collective along.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from paxlike.analysis import collectives
from paxlike.analysis.cost import Cost, Kernels, cost_of
from paxlike.analysis.cost_model import OpClass, OpTime, op_time
from paxlike.analysis.execution import Site, callee_name, trip_count
from paxlike.analysis.hlo import Computation, Instruction, Module
from paxlike.analysis.network import Network
from paxlike.analysis.scopes import parse_scope

PICOSECONDS = 1_000_000_000_000
HOST_MEMORY = 5
_BRANCHES = ("branch_computations", "true_computation", "false_computation")

Kind = Literal["work", "transfer", "start", "done", "loop", "call", "branch"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step.

    Attributes:
        kind: `work` on the compute stream; a `transfer` that the compute stream waits for; the
            `start` of one that it does not, and the `done` that waits for it; a `loop`, a `call`,
            or a `branch` of which one callee runs.
        name: of the instruction.
        ticks: picoseconds of one run.
        links: queues that a transfer occupies.
        family: starts and dones with the same value in flight.
        axis: mesh axes of a collective, joined by `+`; `host` for copies from and to it; "" for
            copies inside the device.
        where: scope.
        label: what a reader calls it, such as `all-gather` or `fusion`.
        limit: what bounds the work: compute, memory or overhead.
        op_class: matmul, kernel, other or collective.
        flops: of one run.
        bytes: through main memory, of one run.
        callees: computations that it runs.
        trips: of a loop.
    """

    kind: Kind
    name: str
    ticks: int = 0
    links: tuple[str, ...] = ()
    family: str = ""
    axis: str = ""
    where: str = ""
    label: str = ""
    limit: str = ""
    op_class: OpClass | Literal["collective"] = "other"
    flops: int = 0
    bytes: int = 0
    callees: tuple[str, ...] = ()
    trips: int = 1


class Steps:
    """The steps of each computation of a program, made when asked for.

    Args:
        module: the program.
        network: links and hardware.
        kernels: cost of custom calls, as `cost.operations` takes it.
    """

    def __init__(self, module: Module, network: Network, kernels: Kernels | None = None) -> None:
        self._module, self._network, self._kernels = module, network, kernels
        self._made: dict[str, list[Step]] = {}
        self._families = _families(module)
        self.exact = True

    def of(self, name: str) -> list[Step]:
        """The steps of a computation, in the order of its schedule."""
        if name not in self._made:
            computation = self._module.computations[name]
            steps = (self._step(computation, instruction) for instruction in computation)
            self._made[name] = [step for step in steps if step is not None]
        return self._made[name]

    def made(self) -> dict[str, list[Step]]:
        """The steps of all computations asked for so far."""
        return self._made

    def _step(self, computation: Computation, instruction: Instruction) -> Step | None:
        opcode, called, name = instruction.opcode, instruction.called, instruction.name
        if opcode == "while":
            return self._loop(computation, instruction)
        if opcode == "conditional":
            callees = tuple(branch for role in _BRANCHES for branch in called.get(role, ()))
            return Step(kind="branch", name=name, callees=callees)
        if opcode == "call":
            return Step(kind="call", name=name, callees=(callee_name(instruction),))
        if name in self._families.dones:
            return Step(kind="done", name=name, family=self._families.dones[name])
        cost = cost_of(self._module, computation, instruction, self._kernels)
        rows = self._collectives(computation, instruction)
        if rows:
            return self._collective(instruction, rows, cost)
        if opcode.endswith("-start"):
            return self._copy(computation, instruction, cost)
        time = op_time(instruction, cost, self._network.hardware, self._network.model)
        return self._work(instruction, cost, time) if time.seconds else None

    def _loop(self, computation: Computation, instruction: Instruction) -> Step:
        trips = trip_count(self._module, computation, instruction)
        self.exact = self.exact and trips.exact
        # XLA's GPU runtime counts a known number of trips on the host; no condition runs.
        counted = "known_trip_count" in instruction.backend_config
        condition = () if counted else instruction.called["condition"]
        callees = (*instruction.called["body"], *condition)
        return Step(
            kind="loop", name=instruction.name, callees=callees, trips=trips.count,
            where=parse_scope(instruction.op_name).path,
        )  # fmt: skip

    def _collectives(
        self, computation: Computation, instruction: Instruction
    ) -> list[collectives.Collective]:
        """Rows of the collectives that an instruction runs, those inside a fusion included."""
        site = Site(instruction, computation, 1, False, True, False, None)
        axes = self._network.axes
        rows = collectives.at(self._module, site, axes)
        fused = instruction.opcode.startswith("fusion")
        if rows or not (fused or instruction.opcode == "async-start"):
            return rows
        callee = self._module.computations[callee_name(instruction)]
        return [
            row
            for inner in callee
            if inner.opcode in collectives.KINDS
            for row in collectives.at(
                self._module, Site(inner, callee, 1, False, True, fused, site), axes
            )
        ]

    def _collective(
        self, instruction: Instruction, rows: list[collectives.Collective], cost: Cost
    ) -> Step:
        first, payload = rows[0], sum(row.payload_bytes for row in rows)
        links, seconds = self._network.seconds(
            first.kind, payload, first.mesh_axes, first.group_size
        )
        family = self._families.starts.get(instruction.name, "")
        return Step(
            kind="start" if family else "transfer",
            name=instruction.name,
            ticks=round(seconds * PICOSECONDS),
            links=links,
            family=family,
            axis="+".join(first.mesh_axes),
            where=first.where,
            label=first.kind,
            op_class="collective",
            bytes=cost.bytes,
        )

    def _copy(self, computation: Computation, instruction: Instruction, cost: Cost) -> Step:
        """A copy, slice or other work beside the compute stream."""
        operands = computation.operands(instruction)
        shapes = [instruction.shape, *(operand.shape for operand in operands)]
        spaces = {array.memory_space for shape in shapes for array in shape.arrays()}
        model, hardware = self._network.model, self._network.hardware
        host = HOST_MEMORY in spaces
        moved = instruction.shape
        if moved.elements:
            moved = moved.elements[0 if instruction.opcode == "copy-start" else 1]
        if host:
            seconds = moved.bytes / (model.pcie * hardware.pcie.bytes_per_second)
        elif len(spaces - {2, 4, 6}) > 1:  # main memory to on-chip memory, or back
            seconds = moved.bytes / (model.hbm * hardware.hbm_bytes_per_second)
        else:
            seconds = op_time(instruction, cost, hardware, model).seconds
        family = self._families.starts.get(instruction.name, "")
        return Step(
            kind="start" if family else "transfer",
            name=instruction.name,
            ticks=round(seconds * PICOSECONDS),
            links=("pcie",) if host else ("dma",),
            family=family,
            axis="host" if host else "",
            where=parse_scope(instruction.op_name).path,
            label=instruction.opcode.removesuffix("-start"),
            bytes=cost.bytes,
        )

    def _work(self, instruction: Instruction, cost: Cost, time: OpTime) -> Step:
        return Step(
            kind="work",
            name=instruction.name,
            ticks=round(time.seconds * PICOSECONDS),
            where=parse_scope(instruction.op_name).path,
            label=instruction.opcode,
            limit=time.bound,
            op_class=time.kind,
            flops=cost.flops,
            bytes=cost.bytes,
        )


@dataclasses.dataclass(frozen=True)
class _Families:
    """Instruction name -> family, of starts and of dones."""

    starts: dict[str, str]
    dones: dict[str, str]


def _families(module: Module) -> _Families:
    """Match dones with the starts whose value reaches them."""
    parents: dict[str, list[tuple[Computation, Instruction]]] = {}
    starts: dict[str, str] = {}
    dones: list[tuple[Computation, Instruction]] = []
    for computation in module.computations.values():
        for instruction in computation:
            role = _role(module, instruction)
            if role == "start":
                starts[instruction.name] = instruction.name
            elif role == "done":
                dones.append((computation, instruction))
            if instruction.opcode == "while":
                for body in instruction.called["body"]:
                    parents.setdefault(body, []).append((computation, instruction))
    reached: dict[str, str] = {}
    for computation, done in dones:
        for operand in done.operands:
            sources = sorted(_sources(module, parents, computation, operand, None, set()))
            if sources:
                reached[done.name] = sources[0]
                for source in sources[1:]:
                    starts[_first(starts, source)] = _first(starts, sources[0])
                break
    families = {start: _first(starts, start) for start in starts}
    return _Families(families, {done: families[start] for done, start in reached.items()})


def _first(parent: dict[str, str], name: str) -> str:
    """The start that stands for all those joined with `name`."""
    while parent[name] != name:
        name = parent[name]
    return name


def _role(module: Module, instruction: Instruction) -> str:
    opcode = instruction.opcode
    if opcode.endswith("-start"):
        return "start"
    if opcode.endswith("-done"):
        return "done"
    if opcode == "fusion" and "kind=kCustom" in instruction.attributes:
        callee = module.computations[callee_name(instruction)]
        for inner in callee:
            if inner.opcode == "custom-call":
                for role in ("Start", "Done"):
                    if f'"AsyncCollective{role}"' in inner.attributes:
                        return role.lower()
    return ""


def _sources(
    module: Module,
    parents: dict[str, list[tuple[Computation, Instruction]]],
    computation: Computation,
    name: str,
    index: int | None,
    seen: set[tuple[str, int | None]],
) -> set[str]:
    """Starts whose value is element `index` (None: all) of an instruction's result."""
    if (name, index) in seen:
        return set()
    seen.add((name, index))
    instruction = computation.instructions[name]
    opcode = instruction.opcode

    def follow(inside: Computation, source: str, element: int | None) -> set[str]:
        return _sources(module, parents, inside, source, element, seen)

    if _role(module, instruction) == "start":
        return {name}
    if opcode == "get-tuple-element":
        return follow(computation, instruction.operands[0], instruction.integers("index")[0])
    if opcode.endswith("-update") or opcode in ("bitcast", "copy"):
        return follow(computation, instruction.operands[0], index)
    if opcode == "tuple" and index is not None:
        return follow(computation, instruction.operands[index], None)
    if opcode == "fusion" and index is not None:
        callee = module.computations[callee_name(instruction)]
        root = callee.instructions[callee.root]
        passed = callee.instructions[root.operands[index]] if root.opcode == "tuple" else root
        if passed.opcode == "parameter":
            return follow(computation, instruction.operands[int(passed.literal)], None)
    found: set[str] = set()
    loops = [(computation, instruction)] if opcode == "while" else []
    if opcode == "parameter":
        loops = parents.get(computation.name, [])
    for outside, loop in loops:
        body = module.computations[loop.called["body"][0]]
        found |= follow(outside, loop.operands[0], index) | follow(body, body.root, index)
    return found
