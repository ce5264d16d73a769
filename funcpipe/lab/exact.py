"""The shortest schedule, proven: a constraint program over the starts of all actions, for small problems.

Each action is an interval; a device runs one at a time, values arrive before they are read, and what lies on a device
never exceeds its limit: a residual from the start of its F (of its R, where it is computed again) to the end of its I,
what that leaves to the end of W. Solved by OR-Tools' CP-SAT, the extra ``solve``.
"""

from __future__ import annotations

from fractions import Fraction
from importlib import import_module
from math import ceil, floor, inf, lcm
from operator import itemgetter
from typing import Any, NamedTuple

from funcpipe.core.cost import per_stage
from funcpipe.core.errors import ScheduleError
from funcpipe.core.result import Timeline
from funcpipe.core.schedule import Action, Kind
from funcpipe.lab.problem import ROUNDING, Problem

_LARGEST = 10**6
"""The most ticks that one action takes; the solver is slow with larger numbers."""
_FINE = 10**6
"""What the largest memory limit is scaled to, for memory in whole numbers."""
_MOST = 4_000
"""The most actions of a problem; with more the solver does not come to an end."""


class Solved(NamedTuple):
    """The result of the solver.

    Attributes:
        orders: a schedule at least as short as the hint; None: it found none in its time.
        bound: no schedule takes less, in the unit of the cost; 0 where the model leaves something out.
        late: whether the time ended it.
    """

    orders: tuple[tuple[Action, ...], ...] | None
    bound: float
    late: bool


def solve(problem: Problem, hint: Timeline | None, *, seconds: float, seed: int) -> Solved | None:
    """Search until the shortest is proven, or the time is over. None where the problem is too large for it.

    Args:
        problem: what to solve. Residuals that move to the host are left out.
        hint: a schedule to begin with.
        seconds: the time.
        seed: of the solver; it runs on one thread, so the same seed gives the same answer unless the time ends it.

    Raises:
        ScheduleError: OR-Tools is not installed.
    """
    if 3 * problem.num_stages * problem.num_microbatches > _MOST:
        return None
    try:
        cp_model: Any = import_module("ortools.sat.python.cp_model")
    except ImportError:
        raise ScheduleError("exact=True solves with OR-Tools: pip install 'torch-funcpipe[solve]'") from None
    model = _Model(problem, cp_model, hint)
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed
    solver.parameters.catch_sigint_signal = (
        False  # it would leave Ctrl-C to end the process without a word, from then on
    )
    status = solver.Solve(model.cp)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Solved(None, 0.0, status == cp_model.UNKNOWN)
    bound = float(solver.BestObjectiveBound() * model.unit) if model.complete else 0.0
    return Solved(model.orders(solver), bound, status != cp_model.OPTIMAL)


