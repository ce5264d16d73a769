"""Makes the connections of one process to others, and ends them all at once: cables, groups of gloo, joined devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

from funcpipe.core.torch_names import gloo
from funcpipe.runtime.address import addresses_at
from funcpipe.runtime.alarms import Alarm
from funcpipe.runtime.cable import Cable, connected
from funcpipe.runtime.connection import Connection, LostError, gloo_device
from funcpipe.runtime.device_stream import DeviceEnds, DeviceStream
from funcpipe.runtime.nccl import abort
from funcpipe.runtime.store import below


class Connector:
    """Makes connections over a store, which nobody else waits in; those who are connected all do so at the same time.

    Attributes:
        rank: which process this is.
        failed: is what is connected about to be cut.
        where: at which of its addresses this process is, in gloo's words (`connect_at`).
        timeout: seconds for which it waits for the others.
    """

    def __init__(self, store: Any, rank: int, failed: Callable[[], bool]) -> None:
        self._store, self.rank, self.failed = store, rank, failed
        self.where: Mapping[str, str] = {}
        self.timeout = 0.0
        self._gate = threading.Lock()
        self._is_cut = False
        self._cuts: list[Callable[[], None]] = []
        self._cables: list[Cable] = []
        self._groups: list[Any] = []
        self._joins: Any = None
        self._loop: Any = None
        """What connections of gloo share."""

    def connection(self, name: str, ranks: Sequence[int]) -> Connection:
        """A connection of some ranks over gloo.

        Raises:
            LostError: the others did not come; Alarm: what is connected is cut.
        """
        store, limit = below(name, self._store), timedelta(seconds=self.timeout)
        if self.failed():
            raise Alarm
        try:
            # Not one each: the thread of every device wakes a hundred times a second, beside the lane on its core.
            self._loop = self._loop or gloo_device(**self.where)
            connection = Connection(gloo(store, ranks.index(self.rank), len(ranks), limit, self._loop), ranks)
        except RuntimeError as error:
            others = [rank for rank in ranks if rank != self.rank]
            raise LostError(others[0] if len(others) == 1 else -1, f"could not be connected: {error}") from None
        self._made(partial(connection.cut, self.rank))
        return connection

    def cable(self, name: str, ranks: Sequence[int]) -> Cable:
        """A cable between two ranks. Raises what `connection` does."""
        hosts, goes_on = addresses_at(self.where), lambda: not self.failed()
        cable = connected(below(name, self._store), self.rank, ranks, hosts, self.timeout, goes_on)
        try:
            self._made(cable.cut)
        except Alarm:
            cable.close()  # whoever closes the others may have done so
            raise
        self._cables.append(cable)
        return cable

    def _made(self, cut: Callable[[], None]) -> None:
        """There is a new connection, to be cut with the others. Raises Alarm: they are cut, and so is this one."""
        with self._gate:
            if not self._is_cut:
                self._cuts.append(cut)
                return
        cut()
        raise Alarm

    def stream(self, name: str, ranks: Sequence[int], ends: DeviceEnds | None) -> DeviceStream | None:
        """The stream for what goes between some ranks on this one's device, which may be joined with those of the others.

        Raises:
            Alarm: what is connected is cut.
        """
        if ends is None:
            return None
        group, seat = None, ranks.index(self.rank)
        if ends.joined:
            if self._joins is None:  # who joins devices waits in the store, maybe long
                self._joins = self._store.clone()
                self._joins.set_timeout(timedelta(seconds=self.timeout))
            group = ends.backend.joined(below(f"{name}, devices", self._joins), seat, len(ranks), ends.device)
            with self._gate:
                self._groups.append(group)
            if self.failed():
                self.abort()
                raise Alarm
        return DeviceStream(name, ends.backend, ends.device, group, seat)

    @contextmanager
    def joining(self, ranks: Sequence[int]) -> Generator[None]:
        """Inside, devices are joined; raises LostError where they cannot be."""
        try:
            yield
        except RuntimeError as error:
            others = ", ".join(str(rank) for rank in ranks if rank != self.rank)
            text = f"its device cannot be joined with that of rank {others} (NCCL_DEBUG=INFO says more): {error}"
            raise LostError(self.rank, text.split("\n")[0]) from None

    def abort(self) -> None:
        """End all that devices wait for of other processes."""
        with self._gate:
            groups, self._groups = self._groups, []
        abort(groups, 1.0)

    def cut(self) -> None:
        """Cut all connections, which wakes whoever waits for them."""
        with self._gate:
            cuts, self._cuts, self._is_cut = self._cuts, [], True
        self.abort()
        for cut in cuts:
            cut()

    def close(self) -> None:
        """Give all back, when nobody uses it any more."""
        for cable in self._cables:
            cable.close()
        self._loop = None
