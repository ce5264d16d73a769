"""The clock against closed forms, the zero-bubble paper's tables, and an independent event
simulator."""

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from funcpipe._src.core.errors import ScheduleError
from funcpipe._src.data.cost import Cost
from funcpipe._src.data.result import Timeline
from funcpipe._src.data.schedule import Action, Kind, Schedule
from funcpipe._src.data.stage import stage
from funcpipe._src.lower.plan import make_plan
from funcpipe._src.schedules.families import (
    fill_drain,
    interleaved,
    looped_bfs,
    one_f_one_b,
    zero_bubble,
)
from funcpipe._src.schedules.legal import check
from funcpipe._src.schedules.transforms import remat
from funcpipe._src.view.simulate import simulate

TIMES = [(1, 1, 1), (2, 3, 1), (10, 12, 8), (5, 5, 5)]
"""T_F, T_I, T_W, in whole numbers so that closed forms are exact."""


@pytest.mark.parametrize(("forward", "inward", "weight"), TIMES)
@pytest.mark.parametrize("comm", [0, 3])
def test_fill_drain_takes_m_plus_p_minus_1_steps_and_two_hops_a_device(
    forward: int, inward: int, weight: int, comm: int
) -> None:
    """(m + p - 1)(F + B) + 2 (p - 1) c."""
    for p, m in itertools.product(range(1, 6), range(1, 9)):
        expected = (m + p - 1) * (forward + inward + weight) + 2 * (p - 1) * comm
        assert (
            expected
            == simulate(fill_drain(p, m), Cost(forward, inward, weight, comm=comm)).makespan
        )


@pytest.mark.parametrize(("forward", "inward", "weight"), TIMES)
def test_forward_only_takes_m_plus_p_minus_1_forwards(
    forward: int, inward: int, weight: int
) -> None:
    """(m + p - 1) F + (p - 1) c, and it holds no residuals."""
    for p, m in itertools.product(range(1, 6), range(1, 9)):
        timeline = simulate(fill_drain(p, m, backward=False), Cost(forward, inward, weight, comm=2))
        assert ((m + p - 1) * forward + 2 * (p - 1), (0.0,) * p) == (
            timeline.makespan,
            timeline.peak,
        )


@pytest.mark.parametrize(("forward", "inward", "weight"), TIMES)
@pytest.mark.parametrize("comm", [0, 1])
def test_1f1b_with_latency_pays_two_hops_a_device_in_every_round(
    forward: int, inward: int, weight: int, comm: int
) -> None:
    """(m + p - 1) T + c (2 (p - 1)(m / p + 1) - 2) where p divides m: makespan and span alike."""
    for p, rounds in itertools.product(range(2, 9), range(1, 5)):
        m = p * rounds
        timeline = simulate(one_f_one_b(p, m), Cost(forward, inward, weight, comm=comm))
        expected = (m + p - 1) * (forward + inward + weight) + comm * (
            2 * (p - 1) * (rounds + 1) - 2
        )
        assert (expected, expected) == (timeline.makespan, timeline.span)


@pytest.mark.parametrize(("forward", "inward", "weight"), [(10, 10, 10), (10, 12, 8), (5, 6, 4)])
@pytest.mark.parametrize("comm", [0, 1])
def test_zb_h1_waits_for_f_plus_i_minus_w_and_four_hops_a_device(
    forward: int, inward: int, weight: int, comm: int
) -> None:
    """m T + (p - 1)(F + I - W) + 4 (p - 1) c for m >= 2p and hops far shorter than actions."""
    for p in range(2, 9):
        for m in (2 * p, 3 * p + 1):
            timeline = simulate(zero_bubble(p, m), Cost(forward, inward, weight, comm=comm))
            expected = m * (forward + inward + weight) + (p - 1) * (
                forward + inward - weight + 4 * comm
            )
            assert (expected, expected) == (timeline.makespan, timeline.span)


