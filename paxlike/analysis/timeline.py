"""Predict the time of a step from its compiled schedule.

The program is run in the order of its schedule on one compute stream and a queue for each link.
Work advances the compute stream; a transfer begins when all its links are free and holds them; the
compute stream waits for it at once, or, if it is asynchronous, at its done. What the compute
stream waits for is exposed, the rest is hidden.

A loop's trips differ only by what is still in flight at their borders. Trips are simulated until
that state repeats, and the repeated ones are multiplied: time and memory are linear in the size of
the program, whatever the trip counts, and the result is that of running every trip. (After
`MAX_TRIPS` different states, which takes a queue that grows with each trip, the rest is taken as
the last one.)

Limits: one device stands for all; compute does not slow down while links are busy.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from paxlike.analysis.cost import Kernels
from paxlike.analysis.hlo import Module
from paxlike.analysis.network import Network
from paxlike.analysis.steps import PICOSECONDS, Step, Steps

MAX_TRIPS = 32

# What is in flight, relative to now: (link, ticks until free) and (family, ((ticks left, start),)).
_State = tuple[tuple[tuple[str, int], ...], tuple[tuple[str, tuple[tuple[int, str], ...]], ...]]
_IDLE: _State = ((), ())


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """A bar of the picture: on a stream, from `begin` for `ticks` picoseconds."""

    stream: str
    name: str
    begin: int
    ticks: int
    details: Mapping[str, object]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """A simulated step of one device; times in seconds.

    Attributes:
        step_seconds: from start to end.
        work_seconds: (scope, op class, limit) -> computing time.
        exposed_seconds: (axis, scope) -> time that the compute stream waited for collectives, or
            for the host (axis `host`).
        transfer_seconds: (axis, scope) -> time that those took on their links.
        memory_wait_seconds: waiting for copies inside the device.
        hidden: name of a collective's instruction -> part of its time that was hidden.
        hbm_bytes: moved through main memory.
        flops: of matrix products.
        events: the first trip of each loop; times in picoseconds.
        exact: False if a trip count is not known.
    """

    step_seconds: float
    work_seconds: Mapping[tuple[str, str, str], float]
    exposed_seconds: Mapping[tuple[str, str], float]
    transfer_seconds: Mapping[tuple[str, str], float]
    memory_wait_seconds: float
    hidden: Mapping[str, float]
    hbm_bytes: int
    flops: int
    events: tuple[Event, ...]
    exact: bool

    def exposed_by_axis(self) -> dict[str, float]:
        """Waiting time by mesh axes, the longest first; `host` is no mesh axis."""
        return _summed(((axis, s) for (axis, _), s in self.exposed_seconds.items()))

    def exposed_by_scope(self) -> dict[str, float]:
        """Waiting time by scope, the longest first."""
        return _summed(((where, s) for (_, where), s in self.exposed_seconds.items()))

    @property
    def exposed_communication_seconds(self) -> float:
        """Waiting time for other devices and the host."""
        return sum(self.exposed_seconds.values())

    @property
    def hidden_communication_seconds(self) -> float:
        """Time that links worked beside the compute stream."""
        return max(0.0, sum(self.transfer_seconds.values()) - self.exposed_communication_seconds)

    def by_scope(self) -> dict[str, float]:
        """All time of the compute stream, waits included, by scope; the longest first."""
        work = ((where, s) for (where, _, _), s in self.work_seconds.items())
        return _summed([*work, *((where, s) for (_, where), s in self.exposed_seconds.items())])

    def by_class(self) -> dict[str, float]:
        """Computing time by class of operation, and waits for collectives."""
        work = [(op_class, s) for (_, op_class, _), s in self.work_seconds.items()]
        waits = self.exposed_communication_seconds
        return _summed([*work, ("collective", waits), ("copy", self.memory_wait_seconds)])

    def limits(self) -> dict[str, float]:
        """Time by what bounds it: compute, memory, overhead, communication:<axis>."""
        work = [(limit, s) for (_, _, limit), s in self.work_seconds.items()]
        waits = [(f"communication:{a}", s) for a, s in self.exposed_by_axis().items()]
        return _summed([*work, *waits, ("memory", self.memory_wait_seconds)])

    @property
    def bound_by(self) -> str:
        """What most of the time goes to."""
        return next(iter(self.limits()), "")


def simulate(module: Module, network: Network, kernels: Kernels | None = None) -> Timeline:
    """Run a scheduled program on a network's hardware.

    Args:
        module: the program, scheduled.
        network: hardware, links and constants.
        kernels: cost of custom calls, as `cost.operations` takes it.
    """
    steps = Steps(module, network, kernels)
    simulation = _Simulation(steps)
    result = simulation.run(module.entry, _IDLE, record_at=0)
    return _collect(steps, result, tuple(simulation.events))


@dataclasses.dataclass(frozen=True, slots=True)
class _Result:
    """One run of a computation: its time, what it leaves in flight, and what happened in it."""

    ticks: int
    state: _State
    runs: Mapping[str, int]  # computation -> how often it ran
    waits: Mapping[str, int]  # name of a transfer -> ticks waited for it


class _Tally:
    """Sums of results."""

    def __init__(self) -> None:
        self.ticks, self.runs, self.waits = 0, Counter[str](), Counter[str]()

    def add(self, result: _Result, times: int = 1) -> None:
        self.ticks += result.ticks * times
        for name, count in result.runs.items():
            self.runs[name] += count * times
        for name, ticks in result.waits.items():
            self.waits[name] += ticks * times

    def result(self, state: _State) -> _Result:
        return _Result(self.ticks, state, self.runs, self.waits)


class _Simulation:
    """Runs computations, remembering the result for each state in which one begins."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._known: dict[tuple[str, _State], _Result] = {}
        self.events: list[Event] = []

    def run(self, name: str, state: _State, record_at: int | None = None) -> _Result:
        """Run a computation once; `record_at` is the time at which its events are drawn."""
        known = self._known.get((name, state))
        if known is not None and record_at is None:
            return known
        tally = _Tally()
        tally.runs[name] += 1
        free = dict(state[0])
        flying = {family: list(entries) for family, entries in state[1]}
        for step in self._steps.of(name):
            now = tally.ticks
            at = None if record_at is None else record_at + now
            if step.kind in ("loop", "call", "branch"):
                before = _relative(free, flying, now)
                inner = self._callees(step, before, at)
                tally.add(inner)
                now = tally.ticks
                free = {link: now + left for link, left in inner.state[0]}
                flying = {
                    family: [(now + left, start) for left, start in entries]
                    for family, entries in inner.state[1]
                }
            elif step.kind == "work":
                tally.ticks += step.ticks
                self._draw(at, "compute", step, step.ticks)
            elif step.kind == "done":
                end, start = flying[step.family].pop(0) if flying.get(step.family) else (now, "")
                tally.ticks = max(now, end)
                tally.waits[start] += tally.ticks - now
                self._draw(at, "compute", step, tally.ticks - now)
            else:
                begin = max([now, *(free.get(link, 0) for link in step.links)])
                end = begin + step.ticks
                free.update(dict.fromkeys(step.links, end))
                for link in step.links:
                    self._draw(None if at is None else at + begin - now, link, step, step.ticks)
                if step.kind == "start":
                    flying.setdefault(step.family, []).append((end, step.name))
                else:
                    tally.ticks = end
                    tally.waits[step.name] += end - now
                    self._draw(at, "compute", step, end - now)
        result = tally.result(_relative(free, flying, tally.ticks))
        self._known[name, state] = result
        return result

    def _callees(self, step: Step, state: _State, at: int | None) -> _Result:
        if step.kind == "loop":
            return self._repeat(step, state, at)
        if step.kind == "branch":
            choices = [self.run(callee, state) for callee in step.callees]
            longest = max(choices, key=lambda result: result.ticks)
            callee = step.callees[choices.index(longest)]
        else:
            callee = step.callees[0]
        return self.run(callee, state, at)

    def _repeat(self, step: Step, state: _State, at: int | None) -> _Result:
        """Run a loop: trips until their state repeats, then multiples of what repeats."""
        tally, trips = _Tally(), []
        seen: dict[_State, int] = {}
        while len(trips) < step.trips and state not in seen and len(trips) < MAX_TRIPS:
            seen[state] = len(trips)
            trip = self._trip(step, state, at if not trips else None)
            trips.append(trip)
            tally.add(trip)
            state = trip.state
        left = step.trips - len(trips)
        if left:
            period = trips[seen.get(state, len(trips) - 1) :]
            rounds, rest = divmod(left, len(period))
            for index, trip in enumerate(period):
                tally.add(trip, rounds + (index < rest))
            state = period[rest - 1].state if rest else state
        if at is not None and step.trips > 1:
            first = trips[0].ticks
            details = {"trips": step.trips, "scope": step.where}
            more = f"{step.trips - 1} more trips of {step.name}"
            self.events.append(Event("compute", more, at + first, tally.ticks - first, details))
        return tally.result(state)

    def _trip(self, step: Step, state: _State, at: int | None) -> _Result:
        body, *condition = step.callees
        trip = self.run(body, state, at)
        if not condition:
            return trip
        tally = _Tally()
        tally.add(trip)
        test = self.run(condition[0], trip.state)
        tally.add(test)
        return tally.result(test.state)

    def _draw(self, at: int | None, stream: str, step: Step, ticks: int) -> None:
        if at is not None and ticks > 0:
            details: dict[str, object] = {"scope": step.where, "kind": step.label or step.kind}
            if step.axis:
                details["axis"] = step.axis
            if stream == "compute" and step.kind != "work":
                details["wait"] = True
            self.events.append(Event(stream, step.name, at, ticks, details))


