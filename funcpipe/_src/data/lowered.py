"""The program of a whole plan: stored in a short form, and expanded lane by lane on demand.

`program.py` has the instructions, `lower/program.py` makes the short form from stages and schedule.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeVar

from funcpipe._src.core.remembered import declared_fields
from funcpipe._src.core.shown import guarded, line
from funcpipe._src.data.kinds import COUNTED
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
            "slots between lanes": sum(pool.slots for pool in self.pools),
        }
        return line("Lowered", [("", f"{count} {word}") for word, count in counts.items()])

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
        before, after = self.num_pieces, num_microbatches * self.num_slices
        calls, turns = [*self.calls], dict[tuple[int, int], int]()

        def kept(code: int) -> int | None:
            number, piece = divmod(code, before)
            call = self.calls[number]
            if call.kind in COUNTED:
                # A call has as many U as there are pieces, so these U may need more calls.
                turn, piece = divmod(call.first + piece, after)
                number = turns.setdefault((call.stage, turn), len(calls))
                if number == len(calls):
                    calls.append(call._replace(first=turn * after))
            return number * after + piece if piece < after else None

        codes = [kept(code) for code in self.order]
        # A pair stays a pair only if both of its actions are kept.
        pairs = (
            pair
            for code, pair in zip(self.order, pairwise(codes), strict=False)
            if code in self.pairs
        )
        return replace(
            self,
            num_microbatches=num_microbatches,
            calls=tuple(calls),
            order=array("i", [code for code in codes if code is not None]),
            pairs=frozenset(one for one, other in pairs if None not in (one, other)),
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


_T = TypeVar("_T")


def _in_turn(lowered: Lowered, lanes: Sequence[Iterator[_T]]) -> Iterator[tuple[int, _T]]:
    """Merge the items of all lanes, one item per instruction, in plan order."""
    parts = [iter(program.parts) for program in lowered.lanes]
    for lane in lowered.lane_order:
        for _ in next(parts[lane]):
            yield lane, next(lanes[lane])


def expand(program: Lowered, lanes: Sequence[int]) -> tuple[LaneProgram, ...]:
    """Build the programs of some lanes."""
    count, order = program.num_pieces, program.order
    again = read_again(program)
    arrivals = _arrivals(program, again)
    read: dict[int, set[int]] = defaultdict(set)  # the wires that each lane reads
    for call in program.calls:
        read[call.lane].update(wire for wire, _ in call.reads)
    writers = {lane: _Writer(program, lane, read[lane], again, arrivals) for lane in lanes}
    # A lane numbers its calls in the order of their first use.
    for number in dict.fromkeys([code // count for code in order]):
        if writer := writers.get(program.calls[number].lane):
            writer.add(number)
    writer_of = [writers.get(call.lane) for call in program.calls]
    for position, code in enumerate(order):
        writer = writer_of[code // count]
        if writer is not None:
            after = order[position + 1] if code in program.pairs else None
            writer.write(position, code, after)
    return tuple(writer.finished() for writer in writers.values())


def slots_of(pools: Sequence[Pool]) -> list[range]:
    """Return the slot numbers of each pool on its lane: one pool after the other."""
    ends: dict[int, int] = defaultdict(int)
    out: list[range] = []
    for pool in pools:
        out.append(range(ends[pool.lane], ends[pool.lane] + pool.slots))
        ends[pool.lane] += pool.slots
    return out


def read_again(program: Lowered) -> set[tuple[int, int]]:
    """Find the reads whose value a later action of the same lane reads again.

    Such a read must not free the value. A residual that comes back from the host is a new value.

    Returns:
        (position in the order, wire) of each such read.
    """
    calls, wires = program.calls, program.wires
    readers = Counter((call.lane, wire) for call in calls for wire, _ in call.reads)
    # Only values with several readers on one lane can be read again. Most programs have none.
    shared = {place for place, number in readers.items() if number > 1}
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
    latest: dict[tuple[int, int, int], int] = {}  # the position of the latest read of each value
    for position, code in enumerate(program.order):
        number, piece = divmod(code, program.num_pieces)
        lane = calls[number].lane
        for wire, shift in reads[number]:
            value = lane, wire, piece + shift
            if value in latest:
                again.add((latest[value], wire))
            latest[value] = position
        for wire in writes[number]:
            latest.pop((lane, wire, piece), None)
    return again


def _arrivals(program: Lowered, again: set[tuple[int, int]]) -> list[dict[int, int]]:
    """Choose the slot in which each value arrives from another lane, by lane and value number.

    Follows plan order and takes the slot that has been free for the longest time. So a sender waits
    only if all slots of the pool are full in plan order. Sender and receiver both call this, so
    they choose the same slots without talking.
    """
    pools, count = program.pools, program.num_pieces
    free = [deque(numbers) for numbers in slots_of(pools)]
    slots: list[dict[int, int]] = [{} for _ in range(program.num_lanes)]
    reads = [
        [(wire, pool) for wire, pool in call.reads if pool >= 0 and pools[pool].source != CALLER]
        for call in program.calls
    ]
    for position, code in enumerate(program.order):
        number, piece = divmod(code, count)
        call = program.calls[number]
        for wire, pool in reads[number]:
            if (position, wire) not in again:
                free[pool].append(slots[call.lane][wire * count + piece])
        for wire, to, pool in call.sends:
            slots[to][wire * count + piece] = free[pool].popleft()
    return slots


class _LaneCall(NamedTuple):
    """A call as `_Writer` needs it. Value numbers are for piece 0."""

    number: int  # the index among the calls of the lane
    reads: list[tuple[int, Slot]]  # (value, use of its slot)
    frees: list[tuple[int, int]]  # (wire, value) of the reads that free the value if they are last
    writes: list[tuple[int, Slot]]  # (value, use of its slot)
    sends: list[tuple[int, int]]  # (value, lane)
    taken: list[int]  # the values that the caller takes
    unread: list[int]  # the values that no action of the lane reads; freed as soon as they are sent


class _Writer:
    """Writes the program of a lane, action by action. Frees each value after its last read."""

    def __init__(
        self,
        program: Lowered,
        lane: int,
        read: set[int],
        again: set[tuple[int, int]],
        arrivals: Sequence[dict[int, int]],
    ) -> None:
        self.program, self.lane, self.again, self.arrivals = program, lane, again, arrivals
        self.read = read  # the wires that actions of the lane read
        self.calls: dict[int, _LaneCall] = {}
        self.instructions: list[Instruction] = []
        self.ends: list[int] = []
        self.pairs: list[int] = []
        self.late: list[int] = []
        """Values that the first action of a pair has read. They are freed with the second action:
        the first may still read them while the second runs."""
        self.left: list[tuple[int, int]] = []
        self.where: dict[int, int] = {}  # the slot of each value that is on the lane now
        self.slots = [
            Slot(pool.source, pool.role)
            for pool in program.pools
            if pool.lane == lane
            for _ in range(pool.slots)
        ]
        self.spare: dict[Slot, deque[int]] = defaultdict(deque)
        """The free slots of each use. Other lanes do not look here: `arrivals` has their slots."""
        for slot, use in enumerate(self.slots):
            self.spare[use].append(slot)

    def add(self, number: int) -> None:
        """Add a call: collect the facts that are the same for all its pieces."""
        pools, wires, count = self.program.pools, self.program.wires, self.program.num_pieces
        call = self.program.calls[number]
        reads = [
            (wire, pool, wire * count + FROM.get(wires[wire].role, 0)) for wire, pool in call.reads
        ]
        taken = [wire for wire in call.writes if wires[wire].role in TAKEN]
        unread = [wire for wire in call.writes if wire not in self.read and wire not in taken]
        self.calls[number] = _LaneCall(
            number=len(self.calls),
            reads=[
                (value, Slot(self.lane if pool < 0 else pools[pool].source, wires[wire].role))
                for wire, pool, value in reads
            ],
            frees=[(wire, value) for wire, _, value in reads if wires[wire].role not in TAKEN],
            writes=[(wire * count, Slot(self.lane, wires[wire].role)) for wire in call.writes],
            sends=[(wire * count, to) for wire, to, _ in call.sends],
            taken=[wire * count for wire in taken],
            unread=[wire * count for wire in unread],
        )

    def write(self, position: int, code: int, after: int | None) -> None:
        """Write one action with its receives, frees and sends.

        The first action of a pair receives for both, and the second frees for both. ``after`` is
        the code of the second.
        """
        number, piece = divmod(code, self.program.num_pieces)
        call = self.calls[number]
        reads = self._received(call, piece)
        done, self.late = self.late, []
        done += [value + piece for wire, value in call.frees if (position, wire) not in self.again]
        if after is not None:
            second, of_second = divmod(after, self.program.num_pieces)
            self._received(self.calls[second], of_second)
            self.pairs.append(len(self.ends))
            self.late, done = done, []
        writes = [self._take(value + piece, use) for value, use in call.writes]
        self.instructions.append(Run(call.number, piece, reads, tuple(writes)))
        # Frees come before sends: a send may block, and meanwhile others could not fill our slots.
        self._free(done)
        for value, to in call.sends:
            slot, into = self.where[value + piece], self.arrivals[to][value + piece]
            self.instructions.append(Send(slot, to, into))
        self.left += [(value + piece, self.where[value + piece]) for value in call.taken]
        self._free([value + piece for value in call.unread])
        self.ends.append(len(self.instructions))

    def _received(self, call: _LaneCall, piece: int) -> tuple[int, ...]:
        """Return the slots of the values that a call reads. Receive the values that are missing."""
        slots: list[int] = []
        for base, use in call.reads:
            value = base + piece
            slot = self.where.get(value)
            if slot is None:
                if use.source == CALLER:
                    slot = self._take(value, use)
                else:
                    slot = self.where[value] = self.arrivals[self.lane][value]
                self.instructions.append(Receive(value, use.source, slot))
            slots.append(slot)
        return tuple(slots)

    def _take(self, value: int, use: Slot) -> int:
        """Put a value into a spare slot, or into a new one."""
        spare = self.spare[use]
        if not spare:
            spare.append(len(self.slots))
            self.slots.append(use)
        slot = self.where[value] = spare.popleft()
        return slot

    def _free(self, values: list[int]) -> None:
        if not values:
            return
        slots = tuple([self.where.pop(value) for value in values])
        self.instructions.append(Free(slots))
        for slot in slots:
            self.spare[self.slots[slot]].append(slot)

    def finished(self) -> LaneProgram:
        """Return the program that was written."""
        program = self.program
        outgoing = [
            (pool.lane, slot)
            for pool, slots in zip(program.pools, slots_of(program.pools), strict=True)
            if pool.source == self.lane
            for slot in slots
        ]
        return LaneProgram(
            self.lane,
            program.num_microbatches,
            program.num_slices,
            program.wires,
            tuple(program.calls[number] for number in self.calls),
            tuple(self.slots),
            tuple(self.instructions),
            tuple(self.ends),
            tuple(outgoing),
            tuple(self.left),
            frozenset(self.pairs),
        )
