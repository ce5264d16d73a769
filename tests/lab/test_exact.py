"""Proofs by OR-Tools: the published optima, a better remat, and what the solver is not asked for."""

import subprocess
import sys

import pytest

import funcpipe as fp

pytest.importorskip("ortools")


@pytest.mark.parametrize(
    ("case", "cap", "objective", "value"),
    [
        ((3, 6, 1, 1, 1, 0), 2, "makespan", 25),
        ((4, 8, 1, 1, 1, 0), 3, "makespan", 31),
        ((4, 8, 2, 2, 1, 0), 4, "makespan", 49),
        ((3, 6, 5, 6, 4, 1), 3, "makespan", 112),
        ((4, 8, 5, 6, 4, 1), 4, "makespan", 153),
        ((2, 4, 1.5, 1.25, 0.5, 0.25), 1, "span", None),
    ],
)
def test_a_proof_closes_the_gap(case, cap, objective, value):
    """What the bounds leave open, the solver closes, with fractions too."""
    devices, microbatches, forward, inward, weight, hop = case
    cost = fp.Cost(forward, inward, weight, comm=hop)
    options = {"num_devices": devices, "num_microbatches": microbatches, "memory_limit": cap, "objective": objective}
    found = fp.search(cost, evaluations=300, exact=True, seconds=100, **options)
    assert (0.0, "bound") == (found.gap, found.ended)
    if value is not None:
        assert value == found.makespan


def test_what_the_solver_finds_is_a_schedule():
    """From a bad start (no search before it) it comes to the optimum, legal and within the limit."""
    cost = fp.Cost()
    found = fp.search(
        cost, num_devices=3, num_microbatches=6, memory_limit=[2, 2, 2], evaluations=1, exact=True, seconds=60
    )
    assert ("exact", "bound", 25) == (found.source, found.ended, found.makespan)
    timeline = fp.simulate(found.schedule, cost)
    assert found.makespan == timeline.makespan
    assert all(map(float.__le__, timeline.peak, (2.0, 2.0, 2.0)))


def test_two_stages_a_device_and_the_same_seed():
    """A V; the solver runs on one thread."""
    cost = fp.Cost([1, 2, 1, 1], [2, 1, 1, 2], 1)
    options = {
        "num_devices": 2,
        "num_microbatches": 3,
        "placement": "v",
        "memory_limit": 4,
        "exact": True,
        "seconds": 60,
    }
    one, other = (fp.search(cost, evaluations=40, seed=1, **options) for _ in range(2))
    assert one.schedule == other.schedule
    assert "bound" == one.ended


def test_remat_is_a_choice_of_the_solver():
    """A residual is computed again only where that makes it shorter."""
    cost = fp.Cost(2, 2, 2)
    options = {
        "num_devices": 3,
        "num_microbatches": 4,
        "memory_limit": 1.5,
        "evaluations": 100,
        "exact": True,
        "seconds": 60,
    }
    plain, again = fp.search(cost, **options), fp.search(cost, remat=True, **options)
    assert again.makespan < plain.makespan
    assert max(again.peak) <= 1.5
    assert "bound" == plain.ended


def test_too_large_a_problem_is_left_to_the_search():
    """It would take hours."""
    found = fp.search(
        fp.Cost(5, 6, 4, comm=1), num_devices=16, num_microbatches=100, evaluations=60, exact=True, seconds=60
    )
    assert "exact" != found.source


def test_costs_that_are_no_whole_numbers_of_anything():
    """Their times are rounded for the solver; what it finds is timed by the true ones, and it proves nothing."""
    cost = fp.Cost(3**0.5, 2**0.5, 5**0.5 / 2, comm=0.1 * 7**0.5)
    found = fp.search(cost, num_devices=3, num_microbatches=5, memory_limit=2, evaluations=50, exact=True, seconds=20)
    assert found.makespan == fp.simulate(found.schedule, cost).makespan
    assert found.lower_bound <= found.makespan


@pytest.mark.parametrize("size", [0.7234567891, 1e-7, 123456789.123, 3.0])
def test_memory_of_any_size_is_rounded_towards_what_fits(size):
    """No bound above what was found, and no number that the solver cannot take: the sizes of real residuals."""
    options = {"num_devices": 2, "num_microbatches": 4, "evaluations": 40, "exact": True, "seconds": 60}
    cost = fp.Cost(2, 3, 2, residual=size, weight_residual=size * 0.9)
    whole = fp.Cost(2, 3, 2, residual=1, weight_residual=0.9)
    found, like = (
        fp.search(cost, memory_limit=[2 * size, size], **options),
        fp.search(whole, memory_limit=[2, 1], **options),
    )
    assert found.lower_bound <= found.makespan
    assert (like.makespan, like.ended) == (found.makespan, found.ended)
    several = fp.Cost(1, 1, 1, residual=[size, size * 1.37, size / 3, size], weight_residual=[size / 7] * 4)
    fp.search(
        several, num_devices=4, num_microbatches=3, memory_limit=size * 2.345678, evaluations=20, exact=True, seconds=20
    )


def test_ctrl_c_is_python_s_again():
    """The solver has a handler of its own, and leaves none behind if it is let."""
    code = """
import os, signal, time, funcpipe as fp
fp.search(fp.Cost(), num_devices=3, num_microbatches=6, memory_limit=2, evaluations=1, exact=True)
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
except KeyboardInterrupt:
    print("caught")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ("caught\n", 0) == (done.stdout, done.returncode)


def test_without_the_extra(monkeypatch):
    """The message says what to install."""
    monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)
    with pytest.raises(fp.ScheduleError, match=r"pip install 'torch-funcpipe\[solve\]'"):
        fp.search(
            fp.Cost(5, 6, 4, comm=1), num_devices=3, num_microbatches=5, memory_limit=2, evaluations=50, exact=True
        )