@pytest.mark.parametrize(("forward", "inward", "weight"), TIMES)
@pytest.mark.parametrize("comm", [0, 1])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_device(
    forward: int, inward: int, weight: int, comm: int
) -> None:
    """Bubble (p - 1) T / v + 2 (p v - 1) c where p divides m; times here are those of one stage, T
    / v."""
    whole = forward + inward + weight
    for p, v, rounds in itertools.product(range(2, 6), range(2, 5), range(2, 4)):
        timeline = simulate(
            interleaved(p * v, p * rounds, num_devices=p), Cost(forward, inward, weight, comm=comm)
        )
        assert (p - 1) * whole + 2 * (
            p * v - 1
        ) * comm == timeline.makespan - p * rounds * v * whole


def test_looped_bfs_has_the_bubble_of_interleaved() -> None:
    """(p - 1) T / v."""
    for p, v, rounds in itertools.product(range(1, 5), range(1, 4), range(1, 4)):
        timeline = simulate(looped_bfs(p * v, p * rounds, num_devices=p))
        assert (p - 1) * 3 == timeline.makespan - 3 * p * rounds * v


@pytest.mark.parametrize(("p", "m", "v", "bubble"), [(4, 8, 2, 3), (8, 24, 2, 7), (8, 24, 3, 7)])
def test_looped_zero_bubble_has_p_minus_1_chunks_of_bubble(
    p: int, m: int, v: int, bubble: int
) -> None:
    """(p - 1)(f + i - w) in stage times at the memory of 1F1B: p v residuals of stages."""
    timeline = simulate(zero_bubble(p * v, m, num_devices=p))
    assert (bubble, p * v) == (timeline.makespan - 3 * m * v, max(timeline.peak))


# arXiv 2401.10241, table 9 (times in ms) with table 5: bubble rates of 1F1B, of 1F1B-I (as an
# honest event simulation has them; the paper's own cells lack p hops), of ZB-H1; v of 1F1B-I.
TABLE_5 = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 3, 0.2431, 0.1090, 0.1585),
    (8, 32, 18.513, 18.086, 9.331, 0.626, 3, 0.1985, 0.0847, 0.1242),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 3, 0.1240, 0.0461, 0.0674),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 4, 0.2347, 0.0827, 0.1323),
    (8, 32, 29.802, 29.428, 19.530, 0.577, 4, 0.1898, 0.0644, 0.1045),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 3, 0.2552, 0.1136, 0.1397),
    (16, 64, 11.307, 11.254, 8.101, 0.379, 3, 0.2082, 0.0878, 0.1088),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 2, 0.2646, 0.1528, 0.1421),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 2, 0.1352, 0.0641, 0.0594),
]
# Table 8, its times per half of a device: bubble rates of 1F1B, 1F1B-I with v = 2, ZB-H1.
TABLE_8 = [
    (16, 48, 14407, 14380, 9676, 1610, 0.2668, 0.1499, 0.1536),
    (16, 64, 14412, 14393, 9688, 1621, 0.2206, 0.1169, 0.1198),
    (16, 128, 14316, 14306, 9639, 1619, 0.1390, 0.0621, 0.0637),
    (32, 96, 9458, 9748, 7288, 879, 0.2676, 0.1509, 0.1429),
    (32, 128, 9469, 9744, 7306, 892, 0.2204, 0.1177, 0.1111),
    (32, 256, 9447, 9644, 7193, 887, 0.1362, 0.0626, 0.0593),
]


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE_5, ids=lambda row: f"{row[0]}x{row[1]}_{row[2]}")
def test_table_5_of_the_zero_bubble_paper(row: tuple[float, ...]) -> None:
    """The cells of 1F1B, 1F1B-I and ZB-H1 within half of the last digit."""
    p, m, v = int(row[0]), int(row[1]), int(row[6])
    forward, inward, weight, comm = row[2:6]
    whole = Cost(forward, inward, weight, comm=comm)
    part = Cost(forward / v, inward / v, weight / v, comm=comm)
    simulated = [
        simulate(one_f_one_b(p, m), whole).span_bubble,
        simulate(interleaved(p * v, m, num_devices=p), part).span_bubble,
        simulate(zero_bubble(p, m), whole).span_bubble,
    ]
    assert list(row[7:]) == pytest.approx(simulated, abs=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE_8, ids=lambda row: f"{row[0]}x{row[1]}")
