"""`Execution`, one run of a program: its lanes, the channels between them, and its results.

`LaneExecutor` is the base of executors; `lane` runs one lane; `finish` computes the results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from threading import get_ident
from time import perf_counter
from typing import Any, ClassVar

from funcpipe._src.batch.microbatch import given_by_caller, numbered
from funcpipe._src.core.border import Border
from funcpipe._src.core.collector import collector_off
from funcpipe._src.core.errors import FuncpipeError, Where, located
from funcpipe._src.core.log import decided
from funcpipe._src.core.plain_tensors import addresses, here
from funcpipe._src.core.tree import Tree, map_leaves
from funcpipe._src.data.lowered import slots_of
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.program import CALLER, LaneProgram, Role, Wire
from funcpipe._src.data.result import Result, RunStats, Span, Timeline
from funcpipe._src.data.schedule import Kind
from funcpipe._src.data.trace import arrows_of
from funcpipe._src.devices.host_link import HostLink
from funcpipe._src.devices.stream import Channel, CopyEdge, HandOut, Place, are_on_host
from funcpipe._src.engine.failures import (
    add_note,
    in_batch,
    is_out_of_memory,
    position_of,
    too_much,
    whole_pair,
)
from funcpipe._src.engine.finish import commit, commits, finish, release, statistics_of
from funcpipe._src.engine.lane import Lane, ranged
from funcpipe._src.engine.mail import Inbox, Mailbox, PoolLevel
from funcpipe._src.engine.options import RunOptions
from funcpipe._src.engine.part import PlanPart, whole
from funcpipe._src.engine.prepare import Prepared, prepare
from funcpipe._src.engine.steps import make_step
from funcpipe._src.optimizing.stepping import Stepping
from funcpipe._src.replicas.gathered import holding
from funcpipe._src.replicas.replicas import Reduction
from funcpipe._src.schedules.memory import residual_peak
from funcpipe._src.stages.context import RUNNING, CallerContext, intra_op_threads
from funcpipe._src.stages.drawing import CatchDraws


class LaneExecutor(ABC):
    """An executor that runs the lanes of this process.

    Attributes:
        threaded: whether each lane has its own thread.
        reason: why this executor was chosen, for `RunStats`.
    """

    threaded: ClassVar[bool]
    halves: ClassVar[bool] = True  # whether it can run each half of a `vjp`
    runs = 0  # the number of runs begun. Several processes compare it, to detect different calls

    def __init__(self, reason: str = "asked for") -> None:
        self.reason = reason

    @property
    def word(self) -> str:
        """The name of this executor in statistics."""
        return "threads" if self.threaded else "serial"

    @abstractmethod
    def check(self, plan: Plan) -> None:
        """Raise PlanError if this executor cannot run the plan now."""

    def part(self, plan: Plan) -> PlanPart:
        """Check a plan, and return the part of it that this process runs."""
        self.check(plan)
        return whole(plan)

    def beats(self) -> int:
        """Return a number that changes whenever lanes of other processes make progress."""
        return 0

    def mailbox(self) -> Mailbox:
        """Make a new mailbox for a lane."""
        return Inbox() if self.threaded else Mailbox()

    def outboxes(
        self, execution: Execution, program: LaneProgram, place: Place
    ) -> Mapping[int, Mailbox]:
        """Return the mailboxes that stand for lanes of other processes, for one lane here."""
        return {}

    def running(self, options: RunOptions) -> AbstractContextManager[RunOptions]:
        """Return the context of a run. It yields the run's options."""
        return nullcontext(options)

    def begin(self, execution: Execution, lane: Lane) -> None:
        """Hook: a lane begins an execution. Called in the lane's thread."""
        lane.thread = get_ident()

    @abstractmethod
    def walk(self, executions: Sequence[Execution]) -> None:
        """Run ``execution.part`` of each execution, and return when all are done; raise failures.

        Each lane runs one execution after the other, without waiting for other lanes in between.
        """

    def run(self, plan: Plan, params: Sequence[Tree], batch: Any, options: RunOptions) -> Result:
        """Run a plan: check the arguments, run the lanes, and compute the result."""
        with self.running(options) as options:
            return self._run(plan, params, batch, options)

    def _run(self, plan: Plan, params: Sequence[Tree], batch: Any, options: RunOptions) -> Result:
        ready = prepare("run", plan, params, batch, options, part=self.part(plan))
        stepping = Stepping(ready) if plan.schedule.steps else None
        try:
            execution = Execution(ready, self, stepping)
            execution.go()
            result = execution.result()
            return result if stepping is None else stepping.settle(result)
        except BaseException:
            if stepping is not None:
                stepping.restore()
            raise
        finally:
            if stepping is not None:
                stepping.undo.close()


