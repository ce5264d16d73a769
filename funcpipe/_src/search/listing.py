"""List scheduling by rules: each device runs the first action that its rules allow, or waits.

Devices are simulated event by event. A rule has few parameters: the number of microbatches in
flight, the length of a wait that a W may fill, and priorities of actions. So a search over rules is
a search over good schedules. `climb.py` does this search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from funcpipe._src.schedules.clock import B, F, I, R, W
from funcpipe._src.search.problem import CodedLanes, Problem, Score
from funcpipe._src.search.simulation import NEVER, Simulation

_ALL = 10**9


@dataclass(frozen=True)
class DeviceRule:
    """The rule by which one device picks its next action.

    Attributes:
        ranks: the priorities: F and I of each stage as (code, number of the stage on the device),
            the highest first.
        window: for each stage of the device, the most microbatches that have run F there, but not F
            in the device's next stage (for the last stage: not I).
        reserve: the number of residuals of the device's next stage that must still fit when a
            forward runs.
        worth: W fills a wait that is at least this many times as long as W.
        owed: the most W that may be pending. If there are more, W runs first.
        keep: the most residuals to keep. Further forwards keep none, and R recomputes them (if the
            problem allows remat).
        whole: run B instead of I and W on stages where B is cheaper.
    """

    ranks: tuple[tuple[int, int], ...]
    window: tuple[int, ...]
    reserve: int
    worth: float
    owed: int
    keep: int = _ALL
    whole: bool = False


class Listed(NamedTuple):
    """The schedule of some rules: its score, and the order of each device."""

    score: Score
    lanes: CodedLanes


_Decision: TypeAlias = tuple[int, int, bool, float]
"""A device's next action: (code, stage, whether a forward drops its residual, 0); (-1, .., ..,
until when it waits)."""


def run(problem: Problem, rules: Sequence[DeviceRule]) -> Listed | None:
    """Return the schedule of some rules; None if they deadlock."""
    ruled = _Ruled(problem, rules)
    if not ruled.run():
        return None
    devices = ruled.devices
    score = problem.score((device.begun for device in devices), [device.free for device in devices])
    return Listed(score, ruled.lanes)


class _Ruled(Simulation):
    """A simulation in which rules choose the next action.

    Attributes:
        ranks: for each device, its priorities as (code, stage, window, next stage of the device or
            -1).
        idle: for each device, whether it waits for another device.
    """

    def __init__(self, problem: Problem, rules: Sequence[DeviceRule]) -> None:
        super().__init__(problem)
        self.rules, self.ranks = rules, list(map(_ranks, problem.local, rules))
        self.grows = [
            rest - residual for rest, residual in zip(problem.rest, problem.residual, strict=True)
        ]
        self.idle = [False] * problem.num_devices

    def run(self) -> bool:
        """Simulate until all actions are done (True), or no device can continue (False)."""
        remaining = 3 * self.problem.num_microbatches * self.problem.num_stages
        events = [(0.0, number) for number in range(len(self.devices))]
        while remaining and events:
            now, number = heappop(events)
            if now < self.devices[number].free:
                continue
            code, stage, drop, until = self.choose(number, now)
            self.idle[number] = code < 0
            if code < 0:
                if until < NEVER:
                    heappush(events, (until, number))
                continue
            remaining -= 0 if code == R else 2 if code == B else 1
            receiver = self.begin(number, code, stage, now, drop=drop)
            # A receiver that waits without an end time has no event. Without this one it would
            # sleep forever.
            if self.idle[receiver]:
                heappush(events, (now, receiver))
            heappush(events, (self.devices[number].free, number))
        return not remaining

    def choose(self, number: int, now: float) -> _Decision:
        """Choose the first action by priority that can start, or a W that fills a long wait."""
        problem, device, rule = self.problem, self.devices[number], self.rules[number]
        waiting = len(device.owed)
        if waiting > rule.owed:
            return W, -1, False, 0.0
        soonest, blocked = NEVER, False
        forwards, backwards, count, turns = (
            self.forwards,
            self.backwards,
            problem.num_microbatches,
            problem.turns,
        )
        whole, room, growth = problem.residual, device.limit - device.held, problem.growth
        for code, stage, window, next_stage in self.ranks[number]:
            if code == F:
                done = forwards[stage]
                ahead = done - (backwards[stage] if next_stage < 0 else forwards[next_stage])
                if done >= count or ahead >= window:
                    continue
                needed = whole[stage] * growth[done][1]
                if rule.reserve and next_stage >= 0 and ahead >= 0 and forwards[next_stage] < count:
                    needed += rule.reserve * whole[next_stage] * problem.largest
                # Memory must remain for the next R; otherwise the device would deadlock.
                needed += whole[stage] * problem.largest * bool(device.dropped)
                arrival = self.inputs[stage][done]
                if problem.remat and (
                    device.kept >= rule.keep or (arrival <= now and needed > room)
                ):
                    if arrival <= now:
                        return F, stage, True, 0.0
                elif needed > room:
                    blocked = blocked or arrival <= now
                    continue
            else:
                done = backwards[stage]
                if done >= count or (done := turns[done]) >= forwards[stage]:
                    continue
                arrival = self.gradients[stage][done]
                # The weight residual may be larger than the residual, so I may need memory.
                if self.grows[stage] * growth[done][1] > room and not (
                    rule.whole and problem.cheaper[stage]
                ):
                    blocked = blocked or arrival <= now
                    continue
                # A dropped residual needs R first, timed to end when the gradient arrives.
                if device.dropped and (stage, done) in device.dropped:
                    if whole[stage] * growth[done][1] > room:
                        blocked = blocked or arrival <= now
                        continue
                    code, arrival = R, arrival - problem.again[stage] * growth[done][0]
            if arrival <= now:
                if code == I and rule.whole and problem.cheaper[stage]:
                    code = B
                return code, stage, False, 0.0
            if arrival < soonest:
                soonest = arrival
        if waiting and (blocked or soonest - now >= rule.worth * problem.weight[device.owed[0]]):
            return W, -1, False, 0.0
        return -1, -1, False, soonest


def _ranks(stages: Sequence[int], rule: DeviceRule) -> list[tuple[int, int, int, int]]:
    following = dict(pairwise(stages))
    return [
        (code, stages[chunk], rule.window[chunk], following.get(stages[chunk], -1))
        for code, chunk in rule.ranks
    ]
