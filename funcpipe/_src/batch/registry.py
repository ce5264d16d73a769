"""The registry of classes whose objects have rows: how a run cuts them, and how it joins outputs.

Tensors need no entry. An object without an entry is a leaf that each microbatch gets whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcpipe._src.core.errors import BatchError, PlanError
from funcpipe._src.core.tree import Tree, flatten, unflatten


class RowRule(NamedTuple):
    """The entry of a class; see `register`."""

    rows: Callable[[Any], int | None]
    cut: Callable[[Any, int, int], Tree]
    join: Callable[[Sequence[Any]], Any] | None = None
    lengths: Callable[[Any], Sequence[int]] | None = None
    """Returns the number of elements of each row. None: not known."""


def register(
    kind: type,
    *,
    rows: Callable[[Any], int | None],
    cut: Callable[[Any, int, int], Tree],
    join: Callable[[Sequence[Any]], Any] | None = None,
) -> None:
    """Register a class, so that a run cuts its objects into microbatches.

    A run treats an object of the class in inputs, target or feeds as one value with rows. If the
    class is registered again, the new functions replace the old ones.

    >>> class Graphs:
    ...     def __init__(self, edges):  # a list with the edges of each graph
    ...         self.edges = edges
    >>> fp.batches.register(
    ...     Graphs, rows=lambda g: len(g.edges), cut=lambda g, start, stop: g.edges[start:stop]
    ... )
    >>> count = fp.stage(lambda p, x: torch.tensor([len(edges) for edges in x]))
    >>> plan = fp.make_plan([count], fp.schedules.fill_drain(1, 2, backward=False), devices="cpu")
    >>> fp.run(plan, ((),), Graphs([torch.ones(3, 2), torch.ones(1, 2), torch.ones(2, 2)])).outputs
    tensor([3, 1, 2])

    Args:
        kind: the class. Subclasses need an entry of their own.
        rows: a function that returns the number of rows of an object, or None: each microbatch gets
            the whole object.
        cut: ``(object, start, stop) -> tree`` returns the value of the microbatch with the rows
            ``start`` to ``stop``: an object of the class, or any other tree.
        join: ``objects -> object`` joins the outputs of the microbatches, in order. None, the
            default: outputs of the class come as `Microbatches`.

    Raises:
        PlanError: ``kind`` is not a class, is a builtin container, or is a tensor class; or a
            function is not callable.
    """
    if not isinstance(kind, type) or kind in (dict, list, tuple) or issubclass(kind, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PlanError(
            f"fp.batches.register takes a class that is not a tensor, dict, list or tuple; got "
            f"{kind!r}"
        )
    for name, function in (("rows", rows), ("cut", cut), *([("join", join)] if join else [])):
        if not callable(function):
            raise PlanError(f"{name}= must be a function; got {function!r}")
    _rules[kind] = RowRule(rows, cut, join)


def rule_of(value: Any) -> RowRule | None:
    """Return the entry of an object's class, or None."""
    kind = type(value)
    if kind in _rules:
        return _rules[kind]
    if kind.__module__ == "torch.nn.attention.flex_attention" and kind.__name__ == "BlockMask":
        return _BLOCK_MASK
    if isinstance(value, Tensor) and value.is_nested and value.layout is torch.jagged:
        return _JAGGED
    return None


def is_registered(value: Any) -> bool:
    """Return whether an object's class has an entry."""
    return rule_of(value) is not None


class Rowed:
    """An object of a registered class in a batch, with its entry: one leaf of the tree."""

    __slots__ = ("rule", "value")

    def __init__(self, value: Any) -> None:
        rule = rule_of(value)
        assert rule is not None
        self.value, self.rule = value, rule

    def rows(self, place: str) -> int | None:
        """Return the number of rows. Raises BatchError if the registered function fails."""
        count = self._call("rows", place, self.rule.rows)
        if count is not None and (type(count) is not int or count < 0):
            raise BatchError(
                f"rows= of {type(self.value).__name__} must return a number of rows or None; got "
                f"{count!r} for {place}"
            )
        return count

    @property
    def is_uneven(self) -> bool:
        """Whether rows are known to have different numbers of elements."""
        return self.rule.lengths is not None and len({*self.rule.lengths(self.value)}) > 1

    def cut(self, sizes: Sequence[int]) -> list[Tree]:
        """Return the value of each microbatch. Raises BatchError if the function fails."""
        return [
            self._call("cut", f"the rows {start} to {stop}", self.rule.cut, start, stop)
            for start, stop in pairwise(accumulate(sizes, initial=0))
        ]

    def _call(self, word: str, place: str, function: Callable[..., Any], *rows: int) -> Any:
        try:
            return function(self.value, *rows)
        except BatchError:
            raise
        except Exception as error:
            raise BatchError(
                f"{word}= of {type(self.value).__name__}, registered by fp.batches.register, "
                f"failed for {place}: {type(error).__name__}: {error}"
            ) from error


def with_rowed(tree: Tree) -> Tree:
    """Return the tree with each object of a registered class as a `Rowed` leaf."""
    if type(tree) is Tensor or tree is None:
        return tree
    leaves, spec = flatten(tree, is_registered)
    if not any(map(is_registered, leaves)):
        return tree
    return unflatten(spec, [Rowed(leaf) if is_registered(leaf) else leaf for leaf in leaves])


