"""Find actions of one device that overlap in a timeline, and the time that the device works."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import TYPE_CHECKING

from funcpipe._src.data.kinds import MOVES
from funcpipe._src.data.schedule import Action

if TYPE_CHECKING:
    from funcpipe._src.data.result import Span


def time_worked(spans: Iterable[Span], num_devices: int) -> tuple[float, ...]:
    """Return the time that each device computes. Overlapping actions count once."""
    worked, until = [0.0] * num_devices, [0.0] * num_devices
    for device, start, end, action in sorted(spans, key=itemgetter(1)):
        # Only the part after `until` counts, so that overlapping actions are not counted twice.
        if action[0] not in MOVES and end > until[device]:
            worked[device] += end - max(start, until[device])
            until[device] = end
    return tuple(worked)


def pairs_in(spans: Iterable[Span]) -> dict[Action, int]:
    """Return the actions that overlap with another action of their device.

    The value is 0 for the first action of a pair and 1 for the second. Actions on links (O, L, G,
    U) do not count.
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
    """Return the spans without overlapping ones.

    Overlapping spans remain if no action of their kind and stage ran alone.
    """
    every = tuple(spans)
    joined = pairs_in(every)
    alone = {span.action[:2] for span in every if span.action not in joined}
    return tuple(
        span for span in every if span.action not in joined or span.action[:2] not in alone
    )
