"""Compile mode on cpu:8 against what running the same experiment allocates, and its verdicts.

Tests marked by `needs` run only where the optional compilers are installed (extras tpu-aot and
cuda-aot); they say so when they are skipped.
"""

import dataclasses
import importlib.util
import json
import os

import jax
import pytest

from experiments.lm.config import llama3_70b, quickstart
from layers.config import DTypes
from layers.counting import num_parameters
from meshes.axes import MeshShape
from paxlike import compilation, launch, main
from paxlike.analysis.model_flops import forward_flops
from paxlike.config import Experiment, ParallelConfig
from paxlike.model import Model
from paxlike.modes.compile import compile_
from paxlike.report import Report
from paxlike.runtime import runtime
from paxlike.training.state import init_state, optimizer_of


def needs(module: str, extra: str):
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"pip install -e '.[{extra}]' runs this test")


def small(mesh: MeshShape, rules: str, **model: object) -> Experiment:
    """Quickstart with few and narrow layers, for short compiles."""
    experiment = quickstart()
    sizes = {"num_layers": 2, "embed_dim": 64, "mlp_dim": 128, "vocab_size": 2048, **model}
    return dataclasses.replace(
        experiment,
        model=dataclasses.replace(experiment.model, **sizes),
        data=dataclasses.replace(experiment.data, sequence_length=64),
        parallel=ParallelConfig(mesh=mesh, rules=rules),
    )


FSDP_TP = small(MeshShape(fsdp=4, tensor=2), "fsdp_tp")


def held_by_one_device(tree: object) -> int:
    device = jax.devices()[0]
    shards = [s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


@pytest.fixture(scope="module")
def train(tmp_path_factory) -> Report:
    return compile_(FSDP_TP, tmp_path_factory.mktemp("train"), target="cpu:8", quiet=True)


def test_arguments_are_what_training_allocates(train):
    with runtime(FSDP_TP):
        model = Model(FSDP_TP.model)
        state = init_state(model, optimizer_of(model, FSDP_TP), FSDP_TP)
    memory = train.memory.per_device_bytes
    assert memory["params"] == held_by_one_device(state.params)
    others = (state.opt_state, state.ema, state.guard, state.step)
    assert memory["optimizer"] == held_by_one_device(others)
    assert memory["batch"] == 5 * 4 * 2 * 64  # five arrays of 4 bytes, 2 of 8 rows, 64 tokens
    assert memory["temporaries"] > 0
    assert memory["outputs"] < 1000  # the metrics: the new state takes the place of the old one
    assert memory["total"] == sum(memory.values()) - memory["total"]
    assert (train.memory.capacity_bytes, train.memory.fits) == (None, None)


def test_the_step_is_counted(train):
    """Tensor parallelism reduces the residual stream twice a layer forward, twice backward."""
    layer = [row for row in train.collectives if row.mesh_axes == ("tensor",)]
    layer = [row for row in layer if row.where.startswith("layer.")]
    assert sum(row.count for row in layer) == 4 * FSDP_TP.model.num_layers
    sent = [row.bytes_per_device for row in train.collectives]
    assert sent == sorted(sent, reverse=True)


def test_the_step_is_predicted(train):
    """On round figures; its division is complete, and names mesh axes and scopes."""
    predicted = train.predicted
    assert predicted.basis.startswith("compiled schedule + cost model v1; a virtual CPU device")
    parts = predicted.breakdown
    assert sum(parts.by_limit_seconds.values()) == pytest.approx(predicted.step_seconds)
    assert sum(parts.by_scope_seconds.values()) == pytest.approx(predicted.step_seconds, rel=0.01)
    assert sum(parts.exposed_by_axis_seconds.values()) == pytest.approx(
        predicted.exposed_communication_seconds
    )
    assert {"fsdp", "tensor"} <= set(parts.exposed_by_axis_seconds)
    assert {"layer.mlp.up", "layer.attention.out"} <= set(parts.exposed_by_scope_seconds)
    assert all(row.hidden_fraction is not None for row in train.collectives)
    peak = 100e9 * 8  # of the round figures
    mfu = train.compute.model_flops / peak / predicted.step_seconds
    assert predicted.mfu == pytest.approx(mfu)
    assert "| waiting for axes tensor |" in train.markdown()


def test_the_peak_is_taken_apart(train):
    """Beside the compiler's own number; every byte has a category."""
    peak = train.memory.peak
    sizes = train.memory.per_device_bytes
    assert peak.compiler_bytes == sizes["temporaries"] + sizes["outputs"]
    assert abs(peak.deviation_fraction) < 0.05
    assert sum(peak.by_category_bytes.values()) == peak.simulated_bytes
    assert sum(peak.by_scope_bytes.values()) == peak.simulated_bytes
    assert peak.by_category_bytes["gradients"] > 0
    assert "head" in peak.by_scope_bytes
    assert "The largest buffers" in train.markdown()


def test_flops_are_those_of_the_model(tmp_path):
    """Without attention's masked half, its recomputation and remat, both counts agree."""
    wide = small(MeshShape(data=8), "dp", mlp_dim=4096, causal=False)
    wide = dataclasses.replace(wide, data=dataclasses.replace(wide.data, sequence_length=16))
    report = compile_(wide, tmp_path, target="cpu:8", quiet=True)
    assert 8 * report.compute.flops_per_device == pytest.approx(
        report.compute.model_flops, rel=0.01
    )


@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_generating_steps(step, tmp_path):
    report = compile_(FSDP_TP, tmp_path, target="cpu:8", step=step, dump_hlo=True, quiet=True)
    model, rows, length = FSDP_TP.model, 8 // 4, 64
    heads = model.num_kv_heads // 2
    keys_values = 2 * model.num_layers * rows * heads * length * model.head_dim * 4
    slots = 2 * 4 * rows * length  # where each token stands, for all layers
    assert report.memory.per_device_bytes["kv_cache"] == keys_values + slots
    assert (tmp_path / f"{step}.hlo.txt").read_text().startswith("HloModule")
    if step == "decode":
        assert report.compute.model_flops == forward_flops(model, tokens=8, context=64)


def test_shapes_alone(tmp_path):
    """280 GB of parameters are described here, so that none can have been allocated."""
    experiment = llama3_70b()
    parallel = dataclasses.replace(experiment.parallel, mesh=MeshShape(fsdp=2, tensor=4))
    with runtime(dataclasses.replace(experiment, parallel=parallel)):
        given = compilation.inputs(experiment, Model(experiment.model), "train")
    sizes = compilation.argument_bytes(given)
    assert sizes["params"] == pytest.approx(4 * num_parameters(experiment.model) / 8, rel=1e-3)
    assert sizes["optimizer"] == pytest.approx(2 * sizes["params"], rel=1e-6)


def fail_with(monkeypatch, message: str) -> None:
    def fail(self):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)


