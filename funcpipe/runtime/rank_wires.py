"""Joins the lanes of a process to those of others, for one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from funcpipe.core.program import CALLER, Send
from funcpipe.runtime.alarms import Alarm
from funcpipe.runtime.device_stream import DeviceEnds
from funcpipe.runtime.edge import EdgeIn, EdgeOut, Outbox
from funcpipe.runtime.execute import Execution
from funcpipe.runtime.lane import Lane
from funcpipe.runtime.link import Link
from funcpipe.runtime.mail import Inbox
from funcpipe.runtime.part import PlanPart, lane_program
from funcpipe.runtime.stream import Place

Identities = Mapping[tuple[int, int], str]
"""By (replica, lane) what tells its device from all others that can be joined with it; "": none can."""


def identities_here(part: PlanPart, plan: Any) -> list[tuple[int, int, str]]:
    """Of the lanes of a process (replica, lane, identity of its device)."""
    devices, backend = part.devices(plan), Place.backend
    return [(part.replica, lane, backend.identity(devices[lane])) for lane in part.lanes]


def connect(link: Link, part: PlanPart, execution: Execution, identities: Identities) -> None:
    """Make what is missing of edges and of ways between replicas. Raises Alarm: the others did not."""
    ready, rank_of, size = execution.ready, part.rank_of, max(part.rank_of) + 1
    pools = {(pool.source, pool.lane) for pool in ready.plan.program.pools if pool.source != CALLER}
    first, device_of = part.replica * size, ready.plan.schedule.device_of
    ranks = {(source, to): (rank_of[source], rank_of[to]) for source, to in pools}
    edges = {edge: (first + a, first + b) for edge, (a, b) in ranks.items() if a != b and part.rank in (a, b)}
    copies = [replica * size + part.rank for replica in range(part.replicas)]
    ways: dict[Any, DeviceEnds] = {}
    for source, to in edges:
        ends = [identities[part.replica, lane] for lane in (source, to)]
        _add_way(ways, (source, to), execution, source if source in part.lanes else to, ends)
    stages = sorted(part.stages) if part.replicas > 1 else []
    for stage in stages:
        ends = [identities[replica, device_of[stage]] for replica in range(part.replicas)]
        _add_way(ways, stage, execution, device_of[stage], ends)
    link.connect(edges, dict.fromkeys(stages, copies), ways)


def _add_way(ways: dict[Any, DeviceEnds], key: Any, execution: Execution, lane: int, ends: list[str]) -> None:
    """Note how values get to a lane that is on a device with streams."""
    device, backend = execution.ready.where[lane], Place.backend
    if backend.asynchronous(device):
        ways[key] = DeviceEnds(backend, device, "" not in ends and len({*ends}) == len(ends))


def begin(link: Link, execution: Execution, runner: Lane) -> None:
    """Let the edges of a lane serve an execution, which it begins."""
    lane = runner.program.lane
    for (end, other), box in execution.outboxes.items():
        if end != lane or not isinstance(box, Outbox):
            continue
        out, back = link.edges.get((lane, other)), link.edges.get((other, lane))
        if isinstance(out, EdgeOut):
            own = execution.boxes[lane]
            assert isinstance(own, Inbox)
            out.begin(other, own)
            box.out = out
        if isinstance(back, EdgeIn):
            theirs = lane_program(execution.ready.program, other).instructions
            sent = [each.into for each in theirs if type(each) is Send and each.to == lane]
            levels = {slot: execution.level_of[lane, slot] for slot in {*sent}}
            back.begin(sent, execution.boxes[lane], levels, runner.place)
            box.back = back


def settle(link: Link, executions: Sequence[Execution], ending: Callable[[], None]) -> None:
    """Wait until devices have done what their lanes have queued, for no longer than for others.

    Raises:
        Alarm: they have not, or another rank failed; after ``ending``.
    """
    last = executions[-1]
    events = [lane.place.event() for lane in last.lanes if lane.place.asynchronous]

    def synchronize() -> RuntimeError | None:
        try:
            for event in events:
                event.synchronize()
        except RuntimeError as error:  # a kernel has failed
            return error
        return None

    last.settling = bool(events)
    try:
        error = link.wait(synchronize) if events else None
    except Alarm:
        ending()
        raise
    if error is not None:
        raise error


def end(executions: Sequence[Execution]) -> None:
    """Else what was sent last would stay until the next run."""
    for execution in executions:
        for box in execution.outboxes.values():
            if isinstance(box, Outbox) and box.out is not None:
                box.out.box = Inbox()
