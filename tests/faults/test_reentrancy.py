"""Row 24: runs beside and inside of each other, asyncio, fork, modes around a run."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from common import EXECUTORS as PLAIN
from common import assert_same_result, same
from fault_rig import (
    SCHEDULES,
    Boom,
    M,
    Rig,
    S,
    assert_invariant,
    lane_threads,
    nothing_unheard,
    surroundings,
    together,
)

import funcpipe as fp
from funcpipe._src.stages import context
from funcpipe.testing import FaultAt


@pytest.fixture(scope="module")
def rig():
    return Rig()


# -- row 24: two runs at once
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", PLAIN)
def test_one_of_two_runs_fails(rig, executor):
    """Row 24: from two threads of the user's, one failing all the time: the other has the right
    numbers all the time."""
    bad, fine = rig.plan(SCHEDULES[0], FaultAt(1, 1, "F", error=Boom)), rig.plan(SCHEDULES[0])
    before, around = rig.everything(), surroundings()

    def fails():
        return [fails_once() for _ in range(15)]

    def fails_once():
        with pytest.raises(Boom) as caught:
            rig.run(bad, executor)
        return caught.value.funcpipe.action

    def succeeds():
        return [rig.run(fine, executor) for _ in range(15)]

    with nothing_unheard():
        actions, results = together(fails, succeeds)
    assert ["1F1"] * 15 == actions
    for result in results:
        assert_same_result(rig.expected, result)
    assert around == surroundings()
    assert same(before, rig.everything())
    assert set() == lane_threads()


def test_a_thread_that_began_to_compute_during_a_run():
    """Row 24: it took the number of intra-op threads of that run; a run of its own hands that to
    nobody else."""
    entered, leave, ready = threading.Event(), threading.Event(), threading.Event()
    around = surroundings()

    def waits(params, x):
        entered.set()
        assert leave.wait(30)
        return x

    def run(fn):
        plan = fp.make_plan(
            [fp.stage(fn)], fp.schedules.fill_drain(1, 1, backward=False), devices="cpu"
        )
        return fp.run(plan, ((),), torch.ones(2), executor="serial", threads_per_lane=2)

    def late():
        assert entered.wait(30)
        torch.ones(2).sum()
        began_with = torch.get_num_threads()
        ready.set()
        assert late_turn.wait(30)
        run(lambda params, x: x)
        return began_with, torch.get_num_threads()

    late_turn = threading.Event()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(run, waits), pool.submit(late)
        assert ready.wait(30)
        leave.set()
        first.result(30)
        late_turn.set()
        assert (2, 2) == second.result(30)
    assert around == surroundings()


@pytest.mark.parametrize(("mine", "others"), [(1, 2), (2, 1), (3, 1), (1, 3)])
def test_a_caller_whose_number_is_not_that_of_new_threads(mine, others, monkeypatch):
    """Row 24: both are as before, whatever numbers this run and earlier ones had."""
    plan = fp.make_plan(
        [fp.stage(lambda p, x: x)], fp.schedules.fill_drain(1, 1, backward=False), devices="cpu"
    )
    monkeypatch.setattr(context, "_outside", 0)  # nobody has asked yet
    torch.set_num_threads(mine)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(torch.set_num_threads, others).result(30)
    around = surroundings()
    assert (mine, others) == (around["threads"], around["threads of a new thread"])
    for count in (1, 2, 3, 1):
        fp.run(plan, ((),), torch.ones(2), executor="serial", threads_per_lane=count)
        assert around == surroundings()


@pytest.mark.parametrize("executor", PLAIN)
def test_two_runs_with_parameters_of_their_own(rig, executor):
    """Row 24: one plan, two sets of parameters and state, the same stages and modules."""
    plan = rig.plan(SCHEDULES[0])
    other = Rig()
    with torch.no_grad():
        for leaf in fp.leaves(other.params):
            leaf.mul_(1.25)
    options = {"params": other.params, "state": other.state, "batch": (other.x + 1, other.target)}
    expected = rig.run_sequential(plan, **options)
    assert not same(expected.grads, rig.expected.grads)
    mine = lambda: [rig.run(plan, executor) for _ in range(15)]
    theirs = lambda: [rig.run(plan, executor, **options) for _ in range(15)]
    with nothing_unheard():
        for wanted, results in zip((rig.expected, expected), together(mine, theirs), strict=True):
            for result in results:
                assert_same_result(wanted, result)


def test_lanes_for_each_of_two_runs(rig):
    """Row 24: kept lanes are one run's at a time; each user has his own."""
    plan = rig.plan(SCHEDULES[0])

    def user():
        with fp.lanes(plan) as lanes:
            return [rig.run(plan, lanes) for _ in range(15)]

    for results in together(user, user):
        for result in results:
            assert_same_result(rig.expected, result)
    assert set() == lane_threads()


@pytest.mark.parametrize("call", ["run", "run_sequential", "vjp"])
def test_a_run_inside_of_a_stage(rig, call, executor):
    """Row 24: refused with the coordinates of the outer stage, in forward and backward; nothing is
    left behind."""
    inner = rig.plan(fp.schedules.fill_drain(S, M), **({"loss": None} if call == "vjp" else {}))

    def nested(tensor):
        if rig.armed:
            given = rig.given(inner, {})
            if call == "vjp":
                given = {"params": rig.params, "inputs": rig.x, "state": rig.state, "seed": 3}
            getattr(fp, call)(inner, **given)

    for kind in "FB":
        plan = rig.plan(SCHEDULES[0], FaultAt(1, 0, kind, error=nested))
        go = functools.partial(rig.run, plan, executor(plan))
        assert_invariant(
            rig,
            go,
            go,
            kind=fp.StageError,
            at=f"1{kind}0",
            words=("within a stage", r"fp\.apply"),
        )


