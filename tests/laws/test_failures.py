"""Law 7: nothing hangs. Whatever fails wherever, the caller gets it with its coordinates and the
next run is clean."""

import gc
import os
import pickle
import random
import signal
import threading
import time
import traceback

import pytest
import torch
from common import assert_same_result, cpu_plan, forward_plan, ids, same, snapshot
from failing import ODD, PARAMS, Boom, Faults, M, S, X, caught, go, make
from watch import num_tensors

import funcpipe as fp
from funcpipe._src.core.errors import Where
from funcpipe._src.engine.failures import raise_located
from funcpipe._src.stages.eager import EagerBound

EXECUTORS = ("serial", "threads", "lanes")
SCHEDULES = [
    fp.schedules.fill_drain(S, M),
    fp.schedules.one_f_one_b(S, M),
    fp.schedules.interleaved(S, M, num_devices=2),
    fp.schedules.zero_bubble(S, M),
    fp.schedules.remat(fp.schedules.one_f_one_b(S, M)),
    fp.schedules.remat(fp.schedules.zero_bubble(S, M)),
]


@pytest.fixture(params=EXECUTORS)
def executor(request):
    """A function from a plan to an executor; lanes are kept for the whole test."""
    kept = {}

    def choose(plan):
        if request.param != "lanes":
            return request.param
        if plan not in kept:
            kept[plan] = fp.lanes(plan)
        return kept[plan]

    yield choose
    for lanes in kept.values():
        lanes.close()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=ids)
def test_every_action_fails_with_its_coordinates(schedule, executor):
    """F, R, B or I, loss; first, middle and last stage and microbatch. The next run is clean,
    nothing was written."""
    faults = Faults()
    plan = make(schedule, faults)
    expected = go(plan, run=fp.run_sequential)
    kinds = {action.kind for order in schedule.orders for action in order}
    backward = "I" if fp.Kind.I in kinds else "B"
    before, rng = snapshot((PARAMS, X)), torch.get_rng_state()
    letters = ["F", "B", *(["R"] if fp.Kind.R in kinds else [])]
    places = [(letter, s, m) for letter in letters for s in (0, 2, S - 1) for m in (0, M - 1)]
    for letter, s, m in [*places, ("L", S - 1, 0), ("L", S - 1, M - 1)]:
        original = Boom("boom", letter)
        faults.at, faults.make, faults.calls = (
            f"{s}{letter}{m}",
            lambda original=original: original,
            [],
        )
        error = caught(lambda: go(plan, executor(plan)))
        at = (
            "W" if backward == "I" and s == 0 else backward
        )  # the first stage has no input that waits for it
        shown = f"{s}F{m} (loss)" if letter == "L" else f"{s}{at if letter == 'B' else letter}{m}"
        assert isinstance(error, Boom)
        assert isinstance(error, fp.StageError)
        assert original is error.__cause__
        assert ("boom", letter) == error.args
        assert Where(s, f"part{s}", m, shown, f"{schedule.device_of[s]} (cpu)") == error.funcpipe
        assert [str(error.funcpipe)] == error.__notes__
        if executor(plan) == "serial":
            assert faults.at == faults.calls[-1]
        faults.at, faults.calls = "", []
        assert_same_result(expected, go(plan, executor(plan)))
    assert same(before, snapshot((PARAMS, X)))
    assert torch.equal(rng, torch.get_rng_state())


def test_the_weight_half_fails(executor, monkeypatch):
    """What fails in W is said to be W."""

    def fail(self, residual):
        raise Boom("w")

    monkeypatch.setattr(EagerBound, "backward_weight", fail)
    plan = make(fp.schedules.zero_bubble(1, 2), Faults())
    error = caught(lambda: go(plan, executor(plan)))
    assert isinstance(error, Boom)
    assert Where(0, "part0", 0, "0W0", "0 (cpu)") == error.funcpipe


def test_weight_and_commit_fail_with_their_names(executor):
    """What is not an action says its word: weight, commit."""

    def fail(*args):
        raise Boom("sum")

    plain = fp.stage(lambda p, x: x * p["w"])
    commits = fp.stage(
        lambda p, x, *, state: fp.Out(x * p["w"], stats=x.sum()), name="stats", commit=fail
    )
    plan = cpu_plan([plain, commits], fp.schedules.one_f_one_b(2, 2))
    run = lambda plan, **given: fp.run(plan, PARAMS[:2], (X, X), executor=executor(plan), **given)
    state = ((), torch.ones(2))
    error = caught(lambda: run(plan, state=state))
    assert isinstance(error, Boom)
    assert isinstance(error, fp.StageError)
    assert Where(1, "stats", None, "commit", "1 (cpu)") == error.funcpipe
    assert ["in commit of stage 1 ('stats') on device 1 (cpu)"] == error.__notes__
    assert torch.equal(torch.ones(2), state[1])

    weighs = cpu_plan([plain, plain], fp.schedules.one_f_one_b(2, 2), weight=fail)
    error = caught(lambda: run(weighs))
    assert isinstance(error, Boom)
    assert Where(None, "", 0, "weight", "") == error.funcpipe


