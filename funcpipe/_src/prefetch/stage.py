"""Batch stages, the fold, and the plan of an overlap, as data. `rows` runs them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from typing import Any, NamedTuple, TypeAlias

import torch

from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.core.shown import amount_of, function_words, guarded, line
from funcpipe._src.core.tree import Tree
from funcpipe._src.data.stage import Stage


@dataclass(frozen=True)
class BatchStage:
    """A function of a batch within an `overlap`, and how it runs.

    In `overlap`, a function means ``BatchStage(function)``.

    >>> noise = fp.batches.BatchStage(lambda x: x + torch.randn(3), seed=0)
    >>> one, two = (list(fp.batches.overlap([torch.zeros(3)] * 2, [noise])) for _ in range(2))
    >>> torch.equal(one[1], two[1]), torch.equal(one[0], one[1])  # the draws depend on the batch, not on threads
    (True, False)

    Attributes:
        fn: ``fn(batch) -> batch``, called once for each batch, in order. With ``lag``: ``fn(state,
            batch) -> batch``.
        name: the name in plans, errors, statistics and thread names. "", the default: the name of
            the function.
        lead: the number of batches that the stage may be ahead of the next batch for the loop, at
            most ``depth``. None, the default: leads decrease evenly from stage to stage.
        stream: the stream of its work on devices with streams. None, the default: a stream of its
            own. A name: one stream for all stages with this name. "caller": the current stream at
            the call of `overlap`. Or a torch stream.
        thread: whether the stage has its own thread. None, the default: True without devices with
            streams, else one thread queues all work. Choose True for work that makes the host wait,
            such as decoding, copies of pageable memory, or ``Awaitable.wait()``.
        grad: whether autograd records the work. None, the default: the mode at the call of
            `overlap`.
        lag: the number of updates by which the stage reads old state. Batch ``index`` reads the
            fold's state after ``max(0, index - lag)`` batches, independent of threads. None, the
            default: the stage reads no state.
        indexed: whether to pass the number of the batch as ``index=``. False by default.
        seed: an int. Draws from torch's global generators then depend only on the seed, the name,
            the number of the batch and the number of the draw. Give each epoch its own seed:
            ``fold_in(seed, epoch)``. Python's ``random`` and numpy are not covered; use ``indexed``
            for these. None, the default: draws use the global generators.
        autocast: run the function under autocast to this dtype. None, the default: the mode at the
            call of `overlap`.
    """

    fn: Callable[..., Any]
    name: str = ""
    lead: int | None = None
    stream: Any = None
    thread: bool | None = None
    grad: bool | None = None
    lag: int | None = None
    indexed: bool = False
    seed: int | None = None
    autocast: torch.dtype | None = None


@dataclass(frozen=True)
class Fold:
    """The last stage of an `overlap`, which updates a state with each batch: a training step.

    The fold runs in the thread of your loop.

    >>> run = fp.batches.overlap([1, 2, 3], [fp.batches.Fold(lambda total, x: (total + x, total + x), 0)])
    >>> list(run), run.state
    ([1, 3, 6], 6)

    Attributes:
        fn: ``fn(state, batch) -> (state, result)``. The loop receives the results.
        init: the state before the first batch, any tree.
        name: the name in plans, errors and statistics. "", the default: the name of the function.
        indexed: whether to pass the number of the batch as ``index=``. False by default.
        earlier: states before ``init``, the newest last, for stages with ``lag`` when training
            resumes. () by default.
        autocast: run the function under autocast to this dtype. None, the default: the mode of the
            loop.
    """

    fn: Callable[..., tuple[Tree, Any]]
    init: Tree
    name: str = ""
    indexed: bool = False
    earlier: tuple[Tree, ...] = ()
    autocast: torch.dtype | None = None

    @guarded
    def __repr__(self) -> str:
        state = amount_of(self.init) or type(self.init).__name__
        return line("Fold", [("", self.name or function_words(self.fn)), ("state", state)])


StageLike: TypeAlias = BatchStage | Fold | Callable[..., Any]


def checked_stages(stages: Iterable[StageLike]) -> tuple[tuple[BatchStage, ...], Fold | None]:
    """Return the batch stages, with unique names, and the fold.

    Raises:
        PlanError: a function cannot be called, a fold is not the last stage, a field has a wrong
            value, or a stage has a lag without a fold.
    """
    if not isinstance(stages, Sequence):
        raise PlanError(
            f"stages are a sequence of functions, BatchStage or Fold; got a {type(stages).__name__}"
        )
    wrapped = [each if isinstance(each, BatchStage | Fold) else BatchStage(each) for each in stages]
    fold = wrapped[-1] if wrapped and isinstance(wrapped[-1], Fold) else None
    faults: list[str] = []
    unique: list[Any] = []
    names = {"source"}
    for position, stage in enumerate(wrapped):
        found = _faults(stage, fold, bare=stage is not stages[position])
        faults += [f"stage {position}{fault}" for fault in found]
        name = str(stage.name or _name_of(stage.fn))
        numbered = (f"{name}_{number}" for number in count(2))
        name = next(new for new in chain([name], numbered) if new not in names)
        names.add(name)
        unique.append(replace(stage, name=name))
    raise_all("these stages cannot be overlapped:", faults)
    return (tuple(unique[:-1]), unique[-1]) if fold else (tuple(unique), None)


def _faults(stage: BatchStage | Fold, fold: Fold | None, *, bare: bool) -> Iterable[str]:
    """Yield the faults of one stage. ``bare``: the user gave only the function."""
    fn: Any = stage.fn
    if not callable(fn):
        problem = " is a function, a BatchStage or a Fold" if bare else ": fn= is a function"
        yield f"{problem}; got a {type(fn).__name__}"
    if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn):
        verb = "yields" if inspect.isgeneratorfunction(fn) else "is async"
        yield f": {_name_of(fn)!r} {verb}, so a call computes nothing; use a function that returns"
    if isinstance(fn, Stage):
        instead = "lambda batch: fp.run(plan, params, batch)"
        yield f" is a stage of a plan; give a function of a batch: {instead}"
    if isinstance(stage, Fold) and stage is not fold:
        yield " is a Fold, and only the last stage can be a Fold"
    wrong = list(_wrong_fields(stage))
    for word, kind in wrong:
        value = getattr(stage, word)
        shown = repr(value) if isinstance(value, str | int | float) else f"a {type(value).__name__}"
        yield f": {word}= is {kind}; got {shown}"
    if wrong or isinstance(stage, Fold) or stage.lag is None:
        return
    if fold is None:
        end = "end the stages with fp.batches.Fold(step, state)"
        yield f" has lag={stage.lag}, but no Fold makes states: {end}"
    if (stage.lead or 0) > stage.lag:
        ahead = f"{stage.lead} batches ahead (lead=)"
        yield (
            f" would run {ahead}, but reads the state of {stage.lag} batches before (lag=); lead "
            "is at most lag"
        )


def _wrong_fields(stage: BatchStage | Fold) -> Iterable[tuple[str, str]]:
    """Yield each field with a wrong value, and a description of right values."""
    if not isinstance(stage.name, str):
        yield "name", "a string"
    if not isinstance(stage.autocast, torch.dtype | None):
        yield "autocast", "a torch.dtype, or None"
    if isinstance(stage, Fold):
        if not isinstance(stage.earlier, tuple):
            yield "earlier", "a tuple of states, the newest last"
        return
    for word in ("lead", "lag", "seed"):
        number = getattr(stage, word)
        if number is not None and (type(number) is not int or number < 0):
            yield word, "a whole number from 0, or None"
    for word in ("thread", "grad"):
        if not isinstance(getattr(stage, word), bool | None):
            yield word, "True, False or None"
    if not isinstance(stage.stream, str | None) and not hasattr(stage.stream, "wait_event"):
        yield "stream", 'a name, "caller", a torch.Stream or None'


def _name_of(fn: Any) -> str:
    inner = getattr(fn, "func", None)  # of a partial
    name = getattr(fn, "__name__", None) or getattr(inner, "__name__", type(fn).__name__)
    return "stage" if name == "<lambda>" else str(name)


class TickRow(NamedTuple):
    """A row of a `TickPlan`: the source, a stage or the fold."""

    name: str  # the name of the stage, or "source"
    # At tick t the row works on batch ``t + lead``; in a thread, on batches up to this one.
    lead: int
    lane: str  # the lane of `TickPlan.lanes` that does the work
    thread: bool  # whether the row has its own thread
    lag: int | None = None  # the lag of the stage, or None


@dataclass(frozen=True)
class TickPlan:
    """The plan of an overlap: the work of tick t, in which batch t becomes ready.

    ``overlap(...).plan`` is a `TickPlan`. You can print, compare, hash and pickle it.

    Attributes:
        rows: a `TickRow` for the source, each stage and the fold, in the order of a batch's path.
    """

    rows: tuple[TickRow, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """The numbers of the rows in a tick: first rows with threads, then the others as the loop
        runs them.

        Older batches come before newer batches. The step comes last, so that work ahead of the step
        is queued first.
        """
        turns = [-1 if row.thread else row.lead or sys.maxsize for row in self.rows]
        return tuple(sorted(range(len(turns)), key=turns.__getitem__))

    @property
    def lanes(self) -> tuple[str, ...]:
        """The names of the threads, or streams of devices, that work at the same time."""
        return tuple(dict.fromkeys(row.lane for row in self.rows))

    @property
    def depth(self) -> int:
        """The number of batches that may be in progress besides the next batch for the loop."""
        return max(row.lead for row in self.rows)

    def __str__(self) -> str:
        wide = max(len(row.name) for row in self.rows)
        lines = ["at tick t, batch t is made ready:"]
        for row in (self.rows[number] for number in self.order):
            ahead = f"+{row.lead}" if row.lead else ""
            batch = f"{'up to ' if row.thread else ''}batch t{ahead}"
            lag = "" if row.lag is None else f", reads the state of {row.lag} before"
            lines.append(f"  {row.name:<{wide}}  {batch:<16}  on {row.lane}{lag}")
        return "\n".join(lines)


def plan_of(
    stages: Sequence[BatchStage], fold: Fold | None, depth: int, *, thread: bool, streamed: bool
) -> TickPlan:
    """Make the plan of an overlap.

    A lead of None becomes a lead that decreases evenly from ``depth`` at the first stage to 0 at
    the fold or the loop. It is at least the largest lead of a later stage, and at most the lead of
    the stage before and the stage's own lag. ``thread``: whether the source has a thread.

    Raises PlanError if a lead is larger than the depth, or than the lead of the stage before.
    """
    rows: list[TickRow] = []
    limit = depth
    for number, stage in enumerate(stages):
        lead = stage.lead
        if lead is None:
            later = max((after.lead or 0 for after in stages[number + 1 :]), default=0)
            # Rounded up, so that every stage runs ahead of the loop by at least one batch.
            even = -(-depth * (len(stages) - number) // len(stages))
            lead = min(limit, max(later, even), depth if stage.lag is None else stage.lag)
        if lead > depth > 0:
            problem = f"{stage.name!r} has lead={lead}, more than depth={depth}"
            raise PlanError(f"{problem}; give overlap(depth={lead})")
        if lead > limit and depth > 0:
            raise PlanError(
                f"this plan of an overlap cannot run: {stage.name!r} (lead {lead}) would run on a "
                f"batch before {rows[-1].name!r} (lead {limit}) has made it; no lead may be larger "
                "than the lead of the stage before"
            )
        limit = lead
        lane = stage.name if stage.thread else "loop"
        if streamed and stage.stream != "caller":
            lane = f"stream {stage.stream}" if isinstance(stage.stream, str) else stage.name
        rows.append(TickRow(stage.name, min(lead, depth), lane, bool(stage.thread), stage.lag))
    lead = rows[0].lead if rows else depth
    first = TickRow("source", lead, "source" if thread else "loop", thread)
    last = [TickRow(fold.name, 0, "loop", thread=False)] if fold else []
    return TickPlan((first, *rows, *last))
