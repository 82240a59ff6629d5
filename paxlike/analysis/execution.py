"""Walk a compiled program as one device executes it.

A scanned model shows one layer in its HLO, and a scan inside a scan shows one step of both: counts
and bytes mean nothing until trip counts are multiplied in. `trip_count` finds how often a while
loop runs; `walk` lists every instruction with the number of times it runs.

Limits: a loop whose condition depends on data counts once and is marked not exact; of a
conditional one branch counts.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable

from paxlike.analysis.hlo import Computation, Instruction, Module

_INTEGER = re.compile(r"\{*(-?\d+)\}*$")
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_BRANCHES = ("branch_computations", "true_computation", "false_computation")
_CALLS = frozenset({"fusion", "call", "fusion-start", "call-start", "async-start"})
_COPIES = frozenset({"copy", "bitcast", "convert", "reshape", "copy-start", "copy-done"})
_FLIPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}
_STATE = "loop state"  # stands for the parameter of a loop's condition or body


@dataclasses.dataclass(frozen=True, slots=True)
class Trips:
    """How often a loop's body runs. Not `exact`: start or step assumed (0, 1), or count unknown."""

    count: int
    exact: bool


def trip_count(module: Module, computation: Computation, loop: Instruction) -> Trips:
    """Return how often the body of a while loop runs.

    XLA's CPU and GPU compilers write `known_trip_count`. The TPU compiler does not: there the
    bound is the constant that the condition compares the induction variable with, the start
    comes from the loop's operand, and the step from what the body adds.

    Args:
      module: the program.
      computation: the one that holds `loop`.
      loop: an instruction with opcode `while`.

    Returns:
      The count; 1 and not exact if the condition depends on data.
    """
    known = _TRIP_COUNT.search(loop.backend_config)
    if known:
        return Trips(int(known.group(1)), exact=True)
    condition = module.computations[loop.called["condition"][0]]
    body = module.computations[loop.called["body"][0]]
    direction, left, right = _comparison(module, condition, condition.root, (_STATE,))
    if isinstance(left, int):
        direction, left, right = _FLIPPED.get(direction, ""), right, left
    if not isinstance(left, _Element) or direction not in _FLIPPED:
        return Trips(1, exact=False)
    if isinstance(right, _Element) and _next(module, body, right.index) == right:
        right = _initial(module, computation, loop, right.index)
    if not isinstance(right, int):
        return Trips(1, exact=False)
    start = _initial(module, computation, loop, left.index)
    following = _next(module, body, left.index)
    step = following.offset if isinstance(following, _Element) else 0
    exact = isinstance(start, int) and step != 0
    step = step or (-1 if direction in ("GT", "GE") else 1)
    first = (start if isinstance(start, int) else 0) + left.offset
    distance = right - first + {"LE": 1, "GE": -1}.get(direction, 0)
    return Trips(max(0, -(-distance // step)), exact=exact)


@dataclasses.dataclass(frozen=True, slots=True)
class _Element:
    """Element `index` of the loop state, plus `offset`."""

    index: int
    offset: int = 0


_Value = int | str | _Element | None


def _evaluate(
    module: Module, computation: Computation, name: str, arguments: tuple[_Value, ...]
) -> _Value:
    """Evaluate a scalar integer as a constant or an offset from the loop state, if it is one."""
    instruction = computation.instructions[name]
    opcode, shape = instruction.opcode, instruction.shape
    if opcode == "parameter":
        index = int(instruction.literal)
        return arguments[index] if index < len(arguments) else None
    if opcode != "copy-start" and (shape.size != 1 or shape.dtype[0] not in "su"):
        return None
    if opcode == "constant":
        match = _INTEGER.match(instruction.literal)
        return int(match.group(1)) if match else None
    if opcode == "get-tuple-element":
        source = computation.instructions[instruction.operands[0]]
        index = instruction.integers("index")[0]
        if source.opcode == "tuple":
            return _evaluate(module, computation, source.operands[index], arguments)
        if source.opcode == "parameter":
            state = _evaluate(module, computation, source.name, arguments)
            return _Element(index) if state == _STATE else None
        return None
    if opcode not in _COPIES | {"fusion", "call", "add", "subtract"}:
        return None
    values = tuple(_evaluate(module, computation, o, arguments) for o in instruction.operands)
    if opcode in _COPIES:
        return values[0]
    if opcode in ("fusion", "call"):
        callee = module.computations[callee_name(instruction)]
        return _evaluate(module, callee, callee.root, values)
    return _sum(values[0], values[1], -1 if opcode == "subtract" else 1)


def _sum(left: _Value, right: _Value, sign: int) -> _Value:
    if isinstance(left, int) and sign == 1:
        left, right = right, left
    if not isinstance(right, int):
        return None
    if isinstance(left, _Element):
        return _Element(left.index, left.offset + sign * right)
    return left + sign * right if isinstance(left, int) else None


def _comparison(
    module: Module, computation: Computation, name: str, arguments: tuple[_Value, ...]
) -> tuple[str, _Value, _Value]:
    """Return direction and both sides of the comparison that computes `name`, through fusions."""
    instruction = computation.instructions[name]
    if instruction.opcode not in ("compare", "fusion", "call"):
        return "", None, None
    values = tuple(_evaluate(module, computation, o, arguments) for o in instruction.operands)
    if instruction.opcode == "compare":
        return instruction.attribute("direction"), values[0], values[1]
    callee = module.computations[callee_name(instruction)]
    return _comparison(module, callee, callee.root, values)


def _initial(module: Module, computation: Computation, loop: Instruction, index: int) -> _Value:
    """Element `index` of the state with which the loop starts."""
    state = computation.instructions[loop.operands[0]]
    if state.opcode != "tuple":
        return None
    return _evaluate(module, computation, state.operands[index], ())


def _next(module: Module, body: Computation, index: int) -> _Value:
    """Element `index` of the state after one trip."""
    root = body.instructions[body.root]
    if root.opcode != "tuple":
        return None
    return _evaluate(module, body, root.operands[index], (_STATE,))


def callee_name(instruction: Instruction) -> str:
    """Return the computation that a fusion, call or async start runs, "" if it names none."""
    for role in ("calls", "to_apply", "async_execution_computation", "called_computations"):
        if role in instruction.called:
            return instruction.called[role][0]
    return ""


@dataclasses.dataclass(frozen=True, slots=True)
class Site:
    """An instruction as one device executes it.

    Attributes:
      instruction: the instruction.
      computation: the one that holds it.
      times: how often it runs in one call of the program, trip counts of nested loops multiplied.
      in_loop: whether a while loop encloses it.
      exact: False if the trip count of an enclosing loop is not exact (`trip_count`).
      fused: whether it is inside a fusion, so that its operands need not pass through memory.
      caller: the site whose instruction calls this computation; None in the entry.
    """

    instruction: Instruction
    computation: Computation
    times: int
    in_loop: bool
    exact: bool
    fused: bool
    caller: Site | None


def walk(module: Module, weigh: Callable[[list[Site]], float] = len) -> list[Site]:
    """List what one device executes, in the order of the schedule, callees after their caller.

    Loop bodies appear once with their trip count in `times`. Of a conditional's branches only the
    one that `weigh` rates highest appears (the first of equals): a device takes one branch, and
    the slowest device sets the pace.
    """
    return _expand(module, weigh, module.entry, times=1, in_loop=False, exact=True)


def _expand(
    module: Module,
    weigh: Callable[[list[Site]], float],
    name: str,
    *,
    times: int,
    in_loop: bool,
    exact: bool,
    fused: bool = False,
    caller: Site | None = None,
) -> list[Site]:
    sites = []
    computation = module.computations[name]
    for instruction in computation:
        site = Site(instruction, computation, times, in_loop, exact, fused, caller)
        sites.append(site)
        opcode, called = instruction.opcode, instruction.called
        inherited = {"times": times, "in_loop": in_loop, "exact": exact, "fused": fused}
        expand = functools.partial(_expand, module, weigh, caller=site, **inherited)
        if opcode == "while":
            trips = trip_count(module, computation, instruction)
            expand = functools.partial(expand, in_loop=True, exact=exact and trips.exact)
            sites += expand(called["condition"][0], times=times * (trips.count + 1))
            sites += expand(called["body"][0], times=times * trips.count)
        elif opcode == "conditional":
            branches = [expand(branch) for role in _BRANCHES for branch in called.get(role, ())]
            sites += max(branches, key=weigh, default=[])
        elif opcode in _CALLS and (callee := callee_name(instruction)):
            sites += expand(callee, fused=fused or opcode.startswith("fusion"))
    return sites
