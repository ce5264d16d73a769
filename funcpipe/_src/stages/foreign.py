"""Refuse gradients that a run would miss: of tensors outside params."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.data.stage import Stage
from funcpipe._src.stages.explain import described
from funcpipe._src.stages.reached import Reached


def refuse_foreign(stage: Stage, fn: Any, foreign: Sequence[Tensor]) -> None:
    """Refuse tensors that require gradients but are not in the stage's params.

    A run would give them no gradient. Refused are tensors in the function's closure, in attributes
    of the stage's copy, and tensors that an earlier graph contained, too. Other leaves pass,
    because the function makes them in each call to differentiate by them.

    Raises:
        PlanError: names the tensors.
    """
    if any(leaf is ref() for ref in stage.seen.inputs for leaf in foreign):
        raise PlanError(
            "the stage computes with an input that it kept from an earlier microbatch, which gets "
            "no gradient from here, because its backward may be over; keep the input detached, or "
            "pass it as a skip or as the carry of a slice"
        )
    reached = Reached(stage, getattr(fn, "module", None)).found
    names = {id(value): name for name, value in reached.items()}
    refs = stage.seen.foreign
    earlier = [ref() for ref in refs]
    faults = [
        f"{names.get(id(leaf), 'a tensor')}: {described(leaf)}"
        for leaf in foreign
        if id(leaf) in names or any(leaf is other for other in earlier)
    ]
    raise_all(
        "the stage computes with tensors that require gradients but are not in its params, so "
        "they would not be trained; pass them as params (for a module: stage, params, state = "
        "fp.from_module(net), with layers in an nn.ModuleList and tensors as nn.Parameter; or "
        "torch.func.functional_call(net, params, x) in the stage), or use them detached:",
        faults,
    )
    refs[:] = map(weakref.ref, foreign)


_OWNER = "_funcpipe_stage"
"""The attribute of a parameter's alias, or of an input, with the number of its stage."""


def mark_owner(leaves: Iterable[Tensor], stage: int) -> None:
    """Mark leaves of a stage's graph, for `refuse_other_stages`."""
    for leaf in leaves:
        setattr(leaf, _OWNER, stage)


def refuse_other_stages(stage: int, leaves: Iterable[Tensor]) -> None:
    """Raise PlanError if a graph contains leaves of another stage.

    A hook or a list may have kept a value of that stage. A backward gives its leaves no gradient.
    """
    others = sorted({getattr(leaf, _OWNER, stage) for leaf in leaves} - {stage})
    if others:
        raise PlanError(
            f"stage {stage} or its loss computes with a value of stage {others[0]} that a hook, an "
            "attribute or a list has kept, and no gradient flows back to that stage from here; "
            "return the value beside the output, or as a skip (Out(stash=...), pop=), or keep it "
            "detached"
        )


def refuse_in_loss(foreign: Sequence[Tensor], leaves: Iterable[Any]) -> None:
    """Refuse a loss with its own parameters, or that closes over parameters of the stages.

    A run gives neither of them a gradient. Leaves that the loss makes itself pass.

    Args:
        foreign: leaves of the loss's graph that are not inputs.
        leaves: the parameters that the caller gave.

    Raises:
        PlanError: with the remedy.
    """
    param_ids = {id(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
    if any(id(leaf) in param_ids for leaf in foreign):
        raise PlanError(
            "the loss closes over parameters of the stages, which get no gradient from there; "
            "compute a term of parameters in their stage, fp.Out(y, loss=(term, 1.0)), or use the "
            "optimizer's weight_decay="
        )
    raise_all(
        "the loss has its own parameters, which get no gradient from a run. To train them, move "
        "the part of the loss with these parameters to the end of the last stage. If they are "
        "trained elsewhere, as a critic is, freeze them during the run: "
        "critic.requires_grad_(False), or torch.func.functional_call of detached parameters:",
        [f"a parameter, {described(leaf)}" for leaf in foreign if isinstance(leaf, nn.Parameter)],
    )
