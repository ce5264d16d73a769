"""Stages and a schedule become a program: plan order, copies, frees, slots.

Copies follow one rule: a task reads a value that lives on another lane, so the lane where it is made sends it there,
once, straight after making it. What the caller gives is fetched just before its first use. Liveness decides every
free: the last task of a lane that reads a value frees it there. The slots of an edge are the most values that lie at
its end at a time, in plan order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from funcpipe.core.errors import PlanError, bullets
from funcpipe.core.plan import Lowered, Row
from funcpipe.core.schedule import Kind, Schedule
from funcpipe.core.stage import Stage
from funcpipe.core.task import CALLER, Pool, Role, Wire
from funcpipe.lower.effects import Context, effects
from funcpipe.lower.skips import routes
from funcpipe.schedules.check import Legal, examine
from funcpipe.schedules.clock import KINDS

_GIVEN = (Role.INPUT, Role.TARGET, Role.FEED)
_FIRST = (Kind.F, Kind.O, Kind.L)
_TAKEN = (Role.REPORT, Role.OUTPUT, Role.INPUT_GRAD)


def lower(stages: Sequence[Stage], schedule: Schedule, *, loss: bool, outputs: bool, halves: bool = False) -> Lowered:
    """Lower a schedule for stages. Linear in the number of actions.

    Args:
        stages: as many as the schedule has.
        schedule: any schedule; it is checked.
        loss: does the plan have a loss.
        outputs: does the caller get the last stage's outputs.
        halves: the program of a `vjp`: every forward comes before all backwards, and the caller gets outputs and the
            gradients of the inputs.

    Raises:
        ScheduleError: the schedule is not legal.
        PlanError: the number of stages differs, stash and pop do not match, or halves are asked for and a device has
            a forward after a backward.
    """
    legal = examine(schedule)
    if len(stages) != schedule.num_stages:
        count = f"{len(stages)} {'is' if len(stages) == 1 else 'are'} given"
        mend = "make the schedule for as many, or join stages with fp.compose"
        raise PlanError(f"the schedule has {schedule.num_stages} stages, but {count}; {mend}")
    if halves:
        _refuse_mixed(schedule)
    rows = _Rows(Context(stages, routes(stages), loss, outputs or halves, halves), schedule, legal)
    order = rows.order()
    if halves:  # no lane's own order changes: what belongs to the first half is first already
        order = _forwards_first(order, rows.made, schedule)
    late, slots = _lives(rows.made, order, schedule.num_microbatches, len(rows.pools))
    pools = tuple(Pool(*key, slots[number]) for key, number in rows.pools.items())
    counts = (schedule.num_stages, schedule.num_microbatches, schedule.num_devices)
    return Lowered(*counts, tuple(rows.wires), tuple(rows.made), tuple(order), pools, late)


def _refuse_mixed(schedule: Schedule) -> None:
    """Forwards first, on every device; else they cannot run without the backwards."""
    faults: list[str] = []
    for device, order in enumerate(schedule.orders):
        begun = next((at for at, action in enumerate(order) if action.kind not in _FIRST), len(order))
        late = next((action for action in order[begun:] if action.kind is Kind.F), None)
        if late is not None:
            faults.append(f"device {device} runs {late} after {order[begun]}")
    if faults:
        raise PlanError(bullets("vjp runs all forwards before it knows the cotangents, so no forward may stand after a backward; use fp.fill_drain or fp.looped_bfs:", faults))  # fmt: skip


def _forwards_first(order: list[int], rows: list[Row], schedule: Schedule) -> list[int]:
    """Each lane up to its last forward, with the O that follow it (and L that come before it); then the rest."""
    left: list[int] = []
    for actions in schedule.orders:
        end = 1 + max(at for at, action in enumerate(actions) if action.kind is Kind.F)
        while end < len(actions) and actions[end].kind is Kind.O:
            end += 1
        left.append(end)
    halves: tuple[list[int], list[int]] = ([], [])
    for code in order:
        lane = rows[code // schedule.num_microbatches].lane
        halves[left[lane] <= 0].append(code)
        left[lane] -= 1
    return halves[0] + halves[1]


class _Rows:
    """Numbers wires, pools and rows, each when it is first met."""

    def __init__(self, given: Context, schedule: Schedule, legal: Legal) -> None:
        self.given, self.schedule, self.legal = given, schedule, legal
        self.wires: dict[Wire, int] = {}
        self.pools: dict[tuple[int, int, Role], int] = {}
        self.made: list[Row] = []
        self.readers: dict[Wire, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        """For each wire, for each lane, the stages that read it there, ascending."""
        kinds = self._kinds()
        for stage in range(schedule.num_stages):
            for kind in kinds[stage]:
                for wire in effects(kind, stage, True, given)[0]:
                    found = self.readers[wire][schedule.device_of[stage]]
                    if stage not in found:
                        found.append(stage)

    def _kinds(self) -> list[set[Kind]]:
        present: list[set[Kind]] = [set() for _ in range(self.schedule.num_stages)]
        flags = [[False] * self.schedule.num_stages for _ in KINDS]
        for lane in self.legal.lanes:
            for code, stage, _ in lane:
                flags[code][stage] = True
        for code, row in enumerate(flags):
            for stage, one in enumerate(row):
                if one:
                    present[stage].add(KINDS[code])
        return present

    def order(self) -> list[int]:
        """The plan order as ``row * M + microbatch``."""
        count, lanes = self.schedule.num_microbatches, self.legal.lanes
        rematted, backward = self.legal.rematted, self.schedule.has_backward
        # By code, then stage: the first number of the row, -1 while it is not made; last, an F that keeps nothing.
        bare = len(KINDS)
        table = [[-1] * self.schedule.num_stages for _ in range(bare + 1)]
        out: list[int] = []
        for device, position in self.legal.plan_order:
            code, stage, microbatch = lanes[device][position]
            if code == 0 and (not backward or (rematted and stage * count + microbatch in rematted)):
                code = bare
            base = table[code][stage]
            if base < 0:
                base = table[code][stage] = count * len(self.made)
                again = code == bare and backward
                self.made.append(self._row(KINDS[code % bare], stage, device, code != bare, again))
            out.append(base + microbatch)
        return out

    def _number(self, wire: Wire) -> int:
        return self.wires.setdefault(wire, len(self.wires))

    def _pool(self, source: int, lane: int, role: Role) -> int:
        return self.pools.setdefault((source, lane, role), len(self.pools))

    def _home(self, wire: Wire) -> int:
        """The lane where a value is made."""
        device_of = self.schedule.device_of
        if wire.role in _GIVEN:
            return CALLER
        if wire.role is Role.GRAD:
            return device_of[wire.stage + 1] if wire.stage + 1 < len(device_of) else CALLER
        return device_of[wire.peer if wire.role is Role.SKIP_GRAD else wire.stage]

    def _row(self, kind: Kind, stage: int, lane: int, keeps: bool, again: bool) -> Row:
        """One row. ``again``: a later R of this stage reads its arguments once more."""
        reads, writes = effects(kind, stage, keeps, self.given)
        fetches: list[tuple[int, int]] = []
        frees: list[tuple[int, int]] = []
        shared: list[tuple[int, int]] = []
        for wire in reads:
            home, number = self._home(wire), self._number(wire)
            pool = -1 if home == lane else self._pool(home, lane, wire.role)
            readers = self.readers[wire][lane]
            if home == CALLER and readers[0] == stage and kind is not Kind.R:
                fetches.append((number, pool))
            if len(readers) > 1:
                shared.append((number, pool))
            elif not again:
                frees.append((number, pool))
        sends: list[tuple[int, int, int]] = []
        drops: list[int] = []
        for wire in writes:
            if wire.role in _TAKEN:
                continue
            number, lanes = self._number(wire), self.readers[wire]
            away = [to for to in lanes if to != lane]
            sends += [(number, to, self._pool(lane, to, wire.role)) for to in sorted(away)]
            if lane not in lanes:
                drops.append(number)
        written = tuple(map(self._number, writes))
        read = tuple(map(self._number, reads))
        return Row(kind, stage, lane, keeps, read, written, tuple(fetches), tuple(frees), tuple(sends), tuple(drops), tuple(shared))  # fmt: skip


def _lives(
    rows: list[Row], order: list[int], count: int, num_pools: int
) -> tuple[tuple[tuple[int, tuple[tuple[int, int], ...]], ...], list[int]]:
    """The late frees by position, and the most values that lie in each pool at a time."""
    late: dict[int, list[tuple[int, int]]] = defaultdict(list)
    if any(row.shared for row in rows):
        last: dict[tuple[int, int, int], int] = {}
        for position, code in enumerate(order):
            row = rows[code // count]
            for wire, pool in row.shared:
                last[wire * count + code % count, row.lane, pool] = position
        for (number, _, pool), position in last.items():
            late[position].append((number, pool))
    moves = [
        [(pool, 1) for _, pool in row.fetches]
        + [(pool, -1) for _, pool in row.frees if pool >= 0]
        + [(pool, 1) for _, _, pool in row.sends]
        for row in rows
    ]
    live, most = [0] * num_pools, [0] * num_pools
    for position, code in enumerate(order):
        for pool, change in moves[code // count]:
            live[pool] = now = live[pool] + change
            if now > most[pool]:
                most[pool] = now
        if position in late:
            for _, pool in late[position]:
                if pool >= 0:
                    live[pool] -= 1
    return tuple((position, tuple(dead)) for position, dead in sorted(late.items())), most
