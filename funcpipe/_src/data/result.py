"""Timelines, simulated or measured, and the result of a run.

These are data. `view/` draws them, `measured_cost.py` computes costs from them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any, NamedTuple

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.notebook import page, picture, shown
from funcpipe._src.core.remembered import declared_fields
from funcpipe._src.core.shown import (
    Facts,
    amount_of,
    guarded,
    line,
    named,
    number_of,
    shapes_of,
    some,
)
from funcpipe._src.core.tree import Tree, flatten, is_differentiable
from funcpipe._src.data.cost import Cost, PerStage
from funcpipe._src.data.exchange import Exchange, alone
from funcpipe._src.data.kinds import MOVES, Kind
from funcpipe._src.data.measured_cost import cost_of
from funcpipe._src.data.overlapping import time_worked
from funcpipe._src.data.schedule import Action
from funcpipe._src.data.trace import Arrow, chrome_trace

NEGLIGIBLE = 0.01
"""Pictures and reports do not mention smaller imbalances."""


class Span(NamedTuple):
    """One action with its device, start and end.

    >>> span = fp.typing.Span(0, 1.0, 3.0, fp.Action.parse("0F1"))
    >>> span.end - span.start
    2.0

    Attributes:
        device: the index of the device that ran the action.
        start: the start in the timeline's unit; the first action of all starts at 0.
        end: the end in the timeline's unit.
        action: the action.
    """

    device: int
    start: float
    end: float
    action: Action


@dataclass(frozen=True)
class Timeline:
    """The start and end of each action, simulated or measured.

    `simulate` returns a timeline, and `run` measures one with ``record=True``. Timelines compare,
    hash and pickle.

    >>> timeline = fp.simulate(fp.schedules.one_f_one_b(2, 4))
    >>> timeline.makespan, timeline.busy
    (15.0, (12.0, 12.0))

    Attributes:
        spans: all actions, ordered by start.
        num_devices: the number of devices.
        peak: the most memory of each device at a time, in the unit of `Cost.residual`. Measured
            timelines count residuals. (): not known.
        unit: the unit of the times: "units" of a cost, or "s" in measured timelines.
        comm: the latency between devices that the times include, as in `Cost`.
        name: the name in pictures.
        memory: for each device its memory over time, as steps ``(start, amount)``. The maximum is
            the peak. (): not known.
        lanes: the name of each device in pictures; (): "device 0", "device 1", ...
        path: the critical path as `simulate` found it; (): not known.
        stages: the names of the stages, for traces; (): not known. Not compared.
        arrows: the values that actions send to each other, for the arrows in traces; (): not known.
            Not compared.
    """

    spans: tuple[Span, ...]
    num_devices: int
    peak: tuple[float, ...] = ()
    unit: str = "units"
    comm: PerStage = 0.0
    name: str = ""
    memory: tuple[tuple[tuple[float, float], ...], ...] = ()
    lanes: tuple[str, ...] = ()
    path: tuple[Action, ...] = ()
    stages: tuple[str, ...] = field(default=(), compare=False)
    arrows: tuple[Arrow, ...] = field(default=(), compare=False)

    __getstate__ = declared_fields

    @cached_property
    def makespan(self) -> float:
        """The end of the last action of one isolated batch."""
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def span(self) -> float:
        """The longest time of a device from its first start to its last end.

        If batches follow each other without a barrier, the span is the time per batch: the
        steady-state cost of the zero-bubble papers (arXiv 2401.10241).
        """
        first, last = [float("inf")] * self.num_devices, [0.0] * self.num_devices
        for device, start, end, _ in self.spans:
            first[device], last[device] = min(first[device], start), max(last[device], end)
        return max((b - a for a, b in zip(first, last, strict=True) if b >= a), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The time that each device works.

        O, L, G and U do not count, because they occupy links. Overlapping actions count once.
        """
        return time_worked(self.spans, self.num_devices)

    @property
    def bubble(self) -> float:
        """The share of the makespan in which the busiest device waits.

        The bubble is ``1 - max(busy) / makespan``: the loss by the schedule. Other devices may wait
        longer: see `idle`.

        Raises:
            PlanError: with `ranks`, the timeline has the lanes of one process only. This is so for
                `span_bubble`, `idle` and `imbalance`, too.
        """
        busy = with_all_lanes(self).busy
        return 1.0 - max(busy, default=0.0) / self.makespan if self.makespan else 0.0

    @property
    def span_bubble(self) -> float:
        """The bubble if batches follow each other without a barrier: ``1 - max(busy) / span``."""
        return 1.0 - max(with_all_lanes(self).busy, default=0.0) / self.span if self.span else 0.0

    @property
    def idle(self) -> float:
        """The share of all device time in which devices do not work.

        This is ``1 - sum(busy) / (num_devices * makespan)``. It is at least the bubble, and equal
        to the bubble if all devices work equally long.
        """
        return 1.0 - fmean(with_all_lanes(self).busy) / self.makespan if self.makespan else 0.0

    @property
    def imbalance(self) -> float:
        """The loss by unequal work of the devices: ``1 - mean(busy) / max(busy)``.

        With equal work and the same bubble, the makespan and the span would be shorter by this
        share. So the imbalance is an upper bound on the gain of `fp.models.balance` at this bubble.
        Usually the bubble grows as the work becomes equal; simulate equal stages to see the gain.
        Bubble and imbalance together give the idle time: ``1 - idle == (1 - bubble) * (1 -
        imbalance)``.

        >>> slow = fp.typing.Span(0, 0.0, 4.0, fp.Action.parse("0F0"))
        >>> fast = fp.typing.Span(1, 6.0, 8.0, fp.Action.parse("1F0"))
        >>> timeline = fp.Timeline((slow, fast), 2)
        >>> timeline.bubble, timeline.idle, timeline.imbalance
        (0.5, 0.625, 0.25)
        """
        longest = max(with_all_lanes(self).busy, default=0.0)
        return max(0.0, 1.0 - fmean(self.busy) / longest) if longest else 0.0

    @cached_property
    def critical_path(self) -> tuple[Action, ...]:
        """The chain of actions that ends with the last action, each waiting for the one before.

        For a measured timeline, the chain is derived from the spans: it follows stages, devices and
        links to the host. It does not follow a wait for a skip or a slot.
        """
        if self.path or not self.spans:
            return self.path
        spans = {span.action: span for span in self.spans}
        before: dict[Action, Span | None] = {}
        last_on: dict[int, Span] = {}
        for span in self.spans:
            before[span.action] = last_on.get(span.device)
            if span.action.kind not in MOVES:
                last_on[span.device] = span
        span: Span | None = max(self.spans, key=lambda last: last.end)
        path: list[Action] = []
        visited: set[Action] = set()  # spans from a file may contradict themselves
        while span is not None:
            path.append(span.action)
            visited.add(span.action)
            previous = before[span.action]
            needs = [
                other for need in span.action.needs() if (other := spans.get(need)) is not None
            ]
            # The action started when the latest of these ended: that one is before it on the path.
            choices = [(previous.end, previous)] if previous is not None else []
            choices += [(other.end + self._latency(other, span), other) for other in needs]
            choices = [choice for choice in choices if choice[1].action not in visited]
            span = max(choices, key=lambda choice: choice[0])[1] if choices else None
        return tuple(reversed(path))

    def _latency(self, source: Span, target: Span) -> float:
        if source.device == target.device:
            return 0.0
        return Cost(comm=self.comm).latency(source.action.stage, target.action.stage)

    @cached_property
    def by_kind(self) -> Mapping[tuple[Kind, int], tuple[float, ...]]:
        """All durations of each (kind, stage), ordered by start."""
        out: dict[tuple[Kind, int], list[float]] = defaultdict(list)
        for span in self.spans:
            out[span.action.kind, span.action.stage].append(span.end - span.start)
        return {key: tuple(values) for key, values in out.items()}

    def cost(self, *, handover: bool = False, microbatches: bool = False) -> Cost:
        """Return the mean time of each kind on each stage, without waiting, to simulate with.

        For kinds that a stage did not run, B is the sum of I and W, I and W are half of B, and R is
        F. Times of O, L, G, U and S are then 0. Slices of a microbatch are added;
        `Cost.slice_times` has the time of each slice. Actions that overlap with another action
        count only if the stage never ran the kind alone.

        >>> first = fp.typing.Span(0, 0.0, 1.0, fp.Action.parse("0F0"))
        >>> second = fp.typing.Span(0, 1.5, 4.5, fp.Action.parse("0F1"))
        >>> timeline = fp.Timeline((first, second), 1)
        >>> timeline.cost().forward, timeline.cost(handover=True).forward
        ((2.0,), (2.5,))

        Args:
            handover: also count the time between the actions of a measured timeline. The median
                host time before a kind of action of a stage is added to its time: the time from the
                previous action of the device, if no value was missing. And ``comm`` is the median
                time of a hop: from the end of an action to the start of an action on another device
                that waited for it. Default: False.
            microbatches: also return the time factor of each microbatch, as
                `Cost.microbatches`. Their mean is 1. Such a cost fits schedules of as many
                microbatches only. Default: False.

        Returns:
            A cost with one number per stage, in the timeline's unit. Its ``comm`` is the hop's
            time, or the timeline's ``comm``. Memory is not measured: its fields are the defaults,
            and ``microbatch_sizes`` are 1.
        """
        return cost_of(self, handover=handover, microbatches=microbatches)

    def to_chrome_trace(self, path: Any) -> None:
        """Write the timeline as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

        Args:
            path: the path of the JSON file. An existing file is replaced.
        """
        import json
        from pathlib import Path

        Path(path).write_text(json.dumps(self.chrome_trace(), separators=(",", ":")))

    def chrome_trace(self) -> dict[str, Any]:
        """Return the trace as data that `json.dumps` can write.

        Each device is a thread of complete events ("X") in microseconds; its memory is a counter.
        One unit of a simulated timeline is shown as a millisecond. O, L, G and U have their own
        threads. Flow events (arrows) connect the action that makes a value with the action that
        reads it on another device, or pops it.
        """
        return chrome_trace(self)

    def __str__(self) -> str:
        head = f"{self.name or 'timeline'}: {len(self.spans)} actions on {self.num_devices} devices"
        makespan, span = (f"{time:.6g} {self.unit}" for time in (self.makespan, self.span))
        times = f"makespan {makespan}" + (f", span {span}" if span != makespan else "")
        peak = (
            f"peak {some((f'{amount:g}' for amount in self.peak), most=8)} residuals"
            if self.peak
            else ""
        )
        return "; ".join(part for part in (head, times, shares(self), peak) if part)

    @guarded
    def __repr__(self) -> str:
        return str(self)

    _repr_html_ = shown(picture)


