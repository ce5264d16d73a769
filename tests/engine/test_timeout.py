"""timeout=: a run that stands still ends, and says what every lane did last, waits for, and where
its Python is."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time

import pytest
import torch
from common import EXECUTORS, cpu_plan

import funcpipe as fp
from funcpipe.testing import FaultAt

S, M = 2, 3
PARAMS = tuple(torch.ones(3) for _ in range(S))
X = torch.ones(M, 3)


def sleeping(seconds: float):
    def sleep(tensor):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(0.02)

    return sleep


def plan_of(kind="F", stage=1, microbatch=0, error=None):
    parts = [fp.stage(lambda p, x: x * p, name=f"layer{i}") for i in range(S)]
    stages = FaultAt(stage, microbatch, kind, error=error or sleeping(60))(parts)
    return cpu_plan(stages, fp.schedules.one_f_one_b(S, M))


@pytest.fixture(autouse=True)
def nothing_left():
    """Whatever happens, no thread of a run outlives the test."""
    yield
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(
        t.name.startswith("funcpipe") for t in threading.enumerate()
    ):
        time.sleep(0.02)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("funcpipe")]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(("kind", "action"), [("F", "1F0"), ("B", "1B0")])
def test_a_stage_that_never_returns(executor, kind, action):
    began = time.monotonic()
    with pytest.raises(fp.RunTimeout) as caught:
        fp.run(plan_of(kind), PARAMS, (X, X), executor=executor, timeout=0.5)
    assert time.monotonic() - began < 2.5
    text = str(caught.value)
    assert isinstance(caught.value, TimeoutError)
    assert "no action began in any lane for" in text
    assert f"is in {action} of stage 1 ('layer1') at microbatch 0" in text
    assert "in sleep" in text  # the function of the stack that stands still
    if executor == "threads":
        assert "device 0 (cpu) did 0F1 and waits, before 0B0" in text
        assert "for grad[0,0]" in text
    else:
        assert "device 0 (cpu) did 0F" in text
    good = plan_of(microbatch=99)
    assert fp.run(good, PARAMS, (X, X), executor=executor, timeout=5).loss == 0


def test_a_stage_in_a_folder_with_the_name_of_the_package():
    """Only files of the package itself are left out of the stack."""
    space = {"time": time}
    code = "def stage(p, x):\n    for _ in range(1000):\n        time.sleep(0.02)\n    return x"
    exec(compile(code, "/home/user/funcpipe/train.py", "exec"), space)
    plan = cpu_plan(
        [fp.stage(space["stage"]), fp.stage(lambda p, x: x * p)], fp.schedules.one_f_one_b(S, M)
    )
    with pytest.raises(fp.RunTimeout, match=r'"/home/user/funcpipe/train\.py", line 3, in stage'):
        fp.run(plan, PARAMS, (X, X), executor="threads", timeout=0.5)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_slow_is_not_stuck(executor):
    """Every action takes less than the timeout, the run takes longer."""
    parts = [fp.stage(lambda p, x: (time.sleep(0.1), x * p)[1], name=f"layer{i}") for i in range(S)]
    plan = cpu_plan(parts, fp.schedules.one_f_one_b(S, 6))
    x = torch.ones(6, 3)
    began = time.monotonic()
    fp.run(plan, PARAMS, (x, x), executor=executor, timeout=0.5)
    assert time.monotonic() - began > 0.55


def test_from_a_thread_of_the_user():
    """The serial executor on another thread than the main one."""
    caught: list[BaseException] = []

    def work():
        try:
            fp.run(plan_of(), PARAMS, (X, X), executor="serial", timeout=0.3)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(5)
    assert not thread.is_alive()
    assert [type(one) for one in caught] == [fp.RunTimeout]


def test_kept_lanes_run_again():
    plan = plan_of()
    with fp.lanes(plan) as lanes:
        with pytest.raises(fp.RunTimeout):
            fp.run(plan, PARAMS, (X, X), executor=lanes, timeout=0.3)
        assert fp.run(plan_of(microbatch=99), PARAMS, (X, X), executor=lanes, timeout=5).loss == 0


@pytest.mark.parametrize("executor", EXECUTORS)
def test_code_that_cannot_be_interrupted(executor, capfd):
    """One long call in C. Threads: left behind. Serial: the report is printed at once, and raised
    when the call ends."""
    libc = ctypes.CDLL(None)
    plan = plan_of(error=lambda tensor: (libc.sleep(2), libc.sleep(1), None)[2])
    began = time.monotonic()
    with pytest.raises(fp.RunTimeout, match="is in 1F0"):
        fp.run(plan, PARAMS, (X, X), executor=executor, timeout=0.3)
    if executor == "threads":
        assert time.monotonic() - began < 2


HOLDS = """
import ctypes, sys, time, torch, torch.nn.functional as F, funcpipe as fp
libc = ctypes.PyDLL(None)  # keeps the interpreter's lock
def stuck(p, x):
    if x.sum():
        libc.sleep(4)
    return x * p
