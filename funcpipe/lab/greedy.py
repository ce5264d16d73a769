"""Schedules built action by action, each gap filled with W where that does not lengthen the longest device.

Zero bubble's automatic schedules on a line (arXiv 2401.10241, section 4) and on a V (section 6): forwards fill each
device until its first gradient comes; then every round runs one backward and one forward on each, and W goes before an
action that would otherwise wait. A gap shorter than a W stays open while the device's waits are less than those of
the worst device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import product

from funcpipe.core.schedule import Action, Kind
from funcpipe.lab.problem import ROUNDING, Orders, Problem

_NEVER = float("inf")


class NoRoom(Exception):
    """The memory does not suffice for the construction."""


class Builder:
    """Orders under construction, with when each device is free, what it holds and how long it has waited.

    Attributes:
        done: by kind (F, I, W), how many each stage has run.
        now: when each device is free.
        idle: how long each device has waited since its first action.
    """

    def __init__(self, problem: Problem, allowed: list[float] | None = None) -> None:
        self.problem = problem
        stages, devices, count = problem.num_stages, problem.num_devices, problem.num_microbatches
        self.ends = {kind: [[_NEVER] * count for _ in range(stages)] for kind in (Kind.F, Kind.I)}
        self.done = {kind: [0] * stages for kind in (Kind.F, Kind.I, Kind.W)}
        self.now, self.idle, self.held = [0.0] * devices, [0.0] * devices, [0.0] * devices
        self.owed: list[deque[int]] = [deque() for _ in range(devices)]
        self.orders: Orders = [[] for _ in range(devices)]
        self.allowed = allowed

    def arrival(self, kind: Kind, stage: int) -> float:
        """When what the next F or I of a stage reads is there; infinite if that is not known."""
        problem, microbatch = self.problem, self.done[kind][stage]
        forward_waits, backward_waits = problem.waits
        if microbatch >= problem.num_microbatches:
            return _NEVER
        if kind is Kind.F:
            return self.ends[Kind.F][stage - 1][microbatch] + forward_waits[stage - 1] if stage else 0.0
        end = self.ends[Kind.F][stage][microbatch]
        last = stage + 1 == problem.num_stages
        return end if last else max(end, self.ends[Kind.I][stage + 1][microbatch] + backward_waits[stage + 1])

    def put(self, kind: Kind, stage: int) -> None:
        """Run the next F or I of a stage. Raises NoRoom."""
        problem, device, microbatch = self.problem, self.problem.device_of[stage], self.done[kind][stage]
        arrived = self.arrival(kind, stage)
        if arrived == _NEVER:
            raise NoRoom
        start = max(self.now[device], arrived)
        if self.orders[device]:
            self.idle[device] += start - self.now[device]
        self.done[kind][stage] += 1
        if kind is Kind.F:
            self.held[device] += problem.residual[stage]
            if self.held[device] > problem.limits[device] * (1 + ROUNDING):
                raise NoRoom
            end = start + problem.forward[stage]
        else:
            self.held[device] -= problem.residual[stage] - problem.rest[stage]
            self.owed[device].append(stage)
            end = start + problem.inward[stage]
        self.now[device] = self.ends[kind][stage][microbatch] = end
        self.orders[device].append(Action(kind, stage, microbatch))

    def put_weight(self, device: int) -> None:
        """Run the oldest W that a device owes."""
        stage = self.owed[device].popleft()
        microbatch = self.done[Kind.W][stage]
        self.done[Kind.W][stage] += 1
        self.now[device] += self.problem.weight[stage]
        self.held[device] -= self.problem.rest[stage]
        self.orders[device].append(Action(Kind.W, stage, microbatch))

    def most_idle(self, device: int) -> float:
        """How long a device may wait without waiting longer than all others."""
        longest = max(self.idle)
        if self.allowed is not None:
            longest = max(longest, max(self.allowed) - self.allowed[device])
        return longest

    def fill(self, kind: Kind, stage: int, *, short: bool, long: bool) -> None:
        """Make room and use the wait before the next F or I of a stage.

        Args:
            kind, stage: what comes next.
            short: put a W also where it ends after the wait, and the wait would not make its device the worst.
            long: the same where it would.
        """
        problem, device = self.problem, self.problem.device_of[stage]
        owed, limit = self.owed[device], problem.limits[device] * (1 + ROUNDING)
        if kind is Kind.F:
            while owed and self.held[device] + problem.residual[stage] > limit:
                self.put_weight(device)
        arrived = self.arrival(kind, stage)
        if arrived == _NEVER:
            return
        while owed and self.now[device] + problem.weight[owed[0]] <= arrived:
            self.put_weight(device)
        wait = arrived - self.now[device]
        worst = wait > self.most_idle(device) - self.idle[device]
        if owed and wait > 0 and (long if worst else short):
            self.put_weight(device)

    def finish(self) -> None:
        """Run all W that are left."""
        for device, owed in enumerate(self.owed):
            while owed:
                self.put_weight(device)


def on_a_line(problem: Problem) -> Iterator[Orders]:
    """The eight variants of the line; those that need more memory than there is are left out."""
    for flags in product((False, True), repeat=3):
        try:
            yield _line(problem, *flags)
        except NoRoom:
            continue


def on_a_v(problem: Problem) -> Iterator[Orders]:
    """The four variants of the V, each repeated while what it learned of the waits makes it better."""
    for forwards, backwards in product((True, False), repeat=2):
        allowed: list[float] | None = None
        while True:
            try:
                builder = _v(problem, allowed, forwards=forwards, backwards=backwards)
            except NoRoom:
                break
            yield builder.orders
            if allowed is not None and max(builder.idle) >= max(allowed) * (1 - ROUNDING):
                break
            allowed = builder.idle


def _line(problem: Problem, wait_before_first: bool, backwards_first: bool, eager: bool) -> Orders:
    builder = Builder(problem)
    stages, count, done = problem.num_stages, problem.num_microbatches, builder.done
    _warm_up(builder, wait_before_first)
    for _ in range(1, count):
        runs_forward = [done[Kind.F][stage] < count for stage in range(stages)]
        if backwards_first:
            runs_forward = [runs and not _better_waits(builder, stage) for stage, runs in enumerate(runs_forward)]
        for stage in reversed(range(stages - 1)):  # a forward that the next stage does not want yet can wait
            runs_forward[stage] = runs_forward[stage] and (runs_forward[stage + 1] or done[Kind.F][stage + 1] >= count)
        for stage in range(stages):
            if runs_forward[stage]:
                builder.fill(Kind.F, stage, short=eager, long=True)
                builder.put(Kind.F, stage)
        for stage in reversed(range(stages)):
            if done[Kind.F][stage] <= done[Kind.I][stage]:
                builder.fill(Kind.F, stage, short=eager, long=True)
                builder.put(Kind.F, stage)
            builder.fill(Kind.I, stage, short=eager, long=True)
            builder.put(Kind.I, stage)
    builder.finish()
    return builder.orders


def _warm_up(builder: Builder, wait: bool) -> None:
    """Run as many forwards on each device as fit before its first gradient, fewer on each than on the one before."""
    problem = builder.problem
    stages, count = problem.num_stages, problem.num_microbatches
    backward_waits = problem.waits[1]
    for stage in range(stages):
        builder.put(Kind.F, stage)
    extra = [0] * stages
    gradient = builder.now[-1] + problem.inward[-1]
    for stage in reversed(range(stages - 1)):
        arrives, free, memory = gradient + backward_waits[stage + 1], builder.now[stage], builder.held[stage]
        limit = problem.limits[stage] * (1 + ROUNDING)
        while 1 + extra[stage] < count and memory + problem.residual[stage] <= limit:
            if (free if wait else free + problem.forward[stage]) > arrives * (1 + ROUNDING) or (
                wait and free >= arrives
            ):
                break
            memory, free = memory + problem.residual[stage], free + problem.forward[stage]
            extra[stage] += 1
        gradient = max(free, arrives) + problem.inward[stage]
    for stage in range(1, stages):
        extra[stage] = max(0, min(extra[stage], extra[stage - 1] - 1)) if 1 + extra[stage] < count else extra[stage]
        extra[stage] = min(extra[stage], extra[stage - 1])
    for stage in range(stages):
        for _ in range(extra[stage]):
            builder.put(Kind.F, stage)
    for stage in reversed(range(stages)):
        builder.put(Kind.I, stage)


def _better_waits(builder: Builder, stage: int) -> bool:
    """Would this device's next forward hold up its next backward, whose gradient the next stage can already compute."""
    problem, done = builder.problem, builder.done
    if stage + 1 >= problem.num_stages or done[Kind.F][stage] < done[Kind.F][stage + 1] + 2:
        return False
    gradient = (
        builder.now[stage + 1] + problem.forward[stage + 1] + problem.inward[stage + 1] + problem.waits[1][stage + 1]
    )
    if builder.now[stage] >= gradient:
        return True
    memory, weight_time = builder.held[stage] + problem.residual[stage], 0.0
    for _ in range(len(builder.owed[stage])):
        if memory <= problem.limits[stage] * (1 + ROUNDING):
            break
        memory, weight_time = memory - problem.rest[stage], weight_time + problem.weight[stage]
    if builder.now[stage] + problem.forward[stage] + weight_time <= gradient:
        return False
    return gradient - builder.now[stage] <= builder.most_idle(stage) - builder.idle[stage]


