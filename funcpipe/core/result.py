"""What comes back: timelines of simulated and measured runs, and the result of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any, NamedTuple

from funcpipe.core.errors import ScheduleError, bullets
from funcpipe.core.schedule import Action, Kind
from funcpipe.core.tree import Tree, flatten, is_differentiable

PerStage = float | Sequence[float]
"""One number for all stages, or one for each."""


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
class Cost:
    """What actions cost: times in one unit of your choice, residuals in one unit of memory.

    Every number may be one for all stages, or a sequence with one per stage.

    Attributes:
        forward: time of F.
        backward_input: time of I.
        backward_weight: time of W.
        backward: time of B; None: the sum of I and W.
        remat: time of R; None: that of F.
        comm: latency of one hop between devices, from the end of an action to the start of what needs it; a number.
        residual: memory that F (or R) takes at its start, until B or W ends.
        weight_residual: what is left of it after I, until W ends. One half is the zero-bubble paper's figure
            (arXiv 2401.10241, table 1); traced programs measure 0.6 to 1.6 of ``residual``.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    backward: PerStage | None = field(default=None, kw_only=True)
    remat: PerStage | None = field(default=None, kw_only=True)
    comm: float = field(default=0.0, kw_only=True)
    residual: PerStage = field(default=1.0, kw_only=True)
    weight_residual: PerStage = field(default=0.5, kw_only=True)

    def __post_init__(self) -> None:
        faults: list[str] = []
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if value is None and name in ("backward", "remat"):
                continue
            if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) and name != "comm":
                value = tuple(value)
                object.__setattr__(self, name, value)
            for one in value if isinstance(value, tuple) else (value,):
                if not isinstance(one, (int, float)) or not 0 <= one < float("inf"):
                    faults.append(f"{name} is a number from 0, or a sequence of them; got {value!r}")
                    break
        if faults:
            raise ScheduleError(bullets("no such cost:", faults))

    def of(self, kind: Kind, stage: int) -> float:
        """Time of one action of this kind on this stage."""
        if kind is Kind.B and self.backward is None:
            return _pick(self.backward_input, stage) + _pick(self.backward_weight, stage)
        times = {
            Kind.F: self.forward,
            Kind.B: self.backward,
            Kind.I: self.backward_input,
            Kind.W: self.backward_weight,
            Kind.R: self.forward if self.remat is None else self.remat,
        }
        return _pick(times[kind] or 0.0, stage)

    def check_stages(self, num_stages: int) -> None:
        """Refuse sequences that do not have one number per stage. Raises ScheduleError."""
        faults = [
            f"{name} has {len(value)} numbers"
            for name in self.__dataclass_fields__
            if isinstance(value := getattr(self, name), tuple) and len(value) != num_stages
        ]
        if faults:
            raise ScheduleError(bullets(f"a cost has one number, or one for each of {num_stages} stages:", faults))


def per_stage(value: PerStage, num_stages: int) -> tuple[float, ...]:
    """The number of each stage."""
    return tuple(value) if isinstance(value, Sequence) else (value,) * num_stages


def _pick(value: PerStage, stage: int) -> float:
    return value[stage] if isinstance(value, Sequence) else value


