"""Schedules on a V, eager 1F1B and ZB-H2: legal for all counts, the published bubbles and memory,
the laws."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from common import EXECUTORS, assert_same_result, cpu_plan, ids, schedules
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as theirs
from watch import Watch

import funcpipe as fp
from funcpipe import schedules as S
from funcpipe._src.schedules import v_shape
from funcpipe._src.schedules.legal import check
from funcpipe._src.schedules.squeeze import most_held, repeated, squeezed, steady
from funcpipe.testing import assert_matches_sequential

Family = Callable[..., fp.Schedule]

V_SHAPED = [S.zbv, S.dualpipe_v, S.v_half, S.v_min]
ANY_COUNT = [S.zbv, S.v_half, S.v_min]
WHOLE = fp.Cost(weight_residual=1)
"""Every F, I and W one unit; I gives back nothing, the hardest case for memory."""

random_sizes = settings(deadline=None, database=None, max_examples=40)


def most_residuals(family: Family, devices: int) -> int:
    """What the docstring allows a device."""
    return {
        S.zbv: 2 * devices,
        S.dualpipe_v: 2 * devices + 1,
        S.v_half: 2 * (devices // 2 + 1),
        S.v_min: 2 * ((devices + 4) // 3),
    }[family]


@random_sizes
@given(st.sampled_from(V_SHAPED), st.integers(1, 10), st.integers(1, 30))
def test_every_count_is_legal_complete_and_within_its_memory(
    family: Family, devices: int, count: int
) -> None:
    """Ascending, on a V, on as many devices as was asked for; remat of it is legal too."""
    count += 2 * devices if family is S.dualpipe_v else 0
    schedule = family(2 * devices, count)
    check(schedule)
    check(S.remat(schedule))
    assert schedule.is_ascending
    assert (2 * devices, count, devices) == (
        schedule.num_stages,
        schedule.num_microbatches,
        schedule.num_devices,
    )
    assert (*range(devices), *reversed(range(devices))) == schedule.device_of
    assert max(fp.simulate(schedule, WHOLE).peak) <= most_residuals(family, devices)
    assert family(2 * devices, count, num_devices=devices) == schedule


@random_sizes
@given(st.integers(1, 8), st.integers(1, 20), st.integers(0, 12))
def test_any_memory_between_v_min_and_zb_v(devices: int, count: int, more: int) -> None:
    """Legal, ascending, on a V, never more than it may; with more memory than ZB-V needs it is none
    the worse."""
    residuals = 2 * ((devices + 4) // 3) + more
    schedule = S.v_adaptive(2 * devices, count, residuals=residuals)
    check(schedule)
    assert schedule.is_ascending
    assert (*range(devices), *reversed(range(devices))) == schedule.device_of
    timeline = fp.simulate(schedule, WHOLE)
    assert max(timeline.peak) <= residuals
    if residuals >= 2 * devices and count > 2 * devices:
        assert 6 * count == timeline.span


@pytest.mark.parametrize("devices", [3, 4, 5, 6, 8])
def test_the_adaptive_frontier(devices: int) -> None:
    """The published bubbles at even memory, at most three more at odd; there half of a residual
    that I gives back helps them."""
    count = 2 * devices + 3
    for residuals in range(2 * ((devices + 4) // 3), 2 * devices + 1):
        timeline = fp.simulate(S.v_adaptive(2 * devices, count, residuals=residuals), WHOLE)
        rising = devices - 1 + 2 * (1 + (residuals + 1) // 2)
        published = 3 * devices - 1 - 3 * residuals + max(3 * devices, rising)
        allowed = 0 if residuals % 2 == 0 and residuals != 10 else 2
        assert published <= timeline.span - 6 * count <= published + allowed


@pytest.mark.parametrize("residuals", [3, 4.0, None])
def test_too_little_memory_for_a_v(residuals: Any) -> None:
    """V-Min holds the least."""
    with pytest.raises(
        fp.ScheduleError,
        match="residuals must be a whole number of at least 4, which V-Min needs on 3 devices",
    ):
        S.v_adaptive(6, 9, residuals=residuals)


def torchs(cls: type, devices: int, microbatches: int) -> str:
    """The order that torch's own class computes."""
    made: Any = object.__new__(cls)
    made.pp_group_size, made.num_stages, made._n_microbatches = devices, 2 * devices, microbatches
    rows: list[str] = []
    for rank in range(devices):
        found = [
            action for action in made._calculate_single_rank_operations(rank) if action is not None
        ]
        rows.append(" ".join(map(words, found)))
    return "\n".join(rows)


def words(action: Any) -> str:
    """An action of torch, or a forward that it overlaps with a backward."""
    return f"({' '.join(map(str, action.sub_actions))})" if action.sub_actions else str(action)


