"""Refuses gradients that a run would miss: of tensors outside of params, and by backwards that a stage calls."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from funcpipe.core.errors import PlanError, raise_all
from funcpipe.core.stage import Stage
from funcpipe.runtime.reached import Reached


def refuse_foreign(stage: Stage, foreign: Sequence[Tensor]) -> bool:
    """Refuse tensors that require gradients and are not in the stage's params: a run gives them no gradient.

    A leaf that the function makes itself (to differentiate by it) is another one in each call, so one that is not among
    what the function closes over is refused at the second call that computes with it.

    Returns:
        True where all is settled; False where the next graph must be checked too.

    Raises:
        PlanError: it names them.
    """
    if not foreign:
        return True
    names = {id(value): name for name, value in Reached(stage).found.items()}
    refs = stage.seen.foreign
    earlier = [ref() for ref in refs]
    faults = [
        f"{names.get(id(leaf), 'a tensor')}: {str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
        for leaf in foreign
        if id(leaf) in names or any(leaf is other for other in earlier)
    ]
    raise_all(
        "the stage computes with tensors that require gradients and are not in its params, so nobody would "
        "train them; hand them in as params (a module: stage, params, state = fp.from_module(net), or "
        "torch.func.functional_call(net, params, x) in the stage), or use them detached:",
        faults,
    )
    refs[:] = map(weakref.ref, foreign)
    return bool(earlier)


def refuse_backward(gradients: Iterable[Tensor | None]) -> None:
    """Refuse a stage that calls backward itself: it leaves these gradients before the run does. Raises PlanError."""
    if any(gradient is not None for gradient in gradients):
        raise PlanError(
            "the stage, or the loss, calls backward itself, and that is what the run does: return the output, or the "
            "loss, alone. A gradient that belongs to the forward is torch.autograd.grad(y, x, create_graph=True)"
        )


def refuse_around(nodes: Iterable[Any], leaves: Iterable[Any]) -> None:
    """Refuse a loss that closes over the caller's parameters: the run trains them, but gives them no gradient this way.

    ``nodes`` are of the loss's graph, ``leaves`` the parameters as they were given. Raises PlanError.
    """
    param_ids = {id(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
    if any(id(getattr(node, "variable", None)) in param_ids for node in nodes):
        raise PlanError(
            "the loss computes with parameters themselves, taken from around it, and no gradient goes there; a term of "
            "parameters belongs into their stage, fp.Out(y, loss=(term, 1.0)), or into the optimizer (weight_decay=)"
        )
