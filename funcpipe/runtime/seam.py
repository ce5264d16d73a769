"""Where microbatches meet: outputs joined, cotangents cut where outputs were joined, gradients of inputs joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcpipe.core.errors import BatchError, bullets
from funcpipe.core.tree import Spec, Tree, flatten, is_differentiable, locations, refuse_hidden, unflatten
from funcpipe.runtime.border import LEAF, Border, apart, dense, share
from funcpipe.runtime.microbatch import Batch, Microbatches
from funcpipe.runtime.program import Gradients


def merge(pieces: Sequence[Border], rows: Sequence[int], *, merged: bool) -> Tree:
    """The outputs of all microbatches as one tree.

    Leaves with one row per row of the batch are joined along axis 0. Tensors without them, and non-tensors that differ,
    come as `Microbatches`, one value each.

    Raises:
        BatchError: microbatches returned trees of different structure, or rows of different shape.
    """
    faults = refuse_hidden(pieces[0].leaves, lambda: locations(pieces[0].tree(), "outputs"))
    if faults:
        raise BatchError(bullets("the outputs cannot be handed back:", faults))
    if not merged:
        # Copies, as joined outputs are: residuals may hold the same memory.
        return Microbatches(unflatten(piece.spec, _copies(piece.leaves)) for piece in pieces)
    for index, piece in enumerate(pieces):
        if piece.spec != pieces[0].spec:
            raise BatchError(f"outputs of microbatch {index} have another structure ({piece.spec}) than those of microbatch 0 ({pieces[0].spec})")  # fmt: skip
    places = locations(pieces[0].tree(), "outputs")
    columns = zip(places, *(piece.leaves for piece in pieces), strict=True)
    return unflatten(pieces[0].spec, [_join(place, values, rows) for place, *values in columns])


def _join(place: str, values: Sequence[Any], rows: Sequence[int]) -> Any:
    if all(isinstance(one, Tensor) for one in values):
        if _has_rows(values, rows):
            if len({(one.shape[1:], one.dtype) for one in values}) > 1:
                shapes = [tuple(one.shape) for one in values]
                raise BatchError(f"{place} cannot be joined over microbatches of shapes {shapes}; give the inputs as fp.Microbatches to get one output each")  # fmt: skip
            return torch.cat(list(values)) if len(values) > 1 else apart(values[0])
        return Microbatches(_copies(values))
    try:
        same = all(type(one) is type(values[0]) and bool(one == values[0]) for one in values)
    except Exception:
        same = False
    return values[0] if same else Microbatches(values)


def _copies(leaves: Sequence[Any]) -> list[Any]:
    return [apart(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _has_rows(values: Sequence[Any], rows: Sequence[int]) -> bool:
    return all(one.dim() and one.shape[0] == count for one, count in zip(values, rows, strict=True))


class _Shape(NamedTuple):
    """What a cotangent of a tensor looks like."""

    size: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.dtype} {self.size}"


class Seam:
    """The shapes of outputs that were merged, and so of their cotangents. Holds no tensor of them.

    Args:
        pieces: the outputs, one border per microbatch.
        rows: of each microbatch.
        merged: were they merged.
    """

    def __init__(self, pieces: Sequence[Border], rows: Sequence[int], *, merged: bool) -> None:
        self.rows, self.merged = tuple(rows), merged
        self.spec: Spec = pieces[0].spec
        self.places = locations(pieces[0].tree(), "cotangents")
        self.shapes = [[_shape(leaf) for leaf in piece.leaves] for piece in pieces]
        self.attached = tuple(tuple(map(bool, piece.flags)) for piece in pieces)
        self.joined = [
            all(isinstance(one, Tensor) for one in values) and _has_rows(values, rows)
            for values in zip(*(piece.leaves for piece in pieces), strict=True)
        ]

    def cut(self, cotangents: Tree) -> list[Border]:
        """One border of cotangents per microbatch.

        Raises:
            BatchError: another structure than the outputs, or a leaf of another shape or dtype; every fault.
        """
        count = len(self.rows)
        if not self.merged:
            return self._cut_ready(cotangents)
        leaves, spec = flatten(cotangents)
        if spec != self.spec:
            raise BatchError(f"cotangents have the structure {spec}, the outputs {self.spec}; give a tensor for each leaf of the outputs, None for no gradient")  # fmt: skip
        faults: list[str] = []
        columns: list[list[Tensor | None]] = []
        for number, (place, leaf) in enumerate(zip(self.places, leaves, strict=True)):
            shapes = [row[number] for row in self.shapes]
            if leaf is None:
                columns.append([None] * count)
            elif shapes[0] is None:
                faults += _fault(place, leaf, None)
            elif self.joined[number]:
                whole = _Shape((sum(self.rows), *shapes[0].size[1:]), shapes[0].dtype)
                faults += _fault(place, leaf, whole)
                columns.append(list(leaf.split(self.rows)) if not faults else [])
            elif isinstance(leaf, Microbatches) and len(leaf) == count:
                faults += [f for m, one in enumerate(leaf) for f in _fault(f"{place}[{m}]", one, shapes[m])]
                columns.append(list(leaf))
            else:
                faults.append(f"{place} belongs to an output that comes as Microbatches; give fp.Microbatches of {count} cotangents, or None")  # fmt: skip
        if faults:
            raise BatchError(bullets("these cotangents do not fit the outputs:", faults))
        return [_border([column[m] for column in columns]) for m in range(count)]

    def _cut_ready(self, cotangents: Tree) -> list[Border]:
        """Cotangents of outputs that were never merged."""
        count = len(self.rows)
        if not isinstance(cotangents, Microbatches) or len(cotangents) != count:
            raise BatchError(f"the outputs are fp.Microbatches of {count} trees, so the cotangents are too; got a {type(cotangents).__name__}")  # fmt: skip
        trees = [flatten(tree)[0] for tree in cotangents]
        faults = [f"microbatch {m} has {len(tree)} leaves, its outputs {len(row)}" for m, (tree, row) in enumerate(zip(trees, self.shapes, strict=True)) if len(tree) != len(row)]  # fmt: skip
        if not faults:
            for m, (tree, row) in enumerate(zip(trees, self.shapes, strict=True)):
                faults += [f for number, (leaf, shape) in enumerate(zip(tree, row, strict=True)) if leaf is not None for f in _fault(f"leaf {number} of microbatch {m}", leaf, shape)]  # fmt: skip
        if faults:
            raise BatchError(bullets("these cotangents do not fit the outputs:", faults))
        return [_border(tree) for tree in trees]


def _shape(leaf: Any) -> _Shape | None:
    return _Shape(tuple(leaf.shape), leaf.dtype) if is_differentiable(leaf) else None


def _fault(place: str, leaf: Any, shape: _Shape | None) -> list[str]:
    if leaf is None:
        return []
    if shape is None:
        return [f"{place} belongs to an output that has no gradient (it is no floating tensor); give None"]
    if not isinstance(leaf, Tensor):
        return [f"{place} is a {type(leaf).__name__}; give a tensor of {shape}, or None"]
    found = _Shape(tuple(leaf.shape), leaf.dtype)
    return [] if found == shape else [f"{place} is {found}; the output is {shape}"]


def _border(leaves: Sequence[Tensor | None]) -> Border:
    # Dense, as every gradient between stages; a copy of one's own, for the caller may write into his.
    held = share(leaf if leaf is None else dense(leaf.detach()) for leaf in leaves)
    return Border(held, LEAF, ())


def _like(grad: Tensor | None, leaf: Any, wanted: bool) -> Tensor | None:
    """The gradient of an input, on the input's device."""
    if grad is not None:
        return grad.to(leaf.device)
    return torch.zeros_like(leaf) if wanted else None


def join_input_grads(batch: Batch, pieces: Sequence[Gradients]) -> Tree:
    """The gradients of the inputs, in their structure: zeros where nothing reached, None where none can be.

    Rows are joined where the inputs were cut; what microbatches share gets the sum, in their order.
    """
    filled = [
        [_like(grad, leaf, flag) for grad, leaf, flag in zip(row, border.leaves, border.flags, strict=True)]
        for row, border in zip(pieces, batch.inputs, strict=True)
    ]
    columns: list[Tensor | None] = []
    if not batch.merged:
        return Microbatches(unflatten(border.spec, row) for border, row in zip(batch.inputs, filled, strict=True))
    for axis, *parts in zip(batch.axes, *filled, strict=True):
        given = [part for part in parts if part is not None]
        if not given:
            columns.append(None)
        elif axis is not None:
            columns.append(torch.cat(given, axis))
        else:
            total = given[0]
            for part in given[1:]:
                total = total + part
            columns.append(total)
    return unflatten(batch.inputs[0].spec, columns)
