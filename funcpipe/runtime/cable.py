"""A socket between two processes: one end writes values in order, the other one reads them and asks for more."""

from __future__ import annotations

import ctypes
import json
import secrets
import selectors
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from time import monotonic
from typing import Any, NamedTuple, Self

from torch import Tensor

from funcpipe.runtime.connection import LostError
from funcpipe.runtime.wire_format import machine_memory

_MOST = 512
"""So many pieces of memory go to the system at once; it takes 1024."""

_PIECE = 1 << 22
"""So many bytes that are only announced get memory at once."""

_NO_SIGNAL = int(getattr(socket, "MSG_NOSIGNAL", 0))
"""Programs may let SIGPIPE end them, as those whose output is piped."""

_AT_ONCE = int(getattr(socket, "MSG_DONTWAIT", 0))
_ALL = int(getattr(socket, "MSG_WAITALL", 0))

_LOOK = 0.2
"""Seconds after which who waits for the other end looks whether it still should."""

_PATIENCE = 5.0
"""Seconds that who knocks has for the word by which it is let in."""

_KNOCKING = 64
"""So many may be about to say it at a time; the first of more have to go."""


_memory: Any = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.restype = ctypes.py_object
_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200


def memory_view(tensor: Tensor) -> memoryview:
    """The bytes of a dense tensor's memory, to be read or written to while the tensor is kept.

    Not by numpy: torch takes memory that it has seen for no memory of its own.
    """
    return _memory(tensor.data_ptr(), tensor.nbytes, _WRITABLE)


class Cable:
    """A connected socket, and the rank at its other end."""

    def __init__(self, connected: socket.socket, rank: int) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(None)
        self._socket, self.rank = connected, rank

    def write(self, pieces: Sequence[Any], *, wait: bool) -> list[Any]:
        """Write pieces of memory; what is left of them, where the system takes no more and this does not ``wait``.

        Raises:
            LostError: the connection has ended.
        """
        left, flags = [*filter(len, pieces)], _NO_SIGNAL if wait else _NO_SIGNAL | _AT_ONCE
        while left:
            try:
                count = self._socket.sendmsg(left[:_MOST], (), flags)
            except BlockingIOError:
                return left
            except OSError as error:
                raise self._lost(error) from None
            left = _after(left, count)
        return left

    def read(self, pieces: Sequence[Any]) -> None:
        """Wait for bytes, and fill pieces of memory with them. Raises LostError: the connection has ended."""
        left = [*filter(len, pieces)]
        while left:
            try:
                count, *_ = self._socket.recvmsg_into(left[:_MOST], 0, _ALL)
            except OSError as error:
                raise self._lost(error) from None
            if not count:
                raise self._lost("its end is closed")
            left = _after(left, count)

    def read_counted(self, length: int) -> bytearray:
        """Wait for the bytes that the other end has announced. Memory grows with the bytes that arrive.

        Raises:
            LostError: the connection has ended, or the announced length exceeds this machine's memory.
        """
        if length > machine_memory():
            raise LostError(self.rank, f"what it sent cannot be read: it says that {length} bytes follow")
        data = bytearray()
        while len(data) < length:
            piece = bytearray(min(length - len(data), _PIECE))
            self.read([piece])
            data += piece
        return data

    def read_some(self, most: int, *, wait: bool) -> int:
        """Read bytes without a meaning; how many came, at most ``most``. With ``wait`` there is at least one.

        Raises:
            LostError: the connection has ended.
        """
        try:
            count = len(self._socket.recv(most, 0 if wait else _AT_ONCE))
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost(error) from None
        if not count:
            raise self._lost("its end is closed")
        return count

    def deafen(self) -> None:
        """Let whoever reads at this end find its end, of which the other end hears nothing."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def cut(self) -> None:
        """End the connection, which wakes whoever waits at this end, and who reads at the other one."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back, when nobody uses it any more."""
        self._socket.close()

    def _lost(self, why: object) -> LostError:
        return LostError(self.rank, f"the connection to its process has ended: {why}")