@pytest.mark.parametrize(
    "said",
    [
        "Ran out of memory in memory space hbm. Used 34.50G of 15.75G hbm. Exceeded hbm capacity.",
        "E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (34.50G) exceeds available HBM (15.75G). HLO module: jit_step.",
    ],
)
def test_a_program_that_the_compiler_cannot_fit_is_a_verdict(said, monkeypatch, tmp_path):
    fail_with(monkeypatch, f"RESOURCE_EXHAUSTED: {said}")
    report = compile_(FSDP_TP, tmp_path, target="cpu:8", quiet=True)
    memory = report.memory
    assert memory.fits == "no"
    assert memory.capacity_bytes == int(15.75 * 2**30)
    assert memory.per_device_bytes["total"] == int(34.5 * 2**30)
    parts = [size for part, size in memory.per_device_bytes.items() if part != "total"]
    assert sum(parts) == memory.per_device_bytes["total"]


def test_what_xla_says_is_kept(monkeypatch, tmp_path):
    fail_with(monkeypatch, "INTERNAL: first line\n" + "detail " * 1000)
    with pytest.raises(ValueError, match="could not compile the train step: INTERNAL") as error:
        compile_(FSDP_TP, tmp_path, target="cpu:8", quiet=True)
    assert len(str(error.value)) < 600
    assert (tmp_path / "xla_error.txt").read_text().count("detail") == 1000


def test_a_compiler_of_another_version_is_named(monkeypatch, tmp_path):
    def fail(self):
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure: async-update")

    monkeypatch.setattr(jax.stages.Compiled, "as_text", fail)
    with pytest.raises(ValueError, match="version that belongs to this jax"):
        compile_(FSDP_TP, tmp_path, target="cpu:8", step="decode", quiet=True)


def test_an_unknown_step(tmp_path):
    with pytest.raises(ValueError, match="step is 'backward'; expected one of train, prefill"):
        compile_(FSDP_TP, tmp_path, step="backward")


def test_from_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "the one of conftest.py")
    overrides = [f"--override=model.{name}" for name in ("num_layers=1", "embed_dim=64")]
    code = main.main(
        ["paxlike", "--experiment=quickstart", "--mode=compile", "--target=cpu:8", "--step=decode",
         f"--workdir={tmp_path}", *overrides]
    )  # fmt: skip
    assert code == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "kv cache" in out
    assert (tmp_path / "sharding.txt").read_text() in out
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["target"] == "cpu:8" and data["results"]["step"] == "decode"
    names = {event["name"] for event in _trace(tmp_path)["traceEvents"]}
    assert "thread_name" in names
    assert (tmp_path / "timeline.png").exists()
    assert Report.read(tmp_path).memory.per_device_bytes == data["memory"]["per_device_bytes"]


def _trace(workdir):
    return json.loads((workdir / "trace" / "timeline.json").read_text())


