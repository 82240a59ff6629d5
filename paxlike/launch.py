"""Where JAX is told what it runs on: platform, virtual devices, processes, compilation cache.

JAX reads these once, when it starts; nothing else in the codebase sets them. The platform is always
chosen here, never left to JAX: with libtpu installed for compilation, JAX would try to start a TPU.
"""

import dataclasses
import importlib.util
import os
import re
import socket
import sys
from pathlib import Path
from types import ModuleType

from paxlike.errors import foreign_character

_FORCE = "--xla_force_host_platform_device_count"

# Keep libtpu from asking a metadata server that only Google's machines have, and from being one
# process's alone, as it must be where there is a TPU.
COMPILE_ONLY_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Processes:
    """The processes of a run over many hosts.

    Under SLURM, Open MPI, Kubernetes or on TPU pods all three are detected, and stay None.

    Attributes:
        coordinator: host:port of process 0.
        num_processes: how many there are.
        process_id: which one this is, from 0.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None

    def __post_init__(self) -> None:
        given = [value is not None for value in dataclasses.astuple(self)]
        if any(given) and not all(given):
            raise ValueError(
                f"multihost is coordinator={self.coordinator}, num_processes={self.num_processes}, "
                f"process_id={self.process_id}; give all three, or none where a cluster tells them"
            )
        if self.num_processes is None or self.process_id is None:
            return
        if not re.fullmatch(r"[^\s:]+:\d+|\[[0-9a-fA-F:]+\]:\d+", self.coordinator or ""):
            raise ValueError(f"coordinator is {self.coordinator!r}; expected host:port")
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"process_id is {self.process_id} and num_processes {self.num_processes}; expected "
                "0 <= process_id < num_processes"
            )


def start(
    num_devices: int = 1, *, target: str | None = None, processes: Processes | None = None
) -> None:
    """Choose the platform and start JAX's processes; call before anything uses a device.

    Args:
        num_devices: devices of the experiment's mesh; on CPU as many virtual ones are made.
        target: `cpu:8` runs on 8 virtual CPU devices. Any other target is compiled for, never run
            on, and leaves the CPU as the platform. None takes the accelerator of this machine, or
            the CPU if it has none. JAX_PLATFORMS and XLA_FLAGS of the environment are kept.
        processes: this process and its peers, for a run over many hosts; None is this one alone.

    Raises:
        ValueError: the environment or the processes' description is malformed, or the peers do not
            answer.
    """
    _check_environment()
    name, _, count = (target or "").partition(":")
    platform = os.environ.get("JAX_PLATFORMS") or ("cpu" if target else local_platform())
    if name == "cpu" and count:
        num_devices = cpu_target(target or "")
    if platform == "cpu":
        local = -(-num_devices // ((processes and processes.num_processes) or 1))
        _set_virtual_devices(local)
    if target and name != "cpu":
        os.environ.update(COMPILE_ONLY_TPU | dict(os.environ))
    os.environ["JAX_PLATFORMS"] = platform
    import jax  # only now: --help and --list do without, and JAX reads the environment here

    # JAX read the environment when it was imported, which a notebook may have done long ago.
    jax.config.update("jax_platforms", platform)
    _use_compilation_cache(jax)
    if processes is not None:
        _join(jax, processes)


def is_first_process() -> bool:
    """Whether this process writes what all of them know."""
    import jax

    return jax.process_index() == 0


def cpu_target(target: str) -> int:
    """Number of virtual devices of a target such as `cpu:8`.

    Raises:
        ValueError: the target is not of that form.
    """
    match = re.fullmatch(r"cpu:([1-9][0-9]*)", target)
    if match is None:
        raise ValueError(
            f"target is {target!r}; expected cpu:<devices>, such as cpu:8"
            f"{foreign_character(target)}"
        )
    return int(match[1])


def local_platform() -> str:
    """The platform of this machine: tpu, cuda or cpu."""
    tpu = any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))
    if tpu and _installed("libtpu"):
        return "tpu"
    gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    if gpu and (_installed("jax_cuda12_plugin") or _installed("jax_cuda13_plugin")):
        return "cuda"
    return "cpu"


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _check_environment() -> None:
    """XLA aborts the process at a flag it cannot read, such as one with a pasted dash."""
    for name in ("XLA_FLAGS", "JAX_PLATFORMS", "LIBTPU_INIT_ARGS"):
        value = os.environ.get(name, "")
        bad = [word for word in value.split() if name == "XLA_FLAGS" and not word.startswith("--")]
        if not value.isascii():
            raise ValueError(f"environment variable {name} is {value!r}{foreign_character(value)}")
        if bad:
            raise ValueError(
                f"environment variable XLA_FLAGS contains {bad[0]!r}; expected --name=value words"
            )


def _set_virtual_devices(count: int) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    if _FORCE not in flags and not os.environ.get("JAX_NUM_CPU_DEVICES"):
        os.environ["XLA_FLAGS"] = f"{flags} {_FORCE}={count}".strip()


def _use_compilation_cache(jax: ModuleType) -> None:
    """Keep compiled programs between runs, unless the environment says where or that not."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    jax.config.update("jax_compilation_cache_dir", str(Path(root) / "paxlike" / "xla"))


def _join(jax: ModuleType, processes: Processes) -> None:
    """Meet the other processes, saying for whom one waits."""
    if processes.coordinator is not None:
        _announce(processes)
    try:
        jax.distributed.initialize(
            coordinator_address=processes.coordinator,
            num_processes=processes.num_processes,
            process_id=processes.process_id,
        )
    except ValueError as error:
        raise ValueError(
            f"--multihost: no cluster was detected ({error}); give --coordinator=host:port, "
            "--num_processes and --process_id to every process"
        ) from error
    except RuntimeError as error:
        raise ValueError(
            f"--multihost: the processes did not meet ({error}); start all "
            f"{processes.num_processes or 'of the job'} of them with the same --coordinator, which "
            "must be reachable from each"
        ) from error


def _announce(processes: Processes) -> None:
    host = (processes.coordinator or "").rpartition(":")[0].strip("[]")
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        raise ValueError(f"coordinator is {processes.coordinator!r}; {host}: {error}") from error
    here = " (this machine only)" if address.startswith("127.") else ""
    print(
        f"process {processes.process_id} of {processes.num_processes} waits for the others at "
        f"{processes.coordinator}{here}",
        file=sys.stderr,
        flush=True,
    )
