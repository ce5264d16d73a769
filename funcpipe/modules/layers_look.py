"""Checks in the first forward of a stage of a layer cut that it gives what the model does; refuses what differs.

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
from funcpipe.core.gradient_graph import nodes_of
from funcpipe.core.torch_names import without_modes
from funcpipe.core.tree import Tree, flatten, is_differentiable, locations, map_leaves, under_transform
from funcpipe.modules.layers_find import TRACED

_BY_NUMBER = ("output_hidden_states", "output_attentions")
"""Flags that take numbers of layers as well as True."""


def asks(name: str, value: Any) -> bool:
    """Whether a flag of a configuration or of a call asks for something of every block."""
    name = name.lstrip("_")  # where a configuration has a property of the name
    return (value is True and name.startswith("output_")) or (
        name in _BY_NUMBER and value is not None and value is not False
    )


def asked(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The arguments of a call that ask for something of every block."""
    arguments = kwargs
    if any(isinstance(value, (bool, int, list)) for value in args):
        try:
            arguments = {**inspect.signature(forward).bind_partial(*args, **kwargs).arguments, **kwargs}
        except (TypeError, ValueError):
            return []  # the call itself says what is wrong
    return [name for name, value in arguments.items() if asks(name, value) or (name == "use_cache" and value is True)]


def nans(tree: Tree) -> list[Tensor] | None:
    """Masks of NaN of the floating tensors of a tree; None if they are no plain tensors with numbers."""
    leaves = [leaf for leaf in flatten(tree)[0] if is_differentiable(leaf)]
    known = not under_transform() and all(type(leaf) in (Tensor, nn.Parameter) and not leaf.is_meta for leaf in leaves)
    return [leaf.detach().isnan() for leaf in leaves] if known else None


def marked(out: Tree) -> tuple[Tree, list[Any]]:
    """What a block returned, as other tensors of the same numbers, and the operations of autograd that made these.

    What comes out of the block by another way comes from before these operations.
    """
    with without_modes():  # so that it does not count as an operation of the model
        out = map_leaves(lambda leaf: leaf.view_as(leaf) if _has_graph(leaf) else leaf, out)
    return out, [leaf.grad_fn for leaf in flatten(out)[0] if _has_graph(leaf)]


def _has_graph(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.grad_fn is not None


def beside(y: Tree, ends: Iterable[Any], tensor_ids: Collection[int]) -> str:
    """The first leaf of an output that depends on tensors of the blocks by another way than what the blocks returned.

    ``ends`` are the operations that made what the blocks returned, ``tensor_ids`` the ids of the tensors that the
    blocks alone have.
    """
    passed = set(ends)
    for place, leaf in zip(locations(y, "output"), flatten(y)[0], strict=True):
        nodes = nodes_of([leaf], passed) if _has_graph(leaf) else ()
        if any(id(getattr(node, "variable", None)) in tensor_ids for node in nodes):
            return place
    return ""


def differs(y: Tree, other: Tree) -> str:
    """The first place of an output that another output lacks; "" for none."""
    places, others = locations(y, "output"), set(locations(other, "output"))
    return next((place for place in places if place not in others), "")


def incomplete(place: str) -> PlanError:
    """The error of an output that depends on what blocks hand out beside what they return."""
    return PlanError(
        f"{place} is made of what blocks hand out beside their output (collected by hooks or in a list, or kept as "
        "attributes), and the last stage has its own blocks only, so it would be incomplete; do without it, or "
        f"{TRACED}"
    )
