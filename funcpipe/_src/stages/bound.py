"""The interface between executors and stages: forward, backward, and the two halves of the
backward.

`Bound` is one stage with its parameters for one run, `Program` makes it. Eager stages are the first
program; compiled ones implement the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from funcpipe._src.core.border import Border
from funcpipe._src.core.errors import BatchError
from funcpipe._src.core.tree import Tree
from funcpipe._src.data.result import Loss
from funcpipe._src.data.stage import Stage
from funcpipe._src.devices.host_link import HostStream
from funcpipe._src.stages.params import StageParams
from funcpipe._src.stages.rng import Keys

Gradients = list[Tensor | None]
"""The gradient of each leaf of a border; None where there is none."""


class StageArgs(NamedTuple):
    """The arguments of a forward.

    Attributes:
        x: the input.
        skips: in the order of ``stage.pop``; then the carry, of a slice that has one.
        feeds: in the order of ``stage.feeds``.
        target: for the loss; None without one.
        microbatch: its index; of a slice that of the piece.
    """

    x: Border
    skips: Sequence[Border]
    feeds: Sequence[Border]
    target: Border | None
    microbatch: int

    def borders(self) -> list[Border]:
        """All that it gets, in this order."""
        return [self.x, *self.skips, *self.feeds, *([] if self.target is None else [self.target])]


class ForwardReport(NamedTuple):
    """What a forward reports for the end of the batch; tensors are detached.

    Attributes:
        stats: for the stage's commit.
        loss: the loss function's result; None in all stages but the last.
        side: the stage's auxiliary loss (sum, weight), or None.
    """

    stats: Tree
    loss: Loss | None
    side: tuple[Any, Any] | None


class StageOut(NamedTuple):
    """The results of a forward.

    Attributes:
        y: the output.
        report: for the end of the batch.
        residual: what the backward needs, None where nothing is kept.
        stash: by name; what the next slice gets under `CARRY`.
    """

    y: Border
    report: ForwardReport
    residual: Any
    stash: dict[str, Border]


class Cotangents(NamedTuple):
    """The results of a backward: gradients of the input and of each skip, as in `StageArgs`."""

    x: Gradients
    skips: list[Gradients]


class Residual(Protocol):
    """What a forward keeps for its backward; opaque."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors at the borders that it holds."""
        ...

    def move(self, to: HostStream, *, fixed: frozenset[int] = frozenset()) -> Any:
        """Move it to the host or back, but for memory at fixed addresses. Returns the event after
        which it is there."""
        ...


class Bound(Protocol):
    """One stage with its parameters, for one run; used by one thread at a time."""

    @property
    def params(self) -> StageParams:
        """The parameters, with their gradient sums."""
        ...

    @property
    def phase(self) -> str:
        """Which part of a forward runs, where it is not the stage's own function."""
        ...

    def forward(self, args: StageArgs, *, keep: bool) -> StageOut:
        """Run F, or R: the same call, its outputs dropped."""
        ...

    def backward(
        self,
        residual: Any,
        y: Gradients | None,
        stash: dict[str, list[Gradients]],
        *,
        split: bool = False,
    ) -> tuple[Cotangents, Any]:
        """Run B, or with ``split`` I: adds weight gradients into their sums. Returns also the
        residual for W, or None."""
        ...

    def backward_weight(self, residual: Any) -> None:
        """Run W: adds weight gradients into their sums."""
        ...

    def rebase(self, state: Tree | None) -> None:
        """Begin the next batch with the parameters as they are now, and with its state; None: it is
        as it was."""
        ...

    def release(self) -> None:
        """Forget every tensor; the run went well."""
        ...


ROWS_UNCLEAR = (
    "the leaves of the ready-made microbatches (fp.Microbatches) differ in how many rows they "
    "have, and it is not known which of them count; say how much a microbatch counts, "
    "make_plan(weight=target -> number), or return (sum, weight) from the loss"
)
"""What to do where ready-made microbatches have no rows that count."""


class Shares(NamedTuple):
    """How much each microbatch counts in the batch's loss; with replicas, those of all of them, one
    after the other.

    Attributes:
        weights: of each microbatch: its rows, or the weight of its loss where that is known.
        total: the weights' sum, by which sums are divided; None where the batch's loss is the sum
            of sums.
        explicit: whether the plan's ``weight`` or the loss's own count gave them, not the rows.
        loss_scale: gradients are multiplied by it.
        parts: the share of each microbatch in auxiliary losses, of 1: by the plan's ``weight``,
            else by rows.
        summed: whether the loss returns sums.
        first: the place of this replica's first microbatch.
        guessed: whether means count by rows although the loss's divisor is unknown.
        rows_unclear: whether leaves of ready-made microbatches disagree on the proportion of rows,
            so that no leaf's rows can count.
    """

    weights: tuple[float, ...]
    total: float | None
    explicit: bool
    loss_scale: float
    parts: tuple[float, ...]
    summed: bool = False
    first: int = 0
    guessed: bool = False
    rows_unclear: bool = False

    def weight(self, microbatch: int) -> float:
        """The weight of a microbatch of this replica."""
        return self.weights[self.first + microbatch]

    def part(self, microbatch: int) -> float:
        """Return the share of a microbatch of this replica in auxiliary losses. Raises BatchError
        if unknown."""
        if self.rows_unclear:
            raise BatchError(f"an auxiliary loss counts by rows; {ROWS_UNCLEAR}")
        return self.parts[self.first + microbatch]

    def factor(self, loss: Loss, microbatch: int) -> float:
        """The factor of the microbatch's loss in the batch's.

        A mean counts by the microbatch's weight; a sum is divided by the total. Where sums come
        with weights that were not known before, the factor is 1 and everything is divided once, at
        the end. Raises BatchError for a mean if ``rows_unclear``.
        """
        if loss.weight is not None and not self.explicit:
            return 1.0 if float(loss.weight) else 0.0
        if self.total is None:
            return 1.0
        if self.rows_unclear and loss.weight is None and not self.summed:
            raise BatchError(f"the loss is a mean, which counts by rows; {ROWS_UNCLEAR}")
        weight = self.weights[self.first + microbatch]
        if weight and (self.summed or loss.weight is not None):
            weight = 1.0
        return weight / self.total


class Program(Protocol):
    """Binds a stage to its parameters for a run: eager, or compiled."""

    def __call__(
        self,
        stage: Stage,
        index: int,
        params: Tree,
        state: Tree,
        *,
        trainable: Sequence[bool],
        train: bool,
        backwards: bool,
        keys: Keys,
        loss: Callable[..., Any] | None,
        shares: Shares | None,
        guard: bool = False,
    ) -> Bound:
        """Bind a stage for one run. With ``guard``, writes into parameters go into copies.

        Raises PlanError where parameters or state do not fit.
        """
        ...