@pytest.mark.parametrize("devices", range(1, 6))
def test_zbv_and_dualpipe_v_equal_torchs(devices: int) -> None:
    """Word for word, also with fewer microbatches than fill the V (DualPipeV refuses those, as
    torch does)."""
    for count in range(1, 14):
        assert torchs(theirs.ScheduleZBVZeroBubble, devices, count) == str(
            S.zbv(2 * devices, count)
        )
        if count >= 2 * devices:
            assert torchs(theirs.ScheduleDualPipeV, devices, count) == str(
                S.dualpipe_v(2 * devices, count)
            )


@pytest.mark.parametrize("devices", [1, 2, 3, 5, 8])
def test_zbv_has_no_bubble_where_all_kinds_take_the_same_time(devices: int) -> None:
    """Span is the work; a single batch waits for the first forward to come down. All devices hold
    the same."""
    for count in (2 * devices - 1, 2 * devices + 3):
        timeline = fp.simulate(S.zbv(2 * devices, count), WHOLE)
        assert (6 * count, 6 * count + devices - 1) == (timeline.span, timeline.makespan)
        assert (2 * devices,) * devices == timeline.peak


@pytest.mark.parametrize(("devices", "bubble"), [(4, 24), (8, 56)])
def test_zbv_bubbles_where_kinds_differ(devices: int, bubble: float) -> None:
    """F, I, W of 10, 12, 8: what the authors' own generator gives."""
    assert 24 * 60 + bubble == fp.simulate(S.zbv(2 * devices, 24), fp.Cost(10, 12, 8)).span


@pytest.mark.parametrize("devices", [2, 3, 4, 5, 6, 7, 8, 9, 16])
@pytest.mark.parametrize("times", [1, 3])
def test_v_half_and_v_min_reach_the_published_bubbles_at_the_published_memory(
    devices: int, times: int
) -> None:
    """Exactly, or less; the bubble does not grow with the microbatches."""
    half = max(1, 3 * devices - (4 if devices % 2 else 7))
    least = 4 * devices - (5 if devices % 3 else 7)
    count = times * devices
    lean = fp.simulate(S.v_half(2 * devices, count), WHOLE)
    leaner = fp.simulate(S.v_min(2 * devices, count), WHOLE)
    assert 6 * count + half == lean.makespan
    assert 6 * count + least - 2 <= leaner.makespan <= 6 * count + least
    if times > 1:
        assert (most_residuals(S.v_half, devices), most_residuals(S.v_min, devices)) == (
            max(lean.peak),
            max(leaner.peak),
        )


@pytest.mark.parametrize(
    ("devices", "count", "makespan"),
    [(2, 4, 26), (4, 10, 66), (4, 16, 102), (8, 20, 134), (8, 32, 206)],
)
def test_dualpipe_v_takes_the_published_time(devices: int, count: int, makespan: int) -> None:
    """With F and B joined as DeepSeek runs them, and, action by action, half the bubble of that."""
    schedule = S.dualpipe_v(2 * devices, count)
    timeline = fp.simulate(schedule, WHOLE)
    assert makespan == timeline.makespan == 6 * count + 2 * (devices - 1)
    apart = fp.simulate(S.unpair(schedule), WHOLE)
    assert (6 * count + devices - 1, (2 * devices + 1,) * devices) == (apart.makespan, apart.peak)


@pytest.mark.parametrize(
    ("both", "bubbles"),
    [(3.0, (2, 6, 14)), (2.5, (1.5, 4.5, 10.5)), (2.0, (1, 3, 7))],
    ids=["3", "2.5", "2"],
)
def test_what_overlapping_hides_as_deepseek_counts_it(
    both: float, bubbles: tuple[float, ...]
) -> None:
    """Table 2 of arXiv 2412.19437 for 2 D stages: a bubble of (D - 1)(F&B + B - 3 W), here with F =
    I = W = 1."""
    link = (3 - both) / 2
    cost = fp.Cost(forward_link=link, backward_link=link)
    for devices, bubble in zip((2, 4, 8), bubbles, strict=True):
        schedule = S.dualpipe_v(2 * devices, 4 * devices)
        timeline = fp.simulate(schedule, cost)
        assert both == cost.both((fp.Kind.F, 0, 1.0), (fp.Kind.B, 1, 1.0))
        assert bubble == (devices - 1) * (both + 2 - 3) == max(idle(timeline))


def idle(timeline: fp.Timeline) -> list[float]:
    """For how long each device does nothing before its own last action ends."""
    ends = [
        max(span.end for span in timeline.spans if span.device == d)
        for d in range(timeline.num_devices)
    ]
    return [end - busy for end, busy in zip(ends, timeline.busy, strict=True)]


