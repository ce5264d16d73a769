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
    """The rule by which one device picks its next action.

    Attributes:
        ranks: what goes first, as (code, number of the stage on the device); F and I of each stage.
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
    """The schedule that rules lead to.

    Attributes:
        makespan: end of the last action.
        span: the longest time of a device from its first start to its last end.
        total: the sum of the devices' ends, or of their spans.
        lanes: the order of each device.
    """

    makespan: float
    span: float
    total: float
    lanes: list[list[CodedAction]]


class _Device:
    """The state of a device during the simulation."""

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
        stages = problem.local[device]
        self.rule, self.limit = rule, problem.limits[device] * (1 + ROUNDING)
        next_stage = dict(pairwise(stages))
        self.plan = [
            (code, stages[chunk], rule.window[chunk], next_stage.get(stages[chunk], -1)) for code, chunk in rule.ranks
        ]
        self.held, self.free, self.begun = 0.0, 0.0, _NEVER
        self.owed: list[int] = []
        self.paid = self.kept = 0
        self.dropped: set[tuple[int, int]] = set()
        self.again: set[tuple[int, int]] = set()
        self.idle = False
        self.lane: list[CodedAction] = []


_Decision: TypeAlias = tuple[int, int, bool, float]
"""A device's next action: (code, stage, whether a forward drops its residual, 0); (-1, .., .., until when it waits)."""


def run(problem: Problem, rules: Sequence[DeviceRule]) -> Listed | None:
    """The schedule that rules lead to; None where they deadlock."""
    simulation = _Floor(problem, rules)
    if not simulation.run():
        return None
    ends = [device.free for device in simulation.devices]
    spans = [device.free - device.begun for device in simulation.devices]
    total = sum(ends if problem.objective == "makespan" else spans)
    return Listed(max(ends), max(spans), total, [device.lane for device in simulation.devices])


class _Floor:
    """The simulation of all devices, with when each input and each gradient arrives."""

    def __init__(self, problem: Problem, rules: Sequence[DeviceRule]) -> None:
        self.problem, self.count, self.last = problem, problem.num_microbatches, problem.num_stages - 1
        stages = problem.num_stages
        self.f_at = [[_NEVER] * self.count for _ in range(stages)]
        self.i_at = [[_NEVER] * self.count for _ in range(stages)]
        self.f_at[0] = [0.0] * self.count
        self.f_done, self.i_done, self.w_done = [0] * stages, [0] * stages, [0] * stages
        self.grows = [rest - residual for rest, residual in zip(problem.rest, problem.residual, strict=True)]
        self.devices = [_Device(problem, device, rule) for device, rule in enumerate(rules)]
        self.events = [(0.0, device) for device in range(len(self.devices))]

    def run(self) -> bool:
        """Simulate until every action is done (True), or no device can go on (False)."""
        remaining = 3 * self.count * (self.last + 1)
        events, devices = self.events, self.devices
        while remaining and events:
            now, number = heappop(events)
            device = devices[number]
            if now < device.free:
                continue
            choice = self.choose(device, now)
            device.idle = choice[0] < 0
            if device.idle:
                if choice[3] < _NEVER:
                    heappush(events, (choice[3], number))
                continue
            remaining -= 0 if choice[0] == R else 2 if choice[0] == B else 1
            self.begin(number, device, now, choice)
        return not remaining

    def choose(self, device: _Device, now: float) -> _Decision:
        """The first action in the device's ranks that can start; W where it fills a wait that is worth it."""
        waiting, rule = len(device.owed) - device.paid, device.rule
        if waiting > rule.owed:
            return W, -1, False, 0.0
        soonest, blocked = _NEVER, False
        f_done, i_done, remat = self.f_done, self.i_done, self.problem.remat
        whole, room = self.problem.residual, device.limit - device.held
        for code, stage, window, next_stage in device.plan:
            if code == F:
                done = f_done[stage]
                ahead = done - (i_done[stage] if next_stage < 0 else f_done[next_stage])
                if done >= self.count or ahead >= window:
                    continue
                needed = whole[stage]
                if rule.reserve and next_stage >= 0 and ahead >= 0 and f_done[next_stage] < self.count:
                    needed += rule.reserve * whole[next_stage]
                arrival = self.f_at[stage][done]
                if remat and (
                    device.kept >= rule.keep or (arrival <= now and needed + whole[stage] * bool(device.dropped) > room)
                ):
                    if arrival <= now:
                        return F, stage, True, 0.0
                elif needed + whole[stage] * bool(device.dropped) > room:  # the next R needs room too
                    blocked = blocked or arrival <= now
                    continue
            else:
                done = i_done[stage]
                if done >= f_done[stage]:
                    continue
                arrival = self.i_at[stage][done]
                if self.grows[stage] > room and not (
                    rule.whole and self.problem.cheaper[stage]
                ):  # what I leaves may be more than what it takes
                    blocked = blocked or arrival <= now
                    continue
                if device.dropped and (stage, done) in device.dropped:  # R first, to end when the gradient comes
                    if whole[stage] > room:
                        blocked = blocked or arrival <= now
                        continue
                    code, arrival = R, arrival - self.problem.again[stage]
            if arrival <= now:
                if code == I and rule.whole and self.problem.cheaper[stage]:
                    code = B
                return code, stage, False, 0.0
            if arrival < soonest:
                soonest = arrival
        if waiting and (blocked or soonest - now >= rule.worth * self.problem.weight[device.owed[device.paid]]):
            return W, -1, False, 0.0
        return -1, -1, False, soonest

    def begin(self, number: int, device: _Device, now: float, choice: _Decision) -> None:
        """Run an action: count it, take and free memory, set when it ends, wake the device that waits for it."""
        problem, (code, stage, drop, _) = self.problem, choice
        receiver = number
        if code == F:
            done = self.f_done[stage]
            self.f_done[stage] += 1
            end = now + problem.forward[stage]
            if drop:
                device.dropped.add((stage, done))
            else:
                device.held += problem.residual[stage]
                device.kept += 1
            if stage < self.last:
                self.f_at[stage + 1][done] = end + problem.waits[0][stage]
                receiver = problem.device_of[stage + 1]
            else:
                self.i_at[stage][done] = end
        elif code in (B, I):
            done = self.i_done[stage]
            self.i_done[stage] += 1
            if code == B:
                end = now + problem.whole_backward[stage]
                device.held -= problem.residual[stage]
            else:
                end = now + problem.inward[stage]
                device.held -= problem.residual[stage] - problem.rest[stage]
                device.owed.append(stage)
            device.kept -= (stage, done) not in device.again
            if stage:
                self.i_at[stage - 1][done] = end + problem.waits[1][stage]
                receiver = problem.device_of[stage - 1]
        elif code == W:
            stage = device.owed[device.paid]
            device.paid += 1
            done = self.w_done[stage]
            self.w_done[stage] += 1
            end = now + problem.weight[stage]
            device.held -= problem.rest[stage]
        else:
            done = self.i_done[stage]
            end = now + problem.again[stage]
            device.held += problem.residual[stage]
            device.dropped.remove((stage, done))
            device.again.add((stage, done))
        if self.devices[receiver].idle:
            heappush(self.events, (now, receiver))
        if not device.lane:
            device.begun = now
        device.lane.append((code, stage, done))
        device.free = end
        heappush(self.events, (end, number))
