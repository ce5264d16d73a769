"""The search: what it finds is legal, within its limits, repeatable, and no better than its bounds
allow."""

import itertools
import random

import pytest
from common import search
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import unequal

import funcpipe as fp
from funcpipe import schedules as S
from funcpipe._src.schedules.clock import CODE, CODED, coded
from funcpipe._src.search.bounds import lower_bound
from funcpipe._src.search.climb import seeds
from funcpipe._src.search.listing import run
from funcpipe._src.search.placement import placed
from funcpipe._src.search.polish import Bench, OrderedLane, bounds_of, polish
from funcpipe._src.search.problem import Budget, Problem, as_schedule

TIMES = st.sampled_from([0.5, 1.0, 1.25, 2.0, 3.0])
COUNTS = st.tuples(st.integers(1, 4), st.integers(1, 2), st.integers(1, 6))
"""Devices, stages of each, microbatches."""


@st.composite
def costs(draw, stages):
    """Costs with numbers per stage, hops, links, skips."""
    row = st.lists(TIMES, min_size=stages, max_size=stages)
    fields = {
        "comm": draw(
            st.one_of(st.just(0.0), st.lists(TIMES, min_size=stages - 1, max_size=stages - 1))
        )
    }
    if draw(st.booleans()):
        fields |= {"bandwidth": draw(TIMES), "output": draw(row)}
    if stages > 2 and draw(st.booleans()):
        fields["skips"] = [(0, draw(st.integers(1, stages - 1)), draw(TIMES))]
    if draw(st.booleans()):
        fields["backward"] = draw(row)
    whole = draw(row)
    rest = [one * draw(st.sampled_from([0.0, 0.5, 1.0])) for one in whole]
    return fp.Cost(draw(row), draw(row), draw(row), residual=whole, weight_residual=rest, **fields)


@st.composite
def searches(draw):
    """What to search for: counts, costs, a limit that some schedule keeps, options."""
    devices, share, microbatches = draw(COUNTS)
    cost = draw(unequal(draw(costs(devices * share)), microbatches))
    simplest = fp.simulate(S.one_f_one_b(devices * share, microbatches, num_devices=devices), cost)
    limit = draw(st.sampled_from([None, *(factor * max(simplest.peak) for factor in (1.0, 1.5))]))
    return {
        "cost": cost,
        "num_devices": devices,
        "num_microbatches": microbatches,
        "memory_limit": limit,
        "objective": draw(st.sampled_from(["makespan", "span"])),
        "remat": draw(st.booleans()),
        "offload": draw(st.booleans()),
        "evaluations": 60,
        "seconds": 60,
    }


@settings(max_examples=60)
@given(searches())
def test_what_is_found_is_legal_fits_and_says_the_truth(options):
    """By the simulator, which knows nothing of the search."""
    found = fp.search(**options)
    timeline = fp.simulate(found.schedule, options["cost"])
    assert (timeline.makespan, timeline.span, timeline.peak) == (
        found.makespan,
        found.span,
        found.peak,
    )
    if options["memory_limit"] is not None:
        assert max(timeline.peak) <= options["memory_limit"] * (1 + 1e-9)
    value = timeline.makespan if options["objective"] == "makespan" else timeline.span
    assert found.lower_bound <= value * (1 + 1e-9)
    assert (found.gap == 0) == (found.ended == "bound")
    assert (options["num_devices"], options["num_microbatches"]) == (
        found.schedule.num_devices,
        found.schedule.num_microbatches,
    )
    kinds = {action.kind for order in found.schedule.orders for action in order}
    assert options["remat"] or fp.Kind.R not in kinds
    assert options["offload"] or fp.Kind.O not in kinds


@settings(max_examples=60)
@given(st.data())
def test_no_schedule_beats_the_bounds(data):
    """Every family and orders at random, under random costs and the memory that they need, for both
    objectives."""
    devices, share, microbatches = data.draw(COUNTS)
    stages = devices * share
    cost = data.draw(unequal(data.draw(costs(stages)), microbatches))
    schedules = [
        family(stages, microbatches, num_devices=devices)
        for family in (S.one_f_one_b, S.zb_h2, S.fill_drain, S.interleaved, S.zero_bubble)
    ]
    if share == 2:
        schedules += [
            family(stages, microbatches, num_devices=devices)
            for family in (S.zbv, S.v_half, S.v_min)
        ]
    for schedule, objective in itertools.product(schedules, ("makespan", "span")):
        timeline = fp.simulate(schedule, cost)
        limits = tuple(max(peak, 1e-9) for peak in timeline.peak)
        problem = Problem(cost, schedule.device_of, microbatches, limits, objective)
        assert lower_bound(problem).value <= problem.value(timeline) * (1 + 1e-9)


