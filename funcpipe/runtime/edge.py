"""The two ends of an edge between lanes of different processes.

An edge has a connection of its own, on which its values travel in the order in which their lane sends them. With each
goes a number, that of its form; a form that is new follows it once, as checked data. Who receives knows the order from
the plan, so it asks for each value as soon as its slot is free, and with equal batches it knows the form beforehand
and asks for the memory at the same time: then the number comes behind the tensors.

Where both lanes compute on devices that are joined, tensors go straight from one to the other, after the message that
tells their form; where only one end is on a device, or both on the same, it copies from or to the memory of its host.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcpipe.runtime.border import Border
from funcpipe.runtime.cache_key import border_key_or_none
from funcpipe.runtime.connection import LostError, Way, lost_by_device
from funcpipe.runtime.message import HEAD, Message, head_of, number_of, rooms, unpacked
from funcpipe.runtime.plain_tensors import materialized
from funcpipe.runtime.stream import Place, Ticket
from funcpipe.runtime.transport import Inbox, Mailbox, PoolLevel
from funcpipe.runtime.wire_format import (
    TensorLayout,
    TreeForm,
    form_key,
    form_of,
    memory,
    pack_form,
    sendable,
    unpack_form,
)
from funcpipe.runtime.worker import Worker

_MORE = 2
"""The tag of what follows a form that the other end did not expect; 0 is that of what it has asked for, maybe long before
(and 1 of what cuts a connection)."""

_FORMS = 4096
"""So many forms an edge remembers, and ..."""

_SIGNATURES = 64
"""... for batches of so many kinds which form each value has."""

_SPARE = 8
"""So many messages whose values have come are kept to be filled again: new memory of their size costs more than the copy."""


class _Edge:
    """What both ends of an edge have: they learn the same forms in the same order."""

    seat = 0
    """Which of the two it is."""

    def __init__(self, way: Way) -> None:
        self.connection, self.lost, self.stream = way.connection, way.lost, way.stream
        self.direct = way.stream is not None and way.stream.group is not None
        ends = [*way.connection.seats]
        self.me, self.peer = ends[self.seat], ends[1 - self.seat]
        self.forms: list[TreeForm] = []
        self.expected: dict[int, int] = {}
        """By the place of a value among those of a run, the number of its form in the last run of such a batch."""
        self._by_signature: dict[Any, dict[int, int]] = {}
        self.worker = Worker(f"funcpipe edge {way.name}", self.stop, patience=1.0)
        self.worker.start()

    def _begin(self, signature: Any) -> None:
        if len(self.forms) > _FORMS or len(self._by_signature) > _SIGNATURES:
            self._by_signature.clear()
            self._forget()
        self.expected = self._by_signature.setdefault(signature, {})

    def _forget(self) -> None:
        self.forms.clear()

    def greet(self) -> None:
        """Connect the devices of both ends, where they are joined."""
        if self.stream is not None:
            self.stream.greet("in" if self.seat else "out")

    def stop(self) -> None:
        """Let the worker's job end, once the connection is cut."""

    def _safely(self, job: Callable[[], None]) -> None:
        """Do a job in the worker; an error breaks the link."""
        try:
            job()
        except LostError as error:
            self.lost(error)
        except torch.distributed.DistBackendError as error:
            self.lost(lost_by_device(self.peer, error))
        except (RuntimeError, MemoryError) as error:  # of this process, mostly for want of memory
            text = f"its values between it and rank {self.peer} cannot be moved: {type(error).__name__}: {error}"
            self.lost(LostError(self.me, text))
        except Exception as error:
            self.lost(LostError(self.peer, f"what it sent cannot be read: {type(error).__name__}: {error}"))


