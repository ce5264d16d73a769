"""Sum the gradients of a stage's parameters over the microbatches of a run.

Autograd adds to the ``.grad`` of the aliases that the stage computes with. The first gradient
becomes the sum if nothing else uses its memory. That saves a zero tensor and an addition for each
parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.plain_tensors import is_plain
from funcpipe._src.core.torch_names import is_shared_lazily, storage_number, storage_users, version


class GradientSums:
    """The gradient sums of parameter aliases, which are their ``.grad``.

    Attributes:
        lacking: the numbers of the aliases without a sum so far.
        sparse: the numbers of the aliases with a sparse sum.
    """

    def __init__(self, aliases: Sequence[Tensor]) -> None:
        self.lacking = [*range(len(aliases))]
        self._aliases = aliases
        self._not_plain = [number for number, alias in enumerate(aliases) if not is_plain(alias)]
        self.sparse: list[int] = []
        self._zeros: dict[int, int] = {}
        """For sums that began as zeros, their version counters at that time, by number."""
        self._negative: set[int] = set()  # the numbers of the sums that may still be negative zeros

    def refuse_early(self) -> None:
        """Raise PlanError for gradients before the first backward of the run."""
        if any(self._aliases[number].grad is not None for number in self.lacking):
            raise PlanError(
                "the stage, or the loss, calls backward itself, but the run calls backward: return "
                "only the output, or the loss. For a gradient within the forward use "
                "torch.autograd.grad(y, x, create_graph=True)"
            )

    def prepare(self) -> None:
        """Prepare for a backward: begin the sums of tensors that are not plain with zeros of the
        same kind.

        Raises:
            PlanError: the stage called backward itself.
        """
        self.refuse_early()
        while self._not_plain:
            self._begin_as_zeros(self._not_plain.pop())

    def begin(self) -> list[Any]:
        """Return every sum, to add to."""
        for number in [*self.lacking]:
            self._begin_as_zeros(number)
        self._not_plain = []
        return self.present()

    def adopt(self) -> None:
        """Use the first gradients as sums, after a backward. Autograd has detached them."""
        if self.sparse:
            self._join_rows()
        for number in [*self.lacking]:
            gradient = self._aliases[number].grad
            if gradient is not None and gradient.is_sparse:
                self.sparse.append(number)
                # A clone, because the values may be a view of other memory.
                self._begin(number, gradient.clone().coalesce())
            elif gradient is not None:
                alone = may_grow(gradient)
                self._begin(
                    number, gradient if alone else _begun_with(self._aliases[number], gradient)
                )

    def all(self) -> list[Tensor | None]:
        """Return every sum, zeros if no gradient has come."""
        totals = self.begin()
        for number in self._negative & {*self.untouched()}:
            self._zeros[number] = version(totals[number].zero_())
        self._negative.clear()
        return totals

    def present(self) -> list[Tensor | None]:
        """Return every present sum; None where no gradient has come."""
        return [alias.grad for alias in self._aliases]

    def untouched(self) -> list[int]:
        """Return the numbers of the aliases to which no backward has added."""
        return [
            number
            for number, alias in enumerate(self._aliases)
            if alias.grad is None or version(alias.grad) == self._zeros.get(number)
        ]

    def clear(self) -> None:
        """Release all sums."""
        for alias in self._aliases:
            alias.grad = None
        self._aliases = ()

    def _join_rows(self) -> None:
        """Add up repeated rows of sparse sums. A sum that got a dense gradient has become dense."""
        for number in [*self.sparse]:
            total = self._aliases[number].grad
            assert total is not None
            if not total.is_sparse:
                self.sparse.remove(number)
            elif total.is_coalesced():
                continue
            else:
                total = total.coalesce()
            self._aliases[number].grad = total

    def _begin_as_zeros(self, number: int) -> None:
        total = _negative_zeros(self._aliases[number])
        self._zeros[number] = version(total)
        self._negative.add(number)
        self._begin(number, total)

    def _begin(self, number: int, total: Tensor) -> None:
        self._aliases[number].grad = total
        self.lacking.remove(number)


def _begun_with(alias: Tensor, gradient: Tensor) -> Tensor:
    """Begin a sum with one gradient, in the layout of its parameter."""
    if gradient.layout is not torch.strided:  # rows that the gradient leaves out are 0
        return torch.zeros_like(alias).add_(gradient)
    return _negative_zeros(alias).add_(gradient)


def _negative_zeros(alias: Tensor) -> Tensor:
    """Make negative zeros. Adding them changes no bit: 0 + -0 is 0, and -0 + -0 is -0."""
    return torch.full_like(alias, complex(-0.0, -0.0) if alias.is_complex() else -0.0)


def may_grow(gradient: Tensor) -> bool:
    """Return whether other gradients may be added in place to a gradient of autograd.

    That is safe only if the gradient alone uses its whole storage. It may be a view of a value that
    another stage got, or of another parameter's gradient.
    """
    if not is_plain(gradient) or is_shared_lazily(gradient):
        return False
    # Two users: the gradient itself, and the handle `storage` in this function.
    storage = gradient.untyped_storage()
    return gradient.nbytes == storage.nbytes() and storage_users(storage_number(storage)) == 2
