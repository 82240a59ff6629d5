"""Trip counts and the walk over what executes."""

import jax
import jax.numpy as jnp
import pytest

from paxlike.analysis import hlo
from paxlike.analysis.execution import Trips, trip_count, walk


def loop(*, start="0", step="1", limit="10", direction="LT", op="add", config="", data="n"):
    """A while loop as the TPU compiler writes it: no known trip count, bound in the condition."""
    return f"""HloModule loop, is_scheduled=true

%body (p: (s32[], f32[4], s32[])) -> (s32[], f32[4], s32[]) {{
  %p = (s32[], f32[4], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %v = f32[4] get-tuple-element(%p), index=1
  %n = s32[] get-tuple-element(%p), index=2
  %one = s32[] constant({step})
  %next = s32[] {op}(%i, %one)
  %w = f32[4] sine(%v)
  ROOT %t = (s32[], f32[4], s32[]) tuple(%next, %w, %{data})
}}

%compare (a: s32[], b: s32[]) -> pred[] {{
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %lt = pred[] compare(%a, %b), direction={direction}
}}

%condition (q: (s32[], f32[4], s32[])) -> pred[] {{
  %q = (s32[], f32[4], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %m = s32[] get-tuple-element(%q), index=2
  %k = s32[] constant({limit})
  ROOT %done = pred[] fusion(%j, %{"k" if limit else "m"}), kind=kLoop, calls=%compare
}}

ENTRY %main (x: f32[4], s: s32[]) -> f32[4] {{
  %x = f32[4] parameter(0)
  %s = s32[] parameter(1)
  %zero = s32[] {"parameter(1)" if start is None else f"constant({start})"}
  %bound = s32[] constant(12)
  %z = s32[] copy(%zero)
  %init = (s32[], f32[4], s32[]) tuple(%z, %x, %bound)
  %while = (s32[], f32[4], s32[]) while(%init), condition=%condition, body=%body{config}
  ROOT %out = f32[4] get-tuple-element(%while), index=1
}}
"""


def trips(text):
    module = hlo.parse(text)
    main = module.computations[module.entry]
    return trip_count(module, main, main.instructions["while"])


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, Trips(10, True)),
        ({"start": "4"}, Trips(6, True)),
        ({"start": "1", "step": "4"}, Trips(3, True)),  # 1, 5, 9
        ({"direction": "LE"}, Trips(11, True)),
        ({"direction": "NE"}, Trips(10, True)),
        ({"start": "9", "step": "-1", "limit": "0", "direction": "GE"}, Trips(10, True)),
        (
            {"start": "9", "step": "2", "limit": "0", "direction": "GT", "op": "subtract"},
            Trips(5, True),
        ),
        ({"start": "20"}, Trips(0, True)),
        ({"limit": ""}, Trips(12, True)),  # the bound is a loop invariant element of the state
        ({"limit": "", "data": "i"}, Trips(1, False)),  # the bound changes
        ({"start": None}, Trips(10, False)),  # the start is data: 0 is assumed
        ({"op": "multiply"}, Trips(10, False)),  # no constant step: 1 is assumed
        (
            {"config": ', backend_config={"known_trip_count":{"n":"7"},"known_init_step":{}}'},
            Trips(7, True),
        ),
    ],
)
def test_trip_count(options, expected):
    assert trips(loop(**options)) == expected


def test_nested_loops_multiply_live():
    def inner(x, _):
        return jnp.sin(x), None

    def outer(x, _):
        return jnp.cos(jax.lax.scan(inner, x, None, length=5)[0]), None

    text = (
        jax.jit(lambda x: jax.lax.scan(outer, x, None, length=3)[0])
        .lower(jnp.ones((64, 64)))
        .compile()
        .as_text()
    )
    for known in (text, text.replace("known_trip_count", "hidden")):
        times = {
            site.instruction.opcode: site.times
            for site in walk(hlo.parse(known))
            if site.instruction.opcode in ("sine", "cosine")
        }
        assert times == {"sine": 15, "cosine": 3}


def test_data_dependent_loop_is_not_exact():
    text = (
        jax.jit(lambda x: jax.lax.while_loop(lambda y: jnp.sum(y) < 9.0, lambda y: y * 2.0, x))
        .lower(jnp.ones((4,)))
        .compile()
        .as_text()
    )
    inside = [site for site in walk(hlo.parse(text)) if site.in_loop]
    assert inside and not any(site.exact for site in inside)


def test_one_branch_of_a_conditional_and_its_choice():
    def program(index, x):
        def step(x):
            return jax.lax.scan(lambda y, _: (jnp.sin(y), None), x, None, length=8)[0]

        return jax.lax.switch(index, [jnp.cos, step, jnp.tanh], x)

    text = jax.jit(program).lower(0, jnp.ones((32, 32))).compile().as_text()

    def opcodes(weigh):
        return {site.instruction.opcode for site in walk(hlo.parse(text), weigh=weigh)}

    def has(opcode):
        return lambda sites: any(site.instruction.opcode == opcode for site in sites)

    for opcode in ("sine", "cosine", "tanh"):
        found = opcodes(has(opcode)) & {"sine", "cosine", "tanh"}
        assert found == {opcode}


def test_callers_and_fusions_are_marked():
    sites = walk(hlo.parse(loop()))
    compare = next(site for site in sites if site.instruction.opcode == "compare")
    assert compare.fused and compare.times == 11
    assert compare.caller.instruction.name == "done"
    sine = next(site for site in sites if site.instruction.opcode == "sine")
    assert not sine.fused and (sine.times, sine.in_loop) == (10, True)
    assert sine.caller.instruction.name == "while"
