"""Several costs, of which each stage gets one: what a choice costs, what none can beat, and which one a search takes."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import funcpipe as fp
from funcpipe.lab.bounds import levels_bound
from funcpipe.lab.levels import descend, least, neighbours
from funcpipe.lab.problem import Problem
from funcpipe.schedules.levels import mixed

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

LIMITS = {"num_devices": 3, "num_microbatches": 6, "memory_limit": 8.0, "seconds": 1e6}


def levels_for(rng, stages, links=False):
    """What keeps all, and what keeps half and takes longer back."""

    def numbers(low, high):
        return [rng.randint(low, high) for _ in range(stages)]

    forward, back = numbers(3, 9), numbers(3, 9)
    options = {"comm": 1, "residual": numbers(4, 8), "weight_residual": numbers(1, 3)}
    if links:
        options |= {"forward_link": [rng.randint(0, 3) for _ in range(stages)], "backward_link": 1}
    keep = fp.Cost(forward, back, numbers(2, 6), **options)
    again = fp.Cost(
        forward,
        [time + rng.randint(1, 4) for time in back],
        keep.backward_weight,
        **options | {"residual": [size / 2 for size in keep.residual]},
    )
    return [keep, again]


@pytest.mark.parametrize("seed", range(4))
def test_it_is_as_good_as_trying_all_choices(seed):
    levels = levels_for(Random(seed), 3)
    found = fp.search(levels, evaluations=6000, **LIMITS)
    values = {}
    for choice in product(range(2), repeat=3):
        try:
            values[choice] = fp.search(mixed(levels, choice), evaluations=1500, **LIMITS).value
        except fp.ScheduleError:
            continue
    assert found.value <= min(values.values())
    assert found.lower_bound <= found.value * (1 + 1e-9)
    timeline = fp.simulate(found.schedule, levels)
    assert timeline == found.timeline
    assert max(timeline.peak) <= 8.0
    assert "levels " in str(found)
    assert found == fp.search(levels, evaluations=6000, **LIMITS)


def shares(schedule):
    """Which share of its microbatches each stage has at level 1."""
    counts = Counter(action.stage for action, level in schedule.levels if level == 1)
    return [counts[stage] / schedule.num_microbatches for stage in range(schedule.num_stages)]


def test_what_is_short_of_memory_keeps_less():
    """The first stages of 1F1B hold most: they recompute, the last ones keep all; and it beats both for all stages."""
    keep = fp.Cost(4, 4, 4, residual=4.0, weight_residual=2.0)
    again = fp.Cost(4, 6, 4, residual=2.0, weight_residual=1.0)
    options = {"num_devices": 4, "num_microbatches": 8, "memory_limit": 8.0, "evaluations": 2000}
    found = fp.search([keep, again], **options)
    first, *_, last = shares(found.schedule)
    assert (1.0, 0.0) == (first, last)
    assert all(found.value < fp.search(cost, **options).value for cost in (keep, again))


def test_microbatches_of_a_stage_have_levels_of_their_own():
    """Where memory lies between what two levels need, some keep all, and it beats every choice of one level a stage."""
    keep = fp.Cost(4, 4, 4, residual=4.0, weight_residual=2.0)
    again = fp.Cost(4, 6, 4, residual=2.0, weight_residual=1.0)
    options = {"num_devices": 4, "num_microbatches": 8, "memory_limit": 12.0}
    found = fp.search([keep, again], evaluations=6000, **options)
    choices = [
        fp.search(mixed([keep, again], choice), evaluations=1000, **options).value
        for choice in product(range(2), repeat=4)
    ]
    assert any(0 < share < 1 for share in shares(found.schedule))
    assert "0|1" in str(found)
    assert found.value < min(choices)
    assert found.lower_bound <= found.value
    assert found.gap < 0.05


@pytest.mark.parametrize("options", [{"remat": True}, {"offload": True}, {"objective": "span"}, {"num_slices": 2}])
def test_levels_beside_everything_else(options):
    levels = levels_for(Random(2), 3)
    found = fp.search(levels, evaluations=1500, **LIMITS | options)
    fp.schedules.check(found.schedule)
    assert fp.simulate(found.schedule, levels) == found.timeline
    assert max(found.peak) <= 8.0 * (1 + 1e-9)
    assert found.lower_bound <= found.value * (1 + 1e-9)


def test_levels_of_stages_that_overlap():
    levels = levels_for(Random(2), 3, links=True)
    found = fp.search(levels, evaluations=1500, **LIMITS)
    assert fp.simulate(found.schedule, levels) == found.timeline
    assert found.lower_bound <= found.value * (1 + 1e-9)


def test_slower_forwards_fill_a_wait_too():
    """What fits into the memory before the first gradient comes may take long."""
    shared = {"comm": 10, "residual": 1.0}
    quick, slow = fp.Cost([4, 4], [4, 2], [4, 2], **shared), fp.Cost([8, 4], [2, 2], [2, 2], **shared)
    found = fp.search([quick, slow], num_devices=2, num_microbatches=8, memory_limit=4, evaluations=3000)
    assert found.value <= 104 < 110
    assert found.lower_bound <= found.value


@pytest.mark.parametrize("seed", range(24))
def test_small_instances_against_proofs(seed):
    """CP-SAT, whose model shares nothing with the search: no bound is above an optimum, and most are found."""
    pytest.importorskip("ortools", reason="extra `solve`")
    from search_reference import at_levels, reference, small

    one = at_levels(small(seed))
    options = {"num_stages": len(one.placement), "placement": one.placement, "memory_limit": one.limit}
    counts = {"num_devices": one.devices, "num_microbatches": one.microbatches}
    found = fp.search(one.costs, **counts, **options, evaluations=3000, seconds=1e6)
    proven = reference(one, found.schedule, seconds=20)
    assert found.lower_bound <= proven.makespan * (1 + 1e-9)
    assert found.value <= 1.02 * proven.makespan
    assert found.lower_bound >= 0.9 * proven.makespan


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_the_bound_holds_for_every_choice(data):
    """Of schedules at random and levels at random: none is below the bound for the memory that it needs itself."""
    seed = data.draw(st.integers(0, 10**6))
    rng = Random(seed)
    levels = levels_for(rng, 3, data.draw(st.booleans()))
    schedule = data.draw(st.sampled_from(SCHEDULES))
    forwards = [action for order in schedule.orders for action in order if action.kind is fp.Kind.F]
    schedule = replace(schedule, levels={forward: rng.randrange(2) for forward in forwards})
    kinds = {action.kind for order in schedule.orders for action in order}
    timeline = fp.simulate(schedule, levels)
    options = {"remat": fp.Kind.R in kinds, "offload": fp.Kind.O in kinds}
    objective = data.draw(st.sampled_from(["makespan", "span"]))
    problem = Problem(least(levels, 3), schedule.device_of, 4, timeline.peak, objective, **options)
    assert levels_bound(problem, levels).value <= problem.value(timeline) * (1 + 1e-9)


def test_one_level_is_one_cost():
    cost = fp.Cost([5, 4, 3], 6, 4, comm=1)
    options = {"num_devices": 3, "num_microbatches": 6, "evaluations": 300}
    one, alone = fp.search([cost], **options), fp.search(cost, **options)
    assert frozenset() == one.schedule.levels
    assert one.value == alone.value
    assert one.lower_bound <= alone.value
    assert "levels" not in str(one)


SCHEDULES = [
    fp.schedules.one_f_one_b(3, 4),
    fp.schedules.zero_bubble(3, 4),
    fp.schedules.remat(fp.schedules.fill_drain(3, 4)),
    fp.schedules.offload(fp.schedules.one_f_one_b(3, 4)),
    fp.schedules.pair(fp.schedules.interleaved(3, 4, num_devices=1)),
]


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 2), min_size=3, max_size=3), st.booleans())
def test_nothing_takes_less_than_the_least(seed, choice, links):
    """Of time where nothing overlaps, and of memory anyway; where things overlap, less what waits for links."""
    rng = Random(seed)
    levels = [*levels_for(rng, 3, links), levels_for(rng, 3, links)[rng.randrange(2)]]
    if links:
        levels[2] = fp.Cost(levels[2].forward, levels[2].backward_input, levels[2].backward_weight, comm=1)
    lowest, cost = least(levels, 3), mixed(levels, choice)
    for schedule in SCHEDULES:
        floor, real = (
            fp.simulate(fp.schedules.unpair(schedule), each.computing() if links else each) for each in (lowest, cost)
        )
        assert floor.makespan <= real.makespan + 1e-9
        assert all(low <= high + 1e-9 for low, high in zip(floor.peak, real.peak, strict=True))


def test_what_a_choice_costs():
    first = fp.Cost(1, 2, 3, residual=[4, 5], comm=1)
    second = fp.Cost([2, 3], 2, 3, backward=6, remat=1.5, residual=1, offload=2, comm=1)
    cost = mixed([first, second], [1, 0])
    assert ((2, 1), (6, 5), (1.5, 1), (1, 5)) == (cost.forward, cost.backward, cost.remat, cost.residual)
    assert 1 == cost.comm
    assert [(0, 1), (2, 1), (1, 0), (1, 2)] == [*neighbours((1, 1), 3)]


def test_descending():
    """To where no neighbour is better, or until the time is over."""
    found, value = descend((0, 0, 0), 4, lambda choice: float(sum((level - 2) ** 2 for level in choice)), lambda: False)
    assert ((2, 2, 2), 0.0) == (found, value)
    assert ((0, 0), 5.0) == descend((0, 0), 2, lambda choice: 5.0 - sum(choice), lambda: True)


@pytest.mark.parametrize(
    ("cost", "says"),
    [
        ([fp.Cost(), fp.Cost(comm=2)], r"not levels of the same stages:(.|\n)*comm is 0.0 and 2; it is of all stages"),
        ([fp.Cost([1, 2]), fp.Cost([1, 2, 3])], r"numbers of \['2', '3'\] stages"),
        ([fp.Cost(), 3], r"one for each level that stages offer; got \['Cost', 'int'\]"),
        ([], r"takes a Cost.* got \[\]"),
        ("cost", "takes a Cost.* got 'cost'"),
        (7, "takes a Cost.* got 7"),
    ],
)
def test_what_are_no_levels(cost, says):
    with pytest.raises(fp.ScheduleError, match=says):
        fp.search(cost, num_devices=2, num_microbatches=4)


def test_levels_are_not_proven_by_the_solver():
    with pytest.raises(fp.ScheduleError, match="exact=True proves schedules for one cost"):
        fp.search([fp.Cost(), fp.Cost(2)], num_devices=2, num_microbatches=4, exact=True)


def test_no_level_fits():
    with pytest.raises(fp.ScheduleError, match="no schedule within a memory limit of 1"):
        fp.search([fp.Cost(residual=4), fp.Cost(residual=2)], num_devices=2, num_microbatches=4, memory_limit=1.0)
