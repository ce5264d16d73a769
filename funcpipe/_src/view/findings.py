"""Compute the content of a report: headline, tables of stages, lanes and edges, and remarks.

The result is plain data; `report.py` formats it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.table import Table
from funcpipe._src.core.tree import Tree, leaves
from funcpipe._src.core.words import size_of
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.program import CALLER, spans
from funcpipe._src.data.result import NEGLIGIBLE, Result, RunStats, Timeline, percent
from funcpipe._src.data.schedule import Kind, Schedule, recounted
from funcpipe._src.data.stage import names_of
from funcpipe._src.lower.plan import program_for
from funcpipe._src.view import summary
from funcpipe._src.view.memory_levels import Levels, count_residuals, spans_by_device
from funcpipe._src.view.simulate import simulate, sliced

_SHORT = 100e-6  # seconds. With shorter actions, two Python threads cost more time than they save
_UNEVEN = 1.2
"""The ratio of work between the busiest and the idlest lane above which the report remarks it."""
_TIMES = ("forward", "backward_input", "backward_weight", "backward", "remat", "offload")
"""The fields of `Cost` that are times of computing or of moves."""


@dataclass(frozen=True)
class Findings:
    """The content of a report: plain data without tensors."""

    title: str  # the title of the run
    headline: tuple[tuple[str, str], ...]  # (name, value) of the most important facts
    measured: Timeline  # the measured timeline
    # The simulated timeline of the schedule, with the mean measured time of each kind and stage.
    simulated: Timeline
    note: str  # the reason for the difference of the two timelines
    held: Levels  # the number of residuals of each lane over time; empty without backwards
    tables: tuple[Table, ...]  # the tables of stages, lanes, and values between lanes
    remarks: tuple[str, ...]  # advice, one or two sentences each


def findings(plan: Plan, result: Result, params: Sequence[Tree] | None, title: str) -> Findings:
    """Compute the content of a report.

    Raises PlanError if the run was not recorded, or if the result or the parameters belong to
    another plan.
    """
    measured, stats = result.timeline, result.stats
    if measured is None:
        raise PlanError(
            "the run was not recorded, so there is nothing to report; use fp.run(..., record=True)"
        )
    schedule = plan.schedule.first(stats.num_microbatches)
    ran = [[span.action for span in lane] for lane in spans_by_device(measured, schedule)]
    if tuple(recounted(tuple(order)) for order in ran) != schedule.orders:
        raise PlanError(
            f"the timeline of this result has {sum(map(len, ran))} actions of {measured.name!r} on "
            f"{measured.num_devices} lanes, but the plan is {plan.schedule!r}; pass the plan of the "
            "run. If the run had several processes, its timeline has the lanes of one process: "
            "pass dataclasses.replace(result, timeline=ranks.timeline(result))"
        )
    if params is not None and len(params) != plan.num_stages:
        raise PlanError(
            f"params has {len(params)} trees, the plan has {plan.num_stages} stages; give the "
            "params of the run"
        )
    simulated = replace(simulate(schedule, sliced(plan, measured.cost())), unit=measured.unit)
    return Findings(
        summary.clean(title) or f"a run of {summary.clean(schedule.name)}",
        _headline(plan, result, measured, simulated),
        measured,
        simulated,
        _note(stats, measured),
        count_residuals(schedule, measured) if schedule.has_backward else (),
        (
            _stages(plan, params, measured),
            _lanes(plan, result, measured, simulated),
            _edges(plan, stats),
        ),
        tuple(_remarks(plan, result, measured, simulated)),
    )


def _headline(
    plan: Plan, result: Result, measured: Timeline, simulated: Timeline
) -> tuple[tuple[str, str], ...]:
    stats, times = result.stats, summary.time_text(measured)
    makespan = measured.makespan or 1.0
    longer = measured.makespan - simulated.makespan
    busy = max(measured.busy)
    imbalance = percent(measured.imbalance) if measured.imbalance >= NEGLIGIBLE else ""
    facts = {
        "schedule": summary.clean(plan.schedule.name),
        "stages": str(plan.num_stages),
        "lanes": str(plan.num_devices),
        "microbatches": str(stats.num_microbatches),
        "executor": stats.executor,
        "because": summary.clean(stats.reason),
        "threads per lane": str(stats.threads_per_lane),
        "loss": "" if result.loss is None else f"{float(result.loss):.6g}",
        "wall clock": summary.time_text_to(stats.seconds, "s")(stats.seconds),
        "makespan, measured": times(measured.makespan),
        "makespan, simulated": times(simulated.makespan),
        "difference": f"{times(longer)} ({longer / makespan:.1%} of the measured)",
        "bubble, measured": percent(measured.bubble),
        "bubble, simulated": percent(simulated.bubble),
        "idle, measured": percent(measured.idle),
        "idle, simulated": percent(simulated.idle),
        "imbalance, measured": imbalance,
        "busiest lane": f"{measured.busy.index(busy)} ({times(busy)}, {busy / makespan:.1%})",
    }
    if stats.num_microbatches < plan.num_microbatches:
        facts["microbatches"] += f" of {plan.num_microbatches}"
    return tuple((name, value) for name, value in facts.items() if value)


def _note(stats: RunStats, measured: Timeline) -> str:
    """What the difference between the two timelines is."""
    reason = "the difference is hand-over, waiting, and the spread of the measured times"
    if stats.executor == "serial" and measured.num_devices > 1:
        reason = (
            "measured: one thread ran all lanes in turn, so most of the difference is that they "
            "do not overlap"
        )
    return (
        "simulated: each action takes the mean measured time of its kind and stage, and hands "
        f"over in no time; {reason}"
    )


def _stages(plan: Plan, params: Sequence[Tree] | None, measured: Timeline) -> Table:
    """For each stage its size, the mean and the total time of each kind, and its share of its
    lane's work."""
    by_kind, homes = measured.by_kind, plan.schedule.device_of
    mean = summary.time_text_to(max(map(fmean, by_kind.values()), default=0.0), measured.unit)
    total = summary.time_text_to(max(map(sum, by_kind.values()), default=0.0), measured.unit)
    columns: dict[str, Iterable[object]] = {
        "stage": range(plan.num_stages),
        "name": [summary.clean(stage.name) for stage in plan.stages],
        "lane": homes,
    }
    if params is not None:
        tensors = [leaves(tree) for tree in params]
        counts = [sum(tensor.numel() for tensor in stage) for stage in tensors]
        sizes = [
            sum(tensor.numel() * tensor.element_size() for tensor in stage) for stage in tensors
        ]
        columns |= {"parameters": [f"{count:,}" for count in counts], "bytes": map(size_of, sizes)}
    work = [0.0] * plan.num_stages
    for kind in summary.kinds_in(measured):
        times = [by_kind.get((kind, stage), ()) for stage in range(plan.num_stages)]
        means = [mean.fixed(fmean(some)) if some else "" for some in times]
        totals = [total.fixed(sum(some)) if some else "" for some in times]
        columns[f"{kind.value} mean, {mean.unit}"] = means
        columns[f"{kind.value} total, {total.unit}"] = totals
        work = [before + sum(some) for before, some in zip(work, times, strict=True)]
    columns["of its lane"] = [
        percent(time / (measured.busy[lane] or 1.0)) for time, lane in zip(work, homes, strict=True)
    ]
    return Table.of_columns("Stages", columns, words=("stage", "name"))


