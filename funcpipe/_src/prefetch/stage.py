"""Batch stages, and the plan of an overlap, as data."""

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
    """A function that every batch goes through, and how it runs. A bare callable means
    ``BatchStage(callable)``.

    >>> noise = fp.batches.BatchStage(lambda x: x + torch.randn(3), seed=0)
    >>> one, two = (list(fp.batches.overlap([torch.zeros(3)] * 2, [noise])) for _ in range(2))
    >>> torch.equal(one[1], two[1]), torch.equal(one[0], one[1])  # the draws depend on the batch, not on threads
    (True, False)

    Attributes:
        fn: ``fn(batch) -> batch``, called once for each batch, in order. With ``lag``: ``fn(state,
            batch) -> batch``.
        name: in plans, errors, statistics and names of threads; "": the name of the function.
        lead: how many batches it may be ahead of the one that is handed out next, at most
            ``depth``; None: spread evenly.
        stream: where its work on devices with streams is queued. None: a stream of its own; a name:
            one stream for all stages with this name; "caller": the stream that is current where
            `overlap` is called; or a torch stream.
        thread: whether it has a thread; None: where no device has streams (there one thread queues
            everything). Choose True for work that makes the host wait: decoding, copies of memory
            that is not page-locked, ``Awaitable.wait()``.
        grad: whether autograd records; None: as where `overlap` was called.
        lag: read the state of the fold after ``max(0, index - lag)`` batches, whatever the threads
            do.
        indexed: call it with ``index=``, too, the number of the batch.
        seed: its draws from torch's global generators depend only on this seed, its name, the
            number of the batch and the number of the draw. Give each epoch another seed:
            ``fold_in(seed, epoch)``. It does not reach Python's ``random`` and numpy: use
            ``indexed``.
        autocast: run it under autocast to this type; None: as where `overlap` was called.
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
    """The last stage, which carries a state from batch to batch: a step of training. Runs where the
    loop runs.

    >>> run = fp.batches.overlap([1, 2, 3], [fp.batches.Fold(lambda total, x: (total + x, total + x), 0)])
    >>> list(run), run.state
    ([1, 3, 6], 6)

    Attributes:
        fn: ``fn(state, batch) -> (state, result)``; the loop gets the results.
        init: the state before the first batch, any tree.
        name: "": the name of the function.
        indexed: call it with ``index=``, too, the number of the batch.
        earlier: states before ``init``, the newest last, for stages with ``lag`` where training
            resumes.
        autocast: run it under autocast to this type; None: as where the loop runs.
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
    """The stages with different names, and the fold.

    Raises:
        PlanError: one cannot be called, a fold is not the last, a field has a wrong value, a lag
            has no fold.
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
    """The faults of one stage. ``fold``: the last stage, if it is a fold; ``bare``: only the
    function was given."""
    fn: Any = stage.fn
    if not callable(fn):
        problem = " is a function, a BatchStage or a Fold" if bare else ": fn= is a function"
        yield f"{problem}; got a {type(fn).__name__}"
    if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn):
        verb = "yields" if inspect.isgeneratorfunction(fn) else "is async"
        yield f": {_name_of(fn)!r} {verb}, so a call of it computes nothing; return the batch"
    if isinstance(fn, Stage):
        instead = "lambda batch: fp.run(plan, params, batch)"
        yield f" is a stage of a plan; here is a function of a batch: {instead}"
    if isinstance(stage, Fold) and stage is not fold:
        yield " is a Fold, and only the last can be one: its results would be batches of the next"
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
            f" would run {ahead} and reads a state only {stage.lag} old (lag=); lead is at most lag"
        )


def _wrong_fields(stage: BatchStage | Fold) -> Iterable[tuple[str, str]]:
    """The fields that have a wrong value, and what they are."""
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
    """A row of the plan: the source, a stage or the fold.

    Attributes:
        name: of the stage.
        lead: at tick t it works on batch ``t + lead`` (in a thread: on batches up to that one).
        lane: which of `TickPlan.lanes` does the work.
        thread: whether it has a thread.
        lag: of the stage.
    """

    name: str
    lead: int
    lane: str
    thread: bool
    lag: int | None = None


@dataclass(frozen=True)
class TickPlan:
    """The work of tick t, while batch t is made ready to be handed out. Compares, hashes, pickles
    and prints.

    Attributes:
        rows: the source, the stages, the fold, as a batch goes through them.
    """

    rows: tuple[TickRow, ...]

    @property
    def order(self) -> tuple[int, ...]:
        """Numbers of the rows: threads, which go on by themselves, then the others as the loop runs
        them in a tick.

        Older batches come before newer ones and the step comes last, so that the work ahead of the
        step is queued first.
        """
        turns = [-1 if row.thread else row.lead or sys.maxsize for row in self.rows]
        return tuple(sorted(range(len(turns)), key=turns.__getitem__))

    @property
    def lanes(self) -> tuple[str, ...]:
        """Names of what works side by side: threads, or streams of devices."""
        return tuple(dict.fromkeys(row.lane for row in self.rows))

    @property
    def depth(self) -> int:
        """How many batches may be under way besides the one that is handed out next."""
        return max(row.lead for row in self.rows)

    def __str__(self) -> str:
        wide = max(len(row.name) for row in self.rows)
        lines = ["at tick t, batch t is made ready:"]
        for row in (self.rows[number] for number in self.order):
            batch = (
                ("up to " if row.thread else "") + "batch t" + (f"+{row.lead}" if row.lead else "")
            )
            lag = "" if row.lag is None else f", reads the state of {row.lag} before"
            lines.append(f"  {row.name:<{wide}}  {batch:<16}  on {row.lane}{lag}")
        return "\n".join(lines)


def plan_of(
    stages: Sequence[BatchStage], fold: Fold | None, depth: int, *, thread: bool, streamed: bool
) -> TickPlan:
    """The plan of an overlap. ``thread``: whether the source has one; ``streamed``: whether devices
    have streams.

    A lead that is not asked for is the depth in even steps down to the fold, or to the loop itself;
    no less than a later stage asks for, and no more than an earlier one or the stage's own lag.

    Raises:
        PlanError: a lead is larger than the depth, or than the lead of the stage before.
    """
    rows: list[TickRow] = []
    limit = depth
    for number, stage in enumerate(stages):
        lead = stage.lead
        if lead is None:
            later = max((after.lead or 0 for after in stages[number + 1 :]), default=0)
            even = -(-depth * (len(stages) - number) // len(stages))
            lead = min(limit, max(later, even), depth if stage.lag is None else stage.lag)
        if lead > depth > 0:
            told = f"{stage.name!r} has lead={lead}, more than depth={depth}"
            raise PlanError(f"{told}; give overlap(depth={lead})")
        if lead > limit and depth > 0:
            raise PlanError(
                f"this plan of an overlap cannot run: {stage.name!r} (lead {lead}) would run on a "
                f"batch before {rows[-1].name!r} (lead {limit}) has made it; leads fall from "
                "stage to stage"
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
