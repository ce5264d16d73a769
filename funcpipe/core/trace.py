"""A timeline as a trace for Perfetto and chrome://tracing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from funcpipe.core.kinds import COUNTED, KINDS, LINKS, MOVES, ONCE, Resource

if TYPE_CHECKING:
    from funcpipe.core.result import Timeline


_RANKS = 1 + len(LINKS)
"""Rows that a device may have: its own, and one for each of its links."""


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The trace as data; see `Timeline.chrome_trace`."""
    scale = 1e6 if timeline.unit == "s" else 1e3
    devices = range(timeline.num_devices)
    events = [_event("M", name="process_name", args={"name": timeline.name or "funcpipe"})]
    for device in devices:
        name = timeline.lanes[device] if device < len(timeline.lanes) else f"device {device}"
        events += _thread(device, name, _RANKS * device)
    moved = {(span.device, KINDS[span.action.kind].resource) for span in timeline.spans if span.action.kind in MOVES}
    links: dict[tuple[int, Resource], int] = {}
    for device in devices:
        for place, link in enumerate(LINKS):  # threads of their own, since the device works meanwhile
            if (device, link) in moved:
                links[device, link] = timeline.num_devices + len(LINKS) * device + place
                name = f"device {device} {link.value}"
                events += _thread(links[device, link], name, _RANKS * device + 1 + place)
    for device, start, end, action in timeline.spans:
        kind, stage, microbatch, number = action
        args: dict[str, Any] = {"stage": stage, "kind": kind.name}
        if kind in COUNTED:
            args["time"] = microbatch
        elif kind not in ONCE:
            args["microbatch"] = microbatch
            args |= {} if number is None else {"slice": number}
        times = {"ts": start * scale, "dur": (end - start) * scale}
        thread = links.get((device, KINDS[kind].resource), device)
        events.append(_event("X", tid=thread, name=str(action), cat=kind.value, **times, args=args))
    for device, steps in enumerate(timeline.memory):
        # Of several at one time a counter shows the last.
        for (time, amount), following in zip(steps, [*steps[1:], None], strict=True):
            if following is None or following[0] != time:
                events.append(_event("C", name=f"memory of device {device}", ts=time * scale, args={"held": amount}))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _thread(tid: int, name: str, place: int) -> list[dict[str, Any]]:
    """The name of a row, and its place among the rows."""
    return [
        _event("M", tid=tid, name="thread_name", args={"name": name}),
        _event("M", tid=tid, name="thread_sort_index", args={"sort_index": place}),
    ]


def _event(phase: str, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": 0, **fields}