def _devices(plan: Plan, result: Result) -> list[str]:
    """The torch device of each lane: the plan's, else the gradients'; "" where neither is known."""
    if plan.devices is not None:
        return [summary.clean(str(device)) for device in plan.devices]
    devices = [""] * plan.num_devices
    for stage, lane in enumerate(plan.schedule.device_of):
        for gradient in leaves(result.grads[stage]) if result.grads else ():
            devices[lane] = str(gradient.device)
    return devices


def _lanes(plan: Plan, result: Result, measured: Timeline, simulated: Timeline) -> Table:
    """For each lane how much it works, measured and simulated, and its peak."""
    times, lanes = summary.time_text(measured), range(plan.num_devices)
    makespan, shortest = measured.makespan or 1.0, simulated.makespan or 1.0
    homes = plan.schedule.device_of
    columns: dict[str, Iterable[object]] = {
        "lane": lanes,
        "device": _devices(plan, result),
        "stages": [
            _ranges(stage for stage, home in enumerate(homes) if home == lane) for lane in lanes
        ],
        "actions": map(len, spans_by_device(measured)),
        f"busy, {times.unit}": map(times.fixed, measured.busy),
        "busy": [percent(busy / makespan) for busy in measured.busy],
        "idle": [percent(1 - busy / makespan) for busy in measured.busy],
        "idle, simulated": [percent(1 - busy / shortest) for busy in simulated.busy],
        "residuals": summary.side_columns(measured)[1],
    }
    return Table.of_columns("Lanes", columns, words=("lane", "device", "stages"))


def _edges(plan: Plan, stats: RunStats) -> Table:
    """Return the table of edges: for each role of values, the slots and the most in use."""
    pools = program_for(plan, stats.num_microbatches).pools
    columns: dict[str, Iterable[object]] = {
        "from": ["caller" if pool.source == CALLER else f"lane {pool.source}" for pool in pools],
        "to": [f"lane {pool.lane}" for pool in pools],
        "value": [pool.role.value for pool in pools],
        "most at a time": stats.slots,
        "slots": [pool.slots for pool in pools],
    }
    return Table.of_columns("Values between lanes", columns, words=("from", "to", "value"))


