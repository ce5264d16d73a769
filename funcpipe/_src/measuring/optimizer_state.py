"""The bytes of state that each optimizer keeps for a parameter: the table of `memory`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.words import similar

StateSize: TypeAlias = Callable[[tuple[int, ...]], float]
"""Maps the shape of a parameter to the number of state elements."""


def _copies(count: float) -> StateSize:
    def numbers(shape: tuple[int, ...]) -> float:
        return count * torch.Size(shape).numel()

    return numbers


def _factored(shape: tuple[int, ...]) -> float:
    """Adafactor (arXiv 1804.04235): a row and a column for each matrix; vectors in full."""
    if len(shape) < 2:
        return float(torch.Size(shape).numel())
    stacked = torch.Size(shape[:-2]).numel()
    return float(stacked * (shape[-2] + shape[-1]))


_TABLE: dict[str, StateSize] = {
    "sgd": _copies(0),
    "momentum": _copies(1),
    "adam": _copies(2),
    "adamw": _copies(2),
    "adamax": _copies(2),
    "nadam": _copies(2),
    "radam": _copies(2),
    "sparseadam": _copies(2),
    "amsgrad": _copies(3),
    "rmsprop": _copies(1),
    "adagrad": _copies(1),
    "adadelta": _copies(2),
    "rprop": _copies(2),
    "asgd": _copies(1),
    "lion": _copies(1),
    "muon": _copies(1),
    "adafactor": _factored,
}
"""By the name of the optimizer in lower case. Scalars (step counts) are not counted."""

_EXTRA: dict[str, tuple[str, ...]] = {
    "sgd": ("momentum",),
    "rmsprop": ("momentum", "centered"),
    "adam": ("amsgrad",),
    "adamw": ("amsgrad",),
}
"""Options that add one state element for each element of the parameter."""


def optimizer_state(optimizer: Any) -> tuple[str, StateSize]:
    """Return the name of an optimizer, and the size of its state.

    >>> [optimizer_state(name)[1]((8, 4)) for name in ("sgd", "adamw", "adafactor", torch.optim.RMSprop, 1.5)]
    [0, 64, 12.0, 32, 48.0]

    Args:
        optimizer: a name of the table, a number of bytes for each byte of parameters, a class of
            ``torch.optim`` (with its default options), or an optimizer (with its own options).

    Raises:
        PlanError: the optimizer is not in the table.
    """
    if (
        isinstance(optimizer, (int, float))
        and not isinstance(optimizer, bool)
        and 0 <= optimizer < float("inf")
    ):
        return f"{optimizer:g} x", _copies(optimizer)
    if isinstance(optimizer, str):
        name, options = "".join(c for c in optimizer.lower() if c.isalnum()), {}
    else:
        kind = optimizer if isinstance(optimizer, type) else type(optimizer)
        names = [base.__name__.lower() for base in kind.__mro__ if base.__name__.lower() in _TABLE]
        name = names[0] if names else kind.__name__.lower()
        options = _options(optimizer)
    if name not in _TABLE:
        mend = similar(name, _TABLE, "did you mean {!r}? ")
        raise PlanError(
            f"the size of the state of the optimizer {optimizer!r} is unknown; {mend}The table has "
            f"{', '.join(_TABLE)}; otherwise give the bytes of state per byte of parameters: "
            "optimizer=2"
        )
    extra = sum(bool(options.get(option)) for option in _EXTRA.get(name, ()))
    base = _TABLE[name]
    if not extra:
        return name, base
    return name, lambda shape: base(shape) + extra * torch.Size(shape).numel()


def _options(optimizer: Any) -> Mapping[str, Any]:
    """The options of an optimizer, or the defaults of a class."""
    if not isinstance(optimizer, type):
        return getattr(optimizer, "defaults", {})
    return {
        p.name: p.default
        for p in inspect.signature(optimizer).parameters.values()
        if p.default is not p.empty
    }
