"""Make the step of each call of a program: a function from the read values to the written values.

The order of both is that of the effects table (`lower.effects`). `Lane` moves values and slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias, assert_never

from funcpipe._src.core.border import LEAF, Border
from funcpipe._src.core.plain_tensors import addresses
from funcpipe._src.data.program import Call, LaneProgram, Role, Run, Wire
from funcpipe._src.data.schedule import Kind
from funcpipe._src.data.stage import CARRY, Stage
from funcpipe._src.devices.host_link import HostLink
from funcpipe._src.replicas.replicas import Reduction
from funcpipe._src.stages.bound import Bound, StageArgs, StageOut
from funcpipe._src.stages.residual import EagerResidual

Step: TypeAlias = Callable[[list[Any], Run], Sequence[Any]]
"""(values read, instruction) -> values written."""
_CARRIES = (Role.CARRY, Role.CARRY_IN, Role.CARRY_OUT)


def make_step(
    call: Call,
    program: LaneProgram,
    stage: Stage,
    bound: Bound,
    host: HostLink | None,
    reduce: Callable[[int, int | None], Reduction],
    advance: Callable[[int, Reduction], None],
) -> Step:
    """Make the step of a call. Work that is the same for all microbatches is done here, once per
    run."""
    wires = program.wires
    match call.kind:
        case Kind.F | Kind.R:
            return _forward(call, wires, stage, bound)
        case Kind.B | Kind.I:
            return _backward(call, wires, bound)
        case Kind.W:

            def weights(reads: list[Any], run: Run) -> Sequence[Any]:
                bound.backward_weight(reads[0])
                return ()

            return weights
        case Kind.O | Kind.L:
            assert host is not None
            return _move(call, bound, host)
        case Kind.U:
            # Nothing to gather for parameters in this process; `sharded.holding` wraps the others.
            return _nothing
        case Kind.G:
            return lambda reads, run: [reduce(call.stage, run.writes[0])]
        case Kind.S:

            def stepped(reads: list[Any], run: Run) -> Sequence[Any]:
                # Without a read, the schedule has no G for this stage: begin the reduction here.
                written = [] if reads else [reduce(call.stage, None)]
                (reduction,) = reads or written
                advance(call.stage, reduction)
                return written

            return stepped
        case _:
            assert_never(call.kind)


def _nothing(reads: list[Any], run: Run) -> Sequence[Any]:
    return ()


def _forward(call: Call, wires: Sequence[Wire], stage: Stage, bound: Bound) -> Step:
    pops = 1 + len(stage.pop) + any(wires[number].role in _CARRIES for number, _ in call.reads)
    feeds = pops + len(stage.feeds)
    loss = len(call.reads) > feeds
    keeps = call.keeps or call.kind is Kind.R
    forward = bound.forward
    written = [wires[number] for number in call.writes]
    take = _taker(written)
    drops = (
        stage.carry and call.kind is Kind.F and all(wire.role not in _CARRIES for wire in written)
    )

    def step(reads: list[Any], run: Run) -> Sequence[Any]:
        target = reads[feeds] if loss else None
        args = StageArgs(
            reads[0],
            reads[1:pops],
            reads[pops:feeds] if feeds > pops else (),
            target,
            run.microbatch,
        )
        out = forward(args, keep=keeps)
        if drops and isinstance(out.residual, EagerResidual):
            # The last slice: no piece reads this carry, so no gradient will come for it.
            out.residual.stash.pop(CARRY, None)
        return take(out)

    return step


def _taker(wires: Sequence[Wire]) -> Callable[[StageOut], Sequence[Any]]:
    """Return a function that selects the written values from a forward's `StageOut`."""
    places = {Role.ACT: 0, Role.OUTPUT: 0, Role.REPORT: 1, Role.RESIDUAL: 2}
    stashed = (Role.SKIP, *_CARRIES)  # a carry has the name CARRY, "", as a wire
    if len(wires) > 1 and all(wire.role in places for wire in wires):
        return itemgetter(*[places[wire.role] for wire in wires])

    def take(out: StageOut) -> Sequence[Any]:
        return [
            out.stash[wire.name] if wire.role in stashed else out[places[wire.role]]
            for wire in wires
        ]

    return take


def _backward(call: Call, wires: Sequence[Wire], bound: Bound) -> Step:
    roles = [wires[number] for number, _ in call.reads]
    output = next((at for at, wire in enumerate(roles) if wire.role is Role.GRAD), None)
    # By name, the positions of the gradients from each popping stage. The table has them in the
    # order in which they are added; another order would change the rounding.
    stashed: dict[str, list[int]] = {}
    for at, wire in enumerate(roles):
        if wire.role in (Role.SKIP_GRAD, Role.CARRY_GRAD):
            stashed.setdefault(wire.name, []).append(at)
    split = call.kind is Kind.I
    gives = any(wires[number].role in (Role.GRAD, Role.INPUT_GRAD) for number in call.writes)
    leaves_of = attrgetter("leaves")

    def step(reads: list[Any], run: Run) -> Sequence[Any]:
        y = None if output is None else reads[output].leaves
        stash = (
            {name: [leaves_of(reads[at]) for at in places] for name, places in stashed.items()}
            if stashed
            else {}
        )
        gradients, residual = bound.backward(reads[0], y, stash, split=split)
        out: list[Any] = [Border(gradients.x, LEAF, ())] if gives else []
        if gradients.skips:
            out += [Border(leaves, LEAF, ()) for leaves in gradients.skips]
        if split:
            out.append(residual)
        return out

    return step


def _move(call: Call, bound: Bound, host: HostLink) -> Step:
    if call.kind is Kind.O:

        def offload(reads: list[Any], run: Run) -> Sequence[Any]:
            # Read anew, because gathered parameters get other memory with each gather.
            own_memory = addresses([*bound.params.leaves, *bound.params.state_leaves])
            reads[0].move(host.out, fixed=host.fixed | own_memory)
            return reads

        return offload

    def load(reads: list[Any], run: Run) -> Sequence[Any]:
        event = reads[0].move(host.back)
        if event is not None:
            # The backward that reads the slot waits for the copy, not the actions before it.
            host.coming[run.writes[0]] = event
        return reads

    return load
