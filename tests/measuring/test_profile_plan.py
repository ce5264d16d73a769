"""A plan is measured while it runs: what its actions take, what lies between them, and whatever
`run` says of bad input."""

import threading
import time

import pytest
import torch
from common import cpu_plan
from torch import nn

import funcpipe as fp

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
WEIGHTS = torch.eye(6), torch.eye(6)


def slow(w, x):
    time.sleep(0.004)
    return x @ w


def fast(w, x):
    return x @ w


def plan_of(*functions, schedule=None, **options):
    stages = [fp.stage(function) for function in functions]
    return cpu_plan(stages, schedule or fp.schedules.one_f_one_b(len(stages), 4), **options)


def test_times_of_stages_as_they_run():
    """Each number belongs to its stage; what ran as B counts half for I and half for W."""
    cost = fp.models.profile_plan(plan_of(fast, slow), WEIGHTS, (X, X), repeats=3, warmup=1)
    assert cost.num_stages == 2
    assert cost.forward[1] >= 0.004 > cost.forward[0] > 0
    assert (
        cost.backward_input
        == cost.backward_weight
        == pytest.approx([whole / 2 for whole in cost.backward])
    )
    assert min(cost.backward) > 0
    assert cost.comm > 0


@pytest.mark.parametrize("made", [fp.compile_stage, lambda stage: stage], ids=["compiled", "eager"])
def test_stages_that_split(made):
    stages = [made(fp.stage(slow)), made(fp.stage(fast))]
    plan = cpu_plan(stages, fp.schedules.zero_bubble(2, 4))
    cost = fp.models.profile_plan(plan, WEIGHTS, (X, X), repeats=1)
    assert min(cost.backward_weight) > 0
    halves = zip(cost.backward_input, cost.backward_weight, strict=True)
    assert cost.backward == pytest.approx([first + second for first, second in halves])


def test_what_one_thread_does_for_other_lanes_is_no_time_of_this_one():
    def separates() -> bool:
        params = *WEIGHTS, torch.eye(6)
        cost = fp.models.profile_plan(
            plan_of(slow, slow, slow), params, (X, X), repeats=3, executor="serial"
        )
        assert min(cost.forward) >= 0.004
        return max(cost.forward) < 0.008 and max(cost.backward) < 0.004

    # On a busy machine each sleep may last longer.
    assert any(separates() for _ in range(10))


def test_it_predicts_other_schedules_of_sleeping_stages():
    """Two stages of 4 ms: fill-drain of eight microbatches takes nine forwards, one stage after the
    other takes sixteen."""
    plan = plan_of(slow, slow)
    cost = fp.models.profile_plan(plan, WEIGHTS, (X, X), repeats=3)
    pipelined, alone = (
        fp.simulate(fp.schedules.fill_drain(2, 8, num_devices=n), cost).makespan for n in (2, 1)
    )
    assert 9 * 0.004 <= pipelined
    assert 16 * 0.004 <= alone
    assert pipelined < 0.9 * alone


def test_threads_are_kept_between_runs_and_gone_afterwards():
    seen: list[threading.Thread] = []

    def stage(w, x):
        seen.append(threading.current_thread())
        return x @ w

    before = threading.active_count()
    fp.models.profile_plan(plan_of(stage, stage), WEIGHTS, (X, X), repeats=4, warmup=3)
    assert len(seen) >= 7 * 8
    assert len({id(thread) for thread in seen}) == 2
    assert threading.active_count() == before


def test_an_executor_of_the_callers():
    seen: set[threading.Thread] = set()

    def stage(w, x):
        seen.add(threading.current_thread())
        return x @ w

    plan = plan_of(stage, stage)
    fp.models.profile_plan(plan, WEIGHTS, (X, X), executor="serial", repeats=1)
    assert seen == {threading.current_thread()}
    with fp.lanes(plan) as lanes:
        fp.models.profile_plan(plan, WEIGHTS, (X, X), executor=lanes, repeats=1)
        assert not lanes.closed


def test_forwards_alone_and_what_runs_take():
    """A plan without backwards; state, feeds, drawing, and leaves that are not trained."""

    def noisy(p, x, *, feeds, state):
        return nn.functional.dropout(x @ p, 0.5) * feeds["scale"] + state

    stages = [
        fp.stage(noisy, name=name, feeds=["scale"], commit=lambda state, stats: state)
        for name in "ab"
    ]
    plan = fp.make_plan(stages, fp.schedules.fill_drain(2, 4).forwards(), devices="cpu")
    options = {
        "state": (torch.ones(6), torch.ones(6)),
        "feeds": {"scale": torch.ones(8, 1)},
        "seed": 3,
    }
    before = torch.get_rng_state()
    cost = fp.models.profile_plan(plan, WEIGHTS, X, trainable=False, **options, repeats=2)
    assert min(cost.forward) > 0
    assert set(cost.backward) == {0.0}
    assert torch.equal(before, torch.get_rng_state())


def test_progress_is_told():
    told: list[fp.typing.CallProgress] = []
    fp.models.profile_plan(
        plan_of(slow, slow), WEIGHTS, (X, X), repeats=3, warmup=2, progress=told.append
    )
    assert told[-1].phase == "done"
    assert (told[-1].done, told[-1].total, told[-1].unit) == (5, 5, "runs")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 0}, "repeats is an int from 1; got 0"),
        ({"warmup": -1}, "warmup is an int from 0; got -1"),
        ({"repeats": True}, "repeats is an int from 1; got True"),
        ({"executor": "thread"}, "executor is 'threads'"),
        ({"progress": 3}, "progress"),
    ],
)
def test_numbers_that_cannot_be(options, message):
    with pytest.raises(fp.PlanError, match=message):
        fp.models.profile_plan(plan_of(fast, fast), WEIGHTS, (X, X), **options)


def test_what_run_refuses_is_refused():
    plan = plan_of(fast, fast)
    with pytest.raises(fp.PlanError, match="profile_plan takes a plan"):
        fp.models.profile_plan([fast, fast], WEIGHTS, (X, X))
    with pytest.raises(fp.BatchError, match="a batch is"):
        fp.models.profile_plan(plan, WEIGHTS, X)
    with pytest.raises(fp.StageError, match="stage 1"):
        fp.models.profile_plan(plan_of(fast, lambda w, x: x.nothing), WEIGHTS, (X, X))
