"""Read optimised, scheduled HLO text into typed dataclasses.

The compiled program is the only honest account of what a plan does: which collectives run, how
often, and on what. `parse` reads the text of `compiled.as_text()` in one pass over its lines
(linear time). Understood: the text of XLA's CPU, GPU and TPU compilers as shipped with jax 0.10.2
to 0.12.

Limits: layouts are dropped, except the memory space; constants keep only short literals; control
dependencies are not read.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

_BITS = re.compile(r"[a-z]+(\d+)")
_WIDTHS = {"pred": 8, "token": 0, "opaque": 0}
_SHAPE_TOKEN = re.compile(r"([()])|([a-z][a-z0-9]*)\[([^\]]*)\](\{[^}]*\})?")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")
_COMMENT = re.compile(r"/\*.*?\*/")
# Kernels' metadata is printed over several lines: {\n"key":"value",\n "key":"value"\n }.
_CONTINUATION = re.compile(r'\n(?= ?["}]\S)(?!\}[ ,\n])')
_PARENTHESES = re.compile(r"[()]")
_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.\-]+)\s*\(.*->.*\{\s*$")
_ASSIGNMENT = re.compile(r"\s+(ROOT\s+)?%?([\w.\-]+) = ")
_NAME = re.compile(r"%([\w.\-]+)")
_DONATED = re.compile(r"\{([\d, ]*)\}: \((\d+), \{\}, m[a-z]+-alias\)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation|branch_computations|"
    r"called_computations|async_execution_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """An array shape, or a tuple of shapes (`elements` is then not None).

    `memory_space` is the number in the layout's S(n): 0 is the device's main memory; the TPU
    compiler writes 1 for on-chip vector memory, and 5 is host memory.
    """

    dtype: str
    dims: tuple[int, ...] = ()
    elements: tuple[Shape, ...] | None = None
    memory_space: int = 0

    @property
    def size(self) -> int:
        """Number of elements of an array shape."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Size in bytes, sub-byte types packed; a tuple is the sum of its elements."""
        if self.elements is not None:
            return sum(element.bytes for element in self.elements)
        return -(-self.size * dtype_bits(self.dtype) // 8)

    def arrays(self) -> Iterator[Shape]:
        """Yield the array shapes of a possibly nested tuple, in order."""
        if self.elements is None:
            yield self
        else:
            for element in self.elements:
                yield from element.arrays()


@functools.cache
def dtype_bits(dtype: str) -> int:
    """Return the width in bits of one element of an HLO type name (`bf16` -> 16, `s4` -> 4)."""
    if dtype in _WIDTHS:
        return _WIDTHS[dtype]
    match = _BITS.match(dtype)
    if match is None:
        raise ValueError(f"dtype: {dtype!r} is not an HLO element type such as f32, s4 or f8e4m3fn")
    return int(match.group(1))


@functools.lru_cache(maxsize=65536)
def parse_shape(text: str) -> Shape:
    """Parse a shape such as `bf16[2,<=8]{1,0:T(8,128)S(1)}` or `(f32[], (s32[4], token[]))`."""
    stack: list[list[Shape]] = [[]]
    for match in _SHAPE_TOKEN.finditer(text):
        bracket, dtype, dims, layout = match.groups()
        if bracket == "(":
            stack.append([])
        elif bracket == ")":
            elements = tuple(stack.pop())
            stack[-1].append(Shape("tuple", elements=elements))
        else:
            sizes = tuple(int(d.lstrip("<= ")) for d in dims.split(",") if d.strip())
            space = _MEMORY_SPACE.search(layout) if layout else None
            stack[-1].append(Shape(dtype, sizes, memory_space=int(space.group(1)) if space else 0))
    if len(stack) != 1 or len(stack[0]) != 1:
        raise ValueError(f"shape: {text!r} is not one HLO shape such as f32[8,4]{{1,0}}")
    return stack[0][0]


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of a computation.

    Attributes:
      name: unique in the module, without the `%`.
      opcode: as printed, so also `all-gather-start` or `fusion-done`.
      shape: of the result; async starts and variadic operations have tuples.
      operands: names of instructions of the same computation.
      called: role -> names of computations (`body`, `condition`, `calls`, `to_apply`, ...).
      literal: what stood in the parentheses of a constant or parameter, shortened.
      attributes: the raw text after the operands, without metadata and backend config.
      op_name: `op_name` of the metadata, "" if there is none.
      backend_config: raw text; `config` parses it.
      is_root: whether its value is the computation's.
    """

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    called: Mapping[str, tuple[str, ...]]
    literal: str
    attributes: str
    op_name: str
    backend_config: str
    is_root: bool

    def attribute(self, name: str) -> str:
        """Return the text of attribute `name`, brackets balanced, or "" where it is absent."""
        start = self.attributes.find(f" {name}=")
        if start < 0:
            return ""
        start += len(name) + 2
        depth = 0
        for end in range(start, len(self.attributes)):
            character = self.attributes[end]
            if character in "{[(":
                depth += 1
            elif character in "}])":
                depth -= 1
            elif character == "," and depth == 0:
                return self.attributes[start:end]
        return self.attributes[start:]

    def integers(self, name: str) -> tuple[int, ...]:
        """Return the integers in attribute `name`, such as `dimensions={0,2}`."""
        return tuple(int(number) for number in re.findall(r"-?\d+", self.attribute(name)))

    def config(self) -> dict[str, Any]:
        """Return the backend config parsed as JSON; {} where it is absent or no JSON object."""
        if not self.backend_config.startswith("{"):
            return {}
        try:
            return json.loads(self.backend_config)
        except json.JSONDecodeError:
            return {}


@dataclasses.dataclass(frozen=True)
class Computation:
    """A computation: its instructions by name, in the order of the text (the schedule)."""

    name: str
    instructions: Mapping[str, Instruction]
    root: str

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """Return the instructions that produce the operands."""
        return [self.instructions[name] for name in instruction.operands]

    def users(self, instruction: Instruction) -> list[Instruction]:
        """Return the instructions that take `instruction` as an operand."""
        return self._users.get(instruction.name, [])

    @functools.cached_property
    def _users(self) -> dict[str, list[Instruction]]:
        users: dict[str, list[Instruction]] = {}
        for user in self:
            for name in dict.fromkeys(user.operands):
                users.setdefault(name, []).append(user)
        return users


@dataclasses.dataclass(frozen=True, slots=True)
class Module:
    """A parsed HLO module. `num_devices` is partitions x replicas.

    `donated` maps an element of the entry's result (its index path) to the parameter whose memory
    it takes.
    """

    name: str
    entry: str
    computations: Mapping[str, Computation]
    num_partitions: int
    num_replicas: int
    is_scheduled: bool
    donated: Mapping[tuple[int, ...], int] = dataclasses.field(default_factory=dict)

    @property
    def num_devices(self) -> int:
        return self.num_partitions * self.num_replicas


def parse(text: str) -> Module:
    """Parse the text of an HLO module.

    Args:
      text: what `jax.stages.Compiled.as_text()` returns.

    Returns:
      The module, computations in the order of the text.

    Raises:
      ValueError: `text` holds no `HloModule` header or no entry computation, or a line of a
        computation is not an instruction (the line is quoted).
    """
    header = re.search(r"^HloModule ([^\s,]+)(.*)$", text, re.MULTILINE)
    if header is None:
        raise ValueError(f"text: no 'HloModule' header in {text[:60]!r}; pass compiled.as_text()")
    computations: dict[str, Computation] = {}
    entry = current = root = ""
    instructions: dict[str, Instruction] = {}
    for line in _CONTINUATION.sub(" ", text).splitlines():
        if current:
            if line.startswith("}"):
                computations[current] = Computation(current, instructions, root)
                current = ""
            elif " = " in line:
                instruction = _parse_instruction(line)
                instructions[instruction.name] = instruction
                if instruction.is_root:
                    root = instruction.name
        elif line.endswith("{") and (match := _HEADER.match(line)):
            current, instructions, root = match.group(2), {}, ""
            if match.group(1):
                entry = current
    if not entry:
        raise ValueError("text: no ENTRY computation; the HLO text is truncated or not a module's")
    return Module(
        name=header.group(1),
        entry=entry,
        computations=computations,
        num_partitions=_header_count(header.group(2), "num_partitions"),
        num_replicas=_header_count(header.group(2), "replica_count"),
        is_scheduled="is_scheduled=true" in header.group(2),
        donated={
            tuple(int(number) for number in re.findall(r"\d+", index)): int(parameter)
            for index, parameter in _DONATED.findall(header.group(2))
        },
    )


def _header_count(header: str, key: str) -> int:
    match = re.search(rf"\b{key}=(\d+)", header)
    return int(match.group(1)) if match else 1


def _closing(text: str, start: int) -> int:
    """Index after the parenthesis that closes the one at `start`."""
    depth = 0
    for match in _PARENTHESES.finditer(text, start):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.end()
    return len(text)


def _parse_instruction(line: str) -> Instruction:
    match = _ASSIGNMENT.match(line)
    if match is None:
        raise ValueError(f"text: not an HLO instruction: {line.strip()[:120]!r}")
    begin = match.end()
    end = _closing(line, begin) if line[begin] == "(" else line.find(" ", begin)
    opening = line.find("(", end)
    if end < 0 or opening < 0:
        raise ValueError(f"text: not an HLO instruction: {line.strip()[:120]!r}")
    opcode = line[end + 1 : opening]
    closing = _closing(line, opening)
    inside = line[opening + 1 : closing - 1]
    tail = line[closing:]
    tail, _, config = tail.partition(", backend_config=")
    tail, _, metadata = tail.partition(", metadata={")
    op_name = _OP_NAME.search(metadata) if metadata else None
    leaf = opcode in ("constant", "parameter")
    return Instruction(
        name=match.group(2),
        opcode=opcode,
        shape=parse_shape(line[begin:end]),
        operands=() if leaf else _operand_names(inside),
        called=_called(tail) if "=" in tail else {},
        literal=inside[:64] if leaf else "",
        attributes=tail,
        op_name=op_name.group(1).replace("\\", "") if op_name else "",
        backend_config=config,
        is_root=match.group(1) is not None,
    )


def _operand_names(text: str) -> tuple[str, ...]:
    if "%" in text:
        return tuple(_NAME.findall(text))
    # Printed without `%`: the name is the last word between commas outside brackets.
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", _COMMENT.sub("", text))
    return tuple(part.split()[-1] for part in text.split(",") if part.strip())


def _called(attributes: str) -> dict[str, tuple[str, ...]]:
    return {
        role: tuple(re.findall(r"[\w.\-]+", names)) for role, names in _CALLED.findall(attributes)
    }
