"""The two ends of an edge between lanes of different processes.

An edge has a connection of its own, on which its values travel in the order in which their lane sends them. With each
goes a number, that of its form; a form that is new follows it once, as checked data. Who receives knows the order from
the plan, and asks for each value with one byte as soon as its slot is free; it is sent once it is asked for.

Where both lanes compute on devices that are joined, tensors go straight from one to the other, after the number that
tells their form; where only one end is on a device, or both on the same, it copies from or to the memory of its host.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcpipe.runtime.border import Border
from funcpipe.runtime.cable import Cable, memory_view
from funcpipe.runtime.cache_key import border_key_or_none
from funcpipe.runtime.connection import LostError, lost_by_device
from funcpipe.runtime.device_stream import DeviceStream
from funcpipe.runtime.mail import Inbox, Mailbox, PoolLevel
from funcpipe.runtime.plain_tensors import materialized
from funcpipe.runtime.stream import Place, Ticket
from funcpipe.runtime.wire_format import TensorLayout, TreeForm, form_key, form_of, pack_form, sendable, unpack_form
from funcpipe.runtime.worker import Worker

_HEAD = struct.Struct("<QQ")
"""What goes before a value: the number of its form, and how many bytes the form has that follows; 0: it is known."""

_FORMS = 4096
"""So many forms an edge remembers."""

_ASKS = 4096
"""So many bytes with which values are asked for are read at once, at most."""

_SMALL = 1 << 18
"""Values of so many bytes at most are read by their lane: a thread that reads them beside it gains less than it costs."""


class EdgeWay(NamedTuple):
    """How the values of an edge get from one process to another.

    Attributes:
        cable: the connection.
        name: of the edge.
        me: the rank at this end.
        lost: called when the connection has ended.
        stream: where this rank's end is on a device with streams, one of these.
    """

    cable: Cable
    name: str
    me: int
    lost: Callable[[LostError], None]
    stream: DeviceStream | None = None


class _Edge:
    """What both ends of an edge have. They number the same forms in the same order."""

    greeting = ""
    """Which of the two it is."""

    def __init__(self, way: EdgeWay) -> None:
        self.cable, self.me, self.lost, self.stream = way.cable, way.me, way.lost, way.stream
        self.direct = way.stream is not None and way.stream.group is not None
        self.worker = Worker(f"funcpipe edge {way.name}", self.cable.cut, patience=1.0)
        self.worker.start()

    def greet(self) -> None:
        """Connect the devices of both ends, where they are joined."""
        if self.stream is not None:
            self.stream.greet(self.greeting)

    def _safely(self, job: Callable[[], None]) -> None:
        """Do a job; an error breaks the link."""
        try:
            job()
        except LostError as error:
            self.lost(error)
        except torch.distributed.DistBackendError as error:
            self.lost(lost_by_device(self.cable.rank, error))
        except (RuntimeError, MemoryError) as error:  # of this process, mostly for want of memory
            text = f"its values between it and rank {self.cable.rank} cannot be moved: {type(error).__name__}: {error}"
            self.lost(LostError(self.me, text))
        except Exception as error:
            self.lost(LostError(self.cable.rank, f"what it sent cannot be read: {type(error).__name__}: {error}"))


@dataclass
class _Parcel:
    """A value under way.

    Attributes:
        left: pieces of memory that are to be written.
        kept: the tensors whose memory that is.
        key: of the slot that it lies in, once it is written.
        box: the mailbox of the lane that sends.
        is_asked: has it been asked for.
    """

    left: list[Any]
    kept: list[Tensor]
    key: tuple[int, int]
    box: Inbox
    is_asked: bool = False


class EdgeOut(_Edge):
    """The end that sends: a lane writes what is asked for and the system takes at once, a worker what is to be waited for."""

    greeting = "out"

    def __init__(self, way: EdgeWay) -> None:
        super().__init__(way)
        self.numbers: dict[Any, int] = {}
        self.box = Inbox()
        self.to = 0
        self._gate = threading.Lock()
        self._parcels: deque[_Parcel] = deque()
        self._writing = False
        """Does a thread write parcels, or the worker soon."""
        self._asked = 0
        """So many values are asked for beyond those that are written; of the thread that writes."""

    def begin(self, to: int, box: Inbox) -> None:
        """A run begins; a slot of lane ``to`` that is free again is put into the box."""
        if len(self.numbers) > _FORMS:
            self.numbers.clear()
        self.to, self.box = to, box

    def send(self, slot: int, value: Border) -> None:
        """Begin to send a value into a slot; of a device, once it is there. Raises PlanError for what cannot travel."""
        home = _at_host if self.stream is None else self.stream.at_home
        leaves = [home(leaf) if isinstance(leaf, Tensor) else leaf for leaf in map(sendable, value.leaves)]
        key = form_key(leaves, value.spec, value.flags, value.shared)
        number, text = self.numbers.get(key), b""
        if number is None:
            text = pack_form(form_of(leaves, value.spec, value.flags, value.shared))
            number = self.numbers[key] = len(self.numbers)
        post = partial(self._post, _HEAD.pack(number, len(text)) + text, (self.to, slot), self.box)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]
        if self.stream is not None and not self.direct:
            copies, wait = self.stream.to_host(tensors)
            self.worker.give(partial(self._safely, partial(_then, wait, post, copies)))
            return
        try:
            post([] if self.direct else tensors)
            if self.stream is not None:  # second: the other end takes what follows once it knows its form
                self.stream.send(tensors)
        except LostError as error:
            self.lost(error)
        except torch.distributed.DistBackendError as error:
            self.lost(lost_by_device(self.cable.rank, error))

    def _post(self, head: bytes, key: tuple[int, int], box: Inbox, tensors: list[Tensor]) -> None:
        """Write what goes from host to host, when all before it is written and it is asked for."""
        parcel = _Parcel([head, *map(memory_view, tensors)], tensors, key, box)
        with self._gate:
            self._parcels.append(parcel)
            if self._writing:
                return
            self._writing = True
        self._write(wait=False)

    def _write(self, *, wait: bool) -> None:
        """Write what waits, by one thread at a time: as far as it goes at once, else the worker goes on."""
        while True:
            with self._gate:
                self._writing = bool(self._parcels)
                if not self._writing:
                    return
                parcel = self._parcels[0]
            if not parcel.is_asked:
                self._asked = self._asked or self.cable.read_some(_ASKS, wait=wait)
                if self._asked:
                    self._asked, parcel.is_asked = self._asked - 1, True
            if parcel.is_asked:
                parcel.left = self.cable.write(parcel.left, wait=wait)
            if parcel.left:
                self.worker.give(partial(self._safely, partial(self._write, wait=True)))
                return
            self._parcels.popleft()
            parcel.box.put_quietly(parcel.key, None)


class EdgeIn(_Edge):
    """The end that receives: each value is asked for, in the order of the plan, as soon as its slot is free.

    So the other end knows that it may send before it has the value. What has come is read by a worker, beside what the lane
    does; where it is small by the lane itself, when it needs it: to wake a thread and be woken by it takes longer.
    """

    greeting = "in"

    def __init__(self, way: EdgeWay) -> None:
        super().__init__(way)
        self._room = TensorLayout.room if way.stream is None else way.stream.host_room
        self.forms: list[TreeForm] = []
        self.words: dict[int, Any] = {}
        self._asked: deque[tuple[int, Any]] = deque()
        """The slots of what is asked for and has not come, with the events after which they are free (None: now)."""
        self._slots: Sequence[int] = ()
        self._taken: set[int] = set()
        self._freed: dict[int, Any] = {}
        self._next = 0
        self._most = 0
        """Bytes of the largest value since the run began."""
        self._take: Callable[[], tuple[int, Ticket]] | None = None
        """Where the lane reads, what does."""

    def begin(self, slots: Sequence[int], box: Mailbox, levels: Mapping[int, PoolLevel], place: Place) -> None:
        """A run begins: its values come into these slots of the lane at ``place``, in this order, told to its box."""
        if len(self.forms) > _FORMS:
            self.forms.clear()
            self.words.clear()
        self._slots, self._taken, self._freed, self._next = slots, set(), {}, 0
        if self.stream is not None:
            place.copy_streams.append(self.stream.stream)
        self._safely(self._ask)
        take = partial(self._counted, levels, place)
        self._take = take if self._lane_reads() else None
        self._most = 0
        if self._take is None:
            self.worker.give(partial(self._safely, partial(self._receive_all, len(slots), box, take)))

    def _lane_reads(self) -> bool:
        """Does the lane read the values of a run that begins: were all of the one before small."""
        return self.stream is None and self._most <= _SMALL

    def bring(self, slot: int, box: Mailbox) -> None:
        """Read, where the lane of this box does, what comes up to the value of a slot, or until the box is stopped."""
        if self._take is None:
            return
        box.waits, box.wake = slot, self.cable.deafen
        try:
            while slot not in box.came and not box.stopped:
                at, ticket = self._take()
                box.came[at] = ticket
        except Exception as error:
            if not box.stopped:  # the worker finds out if others have told why; this lane may be ended meanwhile
                error.__traceback__ = error.__context__ = None  # their frames have all values of this lane
                self.worker.give(partial(self._safely, partial(_raise, error)))
        else:
            box.waits = None
        finally:
            box.wake = None

    def free(self, slot: int, event: Any) -> None:
        """A slot is free again, after an event (None: now)."""
        self._freed[slot] = event
        self._taken.discard(slot)
        self._safely(self._ask)

    def _ask(self) -> None:
        """Ask for the next values, up to the first whose slot is taken."""
        first = self._next
        while self._next < len(self._slots) and (slot := self._slots[self._next]) not in self._taken:
            self._will_come(slot)
            self._next += 1
        if self._next > first:  # of these bytes as many are under way as there are slots at most, so this never waits
            self.cable.write([bytes(self._next - first)], wait=True)

    def _will_come(self, slot: int) -> None:
        """A value is about to be asked for."""
        self._taken.add(slot)
        self._asked.append((slot, self._freed.pop(slot, None)))

    def _receive_all(self, count: int, box: Mailbox, take: Callable[[], tuple[int, Ticket]]) -> None:
        for _ in range(count):
            slot, ticket = take()
            box.put(slot, ticket)
            del ticket

    def _counted(self, levels: Mapping[int, PoolLevel], place: Place) -> tuple[int, Ticket]:
        """The next value of a run, which now lies in its slot."""
        slot, ticket = self._receive(place)
        levels[slot].add()
        return slot, ticket

    def _receive(self, place: Place) -> tuple[int, Ticket]:
        """The next value of a run, and its slot."""
        head = bytearray(_HEAD.size)
        self.cable.read([head])
        kind, length = _HEAD.unpack(head)
        if length:
            self.forms.append(unpack_form(bytes(self.cable.read_counted(length))))
        form, (slot, free), event = self.forms[kind], self._asked.popleft(), None
        if self.direct:
            assert self.stream is not None
            leaves, event = self.stream.receive(form.leaves, free, place.stream)
        else:
            leaves = [self._room(leaf) if isinstance(leaf, TensorLayout) else leaf for leaf in form.leaves]
            views = [memory_view(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]
            self.cable.read(views)
            self._most = max(self._most, sum(map(len, views)))
            if self.stream is not None:
                leaves, event = self.stream.from_host(leaves, free, place.stream)
        value = Border(leaves, form.spec, form.flags)
        value.shared = form.shared
        if kind not in self.words:
            self.words[kind] = border_key_or_none(value)
        value.words = self.words[kind]
        return slot, (value, event)


class Outbox(Mailbox):
    """Of a lane that is not here: one that is puts into it what goes there, values and slots that are free again."""

    def __init__(self) -> None:
        super().__init__()
        self.out: EdgeOut | None = None
        self.back: EdgeIn | None = None

    def put(self, key: Any, item: Any) -> None:
        """A ticket for a slot there, or (lane, slot) of this process that the other lane fills."""
        if isinstance(key, int):
            assert self.out is not None
            value, _ = item
            self.out.send(key, value)
        else:
            assert self.back is not None
            self.back.free(key[1], item)

    def bring(self, slot: int, box: Mailbox) -> None:
        """Read what comes from there up to the value of a slot, if the lane of the box does that."""
        assert self.back is not None
        self.back.bring(slot, box)


def _then(wait: Callable[[], None], post: Callable[[list[Tensor]], None], tensors: list[Tensor]) -> None:
    """Post tensors, once they are there."""
    wait()
    post(tensors)


def _raise(error: Exception) -> None:
    raise error


def _at_host(tensor: Tensor) -> Tensor:
    """A tensor in memory of the host that nobody shares lazily."""
    return materialized(tensor.cpu())
