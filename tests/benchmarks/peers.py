"""The small step against other frameworks, each in an environment of its own, one after another.

    python -m tests.benchmarks.peers --maxtext=PYTHON --torch=PYTHON --meshes=one,fsdp8

PYTHON is the interpreter of an environment in which the peer is installed (MaxText 0.2.5:
`pip install 'maxtext[tpu]'` on Python 3.12; torch with transformers). Peers and ours alternate for
`--rounds` rounds; the table gives medians over the rounds, peak memory and compile time as each
reports them. Times of MaxText are those between its log lines, since its own lag by two steps.
"""

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

# mesh: (devices, ours, MaxText)
MESHES: dict[str, tuple[int, list[str], list[str]]] = {
    "one": (1, ["--rules=fsdp_tp"], ["ici_fsdp_parallelism=1"]),
    "fsdp8": (8, ["--rules=fsdp", "--mesh", "fsdp=8"], ["ici_fsdp_parallelism=8"]),
    "fsdp2_tp4": (
        8, ["--rules=fsdp_tp", "--mesh", "fsdp=2", "tensor=4"],
        ["ici_fsdp_parallelism=2", "ici_tensor_parallelism=4"],
    ),
    "tp8": (
        8, ["--rules=tp", "--mesh", "tensor=8"],
        ["ici_fsdp_parallelism=1", "ici_tensor_parallelism=8"],
    ),
    "data8": (
        8, ["--rules=dp", "--mesh", "data=8"],
        ["ici_fsdp_parallelism=1", "ici_data_parallelism=8"],
    ),
    "fsdp2_cp4": (
        8, ["--rules=fsdp", "--mesh", "fsdp=2", "seq=4"],
        ["ici_fsdp_parallelism=2", "ici_context_parallelism=4"],
    ),
    "fsdp2_ep4": (
        8, ["--rules=fsdp", "--experts=8", "--mesh", "fsdp=2", "expert=4"],
        ["ici_fsdp_parallelism=2", "ici_expert_parallelism=4", "num_experts=8",
         "num_experts_per_tok=2", "decoder_block=mixtral", "sparse_matmul=False",
         "megablox=False", "capacity_factor=1.25", "base_moe_mlp_dim=1024"],
    ),
}  # fmt: skip

STEPS = 8

TORCH_STEP = """
import json, resource, statistics, time, torch, transformers
torch.set_num_threads(2)
config = transformers.LlamaConfig(
    vocab_size=4096, hidden_size=256, intermediate_size=1024, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=256)
model = transformers.LlamaForCausalLM(config).float()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
tokens = torch.randint(0, 4096, (16, 256))
seconds = []
for _ in range(8):
    start = time.perf_counter()
    optimizer.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    seconds.append(time.perf_counter() - start)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"median_seconds": statistics.median(seconds[2:]), "peak_rss_bytes": peak}))
"""


def ours(python: str, mesh: str, *more: str) -> dict[str, float]:
    devices, flags, _ = MESHES[mesh]
    flags = [*flags, *more]
    command = [python, "-m", "tests.benchmarks.small_step", f"--devices={devices}", *flags]
    out = subprocess.run([*command, f"--steps={STEPS}"], capture_output=True, text=True, check=True)
    return json.loads(out.stdout.splitlines()[-1])


def torch_eager(python: str, mesh: str) -> dict[str, float]:
    out = subprocess.run([python, "-c", TORCH_STEP], capture_output=True, text=True, check=True)
    return json.loads(out.stdout.splitlines()[-1])


def maxtext(python: str, mesh: str) -> dict[str, float]:
    devices, _, flags = MESHES[mesh]
    where = (
        "import importlib.util as u; print(u.find_spec('maxtext').submodule_search_locations[0])"
    )
    package = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True)
    base = os.path.join(package.stdout.split()[-1], "configs", "base.yml")
    environment = os.environ | {
        "DECOUPLE_GCLOUD": "TRUE",
        "JAX_PLATFORMS": "cpu",
        "PYTHONUNBUFFERED": "1",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    with tempfile.TemporaryDirectory() as out:
        command = [
            python, "-m", "maxtext.trainers.pre_train.train", base, "run_name=small",
            f"base_output_directory={out}", "hardware=cpu", "dataset_type=synthetic",
            "reuse_example_batch=1", "enable_checkpointing=False",
            "skip_jax_distributed_system=True", "base_emb_dim=256", "base_num_query_heads=8",
            "base_num_kv_heads=8", "head_dim=32", "base_mlp_dim=1024",
            "base_num_decoder_layers=4", "vocab_size=4096",
            f"per_device_batch_size={16 // devices}", "max_target_length=256", f"steps={STEPS + 4}",
            "dtype=float32", "weight_dtype=float32", "attention=dot_product",
            "remat_policy=minimal", "enable_goodput_recording=False", "monitor_goodput=False",
            "enable_checkpoint_cloud_logger=False", "log_config=False", *flags,
        ]  # fmt: skip
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert process.stdout is not None
        times, lines = [], []
        for line in process.stdout:
            lines.append(line)
            if re.search(r"completed step: \d+", line):
                times.append(time.perf_counter())
        if process.wait() or len(times) < 5:
            raise RuntimeError("MaxText failed: " + "".join(lines[-5:]))
    seconds = [b - a for a, b in zip(times[2:], times[3:], strict=False)]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return {"median_seconds": statistics.median(seconds), "peak_rss_bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--maxtext", help="interpreter with MaxText")
    parser.add_argument("--torch", help="interpreter with torch and transformers")
    parser.add_argument("--meshes", default=",".join(MESHES))
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    for mesh in given.meshes.split(","):
        runs: dict[str, Callable[[], dict[str, float]]] = {}
        runs["paxlike"] = lambda mesh=mesh: ours(sys.executable, mesh)
        if mesh == "one":  # torch has no loop over layers either
            runs["unrolled"] = lambda mesh=mesh: ours(sys.executable, mesh, "--unrolled")
        if given.maxtext:
            runs["maxtext"] = lambda mesh=mesh: maxtext(given.maxtext, mesh)
        if given.torch and mesh == "one":
            runs["torch eager"] = lambda mesh=mesh: torch_eager(given.torch, mesh)
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
        for _ in range(given.rounds):
            for name, run in runs.items():
                try:
                    rows[name].append(run())
                except (RuntimeError, subprocess.CalledProcessError) as error:
                    print(f"{mesh}: {name} failed: {str(error)[-300:]}", file=sys.stderr)
        for name, results in rows.items():
            if results:
                shown = {
                    key: round(statistics.median(r[key] for r in results), 3) for key in results[0]
                }
                print(f"{mesh:10} {name:12} {shown}", flush=True)


if __name__ == "__main__":
    main()
