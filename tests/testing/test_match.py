"""assert_matches_sequential passes what is right, and says which number is wrong."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from common import EXECUTORS, assert_same_result, cpu_plan
from faulty import P, X, plain
from nets import Q, net

import funcpipe as fp
from funcpipe import schedules as S
from funcpipe._src.testing.match import differences
from funcpipe.testing import assert_matches_sequential


def test_what_is_right_passes():
    stages, params, state = net()
    plan = cpu_plan(stages, S.remat(S.one_f_one_b(3, 4)), outputs=True)
    with fp.lanes(plan) as lanes:
        executors = (*EXECUTORS, lanes)
        result = assert_matches_sequential(
            plan, params, (X, X), state=state, seed=1, executors=executors
        )
    assert_same_result(fp.run_sequential(plan, params, (X, X), state=state, seed=1), result)
    assert "threads" == result.stats.executor


def test_plans_without_a_loss():
    stages, params, state = net()
    plan = fp.make_plan(stages, S.fill_drain(3, 2, backward=False), devices="cpu", train=True)
    assert assert_matches_sequential(plan, params, X, state=state, seed=1).loss is None


def differs_by_thread(p, x):
    """Another number than in the oracle: by who calls."""
    return x * p["w"] + (1e-3 if threading.current_thread().name == "funcpipe lane 0" else 0)


def test_what_differs_is_named():
    """The leaf that is first made wrong, how many numbers, by how much; all that differ are
    listed."""
    stages = [fp.stage(differs_by_thread, name="odd"), fp.stage(plain)]
    plan = cpu_plan(stages, S.one_f_one_b(2, 2), outputs=True)
    with pytest.raises(AssertionError) as error:
        assert_matches_sequential(plan, (P, Q), (X, X))
    title, *lines = str(error.value).splitlines()
    assert (
        "fp.run(executor='threads') differs from fp.run_sequential in 6 of 9 leaves, first in "
        "losses[0]:" == title
    )
    assert ["losses[0]", "losses[1]", "loss", "outputs", "grads[0]['w']", "grads[1]['w']"] == [
        line[4:].split(": ")[0] for line in lines
    ]
    assert "outputs: 12 of 12 numbers differ, by 0.000" in lines[3]
    assert "; first at [0, 0]: -0.46" in lines[3]


def test_differences_see_every_bit():
    """NaN is NaN, minus zero is not zero; large ints, half floats, complex, structure, types, other
    leaves."""
    nan, t = float("nan"), torch.tensor
    same_pairs = [
        (t([nan, 1.0]), t([nan, 1.0])),
        (t([]), t([])),
        ((1, None, "a"), (1, None, "a")),
        (t(True), t(True)),
    ]
    same_pairs += [
        (t([1, 2]).to(torch.float8_e4m3fn), t([1, 2]).to(torch.float8_e4m3fn)),
        (X.t(), X.t().contiguous()),
    ]
    for a, b in same_pairs:
        assert [] == differences(a, b, "a")[0]
    other = [
        (t([0.0]), t([-0.0])),
        (t([2**60]), t([2**60 + 1])),
        (t([1.0]), t([nan])),
        (t([1 + 1j]), t([1 - 1j])),
        (t([1.0]), t([1.0], dtype=torch.float64)),
        (t([1.0]), t([[1.0]])),
        (t([1.0]).to(torch.float8_e4m3fn), t([2.0]).to(torch.float8_e4m3fn)),
        (t([True]), t([False])),
        ((1,), (1, 2)),
        (1, 1.0),
        ("a", "b"),
        (t(1), 1),
    ]
    for a, b in other:
        assert 1 == len(differences(a, b, "a")[0]), (a, b)
    [line], count = differences(
        {"k": [t([[1.0, 2.0, 4.0]])]}, {"k": [t([[1.0, 3.0, 4.5]])]}, "grads[0]"
    )
    assert (
        "grads[0]['k'][0]: 2 of 3 numbers differ, by 1 at most (relative 0.333); first at [0, 1]: "
        "2.0 came, 3.0 expected" == line
    )
    assert 1 == count


def test_the_whole_batch():
    """Microbatches must not matter: a mean with the wrong weights is found."""
    stages = [fp.stage(plain), fp.stage(plain)]
    x = torch.cat([X, X, X[:2]])
    for loss in (F.mse_loss, lambda y, t: (F.mse_loss(y, t, reduction="sum"), y.numel())):
        plan = fp.make_plan(stages, S.one_f_one_b(2, 4), loss=loss, devices="cpu", outputs=True)
        assert_matches_sequential(plan, (P, Q), (x, x.flip(0)), whole_batch=1e-12)
    plan = cpu_plan(stages, S.one_f_one_b(2, 4), weight=lambda t: 1)
    with pytest.raises(
        AssertionError,
        match="4 microbatches differs from one microbatch of all rows in 3 of 3 leaves",
    ):
        assert_matches_sequential(plan, (P, Q), (x, x.flip(0)), whole_batch=1e-12)


def test_executors_must_be_some():
    plan = cpu_plan([fp.stage(plain)], S.fill_drain(1, 1))
    for executors in ((), "serial"):
        with pytest.raises(fp.PlanError, match="executors is a sequence"):
            assert_matches_sequential(plan, (P,), (X, X), executors=executors)
