"""List scheduling by rules: every device takes the first action that its rules allow, and waits
where they say so.

Devices are simulated event by event. What a rule decides is small (how many microbatches may be
under way, how large a wait must be for a W to fill it, which action goes first), so a search over
rules is a search over good schedules.
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
        ranks: what goes first, as (code, number of the stage on the device); F and I of each stage.
        window: for each of its stages, how many microbatches may have run F there and not yet F in
            the device's next stage (for the last: I).
        reserve: how many residuals of the device's next stage must fit besides one that a forward
            takes.
        worth: a W fills a wait of this many times its length.
        owed: how many W may wait; one more goes first.
        keep: how many residuals to hold; forwards beyond keep none, and are computed again (if the
            problem allows it).
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
    """The schedule that rules lead to: its score, and the order of each device."""

    score: Score
    lanes: CodedLanes


_Decision: TypeAlias = tuple[int, int, bool, float]
"""A device's next action: (code, stage, whether a forward drops its residual, 0); (-1, .., ..,
until when it waits)."""


def run(problem: Problem, rules: Sequence[DeviceRule]) -> Listed | None:
    """The schedule that rules lead to; None where they deadlock."""
    ruled = _Ruled(problem, rules)
    if not ruled.run():
        return None
    devices = ruled.devices
    score = problem.score((device.begun for device in devices), [device.free for device in devices])
    return Listed(score, ruled.lanes)


class _Ruled(Simulation):
    """A simulation in which rules decide, event by event.

    Attributes:
        ranks: for each device its rule's ranks as (code, stage, window, the device's next stage or
            -1).
        idle: does a device wait for what another one does.
    """

    def __init__(self, problem: Problem, rules: Sequence[DeviceRule]) -> None:
        super().__init__(problem)
        self.rules, self.ranks = rules, list(map(_ranks, problem.local, rules))
        self.grows = [
            rest - residual for rest, residual in zip(problem.rest, problem.residual, strict=True)
        ]
        self.idle = [False] * problem.num_devices

    def run(self) -> bool:
        """Simulate until every action is done (True), or no device can go on (False)."""
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
            if self.idle[receiver]:
                heappush(events, (now, receiver))
            heappush(events, (self.devices[number].free, number))
        return not remaining

    def choose(self, number: int, now: float) -> _Decision:
        """The first action in a device's ranks that can start; W where it fills a wait that is
        worth it."""
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
        whole, room = problem.residual, device.limit - device.held
        for code, stage, window, next_stage in self.ranks[number]:
            if code == F:
                done = forwards[stage]
                ahead = done - (backwards[stage] if next_stage < 0 else forwards[next_stage])
                if done >= count or ahead >= window:
                    continue
                needed = whole[stage]
                if rule.reserve and next_stage >= 0 and ahead >= 0 and forwards[next_stage] < count:
                    needed += rule.reserve * whole[next_stage]
                arrival = self.inputs[stage][done]
                if problem.remat and (
                    device.kept >= rule.keep
                    or (arrival <= now and needed + whole[stage] * bool(device.dropped) > room)
                ):
                    if arrival <= now:
                        return F, stage, True, 0.0
                elif (
                    needed + whole[stage] * bool(device.dropped) > room
                ):  # the next R needs room too
                    blocked = blocked or arrival <= now
                    continue
            else:
                done = backwards[stage]
                if done >= count or (done := turns[done]) >= forwards[stage]:
                    continue
                arrival = self.gradients[stage][done]
                if self.grows[stage] > room and not (
                    rule.whole and problem.cheaper[stage]
                ):  # what I leaves may be more than what it takes
                    blocked = blocked or arrival <= now
                    continue
                if (
                    device.dropped and (stage, done) in device.dropped
                ):  # R first, to end when the gradient comes
                    if whole[stage] > room:
                        blocked = blocked or arrival <= now
                        continue
                    code, arrival = R, arrival - problem.again[stage]
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
