"""The zero-bubble papers' tables: their automatic schedules to four digits, what beats them, and
proven optima."""

import itertools

import pytest
from common import search
from greedy_schedules import on_a_line, on_a_v

import funcpipe as fp
from funcpipe._src.search.bounds import lower_bound
from funcpipe._src.search.problem import Problem, as_schedule, gap_of

# arXiv 2401.10241, table 9: p, m, T_F, T_B, T_W, hop in microseconds, hidden size, heads; table 5:
# the bubbles of ZB-1p and ZB-2p; the bounds of the span and of the makespan at the memory of ZB-2p
# (appendix B, and the chain of all microbatches).
LINE = [
    (8, 24, 18522, 18086, 9337, 601, 2304, 24, 0.1585, 0.0433, 0.0433, 0.1083),
    (8, 32, 18513, 18086, 9331, 626, 2304, 24, 0.1242, 0.0039, 0, 0.0835),
    (8, 64, 18546, 18097, 9321, 762, 2304, 24, 0.0674, 0.0026, 0, 0.0439),
    (8, 24, 29718, 29444, 19927, 527, 4096, 32, 0.1323, 0.0029, 0, 0.1003),
    (8, 32, 29802, 29428, 19530, 577, 4096, 32, 0.1045, 0.0022, 0, 0.0778),
    (16, 48, 11347, 11248, 8132, 377, 5120, 40, 0.1397, 0.0066, 0, 0.1065),
    (16, 64, 11307, 11254, 8101, 379, 5120, 40, 0.1088, 0.0054, 0, 0.0820),
    (32, 96, 10419, 10207, 7715, 408, 6144, 48, 0.1421, 0.0038, 0.0030, 0.1098),
    (32, 256, 10402, 10248, 7698, 460, 6144, 48, 0.0594, 0.0018, 0.0018, 0.0443),
]

# Table 8: p, m, f, b, w of a stage (a device has two), hop, hidden size, heads, the bubble of ZB-V.
VEE = [
    (16, 48, 14407, 14380, 9676, 1610, 4096, 32, 0.0697),
    (16, 64, 14412, 14393, 9688, 1621, 4096, 32, 0.0533),
    (16, 128, 14316, 14306, 9639, 1619, 4096, 32, 0.0274),
    (32, 96, 9458, 9748, 7288, 879, 6144, 48, 0.0593),
    (32, 128, 9469, 9744, 7306, 892, 6144, 48, 0.0451),
    (32, 256, 9447, 9644, 7193, 887, 6144, 48, 0.0236),
]


def cost_of(row):
    """Times of a row, and the memory of a layer (table 1, s = 1024): residual, and what is left of
    it for W."""
    _, _, forward, inward, weight, hop, hidden, heads, *_ = row
    whole = 34 * hidden + 5 * heads * 1024
    return fp.Cost(forward, inward, weight, comm=hop, residual=whole, weight_residual=32 * hidden)


def problem_of(row, microbatches, *, placement=None, objective="span"):
    """A row as a problem that may hold so many microbatches a device."""
    cost = cost_of(row)
    return Problem(
        cost,
        placement or tuple(range(row[0])),
        row[1],
        (microbatches * cost.residual,) * row[0],
        objective,
    )


def best_of(problem, built):
    """The shortest span of some orders, each legal and within its memory."""
    timelines = [fp.simulate(as_schedule(orders, "built"), problem.cost) for orders in built]
    assert timelines
    assert all(problem.fits(timeline.peak) for timeline in timelines)
    return min(timelines, key=lambda timeline: timeline.span)


@pytest.mark.slow
@pytest.mark.parametrize("row", LINE[::3], ids=[f"{row[0]}x{row[1]}-{row[6]}" for row in LINE[::3]])
@pytest.mark.parametrize("share", [1, 2])
def test_greedy_schedules_on_a_line_are_zb_1p_and_zb_2p(row, share):
    """Table 5, to four digits."""
    problem = problem_of(row, share * row[0])
    assert row[7 + share] == pytest.approx(
        best_of(problem, on_a_line(problem)).span_bubble, abs=5e-5
    )


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=pytest.mark.slow if row[1] > 48 else ()) for row in VEE],
    ids=[f"{row[0]}x{row[1]}" for row in VEE],
)
def test_greedy_schedules_on_a_v_are_zb_v(row):
    """Table 8, to four digits."""
    problem = problem_of(row, 2 * row[0], placement=(*range(row[0]), *reversed(range(row[0]))))
    assert row[-1] == pytest.approx(best_of(problem, on_a_v(problem)).span_bubble, abs=5e-5)