@pytest.mark.parametrize(
    ("p", "m", "f", "i", "w", "c", "bubble"),
    [
        (8, 24, 18.522, 18.086, 9.337, 0.601, 0.1083),
        (8, 32, 18.513, 18.086, 9.331, 0.626, 0.0837),
        (8, 64, 18.546, 18.097, 9.321, 0.762, 0.0444),
        (8, 24, 29.718, 29.444, 19.927, 0.527, 0.0698),
        (8, 32, 29.802, 29.428, 19.530, 0.577, 0.0559),
        (16, 48, 11.347, 11.248, 8.132, 0.377, 0.0672),
        (16, 64, 11.307, 11.254, 8.101, 0.379, 0.0516),
        (32, 96, 10.419, 10.207, 7.715, 0.408, 0.0641),
        (16, 48, 28814, 28760, 19352, 1610, 0.0823),
        (16, 64, 28824, 28786, 19376, 1621, 0.0630),
        (16, 128, 28632, 28612, 19278, 1619, 0.0325),
        (32, 96, 18916, 19496, 14576, 879, 0.0629),
        (32, 128, 18938, 19488, 14612, 892, 0.0478),
    ],
)
def test_zb_h2_has_the_bubbles_of_the_paper(
    p: int, m: int, f: float, i: float, w: float, c: float, bubble: float
) -> None:
    """Tables 5 and 8 of arXiv 2401.10241, to four digits."""
    assert fp.simulate(S.zb_h2(p, m), fp.Cost(f, i, w, comm=c)).span_bubble == pytest.approx(
        bubble, abs=5e-5
    )


