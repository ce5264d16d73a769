"""Backwards made whole again: what becomes whole, what it costs, and what is refused."""

import pytest
from common import ids, schedules
from hypothesis import given
from hypothesis import strategies as st

import funcpipe as fp
from funcpipe import Kind


def splits(schedule):
    """How many backwards of each device are split."""
    return [sum(action.kind is Kind.I for action in order) for order in schedule.orders]


def test_only_fill_and_drain_stay_split():
    """However many microbatches there are, the same few stay split: 18 of 128, and of 256."""
    assert splits(fp.schedules.unsplit(fp.schedules.zb_h2(4, 32))) == [0, 6, 6, 6]
    assert splits(fp.schedules.unsplit(fp.schedules.zb_h2(4, 64))) == [0, 6, 6, 6]


@pytest.mark.parametrize("schedule", schedules(4, 6), ids=ids)
def test_every_schedule_takes_no_longer_and_holds_no_more(schedule):
    """Legal, the same forwards and backwards in the same order, the span and the residuals no more than before."""
    split = fp.schedules.delay(schedule, group=4)
    for before in (schedule, split):
        whole = fp.schedules.unsplit(before)
        fp.schedules.check(whole)
        for old, new in zip(before.orders, whole.orders, strict=True):
            backward = (Kind.B, Kind.I)
            assert [a[1:] for a in old if a.kind in backward] == [a[1:] for a in new if a.kind in backward]
            kept = [a for a in old if a.kind not in (*backward, Kind.W)]
            assert kept == [a for a in new if a.kind not in (*backward, Kind.W)]
        first, then = fp.simulate(before), fp.simulate(whole)
        assert then.makespan <= first.makespan * (1 + 1e-9)
        assert all(new <= old for new, old in zip(then.peak, first.peak, strict=True))
        assert sum(splits(whole)) == sum(action.kind is Kind.W for order in whole.orders for action in order)


@given(st.data())
def test_by_any_cost(data):
    """By the cost that it is given, also where stages take different times."""
    stages, microbatches = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 9))
    family = data.draw(st.sampled_from([fp.schedules.zb_h2, fp.schedules.zero_bubble, fp.schedules.one_f_one_b]))
    times = st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=stages, max_size=stages)
    forward, inputs, weights = [tuple(data.draw(times)) for _ in range(3)]
    cost = fp.Cost(forward=forward, backward_input=inputs, backward_weight=weights)
    schedule = family(stages, microbatches)
    whole = fp.schedules.unsplit(schedule, cost=cost)
    fp.schedules.check(whole)
    assert fp.simulate(whole, cost).makespan <= fp.simulate(schedule, cost).makespan * (1 + 1e-9)


def test_slow_links_leave_more_split():
    """Where gradients take long to the next device, a W hides the way of one."""
    schedule = fp.schedules.zb_h2(4, 16)
    near, far = [splits(fp.schedules.unsplit(schedule, cost=fp.Cost(comm=comm))) for comm in (0.0, 1.0)]
    assert sum(near) < sum(far)


def test_pairs_and_slices_stay():
    """A pair with an I is one with the B; slices are pieces of their own."""
    paired = fp.schedules.pair(fp.schedules.zb_h2(2, 6))
    whole = fp.schedules.unsplit(paired)
    fp.schedules.check(whole)
    assert whole.pairs
    assert any(action.kind is Kind.B for both in whole.pairs for action in both)
    sliced = fp.schedules.unsplit(fp.schedules.zb_h2(2, 6, num_slices=2))
    fp.schedules.check(sliced)
    assert splits(sliced)[0] == 0


def test_nothing_to_make_whole_is_the_schedule_itself():
    schedule = fp.schedules.one_f_one_b(3, 4)
    assert fp.schedules.unsplit(schedule) is schedule


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ("1F1B", {}, "unsplit takes a schedule"),
        (fp.schedules.fill_drain(2, 2, backward=False), {}, "no backwards"),
        (fp.schedules.zb_h2(2, 2), {"cost": fp.Cost(forward=(1.0, 1.0, 1.0))}, "forward has 3 numbers"),
        (fp.schedules.zb_h2(2, 2), {"cost": 3}, "unsplit takes a Cost"),
        (fp.Schedule.parse("0F0 0W0 0I0"), {}, "0W0"),
    ],
)
def test_what_is_refused(schedule, options, message):
    with pytest.raises(fp.ScheduleError, match=message):
        fp.schedules.unsplit(schedule, **options)
