"""How much each microbatch counts in the loss, before any forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcpipe.core.errors import BatchError, Where, fail
from funcpipe.core.plan import Plan
from funcpipe.runtime.border import given, open_border
from funcpipe.runtime.bound import Shares
from funcpipe.runtime.microbatch import Batch


def shares_of(
    rows: Sequence[int], weights: Sequence[float] | None, plan: Plan, loss_scale: Any, first: int = 0
) -> Shares:
    """The shares of microbatches with so many rows and these weights; None: their rows count.

    They are those of all replicas; ``first`` is the place of the first one of this.
    """
    counts, scale, summed = tuple(map(float, rows)), float(loss_scale), plan.counts.summed
    parts = tuple(size / sum(counts) for size in counts)
    if weights is None:
        return Shares(counts, None if summed else sum(counts), False, scale, parts, summed, first)
    total = sum(weights)
    if plan.weight is not None:
        parts = tuple(weight / total for weight in weights)
    return Shares(tuple(weights), total, True, scale, parts, summed, first)


def weights_of(batch: Batch, plan: Plan) -> tuple[float, ...] | None:
    """The weight of each microbatch by the plan's weight or its loss; None: its rows count, or the target is not here.

    Raises:
        BatchError: a weight is not a number from 0, or all are 0.
    """
    weight, weigh, word = plan.weight, plan.counts.weigh, "what the loss counts (its weigh(inputs, target))"
    if weight is not None:
        weigh, word = lambda _, target: weight(target), "weight(target)"
    if weigh is None or batch.target is None:
        return None
    values: list[Any] = []
    inputs = batch.inputs or [given(None)] * len(batch.target)
    for index, (x, target) in enumerate(zip(inputs, batch.target, strict=True)):
        try:
            values.append(weigh(open_border(x, grad=False)[0], open_border(target, grad=False)[0]))
        except BaseException as error:
            fail(error, Where(None, "", index, "weight", ""))
    if weight is None and any(value is None for value in values):
        return None
    numbers = _numbers(values)
    for index, (number, value) in enumerate(zip(numbers, values, strict=True)):
        if not 0 <= number < float("inf"):
            raise BatchError(f"{word} is a number from 0; for microbatch {index} it gave {value!r}")
    if not sum(numbers):
        raise BatchError(f"{word} is 0 for every microbatch, so the loss of this batch is not defined; leave it out")
    return numbers


def _numbers(values: Sequence[Any]) -> tuple[float, ...]:
    """Weights as numbers, nan where one is none; tensors are read at once, since each read waits for the device."""
    if all(isinstance(value, Tensor) and value.numel() == 1 for value in values):
        return tuple(float(number) for number in torch.stack([value.reshape(()).double() for value in values]).cpu())
    return tuple(map(_number, values))


def _number(value: Any) -> float:
    """A weight as a number; nan where it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")
