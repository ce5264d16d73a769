"""Compute the weight of each microbatch in the loss, before any forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcpipe._src.batch.microbatch import Batch
from funcpipe._src.core.border import given, open_border
from funcpipe._src.core.errors import BatchError, RanksError, Where, fail
from funcpipe._src.data.plan import Plan
from funcpipe._src.stages.bound import Shares


class Weighed(NamedTuple):
    """The weights of the microbatches, as far as one process can compute them."""

    # The weight of each microbatch. None: rows are the weights, or they are unknown.
    weights: tuple[float, ...] | None
    whole: bool = True  # whether the process had all values that the weights depend on
    fault: str = ""  # why the weights are unknown, or ""


def shares_of(
    rows: Sequence[int],
    weights: Sequence[float] | None,
    plan: Plan,
    loss_scale: Any,
    first: int = 0,
    *,
    rows_unclear: bool = False,
    rows_uneven: bool = False,
) -> Shares:
    """Compute the shares of microbatches with these rows and weights; without weights, rows count.

    The shares cover all replicas; ``first`` is the index of this replica's first microbatch. See
    `Shares` for ``rows_unclear`` and ``rows_uneven``. Raises BatchError if all weights are 0.
    """
    counts = tuple([1.0 if plan.counts.alike else float(size) for size in rows])
    scale, summed = float(loss_scale), plan.counts.summed
    parts = tuple(size / sum(counts) for size in counts)
    rows_unclear = (
        rows_unclear and len(counts) > 1 and plan.weight is None and not plan.counts.alike
    )
    unproven = len(counts) > 1 and not summed and not plan.counts.known
    if weights is None:
        uneven = rows_uneven and len(counts) > 1 and not plan.counts.alike
        options = {"rows_unclear": rows_unclear, "rows_uneven": uneven, "unproven": unproven}
        return Shares(
            counts, None if summed else sum(counts), False, scale, parts, summed, first, **options
        )
    total = sum(weights)
    if not total:
        error = BatchError(
            f"{_word(plan)} is 0 for every microbatch, for example because all labels are ignored, "
            "so the loss of this batch is not defined; leave the batch out"
        )
        error.everywhere = True  # all processes have the same weights, so each raises by itself
        raise error
    if plan.weight is not None:
        parts = tuple(weight / total for weight in weights)
    options = {"rows_unclear": rows_unclear, "unproven": unproven}
    return Shares(tuple(weights), total, True, scale, parts, summed, first, **options)


def weighed(batch: Batch, plan: Plan) -> Weighed:
    """Compute the weights from the part of the batch in this process. Raises as `weights_of`."""
    target = batch.target is not None
    whole = target and (bool(batch.inputs) or plan.weight is not None)
    if not whole and (plan.weight is not None or not (target or batch.inputs)):
        return Weighed(None, whole=False)
    try:
        return Weighed(weights_of(batch, plan), whole)
    except Exception as error:
        if whole:
            raise
        return Weighed(None, whole=False, fault=str(error))  # a process with all values may succeed


def settled(by_process: Sequence[Weighed]) -> tuple[float, ...] | None:
    """Return the weights that a replica's processes agree on; None: rows. Raises RanksError."""
    # A process that had all values is right; without one, take the weights that some could compute.
    complete = [each for each in by_process if each.whole]
    known = {
        each.weights for each in complete or by_process if complete or each.weights is not None
    }
    fault = next((each.fault for each in by_process if each.fault), "")
    if len(known) > 1 or (not known and fault):
        reason = f"the ranks computed {sorted(map(str, known))}" if known else fault
        raise RanksError(
            "the weights of microbatches depend on inputs and target (the loss's weigh), but no "
            f"rank has both: {reason}; give (inputs, target) to the rank of the last stage"
        )
    return known.pop() if known else None


def _word(plan: Plan) -> str:
    return "the loss's weigh(inputs, target)" if plan.weight is None else "weight(target)"


def weights_of(batch: Batch, plan: Plan) -> tuple[float, ...] | None:
    """Return the weight of each microbatch, by the plan's ``weight`` or its loss; None: rows.

    Raises BatchError if a weight is not a finite number from 0.
    """
    weight, word = plan.weight, _word(plan)
    weigh = plan.counts.weigh if weight is None else lambda _, target: weight(target)
    if weigh is None:
        return None
    values: list[Any] = []
    nothing = [given(None)] * batch.num_pieces
    for index, (x, target) in enumerate(
        zip(batch.inputs or nothing, batch.target or nothing, strict=True)
    ):
        try:
            values.append(weigh(open_border(x, grad=False)[0], open_border(target, grad=False)[0]))
        except BaseException as error:
            slices = len(batch.slices or (1,))
            word = f"weight of slice {index % slices}" if slices > 1 else "weight"
            fail(error, Where(None, "", index // slices, word, ""))
    if weight is None and any(value is None for value in values):
        return None
    numbers = _numbers(values)
    for index, (number, value) in enumerate(zip(numbers, values, strict=True)):
        if not 0 <= number < float("inf"):
            raise BatchError(
                f"{word} must return a finite number from 0; for {batch.named(index)} it returned "
                f"{value!r}"
            )
    return numbers


def _numbers(values: Sequence[Any]) -> tuple[float, ...]:
    """Return weights as numbers, NaN for other values.

    All tensors are read in one copy, because each read waits for the device.
    """
    if all(isinstance(value, Tensor) and value.numel() == 1 for value in values):
        return tuple(
            float(number)
            for number in torch.stack([value.reshape(()).double() for value in values]).cpu()
        )
    return tuple(map(_number, values))


def _number(value: Any) -> float:
    """Return a weight as a number, NaN for another value."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")
