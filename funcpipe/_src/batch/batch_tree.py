"""`BatchTree`: one tree of a batch, the axes of its leaves, and the faults of its leaves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from funcpipe._src.batch.marks import Axis, Microbatches, Replicate
from funcpipe._src.batch.registry import Rowed, with_rowed
from funcpipe._src.core.border import LEAF, Border, given, mark_shared, sharing_memory
from funcpipe._src.core.cache_key import border_key_or_none
from funcpipe._src.core.tree import (
    Tree,
    flatten,
    locations,
    map_leaves,
    refuse_hidden,
    unflatten,
)


class BatchTree:
    """One tree of the batch: inputs, target or a feed.

    Args:
        name: the name of the tree in errors.
        tree: the tree that the caller gave.
        sliced: whether microbatches are cut into slices.
        has_cache_keys: whether to compute cache keys of microbatches, for compiled stages. They are
            computed once per size.
    """

    def __init__(
        self, name: str, tree: Tree, *, sliced: bool = False, has_cache_keys: bool = False
    ) -> None:
        self.name, self.sliced, self.has_cache_keys = name, sliced, has_cache_keys
        self.ready = tree if isinstance(tree, Microbatches) else None
        self.faults: list[str] = [] if self.ready is not None else _packed(tree, name)
        if self.faults:
            tree = None  # the rows of packed tensors are not sequences, so do not check them
        self.tree = tree = _marks_at_leaves(with_rowed(tree))
        self.leaves, spec = flatten(tree if self.ready is None else None)
        self.spec = LEAF if isinstance(tree, Tensor) else spec
        self.rows: dict[int, int] = {}  # by leaf number, the number of rows
        self.lengths: dict[int, int] = {}
        """By leaf number, the length of the sequences that slices are cut from."""
        self.sequences: list[int | None] = [None] * len(self.leaves)
        """By leaf number, the axis along which slices are cut; None: each slice gets the whole."""
        self.handles: list[Any] = []
        self.axes = [self._axis(index, leaf) for index, leaf in enumerate(self.leaves)]
        if self.ready is None:
            checked = [None if isinstance(leaf, Rowed) else leaf for leaf in self.leaves]
            self.faults += refuse_hidden(tree, name, checked, spec)
        pieces: list[list[Tensor]] = []
        for index, piece in enumerate(self.ready or ()):
            leaves, spec = flatten(piece)
            self.faults += refuse_hidden(piece, f"{name}[{index}]", leaves, spec)
            self.faults += [f"{name}[{index}] has {_NESTED}" for leaf in leaves if _is_nested(leaf)]
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            pieces.append([leaf for leaf in tensors if not _is_nested(leaf) and leaf.dim()])
        self.ready_rows: list[int | None] = [
            leaves[0].shape[0] if leaves else None for leaves in pieces
        ]
        """The rows of each ready-made microbatch, of its first leaf with an axis; None without such
        a leaf."""
        self.rows_agree = _agree(pieces, lambda leaf: leaf.shape[0])
        """Whether the rows of all leaves give ready-made microbatches the same shares."""
        self.sizes_agree = self.rows_agree and _agree(pieces, Tensor.numel)
        """Whether also the numbers of elements give the same shares."""

    @cached_property
    def places(self) -> list[str]:
        """The location of each leaf, for errors. Expensive, so computed only if needed."""
        return locations(self.tree, self.name)

    def _axis(self, index: int, leaf: Any) -> int | None:
        """Return the axis along which a leaf is cut; None: microbatches share the leaf."""
        if isinstance(leaf, Rowed):
            self._count(index, leaf)
            return None
        if _is_nested(leaf.value if isinstance(leaf, (Replicate, Axis)) else leaf):
            self.faults.append(f"{self.places[index]} is {_NESTED}")
            return None
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
                    f"{place} is a {type(leaf).__name__} with rows, not a tensor: "
                    f"torch.from_numpy({place}), or share it: fp.Replicate({place})"
                )
            return None
        if leaf.layout is not torch.strided:
            place = self.places[index]
            self.faults.append(
                f"{place} is a sparse tensor ({leaf.layout}), which is not cut along its rows: "
                f"cut it yourself (fp.Microbatches), share it (fp.Replicate({place})), or make it "
                f"dense ({place}.to_dense())"
            )
            return None
        if leaf.dim() == 0:
            place = self.places[index]
            self.faults.append(
                f"{place} is a 0-dim tensor and has no rows; share it: fp.Replicate({place})"
            )
            return None
        if type(axis) is not int or not -leaf.dim() <= axis < leaf.dim():
            self.faults.append(
                f"{self.places[index]} has shape {tuple(leaf.shape)} and no axis {axis!r}"
            )
            return None
        self.rows[index] = leaf.shape[axis]
        axis %= leaf.dim()
        self.sequences[index] = self._sequence(index, leaf, axis, sequence) if self.sliced else None
        return axis

    def _count(self, index: int, leaf: Rowed) -> None:
        """Count the rows of an object of a registered class."""
        rows, kind = leaf.rows(self.places[index]), type(leaf.value).__name__
        if self.sliced:
            self.faults.append(
                f"{self.places[index]} is a {kind}, which is not cut into slices of a sequence; "
                "give tensors"
            )
        elif rows is not None:
            self.rows[index] = rows

    def _sequence(self, index: int, leaf: Tensor, axis: int, sequence: Any) -> int | None:
        """Return the axis along which a leaf is cut into slices; None: slices share the leaf."""
        if sequence == "next":
            sequence = (0 if axis else 1) if leaf.dim() > 1 else None
        if sequence is None:
            return None
        if (
            type(sequence) is not int
            or not -leaf.dim() <= sequence < leaf.dim()
            or sequence % leaf.dim() == axis
        ):
            self.faults.append(
                f"{self.places[index]} has shape {tuple(leaf.shape)}, its rows along axis {axis}, "
                f"and no other axis {sequence!r} for slices"
            )
            return None
        self.lengths[index] = leaf.shape[sequence]
        return sequence % leaf.dim()

    def listed(self, rows: int | None) -> list[str]:
        """Return faults for lists with one value, or one list, per row, which would not be cut."""
        if rows is None or rows < 2 or self.ready is not None:
            return []
        if all(isinstance(leaf, Tensor) for leaf in self.leaves):
            return []
        with_rows = {id(self.leaves[number]) for number in self.rows}

        def is_listed(node: Any) -> bool:
            kind = type(node)
            strings = kind is tuple and all(isinstance(each, (str, bytes)) for each in node)
            if not (kind in (list, deque) or strings) or len(node) != rows:
                return False
            inside = flatten(node)[0]
            return bool(inside) and not any(
                isinstance(leaf, (Tensor, Replicate, Axis)) or id(leaf) in with_rows
                for leaf in inside
            )

        faults: list[str] = []
        places = locations(self.tree, self.name, is_listed)  # an outer list, not the lists inside
        for place, leaf in zip(places, flatten(self.tree, is_listed)[0], strict=True):
            entry = f"one {type(leaf[0]).__name__}" if is_listed(leaf) else "one value"
            if is_listed(leaf) or (_is_collection(leaf) and len(leaf) == rows):
                faults.append(
                    f"{place} is a {type(leaf).__name__} with {entry} for each of {rows} rows, "
                    "which every microbatch would get whole: make it a tensor, cut it yourself "
                    f"(fp.Microbatches), or share it: fp.Replicate({place})"
                )
        return faults

    def cut(self, parts: Sequence[int], slices: Sequence[int]) -> list[Border]:
        """Return one border per microbatch, views of the caller's tensors.

        With slices, return one border per slice, in its own memory.
        """
        if self.ready is not None:
            return self._given(self.ready)
        columns: list[Iterable[Any]] = []
        for index, (leaf, axis) in enumerate(zip(self.leaves, self.axes, strict=True)):
            if axis is not None:
                columns.append(leaf.detach().split_with_sizes(parts, axis))
            elif isinstance(leaf, Rowed) and index in self.rows:
                columns.append(leaf.cut(parts))
            else:
                columns.append(repeat(leaf.value if isinstance(leaf, Rowed) else leaf, len(parts)))
        if slices:
            parts = [size for size in parts for _ in slices]
            pairs = zip(columns, self.sequences, strict=True)
            columns = [_sliced(values, axis, slices) for values, axis in pairs]
        rows = zip(*columns, strict=True) if columns else repeat((), len(parts))
        if any(isinstance(leaf, Rowed) for leaf in self.leaves):  # their pieces are trees
            return self._given(unflatten(self.spec, row) for row in rows)
        self.handles = _marked(self.leaves)
        flags = (False,) * len(self.leaves)
        shared = sharing_memory(self.leaves) if len(self.leaves) > 1 else ()
        out: list[Border] = []
        keys: dict[tuple[int, int], Hashable] = {}
        for size, row in zip(parts, rows, strict=True):
            border = Border(list(row), self.spec, flags)
            border.shared = shared
            if self.has_cache_keys:
                # Pieces of equal size have equal shapes and layouts, so they share one key.
                length = slices[len(out) % len(slices)] if slices else 0
                if (size, length) not in keys:
                    keys[size, length] = border_key_or_none(border)
                border.words = keys[size, length]
            out.append(border)
        return out

    def _given(self, trees: Iterable[Tree]) -> list[Border]:
        """Return the borders of microbatches that are trees of their own."""
        borders = [given(tree) for tree in trees]
        self.handles = _marked(leaf for border in borders for leaf in border.leaves)
        for border in borders:
            border.shared = sharing_memory(border.leaves)
        return borders


def _sliced(values: Iterable[Any], axis: int | None, lengths: Sequence[int]) -> Iterable[Any]:
    """Return the slices of a leaf's microbatches: contiguous, so that stages can view them."""
    if axis is None:
        return [value for value in values for _ in lengths]
    return [
        piece.contiguous() for value in values for piece in value.split_with_sizes(lengths, axis)
    ]