class EdgeOut(_Edge):
    """The end that sends: a lane begins it, a worker waits until it is sent."""

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self.numbers: dict[Any, int] = {}
        self.box = Inbox()
        self.to = self.place = 0
        self.spare: deque[Message] = deque(maxlen=_SPARE)

    def _forget(self) -> None:
        super()._forget()
        self.numbers.clear()
        self.spare = deque(maxlen=_SPARE)  # not cleared: another thread may look through it

    def begin(self, signature: Any, to: int, box: Inbox) -> None:
        """A run begins: a slot of lane ``to`` that is free again is put into the box."""
        self._begin(signature)
        self.to, self.box, self.place = to, box, 0

    def send(self, slot: int, value: Border) -> None:
        """Begin to send a value into a slot; of a device, once it is there. Raises PlanError for what cannot travel."""
        home = _at_host if self.stream is None else self.stream.at_home
        leaves = [home(leaf) if isinstance(leaf, Tensor) else leaf for leaf in map(sendable, value.leaves)]
        key = form_key(leaves, value.spec, value.flags)
        number, text = self.numbers.get(key), b""
        if number is None:
            form = form_of(leaves, value.spec, value.flags)
            text = pack_form(form)
            number = self.numbers[key] = len(self.forms)
            self.forms.append(form)
        expected, self.expected[self.place] = self.expected.get(self.place), number
        self.place += 1
        parts = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]
        asked = None if expected is None else self.forms[expected]  # now: the next run may forget forms
        as_asked = number == expected
        post = partial(self._post, slot, asked, number, text, self.box, as_asked=as_asked)
        if self.stream is None:
            post(parts)
        elif self.direct:
            post([])  # first: the other end then takes what follows
            try:
                self.stream.send(parts)
            except torch.distributed.DistBackendError as error:
                self.lost(lost_by_device(self.peer, error))
        else:
            copies, wait = self.stream.to_host(parts)
            self.worker.give(partial(self._safely, partial(_then, wait, post, copies)))

    def _post(
        self,
        slot: int,
        asked: TreeForm | None,
        number: int,
        text: bytes,
        box: Inbox,
        parts: list[Tensor],
        *,
        as_asked: bool,
    ) -> None:
        """Begin to send what goes from host to host; the other end has asked for a form, which it has or has not."""
        more, message = list[Tensor](), None
        if asked is None or self.direct:
            first = [head_of(number, len(text))]
        elif asked.is_small:
            message = self._message(asked, number, parts) if as_asked else Message.of(asked, number, len(text))
            first = [message.whole]
        else:
            first = [*(parts if as_asked else rooms(asked)[1]), head_of(number, len(text))]
        if not as_asked:
            more = [torch.frombuffer(bytearray(text), dtype=torch.uint8), *parts] if text else parts
        tensors = [*first, *more]
        try:
            works = [self.connection.send(tensor, self.peer) for tensor in first]
            works += [self.connection.send(tensor, self.peer, _MORE) for tensor in more]
        except LostError as error:
            self.lost(error)
            return
        self.worker.give(
            partial(self._safely, partial(self._sent, slot, works, tensors, box, message if as_asked else None))
        )

    def _message(self, form: TreeForm, number: int, parts: list[Tensor]) -> Message:
        """A message with these tensors."""
        message = self._take_spare(form) or Message.of(form, number)
        for place, part in zip(message.places, parts, strict=True):
            place.copy_(memory(part))
        return message

    def _take_spare(self, form: TreeForm) -> Message | None:
        """A message for values of a form that has come; None: there is none."""
        spare = self.spare
        for _ in range(len(spare)):  # the worker adds to it meanwhile
            message = spare.popleft()
            if message.form is form:
                return message
            spare.append(message)
        return None

    def _sent(self, slot: int, works: list[Any], kept: list[Tensor], box: Inbox, message: Message | None) -> None:
        self.connection.finish(works, self.peer)
        if message is not None:
            self.spare.append(message)
        box.put_quietly((self.to, slot), (works, kept))


class _Asked(NamedTuple):
    """What was asked for of a value before it comes.

    Attributes:
        slot: where it will lie.
        free: the event after which that is free; None: it is.
        works: of what is expected, and of the message behind it that tells its form.
        head: the number of its form, and how long the form is that follows; where all is in one message, its end.
        expected: the number of the form that it had in the last such run; None: there was none.
        leaves: memory for a value of that form; None: it is in the message.
    """

    slot: int
    free: Any
    works: list[Any]
    head: Tensor
    expected: int | None
    leaves: list[Any] | None


