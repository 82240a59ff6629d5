"""Counts and bytes of collectives against closed forms, live on CPU and recorded for GPU, TPU.

The closed forms restate the ring formulas of Thakur et al. for the programs' known shapes; the
reader never sees them. Recorded programs are those of `programs`, compiled by `record.py`.
"""

import functools
import gzip
import pathlib
from fractions import Fraction

import jax
import pytest

from paxlike.analysis import collectives, hlo
from tests.paxlike.analysis import programs
from tests.paxlike.analysis.programs import BATCH, HIDDEN, INNER, LAYERS, OUTER, WIDTH

SAMPLES = pathlib.Path(__file__).parent / "samples"
TARGETS = ["cpu", "h100_0.10.2", "h100_0.12.0.1", "v5e_0.10.2", "v5e_0.12.0.1"]
FLOAT = 4


def mesh():
    axis_types = (jax.sharding.AxisType.Explicit,) * 3
    return jax.make_mesh(tuple(programs.AXES.values()), tuple(programs.AXES), axis_types=axis_types)


@functools.cache
def compiled(target, name):
    if target == "cpu":
        return programs.compile_text(name, mesh())
    return gzip.decompress((SAMPLES / f"{target}_{name}.hlo.gz").read_bytes()).decode()


def ring(kind, size, full):
    """Bytes one device sends for `full` bytes of gathered, unreduced or local buffer."""
    if kind == "collective-permute":
        return full
    return Fraction(size - 1, size) * full * (2 if kind == "all-reduce" else 1)


def expect(*rows):
    """(kind, axes, count, bytes of one) -> what `summary` returns."""
    result = {}
    for kind, axes, count, full in rows:
        size = 2 ** len(axes)
        old_count, old_sent = result.get((kind, axes), (0, 0))
        result[kind, axes] = (old_count + count, old_sent + count * ring(kind, size, full))
    return result


A = BATCH * WIDTH * FLOAT  # one activation of the programs, on one device
WEIGHT = WIDTH * WIDTH * FLOAT
PAIR = WIDTH * HIDDEN // 2 * FLOAT  # half of a column- or row-parallel weight
WIDE = 1024 * 2048 // 2

CLOSED_FORMS = {
    "nested": expect(
        ("all-to-all", ("tensor",), 2 * OUTER * INNER, A),
        ("collective-permute", ("seq",), OUTER * INNER, A),
        ("all-reduce", ("data", "tensor"), OUTER * INNER, A),
        ("all-gather", ("data",), OUTER, 2 * A),
        ("reduce-scatter", ("data",), OUTER, 2 * A),
    ),
    # Tensor parallel with full recomputation: one all-reduce a pair in each of three passes;
    # data parallel: the gradients of both weights of each layer.
    "tensor_parallel": expect(
        ("all-reduce", ("tensor",), 3 * LAYERS, A),
        ("all-reduce", ("data", "seq"), 2 * LAYERS, PAIR),
    ),
    "fsdp": expect(
        ("all-gather", ("data",), 2 * LAYERS, WEIGHT),
        ("reduce-scatter", ("data",), LAYERS, WEIGHT),
    ),
    "megatron_sp": expect(
        ("all-gather", ("tensor",), 2 * LAYERS, 2 * A),
        ("reduce-scatter", ("tensor",), 2 * LAYERS, 2 * A),
    ),
    "experts": expect(("all-to-all", ("tensor",), 4 * LAYERS, 4 * A)),
    "merged": expect(
        ("all-reduce", ("data",), 3, A),
        ("all-reduce", ("seq",), 2, A),
    ),
}


