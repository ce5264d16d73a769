"""`overlap`: a stream of batches through stages that work at the same time, each on another batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from funcpipe.batches.device import ToDevice, numbered
from funcpipe.batches.loop import Overlap
from funcpipe.batches.stage import BatchStage, StageLike, named
from funcpipe.batches.stats import Bar, Progress
from funcpipe.batches.ticks import ticks
from funcpipe.core.errors import FuncpipeError, PlanError
from funcpipe.runtime.context import not_carried, refuse_transforms
from funcpipe.runtime.stream import Place

ProgressReport: TypeAlias = bool | Callable[[Progress], None]


def overlap(
    source: Iterable[Any],
    stages: Sequence[StageLike],
    *,
    depth: int = 2,
    start_index: int = 0,
    thread: bool | None = None,
    devices: Sequence[Any] = (),
    snapshot: Callable[[], Any] | None = None,
    record: bool = False,
    ranges: bool = False,
    progress: ProgressReport = False,
) -> Overlap:
    """Batches through stages: while batch i is trained on, i+1 exchanges its inputs and i+2 is copied to the device.

    What comes out equals ``[last(...first(batch)) for batch in source]`` bit for bit and in order, whatever the depth
    and the threads, for functions that do not depend on each other and a source that does not write into a batch again.
    Each batch that is drawn comes out, or the error that it met is raised in its place, after the results of all
    batches before it: the exception itself, with ``.funcpipe`` (stage, name, batch) and a note.

    >>> list(fp.batches.overlap(range(4), [lambda x: x + 1, lambda x: 10 * x]))
    [10, 20, 30, 40]
    >>> total = fp.batches.overlap(range(4), [lambda x: x + 1, fp.batches.Fold(lambda state, x: (state + x, x), 0)])
    >>> list(total), total.state
    ([1, 2, 3, 4], 10)

    Args:
        source: any iterable of batches; None is a batch like others. Drawn once, from the first ``next`` on, never
            after its end and never by two threads.
        stages: functions of one batch, `BatchStage`, `to_device`, `awaited`; the last may be a `Fold`, which runs where
            the loop runs. Without a fold all of them run ahead of the loop's own work.
        depth: how many batches are under way besides the one that is handed out next; as many as there are stages
            before the step let all of them work at once. 0: the plain loop, nothing runs ahead; good to find a fault.
        start_index: the number of the first batch, where training goes on in the middle of an epoch.
        thread: have the source and the stages threads of their own, where they do not say; None: where no device with
            streams is named (`to_device`, ``devices``). There one thread queues everything, in the plan's order.
        devices: with streams, that stages work on besides those of `to_device`.
        snapshot: called before each draw, such as ``loader.state_dict``, and copied; see `Overlap.source_state`.
        record: keep when everything ran, for `Overlap.timeline`.
        ranges: what is done for a batch is a range of torch.profiler, such as ``decode 3``, and of NVTX on CUDA devices.
        progress: True: a line on stderr; or a function that is told a `Progress` after each batch.

    Returns:
        The iterator. Threads end with the last batch, with an error, with `Overlap.close` (or its ``with`` block), or
        when nobody holds it any more (not its own stages either: an object that holds the overlap and whose method is a
        stage wants ``with``).

    Raises:
        PlanError: stages or leads do not fit; every fault is named.
        FuncpipeError: called under torch.func, or threads are wanted and a mode is on that they cannot take over.
    """
    refuse_transforms("overlap")
    _check(source, depth, start_index)
    if not (thread is None or isinstance(thread, bool)):
        raise PlanError(f"thread is True, False or None; got {thread!r}")
    if not (snapshot is None or callable(snapshot)):
        raise PlanError(f"snapshot is a function; got {snapshot!r}")
    if not (isinstance(progress, bool) or callable(progress)):
        raise PlanError(f"progress is a function, True or False; got {progress!r}")
    listed, fold = named(stages)
    streamed = _devices(listed, devices)
    default = not streamed if thread is None else thread
    asked = [default, *(default if stage.thread is None else stage.thread for stage in listed)]
    threads = [depth > 0 and threaded for threaded in asked]
    plan = ticks(listed, fold, depth=depth, threads=threads, streamed=bool(streamed))
    if any(threads) and (modes := not_carried()):
        raise FuncpipeError(
            f"threads cannot take over what is on here: {', '.join(modes)}; overlap(..., thread=False) runs all "
            "stages in this thread"
        )
    return Overlap(
        source,
        listed,
        fold,
        plan,
        streamed if depth else (),
        start=start_index,
        snapshot=snapshot,
        record=record,
        ranges=ranges,
        report=progress if callable(progress) else Bar() if progress else None,
    )


def _check(source: Any, depth: Any, start: Any) -> None:
    if not isinstance(source, Iterable):
        raise PlanError(f"the source of an overlap is an iterable of batches; got a {type(source).__name__}")
    for word, number in (("depth", depth), ("start_index", start)):
        if type(number) is not int or number < 0:
            raise PlanError(f"{word} is a whole number from 0; got {number!r}")


def _devices(stages: Sequence[BatchStage], devices: Sequence[Any]) -> tuple[torch.device, ...]:
    """The devices with streams that stages work on."""
    try:
        asked = [devices] if isinstance(devices, (str, torch.device)) else devices
        used = [numbered(torch.device(device)) for device in asked]
    except (RuntimeError, TypeError, AssertionError) as error:
        raise PlanError(f"devices is a sequence of torch devices; got {devices!r}: {error}") from error
    for stage in stages:
        if isinstance(stage.fn, ToDevice):
            used += stage.fn.all
        if stage.stream is not None and not isinstance(stage.stream, str):
            used.append(stage.stream.device)
    return tuple(device for device in dict.fromkeys(map(numbered, used)) if Place.backend.asynchronous(device))
