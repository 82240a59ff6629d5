"""Where an experiment's mesh, rules and schemes are entered: once, and together."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import jax

from layers.attention.kernels import CORE, Kernel
from layers.attention.schemes import attention_scheme
from layers.attention.splash import Splash
from layers.attention.triton import Triton
from layers.schemes import Schemes
from meshes.axes import MeshShape
from meshes.build import Device, build_mesh
from meshes.context import Parallelism, parallelism
from meshes.rules import Rules
from paxlike.config import AttentionKernel, Experiment, ParallelConfig

# The kernel that `auto` chooses on a platform; elsewhere the core.
_OWN_KERNEL: dict[str, AttentionKernel] = {"tpu": "splash", "gpu": "triton", "cuda": "triton"}


def attention_kernel(name: AttentionKernel, platform: str) -> Kernel:
    """The attention kernel of this name; on another platform than its own it is interpreted."""
    own = _OWN_KERNEL.get(platform, "jnp")
    name = own if name == "auto" else name
    if name == "splash":
        return Splash(interpret=name != own)
    return Triton(interpret=name != own) if name == "triton" else CORE


def schemes(parallel: ParallelConfig, platform: str = "cpu") -> Schemes:
    """The schemes that a parallel config asks for, on devices of a platform."""
    kernel = attention_kernel(parallel.attention_kernel, platform)
    return Schemes(
        attention=attention_scheme(parallel.attention, kernel),
        remat=parallel.remat,
        scan_layers=parallel.scan_layers,
        loss_chunk=parallel.loss_chunk,
    )


@contextlib.contextmanager
def runtime(
    experiment: Experiment,
    devices: Sequence[Device] | None = None,
    rules: Rules | None = None,
) -> Iterator[Parallelism]:
    """Enter the mesh, rules and schemes of an experiment.

    Args:
        experiment: what is run.
        devices: where; None is every device.
        rules: in place of the experiment's (generation moves the sequence's axes to the batch).

    Raises:
        ValueError: the mesh does not fit the devices, or the rules do not fit mesh, model or
            batch; the message says which and what would do.
    """
    parallel = experiment.parallel
    mesh = build_mesh(parallel.mesh, devices, parallel.dcn_mesh)
    chosen = schemes(parallel, mesh.devices.flat[0].platform)
    with parallelism(mesh, rules or parallel.rule_table, chosen) as entered:
        yield entered


def here() -> str:
    """The hardware of this process group, written as a target: `cpu:8`."""
    return f"{jax.default_backend()}:{jax.device_count()}"


def on_one_device(experiment: Experiment) -> Experiment:
    """The same experiment on a mesh of one device: the oracle of a parallel run."""
    parallel = dataclasses.replace(experiment.parallel, mesh=MeshShape(), dcn_mesh=None)
    return dataclasses.replace(experiment, parallel=parallel)
