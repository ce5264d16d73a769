"""Runs a plan in several processes: each has some lanes, and a lane of another process is a mailbox to it."""

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

from funcpipe.core.errors import FuncpipeError, PeerError, PlanError, RanksError, RunTimeout
from funcpipe.core.exchange import Exchange
from funcpipe.core.lowered import Lowered
from funcpipe.core.plan import Plan
from funcpipe.core.program import CALLER, LaneProgram
from funcpipe.core.result import Result, Timeline
from funcpipe.core.tree import Tree
from funcpipe.runtime.address import machine
from funcpipe.runtime.agreement import END, alike, other_places, refuse_others
from funcpipe.runtime.alarms import Alarm, Telling, names_of
from funcpipe.runtime.context import pin
from funcpipe.runtime.devices import plan_devices
from funcpipe.runtime.edge import Outbox
from funcpipe.runtime.execute import Execution
from funcpipe.runtime.lane import Lane
from funcpipe.runtime.lanes import Lanes, refuse_uncarried
from funcpipe.runtime.link import Link
from funcpipe.runtime.mail import Mailbox, Stop
from funcpipe.runtime.options import RunOptions
from funcpipe.runtime.part import PlanPart, lane_program, stages_of
from funcpipe.runtime.peer_errors import OUTSIDE, asked, peer_error, table_of, tell
from funcpipe.runtime.plan_classes import permit_classes_of
from funcpipe.runtime.rank_schedule import RankSchedule
from funcpipe.runtime.rank_timeline import joined_timeline
from funcpipe.runtime.rank_wires import Identities, begin, connect, end, identities_here, settle
from funcpipe.runtime.refusals import refuse_options
from funcpipe.runtime.replicas import GiveSums, Sharding, Told
from funcpipe.runtime.same_numbers import ComparedLeaves
from funcpipe.runtime.spread import cuts_of, whole_of
from funcpipe.runtime.store import LIMIT, STALL, below, connections
from funcpipe.runtime.surroundings import is_under_torchrun, link_name, refuse_devices, refuse_other_devices
from funcpipe.runtime.watchdog import begun, lane_states
from funcpipe.runtime.wire_format import pack, unpack


