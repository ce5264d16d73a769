"""What lies between actions: the host's time, and the hop to another device, found again in
timelines that were made with them."""

from dataclasses import replace

import pytest

import funcpipe as fp
from funcpipe._src.data.measured_cost import middle

HOST = 0.25
COST = fp.Cost([2.0, 3.0, 2.5, 2.0], [3.0, 4.0, 3.5, 3.0], [2.0, 2.0, 1.5, 1.0], comm=0.5)


def slowed(cost: fp.Cost) -> fp.Cost:
    """Every action takes as much longer as the host does before it."""
    times = {
        name: tuple(time + HOST for time in getattr(cost, name))
        for name in ("forward", "backward_input")
    }
    return replace(
        cost, **times, backward_weight=tuple(time + HOST for time in cost.backward_weight)
    )


def with_gaps(schedule: fp.Schedule) -> fp.Timeline:
    """As a run would be measured: the host's time before each action is not part of it."""
    timeline = fp.simulate(schedule, slowed(COST))
    return replace(
        timeline, spans=tuple(span._replace(start=span.start + HOST) for span in timeline.spans)
    )


@pytest.mark.parametrize("family", ["fill_drain", "zero_bubble", "zb_h2"])
def test_a_measured_timeline_is_predicted(family):
    schedule = getattr(fp.schedules, family)(4, 8)
    schedule = schedule if family != "fill_drain" else fp.schedules.delay(schedule)
    measured = with_gaps(schedule)
    without, found = measured.cost(), measured.cost(handover=True)
    assert found.comm == pytest.approx(COST.comm, abs=HOST)
    predicted, short = (
        fp.simulate(schedule, cost).makespan for cost in (found, replace(without, comm=0.5))
    )
    assert measured.makespan == pytest.approx(predicted, rel=0.02)
    assert short < 0.96 * measured.makespan


def test_the_numbers_of_a_device_that_never_waits():
    """The last stage's W and the first one's F come one after the other: what lies between them is
    theirs."""
    found = with_gaps(fp.schedules.zero_bubble(4, 8)).cost(handover=True)
    want = slowed(COST)
    assert found.forward[0] == pytest.approx(want.forward[0])
    assert found.backward_weight == pytest.approx(want.backward_weight)
    assert found.backward_input[3] == pytest.approx(want.backward_input[3])


@pytest.mark.parametrize(
    "schedule",
    [
        fp.schedules.one_f_one_b(3, 6),
        fp.schedules.interleaved(6, 6, num_devices=3),
        fp.schedules.offload(fp.schedules.one_f_one_b(3, 6)),
        fp.schedules.remat(fp.schedules.fill_drain(3, 6)),
        fp.schedules.one_f_one_b(3, 6, num_slices=2),
    ],
    ids=lambda schedule: schedule.name,
)
def test_of_a_simulation_nothing_lies_between_actions_but_the_hop(schedule):
    timeline = fp.simulate(schedule, fp.Cost(2.0, 3.0, 1.0, comm=0.5, offload=0.75))
    found = timeline.cost(handover=True)
    assert found.comm == pytest.approx(0.5)
    assert replace(found, comm=0.5) == timeline.cost()


def test_waits_for_a_link_are_nobodys():
    """A backward that waits for its own residual to come back is late by the link, not by the
    host."""
    schedule = fp.schedules.offload(fp.schedules.fill_drain(1, 2), ahead=0)
    timeline = fp.simulate(schedule, fp.Cost(1.0, 1.0, 1.0, offload=5.0))
    assert timeline.makespan > 10
    assert timeline.cost(handover=True).backward == (2.0,)


def test_actions_that_overlap_wait_for_each_other():
    schedule = fp.schedules.pair(fp.schedules.one_f_one_b(2, 6))
    assert schedule.pairs
    timeline = fp.simulate(
        schedule, fp.Cost(2.0, backward=4.0, forward_link=0.5, backward_link=1.0)
    )
    assert timeline.cost(handover=True) == timeline.cost()


def test_of_one_thread_no_action_of_another_lane_is_time_between_two():
    """A move of another lane neither."""
    rows = [
        ("0F0", 0, 0, 1),
        ("0O0", 0, 1, 3),
        ("0F1", 0, 3, 4),
        ("1F0", 1, 4, 5),
        ("1O0", 1, 5, 8),
        ("0F2", 0, 8.5, 9),
    ]
    spans = tuple(
        fp.typing.Span(lane, start, end, fp.Action.parse(word)) for word, lane, start, end in rows
    )
    took, passed = (
        (1 + 1 + 0.5) / 3,
        (0 + 0.5) / 2,
    )  # the mean of three, and the median before the second and the third
    assert fp.Timeline(spans, 2).cost(handover=True).forward[0] == pytest.approx(took + passed)


def test_one_microbatch_overlaps_with_nothing_and_its_hops_are_hops():
    timeline = fp.simulate(fp.schedules.one_f_one_b(3, 1), fp.Cost(2.0, 3.0, 1.0, comm=0.5))
    found = timeline.cost(handover=True)
    assert found.comm == pytest.approx(0.5)
    assert replace(found, comm=0.5) == replace(timeline.cost(), comm=0.5)


def test_nothing_and_one_action():
    assert fp.Timeline((), 0).cost(handover=True) == fp.Timeline((), 0).cost()
    one = fp.Timeline((fp.typing.Span(0, 1.0, 3.0, fp.Action.parse("0F0")),), 1, comm=0.5)
    assert one.cost(handover=True) == one.cost()  # the hop that nobody waited for stays what it was


def test_the_middle_of_several_costs():
    costs = [
        fp.Cost((float(n), 1.0), (2.0, 2.0), (1.0, 1.0), backward=(3.0, float(n)), comm=n / 10)
        for n in (1, 5, 2)
    ]
    assert middle(costs) == fp.Cost(
        (2.0, 1.0), (2.0, 2.0), (1.0, 1.0), backward=(3.0, 2.0), comm=0.2
    )
