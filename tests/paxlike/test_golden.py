"""Every registered experiment has a text dump under tests/golden: a change of it is seen in review.

To renew the dumps after a deliberate change: PAXLIKE_UPDATE_GOLDEN=1 pytest <this file>.
"""

import difflib
import os
import pathlib

import pytest

from layers.counting import num_parameters
from paxlike import registry, workdir
from paxlike.config import Experiment
from paxlike.serialization import to_json

GOLDEN = pathlib.Path(__file__).parent.parent / "golden"
UPDATE = os.environ.get("PAXLIKE_UPDATE_GOLDEN") == "1"


def dump(experiment: Experiment) -> str:
    """One line for each leaf of the configuration."""
    leaves = workdir.leaves(to_json(experiment, Experiment))
    lines = [f"{path} = {value!r}" for path, value in leaves.items()]
    return "\n".join([f"# parameters: {num_parameters(experiment.model):,}", *lines]) + "\n"


def compare(name: str, kind: str, now: str) -> None:
    """Compare a dump with the golden one, or renew that."""
    path = GOLDEN / kind / f"{name}.txt"
    if UPDATE:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(now)
    before = path.read_text() if path.exists() else ""
    diff = "".join(
        difflib.unified_diff(before.splitlines(True), now.splitlines(True), "golden", "now", n=0)
    )
    assert not diff, (
        f"{path} differs; if that is meant, renew it with PAXLIKE_UPDATE_GOLDEN=1:\n{diff}"
    )


@pytest.mark.parametrize("name", registry.descriptions())
def test_configuration(name):
    compare(name, "config", dump(registry.build(name)))


def test_no_dump_is_left_behind():
    dumps = {path.stem for path in (GOLDEN / "config").glob("*.txt")}
    assert dumps == set(registry.descriptions())