@settings(max_examples=40)
@given(st.data())
def test_rules_say_what_the_simulator_says(data):
    """List schedules are legal, keep their limits, and take the time that they claim at most."""
    devices, share, microbatches = data.draw(COUNTS)
    stages = devices * share
    cost = data.draw(costs(stages).filter(lambda cost: not cost.skips and cost.bandwidth is None))
    cost = data.draw(unequal(cost, microbatches))
    shape = data.draw(st.sampled_from(["line", "loop", *(["v"] if share == 2 else [])]))
    limit = data.draw(
        st.sampled_from([float("inf"), 4 * max(cost.residual), 8 * max(cost.residual)])
    )
    problem = Problem(
        cost,
        placed(shape, stages, devices),
        microbatches,
        (limit,) * devices,
        data.draw(st.sampled_from(["makespan", "span"])),
        remat=data.draw(st.booleans()),
    )
    tried = [
        listed
        for rules in itertools.islice(seeds(problem), 0, None, 15)
        if (listed := run(problem, rules))
    ]
    for listed in tried:
        timeline = fp.simulate(as_schedule(listed.lanes, "listed"), cost)
        assert problem.value(timeline) <= listed.score.value * (1 + 1e-9)
        assert max(timeline.peak) <= limit * (1 + 1e-9)


@settings(max_examples=25)
@given(st.data())
def test_moving_actions_never_makes_it_longer_or_larger(data):
    """Polishing keeps the schedule legal and within its memory."""
    devices, microbatches, seed = (
        data.draw(st.integers(2, 4)),
        data.draw(st.integers(2, 6)),
        data.draw(st.integers(0, 99)),
    )
    cost = data.draw(costs(devices).filter(lambda cost: not cost.skips and cost.bandwidth is None))
    cost = data.draw(unequal(cost, microbatches))
    schedule = data.draw(st.sampled_from([S.one_f_one_b, S.zero_bubble, S.zb_h2]))(
        devices, microbatches
    )
    before = fp.simulate(schedule, cost)
    problem = Problem(
        cost, schedule.device_of, microbatches, tuple(max(peak, 1.0) for peak in before.peak)
    )
    lanes = [OrderedLane(actions, frozenset()) for actions in coded(schedule.orders)]
    value = before.makespan
    for better in polish(Bench(problem), lanes, random.Random(seed), Budget(150, 60), good=0.0):
        orders = tuple(
            tuple(fp.Action(CODED[code], *place) for code, *place in lane.actions)
            for lane in better
        )
        after = fp.simulate(fp.Schedule(orders), cost)
        assert after.makespan < value
        assert problem.fits(after.peak)
        value = after.makespan


@pytest.mark.parametrize("allowed", ["remat", "offload"])
def test_a_move_makes_room_for_itself(allowed):
    """By R, or O and L: each shorter schedule takes the time that was said, and holds no more at
    any time than it may."""
    cost = fp.Cost([2, 1, 2], [2, 2, 1], [1, 2, 2], offload=[1, 2, 1], comm=1, weight_residual=1.0)
    kinds = set()
    for seed in range(4):
        schedule = S.one_f_one_b(3, 5)
        problem = Problem(cost, schedule.device_of, 5, (2.0, 2.0, 2.0), **{allowed: True})
        bench = Bench(problem)
        lanes = [
            OrderedLane(
                [
                    (CODE[kind], stage, m)
                    for m in range(5)
                    for kind in (fp.Kind.F, fp.Kind.I, fp.Kind.W)
                ],
                frozenset(),
            )
            for stage in range(3)
        ]
        for better in polish(bench, lanes, random.Random(seed), Budget(3_000, 60), good=0.0):
            orders = [lane.actions for lane in better]
            found = as_schedule(orders, "moved")
            timeline = fp.simulate(found, cost)
            assert bench.score(orders).value == pytest.approx(timeline.makespan)
            assert problem.fits(timeline.peak)
            kinds |= {action.kind for order in found.orders for action in order}
    assert (fp.Kind.R if allowed == "remat" else fp.Kind.O) in kinds


