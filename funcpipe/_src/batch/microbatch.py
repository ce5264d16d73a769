"""Cuts a batch into microbatches, and these into slices; no row is lost."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from funcpipe._src.batch.batch_tree import BatchTree
from funcpipe._src.core.border import Border
from funcpipe._src.core.errors import BatchError, raise_all
from funcpipe._src.core.tree import Tree
from funcpipe._src.data.lowered import Lowered
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.program import Role
from funcpipe._src.schedules.slices import whole_lengths


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

    def named(self, piece: int) -> str:
        """A piece in words: ``microbatch 1``, or ``microbatch 1, slice 2``."""
        if not self.slices:
            return f"microbatch {piece}"
        microbatch, number = divmod(piece, len(self.slices))
        return f"microbatch {microbatch}, slice {number}"

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
    """The lengths of the slices of a sequence, () for one that is whole; by ``shares`` in any unit,
    or equal ones.

    >>> slice_lengths(10, 4), slice_lengths(8, 2, (3, 1)), slice_lengths(8, 1)
    ((3, 3, 2, 2), (6, 2), ())

    Raises:
        BatchError: nothing has a sequence, or it is too short.
    """
    if count == 1:
        return ()
    if length is None:
        raise BatchError(
            f"the plan cuts microbatches into {count} slices along the sequence, and no leaf of "
            "the batch has one: their second axis, or fp.Axis(leaf, 0, sequence=axis)"
        )
    if length < count:
        raise BatchError(
            f"a sequence of length {length} cannot be cut into {count} slices; give at least "
            f"{count}"
        )
    return whole_lengths(length, shares) if shares else tuple(sizes(length, count))


def parts_of(rows: int | None, ready: Sequence[int] | None, limit: int) -> tuple[int, ...]:
    """The rows of each microbatch of a batch.

    Args:
        rows: of the leaves; None: none has any.
        ready: of ready-made microbatches, 0 where nothing has rows (metadata: the other leaves
            alone decide how many rows each microbatch has); None: there are no such.
        limit: how many microbatches there may be.

    Raises:
        BatchError: the leaves contradict each other.
    """
    if ready is None:
        return tuple(sizes(rows, limit) if rows is not None else [1] * limit)
    parts = tuple([size or 1 for size in ready])
    if rows is not None and not any(ready) and len(ready) <= rows:
        return tuple(sizes(rows, len(ready)))
    if rows is not None and rows != sum(parts):
        raise BatchError(
            f"the ready-made microbatches have {sum(parts)} rows ({[*parts]}), other leaves have "
            f"{rows}"
        )
    return parts


def cut(plan: Plan, inputs: Tree, target: Tree, feeds: Mapping[str, Tree] | None) -> Batch:
    """Cut inputs, target and feeds alike.

    Raises:
        BatchError: leaves with different numbers of rows, without rows, no rows at all, feeds
            missing or unknown, or the wrong number of ready-made microbatches; every fault with its
            place.
    """
    uncut = look(plan, inputs, target, feeds)
    return uncut.cut(uncut.parts, uncut.slices)


def look(
    plan: Plan,
    inputs: Tree,
    target: Tree,
    feeds: Mapping[str, Tree] | None,
    stages: Container[int] | None = None,
) -> Uncut:
    """Look at a batch before it is cut: all of it, or what some stages read. Raises BatchError as
    `cut` does."""
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
    faults = [
        f"feeds lacks {name!r}, which {_stage_that_feeds(plan, name)} declares" for name in lacking
    ]
    faults += [
        f"feeds has {name!r}, which no stage declares" for name in feeds if name not in everywhere
    ]
    by_name.update({f"feeds[{name!r}]": feeds[name] for name in declared if name in feeds})
    slices = plan.schedule.num_slices
    how = {
        "sliced": slices > 1,
        "has_cache_keys": any(part.program is not None for part in plan.stages),
    }
    trees = {name: BatchTree(name, tree, **how) for name, tree in by_name.items()}
    rows, row_faults = _rows([*trees.values()])
    length, length_faults = _length([*trees.values()])
    row_faults += length_faults
    faults += row_faults or [fault for tree in trees.values() for fault in tree.listed(rows)]
    ready = {name: len(tree.ready) for name, tree in trees.items() if tree.ready is not None}
    limit = plan.num_microbatches
    faults += [
        f"{name} is cut into {n} microbatches, the plan has {limit}"
        for name, n in ready.items()
        if not 0 < n <= limit
    ]
    if len(set(ready.values())) > 1:
        faults.append(
            "ready-made microbatches differ in number: "
            + ", ".join(f"{name} has {n}" for name, n in ready.items())
        )
    faults += [
        f"microbatch {index} of {name} has no rows; leave it out"
        for name, tree in trees.items()
        for index, size in enumerate(tree.ready_rows)
        if size == 0
    ]
    if slices > 1 and ready:
        faults.append(
            f"{', '.join(ready)} came as fp.Microbatches, which are cut already, and the plan "
            f"cuts each into {slices} slices; give tensors"
        )
    raise_all("this batch cannot be cut into microbatches:", faults, BatchError)
    made, of_target, unclear = None, False, False
    if ready:
        # The loss is a mean over the target, so rows of the target count before rows of the inputs.
        order = sorted(trees.values(), key=lambda tree: tree.name != "target")
        source = next((tree for tree in order if any(tree.ready_rows)), None)
        made = (
            tuple([size or 0 for size in source.ready_rows])
            if source
            else (0,) * max(ready.values())
        )
        of_target = source is not None and source.name == "target"
        unclear = source is not None and not (
            source.sizes_agree if of_target else source.rows_agree
        )
        if source is not None and not source.rows_agree and rows is not None:
            raise BatchError(
                f"the leaves of {source.name}, ready-made microbatches, differ in how many rows "
                "they have, so it is not known how to cut the other leaves of the batch; cut "
                "these, too: fp.Microbatches([...])"
            )
    lengths = (
        slice_lengths(length, slices, plan.slices) if stages is None or length is not None else ()
    )
    parts = parts_of(rows, made, limit)
    return Uncut(trees, rows, made, parts, tuple(declared), length, lengths, of_target, unclear)


@dataclass(frozen=True)
class Uncut:
    """A batch that can be cut.

    Attributes:
        trees: inputs, target and feeds as far as they are here, by name.
        rows: of the leaves; None: none has any.
        ready: rows of the ready-made microbatches, 0 where nothing has any; None: there are no
            such.
        parts: rows of the microbatches that follow from it.
        feeds: the names of those that are here.
        length: of the sequences that are cut into slices; None: none is.
        slices: the lengths of the slices that follow from it.
        of_target: whether the ready-made rows are the target's, which count before others.
        rows_unclear: see `Shares`.
    """

    trees: Mapping[str, BatchTree]
    rows: int | None
    ready: tuple[int, ...] | None
    parts: tuple[int, ...]
    feeds: tuple[str, ...]
    length: int | None
    slices: tuple[int, ...]
    of_target: bool = False
    rows_unclear: bool = False

    @property
    def merged(self) -> bool | None:
        """Are inputs cut here, so that outputs are merged; None: they are not here."""
        return self.trees["inputs"].ready is None if "inputs" in self.trees else None

    def cut(
        self, parts: Sequence[int], slices: Sequence[int] = (), merged: bool | None = None
    ) -> Batch:
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


def _rows(trees: Sequence[BatchTree]) -> tuple[int | None, list[str]]:
    """The number of rows of a batch, None if nothing has any; and the faults."""
    faults = [fault for tree in trees for fault in tree.faults]
    counts = {count for tree in trees for count in tree.rows.values()}
    if len(counts) > 1:
        listed = ", ".join(
            f"{tree.places[index]} has {count}"
            for tree in trees
            for index, count in tree.rows.items()
        )
        faults.append(
            f"leaves differ in rows: {listed}; share a leaf that has none with "
            "fp.Replicate(leaf), name another axis with fp.Axis(leaf, axis)"
        )
    if counts == {0}:
        empty = [tree.places[index] for tree in trees for index in tree.rows]
        faults.append(f"the batch has no rows: {', '.join(empty)}")
    return (next(iter(counts)) if counts else None), faults


def _length(trees: Sequence[BatchTree]) -> tuple[int | None, list[str]]:
    """The length of the sequences that slices are cut of, None if there are none; and the
    faults."""
    lengths = {length for tree in trees for length in tree.lengths.values()}
    if len(lengths) < 2:
        return (next(iter(lengths)) if lengths else None), []
    listed = ", ".join(
        f"{tree.places[index]} has {length}"
        for tree in trees
        for index, length in tree.lengths.items()
    )
    return None, [
        f"leaves differ in the length of their sequences: {listed}; one that every slice gets "
        "whole is fp.Axis(leaf, 0, sequence=None), of others name the axis"
    ]


def _stage_that_feeds(plan: Plan, name: str) -> str:
    index = next(i for i, part in enumerate(plan.stages) if name in part.feeds)
    return f"stage {index} ({plan.stages[index].name!r})"


def given_by_caller(batch: Batch, program: Lowered) -> dict[int, Border]:
    """What the caller gives, by value number."""
    pieces = {Role.INPUT: batch.inputs, Role.TARGET: batch.target or ()}
    out: dict[int, Border] = {}
    for number, (role, _, name, _) in enumerate(program.wires):
        out |= numbered(
            number, batch.feeds.get(name, ()) if role is Role.FEED else pieces.get(role, ())
        )
    return out


def numbered(wire: int, pieces: Sequence[Border]) -> Mapping[int, Border]:
    """The values of a wire by number, one of each microbatch."""
    return {wire * len(pieces) + microbatch: piece for microbatch, piece in enumerate(pieces)}
