"""Lower stages and a schedule to a program: choose plan order, sends and slots.

One rule decides the sends: if an action reads a value of another lane, that lane sends the value
once, directly after the action that makes it. Values of the caller are fetched just before their
first use. The number of slots of an edge is the largest number of values that wait at its end in
plan order.

`effects.py` says what actions read and write, `data/lowered.py` expands the program.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.data.kinds import MOVES, Kind
from funcpipe._src.data.lowered import TAKEN, Lowered, read_again
from funcpipe._src.data.program import CALLER, Call, Pool, Role, Wire
from funcpipe._src.data.schedule import Action, Schedule
from funcpipe._src.data.stage import Stage
from funcpipe._src.lower.effects import ALONE, Among, EffectContext, effects
from funcpipe._src.lower.skips import routes
from funcpipe._src.schedules.legal import examine

_GIVEN = (Role.INPUT, Role.TARGET, Role.FEED, Role.CARRY_IN)
_FIRST = (Kind.F, *MOVES)
_CARRYING = frozenset({Kind.F, Kind.B, Kind.I, Kind.R})
"""The kinds that read and write carries, or gradients of carries."""


def lower(
    stages: Sequence[Stage],
    schedule: Schedule,
    *,
    loss: bool,
    outputs: bool,
    halves: bool = False,
    carry: bool = False,
    spare_slots: int = 0,
) -> Lowered:
    """Lower a schedule for stages. Takes linear time in the number of actions.

    Args:
        stages: the stages, as many as the schedule has.
        schedule: any schedule; it is checked.
        loss: whether the plan has a loss.
        outputs: whether the caller receives the outputs of the last stage.
        halves: make the program of a `vjp`: all forwards come before all backwards, and the caller
            receives the outputs and the gradients of the inputs.
        carry: whether the caller gives and receives carries.
        spare_slots: the number of additional slots per pool, beyond those needed if values took no
            time.

    Raises:
        ScheduleError: the schedule is not legal.
        PlanError: the number of stages differs, stash and pop do not match, or, with ``halves``, a
            device has a forward after a backward.
    """
    plan_order = examine(schedule)
    if len(stages) != schedule.num_stages:
        count = f"{len(stages)} {'is' if len(stages) == 1 else 'are'} given"
        mend = "make the schedule for as many, or join stages with fp.compose"
        if len(stages) == schedule.num_microbatches:
            mend += "; a schedule takes (num_stages, num_microbatches), which look swapped here"
        raise PlanError(f"the schedule has {schedule.num_stages} stages, but {count}; {mend}")
    reduced = {
        action.stage for order in schedule.orders for action in order if action.kind is Kind.G
    }
    context = EffectContext(stages, routes(stages), loss, outputs or halves, halves, reduced, carry)
    calls = _Calls(context, schedule)
    order, pairs = calls.order(plan_order)
    if halves:
        order = _forwards_first(order, calls.calls, schedule)
    program = Lowered(
        schedule.num_stages,
        schedule.num_microbatches,
        schedule.num_slices,
        schedule.num_devices,
        tuple(calls.wires),
        tuple(calls.calls),
        array("i", order),
        tuple(Pool(*key, slots=0) for key in calls.pools),
        frozenset(pairs),
    )
    pools = [
        pool._replace(slots=most + (0 if pool.source == CALLER else spare_slots))
        for pool, most in zip(program.pools, _pool_sizes(program), strict=True)
    ]
    return replace(program, pools=tuple(pools))


def _forwards_first(order: list[int], calls: list[Call], schedule: Schedule) -> list[int]:
    """Return the order with the forwards of all lanes first, then the remaining actions.

    The first half of a lane ends with its last forward and the O directly after it. The order of
    each lane stays. Raises PlanError if a device has a forward after a backward: `vjp` could not
    split the run.
    """
    left: list[int] = []
    faults: list[str] = []
    for device, actions in enumerate(schedule.orders):
        end = 1 + max(at for at, action in enumerate(actions) if action.kind is Kind.F)
        begun = next((at for at in range(end) if actions[at].kind not in _FIRST), None)
        if begun is not None:
            late = next(action for action in actions[begun:] if action.kind is Kind.F)
            faults.append(f"device {device} runs {late} after {actions[begun]}")
        while end < len(actions) and actions[end].kind is Kind.O:
            end += 1
        left.append(end)
    raise_all(
        "vjp runs all forwards before it knows the cotangents, so no forward may come after a "
        "backward; use fp.schedules.fill_drain or fp.schedules.looped_bfs:",
        faults,
    )
    halves: tuple[list[int], list[int]] = ([], [])
    for code in order:
        lane = calls[code // schedule.num_pieces].lane
        halves[left[lane] <= 0].append(code)
        left[lane] -= 1
    return halves[0] + halves[1]


class _Calls:
    """Numbers wires, pools and calls, in the order in which they are first needed."""

    def __init__(self, context: EffectContext, schedule: Schedule) -> None:
        self.context, self.schedule = context, schedule
        self.wires: dict[Wire, int] = {}
        self.pools: dict[tuple[int, int, Role], int] = {}
        self.calls: list[Call] = []
        self.readers: dict[Wire, set[int]] = defaultdict(set)  # the lanes that read each wire
        for device, order in enumerate(schedule.orders):
            for kind, stage in {action[:2] for action in order}:
                for wire in effects(kind, stage, True, context)[0]:
                    self.readers[wire].add(device)

    def order(self, plan_order: Sequence[int]) -> tuple[list[int], set[int]]:
        """Return the codes of the plan order, and the codes of the first actions of pairs.

        A code is ``call * num_pieces + piece`` (see `Lowered.order`).
        """
        schedule = self.schedule
        count, slices, backward = schedule.num_pieces, schedule.num_slices, schedule.has_backward
        actions = [*chain.from_iterable(schedule.orders)]
        rematted = {action[1:] for action in actions if action.kind is Kind.R}
        places = [Among(number == 0, number == slices - 1) for number in range(slices)]
        carries = [part.carry and slices > 1 for part in self.context.stages]
        bases: dict[tuple[Kind, int, int, bool, Among], int] = {}  # the first code of each call
        pairs: set[int] = set()
        out: list[int] = []
        for number in plan_order:
            action = actions[number]
            kind, stage, piece, part = action
            if part is not None:
                piece = piece * slices + part
            # A U whose number exceeds the number of pieces belongs to a later turn, which is
            # another call. Other kinds have only turn 0.
            turn, piece = divmod(piece, count)
            again = bool(rematted) and action[1:] in rematted
            keeps = kind is not Kind.F or (backward and not again)
            among = places[piece % slices] if carries[stage] and kind in _CARRYING else ALONE
            key = kind, stage, turn, keeps, among
            base = bases.get(key)
            if base is None:
                base = bases[key] = count * len(self.calls)
                self.calls.append(self._call(kind, stage, turn * count, keeps, among))
            out.append(base + piece)
            if schedule.pairs and self._overlap(*actions[number : number + 2]):
                pairs.add(base + piece)
        return out, pairs

    def _overlap(self, first: Action, second: Action | None = None) -> bool:
        """Return whether an action overlaps with its successor.

        In a vjp, a pair of a forward and a backward would be split over both halves.
        """
        if second is None or (first, second) not in self.schedule.pairs:
            return False
        kinds = {first.kind, second.kind}
        return not self.context.inputs or Kind.F not in kinds or len(kinds) == 1

    def _number(self, wire: Wire) -> int:
        return self.wires.setdefault(wire, len(self.wires))

    def _pool(self, source: int, lane: int, role: Role) -> int:
        return self.pools.setdefault((source, lane, role), len(self.pools))

    def _home(self, wire: Wire) -> int:
        """Return the lane that makes a value."""
        device_of = self.schedule.device_of
        if wire.role in _GIVEN:
            return CALLER
        if wire.role is Role.GRAD:
            return device_of[wire.stage + 1] if wire.stage + 1 < len(device_of) else CALLER
        return device_of[wire.peer if wire.role is Role.SKIP_GRAD else wire.stage]

    def _call(self, kind: Kind, stage: int, first: int, keeps: bool, among: Among) -> Call:
        lane = self.schedule.device_of[stage]
        reads, writes = effects(kind, stage, keeps, self.context, among)
        read: list[tuple[int, int]] = []
        for wire in reads:
            home = self._home(wire)
            read.append(
                (self._number(wire), -1 if home == lane else self._pool(home, lane, wire.role))
            )
        sends = [
            (self._number(wire), to, self._pool(lane, to, wire.role))
            for wire in writes
            if wire.role not in TAKEN
            for to in sorted(self.readers[wire])
            if to != lane
        ]
        written = tuple(map(self._number, writes))
        return Call(kind, stage, lane, keeps, tuple(read), written, tuple(sends), first)


def _pool_sizes(program: Lowered) -> list[int]:
    """Return the most values in each pool at a time, in plan order.

    Values that the first action of a pair has read stay until the second action ends.
    """
    pools, again = program.pools, read_again(program)
    count, pairs = program.num_pieces, program.pairs
    reads = [
        [(wire, pool, pools[pool].source == CALLER) for wire, pool in call.reads if pool >= 0]
        for call in program.calls
    ]
    sends = [[pool for _, _, pool in call.sends] for call in program.calls]
    live, most = [0] * len(pools), [0] * len(pools)
    fetched: set[tuple[int, int, int]] = set()  # values of the caller that are read again
    leaving: list[int] = []
    for position, code in enumerate(program.order):
        number, piece = divmod(code, count)
        arriving = [*sends[number]]
        for wire, pool, is_given in reads[number]:
            # A lane fetches a value of the caller when an action first reads the value.
            if is_given and (wire, piece, pool) not in fetched:
                arriving.append(pool)
            if again and (position, wire) in again:
                fetched.add((wire, piece, pool))
            else:
                leaving.append(pool)
        for pool in arriving:
            live[pool] += 1
            if live[pool] > most[pool]:
                most[pool] = live[pool]
        if code not in pairs:
            for pool in leaving:
                live[pool] -= 1
            leaving.clear()
    return most