class Execution:
    """One run of a program, as a whole (`run`) or in two halves (`vjp`).

    Attributes:
        ready: the prepared run.
        executor: the executor that runs the lanes.
        number: the number of this batch in `run_batches`. None: the run has one batch.
        before: the execution that the lanes run before this one, or None.
        committed: the new states, by stage. Only filled if there are several batches.
        context: the modes of the caller at the start.
        lanes: the lanes of this process.
        boxes: the mailboxes of these lanes, by lane.
        outboxes: mailboxes to lanes of other processes, by (lane here, lane there).
        level_of: the fill level of the pool of each slot, by (lane, slot).
        part: the positions of the plan order that run next, (start, stop).
        turn: the index of the lane whose turn it is, if all lanes are on one thread.
        stopped: whether lanes must not begin another action.
        settling: whether all lanes are done, but devices may still work.
        seconds: the wall-clock time of everything that ran so far.
        began: the start of the first span, once there is a timeline.
    """

    def __init__(
        self,
        ready: Prepared,
        executor: LaneExecutor,
        stepping: Stepping | None = None,
        number: int | None = None,
        before: Execution | None = None,
    ) -> None:
        self.stepping, self.number, self.before = stepping, number, before
        self.committed: dict[int, Tree] = {}
        decided(
            ready.plan,
            "%s runs by %s, because: %s",
            ready.plan.schedule.name,
            executor.word,
            executor.reason,
        )
        self.ready, self.executor, self.context = ready, executor, CallerContext()
        program = ready.program
        self.part = (0, len(program.order))
        self.turn = 0
        self.stopped = self.settling = False
        self.seconds = self.began = 0.0
        self.caller = given_by_caller(ready.batch, program)
        here = [ready.where[lane] for lane in ready.part.lanes]
        places = {
            lane: Place(device, alone=here.count(device) == 1, lane=lane)
            for lane, device in zip(ready.part.lanes, here, strict=True)
        }
        self.boxes = {lane: executor.mailbox() for lane in places}
        self.outboxes: dict[tuple[int, int], Mailbox] = {}
        self.levels = [PoolLevel() for _ in program.pools]
        # The process of a lane counts the values there, so other lanes get a dummy level.
        self.level_of = {
            (pool.lane, slot): level if pool.lane in places else PoolLevel()
            for pool, slots, level in zip(
                program.pools, slots_of(program.pools), self.levels, strict=True
            )
            for slot in slots
        }
        edges = self._edges(places)
        self.lanes = [
            self._lane(lane, places[lane.lane], edges) for lane in ready.part.programs(program)
        ]

    def _edges(self, places: Mapping[int, Place]) -> dict[tuple[int, int], Channel]:
        """Return the channels between the lanes here, from the caller, and to other processes."""
        ends = {CALLER: None, **places}
        how = {"threaded": self.executor.threaded, "on_host": are_on_host(self.caller.values())}
        return {
            (pool.source, pool.lane): CopyEdge(ends[pool.source], places[pool.lane], **how)
            if pool.lane in places
            else HandOut()
            for pool in self.ready.program.pools
            if pool.source in ends and (pool.lane in places or pool.source in places)
        }

    def _lane(
        self, program: LaneProgram, place: Place, edges: Mapping[tuple[int, int], Channel]
    ) -> Lane:
        others = self.executor.outboxes(self, program, place)
        self.outboxes |= {(program.lane, other): box for other, box in others.items()}
        lane = Lane(program, place, {**self.boxes, **others}, edges, self.caller, self.level_of)
        host = None
        if any(call.kind is Kind.O for call in program.calls):
            fixed = addresses([leaf for value in self.caller.values() for leaf in value.leaves])
            host = HostLink(place, lane.coming, fixed)
        ready, options = self.ready, self.ready.options
        advance = _unstepped if self.stepping is None else self.stepping.step
        early = frozenset[int]() if self.stepping is None else self.stepping.early

        # Not `lane` itself: a closure over the lane would be a cycle, and keep the batch alive.
        mail, coming = lane.mail, lane.coming

        def reduce(stage: int, slot: int | None) -> Reduction:
            """Begin a reduction. If the lane steps the stage, the S that reads the slot waits for
            the sums."""
            reduction = ready.reduce(stage, mail)
            if slot is not None and stage in early:
                coming[slot] = reduction
            return reduction

        stages, bounds = ready.plan.stages, ready.bounds
        lane.steps = [
            make_step(call, program, stages[call.stage], bounds[call.stage], host, reduce, advance)
            for call in program.calls
        ]
        if options.record:
            lane.measure()
        if options.ranges:
            lane.steps = [ranged(step, program, place.device) for step in lane.steps]
        # Wrapped last, so that an action's measured time excludes the wait for parameters.
        if ready.spread:
            lane.steps = holding(program, lane.steps, ready.spread, bounds, lane.mail, place)
        return lane

    def go(self, start: int = 0, stop: int | None = None) -> None:
        """Run the actions between two positions of the plan order."""
        self.aim(start, stop)
        walk([self])

    def aim(self, start: int = 0, stop: int | None = None) -> None:
        """Set the actions that run next, by two positions of the plan order."""
        program = self.ready.program
        self.part = (start, len(program.order) if stop is None else stop)
        before = [] if stop is None else program.lane_order[:stop]
        for lane in self.lanes:
            lane.first = lane.done
            lane.stop = len(lane.program.ends) if stop is None else before.count(lane.program.lane)

    def begin(self, lane: Lane) -> None:
        """Begin a lane, in its thread, with the states that the batch before has committed."""
        if self.before is not None:
            with lane.place.active():
                for stage in {call.stage for call in lane.program.calls}:
                    self.ready.bounds[stage].rebase(self.before.committed.get(stage))
        self.executor.begin(self, lane)

    def end(self, lane: Lane) -> None:
        """End a lane. If there are several batches, commit the states of its stages."""
        if self.number is None:
            return
        reports = {
            (stage, m): lane.slots[slot]
            for stage, m, slot in lane.program.taken.get(Role.REPORT, ())
        }
        for stage in {call.stage for call in lane.program.calls}:
            if commits(self.ready.plan, stage):
                known = {} if self.before is None else self.before.committed
                state = known.get(stage, self.ready.state[stage])
                stats = statistics_of(self.ready, stage, reports)
                with lane.place.active():
                    self.committed[stage] = commit(self.ready, stage, state, stats)

    def give(self, wire: Wire, pieces: Sequence[Border]) -> None:
        """Add values of the caller for the next part, one per microbatch."""
        self.caller.update(numbered(self.ready.program.wires.index(wire), pieces))
        # Values on a device need a copy or an event, so the lanes must call `send` for them.
        if not are_on_host(pieces):
            for lane in self.lanes:
                if lane.from_caller is not None:
                    lane.from_caller.at_once = False

    def catching(self) -> AbstractContextManager[object]:
        """Return the outer catcher of draws for a thread, which makes the catchers of eager
        forwards cheap."""
        return (
            CatchDraws()
            if any(part.program is None for part in self.ready.plan.stages)
            else nullcontext()
        )

    # -- what goes wrong

    def where(self, lane: Lane) -> Where:
        """Return the coordinates of the lane's present action."""
        runs = lane.program.runs
        run = runs[max(0, min(lane.begun, len(runs)) - 1)]
        action = lane.program.action(run)
        return self.ready.at(action.stage, action.microbatch, str(action))

    def position(self, lane: Lane) -> tuple[int, int]:
        """Return the number of the batch and the lane's position in the plan order."""
        return self.number or 0, position_of(lane, self.ready.program)

    def failure(self, lane: Lane, error: BaseException) -> BaseException:
        """Return the error to raise for a lane's error, with coordinates and notes."""
        where = self.where(lane)
        failure = located(error, where)
        inputs = self.ready.batch.inputs
        if inputs and (note := whole_pair(self.ready.plan, where, inputs[0].tree())):
            add_note(failure, note)
        if self.number is not None:
            add_note(failure, in_batch(self.number))
        if is_out_of_memory(error):
            add_note(
                failure,
                too_much(lane, self.ready.plan.schedule.first(self.ready.program.num_microbatches)),
            )
        return failure

    # -- after the run

    def collect(self, role: Role) -> dict[tuple[int, int], Any]:
        """Take the values of a role out of their slots, by (stage, microbatch)."""
        out: dict[tuple[int, int], Any] = {}
        for lane in self.lanes:
            for stage, microbatch, slot in lane.program.taken.get(role, ()):
                if lane.slots[slot] is not None:
                    out[stage, microbatch] = _handed(lane.slots[slot], lane.place)
                    lane.slots[slot] = None  # so that `check_empty` finds only values that leak
        return out

    def reductions(self) -> dict[int, Reduction]:
        """Take the reductions that lanes have begun out of their slots, by stage."""
        return {stage: reduction for (stage, _), reduction in self.collect(Role.SUMS).items()}

    def hand_sums(self) -> None:
        """Make the gradient sums safe to use on the caller's streams."""
        if self.ready.part.replicas > 1:  # these are not returned: reductions make new sums
            return
        for lane in self.lanes:
            if lane.place.asynchronous:
                # Gradients of gathered parameters are not returned: reductions make new tensors.
                for stage in {call.stage for call in lane.program.calls} - {*self.ready.spread}:
                    for gradient in self.ready.bounds[stage].params.grads():
                        lane.place.hand(here(gradient))

    def result(self) -> Result:
        """Compute the result of the run from the reports and outputs of the lanes."""
        ready, backward = self.ready, self.ready.plan.schedule.has_backward
        reports = self.collect(Role.REPORT)
        outputs = self.collect(Role.OUTPUT)
        carries = self.collect(Role.CARRY_OUT)
        reductions = self.reductions()
        self.check_empty()
        if backward and (self.stepping is None or not self.stepping.spends):
            self.hand_sums()
        timeline = self.timeline() if ready.options.record else None
        how = timeline, self.stats()
        places = {call.stage: lane.place for lane in self.lanes for call in lane.program.calls}
        given = {stage: _handed(tree, places[stage]) for stage, tree in self.committed.items()}
        left = None if self.number is None else given
        with intra_op_threads(ready.threads):
            result = finish(
                ready,
                reports,
                outputs,
                *how,
                backward=backward,
                stepping=self.stepping,
                committed=left,
                reductions=reductions,
                carries=carries,
            )
        release(ready)
        self.settle()
        return result

    def settle(self) -> None:
        """Make the lanes' streams wait for the caller's reads, before their memory is reused."""
        for lane in self.lanes:
            lane.place.settle()

    def check_empty(self) -> None:
        """Check that every slot is empty. Otherwise the plan's lifetimes are wrong."""
        if all(lane.slots.count(None) == len(lane.slots) for lane in self.lanes):
            return
        left = [
            f"{kind.role.value} in slot {slot} of lane {lane.program.lane}"
            for lane in self.lanes
            for slot, (kind, value) in enumerate(zip(lane.program.slots, lane.slots, strict=True))
            if value is not None
        ]
        raise FuncpipeError(f"internal error: values left in the slots: {left}")

    def timeline(self) -> Timeline:
        """The measured spans, in seconds from the first start. Waits for devices."""
        found = [(lane.program.lane, *span) for lane in self.lanes for span in lane.spans()]
        first = min((start for _, _, start, _ in found), default=0)
        self.began = first / 1e9
        spans = [
            Span(lane, (start - first) / 1e9, (end - first) / 1e9, action)
            for lane, action, start, end in found
        ]
        spans.sort(key=lambda span: (span.start, span.device))
        schedule = self.ready.plan.schedule.first(self.ready.program.num_microbatches)
        peak = tuple(residual_peak(order, schedule) for order in schedule.orders)
        names = tuple(part.name for part in self.ready.plan.stages)
        arrows = arrows_of(self.ready.program)
        lanes = len(schedule.orders)
        return Timeline(
            tuple(spans), lanes, peak, "s", 0.0, schedule.name, stages=names, arrows=arrows
        )

    def stats(self) -> RunStats:
        """Return the statistics so far."""
        ready, most = self.ready, tuple(level.most for level in self.levels)
        first = ready.shares.first // len(ready.batch.slices or (1,))
        how = self.executor.word, self.executor.reason, ready.threads, ready.batch.num_microbatches
        return RunStats(*how, self.seconds, most, self.began, first)


