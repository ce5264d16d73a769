"""Refuse values that a forward keeps in attributes for later calls, because each run starts without
them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.tree import flatten, locations
from funcpipe._src.models.attributes import Change
from funcpipe._src.models.norms.written_buffers import has_numbers


def refuse_kept(left: dict[str, Any], changes: Sequence[Change], who: str) -> None:
    """Raise PlanError for values that a run left on its copy and that the module would use in its
    next call.

    A run begins with the attributes that the module had. Masks and tables are the same in each run,
    so nothing is lost. Values computed from parameters or inputs differ between runs, and the
    module itself would continue with the old value. Integers pass, except counts that the forward
    increases and also uses. Attributes that the forward only writes pass.

    Args:
        left: the numbers that the earlier run left, by place. Updated with the numbers of this run.
        changes: the attributes that this run changed on its copy.
        who: the class of the module.
    """
    for change in changes:
        # Written before it is read: no old value reaches a later call.
        if change.name not in change.uses.kept:
            continue
        if (
            change.name in change.uses.used_counts
            and type(change.old) is int is type(change.new)
            and change.old != change.new
        ):
            raise PlanError(
                f"the forward of {who} counts its calls in {change.place!r} and also reads the "
                "count, but each run begins with the count at the time when the stage was made, so "
                "the stage would not compute what the module computes. Count in your training "
                "loop, and give each microbatch the number: an input, or a feed with "
                "fp.Replicate(number)"
            )
        leaves = zip(locations(change.new, change.place), flatten(change.new)[0], strict=True)
        for place, leaf in leaves:
            new = leaf.detach() if isinstance(leaf, Tensor) else leaf
            if not _is_number(new):
                continue
            if _differ(change.old, new) or _differ(left.get(place), new):
                raise PlanError(
                    f"the forward of {who} keeps {place!r} in an attribute from call to call, but "
                    "each run begins with the value at the time when the stage was made, so the "
                    "stage would not compute what the module computes. Compute the value before "
                    "the stage is made and register it as a buffer, or compute it in each call. If "
                    "batches change the value, it is a statistic: write a function stage that "
                    "returns it in Out(stats=...) and folds it in commit=..."
                )
            left[place] = new


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return has_numbers(leaf) and leaf.layout is torch.strided
    return isinstance(leaf, float)


def _differ(old: Any, new: Any) -> bool:
    """Return whether two values are different numbers of one kind and shape."""
    if isinstance(old, float) and isinstance(new, float):
        return old != new
    if not (isinstance(old, Tensor) and isinstance(new, Tensor)):
        return False
    alike = old.shape == new.shape and old.dtype == new.dtype and old.device == new.device
    return alike and not torch.equal(old, new)