class _Model:
    """The constraint program.

    Attributes:
        unit: the time of one tick.
        complete: is every schedule of the problem one of the model, so that its bound is the problem's. With remat it
            is not known that microbatches may keep their order.
    """

    def __init__(self, problem: Problem, cp_model: Any, hint: Timeline | None) -> None:
        self.problem, self.cp = problem, cp_model.CpModel()
        self.unit, exact = _unit(problem)
        rows = zip(problem.whole_backward, problem.inward, problem.weight, strict=True)
        fused = any(whole < inward + weight for whole, inward, weight in rows)
        crossing = (
            problem.cost.bandwidth or problem.cost.skips or any(per_stage(problem.cost.output, problem.num_stages))
        )
        self.complete = exact and not fused and not crossing and not problem.offload and not problem.remat
        times = {Kind.F: problem.forward, Kind.I: problem.inward, Kind.W: problem.weight, Kind.R: problem.again}
        self.times = {kind: [round(Fraction(time) / self.unit) for time in row] for kind, row in times.items()}
        self.hops = [[round(Fraction(hop) / self.unit) for hop in row] for row in problem.waits]
        work = sum(sum(row) for row in self.times.values()) + sum(map(sum, self.hops))
        self.horizon = max(1, work * problem.num_microbatches)
        if hint is not None:
            self.horizon = min(self.horizon, ceil(Fraction(hint.makespan) / self.unit) * 2 + 1)
        self.starts: dict[Action, Any] = {}
        self.again: dict[tuple[int, int], Any] = {}
        self._actions()
        self._memory()
        self._objective()
        for span in hint.spans if hint is not None else ():
            if span.action in self.starts:
                self.cp.AddHint(self.starts[span.action], round(Fraction(span.start) / self.unit))

    def _actions(self) -> None:
        cp, problem = self.cp, self.problem
        busy: list[list[Any]] = [[] for _ in range(problem.num_devices)]
        for stage in range(problem.num_stages):
            for microbatch in range(problem.num_microbatches):
                for kind in (Kind.F, Kind.I, Kind.W):
                    action = Action(kind, stage, microbatch)
                    start = self.starts[action] = cp.NewIntVar(0, self.horizon, str(action))
                    length = self.times[kind][stage]
                    busy[problem.device_of[stage]].append(cp.NewFixedSizeIntervalVar(start, length, ""))
                    if microbatch:  # microbatches are alike, so their order is no loss
                        cp.Add(start >= self._end(Action(kind, stage, microbatch - 1)))
                self._waits(stage, microbatch)
                if problem.remat:
                    busy[problem.device_of[stage]].append(self._repeated(stage, microbatch))
        for row in busy:
            cp.AddNoOverlap(row)

    def _waits(self, stage: int, microbatch: int) -> None:
        cp, (forward_hops, backward_hops) = self.cp, self.hops
        forward, inward = Action(Kind.F, stage, microbatch), Action(Kind.I, stage, microbatch)
        cp.Add(self.starts[inward] >= self._end(forward))
        cp.Add(self.starts[Action(Kind.W, stage, microbatch)] >= self._end(inward))
        if stage:
            previous = Action(Kind.I, stage - 1, microbatch)
            cp.Add(self.starts[forward] >= self._end(Action(Kind.F, stage - 1, microbatch)) + forward_hops[stage - 1])
            cp.Add(self.starts[previous] >= self._end(inward) + backward_hops[stage])

    def _repeated(self, stage: int, microbatch: int) -> Any:
        """The optional interval of an R between its F and its I."""
        cp = self.cp
        action = Action(Kind.R, stage, microbatch)
        chosen = self.again[stage, microbatch] = cp.NewBoolVar("")
        start = self.starts[action] = cp.NewIntVar(0, self.horizon, str(action))
        cp.Add(start >= self._end(Action(Kind.F, stage, microbatch))).OnlyEnforceIf(chosen)
        cp.Add(self._end(action) <= self.starts[Action(Kind.I, stage, microbatch)]).OnlyEnforceIf(chosen)
        length = self.times[Kind.R][stage]
        return cp.NewOptionalIntervalVar(start, length, start + length, chosen, "")

    def _memory(self) -> None:
        cp, problem = self.cp, self.problem
        largest = max((limit for limit in problem.limits if limit < inf), default=1.0)
        scale = _FINE / largest
        for device, stages in enumerate(problem.local):
            if problem.limits[device] == inf:
                continue
            intervals: list[Any] = []
            demands: list[int] = []
            for stage in stages:
                # Rounded so that whatever fits the problem fits here; what only fits here is refused when it is timed.
                rest = min(problem.rest[stage], problem.residual[stage])
                shares = floor((problem.residual[stage] - rest) * scale), floor(rest * scale)
                for microbatch in range(problem.num_microbatches):
                    for kind, demand in zip((Kind.I, Kind.W), shares, strict=True):
                        if demand:
                            intervals.append(self._held(stage, microbatch, kind))
                            demands.append(demand)
            cp.AddCumulative(intervals, demands, ceil(problem.limits[device] * (1 + ROUNDING) * scale))

    def _held(self, stage: int, microbatch: int, kind: Kind) -> Any:
        """The interval from when a residual is there to the end of an action that frees it."""
        cp = self.cp
        begin = self.starts[Action(Kind.F, stage, microbatch)]
        chosen = self.again.get((stage, microbatch))
        if chosen is not None:
            forward, begin = begin, cp.NewIntVar(0, self.horizon, "")
            cp.Add(begin == forward).OnlyEnforceIf(chosen.Not())
            cp.Add(begin == self.starts[Action(Kind.R, stage, microbatch)]).OnlyEnforceIf(chosen)
        end = self._end(Action(kind, stage, microbatch))
        return cp.NewIntervalVar(begin, cp.NewIntVar(0, self.horizon, ""), end, "")

    def _objective(self) -> None:
        cp, problem, last = self.cp, self.problem, self.problem.num_microbatches - 1
        goal = cp.NewIntVar(0, self.horizon, "goal")
        for stages in problem.local:
            for stage in stages:
                end = self._end(Action(Kind.W, stage, last))
                begin = self.starts[Action(Kind.F, stages[0], 0)] if problem.objective == "span" else 0
                cp.Add(goal >= end - begin)
        cp.Minimize(goal)

    def _end(self, action: Action) -> Any:
        return self.starts[action] + self.times[action.kind][action.stage]

    def orders(self, solver: Any) -> tuple[tuple[Action, ...], ...]:
        """The orders of the solution; actions of no length go before those that start at the same time."""
        rank = {Kind.F: 0, Kind.R: 1, Kind.I: 2, Kind.W: 3}
        rows: list[list[tuple[tuple[int, ...], Action]]] = [[] for _ in range(self.problem.num_devices)]
        for action, start in self.starts.items():
            kind, stage, microbatch, _ = action
            if kind is Kind.R and not solver.Value(self.again[stage, microbatch]):
                continue
            begin = solver.Value(start)
            key = begin, bool(self.times[kind][stage]), rank[kind], stage if kind is Kind.F else -stage, microbatch
            rows[self.problem.device_of[stage]].append((key, action))
        return tuple(tuple(action for _, action in sorted(row, key=itemgetter(0))) for row in rows)


def _unit(problem: Problem) -> tuple[Fraction, bool]:
    """The time of one tick, and whether every time is a whole number of ticks."""
    rows = (problem.forward, problem.inward, problem.weight, problem.again, *problem.waits)
    times = [Fraction(time) for row in rows for time in row]
    rough = [time.limit_denominator(10**4) for time in times]
    unit = Fraction(1, lcm(*(time.denominator for time in rough)))
    long = max(rough, default=Fraction(0))
    if (
        all(abs(a - b) <= Fraction(1, 10**12) * b for a, b in zip(rough, times, strict=True))
        and long / unit <= _LARGEST
    ):
        return unit, True
    return max(long, Fraction(1, 10**9)) / 1000, False
