"""Programs: the instructions of each lane of a plan, over numbered slots.

A lane is a device with a row of slots. Its program is a flat list of four instructions: `Receive` a
value of another lane (or of the caller) into a slot, `Run` an action that reads and writes slots,
`Send` the value of a slot into a slot of another lane, and `Free` slots. A send waits until the
slot at the other end is free. A receive waits until the value has arrived. Printing, running,
simulating and checking a plan all read this list.

The list is stored in a short form. A *wire* is a value without its microbatch, a `Call` is an
action without its microbatch. The value of wire ``w`` at microbatch ``m`` has the number ``w * M +
m``, with M microbatches. If microbatches are cut into slices, pieces are counted in place of
microbatches: slice ``k`` of ``q`` is piece ``m * q + k``.

`Lowered` (lowered.py) contains the short form of all lanes and expands it.
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
"""The lane number of the caller, which gives inputs, targets and feeds."""


class Role(Enum):
    """The role of a value in a plan. Printed in programs, as in ``act[0,1]``.

    >>> fp.typing.Role("act") is fp.typing.Role.ACT
    True
    """

    INPUT = "input"
    """A microbatch of the inputs, for stage 0."""
    TARGET = "target"
    """A microbatch of the target, for the loss in the last stage."""
    FEED = "feed"
    """A microbatch of a named feed."""
    ACT = "act"
    """The output of a stage, for the next stage."""
    SKIP = "skip"
    """A stashed value, for the stages that pop it."""
    GRAD = "grad"
    """The gradient of a stage's output."""
    INPUT_GRAD = "input_grad"
    """The gradient of a microbatch of the inputs, for the caller of a `vjp`."""
    SKIP_GRAD = "skip_grad"
    """The gradient of a skip, from one of the stages that pop it (the peer)."""
    RESIDUAL = "residual"
    """The data that a forward keeps for its backward."""
    OFFLOADED = "offloaded"
    """A residual in host memory."""
    WEIGHT_RESIDUAL = "weight_residual"
    """The data that the backward of the input keeps for the backward of the weights."""
    REPORT = "report"
    """Statistics, losses and aux of a forward, for the caller at the end of the batch."""
    OUTPUT = "output"
    """The last stage's output, for the caller, if the plan returns outputs."""
    CARRY = "carry"
    """A value that a stage passes from one slice of a microbatch to the next slice."""
    CARRY_IN = "carry_in"
    """The carry of an earlier run, for the first slice of a microbatch."""
    CARRY_OUT = "carry_out"
    """The carry of the last slice of a microbatch, for the caller and a later run."""
    CARRY_GRAD = "carry_grad"
    """The gradient of a carry, which a slice passes to the slice before it."""
    SUMS = "sums"
    """The reduction of a stage's gradients over its replicas, for S and for the caller."""

    # Roles are keys of tables everywhere. The hash of the identity is ten times faster than Enum's.
    __hash__ = object.__hash__


FROM = {Role.CARRY: -1, Role.CARRY_GRAD: 1}
"""The offset from an action's own piece to the piece of a value that it reads; 0 for other roles.

A carry comes from the slice before, the gradient of a carry from the slice after.
"""


class Value(NamedTuple):
    """One named tree that actions read or write.

    Printed as role, stage, microbatch and name: ``skip[0,3,e1]`` is the skip ``e1`` of stage 0 for
    microbatch 3.

    >>> print(fp.typing.Value(fp.typing.Role.SKIP, 0, 3, "e1"))
    skip[0,3,e1]

    Attributes:
        role: the role of the value.
        stage: the index of the stage that wrote the value. For a gradient: the stage that wrote the
            value whose gradient this is.
        microbatch: the index of the microbatch.
        name: the name of a skip or a feed; "" for other roles.
        peer: for the gradient of a skip, the stage that popped the skip; else -1.
        slice: the index of the slice; None: the value of a whole microbatch.
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
    """A `Value` without its microbatch.

    Attributes:
        role, stage, name, peer: as in `Value`.
    """

    role: Role
    stage: int
    name: str = ""
    peer: int = -1


class Call(NamedTuple):
    """An `Action` without its microbatch, with the wires that it reads, writes and sends.

    Attributes:
        kind: the kind of the action.
        stage: the index of the stage.
        lane: the lane that runs the action.
        keeps: for a forward, whether it keeps its residual.
        reads: (wire, pool) of each value that it reads. The pool has the slots for values of the
            other lane; -1: this lane makes the value.
        writes: the wires that it writes.
        sends: (wire, lane, pool) of each value that it sends to another lane, in this order.
        first: for counted actions (U), the number of the action with piece 0. A stage may have more
            U than pieces, and then has several calls.
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
    """The slots for one role of values on one directed edge between lanes.

    Attributes:
        source: the lane that sends; -1 for the caller.
        lane: the lane that receives and contains the slots.
        role: the role of the values.
        slots: the number of slots: the most values at a time in plan order.
    """

    source: int
    lane: int
    role: Role
    slots: int


