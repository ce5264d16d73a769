"""What ends a team of processes, and who is told of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from funcpipe._src.core.errors import Where


class Failure(NamedTuple):
    """The message about a failure that the processes of a plan send each other.

    Attributes:
        rank: whose it is; -1: nobody's in particular.
        kind: the type of its exception; "" for a process that is gone.
        text: what it says.
        where: its coordinates, where it was in a stage.
        run: the number of the run.
        timed: did it wait for too long; then all say what they are doing.
        about: the step outside a run that failed, such as fp.step; "" if unknown.
    """

    rank: int
    kind: str
    text: str
    where: Sequence[Any] | None
    run: int
    timed: bool = False
    about: str = ""

    def place(self) -> Where | None:
        """The coordinates."""
        return None if self.where is None else Where(*self.where)


class Alarm(Exception):
    """The team is at its end: `Team.failure` says why."""


class Telling:
    """Send an error inside the context to the other ranks, and turn `Alarm` into another rank's
    error."""

    def __init__(self, failed: Callable[[BaseException, str], None], about: str = "") -> None:
        self.failed, self.about = failed, about

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.failed(error, self.about)


def names_of(processes: Sequence[int]) -> tuple[str, ...]:
    """Return the name of each rank in errors, with the number of its process where the two numbers
    differ."""
    return tuple(
        [
            f"rank {rank}" if rank == number else f"rank {rank} (process {number})"
            for rank, number in enumerate(processes)
        ]
    )