@pytest.fixture
def quiet_libtpu(monkeypatch):
    for name, value in launch.COMPILE_ONLY_TPU.items():
        monkeypatch.setitem(os.environ, name, value)


ON_TWO = small(MeshShape(fsdp=2, tensor=2), "fsdp_tp")


@needs("libtpu", "tpu-aot")
def test_tpu(quiet_libtpu, tmp_path):
    report = compile_(ON_TWO, tmp_path, target="v5e:2x2", quiet=True)
    assert report.memory.fits == "safe"
    assert report.memory.capacity_bytes == 16 * 2**30
    assert report.predicted.basis == "compiled schedule + cost model v1"
    assert {axis for row in report.collectives for axis in row.mesh_axes} == {"fsdp", "tensor"}


def with_kernels(**parallel: object) -> Experiment:
    """Two layers wide enough for the kernels, 512 causal tokens, two heads on one key head."""
    experiment = small(
        MeshShape(fsdp=2, tensor=2), "fsdp_tp", dtypes=DTypes(), embed_dim=512, mlp_dim=1024,
        num_heads=4, num_kv_heads=2, head_dim=128, window=None, vocab_size=8192,
    )  # fmt: skip
    return dataclasses.replace(
        experiment,
        data=dataclasses.replace(experiment.data, sequence_length=512),
        parallel=dataclasses.replace(experiment.parallel, **parallel),
    )


def check_flops(report: Report, *, pairs: int, pairs_backward: int, backward: int) -> None:
    """A layer's scores and contexts are of `pairs` a head, its gradients `backward` products."""
    model = with_kernels().model
    linear = 3 * forward_flops(model, tokens=8 * 512, context=0)
    product = 2 * model.num_layers * 8 * model.num_heads * model.head_dim
    expected = linear + product * (2 * pairs + backward * pairs_backward)
    assert 4 * report.compute.flops_per_device == pytest.approx(expected, rel=0.01)


@needs("libtpu", "tpu-aot")
def test_the_tpu_runs_splash_and_its_work_is_counted(quiet_libtpu, tmp_path):
    """512 tokens are one tile, forward and backward: all pairs of it are computed."""
    report = compile_(with_kernels(), tmp_path, target="v5e:2x2", dump_hlo=True, quiet=True)
    assert any("splash kernel, tiles of 512 queries" in note for note in report.notes)
    assert "splash_mha_dkv" in (tmp_path / "train.hlo.txt").read_text()
    check_flops(report, pairs=512 * 512, pairs_backward=512 * 512, backward=5)


@needs("libtpu", "tpu-aot")
def test_the_core_is_chosen_by_name(quiet_libtpu, tmp_path):
    plain = with_kernels(attention_kernel="jnp")
    report = compile_(plain, tmp_path, target="v5e:2x2", dump_hlo=True, quiet=True)
    assert any("tiled jnp core" in note for note in report.notes)
    assert "splash_mha" not in (tmp_path / "train.hlo.txt").read_text()


@needs("jax_cuda12_plugin", "cuda-aot")
def test_the_gpu_runs_triton_and_its_work_is_counted(tmp_path):
    """Tiles of 128 leave out 6 of 16 forward, tiles of 32 leave out 120 of 256 backward."""
    report = compile_(with_kernels(), tmp_path, target="h100:4", dump_hlo=True, quiet=True)
    assert any("triton kernel, tiles of 128" in note for note in report.notes)
    assert "mha_backward" in (tmp_path / "train.hlo.txt").read_text()
    check_flops(report, pairs=10 * 128 * 128, pairs_backward=136 * 32 * 32, backward=7)


@needs("libtpu", "tpu-aot")
def test_tpu_without_enough_memory(quiet_libtpu, tmp_path):
    too_wide = small(MeshShape(), "dp", embed_dim=32_768, mlp_dim=32_768)
    report = compile_(too_wide, tmp_path, target="v5e:1x1", quiet=True)
    assert report.memory.fits == "no"
    assert report.memory.per_device_bytes["total"] > report.memory.capacity_bytes > 15 * 2**30


@needs("jax_cuda12_plugin", "cuda-aot")
def test_gpu(tmp_path):
    report = compile_(ON_TWO, tmp_path, target="h100:4", quiet=True)
    assert report.memory.fits == "safe"
    assert {axis for row in report.collectives for axis in row.mesh_axes} == {"fsdp", "tensor"}


@needs("jax_cuda12_plugin", "cuda-aot")
def test_gpu_without_enough_memory_or_target(tmp_path):
    too_wide = small(MeshShape(), "dp", embed_dim=32_768, mlp_dim=32_768)
    report = compile_(too_wide, tmp_path, target="rtx4090:1", quiet=True)
    assert report.memory.fits == "no"
    assert report.memory.capacity_bytes == 24 * 10**9
    assert "its relative NVIDIA A100" in report.notes[0]
