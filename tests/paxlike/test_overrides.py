"""Overrides: typed by annotations, applied jointly, refused with a message that helps."""

import dataclasses
import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layers.config import MoEConfig
from meshes.axes import MeshShape
from meshes.presets import preset
from paxlike import overrides, registry

BASE = registry.build("quickstart")


def value_at(experiment, path: str):
    for name in path.split("."):
        experiment = getattr(experiment, name)
    return experiment


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("model.num_layers=2", 2),
        ("model.num_layers= 1_0 ", 10),
        ("optimizer.learning_rate=1e-3", 1e-3),
        ("optimizer.learning_rate=2", 2.0),
        ("model.tie_embeddings=false", False),
        ("model.qk_norm=True", True),
        ("model.window=64", 64),
        ("model.window=none", None),
        ("model.norm=layer", "layer"),
        ("model.dtypes.compute=bfloat16", "bfloat16"),
        ("inference.prompt=a = b – c", "a = b – c"),
        ("parallel.mesh.data=4", 4),
        ("parallel.rules=fsdp_tp", "fsdp_tp"),
        ("parallel.rules.act_seq=seq,tensor", preset("tp").replace(act_seq=("seq", "tensor"))),
        ("parallel.rules.vocab=none", preset("tp").replace(vocab=None)),
        ("parallel.dcn_mesh.data=2", MeshShape(data=2)),
        ("parallel.compiler_options=a=1,b=true,c=x", (("a", 1), ("b", True), ("c", "x"))),
        ("parallel.compiler_options.xla_thing=false", (("xla_thing", False),)),
        ("train.ema_decay=0.99", 0.99),
    ],
)
def test_values_are_typed_by_their_fields(override, value):
    path = override.partition("=")[0]
    for table in ("parallel.rules", "parallel.compiler_options", "parallel.dcn_mesh"):
        path = table if path.startswith(table) else path
    found = value_at(overrides.apply(BASE, [override]), path)
    assert found == value
    assert type(found) is type(value)


def test_only_the_named_path_changes():
    changed = overrides.apply(BASE, ["model.num_layers=2"])
    model = dataclasses.replace(BASE.model, num_layers=2)
    assert changed == dataclasses.replace(BASE, model=model)
    assert overrides.apply(BASE, []) is BASE


@pytest.mark.parametrize("order", [1, -1])
def test_overrides_that_are_valid_only_together(order):
    pair = ["model.num_heads=6", "model.num_kv_heads=3"][::order]
    assert overrides.apply(BASE, pair).model.num_heads == 6
    with pytest.raises(ValueError, match=r"model\.num_heads is 6"):
        overrides.apply(BASE, ["model.num_heads=6"])


def test_a_missing_part_is_built_when_it_is_complete():
    parts = ["num_experts=8", "num_experts_per_token=2", "expert_mlp_dim=64"]
    built = overrides.apply(BASE, [f"model.moe.{part}" for part in parts])
    assert built.model.moe == MoEConfig(num_experts=8, num_experts_per_token=2, expert_mlp_dim=64)
    with pytest.raises(ValueError, match=r"also set model\.moe\.expert_mlp_dim"):
        overrides.apply(BASE, [f"model.moe.{part}" for part in parts[:2]])
    assert overrides.apply(built, ["model.moe=none"]) == BASE


def test_a_preset_and_rows_of_it():
    both = ["parallel.rules.embed=none", "parallel.rules=fsdp_tp"]
    assert overrides.apply(BASE, both).parallel.rules == preset("fsdp_tp").replace(embed=None)


@pytest.mark.parametrize(
    ("given_overrides", "message"),
    [
        (["model.num_layers"], "not of the form path=value"),
        (["=3"], "not of the form path=value"),
        (["model.num_layers–2"], r"U\+2013"),
        (["modle.num_layers=2"], "did you mean model"),
        (["model.num_layer=2"], r"unknown model field 'num_layer'; did you mean num_layers"),
        (["model.num‐layers=2"], r"U\+2010"),
        (["model.num_layers=two"], r"model\.num_layers=two: expected int"),
        (["model.num_layers=2.0"], "expected int"),
        (["model.num_layers=−2"], r"expected int; note the non-ASCII .* \(U\+2212\)"),
        (["model.num_layers=٣"], r"U\+0663"),
        (["optimizer.learning_rate=nan"], "expected float"),
        (["optimizer.learning_rate=inf"], "expected float"),
        (["model.qk_norm=yes"], "expected true or false"),
        (["model.norm=batch"], "expected one of rms, layer"),
        (["model.window=wide"], "expected int or none"),
        (["model=3"], "model has fields, set one of them: vocab_size"),
        (["parallel.mesh=8"], "parallel.mesh has fields, set one of them: pipeline"),
        (["model.num_layers.x=3"], "model.num_layers is int and has no fields"),
        (["seed=1", "seed=2"], "seed is given twice, as '1' and '2'"),
        (["model.moe=none", "model.moe.num_experts=2"], "contradicts model.moe.num_experts"),
        (["parallel.rules=ftp"], "unknown rule preset 'ftp'"),
        (["parallel.rules.act_sq=seq"], "did you mean act_seq"),
        (["parallel.rules.act_seq.x=seq"], "act_seq has no fields"),
        (["parallel.rules.act_seq=sqe"], "sqe"),
        (["parallel.rules.act_seq=seq,seq"], "twice"),
        (["train.num_steps=0"], r"train\.num_steps is 0"),
        (["parallel.mesh.data=0"], "mesh axis 'data' is 0"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(given_overrides, message):
    with pytest.raises(ValueError, match=message):
        overrides.apply(BASE, given_overrides)


@given(st.integers())
def test_every_integer_is_read_back(number):
    assert overrides.parse(str(number), int, "x") == number


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_float_is_read_back(number):
    read = overrides.parse(repr(number), float, "x")
    assert read == number and math.copysign(1, read) == math.copysign(1, number)


@given(st.lists(st.integers()))
def test_every_tuple_is_read_back(numbers):
    assert overrides.parse(",".join(map(str, numbers)), tuple[int, ...], "x") == tuple(numbers)


@given(st.text())
def test_any_text_parses_or_is_refused_by_name(text):
    for annotation in (int, float | None, bool, Literal["a", 2], tuple[int, ...], tuple[str, int]):
        try:
            overrides.parse(text, annotation, "some.path")
        except ValueError as error:
            assert "some.path" in str(error)
    assert overrides.parse(text, str, "x") == text


@given(st.text(), st.text())
def test_any_override_applies_or_is_refused(path, value):
    for override in (f"{path}={value}", f"model.{path}={value}", f"model.num_layers={value}"):
        try:
            overrides.apply(BASE, [override])
        except ValueError as error:
            assert str(error)
