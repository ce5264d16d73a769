"""Several costs, of which each stage gets one: what a choice costs, what none can beat, and which one a search takes."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import funcpipe as fp
from funcpipe.lab import search as room
from funcpipe.lab.levels import descend, least, mixed, neighbours

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
    found = fp.search(levels, evaluations=3000, **LIMITS)
    values = {}
    for choice in product(range(2), repeat=3):
        try:
            values[choice] = fp.search(mixed(levels, choice), evaluations=1500, **LIMITS).value
        except fp.ScheduleError:
            continue
    assert found.value <= 1.01 * min(values.values())
    assert found.lower_bound <= min(values.values()) * (1 + 1e-9)
    timeline = fp.simulate(found.schedule, mixed(levels, found.levels))
    assert timeline == found.timeline
    assert max(timeline.peak) <= 8.0
    assert f"levels {' '.join(map(str, found.levels))}" in str(found)
    assert found == fp.search(levels, evaluations=3000, **LIMITS)


def test_what_is_short_of_memory_keeps_less():
    """The first stages of 1F1B hold most: they recompute, the last ones keep all; and it beats both for all stages."""
    keep = fp.Cost(4, 4, 4, residual=4.0, weight_residual=2.0)
    again = fp.Cost(4, 6, 4, residual=2.0, weight_residual=1.0)
    options = {"num_devices": 4, "num_microbatches": 8, "memory_limit": 8.0, "evaluations": 2000}
    found = fp.search([keep, again], **options)
    assert [*found.levels] == sorted(found.levels, reverse=True)
    assert {0, 1} == {*found.levels}
    assert all(found.value < fp.search(cost, **options).value for cost in (keep, again))


def test_one_level_is_one_cost():
    cost = fp.Cost([5, 4, 3], 6, 4, comm=1)
    options = {"num_devices": 3, "num_microbatches": 6, "evaluations": 300}
    one, alone = fp.search([cost], **options), fp.search(cost, **options)
    assert (0, 0, 0) == one.levels
    assert () == alone.levels
    assert one.value == alone.value
    assert one.lower_bound <= alone.value


def test_bounds_hold_where_choices_are_too_many_to_try(monkeypatch):
    levels = levels_for(Random(1), 3)
    values = [
        fp.search(mixed(levels, choice), evaluations=600, **LIMITS | {"memory_limit": 24}).value
        for choice in product(range(2), repeat=3)
    ]
    monkeypatch.setattr(room, "_CHOICES", 4)
    found = fp.search(levels, evaluations=600, **LIMITS | {"memory_limit": 24})
    assert found.lower_bound <= min(values)


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
        ([], r"takes a Cost .* got \[\]"),
        ("cost", "takes a Cost .* got str"),
        (7, "takes a Cost .* got int"),
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