class EdgeIn(_Edge):
    """The end that receives: each value is asked for, in the order of the plan, as soon as its slot is free.

    So the other end knows that it may send before it has the value, and a worker hands over what has come.
    """

    seat = 1

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        self._room = TensorLayout.room if way.stream is None else way.stream.host_room
        self.words: dict[int, Any] = {}
        self._gate = threading.Lock()
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._slots: Sequence[int] = ()
        self._taken: set[int] = set()
        self._freed: dict[int, Any] = {}
        self._next = 0

    def _forget(self) -> None:
        super()._forget()
        self.words.clear()

    def begin(
        self, signature: Any, slots: Sequence[int], box: Mailbox, levels: Mapping[int, PoolLevel], place: Place
    ) -> None:
        """A run begins: its values come into these slots of the lane at ``place``, in this order, told to its box."""
        self._begin(signature)
        self._asked, self._slots, self._taken, self._next = queue.SimpleQueue(), slots, set(), 0
        self._freed = {}
        if self.stream is not None:
            place.beside.append(self.stream.stream)
        self._safely(self._ask)
        self.worker.give(partial(self._safely, partial(self._receive_all, box, levels, place, self._asked)))

    def free(self, slot: int, event: Any) -> None:
        """A slot is free again, after an event (None: now)."""
        with self._gate:
            self._freed[slot] = event
            self._taken.discard(slot)
        self._safely(self._ask)

    def stop(self) -> None:
        """Let the worker's job end, once the connection is cut."""
        self._asked.put(None)

    def _ask(self) -> None:
        """Ask for the next values, up to the first whose slot is taken."""
        with self._gate:
            while self._next < len(self._slots) and self._slots[self._next] not in self._taken:
                slot = self._slots[self._next]
                self._taken.add(slot)
                self._asked.put(self._ask_for(self._next, slot))
                self._next += 1

    def _ask_for(self, place: int, slot: int) -> _Asked:
        ask, free = partial(self.connection.receive, source=self.peer), self._freed.pop(slot, None)
        expected = self.expected.get(place)
        form = None if expected is None or self.direct else self.forms[expected]
        if form is not None and form.is_small:
            packed = torch.empty(form.nbytes + HEAD, dtype=torch.uint8)
            return _Asked(slot, free, [ask(packed)], packed, expected, None)
        head = torch.empty(HEAD, dtype=torch.uint8)
        leaves, tensors = ([], []) if form is None else rooms(form, self._room)
        return _Asked(slot, free, [*map(ask, tensors), ask(head)], head, expected, leaves)

    def _receive_all(
        self,
        box: Mailbox,
        levels: Mapping[int, PoolLevel],
        place: Place,
        asked: queue.SimpleQueue[_Asked | None],
    ) -> None:
        for number in range(len(self._slots)):
            what = asked.get()
            if what is None:
                return
            ticket = self._receive(number, what, place)
            levels[what.slot].add()
            box.put(what.slot, ticket)
            del ticket, what

    def _receive(self, number: int, asked: _Asked, place: Place) -> Ticket:
        """The next value of a run."""
        more = partial(self.connection.receive, source=self.peer, tag=_MORE)
        finish = partial(self.connection.finish, rank=self.peer)
        finish(asked.works[::-1])  # the small one first: who waits for one that has come in part is not woken (gloo)
        kind, length = number_of(asked.head)
        if length:
            text = torch.empty(length, dtype=torch.uint8)
            finish([more(text)])
            self.forms.append(unpack_form(text.numpy().tobytes()))
        form, leaves, event = self.forms[kind], asked.leaves or [], None
        if self.direct:
            assert self.stream is not None
            leaves, event = self.stream.receive(form.leaves, asked.free, place.streams)
        elif kind != asked.expected:
            leaves, tensors = rooms(form, self._room)
            finish([*map(more, tensors)])
        elif asked.leaves is None:
            leaves = unpacked(asked.head, form, None if self.stream is None else self._room)
        self.expected[number] = kind
        if self.stream is not None and not self.direct:
            leaves, event = self.stream.from_host(leaves, asked.free, place.streams)
        value = Border(leaves, form.spec, form.flags)
        if kind not in self.words:
            self.words[kind] = border_key_or_none(value)
        value.words = self.words[kind]
        return Ticket(value, event)


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
            self.out.send(key, item.value)
        else:
            assert self.back is not None
            self.back.free(key[1], item)


def _then(wait: Callable[[], None], post: Callable[[list[Tensor]], None], tensors: list[Tensor]) -> None:
    """Post tensors, once they are there."""
    wait()
    post(tensors)


def _at_host(tensor: Tensor) -> Tensor:
    """A tensor in memory of the host that nobody shares lazily."""
    return materialized(tensor.cpu())
