"""Find the shortest schedule of a small problem, with a proof, by a constraint program.

Each action is an interval; a backward is one interval, or two if it is split. The constraints:

- A device computes one action at a time. A link moves one residual at a time.
- Values arrive before they are read.
- The memory of a device stays within its limit. A residual occupies memory from the start of its F
  (or R) to the end of its backward. After I, only the weight residual stays, to the end of W. A
  residual on the host occupies no memory from the end of O to the start of L.

OR-Tools' CP-SAT solves the program (extra ``solve``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from importlib import import_module
from itertools import chain, pairwise
from math import ceil, floor, inf, lcm
from time import perf_counter
from typing import Any, NamedTuple, TypeAlias

from funcpipe._src.core.errors import ScheduleError
from funcpipe._src.data.kinds import MOVES
from funcpipe._src.data.result import Timeline
from funcpipe._src.data.schedule import Action, Kind
from funcpipe._src.search.problem import ROUNDING, Problem

_LARGEST = 10**6  # the most ticks of one action; the solver is slow with larger numbers
_FINE = 10**6
"""The number to which the largest memory limit is scaled, because the solver needs whole numbers."""
MOST = 4_000  # the most actions of a problem; with more the solver does not finish
_CAUSES = 60
"""The most computing actions of a device for the constraint that each start has a cause; with more
there are too many choices."""
_TURNS = ((True, 0.2), (False, 0.35), (False, 0.6), (False, 1.0))
"""The turns of the solver if the shortest schedule may reorder microbatches: (keep microbatches in
order, end of the turn as a share of the seconds). Each turn restarts with the best schedule so far,
because the time of a proof depends on luck: it may take seconds or hours."""

_Starts: TypeAlias = Mapping[Action, int]  # the starts of the actions that run, in ticks


class Solved(NamedTuple):
    """A result of the solver."""

    # A schedule at least as short as the hint; None: none was found in time.
    orders: tuple[tuple[Action, ...], ...] | None
    # No schedule is shorter, in the unit of the cost; 0 if the model does not cover all schedules.
    bound: float
    late: bool  # whether the time limit ended the solver


def solve(
    problem: Problem, hint: Timeline | None, *, seconds: float, seed: int
) -> Iterator[Solved]:
    """Yield results until a schedule is proven to be shortest, or the time is over.

    Yields nothing if the problem is too large. Microbatches are alike, so without remat and offload
    they can keep their order without loss. With remat or offload, orders that keep it are tried
    first, and the best of them begins the proof over all orders.

    Args:
        problem: the problem.
        hint: a schedule to begin with.
        seconds: the time limit.
        seed: the seed of the solver. It runs on one thread, so the same seed gives the same result,
            unless the time limit ends it.

    Raises:
        ScheduleError: OR-Tools is not installed.
    """
    if problem.num_actions > MOST:
        return
    try:
        cp_model: Any = import_module("ortools.sat.python.cp_model")
    except ImportError:
        raise ScheduleError(
            "exact=True needs OR-Tools, which is not installed; call pip install ortools"
        ) from None
    began = perf_counter()
    unit, exact = unit_of(problem)
    begun = _begun(problem, hint, unit)
    moves = problem.remat or problem.offload
    for turn, (ordered, share) in enumerate(_TURNS if moves else ((True, 1.0),)):
        ends = began + share * seconds
        late = perf_counter() >= ends  # building a model takes time, too
        model = (
            None
            if late
            else ConstraintProgram(problem, cp_model, begun, unit, exact=exact, ordered=ordered)
        )
        left = ends - perf_counter()
        if model is None or left <= 0:
            yield Solved(None, 0.0, late=True)
            continue
        solver: Any = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = left
        solver.parameters.num_workers = 1
        # With moves, one strategy alone may get stuck with its first schedule.
        solver.parameters.interleave_search = moves
        solver.parameters.random_seed = seed + turn
        # The solver's handler would stay installed, and Ctrl-C would end the process silently.
        solver.parameters.catch_sigint_signal = False
        status = solver.Solve(model.cp)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            yield Solved(None, 0.0, status == cp_model.UNKNOWN)
            continue
        begun = model.solution(solver)
        bound = float(solver.BestObjectiveBound() * unit) if model.complete else 0.0
        yield Solved(model.orders(begun), bound, status != cp_model.OPTIMAL)
        if status == cp_model.OPTIMAL and not (ordered and moves):
            return


class ConstraintProgram:
    """The constraint program.

    Attributes:
        times: the time of each kind and stage, in ticks.
        complete: whether the model covers all schedules of the problem, so that its bound is a
            bound of the problem.
        chosen: the literal that says whether an action runs; actions without one always run.
    """

    def __init__(
        self,
        problem: Problem,
        cp_model: Any,
        begun: _Starts,
        unit: Fraction,
        *,
        exact: bool,
        ordered: bool,
    ) -> None:
        self.problem, self.cp = problem, cp_model.CpModel()
        # Bandwidth, and memory of outputs and skips, are left out. The model then allows more
        # schedules and excludes none, so its bound remains a bound.
        self.complete = exact and not (ordered and (problem.remat or problem.offload))
        crossing = problem.cost.bandwidth or problem.hands_over_memory
        kinds = _kinds(problem)
        stages, count = range(problem.num_stages), problem.num_microbatches
        self.times = {
            kind: [round(Fraction(problem.cost.of(kind, stage)) / unit) for stage in stages]
            for kind in (*kinds, Kind.B)
        }
        self.hops = [[round(Fraction(hop) / unit) for hop in row] for row in problem.waits]
        self.horizon = max(
            1, (sum(map(sum, self.times.values())) + sum(map(sum, self.hops))) * count
        )
        # The horizon must not exclude the best schedule: a schedule with a shorter span may have a
        # longer makespan, and with rounded times a schedule may be longer here.
        if begun and problem.objective == "makespan":
            ends = max(start + self._time(action) for action, start in begun.items())
            self.horizon = min(self.horizon, ends if exact and not crossing else 2 * ends + 1)
        places = [(stage, microbatch) for stage in stages for microbatch in range(count)]
        self.starts = {
            Action(kind, *place): self.cp.NewIntVar(0, self.horizon, "")
            for kind in kinds
            for place in places
        }
        self.ends = {action: start + self._time(action) for action, start in self.starts.items()}
        self.chosen: dict[Action, Any] = {}
        always = (True,) * problem.num_stages
        choices = ((Kind.R, always),) * problem.remat + ((Kind.O, always),) * problem.offload
        for choice, offered in (*choices, (Kind.B, problem.cheaper)):
            for stage, microbatch in places:
                if offered[stage]:
                    self.chosen[Action(choice, stage, microbatch)] = self.cp.NewBoolVar("")
        for action, literal in [*self.chosen.items()]:
            if action.kind is Kind.B:
                self._may_be_one(action, literal)
            elif action.kind is Kind.O:
                self.chosen[action._replace(kind=Kind.L)] = literal
        self._one_at_a_time()
        for place in places:
            self._waits(*place)
        self._in_order(places, ordered)
        self._memory(places)
        most = max(map(len, problem.local))
        if problem.offload and not crossing and 3 * most * count <= _CAUSES:
            self._causes()
        self._objective()
        self._begin(begun)

    def _time(self, action: Action) -> int:
        return self.times[action.kind][action.stage]

    def _may_be_one(self, backward: Action, whole: Any) -> None:
        """Let a backward be whole. I then has the time of B, and W counts as ending with it."""
        inward, weight = (backward._replace(kind=kind) for kind in (Kind.I, Kind.W))
        self.chosen[weight] = whole.Not()
        end = self.starts[inward] + self._time(backward)
        for action in (inward, weight):
            apart, self.ends[action] = self.ends[action], self.cp.NewIntVar(0, self.horizon, "")
            self.cp.Add(self.ends[action] == apart).OnlyEnforceIf(whole.Not())
            self.cp.Add(self.ends[action] == end).OnlyEnforceIf(whole)
        self.cp.Add(self.starts[weight] == self.starts[inward]).OnlyEnforceIf(whole)

    def _one_at_a_time(self) -> None:
        """Forbid that computing actions of a device overlap, or moves on the same link."""
        busy: dict[tuple[int, Kind | None], list[Any]] = defaultdict(list)

        def occupy(action: Action, start: Any, chosen: Any) -> None:
            link = action.kind if action.kind in MOVES else None
            length = self._time(action)
            busy[self.problem.device_of[action.stage], link].append(
                self.cp.NewFixedSizeIntervalVar(start, length, "")
                if chosen is None
                else self.cp.NewOptionalFixedSizeIntervalVar(start, length, chosen, "")
            )

        for action, start in self.starts.items():
            backward = action._replace(kind=Kind.B)
            if action.kind is Kind.I and backward in self.chosen:
                occupy(action, start, self.chosen[backward].Not())
                occupy(backward, start, self.chosen[backward])
            else:
                occupy(action, start, self.chosen.get(action))
        for row in busy.values():
            self.cp.AddNoOverlap(row)

    def _waits(self, stage: int, microbatch: int) -> None:
        """Add the dependencies of the actions of a stage and microbatch."""
        forward_hops, backward_hops = self.hops
        forward, inward, weight, again, off, back = (
            Action(kind, stage, microbatch)
            for kind in (Kind.F, Kind.I, Kind.W, Kind.R, Kind.O, Kind.L)
        )
        self._after(inward, forward)
        self._after(weight, inward)
        if stage:
            self._after(forward, forward._replace(stage=stage - 1), forward_hops[stage - 1])
            self._after(inward._replace(stage=stage - 1), inward, backward_hops[stage])
        for order in ((forward, again, inward), (forward, off, back, inward)):
            if all(action in self.starts for action in order):
                for earlier, later in pairwise(order):
                    self._after(later, earlier)
        if again in self.chosen and off in self.chosen:
            self.cp.AddBoolOr([self.chosen[again].Not(), self.chosen[off].Not()])

    def _after(self, later: Action, earlier: Action, hop: int = 0) -> None:
        constraint = self.cp.Add(self.starts[later] >= self.ends[earlier] + hop)
        chosen = [self.chosen[action] for action in (later, earlier) if action in self.chosen]
        if chosen:
            constraint.OnlyEnforceIf(chosen)

    def _in_order(self, places: Sequence[tuple[int, int]], ordered: bool) -> None:
        """Keep microbatches in order: everywhere, or else in the forwards of stage 0.

        The order of the first forwards only numbers the microbatches, so it excludes no schedule.
        """
        kinds = (Kind.F, Kind.I, Kind.W) if ordered else (Kind.F,)
        for stage, microbatch in places:
            if microbatch and (ordered or stage == 0):
                for kind in kinds:
                    self._after(
                        Action(kind, stage, microbatch), Action(kind, stage, microbatch - 1)
                    )

    def _memory(self, places: Sequence[tuple[int, int]]) -> None:
        problem = self.problem
        largest = max((limit for limit in problem.limits if limit < inf), default=1.0)
        scale = _FINE / largest
        held: dict[int, list[tuple[Any, int]]] = defaultdict(list)
        for stage, microbatch in places:
            device = problem.device_of[stage]
            if problem.limits[device] == inf:
                continue
            # Rounded down, so that all schedules that fit the problem fit the model. A schedule
            # that only fits the model is rejected when it is simulated.
            rest = min(problem.rest[stage], problem.residual[stage])
            shares = floor((problem.residual[stage] - rest) * scale), floor(rest * scale)
            more = floor((problem.rest[stage] - rest) * scale)
            forward, inward, weight, off = (
                Action(kind, stage, microbatch) for kind in (Kind.F, Kind.I, Kind.W, Kind.O)
            )
            begin = self._made(forward)
            for last, share in zip((inward, weight), shares, strict=True):
                if share:
                    held[device].append((self._held(begin, last), share))
            if more:
                held[device].append(
                    (self._held(self.ends[inward], weight, self.chosen.get(weight)), more)
                )
            if off in self.chosen:
                on_device = self._held(self.starts[forward], off, self.chosen[off])
                held[device].append((on_device, sum(shares)))
        for device, rows in held.items():
            intervals, shares = zip(*rows, strict=True)
            self.cp.AddCumulative(
                intervals, shares, ceil(problem.limits[device] * (1 + ROUNDING) * scale)
            )

    def _made(self, forward: Action) -> Any:
        """When the residual that a backward reads is there: from its F, or from its R or L."""
        begin = self.starts[forward]
        for source in (forward._replace(kind=Kind.R), forward._replace(kind=Kind.L)):
            if source in self.chosen:
                chosen, before = self.chosen[source], begin
                begin = self.cp.NewIntVar(0, self.horizon, "")
                self.cp.Add(begin == before).OnlyEnforceIf(chosen.Not())
                self.cp.Add(begin == self.starts[source]).OnlyEnforceIf(chosen)
        return begin

    def _held(self, begin: Any, last: Action, chosen: Any = None) -> Any:
        """The interval from a start to the end of an action, there if it is chosen."""
        size, end = self.cp.NewIntVar(0, self.horizon, ""), self.ends[last]
        if chosen is None:
            return self.cp.NewIntervalVar(begin, size, end, "")
        return self.cp.NewOptionalIntervalVar(begin, size, end, chosen, "")

    def _causes(self) -> None:
        """Require that each action starts when the simulation would start it: at the end of a
        cause.

        Without moves this is not needed: an action that starts late can start earlier without harm.
        But a residual cannot move back earlier without harm, because it occupies memory. A
        computing action waits for the computing action before it, for its value, or for its
        residual. A move waits for the computing action before it, for the move before it on the
        link, or for its other half.
        """
        last = self.problem.num_stages - 1
        forward_hops, backward_hops = self.hops
        for action, start in self.starts.items():
            kind, stage = action.kind, action.stage
            device = self.problem.device_of[stage]
            causes: list[tuple[Any, Any]] = [(0, None)] if kind is Kind.F else []
            causes += [
                (self.ends[other], self.chosen.get(other))
                for other in self.starts
                if other != action
                and self.problem.device_of[other.stage] == device
                and (other.kind not in MOVES or other.kind is kind)
            ]
            if kind is Kind.F and stage:
                sender = action._replace(stage=stage - 1)
                causes.append((self.ends[sender] + forward_hops[stage - 1], None))
            if kind is Kind.I and stage < last:
                sender = action._replace(stage=stage + 1)
                causes.append((self.ends[sender] + backward_hops[stage + 1], None))
            if kind in (Kind.I, Kind.L):
                half = action._replace(kind=Kind.L if kind is Kind.I else Kind.O)
                causes.append((self.ends[half], self.chosen.get(half)))
            literals: list[Any] = []
            for moment, condition in causes:
                literal = self.cp.NewBoolVar("")
                self.cp.Add(start == moment).OnlyEnforceIf(literal)
                if condition is not None:
                    self.cp.AddImplication(literal, condition)
                literals.append(literal)
            if action in self.chosen:
                literals.append(self.chosen[action].Not())
            self.cp.AddBoolOr(literals)

    def _objective(self) -> None:
        cp, problem = self.cp, self.problem
        goal = cp.NewIntVar(0, self.horizon, "goal")
        for stages in problem.local:
            begin: Any = 0
            if problem.objective == "span" and stages:
                begin = cp.NewIntVar(0, self.horizon, "")
                for microbatch in range(problem.num_microbatches):
                    cp.Add(begin <= self.starts[Action(Kind.F, stages[0], microbatch)])
            for stage in stages:
                for microbatch in range(problem.num_microbatches):
                    cp.Add(goal >= self.ends[Action(Kind.W, stage, microbatch)] - begin)
        cp.Minimize(goal)

    def _begin(self, begun: _Starts) -> None:
        """Give the solver a schedule as a hint."""
        for action, start in self.starts.items():
            whole = action._replace(kind=Kind.B)
            if action in begun:
                self.cp.AddHint(start, begun[action])
            elif whole in begun and action.kind in (Kind.I, Kind.W):
                self.cp.AddHint(start, begun[whole])
        for action, literal in self.chosen.items():
            if begun and action.kind not in (Kind.L, Kind.W):  # these follow from O and B
                self.cp.AddHint(literal, action in begun)

    def solution(self, solver: Any) -> dict[Action, int]:
        """Return the starts of the actions that run in a solution."""
        left_out = {action for action, literal in self.chosen.items() if not solver.Value(literal)}
        found = {
            action: solver.Value(start)
            for action, start in self.starts.items()
            if action not in left_out
        }
        for whole in self.chosen:
            if whole.kind is Kind.B and whole not in left_out:
                found[whole] = found.pop(whole._replace(kind=Kind.I))
        return found

    def orders(self, starts: _Starts) -> tuple[tuple[Action, ...], ...]:
        """Return the orders of a solution.

        Computing actions are ordered by start. A move comes before the computing action during
        which it starts, or before the next one. Of actions with one start, actions without duration
        come first, and actions of one microbatch in their own order.
        """
        rank = (Kind.F, Kind.R, Kind.O, Kind.L, Kind.B, Kind.I, Kind.W)
        device_of = self.problem.device_of
        computing = [action for action in starts if action.kind not in MOVES]

        def begin_of_computing(move: Action) -> int:
            """Return the start of the computing action during which a move starts, or its own."""
            begins = (
                starts[other]
                for other in computing
                if device_of[other.stage] == device_of[move.stage]
                and starts[other] < starts[move] < starts[other] + self._time(other)
            )
            return next(begins, starts[move])

        def key(action: Action) -> tuple[int, ...]:
            kind, stage, microbatch, _ = action
            start = starts[action]
            place = begin_of_computing(action) if kind in MOVES else start
            after = 0 if place == start and not self._time(action) else 1 if kind in MOVES else 2
            ascending = stage if kind is Kind.F else -stage
            return place, after, start, rank.index(kind), ascending, microbatch

        lanes: list[list[Action]] = [[] for _ in self.problem.limits]
        for action in sorted(starts, key=key):
            lanes[device_of[action.stage]].append(action)
        return tuple(map(tuple, lanes))


def _kinds(problem: Problem) -> tuple[Kind, ...]:
    """Return the kinds that the model has variables for; a B is an I with another time."""
    remat = (Kind.R,) if problem.remat else ()
    return (Kind.F, Kind.I, Kind.W, *remat, *((Kind.O, Kind.L) if problem.offload else ()))


def _begun(problem: Problem, hint: Timeline | None, unit: Fraction) -> dict[Action, int]:
    """Return the starts of a schedule's actions. A B that saves no time becomes I and W."""
    starts: dict[Action, int] = {}
    for span in hint.spans if hint is not None else ():
        kind, stage, microbatch, _ = span.action
        start = Fraction(span.start)
        if kind is Kind.B and not problem.cheaper[stage]:
            starts[Action(Kind.I, stage, microbatch)] = round(start / unit)
            starts[Action(Kind.W, stage, microbatch)] = round(
                (start + Fraction(problem.inward[stage])) / unit
            )
        else:
            starts[span.action] = round(start / unit)
    return starts


def unit_of(problem: Problem) -> tuple[Fraction, bool]:
    """Choose the time of a tick. Return it, and whether all times are whole numbers of ticks."""
    stages = range(problem.num_stages)
    times = [problem.cost.of(kind, stage) for kind in _kinds(problem) for stage in stages]
    times += [problem.whole_backward[stage] for stage in stages if problem.cheaper[stage]]
    times = [*map(Fraction, chain(times, *problem.waits))]
    rough = [time.limit_denominator(10**4) for time in times]
    unit = Fraction(1, lcm(*(time.denominator for time in rough)))
    long = max(rough, default=Fraction(0))
    if (
        all(abs(a - b) <= Fraction(1, 10**12) * b for a, b in zip(rough, times, strict=True))
        and long / unit <= _LARGEST
    ):
        return unit, True
    return max(long, Fraction(1, 10**9)) / 1000, False
