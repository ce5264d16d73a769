"""Join the timelines of several processes into one timeline with one clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, NamedTuple

from funcpipe._src.core.errors import PlanError
from funcpipe._src.data.result import Result, Span, Timeline
from funcpipe._src.data.schedule import Action, Kind

_ROUNDS = 5  # the number of exchanges to compare clocks. The shortest counts


class _Own(NamedTuple):
    """The part of one process in a timeline, in a form that can be sent."""

    machine: str  # the machine of the process. Processes of one machine have the same clock
    # For each exchange of all processes, its duration here and its middle, in seconds.
    rounds: tuple[tuple[float, float], ...]
    began: float  # the time of the first action
    # (device, start, end, letter, stage, microbatch, slice) of each action.
    spans: tuple[tuple[int, float, float, str, int, int, int | None], ...]


def joined_timeline(
    result: Result, machine: str, exchange: Callable[[str, Any], list[Any]]
) -> Timeline:
    """Return the timeline of all processes of a run, in seconds from the first start.

    All processes call this function. Processes of one machine share a clock. Clocks of different
    machines are aligned at the middle of the shortest of five exchanges. The error is at most half
    the duration of that exchange.

    Raises:
        PlanError: the run was not recorded.
    """
    timeline = result.timeline
    if timeline is None:
        raise PlanError(
            "the run was not recorded, so there is no timeline; call fp.run(..., record=True) on "
            "every rank"
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