def resharded_forms(target):
    """CPU computes in float32, and keeps gradients' all-reduce apart from the slice after it."""
    width = 4 if target == "cpu" else 2
    gradient = "all-reduce" if target == "cpu" else "reduce-scatter"
    return expect(
        ("all-gather", ("data", "seq"), 4 * LAYERS, WIDE * width),
        ("all-reduce", ("tensor",), 3 * LAYERS, 8192 // 4 * 1024 * width),
        (gradient, ("data", "seq"), 2 * LAYERS, WIDE * width),
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [*CLOSED_FORMS, "resharded"])
def test_counts_and_bytes_equal_closed_forms(target, name):
    rows = collectives.table(compiled(target, name), programs.AXES)
    expected = resharded_forms(target) if name == "resharded" else CLOSED_FORMS[name]
    assert collectives.summary(rows) == expected
    assert all(row.exact for row in rows)


@pytest.mark.parametrize("target", TARGETS)
def test_scopes_and_phases(target):
    def found(name):
        rows = collectives.table(compiled(target, name), programs.AXES)
        return {(row.kind, row.where, row.phase) for row in rows}

    assert found("nested") == {
        ("all-to-all", "mix", "forward"),
        ("collective-permute", "ring", "forward"),
        ("all-reduce", "norm", "forward"),
        ("all-gather", "weights", "forward"),
        ("reduce-scatter", "weights", "forward"),
    }
    assert found("fsdp") == {
        ("all-gather", "layer", "forward"),
        ("all-gather", "layer", "recompute"),
        ("reduce-scatter", "layer", "backward"),
    }
    assert found("merged") == {
        ("all-reduce", "gradients", "forward"),
        ("all-reduce", "chain", "forward"),
    }
    assert found("experts") == {
        ("all-to-all", where, phase)
        for where in ("dispatch", "combine")
        for phase in ("forward", "backward")
    }
    phases = {phase for _, where, phase in found("tensor_parallel") if where == "layers.mlp"}
    assert phases == {"forward", "recompute", "backward"}


@pytest.mark.parametrize(
    "op_name, where, phase",
    [
        ("jit(f)/own/psum", "own", "forward"),
        ("", "consumer", "backward"),  # all of the consumer's
        ("jit(f)/while/body/jit", "consumer", "forward"),  # keeps its own phase
    ],
)
def test_a_collective_without_scope_takes_its_consumers(op_name, where, phase):
    metadata = f', metadata={{op_name="{op_name}"}}' if op_name else ""
    line = (
        f"%c = f32[16] all-reduce(%x), replica_groups=[2,4]<=[8], {GLOBAL}{metadata}\n"
        "  %d = f32[16] copy(%c)\n  %e = f32[16] sine(%d), "
        'metadata={op_name="jit(f)/transpose(jvp(consumer))/sin"}'
    )
    (row,) = collectives.table(program(line), AB)
    assert (row.where, row.phase, row.backward) == (where, phase, phase != "forward")


def test_a_collective_without_scope_takes_its_producers_last():
    line = (
        '%s = f32[16] sine(%x), metadata={op_name="jit(f)/producer/sin"}\n'
        f"  %c = f32[16] all-reduce(%s), replica_groups=[2,4]<=[8], {GLOBAL}"
    )
    (row,) = collectives.table(program(line), AB)
    assert row.where == "producer"


def test_mesh_is_a_jax_mesh_or_a_mapping():
    text = compiled("cpu", "merged")
    by_mapping = collectives.table(text, programs.AXES)
    assert collectives.table(hlo.parse(text), mesh()) == by_mapping
    assert collectives.table(text, mesh().abstract_mesh) == by_mapping


def program(line, *, num_partitions=8, replica_count=1):
    return f"""HloModule m, num_partitions={num_partitions}, replica_count={replica_count}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}

ENTRY %main (x: f32[16], y: bf16[4]) -> f32[] {{
  %x = f32[16] parameter(0)
  %y = bf16[4] parameter(1)
  {line}
  ROOT %r = f32[] constant(0)
}}
"""


def rows_of(line, axes, **options):
    rows = collectives.table(program(line, **options), axes)
    return [(row.kind, row.mesh_axes, row.count, row.bytes_per_device) for row in rows]


AB = {"a": 2, "b": 4}
GLOBAL = "channel_id=1, use_global_device_ids=true, to_apply=%add"


@pytest.mark.parametrize(
    "groups, axes, sent",
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("b",), 96),
        ("{{3,1,0,2},{5,4,6,7}}", ("b",), 96),  # order inside a group does not matter
        ("{{0,4},{1,5},{2,6},{3,7}}", ("a",), 64),
        ("[2,4]<=[8]", ("b",), 96),
        ("[4,2]<=[2,4]T(1,0)", ("a",), 64),
        ("[1,8]<=[8]", ("a", "b"), 112),
        ("{}", ("a", "b"), 112),
        ("mesh['a'=2,'b'=4] {'b'}", ("b",), 96),
        ("mesh['x'=8] {'x':(1)2}", ("a",), 64),
        ("mesh['x'=8] {'x':(2)4}", ("b",), 96),
        ("mesh['p'=4,'q'=2], device_ids=([2,4]T(1,0)) {'q'}", ("a",), 64),
        ("mesh['p'=4,'q'=2], device_ids=(0,4,1,5,2,6,3,7) {'p'}", ("b",), 96),
        ("{{0,1},{2,3},{4,5},{6,7}}", ("?",), 64),  # half of b
        ("mesh['x'=8] {'x':(1)2,'x':(4)2}", ("?",), 96),
        ("{{0,1,2,3},{4,5},{6,7}}", ("?",), 96),  # unequal: the largest sets the pace
        ("{{0,5},{1,4},{2,7},{3,6}}", ("?",), 64),  # diagonal
    ],
)
def test_replica_groups(groups, axes, sent):
    line = f"%c = f32[16] all-reduce(%x), replica_groups={groups}, {GLOBAL}"
    assert rows_of(line, AB) == [("all-reduce", axes, 1, sent)]


