"""The times of a cost's backward and of its slices, wherever a cost is used."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from common import cpu_plan

import funcpipe as fp
from funcpipe import schedules as S
from funcpipe._src.cli.words import as_cost


def halves(cost: fp.Cost, stage: int = 0) -> tuple[float, float, float]:
    return cost.of(fp.Kind.B, stage), cost.of(fp.Kind.I, stage), cost.of(fp.Kind.W, stage)


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({}, (2, 1, 1)),
        ({"backward": 3}, (3, 1.5, 1.5)),
        ({"backward": [3, 4]}, (3, 1.5, 1.5)),
        ({"backward_input": 2}, (3, 2, 1)),
        ({"backward_weight": 4}, (5, 1, 4)),
        ({"backward_input": 2, "backward_weight": 3}, (5, 2, 3)),
        ({"backward": 3, "backward_input": 2}, (3, 2, 1)),
        ({"backward": 3, "backward_weight": [0.5, 1]}, (3, 2.5, 0.5)),
        ({"backward": 3, "backward_input": 3}, (3, 3, 0)),
        ({"backward": 0.3, "backward_input": 0.1 + 0.2}, (0.3, 0.1 + 0.2, 0)),
        ({"backward": 3, "backward_input": 2, "backward_weight": 2}, (3, 2, 2)),
    ],
    ids=str,
)
def test_a_backward_and_its_halves(given, want):
    """Missing times follow from the given ones; also from JSON, on the command line and in
    groups."""
    cost = fp.Cost(**given)
    assert halves(cost) == want
    assert S.from_json(S.to_json(cost)) == cost
    if not any(isinstance(value, list) for value in given.values()):
        words = ",".join(f"{name}={value}" for name, value in {"forward": 1, **given}.items())
        assert halves(as_cost(words)) == want
        assert halves(cost.group([2, 1])) == pytest.approx([2 * time for time in want])


def test_a_half_that_is_longer_than_the_whole_backward():
    """The error names the missing number."""
    with pytest.raises(
        fp.ScheduleError,
        match="backward_input is 3, more than backward, which is 2; give backward_weight",
    ):
        fp.Cost(backward=2, backward_input=3)
    with pytest.raises(
        fp.ScheduleError, match="backward_weight of stage 1 is 5, more than backward, which is 4"
    ):
        fp.Cost(backward=[6, 4], backward_weight=5)


def test_a_cost_is_replaced():
    """Halves that the user did not give follow the new backward; measured halves stay."""
    assert halves(replace(fp.Cost(), backward=3)) == (3, 1.5, 1.5)
    assert halves(replace(fp.Cost(backward=3), backward=[4, 5]), 1) == (5, 2.5, 2.5)
    assert halves(replace(fp.Cost(1, 2, 3), backward=4)) == (4, 2, 3)


def test_split_schedules_take_as_long_as_the_backward_says():
    """In a simulation, a search and a plan for a model."""
    cost = fp.Cost(forward=1, backward=3)
    explicit = fp.Cost(1, 1.5, 1.5)
    schedule = S.zero_bubble(4, 8)
    assert fp.simulate(schedule, cost).makespan == fp.simulate(schedule, explicit).makespan == 36.5
    found = fp.search(
        fp.Cost(forward=[1, 1, 2, 1], backward=[2, 2, 4, 2]), num_devices=4, num_microbatches=8
    )
    assert (50, 50) == (found.makespan, found.lower_bound)
    layers = {"num_devices": 2, "num_microbatches": 4, "evaluations": 100}
    chosen = [
        fp.models.plan_for(one, **layers)
        for one in (fp.Cost([1.0] * 4, backward=3), fp.Cost([1.0] * 4, 1.5, 1.5))
    ]
    assert chosen[0].found.makespan == chosen[1].found.makespan


def test_links_hide_a_part_of_a_backward_that_is_given_alone():
    """The part of I that waits for a link is at most I, half of B."""
    with pytest.raises(
        fp.ScheduleError, match="backward_link is a part of the time of I, which is 1"
    ):
        fp.Cost(backward=2, backward_link=1.5)
    assert halves(fp.Cost(backward=3, backward_link=0.5).computing()) == (2.5, 1, 1.5)


# -- slices
# -------------------------------------------------------------------------------


@fp.stage
def summed(p, x, *, carry):
    y = x * p if carry is None else x * p + carry
    return fp.Out(y, carry=y[:, -1:])


def plan_of(slices):
    schedule = S.one_f_one_b(2, 2, num_slices=2)
    return cpu_plan([summed, summed], schedule, slices=slices)


def test_a_plan_is_simulated_with_its_own_slices():
    """Also drawn. A cost with the same lengths in another unit changes nothing."""
    plan = plan_of((3, 1))
    peak = fp.simulate(plan.schedule, fp.Cost(slices=(3, 1))).peak
    for cost in (fp.Cost(), fp.Cost(slices=(6, 2)), fp.Cost(slices=(3, 1))):
        timeline = fp.simulate(plan, cost)
        assert (timeline.makespan, timeline.peak) == (9, peak)
    assert 9 == fp.draw(plan).timeline.makespan


@pytest.mark.parametrize("slices", [(), (1, 1), (3, 1)])
def test_a_cost_of_other_slices_than_the_plan(slices):
    with pytest.raises(
        fp.ScheduleError,
        match=r"the plan cuts microbatches into slices of the lengths .* leave out",
    ):
        fp.simulate(plan_of(slices), fp.Cost(slices=(1, 3)))
    with pytest.raises(fp.ScheduleError, match="the lengths of 3 slices, and a microbatch has 2"):
        fp.simulate(plan_of(slices), fp.Cost(slices=(1, 1, 1)))


def test_measured_slices_take_their_times():
    """A measured cost has no lengths, so the plan's lengths apply."""
    plan = plan_of((3, 1))
    x = torch.ones(4, 8)
    params = (torch.ones((), requires_grad=True), torch.ones((), requires_grad=True))
    result = fp.run(plan, params, (x, x), record=True)
    cost = result.timeline.cost()
    assert () == cost.slices
    assert 2 == len(cost.slice_times)
    times, sizes = zip(*replace(cost, slices=(3, 1)).slice_shares(2), strict=True)
    assert (0.75, 0.25) == sizes
    assert times[0] / times[1] == pytest.approx(cost.slice_times[0] / cost.slice_times[1])
    assert fp.simulate(plan, cost).makespan > 0
    assert fp.report(plan, result).simulated.makespan > 0
    assert S.from_json(S.to_json(cost)) == cost
    with pytest.raises(fp.ScheduleError, match="the times of 3 slices, and a microbatch has 2"):
        fp.simulate(plan, fp.Cost(slice_times=(1, 1, 1)))
