"""A plan: the lowered program, tasks over named values, with the stages and the loss that it runs.

The program stores integers. A *wire* is a value with its microbatch left open; the value of wire ``w`` at microbatch
``m`` is the number ``w * M + m``. A *row* is a task with its microbatch left open; the program's order is a list of
``row * M + m``. `Task` and `Value` are built when someone looks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias, overload

from funcpipe.core.losses import BY_ROWS, Counts
from funcpipe.core.schedule import Action, Kind, Schedule
from funcpipe.core.stage import Stage
from funcpipe.core.task import CALLER, Pool, Task, TaskKind, Value, Wire, lane_name

Ties: TypeAlias = tuple[tuple[tuple[int, Any], ...], ...]
"""Groups of (stage, path): leaves that are one parameter."""


class Row(NamedTuple):
    """An action with its microbatch left open, and everything that follows from it.

    Attributes:
        kind: what it does.
        stage: on which stage.
        lane: where.
        keeps: does a forward keep its residual.
        reads: wires that must be in the lane's store.
        writes: wires that it puts there.
        fetches: (wire, pool) that the lane takes from the caller just before.
        frees: (wire, pool) that die after it, where no other task may read them later; pool -1: made on this lane.
        sends: (wire, lane, pool): copies that follow it.
        drops: wires written that this lane does not read itself; they die after they are sent.
        shared: (wire, pool) read by several tasks of the lane; the last of them frees (see `Lowered.late`).
    """

    kind: Kind
    stage: int
    lane: int
    keeps: bool
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    fetches: tuple[tuple[int, int], ...]
    frees: tuple[tuple[int, int], ...]
    sends: tuple[tuple[int, int, int], ...]
    drops: tuple[int, ...]
    shared: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Lowered:
    """The program of a plan: integers and names, no functions. Compares, hashes, pickles.

    Attributes:
        num_stages, num_microbatches, num_lanes: the counts.
        wires: what the wire numbers mean.
        rows: what the row numbers mean.
        order: ``row * num_microbatches + microbatch`` for each action, in plan order: an order in which one thread can
            run everything, and which every lane follows for its own tasks.
        pools: the slots.
        late: for positions in the order, further (value, pool) that die after that action.
    """

    num_stages: int
    num_microbatches: int
    num_lanes: int
    wires: tuple[Wire, ...]
    rows: tuple[Row, ...]
    order: tuple[int, ...]
    pools: tuple[Pool, ...]
    late: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    def value(self, number: int) -> Value:
        """The value with this number."""
        wire, microbatch = divmod(number, self.num_microbatches)
        role, stage, name, peer = self.wires[wire]
        return Value(role, stage, microbatch, name, peer)

    def action(self, code: int) -> Action:
        """The action with this code of the order."""
        row, microbatch = divmod(code, self.num_microbatches)
        return Action(self.rows[row].kind, self.rows[row].stage, microbatch)

    @cached_property
    def followed(self) -> list[frozenset[int]]:
        """For each stage the microbatches whose W its device follows with another W of the stage."""
        found: list[set[int]] = [set() for _ in range(self.num_stages)]
        for lane in self.lanes:
            for (_, code), (_, after) in pairwise(lane):
                row, microbatch = divmod(code, self.num_microbatches)
                if self.rows[row].kind is Kind.W and row == after // self.num_microbatches:
                    found[self.rows[row].stage].add(microbatch)
        return [frozenset(one) for one in found]

    @cached_property
    def late_frees(self) -> dict[int, tuple[tuple[int, int], ...]]:
        """`late` as a dict."""
        return dict(self.late)

    @cached_property
    def lanes(self) -> tuple[list[tuple[int, int]], ...]:
        """For each lane its part of the order, as (position in the order, code)."""
        lanes: tuple[list[tuple[int, int]], ...] = tuple([] for _ in range(self.num_lanes))
        lane_of = [row.lane for row in self.rows]
        count = self.num_microbatches
        for position, code in enumerate(self.order):
            lanes[lane_of[code // count]].append((position, code))
        return lanes

    @cached_property
    def _slots(self) -> dict[tuple[int, int], int]:
        """The slot of each copy by (value, lane): the one that has been free for longest."""
        taken: dict[tuple[int, int], tuple[int, int]] = {}
        free: list[list[int]] = [list(range(pool.slots)) for pool in self.pools]
        out: dict[tuple[int, int], int] = {}
        for position, code in enumerate(self.order):
            row, microbatch = divmod(code, self.num_microbatches)
            step = self.rows[row]
            late = self.late_frees.get(position, ())

            def take(wire: int, lane: int, pool: int, microbatch: int = microbatch) -> None:
                key = (wire * self.num_microbatches + microbatch, lane)
                out[key] = free[pool].pop(0)
                taken[key] = (pool, out[key])

            for wire, pool in step.fetches:
                take(wire, step.lane, pool)
            dead = [(wire * self.num_microbatches + microbatch, pool) for wire, pool in step.frees]
            for number, pool in (*dead, *late):
                if pool >= 0:
                    free[pool].append(taken.pop((number, step.lane))[1])
            for wire, lane, pool in step.sends:
                take(wire, lane, pool)
        return out

    def tasks_of(self, position: int) -> list[Task]:
        """The tasks of one action: its fetches, itself, its sends."""
        code = self.order[position]
        index, microbatch = divmod(code, self.num_microbatches)
        row = self.rows[index]

        def see(wire: int) -> Value:
            return self.value(wire * self.num_microbatches + microbatch)

        def copy(wire: int, source: int, lane: int, *, last: bool = False) -> Task:
            slot = self._slots[wire * self.num_microbatches + microbatch, lane]
            value = (see(wire),)
            return Task(TaskKind.COPY, None, lane, source, value, value, value if last else (), (slot,))

        late = [number for number, _ in self.late_frees.get(position, ())]
        frees = [see(wire) for wire, _ in row.frees] + [self.value(number) for number in late]
        sent = [wire for wire, _, _ in row.sends]
        frees += [see(wire) for wire in row.drops if wire not in sent]
        final = {wire: at for at, wire in enumerate(sent) if wire in row.drops}
        return [
            *(copy(wire, CALLER, row.lane) for wire, _ in row.fetches),
            Task(
                {Kind.O: TaskKind.OFFLOAD, Kind.L: TaskKind.LOAD}.get(row.kind, TaskKind.COMPUTE),
                self.action(code),
                row.lane,
                row.lane,
                tuple(map(see, row.reads)),
                tuple(map(see, row.writes)),
                tuple(frees),
                (),
            ),
            *(copy(wire, row.lane, lane, last=final.get(wire) == at) for at, (wire, lane, _) in enumerate(row.sends)),
        ]


class Tasks(Sequence[Task]):
    """The tasks of a plan in plan order, each built when it is looked at."""

    def __init__(self, lowered: Lowered) -> None:
        self._lowered = lowered
        sizes = [1 + len(row.fetches) + len(row.sends) for row in lowered.rows]
        count = lowered.num_microbatches
        self._ends = list(accumulate(sizes[code // count] for code in lowered.order))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        from bisect import bisect_right

        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        at = range(len(self))[index]
        position = bisect_right(self._ends, at)
        return self._lowered.tasks_of(position)[at - (self._ends[position - 1] if position else 0)]

    def __iter__(self) -> Iterator[Task]:
        for position in range(len(self._lowered.order)):
            yield from self._lowered.tasks_of(position)

    def __repr__(self) -> str:
        return f"<{len(self)} tasks>"


@dataclass(frozen=True, eq=False)
class Plan:
    """A schedule lowered for stages: what `run` runs, `simulate` times, `draw` draws, `print` shows. Made by `make_plan`.

    Attributes:
        stages: the stages.
        schedule: the schedule.
        program: the lowered program, plain data.
        devices: a torch device (or its name) for each lane; None: chosen at the run.
        loss: ``(y, target) -> loss``, or None.
        weight: ``target -> number``, or None: as the loss counts by itself.
        ties: groups of (stage, path) that are one parameter.
        train: what stages that ask for it get.
        outputs: does a run return the merged outputs of the last stage.
        merge: how outputs of microbatches are joined; see `make_plan`.
        state: of the model that the stages were cut from, as it was then; None: nobody knows.
        counts: how the loss counts by itself.
    """

    stages: tuple[Stage, ...]
    schedule: Schedule
    program: Lowered = field(repr=False)
    devices: tuple[Any, ...] | None = None
    loss: Callable[..., Any] | None = None
    weight: Callable[..., Any] | None = None
    ties: Ties = ()
    train: bool = True
    outputs: bool = False
    merge: Any = None
    state: tuple[Any, ...] | None = field(default=None, repr=False)
    counts: Counts = BY_ROWS

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    @cached_property
    def tasks(self) -> Tasks:
        """The tasks in plan order."""
        return Tasks(self.program)

    @property
    def num_stages(self) -> int:
        """How many stages."""
        return len(self.stages)

    @property
    def num_microbatches(self) -> int:
        """How many microbatches at most; a batch with fewer rows has fewer."""
        return self.schedule.num_microbatches

    @property
    def num_devices(self) -> int:
        """How many lanes."""
        return self.schedule.num_devices

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything but the functions: the same in every process that made the same plan."""
        parts = [str(self.schedule), str(self.train), str(self.outputs), str(self.loss is None), repr(self.ties)]
        parts += [repr((s.name, s.stash, s.pop, s.feeds, s.state, s.commit is None, s.offers)) for s in self.stages]
        return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()

    @cached_property
    def hints(self) -> tuple[str, ...]:
        """What about the plan is not as it could be."""
        stages, rows = self.stages, self.program.rows
        eager = sorted(row.stage for row in rows if row.kind is Kind.W and stages[row.stage].program is None)
        whole = f"eager stages {eager} do not split: I runs the whole backward, W nothing; fp.compile(stage)"
        still = "stage {} stays in evaluation mode, as its module was: model.train() before it is made a stage"
        modes = [still.format(number) for number, one in enumerate(stages) if self.train and one.evaluation]
        return (whole, *modes) if eager else tuple(modes)

    def __str__(self) -> str:
        devices = "unbound" if self.devices is None else ", ".join(map(str, self.devices))
        head = f"plan: {self.schedule!r} on {devices}; {len(self.tasks)} tasks"
        slots = [
            f"  {pool.slots} slot{'s' * (pool.slots != 1)} for {pool.role.value} {lane_name(pool.source)}->{pool.lane}"
            for pool in self.program.pools
        ]
        return "\n".join([head, *[f"  {hint}" for hint in self.hints], *slots, *map(str, self.tasks)])
