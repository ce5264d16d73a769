"""Compute a `Cost` from a timeline: the times of actions, and the gaps between them."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING

from funcpipe._src.data.cost import Cost, PerStage, rows_of
from funcpipe._src.data.kinds import ADDS, COMPUTES, MOVES, Kind
from funcpipe._src.data.overlapping import pairs_in, without_pairs

if TYPE_CHECKING:
    from funcpipe._src.data.result import Span, Timeline
    from funcpipe._src.data.schedule import Action

_PASSES = 30  # the passes of `_factors`


def _handover(spans: Iterable[Span]) -> tuple[dict[tuple[Kind, int], float], float | None]:
    """Return the median times between the actions of a timeline.

    Skips actions that overlap with another action, and actions that waited for a link of their own
    device. Does not recognize a wait for a skip or for a slot. If no two spans overlap, one thread
    ran all devices: gaps are then counted between the actions of this thread.

    Returns:
        By kind and stage, the host time: the time between the previous action of the device and the
        action, if the action did not have to wait for a value. And the time of a hop: from the end
        of an action to the start of an action on another device that waited for it, without the
        host time. None: no action waited.
    """
    ordered = sorted(spans, key=lambda span: span.start)
    one_thread = all(first.end <= second.start for first, second in pairwise(ordered))
    spans_of, joined = {span.action: span for span in ordered}, pairs_in(ordered)
    moved: dict[tuple[int, int], list[float]] = defaultdict(list)
    for span in ordered:
        if span.action.kind in MOVES:
            insort(moved[span.device, span.action.stage], span.end)
    gaps: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    hops: list[tuple[tuple[Kind, int], float]] = []
    free: dict[int, float] = {}
    for device, start, end, action in ordered:
        thread = 0 if one_thread else device
        if action.kind in MOVES:
            if one_thread:
                free[thread] = end
            continue
        before, key = free.get(thread, 0.0), (action.kind, action.stage)
        ends = moved.get((device, action.stage), [])
        links = bisect_right(ends, start) - bisect_right(ends, before)
        needs = [need for other in action.needs() if (need := spans_of.get(other)) is not None]
        sent = max((need.end for need in needs if need.device != device), default=0.0)
        # If the last value arrived after the device was free, the device waited for the hop.
        # Otherwise the gap is host time.
        if action not in joined and not links:
            if sent and sent >= before:
                hops.append((key, start - sent))
            elif thread in free:
                gaps[key].append(max(0.0, start - before))
        free[thread] = max(before, end)
    host = {key: median(values) for key, values in gaps.items()}
    waited = [max(0.0, hop - host.get(key, 0.0)) for key, hop in hops]
    return host, median(waited) if waited else None


def cost_of(timeline: Timeline, *, handover: bool, microbatches: bool) -> Cost:
    """Compute the result of `Timeline.cost`."""
    host, hop = _handover(timeline.spans) if handover else ({}, None)
    times: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    spans = without_pairs(timeline.spans)
    lasted = {
        action: end - start + host.get((action.kind, action.stage), 0.0)
        for _, start, end, action in spans
    }
    factors = _factors(lasted) if microbatches else ()
    for action, time in lasted.items():
        scaled = factors and action.kind in COMPUTES
        times[action.kind, action.stage].append(
            time / factors[action.microbatch] if scaled else time
        )
    slices, shares = _slices(spans)
    stages = range(1 + max((stage for _, stage in times), default=-1))

    def mean(otherwise: Sequence[float], *kinds: Kind) -> tuple[float, ...]:
        out: list[float] = []
        for stage, other in zip(stages, otherwise, strict=True):
            keys = [(kind, stage) for kind in kinds]
            measured = [time for key in keys for time in times[key]]
            share = sum(shares[key] for key in keys) if len(slices) > 1 else 0.0
            average = sum(measured) / share if share else fmean(measured or [other])
            out.append(average)
        return tuple(out)

    no_time = [0.0] * len(stages)
    forward = mean(no_time, Kind.F)
    half = [time / 2 for time in mean(no_time, Kind.B)]
    first, second = mean(half, Kind.I), mean(half, Kind.W)
    return Cost(
        forward,
        first,
        second,
        backward=mean([a + b for a, b in zip(first, second, strict=True)], Kind.B),
        remat=mean(forward, Kind.R),
        offload=mean(no_time, Kind.O, Kind.L),
        reduce=mean(no_time, Kind.G),
        gather=mean(no_time, Kind.U),
        step=mean(no_time, Kind.S),
        comm=timeline.comm if hop is None else hop,
        slice_times=tuple(slices) if len(slices) > 1 and min(slices) > 0 else (),
        microbatches=factors,
        microbatch_sizes=(1.0,) * len(factors),  # a timeline has no sizes of residuals
    )


def middle(costs: Sequence[Cost]) -> Cost:
    """Return the cost with the median of each number, over costs that have the same stages."""
    rows = [rows_of(cost) for cost in costs]
    changed: dict[str, PerStage] = {
        name: tuple(map(median, zip(*(row[name] for row in rows), strict=True))) for name in rows[0]
    }
    hops = [cost.comm for cost in costs if isinstance(cost.comm, (int, float))]
    if len(hops) == len(costs):
        changed["comm"] = median(hops)
    return replace(costs[0], **changed)


def _factors(lasted: Mapping[Action, float]) -> tuple[float, ...]:
    """Return the time factor of each microbatch, so that the factor times a time of the (kind,
    stage, slice) is nearest to each action's time. The mean factor is 1.

    Some microbatches lack a kind: they ran B, others I and W, or they overlapped. So times and
    factors are estimated in turn. If no kind lacks a microbatch, the first pass is exact.
    """
    rows: dict[tuple[Kind, int, int | None], dict[int, float]] = defaultdict(dict)
    for (kind, stage, microbatch, number), time in lasted.items():
        if kind in COMPUTES:
            rows[kind, stage, number][microbatch] = time
    count = 1 + max((microbatch for row in rows.values() for microbatch in row), default=-1)
    factors = [1.0] * count
    for _ in range(_PASSES):
        own, expected = [0.0] * count, [0.0] * count
        for row in rows.values():
            base = sum(row.values()) / sum(factors[microbatch] for microbatch in row)
            for microbatch, time in row.items():
                own[microbatch] += time
                expected[microbatch] += base
        if not all(own):
            return ()  # a microbatch without time has no factor
        factors = [time / mean for time, mean in zip(own, expected, strict=True)]
    return tuple(factor / fmean(factors) for factor in factors)


def _slices(spans: Sequence[Span]) -> tuple[list[float], dict[tuple[Kind, int], float]]:
    """Return the time of each slice, and the microbatches that the slices of each (kind, stage)
    make."""
    slices = [0.0] * (1 + max((span.action.slice or 0 for span in spans), default=0))
    for _, start, end, action in spans:
        # Every slice runs these kinds. With R, the times of rematted slices would count twice.
        if action.slice is not None and action.kind in (Kind.F, *ADDS):
            slices[action.slice] += end - start
    whole = sum(slices)
    shares: dict[tuple[Kind, int], float] = defaultdict(float)
    for span in spans:
        if span.action.slice is not None and whole:
            shares[span.action.kind, span.action.stage] += slices[span.action.slice] / whole
    return slices, shares
