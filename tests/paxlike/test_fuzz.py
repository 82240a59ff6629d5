"""Random overrides: each gives a valid experiment, which also traces, or one line for the user."""

import dataclasses
import random
import types
import typing

import jax
import pytest

from meshes.presets import PRESETS
from paxlike import errors, overrides, registry, serialization
from paxlike.config import Experiment
from paxlike.model import Model
from paxlike.runtime import runtime

NUM_CONFIGS = 3000
NUM_TRACED = 24
JUNK = (
    "", " ", "none", "-1", "0", "1", "3", "7.5", "1e400", "nan", "true", "yes", "abc", "–3", "٣",
    "1,2", "a=b", "[1]", "{}", "'x'", "2**3", "99999999999999999999", "\n", "\x00", "../..",
)  # fmt: skip


def leaf_paths(cls: type, prefix: str = "") -> dict[str, object]:
    """Path -> annotation of everything that an override can reach."""
    paths: dict[str, object] = {}
    for name, annotation in serialization.hints(cls).items():
        inner = serialization.dataclass_of(annotation)
        if inner is not None and inner.__name__ != "Rules":
            paths |= leaf_paths(inner, f"{prefix}{name}.")
        if inner is None or inner.__name__ == "Rules" or inner is not annotation:
            paths[f"{prefix}{name}"] = annotation
    return paths


PATHS = leaf_paths(Experiment)


def plausible(rng: random.Random, path: str, annotation: object) -> str:
    """A value of the right type, more often than not a sensible one."""
    if path == "parallel.rules":
        return rng.choice([*PRESETS, "ftp"])
    if path == "parallel.remat":
        return rng.choice(["none", "full", "dots", "named:layer_input", "offload:", "fulll"])
    if path == "parallel.attention":
        return rng.choice(["all_gather", "ring", ""])
    if path == "data.tokenizer":
        return rng.choice(["byte", "bpe:300", "bpe:9999999", "bpe:-1", "x.json", "gpt2"])
    if path.startswith("model.dtypes"):
        return rng.choice(["float32", "bfloat16", "float16", "int8"])
    kind = rng.choice(serialization.alternatives(annotation))
    if typing.get_origin(kind) is typing.Literal:
        return str(rng.choice(typing.get_args(kind)))
    return {
        int: str(rng.choice([-1, 0, 1, 1, 2, 2, 3, 4, 4, 6, 8, 16, 64])),
        float: str(rng.choice([-1.0, 0.0, 0.1, 0.5, 1.0, 1.25, 2.0, 1e-5])),
        bool: rng.choice(["true", "false"]),
        types.NoneType: "none",
    }.get(kind, rng.choice(JUNK))


def random_override(rng: random.Random) -> str:
    path = rng.choice(list(PATHS))
    annotation = PATHS[path]
    roll = rng.random()
    if roll < 0.06:  # a misspelt path
        at = rng.randrange(len(path))
        path = path[:at] + rng.choice("_.x–") + path[at + 1 :]
    if roll > 0.9:
        return f"{path}={rng.choice(JUNK)}"
    return f"{path}={plausible(rng, path, annotation)}"


def assert_is_one_line_for_the_user(error: Exception, what: object) -> None:
    assert errors.is_users_mistake(error), (what, error)
    assert 10 < len(errors.one_line(error)) < 2000, (what, error)


def test_random_overrides_build_or_are_refused():
    rng = random.Random(0)
    bases = [registry.build(name) for name in registry.descriptions()]
    refused = 0
    for _ in range(NUM_CONFIGS):
        texts = [random_override(rng) for _ in range(rng.randint(1, 4))]
        try:
            built = overrides.apply(rng.choice(bases), texts)
        except (ValueError, TypeError) as error:
            assert_is_one_line_for_the_user(error, texts)
            refused += 1
            continue
        data = serialization.to_json(built, Experiment)
        assert serialization.from_json(data, Experiment) == built, texts
    # Both outcomes are common, or the test would show nothing.
    assert 0.2 < refused / NUM_CONFIGS < 0.9, refused


