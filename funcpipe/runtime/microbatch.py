"""Cuts a batch into microbatches; no row is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from funcpipe.core.errors import BatchError, Where, fail, raise_all
from funcpipe.core.plan import Plan
from funcpipe.core.tree import Path, Tree, at, flatten, locations, map_leaves, paths, refuse_hidden, unflatten
from funcpipe.runtime.border import LEAF, Border, given, open_border, share
from funcpipe.runtime.bound import Shares
from funcpipe.runtime.cache_key import border_key_or_none


class Replicate:
    """A leaf of a batch, or all leaves of a tree in it, that every microbatch gets whole: ``fp.Replicate(table)``.

    Attributes:
        value: a tensor, a tree, or anything.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Replicate({type(self.value).__name__})"


class Axis:
    """A leaf of a batch, or all leaves of a tree in it, whose rows lie along another axis than 0: ``fp.Axis(mask, 1)``.

    Attributes:
        value: the tensor, or a tree.
        axis: of its rows; negative counts from the end.
    """

    def __init__(self, value: Tree, axis: int) -> None:
        self.value, self.axis = value, axis

    def __repr__(self) -> str:
        return f"Axis({type(self.value).__name__}, {self.axis})"


class Microbatches(Sequence[Any]):
    """Microbatches that are cut already, or that cannot be merged: one tree each.

    Give them as inputs, target or feeds where the library should not cut (packed sequences, ragged rows). Outputs come
    back in this form where the inputs had it, and for leaves that have no rows to join.
    """

    def __init__(self, trees: Iterable[Tree]) -> None:
        self.trees = tuple(trees)

    def __len__(self) -> int:
        return len(self.trees)

    def __getitem__(self, index: Any) -> Any:
        return self.trees[index]

    def __repr__(self) -> str:
        return f"Microbatches({len(self.trees)})"


@dataclass(frozen=True)
class Batch:
    """A batch cut into microbatches.

    Attributes:
        inputs: one border per microbatch.
        target: likewise, or None without a loss.
        feeds: likewise, by name.
        rows: of each microbatch; 1 where nothing has rows.
        merged: are outputs merged.
        axes: along which each leaf of the inputs was cut, None where microbatches share it.
        handles: keeps the caller's memory marked as shared while the run lasts.
    """

    inputs: list[Border]
    target: list[Border] | None
    feeds: dict[str, list[Border]]
    rows: tuple[int, ...]
    merged: bool
    axes: tuple[int | None, ...]
    handles: list[Any]

    @property
    def num_microbatches(self) -> int:
        """How many microbatches have rows."""
        return len(self.rows)


