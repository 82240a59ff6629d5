"""What the host adds: to each step of the training loop, and to the start of the program."""

import statistics
import subprocess
import sys
import time
from pathlib import Path

import jax

from layers.config import FLOAT32, ModelConfig
from meshes.axes import MeshShape
from paxlike.config import Experiment, ParallelConfig
from paxlike.data.config import DataConfig, SourceConfig
from paxlike.model import Model
from paxlike.runtime import runtime
from paxlike.training import loop
from paxlike.training.config import TrainConfig
from tests.benchmarks import small_step

STEPS, ROUNDS = 400, 5


def tiny_run() -> Experiment:
    """So little work on the device that the host is what takes time."""
    return Experiment(
        name="host",
        model=ModelConfig(
            vocab_size=64, num_layers=1, embed_dim=16, num_heads=1, num_kv_heads=1, head_dim=16,
            mlp_dim=16, dtypes=FLOAT32,
        ),
        parallel=ParallelConfig(mesh=MeshShape(), rules="dp"),
        data=DataConfig(source=SourceConfig(kind="synthetic", vocab_size=64), sequence_length=16),
        train=TrainConfig(
            num_steps=STEPS, global_batch_size=2, log_every=10, eval_every=0,
            checkpoint_every=STEPS,
        ),
    )  # fmt: skip


def test_the_loop_adds_less_than_two_milliseconds_a_step(tmp_path: Path) -> None:
    """The whole loop, with data, metrics and log lines, less the compiled step called alone."""
    run = tiny_run()
    alone = small_step.Runner(run, devices=1)
    bare = statistics.median(alone() for _ in range(STEPS))
    added = []
    for i in range(ROUNDS):
        with runtime(run, jax.devices()[:1]):
            (tmp_path / str(i)).mkdir()
            done = loop.run(Model(run.model), run, tmp_path / str(i), quiet=True)
        added.append(statistics.median(done.step_seconds) - bare)
    print(f"\ncompiled step {bare * 1e3:.2f} ms; the loop adds {statistics.median(added) * 1e3:.2f}"
          f" ms (of {ROUNDS} runs: {min(added) * 1e3:.2f} to {max(added) * 1e3:.2f})")  # fmt: skip
    assert statistics.median(added) < 2e-3


def seconds(*command: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    return time.perf_counter() - start


def test_starting_takes_less_than_a_second_beyond_jax() -> None:
    commands = {
        "import jax": ("-c", "import jax"),
        "import paxlike.main": ("-c", "import jax, paxlike.main"),
        "and a mode": ("-c", "import jax, paxlike.main, paxlike.modes.train"),
        "python": ("-c", ""),
        "--list": ("-m", "paxlike.main", "--list"),
        "--help": ("-m", "paxlike.main", "--help"),
    }
    rounds = [{name: seconds(*command) for name, command in commands.items()} for _ in range(6)]
    took = {name: statistics.median(r[name] for r in rounds[1:]) for name in commands}
    print("\n" + ", ".join(f"{name}: {value:.2f} s" for name, value in took.items()))
    assert took["import paxlike.main"] - took["import jax"] < 1.0
    assert took["--list"] - took["python"] < 1.0
    assert took["--help"] - took["python"] < 1.0
