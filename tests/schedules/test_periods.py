"""Schedules of few microbatches as ones of many: legal, no more memory, and each microbatch more takes a period's share."""

import random

import pytest
import torch
import torch.nn.functional as F
from common import ids, same, schedules

import funcpipe as fp
from funcpipe.schedules.periods import fitting, periods

COST = fp.Cost(1.0, 1.2, 0.8, residual=1.0, weight_residual=0.5, comm=0.1)


FAMILIES = [
    fp.schedules.one_f_one_b,
    fp.schedules.eager_one_f_one_b,
    fp.schedules.zero_bubble,
    fp.schedules.zb_h2,
    fp.schedules.interleaved,
    fp.schedules.zbv,
    fp.schedules.v_half,
    fp.schedules.v_min,
    fp.schedules.dualpipe_v,
]


@pytest.mark.parametrize(("stages", "devices"), [(2, 2), (3, 3), (6, 3), (4, 4), (8, 4)])
@pytest.mark.parametrize("make", FAMILIES, ids=lambda make: make.__name__)
def test_as_good_as_what_the_family_makes_of_many(make, stages, devices):
    """No slower, and no device holds more than it did."""
    few, many = 4 * devices, 10 * devices
    try:
        short, whole = (make(stages, count, num_devices=devices) for count in (few, many))
    except fp.ScheduleError:
        pytest.skip("it has other devices")
    if not fitting(periods(short, COST), many - few):
        assert make is fp.schedules.interleaved  # in so few its rounds are not alike
        return
    long = fp.schedules.lengthen(short, many, COST)
    fp.schedules.check(long)
    assert (many, short.device_of) == (long.num_microbatches, long.device_of)
    before, after = fp.simulate(short, COST), fp.simulate(long, COST)
    assert before.peak == pytest.approx(after.peak)
    assert before.makespan < after.makespan <= fp.simulate(whole, COST).makespan * (1 + 1e-9)
    if make is fp.schedules.one_f_one_b:
        assert whole == long
    if short.pairs:
        assert len(long.pairs) > len(short.pairs)


@pytest.mark.parametrize("schedule", schedules(4, 12), ids=ids)
def test_every_schedule_is_lengthened_or_says_why(schedule):
    """With slices, pairs, remat, offload, sums and steps; what comes out is as legal, and has the same kinds."""
    counts = sorted({period.microbatches for period in periods(schedule, fp.Cost())})
    if not counts or "U" in str(schedule):
        with pytest.raises(fp.ScheduleError, match="nothing in schedule .* is repeated|has U"):
            fp.schedules.lengthen(schedule, 24)
        return
    long = fp.schedules.lengthen(schedule, 12 + 2 * counts[-1])
    fp.schedules.check(long)
    assert schedule.num_slices == long.num_slices
    assert {kind for order in schedule.orders for kind, *_ in order} == {
        kind for order in long.orders for kind, *_ in order
    }
    assert schedule == fp.schedules.lengthen(schedule, 12)


@pytest.mark.parametrize(
    "change",
    [
        fp.schedules.remat,
        fp.schedules.offload,
        fp.schedules.reduce_grads,
        lambda schedule: fp.schedules.step_params(fp.schedules.reduce_grads(schedule)),
        lambda schedule: fp.schedules.remat(schedule, keep=lambda action: action.microbatch % 2 == 0),
        lambda schedule: fp.schedules.offload(schedule, move=lambda action: action.microbatch % 2 == 0),
    ],
)
def test_before_and_after_a_change_are_one(change):
    """What is chosen by even numbers has a period of two."""
    few, many = (fp.schedules.one_f_one_b(3, count) for count in (12, 20))
    assert change(many) == fp.schedules.lengthen(change(few), 20)


def test_odd_periods_do_not_fit():
    few = fp.schedules.remat(fp.schedules.one_f_one_b(3, 12), keep=lambda action: action.microbatch % 2 == 0)
    with pytest.raises(
        fp.ScheduleError, match="has periods of 2.* microbatches, by which it does not come to 19; take 18 or 20"
    ):
        fp.schedules.lengthen(few, 19)


