"""How long one operation takes on one device: a roofline with a few global constants.

An operation takes the longer of its computing time (FLOPs over what the matrix units achieve) and
its memory time (bytes over what main memory achieves), plus a fixed overhead. The TPU compiler
writes its own estimate, in cycles, next to each fusion; where it did, that is the time.

`CostModel` holds every constant that is not in the hardware catalogue. They are global (no constant
belongs to one program or one machine), and reasoned from published micro-benchmarks, not fitted.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from meshes.hardware import Hardware
from paxlike.analysis.cost import Cost
from paxlike.analysis.hlo import Instruction, dtype_bits

Bound = Literal["compute", "memory", "overhead"]
OpClass = Literal["matmul", "kernel", "other"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """Constants of the prediction. Fractions are of the catalogue's figures, times in seconds.

    Attributes:
        version: of these values; it is part of every prediction's basis.
        large_matmul: of peak FLOP/s, products whose dims are about 1000 or more. GEMM tables: 0.87
            (A100), 0.80 (H100), 0.78 (B200), 0.90 (TPU v6e) at best; the shapes of models lose
            some of it.
        medium_matmul: likewise, a smallest dim of some hundreds: too few tiles to fill the device.
        skinny_matmul: likewise, below that; such products wait for memory anyway.
        kernel: of peak FLOP/s, attention and other kernels (FlashAttention-2 on A100: 0.6-0.7
            forward and backward; on H100 0.34; FlashAttention-3 forward 0.6).
        hbm: of main memory's bandwidth, large copies (TPU v6e 0.83, tpu7x 0.87, A800 0.85).
        gpu_kernel_seconds: start and tail of a kernel that the next one does not hide.
        tpu_cycles: of the TPU compiler's estimates, how many cycles really pass.
        nvlink: of NVLink's data-sheet bandwidth (ring algorithms on 8 H100 without in-network
            reduction: 370 of 450 GB/s).
        pcie: of PCIe's (8 H100: 35-45 of 64 GB/s).
        network: of InfiniBand's, Ethernet's and the data centre network's.
        ici: of a TPU link's (tpu7x all-gather: 180 of 2 x 90 GB/s along an axis).
        chip_link: bandwidth between the two devices of a TPU chip over that of one ICI link.
        gpu_collective_seconds: start of a collective before its first byte moves (NCCL's base of
            6.6 us for the ring and a kernel launch).
        tpu_collective_seconds: likewise. Decode on 16 TPU v5e (85 % of its memory bandwidth beside
            160 all-reduces a step) leaves 6 us for each, hops included.
    """

    version: str = "v1"
    large_matmul: float = 0.75
    medium_matmul: float = 0.55
    skinny_matmul: float = 0.40
    kernel: float = 0.50
    hbm: float = 0.85
    gpu_kernel_seconds: float = 1.5e-6
    tpu_cycles: float = 1.0
    nvlink: float = 0.80
    pcie: float = 0.65
    network: float = 0.85
    ici: float = 0.95
    chip_link: float = 6.0
    gpu_collective_seconds: float = 1.2e-5
    tpu_collective_seconds: float = 4e-6

    @property
    def basis(self) -> str:
        """What a prediction rests on, as reports say it."""
        return f"compiled schedule + cost model {self.version}"


DEFAULT = CostModel()


@dataclasses.dataclass(frozen=True, slots=True)
class OpTime:
    """Seconds of one run of an operation, what limits it, and what kind it is."""

    seconds: float
    bound: Bound
    kind: OpClass


def op_time(
    instruction: Instruction, cost: Cost, hardware: Hardware, model: CostModel = DEFAULT
) -> OpTime:
    """Return how long one run of an operation takes.

    Args:
        instruction: the operation; a fusion is one.
        cost: from `cost.cost_of`.
        hardware: of the device.
        model: the constants.
    """
    kind = op_class(instruction, cost)
    computing = 0.0
    if cost.flops:
        fraction = model.kernel if kind == "kernel" else _matmul_fraction(cost, model)
        computing = cost.flops / (fraction * hardware.peak_flops(cost.dtype))
    moving = cost.bytes / (model.hbm * hardware.hbm_bytes_per_second)
    bound: Bound = "compute" if computing >= moving and computing else "memory"
    cycles = estimated_cycles(instruction) if hardware.kind == "tpu" else 0
    if cycles:
        return OpTime(model.tpu_cycles * cycles / hardware.clock_hertz, bound, kind)
    longest = max(computing, moving)
    if longest == 0:
        return OpTime(0.0, "overhead", kind)
    overhead = model.gpu_kernel_seconds if hardware.kind == "gpu" else 0.0
    return OpTime(longest + overhead, "overhead" if overhead > longest else bound, kind)


def op_class(instruction: Instruction, cost: Cost) -> OpClass:
    """What kind of operation it is; a library's GEMM is a matmul, though a custom call."""
    if not cost.flops:
        return "other"
    is_kernel = instruction.opcode == "custom-call" and "gemm" not in instruction.attributes
    return "kernel" if is_kernel else "matmul"


def estimated_cycles(instruction: Instruction) -> int:
    """The TPU compiler's estimate; 0 where it made none."""
    before, found, after = instruction.backend_config.partition('"estimated_cycles":"')
    return int(after.partition('"')[0]) if found else 0


def _matmul_fraction(cost: Cost, model: CostModel) -> float:
    """Efficiency by shape class.

    FLOPs over elements moved is twice the harmonic sum of a product's dims M, N and K, which the
    smallest of them rules: it tells the class without asking for the dims.
    """
    elements = cost.bytes * 8 / max(1, dtype_bits(cost.dtype) if cost.dtype else 16)
    smallest = cost.flops / (2 * elements) if elements else float("inf")
    if smallest >= 256:
        return model.large_matmul
    return model.medium_matmul if smallest >= 64 else model.skinny_matmul