def test_table_8_of_the_zero_bubble_paper(row: tuple[float, ...]) -> None:
    """The cells of 1F1B, 1F1B-I (the paper's lack p hops) and ZB-H1 within half of the last
    digit."""
    p, m = int(row[0]), int(row[1])
    forward, inward, weight, comm = row[2:6]
    whole = Cost(2 * forward, 2 * inward, 2 * weight, comm=comm)
    looped = simulate(
        interleaved(2 * p, m, num_devices=p), Cost(forward, inward, weight, comm=comm)
    )
    simulated = [
        simulate(one_f_one_b(p, m), whole).span_bubble,
        1 - max(looped.busy) / (looped.span - p * comm),
        simulate(zero_bubble(p, m), whole).span_bubble,
    ]
    assert list(row[6:]) == pytest.approx(simulated, abs=5e-5)


def test_peaks_of_1f1b_fall_from_the_first_device_to_the_last() -> None:
    """min(M, D - d) residuals of each stage."""
    for p, m in itertools.product(range(1, 7), range(1, 9)):
        assert tuple(min(m, p - d) for d in range(p)) == simulate(one_f_one_b(p, m)).peak


def test_peaks_of_1f1b_in_blocks_count_every_stage_of_the_block() -> None:
    """Two stages a device hold twice as much, at most."""
    timeline = simulate(one_f_one_b(6, 8, num_devices=3), Cost(residual=2))
    assert (12, 8, 4) == timeline.peak


@pytest.mark.parametrize("family", [fill_drain, looped_bfs])
def test_peaks_of_all_forwards_first_are_all_residuals(family: Callable[..., Schedule]) -> None:
    """M residuals of each stage of the device."""
    for p, v, m in itertools.product(range(1, 4), range(1, 4), range(1, 6)):
        assert (v * m,) * p == simulate(family(p * v, m, num_devices=p)).peak


def test_peaks_of_interleaved_in_closed_form() -> None:
    """2 (p - 1 - d) + (v - 1) p + 1 residuals where p divides m, never more than all."""
    for p, v, rounds in itertools.product(range(1, 6), range(2, 5), range(1, 4)):
        expected = tuple(min(p * rounds * v, 2 * (p - 1 - d) + (v - 1) * p + 1) for d in range(p))
        assert expected == simulate(interleaved(p * v, p * rounds, num_devices=p)).peak


@pytest.mark.parametrize(("whole", "rest"), [(1, 0.5), (2, 1), (34, 20)])
def test_peaks_of_zb_h1_are_a_mixture_that_never_exceeds_1f1b(whole: float, rest: float) -> None:
    """(p - d) M_B + d M_W."""
    for p in range(1, 9):
        timeline = simulate(zero_bubble(p, 2 * p), Cost(residual=whole, weight_residual=rest))
        assert tuple((p - d) * whole + d * rest for d in range(p)) == timeline.peak


def test_remat_holds_one_residual_at_a_time() -> None:
    """On every device, whatever the number of microbatches; the same for 1F1B."""
    schedules = [
        remat(fill_drain(4, 9)),
        remat(one_f_one_b(4, 9)),
        remat(fill_drain(6, 9, num_devices=2)),
    ]
    assert [(1,) * 4, (1,) * 4, (1,) * 2] == [simulate(schedule).peak for schedule in schedules]


def test_remat_takes_the_time_of_r() -> None:
    """R costs what F costs, or what the cost says."""
    schedule = remat(fill_drain(1, 4))
    assert [16, 12 + 4 * 7] == [simulate(schedule, Cost(remat=r)).makespan for r in (None, 7)]


def test_costs_per_stage_count_for_their_stage_only() -> None:
    """Times and memory of each stage; B may cost something else than I and W."""
    cost = Cost((1, 10), (2, 20), (4, 40), backward=(100, 1000), residual=(1, 5))
    timeline = simulate(one_f_one_b(2, 1), cost)
    assert (1 + 10 + 1000 + 100, (1, 5)) == (timeline.makespan, timeline.peak)


