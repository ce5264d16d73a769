"""S in schedules: where it stands, what it costs, and which orders are none."""

import pytest

import funcpipe as fp
from funcpipe import schedules as S


def test_it_comes_after_all_that_adds_and_after_the_sum_over_replicas():
    schedule = S.step_params(S.reduce_grads(S.zero_bubble(2, 2)))
    assert str(schedule).splitlines()[0].endswith("0W1 0G 0S")
    assert fp.Schedule.parse(str(schedule)) == schedule
    assert S.from_json(S.to_json(schedule)) == schedule
    assert schedule.steps
    assert not S.zero_bubble(2, 2).steps


def test_sums_over_replicas_are_under_way_while_a_device_computes():
    """Behind its G an S would wait for the sums, and with it the backwards of other stages."""
    schedule = S.reduce_grads(S.interleaved(4, 2, num_devices=2))
    assert [line.partition("B1 ")[2] for line in str(S.step_params(schedule)).splitlines()] == [
        "2G 0B0 0B1 0G 2S 0S",
        "3G 1B0 1B1 1G 3S 1S",
    ]
    cost = fp.Cost(1.0, backward=2.0, reduce=3.0, step=0.5)
    assert (
        fp.simulate(S.step_params(schedule), cost).makespan
        == fp.simulate(schedule, cost).makespan + 0.5
    )
    half = fp.Schedule.parse("0F0 1F0 1B0 1G 0B0")  # only one stage is summed
    assert str(S.step_params(half)) == "0F0 1F0 1B0 1G 0B0 0S 1S"


def test_it_wants_no_parameters_of_other_replicas():
    """A part is stepped by itself: no U is for an S, whichever was put in first."""
    summed = S.reduce_grads(S.looped_bfs(4, 4, num_devices=2))
    schedule = S.step_params(S.gather_params(summed, whole=1))
    assert schedule == S.gather_params(S.step_params(summed), whole=1)
    S.check(schedule)
    S.check(schedule.first(2))
    with pytest.raises(fp.ScheduleError, match="0U1 on device 0 is not needed"):
        S.check(fp.Schedule.parse("0U0 0F0 0B0 0U1 0S"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0S 0B0", "0B0 on device 0 comes after 0S, which needs all gradients"),
        ("0F0 0B0 0S 0S", "0S on device 0 appears twice"),
        ("0F0 0B0 0S 0G", "0G on device 0 comes after 0S"),
        ("0F0 0S", "0B0 is missing"),
    ],
)
def test_orders_that_are_none(text, message):
    with pytest.raises(fp.ScheduleError, match=message):
        S.check(fp.Schedule.parse(text))


def test_it_takes_time_of_its_device_and_waits_for_the_sums():
    cost = fp.Cost(1.0, backward=2.0, reduce=5.0, step=3.0)
    plain = fp.simulate(S.one_f_one_b(1, 2), cost).makespan
    assert fp.simulate(S.step_params(S.one_f_one_b(1, 2)), cost).makespan == plain + 3
    reduced = S.step_params(S.reduce_grads(S.one_f_one_b(1, 2)))
    timeline = fp.simulate(reduced, cost)
    assert timeline.makespan == plain + 5 + 3
    assert timeline.cost().step == (3.0,)


def test_steps_beside_backwards_of_others_cost_nothing():
    """Of four stages all but the first step while the others' backwards still run."""
    cost = fp.Cost(1.0, backward=2.0, step=2.0)
    schedule = S.one_f_one_b(4, 8)
    assert (
        fp.simulate(S.step_params(schedule), cost).makespan
        == fp.simulate(schedule, cost).makespan + 2
    )


def test_refusals():
    with pytest.raises(fp.ScheduleError, match="no backwards, so there is nothing to step by"):
        S.step_params(S.fill_drain(2, 2).forwards())
    with pytest.raises(fp.ScheduleError, match="has S already"):
        S.step_params(S.step_params(S.fill_drain(2, 2)))
