"""The connection to one other process: a socket that carries frames, each a head and a body, in
both directions.

`send` writes as many bytes as the system accepts, and returns. The thread that reads (`Reading`)
writes the other bytes. So no lane waits for a process that does not read. The parser takes bytes as
they arrive, in pieces of any size.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import suppress
from enum import IntEnum
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor

from funcpipe._src.core.plain_tensors import bytes_of, memory_view
from funcpipe._src.core.tensor_layout import TensorLayout, machine_memory
from funcpipe._src.engine.mail import Stop
from funcpipe._src.processes.wire_format import TreeForm, unpack_form

if TYPE_CHECKING:
    from funcpipe._src.processes.team import Team

_MOST = 512  # the most pieces of memory per write. The system accepts at most 1024

_BUFFER = 1 << 16
"""The size of a block in which frames are read. A larger body is read directly into its tensor."""

_FORMS = 4096  # the most forms of values that a sender numbers before it begins again

_NO_SIGNAL = int(getattr(socket, "MSG_NOSIGNAL", 0))
"""A write to a closed socket must not end programs that let SIGPIPE end them."""


class FrameKind(IntEnum):
    """The kind of a frame.

    VALUE carries a value for a lane. JOINED carries only its form, and its tensors travel from
    device to device. FREE says that a slot is free again. DATA carries a message of a channel.
    FAILED, DOING, BEAT and BYE are messages about the sending process.
    """

    VALUE = 0
    JOINED = 1
    FREE = 2
    DATA = 3
    FAILED = 4
    DOING = 5
    BEAT = 6
    BYE = 7


class Head(NamedTuple):
    """The head of a frame."""

    kind: int  # a `FrameKind`
    run: int = 0  # the number of the run
    batch: int = 0  # the number of the batch within the run
    lane: int = 0  # the lane that gets the frame; for DATA the channel
    slot: int = 0  # the slot of a value, or the slot that is free again
    other: int = 0  # for VALUE and JOINED the number of the form; for FREE the lane with the slot
    length: int = 0  # the bytes of the body; for VALUE and JOINED the bytes of the form, 0 if known


_HEAD = struct.Struct("<IIIIIIQ")

Pieces: TypeAlias = Generator[memoryview]
"""Yields the memory that the next bytes of the connection fill."""


class KnownForm:
    """The form of values that a peer has sent, and their cache key after the first value."""

    __slots__ = ("form", "is_keyed", "key")

    def __init__(self, form: TreeForm) -> None:
        self.form, self.is_keyed = form, False
        self.key: Hashable = None


class LostError(Exception):
    """Raised if the connection to a process has ended, or its bytes are invalid.

    ``rank`` is the process at fault, -1 if unknown.
    """

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank, self.text = rank, text


def lost_by_device(rank: int, error: RuntimeError) -> LostError:
    """Return the error for a failed group of devices, without torch's source locations."""
    parts = str(error).split("\n")[0].split(", ")
    text = ", ".join(part for part in parts if ".cpp:" not in part and "NCCL version" not in part)
    return LostError(rank, f"the NCCL connection of its device with this one has ended: {text}")


