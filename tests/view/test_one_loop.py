"""Simulating in plan order against an engine of events, in which lanes sleep and are woken: equal
in every number."""

import pytest
from common import schedules as every_family
from event_play import EventPlay
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import nets, schedules, unequal

import funcpipe as fp
from funcpipe._src.lower.plan import make_plan, program_for
from funcpipe._src.lower.program import lower
from funcpipe._src.schedules.memory import running_sum
from funcpipe._src.view.play import Play


def assert_equal_clocks(program, cost, *, bounded):
    """Equal spans, causes, critical path and memory."""
    one, other = (kind(program, cost, bounded=bounded) for kind in (Play, EventPlay))
    one.run()
    other.run()
    assert [lane.spans for lane in one.lanes] == [lane.spans for lane in other.lanes]
    assert one.causes == other.causes
    assert one.critical_path == other.critical_path
    assert [running_sum(lane.changes) for lane in one.lanes] == [
        running_sum(lane.changes) for lane in other.lanes
    ]


@st.composite
def costs(draw, stages, slices=1):
    """Any cost, with times for every kind, in thirds: equal sums must be added in the same
    order."""
    number = st.integers(0, 9).map(lambda thirds: thirds / 3)
    each = lambda: draw(st.lists(number, min_size=stages, max_size=stages))
    pairs = [(stash, pop) for stash in range(stages) for pop in range(stash + 1, stages)]
    chosen = draw(st.lists(st.sampled_from(pairs), max_size=3)) if pairs else []
    residual, rest = each(), each()
    return fp.Cost(
        each(),
        each(),
        each(),
        backward=draw(st.sampled_from([None, 1.5])),
        remat=each(),
        offload=each(),
        reduce=each(),
        gather=each(),
        step=each(),
        comm=draw(number),
        bandwidth=draw(st.sampled_from([None, 0.7, 2.0])),
        output=each(),
        skips=[(*pair, draw(number)) for pair in chosen],
        residual=residual,
        weight_residual=[min(both) for both in zip(residual, rest, strict=True)],
        slices=draw(st.lists(st.integers(1, 3), min_size=slices, max_size=slices))
        if slices > 1
        else (),
    )


def marked(draw, schedule):
    """A schedule with some of the actions that moves, reduces, gathers and steps."""
    kinds = {action.kind for order in schedule.orders for action in order}
    if kinds > {fp.Kind.F}:
        if fp.Kind.R not in kinds and draw(st.booleans()):
            schedule = fp.schedules.offload(schedule, ahead=draw(st.integers(0, 2)))
        if draw(st.booleans()):
            schedule = fp.schedules.reduce_grads(schedule)
        if draw(st.booleans()):
            schedule = fp.schedules.step_params(schedule)
    return fp.schedules.gather_params(schedule) if draw(st.booleans()) else schedule


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data())
def test_random_plans_take_as_long_in_plan_order(data):
    schedule = marked(data.draw, data.draw(schedules()))
    plan = make_plan(
        data.draw(nets(schedule.num_stages)),
        schedule,
        loss=print if schedule.has_backward and data.draw(st.booleans()) else None,
        spare_slots=data.draw(st.integers(0, 2)),
    )
    program = program_for(plan, data.draw(st.integers(1, plan.num_microbatches)))
    cost = data.draw(costs(schedule.num_stages, schedule.num_slices))
    cost = data.draw(unequal(cost, program.num_microbatches))
    assert_equal_clocks(program, cost, bounded=data.draw(st.booleans()))


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (4, 5), (6, 4)])
def test_families_take_as_long_in_plan_order(stages, microbatches, bounded):
    cost = fp.Cost(
        [1 + stage / 7 for stage in range(stages)],
        comm=0.3,
        bandwidth=2.0,
        output=0.4,
        residual=1.1,
        weight_residual=0.3,
        reduce=0.7,
        gather=0.9,
    )
    net = [fp.stage(lambda p, x: x)] * stages
    for backward in (True, False):
        for schedule in every_family(stages, microbatches, backward=backward):
            program = make_plan(net, schedule, loss=print if backward else None).program
            assert_equal_clocks(program, cost, bounded=bounded)


@pytest.mark.parametrize("family", [fp.schedules.fill_drain, fp.schedules.looped_bfs])
def test_the_halves_of_a_vjp_take_as_long_in_plan_order(family):
    net = [fp.stage(lambda p, x: x)] * 4
    program = lower(net, family(4, 3, num_devices=2), loss=False, outputs=True, halves=True)
    assert_equal_clocks(program, fp.Cost(comm=0.3, output=0.2), bounded=True)
