"""record_values and first_difference: where two runs of a plan begin to differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.shown import line
from funcpipe._src.core.tree import Tree, flatten, locations, map_tensors
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.result import Result
from funcpipe._src.data.schedule import Action
from funcpipe._src.engine.run import run
from funcpipe._src.engine.sequential import run_sequential

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class ValueRecord:
    """The values of a run by action and name, copied to the CPU.

    Attributes:
        values: ``(action, name)`` -> the tree that an ``observe`` function of `funcpipe.run` saw.
        order: the actions of the plan in plan order.
        result: the result of the run; None for the record of a model.
    """

    values: dict[tuple[Action, str], Tree]
    order: tuple[Action, ...]
    result: Result | None

    def __repr__(self) -> str:
        return line("ValueRecord", [("", f"{len(self.values)} values")])


@dataclass(frozen=True)
class Difference:
    """A leaf that differs between two records.

    Attributes:
        action: the first action, in plan order, with a value that differs.
        name: the name of the value, such as "input" or "output gradient".
        leaf: the place of the leaf in the value.
        ulp: the largest difference of two elements, in units in the last place; inf if shapes,
            types or finite elements do not match.
        elements: how many elements differ.
    """

    action: Action
    name: str
    leaf: str
    ulp: float
    elements: int

    @property
    def stage(self) -> int:
        """The stage of the action."""
        return self.action.stage

    @property
    def microbatch(self) -> int:
        """The microbatch of the action."""
        return self.action.microbatch

    def __str__(self) -> str:
        place = f"{self.action} (stage {self.stage}, microbatch {self.microbatch}): {self.leaf}"
        if self.ulp == float("inf"):
            return (
                f"{place} differs in structure, shape or type, or in elements without a distance "
                "in ulp (integers, inf, NaN)"
            )
        return f"{place} differs in {self.elements} elements, by at most {self.ulp:g} ulp"


def record_values(
    plan: Plan, params: Sequence[Tree], batch: Any, *, executor: Any = None, **options: Any
) -> ValueRecord:
    """Run a plan, and record all inputs, outputs and gradients of all its actions.

    >>> double = fp.stage(lambda w, x: x * w)
    >>> schedule = fp.schedules.one_f_one_b(2, 2)
    >>> plan = fp.make_plan([double, double], schedule, loss=nn.functional.mse_loss, devices="cpu")
    >>> weights, batch = (torch.tensor(2.0), torch.tensor(3.0)), (torch.ones(4), torch.zeros(4))
    >>> record = funcpipe.testing.record_values(plan, weights, batch)
    >>> record.values[fp.Action.parse("0F1"), "output"]
    tensor([2., 2.])

    Args:
        plan, params, batch: as for `funcpipe.run`.
        executor: as for `funcpipe.run`; "sequential" runs `funcpipe.run_sequential`, the oracle.
        options: further options of the run, such as ``state`` and ``seed``.

    Raises:
        FuncpipeError: as in `funcpipe.run`.
    """
    values: dict[tuple[Action, str], Tree] = {}

    def observe(action: Action, name: str, value: Tree) -> None:
        values[action, name] = map_tensors(cpu_copy, value)

    if executor == "sequential":
        result = run_sequential(plan, params, batch, observe=observe, **options)
    else:
        result = run(plan, params, batch, observe=observe, executor=executor, **options)
    order = tuple(plan.program.action(code) for code in plan.program.order)
    return ValueRecord(values, order, result)


def cpu_copy(tensor: Tensor) -> Tensor:
    """Return a copy that later writes into the tensor do not change."""
    return tensor.detach().to("cpu", copy=True)


def first_difference(first: ValueRecord, second: ValueRecord) -> Difference | None:
    """Return the first value that differs between two records. None: all values are equal.

    Equal means bit-identical, except that 0.0 and -0.0 are equal, and that all NaN are equal.

    Records of different schedules, executors, devices and of the oracle can be compared, if the
    stages and the cut of the batch are the same. Values that only one of the runs has are left
    out, for example those of R.

    >>> double = fp.stage(lambda w, x: x * w)
    >>> schedule = fp.schedules.one_f_one_b(2, 2)
    >>> plan = fp.make_plan([double, double], schedule, loss=nn.functional.mse_loss, devices="cpu")
    >>> batch, weights = (torch.ones(4), torch.zeros(4)), (torch.tensor(2.0), torch.tensor(3.0))
    >>> right = funcpipe.testing.record_values(plan, weights, batch)
    >>> wrong = funcpipe.testing.record_values(plan, (weights[0], weights[1] + 1e-6), batch)
    >>> print(funcpipe.testing.first_difference(right, wrong))
    1F0 (stage 1, microbatch 0): output differs in 2 elements, by at most 4 ulp

    Args:
        first, second: what `record_values` or `record_model` returned. The plan order of the first
            decides which difference is the first one.

    Raises:
        PlanError: the numbers of stages or microbatches differ, or the records share no value.
    """
    for record in (first, second):
        if not isinstance(record, ValueRecord):
            raise PlanError(
                "first_difference compares two records: "
                f"record_values(plan, params, batch); got a {type(record).__name__}"
            )
    stages, microbatches = [
        [len({action.stage for action in record.order}) for record in (first, second)],
        [len({action.microbatch for action, _ in record.values}) for record in (first, second)],
    ]
    for name, (a, b) in (("stages", stages), ("microbatches", microbatches)):
        if a != b:
            raise PlanError(
                f"the records have {a} and {b} {name}; first_difference compares runs with the same "
                "cuts of the model and of the batch"
            )
    shared = [key for key in first.values if key in second.values]
    if not shared:
        raise PlanError(
            "the two records share no value: their plans have different stages or microbatches"
        )
    place = {action: number for number, action in enumerate(first.order)}
    for action, name in sorted(shared, key=lambda key: place.get(key[0], len(place))):
        found = _difference(action, name, first.values[action, name], second.values[action, name])
        if found is not None:
            return found
    return None


def _difference(action: Action, name: str, first: Tree, second: Tree) -> Difference | None:
    (leaves, structure), (others, other) = flatten(first), flatten(second)
    if structure != other:
        return Difference(action, name, name, float("inf"), len(leaves))
    for where, a, b in zip(locations(first, name), leaves, others, strict=True):
        ulp, elements = _distance(a, b)
        if elements:
            return Difference(action, name, where, ulp, elements)
    return None


def _distance(first: Any, second: Any) -> tuple[float, int]:
    """The largest distance of two elements in ulp, and how many elements differ."""
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return (0.0, 0) if first is second or first == second else (float("inf"), 1)
    if first.shape != second.shape or first.dtype != second.dtype:
        return float("inf"), max(1, first.numel())
    if first.is_sparse or second.is_sparse:
        first, second = first.to_dense(), second.to_dense()
    if first.is_complex():
        first, second = torch.view_as_real(first), torch.view_as_real(second)
    if not first.is_floating_point():
        elements = int((first != second).sum())
        return (float("inf") if elements else 0.0), elements
    a, b = _steps(first), _steps(second)
    far = a.double() - b.double()  # rounded, but does not overflow
    steps = torch.where(far.abs() < 2**53, (a - b).double(), far)
    both_nan = first.isnan() & second.isnan()
    steps = steps.abs().masked_fill(both_nan, 0.0)
    finite = first.isfinite() & second.isfinite()
    elements = int((steps != 0).sum())
    unlike = bool((steps.masked_fill(finite, 0.0) != 0).any())
    largest = float(steps.max()) if steps.numel() else 0.0
    return (float("inf") if unlike else largest), elements


def _steps(tensor: Tensor) -> Tensor:
    """The number of floating-point numbers between 0 and each element, with its sign, as int64."""
    bits = tensor.contiguous().view(_INTEGERS[tensor.dtype.itemsize]).to(torch.int64)
    return torch.where(bits < 0, -(2 ** (8 * tensor.dtype.itemsize - 1)) - bits, bits)
