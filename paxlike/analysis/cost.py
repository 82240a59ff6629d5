"""FLOPs and main-memory bytes of every operation of a compiled program, loops multiplied.

XLA's own `cost_analysis()` counts a loop body once and is absent for compile-only GPU targets, so
the numbers come from the HLO: FLOPs of matrix products and convolutions wherever they hide (in
fusions, in loops, as the convolutions into which the TPU compiler turns products, in library
calls), bytes from the operands and results that pass between operations.

Conventions: a multiply-add is two FLOPs; elementwise work and reductions count no FLOPs. An
operand that a fusion only slices counts as its slices, an update in place as its update: a scan
over stacked weights reads one layer a trip. Arrays in on-chip or host memory count no bytes.

Limits: of a conditional's branches the one with most FLOPs + bytes counts. A custom call counts
FLOPs only if it is a known matrix product, states a cost estimate (Pallas' `cost_estimate`), or
`kernels` knows it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from paxlike.analysis.execution import Site, callee_name, walk
from paxlike.analysis.hlo import Computation, Instruction, Module, Shape
from paxlike.analysis.scopes import Phase, parse_scope

_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all iota "
    "partition-id replica-id opt-barrier add-dependency domain call-start async-start".split()
)
_MATMUL_CALLS = re.compile(r"__cublas\$|__onednn\$matmul|__cutlass\$|\$gemm|[Mm]at[Mm]ul")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_DIM_LABELS = re.compile(r"([\w?]+)_([\w?]+)->([\w?]+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of one run of one operation on one device.

    Attributes:
      flops: of its matrix products and convolutions.
      bytes: read from and written to the device's main memory.
      dtype: element type of the left operand of its largest product, "" without one.
    """

    flops: int = 0
    bytes: int = 0
    dtype: str = ""


