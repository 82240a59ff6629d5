"""Trains the tiny experiment in a process of its own, to be killed: run_tiny.py WORKDIR STEPS."""

import pathlib
import sys

from meshes.axes import MeshShape
from paxlike.modes.train import train
from tests.paxlike.training.tiny import experiment

if __name__ == "__main__":
    config = experiment(
        mesh=MeshShape(fsdp=2),
        num_steps=int(sys.argv[2]),
        checkpoint_every=4,
        eval_every=10,
        eval_steps=1,
        ema_decay=0.9,
    )
    train(config, pathlib.Path(sys.argv[1]))
