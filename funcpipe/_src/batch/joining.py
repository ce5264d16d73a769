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

    Raises BatchError if microbatches returned different structures, or leaves misfit their rules.
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
    out: list[Any] = []
    faults = []
    columns = zip(*(piece.leaves for piece in pieces), strict=True)
    places, rules = locations(pieces[0].tree(), "outputs"), _rules(rule, pieces[0])
    for place, leaf_rule, values in zip(places, rules, columns, strict=True):
        try:
            out.append(_join(values, leaf_rule, batch))
        except _MisfitError as misfit:
            faults.append(f"{place} {misfit}")
    raise_all("the outputs cannot be joined:", faults, BatchError)
    return unflatten(pieces[0].spec, out)


class _MisfitError(Exception):
    """The values of an output leaf cannot be joined by their rule. The message says why."""


def _with_rowed(piece: Border) -> Border:
    """Return a value with each object of a registered class that has a ``join`` as one leaf."""
    if piece.spec == LEAF:
        return piece
    tree = piece.tree()
    wrapped = with_rowed(tree)
    return piece if wrapped is tree else given(wrapped)


def _rules(rule: Tree, piece: Border) -> list[MergeRule]:
    """Return the rule of each output leaf. Raises BatchError if the tree of rules does not fit."""
    try:
        rules: list[MergeRule] = spread(rule, piece.tree())
    except ValueError as error:
        raise BatchError(f"merge= has another structure than the outputs: {error}") from None
    pairs = zip(rules, piece.leaves, strict=True)
    return [_default_rule(leaf) if leaf_rule is None else leaf_rule for leaf_rule, leaf in pairs]


def _default_rule(leaf: Any) -> MergeRule:
    if isinstance(leaf, Tensor) and leaf.dim():
        return 0
    return _JOIN if isinstance(leaf, Rowed) and leaf.rule.join else "each"


def _join(values: Sequence[Any], rule: MergeRule, batch: Batch) -> Any:
    """Join the values of a leaf, one for each piece of the batch. Raises _MisfitError."""
    if rule == "each" or not all(isinstance(value, Tensor) for value in values):
        if rule not in ("each", 0, _JOIN):
            raise _MisfitError("is not a tensor in every microbatch; give it the rule 'each'")
        return _without_rows(values, rule)
    if isinstance(rule, int):
        return _along_axis(values, rule, batch)
    shapes = [tuple(value.shape) for value in values]
    has_mean = values[0].is_floating_point() or values[0].is_complex()
    if len({*shapes}) > 1 or not (has_mean or rule == "sum"):
        raise _MisfitError(f"has shapes {shapes} and type {values[0].dtype}, which have no {rule}")
    if rule == "mean":
        total = sum(batch.sizes)
        values = [value * (size / total) for value, size in zip(values, batch.sizes, strict=True)]
    return reduce(add, values) if len(values) > 1 else caller_copy(values[0])


def _along_axis(values: Sequence[Tensor], axis: int, batch: Batch) -> Tensor:
    """Join slices along their sequence, then microbatches along the axis of their rows."""
    if count := len(batch.slices):
        shapes = [tuple(value.shape) for value in values]
        fits = all(
            len(shape) > 1
            and -len(shape) <= axis < len(shape)
            and shape[_sequence_axis(axis, len(shape))] == length
            for shape, length in zip(shapes, cycle(batch.slices), strict=False)
        )
        if not fits:
            raise _MisfitError(
                f"has shapes {shapes}, and no axis besides {axis} with the lengths of the slices "
                f"({', '.join(map(str, batch.slices))}); give make_plan(..., merge=) 'mean', 'sum' "
                "or 'each', for all leaves or as a tree"
            )
        sequence = _sequence_axis(axis, values[0].dim())
        values = [
            _concatenate(values[first : first + count], sequence, "slices")
            for first in range(0, len(values), count)
        ]
    shapes = [tuple(value.shape) for value in values]
    if not all(-len(shape) <= axis < len(shape) for shape in shapes):
        raise _MisfitError(f"has shapes {shapes} and no axis {axis}")
    if [shape[axis] for shape in shapes] != [*batch.rows]:
        raise _MisfitError(
            f"has shapes {shapes}, but axis {axis} does not have the rows of the microbatches "
            f"({', '.join(map(str, batch.rows))}); give make_plan(..., merge=) another axis, "
            "'mean', 'sum' or 'each', for all leaves or as a tree"
        )
    return _concatenate(values, axis, "microbatches")


