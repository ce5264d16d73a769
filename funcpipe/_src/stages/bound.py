"""The interface between executors and stages: forward, backward, and its halves I and W.

`Bound` is one stage with its parameters for one run. `EagerBound` and `CompiledBound` implement it.
Executors look at two members of a residual: ``nbytes``, and ``move`` to the host or back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from funcpipe._src.core.border import Border
from funcpipe._src.core.errors import BatchError
from funcpipe._src.core.tree import Tree
from funcpipe._src.data.result import Loss
from funcpipe._src.stages.params import StageParams

Gradients = list[Tensor | None]  # the gradient of each leaf of a border, or None


class StageArgs(NamedTuple):
    """The arguments of a forward."""

    x: Border  # the input
    # The skips in the order of ``stage.pop``, then the carry if there is one.
    skips: Sequence[Border]
    feeds: Sequence[Border]  # the feeds in the order of ``stage.feeds``
    target: Border | None  # the target for the loss, or None
    microbatch: int  # the number of the microbatch, or of the piece in a plan with slices

    def borders(self) -> list[Border]:
        """Return all borders, in this order."""
        return [self.x, *self.skips, *self.feeds, *([] if self.target is None else [self.target])]


class ForwardReport(NamedTuple):
    """The values of a forward for the end of the batch. Tensors are detached."""

    stats: Tree  # the statistics for the stage's commit
    loss: Loss | None  # the result of the loss function; None except in the last stage
    side: tuple[Any, Any] | None  # the stage's auxiliary loss (sum, weight), or None


class StageOut(NamedTuple):
    """The results of a forward."""

    y: Border  # the output
    report: ForwardReport  # the values for the end of the batch
    residual: Any  # the residual for the backward, or None if it is not kept
    # The stashed values by name, and the carry for the next slice as `CARRY`.
    stash: dict[str, Border]


class Cotangents(NamedTuple):
    """The results of a backward: gradients of the input and of each skip, as in `StageArgs`."""

    x: Gradients
    skips: list[Gradients]


class Bound(Protocol):
    """One stage with its parameters, for one run. Only one thread may use it at a time."""

    @property
    def params(self) -> StageParams:
        """The parameters, with their gradient sums."""
        ...

    @property
    def phase(self) -> str:
        """The part of a forward that runs, such as "loss"; "" for the stage's function."""
        ...

    def forward(self, args: StageArgs, *, keep: bool) -> StageOut:
        """Run F, or R: the same call, whose outputs are dropped."""
        ...

    def backward(
        self,
        residual: Any,
        y: Gradients | None,
        stash: dict[str, list[Gradients]],
        *,
        split: bool = False,
    ) -> tuple[Cotangents, Any]:
        """Run B, or with ``split`` run I. Add weight gradients to their sums.

        Returns the gradients of the inputs, and the residual for W or None.
        """
        ...

    def backward_weight(self, residual: Any) -> None:
        """Run W: add weight gradients to their sums."""
        ...

    def rebase(self, state: Tree | None) -> None:
        """Begin the next batch with stepped parameters, and with a new state unless it is None."""
        ...

    def release(self) -> None:
        """Release all tensors after a successful run."""
        ...


ROWS_UNCLEAR = (
    "the leaves of the ready-made microbatches (fp.Microbatches) have different numbers of rows, "
    "so the weight of a microbatch is not known; give its weight, make_plan(weight=target -> "
    "number), or return (sum, weight) from the loss"
)
"""The remedy for ready-made microbatches whose leaves disagree on the rows."""

_ROWS_UNEVEN = (
    "the loss is a mean, which is weighted by rows, but the rows of the target have different "
    "lengths, so a mean over elements would be wrong; give the weight of a microbatch, "
    "make_plan(weight=target -> number), for a mean over rows their number, or return (sum, "
    "weight) from the loss"
)


class Shares(NamedTuple):
    """The share of each microbatch in the loss of the batch.

    With replicas, the microbatches of all replicas, one replica after the other.
    """

    # The weight of each microbatch: its rows, or the weight of its loss if known.
    weights: tuple[float, ...]
    # The sum of the weights, by which sums are divided. None: the batch's loss is a sum.
    total: float | None
    explicit: bool  # whether the plan's ``weight`` or the loss gave the weights, instead of rows
    loss_scale: float  # the factor of the gradients
    # The share of each microbatch in auxiliary losses. The shares sum to 1. They are in proportion
    # to the plan's ``weight``, else to rows.
    parts: tuple[float, ...]
    summed: bool = False  # whether the loss returns sums
    first: int = 0  # the number of this replica's first microbatch
    # Whether leaves of ready-made microbatches disagree on the proportion of rows, so that rows
    # cannot be weights.
    rows_unclear: bool = False
    rows_uneven: bool = False  # whether rows of the target have different numbers of elements
    # Whether the loss is not one of torch, so that its first call is checked.
    unproven: bool = False

    @property
    def guessed(self) -> bool:
        """Whether means are weighted by rows although the loss's divisor is unknown."""
        return self.unproven and not self.explicit

    def weight(self, microbatch: int) -> float:
        """Return the weight of a microbatch of this replica."""
        return self.weights[self.first + microbatch]

    def part(self, microbatch: int) -> float:
        """Return the share of a microbatch of this replica in auxiliary losses. Raises BatchError
        if unknown."""
        if self.rows_unclear:
            raise BatchError(f"an auxiliary loss is weighted by rows; {ROWS_UNCLEAR}")
        return self.parts[self.first + microbatch]

    def factor(self, loss: Loss, microbatch: int) -> float:
        """Return the factor of a microbatch's loss in the batch's loss.

        A mean is multiplied by the microbatch's share; a sum is divided by the total. For a loss
        that returns weights the factor is 1, and gradients are divided once at the end. Raises
        BatchError for a mean without a known weight if ``rows_unclear`` or ``rows_uneven``.
        """
        if loss.weight is not None and not self.explicit:
            return 1.0 if float(loss.weight) or _is_sum(loss) else 0.0
        if self.total is None:
            return 1.0
        if loss.weight is None and not (self.explicit or self.summed):
            if self.rows_unclear:
                raise BatchError(f"the loss is a mean, which is weighted by rows; {ROWS_UNCLEAR}")
            if self.rows_uneven:
                raise BatchError(_ROWS_UNEVEN)
        weight = self.weights[self.first + microbatch]
        if (self.summed or loss.weight is not None) and (weight or _is_sum(loss)):
            weight = 1.0
        return weight / self.total


def _is_sum(loss: Loss) -> bool:
    """Return whether a value of weight 0 is a sum that counts. A mean of no rows is NaN, or 0."""
    return math.isfinite(total := float(loss.sum)) and total != 0
