"""Simulate lane programs with given costs: one loop over the instructions in plan order.

`schedules/clock.py` is faster, but has no slots and no memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from funcpipe._src.core.errors import FuncpipeError
from funcpipe._src.data.cost import Cost, per_stage
from funcpipe._src.data.kinds import (
    BY_SIZE,
    KINDS,
    MOVES,
    WHOLE,
    WITHOUT_BACKWARD,
    Kind,
    Resource,
    Scope,
)
from funcpipe._src.data.lowered import Lowered
from funcpipe._src.data.program import (
    CALLER,
    Free,
    Instruction,
    LaneProgram,
    Receive,
    Role,
    Run,
    Send,
)
from funcpipe._src.data.result import Span
from funcpipe._src.data.schedule import Action
from funcpipe._src.schedules.memory import residual_table


class Moment(NamedTuple):
    """A time, and the action whose end set it; None: no action."""

    time: float
    cause: Action | None


BEGIN = Moment(0.0, None)
_ALL = 1.0, 1.0  # the shares of time and memory of an action for all microbatches together


def _latest(moments: Sequence[Moment]) -> Moment:
    """Return the latest moment; the first in the sequence if several are equal."""
    return max(moments, key=lambda moment: moment.time)


@dataclass
class LaneTimes:
    """The simulated state of one lane."""

    program: LaneProgram  # the program of the lane
    now: Moment = BEGIN  # the time until which the lane computes or sends
    # The time until which each of its links is busy.
    links: dict[Resource, Moment] = field(default_factory=lambda: defaultdict(lambda: BEGIN))
    # By slot, the time when its value can be read, if this may be later than ``now``.
    ready: dict[int, Moment] = field(default_factory=dict[int, Moment])
    # By stage, the time when its parameters are gathered.
    gathered: dict[int, Moment] = field(default_factory=lambda: defaultdict(lambda: BEGIN))
    begun: int = 0  # the number of actions that the loop has passed
    spans: list[Span] = field(default_factory=list[Span])  # the spans of the actions, in order
    # The changes of memory as (time, rank among the changes of one time, difference).
    changes: list[tuple[float, float, float]] = field(
        default_factory=list[tuple[float, float, float]]
    )


_LAST = float("inf")
"""The rank of changes by values that arrive or are made: after all changes by actions at that
time."""


class Play:
    """The simulation of a program with a cost.

    In plan order, a value is sent before it is read, and a slot is freed before it is filled again.
    So one loop in plan order knows each time as soon as an instruction needs it, and no lane has to
    be suspended.

    A value occupies the link between its two lanes for its size divided by the bandwidth, one value
    after the other. It can be read one latency later. With ``bounded``, a lane that sends waits
    until the slot at the other end is free, and learns of it one latency late. O, L, G and U occupy
    a link of the lane (G and U the same link), and the lane works on.

    Args:
        program: the program.
        cost: times and memory.
        bounded: whether slots are limited to those of the program.

    Attributes:
        lanes: the state of each lane.
        causes: for each action, the action whose end set its start; None: it started at 0.
    """

    def __init__(self, program: Lowered, cost: Cost, *, bounded: bool) -> None:
        self.program, self.cost, self.bounded = program, cost, bounded
        self.lanes = [LaneTimes(lane) for lane in program.lanes]
        self.causes: dict[Action, Action | None] = {}
        self.backward = any(call.kind not in WITHOUT_BACKWARD for call in program.calls)
        self.durations = {
            (call.kind, call.stage): cost.of(call.kind, call.stage) for call in program.calls
        }
        self.shares = cost.piece_shares(program.num_microbatches, program.num_slices)
        """For each piece, its share of a microbatch's time and memory."""
        self.residuals = residual_table(cost, program.num_stages)
        self.crossings = crossings(program, cost)
        self.links: dict[tuple[int, int], float] = defaultdict(float)
        """The time until which the link from one lane to another is busy."""
        self.free = {end: BEGIN for lane in program.lanes for end in lane.outgoing}
        """The free (lane, slot), with the time when their sender learns of it."""

    def run(self) -> None:
        """Run all instructions, in linear time. Raises FuncpipeError if an instruction waits for a
        later instruction. `make_plan` does not make such programs."""
        for number, instruction, values in self.program.walk():
            self.step(self.lanes[number], instruction, values)

    def step(self, lane: LaneTimes, instruction: Instruction, values: Mapping[int, int]) -> None:
        """Run one instruction of a lane; ``values`` are the value numbers in its slots."""
        if type(instruction) is Run:
            self._run(lane, instruction, values)
        elif type(instruction) is Receive:
            if instruction.source != CALLER and instruction.slot not in lane.ready:
                value = self.program.value(instruction.value)
                raise _endless(lane, f"{value}, which is not sent before")
        elif type(instruction) is Send:
            self._send(lane, instruction, values[instruction.slot])
        elif type(instruction) is Free:
            self._free(lane, instruction, values)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans of all actions, ordered by start and device."""
        spans = (span for lane in self.lanes for span in lane.spans)
        return tuple(sorted(spans, key=lambda span: (span.start, span.device)))

    @property
    def critical_path(self) -> tuple[Action, ...]:
        """The chain of actions that ends with the last action, each waiting for the one before."""
        last = max(self.spans, key=lambda span: span.end, default=None)
        action = None if last is None else last.action
        path: list[Action] = []
        while action is not None:
            path.append(action)
            action = self.causes[action]
        return tuple(reversed(path))

    def _run(self, lane: LaneTimes, run: Run, values: Mapping[int, int]) -> None:
        """Run an action. The first action of a pair begins both."""
        at, program = lane.begun, lane.program
        lane.begun = at + 1
        if at == len(lane.spans):
            self._begin(lane, program.runs[at : at + 1 + (at in program.pairs)])
        for slot in run.writes:
            size, _ = self._crossing(values[slot], program.lane)
            if size:
                lane.changes.append((lane.spans[at].end, _LAST, size))

    def _begin(self, lane: LaneTimes, runs: Sequence[Run]) -> None:
        """Set the times of an action, or of both actions of a pair."""
        actions = [lane.program.action(run) for run in runs]
        shares = [*map(self._share, actions)]
        kind, stage = actions[0].kind, actions[0].stage
        needs = [lane.now, *(lane.ready.pop(slot, lane.now) for run in runs for slot in run.reads)]
        if kind in MOVES:
            row, (time, size) = KINDS[kind], shares[0]
            since = _latest([*needs, lane.links[row.resource]])
            share = size if kind in BY_SIZE else time
            done = Moment(since.time + self.durations[kind, stage] * share, actions[0])
            lane.links[row.resource] = done
            lane.ready |= dict.fromkeys(runs[0].writes, done)
            if row.scope is Scope.RUN:
                lane.gathered[stage] = done
        else:
            since = _latest([*needs, *(lane.gathered[action.stage] for action in actions)])
            if len(actions) == 1:
                duration = self.durations[kind, stage] * shares[0][0]
            else:
                one, other = (
                    (*action[:2], time) for action, (time, _) in zip(actions, shares, strict=True)
                )
                duration = self.cost.both(one, other)
            done = lane.now = Moment(since.time + duration, actions[-1])
        for run, action, (_, share) in zip(runs, actions, shares, strict=True):
            self.causes[action] = since.cause
            span = Span(lane.program.lane, since.time, done.time, action)
            self._hold(lane, span, run, share, is_first=action != actions[-1])

    def _share(self, action: Action) -> tuple[float, float]:
        """Return the share of an action in the time and the memory of a microbatch."""
        if action.kind in WHOLE:
            return _ALL
        return self.shares[action.microbatch * self.program.num_slices + (action.slice or 0)]

    def _hold(self, lane: LaneTimes, span: Span, run: Run, share: float, *, is_first: bool) -> None:
        """Record the span of an action, and the residuals that it takes and frees.

        The first action of a pair frees after the second.
        """
        at, (kind, stage, _, _) = len(lane.spans), span.action
        lane.spans.append(span)
        if not self.backward:
            lane.changes.append((span.start, 2.0 * at, 0.0))
            return
        takes, frees = self.residuals[kind]
        if takes[stage] and lane.program.calls[run.call].keeps:
            lane.changes.append((span.start, 2.0 * at, takes[stage] * share))
        if frees[stage]:
            lane.changes.append((span.end, 2.0 * (at + is_first) + 1, -frees[stage] * share))

    def _send(self, lane: LaneTimes, send: Send, value: int) -> None:
        end = send.to, send.into
        if end not in self.free:
            raise _endless(lane, f"slot {send.into} of lane {send.to}, which is not freed before")
        # Plan order frees a slot before it is filled again, so the slot must be in `free`.
        free = self.free.pop(end)
        if self.bounded:
            lane.now = _latest([lane.now, free])
        size, latency = self._crossing(value, send.to)
        # Values on one directed link cross one after the other.
        crossed = lane.now.time
        if size and self.cost.bandwidth:
            way = lane.program.lane, send.to
            crossed = self.links[way] = max(crossed, self.links[way]) + size / self.cost.bandwidth
        receiver = self.lanes[send.to]
        receiver.ready[send.into] = Moment(crossed + latency, lane.now.cause)
        if size:
            receiver.changes.append((crossed, _LAST, size))

    def _free(self, lane: LaneTimes, free: Free, values: Mapping[int, int]) -> None:
        """Free slots, and the memory of values between stages.

        A value's memory ends at the start of its reader if it becomes part of the reader's
        residual, else at the reader's end.
        """
        program = lane.program
        for slot in free.slots:
            size, latency = self._crossing(values[slot], program.lane)
            if program.sources[slot] not in (None, CALLER):
                self.free[program.lane, slot] = Moment(lane.now.time + latency, lane.now.cause)
            if size:
                # The actions of a pair free together, so the reader is one of the last two actions.
                at = next(
                    at for at in (lane.begun - 1, lane.begun - 2) if slot in program.runs[at].reads
                )
                run, span = program.runs[at], lane.spans[at]
                kept = any(program.slots[slot].role is Role.RESIDUAL for slot in run.writes)
                time, rank = (span.start, 2.0 * at) if kept else (span.end, 2.0 * at + 1)
                lane.changes.append((time, rank, -size))

    def _crossing(self, value: int, lane: int) -> tuple[float, float]:
        """Return the size of a value that a lane receives from another stage, and its latency."""
        wire, piece = divmod(value, self.program.num_pieces)
        size, latency = self.crossings[wire, lane]
        return size * self.shares[piece][1], latency


def _endless(lane: LaneTimes, what: str) -> FuncpipeError:
    return FuncpipeError(
        f"this program cannot come to its end: lane {lane.program.lane} waits for {what}"
    )


def crossings(program: Lowered, cost: Cost) -> Mapping[tuple[int, int], tuple[float, float]]:
    """Return, by (wire, lane), the size and the latency of values from other stages; 0 for
    others."""
    skips, outputs = _skip_sizes(program, cost), per_stage(cost.output, program.num_stages)
    out: dict[tuple[int, int], tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for call in program.calls:
        for wire, _ in call.reads:
            role, stage, name, peer = program.wires[wire]
            makers = {Role.ACT: stage, Role.GRAD: stage + 1, Role.SKIP: stage, Role.SKIP_GRAD: peer}
            if role not in makers:
                continue
            source = makers[role]
            stash, pop = sorted((source, call.stage))
            is_skip = role in (Role.SKIP, Role.SKIP_GRAD)
            size = skips.get((stash, pop, name), 0.0) if is_skip else outputs[stage]
            most, slowest = out[wire, call.lane]
            out[wire, call.lane] = max(most, size), max(slowest, cost.latency(source, call.stage))
    return out


def _skip_sizes(program: Lowered, cost: Cost) -> dict[tuple[int, int, str], float]:
    """Match the skips of the cost, which have no names, to the skips of the program, in order.

    If the numbers of skips between two stages differ, each skip gets an equal share of the total.
    Returns sizes by (stash, pop, name).
    """
    names: dict[tuple[int, int], dict[str, None]] = defaultdict(dict)
    sizes: dict[tuple[int, int], list[float]] = defaultdict(list)
    for call in program.calls:
        for wire, _ in call.reads if call.kind is Kind.F else ():
            role, stash, name, _ = program.wires[wire]
            if role is Role.SKIP:
                names[stash, call.stage][name] = None
    for stash, pop, size in cost.skips:
        sizes[stash, pop].append(size)
    out: dict[tuple[int, int, str], float] = {}
    for pair, between in names.items():
        each = sizes[pair]
        if len(each) != len(between):
            each = [sum(each) / len(between)] * len(between)
        out |= {(*pair, name): size for name, size in zip(between, each, strict=True)}
    return out
