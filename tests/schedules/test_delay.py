"""W later and in groups: what stands where, and what is refused."""

import pytest
from common import ids, schedules
from hypothesis import given
from hypothesis import strategies as st

import funcpipe as fp
from funcpipe import Kind
from funcpipe import schedules as S


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("schedule", schedules(4, 4), ids=ids)
def test_every_backward_is_split_and_legal(schedule, group):
    """The same forwards, each I where the backward was, each W after it; legal as before."""
    delayed = S.delay(schedule, group=group)
    S.check(delayed)
    for before, after in zip(schedule.orders, delayed.orders, strict=True):
        chain = [
            (a.kind is Kind.F, a.stage, a.microbatch)
            for a in before
            if a.kind in (Kind.F, Kind.B, Kind.I)
        ]
        assert chain == [
            (a.kind is Kind.F, a.stage, a.microbatch) for a in after if a.kind in (Kind.F, Kind.I)
        ]
        assert not any(action.kind is Kind.B for action in after)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(1, 4))
def test_groups_stand_together(stages, microbatches, group):
    """So many W of a stage in a row, but for the last."""
    for order in S.delay(S.one_f_one_b(stages, microbatches), group=group).orders:
        runs, length = [], 0
        for action in (*order, None):
            if action is not None and action.kind is Kind.W:
                length += 1
            elif length:
                runs.append(length)
                length = 0
        assert sum(runs) == microbatches
        assert all(run >= group for run in runs[:-1])


def test_splitting_fills_the_bubble():
    """I goes back at once, so a stage waits for less than with whole backwards."""
    base = S.one_f_one_b(4, 8)
    cost = fp.Cost(backward=2)
    assert fp.simulate(S.delay(base), cost).makespan < fp.simulate(base, cost).makespan


@pytest.mark.parametrize(
    ("schedule", "options", "message"),
    [
        ("1F1B", {}, "takes a schedule"),
        (S.one_f_one_b(2, 2), {"group": 0}, "at least 1"),
        (S.one_f_one_b(2, 2), {"group": True}, "at least 1"),
        (S.fill_drain(2, 2, backward=False), {}, "no backwards"),
    ],
)
def test_what_is_refused(schedule, options, message):
    with pytest.raises(fp.ScheduleError, match=message):
        S.delay(schedule, **options)
