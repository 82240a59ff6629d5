"""Targets as text, their errors, and the meshes that a torus can hold.

Tests marked by `needs` run only where the optional compilers are installed (extras tpu-aot and
cuda-aot); they say so when they are skipped.
"""

import importlib.util
import math
import os
import types

import jax
import numpy as np
import pytest

from meshes import targets
from meshes.axes import MeshShape
from meshes.build import build_mesh
from meshes.hardware import CATALOGUE
from paxlike import launch


def needs(module: str, extra: str):
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"pip install -e '.[{extra}]' runs this test")


needs_tpu = needs("libtpu", "tpu-aot")
needs_gpu = needs("jax_cuda12_plugin", "cuda-aot")


@pytest.fixture(autouse=True)
def quiet_libtpu(monkeypatch):
    for name, value in launch.COMPILE_ONLY_TPU.items():
        monkeypatch.setitem(os.environ, name, value)


@pytest.mark.parametrize(
    ("text", "topology", "num_devices"),
    [
        ("cpu:8", (8,), 8),
        ("v5e:16x16", (16, 16), 256),
        ("v5p:8x8x8", (8, 8, 8), 512),
        ("tpu7x:4x4x4", (4, 4, 4), 128),
        ("2xv5e:16x16", (16, 16), 512),
        ("h100:8", (1, 8), 8),
        ("h100:16x8", (16, 8), 128),
        ("a100_40:2x4", (2, 4), 8),
    ],
)
def test_parse(text, topology, num_devices):
    target = targets.parse(text)
    assert (target.topology, target.num_devices) == (topology, num_devices)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("v5e", "expected cpu:<devices>, <tpu>:<X>x<Y>"),
        ("", "expected cpu:<devices>"),
        ("v5e:0x4", "expected cpu:<devices>"),
        ("v5e:4×4", "expected cpu:<devices>"),
        ("h10:8", "did you mean h100 or h20"),
        ("tpu7:4x4x4", "did you mean tpu7x"),
        ("zzz:8", "known are cpu, v4, v5e"),
        ("cpu:2x4", "expected cpu:<devices>, such as cpu:8"),
        ("2xh100:8", "only TPUs come in slices"),
        ("h100:64", "such as h100:8x8"),
        ("h100:2x16", "such as h100:4x8"),
        ("v5e:256", "expected 2 sizes, such as v5e:16x16"),
        ("v5p:64", "expected 3 sizes, such as v5p:4x4x4"),
        ("v5e:32x8", "2-D torus of at most 256 chips"),
        ("v5p:64x64x64", "at most 8960 chips"),
    ],
)
def test_errors_say_what_would_do(text, said):
    with pytest.raises(ValueError) as error:
        targets.parse(text)
    assert said in str(error.value)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("text", "install"),
    [("v5e:4x4", "pip install -e '.[tpu-aot]'"), ("h100:8", "pip install -e '.[cuda-aot]'")],
)
def test_a_missing_compiler_says_how_to_install_it(monkeypatch, text, install):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    targets._compile_only.cache_clear()
    with pytest.raises(ValueError) as error:
        targets.devices(targets.parse(text))
    assert install in str(error.value) and "\n" not in str(error.value)


def test_cpu_devices():
    assert targets.devices(targets.parse("cpu:4")) == jax.devices()[:4]
    with pytest.raises(ValueError, match="JAX started with 8 CPU devices"):
        targets.devices(targets.parse("cpu:9"))


def test_the_gpu_compiler_is_told_the_figures_of_its_target_spec():
    """Against the public target spec of the H100."""
    text = targets.target_config(CATALOGUE["h100"])
    for field in (
        "core_count: 132", "fpus_per_core: 128", "shared_memory_per_core: 233472",
        "shared_memory_per_block_optin: 232448", "memory_bandwidth: 3352320000000",
        "l2_cache_size: 52428800", "clock_rate_ghz: 1.98", "device_memory_size: 84942979072",
        "cuda_compute_capability { major: 9 minor: 0 }", 'platform_name: "CUDA"',
    ):  # fmt: skip
        assert field in text
    assert text.count("{") == text.count("}")


class Chip(types.SimpleNamespace):
    """A stand-in for a compile-only TPU device, so that no compiler is needed."""

    __hash__ = object.__hash__


