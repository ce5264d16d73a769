"""Find losses that are not means over rows and state no weight, and wrong (sum, weight)."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcpipe._src.core.errors import BatchError
from funcpipe._src.core.remembered import Remembered
from funcpipe._src.core.torch_names import WatchingMode, uncompiled
from funcpipe._src.core.tree import Tree, flatten, tensors_in, unflatten
from funcpipe._src.data.losses import read_loss
from funcpipe._src.data.result import Loss
from funcpipe._src.stages.context import autocasting
from funcpipe._src.stages.drawing import MeanOverTargets

_ATEN = torch.ops.aten
_SELECTIONS = {_ATEN.masked_select.default, _ATEN.nonzero.default}
_ROWS = 4  # the most rows that `why_not_mean` computes with
_ROWS_OF_PAIRS = 32  # the same for pairs (sum, weight): an accuracy of few rows is often 0
_MOST = 2**22  # the most numbers that `why_not_mean` converts to double precision: 32 MiB
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


@dataclass
class _Record:
    """The checks of one kind that the runs of a loss have made."""

    rows: float = -1.0  # the rows of the call that passed; one row shows less. -1: none passed
    runs: int = 1  # the number of runs, from the one that passed
    is_refused: bool = False  # whether a run has raised an error


_records: Remembered[Callable[..., Any], dict[Hashable, _Record]] = Remembered(lambda _: {})
"""For a loss, its records by the kind of check: whether weights are guessed, or the shapes of
output and target."""


class WatchDivisors(WatchingMode):
    """A dispatch mode for one call of a loss: finds divisions by a number that the loss computes.

    Attributes:
        guessed: whether the weights of microbatches are guessed, so that a finding is an error.
        found: the division or selection, in words, or "".
    """

    supports_higher_order_operators = True

    def __init__(self, *, guessed: bool) -> None:
        super().__init__()
        self.guessed, self.found = guessed, ""
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
        operands = list(tensors_in(args))
        constant = func is _ATEN.lift_fresh.default or all(
            any(operand is known for known in self._constants) for operand in operands
        )
        (self._constants if constant else self._computed).extend(tensors_in(out))
        return out

    def check(self, loss: Loss) -> None:
        """Raise BatchError if the loss returned a mean with such a division or selection."""
        if self.found and self.guessed and loss.weight is None:
            raise BatchError(f"the loss returned a mean that {self.found}, {_REMEDY}")


def is_due(loss: Callable[..., Any], rows: float, kind: Hashable) -> bool:
    """Return whether a run must check its loss, and count the run.

    The rows of one batch may hide a fault, such as padding that the first batch lacks. So runs 1,
    2, 4, 8, ... check the loss, and each run after a refusal.
    """
    with suppress(TypeError):  # objects without weak references are checked in every run
        record = _records(loss).get(kind)
        if record is not None and record.rows >= min(rows, 2) and not record.is_refused:
            record.runs += 1
            return record.runs.bit_count() == 1
    return True


def record_check(
    loss: Callable[..., Any], rows: float, kind: Hashable, *, is_refused: bool
) -> None:
    """Record the result of a check of a loss with some rows."""
    with suppress(TypeError):
        record = _records(loss).setdefault(kind, _Record())
        record.rows, record.is_refused = max(rows, record.rows), record.is_refused or is_refused


def why_not_mean(
    fn: Callable[..., Any],
    y: Tree,
    target: Tree,
    weight: float | None,
    *,
    pair: bool = False,
    several: bool = True,
    in_model: bool = False,
) -> str | None:
    """Return why a loss is not a mean over rows, found by a few calls with a few rows; or "".

    The loss of some rows must be the mean of the losses of two parts of these rows, in proportion
    to the rows. Sums, root means, and losses that compare rows fail. A pair (sum,
    weight) fails if the sum of some rows is not the sum of its parts, or if its weight is a mean
    over rows, such as an accuracy. No check takes place if some tensor is not cut along its first
    axis, or if the loss cannot take these rows. None: fewer than two of the rows count, which shows
    nothing about a pair.

    Args:
        fn: the loss.
        y, target: its arguments for one microbatch, tensors ``[rows, ...]``. A tensor without
            numbers, such as the shape of an absent value, stays whole.
        weight: the rows of the microbatch, times the length of its slice. None: its weight is
            known, so only sums are found.
        pair: whether the loss returns (sum, weight).
        several: whether there are several microbatches. One may have a sum that compares rows.
        in_model: whether ``fn`` is the last stage of a model that computes its own loss. Then
            tensors with another length than the first one, such as position embeddings, stay
            whole.
    """
    leaves, spec = flatten((y, target))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]
    sizes = [len(leaf) if type(leaf) is Tensor and leaf.dim() else 0 for leaf in tensors]
    rows = sizes[0] if sizes and all(sizes) and (in_model or len({*sizes}) == 1) else 0
    if not rows or (weight or rows) % rows:
        return ""
    numbers = sum(leaf.numel() for leaf in tensors) // rows
    most = max(2, min(rows, _ROWS_OF_PAIRS if pair else _ROWS, _MOST // max(1, numbers)))
    is_small = most * numbers <= _MOST
    is_rough = bool(autocasting()) or any(
        leaf.is_floating_point() and leaf.itemsize < 4 for leaf in tensors
    )
    # Convolutions on a GPU round to 10 bits (TF32).
    single = 0.05 if is_rough else 1e-4 if all(leaf.is_cpu for leaf in tensors) else 1e-3
    is_cut = [isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == rows for leaf in leaves]
    # Not compiled: other numbers of rows and double precision would compile the loss again.
    eager = uncompiled(fn)

    def value(few: list[Any], start: int, stop: int, count_of: int | None) -> _SumAndWeight:
        # Copies, because a loss may work in place.
        parts = [
            leaf[start:stop].clone() if cut else leaf for leaf, cut in zip(few, is_cut, strict=True)
        ]
        parts = [stop - start if type(leaf) is int and leaf == count_of else leaf for leaf in parts]
        loss = read_loss(eager(*unflatten(spec, parts)))[1]
        if (loss.weight is not None) is not pair:
            raise ValueError("the loss returns another form for a few rows")
        return loss.sum.item(), float(loss.weight or 0)

    def compare(count_of: int | None) -> str | None:
        """Compare a few rows with their parts. Ints equal to ``count_of`` are numbers of rows."""
        # Some losses need two rows, such as the mean of the two hardest rows. Others need single
        # precision, such as a loss with a layer of its own.
        splits = [(most, most // 2 if pair else 1), (_ROWS, 2)]
        tries = [(*split, exact) for exact in (is_small, False) for split in splits]
        for stop, middle, exact in tries:
            with suppress(Exception), torch.no_grad():
                few = [
                    _rows(leaf, stop, exact=exact) if cut else leaf
                    for leaf, cut in zip(leaves, is_cut, strict=True)
                ]

                def of(start: int, stop: int, few: list[Any] = few) -> _SumAndWeight:
                    return value(few, start, stop, count_of)

                start = 0
                if pair:  # may leave out rows, which show nothing
                    rows_that_count = _narrowed(of, middle, stop)
                    if rows_that_count is None:
                        return None
                    start, middle, stop = rows_that_count
                whole, reason = of(start, stop), ""
                difference = _pair_difference if pair else _difference
                # A pair also by its first row: a wrong sum of halves that count alike is a sum.
                for cut in (middle, start + 1) if pair else (middle,):
                    parts, counts = (of(start, cut), of(cut, stop)), (stop - start, cut - start)
                    if not reason and not (pair and any(map(_is_empty, parts))):
                        reason = difference(whole, parts, counts, 1e-6 if exact else single)
                if reason and (again := of(start, stop)) != whole:
                    return _STATEFUL.format(whole[0], again[0])
                return reason
        return ""

    # A traced model passes the number of rows on to its last stage. In an output that the loss
    # reads, an int equal to the rows may also be a constant, so both readings must show a sum or no
    # mean.
    reason = compare(rows if in_model else None)
    if reason and not in_model and any(type(leaf) is int and leaf == rows for leaf in leaves):
        reason = compare(rows)
    if reason is None or (weight is None and not reason.startswith(_SUM) and not pair):
        return reason and ""
    if _NO_SUM in reason and not several:
        return ""
    rows_of = "target" if isinstance(target, Tensor) else "fp.leaves(target)[0]"
    remedy = f"make_plan(weight=lambda target: len({rows_of}))"
    if not any(isinstance(leaf, Tensor) for leaf in flatten(target)[0]):
        remedy = "a loss with a method weigh(inputs, target)"
    if weight is None and not pair:
        reason += (
            ". If it is a mean by the weights of make_plan(weight=), give the loss a method "
            "weigh(inputs, target) in their place"
        )
    return reason and reason.format(remedy=remedy)


_SUM = "the loss returned a sum over the microbatch"
_NO_SUM = "but the first value is no sum over rows"
_STATEFUL = (
    "the loss returned {:.6g}, and in a second call with the same rows {:.6g}: it keeps a state, or "
    "draws random numbers that torch does not draw, so the loss of the batch would depend on the "
    "order of the microbatches. Change the state in your training loop, after the run, and give its "
    "value with the target; or weigh the microbatches as they are, {{remedy}}"
)


_NOISE = 0.1
"""A smaller loss is allowed the rounding error of a loss of this size. A loss near 0 may be the
difference of large numbers, such as the distance of two equal models."""

_SumAndWeight: TypeAlias = tuple[float, float]
"""What a loss returned for some rows: (sum, weight), or (mean, 0)."""


def _difference(
    whole_value: _SumAndWeight,
    parts: tuple[_SumAndWeight, _SumAndWeight],
    rows: tuple[int, int],
    tolerance: float,
) -> str:
    """Return the message about a loss that is not the mean of its parts; "" if it is.

    Args:
        whole_value: the loss of all rows.
        parts: the loss of the first rows, and of the others.
        rows: the number of all rows, and of the first rows.
        tolerance: the rounding error, relative to the parts.
    """
    (whole, _), ((first, _), (others, _)), (count, cut) = whole_value, parts, rows
    mean = (cut * first + (count - cut) * others) / count
    error = tolerance * (abs(first) + abs(others) + _NOISE)
    # A mean of NaN and another number is NaN: the deviation of a single row is no part of a mean.
    if not math.isfinite(whole) or abs(whole - mean) <= error:
        return ""
    of_parts = f"its values for {'the first row' if cut == 1 else f'the first {cut} rows'}"
    # If one of them is 0, perhaps its rows do not count.
    if min(abs(first), abs(others)) > error >= abs(whole - (first + others)):
        return (
            f"{_SUM}: for {count} rows it is {whole:.6g}, the sum of {of_parts} and for the rest, "
            f"{first:.6g} and {others:.6g}. Return the mean over rows, or (sum, weight). To add "
            "the sums of all microbatches, give a loss of torch with reduction='sum', or an "
            "nn.Module with the attribute reduction='sum'"
        )
    return (
        f"the loss is not a mean over rows: for {count} rows it is {whole:.6g}, but the mean of "
        f"{of_parts} and for the rest is {mean:.6g}. Microbatches count by rows, so the loss of "
        "the batch would be another number. Return the mean over rows, or (sum, weight). To "
        "average this loss over microbatches as it is, state their weights: {remedy}"
    )


def _narrowed(
    loss: Callable[[int, int], _SumAndWeight], middle: int, stop: int
) -> tuple[int, int, int] | None:
    """Return the first rows [start, middle, stop] of which both parts have rows that count, by
    bisection; None if fewer than two rows count."""
    start = 0
    while stop - start > 1:
        empty = [_is_empty(loss(start, middle)), _is_empty(loss(middle, stop))]
        if not any(empty):
            return start, middle, stop
        start, stop = (middle, stop) if empty[0] else (start, middle)
        middle = (start + stop) // 2
    return None


def _is_empty(part: _SumAndWeight) -> bool:
    """Return whether no row of a part counts: its mean is 0 / 0, or sum and weight are 0."""
    total, weight = part
    return not math.isfinite(total) or (total == 0 and weight == 0)


def _pair_difference(
    whole: _SumAndWeight,
    parts: tuple[_SumAndWeight, _SumAndWeight],
    rows: tuple[int, int],
    tolerance: float,
) -> str:
    """Return the message about a pair that is not (sum, weight); "" otherwise.

    A weight that does not add up may be meant, such as a constant for the whole batch. A value that
    is no sum may be meant if each microbatch has the weight 1. Arguments are as in `_difference`.
    """
    (total, weight), ((first, w_first), (others, w_others)), (count, cut) = whole, parts, rows

    def equal(one: float, other: float, *terms: float) -> bool:
        return abs(one - other) <= tolerance * (sum(map(abs, terms)) + _NOISE)

    def mean(one: float, other: float) -> float:
        return (cut * one + (count - cut) * other) / count

    if equal(weight, mean(w_first, w_others), w_first, w_others) and not equal(
        w_first, w_others, w_first
    ):
        return (
            "the loss returned two values, which are read as (sum, weight), but the second value is "
            f"a mean over rows: {weight:.6g} for {count} rows, {w_first:.6g} and {w_others:.6g} "
            "for the parts. To return a metric beside the loss, return fp.Loss(loss, aux=metric)"
        )
    if equal(total, first + others, first, others) or weight == w_first == w_others == 1:
        return ""
    values = f"is {total:.6g} for {count} rows, {first:.6g} and {others:.6g} for the parts"
    weighed = first * w_first, others * w_others
    if equal(weight, w_first + w_others, weight) and equal(total * weight, sum(weighed), *weighed):
        return (
            "the loss returned (mean, weight), but two values are read as (sum, weight): the first "
            f"{values}. Return (mean * weight, weight)"
        )
    if equal(total, mean(first, others), first, others):
        return (
            "the loss returned two values, which are read as (sum, weight), but the first value is "
            f"a mean over rows: it {values}. Return (sum, weight). To return a metric beside the "
            "loss, return fp.Loss(loss, aux=metric)"
        )
    return (
        f"the loss returned two values, which are read as (sum, weight), {_NO_SUM}: it {values}. So "
        "the loss of the batch would depend on the number of microbatches. Return the sum of the "
        "losses of single rows. To average this loss over microbatches as it is, return it alone "
        "and state the weights: {remedy}"
    )


def why_broadcast(fn: Callable[..., Any], y: Tree, target: Tree, *, summed: bool) -> str:
    """Return why a loss whose weights are known to be rows is no mean or sum over rows; or "".

    If output and target have different shapes, such as ``[B, 1]`` and ``[B]``, losses of torch
    compare each row with all other rows of the microbatch.
    """
    if not (isinstance(y, Tensor) and isinstance(target, Tensor)):
        return ""

    def mean(y: Tensor, target: Tensor) -> Any:
        return fn(y, target) / len(y) if summed else fn(y, target)

    if not y.dim() or not why_not_mean(mean, y, target, float(len(y))):
        return ""
    if summed and not _grows(y.shape, target.shape):
        return (
            "the loss has reduction='sum', so the losses of the microbatches are added, but it is "
            "no sum over rows: it compares rows with each other, or contains a mean or a root. "
            "Return the sum of the losses of single rows, or (sum, weight)"
        )
    return (
        f"the loss compares rows with each other: torch broadcasts the output {list(y.shape)} "
        f"against the target {list(target.shape)}. Give both one shape, with target.unsqueeze(-1) "
        "or y.squeeze(-1)"
    )


def _grows(shape: torch.Size, other: torch.Size) -> bool:
    """Return whether a tensor of a shape gets another shape if torch broadcasts it against
    another."""
    try:
        return torch.broadcast_shapes(shape, other) != shape
    except RuntimeError:
        return False


def has_scalar(y: Tree) -> bool:
    """Return whether an output contains a floating number, such as a loss, that has no rows."""
    return any(
        isinstance(leaf, Tensor) and not leaf.dim() and leaf.is_floating_point()
        for leaf in flatten(y)[0]
    )


def _rows(leaf: Tensor, count: int, *, exact: bool) -> Tensor:
    """Return some rows at equal distances, in double precision if ``exact``; too few rows are
    repeated."""
    # Not the first rows: sorted rows are alike, for example without padding.
    few = leaf.detach()[[number * len(leaf) // count for number in range(count)]]
    return few.double() if exact and few.is_floating_point() else few


def _has_mask(indices: Any) -> bool:
    return any(
        isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices
    )
