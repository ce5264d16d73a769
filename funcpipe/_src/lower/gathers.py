"""Which U of a program gather parameters, and when gathered parameters are freed."""

from __future__ import annotations

from collections.abc import Collection

from funcpipe._src.core.remembered import Remembered
from funcpipe._src.data.kinds import COMPUTES, COUNTED
from funcpipe._src.data.lowered import Lowered
from funcpipe._src.data.program import LaneProgram
from funcpipe._src.data.schedule import Action, serving

_serving: Remembered[Lowered, frozenset[Action]] = Remembered(
    lambda program: serving([program.action(code) for code in program.order])
)
"""The U of a program that serve at least one action."""


def useful_gathers(program: Lowered, stage: int) -> frozenset[int]:
    """Return the numbers of a stage's U that gather: the first, and those that serve an action."""
    return frozenset({0, *(number for _, at, number, _ in _serving(program) if at == stage)})


def last_uses(
    program: LaneProgram, stage: int, gathers: Collection[int]
) -> frozenset[tuple[int, int]]:
    """Return (call, microbatch) of each action after which a stage's parameters can be freed.

    These are the last uses before each further gather, and at the end.
    """
    last: set[tuple[int, int]] = set()
    use: tuple[int, int] | None = None
    for run in program.runs:
        call = program.calls[run.call]
        if call.stage != stage:
            continue
        if call.kind in COMPUTES:
            use = (run.call, run.microbatch)
        elif call.kind in COUNTED and call.first + run.microbatch in gathers and use is not None:
            last.add(use)
            use = None
    return frozenset(last | ({use} if use is not None else set()))