def lanes_elsewhere(timeline: Timeline) -> str:
    """Say that lanes of other processes are missing in a measured timeline; "" if none is missing.

    Each device of a legal schedule runs actions, so a device without an action was not recorded.
    """
    here = sorted({span.device for span in timeline.spans})
    if timeline.unit != "s" or timeline.lanes or len(here) in (0, timeline.num_devices):
        return ""
    return (
        f"this timeline has the lanes of {named(len(here), 'device')} ({some(map(str, here))}) of "
        f"{timeline.num_devices}, because each rank records its own lanes; call "
        "ranks.timeline(result) on all ranks for the timeline of all lanes"
    )


def with_all_lanes(timeline: Timeline) -> Timeline:
    """Return a timeline that has all lanes. Raises PlanError if lanes of other processes are
    missing."""
    if fault := lanes_elsewhere(timeline):
        raise PlanError(fault)
    return timeline


def percent(share: float) -> str:
    """Return a share as a percentage. Rounding errors below 0 are shown as 0."""
    return f"{max(0.0, share):.1%}"


def imbalance_of(timeline: Timeline) -> str:
    """Say the imbalance and the possible gain; "" if it is negligible, or if lanes are not
    devices."""
    if timeline.lanes or timeline.imbalance < NEGLIGIBLE:
        return ""
    share = percent(timeline.imbalance)
    return (
        f"imbalance {share}: equal work on all devices would save {share} of the makespan at the "
        "same bubble"
    )