def test_groups_of_one_are_no_collectives():
    groups = "{{0},{1},{2},{3},{4},{5},{6},{7}}"
    assert not rows_of(f"%c = f32[16] all-reduce(%x), replica_groups={groups}, {GLOBAL}", AB)
    line = "%c = f32[16] collective-permute(%x), channel_id=1, source_target_pairs={{0,0},{3,3}}"
    assert not rows_of(line, AB)
    empty = "source_target_pairs={}, frontend_attributes={a={{0,1},{1,0}}}"
    assert not rows_of(f"%c = f32[16] collective-permute(%x), channel_id=1, {empty}", AB)


@pytest.mark.parametrize(
    "attributes, axes",
    [
        ("replica_groups={{0,1},{2,3}}, channel_id=1, use_global_device_ids=true", ("partition",)),
        ("replica_groups={{0,1},{2,3}}, channel_id=1", ("?",)),  # 2 replicas x 2 partitions
        ("replica_groups={{0,2},{1,3}}, channel_id=1", ("?",)),
        ("replica_groups={{0,1,2,3}}, channel_id=1", ("replica", "partition")),
        ("replica_groups={{0,1,2,3}}", ("replica",)),
    ],
)
def test_replica_and_partition_ids(attributes, axes):
    """Without global ids groups are of replicas; with a channel they span all partitions."""
    line = f"%c = f32[16] all-reduce(%x), {attributes}, to_apply=%add"
    mesh_axes = {"replica": 4, "partition": 2}
    rows = rows_of(line, mesh_axes, num_partitions=2, replica_count=4)
    assert [row[1] for row in rows] == [axes]


@pytest.mark.parametrize(
    "pairs, axes",
    [
        ("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", ("b",)),
        ("{{0,4},{4,0},{1,5},{5,1}}", ("a",)),
        ("{{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7}}", ("a", "b")),
        ("{{0,1},{1,9}}", ("?",)),
    ],
)
def test_permute_pairs(pairs, axes):
    line = f"%c = f32[16] collective-permute(%x), channel_id=1, source_target_pairs={pairs}"
    assert rows_of(line, AB) == [("collective-permute", axes, 1, 64)]