@dataclass(frozen=True)
class Timeline:
    """Spans in time, simulated or measured: one type for both. Compares, hashes and pickles.

    Attributes:
        spans: every action, by start.
        num_devices: how many lanes.
        peak: the most memory held in residuals, one number per device, in the unit of `Cost.residual` (measured
            timelines count residuals).
        unit: of the times: "units" of a cost, or "s" where measured.
        comm: the latency between devices that the times include.
        name: what it is a timeline of.
    """

    spans: tuple[Span, ...]
    num_devices: int
    peak: tuple[float, ...] = ()
    unit: str = "units"
    comm: float = 0.0
    name: str = ""

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    @cached_property
    def makespan(self) -> float:
        """End of the last action of one isolated batch."""
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def span(self) -> float:
        """The longest time that a device is between its first start and last end.

        The steady-state cost of the zero-bubble papers, where one batch follows the other without a barrier.
        """
        first, last = [float("inf")] * self.num_devices, [0.0] * self.num_devices
        for device, start, end, _ in self.spans:
            first[device], last[device] = min(first[device], start), max(last[device], end)
        return max((b - a for a, b in zip(first, last, strict=True) if b >= a), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Time that each device works."""
        busy = [0.0] * self.num_devices
        for device, start, end, _ in self.spans:
            busy[device] += end - start
        return tuple(busy)

    @property
    def bubble(self) -> float:
        """Idle share of one isolated batch: ``1 - work / makespan``, work being that of the busiest device."""
        return 1.0 - max(self.busy, default=0.0) / self.makespan if self.makespan else 0.0

    @property
    def span_bubble(self) -> float:
        """Idle share in the steady state: ``(span - work) / span``."""
        return 1.0 - max(self.busy, default=0.0) / self.span if self.span else 0.0

    @cached_property
    def critical_path(self) -> tuple[Action, ...]:
        """The chain of actions, each starting when the one before lets it, that ends with the last action."""
        if not self.spans:
            return ()
        at = {span.action: span for span in self.spans}
        before: dict[Action, Span | None] = {}
        last_on: dict[int, Span] = {}
        for span in self.spans:
            before[span.action] = last_on.get(span.device)
            last_on[span.device] = span
        span: Span | None = max(self.spans, key=lambda one: one.end)
        path: list[Action] = []
        seen: set[Action] = set()
        while span is not None:
            path.append(span.action)
            choices = [(one.end, one) for one in [before[span.action]] if one is not None]
            seen.add(span.action)
            for need in _needs(span.action):
                other = at.get(need)
                if other is not None:
                    choices.append((other.end + (self.comm if other.device != span.device else 0.0), other))
            choices = [
                one for one in choices if one[1].action not in seen
            ]  # spans from a file may contradict themselves
            span = max(choices, key=lambda one: one[0])[1] if choices else None
        return tuple(reversed(path))

    @cached_property
    def by_kind(self) -> Mapping[tuple[Kind, int], tuple[float, ...]]:
        """All durations of each (kind, stage), in order of start."""
        out: dict[tuple[Kind, int], list[float]] = defaultdict(list)
        for span in self.spans:
            out[span.action.kind, span.action.stage].append(span.end - span.start)
        return {key: tuple(values) for key, values in out.items()}

    def cost(self) -> Cost:
        """The mean time of each kind on each stage, to simulate with: what the actions took, without the waiting.

        Of what a stage did not run, B is I and W together, I and W are half of B each, and R is F, as in `Cost`.

        >>> Timeline((Span(0, 0.0, 1.0, Action(Kind.F, 0, 0)), Span(0, 1.0, 4.0, Action(Kind.F, 0, 1))), 1).cost().forward
        (2.0,)

        Returns:
            A cost with one number per stage, in the timeline's unit; ``comm`` is the timeline's.
        """
        stages = range(1 + max((stage for _, stage in self.by_kind), default=-1))

        def mean(kind: Kind, otherwise: Sequence[float]) -> tuple[float, ...]:
            found = (self.by_kind.get((kind, stage)) for stage in stages)
            return tuple(fmean(times) if times else other for times, other in zip(found, otherwise, strict=True))

        forward = mean(Kind.F, [0.0] * len(stages))
        half = [time / 2 for time in mean(Kind.B, [0.0] * len(stages))]
        first, second = mean(Kind.I, half), mean(Kind.W, half)
        backward = mean(Kind.B, [a + b for a, b in zip(first, second, strict=True)])
        return Cost(forward, first, second, backward=backward, remat=mean(Kind.R, forward), comm=self.comm)

    def to_chrome_trace(self, path: Any) -> None:
        """Write the timeline as a trace that Perfetto and chrome://tracing open.

        Args:
            path: of the JSON file; written anew.
        """
        import json
        from pathlib import Path

        Path(path).write_text(json.dumps(self.chrome_trace()))

    def chrome_trace(self) -> dict[str, Any]:
        """The trace as data: complete events ("X") in microseconds, one thread per device.

        One unit of a simulated timeline is shown as a millisecond.
        """
        scale = 1e6 if self.unit == "s" else 1e3
        title = self.name or "funcpipe"
        events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}]
        for device in range(self.num_devices):
            events.append(
                {"ph": "M", "pid": 0, "tid": device, "name": "thread_name", "args": {"name": f"device {device}"}}
            )
            events.append(
                {"ph": "M", "pid": 0, "tid": device, "name": "thread_sort_index", "args": {"sort_index": device}}
            )
        for device, start, end, action in self.spans:
            kind, stage, microbatch = action
            args = {"stage": stage, "microbatch": microbatch, "kind": kind.name}
            events.append({"ph": "X", "pid": 0, "tid": device, "name": str(action), "cat": kind.value,
                           "ts": start * scale, "dur": (end - start) * scale, "args": args})  # fmt: skip
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def __str__(self) -> str:
        head = f"{self.name or 'timeline'}: {len(self.spans)} actions on {self.num_devices} devices"
        times = f"makespan {self.makespan:.6g} {self.unit}, span {self.span:.6g} {self.unit}"
        shares = f"bubble {self.bubble:.1%} of the makespan, {self.span_bubble:.1%} of the span"
        peak = f"peak {', '.join(f'{one:g}' for one in self.peak)} residuals" if self.peak else ""
        return "; ".join(part for part in (head, times, shares, peak) if part)

    __repr__ = __str__


def _needs(action: Action) -> list[Action]:
    """What an action waits for besides the device's earlier ones."""
    kind, stage, microbatch = action
    if kind is Kind.F:
        return [Action(Kind.F, stage - 1, microbatch)]
    if kind is Kind.B or kind is Kind.I:
        return [Action(Kind.B, stage + 1, microbatch), Action(Kind.I, stage + 1, microbatch)]
    return []


class Loss(NamedTuple):
    """What a loss function may return when a plain mean is not enough.

    Attributes:
        sum: the sum over what counts, a 0-dim tensor; with ``weight=None`` the mean over the microbatch.
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
        executor: "threads", "serial" or "sequential" (the oracle).
        reason: why this executor, where it was not asked for.
        threads_per_lane: intra-op threads of each lane.
        num_microbatches: how many microbatches had rows.
        seconds: from the first action to the last, by the wall clock.
        slots: the most values that lay in each pool at a time, in the order of the program's pools.
    """

    executor: str
    reason: str
    threads_per_lane: int
    num_microbatches: int
    seconds: float
    slots: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Result:
    """What a run gives back. Everything is detached; nothing of it is written into your tensors.

    Attributes:
        loss: of the whole batch, a 0-dim tensor on the last device; None without a loss.
        weight: what the loss was divided by.
        losses: of each microbatch, its mean.
        aux: what the loss function handed back, one tree per microbatch.
        grads: one tree per stage, as params: None where not trainable, zeros where unused. None without backwards.
        unused: (stage, path) of trainable leaves that no backward reached.
        state: the new state, one tree per stage, always the full tuple.
        outputs: of the last stage, merged over microbatches; None unless the plan returns outputs.
        timeline: measured, with ``record=True``.
        stats: how the run went.
        loss_scale: what the gradients (not the loss) were multiplied by.
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

    @cached_property
    def finite(self) -> bool:
        """Are the loss and all gradients finite. Looked up when asked, once; waits for the devices."""
        numbers = [leaf for leaf in flatten((self.loss, self.grads))[0] if is_differentiable(leaf)]
        return all(bool(leaf.isfinite().all()) for leaf in numbers)
