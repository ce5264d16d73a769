"""Schedules built action by action, each gap filled with W where that does not lengthen the longest
device.

Zero bubble's automatic schedules on a line (arXiv 2401.10241, section 4) and on a V (section 6):
forwards fill each device until its first gradient comes; then every round runs one backward and one
forward on each, and W goes before an action that would otherwise wait. A gap shorter than a W stays
open while the device's waits are less than those of the worst device.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from funcpipe._src.schedules.clock import F, I, W
from funcpipe._src.search.listing import NEVER, Simulation
from funcpipe._src.search.problem import ROUNDING, CodedLanes, Problem


class NoRoom(Exception):
    """The memory does not suffice for the construction."""


class Builder(Simulation):
    """Lanes under construction, with how long each device has waited since its first action."""

    def __init__(self, problem: Problem, allowed: list[float] | None = None) -> None:
        super().__init__(problem)
        self.idle, self.allowed = [0.0] * problem.num_devices, allowed

    def arrival(self, code: int, stage: int) -> float:
        """When what the next F or I of a stage reads is there; infinite if that is not known."""
        arrivals, done = (
            (self.inputs, self.forwards) if code == F else (self.gradients, self.backwards)
        )
        microbatch = done[stage]
        return arrivals[stage][microbatch] if microbatch < self.problem.num_microbatches else NEVER

    def put(self, code: int, stage: int) -> None:
        """Run the next F or I of a stage. Raises NoRoom."""
        number, arrived = self.problem.device_of[stage], self.arrival(code, stage)
        device = self.devices[number]
        if arrived == NEVER:
            raise NoRoom
        start = max(device.free, arrived)
        if device.lane:
            self.idle[number] += start - device.free
        self.begin(number, code, stage, start)
        if code == F and device.held > device.limit:
            raise NoRoom

    def put_weight(self, number: int) -> None:
        """Run the oldest W that a device owes."""
        self.begin(number, W, -1, self.devices[number].free)

    def most_idle(self, number: int) -> float:
        """How long a device may wait without waiting longer than all others."""
        longest = max(self.idle)
        if self.allowed is not None:
            longest = max(longest, max(self.allowed) - self.allowed[number])
        return longest

    def fill(self, code: int, stage: int, *, short: bool, long: bool) -> None:
        """Make room and use the wait before the next F or I of a stage.

        Args:
            code, stage: what comes next.
            short: put a W also where it ends after the wait, and the wait would not make its device
                the worst.
            long: the same where it would.
        """
        problem, number = self.problem, self.problem.device_of[stage]
        device = self.devices[number]
        owed = device.owed
        if code == F:
            while owed and device.held + problem.residual[stage] > device.limit:
                self.put_weight(number)
        arrived = self.arrival(code, stage)
        if arrived == NEVER:
            return
        while owed and device.free + problem.weight[owed[0]] <= arrived:
            self.put_weight(number)
        wait = arrived - device.free
        worst = wait > self.most_idle(number) - self.idle[number]
        if owed and wait > 0 and (long if worst else short):
            self.put_weight(number)

    def finish(self) -> None:
        """Run all W that are left."""
        for number, device in enumerate(self.devices):
            while device.owed:
                self.put_weight(number)


def on_a_line(problem: Problem) -> Iterator[CodedLanes]:
    """The eight variants of the line; those that need more memory than there is are left out."""
    for flags in product((False, True), repeat=3):
        try:
            yield _line(problem, *flags)
        except NoRoom:
            continue


def on_a_v(problem: Problem) -> Iterator[CodedLanes]:
    """The four variants of the V, each repeated while what it learned of the waits makes it
    better."""
    for forwards, backwards in product((True, False), repeat=2):
        allowed: list[float] | None = None
        while True:
            try:
                builder = _v(problem, allowed, forwards=forwards, backwards=backwards)
            except NoRoom:
                break
            yield builder.lanes
            if allowed is not None and max(builder.idle) >= max(allowed) * (1 - ROUNDING):
                break
            allowed = builder.idle


def _line(
    problem: Problem, wait_before_first: bool, backwards_first: bool, eager: bool
) -> CodedLanes:
    builder = Builder(problem)
    stages, count = problem.num_stages, problem.num_microbatches
    forwards, backwards = builder.forwards, builder.backwards
    _warm_up(builder, wait_before_first)
    for _ in range(1, count):
        runs_forward = [forwards[stage] < count for stage in range(stages)]
        if backwards_first:
            runs_forward = [
                runs and not _better_waits(builder, stage)
                for stage, runs in enumerate(runs_forward)
            ]
        for stage in reversed(
            range(stages - 1)
        ):  # a forward that the next stage does not want yet can wait
            runs_forward[stage] = runs_forward[stage] and (
                runs_forward[stage + 1] or forwards[stage + 1] >= count
            )
        for stage in range(stages):
            if runs_forward[stage]:
                builder.fill(F, stage, short=eager, long=True)
                builder.put(F, stage)
        for stage in reversed(range(stages)):
            if forwards[stage] <= backwards[stage]:
                builder.fill(F, stage, short=eager, long=True)
                builder.put(F, stage)
            builder.fill(I, stage, short=eager, long=True)
            builder.put(I, stage)
    builder.finish()
    return builder.lanes


def _warm_up(builder: Builder, wait: bool) -> None:
    """Run as many forwards on each device as fit before its first gradient, fewer on each than on
    the one before."""
    problem = builder.problem
    stages, count = problem.num_stages, problem.num_microbatches
    backward_waits = problem.waits[1]
    for stage in range(stages):
        builder.put(F, stage)
    extra = [0] * stages
    gradient = builder.devices[-1].free + problem.inward[-1]
    for stage in reversed(range(stages - 1)):
        device, arrives = builder.devices[stage], gradient + backward_waits[stage + 1]
        free, memory = device.free, device.held
        while 1 + extra[stage] < count and memory + problem.residual[stage] <= device.limit:
            if (free if wait else free + problem.forward[stage]) > arrives * (1 + ROUNDING) or (
                wait and free >= arrives
            ):
                break
            memory, free = memory + problem.residual[stage], free + problem.forward[stage]
            extra[stage] += 1
        gradient = max(free, arrives) + problem.inward[stage]
    for stage in range(1, stages):
        extra[stage] = (
            max(0, min(extra[stage], extra[stage - 1] - 1))
            if 1 + extra[stage] < count
            else extra[stage]
        )
        extra[stage] = min(extra[stage], extra[stage - 1])
    for stage in range(stages):
        for _ in range(extra[stage]):
            builder.put(F, stage)
    for stage in reversed(range(stages)):
        builder.put(I, stage)


def _better_waits(builder: Builder, stage: int) -> bool:
    """Would this device's next forward hold up its next backward, whose gradient the next stage can
    already compute."""
    problem, forwards, following = builder.problem, builder.forwards, stage + 1
    if following >= problem.num_stages or forwards[stage] < forwards[following] + 2:
        return False
    device, computes = (
        builder.devices[stage],
        problem.forward[following] + problem.inward[following],
    )
    gradient = builder.devices[following].free + computes + problem.waits[1][following]
    if device.free >= gradient:
        return True
    memory, weight_time = device.held + problem.residual[stage], 0.0
    for _ in device.owed:
        if memory <= device.limit:
            break
        memory, weight_time = memory - problem.rest[stage], weight_time + problem.weight[stage]
    if device.free + problem.forward[stage] + weight_time <= gradient:
        return False
    return gradient - device.free <= builder.most_idle(stage) - builder.idle[stage]


def _v(
    problem: Problem, allowed: list[float] | None, *, forwards: bool, backwards: bool
) -> Builder:
    builder = Builder(problem, allowed)
    devices, count = problem.num_devices, problem.num_microbatches
    last = problem.num_stages - 1
    _fill_the_v(builder)
    for _ in range(2 * count):
        down, up = _next_backwards(builder)
        for stage in [*reversed(down), *(last - device for device in up)]:
            builder.fill(I, stage, short=False, long=backwards or stage < devices)
            builder.put(I, stage)
        for device in range(devices):
            stage = _next_forward(builder, device)
            if stage is not None:
                builder.fill(F, stage, short=False, long=forwards)
                builder.put(F, stage)
    if min(*builder.forwards, *builder.backwards) < count:
        raise NoRoom
    builder.finish()
    return builder


def _fill_the_v(builder: Builder) -> None:
    """Run forwards until every device has run the first microbatch on both stages, as many as each
    has room for."""
    problem, forwards = builder.problem, builder.forwards
    devices, count, last = problem.num_devices, problem.num_microbatches, problem.num_stages - 1
    for device in range(devices):
        builder.put(F, device)
    for device in reversed(range(devices)):
        up = last - device
        needed = (
            2 * device * problem.residual[device] + problem.residual[device] + problem.residual[up]
        )
        while (
            device + 1 < devices
            and forwards[0] < count
            and builder.devices[device].held + needed <= builder.devices[device].limit
            and builder.devices[device].free + problem.forward[device] <= builder.arrival(F, up)
        ):
            for earlier in range(device + 1):
                builder.put(F, earlier)
        builder.put(F, up)
    way_up = False
    for device in range(1, devices):
        before, up = device - 1, last - device
        while (
            forwards[device] + forwards[up] < forwards[before] + forwards[up + 1]
            or forwards[up] <= forwards[up + 1] < count
        ):
            for later in reversed(range(device, devices)):
                stage = last - later if way_up else later
                if forwards[stage] < count:
                    builder.put(F, stage)
            way_up = not way_up


def _next_backwards(builder: Builder) -> tuple[list[int], list[int]]:
    """The devices whose next backward is of their stage on the way down, and those with that of
    their other stage."""
    problem, backwards = builder.problem, builder.backwards
    last, count = problem.num_stages - 1, problem.num_microbatches
    down: list[int] = []
    up: list[int] = []
    for device in range(problem.num_devices):
        done_down, done_up = backwards[device], backwards[last - device]
        if done_down >= count:
            continue
        follows = done_down < done_up and (
            device + 1 == problem.num_devices
            or done_up >= count
            or builder.arrival(I, device) < NEVER
        )
        (down if follows else up).append(device)
    return down, up


def _next_forward(builder: Builder, device: int) -> int | None:
    """The stage whose forward a device runs next; None: it has to wait for one."""
    problem, forwards = builder.problem, builder.forwards
    up = problem.num_stages - 1 - device
    if forwards[up] >= problem.num_microbatches:
        return None
    if forwards[up] >= forwards[device]:
        return device
    if device + 1 == problem.num_devices or builder.arrival(F, up) < NEVER:
        return up
    return device if builder.arrival(F, device) < NEVER else None