def _agree(pieces: Sequence[Sequence[Tensor]], size: Callable[[Tensor], int]) -> bool:
    """Return whether the sizes of all leaves are proportional to the rows, over microbatches."""
    if len({len(leaves) for leaves in pieces}) > 1:
        return all(len({size(leaf) for leaf in leaves}) <= 1 for leaves in pieces)
    columns = list(zip(*pieces, strict=True))
    first = [leaf.shape[0] for leaf in columns[0]] if columns else []
    return all(
        size(leaf) * first[0] == rows * size(column[0])
        for column in columns
        for leaf, rows in zip(column, first, strict=True)
    )


_NESTED = (
    "a nested tensor (torch.nested), which stages cannot exchange: give its padded values and "
    "lengths (nested.to_padded_tensor(0.0), lengths), and make it nested in the stage that needs "
    "it"
)


def _is_nested(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_nested


def _packed(tree: Tree, place: str) -> list[str]:
    """List faults for packed sequences, because their rows are steps of all sequences."""
    if isinstance(tree, (Replicate, Axis)):
        return _packed(tree.value, place)
    if isinstance(tree, PackedSequence):
        return [
            f"{place} is a PackedSequence, whose rows are steps of all sequences: give padded "
            "sequences and their lengths, and pack them in the stage; or pack each microbatch "
            "yourself: fp.Microbatches([pack_sequence(...), ...])"
        ]
    items: Iterable[tuple[Any, Any]] = ()
    if type(tree) is dict:
        items = tree.items()
    elif type(tree) in (list, tuple):
        items = enumerate(tree)
    return [fault for key, inner in items for fault in _packed(inner, f"{place}[{key!r}]")]


def _is_collection(leaf: Any) -> bool:
    """Return whether a leaf is a collection such as a range or a set, but not an array."""
    return (
        isinstance(leaf, Collection)
        and not isinstance(leaf, (str, bytes, torch.Size))
        and not hasattr(leaf, "__array__")
    )


def _marks_at_leaves(tree: Tree) -> Tree:
    """Return the tree with marks only around leaves: move a mark of a tree to each leaf."""
    leaves, spec = flatten(tree)
    if not any(
        isinstance(leaf, (Replicate, Axis)) and flatten(leaf.value)[1] != LEAF for leaf in leaves
    ):
        return tree

    def spread(mark: Any) -> Tree:
        if isinstance(mark, Replicate):
            return map_leaves(Replicate, mark.value)
        if isinstance(mark, Axis):
            return map_leaves(
                lambda leaf: Axis(leaf, mark.axis, sequence=mark.sequence), mark.value
            )
        return mark

    return unflatten(spec, map(spread, leaves))


def _marked(leaves: Iterable[Any]) -> list[Any]:
    """Return handles that mark the caller's CPU memory as shared while they exist.

    Devices with streams need no mark, because each stage gets a copy there.
    """
    return mark_shared(leaf.detach() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cpu)