def tiny(rng: random.Random) -> list[str]:
    """Overrides of a tiny model on a random mesh, often one that does not fit."""
    choice = rng.choice
    heads = choice([1, 2, 3, 4, 6, 8])
    texts = {
        "model.num_layers": choice([1, 2, 3]), "model.embed_dim": choice([16, 24, 30, 32]),
        "model.num_heads": heads, "model.num_kv_heads": choice([1, heads, heads, 2]),
        "model.head_dim": choice([4, 8]), "model.mlp_dim": choice([32, 48, 33]),
        "model.vocab_size": choice([300, 304, 512]), "data.tokenizer": "byte",
        "data.sequence_length": choice([16, 32, 24, 31]),
        "train.global_batch_size": choice([8, 16, 4, 6]),
        "model.norm": choice(["rms", "layer"]),
        "model.norm_placement": choice(["pre", "post", "pre_post"]),
        "model.position": choice(["rope", "learned", "none"]),
        "model.activation": choice(["swiglu", "geglu", "gelu", "relu2"]),
        "model.qk_norm": choice(["true", "false"]), "model.qkv_bias": choice(["true", "false"]),
        "model.tie_embeddings": choice(["true", "false"]), "model.window": choice(["none", 8]),
        "model.logit_softcap": choice(["none", 30.0]), "model.causal": choice(["true", "false"]),
        "model.dtypes.compute": choice(["float32", "bfloat16"]),
        "parallel.rules": choice(list(PRESETS)),
        "parallel.remat": choice(["none", "full", "dots", "named:layer_input"]),
        "parallel.scan_layers": choice(["true", "false"]),
        "parallel.loss_chunk": choice([0, 0, 8, 5]),
    }  # fmt: skip
    if rng.random() < 0.3:
        texts |= {
            "model.moe.num_experts": choice([2, 4, 3]),
            "model.moe.num_experts_per_token": choice([1, 2]),
            "model.moe.expert_mlp_dim": choice([16, 24]),
            "model.moe.routing": choice(["dropless", "capacity"]),
        }
    sizes = choice([(8,), (2, 4), (4, 2), (2, 2, 2), (2, 2, 2), (3, 2)])
    axes = rng.sample(["data", "fsdp", "seq", "tensor", "expert"], len(sizes))
    if rng.random() < 0.05:
        axes[0] = "pipeline"
    mesh = {"data": 1, "seq": 1, "tensor": 1} | dict(zip(axes, sizes, strict=True))
    texts |= {f"parallel.mesh.{axis}": size for axis, size in mesh.items()}
    return [f"{path}={value}" for path, value in texts.items()]


def trace(experiment: Experiment) -> None:
    """Trace the loss and its gradient, without devices' work."""
    with runtime(experiment) as active:
        model = Model(experiment.model)
        rows = experiment.train.global_batch_size
        shape = (rows, experiment.data.sequence_length)
        sharding = jax.sharding.NamedSharding(
            active.mesh, active.spec(("act_batch", "act_seq"), shape, "batch")
        )
        batch = {
            name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            for name, dtype in {
                "tokens": "int32", "targets": "int32", "segment_ids": "int32",
                "positions": "int32", "loss_weights": "float32",
            }.items()
        }  # fmt: skip
        gradient = jax.grad(lambda params, batch: model.loss(params, batch)[0])
        jax.eval_shape(gradient, model.abstract(), batch)


@pytest.mark.parametrize("seed", range(NUM_TRACED))
def test_random_configurations_trace_or_are_refused(seed):
    rng = random.Random(f"trace {seed}")
    base = dataclasses.replace(registry.build("quickstart"), name="tiny")
    refused: list[str] = []
    # The cheap refusals come first, so that every seed traces something in the end.
    for _ in range(200):
        texts = tiny(rng)
        try:
            trace(overrides.apply(base, texts))
            return
        except (ValueError, TypeError) as error:
            assert_is_one_line_for_the_user(error, texts)
            refused.append(errors.one_line(error))
    raise AssertionError(f"nothing traced: {refused[-5:]}")
