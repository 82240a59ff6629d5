"""Hardware as data: what one device computes, holds and sends, each figure with its source.

Figures are of one JAX device: a TPU chip (half a chip on tpu7x, whose two halves JAX sees as two
devices) or a GPU. FLOP/s are dense; bandwidths are those of data sheets and run in one direction:
what programs achieve of them is a matter of calibration, not of this table. Free of JAX.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Literal

GIB = 2**30
MIB = 2**20

GOOGLE = "Google Cloud TPU product pages"
BOOK = "the JAX scaling book"
JAX = "the TPU table of jax.experimental.pallas"
NVIDIA = "NVIDIA data sheets"
XLA = "XLA's GPU target specs"
NCCL = "NCCL's tuner constants, LL protocol"
MXU = "derived: peak FLOP/s over the operations of all MXUs in a cycle"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """One direction of a connection, shared by nobody else.

    Attributes:
        bytes_per_second: what it carries.
        latency_seconds: of one hop.
        source: where both figures stand.
    """

    bytes_per_second: float
    latency_seconds: float
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Torus:
    """The TPU's network of neighbours: two links (one each way) for each axis of a chip.

    Attributes:
        num_axes: 2 or 3.
        link: one of the 2 * num_axes links of a chip.
        wrap_unit: an axis closes to a ring if its size is a multiple of this; otherwise it is a
            line, on which collectives take about twice as long.
        max_chips: chips of the largest slice.
        source: of axes, wrap-around and size.
    """

    num_axes: int
    link: Link
    wrap_unit: int
    max_chips: int
    source: str

    def wraps(self, size: int) -> bool:
        """Whether an axis of this many chips is a ring."""
        return size % self.wrap_unit == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Multiprocessors:
    """What XLA's GPU compiler asks about the processors of a GPU. Source: XLA's target specs.

    Attributes:
        count: streaming multiprocessors.
        fpus: floating point units of each.
        shared_memory_bytes: of each.
        shared_memory_block_bytes: of each, at most, for one block.
        capability: CUDA compute capability, (major, minor).
        description: the device's name as the driver gives it.
    """

    count: int
    fpus: int
    shared_memory_bytes: int
    shared_memory_block_bytes: int
    capability: tuple[int, int]
    description: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hardware:
    """One kind of accelerator.

    Attributes:
        name: as written in targets.
        title: as written on the box.
        kind: whose compiler it is.
        bf16_flops: peak FLOP/s of matrix products in bfloat16 and float16.
        fp8_flops: in 8-bit floating point; None where it has no such units.
        int8_flops: in 8-bit integers; None likewise.
        float32_fraction: FLOP/s of float32 products, at JAX's default precision, over bf16_flops.
        hbm_bytes: main memory that programs can use.
        hbm_bytes_per_second: its bandwidth.
        fast_memory_bytes: on-chip memory shared by the device's cores: VMEM (TPU), L2 (GPU).
        clock_hertz: of the matrix units.
        launch_seconds: host and device overhead of one kernel.
        devices_per_chip: JAX devices of one chip, which share its links.
        devices_per_host: in one machine; on GPUs those that NVLink or PCIe connect.
        torus: network between TPU chips.
        nvlink: of one GPU into its machine's switch; None where GPUs of a machine meet over PCIe.
        pcie: between the device and its host.
        network: the device's share of its host's network.
        multiprocessors: what the GPU compiler needs; None for TPUs and for GPUs without a target.
        compiled_as: name of the near relative whose program stands for this one's.
        sources: figure -> where it stands; links and torus name their own.
    """

    name: str
    title: str
    kind: Literal["tpu", "gpu", "cpu"]
    bf16_flops: float
    fp8_flops: float | None = None
    int8_flops: float | None = None
    float32_fraction: float
    hbm_bytes: int
    hbm_bytes_per_second: float
    fast_memory_bytes: int
    clock_hertz: float
    launch_seconds: float
    devices_per_chip: int = 1
    devices_per_host: int
    torus: Torus | None = None
    nvlink: Link | None = None
    pcie: Link
    network: Link
    multiprocessors: Multiprocessors | None = None
    compiled_as: str | None = None
    sources: Mapping[str, str] = dataclasses.field(hash=False)

    def peak_flops(self, dtype: str) -> float:
        """Peak FLOP/s of matrix products with operands of an HLO type, such as `bf16` or `f8e4m3`.

        Types without units of their own run as the next wider one that has some.
        """
        wide = {"f32": self.float32_fraction, "f64": self.float32_fraction / 16}
        if dtype in wide:
            return self.bf16_flops * wide[dtype]
        if dtype.startswith(("s8", "u8", "s4", "u4", "pred")):
            return self.int8_flops or self.bf16_flops
        if dtype.startswith(("f8", "f4")):
            return self.fp8_flops or self.bf16_flops
        return self.bf16_flops


def _ici(bytes_per_second: float) -> Link:
    return Link(
        bytes_per_second=bytes_per_second,
        latency_seconds=1e-6,
        source=f"{GOOGLE}; a hop's latency from {BOOK}",
    )


def _torus(num_axes: int, bytes_per_second: float, max_chips: int) -> Torus:
    # The optical switches of the 3-D pods close any axis of whole 4x4x4 cubes.
    return Torus(
        num_axes=num_axes,
        link=_ici(bytes_per_second),
        wrap_unit=16 if num_axes == 2 else 4,
        max_chips=max_chips,
        source=f"{GOOGLE} and {BOOK}",
    )


def _pcie(bytes_per_second: float, source: str) -> Link:
    return Link(
        bytes_per_second=bytes_per_second,
        latency_seconds=1e-6,
        source=f"{source}; latency from {NCCL}",
    )


def _network(bytes_per_second: float, latency_seconds: float, source: str) -> Link:
    return Link(bytes_per_second=bytes_per_second, latency_seconds=latency_seconds, source=source)


def _datacenter(bytes_per_second: float, source: str) -> Link:
    return _network(bytes_per_second, 1e-5, f"{source}; latency assumed")


def _infiniband(bytes_per_second: float, source: str) -> Link:
    return _network(bytes_per_second, 2.7e-6, f"{source}; latency from {NCCL}")


_TPU_SOURCES = {
    "bf16_flops": GOOGLE,
    "fp8_flops": f"{GOOGLE} and {JAX}",
    "int8_flops": f"{GOOGLE} and {JAX}",
    "float32_fraction": "JAX rounds float32 operands to one bfloat16 pass by default on TPU",
    "hbm_bytes": GOOGLE,
    "hbm_bytes_per_second": GOOGLE,
    "fast_memory_bytes": JAX,
    "clock_hertz": MXU,
    "launch_seconds": "none: a step is one program",
    "devices_per_host": GOOGLE,
}

V4 = Hardware(
    name="v4", title="TPU v4", kind="tpu",
    bf16_flops=275e12, int8_flops=275e12, float32_fraction=1.0,
    hbm_bytes=32 * GIB, hbm_bytes_per_second=1200e9,
    fast_memory_bytes=2 * 16 * MIB + 128 * MIB, clock_hertz=1.05e9, launch_seconds=0.0,
    devices_per_host=4, torus=_torus(3, 45e9, 4096),
    pcie=_pcie(16e9, BOOK), network=_datacenter(6.25e9, "not stated; as v5p"),
    sources=_TPU_SOURCES,
)  # fmt: skip

V5E = Hardware(
    name="v5e", title="TPU v5e", kind="tpu",
    bf16_flops=197e12, int8_flops=394e12, float32_fraction=1.0,
    hbm_bytes=16 * GIB, hbm_bytes_per_second=819e9,
    fast_memory_bytes=128 * MIB, clock_hertz=1.5e9, launch_seconds=0.0,
    devices_per_host=8, torus=_torus(2, 45e9, 256),
    pcie=_pcie(16e9, BOOK), network=_datacenter(3.125e9, f"{GOOGLE}: 2 x 100 Gb/s a host"),
    sources=_TPU_SOURCES,
)  # fmt: skip

V5P = Hardware(
    name="v5p", title="TPU v5p", kind="tpu",
    bf16_flops=459e12, int8_flops=918e12, float32_fraction=1.0,
    hbm_bytes=95 * GIB, hbm_bytes_per_second=2765e9,
    fast_memory_bytes=2 * 64 * MIB, clock_hertz=1.75e9, launch_seconds=0.0,
    devices_per_host=4, torus=_torus(3, 90e9, 8960),
    pcie=_pcie(16e9, BOOK), network=_datacenter(6.25e9, f"{BOOK}: 4 x 50 Gb/s a host"),
    sources=_TPU_SOURCES,
)  # fmt: skip

V6E = Hardware(
    name="v6e", title="TPU v6e (Trillium)", kind="tpu",
    bf16_flops=918e12, fp8_flops=918e12, int8_flops=1836e12, float32_fraction=1.0,
    hbm_bytes=32 * GIB, hbm_bytes_per_second=1638e9,
    fast_memory_bytes=128 * MIB, clock_hertz=1.75e9, launch_seconds=0.0,
    devices_per_host=8, torus=_torus(2, 90e9, 256),
    pcie=_pcie(32e9, BOOK), network=_datacenter(12.5e9, f"{GOOGLE}: 4 x 200 Gb/s a host"),
    sources=_TPU_SOURCES,
)  # fmt: skip

TPU7X = Hardware(
    name="tpu7x", title="TPU7x (Ironwood), half a chip", kind="tpu",
    bf16_flops=2307e12 / 2, fp8_flops=4614e12 / 2, float32_fraction=1.0,
    hbm_bytes=192 * GIB // 2, hbm_bytes_per_second=7380e9 / 2,
    fast_memory_bytes=64 * MIB, clock_hertz=2.2e9, launch_seconds=0.0,
    devices_per_chip=2, devices_per_host=8, torus=_torus(3, 90e9, 9216),
    pcie=_pcie(32e9 / 2, "not stated; a chip as v6e"),
    network=_datacenter(6.25e9, "two NICs a host; 200 Gb/s each assumed, as v6e"),
    sources=_TPU_SOURCES,
)  # fmt: skip


def _nvlink(bytes_per_second: float) -> Link:
    return Link(
        bytes_per_second=bytes_per_second,
        latency_seconds=0.47e-6,
        source=f"{NVIDIA}; latency of a ring's hop from {NCCL}",
    )


_GPU_SOURCES = {
    "bf16_flops": NVIDIA,
    "fp8_flops": NVIDIA,
    "int8_flops": NVIDIA,
    "float32_fraction": f"{NVIDIA}: TF32, which XLA uses by default",
    "hbm_bytes": XLA,
    "hbm_bytes_per_second": XLA,
    "fast_memory_bytes": XLA,
    "clock_hertz": XLA,
    "launch_seconds": "XLA's GPU cost model",
    "devices_per_host": NVIDIA,
}
_SHEET = _GPU_SOURCES | dict.fromkeys(
    ("hbm_bytes", "hbm_bytes_per_second", "fast_memory_bytes", "clock_hertz"), NVIDIA
)

_AMPERE = Multiprocessors(
    count=108, fpus=64, shared_memory_bytes=167_936, shared_memory_block_bytes=166_912,
    capability=(8, 0), description="NVIDIA A100-SXM4-80GB",
)  # fmt: skip
_HOPPER = Multiprocessors(
    count=132, fpus=128, shared_memory_bytes=233_472, shared_memory_block_bytes=232_448,
    capability=(9, 0), description="NVIDIA H100 80GB HBM3",
)  # fmt: skip

A100 = Hardware(
    name="a100", title="NVIDIA A100 SXM 80 GB", kind="gpu",
    bf16_flops=312e12, int8_flops=624e12, float32_fraction=0.5,
    hbm_bytes=85_100_068_864, hbm_bytes_per_second=2_039_040_000_000,
    fast_memory_bytes=40 * MIB, clock_hertz=1.41e9, launch_seconds=5e-6,
    devices_per_host=8, nvlink=_nvlink(300e9), pcie=_pcie(32e9, NVIDIA),
    network=_infiniband(25e9, f"{NVIDIA}: DGX A100, 200 Gb/s a GPU"),
    multiprocessors=_AMPERE, sources=_GPU_SOURCES,
)  # fmt: skip

A100_40 = dataclasses.replace(
    A100, name="a100_40", title="NVIDIA A100 SXM 40 GB",
    hbm_bytes=42_331_013_120, hbm_bytes_per_second=1_555_200_000_000,
    multiprocessors=dataclasses.replace(_AMPERE, description="NVIDIA A100-SXM4-40GB"),
)  # fmt: skip

H100 = Hardware(
    name="h100", title="NVIDIA H100 SXM 80 GB", kind="gpu",
    bf16_flops=989e12, fp8_flops=1979e12, int8_flops=1979e12, float32_fraction=0.5,
    hbm_bytes=84_942_979_072, hbm_bytes_per_second=3_352_320_000_000,
    fast_memory_bytes=50 * MIB, clock_hertz=1.98e9, launch_seconds=5e-6,
    devices_per_host=8, nvlink=_nvlink(450e9), pcie=_pcie(64e9, NVIDIA),
    network=_infiniband(50e9, f"{NVIDIA}: DGX H100, 400 Gb/s a GPU"),
    multiprocessors=_HOPPER, sources=_GPU_SOURCES,
)  # fmt: skip

H200 = dataclasses.replace(
    H100, name="h200", title="NVIDIA H200 SXM 141 GB",
    hbm_bytes=151_397_597_184, hbm_bytes_per_second=4_800_000_000_000,
    multiprocessors=dataclasses.replace(_HOPPER, description="NVIDIA H200 141GB HBM3e"),
)  # fmt: skip

B200 = dataclasses.replace(
    H100, name="b200", title="NVIDIA B200 SXM 180 GB",
    bf16_flops=2250e12, fp8_flops=4500e12, int8_flops=4500e12,
    hbm_bytes=191_514_411_008, hbm_bytes_per_second=7_672_320_000_000,
    fast_memory_bytes=132_644_864, clock_hertz=1.965e9, nvlink=_nvlink(900e9),
    network=_infiniband(50e9, "Google Cloud A4 machines: 400 Gb/s a GPU"),
    multiprocessors=dataclasses.replace(
        _HOPPER, count=148, capability=(10, 0), description="NVIDIA B200"
    ),
)  # fmt: skip

# Entries below have no target in XLA: `compiled_as` names the relative that stands for them.

A800 = dataclasses.replace(
    A100, name="a800", title="NVIDIA A800 SXM 80 GB", nvlink=_nvlink(200e9),
    network=_infiniband(12.5e9, "clusters of 8 x 100 Gb/s a node, as published results name"),
    multiprocessors=None, compiled_as="a100",
)  # fmt: skip

H800 = dataclasses.replace(
    H100, name="h800", title="NVIDIA H800 SXM 80 GB", nvlink=_nvlink(200e9),
    network=_infiniband(12.5e9, "clusters of 8 x 100 Gb/s a node, as published results name"),
    multiprocessors=None, compiled_as="h100",
)  # fmt: skip

H20 = dataclasses.replace(
    H100, name="h20", title="NVIDIA H20 96 GB",
    bf16_flops=148e12, fp8_flops=296e12, int8_flops=296e12,
    hbm_bytes=96_000_000_000, hbm_bytes_per_second=4000e9, fast_memory_bytes=60 * MIB,
    multiprocessors=None, compiled_as="h100", sources=_SHEET,
)  # fmt: skip

_NO_SWITCH = {
    "nvlink": None,
    "pcie": _pcie(32e9, NVIDIA),
    "network": _infiniband(12.5e9 / 8, "assumed: 100 Gb/s a host of 8"),
    "multiprocessors": None,
    "compiled_as": "a100",
    "sources": _SHEET,
}

L4 = dataclasses.replace(
    A100, name="l4", title="NVIDIA L4",
    bf16_flops=121e12, fp8_flops=242e12, int8_flops=242e12,
    hbm_bytes=24_000_000_000, hbm_bytes_per_second=300e9, fast_memory_bytes=48 * MIB,
    clock_hertz=2.04e9, **_NO_SWITCH,
)  # fmt: skip

L20 = dataclasses.replace(
    A100, name="l20", title="NVIDIA L20",
    bf16_flops=119.5e12, fp8_flops=239e12, int8_flops=239e12,
    hbm_bytes=48_000_000_000, hbm_bytes_per_second=864e9, fast_memory_bytes=96 * MIB,
    clock_hertz=2.52e9, **_NO_SWITCH,
)  # fmt: skip

RTX4090 = dataclasses.replace(
    A100, name="rtx4090", title="NVIDIA GeForce RTX 4090 (float32 accumulation)",
    bf16_flops=165e12, fp8_flops=330e12, int8_flops=660e12,
    hbm_bytes=24_000_000_000, hbm_bytes_per_second=1008e9, fast_memory_bytes=72 * MIB,
    clock_hertz=2.52e9, **_NO_SWITCH,
)  # fmt: skip

# A virtual device of this machine has no data sheet. Times on round figures order plans; they are
# no forecast. Not in the catalogue: `cpu:8` is executed, not looked up.
NOMINAL_CPU = Hardware(
    name="cpu", title="a virtual CPU device (round figures: 100 GFLOP/s, 10 GB/s)", kind="cpu",
    bf16_flops=100e9, float32_fraction=1.0,
    hbm_bytes=16 * GIB, hbm_bytes_per_second=10e9, fast_memory_bytes=MIB, clock_hertz=3e9,
    launch_seconds=0.0, devices_per_host=1024,
    pcie=Link(bytes_per_second=10e9, latency_seconds=1e-5, source="assumed"),
    network=Link(bytes_per_second=10e9, latency_seconds=1e-5, source="assumed"),
    sources={"bf16_flops": "assumed", "hbm_bytes_per_second": "assumed"},
)  # fmt: skip

CATALOGUE: Mapping[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        V4, V5E, V5P, V6E, TPU7X, A100, A100_40, H100, H200, B200, A800, H800, H20, L4, L20, RTX4090
    )
}  # fmt: skip

# What a driver calls a device -> our name; the first pattern that is found counts.
_DEVICE_KINDS = {
    r"TPU ?v4": "v4",
    r"TPU ?v5( lite|e)": "v5e",
    r"TPU ?v5": "v5p",
    r"TPU ?v6": "v6e",
    r"TPU ?7x": "tpu7x",
    r"A100.*40GB": "a100_40",
    r"A100": "a100",
    r"A800": "a800",
    r"H100": "h100",
    r"H200": "h200",
    r"H800": "h800",
    r"H20\b": "h20",
    r"B200": "b200",
    r"L4\b": "l4",
    r"L20\b": "l20",
    r"RTX 4090\b": "rtx4090",
}


def identify(device_kind: str) -> Hardware | None:
    """The entry of a real device, by `jax.Device.device_kind`; None if it has none."""
    for pattern, name in _DEVICE_KINDS.items():
        if re.search(pattern, device_kind):
            return CATALOGUE[name]
    return None
