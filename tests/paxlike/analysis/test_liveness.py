"""Live ranges against sums by hand, and against what XLA's buffer assignment really takes."""

import gzip
import pathlib

import jax
import jax.numpy as jnp
import pytest

from paxlike.analysis import hlo, liveness

KB = 4 * 250  # bytes of f32[250]
V = "f32[250]"
SAMPLES = pathlib.Path(__file__).parent / "samples"


def peak(main, *others, header="", shapes=()):
    text = f"HloModule m, is_scheduled=true{header}\n\n" + "\n".join((*others, main))
    return liveness.peak(hlo.parse(text), shapes)


def entry(*lines, result=V):
    body = "\n".join(f"  {line}" for line in lines[:-1])
    return (
        f"ENTRY %main (x: {V}) -> {result} {{\n  %x = {V} parameter(0)\n{body}\n"
        f"  ROOT {lines[-1]}\n}}\n"
    )


def sort(name, operand, scope="s", size=V):
    """An operation that cannot write over its operand."""
    return f'%{name} = {size} reverse(%{operand}), metadata={{op_name="jit(f)/{scope}/op"}}'


def test_a_chain_needs_two_buffers():
    """The last of four is the result, which is not an argument's: it lives to the end."""
    found = peak(entry(sort("a", "x"), sort("b", "a"), sort("c", "b"), sort("d", "c")))
    assert found.bytes == 2 * KB


def test_a_buffer_lives_to_its_last_use():
    found = peak(
        entry(
            sort("a", "x", "early"), sort("b", "a"), sort("c", "b"), sort("e", "c"),
            f"%d = {V} concatenate(%a, %e)",
        )
    )  # fmt: skip
    assert found.bytes == 3 * KB
    assert found.by_scope()["early"] == KB


def test_elementwise_operations_write_over_what_ends():
    lines = (f"%{new} = {V} negate(%{old})" for new, old in ("ax", "ba", "cb"))
    assert peak(entry(*lines)).bytes == KB


def test_views_are_no_buffers():
    found = peak(
        entry(
            sort("a", "x"), f"%t = ({V}) tuple(%a)",
            f"%g = {V} get-tuple-element(%t), index=0", "%v = f32[2,125] bitcast(%g)",
        )
    )  # fmt: skip
    assert found.bytes == KB


def test_a_donated_result_takes_its_arguments_place():
    header = ", input_output_alias={ {}: (0, {}, may-alias) }, entry_computation_layout={()->()}"
    assert peak(entry(sort("a", "x"), sort("b", "a"))).bytes == 2 * KB
    assert peak(entry(sort("a", "x"), sort("b", "a")), header=header).bytes == KB


LOOP = (
    f"%body (p: ({V}, {V})) -> ({V}, {V}) {{\n  %p = ({V}, {V}) parameter(0)\n"
    f"  %p0 = {V} get-tuple-element(%p), index=0\n  %p1 = {V} get-tuple-element(%p), index=1\n"
    f"  {sort('b0', 'p0', 'inner')}\n  {sort('b1', 'b0', 'inner')}\n  {sort('b2', 'b1', 'inner')}\n"
    f"  ROOT %br = ({V}, {V}) tuple(%b2, %p1)\n}}\n",
    f"%cond (p: ({V}, {V})) -> pred[] {{\n  %q = ({V}, {V}) parameter(0)\n"
    "  ROOT %ct = pred[] constant(true)\n}\n",
)  # fmt: skip


def test_a_loops_state_is_one_buffer():
    """Two of state, and inside it two more at a time; the next state lies in the last one."""
    found = peak(
        entry(
            sort("a", "x", "first"), sort("b", "x", "second"), f"%t = ({V}, {V}) tuple(%a, %b)",
            f"%w = ({V}, {V}) while(%t), condition=%cond, body=%body",
            f"%g = {V} get-tuple-element(%w), index=1",
        ),
        *LOOP,
    )  # fmt: skip
    assert found.bytes == 4 * KB
    assert found.during[0] == "w" and found.where == "inner"
    assert found.by_scope() == {"inner": 2 * KB, "first": KB, "second": KB}


def test_categories():
    gradient = 'metadata={op_name="jit(f)/transpose(jvp(mlp))/op"}'
    found = peak(
        entry(
            f"%g = f32[500,2] broadcast(%x), {gradient}",
            f"%h = f32[20,2] broadcast(%x), {gradient}",
            f"%r = {V} all-reduce(%x), replica_groups={{{{0,1}}}}, to_apply=%add",
            f"%z = {V} concatenate(%g, %h, %r)",
        ),
        shapes=[(500, 2)],
    )
    # What has no scope of its own, the result here, has that of its producer.
    assert found.by_category() == {"gradients": 4000, "activations": KB + 160, "collectives": KB}


def compiled(function, *arguments, donate=()):
    lowered = jax.jit(function, donate_argnums=donate).lower(*arguments)
    done = lowered.compile()
    stats = done.memory_analysis()
    taken = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return liveness.peak(hlo.parse(done.as_text())), taken


def chain(x, weights):
    def block(x, w):
        with jax.named_scope("block"):
            return jnp.tanh(x @ w), None

    return jnp.sum(jax.lax.scan(block, x, weights)[0] ** 2)


@pytest.mark.parametrize("program", ["gradient", "forward", "update", "nested"])
def test_against_the_compiler(program):
    x, weights = jnp.ones((256, 128)), jnp.ones((12, 128, 128))
    if program == "gradient":
        found, taken = compiled(jax.grad(chain), x, weights)
        saved = 12 * x.size * 4
        assert found.by_scope()["block"] >= saved, "what the loop saves has the scope of its maker"
    elif program == "forward":
        found, taken = compiled(chain, x, weights)
    elif program == "update":
        found, taken = compiled(
            lambda w, x: jax.tree.map(lambda a, g: a - g, w, jax.grad(chain, 1)(x, w)),
            weights, x, donate=0,
        )  # fmt: skip
    else:
        twice = jax.checkpoint(chain)
        found, taken = compiled(
            jax.grad(lambda w: jax.lax.map(lambda s: twice(x * s, w), jnp.arange(3.0)).sum()),
            weights,
        )
    assert found.bytes == pytest.approx(taken, rel=0.08, abs=2000)


def test_recorded_programs_have_a_peak():
    for path in sorted(SAMPLES.glob("*.gz")):
        found = liveness.peak(hlo.parse(gzip.decompress(path.read_bytes()).decode()))
        assert found.bytes == sum(buffer.bytes for buffer in found.buffers), path.name
