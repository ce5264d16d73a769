"""Lanes of other processes: `RemoteLane` sends values to one, `Arrivals` receives values from them.

`team` and `peer` own the connections.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import count, repeat
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
from funcpipe._src.processes.wire_dtensors import Meshes, ReceivedDTensors, Spread
from funcpipe._src.processes.wire_format import form_key, form_of, pack_form, sendable

if TYPE_CHECKING:
    from funcpipe._src.engine.execute import Execution
    from funcpipe._src.processes.device_stream import DeviceStream
    from funcpipe._src.processes.team import Team


class Arrivals:
    """Puts values from other processes into the mailbox of one lane, for one execution.

    Args:
        box: the mailbox.
        place: the place of the lane.
        levels: the fill level of the pool of each slot.
        streams: the transfer stream of each slot on a device with streams.
        meshes: the meshes of this process, for DTensors.
    """

    def __init__(
        self,
        box: Mailbox,
        place: Place,
        levels: Mapping[int, PoolLevel],
        streams: Mapping[int, DeviceStream],
        meshes: Meshes,
    ) -> None:
        self.box, self._place, self._levels, self._streams = box, place, levels, streams
        self.meshes = meshes
        self.remotes: dict[int, RemoteLane] = {}
        """The mailboxes of the lanes to which this lane sends, by lane."""
        self._freed: dict[int, Any] = {}
        """By slot, the device event after which the slot may be filled again."""
        place.copy_streams.extend({id(each): each.stream for each in streams.values()}.values())

    def room(self, slot: int) -> Callable[[TensorLayout], Tensor]:
        """Return the function that allocates host memory for a slot's value."""
        return self._streams[slot].host_room if slot in self._streams else TensorLayout.room

    def put(self, slot: int, leaves: Sequence[Any], known: KnownForm) -> None:
        """Deliver a value that has arrived in host memory."""
        event, stream = None, self._streams.get(slot)
        if stream is not None:
            leaves, event = stream.from_host(
                leaves, self._freed.pop(slot, None), self._place.stream
            )
        self._put(slot, [*leaves], event, known)

    def receive(self, slot: int, known: KnownForm) -> None:
        """Begin to receive a value from another device, and deliver it."""
        stream = self._streams[slot]
        self._put(
            slot,
            *stream.receive(known.form.leaves, self._freed.pop(slot, None), self._place.stream),
            known,
        )

    def _put(self, slot: int, leaves: list[Any], event: Any, known: KnownForm) -> None:
        form = known.form
        described = leaves, form.spec, form.flags
        if form.spreads:
            value = ReceivedDTensors(*described, dict(form.spreads), self.meshes)
            known.is_keyed = True  # DTensors have no key, and the lane makes them later
        else:
            value = Border(*described)
        value.shared = form.shared
        if not known.is_keyed:
            known.key, known.is_keyed = border_key_or_none(value), True
        value.words = known.key
        self._levels[slot].add()
        self.box.put(slot, (value, event))

    def empty(self, slot: int, event: Any) -> None:
        """Record that a slot may be filled after the event (None: now)."""
        if event is not None:
            self._freed[slot] = event

    def is_free(self, lane: int, slot: int) -> None:
        """Pass the notice of a free slot to the mailbox of its lane."""
        self.remotes[lane].freed(slot)