class Samples:
    """A mark for a list with one entry per row of the batch: ``fp.batches.Samples(samples)``.

    Each microbatch gets the list of its entries. An entry is any tree, such as a dict of tensors of
    different shapes.

    >>> total = fp.stage(lambda p, samples: torch.stack([s["x"].sum() for s in samples]))
    >>> plan = fp.make_plan([total], fp.schedules.fill_drain(1, 2, backward=False), devices="cpu")
    >>> fp.run(plan, ((),), fp.batches.Samples([{"x": torch.ones(n)} for n in (1, 2, 3)])).outputs
    tensor([1., 2., 3.])

    Attributes:
        entries: the entries.
    """

    __slots__ = ("entries",)

    def __init__(self, entries: Sequence[Tree]) -> None:
        self.entries = entries

    def __repr__(self) -> str:
        return f"Samples({len(self.entries)})"


@dataclass
class Varlen:
    """Sequences of different lengths in one tensor, without padding.

    A run cuts the sequences into microbatches, and rebases ``cu_seqlens``. So kernels for sequences
    of variable length take both as they are.

    >>> packed = fp.batches.Varlen.of([torch.ones(2), torch.ones(3), torch.ones(1)])
    >>> packed.cu_seqlens, packed.lengths
    (tensor([0, 2, 5, 6], dtype=torch.int32), tensor([2, 3, 1], dtype=torch.int32))

    Attributes:
        values: the tokens of all sequences ``[total, ...]``.
        cu_seqlens: the start of each sequence, then the end of the last ``[sequences + 1]``.
    """

    values: Tensor
    cu_seqlens: Tensor

    @classmethod
    def of(cls, sequences: Sequence[Tensor]) -> Varlen:
        """Pack sequences ``[length, ...]``."""
        lengths = torch.tensor([0, *map(len, sequences)])
        return cls(torch.cat([*sequences]), lengths.cumsum(0, dtype=torch.int32))

    @property
    def lengths(self) -> Tensor:
        """The length of each sequence ``[sequences]``."""
        return self.cu_seqlens.diff()

    def nested(self) -> Tensor:
        """Return a nested tensor with the layout ``torch.jagged``, as a view of the values."""
        return torch.nested.nested_tensor_from_jagged(self.values, self.cu_seqlens)


def _elements(tree: Tree) -> int:
    return sum(leaf.numel() for leaf in flatten(tree)[0] if isinstance(leaf, Tensor))


def _packed_rows(packed: Varlen) -> int:
    starts, values = packed.cu_seqlens, packed.values
    if starts.is_floating_point():
        raise BatchError(
            f"cu_seqlens of fp.batches.Varlen must be whole numbers; got {starts.dtype}"
        )
    if starts.dim() != 1 or not len(starts) or int(starts[0]) or int(starts[-1]) != len(values):
        raise BatchError(
            "cu_seqlens of fp.batches.Varlen must begin with 0 and end with the number of values "
            f"({len(values)}); got {starts.tolist()}"
        )
    if bool((starts.diff() < 0).any()):
        raise BatchError(f"cu_seqlens of fp.batches.Varlen must not fall; got {starts.tolist()}")
    return len(starts) - 1


def _cut_packed(packed: Varlen, start: int, stop: int) -> Varlen:
    starts = packed.cu_seqlens[start : stop + 1]
    first, last = int(starts[0]), int(starts[-1])
    return Varlen(packed.values[first:last], starts - first)


def _join_packed(pieces: Sequence[Varlen]) -> Varlen:
    starts, total = [pieces[0].cu_seqlens[:1]], 0
    for piece in pieces:
        starts.append(piece.cu_seqlens[1:] + total)
        total += len(piece.values)
    return Varlen(torch.cat([piece.values for piece in pieces]), torch.cat(starts))


def _jagged_rows(nested: Any) -> int:
    if nested.lengths() is not None or isinstance(nested.shape[1], int):
        raise BatchError(
            "a run cuts nested tensors whose rows follow each other without gaps, with the ragged "
            "dimension 1; call .contiguous(), or give fp.batches.Varlen"
        )
    return nested.size(0)


def _cut_jagged(nested: Any, start: int, stop: int) -> Tensor:
    return _cut_packed(Varlen(nested.values(), nested.offsets()), start, stop).nested()


def _block_mask_rows(mask: Any) -> int | None:
    rows = mask.kv_num_blocks.shape[0]
    return rows if rows > 1 else None


def _cut_block_mask(mask: Any, start: int, stop: int) -> Any:
    rule = mask.mask_mod

    def shifted(row: Any, head: Any, query: Any, key: Any) -> Any:
        return rule(row + start, head, query, key)

    blocks = mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices
    cut = [None if block is None else block[start:stop] for block in blocks]
    sizes = {"BLOCK_SIZE": mask.BLOCK_SIZE, "seq_lengths": mask.seq_lengths}
    return type(mask).from_kv_blocks(*cut, mask_mod=shifted, **sizes)


_BLOCK_MASK = RowRule(_block_mask_rows, _cut_block_mask)
_JAGGED = RowRule(
    _jagged_rows, _cut_jagged, lengths=lambda nested: nested.offsets().diff().tolist()
)
_rules: dict[type, RowRule] = {
    Samples: RowRule(
        lambda mark: len(mark.entries),
        lambda mark, start, stop: [*mark.entries[start:stop]],
        lengths=lambda mark: [_elements(entry) for entry in mark.entries],
    ),
    Varlen: RowRule(
        _packed_rows, _cut_packed, _join_packed, lambda packed: packed.lengths.tolist()
    ),
}
