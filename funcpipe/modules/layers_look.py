"""Does a stage of a layer cut give what the model does: looked at in its first forward, refused by name if it does not.

A stage sees its own blocks only, so what a model collects over all of them would come out incomplete. Asked for by name
it is refused before anything runs; what blocks hand out beside their output (a list that they append to, an attribute
that the end of the model sums up) shows in the last stage, which is the one that would return it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.core.errors import PlanError
from funcpipe.core.torch_names import without_modes
from funcpipe.core.tree import Tree, flatten, is_differentiable, locations, map_leaves, under_transform
from funcpipe.modules.layers_find import TRACED

_BY_NUMBER = ("output_hidden_states", "output_attentions")
"""Flags that take numbers of layers as well as True."""


def asks(name: str, value: Any) -> bool:
    """Does a flag of a configuration or of a call ask for something of every block."""
    name = name.lstrip("_")  # where a configuration has a property of the name
    return (value is True and name.startswith("output_")) or (
        name in _BY_NUMBER and value is not None and value is not False
    )


def asked(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """What the inputs of a call ask for that is collected from all blocks."""
    given = kwargs
    if any(isinstance(one, (bool, int, list)) for one in args):
        try:
            given = {**inspect.signature(forward).bind_partial(*args, **kwargs).arguments, **kwargs}
        except (TypeError, ValueError):
            return []  # the call itself says what is wrong
    return [name for name, value in given.items() if asks(name, value) or (name == "use_cache" and value is True)]


def nans(tree: Tree) -> list[Tensor] | None:
    """Where the floating tensors of a tree are NaN; None if they are no plain tensors with numbers."""
    found = [leaf for leaf in flatten(tree)[0] if is_differentiable(leaf)]
    known = not under_transform() and all(type(leaf) in (Tensor, nn.Parameter) and not leaf.is_meta for leaf in found)
    return [leaf.detach().isnan() for leaf in found] if known else None


def marked(out: Tree) -> tuple[Tree, list[Any]]:
    """What a block returned, as other tensors of the same numbers, and the operations of autograd that made these.

    What comes out of the block by another way comes from before these operations.
    """
    with without_modes():  # nobody counts this as an operation of the model
        out = map_leaves(lambda leaf: leaf.view_as(leaf) if _has_graph(leaf) else leaf, out)
    return out, [leaf.grad_fn for leaf in flatten(out)[0] if _has_graph(leaf)]


def _has_graph(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.grad_fn is not None


def beside(y: Tree, ends: Iterable[Any], own: Collection[int]) -> str:
    """The first leaf of an output that depends on tensors of the blocks by another way than what the blocks returned.

    Args:
        y: the output.
        ends: the operations that made what the blocks returned.
        own: the ids of the tensors that the blocks alone have.
    """
    passed = set(ends)
    for place, leaf in zip(locations(y, "output"), flatten(y)[0], strict=True):
        waiting = [leaf.grad_fn] if _has_graph(leaf) else []
        while waiting:
            step = waiting.pop()
            if step in passed:
                continue
            passed.add(step)
            if id(getattr(step, "variable", None)) in own:
                return place
            waiting += [before for before, _ in step.next_functions if before is not None]
    return ""


def differs(y: Tree, other: Tree) -> str:
    """The first place that two outputs do not share."""
    mine, others = locations(y, "output"), set(locations(other, "output"))
    return next((place for place in mine if place not in others), "")


def incomplete(place: str) -> PlanError:
    """What to say of an output that holds what blocks hand out beside what they return."""
    return PlanError(
        f"{place} is made of what blocks hand out beside their output (collected by hooks or in a list, or kept as "
        "attributes), and the last stage has its own blocks only, so it would be incomplete; do without it, or "
        f"{TRACED}"
    )
