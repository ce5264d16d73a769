"""Join outputs and input gradients of microbatches, and cut cotangents of joined outputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import cycle
from operator import add
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcpipe._src.batch.marks import Microbatches
from funcpipe._src.batch.microbatch import Batch
from funcpipe._src.batch.registry import Rowed, with_rowed
from funcpipe._src.core.border import LEAF, Border, caller_copy, dense, given, share
from funcpipe._src.core.errors import BatchError, raise_all
from funcpipe._src.core.tree import (
    Spec,
    Tree,
    flatten,
    is_differentiable,
    locations,
    refuse_hidden,
    spread,
    unflatten,
)
from funcpipe._src.stages.bound import Gradients

MergeRule: TypeAlias = int | str | None
"""The rule for joining one output leaf over microbatches; see ``make_plan(merge=)``."""


_JOIN = "join"  # the rule of an output of a registered class that has a ``join``


def merge(pieces: Sequence[Border], batch: Batch, rule: Tree) -> Tree:
    """Join the outputs of all microbatches into one tree, each leaf by its rule.

    Raises:
        BatchError: microbatches returned trees of different structure, or leaves that the rule
            cannot join.
    """
    faults = [
        fault
        for piece in pieces
        for fault in refuse_hidden(piece.tree(), "outputs", piece.leaves, piece.spec)
    ]
    raise_all("the run cannot return these outputs:", dict.fromkeys(faults), BatchError)
    if not batch.merged:
        # Copies, like joined outputs: residuals may use the same memory.
        return Microbatches(unflatten(piece.spec, share(piece.leaves)) for piece in pieces)
    pieces = [_with_rowed(piece) for piece in pieces]
    for index, piece in enumerate(pieces):
        if piece.spec != pieces[0].spec:
            raise BatchError(
                f"outputs of {batch.named(index)} have another structure ({piece.spec}) than "
                f"those of {batch.named(0)} ({pieces[0].spec})"
            )
    columns = [list(column) for column in zip(*(piece.leaves for piece in pieces), strict=True)]
    places = locations(pieces[0].tree(), "outputs")
    rules = _rules(rule, pieces[0])
    if batch.slices:
        faults = [
            _unjoinable(*row, batch.slices) for row in zip(places, columns, rules, strict=True)
        ]
        raise_all(
            "the outputs of the slices cannot be joined:", [*filter(None, faults)], BatchError
        )
        columns = [_whole(*row, len(batch.slices)) for row in zip(columns, rules, strict=True)]
    sizes = [batch.rows if isinstance(leaf_rule, int) else batch.sizes for leaf_rule in rules]
    faults = [_misfit(*row) for row in zip(places, columns, rules, sizes, strict=True)]
    raise_all(
        "the outputs of the microbatches cannot be joined:", [*filter(None, faults)], BatchError
    )
    return unflatten(
        pieces[0].spec, [_join(*row) for row in zip(columns, rules, sizes, strict=True)]
    )


def _with_rowed(piece: Border) -> Border:
    """Return a value with each object of a registered class that has a ``join`` as one leaf."""
    if piece.spec == LEAF:
        return piece
    tree = piece.tree()
    wrapped = with_rowed(tree)
    return piece if wrapped is tree else given(wrapped)


def _along(rule: int, dims: int) -> int:
    """Return the sequence axis of a leaf: the first axis other than its rows'."""
    return 0 if rule % dims else 1


def _unjoinable(place: str, values: Sequence[Any], rule: MergeRule, lengths: Sequence[int]) -> str:
    """Return why a leaf's slices cannot be joined along its sequence, or ""."""
    if not isinstance(rule, int) or not all(isinstance(value, Tensor) for value in values):
        return ""
    shapes = [tuple(value.shape) for value in values]
    axis = _along(rule, max(1, values[0].dim()))
    fits = all(
        len(shape) > 1
        and -len(shape) <= rule < len(shape)
        and shape[_along(rule, len(shape))] == length
        for shape, length in zip(shapes, cycle(lengths), strict=False)
    )
    count = len(lengths)
    for at in range(0, len(values) if fits else 0, count):
        rest = {
            (value.dtype, *value.shape[:axis], *value.shape[axis + 1 :])
            for value in values[at : at + count]
        }
        if len(rest) > 1:
            return (
                f"{place} cannot be joined over slices of shapes {shapes}; merge='each' returns "
                "them separately"
            )
    if fits:
        return ""
    return (
        f"{place} has shapes {shapes}, and no axis besides {rule} with the lengths of the slices "
        f"({', '.join(map(str, lengths))}); give make_plan(..., merge=) 'mean', 'sum' or 'each', "
        "for all leaves or as a tree"
    )


def _whole(values: Sequence[Any], rule: MergeRule, count: int) -> list[Any]:
    """Join the slices of each microbatch if the rule is an axis, else return the values."""
    if not isinstance(rule, int) or not all(isinstance(value, Tensor) for value in values):
        return list(values)
    axis = _along(rule, values[0].dim())
    return [torch.cat(list(values[at : at + count]), axis) for at in range(0, len(values), count)]


