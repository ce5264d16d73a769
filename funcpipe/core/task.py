"""What a plan is made of: tasks over named values, and the wires and slots behind them."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from funcpipe.core.schedule import Action

CALLER = -1
"""The lane of what the caller gives: inputs, targets, feeds."""


class Role(Enum):
    """What a value is for."""

    INPUT = "input"
    """A microbatch of the inputs, for stage 0."""
    TARGET = "target"
    """A microbatch of the target, for the loss in the last stage."""
    FEED = "feed"
    """A microbatch of a named feed."""
    ACT = "act"
    """The output of a stage, for the next."""
    SKIP = "skip"
    """A stashed value, for the stages that pop it."""
    GRAD = "grad"
    """The gradient of a stage's output."""
    INPUT_GRAD = "input_grad"
    """The gradient of a microbatch of the inputs, in the program of a `vjp`; the caller takes it."""
    SKIP_GRAD = "skip_grad"
    """The gradient of a skip from one of its poppers (the peer)."""
    RESIDUAL = "residual"
    """What a forward keeps for its backward."""
    OFFLOADED = "offloaded"
    """A residual that lies in host memory."""
    WEIGHT_RESIDUAL = "weight_residual"
    """What the backward of the input keeps for that of the weights."""
    REPORT = "report"
    """What a forward has for the end of the batch: statistics, losses, aux; the caller takes it."""
    OUTPUT = "output"
    """The last stage's output, where the plan returns outputs; the caller takes it."""

    __hash__ = object.__hash__


class Value(NamedTuple):
    """One named tree that tasks read or write, printed ``skip[0,3,e1]``.

    Attributes:
        role: what it is for.
        stage: the stage that it belongs to: that wrote it, or (for gradients) whose value it is the gradient of.
        microbatch: None: it lives for the whole run.
        name: of a skip or a feed.
        peer: of a skip gradient: the stage that popped; else -1.
    """

    role: Role
    stage: int
    microbatch: int | None
    name: str = ""
    peer: int = -1

    def __str__(self) -> str:
        parts = [str(self.stage), "*" if self.microbatch is None else str(self.microbatch)]
        parts += [self.name] if self.name else []
        parts += [f"from {self.peer}"] if self.peer >= 0 else []
        return f"{self.role.value}[{','.join(parts)}]"


class TaskKind(Enum):
    """The closed set of things that a task can be."""

    COMPUTE = "compute"
    COPY = "copy"
    OFFLOAD = "offload"
    LOAD = "load"

    __hash__ = object.__hash__


class Task(NamedTuple):
    """One step of a plan.

    Attributes:
        kind: compute (an action), copy (a value to another lane), offload or load (a residual to the host and back).
        action: None for a copy.
        lane: where it runs; for a copy where the value arrives.
        source: where a copy comes from, -1 for the caller; for a compute the lane itself.
        reads: values that must be there.
        writes: values that are there afterwards.
        frees: values that nobody on the lane needs any more; for a copy: on the lane that it comes from.
        slots: for each value written by a copy, the place that it occupies at its lane until it is freed.
    """

    kind: TaskKind
    action: Action | None
    lane: int
    source: int
    reads: tuple[Value, ...]
    writes: tuple[Value, ...]
    frees: tuple[Value, ...]
    slots: tuple[int, ...]

    def __str__(self) -> str:
        words = [f"{self.action}  on {self.lane}:" if self.action else f"copy {lane_name(self.source)}->{self.lane}:"]
        words += ["reads " + " ".join(map(str, self.reads))] if self.reads else []
        words += ["writes " + " ".join(map(str, self.writes))] if self.writes and self.action else []
        words += [f"slot {slot}" for slot in self.slots]
        words += ["frees " + " ".join(map(str, self.frees))] if self.frees else []
        return "  ".join(words)


def lane_name(lane: int) -> str:
    """A lane in print."""
    return "caller" if lane == CALLER else str(lane)


class Wire(NamedTuple):
    """A value with its microbatch left open."""

    role: Role
    stage: int
    name: str = ""
    peer: int = -1


class Pool(NamedTuple):
    """The slots of one kind of value on one directed edge between lanes.

    Attributes:
        source: the lane that sends, -1 for the caller.
        lane: the lane where the values lie.
        role: what kind of value.
        slots: how many of them may lie there at a time: the most that do in plan order.
    """

    source: int
    lane: int
    role: Role
    slots: int