class Ranks(Lanes):
    """The processes of a plan, seen from one of them. Made by `ranks`.

    Attributes:
        plan: the plan they were made for.
        rank: the number of this process among those of its replica.
        size: how many these are.
        replica: the number of the replica.
        replicas: how many there are.
        mesh: the ``DeviceMesh`` of those with the same stages as this one; None: there are no replicas.
        members: the processes of all of them, as torch.distributed numbers them.
        processes: the same numbers in order: replica by replica and by rank.
        names: the name of each process in errors.
        compared: the parameter leaves that runs have found equal over replicas and ties.
        copies: of these, those with the same stages as this one, by replica.
        rank_of: the rank of each lane.
        lanes: the lanes of this process.
        device: that of the first of them.
        stages: the stages of these lanes.
        beside: how many lanes all processes of this machine have.
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
        self.plan, self.rank, self.size, self.rank_of, self.lanes = plan, rank, size, tuple(rank_of), lanes
        self.stages, self._own_devices = stages_of(plan, lanes), plan_devices(plan, lanes)
        self.device = self._own_devices[lanes[0]]
        self.beside, self._seats = len(lanes), {lane: seat for seat, lane in enumerate(lanes)}
        self._store, self._limit, self._links = store, timeout or LIMIT, 0
        self._is_limit_given = timeout is not None
        self._stores: list[Any] = []
        self._link: Link | None = None
        self._identities: Identities = {}
        self._turn = threading.Lock()
        self._over = False
        """Are all at the end of the run, and know the same: what is refused then every rank refuses by itself, untold."""
        self._executions: Sequence[Execution] = ()
        self._at = OUTSIDE
        self._did: tuple[bool, str] | None = None
        """What the lanes did when they were ended."""

    def __enter__(self) -> Self:
        with Telling(self._failed):
            self._open()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        if isinstance(error[1], BaseException):
            with suppress(PeerError):
                self._failed(error[1])
        self.close()

    def close(self) -> None:
        """End all threads and connections; the other ranks are told that this one runs nothing more."""
        link, self._link = self._link, None
        if link is not None:
            link.close(told=True)
        super().close()

    # -- as an executor ------------------------------------------------------------------------------------------------

    @contextmanager
    def running(self, options: RunOptions) -> Generator[RunOptions]:
        """Inside is a run, or several, which every rank begins; see `ranks`."""
        if self.closed:
            raise FuncpipeError("these ranks are closed; run inside of their with block")
        if not self._turn.acquire(blocking=False):
            raise FuncpipeError("these ranks are busy with another run; runs of one plan follow each other")
        try:
            self.runs, self._over, self._did = self.runs + 1, False, None
            self.compared.begin()
            with Telling(self._failed):
                link = self._open()
                refuse_options(options)
                link.run = self.runs
                link.refuse_gone()
                if options.timeout is None:
                    options = replace(options, timeout=self._limit, takes_faulthandler=self._is_limit_given)
                link.limit(options.timeout or self._limit)
                yield options
        finally:
            self._at, self._over = f"{OUTSIDE}, after one ({self.runs})", False
            if self._link is not None:
                self._link.limit(self._limit)
            self._turn.release()

    def check(self, plan: Plan) -> None:
        """Raises PlanError where these ranks cannot run the plan."""
        if plan.num_devices != len(self.rank_of):
            raise PlanError(
                f"these ranks have {len(self.rank_of)} lanes, the plan has {plan.num_devices}; make them with "
                "fp.ranks(plan)"
            )
        if plan.schedule.device_of != self.plan.schedule.device_of:
            raise PlanError(
                f"the plan has its stages on lanes {[*plan.schedule.device_of]}, and the one that these ranks were made "
                f"for on {[*self.plan.schedule.device_of]}: another process would have their params; make ranks for it"
            )
        refuse_other_devices(self.lanes, self._own_devices, self.devices(plan))
        refuse_devices(plan)
        refuse_uncarried(plan)

    def devices(self, plan: Plan) -> Sequence[torch.device]:
        """The device of each lane; those that have no number are, where they are here, this process's current one."""
        return self._own_devices if plan.devices == self.plan.devices else plan_devices(plan, self.lanes)

    def part(self, plan: Plan) -> PlanPart:
        """What is here of a plan with as many lanes."""
        self.check(plan)
        permit_classes_of(plan)
        return self

    def programs(self, program: Lowered) -> Sequence[LaneProgram]:
        """The programs of the lanes that are here."""
        return [lane_program(program, lane) for lane in self.lanes]

    def seat(self, lane: int) -> tuple[int, int]:
        """The number of a lane among those of this machine, and how many these are."""
        return self._seats[lane], self.beside

    def beats(self) -> int:
        """Changes whenever a rank gets on."""
        return 0 if self._link is None else self._link.pulse.beats

    def outboxes(self, program: LaneProgram) -> Mapping[int, Mailbox]:
        """Of lanes that are not here, the mailboxes into which one that is puts what goes to them."""
        others = {lane for lane, _ in program.outgoing} | {slot.source for slot in program.slots}
        return {other: Outbox() for other in others - {*self.lanes, CALLER}}

    def walk(self, executions: Sequence[Execution]) -> None:
        """Run the lanes that are here; come back when they are done, or raise what failed, here or elsewhere."""
        link = self._open()
        connect(link, self, executions[0], self._identities)
        self._executions = executions
        try:
            super().walk(executions)
            settle(link, executions, partial(self.ending, None))
        finally:
            end(executions)
            self._executions = ()

    def begin(self, execution: Execution, lane: Lane) -> None:
        """Let the edges of a lane serve what it begins."""
        super().begin(execution, lane)
        if self._link is None:
            raise Stop
        begin(self._link, execution, lane)

    def watched(self, alarm: Callable[[], None]) -> AbstractContextManager[object]:
        """Inside, the lanes run; whatever breaks the link ends them."""
        return self._open().alarming(alarm)

    def ending(self, error: BaseException | None) -> None:
        """Tell the others first: to end the lanes may take as long as what they are in."""
        self._did = self._doing()
        if error is not None:
            tell(self._open(), error, self.runs)
        if self._link is not None:
            self._link.abort()  # a lane may stand in a device that waits for another process

    def raise_alarm(self) -> None:
        """Raise what an alarm was about."""
        raise Alarm

    # -- with the others -----------------------------------------------------------------------------------------------

    def exchange(self, about: str, mine: Any) -> list[Any]:
        """What every rank gives, by rank; all of them call this about the same thing. Nobody goes on before all came.

        Raises:
            RanksError: another rank exchanges something else now.
            PeerError: a rank failed, or is lost.
        """
        with Telling(self._failed):
            self._at = f"at {about} ({self.runs})"
            known = [unpack(data) for data in self._open().exchange(pack((self.runs, about, mine)))]
            self._over = about == END
            self._at = f"{'' if self._turn.locked() else f'{OUTSIDE}, '}after {about} ({self.runs})"
        if len({(run, what) for run, what, _ in known}) > 1:
            self.runs = max(run for run, *_ in known)
            raise other_places(known, self.names)
        return [given for *_, given in known]

    @property
    def others(self) -> Exchange:
        """The exchange for what comes out of a run."""
        return Exchange(self.exchange, self.copies, self.telling)

    def exchange_here(self, about: str, mine: Any) -> list[Any]:
        """What every rank of this replica gives; all replicas call it. Raises what `exchange` does."""
        first = self.replica * self.size
        return self.exchange(about, mine)[first : first + self.size]

    def timeline(self, result: Result) -> Timeline:
        """The timeline of a recorded run with the lanes of all ranks, by one clock; every rank calls it.

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
        """An object with the ``step`` and ``eval`` of torch.distributed.pipelining's schedules, for loops such as
        torchtitan's.

        Args:
            params: as for `run`, one tree per stage, None for stages of other ranks.
            state: likewise; the schedule keeps what each step makes of it.
            seed: each step draws by a key made of it and the number of the step.
            scale_grads: divide gradients by the number of microbatches, which is also the default of torch's schedules.
                Give False for a loss that returns a sum, such as torchtitan's.

        Raises:
            PlanError: the plan has no loss, no backwards, or slices.
        """
        return RankSchedule(self.plan, self, params, state, seed, scale_grads=scale_grads)

    def spread(self, stage: int, tree: Tree) -> Mapping[int, Sharding | None]:
        """The leaves of a stage's parameters that are DTensors over its replicas."""
        return cuts_of(tree, f"params[{stage}]", self.copies, self.members)

    def gather_params(
        self, stage: int, parts: Sequence[tuple[Tensor, Sequence[Tensor]]], done: Callable[[Any], None]
    ) -> None:
        """Begin to fetch the parts of parameters that other replicas have."""
        if self.replicas == 1:
            done(None)
        else:
            self._open().replicas[stage].gather(parts, done)

    def whole(self, tensor: Any) -> Tensor:
        """All of a tensor; where replicas have parts of it, all of them call this for the same ones in the same order."""
        with Telling(self._failed):
            return whole_of(
                tensor, self.copies, lambda part, room: self._open().gather({self.replica: part}, self._copies, room)
            )

    def reduce(
        self, stage: int, gradients: list[Tensor | None], cuts: Mapping[int, Sharding], told: Told
    ) -> Callable[[], GiveSums]:
        """Begin to sum the gradients of a stage over the replicas."""
        answers = self._open().replicas[stage].begin(gradients, cuts, told)

        def wait() -> GiveSums:
            with Telling(self._failed):
                self._at = f"at the sums of stage {stage} ({self.runs})"
                return self._open().take(answers)

        return wait

    def telling(self, about: str = "") -> AbstractContextManager[object]:
        """Return a context that sends an error inside to the other ranks, which raise PeerError.

        ``about`` names the step.
        """
        return Telling(self._failed, about)

    def gather(self, mine: Mapping[int, Tensor], holders: Sequence[int], like: Sequence[Any]) -> list[Tensor]:
        """Tensors that several ranks hold, in order; see `PlanPart.gather`."""
        holders = [self.replica * self.size + holder for holder in holders]
        dense = {place: tensor.contiguous().cpu() for place, tensor in mine.items()}
        with Telling(self._failed):
            return self._open().gather(dense, holders, lambda place: like[place].room())

    def _open(self) -> Link:
        """The link; made if there is none. Raises RanksError: the others have another plan; Alarm: they do not come."""
        if self.closed:
            raise FuncpipeError(
                "these ranks are closed; run, step and ask for result.finite inside of their with block"
            )
        if self._link is None:
            self._links += 1
            limit = self._limit + (0.0 if self._stores else STALL)
            self._stores = self._stores or connections(self._store, limit)
            stores = [below(link_name(self._links), store) for store in self._stores]
            number = self.replica * self.size + self.rank
            link = self._link = Link(stores, number, self.processes, limit, self._doing, self._marks)
            link.run = self.runs
            said = link.hear(self._hello())
            try:
                refuse_others(said, self.names)
            except RanksError:
                self._link = None
                link.close(told=False)
                raise
            names = [each["machine"] for each in said]
            self._identities = {(q, lane): each for one in said for q, lane, each in one["devices"]}
            everyone = [(replica, lane) for replica in range(self.replicas) for lane in range(len(self.rank_of))]
            here = [(q, lane) for q, lane in everyone if names[q * self.size + self.rank_of[lane]] == names[number]]
            self.beside = len(here)
            self._seats = {lane: seat for seat, (replica, lane) in enumerate(here) if replica == self.replica}
            # Threads of connections keep to the cores of these lanes, as whole processes of other libraries do.
            link.join(partial(pin, [self._seats[lane] for lane in self.lanes], self.beside, self._cores))
            link.limit(self._limit)
        return self._link

    def _hello(self) -> dict[str, Any]:
        """What the others must know of this process."""
        devices = identities_here(self, self.plan)
        return {"same": alike(self.plan, self.rank_of), "machine": machine(), "devices": devices}

    def _doing(self) -> tuple[bool, str]:
        """Is a lane in an action, and what all of them do; for the tables of others."""
        executions = self._executions
        if self._did is not None:
            return self._did
        if not executions:
            return False, self._at
        states = lane_states(executions)
        return any(busy for busy, _ in states), "; ".join(words for _, words in states)

    def _marks(self) -> tuple[Any, ...]:
        """Changes whenever this rank gets on."""
        moved = 0 if self._link is None else self._link.moved()
        return (self.runs, self._at, moved, *begun(self._executions))

    # -- what goes wrong -----------------------------------------------------------------------------------------------

    def _failed(self, error: BaseException, about: str = "") -> None:
        """After an error: tell it to the others and break the link, or raise what one of theirs is here."""
        link = self._link
        if link is None or (isinstance(error, FuncpipeError) and (self._over or error.everywhere)):
            return
        self._link = None
        self.compared.forget()
        failure = tell(link, error, self.runs, about)
        table = asked(link) if failure.timed else {}
        if not link.close(told=False):
            self._stores = []
        if not (isinstance(error, Alarm) or failure.timed):
            return
        if table.get(link.rank, (False, ""))[0]:  # the others wait for this one
            text = str(error) if isinstance(error, RunTimeout) else "this rank is in an action, for too long"
            raise RunTimeout(f"{text}\n{table_of(table, link.names)}") from None
        if is_under_torchrun():
            sleep(1.1)  # it blames who ends first, and counts in whole seconds
        raise peer_error(failure, table, link) from None
