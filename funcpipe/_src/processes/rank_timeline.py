"""The timelines of several processes as one, by one clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

from funcpipe._src.core.errors import PlanError
from funcpipe._src.data.result import Result, Span, Timeline
from funcpipe._src.data.schedule import Action, Kind

_ROUNDS = 5


class _Own(NamedTuple):
    """What a process has of a timeline.

    Attributes:
        machine: where it runs; processes of one machine have one clock.
        rounds: for each of some exchanges in which all took part, how long it took here and the
            middle of it.
        began: when its first action began.
        spans: (device, start, end, letter, stage, microbatch, slice).
    """

    machine: str
    rounds: tuple[tuple[float, float], ...]
    began: float
    spans: tuple[tuple[int, float, float, str, int, int, int | None], ...]


def joined_timeline(
    result: Result, machine: str, exchange: Callable[[str, Any], list[Any]]
) -> Timeline:
    """The timeline of all processes of a run, in seconds from the first start; all of them call it.

    Processes of one machine share a clock. Those of others are brought together by exchanges, in
    which all take part at once: the middle of the shortest of five, which is right to half of its
    length.

    Raises:
        PlanError: the run was not recorded.
    """
    timeline = result.timeline
    if timeline is None:
        raise PlanError(
            "the run was not recorded, so there is no timeline; fp.run(..., record=True) on every "
            "rank"
        )
    moments: list[tuple[float, float]] = []
    for _ in range(_ROUNDS):
        start = perf_counter()
        exchange("the clocks", None)
        end = perf_counter()
        moments.append((end - start, (start + end) / 2))
    spans = tuple(
        [(device, start, end, *_plain(action)) for device, start, end, action in timeline.spans]
    )
    own = _Own(machine, tuple(moments), result.stats.began, spans)
    everyone: Sequence[_Own] = exchange("the timelines", own)
    first = everyone[0]
    best = min(range(_ROUNDS), key=lambda number: max(each.rounds[number][0] for each in everyone))
    out: list[Span] = []
    for each in everyone:
        ahead = (
            0.0 if each.machine == first.machine else each.rounds[best][1] - first.rounds[best][1]
        )
        shift = each.began - ahead
        out += [
            Span(device, start + shift, end + shift, Action(Kind(letter), *place))
            for device, start, end, letter, *place in each.spans
        ]
    zero = min((span.start for span in out), default=0.0)
    moved = sorted(
        (span._replace(start=span.start - zero, end=span.end - zero) for span in out), key=_order
    )
    return replace(timeline, spans=tuple(moved))


def _plain(action: Action) -> tuple[str, int, int, int | None]:
    return action.kind.value, *action[1:]


def _order(span: Span) -> tuple[float, int]:
    return span.start, span.device