def test_slices_stay_together():
    few, many = (fp.schedules.one_f_one_b(3, count, num_slices=2) for count in (12, 20))
    long = fp.schedules.lengthen(few, 20)
    assert many == long
    assert fp.simulate(long).makespan == fp.simulate(many).makespan


def test_one_device_costs_of_nothing_and_numbers_out_of_order():
    """A device by itself; no time at all; microbatches that trade places two by two."""
    assert fp.schedules.one_f_one_b(1, 9) == fp.schedules.lengthen(fp.schedules.one_f_one_b(1, 4), 9)
    assert fp.schedules.one_f_one_b(3, 20) == fp.schedules.lengthen(
        fp.schedules.one_f_one_b(3, 12), 20, fp.Cost(0, 0, 0)
    )
    few, many = (fp.schedules.one_f_one_b(3, count) for count in (12, 20))
    swapped = [
        fp.Schedule(tuple(tuple(one._replace(microbatch=one.microbatch ^ 1) for one in order) for order in each.orders))
        for each in (few, many)
    ]
    assert swapped[1] == fp.schedules.lengthen(swapped[0], 20)


def test_forwards_alone():
    few, many = (fp.schedules.one_f_one_b(3, count).forwards() for count in (8, 13))
    assert many == fp.schedules.lengthen(few, 13)


@pytest.mark.parametrize("seed", range(8))
def test_what_a_search_finds(seed):
    """Unequal costs, short memory, remat or not."""
    rng = random.Random(seed)
    devices = rng.randint(2, 4)
    cost = fp.Cost(*([rng.randint(3, 6) for _ in range(devices)] for _ in range(3)), comm=rng.choice((0, 1)))
    options = {"num_devices": devices, "memory_limit": rng.choice((2, devices)), "remat": rng.random() < 0.5}
    found = fp.search(cost, num_microbatches=6 * devices, evaluations=150, **options)
    counts = {period.microbatches for period in periods(found.schedule, cost)}
    assert counts
    long = fp.schedules.lengthen(found.schedule, 6 * devices + 3 * min(counts), cost)
    timeline = fp.simulate(long, cost)
    assert timeline.peak == found.peak
    assert timeline.makespan > found.makespan


def test_a_lengthened_schedule_runs():
    few = fp.schedules.dualpipe_v(4, 8, num_devices=2)
    plan = fp.make_plan(
        [fp.stage(lambda p, x: torch.tanh(x @ p))] * 4, fp.schedules.lengthen(few, 12), loss=F.mse_loss, devices="cpu"
    )
    generator = torch.Generator().manual_seed(1)
    params = tuple(torch.randn(5, 5, generator=generator) for _ in range(4))
    x, target = (torch.randn(24, 5, generator=generator) for _ in range(2))
    assert same(fp.run_sequential(plan, params, (x, target)).grads, fp.run(plan, params, (x, target)).grads)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda one: fp.schedules.lengthen("0F0 0B0", 4), "takes a schedule; got a str"),
        (lambda one: fp.schedules.lengthen(one, 7), r"keeps the 8 microbatches .* got 7 \(fewer: schedule.first"),
        (lambda one: fp.schedules.lengthen(one, 9.0), "got 9.0"),
        (lambda one: fp.schedules.lengthen(one, 9, fp.Cost([1, 2, 3])), "forward has 3 numbers"),
        (lambda one: fp.schedules.lengthen(one, 8, fp.Cost([1, 2, 3])), "forward has 3 numbers"),
        (lambda one: fp.schedules.lengthen(one, 9, "x"), "lengthen takes a Cost .*got .x"),
        (lambda one: fp.schedules.lengthen(fp.schedules.gather_params(one), 9), "has U, which are numbered"),
        (
            lambda one: fp.schedules.lengthen(fp.schedules.fill_drain(2, 8), 9),
            "nothing in schedule 'fill-drain' is repeated",
        ),
        (lambda one: fp.schedules.lengthen(fp.Schedule.parse("0F0 0F0"), 9), "0F0 .* twice"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(fp.ScheduleError, match=message):
        call(fp.schedules.one_f_one_b(2, 8))
