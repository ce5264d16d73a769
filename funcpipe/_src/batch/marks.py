"""Marks for leaves of a batch: shared by all microbatches, cut along another axis, already cut."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from funcpipe._src.core.tree import Tree


class Replicate:
    """A mark for a value in a batch that each microbatch gets whole: ``fp.Replicate(table)``.

    By default, `run` cuts all tensors of a batch along axis 0. Mark tensors that have no rows, such
    as a table of weights.

    >>> weigh = fp.stage(lambda p, batch: batch["x"] * batch["table"].sum())
    >>> plan = fp.make_plan([weigh], fp.schedules.fill_drain(1, 2, backward=False), devices="cpu")
    >>> fp.run(plan, ((),), {"x": torch.ones(2), "table": fp.Replicate(torch.ones(5))}).outputs
    tensor([5., 5.])

    Attributes:
        value: a tensor, a tree, or any other object.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Replicate({type(self.value).__name__})"


class Axis:
    """A mark for tensors of a batch whose rows are not along axis 0: ``fp.Axis(mask, 1)``.

    >>> total = fp.stage(lambda p, x: x.sum(0))
    >>> plan = fp.make_plan([total], fp.schedules.fill_drain(1, 2, backward=False), devices="cpu", merge=0)
    >>> fp.run(plan, ((),), fp.Axis(torch.ones(3, 2), 1)).outputs  # a column for each microbatch
    tensor([3., 3.])

    Attributes:
        value: a tensor, or a tree of tensors with their rows along the same axis.
        axis: the axis of the rows. A negative axis counts from the end.
        sequence: the axis along which a plan with slices cuts the tensor. "next", the default: the
            first other axis, if the tensor has one. None: each slice gets the whole tensor.
    """

    def __init__(self, value: Tree, axis: int, sequence: int | str | None = "next") -> None:
        self.value, self.axis, self.sequence = value, axis, sequence

    def __repr__(self) -> str:
        sequence = "" if self.sequence == "next" else f", sequence={self.sequence!r}"
        return f"Axis({type(self.value).__name__}, {self.axis}{sequence})"


class Microbatches(Sequence[Any]):
    """A sequence with one tree per microbatch, in the place of one tree that `run` cuts.

    Give `Microbatches` as inputs, target or feeds that you cut yourself, such as packed sequences
    or rows of different lengths. Outputs have this form, too, if the inputs had it, or if the
    outputs have no rows to join. Objects without rows, such as metadata, may stand beside leaves
    with rows: then `run` cuts the other leaves into as many microbatches.

    >>> double = fp.stage(lambda p, x: 2 * x)
    >>> plan = fp.make_plan([double], fp.schedules.fill_drain(1, 2, backward=False), devices="cpu")
    >>> list(fp.run(plan, ((),), fp.Microbatches([torch.ones(1), torch.ones(3)])).outputs)
    [tensor([2.]), tensor([2., 2., 2.])]

    Attributes:
        trees: a tuple with the tree of each microbatch.
    """

    def __init__(self, trees: Iterable[Tree]) -> None:
        self.trees = tuple(trees)

    def __len__(self) -> int:
        return len(self.trees)

    def __getitem__(self, index: Any) -> Any:
        return self.trees[index]

    def __repr__(self) -> str:
        return f"Microbatches({len(self.trees)})"
