"""The proof that lanes never wait for each other for ever: what is waited for stands before in plan
order.

A lane does its actions in plan order: it receives what an action reads, runs it, frees what it has
read for the last time, then sends what it wrote, in the order of the call. Lanes wait for each
other at three places, and there only:

- an action waits until what it reads from other lanes has come;
- a send waits until what lay in its slot at the other end is freed (between processes: until that
  has come there);
- between processes a value comes when all that its lane sent to that lane before has come, from
  whatever pools, and its own slot is free: the end that receives takes one value after the other.

Slots are given to values in plan order, to each at its send one of its pool that is free in plan
order: that had no value yet, or whose last one was read for the last time before. `prove` looks at
every position t of the order:

1. what the action at t reads was made by its lane before t, or sent to it before t by the lane that
   makes it, into the pool where it is read, or is the caller's;
2. with what is sent at t no pool has more values that are still to be read than it has slots. So
   there is a free one, and what lay in it was freed by an action before t.

Then the action at t comes to its end, its sends too, and what it sends comes, for every t. By
induction: let it be so for every position before t. The lane gets to t, for what it does before
stands before t. What is read has come (1), so the action runs. Now its sends, one after the other:
what lay in the slot came and was freed before t (2), so the send begins. What was sent on that way
before, by actions before t or by this one, has come; so the other end is about to take this value,
and its slot was freed before t: it comes.

So the third kind of wait needs no look of its own: as 2 holds for every value, none of those in
front on a way waits for anything at t or later. It does not matter which lanes share a process, and
a run is followed by the next on every lane and way.

Of two that overlap, at t and t + 1, the first waits for what the second reads, too: so that must
stand before t (the lane itself makes nothing between them but the first, and of that the second may
not read). What the first has read is freed with what the second has read, so its slots are no
earlier free than after t + 1.

A batch of fewer microbatches runs the same order with the actions of the others left out
(`Lowered.first`). What is left of 1 and 2 still holds: an action reads values of its own
microbatch, and no pool has more values than before. So this program is proven with the plan's.

Where each replica of a stage has a part of its parameters, an action also waits until they are
gathered, on a way of the stage's own, on which everything comes in the order in which it was begun.
Replicas may have different numbers of microbatches, but all run the one order, each with some
actions left out, and the same U gather in all of them (`serving` of the fewest). So, if the stages
have U, a gather is begun at one position in all replicas, before t, and the induction goes over all
replicas at once: let it be so for every position before t in each of them. If they have none, a
stage is gathered when it first computes. Before that no later stage does, in no replica: all begin
to gather the stages in ascending order, and the induction over positions stands within one over
stages. (Were there stages with U and others without, it would not hold: so that is not legal.)

A way carries so many gathers, as many in all replicas, and one sum, after them: G stands after
every U, and without G the sum is begun when all lanes of the process are done. No lane waits for a
sum. Processes do so when their lanes are done, for their stages in ascending order, as their
replicas do.

The rest that is looked at is whether the program is whole: calls fit their pools, forwards and
backwards stand once, what is made to be read, or sent, is read. No part of it: what a stage waits
for inside of its function.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from funcpipe._src.core.errors import raise_all
from funcpipe._src.data.kinds import Kind
from funcpipe._src.data.lowered import TAKEN, Lowered
from funcpipe._src.data.program import CALLER, FROM, Call, Role, lane_name
from funcpipe._src.data.schedule import action_of

MOST_WAITS = 20
"""A message lists no more."""

_GIVEN = (Role.INPUT, Role.TARGET, Role.FEED)
"""What the caller gives; and the gradient of the last stage's output, for the second half of a
`vjp`."""


def prove(program: Lowered) -> None:
    """Prove that all lanes of a program come to their end, in whatever processes. Linear in the
    number of actions.

    Raises:
        PlanError: it is not so, or not proven: every action that waits for what does not stand
            before it is named, with what it waits for and where that stands.
    """
    raise_all("the program of this plan is not whole:", list(_malformed(program)), most=MOST_WAITS)
    walk = _OrderWalk(program)
    walk.through()
    # Where something stands is searched for, so only for what is told.
    told = [walk.words(fault) for fault in walk.faults[:MOST_WAITS]]
    raise_all(
        "lanes of this plan could wait for ever; what is waited for must stand before (in "
        "brackets: where in plan order):",
        told + [""] * (len(walk.faults) - len(told)),
        most=MOST_WAITS,
    )


def _malformed(program: Lowered) -> Iterator[str]:
    """What is wrong with calls and pools, in whatever order they run."""
    pools, lanes = program.pools, range(program.num_lanes)
    for number, pool in enumerate(pools):
        if (
            pool.slots < 1
            or pool.lane not in lanes
            or pool.source not in (CALLER, *lanes)
            or pool.source == pool.lane
        ):
            yield (
                f"pool {number} has {pool.slots} slots, from {lane_name(pool.source)} to "
                f"{pool.lane}"
            )
            return
    codes = len(program.calls) * program.num_pieces
    if not program.order or min(program.order) < 0 or max(program.order) >= codes:
        yield f"the order holds actions from 0 to {codes - 1}"
        return
    yield from _unpaired(program)
    ways: dict[tuple[int, int], int] = {}
    """By wire and lane, the pool in which it lies there; -1: it is made there."""
    for call in program.calls:
        name = f"{call.stage}{call.kind} on device {call.lane}"
        sends = [(wire, to) for wire, to, _ in call.sends]
        if call.lane not in lanes or not 0 <= call.stage < program.num_stages:
            yield f"{name}: there are {program.num_stages} stages on {program.num_lanes} devices"
        if any(not 0 <= wire < len(program.wires) for wire, *_ in _uses(call)):
            yield f"{name}: there are {len(program.wires)} wires"
            return
        # A carry is read of one piece and written of another.
        uses = [(wire, FROM.get(program.wires[wire].role, 0)) for wire, _ in call.reads]
        uses += [(wire, 0) for wire in call.writes]
        if len({*uses}) < len(uses) or len({*sends}) < len(sends):
            yield f"{name} reads, writes or sends something twice"
        for wire, lane, pool in _uses(call):
            if ways.setdefault((wire, lane), pool) != pool:
                yield f"{name}: {_name(program, wire)} comes to device {lane} in two ways"
        yield from (f"{name}: {fault}" for fault in _unfit(program, call))


def _unpaired(program: Lowered) -> Iterator[str]:
    """Pairs whose second does not follow, is of another lane, or reads what the first makes."""
    left = set(program.pairs)
    if not left:
        return
    for code, after in zip(program.order, [*program.order[1:], None], strict=True):
        if code not in left:
            continue
        left.remove(code)
        name = f"{program.action(code)} overlaps with what follows it in the order"
        one, piece = program.calls[code // program.num_pieces], code % program.num_pieces
        other = program.calls[after // program.num_pieces] if after is not None else None
        if after is None or other is None or other.lane != one.lane or after in program.pairs:
            yield f"{name}, and that is not an action of its device that could"
            continue
        shift = after % program.num_pieces - piece
        reads = [
            wire for wire, _ in other.reads if FROM.get(program.wires[wire].role, 0) + shift == 0
        ]
        made = [wire for wire in one.writes if wire in reads]
        if made:
            yield (
                f"{name}, and {program.action(after)} reads {_name(program, made[0])}, which it "
                "makes"
            )
    yield from (
        f"{program.action(code)} overlaps, and does not stand in the order" for code in left
    )


def _uses(call: Call) -> Iterator[tuple[int, int, int]]:
    """(wire, lane, pool): what a call reads, sends and writes, and where that lies."""
    yield from ((wire, call.lane, pool) for wire, pool in call.reads)
    yield from call.sends
    yield from ((wire, call.lane, -1) for wire in call.writes)


def _unfit(program: Lowered, call: Call) -> Iterator[str]:
    """What a call reads from pools, or sends into pools, that are for something else."""
    pools = program.pools
    for wire, lane, number in _uses(call):
        if not -1 <= number < len(pools):
            yield f"there are {len(pools)} pools, not {number + 1}"
        elif number >= 0:
            source, at, role, _ = pools[number]
            given = program.wires[wire].role in _GIVEN or program.wires[wire][:2] == (
                Role.GRAD,
                program.num_stages - 1,
            )
            sent = (wire, lane, number) in call.sends
            fits = (role, at) == (program.wires[wire].role, lane) and role not in TAKEN
            if not fits or (source != call.lane if sent else source == CALLER and not given):
                yield (
                    f"{_name(program, wire)} in a pool for {role.value} from {lane_name(source)} "
                    f"to {at}"
                )
        elif program.wires[wire].role in TAKEN - {Role.SUMS} and wire not in call.writes:
            yield f"{_name(program, wire)} is the caller's"
    for wire, *_ in call.sends:
        if wire not in call.writes:
            yield f"it sends {_name(program, wire)}, which it does not make"


def _name(program: Lowered, wire: int) -> str:
    """A wire in print."""
    role, stage, name, _ = program.wires[wire]
    return f"{role.value} of stage {stage}" + (f" ({name})" if name else "")


class _FaultKind(Enum):
    """What cannot be proven of an action."""

    TWICE = "it stands twice"
    EARLY = "it reads what is not there"
    FULL = "it sends what has no slot yet"
    AGAIN = "it makes or sends what is there"
    UNREAD = "it makes or sends what nobody reads"
    MISSING = "it stands nowhere"


@dataclass(slots=True)
class _Unproven:
    """A fault of the action at a position, about a value or an action (by number); what it waits
    for ends at ``until``."""

    fault: _FaultKind
    position: int
    about: int
    until: int = -1


class _CallPlaces(NamedTuple):
    """A call, for who walks over all actions; of everything the number for microbatch 0.

    Attributes:
        mark: of the action.
        own: what it reads that its lane made.
        fetched: what it reads that the caller gives, and the pool.
        come: what it reads that others give, the caller too, and the pool.
        makes: what its lane reads later.
        sends: what it sends, and the pool.
    """

    mark: int
    own: list[int]
    fetched: list[tuple[int, int]]
    come: list[tuple[int, int]]
    makes: list[int]
    sends: list[tuple[int, int]]


_MARKS = {kind: number for number, kind in enumerate(kind for kind in Kind if kind is not Kind.I)}
_MARKS[Kind.I] = _MARKS[Kind.B]
"""Actions of a stage and microbatch are told apart by these; its backward is one, whole or in
halves."""


class _OrderWalk:
    """Goes through the order once, and knows of each value where it is."""

    def __init__(self, program: Lowered) -> None:
        self.program = program
        self.faults: list[_Unproven] = []
        self.places: dict[tuple[int, int], int] = {}
        """By wire and lane that reads it, the number there of its value of microbatch 0."""
        self.more: dict[tuple[int, int], int] = {}
        """By stage and first number, the cells of what is counted beyond the first ones."""
        count = program.num_pieces
        for call in program.calls:
            for wire, lane, _ in _uses(call._replace(writes=())):
                self.places.setdefault((wire, lane), len(self.places) * count)
        self.rows = [self._row(call) for call in program.calls]

    def _row(self, call: Call) -> _CallPlaces:
        places, pools, wires, lane = self.places, self.program.pools, self.program.wires, call.lane
        cell = _MARKS[call.kind] * self.program.num_stages + call.stage
        if call.first:
            cell = self.more.setdefault(
                (call.stage, call.first), len(_MARKS) * self.program.num_stages + len(self.more)
            )
        come = [(places[wire, lane], pool) for wire, pool in call.reads if pool >= 0]
        return _CallPlaces(
            cell * self.program.num_pieces,
            [
                places[wire, lane] + FROM.get(wires[wire].role, 0)
                for wire, pool in call.reads
                if pool < 0
            ],
            [(place, pool) for place, pool in come if pools[pool].source == CALLER],
            come,
            [places[wire, lane] for wire in call.writes if (wire, lane) in places],
            [(places[wire, to], pool) for wire, to, pool in call.sends],
        )

    def through(self) -> None:
        """Find every fault."""
        program, count, rows = self.program, self.program.num_pieces, self.rows
        to_read = self._reads()
        """Of each value in a pool, how many reads are to come; below 0 as long as it is not
        there."""
        here = bytearray(len(self.places) * count)
        """Of each value on the lane that makes it: 0: it is not there, 1: nobody has read it, 2:
        somebody has."""
        spare = [pool.slots for pool in program.pools]
        late: list[deque[_Unproven]] = [deque() for _ in spare]
        """Of each pool, the sends that wait; every free ends the wait of one."""
        stands = bytearray((len(_MARKS) * program.num_stages + len(self.more)) * count)
        note = self._note
        freed: list[int] = []
        """The pools in which the first of a pair has read something for the last time."""
        for position, code in enumerate(program.order):
            number, microbatch = divmod(code, count)
            joined = code in program.pairs
            mark, own, fetched, come, makes, sends = rows[number]
            if stands[mark + microbatch]:
                note(_FaultKind.TWICE, position, code)
            stands[mark + microbatch] = 1
            for place in own:
                if here[place + microbatch]:
                    here[place + microbatch] = 2
                else:
                    note(_FaultKind.EARLY, position, place + microbatch)
            for place, pool in fetched:
                if to_read[place + microbatch] < 0:
                    to_read[place + microbatch] *= -1
                    spare[pool] = free = spare[pool] - 1
                    if free < 0:
                        late[pool].append(note(_FaultKind.FULL, position, place + microbatch))
            for place, pool in come:
                left = to_read[place + microbatch]
                to_read[place + microbatch] = left - 1 if left > 0 else left + 1
                if left == 1:
                    freed.append(pool)
                elif left <= 0:
                    note(_FaultKind.EARLY, position, place + microbatch)
            if freed and not joined:
                for pool in freed:
                    spare[pool] = free = spare[pool] + 1
                    if free <= 0:
                        late[pool].popleft().until = position
                freed.clear()
            for place in makes:
                if here[place + microbatch] == 1:
                    note(_FaultKind.AGAIN, position, place + microbatch)
                here[place + microbatch] = 1
            for place, pool in sends:
                left = to_read[place + microbatch]
                if left >= 0:
                    note(
                        _FaultKind.AGAIN if left else _FaultKind.UNREAD,
                        position,
                        place + microbatch,
                    )
                    continue
                to_read[place + microbatch] = -left
                spare[pool] = free = spare[pool] - 1
                if free < 0:
                    late[pool].append(note(_FaultKind.FULL, position, place + microbatch))
        self._left_over(here, stands)

    def _reads(self) -> list[int]:
        """Of each value that comes to a lane, how often it is read there, below 0."""
        reads = [0] * (len(self.places) * self.program.num_pieces)
        come = [[place for place, _ in row.come] for row in self.rows]
        for code in self.program.order:
            number, microbatch = divmod(code, self.program.num_pieces)
            for place in come[number]:
                reads[place + microbatch] -= 1
        return reads

    def _note(self, fault: _FaultKind, position: int, about: int) -> _Unproven:
        found = _Unproven(fault, position, about)
        self.faults.append(found)
        return found

    def _left_over(self, here: bytearray, stands: bytearray) -> None:
        """What is there at the end, and what is missing."""
        end, cells = len(self.program.order), self.program.num_stages * self.program.num_pieces
        early = {each.about for each in self.faults if each.fault is _FaultKind.EARLY}
        self.faults += [
            _Unproven(_FaultKind.UNREAD, end, at) for at in _places_of(1, here, 0, len(here))
        ]
        # What is read too early only is not told twice.
        self.faults = [
            each
            for each in self.faults
            if each.fault is not _FaultKind.UNREAD or each.about not in early
        ]
        backward = 1 in stands[cells : 2 * cells]
        self.faults += [
            _Unproven(_FaultKind.MISSING, end, at)
            for at in _places_of(0, stands, 0, cells * (1 + backward))
        ]

    def words(self, unproven: _Unproven) -> str:
        """A fault in words."""
        program, count = self.program, self.program.num_pieces
        fault, position, about, until = (
            unproven.fault,
            unproven.position,
            unproven.about,
            unproven.until,
        )
        if fault is _FaultKind.MISSING:
            cell, microbatch = divmod(about, count)
            kind, stage = divmod(cell, program.num_stages)
            action = action_of((Kind.F, Kind.B)[kind], stage, microbatch, program.num_slices)
            return f"{action} stands nowhere" + (" (nor I)" if kind else "")
        if fault is _FaultKind.TWICE:
            return f"{self._at(position)} stands twice"
        wire, lane = [*self.places][about // count]
        value = program.value(wire * count + about % count)
        makers = [number for number, call in enumerate(program.calls) if wire in call.writes]
        made = min(
            (at for number in makers for at in self._stand(number, about % count)), default=-1
        )
        if fault is _FaultKind.EARLY:
            return f"{self._at(position)} waits for {value}, which {self._does(made, wire, lane)}"
        if fault is _FaultKind.UNREAD:
            return f"nobody on device {lane} reads {value} after {self._at(made)} made it"
        if fault is _FaultKind.AGAIN:
            return (
                f"{self._at(position)} makes {value} anew, which is still to be read on device "
                f"{lane}"
            )
        call = program.calls[program.order[position] // count]
        source, to, role, slots = program.pools[
            next(pool for *key, pool in _uses(call) if key == [wire, lane])
        ]
        place = (
            f"{slots} slot{'s' * (slots != 1)} for {role.value} from {lane_name(source)} on "
            f"device {to}"
        )
        end = f"until {self._at(until)}" if until >= 0 else "for ever"
        return f"{self._at(position)} waits to send {value}: {place}, taken {end}"

    def _stand(self, number: int, microbatch: int) -> list[int]:
        """Where an action stands, if it does."""
        code = number * self.program.num_pieces + microbatch
        return [self.program.order.index(code)] if code in self.program.order else []

    def _at(self, position: int) -> str:
        """An action in print: ``2F0 on device 1 (17)``."""
        code = self.program.order[position]
        lane = self.program.calls[code // self.program.num_pieces].lane
        return f"{self.program.action(code)} on device {lane} ({position})"

    def _does(self, position: int, wire: int, lane: int) -> str:
        """How a value comes to a lane."""
        if position < 0:
            return "nobody makes"
        call = self.program.calls[self.program.order[position] // self.program.num_pieces]
        if call.lane != lane and all((wire, lane) != send[:2] for send in call.sends):
            return f"{self._at(position)} makes and does not send there"
        return f"{self._at(position)} {'makes' if call.lane == lane else 'sends'}"


def _places_of(byte: int, data: bytearray, start: int, end: int) -> Iterator[int]:
    """Where a byte stands."""
    while (start := data.find(byte, start, end)) >= 0:
        yield start
        start += 1
