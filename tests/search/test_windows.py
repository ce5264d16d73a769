"""Bounds from windows: never above what can be, and sharp."""

import random
import sys
from pathlib import Path

import pytest
from common import search
from hypothesis import given, settings
from hypothesis import strategies as st

import funcpipe as fp
from funcpipe._src.schedules.clock import F, I, W
from funcpipe._src.search.bounds import lower_bound
from funcpipe._src.search.problem import Problem
from funcpipe._src.search.rows import rows_of
from funcpipe._src.search.windows import done, sharpened, windows_bound

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))


def never():
    """The time is not over."""
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("allowed", "seeds", "sharp"),
    [
        ("", range(40), 0.9),
        ("remat", range(5), 0.8),
        ("offload", range(3), 0.6),
        pytest.param("", range(40, 90), 0.9, marks=pytest.mark.slow),
        pytest.param("remat", range(5, 30), 0.7, marks=pytest.mark.slow),
        pytest.param("offload", range(3, 12), 0.4, marks=pytest.mark.slow),
    ],
)
def test_no_bound_is_above_a_proven_optimum(allowed, seeds, sharp):
    """CP-SAT proves it with a model that shares nothing with the search; most bounds are equal to
    it."""
    pytest.importorskip("ortools")
    from search_reference import reference, small

    equal = 0
    for seed in seeds:
        one = small(seed, allowed)
        makespan, proven = reference(one, None, seconds=60)
        assert proven >= makespan
        limits = (float(one.limit),) * one.devices
        problem = Problem(
            one.cost, one.placement, one.microbatches, limits, remat=one.remat, offload=one.offload
        )
        bound = lower_bound(problem).value
        assert bound <= makespan * (1 + 1e-9), one
        for value in (makespan, makespan * 1.1, makespan + 7.0):
            assert (
                bound <= sharpened(problem, bound, value, never, steps=6) <= makespan * (1 + 1e-9)
            ), one
        equal += sharpened(problem, bound, makespan, never, steps=6) >= makespan * (1 - 1e-9)
    assert equal >= sharp * len(seeds)


@pytest.mark.slow
@settings(max_examples=150)
@given(st.integers(0, 10**9))
def test_no_order_beats_the_windows(seed):
    """Orders at random, microbatches in any order too, with R, B and slices, within the memory that
    they need."""
    rng = random.Random(seed)
    devices, slices = rng.randint(1, 3), rng.choice((1, 1, 2))
    stages, microbatches = devices + rng.randint(0, 2), rng.randint(1, 3)
    placement = rng.sample(
        [*range(devices), *(rng.randrange(devices) for _ in range(stages - devices))], stages
    )
    row = [[rng.randint(0, 4) for _ in range(stages)] for _ in range(6)]
    cost = fp.Cost(
        *row[:3],
        backward=row[3],
        remat=row[4],
        residual=row[5],
        comm=[rng.randint(0, 3) for _ in range(stages - 1)],
    )
    again = rng.random() < 0.5
    orders = [[] for _ in range(devices)]
    waiting = list(_all_actions(rng, stages, microbatches, slices, again=again))
    ran = set()
    while waiting:
        ready = [action for action in waiting if _needs(action, stages, slices, waiting) <= ran]
        action = rng.choice(ready)
        waiting.remove(action)
        ran.add(action)
        orders[placement[action.stage]].append(action)
    schedule = fp.Schedule(tuple(map(tuple, orders)))
    timeline = fp.simulate(schedule, cost)
    limits = tuple(max(peak, 1e-9) for peak in timeline.peak)
    for objective in ("makespan", "span"):
        problem = Problem(
            cost,
            tuple(placement),
            microbatches * slices,
            limits,
            objective,
            remat=again,
            num_slices=slices,
        )
        value = problem.value(timeline)
        assert windows_bound(problem)[0] <= value * (1 + 1e-9)
        assert sharpened(problem, 0.0, value * 1.05 + 1e-6, never, steps=6) <= value * (1 + 1e-9)


def _all_actions(rng, stages, microbatches, slices, *, again):
    for stage in range(stages):
        for microbatch in range(microbatches):
            whole, computes = rng.random() < 0.3, again and rng.random() < 0.5
            for number in range(slices) if slices > 1 else (None,):
                kinds = [
                    fp.Kind.F,
                    *([fp.Kind.B] if whole else [fp.Kind.I, fp.Kind.W]),
                    *[fp.Kind.R] * computes,
                ]
                yield from (fp.Action(kind, stage, microbatch, number) for kind in kinds)


def _needs(action, stages, slices, waiting):
    """What must have run before an action may."""
    kind, stage, microbatch, number = action
    of = {one for one in waiting if one.microbatch == microbatch}
    mine = {one for one in of if one.stage == stage and one.slice == number}
    backward = (fp.Kind.B, fp.Kind.I)
    if kind is fp.Kind.F:
        needed = {
            one
            for one in of
            if one.kind is kind
            and (
                (one.stage == stage - 1 and one.slice == number)
                or (one.stage == stage and (one.slice or 0) < (number or 0))
            )
        }
    elif kind in backward:
        needed = {one for one in mine if one.kind in (fp.Kind.F, fp.Kind.R)}
        needed |= {
            one
            for one in of
            if one.kind in backward
            and (
                (one.stage == stage + 1 and one.slice == number)
                or (one.stage == stage and (one.slice or 0) > (number or 0))
            )
        }
        needed |= {one for one in of if one.kind is fp.Kind.F and one.stage == stage}
    else:
        needed = {
            one for one in mine if one.kind is (fp.Kind.F if kind is fp.Kind.R else fp.Kind.I)
        }
    return needed - {action}


def test_a_device_is_done_when_it_can_be():
    """It waits for what comes late, and not longer."""
    assert 9 == done([(6, 2), (0, 3), (1, 1), (8, 1)])
    assert 7 == done([(0, 3), (1, 4)])


def test_what_memory_says_comes_first():
    """With room for two whole residuals, half of one is left after I: F number 2 needs one I and
    one W, or two I."""
    problem = Problem(fp.Cost(), (0, 1), 3, (2.0, 2.0))
    ways = rows_of(problem).after[F, 0][2]
    assert [(way[F, 0], way[I, 0], way[W, 0]) for way in ways] == [(2, 1, 1), (2, 2, 0)]


def test_a_memory_that_holds_one():
    """One microbatch after the other, so nothing overlaps: proven without a solver."""
    cost = fp.Cost([2, 3, 1], [3, 1, 2], [1, 2, 2], comm=1, weight_residual=1.0)
    found = search(cost, 3, 5, memory_limit=1, evaluations=50)
    assert ("bound", 0.0) == (found.ended, found.gap)
    assert "memory" in found.binds


def test_too_large_a_problem_has_no_windows():
    """It would take long; the other bounds are there."""
    problem = Problem(fp.Cost(), tuple(range(32)), 128, (4.0,) * 32)
    assert (0.0, 0) == windows_bound(problem)
    assert lower_bound(problem).value > 0
