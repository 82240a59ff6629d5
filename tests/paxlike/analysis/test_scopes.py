"""Named scopes and phases out of op names as jax 0.10 and 0.12 write them."""

import pytest

from paxlike.analysis.scopes import Scope, parse_scope


@pytest.mark.parametrize(
    "op_name, path, phase",
    [
        ("jit(f)/layer/mlp/dot_general", "layer.mlp", "forward"),
        (
            "jit(f)/jvp()/while/body/closed_call/layer/mlp/bd,df->bf/dot_general",
            "layer.mlp",
            "forward",
        ),
        ("jit(f)/outer/jvp(inner)/cond/branch_1_fun/tanh", "outer.inner", "forward"),
        ("jit(f)/outer/transpose(jvp(inner))/mlp/mul", "outer.inner.mlp", "backward"),
        ("jit(f)/transpose(jvp(a/b))/mul", "a.b", "backward"),
        (
            "jit(f)/transpose(jvp())/while/body/checkpoint/rematted_computation/layer/sin",
            "layer",
            "recompute",
        ),
        ("jit(f)/transpose(jvp())/while/body/eval_jaxpr/remat2", "", "recompute"),
        ("jit(f)/a/(bd,df->bf/dot_general:bf,fd->bd/dot_general)", "a", "forward"),
        ("jit(f)/attn/jit(softmax)/exp", "attn", "forward"),
        ("jit(f)/shard_map/attn/psum_invariant", "attn", "forward"),
        ("params['w']", "", "forward"),
        ("", "", "forward"),
    ],
)
def test_scope(op_name, path, phase):
    assert parse_scope(op_name) == Scope(path, phase)
