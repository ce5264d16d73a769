"""Put a hook around every call of a stage's function, in a run and outside of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeAlias

from funcpipe._src.core.tree import Tree
from funcpipe._src.data.stage import Bindable, BoundFn, Origin, Stage

StageCall: TypeAlias = Callable[[Tree, Tree, dict[str, Any]], Any]
"""``(params, input, extras) -> result of the stage``. A bound stage ignores params."""

Hook: TypeAlias = Callable[[StageCall, Tree, Tree, dict[str, Any]], Any]
"""``(call, params, input, extras) -> result of the stage``."""


class HookedFn(Bindable):
    """The function of a stage with a hook around it; all else about the stage stays."""

    def __init__(self, stage: Stage, hook: Hook) -> None:
        self.stage, self.hook = stage, hook

    def call(self, params: Tree, x: Tree, extras: dict[str, Any]) -> Any:
        return self.stage.fn(params, x, **extras)

    def __call__(self, params: Tree, x: Tree, **extras: Any) -> Any:
        return self.hook(self.call, params, x, extras)

    def bind(self, params: Tree, state: Tree) -> BoundFn:
        return _BoundAround(self, params, state)

    def layers(self) -> Iterable[str]:
        return self.stage.layers()

    def parts(self) -> Iterable[Stage]:
        return self.stage.fn.parts() if isinstance(self.stage.fn, Bindable) else ()

    def described(self) -> Iterable[tuple[str, str]]:
        return self.stage.described()

    def origins(self) -> Iterable[Origin]:
        return self.stage.origins()


def hooked(stage: Stage, hook: Hook) -> Stage:
    return replace(stage, fn=HookedFn(stage, hook))


class _BoundAround:
    def __init__(self, around: HookedFn, params: Tree, state: Tree) -> None:
        self.around, self.params = around, params
        self.fn = around.stage.bind(params, state)
        self.places = self.fn.places

    def call(self, params: Tree, x: Tree, extras: dict[str, Any]) -> Any:
        """Call without the hook. A plain function gets the params that the hook passes."""
        if isinstance(self.around.stage.fn, Bindable):
            return self.fn(x, **extras)
        return self.around.call(params, x, extras)

    def __call__(self, x: Tree, **extras: Any) -> Any:
        return self.around.hook(self.call, self.params, x, extras)

    def release(self) -> None:
        self.fn.release()
        self.params = None
