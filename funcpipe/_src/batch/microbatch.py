"""Cut a batch into microbatches, and microbatches into slices. `joining` joins outputs."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from funcpipe._src.batch.batch_tree import BatchTree
from funcpipe._src.batch.registry import Rowed
from funcpipe._src.core.border import Border
from funcpipe._src.core.errors import BatchError, raise_all
from funcpipe._src.core.tree import Tree
from funcpipe._src.data.lowered import Lowered
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.program import Role
from funcpipe._src.schedules.slices import whole_lengths


@dataclass(frozen=True)
class Batch:
    """A batch cut into microbatches."""

    inputs: list[Border]  # one border per piece: per microbatch, or per slice
    target: list[Border] | None  # one border per piece, or None without a loss
    feeds: dict[str, list[Border]]  # one border per piece, by name
    rows: tuple[int, ...]  # the rows of each microbatch; 1 if no leaf has rows
    merged: bool  # whether outputs are merged
    # The axis along which each input leaf was cut; None for a shared leaf.
    axes: tuple[int | None, ...]
    handles: list[Any]  # keep the caller's memory marked as shared during the run
    slices: tuple[int, ...] = ()  # the lengths of the slices of a microbatch; () without slices
    # By stage, a border per piece: the carry of an earlier run, for first slices.
    carry: Mapping[int, list[Border]] = field(default_factory=dict[int, "list[Border]"])

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches with rows."""
        return len(self.rows)

    @property
    def num_pieces(self) -> int:
        """The number of pieces: slices of all microbatches, or microbatches without slices."""
        return len(self.rows) * max(1, len(self.slices))

    def named(self, piece: int) -> str:
        """Return the name of a piece: ``microbatch 1``, or ``microbatch 1, slice 2``."""
        if not self.slices:
            return f"microbatch {piece}"
        microbatch, number = divmod(piece, len(self.slices))
        return f"microbatch {microbatch}, slice {number}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of each piece: rows, times the length of the slice."""
        return tuple([size * length for size in self.rows for length in self.slices or (1,)])


