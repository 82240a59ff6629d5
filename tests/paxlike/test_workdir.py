"""A run's folder: the configuration is restored exactly, and another one is noticed."""

import dataclasses
import json

import pytest

from layers.config import MoEConfig
from meshes.axes import MeshShape
from meshes.presets import preset
from paxlike import overrides, registry, serialization, workdir
from paxlike.config import Experiment

# The values that the tests below see change.
BASE = overrides.apply(
    registry.build("quickstart"),
    (
        "model.num_layers=4", "model.vocab_size=2048", "optimizer.learning_rate=0.003", "seed=0",
        "train.num_steps=300", "parallel.mesh.data=2", "parallel.mesh.seq=2",
    ),
)  # fmt: skip


def learnt(directory):
    """Pretend that a run got as far as its first metrics."""
    (directory / "metrics.jsonl").write_text("{}\n")


def with_overrides(*texts: str) -> Experiment:
    return overrides.apply(BASE, texts)


@pytest.mark.parametrize("name", registry.descriptions())
def test_every_experiment_survives_the_file(name, tmp_path):
    experiment = registry.build(name)
    workdir.save(tmp_path / "config.json", experiment)
    assert workdir.load(tmp_path / "config.json") == experiment


def test_tables_none_and_parts_survive_the_file(tmp_path):
    experiment = with_overrides(
        "parallel.rules.act_seq=seq,tensor", "parallel.dcn_mesh.data=2", "model.window=8",
        "parallel.compiler_options=a=1,b=true,c=x", "optimizer.clip_norm=none",
        "model.moe.num_experts=4", "model.moe.num_experts_per_token=1",
        "model.moe.expert_mlp_dim=8",
    )  # fmt: skip
    workdir.save(tmp_path / "config.json", experiment)
    loaded = workdir.load(tmp_path / "config.json")
    assert loaded == experiment
    assert loaded.parallel.rules == preset("tp").replace(act_seq=("seq", "tensor"))
    assert loaded.parallel.compiler_options == (("a", 1), ("b", True), ("c", "x"))
    assert isinstance(loaded.model.moe, MoEConfig)


def test_a_first_launch_writes_and_a_second_agrees(tmp_path):
    assert workdir.prepare(tmp_path / "run", BASE, trains=True) == []
    learnt(tmp_path / "run")
    assert workdir.prepare(tmp_path / "run", BASE, trains=True) == []


def test_another_run_is_refused_path_by_path(tmp_path):
    workdir.prepare(tmp_path, BASE, trains=True)
    learnt(tmp_path)
    other = with_overrides("model.num_layers=2", "optimizer.learning_rate=0.01", "seed=3")
    with pytest.raises(ValueError) as info:
        workdir.prepare(tmp_path, other, trains=True)
    for change in (
        "model.num_layers: 4 -> 2", "optimizer.learning_rate: 0.003 -> 0.01", "seed: 0 -> 3",
        "--on_config_change=take_new",
    ):  # fmt: skip
        assert change in str(info.value)
    assert workdir.load(tmp_path / "config.json") == BASE
    assert workdir.prepare(tmp_path, other, trains=True, on_change="take_new")
    assert workdir.load(tmp_path / "config.json") == other


def test_what_cannot_change_the_past_is_accepted_and_said(tmp_path):
    workdir.prepare(tmp_path, BASE, trains=True)
    learnt(tmp_path)
    other = with_overrides("train.num_steps=900", "parallel.mesh.data=4", "parallel.mesh.seq=1")
    assert workdir.prepare(tmp_path, other, trains=True) == [
        "parallel.mesh.data: 2 -> 4", "parallel.mesh.seq: 2 -> 1", "train.num_steps: 300 -> 900"
    ]  # fmt: skip
    assert workdir.load(tmp_path / "config.json") == other


def test_nothing_learnt_nothing_to_protect(tmp_path):
    workdir.prepare(tmp_path, BASE, trains=True)
    other = with_overrides("seed=3")
    assert workdir.prepare(tmp_path, other, trains=True) == []
    assert workdir.load(tmp_path / "config.json") == other


def test_a_mode_that_only_reads_needs_the_same_model(tmp_path):
    workdir.prepare(tmp_path, BASE, trains=True)
    learnt(tmp_path)
    workdir.prepare(tmp_path, with_overrides("data.eval_fraction=0.1"), trains=False)
    assert workdir.load(tmp_path / "config.json") == BASE
    with pytest.raises(ValueError, match="model.num_layers: 4 -> 2"):
        workdir.prepare(tmp_path, with_overrides("model.num_layers=2"), trains=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-9], "not valid JSON"),
        (lambda text: text.replace('"schema": 1', '"schema": 9'), "schema 9"),
        (lambda text: "[]", "schema None"),
        (lambda text: text.replace('"num_layers"', '"num_layerz"'), "did you mean num_layers"),
        (lambda text: text.replace('"num_layers": 4', '"num_layers": "4"'), "expected int"),
        (lambda text: text.replace('"num_layers": 4', '"num_layers": 0'), "at least 1"),
        (lambda text: text.replace('"norm": "rms"', '"norm": "batch"'), "one of rms, layer"),
        (lambda text: text.replace('"vocab_size": 2048,', ""), "lacks vocab_size"),
        (lambda text: text.replace('"data": 2', '"type": "os:path", "data": 2'), "packages"),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(change, message, tmp_path):
    path = tmp_path / "config.json"
    workdir.save(path, BASE)
    before = path.read_text()
    path.write_text(change(before))
    assert path.read_text() != before
    with pytest.raises(ValueError, match=message) as info:
        workdir.load(path)
    assert str(path) in str(info.value)


def test_a_field_added_later_takes_its_default(tmp_path):
    path = tmp_path / "config.json"
    workdir.save(path, BASE)
    document = json.loads(path.read_text())
    del document["experiment"]["train"]["spike_factor"]
    path.write_text(json.dumps(document))
    assert workdir.load(path) == BASE


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_layers", 2.0), ("num_layers", True), ("norm", "batch"), ("norm_eps", float("nan"))],
)
def test_a_wrongly_typed_declaration_is_refused(field, value):
    wrong = dataclasses.replace(BASE, model=dataclasses.replace(BASE.model, **{field: value}))
    with pytest.raises(ValueError, match=f"model.{field} is {value!r}"):
        serialization.from_json(serialization.to_json(wrong, Experiment), Experiment)


def test_a_subclass_carries_its_class():
    data = serialization.to_json(BASE.parallel.mesh)
    assert data["type"] == "meshes.axes:MeshShape"
    assert serialization.from_json(data, MeshShape) == BASE.parallel.mesh
    assert "type" not in serialization.to_json(BASE.parallel.mesh, MeshShape)
