"""The pass that inserts O and L: where they stand, what it leaves alone, what it refuses."""

from __future__ import annotations

from itertools import pairwise

import pytest
from common import ids, schedules
from hypothesis import given
from hypothesis import strategies as st

import funcpipe as fp
from funcpipe._src.data.schedule import Action, Kind, Schedule
from funcpipe._src.schedules.transforms import offload

S, M = 4, 4
PLAIN = [one for one in schedules(S, M) if not {"R", "O"} & set(str(one))]
NO_TIME = fp.Cost(offload=0, weight_residual=0)


def test_o_follows_its_forward_and_l_stands_one_action_before_the_backward() -> None:
    assert "0F0 0O0 0F1 0O1 0L0 0F2 0O2 0L1 0B0 0L2 0B1 0B2" == str(
        offload(fp.schedules.fill_drain(1, 3))
    )


@pytest.mark.parametrize(
    ("ahead", "text"),
    [
        (0, "0F0 0O0 0F1 0O1 0F2 0O2 0L0 0B0 0L1 0B1 0L2 0B2"),
        (1, "0F0 0O0 0F1 0O1 0L0 0F2 0O2 0L1 0B0 0L2 0B1 0B2"),
        (2, "0F0 0F1 0F2 0B0 0B1 0B2"),
    ],
)
def test_ahead_counts_the_actions_that_compute(ahead: int, text: str) -> None:
    """And what would come back at once is left alone."""
    found = offload(Schedule.parse("0F0 0F1 0F2 0B0 0B1 0B2"), ahead=ahead)
    assert text == str(found)


def test_it_moves_what_it_is_told_to() -> None:
    """Asked once for each residual that it could move, by its forward."""
    asked: list[str] = []

    def move(action: Action) -> bool:
        asked.append(str(action))
        return action.microbatch == 1

    assert "0F0 0F1 0O1 0F2 0L1 0B0 0B1 0B2" == str(
        offload(fp.schedules.fill_drain(1, 3), move=move)
    )
    assert ["0F0", "0F1", "0F2"] == asked


def test_a_split_backward_needs_the_residual_at_i() -> None:
    assert "0F0 0O0 0F1 0L0 0I0 0W0 0I1 0W1" == str(
        offload(
            Schedule.parse("0F0 0F1 0I0 0W0 0I1 0W1"), ahead=0, move=lambda a: a.microbatch == 0
        )
    )


def test_other_residuals_may_be_computed_again() -> None:
    """R counts as an action that computes."""
    schedule = fp.schedules.remat(
        fp.schedules.fill_drain(1, 3), keep=lambda action: action.microbatch == 0
    )
    found = offload(schedule, move=lambda action: action.microbatch == 0)
    assert "0F0 0O0 0F1 0L0 0F2 0B0 0R1 0B1 0R2 0B2" == str(found)
    fp.schedules.check(found)


@pytest.mark.parametrize("schedule", PLAIN, ids=ids)
@pytest.mark.parametrize("ahead", [0, 2])
def test_every_family_stays_legal_and_holds_no_more(schedule: Schedule, ahead: int) -> None:
    """Without O and L it is the schedule that was given; where copies take no time no device holds
    more than before."""
    found = offload(schedule, ahead=ahead)
    fp.schedules.check(found)
    assert f"{schedule.name}+offload" == found.name
    kept = tuple(
        tuple(a for a in order if a.kind not in (Kind.O, Kind.L)) for order in found.orders
    )
    assert schedule.orders == kept
    before, after = fp.simulate(schedule, NO_TIME), fp.simulate(found, NO_TIME)
    assert before.makespan == after.makespan
    assert all(a <= b for a, b in zip(after.peak, before.peak, strict=True))
    if ahead == 0:
        assert max(after.peak) <= 2  # one on its way out, or back, and one that computes


@given(st.data())
def test_any_choice(data: st.DataObject) -> None:
    """Each residual is moved or not; between O and L stands something that computes, after L ahead
    actions at least."""
    schedule = data.draw(st.sampled_from(PLAIN))
    ahead = data.draw(st.integers(0, 4))
    chosen = {(s, m) for s in range(S) for m in range(M) if data.draw(st.booleans())}
    found = offload(schedule, move=lambda a: (a.stage, a.microbatch) in chosen, ahead=ahead)
    fp.schedules.check(found)
    for order in found.orders:
        counted = [
            sum(a.kind not in (Kind.O, Kind.L) for a in order[:at]) for at in range(len(order))
        ]
        at = {action: position for position, action in enumerate(order)}
        for action, position in at.items():
            _, stage, m, _ = action
            if action.kind is Kind.O:
                assert (stage, m) in chosen
                before = [a for a in order[:position] if a.kind not in (Kind.O, Kind.L)]
                overlaps = tuple(before[-2:]) in found.pairs
                assert (
                    Action(Kind.F, stage, m) in before[-2:]
                    if overlaps
                    else Action(Kind.F, stage, m) == before[-1]
                )
                back = at[Action(Kind.L, stage, m)]
                end = at.get(Action(Kind.B, stage, m), at.get(Action(Kind.I, stage, m), -1))
                assert counted[back] > counted[position]
                # What would stand within a pair stands before it.
                assert counted[end] - counted[back] in (ahead, ahead + 1)
                assert counted[end] - counted[back] == ahead or not {*found.pairs}.isdisjoint(
                    pairwise(order[back : end + 1])
                )


def test_what_it_refuses() -> None:
    schedule = fp.schedules.one_f_one_b(2, 3)
    plan = fp.make_plan([fp.stage(lambda p, x: x)] * 2, schedule, loss=lambda y, t: y)
    with pytest.raises(
        fp.ScheduleError,
        match=r"offload takes a schedule; got a Plan \(of a plan: fp.schedules.offload",
    ):
        offload(plan)  # pyright: ignore[reportArgumentType]
    with pytest.raises(fp.ScheduleError, match="move must be a function .* got 3"):
        offload(schedule, move=3)  # pyright: ignore[reportArgumentType]
    for ahead in (-1, 1.0, True):
        with pytest.raises(fp.ScheduleError, match="ahead is the number of"):
            offload(schedule, ahead=ahead)  # pyright: ignore[reportArgumentType]
    with pytest.raises(fp.ScheduleError, match="has no backwards"):
        offload(schedule.forwards())
    with pytest.raises(fp.ScheduleError, match="has O or L already"):
        offload(offload(schedule))


def test_a_residual_is_computed_again_or_moved_not_both() -> None:
    """Every such residual is named."""
    schedule = fp.schedules.remat(
        fp.schedules.fill_drain(1, 30), keep=lambda action: action.microbatch > 24
    )
    with pytest.raises(fp.ScheduleError) as caught:
        offload(schedule)
    assert "0F3, but its residual is computed again by 0R3" in str(caught.value)
    assert "and 5 more" in str(caught.value)
    assert "move=" in str(caught.value)
