"""The picture of a simulated step, read back."""

import json

import pytest

from paxlike.analysis import timeline, trace
from tests.paxlike.analysis.test_timeline import done, entry, machine, simulated, start, work


@pytest.fixture
def simple() -> timeline.Timeline:
    lines = start("r", "x"), work("a", "y"), done("d", "r"), work("b", "a")
    return simulated(entry(*lines), network=machine())


def test_lanes_and_times(simple, tmp_path):
    """2 us of work and 2 of waiting beside a transfer of 4 us, then 2 us of work."""
    trace.write(simple, "a title", tmp_path / "trace" / "timeline.json")
    events = json.loads((tmp_path / "trace" / "timeline.json").read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    bars = [
        (lanes[e["tid"]], e["name"], e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X"
    ]
    assert [bar[:4] for bar in bars] == [
        ("nvlink", "r", 0, 4), ("compute", "a", 0, 2), ("compute", "d", 2, 2),
        ("compute", "b", 4, 2),
    ]  # fmt: skip
    assert bars[0][4] == {"scope": "r", "kind": "all-reduce", "axis": "near"}
    assert bars[2][4]["wait"] is True


def test_a_picture(simple, tmp_path):
    trace.plot(simple, "a title", tmp_path / "lanes.png")
    assert (tmp_path / "lanes.png").read_bytes().startswith(b"\x89PNG")
