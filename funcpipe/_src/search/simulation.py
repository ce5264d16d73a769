"""Devices that are given one action after the other: when each can begin, what it takes and frees,
for whom it is.

What goes next is decided elsewhere, by rules (`listing`).
Where the order of every device is known, `schedules.clock` is the simulation.
"""

from __future__ import annotations

from collections import deque

from funcpipe._src.schedules.clock import B, F, I, W
from funcpipe._src.search.problem import ROUNDING, CodedAction, CodedLanes, Problem

NEVER = float("inf")


class Device:
    """What a device has done, and what it holds.

    Attributes:
        limit: the most memory that it may hold.
        held: the memory that it holds.
        kept: how many residuals it holds that a forward left.
        begun, free: when its first action began, and when its last one ends.
        owed: the stages whose W are still to come, the oldest first.
        dropped, again: (stage, microbatch) of the residuals that a forward dropped, and of those
            that R made again.
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
    """All devices, with what each stage has run and when what it reads next arrives.

    Microbatches of a stage go in order, so an action is a code and a stage; slices too, forwards up
    and backwards down.

    Attributes:
        inputs, gradients: by stage and microbatch, when they arrive; infinite where that is not
            known yet.
        forwards, backwards, weights: how many F, how many I or B, and how many W each stage has
            run.
    """

    def __init__(self, problem: Problem) -> None:
        stages, count = problem.num_stages, problem.num_microbatches
        self.problem = problem
        self.inputs = [[0.0 if stage == 0 else NEVER] * count for stage in range(stages)]
        self.gradients = [[NEVER] * count for _ in range(stages)]
        self.forwards, self.backwards, self.weights = [0] * stages, [0] * stages, [0] * stages
        self.devices = [Device(limit) for limit in problem.limits]

    @property
    def lanes(self) -> CodedLanes:
        """The order of each device."""
        return [device.lane for device in self.devices]

    def begin(self, number: int, code: int, stage: int, now: float, *, drop: bool = False) -> int:
        """Run the next action of a kind and stage on a device; returns the device for which its
        value is.

        Args:
            number: of the device.
            code, stage: what runs. The W that runs is the oldest that the device owes.
            now: when it begins.
            drop: does this forward keep no residual.
        """
        problem, device, receiver = self.problem, self.devices[number], number
        if code == F:
            microbatch = self.forwards[stage]
            self.forwards[stage] += 1
            end = now + problem.forward[stage]
            if drop:
                device.dropped.add((stage, microbatch))
            else:
                device.held += problem.residual[stage]
                device.kept += 1
            if stage + 1 < problem.num_stages:
                self.inputs[stage + 1][microbatch] = end + problem.waits[0][stage]
                receiver = problem.device_of[stage + 1]
            else:
                self.gradients[stage][microbatch] = end
        elif code in (B, I):
            microbatch = problem.turns[self.backwards[stage]]
            self.backwards[stage] += 1
            if code == B:
                end = now + problem.whole_backward[stage]
                device.held -= problem.residual[stage]
            else:
                end = now + problem.inward[stage]
                device.held -= problem.residual[stage] - problem.rest[stage]
                device.owed.append(stage)
            device.kept -= (stage, microbatch) not in device.again
            if stage:
                self.gradients[stage - 1][microbatch] = end + problem.waits[1][stage]
                receiver = problem.device_of[stage - 1]
        elif code == W:
            stage = device.owed.popleft()
            microbatch = problem.turns[self.weights[stage]]
            self.weights[stage] += 1
            end = now + problem.weight[stage]
            device.held -= problem.rest[stage]
        else:
            microbatch = problem.turns[self.backwards[stage]]
            end = now + problem.again[stage]
            device.held += problem.residual[stage]
            device.dropped.remove((stage, microbatch))
            device.again.add((stage, microbatch))
        device.begun = min(device.begun, now)
        device.lane.append((code, stage, microbatch))
        device.free = end
        return receiver