def sizes(rows: int, count: int) -> list[int]:
    """Rows of each microbatch: as equal as can be, the larger first, none empty.

    >>> sizes(10, 8), sizes(3, 8)
    ([2, 2, 1, 1, 1, 1, 1, 1], [1, 1, 1])
    """
    parts = min(rows, count)
    return [rows // parts + (index < rows % parts) for index in range(parts)]


def cut(plan: Plan, inputs: Tree, target: Tree, feeds: Mapping[str, Tree] | None) -> Batch:
    """Cut inputs, target and feeds alike.

    Raises:
        BatchError: leaves with different numbers of rows, without rows, no rows at all, feeds missing or unknown, or
            the wrong number of ready-made microbatches; every fault with its place.
    """
    feeds = feeds or {}
    by_name: dict[str, Tree] = {"inputs": inputs}
    if plan.loss is not None:
        by_name["target"] = target
    declared = dict.fromkeys(name for part in plan.stages for name in part.feeds)
    lacking = [name for name in declared if name not in feeds]
    faults = [f"feeds lacks {name!r}, which {_stage_that_feeds(plan, name)} declares" for name in lacking]
    faults += [f"feeds has {name!r}, which no stage declares" for name in feeds if name not in declared]
    by_name.update({f"feeds[{name!r}]": feeds[name] for name in declared if name in feeds})
    trees = [_BatchTree(name, tree) for name, tree in by_name.items()]
    rows, row_faults = _rows(trees)
    faults += row_faults or [fault for tree in trees for fault in tree.listed(rows)]
    ready = {tree.name: len(tree.ready) for tree in trees if tree.ready is not None}
    limit = plan.num_microbatches
    faults += [
        f"{name} is cut into {n} microbatches, the plan has {limit}" for name, n in ready.items() if not 0 < n <= limit
    ]
    if len(set(ready.values())) > 1:
        faults.append(
            "ready-made microbatches differ in number: " + ", ".join(f"{name} has {n}" for name, n in ready.items())
        )
    faults += [
        f"microbatch {index} of {tree.name} has no rows; leave it out"
        for tree in trees
        for index, size in enumerate(tree.ready_rows)
        if size == 0
    ]
    raise_all("this batch cannot be cut into microbatches:", faults, BatchError)
    if ready:
        count = next(iter(ready.values()))
        by_microbatch = [size or 1 for size in next(filter(any, (tree.ready_rows for tree in trees)), [1] * count)]
        if rows is not None and rows != sum(by_microbatch):
            raise BatchError(
                f"the ready-made microbatches have {sum(by_microbatch)} rows ({by_microbatch}), other leaves have "
                f"{rows}"
            )
        parts = by_microbatch
    else:
        parts = sizes(rows, limit) if rows is not None else [1] * limit
    pieces = {tree.name: tree.cut(parts) for tree in trees}
    handles = [handle for tree in trees for handle in tree.handles]
    by_feed = {name: pieces[f"feeds[{name!r}]"] for name in declared}
    axes = tuple(trees[0].axes)  # the inputs are first
    return Batch(pieces["inputs"], pieces.get("target"), by_feed, tuple(parts), "inputs" not in ready, axes, handles)


class _BatchTree:
    """One tree of the batch, its leaves with their places and axes."""

    def __init__(self, name: str, tree: Tree) -> None:
        self.name = name
        self.ready = tree if isinstance(tree, Microbatches) else None
        self.tree = tree = _marks_at_leaves(tree)
        self.leaves, spec = flatten(tree if self.ready is None else None)
        self.marked = [isinstance(leaf, (Replicate, Axis)) for leaf in self.leaves]
        self.spec = LEAF if isinstance(tree, Tensor) else spec
        self.faults: list[str] = []
        self.rows: dict[int, int] = {}
        """By leaf number."""
        self.handles: list[Any] = []
        self.axes = [self._axis(index, leaf) for index, leaf in enumerate(self.leaves)]
        if self.ready is None:
            self.faults += refuse_hidden(tree, name, self.leaves, spec)
        self.ready_rows: list[int | None] = []
        """The rows of ready-made microbatches: those of the first leaf that can have any, None if there is none."""
        for index, piece in enumerate(self.ready or ()):
            leaves, spec = flatten(piece)
            self.faults += refuse_hidden(piece, f"{name}[{index}]", leaves, spec)
            self.ready_rows.append(
                next((leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), None)
            )

    @cached_property
    def places(self) -> list[str]:
        """Where each leaf stands; they cost much, and only errors have them."""
        return locations(self.tree, self.name)

    def _axis(self, index: int, leaf: Any) -> int | None:
        """The axis along which a leaf is cut; None: it is shared."""
        if isinstance(leaf, Replicate):
            self.leaves[index] = leaf.value
            return None
        axis = 0
        if isinstance(leaf, Axis):
            axis, leaf = leaf.axis, leaf.value
            self.leaves[index] = leaf
        if not isinstance(leaf, Tensor):
            if getattr(leaf, "shape", ()) and hasattr(leaf, "__array__"):
                place = self.places[index]
                self.faults.append(
                    f"{place} is a {type(leaf).__name__} with rows but no tensor: torch.from_numpy({place}), or share "
                    f"it: fp.Replicate({place})"
                )
            return None
        if leaf.dim() == 0:
            place = self.places[index]
            self.faults.append(f"{place} is a 0-dim tensor and has no rows; share it: fp.Replicate({place})")
            return None
        if not -leaf.dim() <= axis < leaf.dim():
            self.faults.append(f"{self.places[index]} has shape {tuple(leaf.shape)} and no axis {axis}")
            return None
        self.rows[index] = leaf.shape[axis]
        return axis % leaf.dim()

    def listed(self, rows: int | None) -> list[str]:
        """Faults: lists with a value for each row, which every microbatch would get whole."""
        if rows is None or rows < 2 or all(isinstance(leaf, Tensor) for leaf in self.leaves):
            return []
        groups: dict[Path, list[int]] = {}
        for number, path in enumerate(paths(self.tree)):
            groups.setdefault(path[:-1], []).append(number)
        faults: list[str] = []
        for path, numbers in groups.items():
            values = [self.leaves[number] for number in numbers]
            if len(values) != rows or any(isinstance(value, Tensor) for value in values):
                continue
            kind = type(at(self.tree, path))
            strings = kind is tuple and all(isinstance(value, (str, bytes)) for value in values)
            if (kind in (list, deque) or strings) and not any(self.marked[number] for number in numbers):
                place = self.name + "".join(f"[{key!r}]" for key in path)
                faults.append(f"{place} is a {kind.__name__} with one {type(values[0]).__name__} {_each(rows, place)}")
        for number, leaf in enumerate(self.leaves):
            if _is_collection(leaf) and len(leaf) == rows and not self.marked[number]:
                place = self.places[number]
                faults.append(f"{place} is a {type(leaf).__name__} with one value {_each(rows, place)}")
        return faults

    def cut(self, parts: Sequence[int]) -> list[Border]:
        """One border per microbatch: views of the caller's tensors."""
        if self.ready is not None:
            self.handles = _marked(leaf for tree in self.ready for leaf in flatten(tree)[0])
            return [given(tree) for tree in self.ready]
        self.handles = _marked(self.leaves)
        columns = [
            repeat(leaf, len(parts)) if axis is None else leaf.detach().split_with_sizes(parts, axis)
            for leaf, axis in zip(self.leaves, self.axes, strict=True)
        ]
        rows = zip(*columns, strict=True) if columns else repeat((), len(parts))
        flags = (False,) * len(self.leaves)
        out: list[Border] = []
        keys: dict[int, Hashable] = {}
        for size, row in zip(parts, rows, strict=True):
            border = Border(list(row), self.spec, flags)
            if size not in keys:
                keys[size] = border_key_or_none(border)
            border.words = keys[size]
            out.append(border)
        return out


def _each(rows: int, place: str) -> str:
    return (
        f"for each of {rows} rows, which every microbatch would get whole: make it a tensor, cut it yourself "
        f"(fp.Microbatches), or share it: fp.Replicate({place})"
    )


def _is_collection(leaf: Any) -> bool:
    """Is the leaf a range, a set or the like; arrays are refused elsewhere."""
    return (
        isinstance(leaf, Collection)
        and not isinstance(leaf, (str, bytes, torch.Size))
        and not hasattr(leaf, "__array__")
    )


def _marks_at_leaves(tree: Tree) -> Tree:
    """The tree with marks around single leaves: one around a tree holds for each of its leaves."""
    leaves, spec = flatten(tree)
    if not any(isinstance(leaf, (Replicate, Axis)) and flatten(leaf.value)[1] != LEAF for leaf in leaves):
        return tree

    def spread(mark: Any) -> Tree:
        if isinstance(mark, Replicate):
            return map_leaves(Replicate, mark.value)
        return map_leaves(lambda leaf: Axis(leaf, mark.axis), mark.value) if isinstance(mark, Axis) else mark

    return unflatten(spec, map(spread, leaves))


def _marked(leaves: Iterable[Any]) -> list[Any]:
    """Handles that mark the caller's memory as shared; where there are streams every stage gets a copy instead."""
    return share(leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cpu)


def _rows(trees: Sequence[_BatchTree]) -> tuple[int | None, list[str]]:
    """The number of rows of a batch, None if nothing has any; and the faults."""
    faults = [fault for tree in trees for fault in tree.faults]
    counts = {count for tree in trees for count in tree.rows.values()}
    if len(counts) > 1:
        listed = ", ".join(f"{tree.places[index]} has {count}" for tree in trees for index, count in tree.rows.items())
        faults.append(
            f"leaves differ in rows: {listed}; share a leaf that has none with fp.Replicate(leaf), name another axis "
            "with fp.Axis(leaf, axis)"
        )
    if counts == {0}:
        empty = [tree.places[index] for tree in trees for index in tree.rows]
        faults.append(f"the batch has no rows: {', '.join(empty)}")
    return (next(iter(counts)) if counts else None), faults


def _stage_that_feeds(plan: Plan, name: str) -> str:
    index = next(i for i, part in enumerate(plan.stages) if name in part.feeds)
    return f"stage {index} ({plan.stages[index].name!r})"


def shares(batch: Batch, plan: Plan, loss_scale: Any) -> Shares:
    """The weight of every microbatch, before any forward.

    Raises:
        BatchError: a weight is not a number from 0, or all are 0.
    """
    scale, summed = float(loss_scale), plan.counts.summed
    rows = tuple(map(float, batch.rows))
    parts = tuple(size / sum(rows) for size in rows)
    weights = _weights(batch, plan)
    if weights is None:
        return Shares(rows, None if summed else sum(rows), False, scale, parts, summed)
    total = sum(weights)
    if plan.weight is not None:
        parts = tuple(weight / total for weight in weights)
    return Shares(weights, total, True, scale, parts, summed)


def _weights(batch: Batch, plan: Plan) -> tuple[float, ...] | None:
    """The weight of each microbatch by the plan's weight or its loss; None: its rows count."""
    weight, weigh, word = plan.weight, plan.counts.weigh, "what the loss counts (its weigh(inputs, target))"
    if weight is not None:
        weigh, word = lambda _, target: weight(target), "weight(target)"
    if weigh is None or batch.target is None:
        return None
    values: list[Any] = []
    for index, (x, target) in enumerate(zip(batch.inputs, batch.target, strict=True)):
        try:
            values.append(weigh(open_border(x, grad=False)[0], open_border(target, grad=False)[0]))
        except BaseException as error:
            fail(error, Where(None, "", index, "weight", ""))
    if weight is None and any(value is None for value in values):
        return None
    weights = _numbers(values)
    for index, (number, value) in enumerate(zip(weights, values, strict=True)):
        if not 0 <= number < float("inf"):
            raise BatchError(f"{word} is a number from 0; for microbatch {index} it gave {value!r}")
    if not sum(weights):
        raise BatchError(f"{word} is 0 for every microbatch, so the loss of this batch is not defined; leave it out")
    return weights


def _numbers(values: Sequence[Any]) -> tuple[float, ...]:
    """Weights as numbers, nan where one is none; tensors are read at once, since each read waits for the device."""
    if all(isinstance(value, Tensor) and value.numel() == 1 for value in values):
        return tuple(float(number) for number in torch.stack([value.reshape(()).double() for value in values]).cpu())
    return tuple(map(_number, values))


def _number(value: Any) -> float:
    """A weight as a number; nan where it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")
