"""`config.json` of Hugging Face and our model config, each from the other.

Every key is translated, known to change nothing, or refused by name; a model that a family cannot
express is found by translating there and back. Free of JAX.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layers.config import DTypes, ModelConfig
from paxlike.errors import expected_name
from paxlike.interop.families import FAMILIES, Family
from paxlike.serialization import from_json, to_json
from paxlike.workdir import leaves

CONFIG = "config.json"

# Keys that say nothing of the function that the model computes.
_WITHOUT_EFFECT = frozenset((
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "return_dict", "output_attentions",
    "output_hidden_states", "output_router_logits", "id2label", "label2id", "problem_type",
    "chunk_size_feed_forward", "task_specific_params", "tokenizer_class", "is_llama_config",
    "transformers.js_config", "is_encoder_decoder",
))  # fmt: skip

# Our settings without effect on logits, which a config file need not agree with.
_FREE = ("dtypes", "z_loss", "init_std", "moe.auxiliary_loss", "moe.z_loss", "max_position")

# Kind of rope scaling -> (their name, {their parameter: ours}).
_ROPE: dict[str, tuple[str, dict[str, str]]] = {
    "none": ("default", {}),
    "linear": ("linear", {"factor": "factor"}),
    "llama3": (
        "llama3",
        {
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            "original_max_position_embeddings": "original_max_position",
        },
    ),
    "yarn": (
        "yarn",
        {
            "factor": "factor",
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
            "original_max_position_embeddings": "original_max_position",
            "attention_factor": "attention_factor",
        },
    ),
}


_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")

# Parameters that a scaling may carry if they have this value, which changes nothing.
_ROPE_WITHOUT_EFFECT = {"partial_rotary_factor": 1.0, "truncate": True}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ValueError: the file is missing, or no JSON object.
    """
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ValueError(
            f"there is no {path}; expected a folder of a Hugging Face model"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value


def family_of(config: Mapping[str, Any], where: str) -> Family:
    """The family that a `config.json` names.

    Raises:
        ValueError: none that we know.
    """
    name = str(config.get("model_type"))
    if name not in FAMILIES:
        raise ValueError(f"{where}: {expected_name('model_type', name, FAMILIES)}")
    return FAMILIES[name]


def to_model(config: Mapping[str, Any], where: str, dtypes: DTypes | None = None) -> ModelConfig:
    """Translate a `config.json`.

    Args:
        config: its content.
        where: what it is called in errors.
        dtypes: the dtype policy, which the file does not decide.

    Raises:
        ValueError: a model type, a key or a value that we cannot represent.
    """
    family = family_of(config, where)
    said = {family.aliases.get(key, key): value for key, value in config.items()}
    filled = {**family.defaults, **said}
    for key, only in family.required.items():
        if said.get(key, only) not in (only, None):
            raise ValueError(
                f"{where}: {key} is {said[key]!r}, which we cannot represent; expected {only!r}"
            )
    values: dict[str, Any] = dict(family.fixed)
    for key, paths in family.fields.items():
        value = filled.get(key)
        if value is None:
            value = family.defaults.get(key)
        values |= {path: value for path in paths.split()}
    values |= _dimensions(values, where) | _rope(filled, where)
    known = {*family.fields, *family.required, *_ROPE_KEYS, *_WITHOUT_EFFECT}
    bias = False
    if family.biased == "all":
        known.add("attention_bias")
        bias = bool(said.get("attention_bias"))
    values |= {"qkv_bias": bias or family.biased == "qkv", "out_bias": bias}
    if family.windowed != "never":
        known |= {"sliding_window", "use_sliding_window", "layer_types", "max_window_layers"}
        values["window"] = _window(family, filled, values["num_layers"], where)
    unknown = {
        key: value
        for key, value in said.items()
        if key not in known and not key.startswith("_") and value is not None
    }
    if unknown:
        raise ValueError(
            f"{where}: {', '.join(f'{k}={v!r}' for k, v in sorted(unknown.items()))}: not known "
            f"for model_type {family.model_type!r}, and not ignored; remove what has no effect"
        )
    tree = _nested({path: value for path, value in values.items() if value is not None})
    try:
        return from_json(
            tree | {"dtypes": to_json(dtypes or DTypes(), DTypes)}, ModelConfig, "model"
        )
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error


def from_model(model: ModelConfig, family: Family) -> dict[str, Any]:
    """Say a model in the words of a family.

    Raises:
        ValueError: a setting that the family cannot express.
    """
    ours = leaves(to_json(model, ModelConfig))
    name, parameters = _ROPE[model.rope.scaling]
    scaling = {theirs: getattr(model.rope, own) for theirs, own in parameters.items()}
    scaling = {theirs: value for theirs, value in scaling.items() if value is not None}
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{key: ours.get(paths.split()[-1]) for key, paths in family.fields.items()},
        **family.required,
        "rope_theta": model.rope.theta,
        "rope_scaling": {"rope_type": name, **scaling} if scaling else None,
        "dtype": model.dtypes.params,
    }
    if family.biased == "all":
        config["attention_bias"] = model.qkv_bias
    if family.windowed != "never":
        config["sliding_window"] = model.window
    if family.windowed == "flag":
        config |= {"use_sliding_window": model.window is not None, "max_window_layers": 0}
    back = to_model(config, "config.json", model.dtypes)
    if differing := differences(model, back):
        raise ValueError(
            f"model_type {family.model_type!r} of Hugging Face has no word for "
            f"{'; '.join(differing)}"
        )
    return config


