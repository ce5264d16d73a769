"""Find losses that are means over something else than rows, and that state no weight."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.errors import BatchError
from funcpipe._src.core.torch_names import WatchingMode
from funcpipe._src.core.tree import tensors_in
from funcpipe._src.data.result import Loss
from funcpipe._src.stages.drawing import MeanOverTargets

_ATEN = torch.ops.aten
_SELECTIONS = {_ATEN.masked_select.default, _ATEN.nonzero.default}
_REMEDY = (
    "so rows are not the weights of its microbatches, and funcpipe does not know the divisor. "
    "Give it: make_plan(weight=target -> number), a loss that returns (sum, weight), or a loss "
    "with a method weigh(inputs, target); torch's own losses, such as nn.CrossEntropyLoss(), are "
    "known"
)


def refuse_left_out(means: Sequence[MeanOverTargets]) -> None:
    """Raise BatchError for a mean of an unknown loss if a cross entropy behind it left out targets.

    Reading the targets waits for their device.
    """
    for mean in means:
        if mean.weighed:
            raise BatchError(f"the loss is a mean with class weights, {_REMEDY}")
        classes = mean.target.detach()
        if (
            not classes.is_floating_point()
            and not classes.is_meta
            and bool((classes == mean.ignored).any())
        ):
            raise BatchError(
                f"the loss is a mean that leaves out targets of {mean.ignored}, {_REMEDY}"
            )


_watched: dict[int, weakref.ref[Any]] = {}
"""Losses that passed a watched call, by id."""


class WatchDivisors(WatchingMode):
    """A dispatch mode for one call of a loss: finds divisions by a number that the loss computes.

    Attributes:
        found: the division or selection, in words, or "".
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.found = ""
        # These lists keep tensors alive, so that no new tensor gets the id of an old one.
        self._computed: list[Tensor] = []
        self._constants: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note a division of one number by another, and a selection of elements by a mask."""
        out = func(*args, **(kwargs or {}))
        if func in _SELECTIONS or (func is _ATEN.index.Tensor and _has_mask(args[1])):
            self.found = self.found or "selects elements by a mask"
        elif func in (_ATEN.div.Tensor, _ATEN.div_.Tensor) and isinstance(args[1], Tensor):
            computed = any(args[1] is tensor for tensor in self._computed)
            if computed and args[0].dim() == 0 == args[1].dim():
                self.found = self.found or "is divided by a number that the loss computes"
        given = list(tensors_in(args))
        constant = func is _ATEN.lift_fresh.default or all(
            any(t is c for c in self._constants) for t in given
        )
        (self._constants if constant else self._computed).extend(tensors_in(out))
        return out

    @classmethod
    def of(cls, loss: Callable[..., Any]) -> WatchDivisors | None:
        """Return a watch for the next call of a loss, or None if an earlier call has passed."""
        return None if _watched.get(id(loss), lambda: None)() is loss else cls()

    def check(self, fn: Callable[..., Any], loss: Loss) -> None:
        """Raise BatchError if the loss returned a mean with such a division or selection.

        Otherwise record that the loss has passed.
        """
        if self.found and loss.weight is None:
            raise BatchError(f"the loss returned a mean that {self.found}, {_REMEDY}")
        with suppress(TypeError):  # objects without weak references are watched in every call
            key = id(fn)
            _watched[key] = weakref.ref(fn, lambda _: _watched.pop(key, None))


def _has_mask(indices: Any) -> bool:
    return any(
        isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices
    )
