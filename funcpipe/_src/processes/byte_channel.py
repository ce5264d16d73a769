"""Channels for exchanges, gradient sums and gathered parameters between the processes of a plan.

Values of a run travel by `remote` instead.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from torch import Tensor

from funcpipe._src.engine.mail import Inbox
from funcpipe._src.processes.peer import FrameKind, Head

if TYPE_CHECKING:
    from funcpipe._src.processes.team import Team


class ByteChannel:
    """Messages between processes, in order from each process. One thread here receives them."""

    def __init__(self, team: Team, number: int) -> None:
        self.box, self._team, self._number = Inbox(team.lead), team, number
        self._came, self._taken = Counter[int](), Counter[int]()

    def post(self, rank: int, tensor: Tensor) -> None:
        """Send the memory of a dense tensor. It must not change before `drain`."""
        self._team.send(
            rank,
            Head(FrameKind.DATA, lane=self._number),
            tensors=(tensor,) if tensor.numel() else (),
        )

    def take(self, rank: int) -> Tensor:
        """Wait for the next message of another process, uint8 ``[length]``.

        Raises Stop if the team ends.
        """
        key = rank, self._taken[rank]
        self.box.wait(key)
        self._taken[rank] += 1
        body = self.box.came.pop(key)
        if body is None:
            self._team.miss(rank)
        return body

    def put(self, rank: int, body: Tensor | None) -> None:
        """Deliver the next message of another process; None: the process has left."""
        key = rank, self._came[rank]
        self._came[rank] += 1
        self.box.put(key, body)

    def drain(self) -> None:
        """Wait until all messages are written. Raises Stop if the team ends."""
        self._team.drain()
