"""Lanes of other processes: a mailbox that sends what is put into it, and what takes what comes for
a lane here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from funcpipe._src.core.border import Border
from funcpipe._src.core.cache_key import border_key_or_none
from funcpipe._src.core.plain_tensors import materialized
from funcpipe._src.core.tensor_layout import TensorLayout
from funcpipe._src.data.program import LaneProgram
from funcpipe._src.devices.stream import Place
from funcpipe._src.engine.mail import Mailbox, PoolLevel
from funcpipe._src.processes.peer import FrameKind, Head, KnownForm
from funcpipe._src.processes.wire_format import form_key, form_of, pack_form, sendable

if TYPE_CHECKING:
    from funcpipe._src.processes.device_stream import DeviceStream
    from funcpipe._src.processes.team import Team


class Arrivals:
    """Takes what other processes send for one lane in one execution, and puts it into the lane's
    mailbox.

    Args:
        box: the mailbox.
        place: where the lane computes.
        levels: the fill level of the pool of each slot.
        streams: of slots whose values come to a device with streams, the stream.
    """

    def __init__(
        self,
        box: Mailbox,
        place: Place,
        levels: Mapping[int, PoolLevel],
        streams: Mapping[int, DeviceStream],
    ) -> None:
        self.box, self._place, self._levels, self._streams = box, place, levels, streams
        self.remotes: dict[int, RemoteLane] = {}
        """By number, the lanes of other processes to which this one sends."""
        self._freed: dict[int, Any] = {}
        """By slot, the event of the device after which it may be filled again."""
        place.copy_streams.extend({id(each): each.stream for each in streams.values()}.values())

    def room(self, slot: int) -> Callable[[TensorLayout], Tensor]:
        """What makes the memory of the host into which a value for a slot is read."""
        return self._streams[slot].host_room if slot in self._streams else TensorLayout.room

    def put(self, slot: int, leaves: Sequence[Any], known: KnownForm) -> None:
        """Deliver a value that has come to the memory of the host."""
        event, stream = None, self._streams.get(slot)
        if stream is not None:
            leaves, event = stream.from_host(
                leaves, self._freed.pop(slot, None), self._place.stream
            )
        self._put(slot, [*leaves], event, known)

    def receive(self, slot: int, known: KnownForm) -> None:
        """Begin to receive a value straight from another device, and deliver it."""
        stream = self._streams[slot]
        self._put(
            slot,
            *stream.receive(known.form.leaves, self._freed.pop(slot, None), self._place.stream),
            known,
        )

    def _put(self, slot: int, leaves: list[Any], event: Any, known: KnownForm) -> None:
        form = known.form
        value = Border(leaves, form.spec, form.flags)
        value.shared = form.shared
        if not known.is_keyed:
            known.key, known.is_keyed = border_key_or_none(value), True
        value.words = known.key
        self._levels[slot].add()
        self.box.put(slot, (value, event))

    def empty(self, slot: int, event: Any) -> None:
        """Note that the lane has freed a slot: it may be filled after the event (None: now)."""
        if event is not None:
            self._freed[slot] = event

    def is_free(self, lane: int, slot: int) -> None:
        """A slot of a lane of another process may be filled again."""
        self.remotes[lane].freed(slot)


class RemoteLane(Mailbox):
    """The mailbox of a lane of another process, for one local lane and one execution. `put` sends
    to that lane.

    A value waits here while its slot in the other process is taken. So the local lane may be one
    value for each slot ahead.

    Args:
        team: the other processes.
        rank: the process of the lane.
        ends: the lane here, and the lane there.
        batch: the place of the batch among those of the run.
        arrivals: what comes for the lane here.
        stream: where the lane here is on a device with streams, the stream for what goes out.
    """

    def __init__(
        self,
        team: Team,
        rank: int,
        ends: tuple[int, int],
        batch: int,
        arrivals: Arrivals,
        stream: DeviceStream | None,
    ) -> None:
        super().__init__()
        self.arrivals, self._team, self._rank, self._stream = arrivals, team, rank, stream
        here, there = ends
        self._lane = there
        self._value = Head(FrameKind.VALUE, team.run, batch, there)
        self._free = Head(FrameKind.FREE, team.run, batch, there, other=here)
        self._gate = threading.Lock()
        self._taken: set[int] = set()
        self._held: dict[int, Callable[[], None]] = {}
        """By slot, what sends the value that waits for it."""
        arrivals.remotes[there] = self

    def put(self, key: Hashable, item: Any) -> None:
        """Send a value into a slot there; of (lane, slot) here, tell that it is free after an
        event."""
        if isinstance(key, int):
            post = self._sending(key, item[0])
            if key in self._taken:
                self._team.look()  # it may be told already that the slot is free
            with self._gate:
                if key in self._taken:
                    self._held[key] = post
                    return
                self._taken.add(key)
                post()
            self.arrivals.box.came[self._lane, key] = None  # this is the thread of the lane here
        else:
            assert isinstance(key, tuple)
            slot: int = key[1]
            self.arrivals.empty(slot, item)
            self._team.send(self._rank, self._free._replace(slot=slot))

    def freed(self, slot: int) -> None:
        """A slot there is free again: send the value that waits for it."""
        with self._gate:
            post = self._held.pop(slot, None)
            if post is None:
                self._taken.discard(slot)
                return
            post()
        self.arrivals.box.put((self._lane, slot), None)

    def _sending(self, slot: int, value: Border) -> Callable[[], None]:
        """Return what sends a value; of a device, once it is there. Raises PlanError for what
        cannot travel."""
        stream, team, rank = self._stream, self._team, self._rank
        home = _at_host if stream is None else stream.at_home
        leaves = [
            home(leaf) if isinstance(leaf, Tensor) else leaf for leaf in map(sendable, value.leaves)
        ]
        described = leaves, value.spec, value.flags, value.shared
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]
        head, key, form = (
            self._value._replace(slot=slot),
            form_key(*described),
            lambda: pack_form(form_of(*described)),
        )
        if not team.peers[rank].knows(key):  # now, so that this lane hears of what cannot travel
            form = partial(bytes, form())
        if stream is None:
            return partial(team.send_value, rank, head, key, form, tensors)
        if stream.group is None:
            copies, wait = stream.to_host(tensors)
            post = partial(team.send_value, rank, head, key, form, copies)
            return lambda: team.jobs.give(partial(team.safely, partial(_then, wait, post), rank))
        head, event = head._replace(kind=FrameKind.JOINED), stream.now()

        def send() -> (
            None
        ):  # second the tensors: the other end receives them once it knows their form
            team.send_value(rank, head, key, form, ())
            team.safely(partial(stream.send, tensors, event), rank)

        return send


def remote_lanes(
    team: Team,
    ranks: Mapping[int, int],
    program: LaneProgram,
    box: Mailbox,
    place: Place,
    levels: Mapping[tuple[int, int], PoolLevel],
    stream: Callable[[tuple[int, int]], DeviceStream | None],
    batch: int,
) -> Mapping[int, Mailbox]:
    """The mailboxes of lanes of other processes with which a lane here exchanges values.

    Args:
        team: the other processes.
        ranks: the process of each lane that is not here.
        program: of the lane here, with its mailbox and place.
        levels: the fill level of the pool of each slot, by (lane, slot).
        stream: of an edge (from lane, to lane), the stream on the device that is here.
        batch: the place of the batch among those of the run.
    """
    lane = program.lane
    sources = {
        slot: source
        for slot, source in enumerate(program.sources)
        if source is not None and source in ranks
    }
    streams = {
        slot: found
        for slot, source in sources.items()
        if (found := stream((source, lane))) is not None
    }
    arrivals = Arrivals(box, place, {slot: levels[lane, slot] for slot in sources}, streams)
    others = {*sources.values()} | {to for to, _ in program.outgoing if to in ranks}
    return {
        other: RemoteLane(team, ranks[other], (lane, other), batch, arrivals, stream((lane, other)))
        for other in sorted(others)
    }


def _then(wait: Callable[[], None], post: Callable[[], None]) -> None:
    wait()
    post()


def _at_host(tensor: Tensor) -> Tensor:
    """A tensor in memory of the host that nobody shares lazily."""
    return materialized(tensor.cpu())
