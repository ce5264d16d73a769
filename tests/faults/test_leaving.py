"""Rows 5 and 30: Ctrl-C, leaving Python, closing and dropping lanes while a run goes on."""

from __future__ import annotations

import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from common import assert_same_result
from fault_rig import SCHEDULES, Rig, assert_invariant, lane_threads, together

import funcpipe as fp
from funcpipe.testing import FaultAt


@pytest.fixture(scope="module")
def rig():
    return Rig()


def test_ctrl_c_and_the_cell_again(rig, executor):
    """Row 5, 30: a real SIGINT in a running cell, within a second; the same cell again, with kept
    lanes too."""

    def long(tensor):
        end = time.monotonic() + 30
        while rig.armed and time.monotonic() < end:
            if not sent.is_set():
                sent.set()
                os.kill(os.getpid(), signal.SIGINT)
            torch.tanh(tensor)

    for kind in "FB":
        plan, sent = rig.plan(SCHEDULES[0], FaultAt(1, 1, kind, error=long)), threading.Event()
        go = functools.partial(rig.run, plan, executor(plan))
        began = time.monotonic()
        assert_invariant(rig, go, go, kind=KeyboardInterrupt)
        assert time.monotonic() - began < 2


START = """
import os, signal, sys, threading, time, torch, torch.nn.functional as F, funcpipe as fp
way, stuck = sys.argv[1:3]
def stage(p, x):
    end = time.monotonic() + 30 * bool(x.any())
    if end > time.monotonic() + 1:
        print("inside", flush=True)
    while time.monotonic() < end:
        time.sleep(30) if stuck == "in C" else torch.tanh(x)
    return x * p
plan = fp.make_plan([fp.stage(stage, name=f"s{i}") for i in range(2)], fp.schedules.one_f_one_b(2, 2), loss=F.mse_loss, devices="cpu")
params, x = (torch.ones(3), torch.ones(3)), torch.ones(4, 3)
executor = fp.lanes(plan) if way == "lanes" else way
def interrupt(*args):
    os.write(1, b"interrupted\\n")
    signal.default_int_handler(*args)
signal.signal(signal.SIGINT, interrupt)
go = lambda x: fp.run(plan, params, (x, x), executor=executor)
go(x * 0)
"""

WAITS = (
    START
    + """
try:
    go(x)
finally:
    print(time.monotonic(), flush=True)
    print([t.name for t in threading.enumerate() if t.name.startswith("funcpipe")], flush=True)
"""
)


def script(code, *words):
    """A Python that has said "inside"."""
    command = [sys.executable, "-c", code, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert "inside" == process.stdout.readline().strip()
    return process


def test_ctrl_c_ends_the_process():
    """Row 5: within a second, threads joined, with the status of a process that SIGINT ended (a
    shell says 130)."""
    process = script(WAITS, "threads", "in Python")
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    arrived = float(
        out.strip().splitlines()[-2]
    )  # at the caller; how long Python takes to leave is its own matter
    assert arrived - began < 1
    assert -signal.SIGINT == process.returncode
    assert "[]" == out.strip().splitlines()[-1]
    assert 1 == sum(line.startswith("KeyboardInterrupt") for line in err.splitlines())
    assert "ignored" not in err


def test_ctrl_c_twice_leaves_what_cannot_be_interrupted():
    """Row 5: law 7 waits for actions in flight; who presses again does not wait for one that sleeps
    in C."""
    process = script(WAITS, "threads", "in C")
    process.send_signal(signal.SIGINT)
    assert "interrupted" == process.stdout.readline().strip()  # two signals at once would be one
    time.sleep(0.5)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    interrupted, arrived, left = out.strip().splitlines()
    assert "interrupted" == interrupted
    assert float(arrived) - began < 1  # as above
    assert "funcpipe" in left  # the one that sleeps
    assert -signal.SIGINT == process.returncode
    assert "Fatal" not in err
    assert "terminate" not in err


LEAVES = (
    START
    + """
done = threading.Event()
def user():
    try:
        go(x)
    except BaseException as error:
        print(type(error).__name__, flush=True)
    done.wait()  # in Python: a thread that is in torch's code when Python ends aborts the process, with or without us
threading.Thread(target=user, daemon=True).start()
time.sleep(0.5)
sys.exit(3)
"""
)


def test_leaving_while_a_run_goes_on():
    """Row 30: the interpreter ends while a daemon thread of the user's runs a plan: no crash, the
    status is kept."""
    process = script(LEAVES, "lanes", "in Python")
    _, err = process.communicate(timeout=20)
    assert "" == err
    assert 3 == process.returncode


FINISHES = (
    START.replace("30 * bool", "0.6 * bool")
    .replace("+ 1:", "+ 0.3:")
    .replace('print("inside", flush=True)', 'print("inside", flush=True), entered.set()')
    + """
entered = threading.Event()
threading.Thread(target=lambda: print(float(go(x).loss), flush=True)).start()
entered.wait()  # from Python 3.12 on no thread can be started once Python leaves
sys.exit(3)
"""
)


def test_leaving_waits_for_threads_that_are_no_daemons():
    """Row 30: Python waits for them, and their run goes on to its end."""
    process = script(FINISHES, "threads", "in Python")
    out, err = process.communicate(timeout=30)
    assert "" == err
    assert "0.0" == out.strip().splitlines()[-1]
    assert 3 == process.returncode


def test_lanes_that_are_closed_during_a_run(rig):
    """Row 30: by another thread: the run ends well or is refused; nothing hangs, no thread
    stays."""
    plan = rig.plan(SCHEDULES[0], FaultAt(1, 1, "F", error=lambda _: time.sleep(0.2)))
    lanes, inside = fp.lanes(plan), threading.Event()
    first = FaultAt(0, 0, "F", error=lambda _: inside.set())
    plan = fp.make_plan(first(plan.stages), plan.schedule, loss=F.mse_loss, devices="cpu")

    def close():
        inside.wait(5)
        lanes.close()

    result, _ = together(lambda: rig.run(plan, lanes), close)
    if isinstance(result, fp.Result):
        assert_same_result(rig.expected, result)
    else:
        assert isinstance(result, fp.FuncpipeError)
    assert set() == lane_threads()
    with pytest.raises(fp.FuncpipeError, match="closed"):
        rig.run(plan, lanes)


def test_lanes_that_nobody_holds_end(rig):
    """Row 30: ``run(..., executor=fp.lanes(plan))`` and ``del lanes``: the threads end with the
    object."""
    plan = rig.plan(SCHEDULES[0])
    lanes = fp.lanes(plan)
    assert_same_result(rig.expected, rig.run(plan, lanes))
    workers = list(lanes._workers)  # they do not hold the lanes
    try:
        del lanes
        gc.collect()
        end = time.monotonic() + 2
        while lane_threads() and time.monotonic() < end:
            time.sleep(0.01)
        assert set() == lane_threads()
    finally:
        for worker in workers:  # a failure here must not fail the other tests
            worker.end()
