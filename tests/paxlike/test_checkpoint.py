"""Checkpoints: any mesh to any mesh, bit for bit; damage, mismatch and failure are named."""

import dataclasses
import gc
import json
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshes.axes import MeshShape
from meshes.build import build_mesh
from paxlike import checkpoint
from paxlike.checkpoint import CheckpointError, Checkpoints, load_params
from paxlike.model import Model
from paxlike.runtime import runtime
from paxlike.training.state import abstract_state, optimizer_of
from tests.paxlike.training.tiny import MIXED, MODEL, experiment

# One device; data only, with moments split further; all of FSDP, of the sequence; mixed ones.
LAYOUTS = {
    "one": {"mesh": MeshShape()},
    "data8_zero1": {"mesh": MeshShape(data=8), "parallel": {"zero1": True}},
    "fsdp8": {"mesh": MeshShape(fsdp=8)},
    "data2_seq4": {"mesh": MeshShape(data=2, seq=4)},
    "mixed": {"mesh": MIXED},
    "expert2_tensor2": {"mesh": MeshShape(expert=2, fsdp=1, tensor=2), "parallel": {"rules": "tp"}},
}


def layout(name):
    return experiment(
        ema_decay=0.9, model=dataclasses.replace(MODEL, qkv_bias=True), **LAYOUTS[name]
    )


class Entered:
    """A layout's parallelism, with abstract state and a state of random bits."""

    def __init__(self, name):
        self.config = layout(name)
        shape = self.config.parallel.mesh
        self.runtime = runtime(self.config, jax.devices()[: shape.num_devices])

    def __enter__(self):
        self.runtime.__enter__()
        model = Model(self.config.model)
        self.abstract = abstract_state(model, optimizer_of(model, self.config), self.config)
        return self

    def __exit__(self, *exception):
        self.runtime.__exit__(*exception)

    def state(self):
        rng = np.random.default_rng(0)

        def bits(x):
            host = rng.integers(0, 2**32, x.shape, dtype=np.uint32).view(x.dtype)
            return jax.device_put(host, x.sharding)

        return jax.tree.map(bits, self.abstract)


def same_bits(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x).view(np.uint32), np.asarray(y).view(np.uint32))


@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_restores_onto_every_other(source, tmp_path):
    with Entered(source) as entered, Checkpoints(tmp_path) as checkpoints:
        state = entered.state()
        checkpoints.save(7, state, {"row": 3})
    for target in LAYOUTS:
        with Entered(target) as entered, Checkpoints(tmp_path) as checkpoints:
            restored = checkpoints.restore(entered.abstract)
            assert (restored.step, restored.extra) == (7, {"row": 3})
            same_bits(restored.tree, state)
            placed = jax.tree.map(lambda x: x.sharding, restored.tree)
            assert placed == jax.tree.map(lambda x: x.sharding, entered.abstract)


@pytest.fixture
def mesh():
    return build_mesh(MeshShape(data=8))


def tree(mesh, value=1.0, dtype=jnp.float32):
    w = jax.device_put(jnp.full((8, 4), value, dtype), NamedSharding(mesh, P("data")))
    return {"params": {"w": w}, "step": jax.device_put(jnp.int32(value), NamedSharding(mesh, P()))}


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def saved(mesh, path, *values, keep=3):
    with Checkpoints(path, keep=keep) as checkpoints:
        for value in values:
            checkpoints.save(value, tree(mesh, value), {})
    return tree(mesh)


def test_arrays_may_be_donated_while_they_are_written(mesh, tmp_path):
    big = jax.device_put(jnp.ones((8, 2**18)), NamedSharding(mesh, P("data")))
    expected = abstract({"w": big})
    forget = jax.jit(lambda x: 0 * x - 1, donate_argnums=0)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": big}, {})
        for _ in range(20):
            big = forget(big)
        jax.block_until_ready(big)
    with Checkpoints(tmp_path) as checkpoints:
        np.testing.assert_array_equal(checkpoints.restore(expected).tree["w"], 1.0)


