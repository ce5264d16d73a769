"""Pass the carry of a module: in by a keyword of its forward, out as the second of two returned
values."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

from torch import nn

from funcpipe._src.core.errors import PlanError
from funcpipe._src.data.stage import Out


def check_carry(module: nn.Module, carry: str, feeds: Sequence[str]) -> None:
    """Raise PlanError if the forward cannot take this keyword as its carry; "" for none."""
    if not carry:
        return
    who, known = type(module).__name__, inspect.signature(module.forward).parameters
    if carry not in known and not any(each.kind is each.VAR_KEYWORD for each in known.values()):
        raise PlanError(
            f"carry={carry!r}: the forward of {who} has no such keyword; it takes "
            f"{', '.join(known)}"
        )
    if carry in feeds or carry == next(iter(known)):
        raise PlanError(
            f"carry={carry!r} is also {'a feed' if carry in feeds else 'the input'}; name another "
            "keyword"
        )
    if any(isinstance(layer, nn.RNNBase) and layer.bidirectional for layer in module.modules()):
        raise PlanError(
            f"{who} is bidirectional: later slices change earlier outputs, so slices cannot run "
            "one "
            "after the other"
        )


def carry_apart(returned: Any, carry: str, who: str) -> Any:
    """Separate the carry from a forward's output."""
    if not carry:
        return returned
    if not isinstance(returned, tuple) or len(cast("tuple[Any, ...]", returned)) != 2:
        raise PlanError(
            f"carry={carry!r}: the forward of {who} must return two values, its output and the "
            f"carry for the next slice; it returned a {type(cast('object', returned)).__name__}"
        )
    y, handed = cast("tuple[Any, Any]", returned)
    return Out(y, carry=handed)
