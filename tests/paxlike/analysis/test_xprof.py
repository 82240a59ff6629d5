"""Time by scope, class and overlap, from spans worked out by hand and from a real trace."""

import pytest

from paxlike.analysis import hlo
from paxlike.analysis.xprof import Span, measure, summarise
from paxlike.modes.train import train
from tests.paxlike.training.tiny import experiment

PROGRAM = """HloModule jit_step, is_scheduled=true

ENTRY %main (a: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %dot.1 = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/layer/mlp/dot_general"}
  %all-reduce.1 = f32[8,8]{1,0} all-reduce(%dot.1), replica_groups={{0,1}}, to_apply=%sum, metadata={op_name="jit(step)/layer/out/psum"}
  ROOT %add.1 = f32[8,8]{1,0} add(%all-reduce.1, %a), metadata={op_name="jit(step)/head/add"}
}
"""  # noqa: E501


def ran(run: int, *spans: tuple[str, float, float]) -> list[Span]:
    return [Span("/device:0", run, name, 1e9 * start, 1e9 * end) for name, start, end in spans]


def test_overlap_idle_time_and_the_host_are_told_apart():
    """Of the collective's 3 s, 1 s lies beside the product: 2 s are exposed."""
    module = hlo.parse(PROGRAM)
    warm_up = ran(1, ("dot.1", -9, -8))
    first = ran(2, ("dot.1", 0, 2), ("all-reduce.1", 1, 4), ("add.1", 5, 6))
    second = ran(3, ("dot.1", 8, 10), ("all-reduce.1", 9, 12), ("add.1", 13, 14))
    found = measure(warm_up + first + second, module, 2)
    assert found.by_scope_seconds == pytest.approx({"layer.mlp": 2, "layer.out": 2, "head": 1})
    assert found.by_class_seconds == pytest.approx({"matmul": 2, "collective": 2, "other": 1})
    assert found.exposed_by_scope_seconds == pytest.approx({"layer.out": 2})
    assert found.hidden_communication_seconds == pytest.approx(1)
    assert found.idle_seconds == pytest.approx(1)
    assert found.between_steps_seconds == pytest.approx(2 / 2)


def test_events_of_another_program():
    with pytest.raises(ValueError, match="no event of the trace belongs to .*jit_step"):
        measure([], hlo.parse(PROGRAM), 1)


def test_no_trace(tmp_path):
    with pytest.raises(ValueError, match="no trace"):
        summarise(tmp_path, PROGRAM, 1)


def test_a_traced_run_reports_where_its_time_went(tmp_path):
    report = train(
        experiment(num_steps=6), tmp_path, quiet=True, profile_first_step=3, profile_steps=2
    )
    found = report.measured.breakdown
    assert {"layer.attention.core", "layer.mlp.up", "head"} <= set(found.by_scope_seconds)
    assert found.by_class_seconds["collective"] > 0 and found.by_class_seconds["matmul"] > 0
    assert set(found.exposed_by_scope_seconds) <= set(found.by_scope_seconds)
    assert "scope layer.attention.core" in report.markdown()
    assert (tmp_path / "trace" / "step.hlo.txt").exists()
    assert (tmp_path / "trace" / "memory.prof").exists()
