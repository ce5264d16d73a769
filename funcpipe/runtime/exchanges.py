"""The connection of all ranks: exchanges of bytes, tensors that several hold, and a guard over the next rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from funcpipe.runtime.connection import Connection, LostError

_CHUNK = 4096
"""Bytes of the first message of each round of an exchange, which tells how many follow."""

_FLUSH = timedelta(seconds=5)
"""How long who leaves in order waits until others have asked for what it has sent them."""

_EXCHANGE, _FAREWELL = 2, 3
"""Tags; 0 is that of tensors (and 1 of what cuts a connection)."""


class Everyone:
    """What goes over one connection of all ranks.

    Where the other end is closed just when something is sent, gloo never wakes who waits for the end of that send. So
    nobody does: what is sent is kept until the next exchange is over, which proves that all have it, or until the end.
    The first messages of each exchange are asked for as soon as the one before is over, and so mostly sent at once; a
    rank that has left by then is missed by who needs it in another exchange.
    """

    def __init__(self, connection: Connection, me: int, size: int) -> None:
        self.connection, self.me, self.size = connection, me, size
        self._first = {1 << k: _room(_CHUNK) for k in range((size - 1).bit_length())}
        """By round (how far it sends), where the first message comes."""
        self._asked: dict[int, Any] = {}
        self._sent: list[Any] = []
        self._farewell = [] if size == 1 else [self._receive(_room(1), self.next, _FAREWELL)]
        self._ask()
        self.exchange(b"")  # nobody leaves before all await the farewell of the next

    @property
    def next(self) -> int:
        """The rank over which this one is the guard: so each has one."""
        return (self.me + 1) % self.size

    def exchange(self, data: bytes) -> list[bytes]:
        """What every rank gives, by rank, in log2(size) rounds (Bruck and others, 1997). Raises LostError."""
        blocks, before, self._sent = [data], self._sent, []  # blocks[i] is that of rank me + i
        for step in self._first:
            to = (self.me - step) % self.size
            self._sent += self._send_bytes(_joined(blocks[: min(step, self.size - step)]), to)
            blocks += _parted(self._received_bytes(step))
        del before  # whoever has come to this exchange has all of it
        self._ask()
        return [blocks[(rank - self.me) % self.size] for rank in range(self.size)]

    def gather(self, mine: Mapping[int, Tensor], holders: Sequence[int], room: Callable[[int], Tensor]) -> list[Tensor]:
        """Tensors that several ranks hold, in order; see `PlanPart.gather`. Raises LostError."""
        others = sorted({*holders} - {self.me})
        works = {other: [self.connection.send(mine[place], other) for place in sorted(mine)] for other in others}
        values = dict(mine)
        for other in others:
            places = [place for place, holder in enumerate(holders) if holder == other]
            values |= {place: room(place) for place in places}
            self.connection.finish([self.connection.receive(values[place], other) for place in places], other)
        for other, sent in works.items():
            self.connection.finish(sent, other)
        return [values[place] for place in range(len(holders))]

    def guard(self) -> None:
        """Wait until the next rank says farewell. Raises LostError: it is gone without.

        The connections over which values come do not always tell: gloo does not wake who waits for a message that has
        come in part.
        """
        self.connection.finish(self._farewell, self.next)

    def say_farewell(self) -> None:
        """Tell the rank before that this one ends its connections in order, when all has been sent."""
        with suppress(LostError, RuntimeError):
            for work in self._sent:
                work.wait(_FLUSH)  # a wait that is over closes the connection, but that is to come now
            if self.size > 1:
                self.connection.send(_room(1), (self.me - 1) % self.size, _FAREWELL)

    def _receive(self, into: Tensor, source: int, tag: int = _EXCHANGE) -> Any:
        return self.connection.receive(into, source, tag)

    def _ask(self) -> None:
        """Ask for the first messages of the next exchange, or keep why they cannot come: there may be none."""
        for step, into in self._first.items():
            try:
                self._asked[step] = self._receive(into, (self.me + step) % self.size)
            except LostError as error:
                self._asked[step] = error

    def _send_bytes(self, data: bytes, to: int) -> list[Any]:
        """Begin to send bytes of any length."""
        data = len(data).to_bytes(8, "little") + data
        first = torch.frombuffer(bytearray(data[:_CHUNK].ljust(_CHUNK, b"\0")), dtype=torch.uint8)
        rest = [torch.frombuffer(bytearray(data[_CHUNK:]), dtype=torch.uint8)] if len(data) > _CHUNK else []
        return [self.connection.send(part, to, _EXCHANGE) for part in (first, *rest)]

    def _received_bytes(self, step: int) -> bytes:
        """The bytes that come in a round."""
        source, asked = (self.me + step) % self.size, self._asked[step]
        if isinstance(asked, LostError):
            raise asked
        self.connection.finish([asked], source)
        data = self._first[step].numpy().tobytes()
        length = 8 + int.from_bytes(data[:8], "little")
        if length > _CHUNK:
            rest = _room(length - _CHUNK)
            self.connection.finish([self._receive(rest, source)], source)
            data += rest.numpy().tobytes()
        return data[8:length]


def _room(count: int) -> Tensor:
    """Memory for bytes, of the host whatever the default device is."""
    return torch.zeros(count, dtype=torch.uint8, device="cpu")


def _joined(blocks: Sequence[bytes]) -> bytes:
    """Blocks as one, each after its length."""
    return b"".join(part for block in blocks for part in (len(block).to_bytes(8, "little"), block))


def _parted(data: bytes) -> list[bytes]:
    """The blocks that were joined."""
    blocks: list[bytes] = []
    while data:
        end = 8 + int.from_bytes(data[:8], "little")
        blocks.append(data[8:end])
        data = data[end:]
    return blocks
