"""What joins the processes of a plan: connections, exchanges in which all take part, and alarms through the store.

A link lasts until the first failure of anyone: who fails tells the others through the store, closes its connections,
and so does everyone who is told. The next run makes a new one.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any

from torch import Tensor

from funcpipe.runtime.address import connect_at, host_of, own_address, own_loopback
from funcpipe.runtime.alarms import Alarm, Alarming, Failure, names_of
from funcpipe.runtime.connection import LostError, Way
from funcpipe.runtime.connector import Connector
from funcpipe.runtime.device_stream import DeviceEnds
from funcpipe.runtime.edge import EdgeIn, EdgeOut, EdgeWay
from funcpipe.runtime.exchanges import Everyone
from funcpipe.runtime.pulse import Pulse
from funcpipe.runtime.replicas import Replicas
from funcpipe.runtime.store import AskedStore, hello
from funcpipe.runtime.worker import Worker, end_all

_FOREVER = timedelta(days=365)
_NAMING = 1.5
"""Seconds more than others that a wait gets whose job has the timeout itself, and says then who did not come."""
_WHY = 0.5
"""Seconds for which a rank that has lost another waits to be told why: others may leave for that before all are told."""


class Link:
    """One process's connections to the others of its plan.

    Attributes:
        rank, size: which it is, of how many.
        processes: the number of each rank in torch.distributed.
        names: the name of each rank in errors.
        failure: what has broken the link, once something has.
        heard: was that told by another, who tells all.
        timeout: seconds after which a wait ends in an error, when no rank gets on any more.
        pulse: tells whether one does.
        store: where failures are told and heard.
    """

    def __init__(
        self,
        stores: Sequence[Any],
        rank: int,
        processes: Sequence[int],
        timeout: float,
        doing: Callable[[], tuple[bool, str]],
        marks: Callable[[], Any],
    ) -> None:
        store, self._waits, self._watches = stores  # while one waits nobody else can use it
        self.rank, self.size, self.doing = rank, len(processes), doing
        self.processes, self.names = tuple(processes), names_of(processes)
        self.store, self.pulse = AskedStore(store), Pulse(store, marks)
        self._connector = Connector(self._waits, rank, lambda: self.failure is not None)
        self.limit(timeout)
        self.failure: Failure | None = None
        self.heard, self.run = False, 0
        self.edges: dict[tuple[int, int], EdgeOut | EdgeIn] = {}
        self.replicas: dict[int, Replicas] = {}
        self._gone: dict[int, int] = {}
        """Of ranks that have closed, the number of their last run."""
        self._alarms: list[Callable[[], None]] = []
        self._gate = threading.Lock()
        self._everyone: Everyone | None = None
        self._events = 0
        self._told = False
        self._suspect: LostError | None = None
        self._worker = Worker("funcpipe exchange", self.cut, patience=1.0)
        self._watcher = Worker("funcpipe watcher", self._wake_watcher, patience=1.0)
        self._guard = Worker("funcpipe guard", self.cut, patience=1.0)
        for worker in (self._worker, self._watcher, self._guard):
            worker.start()

    def limit(self, timeout: float) -> None:
        """Let waits end so many seconds after the last rank got on."""
        self.timeout = self._connector.timeout = timeout
        self.pulse.serve(timeout)

    # -- making it -----------------------------------------------------------------------------------------------------

    def hear(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Say hello, and hear everyone's. Raises Alarm: someone did not come."""
        self._watcher.give(partial(self._watch, self._watches))
        said = self.wait(partial(self._hear, mine), _NAMING)
        self.pulse.start()
        return said

    def join(self, settle: Callable[[], None]) -> None:
        """Connect to everyone; ``settle`` is called first, by the thread that starts all others. Raises Alarm."""

        def connect() -> None:
            settle()
            self._everyone = Everyone(self._connector, self.size)
            self._guard.give(partial(self._watch_next, self._everyone))

        self.wait(connect)

    def _watch_next(self, everyone: Everyone) -> None:
        """Wait until the next rank leaves; break the link where it is lost."""
        try:
            everyone.guard()
        except LostError as error:
            self.lost(error)

    def _hear(self, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
        store = self._waits
        host = host_of(store)
        loopback = own_loopback(host)
        store.set(*hello(self.rank, {**mine, "address": own_address([host]), "loopback": loopback}))
        deadline, said = monotonic() + self.timeout, list[dict[str, Any]]()
        for other in range(self.size):
            try:
                store.wait([f"hello/{other}"], timedelta(seconds=max(0.001, deadline - monotonic())))
            except RuntimeError:
                missing = [rank for rank in range(other, self.size) if not store.check([f"hello/{rank}"])]
                names = ", ".join(self.names[rank] for rank in missing)
                text = f"did not come: {names} made no fp.ranks, or did not use it, for {self.timeout:g} s"
                raise LostError(missing[0] if missing else -1, text) from None
            said.append(json.loads(store.get(f"hello/{other}")))
        # Where the store is kept its host may be a name of this machine for itself; others then say where they are.
        where = connect_at([host, *(each.get("address", "") for each in said)])
        at_home = len({each.get("machine") for each in said}) == 1 and all(each.get("loopback") for each in said)
        if not where and at_home:
            # All reach the store at a loopback address, so all are on this machine: cables need no network.
            where = {"hostname": loopback}
        self._connector.where = where
        return said

    def connect(
        self,
        edges: Mapping[tuple[int, int], tuple[int, int]],
        replicas: Mapping[int, Sequence[int]],
        ways: Mapping[Any, DeviceEnds],
    ) -> None:
        """Make what is not there yet of edges and of the ways between replicas.

        Args:
            edges: (from lane, to lane) -> (from rank, to rank).
            replicas: the ranks that have a stage, by stage.
            ways: of edges and stages that are on a device with streams here, how their values get there.

        Raises:
            Alarm: the others did not.
        """
        missing = {edge: edges[edge] for edge in sorted(edges) if edge not in self.edges}
        stages = {stage: ranks for stage, ranks in replicas.items() if stage not in self.replicas}
        if missing or stages:
            self.wait(partial(self._connect, missing, stages, ways))

    def _connect(
        self,
        edges: Mapping[tuple[int, int], tuple[int, int]],
        replicas: Mapping[int, Sequence[int]],
        ways: Mapping[Any, DeviceEnds],
    ) -> None:
        connector = self._connector
        for (source, to), ranks in edges.items():
            end = EdgeOut if ranks[0] == self.rank else EdgeIn
            with connector.joining(ranks):
                name = f"{ranks[0]}:{source}-{to}"
                cable = connector.cable(name, ranks)
                stream = connector.stream(name, ranks, ways.get((source, to)))
                self.edges[source, to] = edge = end(EdgeWay(cable, name, self.rank, self.lost, stream))
                edge.greet()
        for stage, ranks in replicas.items():
            with connector.joining(ranks):
                name = f"stage {stage}"
                connection = connector.connection(name, ranks)
                way = Way(connection, name, self.lost, connector.stream(name, ranks, ways.get(stage)))
                self.replicas[stage] = copies = Replicas(way, self.rank)
                copies.greet()

    def abort(self) -> None:
        """End all that devices wait for of other processes."""
        self._connector.abort()

    def moved(self) -> int:
        """Changes whenever a device here gets on with what goes between processes."""
        streams = [each.stream for each in (*self.edges.copy().values(), *self.replicas.copy().values())]
        return sum(stream.moved() for stream in streams if stream is not None)

    # -- waiting for others --------------------------------------------------------------------------------------------

    def wait(self, job: Callable[[], Any], more: float = 0.0) -> Any:
        """Run a job on the thread that may block, and return its result.

        ``more`` extends the limit. Raises Alarm; see `take`.
        """
        answers: queue.SimpleQueue[tuple[Any] | None] = queue.SimpleQueue()

        def work() -> None:
            try:
                answers.put((job(),))
            except (LostError, RuntimeError) as error:
                self.lost(error if isinstance(error, LostError) else LostError(-1, str(error)))
            except Alarm:
                pass
            except Exception as error:
                self.fail(Failure(self.rank, type(error).__name__, str(error), None, self.run))

        self._worker.give(work)
        return self.take(answers, more)

    def take(self, answers: queue.SimpleQueue[tuple[Any] | None], more: float = 0.0) -> Any:
        """Return the value in the next tuple of a queue.

        Raises Alarm, also after the timeout and ``more`` without progress.
        """
        with self.alarming(partial(answers.put, None)):
            beats, since = self.pulse.beats, monotonic()
            while True:
                try:
                    answer = answers.get(timeout=min(0.5, self.timeout / 20))
                except queue.Empty:  # Ctrl-C is seen here
                    if beats != self.pulse.beats:
                        beats, since = self.pulse.beats, monotonic()
                    if monotonic() - since < self.timeout + more:
                        continue
                    text = f"the others did not come for {self.timeout:g} s"
                    self.fail(Failure(self.rank, "RunTimeout", text, None, self.run, timed=True))
                    answer = None
                if answer is None:
                    raise Alarm
                return answer[0]

    @property
    def everyone(self) -> Everyone:
        """The connection of all ranks. Raises LostError: there is none."""
        if self._everyone is None:
            raise LostError(-1, "the ranks are not connected")
        return self._everyone

    def exchange(self, data: bytes) -> list[bytes]:
        """What every rank gives, by rank. Raises Alarm."""
        return self.wait(lambda: self.everyone.exchange(data))

    def gather(self, mine: Mapping[int, Tensor], holders: Sequence[int], room: Callable[[int], Tensor]) -> list[Tensor]:
        """Tensors that several ranks hold, in order; see `PlanPart.gather`. Raises Alarm."""
        return self.wait(lambda: self.everyone.gather(mine, holders, room))

    # -- failures ------------------------------------------------------------------------------------------------------

    def alarming(self, alarm: Callable[[], None]) -> Alarming:
        """Inside, ``alarm`` is called, from any thread, as soon as the link breaks."""
        return Alarming(self._alarms, self._gate, alarm, lambda: self.failure is not None)

    def fail(self, failure: Failure, *, heard: bool = False) -> None:
        """Break the link; the first failure counts."""
        with self._gate:
            if self.failure is not None:
                return
            self.failure, self.heard = failure, heard
            alarms = [*self._alarms]
        for alarm in alarms:
            alarm()

    def lost(self, error: LostError) -> None:
        """A connection to a rank has ended. Either it failed, then it has told so before; or its process is gone."""
        if self.failure is not None:
            return
        number = self._events
        told = self.store.ask(lambda store: store.check([f"event/{self.rank}/{number}"]))
        self._suspect = error
        if told and self._events == number:  # the watcher is about to say more, or comes back to it
            return
        if not self.store.silent:
            broken = threading.Event()
            with self.alarming(broken.set):
                broken.wait(_WHY)
        self._fail_by_suspect()

    def _fail_by_suspect(self) -> None:
        if self._suspect is not None:
            self.fail(Failure(self._suspect.rank, "", self._suspect.text, None, self.run))

    def tell(self, failure: Failure) -> None:
        """Tell a failure to all others, once."""
        if self._told:
            return
        self._told = True
        self._post("failed", list(failure), {*range(self.size)} - {self.rank})

    def _post(self, kind: str, what: Any, to: Iterable[int]) -> None:
        def post(store: Any) -> None:
            for other in to:
                number = store.add(f"events/{other}", 1) - 1
                store.set(f"event/{other}/{number}", json.dumps([kind, what]))

        self.store.ask(post)

    def _watch(self, store: Any) -> None:
        """Wait for what others tell, event by event; in a thread of its own."""
        while True:
            try:
                key = f"event/{self.rank}/{self._events}"
                store.wait([key], _FOREVER)
                kind, what = json.loads(store.get(key))
            except RuntimeError as error:
                text = f"the store of the processes is gone, and with it the process that keeps it ({error})"
                self.fail(Failure(-1, "", text.split("\n")[0], None, self.run))
                return
            self._events += 1
            if kind == "end":
                return
            if kind == "closed":
                self._gone[what[0]] = what[1]
                self.refuse_gone()
                self._fail_by_suspect()
            else:
                failure = Failure(*what)
                if failure.timed:
                    with suppress(Exception):  # lanes go on while they are looked at
                        self.say(store)
                self.fail(failure, heard=True)

    def refuse_gone(self) -> None:
        """Break the link where a rank has closed its ranks and this one runs on."""
        for rank, run in self._gone.items():
            if self.run > run:
                text = f"has left its `with fp.ranks(...)` after {run} runs, and this is run {self.run}"
                self.fail(Failure(rank, "FuncpipeError", text, None, self.run))

    def say(self, store: Any) -> None:
        """Say in the store what this rank does."""
        store.set(f"doing/{self.rank}", json.dumps(self.doing()))

    # -- its end -------------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """Close all connections, which ends what waits for them at both ends; in order where nothing has failed."""
        if self.failure is None and self._everyone is not None:
            self._everyone.say_farewell()
        self.fail(Failure(self.rank, "", "its connections were closed", None, self.run))
        self._connector.cut()

    def close(self, *, told: bool) -> bool:
        """End all threads and connections; with ``told`` the others get to know that this one runs no more.

        Returns:
            May others use the connections to the store; not where a thread is left that waits there.
        """
        if told:
            self._post("closed", [self.rank, self.run], {*range(self.size)} - {self.rank})
        self.cut()
        self._wake_watcher()
        patience = 0.1 if self.store.silent else 1.0  # those that wait for the store end when it comes back
        self.pulse.end(patience)
        others = [each.worker for each in (*self.edges.values(), *self.replicas.values())]
        end_all([*others, self._worker, self._watcher, self._guard], patience)
        # gloo's threads end with their last connections, not when the collector comes upon this link.
        self._everyone = None
        self._connector.close()
        self.edges.clear()
        self.replicas.clear()
        return not (self._worker.alive or self._watcher.alive)

    def _wake_watcher(self) -> None:
        self._post("end", None, [self.rank])
