"""How much each microbatch counts in the loss, before any forward."""

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
    """What a process makes of the weights of its microbatches.

    Attributes:
        weights: of each; None: their rows count, or it does not know.
        whole: did it have all that decides about them.
        fault: why it does not know.
    """

    weights: tuple[float, ...] | None
    whole: bool = True
    fault: str = ""


def shares_of(
    rows: Sequence[int],
    weights: Sequence[float] | None,
    plan: Plan,
    loss_scale: Any,
    first: int = 0,
    *,
    rows_unclear: bool = False,
) -> Shares:
    """Compute the shares of microbatches with these rows and weights; without weights, rows count.

    The shares cover all replicas; ``first`` is the index of this replica's first microbatch. See
    `Shares` for ``rows_unclear``.

    Raises:
        BatchError: all weights are 0.
    """
    counts = tuple([1.0 if plan.counts.alike else float(size) for size in rows])
    scale, summed = float(loss_scale), plan.counts.summed
    parts = tuple(size / sum(counts) for size in counts)
    rows_unclear = (
        rows_unclear and len(counts) > 1 and plan.weight is None and not plan.counts.alike
    )
    if weights is None:
        guessed = len(counts) > 1 and not summed and not plan.counts.known
        options = {"guessed": guessed, "rows_unclear": rows_unclear}
        return Shares(
            counts, None if summed else sum(counts), False, scale, parts, summed, first, **options
        )
    total = sum(weights)
    if not total:
        error = BatchError(
            f"{_word(plan)} is 0 for every microbatch, so the loss of this batch is not defined; "
            "leave it out"
        )
        error.everywhere = True
        raise error
    if plan.weight is not None:
        parts = tuple(weight / total for weight in weights)
    return Shares(
        tuple(weights), total, True, scale, parts, summed, first, rows_unclear=rows_unclear
    )


def weighed(batch: Batch, plan: Plan) -> Weighed:
    """What this process makes of the weights, with what it has of the batch. Raises what
    `weights_of` does."""
    target = batch.target is not None
    whole = target and (bool(batch.inputs) or plan.weight is not None)
    if not whole and (plan.weight is not None or not (target or batch.inputs)):
        return Weighed(None, whole=False)
    try:
        return Weighed(weights_of(batch, plan), whole)
    except Exception as error:
        if whole:
            raise
        return Weighed(None, whole=False, fault=str(error))  # who has all may know


def settled(told: Sequence[Weighed]) -> tuple[float, ...] | None:
    """The weights, by what the processes of a replica make of them; None: their rows count. Raises
    RanksError."""
    sure = [each for each in told if each.whole]
    known = {each.weights for each in sure or told if sure or each.weights is not None}
    fault = next((each.fault for each in told if each.fault), "")
    if len(known) > 1 or (not known and fault):
        what = f"several say other things, {sorted(map(str, known))}" if known else fault
        raise RanksError(
            "how much microbatches count hangs on inputs and target (the loss's weigh), and no "
            f"rank has both: {what}; give (inputs, target) to the rank of the last stage"
        )
    return known.pop() if known else None


def _word(plan: Plan) -> str:
    return (
        "what the loss counts (its weigh(inputs, target))"
        if plan.weight is None
        else "weight(target)"
    )


def weights_of(batch: Batch, plan: Plan) -> tuple[float, ...] | None:
    """The weight of each microbatch by the plan's weight or its loss; None: its rows count.

    Raises:
        BatchError: a weight is not a number from 0.
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
                f"{word} is a number from 0; for {batch.named(index)} it gave {value!r}"
            )
    return numbers


def _numbers(values: Sequence[Any]) -> tuple[float, ...]:
    """Weights as numbers, nan where one is none; tensors are read at once, since each read waits
    for the device."""
    if all(isinstance(value, Tensor) and value.numel() == 1 for value in values):
        return tuple(
            float(number)
            for number in torch.stack([value.reshape(()).double() for value in values]).cpu()
        )
    return tuple(map(_number, values))


def _number(value: Any) -> float:
    """A weight as a number; nan where it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")