def test_a_wrong_loss_says_where(executor):
    """What funcpipe itself refuses inside a run has coordinates too."""
    plain = fp.stage(lambda p, x: x * p["w"])
    plan = cpu_plan([plain, plain], fp.schedules.one_f_one_b(2, 2), loss=lambda y, t: y)
    error = caught(lambda: fp.run(plan, PARAMS[:2], (X, X), executor=executor(plan)))
    assert fp.StageError is type(error)
    assert "1F0 (loss)" == error.funcpipe.action


@pytest.mark.parametrize(
    "exit",
    [KeyboardInterrupt("now"), SystemExit(3), GeneratorExit()],
    ids=lambda e: type(e).__name__,
)
@pytest.mark.parametrize("at", ["0F3", "2F1", "1B2"])
def test_exits_arrive_as_the_very_object(exit, at, executor):
    """KeyboardInterrupt, SystemExit, GeneratorExit stay what they are, with coordinates and a
    note."""
    faults = Faults()
    plan = make(SCHEDULES[1], faults)
    exit.__dict__.clear()
    faults.at, faults.make = at, lambda: exit
    error = caught(lambda: go(plan, executor(plan)))
    assert exit is error
    assert 3 == getattr(error, "code", 3)
    assert at == error.funcpipe.action
    assert [str(error.funcpipe)] == error.__notes__


def test_the_message_is_for_a_user():
    """One traceback that ends with the user's message, the type and the place."""
    faults = Faults()
    plan = make(SCHEDULES[1], faults)
    faults.at, faults.make = "2F0", lambda: ValueError("shapes differ")
    text = "".join(traceback.format_exception(caught(lambda: go(plan, "threads"))))
    end = (
        "StageError[ValueError]: shapes differ\nin 2F0 of stage 2 ('part2') at microbatch 0 on "
        "device 2 (cpu)\n"
    )
    assert text.endswith(end)
    assert 1 == text.count("The above exception was the direct cause")
    assert "During handling" not in text


@pytest.mark.parametrize(
    ("build", "fields"), ODD, ids=lambda v: type(v()).__name__ if callable(v) else ""
)
def test_odd_exceptions_survive(build, fields, executor):
    """Types with arguments, slots, C fields, frozen or final: caught as what they are, with all
    they hold; they pickle."""
    faults = Faults()
    plan = make(SCHEDULES[1], faults)
    faults.at, faults.make = "1F1", build
    error = caught(lambda: go(plan, executor(plan)))
    original = error.__cause__
    assert type(build()) is type(original)
    assert isinstance(error, fp.StageError)
    assert "1F1" == error.funcpipe.action
    if fields is None:
        assert "Final: last" == str(error)
    else:
        assert isinstance(error, type(original))
        assert str(original) == str(error)
        assert [getattr(original, name) for name in fields] == [
            getattr(error, name) for name in fields
        ]
    again = pickle.loads(pickle.dumps(error))
    assert fp.StageError is type(again)
    assert error.funcpipe == again.funcpipe
    assert error.__notes__ == again.__notes__
    assert str(original) in str(again)


def slow_halt(monkeypatch, seconds):
    """The caller wakes late after a failure."""
    halt = fp.typing.Lanes._halt
    monkeypatch.setattr(
        fp.typing.Lanes,
        "_halt",
        lambda self, execution, wait: (time.sleep(seconds), halt(self, execution, wait)),
    )


def test_the_earliest_of_two_failures_wins(monkeypatch):
    """Of those raised, the first in plan order; the other is a note of it."""
    slow_halt(monkeypatch, 0.1)
    both = threading.Barrier(2)

    def fail(p, x):
        both.wait(5)
        raise Boom(p)

    first = fp.stage(
        lambda p, x: x if x.any() else fail(p, x), name="first"
    )  # fails at microbatch 1
    second = fp.stage(fail, name="second")
    plan = forward_plan([first, second], 2)
    x = torch.tensor([[1.0], [0.0]])
    for _ in range(5):
        error = caught(lambda: fp.run(plan, ("a", "b"), x, executor="threads"))
        order = [str(plan.program.action(code)) for code in plan.program.order]
        winner, other = sorted(["0F1", "1F0"], key=order.index)
        assert winner == error.funcpipe.action
        assert [str(error.funcpipe)] == error.__notes__[:1]
        assert f"in {other} of stage" in error.__notes__[1]
        assert error.__notes__[1].startswith("also failed: StageError[Boom]: ")


