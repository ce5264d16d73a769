"""Replace modules of a stage's copy, or intercept their calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from funcpipe._src.core.torch_names import drop_hooks
from funcpipe._src.core.tree import Tree


class Leave(BaseException):
    """Ends a forward after the stage's last block, with what the block returned."""

    def __init__(self, out: Tree) -> None:
        self.out = out


def stub(layer: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace a module's forward and drop its hooks, because they run in the stage that has the
    module."""
    vars(layer)["forward"] = forward
    drop_hooks(layer)


def intercept(layer: nn.Module, called: Callable[..., Any]) -> None:
    """Send every call of a module to ``called``. The first argument of ``called`` is the original
    call, with hooks.

    The module gets a new class, because Python looks up ``__call__`` in the class.
    """
    kind = type(layer)

    def call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return called(partial(kind.__call__, self), *args, **kwargs)

    names = {
        "__call__": call,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    layer.__class__ = type(kind.__name__, (kind,), names)


def outer_paths(path: str) -> list[str]:
    """The paths of the modules that contain a list, the model itself first."""
    steps = path.split(".") if path else []
    return [".".join(steps[:depth]) for depth in range(len(steps))]
