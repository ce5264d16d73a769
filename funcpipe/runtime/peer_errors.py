"""What a process tells others of its failure, and raises for that of another one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from time import monotonic, sleep
from typing import Any

from funcpipe.core.errors import PeerError, RunTimeout, StageError
from funcpipe.runtime.alarms import Alarm, Failure
from funcpipe.runtime.link import Link

OUTSIDE = "outside of a run"
"""How the words of a rank begin that is in no run, and at nothing that all do together."""

_NO_STORE = "the store of the processes does not answer"


def peer_error(failure: Failure, table: Mapping[int, tuple[bool, str]], link: Link) -> PeerError:
    """What a rank raises for another one's failure."""
    rank, place, names = failure.rank, failure.place(), link.names
    if (
        failure.timed and link.store.silent and len(table) < 2
    ):  # is it this rank that is cut off, or the store; who knows
        rank, text = -1, f"{_NO_STORE}, and nothing went on for a while\n{table_of(table, names)}"
    elif failure.timed:
        silent = [other for other in range(link.size) if other not in table]
        busy = [other for other in table if table[other][0]]
        outside = [other for other in table if table[other][1].startswith(OUTSIDE)]
        away = outside if len(outside) < link.size else []  # this rank does not reach the call in which the others wait
        rank = next(iter([*silent, *busy, *away]), -1)
        whom = "is silent" if silent else "is in an action" if busy else "is outside of a run" if away else ""
        head = f"{names[rank]} {whom}" if whom else "the ranks wait for each other"
        text = f"{head}, and nothing went on for a while ({names[failure.rank]} saw it first)\n{table_of(table, names)}"
    elif not failure.kind:
        text = f"{names[rank]}: {failure.text}" if rank >= 0 else failure.text
        if link.store.silent:
            text = f"{text}; {_NO_STORE}, so nobody could tell what came first"
    else:
        at = f" {place}" if place is not None else f" in {failure.about}" if failure.about else ""
        text = f"{names[rank]} failed{at}: {failure.kind}: {failure.text}"
    error = PeerError(text)
    error.funcpipe = place
    if rank >= 0:
        error.rank, error.process = rank, link.processes[rank]
    return error


def asked(link: Link, seconds: float = 1.0) -> dict[int, tuple[bool, str]]:
    """What every rank does, by rank: (is it in an action, in words); others that do not answer are left out."""
    said = {link.rank: link.doing()}
    deadline = monotonic() + seconds

    def ask(store: Any) -> None:
        link.say(store)
        while len(said) < link.size and monotonic() < deadline:
            for rank in range(link.size):
                if rank not in said and store.check([f"doing/{rank}"]):
                    busy, words = json.loads(store.get(f"doing/{rank}"))
                    said[rank] = (busy, words)
            sleep(0.02)

    link.store.ask(ask, seconds + 0.3)
    return {**said}


def table_of(table: Mapping[int, tuple[bool, str]], names: Sequence[str]) -> str:
    """What all ranks do, a line each."""
    lines = {rank: words for rank, (_, words) in table.items()}
    return "\n".join(f"  * {name}: {lines.get(rank, 'does not answer')}" for rank, name in enumerate(names))


def tell(link: Link, error: BaseException, run: int, about: str = "") -> Failure:
    """Break the link by an error in a run and tell it to the others, where nobody else does; what has broken it first."""
    if not isinstance(error, Alarm):
        where, text = getattr(error, "funcpipe", None), str(error)[:2000]
        kind = type(error.__cause__ if isinstance(error, StageError) and error.__cause__ else error).__name__
        link.fail(Failure(link.rank, kind, text, where, run, isinstance(error, RunTimeout), about))
    failure = link.failure
    assert failure is not None
    if not link.heard:
        link.tell(failure)
    return failure
