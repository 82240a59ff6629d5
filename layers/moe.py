"""Sparse mixture of experts: being built."""

from flax import nnx

from layers.config import ModelConfig


class MoE(nnx.Module):
    """A sparse feed-forward block."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        raise NotImplementedError
