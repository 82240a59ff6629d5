"""What lies in a device's memory at the worst moment of a step: the answer to "why is this OOM".

The compiler says how much memory a program needs, not for what. Here its schedule is walked with
the rules of XLA's buffer assignment: a value lives from its definition to its last use; tuples,
bitcasts and updates in place make no buffer; the state of a loop is one buffer from before the loop
to after it, and what a body hands to the next trip lies in it; results that take a donated
argument's place lie there; an elementwise operation may write over an operand that dies with it.

Limits: it is a simulation. Padding of tiled layouts and fragmentation are left out, and compilers
reuse more than these rules say; reports show the deviation from the compiler's own total.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator
from typing import Literal

from paxlike.analysis.collectives import KINDS, nearest_scope
from paxlike.analysis.execution import callee_name
from paxlike.analysis.hlo import Computation, Instruction, Module, Shape
from paxlike.analysis.scopes import Phase, Scope, parse_scope

Category = Literal["gradients", "collectives", "activations", "other"]

_ALIASING = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}\)")
_BRANCHES = ("branch_computations", "true_computation", "false_computation")
_SAME = frozenset({"bitcast", "opt-barrier", "add-dependency", "domain", "reshape"})
_IN_PLACE = frozenset({"dynamic-update-slice", "scatter"})
# Read one element of an operand for each they write, so that they may write over it.
_ELEMENTWISE = frozenset(
    "add subtract multiply divide maximum minimum power negate exponential log tanh rsqrt sqrt abs "
    "convert select compare and or not copy all-reduce clamp sine cosine is-finite".split()
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LiveBuffer:
    """A buffer at the peak.

    Attributes:
        bytes: its size on one device.
        shape: such as `f32[32,4096]`.
        category: gradients (backward, of a parameter's shape), collectives (what one has gathered
            or reduced), activations (anything else with a scope), other.
        where: named scope of what writes it; "" if none is known.
        phase: of the same.
        name: of the HLO instruction.
    """

    bytes: int
    shape: str
    category: Category
    where: str
    phase: Phase
    name: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peak:
    """The worst moment.

    Attributes:
        bytes: of all temporary buffers then; arguments and donated results not counted.
        during: instruction that ran, those of enclosing loops first.
        where: its scope.
        buffers: those that live, the largest first.
    """

    bytes: int
    during: tuple[str, ...]
    where: str
    buffers: tuple[LiveBuffer, ...]

    def by_category(self) -> dict[str, int]:
        """Bytes by category, the largest first."""
        return _summed((buffer.category, buffer.bytes) for buffer in self.buffers)

    def by_scope(self) -> dict[str, int]:
        """Bytes by named scope, the largest first."""
        return _summed((buffer.where, buffer.bytes) for buffer in self.buffers)


def peak(module: Module, parameter_shapes: Collection[tuple[int, ...]] = ()) -> Peak:
    """Find the moment at which temporaries take most memory.

    Args:
        module: the program, scheduled.
        parameter_shapes: dims of the parameters' shards on a device, to know gradients by.
    """
    walk = _Walk(module, frozenset(parameter_shapes))
    moment = walk.moment(module.entry)
    buffers = sorted(moment.buffers, key=lambda buffer: (-buffer.bytes, buffer.name))
    return Peak(
        bytes=moment.bytes,
        during=moment.during,
        where=moment.where,
        buffers=tuple(buffer for buffer in buffers if buffer.bytes),
    )


@dataclasses.dataclass(eq=False, slots=True)
class _Buffer:
    """Memory that values share. External buffers are counted by somebody else."""

    size: int
    shape: Shape
    maker: Instruction
    scope: Scope
    external: bool = False
    born: int = 0
    dies: int = 0
    into: _Buffer | None = None  # the buffer that took this one's place


_Tree = _Buffer | list  # a value: one buffer, or a tuple's elements


@dataclasses.dataclass(frozen=True, slots=True)
class _Moment:
    """Peak of one computation, and who writes the elements of its result."""

    bytes: int
    during: tuple[str, ...]
    where: str
    buffers: list[LiveBuffer]
    writers: list[Scope]


class _Walk:
    """Peaks of the computations of a module, each worked out once."""

    def __init__(self, module: Module, parameters: frozenset[tuple[int, ...]]) -> None:
        self._module, self._parameters = module, parameters
        self._moments: dict[str, _Moment] = {}
        self._carried: dict[_Buffer, list[_Buffer]] = {}  # updated -> other operands of the update
        self._copied: dict[_Buffer, _Buffer] = {}

    def moment(self, name: str) -> _Moment:
        if name not in self._moments:
            self._moments[name] = self._work_out(self._module.computations[name])
        return self._moments[name]

    def _work_out(self, computation: Computation) -> _Moment:
        values: dict[str, _Tree] = {}
        buffers: list[_Buffer] = []
        order = list(computation)
        for index, instruction in enumerate(order):
            tree = self._value(computation, instruction, values)
            values[instruction.name] = tree
            for buffer in _leaves(tree):
                if buffer.maker is instruction:
                    buffer.born = buffer.dies = index
                    buffers.append(buffer)
        self._settle_result(computation, values)
        for index, instruction in enumerate(order):
            for operand in instruction.operands:
                for buffer in _leaves(values[operand]):
                    buffer.dies = max(buffer.dies, index)
        for buffer in _leaves(values[computation.root]):
            buffer.dies = len(order)
        for index, instruction in enumerate(order):
            if self._elementwise(instruction):
                _take_place(values, instruction, index)
        return self._find_peak(computation, order, buffers, values)

    def _find_peak(
        self,
        computation: Computation,
        order: list[Instruction],
        buffers: list[_Buffer],
        values: dict[str, _Tree],
    ) -> _Moment:
        changes = [0] * (len(order) + 2)
        counted = [buffer for buffer in buffers if buffer.size and not buffer.external]
        for buffer in counted:
            changes[buffer.born] += buffer.size
            # One that is overwritten ends where its successor begins.
            changes[buffer.dies + (buffer.into is None)] -= buffer.size
        best, at, inner_best, live = -1, 0, None, 0
        for index, instruction in enumerate(order):
            live += changes[index]
            inner = self._inner(instruction)
            total = live + (inner.bytes if inner else 0)
            if total > best:
                best, at, inner_best = total, index, inner
        alive = [
            self._described(buffer)
            for buffer in counted
            if buffer.born <= at <= buffer.dies - (buffer.into is not None)
        ]
        worst = order[at]
        return _Moment(
            bytes=best,
            during=(worst.name, *(inner_best.during if inner_best else ())),
            where=(inner_best.where if inner_best else "") or _scope(computation, worst).path,
            buffers=alive + (inner_best.buffers if inner_best else []),
            writers=self._writers(computation, values),
        )

    def _writers(self, computation: Computation, values: dict[str, _Tree]) -> list[Scope]:
        """Scope of what writes each element of a computation's result.

        A loop that saves what it carries from trip to trip has no scope for the saving; then the
        scope of what writes the carried value speaks for it.
        """
        results = list(_leaves(values[computation.root]))
        given = [
            leaf
            for instruction in computation
            if instruction.opcode == "parameter"
            for leaf in _leaves(values[instruction.name])
        ]
        scopes = [buffer.scope for buffer in results]
        for index, buffer in enumerate(results):
            if scopes[index].path or len(given) != len(results):
                continue
            carried = [given.index(x) for x in self._carried.get(buffer, ()) if x in given]
            scopes[index] = next((scopes[i] for i in carried if scopes[i].path), scopes[index])
        return scopes

    def _inner(self, instruction: Instruction) -> _Moment | None:
        """The worst moment of what an instruction runs."""
        moments = [self.moment(name) for name in _callees(instruction)]
        return max(moments, key=lambda moment: moment.bytes, default=None)

    def _settle_result(self, computation: Computation, values: dict[str, _Tree]) -> None:
        """A loop's next state, and what takes an argument's place, need no memory of their own."""
        is_entry = computation.name == self._module.entry
        for path, buffer in _paths(values[computation.root]):
            if not is_entry or path in self._module.donated:
                buffer.external = True

    def _value(
        self, computation: Computation, instruction: Instruction, values: dict[str, _Tree]
    ) -> _Tree:
        """The buffers in which an instruction's result lies."""
        opcode = instruction.opcode
        operands = [values[name] for name in instruction.operands]
        if opcode == "tuple":
            return operands
        if opcode == "get-tuple-element":
            return _at(operands[0], instruction.integers("index")[:1])
        if opcode in _SAME or opcode in _IN_PLACE:
            return operands[0]
        if opcode == "while":
            self._name_state(instruction, operands[0])
            return operands[0]
        if opcode.endswith("-done") and isinstance(operands[0], list):
            return _finished(opcode, operands[0])
        tree = self._fresh(computation, instruction, instruction.shape)
        if opcode == "copy" and isinstance(tree, _Buffer) and isinstance(operands[0], _Buffer):
            self._copied[tree] = operands[0]
        elif opcode in ("parameter", "constant"):
            for buffer in _leaves(tree):
                buffer.external = True
        elif opcode.endswith("-start") and isinstance(tree, list):
            source = 1 if opcode == "copy-start" else 0
            if opcode != "all-reduce-start":
                tree[source] = operands if isinstance(tree[source], list) else operands[0]
        elif opcode.startswith("fusion"):
            tree = self._updated(instruction, operands, tree)
        for path, operand, inside in _ALIASING.findall(instruction.attributes):
            old = _at(operands[int(operand)], _numbers(inside))
            tree = _replaced(tree, _numbers(path), old)
        return tree

    def _fresh(self, computation: Computation, instruction: Instruction, shape: Shape) -> _Tree:
        if shape.elements is not None:
            return [self._fresh(computation, instruction, element) for element in shape.elements]
        size = shape.bytes if shape.memory_space == 0 else 0
        return _Buffer(size, shape, instruction, _scope(computation, instruction) if size else _NO)

    def _updated(self, instruction: Instruction, operands: list[_Tree], tree: _Tree) -> _Tree:
        """A fusion that ends in an update writes it into its operand."""
        callee = self._module.computations[callee_name(instruction)]
        root = callee.instructions[callee.root]
        outputs = callee.operands(root) if root.opcode == "tuple" else [root]
        for index, output in enumerate(outputs):
            target = _updated_parameter(callee, output)
            if target is not None:
                old = operands[target]
                if isinstance(old, _Buffer) and old.size == output.shape.bytes:
                    if not old.scope.path:
                        old.scope = _leaf_scope(tree, index)
                        others = [x for x in operands if isinstance(x, _Buffer)]
                        self._carried[old] = [self._copied.get(x, x) for x in others]
                    tree = _replaced(tree, (index,) if root.opcode == "tuple" else (), old)
        return tree

    def _name_state(self, loop: Instruction, state: _Tree) -> None:
        """Buffers that a loop fills are named by what fills them."""
        for body in loop.called["body"]:
            writers = self.moment(body).writers
            for buffer, writer in zip(_leaves(state), writers, strict=True):
                if writer.path and (not buffer.scope.path or writer.phase == "backward"):
                    buffer.scope = writer

    def _elementwise(self, instruction: Instruction) -> bool:
        if instruction.opcode in _ELEMENTWISE:
            return True
        if instruction.opcode != "fusion" or "kind=kLoop" not in instruction.attributes:
            return False
        callee = self._module.computations[callee_name(instruction)]
        return not any(inner.opcode in ("dot", "convolution", "reduce") for inner in callee)

    def _described(self, buffer: _Buffer) -> LiveBuffer:
        opcode = buffer.maker.opcode.removesuffix("-start").removesuffix("-done")
        dims = tuple(buffer.shape.dims)
        category: Category = "activations" if buffer.scope.path else "other"
        if opcode in KINDS:
            category = "collectives"
        elif buffer.scope.phase == "backward" and dims in self._parameters:
            category = "gradients"
        return LiveBuffer(
            bytes=buffer.size,
            shape=f"{buffer.shape.dtype}[{','.join(str(dim) for dim in dims)}]",
            category=category,
            where=buffer.scope.path,
            phase=buffer.scope.phase,
            name=buffer.maker.name,
        )


