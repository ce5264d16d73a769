"""What each kind of action reads and writes; what is sent, slots and frees follow from it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, assert_never

from funcpipe._src.data.program import Role, Wire
from funcpipe._src.data.schedule import Kind
from funcpipe._src.data.stage import Stage
from funcpipe._src.lower.skips import Route


@dataclass(frozen=True)
class EffectContext:
    """What the table depends on besides the action.

    Attributes:
        stages: the stages.
        routes: the skips.
        loss: does the last stage end in the plan's loss.
        outputs: does the caller get the last stage's outputs.
        inputs: does the caller get the gradients of the inputs.
        reduced: the stages with a G, which begins to sum their gradients; of others S does.
    """

    stages: Sequence[Stage]
    routes: Mapping[str, Route]
    loss: bool
    outputs: bool
    inputs: bool = False
    reduced: Collection[int] = ()


class Among(NamedTuple):
    """Where a slice stands among those of its microbatch."""

    first: bool
    last: bool


ALONE = Among(first=True, last=True)
"""A microbatch that is whole."""


def effects(
    kind: Kind, stage: int, keeps: bool, context: EffectContext, among: Among = ALONE
) -> tuple[list[Wire], list[Wire]]:
    """The wires that an action reads, and those that it writes.

    A forward does not keep its residual where it is computed again, or never needed. Gradients of
    one skip from several pops are read in descending order of the popper: plain autograd adds them
    in that order. A stage with a carry gets it from the slice before, and its gradient from the
    slice after.
    """
    this, last = context.stages[stage], len(context.stages) - 1
    ends_in_loss = stage == last and context.loss
    residual = Wire(Role.RESIDUAL, stage)
    arguments = [Wire(Role.ACT, stage - 1) if stage else Wire(Role.INPUT, 0)]
    arguments += [Wire(Role.SKIP, context.routes[name].stash, name) for name in this.pop]
    arguments += [Wire(Role.CARRY, stage)] if this.carry and not among.first else []
    arguments += [Wire(Role.FEED, 0, name) for name in this.feeds]
    arguments += [Wire(Role.TARGET, stage)] if ends_in_loss else []
    stashes = [name for name in (*this.stash, *this.offers) if name in context.routes]
    match kind:
        case Kind.F:
            results = [Wire(Role.ACT, stage)] if stage < last else []
            results += [Wire(Role.OUTPUT, stage)] if stage == last and context.outputs else []
            results += [Wire(Role.SKIP, stage, name) for name in stashes]
            results += [Wire(Role.CARRY, stage)] if this.carry and not among.last else []
            results += [Wire(Role.REPORT, stage)]
            results += [residual] if keeps else []
            return arguments, results
        case Kind.R:
            return arguments, [residual]
        case Kind.B | Kind.I:
            cotangents = [] if ends_in_loss else [Wire(Role.GRAD, stage)]
            for name in stashes:
                poppers = sorted(context.routes[name].pops, reverse=True)
                cotangents += [Wire(Role.SKIP_GRAD, stage, name, popper) for popper in poppers]
            cotangents += [Wire(Role.CARRY_GRAD, stage)] if this.carry and not among.last else []
            gradients = (
                [Wire(Role.GRAD, stage - 1)]
                if stage
                else [Wire(Role.INPUT_GRAD, 0)]
                if context.inputs
                else []
            )
            gradients += [
                Wire(Role.SKIP_GRAD, context.routes[name].stash, name, stage) for name in this.pop
            ]
            gradients += [Wire(Role.CARRY_GRAD, stage)] if this.carry and not among.first else []
            gradients += [Wire(Role.WEIGHT_RESIDUAL, stage)] if kind is Kind.I else []
            return [residual, *cotangents], gradients
        case Kind.O:
            return [residual], [Wire(Role.OFFLOADED, stage)]
        case Kind.L:
            return [Wire(Role.OFFLOADED, stage)], [residual]
        case Kind.W:
            return [Wire(Role.WEIGHT_RESIDUAL, stage)], []
        case Kind.G:
            return [], [Wire(Role.SUMS, stage)]
        case Kind.S:
            sums = [Wire(Role.SUMS, stage)]
            return (sums, []) if stage in context.reduced else ([], sums)
        case Kind.U:
            return [], []  # the parameters are the stage's own
        case _:
            assert_never(kind)