def sizes(rows: int, count: int) -> list[int]:
    """Return the rows of each microbatch: as equal as possible, larger first, none empty.

    >>> sizes(10, 8), sizes(3, 8)
    ([2, 2, 1, 1, 1, 1, 1, 1], [1, 1, 1])
    """
    parts = min(rows, count)
    return [rows // parts + (index < rows % parts) for index in range(parts)]


def slice_lengths(length: int | None, count: int, shares: Sequence[float] = ()) -> tuple[int, ...]:
    """Return the lengths of the slices of a sequence, () for one slice.

    Lengths are proportional to ``shares``, or equal without shares. Raises BatchError if no leaf
    has a sequence, or if the sequence is too short.

    >>> slice_lengths(10, 4), slice_lengths(8, 2, (3, 1)), slice_lengths(8, 1)
    ((3, 3, 2, 2), (6, 2), ())
    """
    if count == 1:
        return ()
    if length is None:
        raise BatchError(
            f"the plan cuts microbatches into {count} slices along the sequence, but no leaf of "
            "the batch has a sequence; a sequence is the second axis of a leaf, or name its axis: "
            "fp.Axis(leaf, 0, sequence=axis)"
        )
    if length < count:
        raise BatchError(
            f"a sequence of length {length} cannot be cut into {count} slices; give sequences of "
            f"length {count} or more"
        )
    return whole_lengths(length, shares) if shares else tuple(sizes(length, count))


def parts_of(rows: int | None, ready: Sequence[int] | None, limit: int) -> tuple[int, ...]:
    """Return the rows of each microbatch of a batch. Raises BatchError if numbers of rows differ.

    Args:
        rows: the rows of the leaves. None: no leaf has rows.
        ready: the rows of each ready-made microbatch. 0: the microbatch is metadata without rows,
            so the other leaves decide. None: there are no ready-made microbatches.
        limit: the plan's number of microbatches.
    """
    if ready is None:
        return tuple(sizes(rows, limit) if rows is not None else [1] * limit)
    parts = tuple([size or 1 for size in ready])
    if rows is not None and not any(ready) and len(ready) <= rows:
        return tuple(sizes(rows, len(ready)))
    if rows is not None and rows != sum(parts):
        raise BatchError(
            f"the ready-made microbatches have {sum(parts)} rows ({[*parts]}), but other leaves "
            f"have {rows}; give the same rows in all of them"
        )
    return parts


def cut(plan: Plan, inputs: Tree, target: Tree, feeds: Mapping[str, Tree] | None) -> Batch:
    """Cut inputs, target and feeds into the same microbatches.

    Raises:
        BatchError: leaves have different numbers of rows, or no rows; feeds are missing or unknown;
            or the number of ready-made microbatches is wrong. The message lists all faults.
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
    """Check a batch before it is cut. Raises BatchError as `cut` does.

    With ``stages``, check only the values that these stages read.
    """
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
    # Lists with one value per row are found only if the number of rows is certain.
    faults += row_faults or [fault for tree in trees.values() for fault in tree.listed(rows)]
    ready = {name: len(tree.ready) for name, tree in trees.items() if tree.ready is not None}
    limit = plan.num_microbatches
    faults += [
        f"{name} has {n} ready-made microbatches, but the plan has {limit}"
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
            f"{', '.join(ready)} came as fp.Microbatches, which are already cut, but the plan "
            f"cuts each microbatch into {slices} slices; give tensors"
        )
    raise_all("this batch cannot be cut into microbatches:", faults, BatchError)
    made, of_target, unclear = None, False, False
    if ready:
        # The loss is a mean over the target, so use the rows of the target before those of inputs.
        order = sorted(trees.values(), key=lambda tree: tree.name != "target")
        source = next((tree for tree in order if any(tree.ready_rows)), None)
        if source is None:
            made = (0,) * max(ready.values())
        else:
            made = tuple([size or 0 for size in source.ready_rows])
            of_target = source.name == "target"
            unclear = not (source.sizes_agree if of_target else source.rows_agree)
            if not source.rows_agree and rows is not None:
                raise BatchError(
                    f"the leaves of {source.name}, ready-made microbatches, have different numbers "
                    "of rows, so it is not known how to cut the other leaves of the batch; cut "
                    "them, too: fp.Microbatches([...])"
                )
    lengths = (
        slice_lengths(length, slices, plan.slices) if stages is None or length is not None else ()
    )
    parts = parts_of(rows, made, limit)
    return Uncut(trees, rows, made, parts, tuple(declared), length, lengths, of_target, unclear)


@dataclass(frozen=True)
class Uncut:
    """A checked batch that can be cut."""

    trees: Mapping[str, BatchTree]  # the inputs, target and feeds in this process, by name
    rows: int | None  # the rows of the leaves. None: no leaf has rows
    # The rows of each ready-made microbatch, 0 without rows. None: there are none.
    ready: tuple[int, ...] | None
    parts: tuple[int, ...]  # the rows of each microbatch, as far as this process can tell
    feeds: tuple[str, ...]  # the names of the feeds in this process
    length: int | None  # the length of the sequences that are cut into slices, or None
    slices: tuple[int, ...]  # the lengths of the slices, as far as this process can tell
    # Whether ``ready`` has the rows of the target, which count before others.
    of_target: bool = False
    rows_unclear: bool = False  # see `Shares`

    @property
    def merged(self) -> bool | None:
        """Whether inputs are cut here, so that outputs are merged. None: no inputs here."""
        return self.trees["inputs"].ready is None if "inputs" in self.trees else None

    @property
    def is_target_uneven(self) -> bool:
        """Whether rows of the target, if it is here, have different numbers of elements."""
        leaves = self.trees["target"].leaves if "target" in self.trees else []
        return any(isinstance(leaf, Rowed) and leaf.is_uneven for leaf in leaves)

    def cut(
        self, parts: Sequence[int], slices: Sequence[int] = (), merged: bool | None = None
    ) -> Batch:
        """Cut into microbatches with these rows, and into slices with these lengths.

        ``merged`` is the answer of the process with the inputs. None: this process.
        """
        pieces = {name: tree.cut(parts, slices) for name, tree in self.trees.items()}
        handles = [handle for tree in self.trees.values() for handle in tree.handles]
        by_feed = {name: pieces[f"feeds[{name!r}]"] for name in self.feeds}
        axes = tuple(self.trees["inputs"].axes) if "inputs" in self.trees else ()
        merged = self.merged is not False if merged is None else merged
        values = pieces.get("inputs", []), pieces.get("target"), by_feed
        return Batch(*values, tuple(parts), merged, axes, handles, tuple(slices))


def _rows(trees: Sequence[BatchTree]) -> tuple[int | None, list[str]]:
    """Return the number of rows of a batch, or None, and the faults."""
    faults = [fault for tree in trees for fault in tree.faults]
    counts = {count for tree in trees for count in tree.rows.values()}
    if len(counts) > 1:
        listed = ", ".join(
            f"{tree.places[index]} has {count}"
            for tree in trees
            for index, count in tree.rows.items()
        )
        faults.append(
            f"leaves differ in rows: {listed}; share a leaf without rows with "
            "fp.Replicate(leaf), or name another axis with fp.Axis(leaf, axis)"
        )
    if counts == {0}:
        empty = [tree.places[index] for tree in trees for index in tree.rows]
        faults.append(f"the batch has no rows: {', '.join(empty)}")
    return (next(iter(counts)) if counts else None), faults


def _length(trees: Sequence[BatchTree]) -> tuple[int | None, list[str]]:
    """Return the length of the sequences that slices are cut from, or None, and the faults."""
    lengths = {length for tree in trees for length in tree.lengths.values()}
    if len(lengths) < 2:
        return (next(iter(lengths)) if lengths else None), []
    listed = ", ".join(
        f"{tree.places[index]} has {length}"
        for tree in trees
        for index, length in tree.lengths.items()
    )
    return None, [
        f"leaves differ in the length of their sequences: {listed}; mark a leaf that every slice "
        "gets whole, fp.Axis(leaf, 0, sequence=None), or name another axis, sequence=axis"
    ]


def _stage_that_feeds(plan: Plan, name: str) -> str:
    index = next(i for i, part in enumerate(plan.stages) if name in part.feeds)
    return f"stage {index} ({plan.stages[index].name!r})"


def given_by_caller(batch: Batch, program: Lowered) -> dict[int, Border]:
    """Return the values that the caller gives, by value number."""
    pieces = {Role.INPUT: batch.inputs, Role.TARGET: batch.target or ()}
    out: dict[int, Border] = {}
    for number, (role, stage, name, _) in enumerate(program.wires):
        if role is Role.CARRY_IN:
            out |= numbered(number, batch.carry.get(stage, ()))
        else:
            out |= numbered(
                number, batch.feeds.get(name, ()) if role is Role.FEED else pieces.get(role, ())
            )
    return out


def numbered(wire: int, pieces: Sequence[Border]) -> Mapping[int, Border]:
    """Return the values of a wire by value number, one per piece."""
    return {wire * len(pieces) + microbatch: piece for microbatch, piece in enumerate(pieces)}
