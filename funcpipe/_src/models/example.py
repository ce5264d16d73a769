"""Read the marks of an example: remove `Replicate` and `Axis`, and find the row axis of each
leaf."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from funcpipe._src.batch.marks import Axis, Microbatches, Replicate
from funcpipe._src.core.errors import BatchError, PlanError, raise_all
from funcpipe._src.core.tree import Tree, flatten, locations, map_leaves
from funcpipe._src.models.traced.signature import as_call, as_input


def bare(leaf: Any) -> Any:
    """A leaf without the mark for cutting it."""
    return leaf.value if isinstance(leaf, (Replicate, Axis)) else leaf


def unmarked(example: Tree) -> Tree:
    """The example as a stage would get it. Raises PlanError for several microbatches."""

    def value(leaf: Any) -> Any:
        if isinstance(leaf, Microbatches):
            raise PlanError(
                "an example is the input of one microbatch, but fp.Microbatches contains several; "
                "give one of them: example=microbatches[0]"
            )
        # A slice along another axis than 0 has gaps, by which export would fix the number of rows.
        has_gaps = isinstance(leaf, Axis) and isinstance(leaf.value, Tensor) and leaf.axis
        return bare(leaf).contiguous() if has_gaps else bare(leaf)

    return map_leaves(value, example)


def row_axes(example: Tree) -> list[int | None]:
    """Return the axis of rows for each leaf of a forward's (args, kwargs), or None.

    The first tensor that is not replicated determines the number of rows. Tensors without a mark
    have rows along axis 0 if that axis has this length.
    """
    marked = map_leaves(
        lambda leaf: map_leaves(Replicate, leaf.value) if isinstance(leaf, Replicate) else leaf,
        example,
    )
    faults: list[str] = []
    axes: list[int | None] = []
    rows: int | None = None
    call = as_input(*as_call(marked))
    for place, leaf in zip(locations(call, "example"), flatten(call)[0], strict=True):
        value, axis = (leaf.value, leaf.axis) if isinstance(leaf, Axis) else (leaf, 0)
        axes.append(None)
        if isinstance(leaf, Axis) and not (
            isinstance(value, Tensor) and -value.dim() <= axis < value.dim()
        ):
            faults.append(f"{place} is a {type(value).__name__} without an axis {axis}")
        elif isinstance(value, Tensor) and value.dim():
            size = value.shape[axis]
            rows = size if rows is None else rows
            if size == rows:
                axes[-1] = axis % value.dim()
            elif isinstance(leaf, Axis):
                faults.append(
                    f"{place} has {size} rows along axis {axis}, but the tensors before it have "
                    f"{rows} rows"
                )
    raise_all("the marks of this example do not fit it:", faults, BatchError)
    return axes
