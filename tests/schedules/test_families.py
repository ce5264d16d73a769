"""Every family: legal for all counts, ascending, as it is published, and clear about counts that
make no schedule."""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from funcpipe._src.core.errors import ScheduleError
from funcpipe._src.data.cost import Cost
from funcpipe._src.data.schedule import Action, Kind, Schedule
from funcpipe._src.schedules.families import (
    eager_one_f_one_b,
    fill_drain,
    interleaved,
    looped_bfs,
    one_f_one_b,
    zb_h2,
    zero_bubble,
)
from funcpipe._src.schedules.legal import check
from funcpipe._src.schedules.transforms import remat
from funcpipe._src.view.simulate import simulate

random_sizes = settings(deadline=None, database=None, max_examples=40)

BLOCKS = [fill_drain, one_f_one_b, eager_one_f_one_b, zb_h2]
LOOPS = [looped_bfs, interleaved, zero_bubble]
FAMILIES = BLOCKS + LOOPS
SPLIT = [zero_bubble, zb_h2]
Family = Callable[..., Schedule]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("devices", range(1, 6))
def test_a_family_is_legal_for_all_small_counts(family: Family, devices: int) -> None:
    """D in 1..5, v in 1..3, M in 1..12: no fault, and exactly the counts that were asked for.
    Larger counts are tried at random below."""
    for chunks, microbatches in itertools.product(range(1, 4), range(1, 13)):
        schedule = family(devices * chunks, microbatches, num_devices=devices)
        check(schedule)
        counts = (schedule.num_stages, schedule.num_microbatches, schedule.num_devices)
        assert (devices * chunks, microbatches, devices) == counts
        assert schedule.is_ascending


@random_sizes
@given(st.sampled_from(BLOCKS), st.integers(1, 30), st.integers(1, 40), st.data())
def test_blocks_take_any_number_of_devices_up_to_the_stages(
    family: Family, stages: int, microbatches: int, data: st.DataObject
) -> None:
    """Uneven blocks are legal and ascending; block sizes differ by one at most, larger ones
    first."""
    devices = data.draw(st.integers(1, stages))
    schedule = family(stages, microbatches, num_devices=devices)
    check(schedule)
    sizes = list(Counter(schedule.device_of).values())
    assert schedule.is_ascending
    assert (sorted(schedule.device_of), sorted(sizes, reverse=True)) == (
        list(schedule.device_of),
        sizes,
    )
    assert max(sizes) - min(sizes) <= 1


@random_sizes
@given(st.sampled_from(LOOPS), st.integers(1, 12), st.integers(1, 5), st.integers(1, 60))
def test_loops_put_stage_s_on_device_s_mod_d(
    family: Family, devices: int, chunks: int, microbatches: int
) -> None:
    """Any number of microbatches, dividing or not."""
    schedule = family(devices * chunks, microbatches, num_devices=devices)
    check(schedule)
    assert (microbatches, True) == (schedule.num_microbatches, schedule.is_ascending)
    assert tuple(stage % devices for stage in range(devices * chunks)) == schedule.device_of


@random_sizes
@given(st.sampled_from(FAMILIES), st.integers(1, 12), st.integers(1, 12))
def test_every_stage_runs_every_microbatch_with_one_kind_of_backward(
    family: Family, stages: int, count: int
) -> None:
    """Zero-bubble splits every backward, the others none."""
    found = Counter(action.kind for order in family(stages, count).orders for action in order)
    kinds = [Kind.F, Kind.I, Kind.W] if family in SPLIT else [Kind.F, Kind.B]
    assert dict.fromkeys(kinds, stages * count) == found


@random_sizes
@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_forward_only_is_fill_drain_without_its_backwards(
    stages: int, count: int, data: st.DataObject
) -> None:
    """Evaluation runs the same forwards in the same order."""
    devices = data.draw(st.integers(1, stages))
    whole = fill_drain(stages, count, num_devices=devices)
    forwards = tuple(tuple(a for a in order if a.kind is Kind.F) for order in whole.orders)
    eval_only = fill_drain(stages, count, num_devices=devices, backward=False)
    check(eval_only)
    assert (forwards, False) == (eval_only.orders, eval_only.has_backward)