def _rules(rule: Tree, piece: Border) -> list[MergeRule]:
    """Return the rule of each output leaf. Raises BatchError if the tree of rules does not fit."""
    try:
        rules: list[MergeRule] = spread(rule, piece.tree())
    except ValueError as error:
        raise BatchError(f"merge= has another structure than the outputs: {error}") from None
    return [
        (_JOIN if isinstance(leaf, Rowed) and leaf.rule.join else "each")
        if leaf_rule is None and (not isinstance(leaf, Tensor) or not leaf.dim())
        else 0
        if leaf_rule is None
        else leaf_rule
        for leaf_rule, leaf in zip(rules, piece.leaves, strict=True)
    ]


def _misfit(place: str, values: Sequence[Any], rule: MergeRule, rows: Sequence[int]) -> str:
    """Return why a leaf's values cannot be joined by their rule, or ""."""
    if rule == "each" or not all(isinstance(value, Tensor) for value in values):
        return (
            ""
            if rule in ("each", 0, _JOIN)
            else f"{place} is not a tensor in every microbatch; give it the rule 'each'"
        )
    shapes = [tuple(value.shape) for value in values]
    if isinstance(rule, str):
        same = len({*shapes}) == 1 and values[0].is_floating_point() | values[0].is_complex() | (
            rule == "sum"
        )
        return (
            ""
            if same
            else f"{place} has shapes {shapes} and type {values[0].dtype}, which have no {rule}"
        )
    assert rule is not None
    if not all(-len(shape) <= rule < len(shape) for shape in shapes):
        return f"{place} has shapes {shapes} and no axis {rule}"
    if [shape[rule] for shape in shapes] != list(rows):
        return (
            f"{place} has shapes {shapes}, but axis {rule} does not have the rows of the "
            f"microbatches ({', '.join(map(str, rows))}); give make_plan(..., merge=) another "
            "axis, 'mean', 'sum' or 'each', for all leaves or as a tree"
        )
    other_axes = {
        (*shape[: rule % len(shape)], *shape[rule % len(shape) + 1 :]) for shape in shapes
    }
    if len(other_axes) > 1 or len({value.dtype for value in values}) > 1:
        return (
            f"{place} cannot be joined over microbatches of shapes {shapes}; merge='each' returns "
            "them separately"
        )
    return ""


def _join(values: Sequence[Any], rule: MergeRule, rows: Sequence[int]) -> Any:
    if all(isinstance(value, Tensor) for value in values) and rule != "each":
        # A single value is copied, too: the caller may write into it while a residual uses it.
        if isinstance(rule, int):
            return torch.cat(list(values), rule) if len(values) > 1 else caller_copy(values[0])
        if rule == "mean":
            return reduce(
                add, (value * (size / sum(rows)) for value, size in zip(values, rows, strict=True))
            )
        return reduce(add, values) if len(values) > 1 else caller_copy(values[0])
    if rule == _JOIN and values[0].rule.join:
        return values[0].rule.join([value.value for value in values])
    values = [value.value if isinstance(value, Rowed) else value for value in values]
    if isinstance(values[0], Tensor):
        return Microbatches(share(values))
    try:
        same = all(type(value) is type(values[0]) and bool(value == values[0]) for value in values)
    except Exception:
        same = False
    return values[0] if same else Microbatches(values)


class _Shape(NamedTuple):
    """The size and dtype of an output, and of its cotangent."""

    size: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.dtype} {self.size}"


