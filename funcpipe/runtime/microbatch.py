"""Cuts a batch into microbatches; no row is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise, repeat
from typing import Any

import torch
from torch import Tensor

from funcpipe.core.errors import BatchError, raise_all
from funcpipe.core.plan import Plan
from funcpipe.core.tree import Path, Tree, at, flatten, locations, map_leaves, paths, refuse_hidden, unflatten
from funcpipe.runtime.border import LEAF, Border, given, share
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
        sequence: the axis along which plans with slices cut it; "next": the first of the others, if there is one; None:
            every slice gets it whole.
    """

    def __init__(self, value: Tree, axis: int, *, sequence: int | str | None = "next") -> None:
        self.value, self.axis, self.sequence = value, axis, sequence

    def __repr__(self) -> str:
        sequence = "" if self.sequence == "next" else f", sequence={self.sequence!r}"
        return f"Axis({type(self.value).__name__}, {self.axis}{sequence})"


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
        inputs: one border per microbatch; where these are in slices, one for each.
        target: likewise, or None without a loss.
        feeds: likewise, by name.
        rows: of each microbatch; 1 where nothing has rows.
        merged: are outputs merged.
        axes: along which each leaf of the inputs was cut, None where microbatches share it.
        handles: keeps the caller's memory marked as shared while the run lasts.
        slices: the lengths of the slices of each microbatch; () where they are whole.
    """

    inputs: list[Border]
    target: list[Border] | None
    feeds: dict[str, list[Border]]
    rows: tuple[int, ...]
    merged: bool
    axes: tuple[int | None, ...]
    handles: list[Any]
    slices: tuple[int, ...] = ()

    @property
    def num_microbatches(self) -> int:
        """How many microbatches have rows."""
        return len(self.rows)

    @property
    def num_pieces(self) -> int:
        """How many slices these have; as many as there are of them where they are whole."""
        return len(self.rows) * max(1, len(self.slices))

    @property
    def sizes(self) -> tuple[int, ...]:
        """How much there is of each: its rows, times the length of its slice."""
        return tuple([size * length for size in self.rows for length in self.slices or (1,)])


def sizes(rows: int, count: int) -> list[int]:
    """Rows of each microbatch: as equal as can be, the larger first, none empty.

    >>> sizes(10, 8), sizes(3, 8)
    ([2, 2, 1, 1, 1, 1, 1, 1], [1, 1, 1])
    """
    parts = min(rows, count)
    return [rows // parts + (index < rows % parts) for index in range(parts)]


def slice_lengths(length: int | None, count: int, shares: Sequence[float] = ()) -> tuple[int, ...]:
    """The lengths of the slices of a sequence, () for one that is whole; by ``shares`` in any unit, or equal ones.

    >>> slice_lengths(10, 4), slice_lengths(8, 2, (3, 1)), slice_lengths(8, 1)
    ((3, 3, 2, 2), (6, 2), ())

    Raises:
        BatchError: nothing has a sequence, or it is too short.
    """
    if count == 1:
        return ()
    if length is None:
        raise BatchError(
            f"the plan cuts microbatches into {count} slices along the sequence, and no leaf of the batch has one: "
            "their second axis, or fp.Axis(leaf, 0, sequence=axis)"
        )
    if length < count:
        raise BatchError(f"a sequence of length {length} cannot be cut into {count} slices; give at least {count}")
    if not shares:
        return tuple(sizes(length, count))
    ends = [round(length * end / sum(shares)) for end in accumulate(shares)]
    for number in range(count):  # none is empty: from the left, then from the right
        ends[number] = max(ends[number], number + 1)
    for number in reversed(range(count - 1)):
        ends[number] = min(ends[number], ends[number + 1] - 1)
    return tuple([end - start for start, end in pairwise((0, *ends))])


def parts_of(rows: int | None, ready: Sequence[int] | None, limit: int) -> tuple[int, ...]:
    """The rows of each microbatch of a batch.

    Args:
        rows: of the leaves; None: none has any.
        ready: of ready-made microbatches, 0 where nothing has rows; None: there are no such.
        limit: how many microbatches there may be.

    Raises:
        BatchError: the leaves contradict each other.
    """
    if ready is None:
        return tuple(sizes(rows, limit) if rows is not None else [1] * limit)
    parts = tuple([size or 1 for size in ready])
    if rows is not None and rows != sum(parts):
        raise BatchError(f"the ready-made microbatches have {sum(parts)} rows ({[*parts]}), other leaves have {rows}")
    return parts


def cut(plan: Plan, inputs: Tree, target: Tree, feeds: Mapping[str, Tree] | None) -> Batch:
    """Cut inputs, target and feeds alike.

    Raises:
        BatchError: leaves with different numbers of rows, without rows, no rows at all, feeds missing or unknown, or
            the wrong number of ready-made microbatches; every fault with its place.
    """
    uncut = look(plan, inputs, target, feeds)
    return uncut.cut(uncut.parts, uncut.slices)


def look(
    plan: Plan, inputs: Tree, target: Tree, feeds: Mapping[str, Tree] | None, stages: Container[int] | None = None
) -> Uncut:
    """Look at a batch before it is cut: all of it, or what some stages read. Raises BatchError as `cut` does."""
    feeds = feeds or {}
    last = plan.num_stages - 1
    by_name: dict[str, Tree] = {}
    if stages is None or 0 in stages or (last in stages and inputs is not None):
        by_name["inputs"] = inputs
    if plan.loss is not None and (stages is None or last in stages):
        by_name["target"] = target
    users = [part for stage, part in enumerate(plan.stages) if stages is None or stage in stages]
    declared = dict.fromkeys(name for part in users for name in part.feeds)
    everywhere = {name for part in plan.stages for name in part.feeds}
    lacking = [name for name in declared if name not in feeds]
    faults = [f"feeds lacks {name!r}, which {_stage_that_feeds(plan, name)} declares" for name in lacking]
    faults += [f"feeds has {name!r}, which no stage declares" for name in feeds if name not in everywhere]
    by_name.update({f"feeds[{name!r}]": feeds[name] for name in declared if name in feeds})
    slices = plan.schedule.num_slices
    trees = {name: _BatchTree(name, tree, sliced=slices > 1) for name, tree in by_name.items()}
    rows, row_faults = _rows([*trees.values()])
    length, length_faults = _length([*trees.values()])
    row_faults += length_faults
    faults += row_faults or [fault for tree in trees.values() for fault in tree.listed(rows)]
    ready = {name: len(tree.ready) for name, tree in trees.items() if tree.ready is not None}
    limit = plan.num_microbatches
    faults += [
        f"{name} is cut into {n} microbatches, the plan has {limit}" for name, n in ready.items() if not 0 < n <= limit
    ]
    if len(set(ready.values())) > 1:
        faults.append(
            "ready-made microbatches differ in number: " + ", ".join(f"{name} has {n}" for name, n in ready.items())
        )
    faults += [
        f"microbatch {index} of {name} has no rows; leave it out"
        for name, tree in trees.items()
        for index, size in enumerate(tree.ready_rows)
        if size == 0
    ]
    if slices > 1 and ready:
        faults.append(
            f"{', '.join(ready)} came as fp.Microbatches, which are cut already, and the plan cuts each into {slices} "
            "slices; give tensors"
        )
    raise_all("this batch cannot be cut into microbatches:", faults, BatchError)
    made = None
    if ready:
        known = next((tree.ready_rows for tree in trees.values() if any(tree.ready_rows)), [None] * max(ready.values()))
        made = tuple([size or 0 for size in known])
    lengths = slice_lengths(length, slices, plan.slices) if stages is None or length is not None else ()
    return Uncut(trees, rows, made, parts_of(rows, made, limit), tuple(declared), length, lengths)


@dataclass(frozen=True)
class Uncut:
    """A batch that can be cut.

    Attributes:
        trees: inputs, target and feeds as far as they are here, by name.
        rows: of the leaves; None: none has any.
        ready: rows of the ready-made microbatches, 0 where nothing has any; None: there are no such.
        parts: rows of the microbatches that follow from it.
        feeds: the names of those that are here.
        length: of the sequences that are cut into slices; None: none is.
        slices: the lengths of the slices that follow from it.
    """

    trees: Mapping[str, _BatchTree]
    rows: int | None
    ready: tuple[int, ...] | None
    parts: tuple[int, ...]
    feeds: tuple[str, ...]
    length: int | None
    slices: tuple[int, ...]

    @property
    def merged(self) -> bool | None:
        """Are inputs cut here, so that outputs are merged; None: they are not here."""
        return self.trees["inputs"].ready is None if "inputs" in self.trees else None

    def shapes(self) -> str:
        """What its trees are, without the numbers of tensors; equal for batches that are cut alike."""
        known = [
            (name, tree.spec, tree.axes, tree.sequences, *map(_shape, tree.leaves)) for name, tree in self.trees.items()
        ]
        return str((self.ready, known))

    def cut(self, parts: Sequence[int], slices: Sequence[int] = (), merged: bool | None = None) -> Batch:
        """Cut into microbatches of so many rows, and these into slices of such lengths.

        ``merged`` as the process knows that has the inputs.
        """
        pieces = {name: tree.cut(parts, slices) for name, tree in self.trees.items()}
        handles = [handle for tree in self.trees.values() for handle in tree.handles]
        by_feed = {name: pieces[f"feeds[{name!r}]"] for name in self.feeds}
        axes = tuple(self.trees["inputs"].axes) if "inputs" in self.trees else ()
        merged = self.merged is not False if merged is None else merged
        values = pieces.get("inputs", []), pieces.get("target"), by_feed
        return Batch(*values, tuple(parts), merged, axes, handles, tuple(slices))


def _shape(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else type(leaf)


class _BatchTree:
    """One tree of the batch, its leaves with their places and axes."""

    def __init__(self, name: str, tree: Tree, *, sliced: bool = False) -> None:
        self.name, self.sliced = name, sliced
        self.ready = tree if isinstance(tree, Microbatches) else None
        self.tree = tree = _marks_at_leaves(tree)
        self.leaves, spec = flatten(tree if self.ready is None else None)
        self.marked = [isinstance(leaf, (Replicate, Axis)) for leaf in self.leaves]
        self.spec = LEAF if isinstance(tree, Tensor) else spec
        self.faults: list[str] = []
        self.rows: dict[int, int] = {}
        """By leaf number."""
        self.lengths: dict[int, int] = {}
        """By leaf number, of the sequences that slices are cut of."""
        self.sequences: list[int | None]
        self.handles: list[Any] = []
        self.sequences = [None] * len(self.leaves)
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
        axis, sequence = 0, "next"
        if isinstance(leaf, Axis):
            axis, sequence, leaf = leaf.axis, leaf.sequence, leaf.value
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
        axis %= leaf.dim()
        self.sequences[index] = self._sequence(index, leaf, axis, sequence) if self.sliced else None
        return axis

    def _sequence(self, index: int, leaf: Tensor, axis: int, sequence: Any) -> int | None:
        """The axis along which slices of a leaf are cut; None: each gets it whole."""
        if sequence == "next":
            sequence = (0 if axis else 1) if leaf.dim() > 1 else None
        if sequence is None:
            return None
        if type(sequence) is not int or not -leaf.dim() <= sequence < leaf.dim() or sequence % leaf.dim() == axis:
            self.faults.append(
                f"{self.places[index]} has shape {tuple(leaf.shape)}, its rows along axis {axis}, and no other axis "
                f"{sequence!r} for slices"
            )
            return None
        self.lengths[index] = leaf.shape[sequence]
        return sequence % leaf.dim()

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

    def cut(self, parts: Sequence[int], slices: Sequence[int]) -> list[Border]:
        """One border per microbatch, or slice of one: views of the caller's tensors."""
        if self.ready is not None:
            self.handles = _marked(leaf for tree in self.ready for leaf in flatten(tree)[0])
            return [given(tree) for tree in self.ready]
        self.handles = _marked(self.leaves)
        columns: list[Iterable[Any]] = [
            repeat(leaf, len(parts)) if axis is None else leaf.detach().split_with_sizes(parts, axis)
            for leaf, axis in zip(self.leaves, self.axes, strict=True)
        ]
        if slices:
            parts = [size for size in parts for _ in slices]
            columns = [
                [
                    piece
                    for value in column
                    for piece in (repeat(value, len(slices)) if axis is None else value.split_with_sizes(slices, axis))
                ]
                for column, axis in zip(columns, self.sequences, strict=True)
            ]
        rows = zip(*columns, strict=True) if columns else repeat((), len(parts))
        flags = (False,) * len(self.leaves)
        out: list[Border] = []
        keys: dict[tuple[int, int], Hashable] = {}
        for size, row in zip(parts, rows, strict=True):
            border = Border(list(row), self.spec, flags)
            length = slices[len(out) % len(slices)] if slices else 0
            if (size, length) not in keys:
                keys[size, length] = border_key_or_none(border)
            border.words = keys[size, length]
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
        if isinstance(mark, Axis):
            return map_leaves(lambda leaf: Axis(leaf, mark.axis, sequence=mark.sequence), mark.value)
        return mark

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


def _length(trees: Sequence[_BatchTree]) -> tuple[int | None, list[str]]:
    """The length of the sequences that slices are cut of, None if there are none; and the faults."""
    lengths = {length for tree in trees for length in tree.lengths.values()}
    if len(lengths) < 2:
        return (next(iter(lengths)) if lengths else None), []
    listed = ", ".join(f"{tree.places[index]} has {length}" for tree in trees for index, length in tree.lengths.items())
    return None, [
        f"leaves differ in the length of their sequences: {listed}; one that every slice gets whole is "
        "fp.Axis(leaf, 0, sequence=None), of others name the axis"
    ]


def _stage_that_feeds(plan: Plan, name: str) -> str:
    index = next(i for i, part in enumerate(plan.stages) if name in part.feeds)
    return f"stage {index} ({plan.stages[index].name!r})"