@pytest.mark.parametrize("start", [S.one_f_one_b, S.zero_bubble])
def test_a_backward_is_parted_or_its_halves_are_joined_where_that_is_shorter(start):
    """From wholes as from halves; gradients of weights are still added up in the order of the
    microbatches."""
    cost = fp.Cost([2, 3, 2], [2, 2, 3], [3, 2, 2], backward=[4, 3, 4], comm=1)
    for seed in range(4):
        schedule = start(3, 5)
        problem = Problem(cost, schedule.device_of, 5, (3.0, 3.0, 3.0))
        lanes = [OrderedLane(actions, frozenset()) for actions in coded(schedule.orders)]
        kinds = {action.kind for order in schedule.orders for action in order}
        value = fp.simulate(schedule, cost).makespan
        for better in polish(
            Bench(problem), lanes, random.Random(seed), Budget(2_000, 60), good=0.0
        ):
            found = as_schedule([lane.actions for lane in better], "moved")
            timeline = fp.simulate(found, cost)
            assert timeline.makespan < value
            assert problem.fits(timeline.peak)
            assert found.is_ascending
            value, kinds = (
                timeline.makespan,
                kinds | {action.kind for order in found.orders for action in order},
            )
        assert {fp.Kind.B, fp.Kind.I, fp.Kind.W} <= kinds


def test_the_host_takes_what_two_residuals_do_not_leave_room_for():
    """Moves find where it pays; no rule and no family does. Without the host there is no such
    schedule."""
    options = {"memory_limit": 2, "evaluations": 5_000, "seconds": 300}
    found, plain = (
        search(fp.Cost(offload=0.5), 4, 8, offload=offload, **options) for offload in (True, False)
    )
    assert found.makespan <= 34 < 41 == plain.makespan
    assert max(found.peak) <= 2
    kinds = [action.kind for order in found.schedule.orders for action in order]
    assert kinds.count(fp.Kind.O) == kinds.count(fp.Kind.L) > 0


def test_an_action_moves_past_those_of_others_only():
    """Not past its own stage's of the same microbatch, nor past the same kind of its stage."""
    lane = [(CODE[a.kind], a.stage, a.microbatch) for a in S.zb_h2(2, 3).orders[1]]
    assert "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2" == " ".join(map(str, S.zb_h2(2, 3).orders[1]))
    assert [(0, 0), (1, 2), (1, 2), (3, 4), (3, 4), (5, 7), (2, 6), (7, 7), (8, 8)] == [
        bounds_of(lane, at) for at in range(9)
    ]


def test_the_same_seed_finds_the_same():
    """A number of evaluations makes it repeatable; another seed may find another."""
    options = {"memory_limit": 3, "evaluations": 400, "seconds": 300}
    cost = fp.Cost(5, 6, 4, comm=1)
    one, other = (search(cost, 4, 8, seed=3, **options) for _ in range(2))
    assert "evaluations" == one.ended
    assert (one.schedule, one.evaluations, one.source) == (
        other.schedule,
        other.evaluations,
        other.source,
    )


def test_seconds_cut_it_short():
    """And the result says so."""
    cost = fp.Cost([1.0, 1.1] * 8, [1.2, 0.9] * 8, [0.7, 0.8] * 8, comm=0.1)
    found = search(cost, 16, 64, evaluations=10**9, seconds=0.5, objective="span")
    assert "seconds" == found.ended


@pytest.mark.slow
def test_stages_that_differ_and_torch_s_orders():
    """Unequal times on a V: beaten at equal or lower memory, as in no static order."""
    for times in ((1, 1.4, 0.6), (1, 2, 1), (1, 0.8, 1.2), (1, 1, 1)):
        cost = fp.Cost(*times, weight_residual=1.0)
        for family in (S.interleaved, S.zero_bubble, S.zbv, S.dualpipe_v):
            theirs = fp.simulate(family(16, 32, num_devices=8), cost)
            found = search(
                cost,
                8,
                32,
                num_stages=16,
                memory_limit=max(theirs.peak),
                evaluations=40,
                seconds=120,
            )
            assert max(found.peak) <= max(theirs.peak)
            assert found.makespan <= theirs.makespan


