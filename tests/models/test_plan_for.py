"""Partition and schedule together."""

import itertools

import pytest
import torch
from torch import nn

import funcpipe as fp

TIMES = [1.0, 2.0, 3.0, 1.0, 1.0, 2.0, 3.0, 1.0, 2.0, 2.0, 1.0, 3.0]


def layers(count):
    """Twelve layers whose microbatches shrink as they get more; a part of each action does not."""
    share = 8 / count
    return fp.Cost(
        [t * share + 0.1 for t in TIMES],
        [1.2 * t * share + 0.1 for t in TIMES],
        [0.8 * t * share + 0.1 for t in TIMES],
        comm=0.2,
        residual=[t * share for t in TIMES],
    )


def test_no_other_cut_is_better_under_the_published_schedules():
    """Against all partitions of six layers into three stages."""
    cost = fp.Cost([3.0, 1, 1, 2, 4, 1], [3.0, 1, 1, 2, 4, 1], [2.0, 1, 1, 2, 3, 1], comm=0.25)
    choice = fp.models.plan_for(
        cost, num_devices=3, num_microbatches=6, stages_per_device=1, evaluations=300
    )
    cuts = [(a, b - a, 6 - b) for a, b in itertools.combinations(range(1, 6), 2)]
    best = min(
        fp.search(cost.group(cut), num_devices=3, num_microbatches=6, evaluations=300).makespan
        for cut in cuts
    )
    assert choice.timeline.makespan == pytest.approx(best)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 40.0, 16.0])
def test_everything_that_is_chosen_fits_together(limit):
    """Sizes, stages, schedule, memory; the table has every way, best first."""
    choice = fp.models.plan_for(
        layers,
        num_devices=4,
        num_microbatches=[4, 8, 16],
        memory_limit=limit,
        fixed=0.5,
        evaluations=150,
    )
    assert (12, len(choice.sizes)) == (sum(choice.sizes), choice.schedule.num_stages)
    assert choice.num_microbatches == choice.schedule.num_microbatches
    assert choice.cost == layers(choice.num_microbatches).group(choice.sizes)
    timeline = fp.simulate(choice.schedule, choice.cost)
    assert timeline.makespan == choice.timeline.makespan == choice.tried[0].value
    if limit is not None:
        room = [limit] * 4
        ends = [0, *itertools.accumulate(choice.sizes)]
        for stage, device in enumerate(choice.schedule.device_of):
            room[device] -= 0.5 * (ends[stage + 1] - ends[stage])
        assert all(
            peak <= most * (1 + 1e-9) for peak, most in zip(timeline.peak, room, strict=True)
        )
    assert choice.remat == any(
        a.kind is fp.Kind.R for order in choice.schedule.orders for a in order
    )
    values = [one.value for one in choice.tried[1:]]
    assert sorted(values) == values
    assert 3 <= len(choice.tried) <= 12  # what its bound rules out is not tried
    assert choice.placement in str(choice)


def test_a_model_runs_as_chosen():
    """From a profile to a step: the sizes cut the model, the schedule runs it."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)]).double()
    example = torch.randn(4, 8, dtype=torch.float64)
    choice = fp.models.plan_for(
        fp.models.profile(model, example, repeats=1, warmup=0),
        num_devices=2,
        num_microbatches=4,
        evaluations=60,
    )
    split = fp.split(model, balance=choice.sizes)
    plan = fp.make_plan(split.stages, choice.schedule, loss=nn.functional.mse_loss, devices="cpu")
    x = torch.randn(16, 8, dtype=torch.float64)
    result = fp.run(plan, split.params, (x, x), state=split.state)
    torch.testing.assert_close(nn.functional.mse_loss(model(x), x), result.loss)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cost": fp.Cost(), "num_microbatches": 4}, "needs a cost with one number per layer"),
        ({"cost": 4}, "cost must be a Cost of the layers"),
        ({"num_devices": 0}, "num_devices must be a positive integer"),
        ({"num_microbatches": []}, "num_microbatches must be a positive integer, or several"),
        ({"cost": layers(4), "num_microbatches": [4, 8]}, "cost must be a function"),
        ({"memory_limit": 1.0}, "no way to run these layers fits"),
        ({"memory_limit": 4.0, "fixed": 2.0}, "the parameters alone fill device 0"),
        ({"num_devices": 20}, "there are fewer layers than devices"),
        ({"num_devices": [2]}, "num_devices must be a positive integer"),
        ({"fixed": [1, 2]}, "fixed has 2 numbers, not 12"),
        ({"fixed": [None] * 12, "memory_limit": 9.0}, "fixed: numbers from 0; got None"),
        ({"objective": "time"}, "arguments:\n.*objective is 'makespan' or 'span'; got 'time'"),
        (
            {"memory_limit": [1.0, 2.0]},
            "memory_limit is a positive number, or one for each of 4 devices",
        ),
    ],
)
def test_choices_that_cannot_be_made(options, says):
    """With every reason."""
    given = {"cost": layers, "num_devices": 4, "num_microbatches": 8, "evaluations": 20, **options}
    cost = given.pop("cost")
    with pytest.raises(fp.FuncpipeError, match=says):
        fp.models.plan_for(cost, **given)


def test_large_parameters_at_one_end():
    """Equal times would put all of them on one device; the cut goes where they fit."""
    cost = fp.Cost([1.0] * 16, residual=[0.01] * 16)
    fixed = [10.0] * 4 + [0.0] * 12
    choice = fp.models.plan_for(
        cost,
        num_devices=2,
        num_microbatches=4,
        stages_per_device=2,
        memory_limit=25,
        fixed=fixed,
        evaluations=60,
    )
    homes = [
        device
        for device, size in zip(choice.schedule.device_of, choice.sizes, strict=True)
        for _ in range(size)
    ]
    assert {20.0} == {
        sum(more for more, home in zip(fixed, homes, strict=True) if home == device)
        for device in range(2)
    }


def test_one_device_without_a_limit():
    """Infinity is a limit like any other."""
    choice = fp.models.plan_for(
        fp.Cost([1.0] * 6),
        num_devices=2,
        num_microbatches=4,
        memory_limit=[3, float("inf")],
        evaluations=40,
    )
    assert choice.timeline.peak[0] <= 3


def test_seconds_end_it():
    """Not at once: a look that was begun ends, and the best of them is what one gets."""
    from time import perf_counter

    began = perf_counter()
    choice = fp.models.plan_for(
        fp.Cost([1.0, 1.2, 0.9] * 10), num_devices=4, num_microbatches=16, seconds=0.2
    )
    assert perf_counter() - began < 10
    assert sum(choice.sizes) == 30