def shares(timeline: Timeline) -> str:
    """Say the bubble, the idle share and the imbalance in one line, or that lanes are missing."""
    if fault := lanes_elsewhere(timeline):
        return fault
    bubbles = f"bubble {percent(timeline.bubble)} of the makespan"
    if timeline.span != timeline.makespan:
        bubbles += f", {percent(timeline.span_bubble)} of the span"
    idle = f"idle {percent(timeline.idle)} of all device time"
    return "; ".join(part for part in (bubbles, idle, imbalance_of(timeline)) if part)


class Loss(NamedTuple):
    """The return value of a loss function that is not a plain mean over rows.

    The loss of the batch is the sum of all ``sum`` divided by the sum of all ``weight``.

    >>> def per_token(y, target):
    ...     counted = target >= 0
    ...     return fp.Loss((y * counted).sum(), counted.sum(), aux=y.max())
    >>> per_token(torch.tensor([1.0, 2.0]), torch.tensor([0, -1])).weight
    tensor(1)

    Attributes:
        sum: the loss summed over the microbatch, a 0-dim tensor; with ``weight=None`` the mean over
            the microbatch.
        weight: the number of summands (rows, tokens), a number or a 0-dim tensor. None: ``sum`` is
            a mean, and the microbatch counts by its rows.
        aux: any tree to return from the run; `Result.aux` has one per microbatch. Default: None.
    """

    sum: Any
    weight: Any = None
    aux: Tree = None


