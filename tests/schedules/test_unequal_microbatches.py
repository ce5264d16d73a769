"""Microbatches of unequal work: the factors of a cost in simulation, search, plans, and measured."""

import itertools
from time import sleep

import pytest
import torch
from common import cpu_plan, search

import funcpipe as fp
from funcpipe import schedules as S

FACTORS = [1, 4, 2]


def test_a_single_device_takes_the_sum_of_the_factors():
    cost = fp.Cost(2, 3, 1, microbatches=FACTORS)
    for schedule in (S.fill_drain(1, 3), S.one_f_one_b(1, 3), S.zero_bubble(1, 3)):
        assert 7 * (2 + 3 + 1) == fp.simulate(schedule, cost).makespan


def test_two_devices_by_hand():
    """0F0 to 1, 0F1 to 5, 0F2 to 7; device 1 starts each when it comes: 1F0 to 2, 1F1 to 9, 1F2 to
    11."""
    cost = fp.Cost(1, microbatches=FACTORS)
    schedule = S.fill_drain(2, 3, backward=False)
    ends = {str(span.action): span.end for span in fp.simulate(schedule, cost).spans}
    assert {"0F0": 1, "0F1": 5, "0F2": 7, "1F0": 2, "1F1": 9, "1F2": 11} == ends


def test_memory_has_its_own_factors():
    """Or those of the times. F of all microbatches comes first, so all residuals are held."""
    schedule = S.fill_drain(2, 3)
    for fields, peak in (
        ({"microbatches": FACTORS}, 7),
        ({"microbatches": FACTORS, "microbatch_sizes": [1, 1, 3]}, 5),
        ({"microbatch_sizes": [1, 1, 3]}, 5),
    ):
        assert (peak, peak) == fp.simulate(schedule, fp.Cost(**fields)).peak
    times = {"microbatch_sizes": [1, 1, 3]}
    assert fp.simulate(schedule, fp.Cost()).spans == fp.simulate(schedule, fp.Cost(**times)).spans


def test_values_cross_a_link_for_their_size():
    cost = fp.Cost(1, output=6, bandwidth=2, microbatches=[1, 2], microbatch_sizes=[3, 1])
    starts = {
        str(span.action): span.start
        for span in fp.simulate(S.fill_drain(2, 2, backward=False), cost).spans
    }
    assert (1 + 9, 10 + 3) == (starts["1F0"], starts["1F1"])


def test_actions_for_all_microbatches_have_no_factor():
    schedule = S.step_params(S.reduce_grads(S.gather_params(S.fill_drain(1, 3))))
    cost = fp.Cost(reduce=5, gather=3, step=2, microbatches=FACTORS)
    lasted = {
        str(span.action): span.end - span.start
        for span in fp.simulate(schedule, cost).spans
        if span.action.kind in (fp.Kind.G, fp.Kind.U, fp.Kind.S)
    }
    assert {"0G": 5, "0S": 2, "0U0": 3} == lasted


def test_moves_to_the_host_take_the_size():
    order = S.offload(S.fill_drain(1, 3), move=lambda action: action.microbatch == 1)
    cost = fp.Cost(offload=2, microbatches=FACTORS, microbatch_sizes=[1, 3, 1])
    lasted = {str(span.action): span.end - span.start for span in fp.simulate(order, cost).spans}
    assert (6, 6) == (lasted["0O1"], lasted["0L1"])


def test_a_slice_takes_its_share_of_its_own_microbatch():
    cost = fp.Cost(4, 4, 4, microbatches=[1, 3], slices=[3, 1])
    schedule = S.one_f_one_b(2, 2, num_slices=2)
    lasted = {str(span.action): span.end - span.start for span in fp.simulate(schedule, cost).spans}
    assert (3, 1, 9, 3) == tuple(lasted[f"0F{piece}"] for piece in ("0.0", "0.1", "1.0", "1.1"))


@pytest.mark.parametrize(
    "schedule",
    [
        S.one_f_one_b(4, 3),
        S.zero_bubble(4, 3),
        S.remat(S.one_f_one_b(4, 3), keep=lambda action: action.microbatch == 0),
        S.one_f_one_b(2, 3, num_slices=2),
        S.pair(S.interleaved(4, 3, num_devices=2)),
    ],
    ids=lambda schedule: schedule.name,
)
def test_a_timeline_gives_the_factors_back(schedule):
    """Times that factors and stages explain are explained exactly, also where actions overlap or
    some microbatches lack a kind."""
    stages = range(schedule.num_stages)
    cost = fp.Cost(
        [1 + stage for stage in stages], 2, [1.5 - stage / 4 for stage in stages], comm=0.5
    )
    cost = fp.Cost(**{**vars(cost), "microbatches": FACTORS, "microbatch_sizes": [1, 1, 1]})
    timeline = fp.simulate(schedule, cost)
    found = timeline.cost(microbatches=True)
    assert [factor * 7 / 3 for factor in found.microbatches] == pytest.approx(FACTORS, rel=1e-6)
    assert timeline.makespan == pytest.approx(fp.simulate(schedule, found).makespan, rel=1e-6)
    assert () == timeline.cost().microbatches


