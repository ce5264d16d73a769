"""Programs: what each lane of a plan does, instruction by instruction, over numbered slots.

A lane is a device with a row of slots. Its program is a flat list of four instructions: `Receive` a
value of another lane (or of the caller) into a slot, `Run` an action that reads slots and writes
slots, `Send` a slot's value into a slot of another lane, `Free` slots. A lane knows no other: what
it sends waits until the slot at the other end is free, what it receives until it has come. Whatever
the library does with a plan (print, run, simulate, prove) reads this list.

What the lists are made of is kept short: a *wire* is a value whose microbatch is left open, a
`Call` an action whose microbatch is left open. The value of wire ``w`` at microbatch ``m`` is the
number ``w * M + m``. Where microbatches are cut into slices each slice is a piece by itself, and it
is pieces that are numbered and counted so: slice ``k`` of ``q`` is piece ``m * q + k``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias, final

from funcpipe._src.core.remembered import declared_fields
from funcpipe._src.core.shown import guarded, line
from funcpipe._src.data.schedule import Action, Kind, action_of

CALLER = -1
"""The lane of what the caller gives: inputs, targets, feeds."""


class Role(Enum):
    """What a value is for."""

    INPUT = "input"
    """A microbatch of the inputs, for stage 0."""
    TARGET = "target"
    """A microbatch of the target, for the loss in the last stage."""
    FEED = "feed"
    """A microbatch of a named feed."""
    ACT = "act"
    """The output of a stage, for the next."""
    SKIP = "skip"
    """A stashed value, for the stages that pop it."""
    GRAD = "grad"
    """The gradient of a stage's output."""
    INPUT_GRAD = "input_grad"
    """The gradient of a microbatch of the inputs, in the program of a `vjp`; the caller takes
    it."""
    SKIP_GRAD = "skip_grad"
    """The gradient of a skip from one of its poppers (the peer)."""
    RESIDUAL = "residual"
    """What a forward keeps for its backward."""
    OFFLOADED = "offloaded"
    """A residual that lies in host memory."""
    WEIGHT_RESIDUAL = "weight_residual"
    """What the backward of the input keeps for that of the weights."""
    REPORT = "report"
    """What a forward has for the end of the batch: statistics, losses, aux; the caller takes it."""
    OUTPUT = "output"
    """The last stage's output, where the plan returns outputs; the caller takes it."""
    CARRY = "carry"
    """What a stage hands from one slice of a microbatch to the next; read by the piece after the
    one that made it."""
    CARRY_GRAD = "carry_grad"
    """The gradient of what a slice was handed; read by the piece before the one that made it."""

    SUMS = "sums"
    """The reduction of a stage's gradients over its replicas; S reads it, and the caller takes
    it."""

    __hash__ = object.__hash__


FROM = {Role.CARRY: -1, Role.CARRY_GRAD: 1}
"""Of which piece a value is that an action reads, counted from its own; of all others it is the
same."""


class Value(NamedTuple):
    """One named tree that actions read or write, printed ``skip[0,3,e1]``.

    Attributes:
        role: what it is for.
        stage: the stage that it belongs to: that wrote it, or (for gradients) whose value it is the
            gradient of.
        microbatch: of which microbatch.
        name: of a skip or a feed.
        peer: of a skip gradient: the stage that popped; else -1.
        slice: of which slice; None: of the whole microbatch.
    """

    role: Role
    stage: int
    microbatch: int
    name: str = ""
    peer: int = -1
    slice: int | None = None

    def __str__(self) -> str:
        parts = [
            str(self.stage),
            f"{self.microbatch}{'' if self.slice is None else f'.{self.slice}'}",
        ]
        parts += [self.name] if self.name else []
        parts += [f"from {self.peer}"] if self.peer >= 0 else []
        return f"{self.role.value}[{','.join(parts)}]"


class Wire(NamedTuple):
    """A value with its microbatch left open."""

    role: Role
    stage: int
    name: str = ""
    peer: int = -1