@pytest.mark.parametrize("row", LINE, ids=[f"{row[0]}x{row[1]}-{row[6]}" for row in LINE])
def test_bounds_of_the_tables(row):
    """As a share of the bound that is no work: at the memory of ZB-2p, for both objectives."""
    work = row[1] * sum(row[2:5])
    for objective, share in (("span", row[10]), ("makespan", row[11])):
        bound = lower_bound(problem_of(row, 2 * row[0], objective=objective)).value
        assert share == pytest.approx((bound - work) / bound, abs=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("at", [0, 8])
def test_what_cannot_be_beaten_is_known_to_be(at):
    """Two rows of table 5 are optimal: the greedy schedule is as short as the bound. A search comes
    within 0.05%."""
    row = LINE[at]
    problem = problem_of(row, 2 * row[0])
    bound = lower_bound(problem).value
    built = best_of(problem, on_a_line(problem))
    assert 0.0 == gap_of(built.span, bound)
    assert row[9] == pytest.approx(built.span_bubble, abs=5e-5)
    found = search(
        problem.cost,
        row[0],
        row[1],
        memory_limit=2 * row[0] * problem.cost.residual,
        objective="span",
        evaluations=300,
        seconds=300,
    )
    assert bound == pytest.approx(found.lower_bound)
    assert found.gap <= 5e-4


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("at", "most"), [(3, 0.0015), (4, 0.0012), (5, 0.0036)])
def test_a_search_beats_zb_2p(at, most):
    """At the memory of ZB-2p, with the default number of evaluations; about half its bubble."""
    row = LINE[at]
    cost = cost_of(row)
    found = search(
        cost,
        row[0],
        row[1],
        memory_limit=2 * row[0] * cost.residual,
        objective="span",
        evaluations=10_000 if at != 5 else 4_000,
        seconds=600,
    )
    assert max(found.peak) <= 2 * row[0] * cost.residual
    assert found.timeline.span_bubble <= most


# Proven by constraint programming: (p, m, F, I, W, hop), then by the memory limit in residuals
# makespan and span.
OPTIMA = {
    (2, 4, 1, 1, 1, 0): {2: (13, 13), 3: (13, 12)},
    (2, 8, 1, 1, 1, 0): {2: (25, 25), 3: (25, 24)},
    (3, 6, 1, 1, 1, 0): {2: (25, 25), 3: (20, 20), 4: (20, 19), 5: (20, 18)},
    (4, 8, 1, 1, 1, 0): {3: (31, 31), 4: (27, 27), 5: (27, 26), 6: (27, 25), 7: (27, 24)},
    (4, 8, 2, 2, 1, 0): {4: (49, 49), 6: (46, 45), 8: (46, 45)},
    (3, 6, 5, 6, 4, 1): {3: (112, 112), 4: (102, 101), 6: (102, 96)},
    (4, 8, 5, 6, 4, 1): {4: (153, 153), 6: (138, 134), 8: (138, 131)},
}
CASES = [
    (case, cap, *both)
    for case, caps in OPTIMA.items()
    for cap, values in caps.items()
    for both in zip(("makespan", "span"), values, strict=True)
]


def optimum(case, cap, objective, **options):
    """Search one of the small cases."""
    devices, microbatches, forward, inward, weight, hop = case
    cost = fp.Cost(forward, inward, weight, comm=hop)
    return search(
        cost,
        devices,
        microbatches,
        memory_limit=cap,
        objective=objective,
        **{"evaluations": 3000, "seconds": 300, **options},
    )


@pytest.mark.parametrize(("case", "cap", "objective", "value"), CASES, ids=itertools.count())
def test_small_optima_are_found_without_a_solver(case, cap, objective, value):
    """Every one."""
    found = optimum(case, cap, objective)
    assert value == pytest.approx(found.makespan if objective == "makespan" else found.span)


@pytest.mark.parametrize(
    ("placement", "devices", "microbatches", "cap", "value"),
    [
        ("v", 4, 8, 4, 59),
        ("v", 4, 8, 6, 53),
        ("v", 4, 8, 8, 51),
        ("v", 3, 6, 4, 41),
        ("v", 3, 6, 6, 38),
        ("loop", 4, 8, 11, 51),
        ("loop", 4, 8, 16, 51),
        ("loop", 3, 6, 9, 38),
    ],
)
def test_small_optima_with_two_stages_a_device(placement, devices, microbatches, cap, value):
    """Makespans in units of a stage's F = I = W."""
    found = search(
        fp.Cost(),
        devices,
        microbatches,
        num_stages=2 * devices,
        memory_limit=cap,
        placement=placement,
        evaluations=3000,
        seconds=300,
    )
    assert value == found.makespan


# The frontier of controllable memory (arXiv 2405.15362) for F = I = W: by half-microbatches of
# memory, the bubble in stage times, whatever the number of microbatches.
FRONTIER = {
    3: {4: 5, 5: 3, 6: 0},
    4: {4: 11, 5: 8, 6: 5, 7: 3, 8: 0},
    6: {6: 17, 7: 14, 8: 11, 9: 8, 10: 5, 11: 3, 12: 0},
}


@pytest.mark.parametrize(
    ("devices", "cap"),
    [
        pytest.param(p, cap, marks=pytest.mark.slow if p > 3 else ())
        for p, caps in FRONTIER.items()
        for cap in caps
    ],
)
def test_the_frontier_of_the_v_is_reached(devices, cap):
    """Bubble against memory, as span."""
    found = search(
        fp.Cost(),
        devices,
        2 * devices,
        num_stages=2 * devices,
        memory_limit=cap,
        placement="v",
        objective="span",
        evaluations=3000,
        seconds=300,
    )
    assert max(found.peak) <= cap
    assert found.span - 12 * devices <= FRONTIER[devices][cap]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("cap", "without", "value"), [(2, 410, 300), (3, 310, 280), (4, 270, 270)])
def test_remat_of_some_residuals_saves_waiting_for_memory(cap, without, value):
    """p = 4, m = 8, F = I = W = 10: between computing nothing and everything again."""
    case = (4, 8, 10, 10, 10, 0)
    found = optimum(case, cap, "span", remat=True, evaluations=20_000, seconds=500)
    assert found.span <= value <= without
    assert max(found.peak) <= cap
    repeated = [
        action for order in found.schedule.orders for action in order if action.kind is fp.Kind.R
    ]
    assert 0 <= len(repeated) < 32
    assert bool(repeated) == (value < without)