class RemoteLane(Mailbox):
    """The mailbox of a lane of another process, for one lane here and one execution.

    `put` sends to that lane. A value waits here while its slot there is taken. So the lane here may
    be ahead by one value per slot.

    Args:
        team: the other processes.
        rank: the process of the lane.
        ends: the lane here, and the lane there.
        batch: the number of the batch within the run.
        arrivals: the arrivals of the lane here.
        stream: the stream for outgoing values, or None on the CPU.
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
        """By slot, the function that sends the value that waits for the slot."""
        arrivals.remotes[there] = self

    def put(self, key: Hashable, item: Any) -> None:
        """Send a value to a slot there; for the key (lane, slot), send that this slot is free."""
        if isinstance(key, int):
            post = self._sending(key, item[0])
            if key in self._taken:
                self._team.look()  # the notice of the free slot may have arrived
            # Under the gate: the reading thread may call `freed` between the check and the entry.
            # Then the value would wait forever.
            with self._gate:
                if key in self._taken:
                    self._held[key] = post
                    return
                self._taken.add(key)
                post()
            # The value is on its way, so the lane here need not wait for the slot. Written without
            # `put`, because this is the lane's own thread.
            self.arrivals.box.came[self._lane, key] = None
        else:
            assert isinstance(key, tuple)
            slot: int = key[1]
            self.arrivals.empty(slot, item)
            self._team.send(self._rank, self._free._replace(slot=slot))

    def freed(self, slot: int) -> None:
        """Send the value that waits for a slot there, which is free again."""
        with self._gate:
            post = self._held.pop(slot, None)
            if post is None:
                self._taken.discard(slot)
                return
            post()
        self.arrivals.box.put((self._lane, slot), None)

    def _sending(self, slot: int, value: Border) -> Callable[[], None]:
        """Return a function that sends a value. Raises PlanError for values that cannot travel."""
        stream, team, rank = self._stream, self._team, self._rank
        home = _at_host if stream is None else stream.at_home
        spreads: dict[int, Spread] = {}
        leaves = [
            home(leaf) if isinstance(leaf, Tensor) else leaf
            for leaf in map(sendable, value.leaves, count(), repeat(spreads))
        ]
        for number in spreads:
            self.arrivals.meshes.add(value.leaves[number].device_mesh)
        described = leaves, value.spec, value.flags, value.shared, spreads
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]
        head = self._value._replace(slot=slot)
        key = form_key(*described)
        # Pack a new form now, so that this lane raises the error of a value that cannot travel.
        packed = None if team.peers[rank].knows(key) else pack_form(form_of(*described))

        def form() -> bytes:
            return pack_form(form_of(*described)) if packed is None else packed

        if stream is None:
            return partial(team.send_value, rank, head, key, form, tensors)
        if stream.group is None:
            copies, wait = stream.to_host(tensors)
            post = partial(team.send_value, rank, head, key, form, copies)
            return lambda: team.jobs.give(partial(team.safely, partial(_then, wait, post), rank))
        head, event = head._replace(kind=FrameKind.JOINED), stream.now()

        def send() -> None:
            # First the form: the other end begins to receive the tensors when it has the form.
            team.send_value(rank, head, key, form, ())
            team.safely(partial(stream.send, tensors, event), rank)

        return send


def remote_lanes(
    team: Team,
    ranks: Mapping[int, int],
    program: LaneProgram,
    place: Place,
    stream: Callable[[tuple[int, int]], DeviceStream | None],
    execution: Execution,
) -> Mapping[int, Mailbox]:
    """Make the mailboxes of all lanes of other processes with which a lane here exchanges values.

    Args:
        team: the other processes.
        ranks: the process of each lane of another process.
        program: the program of the lane here.
        place: the place of the lane here.
        stream: a function from an edge (from lane, to lane) to its stream on the device here.
        execution: the execution, with the mailboxes and the fill levels of the lanes here.
    """
    ready, batch = execution.ready, execution.number or 0
    meshes = Meshes((ready.params, ready.state))
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
    levels = {slot: execution.level_of[lane, slot] for slot in sources}
    arrivals = Arrivals(execution.boxes[lane], place, levels, streams, meshes)
    others = {*sources.values()} | {to for to, _ in program.outgoing if to in ranks}
    return {
        other: RemoteLane(team, ranks[other], (lane, other), batch, arrivals, stream((lane, other)))
        for other in sorted(others)
    }


def _then(wait: Callable[[], None], post: Callable[[], None]) -> None:
    wait()
    post()


def _at_host(tensor: Tensor) -> Tensor:
    """Return a tensor in host memory that is not shared copy-on-write."""
    return materialized(tensor.cpu())
