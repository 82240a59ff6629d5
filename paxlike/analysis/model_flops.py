"""FLOPs that a model needs, whatever a program spends: the numerator of MFU.

Matrix products only, a multiply-add being two. Every weight matrix counts once a token, the output
head included and the embedding look-up not; a token of a causal model attends to half the sequence
(convention "H" of MaxText and Megatron-Bridge); recomputation counts nothing. Free of JAX.
"""

from layers.config import ModelConfig
from layers.counting import num_parameters


def forward_flops(
    config: ModelConfig, *, tokens: int, context: float, heads_of_output: int | None = None
) -> float:
    """FLOPs of a forward pass.

    Args:
        config: the architecture.
        tokens: tokens that the pass reads.
        context: tokens to which one of them attends on average, itself included.
        heads_of_output: tokens whose logits are computed; None is all.
    """
    outputs = tokens if heads_of_output is None else heads_of_output
    head = config.vocab_size * config.embed_dim
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * context
    return 2.0 * (tokens * (_block_weights(config) + attention) + outputs * head)


def training_flops(config: ModelConfig, *, sequences: int, length: int) -> float:
    """FLOPs of forward and backward passes (twice the forward's) over sequences."""
    tokens = sequences * length
    return 3 * forward_flops(config, tokens=tokens, context=mean_context(config, length))


def mean_context(config: ModelConfig, length: int) -> float:
    """Tokens to which a token of a sequence attends on average, without the diagonal's half."""
    if not config.causal:
        return length
    window = min(config.window or length, length)
    return window - window * window / (2 * length)


def _block_weights(config: ModelConfig) -> int:
    """Entries of the blocks' matrices that one token meets (vectors are a rounding error)."""
    embeddings = config.vocab_size * config.embed_dim * (1 if config.tie_embeddings else 2)
    if config.position == "learned":
        embeddings += config.max_position * config.embed_dim
    weights = num_parameters(config) - embeddings
    if config.moe is not None:
        moe = config.moe
        expert = (3 if config.gated else 2) * config.embed_dim * moe.expert_mlp_dim
        idle = moe.num_experts - moe.num_experts_per_token
        weights -= config.num_layers * idle * expert
    return weights