@random_sizes
@given(st.integers(1, 9), st.integers(1, 30), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_zb_h2_and_eager_1f1b_hold_what_they_say(devices: int, count: int, rest: float) -> None:
    """Exactly, once there are microbatches enough to fill the warmup and the delay; less before."""
    cost = fp.Cost(weight_residual=rest)
    stated = tuple(2 * (devices - d) - 1 + 2 * d * rest for d in range(devices))
    peak = fp.simulate(S.zb_h2(devices, count), cost).peak
    assert peak == stated if count >= 2 * devices - 1 else all(map(float.__le__, peak, stated))
    eager = fp.simulate(S.eager_one_f_one_b(devices, count), cost).peak
    assert tuple(min(count, 2 * (devices - d) - 1) for d in range(devices)) == eager


def test_zb_h2_has_the_least_makespan_of_a_line_and_its_stated_span() -> None:
    """With F, I, W of 5, 6, 4 on 4 devices: (D - 1)(F + I - 2 W) and (D - 1) F beyond the work."""
    timeline = fp.simulate(S.zb_h2(4, 12), fp.Cost(5, 6, 4))
    assert (12 * 15 + 3 * 3, 12 * 15 + 3 * 5) == (timeline.span, timeline.makespan)


def test_eager_1f1b_hides_copies_that_1f1b_waits_for() -> None:
    """Without them the two take the same time; with them 1F1B waits in every round."""
    assert (
        fp.simulate(S.one_f_one_b(4, 16)).makespan
        == fp.simulate(S.eager_one_f_one_b(4, 16)).makespan
    )
    slow = fp.Cost(comm=0.5)
    assert (
        fp.simulate(S.eager_one_f_one_b(4, 16), slow).makespan
        == fp.simulate(S.one_f_one_b(4, 16)).makespan + 3
    )
    assert (
        fp.simulate(S.one_f_one_b(4, 16), slow).makespan
        >= fp.simulate(S.one_f_one_b(4, 16)).makespan + 12
    )


@pytest.mark.parametrize("family", V_SHAPED)
def test_counts_that_make_no_v_are_refused_all_at_once(family: Family) -> None:
    """With the count that mends it."""
    with pytest.raises(fp.ScheduleError) as error:
        family(6, 0, num_devices=2)
    assert [
        "no such schedule:",
        "  * num_microbatches must be positive; got 0",
        (
            "  * a V has two stages per device, so num_stages must be twice num_devices; got 6 stages on "
            "2 devices; take num_devices=3"
        ),
    ] == str(error.value).splitlines()
    with pytest.raises(fp.ScheduleError, match="got 5 stages on 5 devices; take num_stages=6"):
        family(5, 20)
    with pytest.raises(
        fp.ScheduleError, match="num_devices must be at most num_stages; got 3 devices for 2 stages"
    ):
        family(2, 20, num_devices=3)
    with pytest.raises(fp.ScheduleError, match=r"num_stages must be a whole number; got 4\.0"):
        family(4.0, 20)


def test_dualpipe_v_refuses_too_few_microbatches() -> None:
    """The message has both counts and a family that takes them."""
    with pytest.raises(fp.ScheduleError) as error:
        S.dualpipe_v(6, 5)
    assert (
        "no such schedule: DualPipeV needs 6 microbatches, one for each stage, to fill the V; got 5; "
        "take more microbatches, or fp.schedules.zbv, which takes any number" == str(error.value)
    )


def test_v_shaped_families_are_named_for_pictures() -> None:
    """The published names."""
    assert ["ZB-V", "DualPipeV", "V-Half", "V-Min"] == [family(4, 4).name for family in V_SHAPED]


def lawful() -> list[fp.Schedule]:
    """Small ones of every new family, and two with remat."""
    made = [family(4, 4) for family in [*V_SHAPED, S.zb_h2, S.eager_one_f_one_b]]
    made += [family(4, 1) for family in ANY_COUNT]
    return [
        *made,
        S.zb_h2(4, 6, num_devices=2),
        S.v_min(4, 7),
        S.remat(S.zbv(4, 5)),
        S.remat(S.dualpipe_v(4, 6)),
    ]


IN_LAWS = {str(schedule) for schedule in schedules(4, 4)}


@pytest.mark.parametrize(
    "schedule", [schedule for schedule in lawful() if str(schedule) not in IN_LAWS], ids=ids
)
def test_they_obey_the_laws(schedule: fp.Schedule) -> None:
    """The bits of the plain loop and of 1F1B on both executors. Those with as many microbatches as
    stages are in `tests/laws`."""
    g = torch.Generator().manual_seed(0)
    params = tuple(torch.randn(5, 5, generator=g, dtype=torch.float64) for _ in range(4))
    batch = tuple(torch.randn(11, 5, generator=g, dtype=torch.float64) for _ in range(2))
    stages = [fp.stage(lambda p, x: torch.sin(x @ p), name=f"part {number}") for number in range(4)]
    result = assert_matches_sequential(
        cpu_plan(stages, schedule), params, batch, executors=EXECUTORS
    )
    plain = cpu_plan(stages, S.one_f_one_b(4, schedule.num_microbatches))
    assert_same_result(fp.run(plain, params, batch, threads_per_lane=1), result)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("schedule", [one for one in lawful() if "remat" not in one.name], ids=ids)
def test_a_run_holds_what_the_simulation_says(schedule: fp.Schedule, executor: str) -> None:
    """The most graphs that live at a time on each device; eager stages free all of them in I."""
    watch = [Watch() for _ in range(schedule.num_devices)]
    most = [0] * schedule.num_devices

    def part(stage: int) -> fp.Stage:
        device = schedule.device_of[stage]

        def fn(w: Any, x: Any) -> Any:
            if torch.is_grad_enabled():  # a forward that keeps; its own graph comes on top
                most[device] = max(most[device], watch[device].live_graphs + 1)
            return watch[device].layer(x, w)

        return fp.stage(fn)

    plan = cpu_plan([part(stage) for stage in range(4)], schedule)
    x = torch.randn(2 * schedule.num_microbatches, 3)
    fp.run(
        plan, tuple(torch.full((3,), 1.0 + stage) for stage in range(4)), (x, x), executor=executor
    )
    assert list(fp.simulate(schedule, fp.Cost(weight_residual=0)).peak) == most


@pytest.mark.parametrize("family", V_SHAPED)
def test_halves_of_backwards_come_in_the_order_of_the_microbatches(family: Family) -> None:
    """Each kind of each stage ascends by one (a whole backward is both halves)."""
    for order in family(8, 11).orders:
        for halves in ((fp.Kind.F,), (fp.Kind.B, fp.Kind.I), (fp.Kind.B, fp.Kind.W)):
            for stage in {action.stage for action in order}:
                visits = [
                    action.microbatch
                    for action in order
                    if action.stage == stage and action.kind in halves
                ]
                assert all(b - a == 1 for a, b in pairwise(visits))


@pytest.mark.parametrize("block", [v_shape._half_block, v_shape._min_block])
@pytest.mark.parametrize("devices", [*range(1, 14), pytest.param(64, marks=pytest.mark.slow)])
def test_what_repeats_is_worked_out_once_and_nothing_differs(
    block: Callable[..., Any], devices: int
) -> None:
    for microbatches in (1, 2 * devices + 4, 2 * devices + 5, 3 * devices + 9):
        lanes = repeated(microbatches, [block(device, devices) for device in range(devices)])
        assert steady(block, devices, microbatches) == squeezed(lanes, most_held(lanes)), (
            microbatches
        )
