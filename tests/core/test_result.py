"""Costs and timelines as data: what they refuse, what they compute, how they travel."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import funcpipe as fp
from funcpipe._src.core.errors import ScheduleError
from funcpipe._src.data.cost import Cost
from funcpipe._src.data.result import Span, Timeline
from funcpipe._src.data.schedule import Action, Kind, Schedule
from funcpipe._src.schedules.families import one_f_one_b, zero_bubble
from funcpipe._src.schedules.transforms import offload
from funcpipe._src.view.simulate import simulate


def test_a_default_cost_is_one_for_each_half_and_two_for_a_whole_backward() -> None:
    """F 1, I 1, W 1, B their sum, R that of F."""
    assert [1, 2, 1, 1, 1] == [
        Cost().of(kind, 0) for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)
    ]


def test_a_cost_is_read_by_kind_and_stage() -> None:
    """One number for all stages, or one for each; B and R fall back stage by stage."""
    cost = Cost([1, 2], 10, (100, 200))
    assert [1, 110, 10, 100, 1, 2, 210, 10, 200, 2] == [
        cost.of(kind, s) for s in (0, 1) for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)
    ]


def test_a_backward_of_zero_is_not_the_sum() -> None:
    """None means the sum; zero means zero."""
    assert [0, 0] == [Cost(backward=0, remat=0).of(kind, 0) for kind in (Kind.B, Kind.R)]


@pytest.mark.parametrize(
    "bad",
    [
        -1,
        float("inf"),
        float("nan"),
        -0.5,
        "1",
        1j,
        [1, -1],
        (1, None),
        {"a": 1},
        "12",
        b"xy",
        torch.ones(2),
        None,
    ],
)
def test_numbers_below_zero_and_what_is_no_number_are_refused(bad: object) -> None:
    """Every field is checked; the message has the field and what came."""
    shown = tuple(bad) if isinstance(bad, list) else bad
    with pytest.raises(ScheduleError) as error:
        Cost(forward=bad, residual=bad)  # pyright: ignore[reportArgumentType]
    assert [
        "no such cost:",
        f"  * forward is a number from 0, or a sequence of them; got {shown!r}",
        f"  * residual is a number from 0, or a sequence of them; got {shown!r}",
    ] == str(error.value).splitlines()


def test_latencies_are_one_number_or_one_for_each_hop() -> None:
    """Three stages have two hops; a skip over both takes the slower one's."""
    cost = Cost(comm=[1, 2])
    cost.check_stages(3)
    assert (1, 2, 2, 1) == (
        cost.latency(0, 1),
        cost.latency(1, 2),
        cost.latency(2, 0),
        cost.latency(1, 0),
    )
    with pytest.raises(ScheduleError, match=r"comm has 2 numbers \(it needs 1, one per hop\)"):
        cost.check_stages(2)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"bandwidth": 0}, "bandwidth must be more than 0"),
        ({"bandwidth": (1, 2)}, "bandwidth is a number from 0; got"),
        ({"skips": "ab"}, "skips must be a sequence of"),
        ({"skips": [(2, 1, 1.0)]}, r"0 <= stash < pop .*got \(2, 1, 1.0\)"),
        ({"skips": [(0, 1, -1.0)]}, "a size of at least 0"),
        ({"skips": [3]}, r"got \(3,\)"),
    ],
)
def test_costs_of_what_crosses_are_refused(fields: dict[str, Any], says: str) -> None:
    """Before any clock runs."""
    with pytest.raises(ScheduleError, match=says):
        Cost(**fields)


def test_a_skip_ends_at_a_stage_that_is_there() -> None:
    """Its stages are counted with the others."""
    with pytest.raises(ScheduleError, match="popped by a stage that does not exist"):
        Cost(skips=[(0, 3, 1.0)]).check_stages(3)


def test_costs_compare_hash_and_pickle_whatever_sequence_came() -> None:
    """Lists become tuples."""
    a, b = Cost([1, 2]), Cost((1, 2))
    assert (a, hash(a), a) == (b, hash(b), pickle.loads(pickle.dumps(b)))


def spans() -> tuple[Span, ...]:
    """Two devices; the second starts late."""
    return (
        Span(0, 0.0, 1.0, Action(Kind.F, 0, 0)),
        Span(1, 2.0, 4.0, Action(Kind.F, 1, 0)),
        Span(1, 4.0, 5.0, Action(Kind.B, 1, 0)),
        Span(0, 6.0, 8.0, Action(Kind.B, 0, 0)),
    )