def _sequence_axis(rows: int, dims: int) -> int:
    """Return the sequence axis of a leaf: the first axis other than its rows'."""
    return 0 if rows % dims else 1


def _concatenate(values: Sequence[Tensor], axis: int, pieces: str) -> Tensor:
    kinds: set[Any] = set()
    for value in values:
        others = [*value.shape]
        del others[axis]
        kinds.add((value.dtype, *others))
    if len(kinds) > 1:
        shapes = [tuple(value.shape) for value in values]
        raise _MisfitError(
            f"cannot be joined over {pieces} of shapes {shapes}; merge='each' returns them "
            "separately"
        )
    # A single value is copied, too: the caller may write into it while a residual uses it.
    return torch.cat([*values], axis) if len(values) > 1 else caller_copy(values[0])


def _without_rows(values: Sequence[Any], rule: MergeRule) -> Any:
    """Return values that are not concatenated or summed, once if they are all equal."""
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

        Raises BatchError if structure, shapes or types differ from the outputs.
        """
        if self.joins_objects:
            raise BatchError(
                "a pullback cannot cut the cotangents of objects that fp.batches.register joins; "
                "let the last stage return tensors"
            )
        faults: list[str] = []
        rows = (self._cut_merged if self.merged else self._cut_ready)(cotangents, faults)
        raise_all("these cotangents do not fit the outputs:", faults, BatchError)
        return [_border(row) for row in rows]

    def _cut_merged(self, cotangents: Tree, faults: list[str]) -> Sequence[Sequence[Tensor | None]]:
        """Return the cotangents of each microbatch, for joined outputs. Append faults."""
        count = len(self.rows)
        leaves, spec = flatten(cotangents)
        if spec != self.spec:
            raise BatchError(
                f"cotangents have the structure {spec}, but the outputs have {self.spec}; give a "
                "tensor for each output leaf, or None for no gradient"
            )
        columns: list[Sequence[Tensor | None]] = []
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
                columns.append(leaf)
            else:
                faults.append(
                    f"{place} belongs to an output that comes as Microbatches; give "
                    f"fp.Microbatches of {count} cotangents, or None"
                )
        return [] if faults else [[column[m] for column in columns] for m in range(count)]

    def _spread(
        self, place: str, leaf: Any, number: int, faults: list[str]
    ) -> Sequence[Tensor | None]:
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
            return leaf.split(self.rows, rule)
        return [leaf * (size / sum(self.rows)) if rule == "mean" else leaf for size in self.rows]

    def _cut_ready(self, cotangents: Tree, faults: list[str]) -> Sequence[Sequence[Tensor | None]]:
        """Return the cotangents of each microbatch, for unmerged outputs. Append faults."""
        count = len(self.rows)
        if not isinstance(cotangents, Microbatches) or len(cotangents) != count:
            raise BatchError(
                f"the outputs are fp.Microbatches of {count} trees, so the cotangents are too; "
                f"got a {type(cotangents).__name__}"
            )
        trees = [flatten(tree)[0] for tree in cotangents]
        for m, (tree, row) in enumerate(zip(trees, self.shapes, strict=True)):
            if len(tree) != len(row):
                faults.append(f"microbatch {m} has {len(tree)} leaves, its outputs {len(row)}")
                continue
            for number, (leaf, shape) in enumerate(zip(tree, row, strict=True)):
                faults += _fault(f"leaf {number} of microbatch {m}", leaf, shape)
        return trees


def _shape(leaf: Any) -> _Shape | None:
    return _Shape(tuple(leaf.shape), leaf.dtype) if is_differentiable(leaf) else None


def _fault(place: str, leaf: Any, shape: _Shape | None) -> list[str]:
    if leaf is None:
        return []
    if shape is None:
        why = "(it is not a floating-point tensor); give None"
        return [f"{place} belongs to an output that has no gradient {why}"]
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