def test_asyncio(rig, executor):
    """Row 24: in a coroutine, in threads of its loop beside each other, failing: as anywhere
    else."""
    plan = rig.plan(SCHEDULES[0], rig.fault(1, 1, "F"))
    go = functools.partial(rig.run, plan, executor(plan))

    async def directly():
        return go()

    async def in_thread():
        return await asyncio.to_thread(go)

    async def beside():
        own = rig.plan(SCHEDULES[0])
        return await asyncio.gather(
            *(asyncio.to_thread(rig.run, own, "threads") for _ in range(3)), directly()
        )

    for way in (directly, in_thread):
        assert_invariant(
            rig,
            lambda way=way: asyncio.run(way()),
            lambda way=way: asyncio.run(way()),
            at="1F1",
            cycles=True,
        )
    for result in asyncio.run(beside()):
        assert_same_result(rig.expected, result)


def test_a_coroutine_that_is_cancelled(rig, executor):
    """Row 24: to_thread cannot end its thread; the run ends by itself and the lanes serve the
    next."""
    plan = rig.plan(SCHEDULES[0], FaultAt(1, 0, "F", error=lambda _: time.sleep(0.3)))
    go = functools.partial(rig.run, plan, executor(plan))

    async def impatient():
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(go), 0.1)

    asyncio.run(impatient())  # waits for the loop's threads
    assert_same_result(rig.expected, go())


# -- row 24: fork
# -------------------------------------------------------------------------------


def in_child(work, seconds=10):
    """What ``work`` returns or raises in a forked child, as text; None if the child hangs."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def child():
        try:
            theirs.send(f"returned {work()}")
        except BaseException as error:
            theirs.send(f"{type(error).__name__}: {error}")

    process = context.Process(target=child, daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of fork beside threads, from Python 3.12 on
        process.start()
    try:
        return ours.recv() if ours.poll(seconds) else None
    finally:
        process.kill()
        process.join()


def test_a_forked_child_runs(rig):
    """Row 24: after runs on threads in the parent, with lanes alive there: the child's numbers are
    right on any executor."""
    plan = rig.plan(SCHEDULES[0])

    def work(executor):
        assert_same_result(rig.expected, rig.run(plan, executor))

    with fp.lanes(plan) as lanes:
        rig.run(plan, lanes)
        rig.run(plan, "threads")
        for executor in PLAIN:
            assert "returned None" == in_child(functools.partial(work, executor))
        assert_same_result(rig.expected, rig.run(plan, lanes))


def test_lanes_of_the_parent_do_not_hang_in_a_forked_child(rig):
    """Row 24: their threads are not in the child. They are refused with what to do, or start anew;
    closing them ends."""
    plan = rig.plan(SCHEDULES[0])
    with fp.lanes(plan) as lanes:
        rig.run(plan, lanes)

        def work():
            assert_same_result(rig.expected, rig.run(plan, lanes))

        answer = in_child(work, seconds=5)
        assert answer is not None, "the child hangs"
        assert answer == "returned None" or "lanes" in answer, answer
        assert "returned None" == in_child(lanes.close, seconds=5)
        assert_same_result(rig.expected, rig.run(plan, lanes))


def test_a_stage_may_fork(rig, executor):
    """Row 24: as a data loader does inside of a stage: the child leaves, the run goes on."""
    answers = []
    strike = lambda _: answers.append(in_child(lambda: torch.ones(2).sum().item(), seconds=5))
    plan = rig.plan(SCHEDULES[0], FaultAt(1, 1, "F", error=strike))
    assert_same_result(rig.expected, rig.run(plan, executor(plan)))
    assert ["returned 2.0"] == answers


# -- row 24: modes around a run
# -------------------------------------------------------------------------------


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(name):
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


MODES = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast without its cache": lambda: torch.autocast(
        "cpu", torch.bfloat16, cache_enabled=False
    ),
    "device meta": lambda: torch.device("meta"),
    "default device meta": lambda: default_device("meta"),
    "default device cpu": lambda: default_device("cpu"),
    "default dtype": lambda: default_dtype(torch.float64),
    "enable_grad": torch.enable_grad,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "one thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "deterministic": lambda: deterministic(),
}


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
def test_modes_around_a_run_that_fails(rig, mode, executor):
    """Row 24: the mode holds after the failure as before it, on every thread; the next run has the
    oracle's bits."""
    kind = "FB"[list(MODES.values()).index(mode) % 2]
    plan = rig.plan(SCHEDULES[0], rig.fault(1, 1, kind))
    with mode():
        expected = rig.run_sequential(plan)
        go = functools.partial(rig.run, plan, executor(plan))
        assert_invariant(rig, go, lambda: assert_same_result(expected, go()), at=f"1{kind}1")
    assert_same_result(rig.expected, rig.run(rig.plan(SCHEDULES[0]), executor(plan)))


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__
)
def test_modes_without_autograd(rig, mode, executor):
    """Row 24: a plan with backwards is refused before any stage, forwards alone run, a failing one
    leaves the mode."""
    plan = rig.plan(SCHEDULES[0])
    forwards = rig.plan(SCHEDULES[0].forwards(), rig.fault(1, 1, "F"), loss=None)
    with mode():
        assert_invariant(
            rig,
            lambda: rig.run(plan, executor(plan)),
            kind=fp.PlanError,
            words=(mode.__name__, "forwards"),
            kept=True,
        )
        go = lambda: rig.run(forwards, executor(forwards))
        expected = rig.run_sequential(forwards)
        assert_invariant(rig, go, lambda: assert_same_result(expected, go()), at="1F1")
    assert_same_result(rig.expected, rig.run(rig.plan(SCHEDULES[0]), executor(plan)))