def test_stages_of_one_device_need_no_hop() -> None:
    """comm is paid between devices only."""
    assert 12 == simulate(one_f_one_b(4, 1, num_devices=1), Cost(comm=100)).makespan
    assert 12 + 2 * 100 == simulate(one_f_one_b(4, 1, num_devices=2), Cost(comm=100)).makespan


def test_a_plan_simulates_as_its_schedule_where_it_has_slots_enough() -> None:
    """Slots are as many as plan order needs; where values travel long, who sends waits until it
    hears of a free one."""
    schedule = interleaved(4, 4, num_devices=2)
    plan = make_plan([stage(lambda p, x: x)] * 4, schedule, loss=lambda y, t: y)
    assert simulate(schedule) == simulate(plan)
    assert (42.0, 58.0) == (
        simulate(schedule, Cost(comm=2)).makespan,
        simulate(plan, Cost(comm=2)).makespan,
    )
    roomy = make_plan(plan.stages, schedule, loss=plan.loss, spare_slots=2)
    assert simulate(schedule, Cost(comm=2)) == simulate(roomy, Cost(comm=2))


def test_an_illegal_schedule_is_refused() -> None:
    """A clock needs a schedule that can run."""
    with pytest.raises(ScheduleError, match="microbatch 0 is missing, but microbatch 1 appears"):
        simulate(Schedule.parse("0F1 0B1"))


def test_a_cost_with_another_number_of_stages_is_refused_naming_every_field() -> None:
    """One number, or one for each stage."""
    with pytest.raises(ScheduleError) as error:
        simulate(fill_drain(2, 2), Cost((1, 2), [1, 2, 3], remat=(1,)))
    expected = (
        "a cost needs one number, or one for each of 2 stages (of layers: cost.group(sizes)):"
        "\n  * backward_input has 3 numbers\n  * remat has 1 numbers"
    )
    assert expected == str(error.value)


def test_sizes_must_add_up_to_the_layers_of_a_cost():
    with pytest.raises(
        ScheduleError, match=r"sizes \[2, 2\] add up to 4 layers[^*]*\* forward has 5 numbers"
    ):
        Cost([1, 2, 3, 4, 5]).group([2, 2])


# -- random costs and random schedules
# -------------------------------------------------------------------------------


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """A family, perhaps with remat, its orders then shuffled by swaps of neighbours that stay
    legal."""
    family = draw(st.sampled_from([fill_drain, one_f_one_b, looped_bfs, interleaved, zero_bubble]))
    devices = draw(st.integers(1, 4))
    schedule = family(
        devices * draw(st.integers(1, 3)), draw(st.integers(1, 5)), num_devices=devices
    )
    if draw(st.booleans()):
        kept = draw(st.sets(st.integers(0, 4)))
        schedule = remat(schedule, keep=lambda action: action.microbatch in kept)
    for _ in range(draw(st.integers(0, 10))):
        rows = [list(order) for order in schedule.orders]
        row = draw(st.sampled_from(rows))
        at = draw(st.integers(0, len(row) - 1))
        row[at : at + 2] = row[at : at + 2][::-1]
        swapped = Schedule(tuple(map(tuple, rows)), schedule.name)
        try:
            check(swapped)
            schedule = swapped
        except ScheduleError:
            pass
    return schedule


@st.composite
def priced(draw: st.DrawFn) -> tuple[Schedule, Cost]:
    """A schedule and a random cost, of one number or of one per stage."""
    schedule = draw(schedules())
    number = st.floats(0, 10) | st.integers(0, 3)
    numbers = number | st.lists(number, min_size=schedule.num_stages, max_size=schedule.num_stages)
    backward, again = draw(st.none() | numbers), draw(st.none() | numbers)
    return schedule, Cost(
        draw(numbers),
        draw(numbers),
        draw(numbers),
        backward=backward,
        remat=again,
        comm=draw(number),
    )


