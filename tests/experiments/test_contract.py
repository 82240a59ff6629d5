"""What every registered experiment owes: a new one is covered without an edit here.

Its train step is traced and lowered for each platform on an abstract mesh of its own size, so that
the largest models need no device; where its parameters lie is compared with tests/golden/sharding.
"""

import pytest

from meshes.axes import FILL
from meshes.build import abstract_mesh
from meshes.context import parallelism
from paxlike import registry
from paxlike.compilation import inputs
from paxlike.describe import check_promise, describe
from paxlike.model import build_model
from paxlike.runtime import schemes
from tests.paxlike.test_golden import GOLDEN, compare

PLATFORMS = ("cpu", "cuda", "tpu")


@pytest.mark.parametrize("name", registry.descriptions())
def test_train_step_lowers_for_every_platform(name):
    experiment = registry.build(name)
    parallel = experiment.parallel
    shape = parallel.mesh
    mesh = abstract_mesh(shape.resolve(8) if FILL in shape.sizes.values() else shape)
    with parallelism(mesh, parallel.rule_table, schemes(parallel)):
        model = build_model(experiment)
        compare(name, "sharding", describe(model.abstract()) + "\n")
        if isinstance(parallel.rules, str):
            check_promise(model.abstract(), parallel.rules)
        given = inputs(experiment, model, "train")
        traced = given.step.trace(*given.arguments)
        for platform in PLATFORMS:
            text = traced.lower(lowering_platforms=(platform,)).as_text()
            devices = f"mhlo.num_partitions = {mesh.size} : i32"
            assert devices in text, text[:300]


def test_no_dump_is_left_behind():
    dumps = {path.stem for path in (GOLDEN / "sharding").glob("*.txt")}
    assert dumps == set(registry.descriptions())
