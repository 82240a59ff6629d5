"""The catalogue: complete, sourced, and consistent with facts that it was not written from."""

import dataclasses
import subprocess
import sys

import pytest
from jax.experimental.pallas import tpu as pltpu

from meshes.hardware import CATALOGUE, Hardware, identify

ALL = list(CATALOGUE.values())
TPUS = [hardware for hardware in ALL if hardware.kind == "tpu"]
GPUS = [hardware for hardware in ALL if hardware.kind == "gpu"]
IDS = dict(ids=lambda hardware: hardware.name)


def test_what_the_papers_need_is_listed():
    assert set(CATALOGUE) >= {
        "v4", "v5e", "v5p", "v6e", "tpu7x", "a100", "a100_40", "h100", "h200", "b200", "l4", "l20",
        "a800", "h800", "h20", "rtx4090",
    }  # fmt: skip


@pytest.mark.parametrize("hardware", ALL, **IDS)
def test_every_figure_has_a_source(hardware: Hardware):
    figures = {
        field.name
        for field in dataclasses.fields(hardware)
        if isinstance(getattr(hardware, field.name), int | float)
    } - {"devices_per_chip"}
    assert figures <= set(hardware.sources)
    links = (hardware.torus and hardware.torus.link, hardware.nvlink, hardware.pcie)
    assert all(link.source for link in (*links, hardware.network) if link is not None)


@pytest.mark.parametrize("hardware", TPUS, **IDS)
def test_tpu_clocks_give_the_peak(hardware: Hardware):
    """Peak = MXUs x their multiply-adds a cycle x 2 x clock, the counts from the public papers."""
    mxus, side = {
        "v4": (8, 128), "v5e": (4, 128), "v5p": (8, 128), "v6e": (4, 256), "tpu7x": (4, 256)
    }[hardware.name]  # fmt: skip
    peak = mxus * side**2 * 2 * hardware.clock_hertz
    assert peak == pytest.approx(hardware.bf16_flops, rel=0.005)


@pytest.mark.parametrize("hardware", TPUS, **IDS)
def test_tpus_agree_with_jax(hardware: Hardware):
    """JAX's own table of TPUs, for one core; a device has one or two."""
    version = pltpu.ChipVersion({"tpu7x": "7x"}.get(hardware.name, hardware.name))
    cores = 2 if hardware.name in ("v4", "v5p") else 1
    info = pltpu.get_tpu_info_for_chip(version, cores)
    assert info.bf16_ops_per_second * cores == pytest.approx(hardware.bf16_flops, rel=0.01)
    assert info.hbm_capacity_bytes * cores == pytest.approx(hardware.hbm_bytes, rel=0.02)
    # The vendor's page says 12 % more for v5p.
    assert info.mem_bw_bytes_per_second * cores == pytest.approx(
        hardware.hbm_bytes_per_second, rel=0.13
    )


@pytest.mark.parametrize("hardware", GPUS, **IDS)
def test_gpus_have_a_target_or_a_relative_that_has(hardware: Hardware):
    assert (hardware.multiprocessors is None) == (hardware.compiled_as is not None)
    if hardware.compiled_as is not None:
        assert CATALOGUE[hardware.compiled_as].multiprocessors is not None


def test_rings():
    v5e, v5p = CATALOGUE["v5e"].torus, CATALOGUE["v5p"].torus
    assert [v5e.wraps(size) for size in (4, 8, 16)] == [False, False, True]
    assert [v5p.wraps(size) for size in (2, 4, 6, 8)] == [False, True, False, True]


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("v5e", "bf16", 197e12), ("v5e", "f32", 197e12), ("v5e", "f8e4m3fn", 197e12),
        ("v5e", "s8", 394e12), ("h100", "f8e5m2", 1979e12), ("a100", "f32", 156e12),
        ("a100", "f8e4m3fn", 312e12), ("tpu7x", "s8", 1153.5e12),
    ],
)  # fmt: skip
def test_peak_by_dtype(name: str, dtype: str, peak: float):
    assert CATALOGUE[name].peak_flops(dtype) == pytest.approx(peak)


def test_it_is_free_of_jax():
    code = "import sys, meshes.hardware, meshes.targets; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [
        ("TPU v4", "v4"), ("TPU v5 lite", "v5e"), ("TPU v5e", "v5e"), ("TPU v5", "v5p"),
        ("TPU v5p", "v5p"), ("TPU v6 lite", "v6e"), ("TPU7x", "tpu7x"),
        ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA H20", "h20"),
        ("NVIDIA A100-SXM4-40GB", "a100_40"), ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"), ("NVIDIA L4", "l4"), ("NVIDIA L40S", None),
        ("NVIDIA GeForce RTX 4090", "rtx4090"), ("cpu", None),
    ],
)  # fmt: skip
def test_devices_are_recognised_by_what_drivers_call_them(device_kind, name):
    found = identify(device_kind)
    assert (found.name if found else None) == name