@pytest.mark.parametrize(
    "lines, expected",
    [
        (  # asynchronous pair with a tuple of two operands of two types
            f"%c = ((f32[16], bf16[4]), (f32[32], bf16[8])) all-gather-start(%x, %y), "
            f"replica_groups=[4,2]<=[2,4]T(1,0), dimensions={{0}}, {GLOBAL}\n"
            "  %d = (f32[32], bf16[8]) all-gather-done(%c)",
            [("all-gather", ("a",), 1, 64), ("all-gather", ("a",), 1, 8)],
        ),
        (  # one operand a peer: a single all-to-all of the whole buffer
            "%p = f32[4] slice(%x), slice={[0:4]}\n"
            "  %c = (f32[4], f32[4], f32[4], f32[4]) all-to-all(%p, %p, %p, %p), channel_id=1, "
            "replica_groups=[2,4]<=[8]",
            [("all-to-all", ("b",), 1, 48)],
        ),
        (
            "%c = f32[16] ragged-all-to-all(%x, %x, %y, %y, %y, %y), channel_id=1, "
            "replica_groups=[2,4]<=[8]",
            [("ragged-all-to-all", ("b",), 1, 48)],
        ),
        (
            f"%c = f32[4] reduce-scatter-start(%x), replica_groups=[2,4]<=[8], "
            f"dimensions={{0}}, {GLOBAL}\n  %d = f32[4] reduce-scatter-done(%c)",
            [("reduce-scatter", ("b",), 1, 48)],
        ),
        (  # packed by the compiler: two tensors, flattened
            "%p = f32[4] bitcast(%y)\n  %q = f32[20] concatenate(%x, %p), dimensions={0}\n"
            f"  %c = f32[20] all-reduce(%q), replica_groups=[2,4]<=[8], {GLOBAL}",
            [("all-reduce", ("b",), 2, 120)],
        ),
        (  # concatenated by the user: one
            "%q = f32[32] concatenate(%x, %x), dimensions={0}, "
            'metadata={op_name="jit(f)/concatenate"}\n'
            f"  %c = f32[32] all-reduce(%q), replica_groups=[2,4]<=[8], {GLOBAL}",
            [("all-reduce", ("b",), 1, 192)],
        ),
    ],
    ids=["async_tuple", "split_all_to_all", "ragged", "async_scatter", "packed", "users_own"],
)
def test_forms(lines, expected):
    assert rows_of(lines, AB) == expected


def test_conditional_counts_the_branch_that_sends_most():
    @functools.partial(
        jax.shard_map,
        mesh=mesh(),
        in_specs=(jax.P(), jax.P("data")),
        out_specs=jax.P("data"),
        check_vma=False,
    )
    def switch(index, x):
        def small(x):
            return jax.lax.psum(x, "tensor")

        def large(x):
            return jax.lax.psum(jax.numpy.sin(jax.lax.psum(x, "seq")), "seq")

        return jax.lax.switch(index, [small, large, small], x)

    argument = programs.struct(mesh(), (64, 64), "data")
    text = jax.jit(switch).lower(0, argument).compile().as_text()
    assert "conditional(" in text
    size = 32 * 64 * FLOAT
    assert collectives.summary(collectives.table(text, programs.AXES)) == expect(
        ("all-reduce", ("seq",), 2, size)
    )


def test_unknown_trip_count_shows_in_the_table():
    @functools.partial(jax.shard_map, mesh=mesh(), in_specs=jax.P("data"), out_specs=jax.P("data"))
    def program(x):
        def more(x):
            return jax.numpy.sum(jax.lax.psum(x, "data")) < 100.0

        return jax.lax.while_loop(more, lambda y: y * 2.0, x)

    text = jax.jit(program).lower(programs.struct(mesh(), (64, 64), "data")).compile().as_text()
    rows = collectives.table(text, programs.AXES)
    assert rows and not any(row.exact for row in rows)
    assert ">=" in collectives.format_table(rows)


def test_format_table():
    rows = collectives.table(compiled("cpu", "fsdp"), programs.AXES)
    lines = collectives.format_table(rows).splitlines()
    assert lines[0].split() == ["kind", "axes", "count", "sent/device", "dtype", "phase", "where"]
    assert sorted(line.split()[0] for line in lines[1:]) == [
        "all-gather",
        "all-gather",
        "reduce-scatter",
    ]
    assert "524,288 B" in lines[1]


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(ValueError, match="has 4 devices, but the program .* compiled for 8"):
        collectives.table(compiled("cpu", "merged"), {"a": 4})
    with pytest.raises(TypeError, match="expected a jax Mesh or a mapping"):
        collectives.table(compiled("cpu", "merged"), 8)
