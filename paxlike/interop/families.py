"""The families of models that we exchange with Hugging Face and GGUF, as data.

A family is a `model_type` of `config.json`, the class that `transformers` loads it with, how its
configuration says ours, and the table of its tensors. To add one: a `Family` below, and a line in
`tests/paxlike/interop/test_pretrained.py`, which compares it with the library's own implementation.

d model, n query heads, k key/value heads, h head dim, f feed-forward, v vocabulary, e experts.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from paxlike.interop.mapping import Row, Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One model type.

    Attributes:
        model_type: as in `config.json`.
        architecture: class of `transformers`.
        fields: key of `config.json` -> path in our model config (or several), values equal.
        fixed: our settings that the family implies and no key says.
        required: key -> the only value that we can represent.
        defaults: key -> value where the file does not say it, as the library has it.
        table: its tensors.
        windowed: how the file says that attention has a window: `always` (a number switches it
            on), `flag` (only with `use_sliding_window`) or `never`.
        biased: which biases attention has: `all` with `attention_bias`, `qkv` (those of queries,
            keys and values, always) or `none`.
        aliases: other spellings of keys.
    """

    model_type: str
    architecture: str
    fields: Mapping[str, str]
    fixed: Mapping[str, Any]
    required: Mapping[str, Any]
    defaults: Mapping[str, Any]
    table: Table
    windowed: Literal["always", "flag", "never"] = "never"
    biased: Literal["all", "qkv", "none"] = "none"
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _rows(*rows: tuple[str, str, str]) -> Table:
    return tuple(Row(*row) for row in rows)


_OUTER = _rows(
    ("model.embed_tokens.weight", "embedding", "v d -> v d"),
    ("model.norm.weight", "final_norm/scale", "d -> d"),
    ("lm_head.weight", "head", "v d -> d v"),
)

_L = "model.layers.{layer}."

_ATTENTION = _rows(
    (_L + "self_attn.q_proj.weight", "layers/attention/query", "(n h) d -> d n h"),
    (_L + "self_attn.k_proj.weight", "layers/attention/key", "(k h) d -> d k h"),
    (_L + "self_attn.v_proj.weight", "layers/attention/value", "(k h) d -> d k h"),
    (_L + "self_attn.o_proj.weight", "layers/attention/out", "d (n h) -> n h d"),
    (_L + "self_attn.q_proj.bias", "layers/attention/query_bias", "(n h) -> n 1 h"),
    (_L + "self_attn.k_proj.bias", "layers/attention/key_bias", "(k h) -> k 1 h"),
    (_L + "self_attn.v_proj.bias", "layers/attention/value_bias", "(k h) -> k 1 h"),
    (_L + "self_attn.o_proj.bias", "layers/attention/out_bias", "d -> d"),
    (_L + "self_attn.q_norm.weight", "layers/attention/query_norm/scale", "h -> h"),
    (_L + "self_attn.k_norm.weight", "layers/attention/key_norm/scale", "h -> h"),
)

_PRE_NORMS = _rows(
    (_L + "input_layernorm.weight", "layers/attention_norm/scale", "d -> d"),
    (_L + "post_attention_layernorm.weight", "layers/mlp_norm/scale", "d -> d"),
)

_DENSE = _rows(
    (_L + "mlp.gate_proj.weight", "layers/mlp/gate", "f d -> d f"),
    (_L + "mlp.up_proj.weight", "layers/mlp/up", "f d -> d f"),
    (_L + "mlp.down_proj.weight", "layers/mlp/down", "d f -> f d"),
    (_L + "mlp.gate_proj.bias", "layers/mlp/gate_bias", "f -> f"),
    (_L + "mlp.up_proj.bias", "layers/mlp/up_bias", "f -> f"),
    (_L + "mlp.down_proj.bias", "layers/mlp/down_bias", "d -> d"),
)

_MIXTRAL_EXPERTS = _rows(
    (_L + "block_sparse_moe.gate.weight", "layers/mlp/router", "e d -> d e"),
    (_L + "block_sparse_moe.experts.{expert}.w1.weight", "layers/mlp/gate", "f d -> d f"),
    (_L + "block_sparse_moe.experts.{expert}.w3.weight", "layers/mlp/up", "f d -> d f"),
    (_L + "block_sparse_moe.experts.{expert}.w2.weight", "layers/mlp/down", "d f -> f d"),
)

