"""Which action hands a value to which: the arrows of a trace, between devices and of skips."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from funcpipe._src.data.kinds import Kind
from funcpipe._src.data.program import CALLER, Call, Role

if TYPE_CHECKING:
    from funcpipe._src.data.lowered import Lowered

_WORDS = {Role.SKIP: "skip", Role.SKIP_GRAD: "gradient of skip", Role.GRAD: "gradient"}


class Arrow(NamedTuple):
    """A value that one action makes and another one reads, microbatches left open: each has one.

    Attributes:
        value: what it is: "act", "gradient", "skip early".
        source: kind and stage of what makes it.
        target: kind and stage of what reads it.
        crosses: do they run on two devices, so that it is copied, or sent.
    """

    value: str
    source: tuple[Kind, int]
    target: tuple[Kind, int]
    crosses: bool


def arrows_of(program: Lowered) -> tuple[Arrow, ...]:
    """The arrows of a program: of values that cross from one lane to another, and of all skips."""
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
