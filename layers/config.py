"""What a model is: the architecture as frozen data, and nothing about how it is executed.

Rule of thumb: if one device would give other logits, the setting belongs here. Free of JAX, so that
listing experiments costs nothing.
"""

import dataclasses
from typing import Literal

Activation = Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu", "relu2"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DTypes:
    """The one dtype policy.

    Attributes:
        params: dtype in which parameters are stored and updated.
        compute: dtype of activations and of the operands of matrix products.
        accumulate: dtype of the sums inside matrix products, softmax, norms and losses.
        reduce: dtype of partial sums on the wire (all-reduce, reduce-scatter).
    """

    params: str = "float32"
    compute: str = "bfloat16"
    accumulate: str = "float32"
    reduce: str = "float32"

    def __post_init__(self) -> None:
        known = ("float64", "float32", "bfloat16", "float16")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value not in known:
                raise ValueError(f"dtypes.{field.name} is {value!r}; expected one of {known}")


FLOAT32 = DTypes(compute="float32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding, halves convention.

    Attributes:
        theta: base of the geometric frequencies.
        scaling: `none`; `linear` divides positions by `factor`; `llama3` stretches the low
            frequencies only (Llama 3.1); `yarn` interpolates by wavelength and scales attention
            (arXiv 2309.00071).
        factor: how far the context is stretched.
        low_freq_factor: llama3: wavelengths above original/low are fully stretched.
        high_freq_factor: llama3: wavelengths below original/high are untouched.
        original_max_position: context length before stretching.
        beta_fast: yarn: rotations above which a frequency is untouched.
        beta_slow: yarn: rotations below which a frequency is fully stretched.
        attention_factor: yarn: multiplies queries and keys; None is 0.1 ln(factor) + 1.
    """

    theta: float = 10_000.0
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        if self.theta <= 0 or self.factor < 1:
            raise ValueError(
                f"rope.theta is {self.theta} and rope.factor {self.factor}; expected a positive "
                "base and a factor of at least 1"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Sparse mixture of experts in place of the feed-forward block.

    Attributes:
        num_experts: experts of each layer.
        num_experts_per_token: experts that each token visits (top k).
        expert_mlp_dim: hidden width of one expert.
        routing: `dropless` computes every chosen pair; `capacity` drops what exceeds
            ceil(capacity_factor * k * tokens / experts) pairs of an expert (GShard, Switch).
        capacity_factor: room of an expert over a perfectly even share.
        normalize_weights: whether the k gate values are rescaled to sum to 1.
        auxiliary_loss: weight of the load-balancing loss E * sum(fraction * mean probability).
        z_loss: weight of the squared log-partition of the router (ST-MoE).
    """

    num_experts: int
    num_experts_per_token: int
    expert_mlp_dim: int
    routing: Literal["dropless", "capacity"] = "dropless"
    capacity_factor: float = 1.25
    normalize_weights: bool = True
    auxiliary_loss: float = 0.01
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ValueError(
                f"moe.num_experts_per_token is {self.num_experts_per_token}; expected 1 to "
                f"moe.num_experts = {self.num_experts}"
            )
        if self.routing == "capacity" and self.capacity_factor <= 0:
            raise ValueError(
                f"moe.capacity_factor is {self.capacity_factor}; expected a positive number"
            )
        if self.routing == "dropless" and self.capacity_factor != type(self).capacity_factor:
            raise ValueError(
                "moe.capacity_factor has no effect with moe.routing=dropless; set "
                "moe.routing=capacity or leave the factor alone"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer.

    Attributes:
        vocab_size: rows of the embedding; at least the tokenizer's vocabulary.
        num_layers: transformer blocks.
        embed_dim: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: key/value heads: num_heads (MHA), fewer (GQA) or 1 (MQA).
        head_dim: width of one head; independent of embed_dim / num_heads.
        mlp_dim: hidden width of the feed-forward block.
        max_position: longest sequence; the rows of the table if positions are learned.
        activation: of the feed-forward block; swiglu and geglu have a gate matrix.
        norm: kind of normalisation.
        norm_eps: added to the variance.
        norm_placement: before a block, after it (on the residual sum), or on both its sides.
        norm_unit_offset: the scale is stored as its difference from 1 (Gemma).
        position: rotary, learned or no position information.
        rope: parameters of the rotary embedding; unused otherwise.
        causal: whether a token sees only itself and earlier ones.
        window: how many tokens back a token sees, itself included; None is unlimited.
        qk_norm: RMS norm of each query and key head before the rotation (Qwen3).
        qkv_bias, out_bias, mlp_bias: biases of these projections.
        tie_embeddings: the output head is the embedding's transpose.
        scale_embeddings: embeddings are multiplied by sqrt(embed_dim) (Gemma).
        attention_softcap: scores become cap * tanh(scores / cap).
        logit_softcap: the same for the output logits.
        attention_scale: multiplies the scores; None is 1/sqrt(head_dim).
        z_loss: weight of the squared log-partition of the output softmax (PaLM).
        moe: mixture of experts; None is a dense feed-forward block.
        init_std: standard deviation of initial weights; outputs of blocks are further divided
            by sqrt(2 * num_layers) (GPT-2).
        dtypes: the dtype policy.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    max_position: int = 8192
    activation: Activation = "swiglu"
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    norm_placement: Literal["pre", "post", "pre_post"] = "pre"
    norm_unit_offset: bool = False
    position: Literal["rope", "learned", "none"] = "rope"
    rope: RopeConfig = RopeConfig()
    causal: bool = True
    window: int | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False
    scale_embeddings: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    attention_scale: float | None = None
    z_loss: float = 0.0
    moe: MoEConfig | None = None
    init_std: float = 0.02
    dtypes: DTypes = DTypes()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim",
            "mlp_dim", "max_position",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}; expected at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"model.num_heads is {self.num_heads} and model.num_kv_heads {self.num_kv_heads}; "
                "expected the query heads to be a multiple of the key/value heads"
            )
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(f"model.head_dim is {self.head_dim}; rotary positions need it even")
        if self.position != "rope" and self.rope != RopeConfig():
            raise ValueError(
                f"model.rope has no effect with model.position={self.position}; set "
                "model.position=rope or leave model.rope alone"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"model.window is {self.window}; expected at least 1, or None")
        for name in ("attention_softcap", "logit_softcap"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"model.{name} is {value}; expected a positive number, or None")

    @property
    def gated(self) -> bool:
        """Whether the feed-forward block multiplies two input projections."""
        return self.activation in ("swiglu", "geglu")