def test_a_timeline_knows_its_ends_and_its_bubbles() -> None:
    """makespan: the end of all; span: the longest device; bubbles: against the busiest device's
    work, 3."""
    timeline = Timeline(spans(), 2, comm=1.0)
    assert (8.0, 8.0, (3.0, 3.0)) == (timeline.makespan, timeline.span, timeline.busy)
    assert (1 - 3 / 8, 1 - 3 / 8) == (timeline.bubble, timeline.span_bubble)


def test_span_is_shorter_than_makespan_where_the_longest_device_starts_late() -> None:
    """The steady-state cost leaves out the wait before the first start."""
    timeline = Timeline(spans()[1:3], 2)
    assert (5.0, 3.0, 0.0) == (timeline.makespan, timeline.span, timeline.span_bubble)


def test_the_critical_path_of_a_timeline_goes_over_the_hops() -> None:
    """There and back."""
    path = Timeline(spans(), 2, comm=1.0).critical_path
    assert "0F0 1F0 1B0 0B0" == " ".join(map(str, path))


def test_an_empty_timeline_is_nothing_at_all() -> None:
    """Zeros, no division."""
    for empty in (
        Timeline((), 0),
        Timeline((), 3),
        Timeline((Span(0, 0.0, 0.0, Action(Kind.F, 0, 0)),), 1),
    ):
        assert (0.0, 0.0, 0.0, 0.0) == (empty.makespan, empty.span, empty.bubble, empty.span_bubble)
        assert (0.0, 0.0) == (empty.idle, empty.imbalance)
        assert "idle 0.0%" in str(empty)
    assert ((), ()) == (Timeline((), 0).critical_path, Timeline((), 0).busy)


def test_idle_is_what_the_bubble_does_not_say_of_devices_with_less_work() -> None:
    """Where one device does most, the schedule hardly loses anything and devices wait all the
    same."""
    unequal = simulate(one_f_one_b(3, 8), Cost(forward=[8, 3, 3], backward=[16, 6, 6]))
    assert (194, (192, 72, 72)) == (unequal.makespan, unequal.busy)
    assert pytest.approx(2 / 194) == unequal.bubble
    assert pytest.approx(1 - 336 / (3 * 194)) == unequal.idle
    assert pytest.approx(1 - 112 / 192) == unequal.imbalance
    says = "idle 42.3% of all device time; imbalance 41.7%: "
    says += "equal work on all devices would save 41.7% of the makespan at the same bubble"
    assert says in str(unequal)
    assert "imbalance" not in str(
        replace(unequal, lanes=("load", "decode", "step"))
    )  # no stages to balance


@pytest.mark.parametrize(
    "cost", [Cost(), Cost([0.3, 1.7, 0.1, 0.7], 0.9, [0, 1, 2, 3], offload=3, comm=0.3)]
)
@pytest.mark.parametrize(
    "schedule",
    [
        zero_bubble(4, 5),
        one_f_one_b(4, 3, num_devices=1),
        offload(one_f_one_b(4, 4, num_devices=2)),
    ],
    ids=lambda schedule: schedule.name,
)
def test_bubble_and_imbalance_make_all_that_is_idle(schedule: Schedule, cost: Cost) -> None:
    """Also with one device, and where links work; nobody is idle for less than the busiest device
    waits."""
    timeline = simulate(schedule, cost)
    work = sum(s.end - s.start for s in timeline.spans if s.action.kind not in (Kind.O, Kind.L))
    assert pytest.approx(1 - work / (timeline.makespan * timeline.num_devices)) == timeline.idle
    assert pytest.approx((1 - timeline.bubble) * (1 - timeline.imbalance)) == 1 - timeline.idle
    assert timeline.idle >= timeline.bubble - 1e-12
    assert timeline.imbalance == pytest.approx(0, abs=1e-12) or (
        timeline.num_devices > 1 and cost != Cost()
    )


def test_devices_whose_links_alone_work_are_idle() -> None:
    """Moves are no work."""
    timeline = Timeline((Span(0, 0.0, 1.0, Action(Kind.O, 0, 0)),), 1)
    assert (1.0, 1.0, 0.0) == (timeline.bubble, timeline.idle, timeline.imbalance)


