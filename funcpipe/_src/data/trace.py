"""Convert a timeline to a trace for Perfetto and chrome://tracing, with arrows between actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from funcpipe._src.core.shown import some
from funcpipe._src.data.kinds import COUNTED, KINDS, LINKS, MOVES, ONCE, Kind
from funcpipe._src.data.program import CALLER, Call, Role
from funcpipe._src.data.schedule import Action

if TYPE_CHECKING:
    from funcpipe._src.data.lowered import Lowered
    from funcpipe._src.data.result import Timeline

_RANKS = 1 + len(LINKS)  # the most rows of a device: its own, and one for each of its links

_WORDS = {Role.SKIP: "skip", Role.SKIP_GRAD: "gradient of skip", Role.GRAD: "gradient"}


class Arrow(NamedTuple):
    """A value that one kind of action makes and another reads. Each microbatch has such an arrow."""

    value: str  # the label: "act", "gradient", "skip early"
    source: tuple[Kind, int]  # (kind, stage) of the action that makes the value
    target: tuple[Kind, int]  # (kind, stage) of the action that reads the value
    crosses: bool  # whether the two actions run on two devices, so that the value is copied or sent


def arrows_of(program: Lowered) -> tuple[Arrow, ...]:
    """Return the arrows of a program: values that cross between lanes, and all skips."""
    makers: dict[int, list[Call]] = {}
    for call in program.calls:
        for wire in call.writes:
            makers.setdefault(wire, []).append(call)
    found: dict[Arrow, None] = {}
    for reader in program.calls:
        for number, _ in reader.reads:
            role, _, name, _ = program.wires[number]
            for maker in makers.get(number, ()):
                crosses = CALLER != maker.lane != reader.lane
                if crosses or role in (Role.SKIP, Role.SKIP_GRAD):
                    value = f"{_WORDS.get(role, role.value)} {name}".rstrip()
                    found[
                        Arrow(
                            value, (maker.kind, maker.stage), (reader.kind, reader.stage), crosses
                        )
                    ] = None
    return tuple(found)


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Return the trace as data; see `Timeline.chrome_trace`."""
    scale = 1e6 if timeline.unit == "s" else 1e3
    devices = range(timeline.num_devices)
    events = [_event("M", name="process_name", args={"name": timeline.name or "funcpipe"})]
    names = {stage: name for stage, name in enumerate(timeline.stages) if name}
    held = {(span.device, span.action.stage) for span in timeline.spans}
    for device in devices:
        name = timeline.lanes[device] if device < len(timeline.lanes) else f"device {device}"
        stages = some(
            names[stage] for owner, stage in sorted(held) if owner == device and stage in names
        )
        events += _thread(device, f"{name}: {stages}" if stages else name, _RANKS * device)
    moved = {
        (span.device, KINDS[span.action.kind].resource)
        for span in timeline.spans
        if span.action.kind in MOVES
    }
    # Links have threads of their own, since the device works meanwhile.
    links = {
        (device, link): timeline.num_devices + len(LINKS) * device + place
        for device in devices
        for place, link in enumerate(LINKS)
        if (device, link) in moved
    }
    for (device, link), thread in links.items():
        place = _RANKS * device + 1 + LINKS.index(link)
        events += _thread(thread, f"device {device} {link.value}", place)
    rows: dict[Action, int] = {}
    for device, start, end, action in timeline.spans:
        kind, stage, microbatch, number = action
        args: dict[str, Any] = {"stage": stage, "kind": kind.name}
        args |= {"name": names[stage]} if stage in names else {}
        if kind in COUNTED:
            args["time"] = microbatch
        elif kind not in ONCE:
            args["microbatch"] = microbatch
            args |= {} if number is None else {"slice": number}
        times = {"ts": start * scale, "dur": (end - start) * scale}
        thread = rows[action] = links.get((device, KINDS[kind].resource), device)
        events.append(_event("X", tid=thread, name=str(action), cat=kind.value, **times, args=args))
    events += _arrows(timeline, rows, scale)
    for device, steps in enumerate(timeline.memory):
        # A counter shows the last of several values at one time, so only that one is written.
        for time, amount in dict(steps).items():
            name, args = f"memory of device {device}", {"held": amount}
            events.append(_event("C", name=name, ts=time * scale, args=args))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _arrows(
    timeline: Timeline, rows: Mapping[Action, int], scale: float
) -> Iterator[dict[str, Any]]:
    """Yield two flow events per arrow: from the end of the maker to the stage's first reader."""
    spans = {span.action: span for span in timeline.spans}
    # By the kind and stage that make a value: the kinds that read it in each other stage.
    readers: dict[tuple[Kind, int], dict[tuple[str, int, bool], list[Kind]]] = {}
    for value, source, (kind, stage), crosses in timeline.arrows:
        readers.setdefault(source, {}).setdefault((value, stage, crosses), []).append(kind)
    number = 0
    for made in timeline.spans:
        for (value, stage, crosses), kinds in readers.get(made.action[:2], {}).items():
            targets = [made.action._replace(kind=kind, stage=stage) for kind in kinds]
            found = [spans[target] for target in targets if target in spans]
            if not found:
                continue
            # R reads the values of its F again: no second arrow.
            first = min(found, key=lambda span: span.start)
            number += 1
            # A viewer attaches an arrow to the event that is open at the arrow's time. An event is
            # not open at its own end, so the arrow starts slightly earlier.
            times = (made.end - (made.end - made.start) / 1024) * scale, first.start * scale
            event = {"name": value, "cat": "copy" if crosses else "skip", "id": number}
            yield _event("s", tid=rows[made.action], ts=times[0], **event)
            yield _event("f", tid=rows[first.action], ts=times[1], bp="e", **event)


def _thread(tid: int, name: str, place: int) -> list[dict[str, Any]]:
    """Return the events that give a row its name and its place among the rows."""
    return [
        _event("M", tid=tid, name="thread_name", args={"name": name}),
        _event("M", tid=tid, name="thread_sort_index", args={"sort_index": place}),
    ]


def _event(phase: str, **fields: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": 0, **fields}