_QWEN_EXPERTS = _rows(
    (_L + "mlp.gate.weight", "layers/mlp/router", "e d -> d e"),
    (_L + "mlp.experts.{expert}.gate_proj.weight", "layers/mlp/gate", "f d -> d f"),
    (_L + "mlp.experts.{expert}.up_proj.weight", "layers/mlp/up", "f d -> d f"),
    (_L + "mlp.experts.{expert}.down_proj.weight", "layers/mlp/down", "d f -> f d"),
)

_DECODER = _OUTER + _ATTENTION + _PRE_NORMS + _DENSE

_FIELDS = {
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
    "hidden_size": "embed_dim",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "mlp_dim",
    "max_position_embeddings": "max_position",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tie_embeddings",
    "initializer_range": "init_std",
}

_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "rope_theta": 10_000.0,
}

_SILU = {"hidden_act": "silu", "attention_dropout": 0.0}

_RMS = {"norm": "rms", "norm_placement": "pre", "activation": "swiglu", "position": "rope"}

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    fields=_FIELDS | {"mlp_bias": "mlp_bias"},
    fixed=_RMS,
    required=_SILU | {"pretraining_tp": 1, "rope_interleaved": False},
    defaults=_DEFAULTS | {"max_position_embeddings": 2048, "mlp_bias": False},
    table=_DECODER,
    biased="all",
)

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    fields=_FIELDS,
    fixed=_RMS,
    required=_SILU,
    defaults=_DEFAULTS | {"max_position_embeddings": 131_072, "sliding_window": 4096},
    table=_DECODER,
    windowed="always",
)

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    fields=_FIELDS,
    fixed=_RMS,
    required=_SILU,
    defaults=_DEFAULTS
    | {
        "max_position_embeddings": 32_768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    table=_DECODER,
    windowed="flag",
    biased="qkv",
)

QWEN3 = dataclasses.replace(
    QWEN2,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    fixed=_RMS | {"qk_norm": True},
    defaults={**QWEN2.defaults, "head_dim": 128},
    biased="all",
)

QWEN3_MOE = dataclasses.replace(
    QWEN3,
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    fields=_FIELDS
    | {
        "num_experts": "moe.num_experts",
        "num_experts_per_tok": "moe.num_experts_per_token",
        "moe_intermediate_size": "moe.expert_mlp_dim",
        "norm_topk_prob": "moe.normalize_weights",
        "router_aux_loss_coef": "moe.auxiliary_loss",
    },
    required=_SILU | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    defaults=_DEFAULTS
    | {
        "max_position_embeddings": 32_768,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "max_window_layers": 0,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
    },
    table=_OUTER + _ATTENTION + _PRE_NORMS + _QWEN_EXPERTS,
    aliases={"num_local_experts": "num_experts"},
)

MIXTRAL = Family(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    fields=_FIELDS
    | {
        "intermediate_size": "mlp_dim moe.expert_mlp_dim",
        "num_local_experts": "moe.num_experts",
        "num_experts_per_tok": "moe.num_experts_per_token",
        "router_aux_loss_coef": "moe.auxiliary_loss",
    },
    fixed=_RMS | {"moe.normalize_weights": True},
    required=_SILU | {"router_jitter_noise": 0.0},
    defaults=_DEFAULTS
    | {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 131_072,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.001,
    },
    table=_OUTER + _ATTENTION + _PRE_NORMS + _MIXTRAL_EXPERTS,
    windowed="always",
)

GEMMA = Family(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    fields=_FIELDS,
    fixed=_RMS | {"activation": "geglu", "norm_unit_offset": True, "scale_embeddings": True},
    required={"hidden_act": "gelu_pytorch_tanh", "attention_dropout": 0.0},
    defaults=_DEFAULTS
    | {"max_position_embeddings": 8192, "tie_word_embeddings": True, "head_dim": 256},
    table=_DECODER,
    biased="all",
)

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL, GEMMA)
}
