"""How users mark leaves of a batch: shared, cut along another axis, cut already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from funcpipe._src.core.tree import Tree


class Replicate:
    """A leaf of a batch, or all leaves of a tree in it, that every microbatch gets whole:
    ``fp.Replicate(table)``.

    >>> weigh = fp.stage(lambda p, batch: batch["x"] * batch["table"].sum())
    >>> plan = fp.make_plan([weigh], fp.schedules.fill_drain(1, 2, backward=False), devices="cpu")
    >>> fp.run(plan, ((),), {"x": torch.ones(2), "table": fp.Replicate(torch.ones(5))}).outputs
    tensor([5., 5.])

    Attributes:
        value: a tensor, a tree, or anything.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Replicate({type(self.value).__name__})"


class Axis:
    """A leaf of a batch, or all leaves of a tree in it, whose rows lie along another axis than 0:
    ``fp.Axis(mask, 1)``.

    >>> total = fp.stage(lambda p, x: x.sum(0))
    >>> plan = fp.make_plan([total], fp.schedules.fill_drain(1, 2, backward=False), devices="cpu", merge=0)
    >>> fp.run(plan, ((),), fp.Axis(torch.ones(3, 2), 1)).outputs  # a column for each microbatch
    tensor([3., 3.])

    Attributes:
        value: the tensor, or a tree.
        axis: of its rows; negative counts from the end.
        sequence: the axis along which plans with slices cut it; "next": the first of the others, if
            there is one; None: every slice gets it whole.
    """

    def __init__(self, value: Tree, axis: int, sequence: int | str | None = "next") -> None:
        self.value, self.axis, self.sequence = value, axis, sequence

    def __repr__(self) -> str:
        sequence = "" if self.sequence == "next" else f", sequence={self.sequence!r}"
        return f"Axis({type(self.value).__name__}, {self.axis}{sequence})"


class Microbatches(Sequence[Any]):
    """Microbatches that are cut already, or that cannot be merged: one tree each.

    Give them as inputs, target or feeds where the library should not cut (packed sequences, ragged
    rows). Outputs come back in this form where the inputs had it, and for leaves that have no rows
    to join.

    >>> double = fp.stage(lambda p, x: 2 * x)
    >>> plan = fp.make_plan([double], fp.schedules.fill_drain(1, 2, backward=False), devices="cpu")
    >>> list(fp.run(plan, ((),), fp.Microbatches([torch.ones(1), torch.ones(3)])).outputs)
    [tensor([2.]), tensor([2., 2., 2.])]
    """

    def __init__(self, trees: Iterable[Tree]) -> None:
        self.trees = tuple(trees)

    def __len__(self) -> int:
        return len(self.trees)

    def __getitem__(self, index: Any) -> Any:
        return self.trees[index]

    def __repr__(self) -> str:
        return f"Microbatches({len(self.trees)})"
