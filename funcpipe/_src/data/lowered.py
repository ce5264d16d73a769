"""The program of a whole plan: stored in a short form, and expanded lane by lane on demand.

`program.py` has the instructions, `lower/program.py` makes the short form from stages and schedule.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeVar

from funcpipe._src.core.remembered import declared_fields
from funcpipe._src.core.shown import guarded, line
from funcpipe._src.data.kinds import COUNTED, ONCE
from funcpipe._src.data.program import (
    CALLER,
    FROM,
    Call,
    Free,
    Instruction,
    LaneProgram,
    Pool,
    Receive,
    Role,
    Run,
    Send,
    Slot,
    Value,
    Wire,
    value_of,
)
from funcpipe._src.data.schedule import Action, action_of

TAKEN = frozenset({Role.REPORT, Role.OUTPUT, Role.INPUT_GRAD, Role.CARRY_OUT, Role.SUMS})
"""The roles of values that the caller takes at the end.

No action frees such a value, not even an action that reads it.
"""


@dataclass(frozen=True)
class Lowered:
    """The program of a plan: integers and names, no functions. Compares, hashes and pickles."""

    # `num_stages`, `num_microbatches`, `num_slices`, `num_lanes`: the counts; the slices are per
    # microbatch.
    num_stages: int
    num_microbatches: int
    num_slices: int
    num_lanes: int
    wires: tuple[Wire, ...]  # the meaning of the wire numbers
    calls: tuple[Call, ...]  # the actions of the order, without their microbatches
    # The code ``call * num_pieces + piece`` of each action, in plan order. One thread can run all
    # actions in this order, and each lane follows it for its own actions. An array, because a plan
    # may have millions of actions.
    order: array[int] = field(hash=False)
    pools: tuple[Pool, ...]  # the slots between lanes
    # The codes of the actions that overlap with their successor in the order.
    pairs: frozenset[int] = frozenset()

    __getstate__ = declared_fields

    @guarded
    def __repr__(self) -> str:
        counts = {"stages": self.num_stages, "pieces": self.num_pieces, "lanes": self.num_lanes}
        counts |= {
            "actions": len(self.order),
            "wires": len(self.wires),
            "slots between lanes": self._slots(),
        }
        return line("Lowered", [("", f"{count} {word}") for word, count in counts.items()])

    def _slots(self) -> int:
        return sum(pool.slots for pool in self.pools)

    @cached_property
    def num_pieces(self) -> int:
        """The number of pieces: all slices, or microbatches if they are not cut."""
        return self.num_microbatches * self.num_slices

    def value(self, number: int) -> Value:
        """Return the value with a number."""
        return value_of(self.wires, number, self.num_pieces, self.num_slices)

    def action(self, code: int) -> Action:
        """Return the action with a code of the order."""
        number, piece = divmod(code, self.num_pieces)
        call = self.calls[number]
        return action_of(call.kind, call.stage, call.first + piece, self.num_slices)

    def first(self, num_microbatches: int) -> Lowered:
        """Return the program without the actions of later microbatches; the order stays.

        Counted actions (U) keep their numbers, even if no remaining action needs them, because
        replicas with more microbatches run the same U and must meet. (`Schedule.first` drops unused
        U.) Pools need no more slots than for all microbatches, so their sizes stay.
        """
        before, count = self.num_pieces, num_microbatches * self.num_slices
        limits = [num_microbatches if call.kind in ONCE else count for call in self.calls]
        calls, turns = _renumbered(self.calls, before, count)

        def kept(code: int) -> int | None:
            number, piece = divmod(code, before)
            call = self.calls[number]
            if call.kind in COUNTED:
                turn, piece = divmod(call.first + piece, count)
                return turns[call.stage, turn] * count + piece
            return number * count + piece if piece < limits[number] else None

        codes = [kept(code) for code in self.order]
        # A pair stays a pair only if both of its actions are kept.
        pairs = (
            pair
            for code, pair in zip(self.order, pairwise(codes), strict=False)
            if code in self.pairs
        )
        order = array("i", [code for code in codes if code is not None])
        joined = frozenset(one for one, other in pairs if one is not None and other is not None)
        return replace(
            self, num_microbatches=num_microbatches, calls=calls, order=order, pairs=joined
        )

    @cached_property
    def lane_order(self) -> list[int]:
        """The lane of each action in the order."""
        lane_of, count = [call.lane for call in self.calls], self.num_pieces
        return [lane_of[code // count] for code in self.order]

    @cached_property
    def lanes(self) -> tuple[LaneProgram, ...]:
        """The program of each lane."""
        return expand(self, range(self.num_lanes))

    def lane(self, lane: int) -> LaneProgram:
        """Return the program of one lane, without building the programs of other lanes."""
        return expand(self, [lane])[0]

    def walk(self) -> Iterator[tuple[int, Instruction, dict[int, int]]]:
        """Yield all instructions in plan order, with lane and slots (see
        `LaneProgram.contents`)."""
        for lane, each in _in_turn(self, [program.contents() for program in self.lanes]):
            yield lane, *each

    def lines(self) -> Iterator[str]:
        """Yield all instructions as text, in plan order, each after the number of its lane."""
        for lane, words in _in_turn(self, [program.lines() for program in self.lanes]):
            yield f"{lane}: {words}"


def _renumbered(
    calls: Sequence[Call], before: int, after: int
) -> tuple[tuple[Call, ...], dict[tuple[int, int], int]]:
    """Adapt calls to fewer pieces.

    Counted actions (U) of one call may need several calls afterwards: call number ``turn`` has the
    numbers from ``turn * after``. Returns the calls, and their indices by (stage, turn).
    """
    out, turns = list(calls), dict[tuple[int, int], int]()
    for call in calls:
        if call.kind in COUNTED:
            for turn in range(call.first // after, (call.first + before - 1) // after + 1):
                if (call.stage, turn) not in turns:
                    turns[call.stage, turn] = len(out)
                    out.append(call._replace(first=turn * after))
    return tuple(out), turns


_T = TypeVar("_T")


def _in_turn(lowered: Lowered, lanes: Sequence[Iterator[_T]]) -> Iterator[tuple[int, _T]]:
    """Merge the items of all lanes, one item per instruction, in plan order."""
    parts = [iter(program.parts) for program in lowered.lanes]
    for lane in lowered.lane_order:
        for _ in next(parts[lane]):
            yield lane, next(lanes[lane])


def expand(lowered: Lowered, lanes: Sequence[int]) -> tuple[LaneProgram, ...]:
    """Build the programs of some lanes."""
    # The slots on an edge depend on both of its lanes, so the neighbours are followed too.
    near = {*lanes}
    for pool in lowered.pools:
        if pool.lane in lanes or pool.source in lanes:
            near |= {pool.lane, pool.source}
    again = read_again(lowered.calls, lowered.wires, lowered.order, lowered.num_pieces, near)
    crossings = _crossings(lowered, {*lanes}, near, again)
    read: dict[int, set[int]] = defaultdict(set)
    for call in lowered.calls:
        read[call.lane].update(wire for wire, _ in call.reads)
    writers = {lane: _Writer(lowered, lane, read[lane], again, crossings) for lane in lanes}
    count = lowered.num_pieces
    parts = [writers.get(call.lane) for call in lowered.calls]
    order = lowered.order
    for position, code in enumerate(order):
        writer = parts[code // count]
        if writer is not None:
            after = divmod(order[position + 1], count) if code in lowered.pairs else None
            writer.write(position, code // count, code % count, after)
    return tuple(writer.program() for writer in writers.values())


def slots_of(pools: Sequence[Pool]) -> list[range]:
    """Return the slot numbers of each pool on its lane: one pool after the other."""
    ends: dict[int, int] = defaultdict(int)
    out: list[range] = []
    for pool in pools:
        out.append(range(ends[pool.lane], ends[pool.lane] + pool.slots))
        ends[pool.lane] += pool.slots
    return out


def read_again(
    calls: Sequence[Call],
    wires: Sequence[Wire],
    order: Sequence[int],
    num_pieces: int,
    lanes: Container[int],
) -> set[tuple[int, int]]:
    """Find the reads whose value a later action of the same lane reads again.

    Such a read must not free the value. A residual that comes back from the host is a new value:
    its write ends the search.

    Returns:
        (position in the order, wire) of each such read.
    """
    readers = Counter((call.lane, wire) for call in calls for wire, _ in call.reads)
    # Only values with several readers on one lane can be read again. Most programs have none.
    shared = {place for place, number in readers.items() if number > 1 and place[0] in lanes}
    if not shared:
        return set()
    reads = [
        [
            (wire, FROM.get(wires[wire].role, 0))
            for wire, _ in call.reads
            if (call.lane, wire) in shared
        ]
        for call in calls
    ]
    writes = [[wire for wire in call.writes if (call.lane, wire) in shared] for call in calls]
    again: set[tuple[int, int]] = set()
    later: set[tuple[int, int, int]] = set()
    # Backwards through the order: `later` has the values that are read after this position.
    for position, code in zip(reversed(range(len(order))), reversed(order), strict=True):
        number, piece = divmod(code, num_pieces)
        lane = calls[number].lane
        later.difference_update([(lane, wire, piece) for wire in writes[number]])
        for wire, shift in reads[number]:
            if (lane, wire, piece + shift) in later:
                again.add((position, wire))
            later.add((lane, wire, piece + shift))
    return again


def _crossings(
    lowered: Lowered, lanes: set[int], near: set[int], again: set[tuple[int, int]]
) -> dict[int, dict[int, int]]:
    """Choose a slot for each value that crosses between lanes, by lane and value number.

    Follows plan order and takes the slot that has been free for the longest time. So a sender waits
    only if all slots of the pool are full in plan order.
    """
    free = [deque(numbers) for numbers in slots_of(lowered.pools)]
    slots: dict[int, dict[int, int]] = {lane: {} for lane in near}
    count = lowered.num_pieces

    def crosses(source: int, to: int) -> bool:
        return source != CALLER and (source in lanes or to in lanes)

    reads = [
        [
            (wire, free[pool])
            for wire, pool in call.reads
            if pool >= 0 and crosses(lowered.pools[pool].source, call.lane)
        ]
        for call in lowered.calls
    ]
    sends = [
        [
            (wire * count, slots[to], free[pool])
            for wire, to, pool in call.sends
            if crosses(call.lane, to)
        ]
        for call in lowered.calls
    ]
    for position, code in enumerate(lowered.order):
        number, microbatch = divmod(code, count)
        # Sender and receiver both follow this order, so they choose the same slots without talking.
        for wire, pool in reads[number]:
            if (position, wire) not in again:
                pool.append(slots[lowered.calls[number].lane][wire * count + microbatch])
        for base, there, pool in sends[number]:
            there[base + microbatch] = pool.popleft()
    return slots


class _Writer:
    """Writes the program of a lane, action by action. Frees each value after its last read."""

    def __init__(
        self,
        lowered: Lowered,
        lane: int,
        read: set[int],
        again: set[tuple[int, int]],
        crossings: dict[int, dict[int, int]],
    ) -> None:
        self.lowered, self.lane, self.again, self.crossings = lowered, lane, again, crossings
        self.read = read  # the wires that actions of the lane read
        self.taken = frozenset(
            [number for number, wire in enumerate(lowered.wires) if wire.role in TAKEN]
        )
        """The wires that the caller takes."""
        self.calls: dict[int, _Form] = {}
        self.instructions: list[Instruction] = []
        self.ends: list[int] = []
        self.pairs: list[int] = []
        self.late: list[int] = []
        """Values that the first action of a pair has read. They are freed with the second action:
        the first may still read them while the second runs."""
        self.left: list[tuple[int, int]] = []
        self.where: dict[int, int] = {}  # the slot of each value that is on the lane now
        self.slots: list[Slot] = []
        self.spare: dict[Slot, deque[int]] = defaultdict(deque)
        """The free slots, among those that only this lane fills."""
        self.home: list[deque[int] | None] = []
        """The queue that each slot returns to when it is free; None: its sender chooses slots."""
        for pool in lowered.pools:
            if pool.lane == lane:
                kind = Slot(pool.source, pool.role)
                spare = self.spare[kind] if pool.source == CALLER else None
                if spare is not None:
                    spare.extend(range(len(self.slots), len(self.slots) + pool.slots))
                self.slots += [kind] * pool.slots
                self.home += [spare] * pool.slots

    def _form(self, number: int) -> _Form:
        """Collect the facts of a call that are the same for all its microbatches."""
        call, wires, count = self.lowered.calls[number], self.lowered.wires, self.lowered.num_pieces
        sources = [
            self.lane if pool < 0 else self.lowered.pools[pool].source for _, pool in call.reads
        ]
        reads = [
            (
                wire,
                wire * count + FROM.get(wires[wire].role, 0),
                source,
                Slot(source, wires[wire].role),
            )
            for (wire, _), source in zip(call.reads, sources, strict=True)
        ]
        writes = [(wire * count, Slot(self.lane, wires[wire].role)) for wire in call.writes]
        sends = [(wire * count, to, self.crossings[to]) for wire, to, _ in call.sends]
        taken = [wire * count for wire in call.writes if wire in self.taken]
        unread = [
            wire * count for wire in call.writes if wire not in self.read and wire not in self.taken
        ]
        return _Form(len(self.calls), reads, writes, sends, taken, unread)

    def write(
        self, position: int, number: int, microbatch: int, after: tuple[int, int] | None = None
    ) -> None:
        """Write one action with its receives, frees and sends.

        The first action of a pair receives for both, and the second frees for both.
        """
        form = self._get(number)
        where, again, add = self.where, self.again, self.instructions.append
        reads = self._received(form, microbatch)
        done, self.late = self.late, []
        done += [
            base + microbatch
            for wire, base, *_ in form.reads
            if (position, wire) not in again and wire not in self.taken
        ]
        if after is not None:
            self._received(self._get(after[0]), after[1])
            self.pairs.append(len(self.ends))
            self.late, done = done, []
        writes: list[int] = []
        for base, kind in form.writes:
            where[base + microbatch] = slot = self._take(kind)
            writes.append(slot)
        add(Run(form.number, microbatch, tuple(reads), tuple(writes)))
        # Frees come before sends: a send may block, and meanwhile others could not fill our slots.
        if done:
            self._free(done)
        for base, to, there in form.sends:
            add(Send(where[base + microbatch], to, there[base + microbatch]))
        for base in form.taken:
            self.left.append((base + microbatch, where[base + microbatch]))
        if form.unread:
            self._free([base + microbatch for base in form.unread])
        self.ends.append(len(self.instructions))

    def _get(self, number: int) -> _Form:
        form = self.calls.get(number)
        if form is None:
            form = self.calls[number] = self._form(number)
        return form

    def _received(self, form: _Form, microbatch: int) -> list[int]:
        """Return the slots of the values that a call reads. Receive the values that are missing."""
        slots: list[int] = []
        for _, base, source, kind in form.reads:
            value = base + microbatch
            slot = self.where.get(value)
            if slot is None:
                slot = self._take(kind) if source == CALLER else self.crossings[self.lane][value]
                self.where[value] = slot
                self.instructions.append(Receive(value, source, slot))
            slots.append(slot)
        return slots

    def _take(self, kind: Slot) -> int:
        spare = self.spare[kind]
        if spare:
            return spare.popleft()
        self.slots.append(kind)
        self.home.append(spare)
        return len(self.slots) - 1

    def _free(self, values: list[int]) -> None:
        slots = [self.where.pop(value) for value in values]
        self.instructions.append(Free(tuple(slots)))
        for slot in slots:
            home = self.home[slot]
            if home is not None:
                home.append(slot)

    def program(self) -> LaneProgram:
        """Return the program that was written."""
        pools, lowered = self.lowered.pools, self.lowered
        outgoing = [
            (pool.lane, slot)
            for pool, slots in zip(pools, slots_of(pools), strict=True)
            if pool.source == self.lane
            for slot in slots
        ]
        return LaneProgram(
            self.lane,
            lowered.num_microbatches,
            lowered.num_slices,
            lowered.wires,
            tuple(lowered.calls[number] for number in self.calls),
            tuple(self.slots),
            tuple(self.instructions),
            tuple(self.ends),
            tuple(outgoing),
            tuple(self.left),
            frozenset(self.pairs),
        )


class _Form(NamedTuple):
    """A call as `_Writer` needs it. Value numbers are for piece 0."""

    number: int  # the index among the calls of the lane
    reads: list[tuple[int, int, int, Slot]]  # (wire, value, source, kind of slot)
    writes: list[tuple[int, Slot]]  # (value, kind of slot)
    sends: list[tuple[int, int, dict[int, int]]]  # (value, lane, slot by value on that lane)
    taken: list[int]  # the values that the caller takes
    unread: list[int]  # the values that no action of the lane reads; freed as soon as they are sent
