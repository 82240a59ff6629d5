"""Differences of reports: planted regressions must be named by scope."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshes.axes import MeshShape
from meshes.presets import preset
from paxlike.analysis import hlo, liveness
from paxlike.config import ParallelConfig
from paxlike.difference import diff
from paxlike.modes.compile import compile_
from paxlike.prediction import predict
from paxlike.report import Memory, PeakMemory, Report
from tests.paxlike.modes.test_compile import small


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Report:
    experiment = small(MeshShape(fsdp=2, tensor=4), "fsdp_tp")
    return compile_(experiment, tmp_path_factory.mktemp("good"), target="cpu:8", quiet=True)


def named(changes, section, quantity):
    return {
        change.what: (change.before, change.after)
        for change in changes
        if (change.section, change.quantity) == (section, quantity)
    }


def test_a_report_does_not_differ_from_itself(good):
    assert diff(good, good) == ()


def test_a_rule_that_replicates_an_activation(good, tmp_path):
    """Without its rule, the feed-forward's hidden layer is whole on every device."""
    wrong = small(MeshShape(fsdp=2, tensor=4), "fsdp_tp")
    rules = preset("fsdp_tp").replace(act_mlp=None)
    wrong = dataclasses.replace(
        wrong, parallel=ParallelConfig(mesh=MeshShape(fsdp=2, tensor=4), rules=rules)
    )
    bad = compile_(wrong, tmp_path, target="cpu:8", quiet=True)
    changes = diff(good, bad)
    sent = named(changes, "collectives", "bytes_per_device")
    new = {what for what, (before, after) in sent.items() if after > before}
    assert any("over tensor in layer.mlp" in what for what in new), new
    held = named(changes, "temporaries at the peak", "by_scope_bytes")
    assert any(after > before for what, (before, after) in held.items() if "layer.mlp" in what)
    assert "over tensor in layer.mlp" in dataclasses.replace(bad, changes=changes).markdown()


def scanned(gather_inside: bool) -> Report:
    """8 layers on one device's weights; the table is gathered once, or in every layer."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))

    def gathered(table):
        with jax.named_scope("table"):
            return jax.lax.all_gather(table, "data", axis=0, tiled=True)

    def program(x, weights, table):
        outside = None if gather_inside else gathered(table)

        def layer(x, weight):
            with jax.named_scope("layer"):
                whole = gathered(table * weight[0, 0]) if gather_inside else outside
                return jnp.tanh(x @ weight + whole), None

        return jax.lax.scan(layer, x, weights)[0]

    mapped = jax.shard_map(
        program, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P("data")
    )

    def struct(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    arguments = struct((64, 32), "data"), struct((8, 32, 32)), struct((8, 32), "data")
    with jax.set_mesh(mesh):
        text = jax.jit(mapped).lower(*arguments).compile().as_text()
    found = predict(text, mesh, None, model_flops=0.0)
    peak = liveness.peak(hlo.parse(text))
    memory = Memory(per_device_bytes={"total": peak.bytes}, peak=PeakMemory.of(peak, peak.bytes))
    return Report(
        experiment="scanned", mode="compile", target="cpu:8", collectives=found.collectives,
        predicted=found.predicted, memory=memory,
    )  # fmt: skip


def test_a_gather_inside_the_loop():
    before, after = scanned(False), scanned(True)
    changes = diff(before, after)
    counts = named(changes, "collectives", "count")
    assert counts == {
        "all-gather over data in table (forward)": (1, 0),
        "all-gather over data in layer.table (forward)": (0, 8),
    }
    waits = named(changes, "predicted", "exposed_by_scope_seconds")
    assert waits["layer.table"][1] > waits["table"][0]


def test_reports_without_sections(good):
    bare = Report(experiment="a", mode="compile", target="cpu:8")
    assert {change.section for change in diff(bare, good)} == {"collectives"}
