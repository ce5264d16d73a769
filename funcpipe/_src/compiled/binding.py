"""Find torch's Python binding of an operation, if the binding makes exactly the same call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from funcpipe._src.core.torch_names import BINDINGS, OpOverload, WatchingMode, pytree, schema


class _CallLog(WatchingMode):
    """A mode that records each call that reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Operations of prim, such as prim.device, read facts of a tensor and compute nothing.
        if getattr(func, "namespace", "") != "prim":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def path_of(value: Any) -> str:
    """``torch.mm`` for a binding of torch, "" for an overload."""
    for prefix, holder in BINDINGS:
        name = getattr(value, "__name__", "")
        if not isinstance(value, OpOverload) and getattr(holder, name, None) is value:
            return f"{prefix}.{name}"
    return ""


def binding(node: fx.Node) -> tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]:
    """The fastest function that makes the call of a node, and its arguments.

    An overload called from Python finds its kernel through a slower path than torch's own binding.
    The function tries on the trace's fake tensors whether a binding of the same name makes the same
    call. Some bindings have other defaults than the operation, so they are also tried with all
    arguments.
    """
    target: Any = node.target
    unchanged = target, node.args, node.kwargs
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return unchanged
    name = schema(target).name.removeprefix("aten::")
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])  # pyright: ignore
    mode: Any = next(
        (
            leaf.fake_mode
            for leaf in pytree.tree_leaves((args, kwargs))
            if hasattr(leaf, "fake_mode")
        ),
        None,
    )
    if mode is None:
        return unchanged
    left_out = tuple(
        argument.default_value
        for argument in schema(target).arguments[len(args) :]
        if not argument.kwarg_only
    )
    for candidate in [getattr(holder, name) for _, holder in BINDINGS if hasattr(holder, name)]:
        for defaults in ((), left_out) if left_out else ((),):
            if _makes(candidate, target, (*args, *defaults), kwargs, mode):
                return candidate, (*node.args, *defaults), node.kwargs
    return unchanged


def _makes(candidate: Any, target: Any, args: Any, kwargs: Mapping[str, Any], mode: Any) -> bool:
    """Whether a call of the candidate runs the target, with the same arguments and no other
    operation."""
    log = _CallLog()
    try:
        with torch.no_grad(), mode, log:
            candidate(*args, **kwargs)
    except Exception:
        return False
    if len(log.calls) != 1 or log.calls[0][0] is not target:
        return False
    return _complete(target, *log.calls[0][1:]) == _complete(target, args, kwargs)


def _complete(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments by name, with defaults for omitted ones. Tensors are compared by identity."""
    arguments = schema(target).arguments
    values = {
        argument.name: argument.default_value
        for argument in arguments
        if argument.has_default_value()
    }
    values |= dict(zip((argument.name for argument in arguments), args, strict=False)) | dict(
        kwargs
    )
    return {
        name: [id(leaf) if isinstance(leaf, Tensor) else leaf for leaf in pytree.tree_leaves(value)]
        for name, value in values.items()
    }
