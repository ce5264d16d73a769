"""The arrows of a trace: values that actions pass between devices, and skips."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from funcpipe._src.data.kinds import Kind
from funcpipe._src.data.program import CALLER, Call, Role

if TYPE_CHECKING:
    from funcpipe._src.data.lowered import Lowered

_WORDS = {Role.SKIP: "skip", Role.SKIP_GRAD: "gradient of skip", Role.GRAD: "gradient"}


class Arrow(NamedTuple):
    """A value that one kind of action makes and another reads. Each microbatch has such an arrow."""

    value: str  # the label: "act", "gradient", "skip early"
    source: tuple[Kind, int]  # (kind, stage) of the action that makes the value
    target: tuple[Kind, int]  # (kind, stage) of the action that reads the value
    crosses: bool  # whether the two actions run on two devices, so that the value is copied or sent


def arrows_of(program: Lowered) -> tuple[Arrow, ...]:
    """Return the arrows of a program: values that cross between lanes, and all skips."""
    makers: dict[int, list[Call]] = {}
    for call in program.calls:
        for wire in call.writes:
            makers.setdefault(wire, []).append(call)
    found: dict[Arrow, None] = {}
    for reader in program.calls:
        for number, _ in reader.reads:
            role, _, name, _ = program.wires[number]
            for maker in makers.get(number, ()):
                crosses = CALLER != maker.lane != reader.lane
                if crosses or role in (Role.SKIP, Role.SKIP_GRAD):
                    value = f"{_WORDS.get(role, role.value)} {name}".rstrip()
                    found[
                        Arrow(
                            value, (maker.kind, maker.stage), (reader.kind, reader.stage), crosses
                        )
                    ] = None
    return tuple(found)
