"""List scheduling by rules: each device runs the first action that its rules allow, or waits.

Devices are simulated event by event. A rule has few parameters: the number of microbatches in
flight, the length of a wait that a W may fill, and priorities of actions. So a search over rules is
a search over good schedules. `climb.py` does this search. If the order of each device is known,
`schedules/clock.py` simulates faster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from funcpipe._src.schedules.clock import CODED, B, F, I, R, W
from funcpipe._src.search.problem import ROUNDING, CodedAction, CodedLanes, Problem, Score

NEVER = float("inf")
_ALL = 10**9


class Device:
    """The simulated state of a device.

    Attributes:
        limit: the memory limit.
        held: the present memory.
        kept: the number of present residuals that forwards kept.
        begun, free: the begin of its first action, and the end of its last action.
        owed: the stages of the pending W, the oldest first.
        dropped: (stage, microbatch) of residuals that a forward dropped and R has not recomputed.
        again: (stage, microbatch) of residuals that R recomputed.
        lane: its actions.
    """

    __slots__ = ("again", "begun", "dropped", "free", "held", "kept", "lane", "limit", "owed")

    def __init__(self, limit: float) -> None:
        self.limit, self.held, self.kept = limit * (1 + ROUNDING), 0.0, 0
        self.begun, self.free = NEVER, 0.0
        self.owed: deque[int] = deque()
        self.dropped: set[tuple[int, int]] = set()
        self.again: set[tuple[int, int]] = set()
        self.lane: list[CodedAction] = []


class Simulation:
    """The simulated state of all devices and stages.

    Microbatches of a stage run in order, so a code and a stage determine an action. Slices run in
    ascending order in forwards, and in descending order in backwards.

    Attributes:
        inputs, gradients: the arrival by stage and microbatch; infinite if not known yet.
        forwards, backwards, weights: by stage, the number of F, of I or B, and of W so far.
    """

    def __init__(self, problem: Problem) -> None:
        stages, count = problem.num_stages, problem.num_microbatches
        self.problem = problem
        self.inputs = [[0.0 if stage == 0 else NEVER] * count for stage in range(stages)]
        self.gradients = [[NEVER] * count for _ in range(stages)]
        self.forwards, self.backwards, self.weights = [0] * stages, [0] * stages, [0] * stages
        self.devices = [Device(limit) for limit in problem.limits]
        self.durations = [problem.times(kind) for kind in CODED]

    @property
    def lanes(self) -> CodedLanes:
        """The order of each device."""
        return [device.lane for device in self.devices]

    def begin(self, number: int, code: int, stage: int, now: float, *, drop: bool = False) -> int:
        """Run the next action of a kind and stage on a device. Return the receiver of its value.

        Args:
            number: the index of the device.
            code, stage: the kind and the stage. For W the stage is ignored: the device's oldest
                pending W runs.
            now: the start.
            drop: whether a forward drops its residual.
        """
        problem, device, receiver = self.problem, self.devices[number], number
        if code == F:
            microbatch = self.forwards[stage]
        elif code == W:
            stage = device.owed.popleft()
            microbatch = problem.turns[self.weights[stage]]
        else:
            microbatch = problem.turns[self.backwards[stage]]
        place, (time, size) = (stage, microbatch), problem.growth[microbatch]
        residual, rest = problem.residual[stage], problem.rest[stage]
        end = now + self.durations[code][stage] * time
        if code == F:
            self.forwards[stage] += 1
            if drop:
                device.dropped.add(place)
            else:
                device.held += residual * size
                device.kept += 1
            if stage + 1 < problem.num_stages:
                self.inputs[stage + 1][microbatch] = end + problem.waits[0][stage]
                receiver = problem.device_of[stage + 1]
            else:
                self.gradients[stage][microbatch] = end
        elif code == R:
            device.held += residual * size
            device.dropped.remove(place)
            device.again.add(place)
        elif code == W:
            self.weights[stage] += 1
            device.held -= rest * size
        else:
            self.backwards[stage] += 1
            if code == B:
                device.held -= residual * size
            else:
                device.held -= (residual - rest) * size
                device.owed.append(stage)
            device.kept -= place not in device.again
            if stage:
                self.gradients[stage - 1][microbatch] = end + problem.waits[1][stage]
                receiver = problem.device_of[stage - 1]
        device.begun = min(device.begun, now)
        device.lane.append((code, stage, microbatch))
        device.free = end
        return receiver


@dataclass(frozen=True)
class DeviceRule:
    """The rule by which one device picks its next action."""

    # The priorities: F and I of each stage as (code, number of the stage on the device), the
    # highest first.
    ranks: tuple[tuple[int, int], ...]
    # For each stage of the device, the most microbatches that have run F there, but not F in the
    # device's next stage (for the last stage: not I).
    window: tuple[int, ...]
    # The number of residuals of the device's next stage that must still fit when a forward runs.
    reserve: int
    worth: float  # W fills a wait that is at least this many times as long as W
    owed: int  # the most W that may be pending. If there are more, W runs first
    # The most residuals to keep. Further forwards keep none, and R recomputes them (if the problem
    # allows remat).
    keep: int = _ALL
    whole: bool = False  # run B instead of I and W on stages where B is cheaper


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
        self.rules, self.ranks = rules, []
        for stages, rule in zip(problem.local, rules, strict=True):
            following = dict(pairwise(stages))
            self.ranks.append(
                [
                    (code, stages[chunk], rule.window[chunk], following.get(stages[chunk], -1))
                    for code, chunk in rule.ranks
                ]
            )
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
        forwards, backwards = self.forwards, self.backwards
        count, turns = problem.num_microbatches, problem.turns
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