Kernels = Mapping[str, Callable[[Sequence[Shape], Shape], Cost]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """An operation (a fusion is one) with the cost of all its `times` runs."""

    name: str
    opcode: str
    where: str
    phase: Phase
    times: int
    exact: bool
    flops: int
    bytes: int
    dtype: str


def operations(module: Module, kernels: Kernels | None = None) -> list[Operation]:
    """List the operations that cost FLOPs or bytes, in the order of the schedule.

    Args:
      module: the program.
      kernels: cost of custom calls: part of the call's target or op name -> function of operand
        shapes and result shape that returns the `Cost` of one run.
    """
    kernels = kernels or {}
    rows = []
    for site in walk(module, weigh=lambda branch: _weight(module, branch, kernels)):
        if site.fused:
            continue
        cost = cost_of(module, site.computation, site.instruction, kernels)
        if cost.flops or cost.bytes:
            scope = parse_scope(site.instruction.op_name)
            rows.append(
                Operation(
                    name=site.instruction.name,
                    opcode=site.instruction.opcode,
                    where=scope.path,
                    phase=scope.phase,
                    times=site.times,
                    exact=site.exact,
                    flops=cost.flops * site.times,
                    bytes=cost.bytes * site.times,
                    dtype=cost.dtype,
                )
            )
    return rows


def stated(work: Mapping[str, Any]) -> Kernels:
    """Kernels whose cost is known beforehand: name -> anything with `flops` and `bytes`."""

    def kernel(known: Any) -> Callable[[Sequence[Shape], Shape], Cost]:
        return lambda operands, result: Cost(
            flops=known.flops,
            bytes=known.bytes,
            dtype=max(operands, key=lambda operand: operand.bytes).dtype,
        )

    return {name: kernel(known) for name, known in work.items()}


def flops(module: Module, kernels: Kernels | None = None) -> int:
    """Return the FLOPs of one call of the program on one device."""
    return sum(operation.flops for operation in operations(module, kernels))


def hbm_bytes(module: Module, kernels: Kernels | None = None) -> int:
    """Return the bytes that one call of the program moves through one device's main memory."""
    return sum(operation.bytes for operation in operations(module, kernels))


def cost_of(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    kernels: Kernels | None = None,
) -> Cost:
    """Return the cost of one run of an instruction, what it fuses included.

    Loops, conditionals and calls cost nothing themselves; what they run is in `execution.walk`.
    The finishing half of an asynchronous pair costs nothing.
    """
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith(("-done", "-update")):
        return Cost()
    operands = [operand.shape for operand in computation.operands(instruction)]
    if opcode == "custom-call":
        cost = _custom_call(instruction, operands, kernels or {})
        if operands and not cost.bytes:
            cost = dataclasses.replace(cost, bytes=_traffic(operands, instruction.shape))
        return cost
    count, dtype = _products(module, computation, instruction)
    if opcode.startswith("fusion"):
        moved = _fusion_bytes(module, instruction, operands)
    else:
        moved = _plain_bytes(instruction, operands)
    return Cost(flops=count, bytes=moved, dtype=dtype)


def _weight(module: Module, sites: list[Site], kernels: Kernels) -> float:
    costs = [
        (site.times, cost_of(module, site.computation, site.instruction, kernels))
        for site in sites
        if not site.fused
    ]
    return sum(times * (cost.flops + cost.bytes) for times, cost in costs)


def _products(
    module: Module, computation: Computation, instruction: Instruction
) -> tuple[int, str]:
    """FLOPs and dtype of the products in an instruction, fused computations included."""
    if instruction.opcode in ("dot", "convolution"):
        left, right = (operand.shape for operand in computation.operands(instruction)[:2])
        if instruction.opcode == "dot":
            contracted = [left.dims[d] for d in instruction.integers("lhs_contracting_dims")]
            return 2 * instruction.shape.size * math.prod(contracted), left.dtype
        return _convolution_flops(instruction, left, right), left.dtype
    if not instruction.opcode.startswith("fusion"):
        return 0, ""
    callee = module.computations[callee_name(instruction)]
    inner = [_products(module, callee, fused) for fused in callee]
    largest = max(inner, default=(0, ""))
    return sum(count for count, _ in inner), largest[1]


def _convolution_flops(instruction: Instruction, left: Shape, right: Shape) -> int:
    """Two FLOPs for each pair of kernel and input element that meet; padding and holes are free.

    The TPU compiler writes batched matrix products as convolutions whose window slides over the
    batch with dilation and padding, so the pairs that really meet have to be counted.
    """
    match = _DIM_LABELS.match(instruction.attribute("dim_labels"))
    assert match is not None, instruction.attributes
    inputs, kernel, outputs = match.groups()
    window = dict(
        part.split("=") for part in instruction.attribute("window").strip("{}").split() if part
    )
    meetings = 1
    for dim in sorted(label for label in kernel if label.isdigit()):
        index = int(dim)
        pad = _window(window, "pad", index, "0_0").split("_")[0]
        meetings *= _meetings(
            size=left.dims[inputs.index(dim)],
            kernel=right.dims[kernel.index(dim)],
            output=instruction.shape.dims[outputs.index(dim)],
            stride=int(_window(window, "stride", index, "1")),
            pad=int(pad),
            spread=int(_window(window, "lhs_dilate", index, "1")),
            dilation=int(_window(window, "rhs_dilate", index, "1")),
        )
    batch_groups = (instruction.integers("batch_group_count") or (1,))[0]
    batch = left.dims[inputs.index("b")] // batch_groups
    features = right.dims[kernel.index("i")] * right.dims[kernel.index("o")]
    return 2 * batch * features * meetings


def _window(window: Mapping[str, str], key: str, index: int, default: str) -> str:
    return window[key].split("x")[index] if key in window else default


def _meetings(
    *, size: int, kernel: int, output: int, stride: int, pad: int, spread: int, dilation: int
) -> int:
    """Count pairs of output and kernel position that meet an input element along one dim."""
    if kernel == 1 and stride == spread == 1 and pad == 0:
        return output
    position = np.arange(output)[:, None] * stride + np.arange(kernel) * dilation - pad
    inside = (position >= 0) & (position <= (size - 1) * spread) & (position % spread == 0)
    return int(inside.sum())


def _custom_call(instruction: Instruction, operands: list[Shape], kernels: Kernels) -> Cost:
    target = _TARGET.search(instruction.attributes)
    name = target.group(1) if target else ""
    for key, kernel in kernels.items():
        if key in name or key in instruction.op_name:
            return kernel(operands, instruction.shape)
    if _MATMUL_CALLS.search(name) and len(operands) >= 2:
        output = next(instruction.shape.arrays())
        return Cost(flops=_matmul_flops(instruction, operands, output), dtype=operands[0].dtype)
    estimate = instruction.config().get("custom_call_config", {}).get("cost_estimate", {})
    return Cost(
        flops=int(estimate.get("flops", 0)),
        bytes=int(estimate.get("bytes_accessed", 0)),
        dtype=operands[0].dtype if estimate and operands else "",
    )


def _matmul_flops(instruction: Instruction, operands: list[Shape], output: Shape) -> int:
    config = instruction.config().get("gemm_backend_config", {})
    dims = config.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions")
    if dims:
        return 2 * output.size * math.prod(operands[0].dims[int(dim)] for dim in dims)
    # Sizes B M K, B K N and B M N: the contracted K follows from them, B from the leading dims.
    batch = math.prod(output.dims[:-2])
    return (
        2
        * output.size
        * math.isqrt(operands[0].size * operands[1].size // (output.size * batch or 1))
    )


def _traffic(operands: Sequence[Shape], result: Shape) -> int:
    """Bytes of all arrays that lie in main memory."""
    shapes = [*operands, result]
    return sum(_main_bytes(array) for shape in shapes for array in shape.arrays())


def _main_bytes(shape: Shape) -> int:
    return shape.bytes if shape.memory_space == 0 else 0


def _plain_bytes(instruction: Instruction, operands: list[Shape]) -> int:
    opcode, result = instruction.opcode.removesuffix("-start"), instruction.shape
    if opcode != instruction.opcode and result.elements:
        # Starts return (result, source, ...) for a copy, and (sources, result, ...) for the rest.
        result = result.elements[0 if opcode == "copy" else 1]
    if opcode in ("dynamic-slice", "slice", "gather"):
        return (0 if operands[0].memory_space else result.bytes) + _main_bytes(result)
    if opcode in ("dynamic-update-slice", "scatter"):
        update = operands[1] if opcode == "dynamic-update-slice" else operands[-1]
        return _main_bytes(update) + (0 if result.memory_space else update.bytes)
    return _traffic(operands, result)


def _fusion_bytes(module: Module, instruction: Instruction, operands: list[Shape]) -> int:
    callee = module.computations[callee_name(instruction)]
    total = sum(
        min(_read(module, callee, parameter), operands[int(parameter.literal)].bytes)
        for parameter in callee
        if parameter.opcode == "parameter" and operands[int(parameter.literal)].memory_space == 0
    )
    root = callee.instructions[callee.root]
    for output in callee.operands(root) if root.opcode == "tuple" else [root]:
        written = _behind_bitcasts(callee, output)
        if written.opcode == "parameter":
            continue  # passed through in place
        if written.opcode == "dynamic-update-slice" and output.shape.memory_space == 0:
            total += callee.operands(written)[1].shape.bytes
        else:
            total += _traffic([], output.shape)
    return total


def _read(module: Module, callee: Computation, value: Instruction) -> int:
    """Bytes that a fused computation reads of a parameter, or of a view of one."""
    total = 0
    for user in callee.users(value):
        first = user.operands[0] == value.name and value.name not in user.operands[1:]
        if user.opcode in ("dynamic-slice", "slice", "gather") and first:
            total += user.shape.bytes
        elif user.opcode == "bitcast":
            total += _read(module, callee, user)
        elif user.opcode == "fusion":
            inner = module.computations[callee_name(user)]
            total += sum(
                _read(module, inner, parameter)
                for parameter in inner
                if parameter.opcode == "parameter"
                and user.operands[int(parameter.literal)] == value.name
            )
        elif not (user.opcode == "dynamic-update-slice" and first) and user.opcode != "tuple":
            total += value.shape.bytes
    return total


def _behind_bitcasts(callee: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode == "bitcast":
        instruction = callee.instructions[instruction.operands[0]]
    return instruction