def test_durations_are_grouped_by_kind_and_stage() -> None:
    """What profile and pictures read."""
    timeline = simulate(zero_bubble(2, 3), Cost((1, 2), 3, 4))
    assert (1, 1, 1) == timeline.by_kind[Kind.F, 0]
    assert {(kind, s) for kind in (Kind.F, Kind.I, Kind.W) for s in (0, 1)} == set(timeline.by_kind)


def test_timelines_compare_hash_and_pickle_without_their_caches() -> None:
    """Simulating twice gives equal data; looking at it changes nothing."""
    a, b = (simulate(one_f_one_b(3, 5), Cost(comm=0.5)) for _ in range(2))
    bare = len(pickle.dumps(a))
    assert all([a.makespan, a.critical_path, a.by_kind, a.busy, a.span])
    copy = pickle.loads(pickle.dumps(a))
    assert (a, hash(a), a.critical_path, bare) == (
        b,
        hash(b),
        copy.critical_path,
        len(pickle.dumps(a)),
    )
    assert copy == b


def test_timelines_of_other_costs_differ() -> None:
    """Equality sees the times."""
    assert 3 == len({simulate(one_f_one_b(2, 2), Cost(comm=comm)) for comm in (0, 1, 2)})


def test_a_timeline_prints_one_line_with_its_numbers() -> None:
    """The figures that people compare."""
    expected = (
        "1F1B: 8 actions on 2 devices; makespan 9 units; bubble 33.3% of the makespan; idle 33.3% "
        "of all device time; peak 2, 1 residuals"
    )
    assert expected == str(simulate(one_f_one_b(2, 2))) == repr(simulate(one_f_one_b(2, 2)))


def test_the_trace_has_one_complete_event_for_each_action(tmp_path: Path) -> None:
    """Chrome's JSON: microseconds (a unit shows as a millisecond), one named thread for each
    device."""
    timeline = simulate(one_f_one_b(2, 3), Cost(comm=0.5))
    file = tmp_path / "trace.json"
    timeline.to_chrome_trace(file)
    trace = json.loads(file.read_text())
    assert timeline.chrome_trace() == trace
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [
        (str(s.action), s.device, s.start * 1e3, (s.end - s.start) * 1e3) for s in timeline.spans
    ] == [(event["name"], event["tid"], event["ts"], event["dur"]) for event in complete]
    assert {"stage": 0, "microbatch": 0, "kind": "F"} == complete[0]["args"]


def test_the_trace_names_process_and_threads() -> None:
    """Perfetto shows the schedule's name and the devices in order."""
    meta = [
        event
        for event in simulate(one_f_one_b(2, 1)).chrome_trace()["traceEvents"]
        if event["ph"] == "M"
    ]
    names = [
        (event["name"], event.get("tid"), next(iter(event["args"].values()))) for event in meta
    ]
    assert [
        ("process_name", None, "1F1B"),
        ("thread_name", 0, "device 0"),
        ("thread_sort_index", 0, 0),
        ("thread_name", 1, "device 1"),
        ("thread_sort_index", 1, 4),
    ] == names


def test_a_measured_timeline_is_traced_in_real_microseconds() -> None:
    """Seconds, not units."""
    events = Timeline(spans(), 2, unit="s").chrome_trace()["traceEvents"]
    assert [0.0, 2e6, 4e6, 6e6] == [event["ts"] for event in events if event["ph"] == "X"]


def test_critical_path_of_spans_that_contradict_themselves():
    """1F0 before 0F0 on one device: from a file, perhaps; it ends."""
    first, second = fp.Action(fp.Kind.F, 1, 0), fp.Action(fp.Kind.F, 0, 0)
    timeline = fp.Timeline(
        (fp.typing.Span(0, 0.0, 1.0, first), fp.typing.Span(0, 1.0, 2.0, second)), 1
    )
    assert timeline.critical_path == (first, second)


def test_the_cost_of_a_timeline_has_its_moves() -> None:
    """O and L of a stage, their mean; nothing where none ran."""
    spans = (
        Span(0, 0.0, 1.0, Action(Kind.F, 0, 0)),
        Span(0, 1.0, 3.0, Action(Kind.O, 0, 0)),
        Span(0, 3.0, 7.0, Action(Kind.L, 0, 0)),
        Span(1, 1.0, 2.0, Action(Kind.F, 1, 0)),
    )
    assert (3.0, 0.0) == Timeline(spans, 2).cost().offload
