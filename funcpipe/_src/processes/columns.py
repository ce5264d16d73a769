"""Stack equal trees with small tensors into one tree, so that they are sent as one message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcpipe._src.core.plain_tensors import is_plain
from funcpipe._src.core.tree import Tree, flatten, unflatten
from funcpipe._src.data.result import Loss
from funcpipe._src.processes.wire_classes import permit

_SMALL = 64  # tensors with at most this many values cost less to copy twice than to send separately


_CONSTANTS = (type(None), bool, int, float, str)


class Columns(NamedTuple):
    """Several trees with equal structure, as one tree."""

    length: int  # the number of trees
    tree: Tree  # a tree with the tensors of all trees stacked: ``[length, ...]``


for _kind in (Columns, Loss):  # the process of the last stage sends these
    permit(_kind)


def joined(trees: tuple[Tree, ...]) -> tuple[Tree, ...] | Columns:
    """Stack trees that differ only in the numbers of small tensors; return others unchanged."""
    if len(trees) < 2:
        return trees
    rows, specs = zip(*map(flatten, trees), strict=True)
    if any(spec != specs[0] for spec in specs) or not all(
        map(_is_one_kind, zip(*rows, strict=True))
    ):
        return trees
    with torch.no_grad():
        columns = [
            torch.stack(column) if isinstance(column[0], Tensor) else column[0]
            for column in zip(*rows, strict=True)
        ]
    return Columns(len(trees), unflatten(specs[0], columns))


def apart(trees: tuple[Tree, ...] | Columns) -> tuple[Tree, ...]:
    """Return the trees that `joined` has stacked, each tensor with its own memory."""
    if not isinstance(trees, Columns):
        return trees
    leaves, spec = flatten(trees.tree)
    columns = [
        [part.clone() for part in leaf.unbind()]
        if isinstance(leaf, Tensor)
        else [leaf] * trees.length
        for leaf in leaves
    ]
    return tuple(
        [unflatten(spec, [column[place] for column in columns]) for place in range(trees.length)]
    )


def _is_one_kind(column: Sequence[Any]) -> bool:
    """Return whether leaves are equal constants, or small tensors with equal layouts."""
    first = column[0]
    if not isinstance(first, Tensor):
        return type(first) in _CONSTANTS and len({(type(leaf), repr(leaf)) for leaf in column}) == 1
    if not all(
        isinstance(leaf, Tensor) and type(leaf) is Tensor and is_plain(leaf) for leaf in column
    ):
        return False
    kinds = {(leaf.shape, leaf.dtype, leaf.device, leaf.is_contiguous()) for leaf in column}
    return len(kinds) == 1 and first.is_contiguous() and first.numel() <= _SMALL