class Call(NamedTuple):
    """An action with its microbatch left open.

    Attributes:
        kind: what it does.
        stage: on which stage.
        lane: where.
        keeps: does a forward keep its residual.
        reads: (wire, pool): the slots in which it comes from another lane; pool -1: it is made on
            this one.
        writes: wires.
        sends: (wire, lane, pool): who else gets what it writes, in this order.
        first: for counted actions (U), the number that piece 0 of this call stands for. A stage may
            have more U than microbatches.
    """

    kind: Kind
    stage: int
    lane: int
    keeps: bool
    reads: tuple[tuple[int, int], ...]
    writes: tuple[int, ...]
    sends: tuple[tuple[int, int, int], ...]
    first: int = 0


class Pool(NamedTuple):
    """The slots of one kind of value on one directed edge between lanes.

    Attributes:
        source: the lane that sends, -1 for the caller.
        lane: the lane where the values lie.
        role: what kind of value.
        slots: how many of them may lie there at a time: the most that do in plan order.
    """

    source: int
    lane: int
    role: Role
    slots: int


@final
class Receive(NamedTuple):
    """Wait until a value lies in a slot.

    Attributes:
        value: its number.
        source: the lane that sends it; -1: the lane fetches it from the caller.
        slot: where it lies.
    """

    value: int
    source: int
    slot: int


@final
class Run(NamedTuple):
    """Do an action.

    Attributes:
        call: the number of the call, among those of the lane.
        microbatch: of which microbatch; where these are in slices, the number of the piece.
        reads: the slots of what it reads, in the order of the call.
        writes: the slots of what it writes.
    """

    call: int
    microbatch: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@final
class Send(NamedTuple):
    """Start to move what lies in a slot, once the slot at the other end is free.

    Attributes:
        slot: where it lies.
        to: the lane that gets it.
        into: the slot there.
    """

    slot: int
    to: int
    into: int


@final
class Free(NamedTuple):
    """Empty slots; those that another lane fills are told to it.

    Attributes:
        slots: which.
    """

    slots: tuple[int, ...]


Instruction: TypeAlias = Receive | Run | Send | Free


class Slot(NamedTuple):
    """What a slot is for.

    Attributes:
        source: the lane that fills it: -1 for the caller, or the lane itself.
        role: what kind of value lies there.
    """

    source: int
    role: Role


