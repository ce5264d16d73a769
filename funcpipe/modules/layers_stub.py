"""Stand-ins for the modules of other stages in a stage of a layer cut."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from funcpipe.core.torch_names import drop_hooks
from funcpipe.core.tree import Tree, is_differentiable


class Blank:
    """What later stages know of a floating tensor that an entry made in the first. No dataclass: it is one leaf."""

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Blank) and (self.shape, self.dtype) == (other.shape, other.dtype)

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype))


class Leave(BaseException):
    """Ends a forward after the stage's last block, with what the block returned."""

    def __init__(self, out: Tree) -> None:
        self.out = out


def stub(layer: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace a module's forward and drop its hooks, which are for the stage that has the module."""
    vars(layer)["forward"] = forward
    drop_hooks(layer)


def real(layer: nn.Module) -> Callable[..., Any]:
    """The forward that a module has, without a reference to the module."""
    replaced = vars(layer).get("forward")
    if replaced is not None:
        return replaced
    reference = weakref.ref(layer)

    def forward(*args: Any, **kwargs: Any) -> Any:
        module = reference()
        assert module is not None
        return type(module).forward(module, *args, **kwargs)

    return forward


def outline(leaf: Any) -> Any:
    """A leaf that an entry returned as later stages get it: a `Blank` where it can have a gradient."""
    return Blank(tuple(leaf.shape), leaf.dtype) if is_differentiable(leaf) else leaf


def outer_paths(path: str) -> list[str]:
    """The paths of the modules around a list: the model's own first."""
    steps = path.split(".") if path else []
    return [".".join(steps[:depth]) for depth in range(len(steps))]
