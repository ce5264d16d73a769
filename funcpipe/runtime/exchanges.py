"""Exchanges over one connection in which all ranks take part: bytes of everyone, and tensors that several hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from funcpipe.runtime.connection import Connection

_CHUNK = 4096
"""Bytes of the first message of an exchange, which tells how many follow."""


def exchange_all(everyone: Connection, me: int, size: int, data: bytes) -> list[bytes]:
    """What every rank gives, by rank, in log2(size) rounds (Bruck and others, 1997). Raises LostError."""
    blocks, step = [data], 1  # blocks[i] is that of rank me + i
    while step < size:
        count = min(step, size - step)
        works = everyone.send_bytes(_joined(blocks[:count]), (me - step) % size, _CHUNK)
        blocks += _parted(everyone.receive_bytes((me + step) % size, _CHUNK))
        everyone.finish(works, (me - step) % size)
        step *= 2
    return [blocks[(rank - me) % size] for rank in range(size)]


def gather_all(
    everyone: Connection, me: int, mine: Mapping[int, Tensor], holders: Sequence[int], room: Callable[[int], Tensor]
) -> list[Tensor]:
    """Tensors that several ranks hold, in order; see `PlanPart.gather`. Raises LostError."""
    others = sorted({*holders} - {me})
    works = {other: [everyone.send(mine[place], other) for place in sorted(mine)] for other in others}
    values = dict(mine)
    for other in others:
        places = [place for place, holder in enumerate(holders) if holder == other]
        values |= {place: room(place) for place in places}
        everyone.finish([everyone.receive(values[place], other) for place in places], other)
    for other, sent in works.items():
        everyone.finish(sent, other)
    return [values[place] for place in range(len(holders))]


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
