"""An oracle for `simulate`: lanes that run as far as they can, sleep, and are woken by what they
wait for."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from funcpipe._src.core.errors import FuncpipeError
from funcpipe._src.data.cost import Cost
from funcpipe._src.data.kinds import COUNTED, KINDS, LINKS, MOVES, WHOLE, Kind
from funcpipe._src.data.lowered import Lowered
from funcpipe._src.data.program import CALLER, Free, LaneProgram, Receive, Role, Run, Send
from funcpipe._src.data.result import Span
from funcpipe._src.data.schedule import Action
from funcpipe._src.schedules.memory import residual_table
from funcpipe._src.view.play import crossings


class Since(NamedTuple):
    """From when on something is, and the action whose end (and way) that is; None: nobody's."""

    time: float
    cause: Action | None


BEGIN = Since(0.0, None)
_ALL = 1.0, 1.0
_time = attrgetter("time")


@dataclass
class SleepingLane:
    """How far a lane is.

    Attributes:
        program: what it does.
        at: its next instruction.
        begun: how many of its actions have begun, of two that overlap one after the other.
        now: until when it is busy.
        values: by slot, the number of what lies there.
        ready: by slot, from when on that can be read.
        links: until when each of `LINKS` is busy: to the host, from it, to other replicas.
        whole: by stage, from when on its parameters are gathered.
        spans: of its actions, in order.
        changes: of the memory that it holds: (when, its place among those of one time, by how
            much).
    """

    program: LaneProgram
    at: int = 0
    begun: int = 0
    now: Since = BEGIN
    values: dict[int, int] = field(default_factory=dict[int, int])
    ready: dict[int, Since] = field(default_factory=dict[int, Since])
    links: list[Since] = field(default_factory=lambda: [BEGIN] * len(LINKS))
    whole: dict[int, Since] = field(default_factory=dict[int, Since])
    spans: list[Span] = field(default_factory=list[Span])
    changes: list[tuple[float, float, float]] = field(
        default_factory=list[tuple[float, float, float]]
    )