def test_only_the_newest_are_kept(mesh, tmp_path):
    saved(mesh, tmp_path, 1, 2, 3, 4, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["00000003", "00000004"]


def test_the_best_are_kept_beside_the_newest(mesh, tmp_path):
    """A loss that is not a number is never the best, nor one that is missing."""
    with Checkpoints(tmp_path, keep=1, keep_best=2) as checkpoints:
        for step, score in enumerate([float("nan"), 1.0, 3.0, 2.0, None, 9.0]):
            checkpoints.save(step, tree(mesh, step), {}, score=score)
        checkpoints.wait()
        assert checkpoints.steps() == [1, 3, 5]
        assert checkpoints.ranked() == [1, 3, 5]
    params = abstract(tree(mesh)["params"])
    assert load_params(tmp_path, params, which="best")[0] == 1
    assert load_params(tmp_path, params)[0] == 5
    with pytest.raises(ValueError, match=r"no checkpoint '2' .* steps \[1, 3, 5\]"):
        load_params(tmp_path, params, which="2")


def test_no_checkpoint(mesh, tmp_path):
    with Checkpoints(tmp_path / "none") as checkpoints:
        assert checkpoints.restore(abstract(tree(mesh))) is None
    with pytest.raises(ValueError, match="no usable checkpoint in .*none; train first"):
        load_params(tmp_path / "none", abstract(tree(mesh)["params"]))


def test_other_arrays_are_refused_by_name(mesh, tmp_path):
    expected = abstract(saved(mesh, tmp_path, 1))
    with Checkpoints(tmp_path) as checkpoints:

        def refused(wanted, match):
            with pytest.raises(ValueError, match=match):
                checkpoints.restore(wanted)

        w = expected["params"]["w"]
        refused(expected | {"ema": w}, "ema is missing")
        refused({"params": expected["params"]}, "step is not expected")
        longer = jax.ShapeDtypeStruct((16, 4), w.dtype, sharding=w.sharding)
        refused(expected | {"params": {"w": longer}}, r"params/w has shape \(8, 4\), expected \(16")
        half = jax.ShapeDtypeStruct(w.shape, jnp.bfloat16, sharding=w.sharding)
        refused(expected | {"params": {"w": half}}, "params/w is float32, expected bfloat16")
    assert load_params(tmp_path, {"w": half}, cast=True)[1]["w"].dtype == jnp.bfloat16


def damage(path):
    """Every file of a checkpoint, removed or cut; and arrays changed in the middle."""
    for file in sorted(p.relative_to(path) for p in path.rglob("*") if p.is_file()):
        yield f"remove {file}", lambda copy, file=file: (copy / file).unlink()
        if (path / file).stat().st_size:
            yield (
                f"cut {file}",
                lambda copy, file=file: os.truncate(copy / file, (copy / file).stat().st_size // 2),
            )
            yield f"flip {file}", lambda copy, file=file: flip(copy / file)


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_damage_falls_back_to_the_checkpoint_before(mesh, tmp_path, capfd):
    original, copy = tmp_path / "original", tmp_path / "copy"
    expected = abstract(saved(mesh, original, 1, 2))
    for what, harm in damage(original / "00000002"):
        shutil.copytree(original, copy)
        harm(copy / "00000002")
        with Checkpoints(copy) as checkpoints:
            restored = checkpoints.restore(expected)
        assert restored.step == 1, what
        # A checkpoint without its seal is not one: nothing was promised.
        warned = "skipping damaged checkpoint" in capfd.readouterr().err
        assert warned != (what == "remove seal.json"), what
        shutil.rmtree(copy)


def test_damage_of_a_named_step_is_an_error(mesh, tmp_path):
    expected = abstract(saved(mesh, tmp_path, 1))
    (tmp_path / "00000001" / "state" / "manifest.ocdbt").unlink()
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(ValueError, match="manifest.ocdbt is missing"):
            checkpoints.restore(expected, step=1)
        with pytest.raises(ValueError, match="00000009 is unusable: it has no seal.json"):
            checkpoints.restore(expected, step=9)


def test_leftovers_of_a_killed_save_are_removed(mesh, tmp_path):
    saved(mesh, tmp_path, 1)
    left = tmp_path / "00000002.orbax-checkpoint-tmp"
    left.mkdir()
    (tmp_path / "00000003").mkdir()  # renamed, but not sealed
    expected = abstract(tree(mesh))
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(expected).step == 1
        checkpoints.save(3, tree(mesh, 3), {})
        checkpoints.wait()
        assert checkpoints.restore(expected).step == 3
    assert not left.exists()


class Failing:
    def __init__(self, error):
        self.error = error

    def result(self):
        raise self.error


def test_failure_in_the_background_is_raised(mesh, tmp_path, monkeypatch):
    saved(mesh, tmp_path, 1)
    broken = Failing(ValueError("INTERNAL: the network went away\ndetails"))
    monkeypatch.setattr(checkpoint.ocp, "save_async", lambda *_: broken)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, tree(mesh, 2), {})
        with pytest.raises(CheckpointError, match="00000002 could not be .*network went away$"):
            while True:
                checkpoints.check()
        checkpoints.save(3, tree(mesh, 3), {})
        with pytest.raises(CheckpointError):
            checkpoints.save(4, tree(mesh, 4), {})
        assert checkpoints.steps() == [1]
    with pytest.raises(CheckpointError), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(5, tree(mesh, 5), {})


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        ValueError("RESOURCE_EXHAUSTED: No space left on device"),
    ],
)
def test_full_disk_is_told_apart(error):
    try:
        raise CheckpointError("failed") from error
    except CheckpointError as failure:
        assert checkpoint.is_full_disk(failure)
    assert not checkpoint.is_full_disk(CheckpointError("other"))


def test_eight_devices_to_a_process_with_one(mesh, tmp_path):
    saved(mesh, tmp_path, 5)
    code = f"""
import jax, numpy as np
from paxlike.checkpoint import load_params
assert jax.device_count() == 1
one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
w = jax.ShapeDtypeStruct((8, 4), "float32", sharding=one)
step, params = load_params({str(tmp_path)!r}, {{"w": w}})
assert step == 5 and (np.asarray(params["w"]) == 5).all()
"""
    flags = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env=os.environ | flags)
    assert not list(tmp_path.rglob("_sharding"))


def test_memory_does_not_grow_with_the_saves(mesh, tmp_path):
    def resident():
        gc.collect()
        with open("/proc/self/statm") as stream:
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    big = {"w": jax.device_put(jnp.ones((8, 2**19)), NamedSharding(mesh, P("data")))}  # 16 MiB
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        for step in range(15):
            checkpoints.save(step, big, {})
            checkpoints.wait()
            if step == 4:
                before = resident()
    assert resident() - before < 2 * 16 * 2**20


def test_seal_says_what_is_inside(mesh, tmp_path):
    saved(mesh, tmp_path, 2)
    seal = json.loads((tmp_path / "00000002" / "seal.json").read_text())
    assert seal["arrays"] == {"params/w": [[8, 4], "float32"], "step": [[], "int32"]}


def test_state_names_are_readable():
    with Entered("one") as entered:
        names = checkpoint.flatten(entered.abstract)
    assert "params/layers/mlp/up" in names and "step" in names
    assert "opt_state/0/mu/layers/mlp/up" in names
