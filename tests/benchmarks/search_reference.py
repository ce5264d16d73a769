"""The shortest schedule by CP-SAT: a model of its own, to hold `fp.search` against. Knows nothing
of `funcpipe._src.search`.

Times are whole numbers here. Where residuals do not move to the host, memory follows from the
orders alone, and any start that the constraints allow will do. Where they do, the clock decides
when memory comes and goes: nothing waits without a cause there, so each start must be the end of
what it waits for (`_Model.begins`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

from ortools.sat.python import cp_model

import funcpipe as fp
from funcpipe._src.data.cost import per_stage
from funcpipe._src.data.kinds import Kind

COMPUTES = (Kind.F, Kind.I, Kind.W, Kind.R)
_SCALE = 2
"""Memory comes in halves."""
_EXACT = 60
"""The most computing actions of a device whose every start is given a cause; with more there are
too many choices."""


@dataclass(frozen=True)
class Instance:
    """A problem for a search: costs, a placement, a limit, and what is allowed."""

    number: int
    cost: fp.Cost
    placement: tuple[int, ...]
    microbatches: int
    limit: float
    remat: bool
    offload: bool

    @property
    def devices(self) -> int:
        return max(self.placement) + 1

    def __str__(self) -> str:
        words = [name for name in ("remat", "offload") if getattr(self, name)] + ["hops"] * (
            self.cost.comm != 0
        )
        places = "".join(map(str, self.placement))
        return (
            f"{self.number} | {self.devices}, {self.microbatches} | {places} | {self.limit:g} | "
            f"{', '.join(words)}"
        )


def instance(number: int) -> Instance:
    """A random instance: 2 to 8 devices with 1 or 2 stages each, unequal costs, .6 to 2 times the
    memory of 1F1B."""
    rng = Random(number)
    devices, share, microbatches = rng.randint(2, 8), rng.randint(1, 2), rng.randint(4, 16)
    stages = devices * share
    line = [stage // share for stage in range(stages)]
    loop, v = [*range(devices)] * share, [*range(devices), *reversed(range(devices))]
    placement = rng.choice(
        [line, rng.sample(line, stages)]
        if share == 1
        else [line, loop, v, rng.sample(line, stages)]
    )
    shortest = rng.choice((1, 5, 8))
    forward, inward, weight = ([rng.randint(shortest, 10) for _ in range(stages)] for _ in range(3))
    residual = [rng.randint(1, 4) for _ in range(stages)]
    cost = fp.Cost(
        forward,
        inward,
        weight,
        residual=residual,
        weight_residual=[size * rng.choice((0.0, 0.5, 1.0)) for size in residual],
        offload=[rng.randint(1, 9) for _ in range(stages)],
        comm=rng.choice([0, [rng.randint(0, 4) for _ in range(stages - 1)]]),
    )
    peak = max(
        fp.simulate(fp.schedules.one_f_one_b(stages, microbatches, num_devices=devices), cost).peak
    )
    least = max(
        sum(residual[stage] for stage in range(stages) if placement[stage] == d)
        for d in range(devices)
    )
    limit = max(round(rng.uniform(0.6, 2.0) * peak), least)
    allowed = rng.choice(("", "", "remat", "offload"))
    return Instance(
        number,
        cost,
        tuple(placement),
        microbatches,
        limit,
        allowed == "remat",
        allowed == "offload",
    )


def small(seed: int, allowed: str = "") -> Instance:
    """A small instance with memory that is short, stages anywhere."""
    rng = Random(seed)
    devices = rng.randint(1, 3)
    stages = devices + rng.randint(0, 2)
    microbatches = rng.randint(1, 4 if stages < 4 else 3)
    placement = rng.sample(
        [*range(devices), *(rng.randrange(devices) for _ in range(stages - devices))], stages
    )
    rows = [[rng.randint(1, 6) for _ in range(stages)] for _ in range(4)]
    residual = [rng.randint(0, 3) for _ in range(stages)]
    cost = fp.Cost(
        *rows[:3],
        remat=rows[3],
        residual=residual,
        weight_residual=[size * rng.choice((0, 0.5, 1)) for size in residual],
        comm=[rng.randint(0, 3) for _ in range(stages - 1)],
    )
    least = max(
        sum(residual[stage] for stage in range(stages) if placement[stage] == d)
        for d in range(devices)
    )
    limit = max(1, least + rng.choice((0, 0, 1, 2, 3)))
    return Instance(
        seed, cost, tuple(placement), microbatches, limit, allowed == "remat", allowed == "offload"
    )


class Reference(NamedTuple):
    """What is known of an instance.

    Attributes:
        makespan: the shortest that was found.
        bound: nothing shorter than this exists, proven.
    """

    makespan: float
    bound: float


def reference(
    one: Instance, known: fp.Schedule | None, *, seconds: float, workers: int = 1
) -> Reference:
    """The shortest that CP-SAT finds, and what it proves, in so many seconds.

    Args:
        one: what to solve.
        known: a schedule to begin with; None: from nothing.
        seconds: the time; it ends early with a proof.
        workers: threads of the solver.
    """
    timeline = None if known is None else fp.simulate(known, one.cost)
    makespan, bound = float("inf") if timeline is None else timeline.makespan, 0.0
    # Microbatches are alike, so they keep their order without loss, if each is held from its F to
    # its backward. Where they need not be, orders that do are tried first, and what that finds
    # begins the proof over all orders.
    moving = one.remat or one.offload
    for ordered, share in ((True, 0.4), (False, 0.6)) if moving else ((True, 1.0),):
        model = _Model(one, timeline, ordered=ordered)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = share * seconds
        solver.parameters.num_workers = workers
        solver.parameters.interleave_search = workers == 1
        solver.parameters.catch_sigint_signal = (
            False  # afterwards Ctrl-C would end Python without a word
        )
        status = solver.Solve(model.cp)
        if not (moving and ordered) and status != cp_model.INFEASIBLE:
            bound = max(bound, solver.BestObjectiveBound())
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            found = fp.simulate(model.schedule(solver), one.cost)
            fits = max(found.peak) <= one.limit * (1 + 1e-9)
            assert fits or not model.exact, f"{one}: a solution that holds {max(found.peak)}"
            assert found.makespan <= solver.ObjectiveValue(), (
                f"{one}: a solution that takes {found.makespan}"
            )
            if fits and found.makespan < makespan:
                makespan, timeline = found.makespan, found
        if bound >= makespan:
            break
    assert bound <= makespan, f"{one}: {makespan} was found, and {bound} proven"
    return Reference(makespan, bound)


class _Model:
    """The constraint program of an instance.

    Attributes:
        exact: is each of its solutions, timed by the clock, as it says.
    """

    def __init__(self, one: Instance, known: fp.typing.Timeline | None, *, ordered: bool) -> None:
        self.one, self.cp = one, cp_model.CpModel()
        self.stages, self.count = range(len(one.placement)), range(one.microbatches)
        kinds = (Kind.F, Kind.I, Kind.W, *[Kind.R] * one.remat, *[Kind.O, Kind.L] * one.offload)
        work = sum(one.cost.of(kind, stage) for kind in kinds for stage in self.stages)
        hops = 2 * sum(per_stage(one.cost.comm, len(self.stages) - 1))
        self.horizon = int((work + hops) * one.microbatches if known is None else known.makespan)
        places = [(stage, microbatch) for stage in self.stages for microbatch in self.count]
        self.start = {
            fp.Action(kind, *place): self.cp.NewIntVar(0, self.horizon, "")
            for kind in kinds
            for place in places
        }
        self.again = {place: self.cp.NewBoolVar("") for place in places if one.remat}
        self.away = {place: self.cp.NewBoolVar("") for place in places if one.offload}
        self.lengths = {
            action: int(one.cost.of(action.kind, action.stage)) for action in self.start
        }
        self.busy: dict[tuple[int, str], list[Any]] = defaultdict(list)
        for action in self.start:
            way = action.kind.value if action.kind in (Kind.O, Kind.L) else ""
            self.busy[one.placement[action.stage], way].append(self._interval(action))
        for intervals in self.busy.values():
            self.cp.AddNoOverlap(intervals)
        for place in places:
            self._precedes(*place)
        for stage in self.stages:
            for kind in (Kind.F, Kind.I, Kind.W) if ordered else (Kind.F,) * (stage == 0):
                for earlier, later in zip(self.count, self.count[1:], strict=False):
                    self._after(fp.Action(kind, stage, later), fp.Action(kind, stage, earlier))
        self._memory(places)
        most = max(one.placement.count(device) for device in range(one.devices))
        self.exact = not one.offload or 3 * most * one.microbatches <= _EXACT
        if one.offload and self.exact:
            self._begins()
        self._minimize()
        if known is not None:
            self._hint(known)

    def end(self, action: fp.Action) -> Any:
        return self.start[action] + self.lengths[action]

    def chosen(self, action: fp.Action) -> Any:
        """Whether an action runs; None: it must."""
        choices = (
            self.again
            if action.kind is Kind.R
            else self.away
            if action.kind in (Kind.O, Kind.L)
            else {}
        )
        return choices.get((action.stage, action.microbatch))

    def _interval(self, action: fp.Action) -> Any:
        start, length, chosen = self.start[action], self.lengths[action], self.chosen(action)
        if chosen is None:
            return self.cp.NewFixedSizeIntervalVar(start, length, "")
        return self.cp.NewOptionalFixedSizeIntervalVar(start, length, chosen, "")

    def _after(self, later: fp.Action, earlier: fp.Action, hop: float = 0) -> None:
        chosen = [
            literal for action in (later, earlier) if (literal := self.chosen(action)) is not None
        ]
        constraint = self.cp.Add(self.start[later] >= self.end(earlier) + int(hop))
        if chosen:
            constraint.OnlyEnforceIf(chosen)

    def _hop(self, stage: int) -> float:
        """The latency between a stage and the next."""
        here, there = self.one.placement[stage : stage + 2]
        return self.one.cost.latency(stage, stage + 1) if here != there else 0.0

    def _precedes(self, stage: int, microbatch: int) -> None:
        """Everything that must come before something else of this stage and microbatch."""
        forward, inward, weight, again, off, back = (
            fp.Action(kind, stage, microbatch)
            for kind in (Kind.F, Kind.I, Kind.W, Kind.R, Kind.O, Kind.L)
        )
        self._after(inward, forward)
        self._after(weight, inward)
        if stage:
            self._after(forward, fp.Action(Kind.F, stage - 1, microbatch), self._hop(stage - 1))
            self._after(fp.Action(Kind.I, stage - 1, microbatch), inward, self._hop(stage - 1))
        if self.one.remat:
            self._after(again, forward)
            self._after(inward, again)
        if self.one.offload:
            self._after(off, forward)
            self._after(back, off)
            self._after(inward, back)

    def _memory(self, places: Iterable[tuple[int, int]]) -> None:
        """What lies on each device at a time stays within the limit."""
        cp = self.cp
        held: dict[int, list[tuple[Any, int]]] = defaultdict(list)
        residual, rest = (
            [int(_SCALE * size) for size in per_stage(row, len(self.stages))]
            for row in (self.one.cost.residual, self.one.cost.weight_residual)
        )
        for stage, microbatch in places:
            forward, inward, weight, again, off, back = (
                fp.Action(kind, stage, microbatch)
                for kind in (Kind.F, Kind.I, Kind.W, Kind.R, Kind.O, Kind.L)
            )
            device = self.one.placement[stage]
            begin = self.start[forward]
            for choice, source in ((self.again, again), (self.away, back)):
                literal = choice.get((stage, microbatch))
                if literal is None:
                    continue
                begin = cp.NewIntVar(0, self.horizon, "")
                cp.Add(begin == self.start[forward]).OnlyEnforceIf(literal.Not())
                cp.Add(begin == self.start[source]).OnlyEnforceIf(literal)
                if source is back:
                    size = cp.NewIntVar(0, self.horizon, "")
                    until = cp.NewOptionalIntervalVar(
                        self.start[forward], size, self.end(off), literal, ""
                    )
                    held[device].append((until, residual[stage]))
            for last, part in ((inward, residual[stage] - rest[stage]), (weight, rest[stage])):
                size, end = cp.NewIntVar(0, self.horizon, ""), self.end(last)
                until = cp.NewIntervalVar(begin, size, end, "")
                held[device].append((until, part))
        for rows in held.values():
            intervals, demands = zip(*rows, strict=True)
            cp.AddCumulative(intervals, demands, int(_SCALE * self.one.limit))

    def _begins(self) -> None:
        """Nothing starts later than the clock starts it: each start is the end of something that it
        waits for.

        What computes waits for what the device computed before, for its value, for its residual; a
        move for what the device computed before, or for its link, or for the other half of it.
        """
        for action, start in self.start.items():
            kind, stage, microbatch, _ = action
            device = self.one.placement[stage]
            causes: list[tuple[Any, Any]] = [(0, None)] if kind is Kind.F else []
            for other in self.start:
                if other == action or self.one.placement[other.stage] != device:
                    continue
                if other.kind in COMPUTES or (kind in (Kind.O, Kind.L) and other.kind is kind):
                    causes.append((self.end(other), self.chosen(other)))
            if kind is Kind.F and stage:
                causes.append(
                    (
                        self.end(fp.Action(Kind.F, stage - 1, microbatch))
                        + int(self._hop(stage - 1)),
                        None,
                    )
                )
            if kind is Kind.I and stage + 1 < len(self.stages):
                causes.append(
                    (
                        self.end(fp.Action(Kind.I, stage + 1, microbatch)) + int(self._hop(stage)),
                        None,
                    )
                )
            if kind is Kind.I:
                causes.append(
                    (self.end(fp.Action(Kind.L, stage, microbatch)), self.away[stage, microbatch])
                )
            if kind is Kind.L:
                causes.append(
                    (self.end(fp.Action(Kind.O, stage, microbatch)), self.away[stage, microbatch])
                )
            literals: list[Any] = []
            for moment, condition in causes:
                literal = self.cp.NewBoolVar("")
                self.cp.Add(start == moment).OnlyEnforceIf(literal)
                if condition is not None:
                    self.cp.AddImplication(literal, condition)
                literals.append(literal)
            chosen = self.chosen(action)
            self.cp.AddBoolOr(literals if chosen is None else [*literals, chosen.Not()])

    def _minimize(self) -> None:
        goal = self.cp.NewIntVar(0, self.horizon, "")
        for stage in self.stages:
            for microbatch in self.count:
                self.cp.Add(goal >= self.end(fp.Action(Kind.W, stage, microbatch)))
        self.cp.Minimize(goal)

    def _hint(self, known: fp.typing.Timeline) -> None:
        ran = {span.action: int(span.start) for span in known.spans}
        for action, start in self.start.items():
            if action in ran:
                self.cp.AddHint(start, ran[action])
        for literals, kind in ((self.again, Kind.R), (self.away, Kind.O)):
            for place, literal in literals.items():
                self.cp.AddHint(literal, fp.Action(kind, *place) in ran)

    def schedule(self, solver: Any) -> fp.Schedule:
        """The orders of the solution; a move stands before what its device computes while it
        starts, or starts next."""
        ran = {
            action: solver.Value(start)
            for action, start in self.start.items()
            if (chosen := self.chosen(action)) is None or solver.Value(chosen)
        }
        orders: list[tuple[fp.Action, ...]] = []
        for device in range(self.one.devices):
            mine = {
                action: start
                for action, start in ran.items()
                if self.one.placement[action.stage] == device
            }
            computes = [
                (start, start + self.lengths[action])
                for action, start in mine.items()
                if action.kind in COMPUTES
            ]
            keys: dict[fp.Action, tuple[int, int, int]] = {}
            for action, start in mine.items():
                place = next((begin for begin, end in computes if begin < start < end), start)
                keys[action] = (
                    place,
                    (Kind.O, Kind.L).index(action.kind) if action.kind in (Kind.O, Kind.L) else 2,
                    start,
                )
            orders.append(tuple(sorted(mine, key=keys.__getitem__)))
        return fp.Schedule(tuple(orders), "CP-SAT")
