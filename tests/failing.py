"""Runs that fail on purpose: stages that call a function in every forward, backward and loss."""

from __future__ import annotations

import dataclasses
import errno

import torch
import torch.nn.functional as F
from watch import Watch

import funcpipe as fp

S, M = 4, 4
PARAMS = tuple({"w": torch.linspace(0.5, 1.5, 3, dtype=torch.float64) + i} for i in range(S))
X = torch.linspace(-1, 1, 3 * M, dtype=torch.float64).reshape(M, 3)


class Boom(Exception):
    """A user's own."""


class Faults:
    """Raises ``make()`` when the action ``at`` runs; notes every action. L is the loss."""

    def __init__(self):
        self.at, self.make, self.calls, self.watch = "", Boom, [], Watch()

    def __call__(self, letter, stage, microbatch):
        if letter == "F" and f"{stage}F{microbatch}" in self.calls:
            letter = "R"
        self.calls.append(f"{stage}{letter}{microbatch}")
        if self.calls[-1] == self.at:
            raise self.make()


class Trip(torch.autograd.Function):
    """The identity; calls something in its backward."""

    @staticmethod
    def forward(ctx, x, trip):
        ctx.trip = trip
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        ctx.trip()
        return g, None


def make(schedule, faults):
    """A plan of stages that call ``faults`` in every forward, backward and loss. One row per
    microbatch."""

    def part(index):
        def fn(p, x, *, feeds):
            m = int(feeds["mb"])
            y = faults.watch.layer(x, p["w"])
            faults("F", index, m)
            return Trip.apply(torch.tanh(y), lambda: faults("B", index, m))

        return fp.stage(fn, name=f"part{index}", feeds=["mb"])

    def loss(y, target):
        faults("L", schedule.num_stages - 1, int(target[1]))
        return F.mse_loss(y, target[0])

    return fp.make_plan(
        [part(i) for i in range(schedule.num_stages)], schedule, loss=loss, devices="cpu"
    )


def go(plan, executor="serial", run=fp.run):
    """Run a plan of `make`."""
    count = plan.num_microbatches
    mb = torch.arange(count)
    options = {} if run is fp.run_sequential else {"executor": executor}
    inputs = (X[:count], (X[:count].flip(0), mb))
    return run(
        plan, PARAMS[: plan.num_stages], inputs, feeds={"mb": mb}, threads_per_lane=1, **options
    )


def caught(call):
    """What a call raises; nobody else holds it."""
    try:
        call()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int


class Needs(Exception):
    def __init__(self, a, *, b):
        super().__init__(f"{a} and {b}")
        self.a, self.b = a, b


class Slots(Exception):
    __slots__ = ("x",)

    def __init__(self, x):
        self.x = x


class Final(Exception):
    def __init_subclass__(cls):
        raise TypeError("no subclasses")


# Exceptions that are hard to build again, with the fields that must survive; None: refuses a
# subclass.
ODD = [
    (lambda: Needs(1, b=2), ("a", "b")),
    (lambda: Slots([1]), ("x",)),
    (lambda: Frozen(3), ("code",)),
    (lambda: FileNotFoundError(errno.ENOENT, "gone", "f.txt"), ("errno", "strerror", "filename")),
    (
        lambda: UnicodeDecodeError("utf8", b"\xff", 0, 1, "bad"),
        ("encoding", "object", "start", "end", "reason"),
    ),
    (lambda: ExceptionGroup("two", [ValueError(1), KeyError(2)]), ("message", "exceptions")),
    (lambda: StopIteration(7), ("value",)),
    (lambda: torch.OutOfMemoryError("no memory"), ()),
    (lambda: KeyError("key"), ()),
    (lambda: Final("last"), None),
]