def test_one_stage_takes_its_turn_microbatch_by_microbatch() -> None:
    """Every family degenerates to the plain loop on one device."""
    assert "0F0 0B0 0F1 0B1" == str(one_f_one_b(1, 2)) == str(interleaved(1, 2))
    assert "0F0 0F1 0B0 0B1" == str(fill_drain(1, 2)) == str(looped_bfs(1, 2))
    assert "0F0 0I0 0W0 0F1 0I1 0W1" == str(zero_bubble(1, 2)) == str(zb_h2(1, 2))


@pytest.mark.parametrize(("stages", "devices"), [(1, 1), (2, 1), (4, 2), (6, 3), (3, 3), (5, 5)])
@pytest.mark.parametrize("family", [looped_bfs, interleaved])
def test_loops_have_two_stages_a_device_by_default_where_that_divides(
    family: Family, stages: int, devices: int
) -> None:
    """An even number of stages loops twice, an odd one not at all."""
    assert family(stages, 3, num_devices=devices) == family(stages, 3)


@pytest.mark.parametrize("family", [*BLOCKS, zero_bubble])
def test_other_families_have_one_stage_a_device_by_default(family: Family) -> None:
    """num_devices=None is num_devices=num_stages."""
    assert family(6, 4, num_devices=6) == family(6, 4)


def test_families_are_named_for_pictures() -> None:
    """The published names, by family and by what was asked for."""
    named = {
        "fill-drain": fill_drain(2, 2),
        "forward-only": fill_drain(2, 2, backward=False),
        "1F1B": one_f_one_b(2, 2),
        "looped-BFS": looped_bfs(4, 2),
        "interleaved": interleaved(4, 2),
        "ZB-H1": zero_bubble(2, 2),
        "interleaved-ZB": zero_bubble(4, 2, num_devices=2),
        "1F1B+remat": remat(one_f_one_b(2, 2)),
        "eager-1F1B": eager_one_f_one_b(2, 2),
        "ZB-H2": zb_h2(2, 2),
    }
    assert [*named] == [schedule.name for schedule in named.values()]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("counts", "faults"),
    [
        (
            (0, -1, -2),
            [
                "num_stages must be positive; got 0",
                "num_microbatches must be positive; got -1",
                "num_devices must be positive; got -2",
            ],
        ),
        (
            (4.0, "3", 2.5),  # a float that happens to be whole is a mistake too
            [
                "num_stages must be a whole number; got 4.0",
                "num_microbatches must be a whole number; got '3'",
                "num_devices must be a whole number; got 2.5",
            ],
        ),
        (
            (2, 0, 3),
            [
                "num_microbatches must be positive; got 0",
                "num_devices must be at most num_stages; got 3 devices for 2 stages",
            ],
        ),
        ((2, 3, 0), ["num_devices must be positive; got 0"]),
        (("4", 2, None), ["num_stages must be a whole number; got '4'"]),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else "",
)
def test_every_fault_of_the_counts_is_named(
    family: Family, counts: tuple[Any, ...], faults: list[str]
) -> None:
    """All at once, with what came; nothing that was not given."""
    stages, microbatches, devices = counts
    with pytest.raises(ScheduleError) as error:
        family(stages, microbatches, num_devices=devices)
    title, *lines = str(error.value).splitlines()
    assert ("no such schedule:", [f"  * {fault}" for fault in faults]) == (title, lines)


@pytest.mark.parametrize("family", FAMILIES)
def test_integers_of_other_libraries_count(family: Family) -> None:
    """What has __index__ is a whole number, and plain ints come out."""
    schedule = family(torch.tensor(4), torch.tensor(4), num_devices=torch.tensor(2))
    check(schedule)
    assert family(4, 4, num_devices=2) == schedule