_NO = Scope("", "forward")


def _scope(computation: Computation, instruction: Instruction) -> Scope:
    own = parse_scope(instruction.op_name)
    return own if own.path else nearest_scope(computation, instruction, upwards=True) or own


def _callees(instruction: Instruction) -> list[str]:
    """Computations that an instruction runs and that have buffers of their own."""
    called = instruction.called
    if instruction.opcode == "while":
        return [*called["body"], *called["condition"]]
    if instruction.opcode == "conditional":
        return [name for role in _BRANCHES for name in called.get(role, ())]
    return [callee_name(instruction)] if instruction.opcode == "call" else []


def _take_place(values: dict[str, _Tree], instruction: Instruction, index: int) -> None:
    """Let an elementwise result lie where an operand of its size ends."""
    for new in _leaves(values[instruction.name]):
        if new.maker is not instruction or new.external or not new.size:
            continue
        for operand in instruction.operands:
            old = values[operand]
            if not isinstance(old, _Buffer) or old.external or old.into is not None:
                continue
            if old.dies == index and old.size == new.size and old.born < index:
                old.into = new
                break


def _updated_parameter(callee: Computation, output: Instruction) -> int | None:
    """Number of the parameter into which a fused computation writes an update."""
    while output.opcode in ("bitcast", "copy"):
        output = callee.instructions[output.operands[0]]
    if output.opcode in _IN_PLACE:
        output = callee.instructions[output.operands[0]]
        while output.opcode == "bitcast":
            output = callee.instructions[output.operands[0]]
    return int(output.literal) if output.opcode == "parameter" else None