plan = fp.make_plan([fp.stage(stuck)], fp.schedules.fill_drain(1, 1), loss=F.mse_loss, devices="cpu")
fp.run(plan, (torch.ones(3),), (torch.zeros(1, 3),) * 2)  # torch imports much at its first dispatch mode
try:
    fp.run(plan, (torch.ones(3),), (torch.ones(1, 3),) * 2, executor="serial", timeout=0.5)
except fp.RunTimeout as error:
    print("RAISED", error)
"""


@pytest.mark.slow
def test_code_that_holds_the_interpreters_lock():
    """No Python can run, so Python's own timer prints the stacks; when the lock is free again the
    run may just go on."""
    done = subprocess.run(
        [sys.executable, "-c", HOLDS], capture_output=True, text=True, timeout=60, check=False
    )
    assert "Timeout (" in done.stderr
    assert "in stuck" in done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("bad", [0, -1, "5", float("nan")])
def test_bad_timeouts(bad):
    with pytest.raises(fp.PlanError, match="timeout is a number of seconds above 0"):
        fp.run(plan_of(), PARAMS, (X, X), timeout=bad)


def test_vjp_has_it_in_both_halves():
    parts = [fp.stage(lambda p, x: x * p, name=f"layer{i}") for i in range(S)]
    stages = FaultAt(1, 0, "B", error=sleeping(60))(parts)
    plan = fp.make_plan(stages, fp.schedules.fill_drain(S, M), devices="cpu")
    result, pullback = fp.vjp(plan, PARAMS, X, timeout=0.3)
    with pytest.raises(fp.RunTimeout, match="is in 1B0"):
        pullback(torch.ones_like(result.outputs))


def test_a_failure_while_another_lane_cannot_be_interrupted():
    """With timeout= nobody waits for ever for a lane that is stuck in C."""
    gate = threading.Lock()
    gate.acquire()
    begun = threading.Event()

    def stuck(p, x):
        begun.set()
        gate.acquire()
        return x

    def fails(p, x):
        if x.sum() > 5:
            begun.wait(5)
            raise ValueError("mine")
        return x * p

    plan = cpu_plan([fp.stage(fails), fp.stage(stuck)], fp.schedules.fill_drain(2, 2))
    x = torch.tensor([[1.0], [9.0]])
    began = time.monotonic()
    with pytest.raises(ValueError, match="mine"):
        fp.run(plan, (torch.ones(1), ()), (x, x), executor="threads", timeout=1.0)
    assert time.monotonic() - began < 5
    gate.release()


def test_a_timeout_as_long_as_you_like():
    assert fp.run(plan_of(microbatch=99), PARAMS, (X, X), timeout=float("inf")).loss == 0
    with pytest.raises(fp.PlanError, match="number of seconds"):
        fp.run(plan_of(microbatch=99), PARAMS, (X, X), timeout=True)