@dataclass(frozen=True)
class RunStats:
    """Facts about the execution of a run, in `Result.stats`.

    Attributes:
        executor: "threads", "serial", "graph" (a replayed recording) or "sequential" (the oracle).
        reason: why funcpipe chose this executor; "" if you chose it.
        threads_per_lane: the number of intra-op threads of each lane.
        num_microbatches: the number of microbatches with rows.
        seconds: the wall-clock time from the first action to the last.
        slots: the most values at a time in each pool, in the order of the program's pools. With
            `ranks`, only pools of this process are counted, and the others are 0.
        began: the start of the timeline's first action, in seconds of ``time.perf_counter``; 0
            without a measured timeline.
        first_microbatch: with replicas, the index of this replica's first microbatch in
            ``Result.losses``.
    """

    executor: str
    reason: str
    threads_per_lane: int
    num_microbatches: int
    seconds: float
    slots: tuple[int, ...] = ()
    began: float = 0.0
    first_microbatch: int = 0

    @guarded
    def __repr__(self) -> str:
        took = f"{named(self.num_microbatches, 'microbatch')} in {self.seconds:.3g} s"
        threads = f"{named(self.threads_per_lane, 'thread')} a lane"
        slots = f"at most {max(self.slots)} values in a pool of slots" if self.slots else ""
        who = f"{self.executor} ({self.reason})" if self.reason else self.executor
        return line("RunStats", [("", who), ("", took), ("", threads), ("", slots)])


class Carry(NamedTuple):
    """The carry of each stage after a run, in `Result.carry`, for the next run of the same rows.

    To change it, for example to drop the last tokens, give other trees: ``carry._replace(trees=...)``.

    Attributes:
        stages: the names of the stages.
        rows: the number of rows of each microbatch.
        trees: for each stage a tuple with one tree per microbatch. None for a stage without a
            carry, and for stages of other ranks.
    """

    stages: tuple[str, ...]
    rows: tuple[int, ...]
    trees: tuple[tuple[Tree, ...] | None, ...]