@dataclass(frozen=True)
class LaneProgram:
    """What one lane does. Plain data: compares, hashes, pickles; it needs no other lane's.

    Attributes:
        lane: which.
        num_microbatches: how many.
        num_slices: how many slices each has.
        wires: what the wires of values mean.
        calls: what it runs, microbatches left open.
        slots: what each slot is for.
        instructions: the program.
        ends: where each action's part of the instructions ends: its receives, itself, its frees and
            sends.
        outgoing: (lane, slot) of every slot elsewhere that it sends into.
        left: (value, slot) of what the caller takes at the end.
        pairs: the numbers of the actions that overlap with the action after them.
    """

    lane: int
    num_microbatches: int
    num_slices: int
    wires: tuple[Wire, ...]
    calls: tuple[Call, ...]
    slots: tuple[Slot, ...]
    instructions: tuple[Instruction, ...]
    ends: tuple[int, ...]
    outgoing: tuple[tuple[int, int], ...]
    left: tuple[tuple[int, int], ...]
    pairs: frozenset[int] = frozenset()

    __getstate__ = declared_fields

    @guarded
    def __repr__(self) -> str:
        counts = {
            "instructions": len(self.instructions),
            "actions": len(self.ends),
            "slots": len(self.slots),
        }
        return line(
            f"LaneProgram {self.lane}", [("", f"{count} {word}") for word, count in counts.items()]
        )

    @cached_property
    def num_pieces(self) -> int:
        """How many slices the microbatches have together."""
        return self.num_microbatches * self.num_slices

    def value(self, number: int) -> Value:
        """The value with this number."""
        return value_of(self.wires, number, self.num_pieces, self.num_slices)

    def action(self, run: Run) -> Action:
        """What a `Run` does."""
        call = self.calls[run.call]
        return action_of(call.kind, call.stage, call.first + run.microbatch, self.num_slices)

    @cached_property
    def sources(self) -> tuple[int | None, ...]:
        """Who else fills each slot; None: only the lane itself."""
        return tuple(None if slot.source == self.lane else slot.source for slot in self.slots)

    @cached_property
    def taken(self) -> dict[Role, list[tuple[int, int, int]]]:
        """`left` by role: (stage, piece, slot)."""
        out: dict[Role, list[tuple[int, int, int]]] = {}
        for number, slot in self.left:
            wire, piece = divmod(number, self.num_pieces)
            role, stage, _, _ = self.wires[wire]
            out.setdefault(role, []).append((stage, piece, slot))
        return out

    @cached_property
    def parts(self) -> tuple[tuple[Instruction, ...], ...]:
        """The instructions of each action: its receives, itself, its frees and sends."""
        return tuple(self.instructions[start:end] for start, end in pairwise((0, *self.ends)))

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """Its actions, in order."""
        return tuple(instruction for instruction in self.instructions if type(instruction) is Run)

    def contents(self) -> Iterator[tuple[Instruction, dict[int, int]]]:
        """Each instruction with what lies in the slots when it begins: value numbers by slot. The
        dict is reused."""
        value_of: dict[int, int] = {}
        for instruction in self.instructions:
            if type(instruction) is Receive:
                value_of[instruction.slot] = instruction.value
                yield instruction, value_of
                continue
            if type(instruction) is Run:
                call = self.calls[instruction.call]
                for wire, slot in zip(call.writes, instruction.writes, strict=True):
                    value_of[slot] = wire * self.num_pieces + instruction.microbatch
            yield instruction, value_of
            if type(instruction) is Free:
                for slot in instruction.slots:
                    del value_of[slot]

    def lines(self) -> Iterator[str]:
        """Each instruction in words; a value is followed by the slot where it lies."""
        runs = enumerate(self.runs)
        for instruction, value_of in self.contents():

            def see(*slots: int, value_of: dict[int, int] = value_of) -> str:
                return " ".join(f"{self.value(value_of[slot])}@{slot}" for slot in slots)

            match instruction:
                case Receive(_, source, slot):
                    yield f"receive {see(slot)} from {lane_name(source)}"
                case Run(_, _, reads, writes):
                    at, _ = next(runs)
                    beside = f" beside {self.action(self.runs[at + 1])}" if at in self.pairs else ""
                    words = [
                        f"{self.action(instruction)}{beside}",
                        *(["reads " + see(*reads)] if reads else []),
                    ]
                    yield "  ".join([*words, *(["writes " + see(*writes)] if writes else [])])
                case Send(slot, to, into):
                    yield f"send {see(slot)} to {to}@{into}"
                case Free(slots):
                    yield f"free {see(*slots)}"

    def head(self) -> str:
        """Its slots in words."""
        kinds: dict[Slot, list[int]] = {}
        for number, slot in enumerate(self.slots):
            kinds.setdefault(slot, []).append(number)
        words = [
            f"{spans(numbers)} {role.value}"
            + ("" if source == self.lane else f" from {lane_name(source)}")
            for (source, role), numbers in kinds.items()
        ]
        return f"lane {self.lane}, slots: {', '.join(words)}"

    def __str__(self) -> str:
        return "\n".join([self.head(), *self.lines()])


def spans(numbers: list[int]) -> str:
    """Ascending numbers in short.

    >>> spans([0, 1, 2, 5])
    '0-2 5'
    """
    out: list[list[int]] = []
    for number in numbers:
        if out and out[-1][-1] == number - 1:
            out[-1][1:] = [number]
        else:
            out.append([number])
    return " ".join("-".join(map(str, span)) for span in out)


def lane_name(lane: int) -> str:
    """A lane in print."""
    return "caller" if lane == CALLER else str(lane)


def value_of(wires: tuple[Wire, ...], number: int, num_pieces: int, num_slices: int) -> Value:
    """The value with this number."""
    wire, piece = divmod(number, num_pieces)
    role, stage, name, peer = wires[wire]
    if num_slices == 1:
        return Value(role, stage, piece, name, peer)
    microbatch, number = divmod(piece, num_slices)
    return Value(role, stage, microbatch, name, peer, number)
