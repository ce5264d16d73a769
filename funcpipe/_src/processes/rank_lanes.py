"""`Ranks`: run a plan in several processes, each with some lanes.

To a lane here, a lane of another process is a mailbox (`remote`). `team` owns the connections.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from time import sleep
from typing import Any, Self

import torch
from torch import Tensor

from funcpipe._src.core.errors import FuncpipeError, PeerError, PlanError, RunTimeout
from funcpipe._src.core.tree import Tree
from funcpipe._src.data.exchange import Exchange, open_pipelines
from funcpipe._src.data.lowered import Lowered
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.program import LaneProgram
from funcpipe._src.data.result import Result, Timeline
from funcpipe._src.devices.devices import plan_devices
from funcpipe._src.devices.stream import Place
from funcpipe._src.engine import agreement
from funcpipe._src.engine.execute import Execution
from funcpipe._src.engine.lane import Lane
from funcpipe._src.engine.lanes import Lanes, refuse_uncarried
from funcpipe._src.engine.mail import Inbox, Mailbox, Stop
from funcpipe._src.engine.options import RunOptions
from funcpipe._src.engine.part import PlanPart, lane_program, stages_of
from funcpipe._src.engine.refusals import refuse_options
from funcpipe._src.engine.watchdog import begun, lane_states
from funcpipe._src.engine.worker import Worker, end_all
from funcpipe._src.processes.address import machine
from funcpipe._src.processes.alarms import Alarm, Failure, Telling, names_of
from funcpipe._src.processes.device_ways import (
    DeviceWays,
    Identities,
    identities_of,
    settle,
    ways_of,
)
from funcpipe._src.processes.peer import LostError
from funcpipe._src.processes.peer_errors import OUTSIDE, failure_of, peer_error, table_of
from funcpipe._src.processes.plan_classes import permit_classes_of
from funcpipe._src.processes.rank_schedule import RankSchedule
from funcpipe._src.processes.rank_timeline import joined_timeline
from funcpipe._src.processes.remote import RemoteLane, remote_lanes
from funcpipe._src.processes.rendezvous import LIMIT, STALL, Rendezvous, answered, below, team_name
from funcpipe._src.processes.surroundings import (
    is_under_torchrun,
    refuse_devices,
    refuse_other_devices,
)
from funcpipe._src.processes.team import Team
from funcpipe._src.processes.wire_format import pack_message, unpack_message, unpack_tree
from funcpipe._src.replicas.replicas import GiveSums, Replicas, Sharding, Told
from funcpipe._src.replicas.same_numbers import ComparedLeaves
from funcpipe._src.replicas.spread import cuts_of, whole_of
from funcpipe._src.stages.context import pin


class Ranks(Lanes):
    """The processes that run a plan, as seen from one of them. `ranks` makes it.

    Attributes:
        plan: the plan that was given to `ranks`.
        rank: the number of this process within its replica.
        size: the number of processes in a replica.
        replica: the number of this replica.
        replicas: the number of replicas.
        mesh: the ``DeviceMesh`` of the processes with the same stages, one per replica. None
            without replicas.
        members: the global torch.distributed ranks of the processes of all replicas.
        processes: the same numbers in order: replica by replica, then by rank.
        names: the name of each process in errors.
        compared: the parameter leaves that runs have found equal over replicas and ties.
        copies: the global ranks of the processes with the same stages, by replica.
        rank_of: the rank of each lane.
        lanes: the lanes of this process.
        device: the device of the first lane of this process.
        stages: the stages of the lanes of this process.
        beside: the number of lanes of all processes on this machine.
    """

    halves = False

    def __init__(
        self,
        plan: Plan,
        store: Any,
        mesh: Any,
        replicas: Sequence[Sequence[int]],
        place: tuple[int, int],
        rank_of: Sequence[int],
        timeout: float | None,
    ) -> None:
        self.mesh, (self.replica, rank) = mesh, place
        self.replicas, size = len(replicas), len(replicas[0])
        self.copies = tuple(members[rank] for members in replicas)
        self._copies = range(rank, len(replicas) * size, size)
        self.processes = tuple(member for members in replicas for member in members)
        self.members, self.names = frozenset(self.processes), names_of(self.processes)
        self.compared = ComparedLeaves()
        lanes = tuple(lane for lane, owner in enumerate(rank_of) if owner == rank)
        super().__init__(len(lanes))
        self.plan, self.rank, self.size = plan, rank, size
        self.rank_of, self.lanes = tuple(rank_of), lanes
        self.stages, self._own_devices = stages_of(plan, lanes), plan_devices(plan, lanes)
        self.device = self._own_devices[lanes[0]]
        self.beside, self._seats = len(lanes), {lane: seat for seat, lane in enumerate(lanes)}
        self._store, self._limit, self._teams = store, timeout or LIMIT, 0
        self._is_limit_given = timeout is not None
        self._team: Team | None = None
        self._identities: Identities = {}
        self._ways = DeviceWays(store, self._limit)
        self._replicas: dict[int, Replicas] = {}
        self._summing: dict[int, Worker] = {}
        """By lane, the thread that sums gradients over the replicas."""
        self._turn = threading.Lock()
        self._over = False
        """Whether all ranks have finished the run and have the same facts. Each rank then raises
        errors by itself, so no rank has to be told."""
        self._executions: Sequence[Execution] = ()
        self._at = OUTSIDE
        self._did: tuple[bool, str] | None = None  # what the lanes did when they were ended early

    def __enter__(self) -> Self:
        with Telling(self._failed):
            self._open()
        if self.size > 1:
            open_pipelines.add(self)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        if isinstance(error[1], BaseException):
            with suppress(PeerError):
                self._failed(error[1])
        self.close()

    def close(self) -> None:
        """End all threads and connections, and tell the other ranks that this rank has closed."""
        open_pipelines.discard(self)
        self._end_team(told=True)
        super().close()

    def _end_team(self, *, told: bool = False) -> None:
        """End the team. The next run makes a new team."""
        team, self._team = self._team, None
        if team is not None:
            self._ways.abort()
            team.close(told=told)
            end_all([*self._summing.values()], 1.0)
            self._replicas, self._summing = {}, {}

    # -- as an executor

    @contextmanager
    def running(self, options: RunOptions) -> Generator[RunOptions]:
        """Return a context for one run, or several, that all ranks begin together."""
        if self.closed:
            raise FuncpipeError("these ranks are closed; call fp.run within their with block")
        if not self._turn.acquire(blocking=False):
            raise FuncpipeError(
                "these ranks are busy with another run; make runs one after the other"
            )
        try:
            self.runs, self._over, self._did = self.runs + 1, False, None
            self.compared.begin()
            with Telling(self._failed):
                team = self._open()
                refuse_options(options)
                team.run = self.runs
                team.refuse_gone()
                if options.timeout is None:
                    options = replace(
                        options, timeout=self._limit, takes_faulthandler=self._is_limit_given
                    )
                team.monitor.limit(options.timeout or self._limit)
                yield options
        finally:
            self._at, self._over = f"{OUTSIDE}, after run {self.runs}", False
            if self._team is not None:
                self._team.end_run()
                self._team.monitor.limit(self._limit)
            self._turn.release()

    def check(self, plan: Plan) -> None:
        """Raise PlanError if these ranks cannot run the plan."""
        if plan.num_devices != len(self.rank_of):
            raise PlanError(
                f"these ranks have {len(self.rank_of)} lanes, but the plan has "
                f"{plan.num_devices}; make ranks for this plan: fp.ranks(plan)"
            )
        if plan.schedule.device_of != self.plan.schedule.device_of:
            raise PlanError(
                f"the plan has its stages on lanes {[*plan.schedule.device_of]}, but the plan of "
                f"these ranks has them on {[*self.plan.schedule.device_of]}, so other processes "
                "have their params; make ranks for this plan: fp.ranks(plan)"
            )
        refuse_other_devices(self.lanes, self._own_devices, self.devices(plan))
        refuse_devices(plan)
        refuse_uncarried(plan)

    def devices(self, plan: Plan) -> Sequence[torch.device]:
        """Return the device of each lane. For lanes here, a device without a number is this
        process's current device."""
        return (
            self._own_devices
            if plan.devices == self.plan.devices
            else plan_devices(plan, self.lanes)
        )

    def part(self, plan: Plan) -> PlanPart:
        """Return the part of a plan that this process runs, which is this object."""
        self.check(plan)
        permit_classes_of(plan)
        return self

    def programs(self, program: Lowered) -> Sequence[LaneProgram]:
        """Return the programs of the lanes of this process."""
        return [lane_program(program, lane) for lane in self.lanes]

    def seat(self, lane: int) -> tuple[int, int]:
        """Return the number of a lane among all lanes of this machine, and their count."""
        return self._seats[lane], self.beside

    def beats(self) -> int:
        """Return a number that changes whenever another rank makes progress."""
        return 0 if self._team is None else self._team.monitor.beats

    def mailbox(self) -> Mailbox:
        """Make the mailbox of a lane. While the lane waits, its thread reads messages of other
        processes."""
        return Inbox(self._open().lead)

    def outboxes(
        self, execution: Execution, program: LaneProgram, place: Place
    ) -> Mapping[int, Mailbox]:
        """Return the mailboxes that stand for the lanes of other processes, for one lane here."""
        team = self._open()
        ways = ways_of(self, execution.ready.plan, self._identities) if place.asynchronous else {}
        if missing := self._ways.missing(ways):
            team.wait(partial(self._ways.make, missing))
        first = self.replica * self.size
        ranks = {
            other: first + owner
            for other, owner in enumerate(self.rank_of)
            if other not in self.lanes
        }
        return remote_lanes(team, ranks, program, place, self._ways.get, execution)

    def walk(self, executions: Sequence[Execution]) -> None:
        """Run the lanes of this process, and wait; raise the first failure, here or elsewhere."""
        team = self._open()
        self._executions = executions
        try:
            super().walk(executions)
            settle(executions, team.wait, partial(self.ending, None))
        finally:
            self._executions = ()

    def begin(self, execution: Execution, lane: Lane) -> None:
        """Direct arriving messages for this execution to the lane that begins it."""
        super().begin(execution, lane)
        if self._team is None:
            raise Stop
        number = lane.program.lane
        boxes = [
            box
            for (here, _), box in execution.outboxes.items()
            if here == number and isinstance(box, RemoteLane)
        ]
        if boxes:
            self._team.begin((self.runs, execution.number or 0, number), boxes[0].arrivals)

    def watched(self, alarm: Callable[[], None]) -> AbstractContextManager[object]:
        """Return a context in which the lanes run. The end of the team calls ``alarm``."""
        return self._open().alarming(alarm)

    def ending(self, error: BaseException | None) -> None:
        """Tell the other ranks of the error, before the lanes end."""
        # Before, because a lane ends only after its present operation, which may take long.
        self._did = self._doing()
        if self._team is not None and error is not None:
            self._tell(self._team, error)
        self._ways.abort()  # a lane may be blocked in a transfer from another process

    def raise_alarm(self) -> None:
        """Raise Alarm: the team was ended by another process."""
        raise Alarm

    # -- with the others

    def exchange(self, about: str, mine: Any) -> list[Any]:
        """Exchange a value with all ranks, and return the values by rank.

        All ranks call this with the same ``about``. It returns after all ranks have called it.

        Raises:
            RanksError: another rank makes a different exchange.
            PeerError: a rank failed, or its connection is lost.
        """
        with Telling(self._failed):
            self._at = f"at {about} (run {self.runs})"
            sent = pack_message(self.runs, about, mine)
            known = [unpack_message(data) for data in self._open().exchange(sent)]
            place = "" if self._turn.locked() else f"{OUTSIDE}, "
            self._at = f"{place}after {about} (run {self.runs})"
            if len({(run, what) for run, what, _ in known}) > 1:
                self.runs = max(run for run, *_ in known)
                raise agreement.other_places(known, self.names)
            values = [unpack_tree(data) for *_, data in known]
            self._over = about == agreement.END
        return values

    def agree(self, word: agreement.Word, limit: int) -> agreement.Agreed:
        """Exchange the facts of all ranks, and return the facts that follow from them."""
        team, among = self._open(), (self.replicas, self.replica, self.names)
        return team.previous_words.agree(
            self.exchange, team.rank, word, lambda words: agreement.agree(words, limit, *among)
        )

    @property
    def others(self) -> Exchange:
        """The exchange that a `Result` uses after the run."""
        return Exchange(self.exchange, self.copies, self.telling)

    def exchange_here(self, about: str, mine: Any) -> list[Any]:
        """Exchange a value, and return the values of this replica's ranks. All replicas call this.

        Raises the errors of `exchange`.
        """
        first = self.replica * self.size
        return self.exchange(about, mine)[first : first + self.size]

    def timeline(self, result: Result) -> Timeline:
        """Join the timelines of all ranks, with one clock. All ranks call this.

        Args:
            result: the `Result` of a run with ``record=True``.

        Raises:
            PlanError: the run was not recorded.
        """
        return joined_timeline(result, machine(), self.exchange_here)

    def schedule(
        self,
        params: Sequence[Tree],
        *,
        state: Sequence[Tree] | None = None,
        seed: int | None = None,
        scale_grads: bool = True,
    ) -> RankSchedule:
        """Make an object with the methods ``step`` and ``eval`` of torch's pipeline schedules.

        Use it in training loops such as torchtitan's.

        Args:
            params: a tuple with one tree per stage, None for stages of other ranks.
            state: the first state, in the same form. The object keeps the new state of each step.
            seed: an int. Step k draws with ``fold_in(seed, k)``. None: drawing raises an error.
            scale_grads: whether to divide gradients by the number of microbatches. True, as in
                torch's schedules. Give False for a loss that returns a sum, such as torchtitan's.

        Raises:
            PlanError: the plan has no loss, no backwards, or slices.
        """
        return RankSchedule(self.plan, self, params, state, seed, scale_grads=scale_grads)

    def spread(self, stage: int, tree: Tree) -> Mapping[int, Sharding | None]:
        """Return how the DTensors among a stage's parameters are spread over its replicas."""
        return cuts_of(tree, f"params[{stage}]", self.copies, self.members)

    def gather_params(
        self,
        stage: int,
        parts: Sequence[tuple[Tensor, Sequence[Tensor]]],
        done: Callable[[Any], None],
    ) -> None:
        """Begin to gather parameter parts from the other replicas; see `PlanPart`."""
        if self.replicas == 1:
            done(None)
        else:
            self._replicas_of(stage).gather(parts, done)

    def whole(self, tensor: Any) -> Tensor:
        """Return the whole of a tensor that may be spread over replicas.

        All replicas call this for the same tensors in the same order.
        """
        with Telling(self._failed):
            return whole_of(
                tensor,
                self.copies,
                lambda part, like: self._open().gather({self.replica: part}, self._copies, like),
            )

    def reduce(
        self, stage: int, gradients: list[Tensor | None], cuts: Mapping[int, Sharding], told: Told
    ) -> Callable[[], GiveSums]:
        """Begin to sum the gradients of a stage over the replicas; see `PlanPart`."""
        key = self._replicas_of(stage).begin(gradients, cuts, told)

        def wait() -> GiveSums:
            with Telling(self._failed):
                self._at = f"at the sums of stage {stage} (run {self.runs})"
                return self._open().answer(key)

        return wait

    def _replicas_of(self, stage: int) -> Replicas:
        """Return the replicas of a stage of this process. Raises Stop if the team has ended."""
        if self._team is None:
            raise Stop
        if stage not in self._replicas:
            lane = self.plan.schedule.device_of[stage]
            if lane not in self._summing:
                self._summing[lane] = Worker(
                    f"funcpipe replicas {lane}", self._ways.abort, patience=1.0
                )
                self._summing[lane].start()
            ways = self._ways.get(stage)
            self._replicas[stage] = Replicas(
                self._team, stage, self._copies, self._summing[lane], ways
            )
        return self._replicas[stage]

    def telling(self, about: str = "") -> AbstractContextManager[object]:
        """Return a context. Other ranks raise PeerError for an error inside; ``about`` names the
        step."""
        return Telling(self._failed, about)

    def gather(
        self, mine: Mapping[int, Tensor], holders: Sequence[int], like: Sequence[Any]
    ) -> list[Tensor]:
        """Return tensors that several ranks hold, in order; see `PlanPart.gather`."""
        holders = [self.replica * self.size + holder for holder in holders]
        dense = {place: tensor.contiguous().cpu() for place, tensor in mine.items()}
        with Telling(self._failed):
            return self._open().gather(dense, holders, like)

    def _open(self) -> Team:
        """Return the team, and make it first if there is none.

        Raises RanksError if the others have another plan, Alarm if they do not come.
        """
        if self.closed:
            raise FuncpipeError(
                "these ranks are closed; call fp.run, fp.step and result.finite within their with "
                "block"
            )
        if self._team is None:
            self._teams += 1
            limit = self._limit + (STALL if self._teams == 1 else 0.0)
            streams = any(
                Place.backend.asynchronous(self._own_devices[lane]) for lane in self.lanes
            )
            number = self.replica * self.size + self.rank
            team = Team(
                number, self.processes, self._limit, self._doing, self._marks, has_devices=streams
            )
            team.run = self.runs
            try:
                self._join(team, below(team_name(self._teams), self._store), limit)
            except BaseException:
                team.close(told=False)
                raise
            self._team = team
        return self._team

    def _join(self, team: Team, store: Any, seconds: float) -> None:
        """Meet the other processes, and connect to them. Raises RanksError, PeerError."""
        meeting = Rendezvous(store, team.rank, team.names, seconds, lambda: team.failure is None)
        try:
            said = answered(partial(meeting.hear, self._hello()), seconds + 1.0)
            agreement.refuse_others(said, self.names)
            names = [each["machine"] for each in said]
            self._identities = {(q, lane): each for one in said for q, lane, each in one["devices"]}
            everyone = [
                (replica, lane)
                for replica in range(self.replicas)
                for lane in range(len(self.rank_of))
            ]
            here = [
                (q, lane)
                for q, lane in everyone
                if names[q * self.size + self.rank_of[lane]] == names[team.rank]
            ]
            self.beside = len(here)
            self._seats = {
                lane: seat for seat, (replica, lane) in enumerate(here) if replica == self.replica
            }
            team.start(
                partial(pin, [self._seats[lane] for lane in self.lanes], self.beside, self._cores)
            )
            answered(partial(meeting.connect, team.add), seconds + 1.0)
            self._ways = DeviceWays(store, self._limit)
        except LostError as error:
            team.lost(error)
            raise peer_error(team, {}) from None

    def _hello(self) -> dict[str, Any]:
        """Return the facts of this process that the others need."""
        same, devices = agreement.alike(self.plan, self.rank_of), identities_of(self, self.plan)
        functions = agreement.functions_of(self.plan, self.stages if self.replicas > 1 else ())
        return {"same": same, "functions": functions, "machine": machine(), "devices": devices}

    def _doing(self) -> tuple[bool, str]:
        """Return whether a lane is in an action, and what all lanes do, for tables in errors."""
        if self._did is not None:
            return self._did
        if not self._executions:
            return False, self._at
        states = lane_states(self._executions)
        return any(busy for busy, _ in states), "; ".join(words for _, words in states)

    def _marks(self) -> tuple[Any, ...]:
        """Return values that change whenever this rank makes progress."""
        return (self.runs, self._at, self._ways.moved(), *begun(self._executions))

    # -- what goes wrong

    def _tell(self, team: Team, error: BaseException, about: str = "") -> Failure:
        """End the team with an error, and tell all others. Return the first failure of the team."""
        if not isinstance(error, Alarm):
            team.fail(failure_of(error, team.rank, self.runs, about))
        team.tell()
        assert team.failure is not None
        return team.failure

    def _failed(self, error: BaseException, about: str = "") -> None:
        """After an error: tell the others and end the team; raise if the first failure is
        theirs."""
        team = self._team
        if team is None or (isinstance(error, FuncpipeError) and (self._over or error.everywhere)):
            return
        self.compared.forget()
        failure = self._tell(team, error, about)
        table = team.all_states() if failure.timed else {}
        self._end_team()
        if not (isinstance(error, Alarm) or failure.timed):
            return
        if table.get(team.rank, (False, ""))[0]:  # the others wait for this one
            text = (
                str(error)
                if isinstance(error, RunTimeout)
                else "this rank is in an action, for too long"
            )
            raise RunTimeout(f"{text}\n{table_of(table, team.names)}") from None
        if is_under_torchrun():
            # torchrun blames the process that ends first, and compares times in whole seconds: let
            # the failing process end first.
            sleep(1.1)
        raise peer_error(team, table) from None