def _relative(
    free: Mapping[str, int], flying: Mapping[str, list[tuple[int, str]]], now: int
) -> _State:
    """What is in flight, in ticks from now."""
    links = tuple(sorted((link, end - now) for link, end in free.items() if end > now))
    values = tuple(
        (family, tuple((max(0, end - now), start) for end, start in entries))
        for family, entries in sorted(flying.items())
        if entries
    )
    return links, values


def _collect(steps: Steps, result: _Result, events: tuple[Event, ...]) -> Timeline:
    """Sum what happened, by scope, axis and class."""
    work: dict[tuple[str, str, str], int] = defaultdict(int)
    exposed: dict[tuple[str, str], int] = defaultdict(int)
    transfers: dict[tuple[str, str], int] = defaultdict(int)
    hidden: dict[str, float] = {}
    flops = moved = memory_wait = 0
    for computation, made in steps.made().items():
        runs = result.runs.get(computation, 0)
        for step in made if runs else ():
            flops += runs * step.flops
            moved += runs * step.bytes
            if step.kind == "work":
                work[step.where, step.op_class, step.limit] += runs * step.ticks
            elif step.kind in ("start", "transfer"):
                waited, total = result.waits.get(step.name, 0), runs * step.ticks
                if not step.axis:
                    memory_wait += waited
                    continue
                exposed[step.axis, step.where] += waited
                transfers[step.axis, step.where] += total
                hidden[step.name] = max(0.0, 1 - waited / total) if total else 1.0
    return Timeline(
        step_seconds=result.ticks / PICOSECONDS,
        work_seconds=_seconds(work),
        exposed_seconds=_seconds(exposed),
        transfer_seconds=_seconds(transfers),
        memory_wait_seconds=memory_wait / PICOSECONDS,
        hidden=hidden,
        hbm_bytes=moved,
        flops=flops,
        events=events,
        exact=steps.exact,
    )


def _seconds(ticks: Mapping[Any, int]) -> dict[Any, float]:
    return {key: value / PICOSECONDS for key, value in ticks.items()}


def _summed(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Sums by name, the largest first; nothing that is zero."""
    totals: dict[str, float] = defaultdict(float)
    for name, value in pairs:
        totals[name] += value
    return {
        name: value
        for name, value in sorted(totals.items(), key=lambda item: (-item[1], item[0]))
        if value
    }