def walk(executions: Sequence[Execution]) -> None:
    """Run the aimed parts of all executions, and add to each its share of the time."""
    outer, began, done = RUNNING.get(), perf_counter(), False
    first, lanes = executions[0], [lane for execution in executions for lane in execution.lanes]
    try:
        RUNNING.set(partial(first.where, first.lanes[0]))
        for lane in lanes:
            lane.place.fork()
            if lane.clock is not None:
                lane.clock.start()
        # A full collection within an action would count as its time.
        with collector_off() if first.ready.options.record else nullcontext():
            first.executor.walk(executions)
        done = True
    finally:
        RUNNING.set(outer)
        # After a failure of a device, its streams cannot wait. That error would hide the failure.
        for lane in lanes:
            with nullcontext() if done else suppress(RuntimeError):
                lane.place.join()
    seconds = perf_counter() - began
    for execution in executions:
        execution.seconds += seconds / len(executions)


def _unstepped(stage: int, reduction: Reduction) -> None:
    """The step of runs without an optimizer: a no-op. `refuse_unstepped` has checked the rest."""


def _handed(value: Any, place: Place) -> Any:
    """Return a lane's value, made safe to use on the caller's streams."""
    if not place.asynchronous:
        return value
    return value.mapped(place.hand) if isinstance(value, Border) else map_leaves(place.hand, value)
