"""The smallest real experiment, and batches for it."""

import dataclasses

import jax
import numpy as np

from layers.config import FLOAT32, ModelConfig
from meshes.axes import MeshShape
from paxlike.config import Experiment, ParallelConfig
from paxlike.data.config import DataConfig, SourceConfig
from paxlike.training.config import OptimizerConfig, TrainConfig
from paxlike.training.step import abstract_batch

MODEL = ModelConfig(
    vocab_size=64, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, head_dim=8,
    mlp_dim=32, dtypes=FLOAT32,
)  # fmt: skip
DATA = DataConfig(
    source=SourceConfig(kind="synthetic", vocab_size=64, num_documents=64), sequence_length=32
)
MIXED = MeshShape(data=2, fsdp=2, tensor=2)


def experiment(*, mesh=MIXED, optimizer=None, model=MODEL, parallel=None, **train):
    return Experiment(
        name="tiny",
        model=model,
        parallel=dataclasses.replace(ParallelConfig(mesh=mesh), **(parallel or {})),
        data=DATA,
        optimizer=optimizer or OptimizerConfig(),
        train=TrainConfig(**({"num_steps": 12, "log_every": 1} | train)),
    )


def batch(experiment, seed=0):
    """Random tokens whose weights differ much between rows, on the devices."""
    rng = np.random.default_rng(seed)
    abstract = abstract_batch(experiment)
    shape = abstract["tokens"].shape
    rows = (np.arange(shape[0]) + 1.0)[:, None] / shape[0]
    host = {
        "tokens": rng.integers(0, 64, shape).astype(np.int32),
        "targets": rng.integers(0, 64, shape).astype(np.int32),
        "segment_ids": np.ones(shape, np.int32),
        "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        "loss_weights": (rng.random(shape) < rows).astype(np.float32),
    }
    return {name: jax.device_put(x, abstract[name].sharding) for name, x in host.items()}
