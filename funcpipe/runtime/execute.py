"""The executor: for each task wait for its reads and slots, do it, publish, free. It knows no schedule, no autograd."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns
from typing import Any, NoReturn

import torch

from funcpipe.core.errors import FuncpipeError, Where, located
from funcpipe.core.plan import Lowered, Plan
from funcpipe.core.result import Span, Timeline
from funcpipe.core.schedule import Kind
from funcpipe.core.task import CALLER, Role
from funcpipe.runtime.border import Border
from funcpipe.runtime.context import RUNNING, no_autocast_cache
from funcpipe.runtime.drawing import Catching
from funcpipe.runtime.host import Host
from funcpipe.runtime.plain import addresses
from funcpipe.runtime.program import Bound
from funcpipe.runtime.steps import make_step
from funcpipe.runtime.stream import Channel, Edge, Place, Ticket
from funcpipe.schedules.memory import residual_peak


class Stop(SystemExit):
    """Unwinds a lane whose run is over. Never leaves this room."""


STOP = object()


class Lane:
    """A device at run time: its part of the order, its store, its inbox.

    Only the lane's own thread touches the store; other lanes put (value number, ticket) or (-1 - pool, event of
    a free slot) in the inbox.
    """

    def __init__(self, index: int, place: Place, num_pools: int) -> None:
        self.index, self.place = index, place
        self.order: list[tuple[int, int]] = []
        self.here: dict[int, Any] = {}
        self.coming: dict[int, Any] = {}
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.freed: list[list[Any]] = [[] for _ in range(num_pools)]
        self.sent = [0] * num_pools
        self.most = [0] * num_pools
        self.spans: list[tuple[int, int, int]] = []
        self.now = -1
        self.waits: int | None = None
        self.thread = 0

    def take(self) -> None:
        """Wait for one message and act on it."""
        message = self.inbox.get()
        if message is STOP:
            raise Stop
        number, payload = message
        if number >= 0:
            self.put(number, payload)
        else:
            self.freed[-1 - number].append(payload)

    def put(self, number: int, ticket: Ticket) -> None:
        """A value that is on its way; who reads it waits for it, not who comes before."""
        self.here[number] = ticket.value
        if ticket.event is not None:
            self.coming[number] = ticket.event


class Execution:
    """One run of a program: lanes, edges, and what each action does."""

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
        self.rows, self.count, self.late = program.rows, program.num_microbatches, program.late_frees
        self.slots = [pool.slots for pool in program.pools]
        self.sources = [pool.source for pool in program.pools]
        num_pools = len(program.pools)
        self.lanes = [Lane(i, place, num_pools) for i, place in enumerate(places)]
        hosts = self._hosts()
        self.steps = [
            make_step(row, program, plan.stages[row.stage], bounds[row.stage], hosts.get(row.lane))
            for row in program.rows
        ]
        self.part = (0, 0)
        self.edges: dict[tuple[int, int], Channel] = {
            (pool.source, pool.lane): Edge(
                None if pool.source == CALLER else places[pool.source], places[pool.lane], threaded=threaded
            )
            for pool in program.pools
        }
        self.threaded, self.timed = threaded, timed
        self.stopped = False

    def _hosts(self) -> dict[int, Host]:
        """The links of those lanes that move residuals."""
        moving = {row.lane for row in self.program.rows if row.kind is Kind.O}
        given = [leaf for value in self.caller.values() for leaf in value.leaves] if moving else []
        fixed = addresses(given)
        return {lane: Host(self.lanes[lane].place, self.lanes[lane].coming, fixed) for lane in moving}

    def aim(self, start: int, stop: int) -> None:
        """What runs next: the actions from one position of the plan order to another."""
        self.part = (start, stop)
        whole = (start, stop) == (0, len(self.program.order))
        for lane, order in zip(self.lanes, self.program.lanes, strict=True):
            lane.order = order if whole else [step for step in order if start <= step[0] < stop]

    def listening(self) -> AbstractContextManager[Any]:
        """What a walk is inside of: eager stages catch their draws, and each forward would else ask for them anew."""
        eager = any(stage.program is None for stage in self.plan.stages)
        return Catching() if eager else nullcontext()

    # -- one action --------------------------------------------------------------------------------------------------

    def perform(self, lane: Lane, position: int, code: int) -> None:
        """One action of a lane with everything around it."""
        lane.now = position
        count, here = self.count, lane.here
        index, microbatch = divmod(code, count)
        row, step = self.rows[index], self.steps[index]
        for wire, pool in row.fetches:
            self._fetch(lane, wire * count + microbatch, pool)
        reads: list[Any] = []
        for wire in row.reads:
            number = wire * count + microbatch
            while number not in here:
                self._wait(lane, number)
            reads.append(here[number])
            if lane.coming:
                lane.place.wait(lane.coming.pop(number, None))
        if self.timed:
            start = perf_counter_ns()
            results = step(reads, microbatch)
            lane.spans.append((code, start, perf_counter_ns()))
        else:
            results = step(reads, microbatch)
        for at, wire in enumerate(row.writes):
            here[wire * count + microbatch] = results[at]
        del reads, results  # else a value would outlive its free while this lane waits for a slot
        for wire, pool in row.frees:
            del here[wire * count + microbatch]
            if pool >= 0:
                self._credit(lane, pool)
        if position in self.late:
            for number, pool in self.late[position]:
                del here[number]
                if pool >= 0:
                    self._credit(lane, pool)
        for wire, to, pool in row.sends:
            self._send(lane, wire * count + microbatch, to, pool)
        for wire in row.drops:
            del here[wire * count + microbatch]

    # -- values between lanes ----------------------------------------------------------------------------------------

    def _fetch(self, lane: Lane, number: int, pool: int) -> None:
        need = self._count(lane, pool)
        ticket = self.edges[CALLER, lane.index].send(self.caller[number], lane.freed[pool][need] if need >= 0 else None)
        lane.put(number, ticket)

    def _send(self, lane: Lane, number: int, to: int, pool: int) -> None:
        need = lane.sent[pool] - self.slots[pool]
        freed = lane.freed[pool]
        while len(freed) <= need:  # every slot is taken: wait until the reader frees one
            self._wait(lane, -1 - pool)
        self._count(lane, pool)
        ticket = self.edges[lane.index, to].send(lane.here[number], freed[need] if need >= 0 else None)
        self.post(self.lanes[to], number, ticket)

    def _wait(self, lane: Lane, number: int) -> None:
        """Wait for one message; ``number`` says what for: a value, or -1 - pool for a slot."""
        if not self.threaded:
            raise FuncpipeError("internal error: a task came before what it waits for in plan order")
        lane.waits = number
        lane.take()
        lane.waits = None

    def _count(self, lane: Lane, pool: int) -> int:
        """One more value in a pool. Returns which of the slots' frees it follows, in order; below 0: none."""
        sent = lane.sent[pool] = lane.sent[pool] + 1
        live = sent - len(lane.freed[pool])
        if live > lane.most[pool]:
            lane.most[pool] = live
        return sent - 1 - self.slots[pool]

    def _credit(self, lane: Lane, pool: int) -> None:
        """A slot at this lane is free once the lane has done what it has queued: tell the sender."""
        source = self.sources[pool]
        event = lane.place.event() if lane.place.asynchronous else None
        if source == CALLER:
            lane.freed[pool].append(event)
        elif self.threaded:
            self.lanes[source].inbox.put((-1 - pool, event))
        else:
            self.lanes[source].freed[pool].append(event)

    def post(self, lane: Lane, number: int, ticket: Ticket) -> None:
        """Hand a value to a lane."""
        if self.threaded:
            lane.inbox.put((number, ticket))
        else:
            lane.put(number, ticket)

    # -- after the run -----------------------------------------------------------------------------------------------

    def where(self, lane: Lane) -> Where:
        """The coordinates of what the lane is doing."""
        code = self.program.order[lane.now] if lane.now >= 0 else self.program.order[0]
        row = self.program.rows[code // self.program.num_microbatches]
        action = self.program.action(code)
        phase = self.bounds[row.stage].phase
        word = f"{action} ({phase})" if phase else str(action)
        device = f"{lane.index} ({lane.place.device})"
        return Where(row.stage, self.plan.stages[row.stage].name, action.microbatch, word, device)

    def failure(self, lane: Lane, error: BaseException) -> BaseException:
        """What the run raises for an error of a lane: it knows where, and (out of memory) what to do."""
        found = located(error, self.where(lane))
        if _out_of_memory(error):
            held = [value for number, value in lane.here.items() if self._role(number) is Role.RESIDUAL]
            schedule = self.plan.schedule.first(self.count)
            most = residual_peak(schedule.orders[lane.index], schedule)
            size = sum(value.nbytes for value in held) / 2**20
            found.__dict__.setdefault("__notes__", []).append(
                f"device {lane.index} holds {len(held)} residuals (the schedule's most is {most:g}) with {size:.1f} MiB at "
                f"their borders{_free(lane.place.device)}; to hold less: more microbatches of fewer rows, "
                "fp.remat(schedule) or fp.offload(schedule), or a schedule that holds fewer (fp.one_f_one_b)"
            )
        return found

    def _role(self, number: int) -> Role:
        return self.program.wires[number // self.count].role

    def collect(self, role: Role) -> dict[tuple[int, int], Any]:
        """What the caller takes, by (stage, microbatch); it leaves the stores."""
        out: dict[tuple[int, int], Any] = {}
        count = self.program.num_microbatches
        for number, wire in enumerate(self.program.wires):
            if wire.role is role:
                for lane in self.lanes:
                    for microbatch in range(count):
                        value = lane.here.pop(number * count + microbatch, None)
                        if value is not None:
                            out[wire.stage, microbatch] = value
        return out

    def check_empty(self) -> None:
        """Every value was freed: the plan's liveness and what ran agree."""
        left = [str(self.program.value(number)) for lane in self.lanes for number in lane.here]
        if left:
            raise FuncpipeError(f"internal error: values left in the stores: {left}")

    def timeline(self) -> Timeline:
        """The measured spans, in seconds from the first start."""
        first = min((lane.spans[0][1] for lane in self.lanes if lane.spans), default=0)
        spans = [
            Span(lane.index, (start - first) / 1e9, (end - first) / 1e9, self.program.action(code))
            for lane in self.lanes
            for code, start, end in lane.spans
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
        return tuple(max(lane.most[pool] for lane in self.lanes) for pool in range(len(self.program.pools)))


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
    lanes, program = execution.lanes, execution.program
    lane_of = [row.lane for row in program.rows]
    count = program.num_microbatches
    lane = lanes[0]
    for one in lanes:
        one.thread = threading.get_ident()
    RUNNING.set(lambda: execution.where(lane))  # whoever began the run sets it back
    with no_autocast_cache(), torch.autograd.set_multithreading_enabled(False), execution.listening():
        try:
            start, stop = execution.part
            for position in range(start, stop):
                code = program.order[position]
                lane = lanes[lane_of[code // count]]
                if lane.place.asynchronous:
                    with lane.place.active():
                        execution.perform(lane, position, code)
                else:
                    execution.perform(lane, position, code)
        except BaseException as error:  # in here: context managers write to the exceptions that they see
            raise_located([(lane.now, execution.failure(lane, error))])


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
