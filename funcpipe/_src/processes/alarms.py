"""The failure that ends a team of processes, and the context that sends errors to other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from funcpipe._src.core.errors import Where


class Failure(NamedTuple):
    """The message about a failure that the processes of a plan send each other."""

    rank: int  # the rank that failed; -1: no rank in particular
    kind: str  # the class name of the exception; "" for a process that is gone
    text: str  # the message of the exception
    where: Sequence[Any] | None  # the coordinates of a failure in a stage, or None
    run: int  # the number of the run
    timed: bool = False  # whether a wait took too long. Then all ranks report what they do
    about: str = ""  # the step outside a run that failed, such as fp.step; "" if unknown

    def place(self) -> Where | None:
        """Return the coordinates, or None."""
        return None if self.where is None else Where(*self.where)


class Alarm(Exception):
    """Raised when the team has ended. `Team.failure` has the reason."""


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
    """Return the name of each rank in errors, with its process number if that differs."""
    return tuple(
        [
            f"rank {rank}" if rank == number else f"rank {rank} (process {number})"
            for rank, number in enumerate(processes)
        ]
    )