@pytest.mark.parametrize("family", LOOPS)
def test_devices_that_do_not_divide_the_stages_are_refused_with_those_that_do(
    family: Family,
) -> None:
    """Looped stages are spread evenly; the message says what to take."""
    with pytest.raises(ScheduleError) as error:
        family(6, 4, num_devices=4)
    assert (
        "no such schedule:\n  * looped stages are spread evenly, so num_devices must divide "
        "num_stages; got 6 stages on "
        "4 devices; take num_devices from [1, 2, 3, 6]" == str(error.value)
    )


@random_sizes
@given(st.sampled_from(FAMILIES), st.integers(1, 6), st.integers(1, 9), st.sets(st.integers(0, 8)))
@example(zero_bubble, 3, 6, {1, 4})
def test_remat_puts_r_just_before_the_first_backward_of_what_is_not_kept(
    family: Family, stages: int, count: int, kept: set[int]
) -> None:
    """Legal, nothing else moves, and exactly the microbatches that were not kept are computed
    again."""
    plain = family(stages, count)
    again = remat(plain, keep=lambda action: action.microbatch in kept)
    check(again)
    for before, after in zip(plain.orders, again.orders, strict=True):
        assert list(before) == [action for action in after if action.kind is not Kind.R]
        followers = {
            (a.stage, a.microbatch, b.kind)
            for a, b in itertools.pairwise(after)
            if a.kind is Kind.R
        }
        first = Kind.I if family in SPLIT else Kind.B
        stages_here = {action.stage for action in before}
        assert {
            (s, m, first) for s in stages_here for m in range(count) if m not in kept
        } == followers


def test_remat_asks_about_the_forward_of_every_stage_and_microbatch() -> None:
    """keep= is given the F, so it may choose by stage and microbatch."""
    asked: list[Action] = []
    remat(zero_bubble(2, 2), keep=lambda action: bool(asked.append(action)))
    assert {Action(Kind.F, s, m) for s in range(2) for m in range(2)} == set(asked)


def test_remat_of_a_schedule_without_backwards_is_refused() -> None:
    """There is nothing to compute again."""
    with pytest.raises(
        ScheduleError, match="'forward-only' has no backwards, so there is nothing to compute again"
    ):
        remat(fill_drain(2, 2, backward=False))


def test_remat_twice_is_refused() -> None:
    """Two passes would leave two R; the message says how to choose in one."""
    with pytest.raises(
        ScheduleError, match=r"'1F1B\+remat' has R already; apply remat once, with keep="
    ):
        remat(remat(one_f_one_b(2, 2)))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 20), st.data())
def test_interleaved_in_groups_is_legal_and_keeps_its_memory(
    devices: int, share: int, count: int, data: Any
) -> None:
    """GIS: for any counts, any group from half of the devices to all."""
    group = data.draw(st.integers((devices + 1) // 2, devices))
    schedule = interleaved(share * devices, count, num_devices=devices, group=group)
    check(schedule)
    assert schedule.is_ascending
    assert [stage % devices for stage in range(share * devices)] == list(schedule.device_of)
    peaks = simulate(schedule, Cost(weight_residual=1)).peak
    assert all(peak <= group * (share - 1) + devices - device for device, peak in enumerate(peaks))


@pytest.mark.parametrize(("devices", "share"), [(4, 2), (8, 2), (8, 4), (3, 3)])
def test_groups_of_all_devices_have_the_bubble_of_interleaved_and_less_memory(
    devices: int, share: int
) -> None:
    """16 instead of 23 residuals for 8 devices with two stages each."""
    count = 4 * devices
    usual, grouped = (
        simulate(interleaved(share * devices, count, num_devices=devices, group=g))
        for g in (None, devices)
    )
    assert usual.makespan == grouped.makespan
    assert (2 * (devices - 1) + (share - 1) * devices + 1, share * devices) == (
        usual.peak[0],
        grouped.peak[0],
    )


@pytest.mark.parametrize("group", [1, 5, 2.0, "2"])
def test_groups_that_are_none(group: Any) -> None:
    """From half of the devices to all of them."""
    with pytest.raises(ScheduleError, match="group must be a whole number from 2 to 4"):
        interleaved(8, 8, num_devices=4, group=group)