class OutputJoin:
    """The shapes of joined outputs, to cut their cotangents. It keeps no output tensor alive."""

    def __init__(self, pieces: Sequence[Border], batch: Batch, rule: Tree) -> None:
        self.rows, self.merged = batch.rows, batch.merged
        self.spec: Spec = pieces[0].spec
        self.joins_objects = batch.merged and _with_rowed(pieces[0]) is not pieces[0]
        self.places = locations(pieces[0].tree(), "cotangents")
        self.shapes = [[_shape(leaf) for leaf in piece.leaves] for piece in pieces]
        self.attached = tuple(tuple(map(bool, piece.flags)) for piece in pieces)
        self.rules = _rules(rule, pieces[0]) if batch.merged else []

    def cut(self, cotangents: Tree) -> list[Border]:
        """Return one border of cotangents per microbatch.

        Raises:
            BatchError: the cotangents differ from the outputs in structure, or a leaf differs in
                shape or dtype. The message lists all faults.
        """
        count = len(self.rows)
        if self.joins_objects:
            raise BatchError(
                "a pullback cannot cut the cotangents of objects that fp.batches.register joins; "
                "let the last stage return tensors"
            )
        if not self.merged:
            return self._cut_ready(cotangents)
        leaves, spec = flatten(cotangents)
        if spec != self.spec:
            raise BatchError(
                f"cotangents have the structure {spec}, but the outputs have {self.spec}; give a "
                "tensor for each output leaf, or None for no gradient"
            )
        faults: list[str] = []
        columns: list[list[Tensor | None]] = []
        for number, (place, leaf) in enumerate(zip(self.places, leaves, strict=True)):
            shapes = [row[number] for row in self.shapes]
            if leaf is None:
                columns.append([None] * count)
            elif shapes[0] is None:
                faults += _fault(place, leaf, None)
            elif self.rules[number] != "each":
                columns.append(self._spread(place, leaf, number, faults))
            elif isinstance(leaf, Microbatches) and len(leaf) == count:
                for m, cotangent in enumerate(leaf):
                    faults += _fault(f"{place}[{m}]", cotangent, shapes[m])
                columns.append(list(leaf))
            else:
                faults.append(
                    f"{place} belongs to an output that comes as Microbatches; give "
                    f"fp.Microbatches of {count} cotangents, or None"
                )
        raise_all("these cotangents do not fit the outputs:", faults, BatchError)
        return [_border([column[m] for column in columns]) for m in range(count)]

    def _spread(self, place: str, leaf: Any, number: int, faults: list[str]) -> list[Tensor | None]:
        """Cut the cotangent of a joined output, one for each microbatch. Append faults."""
        rule, first = self.rules[number], self.shapes[0][number]
        assert first is not None
        sizes = list(first.size)
        if isinstance(rule, int):
            sizes[rule] = sum(self.rows)
        wrong = _fault(place, leaf, _Shape(tuple(sizes), first.dtype))
        faults += wrong
        if wrong:
            return []
        if isinstance(rule, int):
            return list(leaf.split(self.rows, rule))
        return [leaf * (size / sum(self.rows)) if rule == "mean" else leaf for size in self.rows]

    def _cut_ready(self, cotangents: Tree) -> list[Border]:
        """Check the cotangents of outputs that were not merged."""
        count = len(self.rows)
        if not isinstance(cotangents, Microbatches) or len(cotangents) != count:
            raise BatchError(
                f"the outputs are fp.Microbatches of {count} trees, so the cotangents are too; "
                f"got a {type(cotangents).__name__}"
            )
        trees = [flatten(tree)[0] for tree in cotangents]
        faults = [
            f"microbatch {m} has {len(tree)} leaves, its outputs {len(row)}"
            for m, (tree, row) in enumerate(zip(trees, self.shapes, strict=True))
            if len(tree) != len(row)
        ]
        if not faults:
            for m, (tree, row) in enumerate(zip(trees, self.shapes, strict=True)):
                for number, (leaf, shape) in enumerate(zip(tree, row, strict=True)):
                    faults += _fault(f"leaf {number} of microbatch {m}", leaf, shape)
        raise_all("these cotangents do not fit the outputs:", faults, BatchError)
        return [_border(tree) for tree in trees]


def _shape(leaf: Any) -> _Shape | None:
    return _Shape(tuple(leaf.shape), leaf.dtype) if is_differentiable(leaf) else None


def _fault(place: str, leaf: Any, shape: _Shape | None) -> list[str]:
    if leaf is None:
        return []
    if shape is None:
        return [
            (
                f"{place} belongs to an output that has no gradient (it is not a floating-point "
                "tensor); give None"
            )
        ]
    if not isinstance(leaf, Tensor):
        return [f"{place} is a {type(leaf).__name__}; give a tensor of {shape}, or None"]
    got = _Shape(tuple(leaf.shape), leaf.dtype)
    return [] if got == shape else [f"{place} is {got}; the output is {shape}"]


def _border(leaves: Sequence[Tensor | None]) -> Border:
    # Dense, like every gradient between stages. A lazy copy, because the caller may write into the
    # cotangents later.
    cotangents = share(leaf if leaf is None else dense(leaf.detach()) for leaf in leaves)
    return Border(cotangents, LEAF, ())


def _like(grad: Tensor | None, leaf: Any, asked: bool) -> Tensor | None:
    """Return the gradient of an input on its device: zeros if it was asked for but is missing."""
    if grad is not None:
        return grad.to(leaf.device)
    return torch.zeros_like(leaf) if asked else None


def join_input_grads(batch: Batch, pieces: Sequence[Gradients]) -> Tree:
    """Return the gradients of the inputs, in the structure of the inputs.

    Gradients of cut leaves are joined along their rows. A leaf that microbatches share gets the sum
    in their order. Unused leaves get zeros; leaves that cannot have a gradient get None.
    """
    filled = [
        [
            _like(grad, leaf, flag)
            for grad, leaf, flag in zip(row, border.leaves, border.flags, strict=True)
        ]
        for row, border in zip(pieces, batch.inputs, strict=True)
    ]
    columns: list[Tensor | None] = []
    if not batch.merged:
        return Microbatches(
            unflatten(border.spec, row) for border, row in zip(batch.inputs, filled, strict=True)
        )
    for axis, *grads in zip(batch.axes, *filled, strict=True):
        parts = [grad for grad in grads if grad is not None]
        if not parts:
            columns.append(None)
        elif axis is not None:
            columns.append(torch.cat(parts, axis))
        else:
            columns.append(reduce(add, parts))
    return unflatten(batch.inputs[0].spec, columns)
