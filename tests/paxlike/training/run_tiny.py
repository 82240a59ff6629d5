"""Trains the tiny experiment in a process of its own, to be killed.

run_tiny.py WORKDIR STEPS AXIS=SIZE,... [COORDINATOR PROCESSES PROCESS]
"""

import pathlib
import sys

import jax

from meshes.axes import MeshShape
from paxlike.modes.train import train
from tests.paxlike.training.tiny import experiment

if __name__ == "__main__":
    workdir, steps, axes, *cluster = sys.argv[1:]
    if cluster:
        jax.distributed.initialize(cluster[0], int(cluster[1]), int(cluster[2]))
    sizes = dict(axis.split("=") for axis in axes.split(","))
    config = experiment(
        mesh=MeshShape(**{axis: int(size) for axis, size in sizes.items()}),
        num_steps=int(steps),
        checkpoint_every=4,
        eval_every=10,
        eval_steps=1,
        ema_decay=0.9,
    )
    train(config, pathlib.Path(workdir))
