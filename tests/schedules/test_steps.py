"""S in schedules: where it stands, what it costs, and which orders are none."""

import pytest

import funcpipe as fp


def test_it_comes_after_all_that_adds_and_after_the_sum_over_replicas():
    schedule = fp.schedules.step_params(fp.schedules.reduce_grads(fp.schedules.zero_bubble(2, 2)))
    assert str(schedule).splitlines()[0].endswith("0W1 0G 0S")
    assert fp.Schedule.parse(str(schedule)) == schedule
    assert fp.schedules.from_json(fp.schedules.to_json(schedule)) == schedule
    assert schedule.steps
    assert not fp.schedules.zero_bubble(2, 2).steps


def test_sums_over_replicas_are_under_way_while_a_device_computes():
    """Behind its G an S would wait for the sums, and with it the backwards of other stages."""
    schedule = fp.schedules.reduce_grads(fp.schedules.interleaved(4, 2, num_devices=2))
    assert [
        line.partition("B1 ")[2] for line in str(fp.schedules.step_params(schedule)).splitlines()
    ] == [
        "2G 0B0 0B1 0G 2S 0S",
        "3G 1B0 1B1 1G 3S 1S",
    ]
    cost = fp.Cost(1.0, backward=2.0, reduce=3.0, step=0.5)
    assert (
        fp.simulate(fp.schedules.step_params(schedule), cost).makespan
        == fp.simulate(schedule, cost).makespan + 0.5
    )
    half = fp.Schedule.parse("0F0 1F0 1B0 1G 0B0")  # only one stage is summed
    assert str(fp.schedules.step_params(half)) == "0F0 1F0 1B0 1G 0B0 0S 1S"


def test_it_wants_no_parameters_of_other_replicas():
    """A part is stepped by itself: no U is for an S, whichever was put in first."""
    summed = fp.schedules.reduce_grads(fp.schedules.looped_bfs(4, 4, num_devices=2))
    schedule = fp.schedules.step_params(fp.schedules.gather_params(summed, whole=1))
    assert schedule == fp.schedules.gather_params(fp.schedules.step_params(summed), whole=1)
    fp.schedules.check(schedule)
    fp.schedules.check(schedule.first(2))
    with pytest.raises(fp.ScheduleError, match="0U1 on device 0 is not needed"):
        fp.schedules.check(fp.Schedule.parse("0U0 0F0 0B0 0U1 0S"))


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
        fp.schedules.check(fp.Schedule.parse(text))


def test_it_takes_time_of_its_device_and_waits_for_the_sums():
    cost = fp.Cost(1.0, backward=2.0, reduce=5.0, step=3.0)
    plain = fp.simulate(fp.schedules.one_f_one_b(1, 2), cost).makespan
    assert (
        fp.simulate(fp.schedules.step_params(fp.schedules.one_f_one_b(1, 2)), cost).makespan
        == plain + 3
    )
    reduced = fp.schedules.step_params(fp.schedules.reduce_grads(fp.schedules.one_f_one_b(1, 2)))
    timeline = fp.simulate(reduced, cost)
    assert timeline.makespan == plain + 5 + 3
    assert timeline.cost().step == (3.0,)


def test_steps_beside_backwards_of_others_cost_nothing():
    """Of four stages all but the first step while the others' backwards still run."""
    cost = fp.Cost(1.0, backward=2.0, step=2.0)
    schedule = fp.schedules.one_f_one_b(4, 8)
    assert (
        fp.simulate(fp.schedules.step_params(schedule), cost).makespan
        == fp.simulate(schedule, cost).makespan + 2
    )


def test_refusals():
    with pytest.raises(fp.ScheduleError, match="no backwards, so there is nothing to step by"):
        fp.schedules.step_params(fp.schedules.fill_drain(2, 2).forwards())
    with pytest.raises(fp.ScheduleError, match="has S already"):
        fp.schedules.step_params(fp.schedules.step_params(fp.schedules.fill_drain(2, 2)))


def test_torch_has_no_such_action():
    schedule = fp.schedules.one_f_one_b(2, 2)
    assert fp.schedules.to_torch_csv(
        fp.schedules.step_params(schedule)
    ) == fp.schedules.to_torch_csv(schedule)
