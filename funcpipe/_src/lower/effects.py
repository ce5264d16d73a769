"""The table of values that each kind of action reads and writes.

Sends, slots and frees are not listed here: `program.py` and `data/lowered.py` derive them.
"""

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
    """The facts about a plan that the table depends on."""

    stages: Sequence[Stage]  # the stages
    routes: Mapping[str, Route]  # the route of each skip
    loss: bool  # whether the last stage ends in the plan's loss
    outputs: bool  # whether the caller receives the outputs of the last stage
    inputs: bool = False  # whether the caller receives the gradients of the inputs
    # The stages with a G, which begins to sum their gradients. For other stages S does.
    reduced: Collection[int] = ()
    # Whether the caller gives the carry of the first slices, and receives the carry of the last
    # slices.
    carry: bool = False


class Among(NamedTuple):
    """The place of a slice in its microbatch: first, last, both or neither."""

    first: bool
    last: bool


ALONE = Among(first=True, last=True)  # the place of a microbatch that is not cut


def effects(
    kind: Kind, stage: int, keeps: bool, context: EffectContext, among: Among = ALONE
) -> tuple[list[Wire], list[Wire]]:
    """Return the wires that an action reads, and the wires that it writes.

    A forward with ``keeps=False`` does not keep its residual: R recomputes it, or no backward needs
    it.
    """
    this, last = context.stages[stage], len(context.stages) - 1
    ends_in_loss = stage == last and context.loss
    residual = Wire(Role.RESIDUAL, stage)
    arguments = [Wire(Role.ACT, stage - 1) if stage else Wire(Role.INPUT, 0)]
    arguments += [Wire(Role.SKIP, context.routes[name].stash, name) for name in this.pop]
    if this.carry and (context.carry or not among.first):
        arguments += [Wire(Role.CARRY_IN if among.first else Role.CARRY, stage)]
    arguments += [Wire(Role.FEED, 0, name) for name in this.feeds]
    arguments += [Wire(Role.TARGET, stage)] if ends_in_loss else []
    stashes = [name for name in (*this.stash, *this.offers) if name in context.routes]
    match kind:
        case Kind.F:
            results = [Wire(Role.ACT, stage)] if stage < last else []
            results += [Wire(Role.OUTPUT, stage)] if stage == last and context.outputs else []
            results += [Wire(Role.SKIP, stage, name) for name in stashes]
            if this.carry and (context.carry or not among.last):
                results += [Wire(Role.CARRY_OUT if among.last else Role.CARRY, stage)]
            results += [Wire(Role.REPORT, stage)]
            results += [residual] if keeps else []
            return arguments, results
        case Kind.R:
            return arguments, [residual]
        case Kind.B | Kind.I:
            cotangents = [] if ends_in_loss else [Wire(Role.GRAD, stage)]
            for name in stashes:
                # Descending, because plain autograd adds the gradients of several uses in this
                # order. In another order the sum would not be bit-identical to plain autograd.
                poppers = sorted(context.routes[name].pops, reverse=True)
                cotangents += [Wire(Role.SKIP_GRAD, stage, name, popper) for popper in poppers]
            cotangents += [Wire(Role.CARRY_GRAD, stage)] if this.carry and not among.last else []
            gradients = [Wire(Role.INPUT_GRAD, 0)] if context.inputs else []
            if stage:
                gradients = [Wire(Role.GRAD, stage - 1)]
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
            return [], []  # U writes the stage's parameters, which are not values of the program
        case _:
            assert_never(kind)
