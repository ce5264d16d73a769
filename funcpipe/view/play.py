"""Lane programs by the clock: every lane does its instructions as early as it can, under given costs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from funcpipe.core.cost import Cost, per_stage
from funcpipe.core.lowered import Lowered
from funcpipe.core.program import CALLER, Free, LaneProgram, Receive, Role, Run, Send
from funcpipe.core.schedule import Action, Kind
from funcpipe.schedules.memory import residual_table


@dataclass
class Lane:
    """How far a lane is.

    Attributes:
        program: what it does.
        at: its next instruction.
        now: until when it is busy.
        wires: by slot, what lies there.
        ready: by slot, from when on that can be read.
        links: until when the link to its host is busy, and that from it.
        spans: (action, start, end).
        changes: of the memory that it holds: (when, its place among those of one time, by how much).
    """

    program: LaneProgram
    at: int = 0
    now: float = 0.0
    wires: dict[int, int] = field(default_factory=dict[int, int])
    ready: dict[int, float] = field(default_factory=dict[int, float])
    links: list[float] = field(default_factory=lambda: [0.0, 0.0])
    spans: list[tuple[Action, float, float]] = field(default_factory=list[tuple[Action, float, float]])
    changes: list[tuple[float, float, float]] = field(default_factory=list[tuple[float, float, float]])


class Play:
    """All lanes of a program under a cost.

    A value that is sent occupies the link between its two lanes for its size over the bandwidth, one value after the
    other, and can be read the latency later. Who reads it waits. With ``bounded`` a lane also waits until the slot into
    which it sends is free. O and L occupy the link between a lane and its host, one for each way; the lane goes on.

    Args:
        lowered: a program.
        cost: times and memory.
        bounded: are there only as many slots as the program has.
    """

    def __init__(self, lowered: Lowered, cost: Cost, *, bounded: bool) -> None:
        self.lowered, self.cost, self.bounded = lowered, cost, bounded
        self.lanes = [Lane(program) for program in lowered.lanes]
        self.backward = any(call.kind is not Kind.F for call in lowered.calls)
        self.residuals = residual_table(cost, lowered.num_stages)
        self.outputs = per_stage(cost.output, lowered.num_stages)
        self.skips = {(skip.stash, skip.pop): skip.size for skip in cost.skips}
        self.sizes: dict[tuple[int, int], tuple[float, float]] = {}
        """Of a wire that stages on a lane read."""
        self.links: dict[tuple[int, int], float] = defaultdict(float)
        self.arrivals: dict[tuple[int, int], deque[float]] = defaultdict(deque)
        """When what was sent into a slot can be read."""
        self.free = {end: 0.0 for lane in self.lanes for end in lane.program.outgoing}
        """From when on a slot is free, of those that are."""
        self.waits: dict[Hashable, int] = {}
        """Which lane waits for what."""

    def run(self) -> None:
        """All lanes to their ends. Linear: a lane that waits is woken by the very thing that it waits for."""
        awake = list(range(len(self.lanes)))[::-1]
        while awake:
            number = awake.pop()
            lane = self.lanes[number]
            while lane.at < len(lane.program.instructions):
                wanted = self._step(number, lane, awake)
                if wanted is not None:
                    self.waits[wanted] = number
                    break
                lane.at += 1

    def _step(self, number: int, lane: Lane, awake: list[int]) -> Hashable:
        """Do the next instruction of a lane, or return what it has to wait for. Lanes that waited for it are awake."""
        instruction = lane.program.instructions[lane.at]
        if type(instruction) is Run:
            self._run(number, lane, instruction)
        elif type(instruction) is Receive:
            value, source, slot = instruction
            lane.wires[slot] = value // self.lowered.num_microbatches
            if source != CALLER:
                if not self.arrivals[number, slot]:
                    return "arrival", number, slot
                lane.ready[slot] = self.arrivals[number, slot].popleft()
        elif type(instruction) is Send:
            _, to, into = instruction
            if self.bounded:
                if (to, into) not in self.free:
                    return "free", to, into
                lane.now = max(lane.now, self.free.pop((to, into)))
            self._send(number, lane, instruction)
            self._wake(("arrival", to, into), awake)
        elif type(instruction) is Free:
            for slot in instruction.slots:
                self._leave(number, lane, slot)
                if lane.program.sources[slot] not in (None, CALLER):
                    self.free[number, slot] = lane.now
                    self._wake(("free", number, slot), awake)
        return None

    def _wake(self, thing: Hashable, awake: list[int]) -> None:
        waiter = self.waits.pop(thing, None)
        if waiter is not None:
            awake.append(waiter)

    def _run(self, number: int, lane: Lane, run: Run) -> None:
        """One action: when it starts, what it takes and frees."""
        call = lane.program.calls[run.call]
        kind, stage = call.kind, call.stage
        start = max([lane.now, *(lane.ready.pop(slot, 0.0) for slot in run.reads)])
        if kind in (Kind.O, Kind.L):
            way = kind is Kind.L
            start = max(start, lane.links[way])
            end = lane.links[way] = start + self.cost.of(kind, stage)
            lane.ready[run.writes[0]] = end
        else:
            end = lane.now = start + self.cost.of(kind, stage)
        place = 2.0 * len(lane.spans)
        lane.spans.append((lane.program.action(run), start, end))
        takes, frees = self.residuals[kind]
        taken = takes[stage] if kind is not Kind.F or call.keeps else 0.0
        if taken or not self.backward:
            lane.changes.append((start, place, taken if self.backward else 0.0))
        if self.backward and frees[stage]:
            lane.changes.append((end, place + 1, -frees[stage]))
        for wire, slot in zip(call.writes, run.writes, strict=True):
            lane.wires[slot] = wire
            size, _ = self._crossing(wire, number)
            if size:
                lane.changes.append((end, float("inf"), size))

    def _send(self, number: int, lane: Lane, send: Send) -> None:
        slot, to, into = send
        size, latency = self._crossing(lane.wires[slot], to)
        crossed = lane.now
        if size and self.cost.bandwidth:
            crossed = self.links[number, to] = max(crossed, self.links[number, to]) + size / self.cost.bandwidth
        self.arrivals[to, into].append(crossed + latency)
        if size:
            self.lanes[to].changes.append((crossed, float("inf"), size))

    def _leave(self, number: int, lane: Lane, slot: int) -> None:
        """What one stage handed to another goes: into the residual, or when the action that read it ends."""
        size, _ = self._crossing(lane.wires[slot], number)
        if size:
            _, start, end = lane.spans[-1]
            place = 2.0 * (len(lane.spans) - 1)
            run = next(one for one in lane.program.parts[len(lane.spans) - 1] if type(one) is Run)
            kept = any(lane.program.slots[written].role is Role.RESIDUAL for written in run.writes)
            lane.changes.append((start, place, -size) if kept else (end, place + 1, -size))

    def _crossing(self, wire: int, lane: int) -> tuple[float, float]:
        """The size of a value that stages on a lane get of others, and its latency; of all others and elsewhere 0."""
        found = self.sizes.get((wire, lane))
        if found is None:
            role, stage, _, peer = self.lowered.wires[wire]
            readers = {
                call.stage for call in self.lowered.calls if call.lane == lane for one, _ in call.reads if one == wire
            }
            sizes, latencies = [0.0], [0.0]
            for reader in readers if role in _HANDED else ():
                source = stage if role in (Role.ACT, Role.SKIP) else peer if role is Role.SKIP_GRAD else stage + 1
                pair = min(source, reader), max(source, reader)
                neighbours = role in (Role.ACT, Role.GRAD)
                sizes.append(self.outputs[stage] if neighbours else self.skips.get(pair, 0.0))
                latencies.append(self.cost.latency(source, reader))
            found = self.sizes[wire, lane] = max(sizes), max(latencies)
        return found


_HANDED = frozenset({Role.ACT, Role.GRAD, Role.SKIP, Role.SKIP_GRAD})
"""What one stage hands to another."""
