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
    """The construction does not get by with the memory."""


class Builder:
    """Orders that grow; when each device is free, what it holds, how long it has waited.

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
        """When the next F or I of a stage can start, its device apart; infinite if that is not known."""
        problem, microbatch = self.problem, self.done[kind][stage]
        there, back = problem.waits
        if microbatch >= problem.num_microbatches:
            return _NEVER
        if kind is Kind.F:
            return self.ends[Kind.F][stage - 1][microbatch] + there[stage - 1] if stage else 0.0
        own = self.ends[Kind.F][stage][microbatch]
        last = stage + 1 == problem.num_stages
        return own if last else max(own, self.ends[Kind.I][stage + 1][microbatch] + back[stage + 1])

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
        """How much a device may wait without being the worst."""
        most = max(self.idle)
        if self.allowed is not None:
            most = max(most, max(self.allowed) - self.allowed[device])
        return most

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
        """All W that are left."""
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
                built = _v(problem, allowed, forwards=forwards, backwards=backwards)
            except NoRoom:
                break
            yield built.orders
            if allowed is not None and max(built.idle) >= max(allowed) * (1 - ROUNDING):
                break
            allowed = built.idle


def _line(problem: Problem, wait_before_first: bool, backwards_first: bool, eager: bool) -> Orders:
    built = Builder(problem)
    stages, count, done = problem.num_stages, problem.num_microbatches, built.done
    _warm_up(built, wait_before_first)
    for _ in range(1, count):
        wanted = [done[Kind.F][stage] < count for stage in range(stages)]
        if backwards_first:
            wanted = [one and not _better_waits(built, stage) for stage, one in enumerate(wanted)]
        for stage in reversed(range(stages - 1)):  # a forward that the next stage does not want yet can wait
            wanted[stage] = wanted[stage] and (wanted[stage + 1] or done[Kind.F][stage + 1] >= count)
        for stage in range(stages):
            if wanted[stage]:
                built.fill(Kind.F, stage, short=eager, long=True)
                built.put(Kind.F, stage)
        for stage in reversed(range(stages)):
            if done[Kind.F][stage] <= done[Kind.I][stage]:
                built.fill(Kind.F, stage, short=eager, long=True)
                built.put(Kind.F, stage)
            built.fill(Kind.I, stage, short=eager, long=True)
            built.put(Kind.I, stage)
    built.finish()
    return built.orders


def _warm_up(built: Builder, wait: bool) -> None:
    """As many forwards on each device as fit before its first gradient, fewer on each than on the one before."""
    problem = built.problem
    stages, count = problem.num_stages, problem.num_microbatches
    back = problem.waits[1]
    for stage in range(stages):
        built.put(Kind.F, stage)
    more = [0] * stages
    gradient = built.now[-1] + problem.inward[-1]
    for stage in reversed(range(stages - 1)):
        arrives, now, held = gradient + back[stage + 1], built.now[stage], built.held[stage]
        limit = problem.limits[stage] * (1 + ROUNDING)
        while 1 + more[stage] < count and held + problem.residual[stage] <= limit:
            if (now if wait else now + problem.forward[stage]) > arrives * (1 + ROUNDING) or (wait and now >= arrives):
                break
            held, now = held + problem.residual[stage], now + problem.forward[stage]
            more[stage] += 1
        gradient = max(now, arrives) + problem.inward[stage]
    for stage in range(1, stages):
        more[stage] = max(0, min(more[stage], more[stage - 1] - 1)) if 1 + more[stage] < count else more[stage]
        more[stage] = min(more[stage], more[stage - 1])
    for stage in range(stages):
        for _ in range(more[stage]):
            built.put(Kind.F, stage)
    for stage in reversed(range(stages)):
        built.put(Kind.I, stage)


def _better_waits(built: Builder, stage: int) -> bool:
    """Would this device's next forward hold up its next backward, which the next stage has all it needs for."""
    problem, done = built.problem, built.done
    if stage + 1 >= problem.num_stages or done[Kind.F][stage] < done[Kind.F][stage + 1] + 2:
        return False
    comes = built.now[stage + 1] + problem.forward[stage + 1] + problem.inward[stage + 1] + problem.waits[1][stage + 1]
    if built.now[stage] >= comes:
        return True
    held, cost = built.held[stage] + problem.residual[stage], 0.0
    for _ in range(len(built.owed[stage])):
        if held <= problem.limits[stage] * (1 + ROUNDING):
            break
        held, cost = held - problem.rest[stage], cost + problem.weight[stage]
    if built.now[stage] + problem.forward[stage] + cost <= comes:
        return False
    return comes - built.now[stage] <= built.most_idle(stage) - built.idle[stage]


