"""Batch stages as data: functions that every batch goes through, and the fold that may end them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from funcpipe.core.errors import PlanError, raise_all
from funcpipe.core.shown import amount_of, function_words, guarded, line
from funcpipe.core.stage import Stage
from funcpipe.core.tree import Tree


@dataclass(frozen=True)
class BatchStage:
    """A function that every batch goes through, and how it runs. A bare callable means ``BatchStage(callable)``.

    >>> noise = fp.batches.BatchStage(lambda x: x + torch.randn(3), seed=0)
    >>> one, two = (list(fp.batches.overlap([torch.zeros(3)] * 2, [noise])) for _ in range(2))
    >>> torch.equal(one[1], two[1]), torch.equal(one[0], one[1])  # by batch, whatever the threads do
    (True, False)

    Attributes:
        fn: ``fn(batch) -> batch``, called once for each batch, in order. With ``lag``: ``fn(state, batch) -> batch``.
        name: in plans, errors, statistics and names of threads; "": that of the function.
        lead: how many batches it may be ahead of the one that is handed out next, at most ``depth``; None: spread
            evenly.
        stream: where its work on devices with streams is queued. None: a stream of its own; a name: one that all stages
            with this name share; "caller": the stream that is current where `overlap` is called; or a stream of
            torch's.
        thread: has it a thread of its own; None: where no device has streams (there one thread queues everything).
            True for what makes the host wait: decoding, copies of memory that is not page-locked, ``Awaitable.wait()``.
        grad: does autograd record; None: as where `overlap` was called.
        lag: read the state of the fold, as it is after ``max(0, index - lag)`` batches: exactly that one, however the
            threads are scheduled.
        indexed: call it with ``index=``, too, the number of the batch.
        seed: what it draws from torch's global generators depends on this seed, its name, the number of the batch and
            the number of the draw, and on nothing else; each epoch wants its own: ``fold_in(seed, epoch)``. (Python's
            ``random`` and numpy are not reached: use ``indexed``.)
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
    """The last stage, that carries a state from batch to batch: a step of training. Runs where the loop runs.

    >>> run = fp.batches.overlap([1, 2, 3], [fp.batches.Fold(lambda total, x: (total + x, total + x), 0)])
    >>> list(run), run.state
    ([1, 3, 6], 6)

    Attributes:
        fn: ``fn(state, batch) -> (state, result)``; results are what the loop gets.
        init: the state before the first batch, any tree.
        name: "": that of the function.
        indexed: call it with ``index=``, too, the number of the batch.
        earlier: states before ``init``, the newest last, for stages with ``lag`` where training goes on in the middle.
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


def named(stages: Iterable[StageLike]) -> tuple[tuple[BatchStage, ...], Fold | None]:
    """The stages with names that differ, and the fold.

    Raises:
        PlanError: one cannot be called, a fold is not the last, a number is out of range, a lag has no fold to read of.
    """
    if not isinstance(stages, Sequence):
        raise PlanError(f"stages are a sequence of functions, BatchStage or Fold; got a {type(stages).__name__}")
    last = stages[-1] if stages else None
    fold = last if isinstance(last, Fold) else None
    faults = [fault for position, entry in enumerate(stages) for fault in _faults(position, entry, fold)]
    raise_all("these stages cannot be overlapped:", faults)
    taken = {"source": 1}
    wrapped = [entry if isinstance(entry, BatchStage | Fold) else BatchStage(entry) for entry in stages]
    unique: list[Any] = [replace(stage, name=_unlike(stage.name or _called(stage.fn), taken)) for stage in wrapped]
    return (tuple(unique[:-1]), unique[-1]) if fold else (tuple(unique), None)


def _faults(position: int, entry: StageLike, fold: Fold | None) -> Iterable[str]:
    """The faults of one stage; ``fold`` is the last stage, if that is a fold."""
    fn: Any = entry.fn if isinstance(entry, BatchStage | Fold) else entry
    if not callable(fn):
        problem = " is a function, a BatchStage or a Fold" if fn is entry else ": fn= is a function"
        yield f"stage {position}{problem}; got a {type(fn).__name__}"
    if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn):
        problem = "yields" if inspect.isgeneratorfunction(fn) else "is async"
        yield f"stage {position}: {_called(fn)!r} {problem}, so a call of it computes nothing; return the batch"
    if isinstance(fn, Stage):
        yield (
            f"stage {position} is a stage of a plan; here is a function of a batch: "
            "lambda batch: fp.run(plan, params, batch)"
        )
    if not isinstance(entry, BatchStage | Fold):
        return
    if not isinstance(entry.name, str):
        yield f"stage {position}: name= is a string; got {entry.name!r}"
    if entry.autocast is not None and not isinstance(entry.autocast, torch.dtype):
        yield f"stage {position}: autocast= is a torch.dtype, or None; got {entry.autocast!r}"
    if isinstance(entry, Fold):
        if entry is not fold:
            yield f"stage {position} is a Fold, and only the last can be one: its results would be batches of the next"
        if not isinstance(entry.earlier, tuple):
            yield (
                f"stage {position}: earlier= is a tuple of states, the newest last; "
                f"got a {type(entry.earlier).__name__}"
            )
        return
    for word in ("lead", "lag", "seed"):
        number = getattr(entry, word)
        if number is not None and (type(number) is not int or number < 0):
            yield f"stage {position}: {word}= is a whole number from 0, or None; got {number!r}"
    for word in ("thread", "grad"):
        if getattr(entry, word) not in (None, True, False):
            yield f"stage {position}: {word}= is True, False or None; got {getattr(entry, word)!r}"
    if entry.stream is not None and not isinstance(entry.stream, str) and not hasattr(entry.stream, "wait_event"):
        yield f'stage {position}: stream= is a name, "caller", a torch.Stream or None; got {entry.stream!r}'
    if entry.lag is not None and fold is None:
        yield (
            f"stage {position} has lag={entry.lag}, but no Fold makes states: end the stages with "
            "fp.batches.Fold(step, state)"
        )
    if isinstance(entry.lag, int) and isinstance(entry.lead, int) and entry.lead > entry.lag:
        how_far = f"{entry.lead} batches ahead (lead=) and reads a state only {entry.lag} old (lag=)"
        yield f"stage {position} would run {how_far}; lead is at most lag"


def _called(fn: Callable[..., Any]) -> str:
    name = getattr(fn, "__name__", None) or getattr(getattr(fn, "func", None), "__name__", None) or type(fn).__name__
    return "stage" if name == "<lambda>" else str(name)


def _unlike(name: str, taken: dict[str, int]) -> str:
    """The name, with a number behind it if it is taken."""
    count = taken[name] = taken.get(name, 0) + 1
    return name if count == 1 else _unlike(f"{name}_{count}", taken)
