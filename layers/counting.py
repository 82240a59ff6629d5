"""Closed-form parameter count of a model: what a paper's table says, without building anything.

Free of JAX. It is written from the architecture, not from the modules, so that each checks the
other.
"""

from layers.config import ModelConfig


def num_parameters(config: ModelConfig) -> int:
    """Number of trainable scalars of a model, embeddings and output head included.

    Args:
        config: the architecture.
    """
    embed = config.embed_dim
    embeddings = config.vocab_size * embed * (1 if config.tie_embeddings else 2)
    if config.position == "learned":
        embeddings += config.max_position * embed
    return embeddings + config.num_layers * num_layer_parameters(config) + _norm(config)


def num_layer_parameters(config: ModelConfig) -> int:
    """Number of trainable scalars of one transformer block."""
    norms = (4 if config.norm_placement == "pre_post" else 2) * _norm(config)
    return norms + _attention(config) + _feed_forward(config)


def _norm(config: ModelConfig) -> int:
    return config.embed_dim * (2 if config.norm == "layer" else 1)


def _attention(config: ModelConfig) -> int:
    query = config.num_heads * config.head_dim
    key_value = 2 * config.num_kv_heads * config.head_dim
    matrices = config.embed_dim * (2 * query + key_value)
    biases = (query + key_value) * config.qkv_bias + config.embed_dim * config.out_bias
    return matrices + biases + 2 * config.head_dim * config.qk_norm


def _feed_forward(config: ModelConfig) -> int:
    inputs = 2 if config.gated else 1
    if config.moe is not None:
        moe = config.moe
        expert = (inputs + 1) * config.embed_dim * moe.expert_mlp_dim
        return moe.num_experts * (expert + config.embed_dim)
    matrices = (inputs + 1) * config.embed_dim * config.mlp_dim
    return matrices + (inputs * config.mlp_dim + config.embed_dim) * config.mlp_bias
