"""Connections between processes over gloo, and the two ends of an edge between lanes of different ones.

An edge has a connection of its own, on which its values travel in the order in which their lane sends them. Before each
goes a number, that of its form; a form that is new follows it once, as checked data. Who receives knows the order from
the plan, so it asks for each value as soon as its slot is free, and with equal batches it knows the form beforehand
and asks for the memory at the same time.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcpipe.runtime.border import Border
from funcpipe.runtime.cache_key import border_key_or_none
from funcpipe.runtime.plain_tensors import materialized
from funcpipe.runtime.stream import Ticket
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

_HEAD = 16
"""Bytes of what goes before a value: the number of its form, and how long the form is that follows."""

_MORE = 2
"""The tag of what follows a form that the other end did not expect; 0 is that of what it has asked for, maybe long before
(and 1 of what cuts a connection)."""

_FORMS = 4096
"""So many forms an edge remembers, and ..."""

_SIGNATURES = 64
"""... for batches of so many kinds which form each value has."""


_LONG = timedelta(days=30)
"""How long gloo may wait; whoever needs what comes waits for less, and cuts the connection."""


class LostError(Exception):
    """The connection to a rank has ended."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(text)
        self.rank, self.text = rank, text


class Connection:
    """A group of gloo that joins some ranks; ranks are those of the plan."""

    def __init__(self, group: Any, ranks: Sequence[int]) -> None:
        self.group, self.seats = group, {rank: seat for seat, rank in enumerate(ranks)}

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> Any:
        """Begin to send a dense tensor's memory, which must not change before the end."""
        try:
            return self.group.send([memory(tensor)], self.seats[to], tag)
        except RuntimeError as error:
            raise _lost(to, error) from None

    def receive(self, into: Tensor, source: int, tag: int = 0) -> Any:
        """Begin to receive into a dense tensor's memory."""
        try:
            return self.group.recv([memory(into)], self.seats[source], tag)
        except RuntimeError as error:
            raise _lost(source, error) from None

    def finish(self, works: Iterable[Any], rank: int) -> None:
        """Wait for the end of what was begun with a rank. Raises LostError."""
        try:
            for work in works:
                work.wait(_LONG)
        except RuntimeError as error:
            raise _lost(rank, error) from None

    def send_bytes(self, data: bytes, to: int, chunk: int) -> list[Any]:
        """Begin to send bytes of any length: a first message of ``chunk`` bytes tells it."""
        data = len(data).to_bytes(8, "little") + data
        first = torch.frombuffer(bytearray(data[:chunk].ljust(chunk, b"\0")), dtype=torch.uint8)
        rest = [torch.frombuffer(bytearray(data[chunk:]), dtype=torch.uint8)] if len(data) > chunk else []
        return [self.send(part, to) for part in (first, *rest)]

    def receive_bytes(self, source: int, chunk: int) -> bytes:
        """The bytes that a rank sends."""
        first = torch.empty(chunk, dtype=torch.uint8)
        self.finish([self.receive(first, source)], source)
        data = first.numpy().tobytes()
        length = 8 + int.from_bytes(data[:8], "little")
        if length > chunk:
            rest = torch.empty(length - chunk, dtype=torch.uint8)
            self.finish([self.receive(rest, source)], source)
            data += rest.numpy().tobytes()
        return data[8:length]

    def cut(self, rank: int) -> None:
        """Close it, so that whoever waits at any end is woken.

        gloo has no other way: a receive that nobody answers within its limit closes its connection.
        """
        for other, seat in self.seats.items():
            if other != rank:
                with suppress(RuntimeError):
                    self.group.recv([torch.empty(1)], seat, 1).wait(timedelta(milliseconds=1))


def _lost(rank: int, error: RuntimeError) -> LostError:
    """The error of a connection, without what gloo says of its own source, and of what to do."""
    text = str(error).split("\n")[0].rsplit("] ", 1)[-1].split(". This is")[0]
    return LostError(rank, f"the connection to its process has ended: {text}")


