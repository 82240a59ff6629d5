"""Simulated steps against times worked out by hand.

The test machine moves 1 GB/s through memory and over each link, without latencies and overheads: an
elementwise operation on f32[250] reads and writes 2 kB and takes 2 us, an all-reduce of f32[1000]
over two devices sends 4 kB and takes 4 us.
"""

import dataclasses
import gzip
import pathlib
import time

import numpy as np
import pytest

from meshes import targets
from meshes.hardware import NOMINAL_CPU, Link
from paxlike.analysis import collectives, hlo, timeline
from paxlike.analysis.cost_model import CostModel
from paxlike.analysis.network import Network
from tests.paxlike.analysis import programs

SAMPLES = pathlib.Path(__file__).parent / "samples"
US = 1e-6
LINK = Link(bytes_per_second=1e9, latency_seconds=0.0, source="made up")
MACHINE = dataclasses.replace(
    NOMINAL_CPU, kind="gpu", hbm_bytes_per_second=1e9, bf16_flops=1e12, nvlink=LINK, network=LINK
)
IDEAL = CostModel(
    version="ideal", hbm=1.0, nvlink=1.0, network=1.0, gpu_kernel_seconds=0.0,
    gpu_collective_seconds=0.0, large_matmul=1.0, medium_matmul=1.0, skinny_matmul=1.0,
)  # fmt: skip


def machine(hosts=2, gpus=2):
    """Axes `far` between hosts and `near` inside one."""
    places = np.stack(np.unravel_index(np.arange(hosts * gpus), (hosts, gpus)), axis=1)
    axes = (("far", hosts), ("near", gpus))
    return Network(MACHINE, axes, places.reshape(hosts, gpus, 2), (), IDEAL)


