"""Timelines, simulated or measured, and the result of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any, NamedTuple

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
from funcpipe._src.data.arrows import Arrow
from funcpipe._src.data.cost import Cost, PerStage
from funcpipe._src.data.exchange import Exchange, alone
from funcpipe._src.data.kinds import MOVES, Kind
from funcpipe._src.data.measured_cost import cost_of
from funcpipe._src.data.overlapping import time_worked
from funcpipe._src.data.schedule import Action
from funcpipe._src.data.trace import chrome_trace

NEGLIGIBLE = 0.01
"""Smaller imbalances are not mentioned."""


class Span(NamedTuple):
    """One action in time.

    Attributes:
        device: the lane that ran it.
        start, end: in the timeline's unit, from the start of the first action of all.
        action: what ran.
    """

    device: int
    start: float
    end: float
    action: Action


@dataclass(frozen=True)
class Timeline:
    """Spans in time, simulated or measured: one type for both. Compares, hashes and pickles.

    Attributes:
        spans: every action, by start.
        num_devices: how many lanes.
        peak: the most memory held in residuals, one number per device, in the unit of
            `Cost.residual` (measured timelines count residuals).
        unit: of the times: "units" of a cost, or "s" where measured.
        comm: the latency between devices that the times include, as in `Cost`.
        name: what it is a timeline of.
        memory: for each device what it holds over time, as steps ``(from when, how much)``; its
            maximum is the peak.
        lanes: what each device is called in pictures; () for "device 0", "device 1", ...
        path: the critical path where it is known, as `simulate` knows it.
        stages: the names of the stages, for traces; () where they are not known. Not compared.
        arrows: which actions hand values to which, for the arrows of traces; likewise.
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
        """End of the last action of one isolated batch."""
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def span(self) -> float:
        """The longest time that a device is between its first start and last end.

        The steady-state cost of the zero-bubble papers, where one batch follows the other without a
        barrier.
        """
        first, last = [float("inf")] * self.num_devices, [0.0] * self.num_devices
        for device, start, end, _ in self.spans:
            first[device], last[device] = min(first[device], start), max(last[device], end)
        return max((b - a for a, b in zip(first, last, strict=True) if b >= a), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time that each device works; O, L and G are the work of its links. Where two overlap it
        works once."""
        return time_worked(self.spans, self.num_devices)

    @property
    def bubble(self) -> float:
        """The share of the makespan in which the busiest device waits: ``1 - max(busy) /
        makespan``.

        What the schedule loses. The other devices may wait for longer: see `idle`.
        """
        return 1.0 - max(self.busy, default=0.0) / self.makespan if self.makespan else 0.0

    @property
    def span_bubble(self) -> float:
        """The same where batches follow each other: ``1 - max(busy) / span``."""
        return 1.0 - max(self.busy, default=0.0) / self.span if self.span else 0.0

    @property
    def idle(self) -> float:
        """The share of all device time in which devices do not work: ``1 - sum(busy) / (num_devices
        * makespan)``.

        Never less than the bubble, and equal to it where all devices work as long.
        """
        return 1.0 - fmean(self.busy) / self.makespan if self.makespan else 0.0

    @property
    def imbalance(self) -> float:
        """What devices lose by unequal work: ``1 - mean(busy) / max(busy)``, whatever the makespan.

        With the bubble it makes all that is idle: ``1 - idle == (1 - bubble) * (1 - imbalance)``.
        Equal work at the same bubble would shorten the makespan, and the span, by this share: the
        most that `balance` wins there. Mostly the bubble grows as the work becomes equal, and the
        win is smaller; simulate equal stages to see it.

        >>> slow = fp.typing.Span(0, 0.0, 4.0, fp.Action.parse("0F0"))
        >>> fast = fp.typing.Span(1, 6.0, 8.0, fp.Action.parse("1F0"))
        >>> timeline = fp.Timeline((slow, fast), 2)
        >>> timeline.bubble, timeline.idle, timeline.imbalance
        (0.5, 0.625, 0.25)
        """
        longest = max(self.busy, default=0.0)
        return max(0.0, 1.0 - fmean(self.busy) / longest) if longest else 0.0

    @cached_property
    def critical_path(self) -> tuple[Action, ...]:
        """The chain of actions, each starting when the one before lets it, that ends with the last
        action.

        Of a measured timeline it is what the spans look like: along stages, devices and links to
        the host; a wait for a skip or a slot is not followed.
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
        """All durations of each (kind, stage), in order of start."""
        out: dict[tuple[Kind, int], list[float]] = defaultdict(list)
        for span in self.spans:
            out[span.action.kind, span.action.stage].append(span.end - span.start)
        return {key: tuple(values) for key, values in out.items()}

    def cost(self, *, handover: bool = False) -> Cost:
        """The mean time of each kind on each stage, to simulate with: what the actions took,
        without the waiting.

        Of what a stage did not run, B is I and W together, I and W are half of B each, R is F; O,
        L, G, U and S are nothing. The slices of a microbatch count together; `Cost.slice_times` has
        the time of each slice. If an action overlaps with another one, its time counts only for
        stages where the kind never runs alone.

        >>> first = fp.typing.Span(0, 0.0, 1.0, fp.Action.parse("0F0"))
        >>> second = fp.typing.Span(0, 1.5, 4.5, fp.Action.parse("0F1"))
        >>> timeline = fp.Timeline((first, second), 1)
        >>> timeline.cost().forward, timeline.cost(handover=True).forward
        ((2.0,), (2.5,))

        Args:
            handover: count what a measured timeline has between actions, too. What passes on a
                device between two of them, though all was there, is time of the second (the median
                of its kind and stage): the host's. And ``comm`` is the median of what passes from
                the end of an action to the start of the one on another device that waits for it:
                the hop, with waking up.

        Returns:
            A cost with one number per stage, in the timeline's unit; ``comm`` is one number, or the
            timeline's.
        """
        return cost_of(self, handover=handover)

    def to_chrome_trace(self, path: Any) -> None:
        """Write the timeline as a trace that Perfetto and chrome://tracing open.

        Args:
            path: of the JSON file; written anew.
        """
        import json
        from pathlib import Path

        Path(path).write_text(json.dumps(self.chrome_trace(), separators=(",", ":")))

    def chrome_trace(self) -> dict[str, Any]:
        """The trace as data: complete events ("X") in microseconds, one thread per device; what it
        holds as a counter.

        One unit of a simulated timeline is shown as a millisecond. O, L, G and U are on threads of
        their own. Arrows (flow events) lead from what makes a value to what reads it on another
        device, or pops it.
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


def percent(share: float) -> str:
    """A share for people to read; rounding errors may have left it a hair below 0."""
    return f"{max(0.0, share):.1%}"


def imbalance_of(timeline: Timeline) -> str:
    """The imbalance and what balancing wins, in words; "" where it is negligible, or where lanes
    are not devices."""
    if timeline.lanes or timeline.imbalance < NEGLIGIBLE:
        return ""
    share = percent(timeline.imbalance)
    return (
        f"imbalance {share}: equal work on all devices would save {share} of the makespan at the "
        "same bubble"
    )


def shares(timeline: Timeline) -> str:
    """The bubble, the idle share and the imbalance, in a line."""
    bubbles = f"bubble {percent(timeline.bubble)} of the makespan"
    if timeline.span != timeline.makespan:
        bubbles += f", {percent(timeline.span_bubble)} of the span"
    idle = f"idle {percent(timeline.idle)} of all device time"
    return "; ".join(part for part in (bubbles, idle, imbalance_of(timeline)) if part)


class Loss(NamedTuple):
    """What a loss function may return when a plain mean is not enough.

    Attributes:
        sum: the sum over what counts, a 0-dim tensor; with ``weight=None`` the mean over the
            microbatch.
        weight: how much counts (rows, tokens): the batch's loss is all sums over all weights.
        aux: anything else to hand back, any tree; `Result.aux` has one per microbatch.
    """

    sum: Any
    weight: Any = None
    aux: Tree = None


@dataclass(frozen=True)
class RunStats:
    """How a run went.

    Attributes:
        executor: "threads", "serial", "graph" (it was played) or "sequential" (the oracle).
        reason: why this executor, where it was not asked for.
        threads_per_lane: intra-op threads of each lane.
        num_microbatches: how many microbatches had rows.
        seconds: from the first action to the last, by the wall clock.
        slots: the most values that lay in each pool at a time, in the order of the program's pools;
            of `ranks` in those of this process, once they are read, and 0 in others.
        began: when the timeline's first action began, in seconds of ``time.perf_counter``; 0 where
            none was measured.
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


@dataclass(frozen=True, eq=False)
class Result:
    """What a run gives back. Everything is detached; nothing of it is written into your tensors.

    Attributes:
        loss: of the whole batch, a 0-dim tensor on the last device; None without a loss.
        weight: what the loss was divided by; None: by nothing, it is the sum of the microbatches'
            sums.
        losses: of each microbatch, its mean (where the loss is a sum, its sum).
        aux: what the loss function handed back, one tree per microbatch.
        grads: one tree per stage, as params: None where not trainable, zeros where unused. None
            without backwards, and of `run_batches`, which spends them.
        unused: (stage, path) of trainable leaves that no backward reached.
        state: the new state, one tree per stage, always the full tuple.
        outputs: of the last stage, merged over microbatches; None unless the plan returns outputs.
        timeline: measured, with ``record=True``.
        stats: how the run went.
        loss_scale: what the gradients (not the loss) were multiplied by.
        ties: of the plan: groups of (stage, path) that are one parameter.
        exchange: what other processes have to say of the result, where it is of `ranks`.
        norm: of the gradients of all stages before clipping, as `step` gives it; None where the run
            stepped nothing.
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

    @property
    def facts(self) -> Facts:
        """What there is in it, in words."""
        stats, timeline = self.stats, self.timeline
        loss = "" if self.loss is None else number_of(self.loss)
        return [
            (
                "loss",
                f"{loss} of weight {self.weight:g}" if loss and self.weight is not None else loss,
            ),
            (
                "microbatches",
                f"{stats.num_microbatches} by {stats.executor} in {stats.seconds:.3g} s",
            ),
            ("gradients", amount_of(self.grads)),
            ("loss scale", "" if self.loss_scale == 1.0 else f"{self.loss_scale:g}"),
            ("unused", named(len(self.unused), "leaf").replace("leafs", "leaves")),
            ("state", amount_of(self.state)),
            ("outputs", shapes_of(self.outputs)),
            (
                "timeline",
                ""
                if timeline is None
                else f"{len(timeline.spans)} actions in {timeline.makespan:.3g} s",
            ),
        ]

    @guarded
    def __repr__(self) -> str:
        return line("Result", self.facts)

    @shown
    def _repr_html_(self) -> str:
        return page("Result", self.facts, "" if self.timeline is None else picture(self.timeline))

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled: the processes it came from are not."""
        return {**declared_fields(self), "exchange": alone}

    @cached_property
    def finite(self) -> bool:
        """Are the loss and all gradients finite. Looked up when asked, once; waits for the devices.

        Of a result of `ranks` it is about the gradients of all ranks, and all ask for it together.
        """
        numbers = [leaf for leaf in flatten((self.loss, self.grads))[0] if is_differentiable(leaf)]
        return self.exchange.finite("result.finite", numbers)