def _remarks(plan: Plan, result: Result, measured: Timeline, simulated: Timeline) -> Iterable[str]:
    """Yield the remarks: an observation, its meaning, and what to do."""
    stats = result.stats
    yield from _short_actions(measured)
    yield from _unequal(plan.schedule.first(stats.num_microbatches), measured, simulated)
    if result.unused:
        names = names_of(plan.stages)
        paths = ", ".join(f"{key!r} of {names[stage]}" for stage, key in result.unused)
        yield (
            f"No backward reached these trainable leaves: {summary.clean(paths)}. Use them, or "
            "freeze them."
        )
    if stats.executor == "serial" and plan.num_devices > 1:
        yield (
            f"One thread ran all {plan.num_devices} lanes ({summary.clean(stats.reason)}): the "
            "simulated timeline is what lanes that run at a time would take."
        )
    if stats.num_microbatches < plan.num_microbatches:
        yield (
            f"The batch had rows for {stats.num_microbatches} of the plan's "
            f"{plan.num_microbatches} microbatches; the bubble is larger for it."
        )
    if any(device and not device.startswith("cpu") for device in _devices(plan, result)):
        yield (
            "Some lanes are not CPUs: times are those of the host, which may be ahead of the "
            "device."
        )


def _short_actions(measured: Timeline) -> Iterable[str]:
    """Yield remarks on actions as short as a hand-over, and on W that take no time."""
    mean = {key: fmean(times) for key, times in measured.by_kind.items()}
    # These stages do the whole backward in I. Their W are short for this reason, so they must not
    # count as too short.
    unsplit = {
        stage
        for kind, stage in mean
        if kind is Kind.W and mean[Kind.W, stage] < 0.05 * mean[Kind.I, stage]
    }
    short = [
        (kind, stage)
        for kind, stage in mean
        if mean[kind, stage] < _SHORT and not (kind is Kind.W and stage in unsplit)
    ]
    if short:
        stages = {kind: {stage for other, stage in short if other is kind} for kind in Kind}
        which = "; ".join(
            f"{kind.value} of {_stage_numbers(some)}" for kind, some in stages.items() if some
        )
        count = sum(len(measured.by_kind[key]) for key in short)
        yield (
            f"{count} of {len(measured.spans)} actions take less than 100 us on average "
            f"({which}). Handing over costs about as much: take fewer microbatches with more "
            "rows, or fewer stages."
        )
    if unsplit:
        yield (
            f"W takes no time: {_stage_numbers(unsplit)} {'do' if len(unsplit) > 1 else 'does'} "
            "the whole backward in I, so W fills no bubble: of an eager stage only weights of "
            "matrix products and convolutions wait, and none with slices. A schedule with whole "
            "backwards (1F1B, interleaved) is as fast; fp.compile_stage(stage) splits them."
        )


def _unequal(schedule: Schedule, measured: Timeline, simulated: Timeline) -> Iterable[str]:
    """Yield a remark on the gain of stages of equal cost, if lanes work for different times."""
    busy = measured.busy
    busiest, idlest = (pick(range(len(busy)), key=busy.__getitem__) for pick in (max, min))
    if busy[busiest] <= _UNEVEN * busy[idlest]:
        return
    longer = "while nothing is done by"
    if busy[idlest]:
        longer = f"{busy[busiest] / busy[idlest] - 1:.0%} longer than"
    cost, times = measured.cost(), summary.time_text(measured)
    means = {name: fmean(getattr(cost, name)) for name in _TIMES}
    equal = simulate(schedule, replace(cost, **means)).makespan
    change = equal / (simulated.makespan or 1.0) - 1
    advice = (
        ": fp.models.balance with the times of fp.models.profile comes as near to that as the "
        "layers allow. If it chose these stages, try smaller layers or fewer stages"
    )
    yield (
        f"Lane {busiest} works {longer} lane {idlest}, and the others wait for it. With stages of "
        f"equal cost the same schedule takes {times(equal)} instead of "
        f"{times(simulated.makespan)} ({change:+z.1%}), "
        f"simulated{advice if change <= -NEGLIGIBLE else ''}."
    )


def _ranges(numbers: Iterable[int]) -> str:
    """Write ascending numbers as ranges: ``0-3, 6``."""
    return ", ".join(spans([*numbers]).split())


def _stage_numbers(stages: set[int]) -> str:
    return f"{'stages' if len(stages) > 1 else 'stage'} {_ranges(sorted(stages))}"