class _Edge:
    """What both ends of an edge have: they learn the same forms in the same order."""

    def __init__(self, connection: Connection, name: str, lost: Callable[[LostError], None]) -> None:
        self.connection, self.lost = connection, lost
        self.peer = -1
        self.forms: list[TreeForm] = []
        self.expected: dict[int, int] = {}
        """By the place of a value among those of a run, the number of its form in the last run of such a batch."""
        self._by_signature: dict[Any, dict[int, int]] = {}
        self.worker = Worker(f"funcpipe edge {name}", self.stop, patience=1.0)
        self.worker.start()

    def _begin(self, signature: Any) -> None:
        if len(self.forms) > _FORMS or len(self._by_signature) > _SIGNATURES:
            self._by_signature.clear()
            self._forget()
        self.expected = self._by_signature.setdefault(signature, {})

    def _forget(self) -> None:
        self.forms.clear()

    def stop(self) -> None:
        """Let the worker's job end, once the connection is cut."""

    def _safely(self, job: Callable[[], None]) -> None:
        """Do a job in the worker; an error breaks the link."""
        try:
            job()
        except LostError as error:
            self.lost(error)
        except Exception as error:
            self.lost(LostError(self.peer, f"what it sent cannot be read: {type(error).__name__}: {error}"))


class EdgeOut(_Edge):
    """The end that sends: a lane begins it, a worker waits until it is sent."""

    def __init__(self, connection: Connection, name: str, lost: Callable[[LostError], None]) -> None:
        super().__init__(connection, name, lost)
        self.peer = [*connection.seats][1]
        self.numbers: dict[Any, int] = {}
        self.box = Inbox()
        self.to = self.place = 0

    def _forget(self) -> None:
        super()._forget()
        self.numbers.clear()

    def begin(self, signature: Any, to: int, box: Inbox) -> None:
        """A run begins: a slot of lane ``to`` that is free again is put into the box."""
        self._begin(signature)
        self.to, self.box, self.place = to, box, 0

    def send(self, slot: int, value: Border) -> None:
        """Begin to send a value into a slot. Raises PlanError for what cannot travel."""
        leaves = [materialized(leaf) if isinstance(leaf, Tensor) else leaf for leaf in map(sendable, value.leaves)]
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
        first, more = self._head(expected, number, len(text), parts), list[Tensor]()
        if number != expected:
            more = [torch.frombuffer(bytearray(text), dtype=torch.uint8), *parts] if text else parts
        tensors = [*first, *more]
        try:
            works = [self.connection.send(tensor, self.peer) for tensor in first]
            works += [self.connection.send(tensor, self.peer, _MORE) for tensor in more]
        except LostError as error:
            self.lost(error)
            return
        self.worker.give(partial(self._safely, partial(self._sent, slot, works, tensors, self.box)))

    def _head(self, expected: int | None, number: int, length: int, parts: list[Tensor]) -> list[Tensor]:
        """What the other end has asked for: the number of the form, then the tensors, or what fills their places."""
        if expected is None:
            return [torch.tensor([number, length])]
        if number != expected:
            parts = _rooms(self.forms[expected])[1]
        if self.forms[expected].is_small:
            return _packed([number, length], parts)
        return [torch.tensor([number, length]), *parts]

    def _sent(self, slot: int, works: list[Any], kept: list[Tensor], box: Inbox) -> None:
        self.connection.finish(works, self.peer)
        box.put_quietly((self.to, slot), (works, kept))


class _Asked(NamedTuple):
    """What was asked for of a value before it comes.

    Attributes:
        slot: where it will lie.
        works: of the message that tells its form, and of what is expected to follow.
        head: the number of its form, and how long the form is that follows.
        packed: head and all tensors in one; None: each travels by itself.
        expected: the number of the form that it had in the last such run; None: there was none.
        leaves, tensors: memory for a value of that form, and those of its leaves that travel.
    """

    slot: int
    works: list[Any]
    head: Tensor
    packed: Tensor | None
    expected: int | None
    leaves: list[Any]
    tensors: list[Tensor]