def _v(problem: Problem, allowed: list[float] | None, *, forwards: bool, backwards: bool) -> Builder:
    built = Builder(problem, allowed)
    devices, count, done = problem.num_devices, problem.num_microbatches, built.done
    last = problem.num_stages - 1
    _fill_the_v(built)
    for _ in range(2 * count):
        down, up = _next_backwards(built)
        for stage in [*reversed(down), *(last - device for device in up)]:
            built.fill(Kind.I, stage, short=False, long=backwards or stage < devices)
            built.put(Kind.I, stage)
        for device in range(devices):
            stage = _next_forward(built, device)
            if stage is not None:
                built.fill(Kind.F, stage, short=False, long=forwards)
                built.put(Kind.F, stage)
    if any(n < count for kind in (Kind.F, Kind.I) for n in done[kind]):
        raise NoRoom
    built.finish()
    return built


def _fill_the_v(built: Builder) -> None:
    """Forwards until every device has seen the first microbatch on both its stages, as many as each has room for."""
    problem, forward = built.problem, built.done[Kind.F]
    devices, count, last = problem.num_devices, problem.num_microbatches, problem.num_stages - 1
    for device in range(devices):
        built.put(Kind.F, device)
    for device in reversed(range(devices)):
        up = last - device
        more = 2 * device * problem.residual[device] + problem.residual[device] + problem.residual[up]
        while (
            device + 1 < devices
            and forward[0] < count
            and built.held[device] + more <= problem.limits[device] * (1 + ROUNDING)
            and built.now[device] + problem.forward[device] <= built.arrival(Kind.F, up)
        ):
            for above in range(device + 1):
                built.put(Kind.F, above)
        built.put(Kind.F, up)
    way_up = False
    for device in range(1, devices):
        before, up = device - 1, last - device
        while (
            forward[device] + forward[up] < forward[before] + forward[up + 1] or forward[up] <= forward[up + 1] < count
        ):
            for below in reversed(range(device, devices)):
                stage = last - below if way_up else below
                if forward[stage] < count:
                    built.put(Kind.F, stage)
            way_up = not way_up


def _next_backwards(built: Builder) -> tuple[list[int], list[int]]:
    """The devices whose next backward is that of the stage on the way down, and those where it is the other."""
    problem, done = built.problem, built.done[Kind.I]
    last, count = problem.num_stages - 1, problem.num_microbatches
    down: list[int] = []
    up: list[int] = []
    for device in range(problem.num_devices):
        here, there = done[device], done[last - device]
        if here >= count:
            continue
        follows = here < there and (
            device + 1 == problem.num_devices or there >= count or built.arrival(Kind.I, device) < _NEVER
        )
        (down if follows else up).append(device)
    return down, up


def _next_forward(built: Builder, device: int) -> int | None:
    """The stage whose forward a device runs next; None: it has to wait for one."""
    problem, forward = built.problem, built.done[Kind.F]
    up = problem.num_stages - 1 - device
    if forward[up] >= problem.num_microbatches:
        return None
    if forward[up] >= forward[device]:
        return device
    if device + 1 == problem.num_devices or built.arrival(Kind.F, up) < _NEVER:
        return up
    return device if built.arrival(Kind.F, device) < _NEVER else None
