"""Simulate devices that receive one action after the other: times, memory and receivers.

Does not choose the next action: `listing` does, by rules. If the order of each device is known,
`schedules/clock.py` simulates faster.
"""

from __future__ import annotations

from collections import deque

from funcpipe._src.schedules.clock import B, F, I, W
from funcpipe._src.search.problem import ROUNDING, CodedAction, CodedLanes, Problem

NEVER = float("inf")


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
        growth = problem.growth
        if code == F:
            microbatch = self.forwards[stage]
            self.forwards[stage] += 1
            time, size = growth[microbatch]
            end = now + problem.forward[stage] * time
            if drop:
                device.dropped.add((stage, microbatch))
            else:
                device.held += problem.residual[stage] * size
                device.kept += 1
            if stage + 1 < problem.num_stages:
                self.inputs[stage + 1][microbatch] = end + problem.waits[0][stage]
                receiver = problem.device_of[stage + 1]
            else:
                self.gradients[stage][microbatch] = end
        elif code in (B, I):
            microbatch = problem.turns[self.backwards[stage]]
            time, size = growth[microbatch]
            self.backwards[stage] += 1
            if code == B:
                end = now + problem.whole_backward[stage] * time
                device.held -= problem.residual[stage] * size
            else:
                end = now + problem.inward[stage] * time
                device.held -= (problem.residual[stage] - problem.rest[stage]) * size
                device.owed.append(stage)
            device.kept -= (stage, microbatch) not in device.again
            if stage:
                self.gradients[stage - 1][microbatch] = end + problem.waits[1][stage]
                receiver = problem.device_of[stage - 1]
        elif code == W:
            stage = device.owed.popleft()
            microbatch = problem.turns[self.weights[stage]]
            time, size = growth[microbatch]
            self.weights[stage] += 1
            end = now + problem.weight[stage] * time
            device.held -= problem.rest[stage] * size
        else:
            microbatch = problem.turns[self.backwards[stage]]
            time, size = growth[microbatch]
            end = now + problem.again[stage] * time
            device.held += problem.residual[stage] * size
            device.dropped.remove((stage, microbatch))
            device.again.add((stage, microbatch))
        device.begun = min(device.begun, now)
        device.lane.append((code, stage, microbatch))
        device.free = end
        return receiver
