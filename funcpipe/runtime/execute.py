"""One run of a program: a runner for each lane, the ways between them, and what is left at the end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, NoReturn

import torch

from funcpipe.core.errors import FuncpipeError, Where, located
from funcpipe.core.lowered import Lowered, slots_of
from funcpipe.core.plan import Plan
from funcpipe.core.program import CALLER, LaneProgram, Role
from funcpipe.core.result import Span, Timeline
from funcpipe.core.schedule import Kind
from funcpipe.runtime.border import Border
from funcpipe.runtime.context import RUNNING, no_autocast_cache
from funcpipe.runtime.drawing import Catching
from funcpipe.runtime.host import Host
from funcpipe.runtime.plain import addresses
from funcpipe.runtime.program import Bound
from funcpipe.runtime.runner import Runner
from funcpipe.runtime.steps import make_step
from funcpipe.runtime.stream import Channel, Edge, Place
from funcpipe.runtime.transport import Inbox, Level, Local, Mailbox
from funcpipe.schedules.memory import residual_peak


class Execution:
    """One run of a program.

    Attributes:
        lanes: the runners.
        boxes: their mailboxes.
        turn: the lane whose turn it is, where all are on one thread.
        stopped: no lane begins another action.
    """

    def __init__(
        self,
        plan: Plan,
        program: Lowered,
        bounds: Sequence[Bound],
        places: Sequence[Place],
        caller: dict[int, Border],
        *,
        threaded: bool,
        timed: bool,
    ) -> None:
        self.plan, self.program, self.bounds, self.caller = plan, program, bounds, caller
        self.threaded, self.timed = threaded, timed
        self.part = (0, len(program.order))
        self.turn = 0
        self.stopped = False
        self.boxes: list[Mailbox] = [Inbox() if threaded else Mailbox() for _ in places]
        edges: dict[tuple[int, int], Channel] = {
            (pool.source, pool.lane): Edge(
                None if pool.source == CALLER else places[pool.source], places[pool.lane], threaded=threaded
            )
            for pool in program.pools
        }
        self.levels = [Level() for _ in program.pools]
        levels = {
            (pool.lane, slot): level
            for pool, slots, level in zip(program.pools, slots_of(program.pools), self.levels, strict=True)
            for slot in slots
        }
        self.lanes = [
            self._runner(lane, place, Local(lane, self.boxes, edges, caller, levels))
            for lane, place in zip(program.lanes, places, strict=True)
        ]

    def _runner(self, lane: LaneProgram, place: Place, transport: Local) -> Runner:
        coming: dict[int, Any] = {}
        host = None
        if any(call.kind is Kind.O for call in lane.calls):
            fixed = addresses([leaf for value in self.caller.values() for leaf in value.leaves])
            host = Host(place, coming, fixed)
        steps = [
            make_step(call, lane, self.plan.stages[call.stage], self.bounds[call.stage], host) for call in lane.calls
        ]
        return Runner(lane, steps, place, transport, coming, timed=self.timed)

    def aim(self, start: int, stop: int) -> None:
        """What runs next: the actions from one position of the plan order to another."""
        self.part = (start, stop)
        whole = stop == len(self.program.order)
        before = [] if whole else self.program.lane_order[:stop]
        for lane in self.lanes:
            lane.first = lane.done
            lane.stop = len(lane.program.ends) if whole else before.count(lane.program.lane)

    def listening(self) -> AbstractContextManager[Any]:
        """What a walk is inside of: eager stages catch their draws, and each forward would else ask for them anew."""
        eager = any(stage.program is None for stage in self.plan.stages)
        return Catching() if eager else nullcontext()

    # -- what goes wrong ---------------------------------------------------------------------------------------------

    def where(self, lane: Runner) -> Where:
        """The coordinates of what the lane is doing."""
        runs = lane.program.runs
        run = runs[max(0, min(lane.begun, len(runs)) - 1)]
        action = lane.program.action(run)
        phase = self.bounds[action.stage].phase
        word = f"{action} ({phase})" if phase else str(action)
        device = f"{lane.program.lane} ({lane.place.device})"
        return Where(action.stage, self.plan.stages[action.stage].name, action.microbatch, word, device)

    def position(self, lane: Runner) -> int:
        """Where in the plan order the lane is."""
        left = lane.begun
        for position, number in enumerate(self.program.lane_order):
            left -= number == lane.program.lane
            if left == 0:
                return position
        return -1

    def failure(self, lane: Runner, error: BaseException) -> BaseException:
        """What the run raises for an error of a lane: it knows where, and (out of memory) what to do."""
        found = located(error, self.where(lane))
        if _out_of_memory(error):
            kinds = zip(lane.program.slots, lane.slots, strict=True)
            held = [value for kind, value in kinds if kind.role is Role.RESIDUAL and value is not None]
            schedule = self.plan.schedule.first(self.program.num_microbatches)
            most = residual_peak(schedule.orders[lane.program.lane], schedule)
            size = sum(value.nbytes for value in held) / 2**20
            found.__dict__.setdefault("__notes__", []).append(
                f"device {lane.program.lane} holds {len(held)} residuals (the schedule's most is {most:g}) with {size:.1f} MiB at "
                f"their borders{_free(lane.place.device)}; to hold less: more microbatches of fewer rows, "
                "fp.remat(schedule) or fp.offload(schedule), or a schedule that holds fewer (fp.one_f_one_b)"
            )
        return found

    # -- after the run -----------------------------------------------------------------------------------------------

    def collect(self, role: Role) -> dict[tuple[int, int], Any]:
        """What the caller takes, by (stage, microbatch); it leaves the slots."""
        out: dict[tuple[int, int], Any] = {}
        for lane in self.lanes:
            for stage, microbatch, slot in lane.program.taken.get(role, ()):
                if lane.slots[slot] is not None:
                    out[stage, microbatch] = lane.slots[slot]
                    lane.slots[slot] = None
        return out

    def check_empty(self) -> None:
        """Every value was freed: the plan's liveness and what ran agree."""
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
        """The measured spans, in seconds from the first start."""
        first = min((lane.spans[0][1] for lane in self.lanes if lane.spans), default=0)
        spans = [
            Span(lane.program.lane, (start - first) / 1e9, (end - first) / 1e9, action)
            for lane in self.lanes
            for action, start, end in lane.spans
        ]
        spans.sort(key=lambda span: (span.start, span.device))
        schedule = self.plan.schedule.first(self.program.num_microbatches)
        peak = tuple(residual_peak(order, schedule) for order in schedule.orders)
        return Timeline(tuple(spans), len(self.lanes), peak, "s", 0.0, schedule.name)

    def busy(self) -> float:
        """Seconds that all lanes together spent in actions."""
        return sum(end - start for lane in self.lanes for _, start, end in lane.spans) / 1e9

    def most(self) -> tuple[int, ...]:
        """The most values that lay in each pool at a time."""
        return tuple(level.most for level in self.levels)