@final
class Receive(NamedTuple):
    """Wait until a value is in a slot.

    Attributes:
        value: the number of the value.
        source: the lane that sends the value; -1: this lane fetches the value from the caller.
        slot: the slot.
    """

    value: int
    source: int
    slot: int


@final
class Run(NamedTuple):
    """Run an action.

    Attributes:
        call: the index of the call among the calls of the lane.
        microbatch: the index of the microbatch, or of the piece if microbatches are cut.
        reads: the slots that the action reads, in the order of the call's wires.
        writes: the slots that the action writes, in the order of the call's wires.
    """

    call: int
    microbatch: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@final
class Send(NamedTuple):
    """Begin to send the value of a slot, as soon as the slot at the other end is free.

    Attributes:
        slot: the slot of the value on this lane.
        to: the lane that receives the value.
        into: the slot on that lane.
    """

    slot: int
    to: int
    into: int


@final
class Free(NamedTuple):
    """Empty slots. If another lane fills a slot, that lane learns that the slot is free.

    Attributes:
        slots: the slots.
    """

    slots: tuple[int, ...]


Instruction: TypeAlias = Receive | Run | Send | Free


class Slot(NamedTuple):
    """The use of a slot.

    Attributes:
        source: the lane that fills the slot: another lane, the slot's own lane, or -1 for the
            caller.
        role: the role of the values in the slot.
    """

    source: int
    role: Role


@dataclass(frozen=True)
class LaneProgram:
    """The program of one lane. Plain data: compares, hashes and pickles.

    A lane's program is complete: running it does not need the programs of other lanes.

    Attributes:
        lane: the number of the lane.
        num_microbatches: the number of microbatches.
        num_slices: the number of slices per microbatch.
        wires: the meaning of the wire numbers.
        calls: the calls of the lane: its actions without microbatches.
        slots: the use of each slot.
        instructions: the instructions, in order.
        ends: for each action, the end of its part of the instructions: its receives, its run, its
            frees and its sends.
        outgoing: (lane, slot) of each slot of another lane that this lane fills.
        left: (value, slot) of each value that the caller takes at the end.
        pairs: the positions of the actions that overlap with their successor.
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
        """The number of pieces: all slices, or microbatches if they are not cut."""
        return self.num_microbatches * self.num_slices

    def value(self, number: int) -> Value:
        """Return the value with a number."""
        return value_of(self.wires, number, self.num_pieces, self.num_slices)

    def action(self, run: Run) -> Action:
        """Return the action of a `Run`."""
        call = self.calls[run.call]
        return action_of(call.kind, call.stage, call.first + run.microbatch, self.num_slices)

    @cached_property
    def sources(self) -> tuple[int | None, ...]:
        """The lane that fills each slot; None: this lane fills it."""
        return tuple(None if slot.source == self.lane else slot.source for slot in self.slots)

    @cached_property
    def taken(self) -> dict[Role, list[tuple[int, int, int]]]:
        """The entries of `left` by role, as (stage, piece, slot)."""
        out: dict[Role, list[tuple[int, int, int]]] = {}
        for number, slot in self.left:
            wire, piece = divmod(number, self.num_pieces)
            role, stage, _, _ = self.wires[wire]
            out.setdefault(role, []).append((stage, piece, slot))
        return out

    @cached_property
    def parts(self) -> tuple[tuple[Instruction, ...], ...]:
        """The instructions of each action: its receives, its run, its frees and its sends."""
        return tuple(self.instructions[start:end] for start, end in pairwise((0, *self.ends)))

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The `Run` instructions, in order."""
        return tuple(instruction for instruction in self.instructions if type(instruction) is Run)

    def contents(self) -> Iterator[tuple[Instruction, dict[int, int]]]:
        """Yield each instruction with the value number in each slot at its begin.

        The yielded dict is reused: copy it to keep it.
        """
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
        """Yield each instruction as text; ``@`` and a slot follow each value."""
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
                    words = [f"{self.action(instruction)}{beside}"]
                    words += ["reads " + see(*reads)] if reads else []
                    words += ["writes " + see(*writes)] if writes else []
                    yield "  ".join(words)
                case Send(slot, to, into):
                    yield f"send {see(slot)} to {to}@{into}"
                case Free(slots):
                    yield f"free {see(*slots)}"

    def head(self) -> str:
        """Return a line of text about the slots of the lane."""
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
    """Write ascending numbers as ranges.

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
    """Return the printed name of a lane."""
    return "caller" if lane == CALLER else str(lane)


def value_of(wires: tuple[Wire, ...], number: int, num_pieces: int, num_slices: int) -> Value:
    """Return the value with a number."""
    wire, piece = divmod(number, num_pieces)
    role, stage, name, peer = wires[wire]
    if num_slices == 1:
        return Value(role, stage, piece, name, peer)
    microbatch, number = divmod(piece, num_slices)
    return Value(role, stage, microbatch, name, peer, number)