NEAR, FAR = "{{0,1},{2,3}}", "{{0,2},{1,3}}"
HEADER = "HloModule m, is_scheduled=true, num_partitions=4\n\n"
SUM = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}
"""


def scope(name):
    return f'metadata={{op_name="jit(f)/{name}/op"}}'


def start(name, operand, groups=NEAR, size=1000):
    return (
        f"%{name} = f32[{size}] all-reduce-start(%{operand}), channel_id=1, "
        f"replica_groups={groups}, use_global_device_ids=true, to_apply=%add, {scope(name)}"
    )


def done(name, of, size=1000):
    return f"%{name} = f32[{size}] all-reduce-done(%{of})"


def work(name, operand, size=250):
    return f"%{name} = f32[{size}] negate(%{operand}), {scope(name)}"


def entry(*lines, size=1000):
    body = "\n".join(f"  {line}" for line in lines[:-1])
    return (
        f"ENTRY %main (x: f32[{size}], y: f32[250]) -> f32[250] {{\n  %x = f32[{size}] parameter(0)"
        f"\n  %y = f32[250] parameter(1)\n{body}\n  ROOT {lines[-1]}\n}}\n"
    )


def simulated(*parts, network=None):
    return timeline.simulate(hlo.parse(HEADER + SUM + "\n".join(parts)), network or machine())


def test_operations_follow_each_other():
    result = simulated(entry(work("a", "y"), work("b", "a")))
    assert result.step_seconds == pytest.approx(4 * US)
    assert result.by_scope() == pytest.approx({"a": 2 * US, "b": 2 * US})
    assert (result.bound_by, result.hbm_bytes) == ("memory", 4000)


def test_a_synchronous_collective_is_exposed():
    line = start("r", "x").replace("-start", "")
    result = simulated(entry(line, work("a", "y")))
    assert result.step_seconds == pytest.approx(6 * US)
    assert result.exposed_by_axis() == pytest.approx({"near": 4 * US})
    assert result.bound_by == "communication:near"
    assert result.hidden == {"r": 0.0}


def test_half_hidden():
    """4 us of all-reduce behind 2 us of work."""
    result = simulated(entry(start("r", "x"), work("a", "y"), done("d", "r"), work("b", "a")))
    assert result.step_seconds == pytest.approx(6 * US)
    assert result.exposed_by_scope() == pytest.approx({"r": 2 * US})
    assert result.hidden == pytest.approx({"r": 0.5})
    assert result.hidden_communication_seconds == pytest.approx(2 * US)


@pytest.mark.parametrize("groups, seconds", [(NEAR, 8 * US), (FAR, 4 * US)])
def test_collectives_contend_for_one_link_and_not_for_two(groups, seconds):
    lines = start("p", "x"), start("q", "x", groups), done("d", "p"), done("e", "q")
    result = simulated(entry(*lines))
    assert result.step_seconds == pytest.approx(seconds)
    assert sum(result.exposed_by_axis().values()) == pytest.approx(seconds)


def loop(name, trips, body, state="(s32[], f32[250])"):
    """A while loop over `state`, whose body gets %p and defines ROOT."""
    return (
        f"%{name}_body (p: {state}) -> {state} {{\n  %{name}_p = {state} parameter(0)\n{body}\n}}\n"
        f"%{name}_cond (p: {state}) -> pred[] {{\n  %{name}_q = {state} parameter(0)\n"
        f"  ROOT %{name}_t = pred[] constant(true)\n}}\n",
        f"%{name} = {state} while(%{{init}}), condition=%{name}_cond, body=%{name}_body, "
        f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}',
    )


def test_loops_two_deep():
    """3 x (5 x 2 us + 2 us)."""
    inner, call = loop(
        "inner", 5,
        "  %i0 = s32[] get-tuple-element(%inner_p), index=0\n"
        "  %i1 = f32[250] get-tuple-element(%inner_p), index=1\n"
        f"  {work('deep', 'i1')}\n"
        "  ROOT %ir = (s32[], f32[250]) tuple(%i0, %deep)",
    )  # fmt: skip
    outer, outer_call = loop(
        "outer", 3,
        "  " + call.replace("%{init}", "%outer_p") + "\n"
        "  %o0 = s32[] get-tuple-element(%inner), index=0\n"
        "  %o1 = f32[250] get-tuple-element(%inner), index=1\n"
        f"  {work('shallow', 'o1')}\n"
        "  ROOT %or = (s32[], f32[250]) tuple(%o0, %shallow)",
    )  # fmt: skip
    main = entry(
        "%z = s32[] constant(0)", "%s = (s32[], f32[250]) tuple(%z, %y)",
        outer_call.replace("%{init}", "%s"), "%o = f32[250] get-tuple-element(%outer), index=1",
    )  # fmt: skip
    result = simulated(inner, outer, main)
    assert result.step_seconds == pytest.approx(36 * US)
    assert result.by_scope() == pytest.approx({"deep": 30 * US, "shallow": 6 * US})
    assert [e.details["trips"] for e in result.events if "trips" in e.details] == [5, 3]
    ends = max(event.begin + event.ticks for event in result.events)
    assert ends / timeline.PICOSECONDS == pytest.approx(36 * US)


@pytest.mark.parametrize("trips", [1, 2, 7, 1_000_000])
@pytest.mark.parametrize("size", [750, 250])
def test_a_collective_in_flight_across_trips(trips, size):
    """Each trip waits for the all-reduce of the trip before, starts the next and works 2 us.

    It takes 3 us (or 1), so that the first trip waits 3 (or 1), and each trip takes max(3, 2) (or
    2) until what it started is there: for the last trip, that is after the loop.
    """
    state = f"(f32[{size}], f32[250], f32[{size}])"
    body = (
        f"  %b0 = f32[{size}] get-tuple-element(%l_p), index=0\n"
        f"  %b1 = f32[250] get-tuple-element(%l_p), index=1\n"
        f"  {done('bd', 'b0', size)}\n  {start('bs', 'bd', size=size)}\n  {work('bw', 'b1')}\n"
        f"  ROOT %br = {state} tuple(%bs, %bw, %bd)"
    )
    text, call = loop("l", trips, body, state)
    main = entry(
        start("first", "x", size=size), f"%s = {state} tuple(%first, %y, %x)",
        call.replace("%{init}", "%s"), f"%g = f32[{size}] get-tuple-element(%l), index=0",
        done("last", "g", size), size=size,
    )  # fmt: skip
    begin = time.perf_counter()
    result = simulated(text, main)
    takes = 4 * size / 1000 * US
    assert result.step_seconds == pytest.approx(takes + trips * max(takes, 2 * US), rel=1e-9)
    assert time.perf_counter() - begin < 1.0


def test_what_a_trip_leaves_on_a_link_delays_the_next():
    """Nothing waits inside the loop but the next transfer: 4 us of link a trip against 2 of work.

    Each trip starts a transfer (2 us) and its done stands behind the next trip's transfer.
    """
    state = "(f32[1000], f32[250])"
    body = (
        "  %b0 = f32[1000] get-tuple-element(%l_p), index=0\n"
        "  %b1 = f32[250] get-tuple-element(%l_p), index=1\n"
        f"  {start('bs', 'b0')}\n  {work('bw', 'b1')}\n  {start('bt', 'b0')}\n"
        f"  {done('bd', 'bs')}\n  {done('be', 'bt')}\n"
        f"  ROOT %br = {state} tuple(%be, %bw)"
    )
    text, call = loop("l", 10, body, state)
    main = entry(
        f"%s = {state} tuple(%x, %y)", call.replace("%{init}", "%s"),
        "%g = f32[250] get-tuple-element(%l), index=1",
    )  # fmt: skip
    result = simulated(text, main)
    assert result.step_seconds == pytest.approx(80 * US)
    assert result.exposed_communication_seconds == pytest.approx(60 * US)


def test_of_branches_the_longest_counts():
    branches = (
        "%short (p: f32[250]) -> f32[250] {\n  %sp = f32[250] parameter(0)\n"
        f"  ROOT {work('sw', 'sp')}\n}}\n",
        "%long (p: f32[250]) -> f32[250] {\n  %lp = f32[250] parameter(0)\n"
        f"  {work('lw', 'lp')}\n  ROOT {work('lx', 'lw')}\n}}\n",
    )
    main = entry(
        "%c = s32[] constant(0)",
        "%r = f32[250] conditional(%c, %y, %y), branch_computations={%short, %long}",
    )
    assert simulated(*branches, main).step_seconds == pytest.approx(4 * US)


def test_products_take_their_flops():
    line = (
        "%d = f32[100,100] dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
        + scope("product")
    )
    main = (
        "ENTRY %main (x: f32[100,100]) -> f32[100,100] {\n  %x = f32[100,100] parameter(0)\n"
        f"  ROOT {line}\n}}\n"
    )
    slow = dataclasses.replace(MACHINE, bf16_flops=1e9)
    result = simulated(main, network=dataclasses.replace(machine(), hardware=slow))
    assert result.step_seconds == pytest.approx(2 * 100**3 / 1e9)
    assert (result.bound_by, result.flops) == ("compute", 2_000_000)


AXES = programs.AXES


def sample(name):
    path = SAMPLES / f"{name}.hlo.gz"
    return hlo.parse(gzip.decompress(path.read_bytes()).decode())


@pytest.mark.parametrize("name", ["h100_0.10.2", "h100_0.12.0.1", "v5e_0.10.2", "v5e_0.12.0.1"])
@pytest.mark.parametrize("program", list(programs.PROGRAMS))
def test_recorded_programs(name, program):
    """Every collective is timed once; time is made of work and waits; equal runs, equal numbers."""
    module = sample(f"{name}_{program}")
    target = targets.parse("h100:8" if name.startswith("h100") else "v5e:4x2")
    network = Network.of(AXES, target)
    result = timeline.simulate(module, network)
    rows = collectives.table(module, AXES, result.hidden)
    assert rows and all(0 <= row.hidden_fraction <= 1 for row in rows)
    parts = sum(result.limits().values())
    assert result.step_seconds == pytest.approx(parts, rel=1e-9)
    again = timeline.simulate(module, Network.of(AXES, target))
    assert again == result


def test_async_fusions_of_the_tpu_compiler_hide_their_gathers():
    """Forward, one of a layer's two gathers is synchronous; a fusion carries the other along."""
    module = sample("v5e_0.10.2_resharded")
    result = timeline.simulate(module, Network.of(AXES, targets.parse("v5e:4x2")))
    rows = collectives.table(module, AXES, result.hidden)
    gathers = [row.hidden_fraction for row in rows if row.kind == "all-gather"]
    assert max(gathers) == pytest.approx(0.5)


def test_estimated_cycles_are_the_compilers():
    """Doubling the clock halves the work of a TPU program, and leaves its links alone."""
    module = sample("v5e_0.10.2_transformer")
    target = targets.parse("v5e:4x2")
    fast = dataclasses.replace(target.hardware, clock_hertz=2 * target.hardware.clock_hertz)
    slow, quick = (
        timeline.simulate(module, Network.of(AXES, dataclasses.replace(target, hardware=hardware)))
        for hardware in (target.hardware, fast)
    )
    matmul = slow.by_class()["matmul"], quick.by_class()["matmul"]
    assert matmul[1] == pytest.approx(matmul[0] / 2, rel=0.02)
    assert slow.transfer_seconds == quick.transfer_seconds
