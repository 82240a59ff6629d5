"""One training step of a small decoder through the whole framework: time, compile time, memory.

    python -m tests.benchmarks.small_step --devices=8 --rules=fsdp --mesh fsdp=8

Prints one JSON line. 6.3M parameters: 4 layers, width 256, 8 heads of 32, SwiGLU 1024, vocabulary
4096, batch 16 x 256 tokens, float32, AdamW: the step that other frameworks are compared at.
"""

import argparse
import json
import resource
import statistics
import time
from typing import Any

from layers.config import FLOAT32, ModelConfig, MoEConfig
from meshes.axes import MeshShape
from paxlike import launch
from paxlike.config import Experiment, ParallelConfig
from paxlike.data.config import DataConfig, SourceConfig
from paxlike.training.config import OptimizerConfig, TrainConfig
from tests.benchmarks.bare_step import HUNDRED_MILLION, SMALL, Dims


def experiment(
    mesh: MeshShape, rules: str, dims: Dims = SMALL, *, experts: int = 0, **parallel: Any
) -> Experiment:
    """The step on a mesh; `experts` > 0 makes it a top-2 mixture of the same width."""
    moe = None
    if experts:
        moe = MoEConfig(
            num_experts=experts, num_experts_per_token=2, expert_mlp_dim=dims.mlp,
            routing="capacity",
        )  # fmt: skip
    return Experiment(
        name="small_step",
        model=ModelConfig(
            vocab_size=dims.vocab, num_layers=dims.layers, embed_dim=dims.embed,
            num_heads=dims.heads, num_kv_heads=dims.heads, head_dim=dims.embed // dims.heads,
            mlp_dim=dims.mlp, dtypes=FLOAT32, moe=moe,
        ),
        parallel=ParallelConfig(mesh=mesh, rules=rules, **parallel),
        data=DataConfig(
            source=SourceConfig(kind="synthetic", vocab_size=dims.vocab),
            sequence_length=dims.length,
        ),
        optimizer=OptimizerConfig(schedule="constant"),
        train=TrainConfig(global_batch_size=dims.batch),
    )  # fmt: skip


now = time.perf_counter


class Runner:
    """Compiles the step once; each call runs it once and returns the seconds that it took."""

    def __init__(self, run: Experiment, devices: int | None = None):
        import jax
        import numpy as np

        from paxlike.model import Model
        from paxlike.runtime import runtime
        from paxlike.training.state import init_state, optimizer_of
        from paxlike.training.step import abstract_batch, build_train_step

        with runtime(run, jax.devices()[:devices]):
            model = Model(run.model)
            optimizer = optimizer_of(model, run)
            self.state = init_state(model, optimizer, run)
            random = np.random.default_rng(0)
            self.batch = {
                name: jax.device_put(
                    _values(name, random, like.shape, run.model.vocab_size), like.sharding
                )
                for name, like in abstract_batch(run).items()
            }
            start = now()
            step = build_train_step(model, optimizer, run)
            self.step = step.lower(self.state, self.batch).compile()
            self.compile_seconds = now() - start

    def __call__(self) -> float:
        import jax

        start = now()
        self.state, self.metrics = self.step(self.state, self.batch)
        jax.block_until_ready((self.state, self.metrics))
        return now() - start


def _values(name: str, random: Any, shape: tuple[int, ...], vocab_size: int) -> Any:
    import numpy as np

    if name in ("tokens", "targets"):
        return random.integers(0, vocab_size, shape).astype(np.int32)
    if name == "positions":
        return np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    return np.ones(shape, np.float32 if name == "loss_weights" else np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--rules", default="fsdp_tp")
    parser.add_argument("--mesh", nargs="*", default=[], help="axis=size")
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--large", action="store_true", help="the model of 110M parameters")
    parser.add_argument("--unrolled", action="store_true", help="layers written out, not scanned")
    given = parser.parse_args()
    launch.start(given.devices)
    axes = {axis: int(size) for axis, _, size in (item.partition("=") for item in given.mesh)}
    dims = HUNDRED_MILLION if given.large else SMALL
    run = experiment(
        MeshShape(**axes), given.rules, dims, experts=given.experts,
        scan_layers=not given.unrolled,
    )  # fmt: skip
    runner = Runner(run)
    seconds = [runner() for _ in range(given.steps)][2:]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    row = {
        "median_seconds": statistics.median(seconds),
        "min_seconds": min(seconds),
        "compile_seconds": runner.compile_seconds,
        "peak_rss_bytes": peak,
        "loss": float(runner.metrics["loss"]),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