def test_a_measured_run_gives_the_factors_back():
    @fp.stage
    def slow(p, x):
        sleep(0.02 * len(x))
        return x * p

    plan = cpu_plan([slow, slow], S.one_f_one_b(2, 3))
    params = tuple(torch.ones((), requires_grad=True) for _ in range(2))
    cut = fp.Microbatches([torch.ones(rows, 2) for rows in FACTORS])
    fp.run(plan, params, (cut, cut))  # first calls of torch take longer
    timeline = fp.run(plan, params, (cut, cut), record=True).timeline
    small, large, middle = timeline.cost(microbatches=True).microbatches
    assert small < middle < large
    # A timeline without any time has no factors.
    spans = tuple(fp.typing.Span(0, 0.0, 0.0, fp.Action(fp.Kind.F, 0, m)) for m in range(2))
    assert () == fp.Timeline(spans, 1).cost(microbatches=True).microbatches


def orders_of(stage):
    """Every order of two microbatches on a stage, with ascending F, I and W."""
    words = [f"{stage}{kind}{m}" for m in range(2) for kind in "FIW"]
    before = [f"{stage}{a}{m} {stage}{b}{m}" for m in range(2) for a, b in ("FI", "IW")]
    before += [f"{stage}{kind}0 {stage}{kind}1" for kind in "FIW"]
    return [
        tuple(map(fp.Action.parse, order))
        for order in itertools.permutations(words)
        if all(order.index(first) < order.index(second) for first, second in map(str.split, before))
    ]


@pytest.mark.parametrize("factors", [(1, 3), (3, 1), (1.5, 2)])
@pytest.mark.parametrize("limit", [None, 3.5])
def test_search_finds_the_shortest_of_all_orders(factors, limit):
    """And its bound holds for both orders of the two microbatches."""

    def shortest(microbatches):
        times = [
            fp.simulate(fp.Schedule(orders), fp.Cost(2, 3, 1, comm=0.5, microbatches=microbatches))
            for orders in itertools.product(orders_of(0), orders_of(1))
            if _runs(orders)
        ]
        return min(
            timeline.makespan for timeline in times if limit is None or max(timeline.peak) <= limit
        )

    cost = fp.Cost(2, 3, 1, comm=0.5, microbatches=factors)
    found = search(cost, 2, 2, memory_limit=limit, evaluations=2_000)
    assert shortest(factors) == pytest.approx(found.makespan)
    assert found.lower_bound <= min(shortest(factors), shortest(factors[::-1])) * (1 + 1e-9)


def _runs(orders):
    try:
        S.check(fp.Schedule(orders))
    except fp.ScheduleError:
        return False
    return True


def test_search_refuses_to_prove_unequal_microbatches():
    with pytest.raises(fp.ScheduleError, match="exact=True proves schedules of equal microbatches"):
        search(fp.Cost(microbatches=FACTORS), 2, 3, exact=True)


def test_cuts_make_room_for_the_largest_microbatch():
    """The time of a part is that of a mean microbatch."""
    cost = fp.Cost([1.0] * 4, [1.0] * 4, [1.0] * 4, microbatches=[1, 3], microbatch_sizes=[1, 5])
    parts = fp.models.balance(cost, 2)
    assert ((12.0, 12.0), (10.0, 10.0)) == (parts.times, parts.memory)
    with pytest.raises(fp.PlanError, match="limit"):
        fp.models.balance(cost, 2, limit=9)
    choice = fp.models.plan_for(
        cost, num_devices=2, num_microbatches=2, memory_limit=12, evaluations=100
    )
    assert max(choice.timeline.peak) <= 12
    assert choice.cost.microbatches == (1, 3)
    with pytest.raises(fp.PlanError, match="no way to run these layers fits"):
        fp.models.plan_for(
            cost, num_devices=2, num_microbatches=2, memory_limit=9, remat=False, evaluations=100
        )


@pytest.mark.parametrize("name", ["microbatches", "microbatch_sizes"])
def test_other_numbers_of_microbatches_are_refused(name):
    cost = fp.Cost([1.0] * 2, **{name: FACTORS})
    for use in (
        lambda: fp.simulate(S.one_f_one_b(2, 4), cost),
        lambda: search(cost, 2, 4),
        lambda: fp.models.plan_for(cost, num_devices=2, num_microbatches=4),
    ):
        with pytest.raises(
            fp.ScheduleError,
            match=f"Cost.{name} has 3 numbers, and the schedule has 4 microbatches; give {name}=",
        ):
            use()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"microbatches": [1, 0]}, "microbatches must have the factor of each microbatch"),
        ({"microbatches": 2}, "microbatches must have the factor of each microbatch"),
        ({"microbatch_sizes": [1, -1]}, "microbatch_sizes must have the memory factor"),
        (
            {"microbatches": [1, 2], "microbatch_sizes": [1]},
            "one number per microbatch; got 2 and 1 numbers",
        ),
    ],
)
def test_wrong_factors_are_refused(fields, message):
    with pytest.raises(fp.ScheduleError, match=message):
        fp.Cost(**fields)


def test_files_and_groups_keep_the_factors():
    cost = fp.Cost([1, 2, 3], microbatches=(1, 2.5), microbatch_sizes=(1, 2))
    assert cost == S.from_json(S.to_json(cost))
    grouped = cost.group([2, 1])
    assert (cost.microbatches, cost.microbatch_sizes) == (
        grouped.microbatches,
        grouped.microbatch_sizes,
    )