class Peer:
    """One connection. Any thread writes; one thread at a time reads.

    Attributes:
        rank: the number of the other process.
        is_open: whether neither end has closed the connection.
    """

    def __init__(self, connected: socket.socket, rank: int, team: Team) -> None:
        with suppress(OSError):  # not a TCP socket
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setblocking(False)
        self._socket, self.rank, self._team = connected, rank, team
        self.is_open = True
        self._gate = threading.Lock()
        self._unwritten: deque[tuple[Any, Any]] = deque()
        """Pieces of memory to write, each with the tensor that owns it."""
        self._numbers: dict[Any, int] = {}
        self._forms: dict[int, KnownForm] = {}
        self._buffer = memoryview(bytearray(_BUFFER))
        self._parser = self._parse()
        self._wanted = next(self._parser)
        _open.add(self)

    def fileno(self) -> int:
        """Return the file descriptor of the socket."""
        return self._socket.fileno()

    # -- writing

    def send(self, frame: Head, body: bytes = b"", tensors: Sequence[Tensor] = ()) -> bool:
        """Send a frame. Tensors are dense and must not change until they are written. Returns
        whether all was written."""
        with self._gate:
            self._add(frame, body, tensors)
            return self._flush()

    def send_value(
        self, frame: Head, key: Any, form: Callable[[], bytes], tensors: Sequence[Tensor]
    ) -> bool:
        """Send a value whose form has this key. The form itself is sent only with the first."""
        with self._gate:
            number, text = self._numbers.get(key), b""
            if number is None:
                text = form()
                if len(self._numbers) >= _FORMS:
                    self._numbers.clear()
                number = self._numbers[key] = len(self._numbers)
            self._add(frame._replace(other=number, length=len(text)), text, tensors, counted=False)
            return self._flush()

    def knows(self, key: Any) -> bool:
        """Return whether the form with this key was sent."""
        return key in self._numbers

    def _add(
        self, frame: Head, body: bytes, tensors: Sequence[Tensor], *, counted: bool = True
    ) -> None:
        if counted:
            frame = frame._replace(length=len(body) + sum(tensor.nbytes for tensor in tensors))
        self._unwritten.append((_HEAD.pack(*frame) + body, None))
        self._unwritten.extend((memory_view(tensor), tensor) for tensor in tensors)

    def flush(self) -> bool:
        """Write as much as the system accepts. Return whether all was written."""
        with self._gate:
            return self._flush()

    def _flush(self) -> bool:
        left = self._unwritten
        while left and self.is_open:
            try:
                count = self._socket.sendmsg(
                    [piece for piece, _ in islice(left, _MOST)], (), _NO_SIGNAL
                )
            except BlockingIOError:
                return False
            # The reading thread finds the reason: the other process may have sent its failure.
            except OSError:
                break
            while left and count >= len(left[0][0]):
                count -= len(left.popleft()[0])
            if count:  # the write ended within a piece: keep the rest
                piece, kept = left[0]
                left[0] = memoryview(piece)[count:], kept
        left.clear()  # all was written, or the connection has ended
        return True

    def drain(self, goes_on: Callable[[], bool]) -> None:
        """Wait until all bytes are written, or the connection has ended.

        Raises Stop if ``goes_on()`` is False.
        """
        while not self.flush():
            if not goes_on():
                raise Stop
            with suppress(OSError, ValueError):  # closed meanwhile
                select.select([], [self], [], 0.1)

    # -- reading

    def read(self) -> int:
        """Read once, and return the count of bytes. Raises LostError if the connection has
        ended."""
        wanted = self._wanted
        is_large = len(wanted) >= _BUFFER
        try:
            count = self._socket.recv_into(wanted if is_large else self._buffer)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._lost(error) from None
        if not count:
            raise self._lost("its end is closed")
        try:
            if is_large:
                self._filled(count)
            else:
                self._spread(self._buffer[:count])
        except Stop:
            raise
        except Exception as error:
            text = f"sent bytes that cannot be read: {type(error).__name__}: {error}"
            raise LostError(self.rank, text) from None
        return count

    def _spread(self, data: memoryview) -> None:
        """Copy bytes into the memory that the parser waits for."""
        while data:
            count = min(len(self._wanted), len(data))
            self._wanted[:count] = data[:count]
            data = data[count:]
            self._filled(count)

    def _filled(self, count: int) -> None:
        self._wanted = self._wanted[count:]
        if not self._wanted:
            self._wanted = next(self._parser)

    def _parse(self) -> Pieces:
        """Parse one frame after the other, and deliver each to the team."""
        team, head = self._team, bytearray(_HEAD.size)
        while True:
            yield memoryview(head)
            frame = Head(*_HEAD.unpack(head))
            # A damaged length must not make this process allocate all memory.
            if frame.length > machine_memory():
                raise ValueError(f"a frame of {frame.length} bytes is larger than the memory")
            if frame.kind in (FrameKind.VALUE, FrameKind.JOINED):
                if frame.length:
                    body = _room(frame.length)
                    yield memory_view(body)
                    # A number that comes again replaces its form: the sender has begun again.
                    self._forms[frame.other] = KnownForm(unpack_form(bytes_of(body)))
                known = self._forms[frame.other]
                if frame.kind == FrameKind.VALUE:
                    yield from team.value(self.rank, frame, known)
                else:
                    team.joined(self.rank, frame, known)
            elif frame.kind == FrameKind.FREE:
                team.free(self.rank, frame)
            else:
                body = _room(frame.length)
                if frame.length:
                    yield memory_view(body)
                if frame.kind == FrameKind.DATA:
                    team.data(self.rank, frame.lane, body)
                else:
                    team.word(self.rank, FrameKind(frame.kind), bytes_of(body))
                del body

    # -- its end

    def shut(self) -> None:
        """End the connection, and wake threads that wait at both ends. Written bytes still
        arrive."""
        self.is_open = False
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.is_open = False
        self._socket.close()

    def _lost(self, why: object) -> LostError:
        return LostError(
            self.rank,
            f"the connection to its process has ended: {why}; if the process was killed or has "
            "exited, start all ranks again, and load the last checkpoint",
        )


def _room(length: int) -> Tensor:
    """Return memory for a message. The system allocates pages only as bytes arrive."""
    return TensorLayout((length,), (1,), torch.uint8).room()


_open: WeakSet[Peer] = WeakSet()


def _close_in_child() -> None:
    """Close the connections in a forked child. Otherwise those of a killed parent would stay
    open."""
    for peer in [*_open]:
        peer.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