def _v(problem: Problem, allowed: list[float] | None, *, forwards: bool, backwards: bool) -> Builder:
    builder = Builder(problem, allowed)
    devices, count, done = problem.num_devices, problem.num_microbatches, builder.done
    last = problem.num_stages - 1
    _fill_the_v(builder)
    for _ in range(2 * count):
        down, up = _next_backwards(builder)
        for stage in [*reversed(down), *(last - device for device in up)]:
            builder.fill(Kind.I, stage, short=False, long=backwards or stage < devices)
            builder.put(Kind.I, stage)
        for device in range(devices):
            stage = _next_forward(builder, device)
            if stage is not None:
                builder.fill(Kind.F, stage, short=False, long=forwards)
                builder.put(Kind.F, stage)
    if any(n < count for kind in (Kind.F, Kind.I) for n in done[kind]):
        raise NoRoom
    builder.finish()
    return builder


def _fill_the_v(builder: Builder) -> None:
    """Run forwards until every device has run the first microbatch on both stages, as many as each has room for."""
    problem, forward = builder.problem, builder.done[Kind.F]
    devices, count, last = problem.num_devices, problem.num_microbatches, problem.num_stages - 1
    for device in range(devices):
        builder.put(Kind.F, device)
    for device in reversed(range(devices)):
        up = last - device
        needed = 2 * device * problem.residual[device] + problem.residual[device] + problem.residual[up]
        while (
            device + 1 < devices
            and forward[0] < count
            and builder.held[device] + needed <= problem.limits[device] * (1 + ROUNDING)
            and builder.now[device] + problem.forward[device] <= builder.arrival(Kind.F, up)
        ):
            for earlier in range(device + 1):
                builder.put(Kind.F, earlier)
        builder.put(Kind.F, up)
    way_up = False
    for device in range(1, devices):
        before, up = device - 1, last - device
        while (
            forward[device] + forward[up] < forward[before] + forward[up + 1] or forward[up] <= forward[up + 1] < count
        ):
            for later in reversed(range(device, devices)):
                stage = last - later if way_up else later
                if forward[stage] < count:
                    builder.put(Kind.F, stage)
            way_up = not way_up


def _next_backwards(builder: Builder) -> tuple[list[int], list[int]]:
    """The devices whose next backward is of their stage on the way down, and those with that of their other stage."""
    problem, done = builder.problem, builder.done[Kind.I]
    last, count = problem.num_stages - 1, problem.num_microbatches
    down: list[int] = []
    up: list[int] = []
    for device in range(problem.num_devices):
        done_down, done_up = done[device], done[last - device]
        if done_down >= count:
            continue
        follows = done_down < done_up and (
            device + 1 == problem.num_devices or done_up >= count or builder.arrival(Kind.I, device) < _NEVER
        )
        (down if follows else up).append(device)
    return down, up


def _next_forward(builder: Builder, device: int) -> int | None:
    """The stage whose forward a device runs next; None: it has to wait for one."""
    problem, forward = builder.problem, builder.done[Kind.F]
    up = problem.num_stages - 1 - device
    if forward[up] >= problem.num_microbatches:
        return None
    if forward[up] >= forward[device]:
        return device
    if device + 1 == problem.num_devices or builder.arrival(Kind.F, up) < _NEVER:
        return up
    return device if builder.arrival(Kind.F, device) < _NEVER else None