@dataclass(frozen=True, eq=False)
class Result:
    """The result of a run: the loss, the gradients, the new state and the outputs.

    All tensors are detached. A run does not write into your tensors: `step` applies the gradients.

    >>> stage = fp.stage(lambda w, x: w * x)
    >>> loss = torch.nn.functional.mse_loss
    >>> plan = fp.make_plan([stage], fp.schedules.one_f_one_b(1, 2), loss=loss, devices="cpu")
    >>> w, x = torch.ones(1, requires_grad=True), torch.ones(4)
    >>> result = fp.run(plan, (w,), (x, 3 * x))
    >>> result.loss, result.grads
    (tensor(4.), (tensor([-4.]),))

    Attributes:
        loss: the loss of the whole batch, a 0-dim tensor on the last device; None without a loss.
        weight: the divisor of the loss. None: no divisor, the loss is the sum over microbatches.
        losses: the mean loss of each microbatch, or its sum if the loss is a sum.
        aux: the ``aux`` that the loss function returned, one tree per microbatch.
        grads: one tree per stage, structured as the params. None for leaves that are not trainable,
            zeros for unused leaves. The whole is None without backwards, and after `run_batches`,
            which uses the gradients up.
        unused: (stage, path) of each trainable leaf that no backward reached. A tied leaf is unused
            only if all its stages leave it unused. `step` does not change unused leaves.
        state: the new state, a tuple with one tree for each stage.
        outputs: the outputs of the last stage, merged over the microbatches; None unless the plan
            returns outputs.
        timeline: the measured timeline; None without ``record=True``.
        stats: facts about the execution.
        loss_scale: the factor of the gradients (not of the loss). Default: 1.
        ties: the ties of the plan: groups of (stage, path) that are one parameter.
        exchange: with `ranks`, the connection to the other processes; used by `finite` and `step`.
        norm: the norm of the gradients of all stages before clipping, as `step` returns it; None if
            the run did not step parameters.
        carry: the `typing.Carry` for the next run; None unless the plan has ``carry=True``.
    """

    loss: Any
    weight: float | None
    losses: tuple[Any, ...]
    aux: tuple[Tree, ...]
    grads: tuple[Tree, ...] | None
    unused: tuple[tuple[int, Any], ...]
    state: tuple[Tree, ...]
    outputs: Tree
    timeline: Timeline | None
    stats: RunStats
    loss_scale: float = 1.0
    ties: tuple[tuple[tuple[int, Any], ...], ...] = ()
    exchange: Exchange = field(default=alone, repr=False)
    norm: Any = None
    carry: Carry | None = None

    @property
    def facts(self) -> Facts:
        """The facts for ``repr`` and for notebooks, as (name, words)."""
        stats, timeline = self.stats, self.timeline
        loss = "" if self.loss is None else number_of(self.loss)
        if loss and self.weight is not None:
            loss += f" of weight {self.weight:g}"
        ran = f"{stats.num_microbatches} by {stats.executor} in {stats.seconds:.3g} s"
        recorded = ""
        if timeline is not None:
            recorded = f"{len(timeline.spans)} actions in {timeline.makespan:.3g} s"
        return [
            ("loss", loss),
            ("microbatches", ran),
            ("gradients", amount_of(self.grads)),
            ("loss scale", "" if self.loss_scale == 1.0 else f"{self.loss_scale:g}"),
            ("unused", named(len(self.unused), "leaf").replace("leafs", "leaves")),
            ("state", amount_of(self.state)),
            ("outputs", shapes_of(self.outputs)),
            ("carry", amount_of(self.carry and self.carry.trees)),
            ("timeline", recorded),
        ]

    @guarded
    def __repr__(self) -> str:
        return line("Result", self.facts)

    @shown
    def _repr_html_(self) -> str:
        return page("Result", self.facts, "" if self.timeline is None else picture(self.timeline))

    def __getstate__(self) -> dict[str, Any]:
        """Pickle all fields, but without the connection to other processes."""
        return {**declared_fields(self), "exchange": alone}

    @cached_property
    def finite(self) -> bool:
        """Whether the loss and all gradients are finite.

        The first access computes the answer and waits for the devices. With `ranks`, the answer
        includes the gradients of all ranks, and all ranks must read it together.
        """
        numbers = [leaf for leaf in flatten((self.loss, self.grads))[0] if is_differentiable(leaf)]
        return self.exchange.finite("result.finite", numbers)
