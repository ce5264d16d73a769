"""The store of the processes, which may not answer: it is asked in threads, and waited for only so long."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from funcpipe.core.errors import PeerError

LIMIT = 600.0
"""Seconds for which ranks wait where nobody says how long."""

STALL = 6.0
"""Seconds that the first connections get more than others: torch's store lets every 25th wait for 5 s."""


def below(name: str, store: Any) -> Any:
    """A store whose keys lie below a name in another one."""
    import torch.distributed as dist

    return dist.PrefixStore(name, store)  # pyright: ignore[reportPrivateImportUsage]


def hello(rank: int, mine: Mapping[str, Any]) -> tuple[str, str]:
    """What a rank says before there is a connection: key and value in the store of a link."""
    return f"hello/{rank}", json.dumps(mine)


class AskedStore:
    """A store that is asked for so long at most, and after one question without an answer is waited for no more.

    The process that keeps it may be stopped, or its cable pulled; then torch's calls do not come back, not even
    those that have a limit: a wait that is over says so to the store, and waits for its answer.

    Attributes:
        silent: has a question had no answer in time. Questions are still put, and reach it should it come back.
    """

    def __init__(self, store: Any) -> None:
        self.store, self.silent = store, False

    def ask(self, job: Callable[[Any], Any], seconds: float = 1.0) -> Any:
        """The result of a job with the store; None where that takes longer, or the store is gone."""
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def work() -> None:
            try:
                answers.put(job(self.store))
            except RuntimeError:
                answers.put(None)

        threading.Thread(target=work, name="funcpipe store", daemon=True).start()
        with suppress(queue.Empty):
            return answers.get(timeout=0.0 if self.silent else seconds)
        self.silent = True
        return None


def connections(store: Any, seconds: float) -> list[Any]:
    """A store, and two connections more to it: while one waits nobody else can use it.

    They are made once and kept, see `STALL`.

    Raises:
        PeerError: it does not answer for so many seconds, or is gone.
    """

    def clones(store: Any) -> list[Any]:
        store.check(["hello"])  # raises where the store is gone; a new connection would be tried for minutes
        return [store, store.clone(), store.clone()]

    made = AskedStore(store).ask(clones, seconds)
    if made is None:
        raise PeerError(f"the store of the processes is gone, or has not answered for {seconds:g} s")
    return made
