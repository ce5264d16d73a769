"""Make the streams for transfers between this process's devices and other processes, and end them.

`device_stream` does the transfers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

import torch

from funcpipe._src.data.plan import Plan
from funcpipe._src.data.program import CALLER
from funcpipe._src.devices.nccl import abort
from funcpipe._src.devices.stream import Place, StreamBackend
from funcpipe._src.engine.execute import Execution
from funcpipe._src.engine.part import PlanPart
from funcpipe._src.processes.alarms import Alarm
from funcpipe._src.processes.device_stream import DeviceStream
from funcpipe._src.processes.peer import LostError
from funcpipe._src.processes.rendezvous import below

Identities: TypeAlias = Mapping[tuple[int, int], str]
"""By (replica, lane), the id of the lane's device for NCCL; "": NCCL cannot use the device."""


class DeviceEnds(NamedTuple):
    """The connection between a device of this process and devices of other processes."""

    name: str  # the name of the connection, the same in all its processes
    way: str  # the direction: "out" from here, "in" to here, or "all" for a swap
    ranks: Sequence[int]  # the ranks of its processes
    rank: int  # the rank of this process
    backend: StreamBackend  # the streams of the device
    device: torch.device  # the device
    joined: bool  # whether values travel by NCCL; else through host memory

    @property
    def seat(self) -> int:
        """The number of this process among those of the connection."""
        return [*self.ranks].index(self.rank)


class DeviceWays:
    """The streams of this process for transfers to other processes, by edge or stage.

    Args:
        store: the store. NCCL groups use a copy of it, because their creation may wait long.
        seconds: the limit of that wait.
    """

    def __init__(self, store: Any, seconds: float) -> None:
        self._streams: dict[Any, DeviceStream] = {}
        self._store, self._seconds = store, seconds
        self._joins: Any = None  # the copy of the store, once a device is joined
        self._gate = threading.Lock()
        self._groups: list[Any] = []
        self._is_over = False

    def get(self, key: Any) -> DeviceStream | None:
        """Return the stream of an edge (from lane, to lane), or of a stage; None on the CPU."""
        return self._streams.get(key)

    def missing(self, ways: Mapping[Any, DeviceEnds]) -> dict[Any, DeviceEnds]:
        """Return the connections that are not made yet."""
        return {key: ends for key, ends in ways.items() if key not in self._streams}

    def make(self, ways: Mapping[Any, DeviceEnds]) -> None:
        """Make streams, and join their devices with those of other processes, all in the same
        order.

        Raises:
            LostError: devices cannot be joined.
        """
        for key, ends in ways.items():
            try:
                self._streams[key] = self._made(ends)
            except RuntimeError as error:
                others = ", ".join(str(rank) for rank in ends.ranks if rank != ends.rank)
                text = (
                    f"cannot connect its device with the device of rank {others} by NCCL "
                    f"(NCCL_DEBUG=INFO shows more): {error}"
                )
                raise LostError(ends.rank, text.split("\n")[0]) from None

    def _made(self, ends: DeviceEnds) -> DeviceStream:
        group = None
        if ends.joined:
            if self._joins is None:
                self._joins = self._store.clone()
                self._joins.set_timeout(timedelta(seconds=self._seconds))
            group = ends.backend.joined(
                below(ends.name, self._joins), ends.seat, len(ends.ranks), ends.device
            )
            with self._gate:
                self._groups.append(group)
            # `abort` may have come while the group was made, and has not seen it.
            if self._is_over:
                self.abort()
        stream = DeviceStream(ends.name, ends.backend, ends.device, group, ends.seat)
        stream.greet(ends.way)
        return stream

    def moved(self) -> int:
        """Return a number that changes whenever a transfer of this process finishes."""
        return sum(stream.moved() for stream in [*self._streams.values()])

    def abort(self) -> None:
        """End all transfers with other processes, and with them the waits of devices."""
        self._is_over = True
        with self._gate:
            groups, self._groups = self._groups, []
        abort(groups, 1.0)


def identities_of(part: PlanPart, plan: Plan) -> list[tuple[int, int, str]]:
    """Return (replica, lane, id of the device) for each lane of this process."""
    devices = part.devices(plan)
    return [(part.replica, lane, Place.backend.identity(devices[lane])) for lane in part.lanes]


def ways_of(part: PlanPart, plan: Plan, identities: Identities) -> dict[Any, DeviceEnds]:
    """Return the device connections of this process: by edge (from lane, to lane), and by stage.

    Stages have connections only with replicas.
    """
    size, device_of = max(part.rank_of) + 1, plan.schedule.device_of
    first, ways = part.replica * size, dict[Any, DeviceEnds]()

    def add(
        key: Any,
        name: str,
        way: str,
        lane: int,
        ranks: Sequence[int],
        ends: Sequence[tuple[int, int]],
    ) -> None:
        device, backend = part.devices(plan)[lane], Place.backend
        if backend.asynchronous(device):
            found = [identities[end] for end in ends]
            joined = "" not in found and len({*found}) == len(found)
            ways[key] = DeviceEnds(name, way, ranks, first + part.rank, backend, device, joined)

    for source, to in sorted(
        {(pool.source, pool.lane) for pool in plan.program.pools if pool.source != CALLER}
    ):
        ranks = [first + part.rank_of[lane] for lane in (source, to)]
        if ranks[0] != ranks[1] and part.rank in (part.rank_of[source], part.rank_of[to]):
            lane, way = (source, "out") if source in part.lanes else (to, "in")
            ends = [(part.replica, source), (part.replica, to)]
            add((source, to), f"{ranks[0]}:{source}-{to}", way, lane, ranks, ends)
    for stage in sorted(part.stages) if part.replicas > 1 else ():
        lane = device_of[stage]
        copies = [replica * size + part.rank for replica in range(part.replicas)]
        add(
            stage,
            f"stage {stage}",
            "all",
            lane,
            copies,
            [(replica, lane) for replica in range(part.replicas)],
        )
    return ways


def settle(
    executions: Sequence[Execution],
    wait: Callable[[Callable[[], Any]], Any],
    ending: Callable[[], None],
) -> None:
    """Wait until devices have finished the queued work, as long as for other processes.

    Raises:
        Alarm: a device has not finished in time, or another process failed. Calls ``ending`` first.
    """
    last = executions[-1]
    events = [lane.place.event() for lane in last.lanes if lane.place.asynchronous]
    if not events:
        return

    def synchronize() -> RuntimeError | None:
        try:
            for event in events:
                event.synchronize()
        except RuntimeError as error:  # a kernel has failed
            return error
        return None

    last.settling = True
    try:
        error = wait(synchronize)
    except Alarm:
        ending()
        raise
    if error is not None:
        raise error