def test_skips_count_as_memory():
    """What waits for its pop takes room that residuals then do not have."""
    skips = fp.Cost(1, 1, 1, skips=[(0, 3, 1.0)])
    free = search(fp.Cost(), 4, 8, memory_limit=5, evaluations=200)
    found = search(skips, 4, 8, memory_limit=5, evaluations=200)
    assert free.makespan < found.makespan
    assert max(found.peak) <= 5


def test_a_whole_backward_where_that_is_cheaper():
    """An eager stage's I does all the work: there B is what to run."""
    cost = fp.Cost(1, 2, 0.5, backward=2)
    found = search(cost, 3, 6, evaluations=200)
    assert any(action.kind is fp.Kind.B for order in found.schedule.orders for action in order)
    assert found.makespan <= fp.simulate(S.one_f_one_b(3, 6), cost).makespan


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cost": 3}, "search takes a Cost"),
        ({"num_devices": 0}, "num_devices must be positive"),
        ({"num_microbatches": 1.5}, "num_microbatches must be a whole number"),
        ({"objective": "speed"}, "objective is 'makespan' or 'span'"),
        ({"seconds": 0}, "seconds is a positive number"),
        ({"evaluations": -1}, "evaluations must be positive"),
        ({"num_stages": 1}, "num_devices must be at most the number of stages"),
        (
            {"memory_limit": [1, 2, 3]},
            "memory_limit is a positive number, or one for each of 2 devices",
        ),
        ({"memory_limit": 0}, "memory_limit is a positive number"),
        (
            {"memory_limit": 0.5},
            "no schedule within a memory limit of 0.5 was found: the least that was found needs "
            "0.5 more",
        ),
        (
            {"placement": "v", "num_stages": 6},
            "takes twice as many stages as devices; got 6 stages on 2",
        ),
        ({"placement": "loop", "num_stages": 3}, "takes a multiple of the devices"),
        ({"placement": "zigzag"}, "placement is 'line', 'loop', 'v', or the device of each stage"),
        ({"placement": 5}, "placement is 'line', 'loop', 'v', or the device of each stage; got 5"),
        ({"evaluations": True}, "evaluations must be a whole number; got True"),
        ({"placement": [0, 0, 2]}, "all devices from 0 to 1; got"),
        ({"cost": fp.Cost([1, 2, 3], [1, 2])}, "backward_input has 2 numbers"),
        ({"remat": "no"}, "remat is True or False; got 'no'"),
    ],
)
def test_searches_that_are_refused(options, says):
    """Before any work, all at once."""
    given = {
        "cost": fp.Cost(),
        "num_devices": 2,
        "num_microbatches": 2,
        "evaluations": 20,
        **options,
    }
    with pytest.raises(fp.ScheduleError, match=says.replace("(", r"\(")):
        fp.search(**given)


def test_a_search_reads_well():
    """The one line that a notebook shows."""
    found = search(fp.Cost(5, 6, 4, comm=1), 3, 6, memory_limit=4, evaluations=500)
    assert str(found).startswith(
        "search: makespan 102, nothing shorter exists; bound by the work of device 2; bubble"
    )
    assert str(found).endswith("ended by bound")
    assert found.critical_path[-1].kind is fp.Kind.W


def test_a_residual_that_grows_at_i():
    """What I leaves may be more than what it takes: then a whole backward is what fits."""
    found = search(fp.Cost(weight_residual=1.5), 2, 2, memory_limit=1, evaluations=50)
    assert (1.0, 1.0) == found.peak


def test_a_skip_between_neighbours_hides_nothing():
    """The bound counts the slower of what goes the same way."""
    cost, more = (fp.Cost(bandwidth=1, output=50, skips=skips) for skips in ([], [(0, 1, 0.01)]))
    options = {"evaluations": 20}
    assert search(cost, 2, 2, **options).lower_bound <= search(more, 2, 2, **options).lower_bound


def test_what_is_away_is_not_sent_away_again():
    """A schedule that moves residuals already keeps its moves, or is given up."""
    from funcpipe._src.search.offload_to_fit import offload_to_fit

    schedule = S.offload(S.fill_drain(2, 4), move=lambda action: action.microbatch == 1)
    problem = Problem(fp.Cost(), schedule.device_of, 4, (1.5, 1.5), offload=True)
    relieved = offload_to_fit(
        problem, schedule, lambda one: fp.simulate(one, problem.cost), Budget(10**6, 60)
    )
    assert relieved is None or max(fp.simulate(relieved, problem.cost).peak) <= 1.5