class EventPlay:
    """All lanes of a program under a cost.

    A value that is sent occupies the link between its two lanes for its size over the bandwidth,
    one value after the other, and can be read the latency later. Who reads it waits. With
    ``bounded`` a lane also waits until the slot into which it sends is free and it has heard of
    that, the latency later. O, L, G and U occupy a link of the lane (G and U the same); the lane
    goes on.

    Args:
        lowered: a program.
        cost: times and memory.
        bounded: are there only as many slots as the program has.

    Attributes:
        causes: for each action the one that let it start when it did; None: it started at 0.
    """

    def __init__(self, lowered: Lowered, cost: Cost, *, bounded: bool) -> None:
        self.lowered, self.cost, self.bounded = lowered, cost, bounded
        self.lanes = [SleepingLane(program) for program in lowered.lanes]
        self.causes: dict[Action, Action | None] = {}
        self.backward = any(call.kind not in (Kind.F, *COUNTED) for call in lowered.calls)
        self.durations = {
            (call.kind, call.stage): cost.of(call.kind, call.stage) for call in lowered.calls
        }
        slices = cost.slice_shares(lowered.num_slices)
        self.shares = {
            (microbatch, number): (factor * time, memory * size)
            for microbatch, (factor, memory) in enumerate(cost.factors(lowered.num_microbatches))
            for number, (time, size) in enumerate(slices)
        }
        """Of the time and of the memory of a microbatch of factor 1, by microbatch and slice."""
        self.residuals = residual_table(cost, lowered.num_stages)
        self.crossings = crossings(lowered, cost)
        self.links: dict[tuple[int, int], float] = defaultdict(float)
        self.arrivals: dict[tuple[int, int], deque[Since]] = defaultdict(deque)
        """When what was sent into a slot can be read."""
        self.free = {end: BEGIN for lane in self.lanes for end in lane.program.outgoing}
        """From when on a slot is free, of those that are."""
        self.waits: dict[Hashable, int] = {}
        """Which lane waits for what."""

    def run(self) -> None:
        """All lanes to their ends. Linear: a lane that waits is woken by the very thing that it
        waits for.

        Raises:
            FuncpipeError: they wait for each other; `make_plan` makes no such program.
        """
        awake = list(range(len(self.lanes)))[::-1]
        while awake:
            number = awake.pop()
            lane = self.lanes[number]
            instructions = lane.program.instructions
            while lane.at < len(instructions):
                awaited = self._step(number, lane, awake)
                if awaited is not None:
                    self.waits[awaited] = number
                    break
                lane.at += 1
        waiting = [
            number
            for number, lane in enumerate(self.lanes)
            if lane.at < len(lane.program.instructions)
        ]
        if waiting:
            raise FuncpipeError(
                f"this program cannot come to its end: lanes {waiting} wait for each other"
            )

    @property
    def critical_path(self) -> tuple[Action, ...]:
        """The chain of actions, each starting when the one before lets it, that ends with the last
        action."""
        spans = sorted(
            (span for lane in self.lanes for span in lane.spans),
            key=lambda span: (span.start, span.device),
        )
        action = max(spans, key=lambda span: span.end).action if spans else None
        path: list[Action] = []
        while action is not None:
            path.append(action)
            action = self.causes[action]
        return tuple(reversed(path))

    def _step(self, number: int, lane: SleepingLane, awake: list[int]) -> Hashable:
        """Do the next instruction of a lane, or return what it has to wait for. Lanes that waited
        for it are awake."""
        instruction = lane.program.instructions[lane.at]
        if type(instruction) is Run:
            self._run(number, lane, instruction)
        elif type(instruction) is Receive:
            value, source, slot = instruction
            lane.values[slot] = value
            if source != CALLER:
                if not self.arrivals[number, slot]:
                    return "arrival", number, slot
                lane.ready[slot] = self.arrivals[number, slot].popleft()
        elif type(instruction) is Send:
            _, to, into = instruction
            if self.bounded:
                if (to, into) not in self.free:
                    return "free", to, into
                lane.now = max(lane.now, self.free.pop((to, into)), key=_time)
            self._send(number, lane, instruction)
            self._wake(("arrival", to, into), awake)
        elif type(instruction) is Free:
            for slot in instruction.slots:
                self._leave(number, lane, slot)
                if lane.program.sources[slot] not in (None, CALLER):
                    _, latency = self._crossing(lane.values[slot], number)
                    self.free[number, slot] = Since(
                        lane.now.time + latency, lane.now.cause
                    )  # that news travels too
                    self._wake(("free", number, slot), awake)
        return None

    def _wake(self, event: Hashable, awake: list[int]) -> None:
        waiter = self.waits.pop(event, None)
        if waiter is not None:
            awake.append(waiter)

    def _run(self, number: int, lane: SleepingLane, run: Run) -> None:
        """One action. With the first of two that overlap both begin; all that the second reads has
        come by then."""
        at = lane.begun
        lane.begun = at + 1
        if at in lane.program.pairs:
            self._begin(number, lane, run, lane.program.runs[at + 1])
        elif at == len(lane.spans):
            self._begin(number, lane, run)
        end = lane.spans[at].end
        for wire, slot in zip(lane.program.calls[run.call].writes, run.writes, strict=True):
            lane.values[slot] = wire * self.lowered.num_pieces + run.microbatch
            size, _ = self._crossing(lane.values[slot], number)
            if size:
                lane.changes.append((end, float("inf"), size))

    def _begin(self, number: int, lane: SleepingLane, run: Run, beside: Run | None = None) -> None:
        """When an action, with another one beside it or alone, starts and ends, and what it takes
        and frees."""
        action, since = lane.program.action(run), lane.now
        kind, stage, microbatch, piece = action
        time, part = self.shares[microbatch, piece or 0] if kind not in WHOLE else _ALL
        for slot in run.reads if beside is None else run.reads + beside.reads:
            ready = lane.ready.pop(slot, since)
            if ready[0] > since[0]:
                since = ready
        if kind in MOVES:
            way = LINKS.index(KINDS[kind].resource)
            since = max(since, lane.links[way], key=_time)
            end = since.time + self.durations[kind, stage] * (
                part if kind in (Kind.O, Kind.L) else time
            )
            lane.links[way] = Since(end, action)
            if run.writes:
                lane.ready[run.writes[0]] = lane.links[way]
            if kind in WHOLE:
                lane.whole[stage] = lane.links[way]
        elif beside is None:
            since = max(since, lane.whole.get(stage, BEGIN), key=_time)
            end = since.time + self.durations[kind, stage] * time
            lane.now = Since(end, action)
        else:
            other = lane.program.action(beside)
            since = max(
                since, *(lane.whole.get(one.stage, BEGIN) for one in (action, other)), key=_time
            )
            halves = (
                (kind, stage, time),
                (other.kind, other.stage, self.shares[other.microbatch, other.slice or 0][0]),
            )
            end = since.time + self.cost.both(*halves)
            lane.now = Since(end, other)
        self._hold(number, lane, run, action, part, since, end, both=beside is not None)
        if beside is not None:
            other = lane.program.action(beside)
            size = self.shares[other.microbatch, other.slice or 0][1]
            self._hold(number, lane, beside, other, size, since, end)

    def _hold(
        self,
        number: int,
        lane: SleepingLane,
        run: Run,
        action: Action,
        part: float,
        since: Since,
        end: float,
        *,
        both: bool = False,
    ) -> None:
        """The span of an action, and what it takes and frees, of which it has a part: that of its
        slice.

        The first of ``both`` frees with the second.
        """
        kind, stage = action.kind, action.stage
        self.causes[action] = since.cause
        place = 2.0 * len(lane.spans)
        lane.spans.append(Span(number, since.time, end, action))
        takes, frees = self.residuals[kind]
        taken = (
            takes[stage] * part if kind is not Kind.F or lane.program.calls[run.call].keeps else 0.0
        )
        if taken or not self.backward:
            lane.changes.append((since.time, place, taken if self.backward else 0.0))
        if self.backward and frees[stage]:
            lane.changes.append((end, place + 1 + 2 * both, -frees[stage] * part))

    def _crossing(self, value: int, lane: int) -> tuple[float, float]:
        """The size of a value that a lane gets of others, and its latency."""
        wire, piece = divmod(value, self.lowered.num_pieces)
        size, latency = self.crossings[wire, lane]
        at = divmod(piece, self.lowered.num_slices)
        return (size * self.shares[at][1] if size else size), latency

    def _send(self, number: int, lane: SleepingLane, send: Send) -> None:
        slot, to, into = send
        size, latency = self._crossing(lane.values[slot], to)
        crossed = lane.now.time
        if size and self.cost.bandwidth:
            crossed = self.links[number, to] = (
                max(crossed, self.links[number, to]) + size / self.cost.bandwidth
            )
        self.arrivals[to, into].append(Since(crossed + latency, lane.now.cause))
        if size:
            self.lanes[to].changes.append((crossed, float("inf"), size))

    def _leave(self, number: int, lane: SleepingLane, slot: int) -> None:
        """What one stage handed to another goes: into the residual, or when the action that read it
        ends."""
        size, _ = self._crossing(lane.values[slot], number)
        if size:
            # Of two that overlap, and free together, the one that read it.
            at = next(
                at for at in (lane.begun - 1, lane.begun - 2) if slot in lane.program.runs[at].reads
            )
            _, start, end, _ = lane.spans[at]
            kept = any(
                lane.program.slots[written].role is Role.RESIDUAL
                for written in lane.program.runs[at].writes
            )
            lane.changes.append((start, 2.0 * at, -size) if kept else (end, 2.0 * at + 1, -size))
