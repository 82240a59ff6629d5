"""Summaries of traces: times by hand, and a real trace of the CPU."""

import jax
import jax.numpy as jnp
import pytest

from paxlike.analysis import hlo, xprof
from paxlike.analysis.xprof import Span

PROGRAM = """HloModule jit_f, is_scheduled=true

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8] parameter(0)
  %p = f32[8,8] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(f)/mlp/dot"}
  %n = f32[8,8] negate(%p), metadata={op_name="jit(f)/norm/neg"}
  ROOT %r = f32[8,8] all-reduce(%n), replica_groups={}, to_apply=%add, \
metadata={op_name="jit(f)/mlp/psum"}
}
"""
MS = 1_000_000  # nanoseconds


readable = pytest.mark.skipif(not xprof.can_read(), reason="this JAX cannot read its traces")


def spans(run, at, device="0"):
    """Product 0-4, collective 2-7, negation 9-10: 2 hidden, 3 exposed, 2 idle."""
    times = {"p": (0, 4), "r": (2, 7), "n": (9, 10)}
    return [
        Span(device, run, name, (at + start) * MS, (at + end) * MS)
        for name, (start, end) in times.items()
    ]


def test_exposed_hidden_and_idle():
    """A torn run, then two whole ones 5 ms apart, on two devices."""
    torn = [Span("0", 1, "n", 0, 50 * MS)]
    found = xprof.measure(
        torn + [s for d in "01" for s in (*spans(2, 100, d), *spans(3, 115, d))],
        hlo.parse(PROGRAM),
        num_steps=2,
    )
    assert found.by_class_seconds == pytest.approx(
        {"matmul": 0.004, "collective": 0.003, "other": 0.001}
    )
    assert found.by_scope_seconds == pytest.approx({"mlp": 0.007, "norm": 0.001})
    assert found.exposed_by_scope_seconds == pytest.approx({"mlp": 0.003})
    assert found.hidden_communication_seconds == pytest.approx(0.002)
    assert found.idle_seconds == pytest.approx(0.002)
    assert found.between_steps_seconds == pytest.approx(0.005 / 2)


def test_a_trace_of_another_program():
    with pytest.raises(ValueError, match="no event of the trace belongs to the program jit_f"):
        xprof.measure([], hlo.parse(PROGRAM), 1)


def test_a_jax_that_cannot_read_is_told_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 12, 0))
    with pytest.raises(ValueError, match="aborts the process"):
        xprof.summarise(tmp_path, PROGRAM, 1)


@readable
def test_no_trace(tmp_path):
    with pytest.raises(ValueError, match="no trace"):
        xprof.summarise(tmp_path, PROGRAM, 1)


@readable
def test_a_real_trace(tmp_path):
    def f(x):
        with jax.named_scope("products"):
            return jnp.sin(x @ x) @ x

    x = jnp.ones((512, 512))
    compiled = jax.jit(f).lower(x).compile()
    jax.block_until_ready(compiled(x))
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(2):
            jax.block_until_ready(compiled(x))
    found = xprof.summarise(tmp_path, compiled.as_text(), 2)
    assert max(found.by_class_seconds, key=found.by_class_seconds.get) == "matmul"
    assert next(iter(found.by_scope_seconds)) == "products"
    assert found.exposed_by_scope_seconds == {}
