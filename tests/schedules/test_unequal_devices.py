"""Devices of unequal speed: a stage takes longer on a slower device, in simulation, search, cuts."""

import itertools
from dataclasses import replace

import pytest
from common import search

import funcpipe as fp
from funcpipe import schedules as S


def test_a_stage_computes_for_its_time_over_the_speed_of_its_device():
    """By hand: device 1 is twice as fast, so 1F takes half."""
    cost = fp.Cost(2, comm=1, speeds=[1, 2])
    ends = {
        str(span.action): span.end
        for span in fp.simulate(S.fill_drain(2, 2, backward=False), cost).spans
    }
    assert {"0F0": 2, "0F1": 4, "1F0": 4, "1F1": 6} == ends


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"backward": [5, 4, 3, 2]},
        {"backward_input": None, "backward_weight": [1, 2, 1, 1], "backward": [5, 4, 3, 2]},
        {"forward_link": 1, "backward_link": [0.5, 0, 1, 1]},
        {"backward": 4, "backward_input": None, "backward_weight": None, "backward_link": 2},
    ],
)
def test_each_family_takes_the_time_of_a_cost_by_stage(fields):
    """The same numbers as a cost whose times are divided by hand, on lines, loops and Vs."""
    speeds = [1.0, 0.5, 4.0, 2.0]
    numbers = {"forward": [4, 2, 1, 3], "backward_input": 2, "backward_weight": 1} | fields
    cost = fp.Cost(**numbers, remat=2, step=4, offload=3, comm=0.5, output=1, bandwidth=2)
    for schedule in (
        S.step_params(S.one_f_one_b(4, 5)),
        S.pair(S.interleaved(4, 5, num_devices=2)),
        S.remat(S.zbv(4, 5)),
        S.offload(S.fill_drain(4, 5, num_devices=2)),
    ):
        device_speeds = speeds[: schedule.num_devices]
        rates = [device_speeds[device] for device in schedule.device_of]

        def by_hand(kind, link, rates=rates):
            waits = getattr(cost, link) if link else 0
            waits = waits if isinstance(waits, tuple) else (waits,) * 4
            return [(cost.of(kind, s) - waits[s]) / rates[s] + waits[s] for s in range(4)]

        expected = replace(
            cost,
            forward=by_hand(fp.Kind.F, "forward_link"),
            backward_input=by_hand(fp.Kind.I, "backward_link"),
            backward_weight=by_hand(fp.Kind.W, None),
            backward=by_hand(fp.Kind.B, "backward_link"),
            remat=by_hand(fp.Kind.R, "forward_link"),
            step=by_hand(fp.Kind.S, None),
        )
        timeline = fp.simulate(schedule, replace(cost, speeds=device_speeds))
        assert fp.simulate(schedule, expected).spans == timeline.spans
        equal = fp.simulate(schedule, replace(cost, speeds=[1] * schedule.num_devices))
        assert fp.simulate(schedule, cost).makespan == pytest.approx(equal.makespan)


def test_search_knows_the_speeds():
    """Its result simulates alike, and no schedule of equal devices is as short."""
    cost = fp.Cost(1, 1, 1, comm=0.1, speeds=[1, 0.25, 2])
    found = search(cost, 3, 6, num_stages=6, evaluations=1_000)
    assert found.makespan == fp.simulate(found.schedule, cost).makespan
    assert found.lower_bound <= found.makespan * (1 + 1e-9)
    # The slow device has two of six stages: 6 microbatches of 3 units, at a quarter of the speed.
    assert found.lower_bound >= 2 * 6 * 3 * 4
    proven = search(fp.Cost(1, 1, 1, speeds=[1, 0.5]), 2, 2, exact=True, evaluations=100)
    assert proven.gap == 0


@pytest.mark.parametrize("speeds", [(1, 3), (3, 1), (1, 1)])
def test_cuts_follow_the_speeds(speeds):
    """`plan_for` and `balance` against all cuts of six layers."""
    layers = [3.0, 1.0, 2.0, 1.0, 2.0, 3.0]
    cost = fp.Cost(layers, layers, layers, speeds=speeds)
    options = {"num_devices": 2, "num_microbatches": 4, "evaluations": 200}
    choice = fp.models.plan_for(cost, stages_per_device=1, **options)
    cuts = [
        fp.search(cost.group([first, 6 - first]), placement="line", **options).makespan
        for first in range(1, 6)
    ]
    assert choice.timeline.makespan == pytest.approx(min(cuts))
    assert choice.timeline.makespan == fp.simulate(choice.schedule, choice.cost).makespan
    parts = fp.models.balance(cost, 2)
    assert parts.bottleneck == pytest.approx(
        min(
            max(3 * sum(layers[:first]) / speeds[0], 3 * sum(layers[first:]) / speeds[1])
            for first in range(1, 6)
        )
    )
    assert tuple(parts) == tuple(fp.models.balance(replace(cost, speeds=()), 2, speeds=speeds))


def test_a_memory_limit_per_device_with_speeds():
    """Against all cuts: the fast device has less memory."""
    layers = [1.0] * 6
    cost = fp.Cost(layers, layers, layers, residual=layers, speeds=[1, 4])
    options = {"num_devices": 2, "num_microbatches": 3, "evaluations": 200, "remat": False}
    limits = [20, 3]
    choice = fp.models.plan_for(cost, stages_per_device=1, memory_limit=limits, **options)
    values = []
    for first in range(1, 6):
        try:
            found = fp.search(
                cost.group([first, 6 - first]), placement="line", memory_limit=limits, **options
            )
        except fp.ScheduleError:
            continue
        values.append(found.makespan)
    assert choice.timeline.makespan == pytest.approx(min(values))
    assert all(peak <= limit for peak, limit in zip(choice.timeline.peak, limits, strict=True))


def test_other_numbers_of_devices_are_refused():
    cost = fp.Cost([1.0] * 4, speeds=[1, 2, 3])
    message = "Cost.speeds has 3 numbers, and the schedule has 4 devices; give speeds="
    uses = (
        lambda: fp.simulate(S.one_f_one_b(4, 4), cost),
        lambda: search(cost, 4, 4),
        lambda: fp.models.plan_for(cost, num_devices=4, num_microbatches=4),
    )
    for use in uses:
        with pytest.raises(fp.ScheduleError, match=message):
            use()
    with pytest.raises(fp.PlanError, match="speeds has 3 numbers, not 2"):
        fp.models.balance(cost, 2)


@pytest.mark.parametrize("speeds", [[1, 0], [1, -1.0], 2, ["fast"], [True]])
def test_wrong_speeds_are_refused(speeds):
    with pytest.raises(
        fp.ScheduleError, match="speeds must have the speed of each device, numbers above 0"
    ):
        fp.Cost(speeds=speeds)


def test_files_keep_the_speeds():
    cost = fp.Cost(speeds=(1, 2.5))
    assert cost == S.from_json(S.to_json(cost))


def test_the_order_of_devices_matters_for_a_line():
    """All permutations of three devices: the simulation takes each stage's own device."""
    times = [4.0, 2.0, 1.0]
    spans = {
        speeds: fp.simulate(S.one_f_one_b(3, 8), fp.Cost(times, times, times, speeds=speeds))
        for speeds in itertools.permutations([1.0, 2.0, 4.0])
    }
    best = min(spans, key=lambda speeds: spans[speeds].makespan)
    assert (4.0, 2.0, 1.0) == best