def chips(*topology: int, kind: str = "TPU v5", cores: int = 1, slices: int = 1) -> list:
    """The devices of a torus, x fastest."""
    return [
        Chip(
            platform="tpu", device_kind=kind, slice_index=index, process_index=0,
            coords=[*reversed(place[:-1])], core_on_chip=place[-1],
        )
        for index in range(slices)
        for place in np.ndindex(*reversed(topology), cores)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "mesh", "fits"),
    [
        (chips(8, 8, 8), MeshShape(fsdp=128, tensor=4), {"fsdp": 64, "tensor": 8}),
        (chips(16, 16, 1, kind="TPU v6 lite"), MeshShape(fsdp=64, tensor=4), {"fsdp": 256}),
        (
            chips(4, 4, 4, kind="TPU7x", cores=2), MeshShape(data=2, fsdp=8, tensor=8),
            {"data": 2, "fsdp": 4, "tensor": 16},
        ),
    ],
)  # fmt: skip
def test_a_mesh_that_the_torus_cannot_hold_names_some_that_it_can(devices, mesh, fits):
    with pytest.raises(ValueError, match="without splitting an axis of the torus") as error:
        build_mesh(mesh, devices)
    assert str(fits) in str(error.value)
    named = MeshShape(**fits)
    assert named.num_devices == len(devices)
    assert build_mesh(named, devices).axis_sizes == tuple(named.sizes.values())
    split = build_mesh(mesh, devices, split_torus=True)
    assert split.axis_sizes == tuple(mesh.sizes.values())


def test_slices_are_blocks_of_the_mesh():
    devices = chips(4, 4, 4, slices=2)
    with pytest.raises(ValueError, match="set, for example, parallel.dcn_mesh.data=2"):
        build_mesh(MeshShape(data=2, fsdp=64), devices)
    mesh = build_mesh(MeshShape(data=2, fsdp=64), devices, MeshShape(data=2))
    for number, part in enumerate(mesh.devices.reshape(2, 64)):
        assert {device.slice_index for device in part} == {number}
    with pytest.raises(ValueError, match="form 2 slices or hosts"):
        build_mesh(MeshShape(data=4, fsdp=32), devices, MeshShape(data=4))


def test_an_axis_within_and_across_slices_keeps_a_slice_together():
    devices = chips(4, 4, 4, slices=2)
    mesh = build_mesh(MeshShape(fsdp=128), devices, MeshShape(fsdp=2))
    assert [device.slice_index for device in mesh.devices.flat] == [0] * 64 + [1] * 64


@needs_tpu
@pytest.mark.parametrize(
    "text", ["v4:2x2x1", "v5e:1x1", "v5e:4x4", "2xv5e:4x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1"]
)
def test_tpu_devices(text):
    target = targets.parse(text)
    found = targets.devices(target)
    assert len(found) == target.num_devices
    assert found == targets.devices(targets.parse(text))
    chips_found = {(*device.coords, getattr(device, "slice_index", 0)) for device in found}
    assert len(chips_found) == math.prod(target.topology) * target.num_slices


@needs_tpu
def test_closed_axes_are_compiled_for():
    """On 4x4x4 chips of v5p, rings exist; the compiler takes lines unless it is told."""
    from jax.experimental import topologies

    def gather(devices: list) -> str:
        mesh = build_mesh(MeshShape(fsdp=64), devices)
        layout = jax.NamedSharding(mesh, jax.P("fsdp"))
        x = jax.ShapeDtypeStruct((2**12, 2**12), "bfloat16", sharding=layout)
        with jax.set_mesh(mesh):
            function = jax.jit(lambda x: jax.reshard(x, jax.P(None)) @ jax.reshard(x, jax.P(None)))
            return function.lower(x).compile().as_text()

    lines = topologies.get_topology_desc(
        platform="tpu", topology_name="v5p:4x4x4", wrap=(False,) * 3
    ).devices
    assert gather(targets.devices(targets.parse("v5p:4x4x4"))) != gather(lines)


@needs_tpu
def test_a_topology_that_the_compiler_does_not_know():
    with pytest.raises(ValueError, match="v5e:3x3.*does not know"):
        targets.devices(targets.parse("v5e:3x3"))


@needs_gpu
@pytest.mark.parametrize("text", ["h100:8", "h100:2x8", "b200:8", "a100:4", "rtx4090:2"])
def test_gpu_devices(text):
    target = targets.parse(text)
    found = targets.devices(target)
    assert len(found) == target.num_devices
    assert len({device.process_index for device in found}) == target.topology[0]


@needs_gpu
def test_gpu_hosts_can_be_spanned_by_an_axis():
    devices = targets.devices(targets.parse("h100:2x8"))
    mesh = build_mesh(MeshShape(data=2, tensor=8), devices, MeshShape(data=2))
    for number, host in enumerate(mesh.devices.reshape(2, 8)):
        assert {device.process_index for device in host} == {number}
