"""How the processes of a plan find each other: words in the store of torch.distributed, then a
connection for each pair.

The store may not answer: the process that keeps it may be stopped, or the network cut, and then
torch's calls do not come back. So a thread asks it, and the caller waits for only so long. Once the
processes are connected nobody uses the store.
"""

from __future__ import annotations

import json
import queue
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from time import monotonic, sleep
from typing import Any, NamedTuple, Self, TypeVar

from funcpipe._src.core.errors import PeerError
from funcpipe._src.processes.address import (
    addresses_at,
    connect_at,
    host_of,
    own_address,
    own_loopback,
)
from funcpipe._src.processes.peer import LostError

T = TypeVar("T")

LIMIT = 600.0
"""Seconds for which ranks wait where nobody says how long."""

STALL = 6.0
"""Seconds that the first connections get more than others: torch's store lets every 25th wait for 5
s."""

_LOOK = 0.2
"""Seconds after which a process that waits for connections looks whether it still should."""

_PATIENCE = 5.0
"""Seconds that a new connection has to send its token."""

_KNOCKING = 64
"""At most so many connections may be about to send it; the oldest of more are closed."""

_RANK = struct.Struct("<I")


def below(name: str, store: Any) -> Any:
    """A store whose keys lie below a name in another one."""
    import torch.distributed as dist

    return dist.PrefixStore(name, store)  # pyright: ignore[reportPrivateImportUsage]


def refuse_to_join(store: Any, rank: int, error: Exception) -> None:
    """Tell those who are about to make their first team why this process does not."""
    first = below(team_name(1), store)
    with suppress(PeerError, LostError):
        answered(lambda: first.set(f"hello/{rank}", json.dumps({"refused": str(error)})), 1.0)


def team_name(number: int) -> str:
    """The name of a team of some ranks, below which its keys lie in their store."""
    return f"team{number}"


def answered(job: Callable[[], T], seconds: float) -> T:
    """Return the result of a job with the store, or raise its error.

    Raises:
        PeerError: the store is gone, or does not answer for so many seconds.
    """
    answers: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put((job(), None))
        except Exception as error:
            answers.put((None, error))

    threading.Thread(target=work, name="funcpipe store", daemon=True).start()
    try:
        result, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise PeerError(f"the store of the processes has not answered for {seconds:g} s") from None
    if isinstance(error, RuntimeError):
        text = str(error).split("\n")[0]
        raise PeerError(
            f"the store of the processes is gone, and with it the process that keeps it ({text})"
        ) from None
    if error is not None:
        raise error
    return result  # pyright: ignore[reportReturnType]


class Rendezvous:
    """The way of one process to the others of a plan.

    Args:
        store: a store of their own.
        rank: which process this is.
        names: the name of each process in errors.
        seconds: how long to wait for others.
        goes_on: is this process still to wait; asked now and then, from another thread.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        names: Sequence[str],
        seconds: float,
        goes_on: Callable[[], bool],
    ) -> None:
        self._store, self._rank, self._names = store, rank, names
        self._seconds, self._goes_on = seconds, goes_on
        self._where: Mapping[str, str] = {}

    def hear(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Say hello to all, and return what every process says of itself. Raises LostError: someone
        does not come."""
        host = host_of(self._store)
        loopback = own_loopback(host)
        mine = {**mine, "address": own_address([host]), "loopback": loopback}
        self._say("hello", mine)
        said = self._said("hello", range(len(self._names)))
        # Where the store is kept its host may be a name of this machine for itself; others then say
        # where they are.
        where = connect_at([host, *(each.get("address", "") for each in said)])
        at_home = len({each.get("machine") for each in said}) == 1 and all(
            each.get("loopback") for each in said
        )
        if not where and at_home:
            # All reach the store at a loopback address, so all are on this machine and need no
            # network.
            where = {"hostname": loopback}
        self._where = where
        return said

    def connect(self, add: Callable[[socket.socket, int], None]) -> None:
        """Connect to every other process; ``add`` gets each connection and its rank.

        Of two the one with the higher rank calls the other one, with a token that the store alone
        tells.

        Raises:
            LostError: a process does not come, or cannot be reached.
        """
        deadline, later = monotonic() + self._seconds, {*range(self._rank + 1, len(self._names))}
        with ExitStack() as opened:
            door = None
            if later:
                try:
                    listener = opened.enter_context(closing(listening(addresses_at(self._where))))
                except OSError as error:
                    raise LostError(self._rank, f"cannot be reached by others: {error}") from None
                token = secrets.token_bytes(16)
                door = opened.enter_context(_Door(listener, token))
                host, port, *_ = listener.getsockname()
                self._say("at", [host, port, token.hex()])
            for rank, place in enumerate(self._said("at", range(self._rank))):
                add(self._call(rank, place, deadline), rank)
            while later and door is not None:
                if not self._goes_on() or monotonic() > deadline:
                    first = min(later)
                    raise LostError(
                        first, f"could not be connected: it did not come for {self._seconds:g} s"
                    )
                for connected, rank in door.let_in(later):
                    later.discard(rank)
                    add(connected, rank)

    def _call(self, rank: int, place: Sequence[Any], deadline: float) -> socket.socket:
        host, port, token = place
        try:
            connected = socket.create_connection((host, port), max(0.001, deadline - monotonic()))
            connected.sendall(bytes.fromhex(token) + _RANK.pack(self._rank))
        except OSError as error:
            raise LostError(rank, f"could not be connected: {error}") from None
        return connected

    def _say(self, about: str, what: Any) -> None:
        self._store.set(f"{about}/{self._rank}", json.dumps(what))

    def _said(self, about: str, ranks: Collection[int]) -> list[Any]:
        """What some processes say in the store. Raises LostError: one does not for too long."""
        deadline, pause, missing = monotonic() + self._seconds, 0.001, [*ranks]
        while missing := [rank for rank in missing if not self._store.check([f"{about}/{rank}"])]:
            if not self._goes_on() or monotonic() > deadline:
                names = ", ".join(self._names[rank] for rank in missing)
                text = (
                    f"did not come: {names} made no fp.ranks, or did not use it, for "
                    f"{self._seconds:g} s"
                )
                raise LostError(missing[0], text)
            sleep(pause)
            pause = min(2 * pause, 0.05)
        return [json.loads(self._store.get(f"{about}/{rank}")) for rank in ranks]


