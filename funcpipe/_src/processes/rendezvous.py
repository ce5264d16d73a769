"""Connect the processes of a plan: exchange facts in torch.distributed's store, then open sockets.

The store may not answer: if its process is stopped, or the network is cut, torch's calls do not
return. So a thread asks the store, and the caller waits for a limited time. After the processes are
connected, they do not use the store.
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

LIMIT = 600.0  # the default timeout of ranks, in seconds

STALL = 6.0
"""Extra seconds for the first connections, because torch's store delays every 25th client by 5
s."""

_LOOK = 0.2
"""Seconds after which a process that waits for connections checks whether it must continue."""

_PATIENCE = 5.0  # seconds that a new connection has to send its token

_KNOCKING = 64  # the most connections without a token so far. The oldest of more are closed

_RANK = struct.Struct("<I")


def below(name: str, store: Any) -> Any:
    """Return a store whose keys have a prefix in another store."""
    import torch.distributed as dist

    return dist.PrefixStore(name, store)  # pyright: ignore[reportPrivateImportUsage]


def refuse_to_join(store: Any, rank: int, error: Exception) -> None:
    """Tell processes that make their first team why this process does not take part."""
    first = below(team_name(1), store)
    with suppress(PeerError, LostError):
        answered(lambda: first.set(f"hello/{rank}", json.dumps({"refused": str(error)})), 1.0)


def team_name(number: int) -> str:
    """Return the name of a team, the prefix of its keys in the store."""
    return f"team{number}"


def answered(job: Callable[[], T], seconds: float) -> T:
    """Return the result of a job with the store, or raise its error.

    Raises:
        PeerError: the store is gone, or does not answer for ``seconds``.
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
        raise PeerError(
            f"the store of torch.distributed has not answered for {seconds:g} s"
        ) from None
    if isinstance(error, RuntimeError):
        text = str(error).split("\n")[0]
        raise PeerError(
            f"the store of torch.distributed is gone: the process that keeps it has ended ({text})"
        ) from None
    if error is not None:
        raise error
    return result  # pyright: ignore[reportReturnType]


class Rendezvous:
    """Connects this process with the other processes of a plan.

    Args:
        store: a store for these processes only.
        rank: the number of this process.
        names: the name of each process in errors.
        seconds: the time to wait for the others.
        goes_on: a function that returns whether to wait longer. Called on another thread.
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
        """Send this process's facts to all, and return the facts of all processes.

        Raises LostError if a process does not come.
        """
        host = host_of(self._store)
        loopback = own_loopback(host)
        mine = {**mine, "address": own_address([host]), "loopback": loopback}
        self._say("hello", mine)
        said = self._said("hello", range(len(self._names)))
        # On the store's own machine, its host may be a loopback name. Then use the other processes'
        # addresses.
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
        """Connect to every other process. ``add`` gets each connection with its rank.

        The higher rank of two calls the lower rank, and sends a token that it has read in the
        store. So a foreign process cannot connect.

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
        """Return the entries of some processes in the store. Raises LostError after a timeout."""
        deadline, pause, missing = monotonic() + self._seconds, 0.001, [*ranks]
        while missing := [rank for rank in missing if not self._store.check([f"{about}/{rank}"])]:
            if not self._goes_on() or monotonic() > deadline:
                names = ", ".join(self._names[rank] for rank in missing)
                text = (
                    f"did not come: {names} made no fp.ranks, or did not enter its with block, for "
                    f"{self._seconds:g} s"
                )
                raise LostError(missing[0], text)
            sleep(pause)
            pause = min(2 * pause, 0.05)
        return [json.loads(self._store.get(f"{about}/{rank}")) for rank in ranks]


def listening(hosts: Sequence[str]) -> socket.socket:
    """Return a socket that listens at the first of these addresses that this machine has.

    Raises OSError if this machine has none of them.
    """
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
    """A connection without a token so far: its socket, the received bytes, and a deadline."""

    end: socket.socket
    said: bytearray
    until: float


class _Door:
    """Accepts connections that send the token and a rank.

    It reads all connections at the same time, so a slow one does not delay the others.
    """

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
        # The caller may have gone, or this process may have no free file descriptor.
        with suppress(OSError):
            end, _ = self.listener.accept()
            end.setblocking(False)
            self._knocks[end.fileno()] = _Knock(end, bytearray(), monotonic() + _PATIENCE)
            self._selector.register(end, selectors.EVENT_READ)

    def _hear(self, number: int) -> int:
        """Return the rank that a connection has sent after the token, or -1.

        Close a connection that ends, or sends a wrong token.
        """
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
