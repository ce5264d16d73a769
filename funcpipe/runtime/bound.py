"""What a stage is to the executor: forward, backward, the two halves of the backward.

`Bound` is one stage with its parameters for one run, `Program` makes it. Eager stages are the first program; compiled
ones implement the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from funcpipe.core.result import Loss
from funcpipe.core.stage import Stage
from funcpipe.core.tree import Tree
from funcpipe.runtime.border import Border
from funcpipe.runtime.host_link import HostStream
from funcpipe.runtime.rng import Keys

Gradients = list[Tensor | None]
"""The gradient of each leaf of a border; None where there is none."""


class StageArgs(NamedTuple):
    """What a forward gets.

    Attributes:
        x: the input.
        skips: in the order of ``stage.pop``.
        feeds: in the order of ``stage.feeds``.
        target: for the loss; None without one.
        microbatch: its index.
    """

    x: Border
    skips: Sequence[Border]
    feeds: Sequence[Border]
    target: Border | None
    microbatch: int


class ForwardReport(NamedTuple):
    """What a forward has for the end of the batch; tensors are detached.

    Attributes:
        stats: for the stage's commit.
        loss: what the loss function gave, None elsewhere than in the last stage.
        side: the stage's auxiliary loss (sum, weight), or None.
    """

    stats: Tree
    loss: Loss | None
    side: tuple[Any, Any] | None


class StageOut(NamedTuple):
    """What a forward gives.

    Attributes:
        y: the output.
        report: for the end of the batch.
        residual: what the backward needs, None where nothing is kept.
        stash: by name.
    """

    y: Border
    report: ForwardReport
    residual: Any
    stash: dict[str, Border]


class Cotangents(NamedTuple):
    """What a backward gives: gradients of the input and of each skip, in the order of ``stage.pop``."""

    x: Gradients
    skips: list[Gradients]


class Residual(Protocol):
    """What a forward keeps for its backward; opaque."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors at the borders that it holds."""
        ...

    def move(self, to: HostStream, *, fixed: frozenset[int] = frozenset()) -> Any:
        """Move it to the host or back, but for memory at the fixed addresses. Returns the event after which it is there."""
        ...


class Bound(Protocol):
    """One stage with its parameters, for one run; used by one thread at a time."""

    @property
    def phase(self) -> str:
        """Which part of a forward runs, where it is not the stage's own function."""
        ...

    def forward(self, args: StageArgs, *, keep: bool) -> StageOut:
        """F; R is the same call with the outputs dropped."""
        ...

    def backward(self, residual: Any, y: Gradients | None, stash: dict[str, list[Gradients]]) -> Cotangents:
        """B: adds weight gradients into their sums."""
        ...

    def backward_input(
        self, residual: Any, y: Gradients | None, stash: dict[str, list[Gradients]]
    ) -> tuple[Cotangents, Any]:
        """I: also what W needs."""
        ...

    def backward_weight(self, residual: Any, *, more: bool = False) -> None:
        """W: adds weight gradients into their sums; where ``more`` comes at once, at the latest with the last of these."""
        ...

    def grads(self) -> list[Tensor | None]:
        """The sums, by leaf of the parameters."""
        ...

    def unused(self) -> list[int]:
        """Trainable leaves (by number) that no backward added to."""
        ...

    def fixed(self) -> list[Any]:
        """What every forward and backward reads: parameters and state; it stays where it is."""
        ...

    def written(self) -> list[int]:
        """Parameter leaves (by number) that the stage wrote into, which it must not."""
        ...

    def release(self) -> None:
        """Forget every tensor; the run went well."""
        ...


class Shares(NamedTuple):
    """How much each microbatch counts in the batch's loss.

    Attributes:
        weights: of each microbatch: its rows, or what is known of its loss.
        total: what sums are divided by: the weights' sum; None: by nothing, the batch's loss is the sum of sums.
        explicit: did the plan's ``weight`` give them.
        loss_scale: gradients are multiplied by it.
        parts: of each microbatch, of 1, in auxiliary losses: by what the plan's ``weight`` gave, else by rows.
        summed: does the loss return sums.
    """

    weights: tuple[float, ...]
    total: float | None
    explicit: bool
    loss_scale: float
    parts: tuple[float, ...]
    summed: bool = False

    def factor(self, loss: Loss, microbatch: int) -> float:
        """What the microbatch's loss is multiplied by in the batch's.

        A mean counts by the microbatch's weight; a sum is divided by the total. Where sums come with weights of their
        own that nobody knew before, the factor is 1 and everything is divided once, at the end.
        """
        if loss.weight is not None and not self.explicit:
            return 1.0 if float(loss.weight) else 0.0
        if self.total is None:
            return 1.0
        weight = self.weights[microbatch]
        if weight and (self.summed or loss.weight is not None):
            weight = 1.0
        return weight / self.total


class Program(Protocol):
    """How a stage becomes numbers: eager, or compiled."""

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
    ) -> Bound:
        """Bind a stage for one run. Raises PlanError where parameters or state do not fit."""
        ...
