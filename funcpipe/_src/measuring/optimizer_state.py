"""The bytes of state that each optimizer keeps for a parameter: the table of `memory`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.words import similar

StateSize: TypeAlias = Callable[[tuple[int, ...]], float]
"""Maps the shape of a parameter to the number of state elements."""


def _copies(count: float, shape: tuple[int, ...]) -> float:
    return count * torch.Size(shape).numel()


def _factored(shape: tuple[int, ...]) -> float:
    """Adafactor (arXiv 1804.04235): a row and a column for each matrix; vectors in full."""
    if len(shape) < 2:
        return float(torch.Size(shape).numel())
    stacked = torch.Size(shape[:-2]).numel()
    return float(stacked * (shape[-2] + shape[-1]))


_COPIES: dict[str, int] = {
    "sgd": 0,
    "momentum": 1,
    "adam": 2,
    "adamw": 2,
    "adamax": 2,
    "nadam": 2,
    "radam": 2,
    "sparseadam": 2,
    "amsgrad": 3,
    "rmsprop": 1,
    "adagrad": 1,
    "adadelta": 2,
    "rprop": 2,
    "asgd": 1,
    "lion": 1,
    "muon": 1,
}
"""The state elements for each element of the parameter, by the name of the optimizer in lower case.
Scalars (step counts) are not counted."""

_KNOWN = (*_COPIES, "adafactor")

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
        return f"{optimizer:g} x", partial(_copies, optimizer)
    if isinstance(optimizer, str):
        name, options = "".join(c for c in optimizer.lower() if c.isalnum()), {}
    else:
        kind = optimizer if isinstance(optimizer, type) else type(optimizer)
        names = [base.__name__.lower() for base in kind.__mro__ if base.__name__.lower() in _KNOWN]
        name = names[0] if names else kind.__name__.lower()
        options = _options(optimizer)
    if name not in _KNOWN:
        mend = similar(name, _KNOWN, "did you mean {!r}? ")
        raise PlanError(
            f"the size of the state of the optimizer {optimizer!r} is unknown; {mend}The table has "
            f"{', '.join(_KNOWN)}; otherwise give the bytes of state per byte of parameters: "
            "optimizer=2"
        )
    if name == "adafactor":
        return name, _factored
    extra = sum(bool(options.get(option)) for option in _EXTRA.get(name, ()))
    return name, partial(_copies, _COPIES[name] + extra)


def _options(optimizer: Any) -> Mapping[str, Any]:
    """The options of an optimizer, or the defaults of a class."""
    if not isinstance(optimizer, type):
        return getattr(optimizer, "defaults", {})
    return {
        p.name: p.default
        for p in inspect.signature(optimizer).parameters.values()
        if p.default is not p.empty
    }
