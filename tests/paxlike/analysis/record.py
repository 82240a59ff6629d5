"""Record the optimised HLO of `programs` for targets that the tests' machine does not have.

Run with an environment that holds jax, jax-cuda12-plugin and libtpu:
`python tests/paxlike/analysis/record.py` writes `samples/<target>_<jax version>_<program>.hlo.gz`.
Source tables and the parts of backend configs that the reader ignores are cut off.
"""

import gzip
import os
import pathlib
import re

os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-8",
    TPU_WORKER_HOSTNAMES="localhost",
)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import programs  # noqa: E402
from jax.experimental import topologies  # noqa: E402

SAMPLES = pathlib.Path(__file__).parent / "samples"
KEPT = re.compile(
    r'"(?:known_trip_count|async_collective_fusion_config|gemm_backend_config)":\{[^{}]*\}'
    r'|"estimated_cycles":"\d+"'
)
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def devices(target: str) -> list:
    if target == "h100":
        return topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=H100, topology="1x1x8"
        ).devices
    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x2").devices


def trim(text: str) -> str:
    """Cut what the reader ignores; the instructions stay as the compiler wrote them."""
    text = re.sub(r"\nFileNames\n.*?\n(?=\n*[%E])", "\n", text, flags=re.DOTALL)
    lines = []
    for line in text.splitlines():
        line, found, config = line.partition(", backend_config=")
        kept = ",".join(KEPT.findall(config))
        line = re.sub(r' ?(?:scheduling_name="[^"]*"|stack_frame_id=\d+)', "", line)
        lines.append(line + (f"{found}{{{kept}}}" if kept else ""))
    return "\n".join(lines) + "\n"


def main() -> None:
    SAMPLES.mkdir(exist_ok=True)
    for target in ("h100", "v5e"):
        shape = tuple(programs.AXES.values())
        mesh = jax.sharding.Mesh(
            np.array(devices(target)).reshape(shape),
            tuple(programs.AXES),
            axis_types=(jax.sharding.AxisType.Explicit,) * 3,
        )
        for name in programs.PROGRAMS:
            path = SAMPLES / f"{target}_{jax.__version__}_{name}.hlo.gz"
            text = trim(programs.compile_text(name, mesh))
            path.write_bytes(gzip.compress(text.encode(), mtime=0))
            print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main()