def needs(action: Action) -> list[Action]:
    """What an action waits for on other stages, written from the definition."""
    kind, stage, microbatch, _ = action
    if kind is Kind.F:
        return [Action(Kind.F, stage - 1, microbatch)]
    if kind in (Kind.B, Kind.I):
        return [Action(Kind.B, stage + 1, microbatch), Action(Kind.I, stage + 1, microbatch)]
    return []


def brute_force(schedule: Schedule, cost: Cost) -> dict[Action, tuple[float, float]]:
    """Start and end of everything, by relaxing every constraint until nothing changes: no queue, no
    order, no clock."""
    actions = [(device, action) for device, order in enumerate(schedule.orders) for action in order]
    home = {action: device for device, action in actions}
    times = dict.fromkeys(home, (0.0, 0.0))
    while True:
        new: dict[Action, tuple[float, float]] = {}
        for device, order in enumerate(schedule.orders):
            free = 0.0
            for action in order:
                waits = [free]
                for need in needs(action):
                    if need in home:
                        waits.append(times[need][1] + (cost.comm if home[need] != device else 0.0))
                start = max(waits)
                free = start + cost.of(action.kind, action.stage)
                new[action] = (start, free)
        if new == times:
            return times
        times = new


@pytest.mark.slow
@settings(deadline=None, database=None, max_examples=150)
@given(priced())
def test_the_clock_agrees_with_brute_force(given: tuple[Schedule, Cost]) -> None:
    """Every start and every end, to the bit, at any cost of any legal schedule."""
    schedule, cost = given
    timeline = simulate(schedule, cost)
    assert brute_force(schedule, cost) == {
        span.action: (span.start, span.end) for span in timeline.spans
    }


@settings(deadline=None, database=None, max_examples=100)
@given(priced())
def test_the_makespan_is_bounded_by_work_and_by_every_chain(given: tuple[Schedule, Cost]) -> None:
    """No device ends before its own work, no microbatch before its way; no more is added than all
    hops."""
    schedule, cost = given
    timeline = simulate(schedule, cost)
    work = [sum(cost.of(a.kind, a.stage) for a in order) for order in schedule.orders]
    device_of = schedule.device_of
    hops = sum(a != b for a, b in itertools.pairwise(device_of)) * cost.comm
    chain = hops + sum(cost.of(Kind.F, s) for s in range(schedule.num_stages))
    assert work == pytest.approx(list(timeline.busy))
    assert timeline.makespan >= max(*work, chain, timeline.span) - 1e-9
    assert timeline.makespan <= sum(work) + 2 * len(timeline.spans) * cost.comm + 1e-9
    assert timeline.span >= max(work) - 1e-9


@pytest.mark.slow
@settings(deadline=None, database=None, max_examples=150)
@given(priced())
def test_the_critical_path_is_a_chain_as_long_as_the_makespan(given: tuple[Schedule, Cost]) -> None:
    """It starts at 0, ends with the last action, each starts when the one before (and a hop) lets
    it."""
    schedule, cost = given
    timeline = simulate(schedule, cost)
    at = {span.action: span for span in timeline.spans}
    path = [at[action] for action in timeline.critical_path]
    assert (0.0, timeline.makespan) == (path[0].start, path[-1].end)
    for before, after in itertools.pairwise(path):
        assert before.end + (cost.comm if before.device != after.device else 0.0) == after.start
        order = schedule.orders[after.device]
        neighbour = order[order.index(after.action) - 1] if after.action != order[0] else None
        assert before.action == neighbour or before.action in needs(after.action)


@settings(deadline=None, database=None, max_examples=60)
@given(schedules())
def test_spans_are_sorted_by_start_and_keep_the_order_of_their_device(schedule: Schedule) -> None:
    """One span for each action, no two at a time on a device."""
    timeline: Timeline = simulate(schedule, Cost(forward=0, comm=1))
    starts = [span.start for span in timeline.spans]
    assert sorted(starts) == starts
    for device, order in enumerate(schedule.orders):
        assert list(order) == [span.action for span in timeline.spans if span.device == device]
