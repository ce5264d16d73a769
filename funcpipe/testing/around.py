"""A stage with something around every call of its function, in a run and outside of one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from funcpipe.core.stage import Bindable, BoundFn, Stage, bindable
from funcpipe.core.tree import Tree

Hook: TypeAlias = Callable[[Callable[[], Any], Tree, dict[str, Any]], Any]
"""(call, input, extras) -> what the stage returns; ``call()`` is what it would have returned."""


class Around(Bindable):
    """The function of a stage with a hook around it; what it declares, draws and is made of stays the same."""

    def __init__(self, stage: Stage, hook: Hook) -> None:
        self.stage, self.hook = stage, hook

    def __call__(self, params: Tree, x: Tree, **extras: Any) -> Any:
        """Call outside of a run."""
        return self.hook(lambda: self.stage.fn(params, x, **extras), x, extras)

    def bind(self, params: Tree, state: Tree) -> BoundFn:
        """The bound function with the hook around it."""
        return _BoundAround(self.stage.bind(params, state), self.hook)

    def layers(self) -> Iterable[str]:
        """Those of the stage."""
        return self.stage.layers()

    def parts(self) -> Iterable[Stage]:
        """Those of the stage."""
        return self.stage.fn.parts() if bindable(self.stage.fn) else ()


class _BoundAround:
    def __init__(self, fn: BoundFn, hook: Hook) -> None:
        self.fn, self.hook = fn, hook
        self.places = fn.places

    def __call__(self, x: Tree, **extras: Any) -> Any:
        return self.hook(lambda: self.fn(x, **extras), x, extras)

    def release(self) -> None:
        self.fn.release()
