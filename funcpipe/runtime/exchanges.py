"""What all ranks tell each other: exchanges of bytes, tensors that several hold, and a guard over the next rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from torch import Tensor

from funcpipe.runtime.cable import Cable, memory_view
from funcpipe.runtime.connection import LostError
from funcpipe.runtime.connector import Connector


class Everyone:
    """The cables of one rank to others of all: to and from those of the rounds of an exchange, and for farewells."""

    def __init__(self, connector: Connector, size: int) -> None:
        self.connector, self.me, self.size = connector, connector.rank, size
        steps = [1 << k for k in range((size - 1).bit_length())]
        ways = {("round", self._at(sign * step), self._at(sign * step - step)) for step in steps for sign in (0, 1)}
        ways |= {("farewell", self._at(step), self._at(step - 1)) for step in (0, 1) if size > 1}
        # In one order, that of all, so that nobody waits for who waits for others.
        made = {way: connector.cable("{} {}-{}".format(*way), way[1:]) for way in sorted(ways)}
        self._rounds = {
            step: (made["round", self.me, self._at(-step)], made["round", self._at(step), self.me]) for step in steps
        }
        """By how far a round sends, to whom it does and from whom it hears."""
        self._leaving = made.get(("farewell", self.me, self._at(-1)))
        self._guarded = made.get(("farewell", self.next, self.me))
        self._holders: dict[int, Cable] = {}

    @property
    def next(self) -> int:
        """The rank over which this one is the guard: so each has one."""
        return self._at(1)

    def _at(self, distance: int) -> int:
        return (self.me + distance) % self.size

    def exchange(self, data: bytes) -> list[bytes]:
        """What every rank gives, by rank, in log2(size) rounds (Bruck and others, 1997). Raises LostError."""
        blocks = [data]  # blocks[i] is that of rank me + i
        for step, (to, source) in self._rounds.items():
            theirs = _swapped(to, source, _joined(blocks[: min(step, self.size - step)]))
            blocks += _parted(theirs)
        return [blocks[(rank - self.me) % self.size] for rank in range(self.size)]

    def gather(self, mine: Mapping[int, Tensor], holders: Sequence[int], room: Callable[[int], Tensor]) -> list[Tensor]:
        """Tensors that several ranks hold, in order; see `PlanPart.gather`. Raises LostError.

        Of two ranks the first writes while the other reads, and then the other way round; pairs go in one order.
        """
        values = dict(mine)
        for other in sorted({*holders} - {self.me}):
            pair = (min(self.me, other), max(self.me, other))
            if other not in self._holders:
                self._holders[other] = self.connector.cable("holders {}-{}".format(*pair), pair)
            cable = self._holders[other]
            theirs = {place: room(place) for place, holder in enumerate(holders) if holder == other}
            sent, received = _views([mine[place] for place in sorted(mine)]), _views([*theirs.values()])
            if self.me == pair[0]:
                cable.write(sent, wait=True)
                cable.read(received)
            else:
                cable.read(received)
                cable.write(sent, wait=True)
            values |= theirs
        return [values[place] for place in range(len(holders))]

    def guard(self) -> None:
        """Wait until the next rank says farewell. Raises LostError: it is gone without."""
        if self._guarded is not None:
            self._guarded.read_some(1, wait=True)

    def say_farewell(self) -> None:
        """Tell the rank before that this one ends its connections in order."""
        if self._leaving is not None:
            with suppress(LostError):
                self._leaving.write([b"\0"], wait=False)


def _swapped(to: Cable, source: Cable, data: bytes) -> bytearray:
    """Write bytes to one rank, and read what comes from another. Raises LostError."""
    left = to.write([len(data).to_bytes(8, "little"), data], wait=False)
    failures: list[LostError] = []

    def write_rest() -> None:
        try:
            to.write(left, wait=True)
        except LostError as error:
            failures.append(error)

    # More than the system takes at once: all write, so nobody must wait for that before he reads.
    writer = threading.Thread(target=write_rest, name="funcpipe exchange rest", daemon=True) if left else None
    if writer is not None:
        writer.start()
    head = bytearray(8)
    source.read([head])
    theirs = source.read_counted(int.from_bytes(head, "little"))
    if writer is not None:
        writer.join()
    if failures:
        raise failures[0]
    return theirs


def _views(tensors: Sequence[Tensor]) -> list[memoryview]:
    return [memory_view(tensor) for tensor in tensors if tensor.numel()]


def _joined(blocks: Sequence[bytes]) -> bytes:
    """Blocks as one, each after its length."""
    return b"".join(part for block in blocks for part in (len(block).to_bytes(8, "little"), block))


def _parted(data: bytes | bytearray) -> list[bytes]:
    """The blocks that were joined."""
    blocks: list[bytes] = []
    start = 0
    while start < len(data):
        end = start + 8 + int.from_bytes(data[start : start + 8], "little")
        blocks.append(bytes(data[start + 8 : end]))
        start = end
    return blocks
