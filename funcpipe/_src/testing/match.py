"""Check that a plan is bit-identical to a plain loop over its stages: `assert_matches_sequential`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.batch.marks import Microbatches
from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.core.shown import shape_of
from funcpipe._src.core.tree import Tree, flatten, locations
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.result import Result
from funcpipe._src.data.schedule import Action, Kind, Schedule
from funcpipe._src.engine.options import ExecutorLike
from funcpipe._src.engine.run import run
from funcpipe._src.engine.sequential import run_sequential
from funcpipe._src.lower.plan import make_plan
from funcpipe._src.stages.trainable import Trainable

_FIELDS = ("losses", "loss", "weight", "aux", "outputs", "state", "grads", "unused")
"""The fields of a result in the order of their computation: the cause comes first."""

_SHOWN = 10  # the number of differing leaves that a message lists


def assert_matches_sequential(
    plan: Plan,
    params: Sequence[Tree],
    batch: Any,
    *,
    state: Sequence[Tree] | None = None,
    feeds: Mapping[str, Tree] | None = None,
    seed: int | None = None,
    trainable: Trainable = None,
    loss_scale: float = 1.0,
    threads_per_lane: int | None = None,
    executors: Sequence[ExecutorLike] = ("serial", "threads"),
    whole_batch: float | None = None,
) -> Result:
    """Assert that a plan gives bit-identical results with each executor and with `run_sequential`.

    The comparison covers losses, outputs, state and all gradients.

    >>> import torch, funcpipe as fp
    >>> stages = [fp.stage(lambda p, x: x * p["w"])] * 2
    >>> plan = fp.make_plan(stages, fp.schedules.one_f_one_b(2, 2), loss=torch.nn.functional.mse_loss, devices="cpu")
    >>> params = ({"w": torch.tensor(2.0)}, {"w": torch.tensor(3.0)})
    >>> x = torch.ones(4, 1)
    >>> funcpipe.testing.assert_matches_sequential(plan, params, (x, x), whole_batch=1e-6).loss
    tensor(25.)

    Args:
        plan: a plan, with or without a loss.
        params, batch, state, feeds, seed, trainable, loss_scale, threads_per_lane: as in `run`.
        executors: the executors to compare, as in `run`.
        whole_batch: a tolerance: also compare loss, outputs and gradients with a run of one
            microbatch of all rows. The tolerance is relative to the largest number of each tensor;
            1e-10 suits float64. The comparison needs stages that treat rows independently and draw
            no random numbers, and losses that are means, or sums with weights. None: no such
            comparison.

    Returns:
        The result of the last executor.

    Raises:
        AssertionError: some leaves differ. The message names them, with the number of differing
            elements and the size of the difference.
        PlanError: ``executors`` is empty or a string.
    """
    if not executors or isinstance(executors, str):
        raise PlanError(
            "executors is a sequence of at least one of 'serial', 'threads', fp.lanes(plan), "
            f"fp.graphs(plan); got {executors!r}"
        )
    options: dict[str, Any] = {"state": state, "feeds": feeds, "seed": seed, "trainable": trainable}
    options |= {"loss_scale": loss_scale, "threads_per_lane": threads_per_lane}
    expected = run_sequential(plan, params, batch, **options)
    result = expected
    for executor in executors:
        result = run(plan, params, batch, executor=executor, **options)
        name = repr(executor)
        if not isinstance(executor, str | None):
            name = f"fp.{type(executor).__name__.lower()}(plan)"
        _compare(result, expected, _FIELDS, f"fp.run(executor={name})", "fp.run_sequential")
    if whole_batch is not None:
        whole_batch_plan = make_plan(
            plan.stages,
            _single_microbatch(plan.schedule),
            devices=plan.devices,
            loss=plan.loss,
            weight=plan.weight,
            ties=plan.ties,
            train=plan.train,
            outputs=plan.outputs,
        )
        expected = run_sequential(whole_batch_plan, params, batch, **options)
        fields = "loss", "outputs", "grads"
        title = f"{plan.num_microbatches} microbatches", "one microbatch of all rows"
        _compare(result, expected, fields, *title, tolerance=whole_batch)
    return result


def _single_microbatch(schedule: Schedule) -> Schedule:
    """The schedule of one microbatch, without slices, on the same devices."""
    if schedule.num_slices == 1:
        return schedule.first(1)
    actions = [Action(Kind.F, stage) for stage in range(schedule.num_stages)]
    if schedule.has_backward:
        actions += [Action(Kind.B, stage) for stage in reversed(range(schedule.num_stages))]
    rows = [
        [action for action in actions if schedule.device_of[action.stage] == d]
        for d in range(schedule.num_devices)
    ]
    return Schedule(tuple(map(tuple, rows)), "in one piece")


def _compare(
    result: Result,
    expected: Result,
    fields: Sequence[str],
    name: str,
    reference: str,
    *,
    tolerance: float | None = None,
) -> None:
    faults: list[str] = []
    count = 0
    for field in fields:
        a, b = _plain(getattr(result, field)), _plain(getattr(expected, field))
        if a is not None or b is not None:
            differing, leaf_count = differences(a, b, field, allowed=tolerance)
            faults += differing
            count += leaf_count
    first = faults[0].split(":")[0] if faults else ""
    title = f"{name} differs from {reference} in {len(faults)} of {count} leaves, first in {first}:"
    raise_all(title, faults, AssertionError, most=_SHOWN)


def _plain(tree: Tree) -> Tree:
    return tuple(tree) if isinstance(tree, Microbatches) else tree


def differences(
    actual: Tree, expected: Tree, root: str, *, allowed: float | None = None
) -> tuple[list[str], int]:
    """Describe each leaf that differs, and count all leaves.

    Args:
        actual, expected: the trees.
        root: the name of the trees in the descriptions.
        allowed: None: the leaves must be bit-identical, but any NaN equals any NaN. Otherwise: the
            tolerance of floating numbers, relative to the largest number of a leaf.
    """
    left, spec = flatten(actual)
    right, expected_spec = flatten(expected)
    if spec != expected_spec:
        fault = f"{root}: the structure is {spec} and should be {expected_spec}"
        return [fault], max(len(left), len(right))
    texts = [_difference(a, b, allowed) for a, b in zip(left, right, strict=True)]
    if not any(texts):  # the usual case, without names
        return [], len(left)
    named = zip(locations(expected, root), texts, strict=True)
    return [f"{name}: {text}" for name, text in named if text], len(left)


def _difference(actual: Any, expected: Any, allowed: float | None) -> str:
    """Describe how a leaf differs; "" if it does not."""
    if not isinstance(actual, Tensor) or not isinstance(expected, Tensor):
        if _same(actual, expected):
            return ""
        return f"{_short_text(actual)} came, {_short_text(expected)} expected"
    forms = [(tensor.shape, tensor.dtype, tensor.device) for tensor in (actual, expected)]
    if forms[0] != forms[1]:
        return f"{_short_text(actual)} came, {_short_text(expected)} expected"
    # Compare bytes, because they exist for all types and distinguish -0.0 from 0.0.
    a, b = _bytes(actual), _bytes(expected)
    differs = (a != b).any(1)
    if not differs.any():
        return ""
    x, y = _wide(actual), _wide(expected)
    distance = (x - y).abs()
    # Bits of NaNs differ between kernels without meaning.
    differs &= ~(x.isnan() & y.isnan())
    if allowed is not None:
        largest = y.abs()[y.isfinite()]
        differs &= (x != y) & ~(
            distance <= allowed * float(largest.max() if largest.numel() else 0.0)
        )
    return _describe(x, y, differs, distance, actual.shape) if differs.any() else ""


def _same(a: Any, b: Any) -> bool:
    """Whether two leaves that are not tensors are equal, or cannot be compared."""
    if a is b or type(a) is not type(b):
        return a is b
    if hasattr(a, "__dict__"):
        return not differences(vars(a), vars(b), "")[0]
    if type(a).__eq__ is object.__eq__:
        return True  # an iterator, a lock: nothing to compare
    equal: Any = a == b
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal) or (a != a and b != b)


def _bytes(tensor: Tensor) -> Tensor:
    dense = tensor.detach().to_dense().cpu().resolve_conj().resolve_neg().contiguous()
    return dense.reshape(-1, 1).view(torch.uint8)


def _wide(tensor: Tensor) -> Tensor:
    dtype = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().to_dense().cpu().to(dtype).reshape(-1)


def _describe(x: Tensor, y: Tensor, differs: Tensor, distance: Tensor, shape: torch.Size) -> str:
    first = int(differs.nonzero()[0])
    index = [int(axis) for axis in torch.unravel_index(torch.tensor(first), shape)] if shape else []
    errors = distance[differs]
    relative = errors / y[differs].abs()
    where = f"at {index}: " if index else ""
    return (
        f"{int(differs.sum())} of {x.numel()} numbers differ, by {float(errors.max()):.3g} at "
        f"most (relative {float(relative.max()):.3g}); first {where}{x[first].item()!r} came, "
        f"{y[first].item()!r} expected"
    )


def _short_text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{shape_of(value)} on {value.device}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