def _after(pieces: list[Any], count: int) -> list[Any]:
    """What is left of pieces of memory after so many bytes."""
    for number, piece in enumerate(pieces):
        if count < len(piece):
            return [memoryview(piece)[count:], *pieces[number + 1 :]] if count else pieces[number:]
        count -= len(piece)
    return []


def _listen(hosts: Sequence[str]) -> socket.socket:
    """A socket that listens at the first of these addresses that is one of this machine's. Raises OSError: none is."""
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


def connected(
    store: Any, me: int, ranks: Sequence[int], hosts: Sequence[str], seconds: float, goes_on: Callable[[], bool]
) -> Cable:
    """A cable between two ranks, which both make, over a store: the first is called, at one of its ``hosts``.

    Raises:
        LostError: the other one does not come within so many seconds, or cannot be reached.
    """
    seat = ranks.index(me)
    try:
        return Cable(_called(store, seconds) if seat else _answered(store, hosts, seconds, goes_on), ranks[1 - seat])
    except (OSError, RuntimeError) as error:
        raise LostError(ranks[1 - seat], f"could not be connected: {error}") from None


def _answered(store: Any, hosts: Sequence[str], seconds: float, goes_on: Callable[[], bool]) -> socket.socket:
    """The end of a connection that says in a store where it is, and waits for the other one.

    Raises:
        OSError: nobody came for so many seconds, or this waits no longer.
    """
    with ExitStack() as opened:
        listener = opened.enter_context(closing(_listen(hosts)))
        token, deadline = secrets.token_bytes(16), monotonic() + seconds
        host, port, *_ = listener.getsockname()
        store.set("cable", json.dumps([host, port, token.hex()]))
        listener.setblocking(False)
        door = opened.enter_context(_Door(listener, token))
        while goes_on() and monotonic() < deadline:
            end = door.let_in()
            if end is not None:
                return end
    raise TimeoutError(f"nobody came for {seconds:g} s")


class _Knock(NamedTuple):
    """A connection that has not sent the whole token: its socket, the bytes so far, and a deadline."""

    end: socket.socket
    said: bytearray
    until: float


class _Door:
    """Accepts connections that send the token. Reads all connections at once, so a slow one delays no other."""

    def __init__(self, listener: socket.socket, token: bytes) -> None:
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

    def let_in(self) -> socket.socket | None:
        """Return a connection that has sent the token, if one does so soon."""
        for key, _ in self._selector.select(_LOOK):
            if key.fileobj is self.listener:
                self._open()
            elif key.fd in self._knocks and self._hear(key.fd):
                return self._leave(key.fd)
        over = [number for number, knock in self._knocks.items() if knock.until < monotonic()]
        too_many = [*self._knocks][: max(0, len(self._knocks) - _KNOCKING)]
        for number in {*over, *too_many}:
            self._leave(number).close()
        return None

    def _open(self) -> None:
        with suppress(OSError):  # the caller has gone again, or this process has no free file descriptor
            end, _ = self.listener.accept()
            end.setblocking(False)
            self._knocks[end.fileno()] = _Knock(end, bytearray(), monotonic() + _PATIENCE)
            self._selector.register(end, selectors.EVENT_READ)

    def _hear(self, number: int) -> bool:
        """Return whether a connection has sent the token. Close connections that send other bytes, or end."""
        end, said, _ = self._knocks[number]
        try:
            more = end.recv(len(self.token) - len(said))
        except BlockingIOError:
            return False
        except OSError:
            more = b""
        said += more
        if more and len(said) == len(self.token) and secrets.compare_digest(bytes(said), self.token):
            return True
        if not more or len(said) == len(self.token):
            self._leave(number).close()
        return False

    def _leave(self, number: int) -> socket.socket:
        self._selector.unregister(self._knocks[number].end)
        return self._knocks.pop(number).end


def _called(store: Any, seconds: float) -> socket.socket:
    """The end of a connection that goes where the other one says. Raises OSError, RuntimeError: it cannot."""
    deadline = monotonic() + seconds
    store.wait(["cable"], timedelta(seconds=seconds))
    host, port, token = json.loads(store.get("cable"))
    end = socket.create_connection((host, port), max(0.001, deadline - monotonic()))
    try:
        end.sendall(bytes.fromhex(token))
    except OSError:
        end.close()
        raise
    return end