def differences(model: ModelConfig, other: ModelConfig) -> list[str]:
    """Settings that change logits and in which two models differ, as `path: one, not other`."""
    one, two = (leaves(to_json(x, ModelConfig)) for x in (model, other))
    free = _FREE + (("mlp_dim",) if model.moe is not None else ())
    if model.position == "learned":
        free = tuple(name for name in free if name != "max_position")
    return [
        f"model.{path} = {one.get(path)!r} (here {two.get(path)!r})"
        for path in dict.fromkeys((*one, *two))
        if one.get(path) != two.get(path)
        and not any(path == name or path.startswith(f"{name}.") for name in free)
    ]


def _dimensions(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Key/value heads and head dim where the file leaves them to the other dimensions."""
    heads, width = values["num_heads"], values["embed_dim"]
    if not isinstance(heads, int) or not isinstance(width, int) or heads < 1:
        raise ValueError(
            f"{where}: num_attention_heads is {heads!r} and hidden_size {width!r}; expected "
            "positive numbers"
        )
    head_dim, kv_heads = values.get("head_dim"), values.get("num_kv_heads")
    return {
        "head_dim": width // heads if head_dim is None else head_dim,
        "num_kv_heads": heads if kv_heads is None else kv_heads,
    }


def _rope(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Rotary parameters, in the words of `transformers` 4 (two keys) or 5 (one)."""
    said = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = said.pop("rope_theta", config.get("rope_theta"))
    kind = said.pop("type", None)
    kind = said.pop("rope_type", kind) or "default"
    names = {theirs: ours for ours, (theirs, _) in _ROPE.items()}
    if kind not in names:
        raise ValueError(f"{where}: {expected_name('rope scaling', kind, names)}")
    parameters = _ROPE[names[kind]][1]
    if "original_max_position_embeddings" in parameters:
        said.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    values = {"rope.theta": theta, "rope.scaling": names[kind]}
    for key, value in said.items():
        if key in parameters:
            values[f"rope.{parameters[key]}"] = value
        elif value is not None and value != _ROPE_WITHOUT_EFFECT.get(key):
            raise ValueError(
                f"{where}: rope scaling {kind!r} has {key}={value!r}, which we cannot represent"
            )
    return values


def _window(family: Family, config: Mapping[str, Any], num_layers: Any, where: str) -> int | None:
    """The window of all layers; None is unlimited.

    Raises:
        ValueError: some layers have a window and others not.
    """
    window = config.get("sliding_window")
    if window is None or not config.get("use_sliding_window", True):
        return None
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 0)
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) != {"sliding_attention"}:
        raise ValueError(
            f"{where}: some layers attend within sliding_window={window} and others to everything "
            "(layer_types, max_window_layers), which we cannot represent"
        )
    return window


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *parents, leaf = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree
