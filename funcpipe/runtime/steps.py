"""What each row of a program does with a stage: values in, values out, in the order of the effects table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, TypeAlias, assert_never

from funcpipe.core.plan import Role, Row, Wire
from funcpipe.core.schedule import Kind
from funcpipe.core.stage import Stage
from funcpipe.runtime.border import LEAF, Border
from funcpipe.runtime.program import Bound, StageArgs, StageOut

Step: TypeAlias = Callable[[list[Any], int], Sequence[Any]]
"""(values read, microbatch) -> values written."""


def make_step(row: Row, wires: Sequence[Wire], stage: Stage, bound: Bound) -> Step:
    """The step of a row; everything that is the same for all microbatches is worked out here, once a run."""
    match row.kind:
        case Kind.F | Kind.R:
            return _forward(row, wires, stage, bound)
        case Kind.B | Kind.I:
            return _backward(row, wires, bound)
        case Kind.W:

            def weights(reads: list[Any], microbatch: int) -> Sequence[Any]:
                bound.backward_weight(reads[0])
                return ()

            return weights
        case _:
            assert_never(row.kind)


def _forward(row: Row, wires: Sequence[Wire], stage: Stage, bound: Bound) -> Step:
    pops = 1 + len(stage.pop)
    feeds = pops + len(stage.feeds)
    loss = len(row.reads) > feeds
    keeps = row.keeps or row.kind is Kind.R
    forward = bound.forward
    picks = [_pick(wires[number]) for number in row.writes]

    def step(reads: list[Any], microbatch: int) -> Sequence[Any]:
        target = reads[feeds] if loss else None
        both = forward(StageArgs(reads[0], reads[1:pops], reads[pops:feeds], target, microbatch), keep=keeps)
        return [pick(both) for pick in picks]

    return step


def _pick(wire: Wire) -> Callable[[tuple[StageOut, Any]], Any]:
    """Where a value that a forward writes stands in what it returned."""
    role, name = wire.role, wire.name
    if role is Role.ACT or role is Role.OUTPUT:
        return lambda both: both[0].y
    if role is Role.SKIP:
        return lambda both: both[0].stash[name]
    return (lambda both: both[0].report) if role is Role.REPORT else (lambda both: both[1])


def _backward(row: Row, wires: Sequence[Wire], bound: Bound) -> Step:
    roles = [wires[number] for number in row.reads]
    output = next((at for at, wire in enumerate(roles) if wire.role is Role.GRAD), None)
    # By name, where the gradients from each popper stand; the table has them in the order in which they are added.
    stashed: dict[str, list[int]] = {}
    for at, wire in enumerate(roles):
        if wire.role is Role.SKIP_GRAD:
            stashed.setdefault(wire.name, []).append(at)
    first, split = row.stage == 0, row.kind is Kind.I
    leaves_of = attrgetter("leaves")

    def step(reads: list[Any], microbatch: int) -> Sequence[Any]:
        y = None if output is None else reads[output].leaves
        stash = {name: [leaves_of(reads[at]) for at in places] for name, places in stashed.items()}
        rest: list[Any] = []
        if split:
            gradients, residual = bound.backward_input(reads[0], y, stash)
            rest = [residual]
        else:
            gradients = bound.backward(reads[0], y, stash)
        parts = gradients.skips if first else [gradients.x, *gradients.skips]
        return [*(Border(leaves, LEAF, ()) for leaves in parts), *rest]

    return step
