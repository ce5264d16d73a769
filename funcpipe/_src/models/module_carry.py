"""The carry of a module: a keyword of its forward takes it, and it comes back as the second of two
values."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

from torch import nn

from funcpipe._src.core.errors import PlanError
from funcpipe._src.data.stage import Out


def check_carry(module: nn.Module, carry: str, feeds: Sequence[str]) -> None:
    """Refuse a keyword that cannot take what the slice before handed on; "" for none. Raises
    PlanError."""
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
            f"carry={carry!r} is {'a feed' if carry in feeds else 'the input'}, too; name another "
            "keyword"
        )
    if any(isinstance(layer, nn.RNNBase) and layer.bidirectional for layer in module.modules()):
        raise PlanError(
            f"{who} is bidirectional: what comes later reaches back, so slices cannot run"
        )


def carry_apart(returned: Any, carry: str, who: str) -> Any:
    """What a forward returned, its carry apart. Raises PlanError where it is not two values."""
    if not carry:
        return returned
    if not isinstance(returned, tuple) or len(cast("tuple[Any, ...]", returned)) != 2:
        raise PlanError(
            f"carry={carry!r}: the forward of {who} returns its output and what it hands to the "
            f"next slice, two values; it returned a {type(cast('object', returned)).__name__}"
        )
    y, handed = cast("tuple[Any, Any]", returned)
    return Out(y, carry=handed)
