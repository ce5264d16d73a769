"""Lower stages and a schedule to a program: choose plan order, sends and slots.

One rule decides the sends: if an action reads a value of another lane, that lane sends the value
once, directly after the action that makes it. Values of the caller are fetched just before their
first use. The number of slots of an edge is the largest number of values that wait at its end in
plan order.

`effects.py` says what actions read and write, `data/lowered.py` expands the program.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from itertools import chain

from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.data.kinds import COUNTED, MOVES, Kind
from funcpipe._src.data.lowered import TAKEN, Lowered, read_again
from funcpipe._src.data.program import CALLER, Call, Pool, Role, Wire
from funcpipe._src.data.schedule import Schedule
from funcpipe._src.data.stage import Stage
from funcpipe._src.lower.effects import ALONE, Among, EffectContext, effects
from funcpipe._src.lower.skips import routes
from funcpipe._src.schedules.clock import CODE, CODED, B, F, I, R, coded
from funcpipe._src.schedules.legal import examine

_GIVEN = (Role.INPUT, Role.TARGET, Role.FEED, Role.CARRY_IN)
_FIRST = (Kind.F, *MOVES)
_CARRYING = frozenset({F, B, I, R})
"""The codes of the kinds that read and write carries, or gradients of carries."""


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
    if halves:
        _refuse_mixed(schedule)
    reduced = {
        action.stage for order in schedule.orders for action in order if action.kind is Kind.G
    }
    context = EffectContext(stages, routes(stages), loss, outputs or halves, halves, reduced, carry)
    calls = _Calls(context, schedule)
    order, pairs = calls.order(plan_order)
    # The order of each lane stays: _refuse_mixed has checked that its forwards come first.
    if halves:
        order = _forwards_first(order, calls.calls, schedule)
    most = _levels(calls.calls, [*calls.wires], order, schedule.num_pieces, [*calls.pools], pairs)
    pools = tuple(
        Pool(*key, slots + (0 if key[0] == CALLER else spare_slots))
        for key, slots in zip(calls.pools, most, strict=True)
    )
    counts = (
        schedule.num_stages,
        schedule.num_microbatches,
        schedule.num_slices,
        schedule.num_devices,
    )
    return Lowered(
        *counts, tuple(calls.wires), tuple(calls.calls), array("i", order), pools, frozenset(pairs)
    )


def _refuse_mixed(schedule: Schedule) -> None:
    """Raise PlanError if a device has a forward after a backward: `vjp` could not split the run."""
    faults: list[str] = []
    for device, order in enumerate(schedule.orders):
        begun = next(
            (at for at, action in enumerate(order) if action.kind not in _FIRST), len(order)
        )
        late = next((action for action in order[begun:] if action.kind is Kind.F), None)
        if late is not None:
            faults.append(f"device {device} runs {late} after {order[begun]}")
    raise_all(
        "vjp runs all forwards before it knows the cotangents, so no forward may come after a "
        "backward; use fp.schedules.fill_drain or fp.schedules.looped_bfs:",
        faults,
    )


def _forwards_first(order: list[int], calls: list[Call], schedule: Schedule) -> list[int]:
    """Return the order with the forwards of all lanes first, then the remaining actions.

    The first half of a lane ends with its last forward and the O directly after it.
    """
    left: list[int] = []
    for actions in schedule.orders:
        end = 1 + max(at for at, action in enumerate(actions) if action.kind is Kind.F)
        while end < len(actions) and actions[end].kind is Kind.O:
            end += 1
        left.append(end)
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
        schedule, backward = self.schedule, self.schedule.has_backward
        count, slices, device_of = schedule.num_pieces, schedule.num_slices, schedule.device_of
        stages = schedule.num_stages
        codes = [*chain.from_iterable(coded(schedule.orders, slices))]
        rematted = {(stage, piece) for code, stage, piece in codes if code == R}
        # One table per place of a slice. By code (the last row is for F that keep no residual) and
        # stage: the first code of the call; -1 while there is no call yet.
        places = [Among(number == 0, number == slices - 1) for number in range(slices)]
        tables = {
            among: (among, [[-1] * stages for _ in range(len(CODED) + 1)])
            for among in {ALONE, *places}
        }
        alone, cut = tables[ALONE], [tables[among] for among in places]
        carries = [part.carry and slices > 1 for part in self.context.stages]
        joined = self._joined()
        counted = {CODE[kind] for kind in COUNTED}
        turns: dict[tuple[int, int, int], int] = {}
        """For counted actions (U): the first code of the call, by code, stage and turn. A U whose
        number exceeds the number of pieces belongs to a later turn, which is another call."""
        pairs: set[int] = set()
        out: list[int] = []
        for number in plan_order:
            code, stage, piece = codes[number]
            if code in counted:
                turn, piece = divmod(piece, count)
                base = turns.get((code, stage, turn), -1)
                if base < 0:
                    base = turns[code, stage, turn] = count * len(self.calls)
                    call = self._call(CODED[code], stage, device_of[stage], True, ALONE)
                    self.calls.append(call._replace(first=turn * count))
                out.append(base + piece)
                continue
            among, rows = cut[piece % slices] if carries[stage] and code in _CARRYING else alone
            bare = code == F and (not backward or (stage, piece) in rematted)
            row = rows[-1 if bare else code]
            base = row[stage]
            if base < 0:
                base = row[stage] = count * len(self.calls)
                self.calls.append(self._call(CODED[code], stage, device_of[stage], not bare, among))
            out.append(base + piece)
            if joined and number in joined:
                pairs.add(base + piece)
        return out, pairs

    def _joined(self) -> set[int]:
        """Return the numbers of the actions that overlap with their successor, counted device by
        device."""
        joined: set[int] = set()
        first = 0
        for order in self.schedule.orders:
            for at in self.schedule.joined(order):
                kinds = {order[at].kind, order[at + 1].kind}
                # In a vjp, a pair of a forward and a backward would be split over both halves.
                if not self.context.inputs or Kind.F not in kinds or len(kinds) == 1:
                    joined.add(first + at)
            first += len(order)
        return joined

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

    def _call(self, kind: Kind, stage: int, lane: int, keeps: bool, among: Among) -> Call:
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
        return Call(
            kind, stage, lane, keeps, tuple(read), tuple(map(self._number, writes)), tuple(sends)
        )


def _levels(
    calls: list[Call],
    wires: list[Wire],
    order: list[int],
    count: int,
    pools: Sequence[tuple[int, int, Role]],
    pairs: Collection[int],
) -> list[int]:
    """Return the most values in each pool at a time, in plan order.

    Values that the first action of a pair has read stay until the second action ends.
    """
    readers = Counter(read for call in calls for read in call.reads if read[1] >= 0)
    # If several calls read a value, the first and the last reader depend on the microbatch, so such
    # values are followed one by one.
    shared = [[read for read in call.reads if readers[read] > 1] for call in calls]
    again = set[tuple[int, int]]()
    if any(shared):
        again = read_again(calls, wires, order, count, {lane for _, lane, _ in pools})
    there: set[tuple[int, int]] = set()
    alone = [
        [pool for read in call.reads for pool in read[1:] if readers[read] == 1] for call in calls
    ]
    comes = [[(pool, 1) for pool in row if pools[pool][0] == CALLER] for row in alone]
    goes = [
        [(pool, -1) for pool in row] + [(pool, 1) for _, _, pool in call.sends]
        for row, call in zip(alone, calls, strict=True)
    ]
    moves = [come + go for come, go in zip(comes, goes, strict=True)]
    live, most = [0] * len(pools), [0] * len(pools)
    late: list[tuple[int, int]] = []
    for position, code in enumerate(order):
        number = code // count
        steps = moves[number]
        if shared[number]:
            read = [(wire * count + code % count, pool) for wire, pool in shared[number]]
            come = [
                arrival
                for arrival in read
                if pools[arrival[1]][0] == CALLER and arrival not in there
            ]
            there.update(come)
            gone = [(pool, -1) for wire, pool in shared[number] if (position, wire) not in again]
            steps = [*comes[number], *((pool, 1) for _, pool in come), *gone, *goes[number]]
        if late:
            steps, late = [*steps, *late], []
        if pairs and code in pairs:
            late = [step for step in steps if step[1] < 0]
            steps = [step for step in steps if step[1] > 0]
        for pool, change in steps:
            live[pool] = now = live[pool] + change
            if now > most[pool]:
                most[pool] = now
    return most
