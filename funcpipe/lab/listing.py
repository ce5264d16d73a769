"""List scheduling by rules: every device takes the first action that its rules allow, and waits where they say so.

Devices are simulated event by event. What a rule decides is small (how many microbatches may be under way, how large a
wait must be for a W to fill it, which action goes first), so a search over rules is a search over good schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from funcpipe.lab.problem import ROUNDING, CodedAction, Problem
from funcpipe.schedules.clock import B, F, I, R, W

_NEVER = float("inf")
_ALL = 10**9


@dataclass(frozen=True)
class DeviceRule:
    """How one device decides.

    Attributes:
        ranks: which goes first, as (code, which of the device's stages); F and I of each stage.
        window: for each of its stages, how many microbatches may have run F there and not yet F in the device's next
            stage (for the last: I).
        reserve: how many residuals of the device's next stage must fit besides one that a forward takes.
        worth: a W fills a wait of this many times its length.
        owed: how many W may wait; one more goes first.
        keep: how many residuals to hold; forwards beyond keep none, and are computed again (if the problem allows it).
        whole: B instead of I and W on stages where that takes less time.
    """

    ranks: tuple[tuple[int, int], ...]
    window: tuple[int, ...]
    reserve: int
    worth: float
    owed: int
    keep: int = _ALL
    whole: bool = False


class Listed(NamedTuple):
    """What rules lead to.

    Attributes:
        makespan: end of the last action.
        span: the longest time of a device from its first start to its last end.
        total: of the ends, or of the spans.
        lanes: the orders.
    """

    makespan: float
    span: float
    total: float
    lanes: list[list[CodedAction]]


class _Device:
    """A device in the course of the simulation."""

    __slots__ = (
        "again",
        "begun",
        "dropped",
        "free",
        "held",
        "idle",
        "kept",
        "lane",
        "limit",
        "owed",
        "paid",
        "plan",
        "rule",
    )

    def __init__(self, problem: Problem, device: int, rule: DeviceRule) -> None:
        mine = problem.local[device]
        self.rule, self.limit = rule, problem.limits[device] * (1 + ROUNDING)
        next_stage = dict(pairwise(mine))
        self.plan = [(code, mine[at], rule.window[at], next_stage.get(mine[at], -1)) for code, at in rule.ranks]
        self.held, self.free, self.begun = 0.0, 0.0, _NEVER
        self.owed: list[int] = []
        self.paid = self.kept = 0
        self.dropped: set[tuple[int, int]] = set()
        self.again: set[tuple[int, int]] = set()
        self.idle = False
        self.lane: list[CodedAction] = []


_Decision: TypeAlias = tuple[int, int, bool, float]
"""What a device does now: (code, stage, whether a forward drops its residual, 0); (-1, .., .., until when it waits)."""


def run(problem: Problem, rules: Sequence[DeviceRule]) -> Listed | None:
    """Follow the rules; None where they come to a standstill."""
    floor = _Floor(problem, rules)
    if not floor.run():
        return None
    ends = [device.free for device in floor.devices]
    spans = [device.free - device.begun for device in floor.devices]
    total = sum(ends if problem.objective == "makespan" else spans)
    return Listed(max(ends), max(spans), total, [device.lane for device in floor.devices])


class _Floor:
    """All devices, and when what they wait for arrives."""

    def __init__(self, problem: Problem, rules: Sequence[DeviceRule]) -> None:
        self.problem, self.count, self.last = problem, problem.num_microbatches, problem.num_stages - 1
        stages = problem.num_stages
        self.f_at = [[_NEVER] * self.count for _ in range(stages)]
        self.i_at = [[_NEVER] * self.count for _ in range(stages)]
        self.f_at[0] = [0.0] * self.count
        self.f_done, self.i_done, self.w_done = [0] * stages, [0] * stages, [0] * stages
        self.grows = [rest - whole for rest, whole in zip(problem.rest, problem.residual, strict=True)]
        self.devices = [_Device(problem, device, rule) for device, rule in enumerate(rules)]
        self.events = [(0.0, device) for device in range(len(self.devices))]

    def run(self) -> bool:
        """Until everything is done (True), or nothing happens any more."""
        todo = 3 * self.count * (self.last + 1)
        events, devices = self.events, self.devices
        while todo and events:
            now, number = heappop(events)
            me = devices[number]
            if now < me.free:
                continue
            choice = self.choose(me, now)
            me.idle = choice[0] < 0
            if me.idle:
                if choice[3] < _NEVER:
                    heappush(events, (choice[3], number))
                continue
            todo -= 0 if choice[0] == R else 2 if choice[0] == B else 1
            self.begin(number, me, now, choice)
        return not todo

    def choose(self, me: _Device, now: float) -> _Decision:
        """The first in the device's order that can start; W where it fills a wait that is worth it."""
        waiting, rule = len(me.owed) - me.paid, me.rule
        if waiting > rule.owed:
            return W, -1, False, 0.0
        soonest, blocked = _NEVER, False
        f_done, i_done, remat = self.f_done, self.i_done, self.problem.remat
        whole, room = self.problem.residual, me.limit - me.held
        for code, stage, window, follower in me.plan:
            if code == F:
                done = f_done[stage]
                ahead = done - (i_done[stage] if follower < 0 else f_done[follower])
                if done >= self.count or ahead >= window:
                    continue
                need = whole[stage]
                if rule.reserve and follower >= 0 and ahead >= 0 and f_done[follower] < self.count:
                    need += rule.reserve * whole[follower]
                comes = self.f_at[stage][done]
                if remat and (me.kept >= rule.keep or (comes <= now and need + whole[stage] * bool(me.dropped) > room)):
                    if comes <= now:
                        return F, stage, True, 0.0
                elif need + whole[stage] * bool(me.dropped) > room:  # the next R needs room too
                    blocked = blocked or comes <= now
                    continue
            else:
                done = i_done[stage]
                if done >= f_done[stage]:
                    continue
                comes = self.i_at[stage][done]
                if self.grows[stage] > room and not (
                    rule.whole and self.problem.cheaper[stage]
                ):  # what I leaves may be more than what it takes
                    blocked = blocked or comes <= now
                    continue
                if me.dropped and (stage, done) in me.dropped:  # first R, so that it ends when the gradient comes
                    if whole[stage] > room:
                        blocked = blocked or comes <= now
                        continue
                    code, comes = R, comes - self.problem.again[stage]
            if comes <= now:
                if code == I and rule.whole and self.problem.cheaper[stage]:
                    code = B
                return code, stage, False, 0.0
            if comes < soonest:
                soonest = comes
        if waiting and (blocked or soonest - now >= rule.worth * self.problem.weight[me.owed[me.paid]]):
            return W, -1, False, 0.0
        return -1, -1, False, soonest

    def begin(self, number: int, me: _Device, now: float, choice: _Decision) -> None:
        """Run an action: what it takes and frees, when it ends, who learns of it."""
        problem, (code, stage, drop, _) = self.problem, choice
        other = number
        if code == F:
            done = self.f_done[stage]
            self.f_done[stage] += 1
            end = now + problem.forward[stage]
            if drop:
                me.dropped.add((stage, done))
            else:
                me.held += problem.residual[stage]
                me.kept += 1
            if stage < self.last:
                self.f_at[stage + 1][done] = end + problem.waits[0][stage]
                other = problem.device_of[stage + 1]
            else:
                self.i_at[stage][done] = end
        elif code in (B, I):
            done = self.i_done[stage]
            self.i_done[stage] += 1
            if code == B:
                end = now + problem.whole_backward[stage]
                me.held -= problem.residual[stage]
            else:
                end = now + problem.inward[stage]
                me.held -= problem.residual[stage] - problem.rest[stage]
                me.owed.append(stage)
            me.kept -= (stage, done) not in me.again
            if stage:
                self.i_at[stage - 1][done] = end + problem.waits[1][stage]
                other = problem.device_of[stage - 1]
        elif code == W:
            stage = me.owed[me.paid]
            me.paid += 1
            done = self.w_done[stage]
            self.w_done[stage] += 1
            end = now + problem.weight[stage]
            me.held -= problem.rest[stage]
        else:
            done = self.i_done[stage]
            end = now + problem.again[stage]
            me.held += problem.residual[stage]
            me.dropped.remove((stage, done))
            me.again.add((stage, done))
        if self.devices[other].idle:
            heappush(self.events, (now, other))
        if not me.lane:
            me.begun = now
        me.lane.append((code, stage, done))
        me.free = end
        heappush(self.events, (end, number))