def _finished(opcode: str, started: list[_Tree]) -> _Tree:
    """What a done returns of its start: (result, source, ...) of a copy, else (sources, result)."""
    if opcode == "all-reduce-done":
        return started
    return started[0 if opcode == "copy-done" else 1]


def _leaves(tree: _Tree) -> Iterator[_Buffer]:
    if isinstance(tree, list):
        for element in tree:
            yield from _leaves(element)
    else:
        yield tree


def _paths(tree: _Tree, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], _Buffer]]:
    if isinstance(tree, list):
        for index, element in enumerate(tree):
            yield from _paths(element, (*path, index))
    else:
        yield path, tree


def _at(tree: _Tree, path: tuple[int, ...]) -> _Tree:
    for index in path:
        assert isinstance(tree, list)
        tree = tree[index]
    return tree


def _replaced(tree: _Tree, path: tuple[int, ...], value: _Tree) -> _Tree:
    if not path:
        return value
    assert isinstance(tree, list)
    tree = list(tree)
    tree[path[0]] = _replaced(tree[path[0]], path[1:], value)
    return tree


def _leaf_scope(tree: _Tree, index: int) -> Scope:
    leaves = list(_leaves(tree))
    return leaves[min(index, len(leaves) - 1)].scope


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _summed(pairs: Iterator[tuple[str, int]]) -> dict[str, int]:
    totals: dict[str, int] = {}
    for name, size in pairs:
        totals[name] = totals.get(name, 0) + size
    return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))
