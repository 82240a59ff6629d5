"""Targets: hardware written as text (`cpu:8`, `v5p:8x8x8`, `h100:16x8`), and its devices.

Except for the CPU's, the devices exist only for compilation: XLA's TPU and GPU compilers come with
JAX's plugins and run on any machine. A program compiled for them is the real one, with its
schedule, memory and collectives; it is never executed.
"""

import dataclasses
import difflib
import functools
import importlib.util
import math
import re
from typing import Any

from meshes.hardware import CATALOGUE, Hardware

GRAMMAR = (
    "cpu:<devices>, <tpu>:<X>x<Y> or <X>x<Y>x<Z> (chips along the torus; 2xv5e:16x16 is two "
    "slices), <gpu>:<gpus> or <gpu>:<hosts>x<gpus>, such as cpu:8, v5e:4x4, v5p:8x8x8, h100:8, "
    "h100:16x8"
)
_FORM = re.compile(r"(?:([1-9]\d*)x)?([a-z]\w*):([1-9]\d*(?:x[1-9]\d*)*)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A number of devices of one kind, connected.

    Attributes:
        text: how it is written.
        hardware: entry of the catalogue; None is the CPU of this machine.
        topology: chips along each axis of a slice's torus; hosts and GPUs of a host; or the number
            of virtual CPU devices.
        num_slices: TPU slices joined by the data-centre network.
    """

    text: str
    hardware: Hardware | None
    topology: tuple[int, ...]
    num_slices: int = 1

    @property
    def num_devices(self) -> int:
        """Number of JAX devices."""
        per_chip = self.hardware.devices_per_chip if self.hardware else 1
        return self.num_slices * math.prod(self.topology) * per_chip


def parse(text: str) -> Target:
    """Read a target.

    Raises:
        ValueError: malformed (the message shows the grammar), unknown hardware (it lists the known
            ones), or a topology that the hardware does not come in.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"target is {text!r}; expected {GRAMMAR}")
    slices, name, sizes = match.groups()
    topology = tuple(int(size) for size in sizes.split("x"))
    if name != "cpu" and name not in CATALOGUE:
        raise ValueError(_unknown(text, name))
    hardware = CATALOGUE.get(name)
    if slices is not None and (hardware is None or hardware.kind != "tpu"):
        raise ValueError(f"target is {text!r}, but only TPUs come in slices; expected {GRAMMAR}")
    if hardware is None and len(topology) != 1:
        raise ValueError(f"target is {text!r}; expected cpu:<devices>, such as cpu:8")
    if hardware is not None:
        topology = (_gpus if hardware.kind == "gpu" else _chips)(text, hardware, topology)
    return Target(
        text=text, hardware=hardware, topology=topology, num_slices=int(slices or 1)
    )  # fmt: skip


def devices(target: Target) -> list[Any]:
    """Return the target's devices: this machine's CPU devices, or devices to compile for.

    Raises:
        ValueError: the compiler's plugin is not installed (the message has the command), it does
            not know the topology, or this process has fewer CPU devices.
    """
    import jax

    if target.hardware is not None:
        return list(_compile_only(target))
    found = jax.devices("cpu")
    if len(found) < target.num_devices:
        raise ValueError(
            f"target is {target.text!r}, but JAX started with {len(found)} CPU devices; set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={target.num_devices} before it does"
        )
    return found[: target.num_devices]


# Devices of two calls must be the same objects, or their meshes are not equal.
@functools.lru_cache(maxsize=16)
def _compile_only(target: Target) -> tuple[Any, ...]:
    import jax
    from jax.experimental import topologies

    hardware = target.hardware
    assert hardware is not None
    _check_plugin(target.text, hardware)
    arguments = (_tpu_arguments if hardware.kind == "tpu" else _gpu_arguments)(target, hardware)
    try:
        return tuple(topologies.get_topology_desc(**arguments).devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"target is {target.text!r}, which {hardware.title}'s compiler does not know: {error}"
        ) from error


def _tpu_arguments(target: Target, hardware: Hardware) -> dict[str, Any]:
    assert hardware.torus is not None
    sizes = "x".join(str(size) for size in target.topology)
    place = (*target.topology, 1)[:3]
    arguments: dict[str, Any] = {
        "platform": "tpu",
        "topology_name": f"{hardware.name}:{sizes}",
        # Left out, a 3-D torus is compiled for as if no axis were closed.
        "wrap": tuple(hardware.torus.wraps(size) for size in place),
    }
    if target.num_slices > 1:
        arguments["num_slices"] = target.num_slices
    if hardware.name == "v4":  # otherwise the two cores of a chip are two devices
        arguments["chip_config_name"] = "megacore"
    if math.prod(place) < 4:  # hosts of fewer than the usual 2x2 chips
        arguments["chips_per_host_bounds"] = place
    return arguments