def test_sorting_of_failures():
    """However they were reported, plan order decides."""
    pair = [(7, fp.StageError("late")), (3, fp.StageError("early"))]
    error = caught(lambda: raise_located(pair))
    assert "early" == str(error)
    assert 1 == len(error.__notes__)


def test_no_action_starts_after_a_failure(monkeypatch):
    """The other lane ends the action that it is in and begins no other, even while the caller
    sleeps."""
    slow_halt(monkeypatch, 0.2)
    calls = []

    def slow(p, x):
        calls.append(int(x))
        time.sleep(0.05)
        return x

    first = fp.stage(lambda p, x: x if int(x) < 3 else 1 / 0)
    plan = forward_plan([first, fp.stage(slow)], 6)
    assert 2 == next(pool.slots for pool in plan.program.pools if pool.role is fp.typing.Role.ACT)
    error = caught(lambda: fp.run(plan, ((), ()), torch.arange(6), executor="threads"))
    assert "0F3" == error.funcpipe.action
    assert [0, 1] == calls  # 1F2 had all that it reads


def test_users_who_wrap_everything_do_not_hide_the_failure():
    """A lane that is stopped may make another exception of it; the caller still gets the first."""
    inside = threading.Event()

    def wraps(p, x):
        if not x:
            return x
        try:
            inside.set()
            while True:
                time.sleep(0.001)
        except BaseException as error:
            raise ValueError("cleanup") from error

    def fails(p, x):
        inside.wait(5)
        raise Boom("first")

    plan = forward_plan([fp.stage(wraps), fp.stage(fails)], 2)
    error = caught(lambda: fp.run(plan, ((), ()), torch.tensor([0, 1]), executor="threads"))
    assert isinstance(error, Boom)
    assert 1 == len(error.__notes__)


@pytest.mark.parametrize("at", ["2F1", "1B2", "3L0"])
def test_nothing_of_a_failed_run_is_reachable(at, executor):
    """Without the exception, all memory and graphs of the run are gone; no collector needed."""
    faults = Faults()
    plan = make(SCHEDULES[1], faults)
    faults.at = at
    chosen = executor(plan)
    gc.collect()
    before = num_tensors()
    gc.disable()
    try:
        error = caught(lambda: go(plan, chosen))
        assert isinstance(error, Boom)
        assert faults.watch.memory
        del error
        assert 0 == faults.watch.alive
        assert before == num_tensors()
    finally:
        gc.enable()


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_ctrl_c_while_the_caller_waits(executor):
    """A real SIGINT ends stages that run for long within a second; all threads are joined
    (conftest)."""
    inside, sent = threading.Event(), []

    def long(p, x):
        inside.set()
        end = time.monotonic() + 20
        while time.monotonic() < end:
            x = torch.tanh(x)
        return x

    def press():
        if inside.wait(
            5
        ):  # else the run failed before: a signal now would end this process, and nobody would see why
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    plan = forward_plan([fp.stage(long)] * 2, 2)
    timer = threading.Timer(0.05, press)
    timer.start()
    error = caught(lambda: fp.run(plan, ((), ()), X, executor=executor))
    timer.join()
    assert KeyboardInterrupt is type(error), error
    assert time.monotonic() - sent[0] < 1


def test_random_failures_never_hang():
    """Some hundred failures anywhere, on threads kept and fresh; each next run is right."""
    dice, faults = random.Random(0), Faults()
    plan = make(fp.schedules.one_f_one_b(3, 3), faults)
    expected = go(plan, run=fp.run_sequential)
    with fp.lanes(plan) as lanes:
        for _ in range(250):
            executor = dice.choice([lanes, "threads"])
            faults.at = f"{dice.randrange(3)}{dice.choice('FB')}{dice.randrange(3)}"
            faults.make = dice.choice(
                [Boom, KeyboardInterrupt, lambda: SystemExit(1), StopIteration]
            )
            faults.calls = []
            error = caught(lambda executor=executor: go(plan, executor))
            assert faults.at == error.funcpipe.action
            faults.at, faults.calls = "", []
            assert_same_result(expected, go(plan, executor))


def test_a_plan_that_cannot_finish_is_refused():
    """Two devices that wait for each other: refused when made, with who waits for what."""
    schedule = fp.Schedule.parse("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0")
    error = caught(lambda: make(schedule, Faults()))
    assert isinstance(error, fp.ScheduleError)
    assert "device 0 cannot start 0B0 before 1B0" in str(error)
    assert "device 1 cannot start 1F1 before 0F1" in str(error)