def listening(hosts: Sequence[str]) -> socket.socket:
    """A socket that listens at the first of these addresses that is one of this machine's. Raises
    OSError: none is."""
    failure: OSError | None = None
    for host in hosts:
        try:
            found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except OSError as error:
            failure = error
            continue
        for family, kind, protocol, _, address in found:
            listener = socket.socket(family, kind, protocol)
            try:
                listener.bind(address)
                listener.listen(128)
            except OSError as error:
                failure = error
                listener.close()
            else:
                return listener
    raise failure or OSError("this machine has no address")


class _Knock(NamedTuple):
    """A connection that has not said who it is: its socket, the bytes so far, and a deadline."""

    end: socket.socket
    said: bytearray
    until: float


class _Door:
    """Accepts connections that send the token and a rank. Reads all connections at once, so a slow
    one delays no other."""

    def __init__(self, listener: socket.socket, token: bytes) -> None:
        listener.setblocking(False)
        self.listener, self.token = listener, token
        self._knocks: dict[int, _Knock] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number in [*self._knocks]:
            self._leave(number).close()
        self._selector.close()

    def let_in(self, wanted: Collection[int]) -> list[tuple[socket.socket, int]]:
        """Return the connections of wanted ranks that have sent the token, if any does so soon."""
        found: list[tuple[socket.socket, int]] = []
        for key, _ in self._selector.select(_LOOK):
            if key.fileobj is self.listener:
                self._open()
            elif key.fd in self._knocks:
                rank = self._hear(key.fd)
                if rank in wanted:
                    found.append((self._leave(key.fd), rank))
                elif rank >= 0:
                    self._leave(key.fd).close()
        over = [number for number, knock in self._knocks.items() if knock.until < monotonic()]
        too_many = [*self._knocks][: max(0, len(self._knocks) - _KNOCKING)]
        for number in {*over, *too_many}:
            self._leave(number).close()
        return found

    def _open(self) -> None:
        with suppress(
            OSError
        ):  # the caller has gone again, or this process has no free file descriptor
            end, _ = self.listener.accept()
            end.setblocking(False)
            self._knocks[end.fileno()] = _Knock(end, bytearray(), monotonic() + _PATIENCE)
            self._selector.register(end, selectors.EVENT_READ)

    def _hear(self, number: int) -> int:
        """Return the rank that a connection has sent after the token; -1: not yet. Close what sends
        other bytes, or ends."""
        end, said, _ = self._knocks[number]
        length = len(self.token) + _RANK.size
        try:
            more = end.recv(length - len(said))
        except BlockingIOError:
            return -1
        except OSError:
            more = b""
        said += more
        token = bytes(said[: len(self.token)])
        if more and len(said) == length and secrets.compare_digest(token, self.token):
            return _RANK.unpack(said[len(token) :])[0]
        if not more or len(said) == length:
            self._leave(number).close()
        return -1

    def _leave(self, number: int) -> socket.socket:
        self._selector.unregister(self._knocks[number].end)
        return self._knocks.pop(number).end