def _gpu_arguments(target: Target, hardware: Hardware) -> dict[str, Any]:
    return {
        "platform": "cuda",
        "topology_name": "",
        "target_config": target_config(CATALOGUE[hardware.compiled_as or hardware.name]),
        "topology": "x".join(str(size) for size in (1, *target.topology)),
    }


def target_config(hardware: Hardware) -> str:
    """Describe a GPU as XLA's compiler reads it (text of `stream_executor.GpuTargetConfigProto`).

    Limits of the programming model, equal on all listed GPUs, are written here. Source: XLA's
    target specs.
    """
    cores = hardware.multiprocessors
    assert cores is not None, hardware.name
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49_152,
        "shared_memory_per_core": cores.shared_memory_bytes,
        "threads_per_core_limit": 2048,
        "core_count": cores.count,
        "fpus_per_core": cores.fpus,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65_535,
        "block_dim_limit_z": 65_535,
        "memory_bandwidth": int(hardware.hbm_bytes_per_second),
        "l2_cache_size": hardware.fast_memory_bytes,
        "clock_rate_ghz": hardware.clock_hertz / 1e9,
        "device_memory_size": hardware.hbm_bytes,
        "shared_memory_per_block_optin": cores.shared_memory_block_bytes,
        "registers_per_core_limit": 65_536,
        "registers_per_block_limit": 65_536,
        "thread_dim_limit_x": 1024,
        "thread_dim_limit_y": 1024,
        "thread_dim_limit_z": 64,
    }
    major, minor = cores.capability
    info = " ".join(f"{name}: {value}" for name, value in fields.items())
    info += f" cuda_compute_capability {{ major: {major} minor: {minor} }}"
    return (
        f'gpu_device_info {{ {info} }} platform_name: "CUDA" '
        f"dnn_version_info {{ major: 9 minor: 8 }} "
        f'device_description_str: "{cores.description}"'
    )


def _unknown(text: str, name: str) -> str:
    known = ["cpu", *CATALOGUE]
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"target {text!r} names unknown hardware {name!r}; {hint}known are {', '.join(known)}"


def _gpus(text: str, hardware: Hardware, topology: tuple[int, ...]) -> tuple[int, ...]:
    """Hosts and GPUs of each."""
    hosts, gpus = topology if len(topology) == 2 else (1, topology[0])
    most = hardware.devices_per_host
    if len(topology) > 2 or gpus > most:
        total = math.prod(topology)
        fix = f"{hardware.name}:{-(-total // most)}x{most}"
        raise ValueError(
            f"target is {text!r}; expected <hosts>x<gpus> with at most {most} GPUs a host, such as "
            f"{fix}"
        )
    return hosts, gpus


def _chips(text: str, hardware: Hardware, topology: tuple[int, ...]) -> tuple[int, ...]:
    """Chips along each axis of the torus."""
    torus = hardware.torus
    assert torus is not None
    total = math.prod(topology)
    longest = max(topology) <= 16 if torus.num_axes == 2 else True
    if len(topology) == torus.num_axes and total <= torus.max_chips and longest:
        return topology
    fix = "x".join(str(size) for size in _squarest(min(total, torus.max_chips), torus.num_axes))
    raise ValueError(
        f"target is {text!r}, but {hardware.title} is a {torus.num_axes}-D torus of at most "
        f"{torus.max_chips} chips; expected {torus.num_axes} sizes, such as {hardware.name}:{fix}"
    )


def _squarest(total: int, num_axes: int) -> tuple[int, ...]:
    """Split a number of chips into sizes as equal as they can be, smallest first."""
    if num_axes == 1:
        return (total,)
    root = round(total ** (1 / num_axes))
    first = next(size for size in range(root, 0, -1) if total % size == 0)
    return (first, *_squarest(total // first, num_axes - 1))


def _check_plugin(text: str, hardware: Hardware) -> None:
    """Say how to install the compiler, if it is not."""
    modules = {"tpu": ("libtpu",), "gpu": ("jax_cuda12_plugin", "jax_cuda13_plugin")}
    if any(importlib.util.find_spec(module) for module in modules[hardware.kind]):
        return
    extra = {"tpu": "tpu-aot", "gpu": "cuda-aot"}[hardware.kind]
    raise ValueError(
        f"target {text!r} needs the {hardware.kind.upper()} compiler, which is not installed; run "
        f"pip install -e '.[{extra}]'"
    )
