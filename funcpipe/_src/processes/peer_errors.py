"""Make the message about a process's failure, and the error that other processes raise for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from funcpipe._src.core.errors import PeerError, RunTimeout, StageError
from funcpipe._src.processes.alarms import Failure
from funcpipe._src.processes.team import Team

OUTSIDE = "outside of a run"
"""The first words of a rank's description if it is neither in a run nor in a common step."""


def failure_of(error: BaseException, rank: int, run: int, about: str = "") -> Failure:
    """Return the message about an error. ``about`` names a step outside a run."""
    where, text = getattr(error, "funcpipe", None), str(error)[:2000]
    kind = type(
        error.__cause__ if isinstance(error, StageError) and error.__cause__ else error
    ).__name__
    return Failure(rank, kind, text, where, run, isinstance(error, RunTimeout), about)


def peer_error(team: Team, table: Mapping[int, tuple[bool, str]]) -> PeerError:
    """Return the PeerError for another rank's failure.

    After a timeout, ``table`` has what each rank does.
    """
    failure, names = team.failure, team.names
    assert failure is not None
    rank, place = failure.rank, failure.place()
    if failure.timed:
        silent = [other for other in range(team.size) if other not in table]
        busy = [other for other in table if table[other][0]]
        outside = [other for other in table if table[other][1].startswith(OUTSIDE)]
        # If only some ranks are outside a run, they do not reach the call in which others wait.
        away = outside if len(outside) < team.size else []
        rank = next(iter([*silent, *busy, *away]), -1)
        whom = (
            "is silent"
            if silent
            else "is in an action"
            if busy
            else "is outside of a run"
            if away
            else ""
        )
        head = f"{names[rank]} {whom}" if whom else "the ranks wait for each other"
        text = (
            f"{head}, and nothing went on for {team.monitor.timeout:g} s, the timeout "
            f"({names[failure.rank]} saw it first)\n{table_of(table, names)}"
        )
    elif not failure.kind:
        text = f"{names[rank]}: {failure.text}" if rank >= 0 else failure.text
    else:
        at = f" {place}" if place is not None else f" in {failure.about}" if failure.about else ""
        text = f"{names[rank]} failed{at}: {failure.kind}: {failure.text}"
    error = PeerError(text)
    error.funcpipe = place
    if rank >= 0:
        error.rank, error.process = rank, team.processes[rank]
    return error


def table_of(table: Mapping[int, tuple[bool, str]], names: Sequence[str]) -> str:
    """Return what each rank does, one line per rank."""
    lines = {rank: words for rank, (_, words) in table.items()}
    return "\n".join(
        f"  * {name}: {lines.get(rank, 'does not answer')}" for rank, name in enumerate(names)
    )
