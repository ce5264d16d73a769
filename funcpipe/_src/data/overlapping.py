"""Actions of one device that overlap in time: which, and how long the device works."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import TYPE_CHECKING

from funcpipe._src.data.kinds import MOVES
from funcpipe._src.data.schedule import Action

if TYPE_CHECKING:
    from funcpipe._src.data.result import Span


def time_worked(spans: Iterable[Span], num_devices: int) -> tuple[float, ...]:
    """For how long each device computes; where two actions overlap it does so once."""
    worked, until = [0.0] * num_devices, [0.0] * num_devices
    for device, start, end, action in sorted(spans, key=itemgetter(1)):
        if action[0] not in MOVES and end > until[device]:
            worked[device] += end - max(start, until[device])
            until[device] = end
    return tuple(worked)


def pairs_in(spans: Iterable[Span]) -> dict[Action, int]:
    """The actions that overlap with another one of their device: 0 for the first of two, 1 for the
    second.

    Those of links (O, L, G, U) are none.
    """
    found: dict[Action, int] = {}
    last: dict[int, Span] = {}
    for span in sorted(spans, key=itemgetter(1)):
        device, start, end, action = span
        if action[0] in MOVES:
            continue
        before = last.get(device)
        if before is not None and before.end > start and end > start:
            found[action] = 1 - found.setdefault(before.action, 0)
        if before is None or end >= before.end:
            last[device] = span
    return found


def without_pairs(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The spans but for those of pairs; such stay of which nothing of their kind and stage stands
    alone."""
    every = tuple(spans)
    joined = pairs_in(every)
    alone = {span.action[:2] for span in every if span.action not in joined}
    return tuple(
        span for span in every if span.action not in joined or span.action[:2] not in alone
    )
