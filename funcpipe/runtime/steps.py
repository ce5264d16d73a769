"""What each row of a program does with a stage: values in, values out, in the order of the effects table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias, assert_never

from funcpipe.core.plan import Lowered, Row
from funcpipe.core.schedule import Kind
from funcpipe.core.stage import Stage
from funcpipe.core.task import Role, Wire
from funcpipe.runtime.border import LEAF, Border
from funcpipe.runtime.host import Host
from funcpipe.runtime.plain import addresses
from funcpipe.runtime.program import Bound, StageArgs, StageOut

Step: TypeAlias = Callable[[list[Any], int], Sequence[Any]]
"""(values read, microbatch) -> values written."""


def make_step(row: Row, program: Lowered, stage: Stage, bound: Bound, host: Host | None) -> Step:
    """The step of a row; everything that is the same for all microbatches is worked out here, once a run.

    Args:
        row: the row.
        program: it is of.
        stage, bound: what it does it with.
        host: the lane's link; None where nothing is moved.
    """
    wires = program.wires
    match row.kind:
        case Kind.F | Kind.R:
            return _forward(row, wires, stage, bound)
        case Kind.B | Kind.I:
            return _backward(row, wires, bound)
        case Kind.W:
            followed = program.followed[row.stage]

            def weights(reads: list[Any], microbatch: int) -> Sequence[Any]:
                bound.backward_weight(reads[0], more=microbatch in followed)
                return ()

            return weights
        case Kind.O | Kind.L:
            assert host is not None
            return _move(row, program.num_microbatches, bound, host)
        case _:
            assert_never(row.kind)


def _forward(row: Row, wires: Sequence[Wire], stage: Stage, bound: Bound) -> Step:
    pops = 1 + len(stage.pop)
    feeds = pops + len(stage.feeds)
    loss = len(row.reads) > feeds
    keeps = row.keeps or row.kind is Kind.R
    forward = bound.forward
    take = _taker([wires[number] for number in row.writes])

    def step(reads: list[Any], microbatch: int) -> Sequence[Any]:
        target = reads[feeds] if loss else None
        args = StageArgs(reads[0], reads[1:pops], reads[pops:feeds], target, microbatch)
        return take(forward(args, keep=keeps))

    return step


def _taker(wires: Sequence[Wire]) -> Callable[[StageOut], Sequence[Any]]:
    """What picks the values that a forward writes out of what it returned."""
    places = {Role.ACT: 0, Role.OUTPUT: 0, Role.REPORT: 1, Role.RESIDUAL: 2}
    if len(wires) > 1 and all(wire.role in places for wire in wires):
        return itemgetter(*[places[wire.role] for wire in wires])

    def take(out: StageOut) -> Sequence[Any]:
        return [out.stash[wire.name] if wire.role is Role.SKIP else out[places[wire.role]] for wire in wires]

    return take


def _backward(row: Row, wires: Sequence[Wire], bound: Bound) -> Step:
    roles = [wires[number] for number in row.reads]
    output = next((at for at, wire in enumerate(roles) if wire.role is Role.GRAD), None)
    # By name, where the gradients from each popper stand; the table has them in the order in which they are added.
    stashed: dict[str, list[int]] = {}
    for at, wire in enumerate(roles):
        if wire.role is Role.SKIP_GRAD:
            stashed.setdefault(wire.name, []).append(at)
    split = row.kind is Kind.I
    gives = any(wires[number].role in (Role.GRAD, Role.INPUT_GRAD) for number in row.writes)
    leaves_of = attrgetter("leaves")

    def step(reads: list[Any], microbatch: int) -> Sequence[Any]:
        y = None if output is None else reads[output].leaves
        stash = {name: [leaves_of(reads[at]) for at in places] for name, places in stashed.items()} if stashed else {}
        if split:
            gradients, residual = bound.backward_input(reads[0], y, stash)
        else:
            gradients, residual = bound.backward(reads[0], y, stash), None
        out: list[Any] = [Border(gradients.x, LEAF, ())] if gives else []
        out += [Border(leaves, LEAF, ()) for leaves in gradients.skips]
        if split:
            out.append(residual)
        return out

    return step


def _move(row: Row, count: int, bound: Bound, host: Host) -> Step:
    if row.kind is Kind.O:
        fixed = host.fixed | addresses(bound.fixed())

        def offload(reads: list[Any], microbatch: int) -> Sequence[Any]:
            reads[0].move(host.out, fixed=fixed)
            return reads

        return offload
    first = row.writes[0] * count

    def load(reads: list[Any], microbatch: int) -> Sequence[Any]:
        event = reads[0].move(host.back)
        if event is not None:
            host.coming[first + microbatch] = event  # the backward waits for it, not who comes before
        return reads

    return load
