"""Agree on facts of a run: each process sends a `Word`, and all derive the same `Agreed` from all
words.

This module computes; `PlanPart.exchange` sends. A derived error is the same in every process, so no
process has to be told of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import torch

from funcpipe._src.batch.microbatch import parts_of
from funcpipe._src.batch.shares import Weighed, settled
from funcpipe._src.core.errors import BatchError, RanksError, raise_all
from funcpipe._src.core.remembered import Remembered
from funcpipe._src.core.shown import named, stages_words
from funcpipe._src.data.identity import described_callable, summed_up
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.stage import Stage, names_of

T = TypeVar("T")

START = "the start of a run"  # the topic of the first exchange of a run

END = "the end of a run"
"""The topic of the exchange after which all processes have the facts of the whole run."""


class Word(NamedTuple):
    """The facts that one process sends at the start of a run."""

    plan: str  # the name of the schedule, and the plan's fingerprint
    options: dict[str, Any]  # the options that must be equal in all processes, by name
    rows: int | None  # the number of rows of the batch leaves here. None: no leaf has rows
    # The rows of each ready-made microbatch, 0 if none of its leaves has rows. None: there are no
    # ready-made microbatches here.
    ready: tuple[int, ...] | None
    lacks: tuple[str, ...]  # descriptions of batch parts that are missing here
    # Whether the inputs are cut here, so that outputs are merged. None: no inputs here.
    merged: bool | None
    parts: tuple[int, ...]  # the rows of the microbatches, as far as this process can tell
    weighed: Weighed  # the weights of the microbatches, as far as this process can tell
    marked: bool  # whether a leaf of the params here requires a gradient
    # For each tie, for each member here: (place, layout, whether it is trained if some leaves are
    # marked, whether it is trained if no leaf is marked).
    ties: tuple[tuple[tuple[int, Any, bool, bool], ...], ...]
    trained: str = ""  # the pattern of trained leaves, with replicas
    copies: str = ""  # a description of the parameters without their numbers, with replicas
    # The length of the sequences that slices are cut from. None: no sequences here.
    length: int | None = None
    # `of_target`, `rows_unclear`: for ready-made microbatches, as in `Uncut`.
    of_target: bool = False
    rows_unclear: bool = False
    # Whether the process has parameters that no run has compared with other processes.
    is_new: bool = False
    # In the first run, a hash of each tensor of the batch, by its location and shape.
    batch: Mapping[str, str] = {}
    functions: Mapping[str, Sequence[str]] = {}  # the words of `functions_of`


class Agreed(NamedTuple):
    """The facts that follow from the words of all processes."""

    parts: tuple[tuple[int, ...], ...]  # the rows of the microbatches of each replica
    merged: bool  # whether outputs are merged
    # The weights of the microbatches of each replica. None: rows are the weights.
    weights: tuple[tuple[float, ...], ...] | None
    # Whether ``weights`` belong to these microbatches. False: some process had cut them
    # differently, so the weights must be computed again.
    weighed: bool
    marked: bool  # whether any leaf requires a gradient
    layouts: tuple[tuple[Any, ...], ...]  # for each tie, the layout of each member, at this replica
    # The length of the sequences that slices are cut from. None: there are none.
    length: int | None = None
    rows_unclear: bool = False  # see `Shares`
    is_new: bool = False  # whether any process has parameters to compare


def agreed_alone(word: Word) -> Agreed:
    """Return the facts of a run in one process."""
    layouts = tuple(tuple(layout for _, layout, *_ in tie) for tie in word.ties)
    weights = None if word.weighed.weights is None else (word.weighed.weights,)
    merged, marked, length = word.merged is not False, word.marked, word.length
    return Agreed((word.parts,), merged, weights, True, marked, layouts, length, word.rows_unclear)


def agree(
    words: Sequence[Word],
    limit: int,
    replicas: int,
    replica: int,
    names: Sequence[str],
) -> Agreed:
    """Derive the facts of a run from the words of all processes, for one of the replicas.

    Args:
        words: the words, replica by replica and by rank.
        limit: the plan's number of microbatches.
        replicas, replica: the number of replicas, and the number of this replica.
        names: the names of the processes in errors.

    Raises:
        RanksError: the words do not fit together. Every process raises it, because all processes
            have the same words.
    """
    said = [*zip(names, words, strict=True)]
    by_replica = of_replicas(said, replicas)
    faults = _differences(said, "the plan", attrgetter("plan"))
    for name in words[0].options:
        faults += _differences(said, name, lambda word, name=name: word.options.get(name))
    faults += [f"{name} {lack}" for name, word in said for lack in word.lacks]
    faults += _differences(said, "the length of the sequences", attrgetter("length"), some=True)
    for number, group in enumerate(by_replica):
        of = f" of replica {number}" if replicas > 1 else ""
        faults += _differences(group, f"the rows of the batch{of}", attrgetter("rows"), some=True)
        faults += _differences(
            group,
            f"ready-made microbatches{of}",
            lambda word: word.ready and len(word.ready),
            some=True,
        )
        faults += _other_batches(group, of)
    faults += _other_functions([(name, word.functions) for name, word in said])
    for rank, copies in enumerate(zip(*by_replica, strict=True)):
        faults += _differences(copies, f"trained leaves of rank {rank}", attrgetter("trained"))
        faults += _differences(copies, f"the parameters of rank {rank}", attrgetter("copies"))
    raise_all("the ranks do not run the same:", faults, RanksError)
    groups = of_replicas(words, replicas)
    parts = tuple([_parts(group, limit) for group in groups])
    merged = all(word.merged is not False for word in words)
    marked = any(word.marked for word in words)
    weights = weights_of_all([[word.weighed for word in group] for group in groups])
    weighed = weights is None or all(
        word.parts == rows
        for group, rows in zip(groups, parts, strict=True)
        for word in group
        if word.weighed.weights
    )
    # Per replica: tied leaves that are sharded over replicas have parts of different sizes.
    layouts = [_layouts(group, marked) for group in groups]
    length = next((word.length for word in words if word.length is not None), None)
    deciding = [
        next(filter(_has_ready_rows, sorted(group, key=_precedence)), group[0]) for group in groups
    ]
    unclear = any(word.rows_unclear for word in deciding)
    is_new = any(word.is_new for word in words)
    return Agreed(
        parts, merged, weights, weighed, marked, layouts[replica], length, unclear, is_new
    )


def of_replicas(values: Sequence[T], replicas: int) -> list[Sequence[T]]:
    """Return the values of all processes, by replica."""
    size = len(values) // replicas
    return [values[first : first + size] for first in range(0, len(values), size)]


class PreviousWords:
    """The words of the last run, and its facts. A process whose word has not changed sends None.

    A team has one. All its processes have the same words, because an exchange succeeds in all of
    them or ends the team.
    """

    def __init__(self) -> None:
        self._words: Sequence[Word] = ()
        self._agreed: Agreed | None = None

    def agree(
        self,
        exchange: Callable[[str, Any], list[Word | None]],
        number: int,
        word: Word,
        derive: Callable[[Sequence[Word]], Agreed],
    ) -> Agreed:
        """Exchange the words of all processes, and return the facts that ``derive`` computes.

        ``number`` is the number of this process among all.
        """
        known, agreed = self._words, self._agreed
        given = exchange(START, None if known and word == known[number] else word)
        if agreed is None or any(each is not None for each in given):
            words = [known[at] if each is None else each for at, each in enumerate(given)]
            agreed = derive(words)
            self._words, self._agreed = words, agreed
        return agreed


def weights_of_all(weighed: Sequence[Sequence[Weighed]]) -> tuple[tuple[float, ...], ...] | None:
    """Return the weights of the microbatches of each replica. Raises RanksError."""
    weights = [settled(group) for group in weighed]
    known = tuple([each for each in weights if each is not None])
    if known and len(known) < len(weights):
        raise RanksError(
            "the loss gives weights to the microbatches of some replicas and not of others; let "
            "the loss weigh all of them or none"
        )
    return known or None


def _parts(words: Sequence[Word], limit: int) -> tuple[int, ...]:
    """Return the rows of each microbatch of a replica. Raises RanksError."""
    rows = next((word.rows for word in words if word.rows is not None), None)
    ready = [word.ready for word in sorted(words, key=_precedence) if word.ready is not None]
    try:
        return parts_of(rows, next(filter(any, ready), ready[0] if ready else None), limit)
    except BatchError as error:
        raise RanksError(str(error)) from None


def _precedence(word: Word) -> tuple[bool, bool]:
    """Return a sort key: ready-made rows of the target count before rows of the inputs, as in one
    process."""
    return not word.of_target, word.merged is None


def _has_ready_rows(word: Word) -> bool:
    return word.ready is not None and any(word.ready)


def _differences(
    said: Sequence[tuple[str, Word]], name: str, field: Callable[[Word], Any], *, some: bool = False
) -> list[str]:
    """List the processes, by name, whose values differ from the first. With ``some``, None is no
    value."""
    values = [
        (process, value) for process, word in said if (value := field(word)) is not None or not some
    ]
    return [
        f"{name}: {process} has {value!r}, {values[0][0]} has {values[0][1]!r}"
        for process, value in values
        if value != values[0][1]
    ]


def _other_batches(said: Sequence[tuple[str, Word]], of: str) -> list[str]:
    """List the tensors of the batch that have other numbers than in an earlier process."""
    known: dict[str, tuple[str, str]] = {}
    faults: list[str] = []
    for process, word in said:
        for place, digest in word.batch.items():
            first, other = known.setdefault(place, (process, digest))
            if digest != other:
                faults.append(
                    f"the batch{of}: {place} has other numbers on {process} than on {first}; give "
                    "all ranks the same batch (let them shuffle with the same seed), or None for "
                    "the inputs or the target that a rank does not read"
                )
    return faults


def functions_of(plan: Plan, stages: Iterable[int]) -> dict[str, Sequence[str]]:
    """Return words about the functions that a process with these stages calls, by their places.

    Only the processes with a stage compare its words, because the others may have another function
    in its place. The loss belongs to the last stage.
    """
    stages = [*stages]
    labels = names_of(plan.stages)
    words: dict[str, Sequence[str]] = {
        f"the layers of {labels[stage]}": _of_stage(plan.stages[stage]) for stage in stages
    }
    return {**words, **(_of_loss(plan) if plan.num_stages - 1 in stages else {})}


def _loss_words(plan: Plan) -> dict[str, tuple[str, ...]]:
    functions = {"the loss": plan.loss, "weight=": plan.weight}
    return {
        name: summed_up(described_callable(each))
        for name, each in functions.items()
        if each is not None
    }


_of_loss: Remembered[Plan, dict[str, tuple[str, ...]]] = Remembered(_loss_words)
_of_stage: Remembered[Stage, tuple[str, ...]] = Remembered(
    lambda stage: summed_up(stage.described())
)


def _other_functions(said: Sequence[tuple[str, Mapping[str, Sequence[str]]]]) -> list[str]:
    """List the functions that differ from an earlier process with the same stage."""
    known: dict[str, tuple[str, Sequence[str]]] = {}
    faults: list[str] = []
    for process, functions in said:
        for place, words in functions.items():
            first, others = known.setdefault(place, (process, words))
            if words[0] == others[0]:  # the digests
                continue
            own = ", ".join([each for each in words[1:] if each not in others])
            other = ", ".join([each for each in others[1:] if each not in words])
            faults.append(
                f"{place}: {process} has {own or 'no such layer'}, {first} has "
                f"{other or 'no such layer'}"
                if own or other
                else f"{place}: {process} has other layers than {first}, or in another order"
            )
    return faults


def _layouts(words: Sequence[Word], marked: bool) -> tuple[tuple[Any, ...], ...]:
    """For each tie, the layout of each member. Raises RanksError where members differ."""
    out: list[tuple[Any, ...]] = []
    faults: list[str] = []
    for number, ties in enumerate(zip(*(word.ties for word in words), strict=True)):
        members = {
            place: (layout, some if marked else none)
            for tie in ties
            for place, layout, some, none in tie
        }
        layouts = tuple(members[place][0] for place in sorted(members))
        if len({layout.size for layout in layouts}) > 1:
            faults.append(
                f"the leaves of tie {number} differ in shape: {[layout.size for layout in layouts]}"
            )
        if len({trained for _, trained in members.values()}) > 1:
            faults.append(f"some leaves of tie {number} are trainable and some are not")
        out.append(layouts)
    raise_all("the plan's ties do not fit params:", faults, RanksError)
    return tuple(out)


def alike(plan: Plan, rank_of: Sequence[int]) -> dict[str, str]:
    """Return the facts that must be the same in every process, by name."""
    try:
        own = version("torch-funcpipe")
    except PackageNotFoundError:  # imported from a checkout, without installation
        own = "unknown"
    return {
        "the version of funcpipe": own,
        "the version of torch": str(torch.__version__),
        "the plan's schedule": f"{plan.schedule!r}",
        "the plan's stages": stages_words(stage.name for stage in plan.stages),
        "the plan's options": _options(plan),
        "the plan": plan.fingerprint,
        "the ranks of the lanes": str([*rank_of]),
    }


def _options(plan: Plan) -> str:
    """Return the options of a plan in words."""
    rules = f"outputs={plan.outputs}, merge={plan.merge!r}, train={plan.train}"
    slots = f"spare_slots={plan.spare_slots}, slices={plan.slices}, carry={plan.carry}"
    loss = "no loss" if plan.loss is None else "a loss"
    return f"{rules}, {slots}, {named(len(plan.ties), 'tie')}, {loss}"


def refuse_others(said: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Raise RanksError if processes refuse the plan, or differ from the first process."""
    refused = [
        f"{name} refuses: {each['refused']}"
        for name, each in zip(names, said, strict=True)
        if "refused" in each
    ]
    raise_all("not all ranks run the plan:", refused, RanksError)
    faults: list[str] = []
    for process, each in zip(names, said, strict=True):
        other = {
            name: (each["same"].get(name), value)
            for name, value in said[0]["same"].items()
            if each["same"].get(name) != value
        }
        if len(other) > 1:
            other.pop("the plan", None)  # a hash, which the other differences explain
        faults += [
            f"{name}: {process} has {own}, {names[0]} has {first}"
            for name, (own, first) in other.items()
        ]
    faults += _other_functions(
        [(name, each.get("functions", {})) for name, each in zip(names, said, strict=True)]
    )
    raise_all("the ranks do not fit together:", faults, RanksError)


def other_places(known: Sequence[tuple[int, str, Any]], names: Sequence[str]) -> RanksError:
    """Make the error of processes that exchange values in different runs, or about different
    things."""
    pairs = zip(names, known, strict=True)
    where = "; ".join(f"{name} is at {what} (run {run})" for name, (run, what, _) in pairs)
    return RanksError(
        f"the ranks make different calls: {where}; all ranks must make the same funcpipe calls in "
        "the same order"
    )
