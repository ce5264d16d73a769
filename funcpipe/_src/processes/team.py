"""`Team`: this process's connections to the other processes of a plan, exchanges, and failures.

A thread that waits for a message reads the connections itself (`Reading`). If no thread waits, the
`Monitor` reads at short intervals. It also reports progress of this process to the others, and ends
waits that take too long.

A team lasts until the first failure. A process that fails sends the failure to all others and
closes its connections. A process that receives a failure does the same. The next run makes a new
team.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from time import monotonic, sleep
from typing import Any, NoReturn

import torch
from torch import Tensor

from funcpipe._src.core.plain_tensors import bytes_of, memory_view
from funcpipe._src.core.tensor_layout import TensorLayout
from funcpipe._src.engine.agreement import PreviousWords
from funcpipe._src.engine.mail import Inbox, Stop
from funcpipe._src.engine.worker import Worker, end_all
from funcpipe._src.processes.alarms import Failure, names_of
from funcpipe._src.processes.byte_channel import ByteChannel
from funcpipe._src.processes.monitor import Monitor
from funcpipe._src.processes.peer import (
    FrameKind,
    Head,
    KnownForm,
    LostError,
    Peer,
    Pieces,
    lost_by_device,
)
from funcpipe._src.processes.reading import Reading
from funcpipe._src.processes.remote import Arrivals
from funcpipe._src.processes.wire_format import memory

_SAME_CALLS = "All ranks must make the same calls (fp.run, fp.step, fp.save) equally often"

_FLUSH = 1.0  # seconds to write the last messages before connections are closed


class Team:
    """One process's connections to the others of its plan.

    Args:
        rank: the number of this process.
        processes: the torch.distributed rank of each process.
        timeout: seconds without progress of any rank, after which a wait ends in an error.
        doing: a function that returns whether a lane is in an action, and what lanes do, in words.
        marks: a function whose result changes whenever this process makes progress.
        has_devices: whether lanes here are on devices with streams. Then only the team's thread
            reads: such lanes do not wait for their device, and the order of work on a stream must
            not depend on which thread reads.

    Attributes:
        size: the number of processes.
        names: the name of each rank in errors.
        peers: the connections, by rank.
        failure: the first failure, once there is one.
        run: the number of the run.
        reading: the turn to read the connections.
        monitor: the team's thread.
        caller: the channel of the calling thread.
        states: what other processes have reported to do after a timeout, by rank.
        jobs: a thread for work that must wait for a device.
        previous_words: the facts of the last run, which all processes have.
    """

    def __init__(
        self,
        rank: int,
        processes: Sequence[int],
        timeout: float,
        doing: Callable[[], tuple[bool, str]],
        marks: Callable[[], Any],
        *,
        has_devices: bool = False,
    ) -> None:
        self.rank = rank
        self.size = len(processes)
        self.processes = tuple(processes)
        self.names = names_of(processes)
        self.doing = doing
        self.peers: dict[int, Peer] = {}
        self.failure: Failure | None = None
        self.run, self._told = 0, False
        self.states: dict[int, tuple[bool, str]] = {}
        self._alarms: list[Callable[[], None]] = []
        self._gate = threading.Lock()
        self._gone: dict[int, int] = {}
        """The last run of each process that has left regularly, by rank."""
        self._closed: list[int] = []  # the ranks among these that have closed their connection
        self._arrivals: dict[tuple[int, int, int], Arrivals] = {}
        self._early: dict[tuple[int, int, int], list[tuple[int, Callable[[Arrivals], None]]]] = {}
        """Messages for lanes that have not begun their run, by (run, batch, lane)."""
        self._ended = 0  # the number of the last finished run
        self._channels: dict[int, ByteChannel] = {}
        self.reading = Reading(self._left, lambda: self.failure is None)
        self.has_devices = has_devices
        self.monitor = Monitor(self, timeout, marks)
        self.previous_words = PreviousWords()
        self.jobs = Worker("funcpipe devices", self.cut, patience=1.0)
        self.caller = self.channel(0)

    # -- its members

    def start(self, settle: Callable[[], None]) -> None:
        """Start the team's threads, each with ``settle`` first."""
        self.jobs.start()
        self.jobs.give(settle)
        self.monitor.start(settle)

    def add(self, connected: socket.socket, rank: int) -> None:
        """Add the connection to another process."""
        peer = Peer(connected, rank, self)
        self.peers[rank] = peer
        self.reading.add(peer)

    def channel(self, number: int) -> ByteChannel:
        """Return the channel with a number. Channel 0 belongs to the calling thread."""
        with self._gate:
            if number not in self._channels:
                self._channels[number] = made = ByteChannel(self, number)
                # A new channel must also see who has left, and that the team has failed; otherwise
                # its reader would wait forever.
                for rank in self._closed:
                    made.put(rank, None)
                if self.failure is not None:
                    made.box.stop()
            return self._channels[number]

    # -- sending

    def send(
        self, rank: int, frame: Head, body: bytes = b"", tensors: Sequence[Tensor] = ()
    ) -> None:
        """Send a frame. Tensors are dense, and must not change before `drain`."""
        peer = self.peers[rank]
        if not peer.send(frame, body, [memory(tensor) for tensor in tensors]):
            self._write_later(peer)

    def send_value(
        self, rank: int, frame: Head, key: Any, form: Callable[[], bytes], tensors: Sequence[Tensor]
    ) -> None:
        """Send a value for a lane of another process; see `Peer.send_value`."""
        peer = self.peers[rank]
        if not peer.send_value(frame, key, form, tensors):
            self._write_later(peer)

    def _write_later(self, peer: Peer) -> None:
        self.reading.write_later(peer)
        self.monitor.wake()

    def drain(self) -> None:
        """Wait until all sent bytes are written. Raises Stop if the team ends."""
        for peer in [*self.peers.values()]:
            peer.drain(lambda: self.failure is None)

    def tell_all(self, kind: FrameKind, what: Any) -> None:
        """Send all others a message about this process."""
        for rank in [*self.peers]:
            self.send(rank, Head(kind, self.run), json.dumps(what).encode())

    # -- reading

    def lead(self, box: Inbox) -> None:
        """Read messages until the box has an item. Return at once if another thread reads."""
        if not self.has_devices:
            self.reading.lead(box)

    def look(self) -> None:
        """Read messages once, unless another thread reads."""
        if not self.has_devices:
            self.reading.read(0.0)

    def _left(self, peer: Peer, error: LostError) -> None:
        """Handle a closed connection.

        A process that fails, or leaves regularly, sends that before it closes.
        """
        if peer.rank not in self._gone:
            self.lost(error)
            return
        with self._gate:
            self._closed.append(peer.rank)
            for channel in self._channels.values():
                channel.put(peer.rank, None)

    def miss(self, rank: int) -> NoReturn:
        """End the team, because this process waits for a process that has left. Raises Stop."""
        text = (
            f"has left its `with fp.ranks(...)` after {self._gone.get(rank, 0)} runs, and others "
            f"wait for it ({self.names[self.rank]} is {self.doing()[1]}). {_SAME_CALLS}"
        )
        self.fail(Failure(rank, "", text, None, self.run))
        raise Stop

    # -- what others send

    def value(self, rank: int, frame: Head, known: KnownForm) -> Pieces:
        """Read the tensors of a value, and deliver it to its lane."""
        arrivals = self._arrivals.get(frame[1:4])
        room = TensorLayout.room if arrivals is None else arrivals.room(frame.slot)
        leaves = [
            room(leaf) if isinstance(leaf, TensorLayout) else leaf for leaf in known.form.leaves
        ]
        for leaf in leaves:
            if isinstance(leaf, Tensor) and leaf.numel():
                yield memory_view(leaf)
        self._deliver(rank, frame, lambda arrivals: arrivals.put(frame.slot, leaves, known))

    def joined(self, rank: int, frame: Head, known: KnownForm) -> None:
        """Receive a value whose tensors travel from device to device, on the thread for devices."""
        job = partial(
            self._deliver, rank, frame, lambda arrivals: arrivals.receive(frame.slot, known)
        )
        self.jobs.give(partial(self.safely, job, rank))

    def free(self, rank: int, frame: Head) -> None:
        """Tell a lane that a slot of a lane of another process is free again."""
        self._deliver(rank, frame, lambda arrivals: arrivals.is_free(frame.other, frame.slot))

    def _deliver(self, rank: int, frame: Head, job: Callable[[Arrivals], None]) -> None:
        key = frame.run, frame.batch, frame.lane
        with self._gate:
            arrivals = self._arrivals.get(key)
            if arrivals is None:
                # The lane has not begun yet: keep the message. Drop those of finished runs.
                if frame.run > self._ended:
                    self._early.setdefault(key, []).append((rank, job))
                return
        self.safely(partial(job, arrivals), rank)

    def begin(self, key: tuple[int, int, int], arrivals: Arrivals) -> None:
        """Deliver the values for (run, batch, lane) from now on. The lane's thread calls this."""
        # With devices on the thread that receives, which must keep the order of the frames.
        if self.has_devices:
            self.jobs.give(partial(self._begin, key, arrivals))
        else:
            self._begin(key, arrivals)

    def _begin(self, key: tuple[int, int, int], arrivals: Arrivals) -> None:
        # Both under the gate: a message that came in between would stay in `_early` forever.
        with self._gate:
            self._arrivals[key] = arrivals
            early = self._early.pop(key, [])
        for rank, job in early:
            self.safely(partial(job, arrivals), rank)

    def end_run(self) -> None:
        """Drop the arrivals of the run, because all processes have all values."""
        with self._gate:
            self._ended = self.run
            for arrivals in self._arrivals.values():
                arrivals.remotes.clear()  # a cycle, which would keep values in memory
            self._arrivals.clear()
            self._early = {key: jobs for key, jobs in self._early.items() if key[0] > self.run}

    def data(self, rank: int, channel: int, body: Tensor) -> None:
        """Deliver bytes to a channel."""
        self.channel(channel).put(rank, body)

    def word(self, rank: int, kind: int, body: bytes) -> None:
        """Receive a message about another process."""
        what = json.loads(body)
        if kind == FrameKind.BEAT:
            self.monitor.beats += 1
        elif kind == FrameKind.DOING:
            self.states[rank] = (what[0], what[1])
        elif kind == FrameKind.BYE:
            self._gone[rank] = what
            self.refuse_gone()
        else:
            failure = Failure(*what)
            if failure.timed and self.failure is None:
                self.say()
            self.fail(failure)

    def safely(self, job: Callable[[], Any], rank: int = -1) -> None:
        """Run a job that serves the connection to a rank. An error in it ends the team."""
        try:
            job()
        except LostError as error:
            self.lost(error)
        except torch.distributed.DistBackendError as error:
            self.lost(lost_by_device(rank, error))
        except Stop:
            raise
        except Exception as error:  # usually because memory is exhausted
            text = f"cannot exchange values with other ranks: {type(error).__name__}: {error}"
            self.lost(LostError(self.rank, text))

    # -- waiting for others

    def exchange(self, data: bytes) -> list[bytes]:
        """Exchange bytes with all processes, and return those of all, by rank. Raises Alarm."""
        others = [(self.rank + distance) % self.size for distance in range(1, self.size)]
        head, given = Head(FrameKind.DATA), {self.rank: data}
        for rank in others:
            self.send(rank, head, data)
        with self.monitor.patient():
            for rank in others:
                given[rank] = bytes_of(self.caller.take(rank))
        return [given[rank] for rank in range(self.size)]

    def gather(
        self, mine: Mapping[int, Tensor], holders: Sequence[int], like: Sequence[TensorLayout]
    ) -> list[Tensor]:
        """Return tensors in host memory that several processes hold, in order. All holders call
        this.

        Args:
            mine: the dense tensors of this process, by their place in the order.
            holders: the rank of each tensor.
            like: the layout of each tensor.

        Raises:
            Alarm: a process failed.
        """
        values = dict(mine)
        for other in sorted({*holders} - {self.rank}):
            for place in sorted(mine):
                self.caller.post(other, mine[place])
        with self.monitor.patient():
            for place, holder in enumerate(holders):
                if holder != self.rank:
                    values[place] = like[place].view_of(self.caller.take(holder))
            self.caller.drain()
        return [values[place] for place in range(len(holders))]

    def answer(self, key: Any) -> Any:
        """Wait for an item that another thread puts into the caller's mailbox. Raises Alarm."""
        with self.monitor.patient():
            self.caller.box.wait(key)
        return self.caller.box.came.pop(key)

    def wait(self, job: Callable[[], Any]) -> Any:
        """Run a job on the thread for devices, and return its result. Raises Alarm."""
        key = object()

        def work() -> None:
            self.safely(lambda: self.caller.box.put(key, job()))

        self.jobs.give(work)
        return self.answer(key)

    # -- failures

    @contextmanager
    def alarming(self, alarm: Callable[[], None]) -> Generator[None]:
        """Return a context in which a failure of the team calls ``alarm``, on any thread."""
        with self._gate:
            self._alarms.append(alarm)
        if self.failure is not None:
            alarm()
        try:
            yield
        finally:
            with self._gate:
                self._alarms.remove(alarm)

    def fail(self, failure: Failure) -> None:
        """End the team with a failure. Only the first failure counts."""
        with self._gate:
            if self.failure is not None:
                return
            self.failure = failure
            stops = [channel.box.stop for channel in self._channels.values()]
            alarms = [*self._alarms, *stops]
        for alarm in alarms:
            alarm()
        self.reading.wake()

    def lost(self, error: LostError) -> None:
        """End the team because a connection has ended.

        A process that fails sends its failure first, so this process is gone.
        """
        self.fail(Failure(error.rank, "", error.text, None, self.run))

    def tell(self) -> None:
        """Send the failure to all others, once.

        Every process passes it on, so that its closed connection is not taken for a new failure.
        """
        if not self._told and self.failure is not None:
            self._told = True
            self.tell_all(FrameKind.FAILED, list(self.failure))

    def say(self) -> None:
        """Send all others what this process does."""
        with suppress(Exception):  # lanes continue while their state is read
            self.tell_all(FrameKind.DOING, self.doing())

    def all_states(self, seconds: float = 1.0) -> dict[int, tuple[bool, str]]:
        """Return what each process does, by rank: (whether it is in an action, words).

        Processes that do not answer are missing.
        """
        self.say()
        deadline = monotonic() + seconds
        while monotonic() < deadline and any(rank not in self.states for rank in self.peers):
            sleep(0.01)
        return {**self.states, self.rank: self.doing()}

    def refuse_gone(self) -> None:
        """End the team if a process has closed its ranks and this process makes another run."""
        for rank, run in self._gone.copy().items():
            if self.run > run:
                text = (
                    f"has left its `with fp.ranks(...)` after {run} runs, and this is run "
                    f"{self.run}. {_SAME_CALLS}"
                )
                self.fail(Failure(rank, "", text, None, self.run))

    # -- its end

    def cut(self) -> None:
        """End all connections, which ends all waits, in this and other processes."""
        self.fail(Failure(self.rank, "", "its connections were closed", None, self.run))
        self.monitor.end()
        for peer in [*self.peers.values()]:
            peer.shut()

    def close(self, *, told: bool) -> None:
        """End all threads and connections. With ``told``, tell the others that this process
        leaves."""
        if told and self.failure is None:
            self.tell_all(FrameKind.BYE, self.run)
        self.tell()
        deadline = monotonic() + _FLUSH
        for peer in [*self.peers.values()]:
            with suppress(Stop):
                peer.drain(lambda: monotonic() < deadline)
        self.cut()
        end_all([self.monitor.worker, self.jobs], 1.0)
        for end in (*self.peers.values(), self.reading):
            end.close()
