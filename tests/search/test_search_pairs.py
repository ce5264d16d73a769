"""A search where actions can hide each other's links: pairs, timed as they are simulated, and
bounds that hold for them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from common import search
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import schedules, unequal

import funcpipe as fp
from funcpipe._src.schedules.clock import coded
from funcpipe._src.search.bounds import lower_bound
from funcpipe._src.search.polish import Bench, OrderedLane, polish
from funcpipe._src.search.problem import Budget, Problem, as_schedule

times = st.floats(0.5, 4)


@st.composite
def costs(draw: st.DrawFn, stages: int) -> fp.Cost:
    """Every stage waits for links for some of its time, or for none."""
    each = lambda: draw(st.lists(times, min_size=stages, max_size=stages))
    forward, inward, weight = each(), each(), each()
    shares = st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=stages, max_size=stages)
    return fp.Cost(
        forward,
        inward,
        weight,
        forward_link=[time * share for time, share in zip(forward, draw(shares), strict=True)],
        backward_link=[time * share for time, share in zip(inward, draw(shares), strict=True)],
        comm=draw(st.sampled_from([0.0, 0.5])),
    )


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_pairs_are_timed_as_simulated_and_never_beat_the_bound(data: st.DataObject) -> None:
    """Of any schedule with backwards, at the memory that it needs."""
    schedule = data.draw(schedules().filter(lambda one: one.has_backward))
    cost = data.draw(unequal(data.draw(costs(schedule.num_stages)), schedule.num_microbatches))
    timeline = fp.simulate(schedule, cost)
    device_of, slices = schedule.device_of, schedule.num_slices
    remat = any(action.kind is fp.Kind.R for order in schedule.orders for action in order)
    for objective in ("makespan", "span"):
        problem = Problem(
            cost, device_of, schedule.num_pieces, timeline.peak, objective, remat, num_slices=slices
        )
        score = Bench(problem).score(
            coded(schedule.orders, slices), [schedule.joined(order) for order in schedule.orders]
        )
        assert score is not None
        assert score.value == pytest.approx(problem.value(timeline))
        assert lower_bound(problem).value <= score.value * (1 + 1e-9)


@settings(max_examples=50, deadline=None)
@given(st.data(), st.integers(0, 99))
def test_moving_joining_and_parting_makes_shorter_within_the_memory(
    data: st.DataObject, seed: int
) -> None:
    """Every step is legal, and timed as it is simulated."""
    schedule = data.draw(schedules().filter(lambda one: one.has_backward))
    cost = data.draw(unequal(data.draw(costs(schedule.num_stages)), schedule.num_microbatches))
    before = fp.simulate(schedule, cost)
    problem = Problem(
        cost, schedule.device_of, schedule.num_pieces, before.peak, num_slices=schedule.num_slices
    )
    last = before.makespan
    lanes = [
        OrderedLane(
            actions, frozenset((actions[at], actions[at + 1]) for at in schedule.joined(order))
        )
        for order, actions in zip(
            schedule.orders, coded(schedule.orders, schedule.num_slices), strict=True
        )
    ]
    for better in polish(Bench(problem), lanes, Random(seed), Budget(60, 60.0), good=0.0):
        found = as_schedule((lane.actions for lane in better), "found", schedule.num_slices)
        joined = [lane.joined for lane in better]
        pairs = {
            (o[at], o[at + 1]) for o, row in zip(found.orders, joined, strict=True) for at in row
        }
        found = replace(found, pairs=frozenset(pairs))
        fp.schedules.check(found)
        after = fp.simulate(found, cost)
        assert after.makespan < last
        assert problem.fits(after.peak)
        last = after.makespan


@pytest.mark.parametrize(("devices", "count", "waits"), [(2, 8, 0.5), (3, 9, 0.5)])
def test_a_search_beats_dualpipe_v_at_its_memory(devices: int, count: int, waits: float) -> None:
    """Which takes 4 M + 3 D where all is hidden that can be."""
    cost = fp.Cost(1, 1, 1, forward_link=waits, backward_link=waits)
    published = fp.simulate(fp.schedules.dualpipe_v(2 * devices, count), cost)
    found = search(
        cost,
        devices,
        count,
        num_stages=2 * devices,
        placement="v",
        memory_limit=max(published.peak),
        evaluations=4_000,
        seconds=1e6,
    )
    assert found.schedule.pairs
    assert found.lower_bound <= found.value < published.makespan in (38, 45)
    assert max(found.peak) <= max(published.peak)
    assert fp.simulate(found.schedule, cost) == found.timeline


def test_where_nothing_is_hidden_nothing_overlaps() -> None:
    """A pair would only be late."""
    found = search(fp.Cost(), 2, 6, num_stages=4, placement="v", evaluations=300)
    assert not found.schedule.pairs


def test_the_solver_knows_no_pairs() -> None:
    with pytest.raises(
        fp.ScheduleError, match="exact=True proves schedules in which nothing overlaps"
    ):
        search(fp.Cost(forward_link=0.5), 2, 2, exact=True)


def test_a_cost_without_its_links() -> None:
    """Of every form in which a time can be given."""
    cost = fp.Cost([2, 3], 2, 1, backward=[4, 5], remat=3, forward_link=[1, 0.5], backward_link=1)
    left = cost.computing()
    assert (left.forward, left.remat) == ((1, 2.5), (2, 2.5))
    assert (left.backward_input, left.backward, left.backward_weight) == (1, (3, 4), 1)
    assert (cost.hides, left.hides, fp.Cost(backward_link=0.1).hides, fp.Cost().hides) == (
        True,
        False,
        True,
        False,
    )
    assert fp.Cost(forward_link=0.5).computing() == fp.Cost(0.5)
