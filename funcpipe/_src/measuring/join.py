"""Join measured layers into stages, and stages under a schedule: sums of bytes, without running
anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

from funcpipe._src.data.kinds import COMPUTES, COUNTED
from funcpipe._src.data.program import CALLER, Free, Receive, Role, Run, Send, Value
from funcpipe._src.data.schedule import Kind, Schedule
from funcpipe._src.data.stage import Stage
from funcpipe._src.lower.gathers import last_uses, useful_gathers
from funcpipe._src.lower.program import lower
from funcpipe._src.measuring.measured import NOTHING_WAITS, Bytes, Measured, WeightResidual, merged

Contents: TypeAlias = Mapping[Any, int]
"""The storages of a value, with their sizes. Values that share memory share keys."""


def join(row: Sequence[Measured], popped: set[str]) -> Measured:
    """Join neighbouring layers into one stage.

    A stage keeps its borders (inputs, skips, outputs) from its forward to its backward, whether
    autograd needs them or not. Between the borders it keeps the tensors that autograd keeps, each
    once. Other stages pop the skips ``popped``.
    """
    if len(row) == 1:
        only = row[0]
        return only._replace(
            stash={name: size for name, size in only.stash.items() if name in popped}
        )
    inside = {name for layer in row for name in layer.stash}
    stash = {name: sizes for layer in row for name, sizes in layer.stash.items() if name in popped}
    pops = {
        name: sizes for layer in row for name, sizes in layer.pops.items() if name not in inside
    }
    arrived = merged((row[0].inputs, *pops.values()))
    border = merged((arrived, row[-1].outputs, *stash.values()))
    inner = 0
    alive = dict[int, int]()  # kept or stashed by the layers so far
    forward = backward = 0
    for layer in row:
        present = merged((alive, layer.inputs, *layer.pops.values()))
        # The peak in this layer's forward: tensors kept by earlier layers, the layer's inputs, and
        # its own.
        forward = max(forward, inner + besides(present, arrived) + layer.forward)
        inner += layer.inner
        alive |= merged((layer.kept, *layer.stash.values()))
        incoming = 0 if layer is row[-1] else layer.gradient
        # Backwards run from the last layer to the first. So in this layer's backward, only the
        # layers up to it still keep tensors.
        backward = max(backward, inner + besides(alive, border) + incoming + layer.backward)
    kept = merged(layer.kept for layer in row)
    # Relative to the memory when the backward of the stage starts.
    backward -= inner + besides(kept, border)
    sizes = row[0].inputs, row[-1].outputs, stash, pops, row[-1].gradient, forward, max(backward, 0)
    return Measured(inner, kept, *sizes, _weights(row), any(layer.has_input for layer in row))


def _weights(row: Sequence[Measured]) -> WeightResidual:
    """Join the memory that neighbouring layers keep between I and W.

    A stage keeps the graph from the last operation that waits back to the input. So layers before
    that operation keep their whole graph. If no input has a gradient, W is the whole backward.
    """
    waiting = [number for number, layer in enumerate(row) if layer.weights.gradients]
    if not waiting:
        return NOTHING_WAITS
    if not row[waiting[0]].has_input:
        return WeightResidual(
            sum(layer.inner for layer in row), merged(layer.kept for layer in row), row[-1].gradient
        )
    *before, last = row[: waiting[-1] + 1]
    return WeightResidual(
        sum(layer.inner for layer in before) + last.weights.inner,
        merged((*(layer.kept for layer in before), last.weights.kept)),
        sum(layer.weights.gradients for layer in (*before, last)),
    )


def besides(sizes: Bytes, excluded: Container[int]) -> int:
    """The bytes of the values that are not excluded."""
    return sum(size for value, size in sizes.items() if value not in excluded)


def peaks(
    rows: Sequence[Measured],
    gradients: Sequence[int],
    schedule: Schedule,
    parameters: Sequence[int] = (),
) -> list[int]:
    """The peak bytes of values and gradient sums on each device, from the program of a schedule.

    The first gradients of a stage become its sums. With ``parameters``, which are at home in host
    memory, U adds the bytes of a stage's parameters, the last use frees them, and G frees the sums.
    """
    popped = {name for row in rows for name in row.pops}
    stages = [
        Stage(
            _nothing,
            f"{number}",
            stash=tuple(name for name in row.stash if name in popped),
            pop=tuple(row.pops),
        )
        for number, row in enumerate(rows)
    ]
    program = lower(stages, schedule, loss=schedule.has_backward, outputs=False)
    lanes = [_DeviceMemory() for _ in range(schedule.num_devices)]
    lacking, gathered = {*range(len(rows))}, set[int]()
    gathers = [useful_gathers(program, stage) for stage in range(len(rows))]
    last = [last_uses(program.lanes[d], s, gathers[s]) for s, d in enumerate(schedule.device_of)]
    for number, instruction, values in program.walk():
        lane, value_of = lanes[number], program.value
        match instruction:
            case Receive(value, source, _):
                if source == CALLER:  # `Send` below already counted values from other lanes
                    lane.add(value_of(value), rows)
            case Run(call, microbatch, _, writes):
                made = program.lanes[number].calls[call]
                kind, stage = made[:2]
                row = rows[stage]
                counts = kind in COUNTED and made.first + microbatch in gathers[stage]
                if parameters and (counts or kind in COMPUTES) and stage not in gathered:
                    gathered.add(stage)
                    lane.now += parameters[stage]
                    lane.most(0)
                if kind in (Kind.F, Kind.R):
                    lane.most(row.forward)
                elif kind in (Kind.B, Kind.I):
                    lane.most(row.backward)
                    if stage in lacking:
                        lane.now += gradients[stage]
                        lacking.remove(stage)
                for slot in writes:
                    lane.add(value_of(values[slot]), rows)
                if parameters and (call, microbatch) in last[stage]:
                    gathered.remove(stage)
                    lane.now -= parameters[stage]
                if parameters and kind is Kind.G:
                    lane.now -= gradients[stage]
            case Send(slot, to, _):
                lanes[to].add(value_of(values[slot]), rows)
            case Free(slots):
                for slot in slots:
                    lane.drop(value_of(values[slot]))
    return [lane.peak for lane in lanes]


class _DeviceMemory:
    """The values on one device, their bytes, and the peak so far."""

    def __init__(self) -> None:
        self.held: dict[Value, Contents] = {}
        self.holders: Counter[Hashable] = Counter()
        self.now = self.peak = 0

    def most(self, extra: int) -> None:
        self.peak = max(self.peak, self.now + extra)

    def add(self, value: Value, rows: Sequence[Measured]) -> None:
        self.held[value] = contents = _contents(value, rows)
        for key, size in contents.items():
            if not self.holders[key, value.microbatch]:
                self.now += size
            self.holders[key, value.microbatch] += 1
        self.most(0)

    def drop(self, value: Value) -> None:
        for key, size in self.held.pop(value).items():
            self.holders[key, value.microbatch] -= 1
            if not self.holders[key, value.microbatch]:
                self.now -= size


def _contents(value: Value, rows: Sequence[Measured]) -> Contents:
    row = rows[min(value.stage, len(rows) - 1)]
    match value.role:
        case Role.INPUT:
            return row.inputs
        case Role.ACT:
            return row.outputs
        case Role.SKIP:
            return row.stash[value.name]
        case Role.RESIDUAL:
            return {**row.held(), (value.role, value.stage): row.inner}
        case Role.GRAD:
            return {(value.role, value.stage): row.gradient}
        case Role.SKIP_GRAD:
            return {(value.role, value.name, value.peer): sum(row.stash[value.name].values())}
        case Role.WEIGHT_RESIDUAL:
            return {
                **row.weights.kept,
                (value.role, value.stage): row.weights.inner + row.weights.gradients,
            }
        case _:
            return {}


def _nothing(params: Any, x: Any) -> Any:
    raise AssertionError("this stage only serves to count memory and must not run")
