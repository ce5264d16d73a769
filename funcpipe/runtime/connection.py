"""Connections between processes over gloo, of tensors in the memory of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcpipe.runtime.device_stream import DeviceStream
from funcpipe.runtime.wire_format import memory

_LONG = timedelta(days=36500)
"""How long gloo may wait; whoever needs what comes waits for less, and cuts the connection."""


class LostError(Exception):
    """The connection to a rank has ended."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank, self.text = rank, text


class Connection:
    """A group of gloo that joins some ranks; ranks are those of the plan."""

    def __init__(self, group: Any, ranks: Sequence[int]) -> None:
        self.group, self.seats = group, {rank: seat for seat, rank in enumerate(ranks)}

    def send(self, tensor: Tensor, to: int) -> Any:
        """Begin to send a dense tensor's memory, which must not change before the end."""
        try:
            return self.group.send([memory(tensor)], self.seats[to], 0)
        except RuntimeError as error:
            raise _lost(to, error) from None

    def receive(self, into: Tensor, source: int) -> Any:
        """Begin to receive into a dense tensor's memory."""
        try:
            return self.group.recv([memory(into)], self.seats[source], 0)
        except RuntimeError as error:
            raise _lost(source, error) from None

    def finish(self, works: Iterable[Any], rank: int) -> None:
        """Wait for the end of what was begun with a rank. Raises LostError."""
        try:
            for work in works:
                work.wait(_LONG)
        except RuntimeError as error:
            raise _lost(rank, error) from None

    def cut(self, rank: int) -> None:
        """Close it, so that whoever waits at any end is woken.

        gloo has no other way: a receive that nobody answers within its limit closes its connection.
        """
        for other, seat in self.seats.items():
            if other != rank:
                with suppress(RuntimeError):
                    self.group.recv([torch.empty(1)], seat, 1).wait(timedelta(milliseconds=1))


def gloo_device(**where: str) -> Any:
    """What connections of gloo share, with a thread of its own: on an ``interface=`` or a ``hostname=``."""
    backend: Any = torch.distributed.ProcessGroupGloo  # pyright: ignore
    return backend.create_device(**where) if where else backend.create_default_device()


class Way(NamedTuple):
    """How values get from some ranks to others.

    Attributes:
        connection: joins them.
        name: of the way.
        lost: called when the connection has ended.
        stream: where this rank's end is on a device with streams, one of these.
    """

    connection: Connection
    name: str
    lost: Callable[[LostError], None]
    stream: DeviceStream | None = None


def _lost(rank: int, error: RuntimeError) -> LostError:
    """The error of a connection, without what gloo says of its own source, and of what to do."""
    text = str(error).split("\n")[0].rsplit("] ", 1)[-1].split(". This is")[0]
    return LostError(rank, f"the connection to its process has ended: {text}")


def lost_by_device(rank: int, error: RuntimeError) -> LostError:
    """The error of a group of devices, without what torch says of its own source."""
    parts = str(error).split("\n")[0].split(", ")
    text = ", ".join(part for part in parts if ".cpp:" not in part and "NCCL version" not in part)
    return LostError(rank, f"what joined its device with this one has ended: {text}")
