"""Forms of a problem: whatever is found for the simplest is a schedule of the problem itself, as
long and no larger."""

import pytest
from common import search
from hypothesis import given, settings
from hypothesis import strategies as st

import funcpipe as fp
from funcpipe._src.search.forms import forms
from funcpipe._src.search.problem import Problem

TIMES = st.sampled_from([0.5, 1.0, 2.0, 3.0])


@st.composite
def problems(draw):
    """Stages anywhere, with costs and hops of their own."""
    devices = draw(st.integers(1, 4))
    places = draw(
        st.permutations([*range(devices), *draw(st.lists(st.integers(0, devices - 1), max_size=4))])
    )
    row = st.lists(TIMES, min_size=len(places), max_size=len(places))
    hops = st.lists(TIMES, min_size=len(places) - 1, max_size=len(places) - 1)
    residual = draw(row)
    rest = [size * draw(st.sampled_from([0.0, 0.5, 1.0])) for size in residual]
    cost = fp.Cost(
        draw(row), draw(row), draw(row), comm=draw(hops), residual=residual, weight_residual=rest
    )
    return Problem(cost, tuple(places), draw(st.integers(1, 4)), tuple(range(10, 10 + devices)))


def _one_by_one(stages, microbatch):
    """All actions of a microbatch, one after the other."""
    forwards = [fp.Action(fp.Kind.F, stage, microbatch) for stage in range(stages)]
    backwards = [
        fp.Action(kind, stage, microbatch)
        for stage in reversed(range(stages))
        for kind in (fp.Kind.I, fp.Kind.W)
    ]
    return forwards + backwards


@settings(max_examples=80)
@given(problems())
def test_a_schedule_of_the_simplest_form_is_one_of_the_problem(problem):
    """Legal on its devices, as long, in no more memory; the limits are those of the same
    devices."""
    *simple, (last, same) = forms(problem)
    assert last is problem
    for form, lift in simple:
        assert form.num_devices == problem.num_devices
        assert all(a != b for a, b in zip(form.device_of, form.device_of[1:], strict=False))
        assert [*dict.fromkeys(form.device_of)] == [*range(form.num_devices)]
        assert forms(form)[0][0] is form
        order = [
            action
            for m in range(form.num_microbatches)
            for action in _one_by_one(form.num_stages, m)
        ]
        lanes = tuple(
            tuple(a for a in order if form.device_of[a.stage] == d) for d in range(form.num_devices)
        )
        schedule = fp.Schedule(lanes)
        lifted = lift(schedule)
        fp.schedules.check(lifted)
        assert lifted.device_of == problem.device_of
        before, after = fp.simulate(schedule, form.cost), fp.simulate(lifted, problem.cost)
        assert after.makespan == pytest.approx(before.makespan)
        for device, limit in enumerate(problem.limits):
            place = form.limits.index(limit)
            assert after.peak[device] <= before.peak[place] * (1 + 1e-9)
    schedule = fp.schedules.fill_drain(2, 2)
    assert same(schedule) is schedule


@pytest.mark.parametrize(
    "placement",
    [
        (1, 0, 0),
        (0, 1, 0),
        (0, 0, 1),
        (2, 0, 1),
        (0, 1, 0, 1),
        (1, 1, 0, 0),
        (0, 1, 1, 0),
        (1, 0, 0, 1),
    ],
)
@pytest.mark.parametrize("cap", [None, 3.0])
def test_any_placement_is_searched_to_the_optimum(placement, cap):
    """That the solver proves."""
    pytest.importorskip("ortools")
    stages, devices = len(placement), max(placement) + 1
    cost = fp.Cost([1, 3, 2, 1][:stages], [2, 1, 3, 2][:stages], [1, 2, 1, 1][:stages], comm=1)
    options = {"num_stages": stages, "memory_limit": cap, "placement": placement}
    found = search(cost, devices, 4, evaluations=3000, seconds=100, **options)
    proven = search(cost, devices, 4, evaluations=3000, exact=True, seconds=30, **options)
    assert found.schedule.device_of == placement
    assert found.makespan <= proven.lower_bound * 1.01