class EdgeIn(_Edge):
    """The end that receives: each value is asked for, in the order of the plan, as soon as its slot is free.

    So the other end knows that it may send before it has the value, and a worker hands over what has come.
    """

    def __init__(self, connection: Connection, name: str, lost: Callable[[LostError], None]) -> None:
        super().__init__(connection, name, lost)
        self.peer = next(iter(connection.seats))
        self.words: dict[int, Any] = {}
        self._gate = threading.Lock()
        self._asked: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._slots: Sequence[int] = ()
        self._taken: set[int] = set()
        self._next = 0

    def _forget(self) -> None:
        super()._forget()
        self.words.clear()

    def begin(self, signature: Any, slots: Sequence[int], box: Mailbox, levels: Mapping[int, PoolLevel]) -> None:
        """A run begins: its values come into these slots, in this order, and are put into the box."""
        self._begin(signature)
        self._asked, self._slots, self._taken, self._next = queue.SimpleQueue(), slots, set(), 0
        self._safely(self._ask)
        self.worker.give(partial(self._safely, partial(self._receive_all, box, levels, self._asked)))

    def free(self, slot: int) -> None:
        """A slot is free again."""
        with self._gate:
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
        ask = partial(self.connection.receive, source=self.peer)
        expected = self.expected.get(place)
        form = None if expected is None else self.forms[expected]
        leaves, tensors = ([], []) if form is None else _rooms(form)
        if form is not None and form.is_small:
            packed = torch.empty(_HEAD + form.nbytes, dtype=torch.uint8)
            return _Asked(slot, [ask(packed)], packed[:_HEAD].view(torch.int64), packed, expected, leaves, tensors)
        head = torch.empty(2, dtype=torch.int64)
        return _Asked(slot, [ask(head), *map(ask, tensors)], head, None, expected, leaves, tensors)

    def _receive_all(
        self, box: Mailbox, levels: Mapping[int, PoolLevel], asked: queue.SimpleQueue[_Asked | None]
    ) -> None:
        for place in range(len(self._slots)):
            what = asked.get()
            if what is None:
                return
            value = self._receive(place, what)
            levels[what.slot].add()
            box.put(what.slot, Ticket(value))
            del value, what

    def _receive(self, place: int, asked: _Asked) -> Border:
        """The next value."""
        more = partial(self.connection.receive, source=self.peer, tag=_MORE)
        finish = partial(self.connection.finish, rank=self.peer)
        finish(asked.works)
        number, length = asked.head.tolist()
        leaves = asked.leaves
        if number != asked.expected:
            if length:
                text = torch.empty(length, dtype=torch.uint8)
                finish([more(text)])
                self.forms.append(unpack_form(text.numpy().tobytes()))
            leaves, tensors = _rooms(self.forms[number])
            finish([*map(more, tensors)])
            self.expected[place] = number
        elif asked.packed is not None:
            _unpack(asked.packed, asked.tensors)
        form = self.forms[number]
        value = Border(leaves, form.spec, form.flags)
        if number not in self.words:
            self.words[number] = border_key_or_none(value)
        value.words = self.words[number]
        return value


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
            self.back.free(key[1])


def _packed(head: list[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    """One message of all."""
    return [torch.cat([torch.tensor(head).view(torch.uint8), *map(memory, tensors)])]


def _unpack(packed: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy what is in a message to where it belongs."""
    start = _HEAD
    for tensor in tensors:
        bytes_of = memory(tensor)
        bytes_of.copy_(packed[start : start + bytes_of.numel()])
        start += bytes_of.numel()


def _rooms(form: TreeForm) -> tuple[list[Any], list[Tensor]]:
    """Leaves of a form with new memory, and those of them that travel."""
    leaves = [leaf.room() if isinstance(leaf, TensorLayout) else leaf for leaf in form.leaves]
    return leaves, [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]