def _out_of_memory(error: BaseException) -> bool:
    words = ("can't allocate memory", "out of memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    )


def _free(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    return f", {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free"


def run_serial(execution: Execution) -> None:
    """Everything on this thread, in plan order."""
    lanes = execution.lanes
    for lane in lanes:
        lane.thread = threading.get_ident()
    RUNNING.set(lambda: execution.where(lanes[execution.turn]))  # whoever began the run sets it back
    with no_autocast_cache(), torch.autograd.set_multithreading_enabled(False), execution.listening():
        try:
            start, stop = execution.part
            for number in islice(execution.program.lane_order, start, stop):
                execution.turn = number
                lane = lanes[number]
                if lane.place.asynchronous:
                    with lane.place.active():
                        lane.advance()
                else:
                    lane.advance()
        except BaseException as error:  # in here: context managers write to the exceptions that they see
            raise_located([(0, execution.failure(lanes[execution.turn], error))])


def raise_located(failures: list[tuple[int, BaseException]]) -> NoReturn:
    """Raise the earliest in plan order; the others become notes of it."""
    failures.sort(key=lambda failure: failure[0])
    first = failures[0][1]
    for _, other in failures[1:]:
        notes = first.__dict__.setdefault("__notes__", [])
        notes.append(f"also failed: {type(other).__name__}: {other} ({getattr(other, 'funcpipe', '')})")
    failures.clear()
    try:
        raise first
    finally:
        del first  # the traceback's frames must not point back at the exception
