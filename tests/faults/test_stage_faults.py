"""Rows 1 to 10: what fails inside of a stage, a loss, a commit, a callback; invariant I after
each."""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
import time

import pytest
import torch
import torch.nn.functional as F
from common import ids, schedules
from failing import ODD, Final, Trip
from fault_rig import EXECUTORS, SCHEDULES, Boom, Executors, M, Rig, S, assert_invariant

import funcpipe as fp
from funcpipe.testing import FaultAt


@pytest.fixture(scope="module")
def rig():
    return Rig()


def place(plan, stage, microbatch):
    """The coordinates of a stage in a plan."""
    device = f"{plan.schedule.device_of[stage]} (cpu)"
    return {
        "stage": stage,
        "name": plan.stages[stage].name,
        "microbatch": microbatch,
        "device": device,
    }


def letter(schedule, kind, stage=1):
    """How the schedule calls an action: its backward may be I, and of the first stage, with an
    input that needs no gradient, W."""
    split = any(action.kind is fp.Kind.I for order in schedule.orders for action in order)
    return ("I" if stage else "W") if kind == "B" and split else kind


EVERYWHERE = [(stage, microbatch) for stage in (0, 1, S - 1) for microbatch in (0, M - 1)]


# -- rows 1 and 2: F, R, B, I
# -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "schedule"),
    list(enumerate(schedules(S, M))),
    ids=lambda v: "" if isinstance(v, int) else ids(v),
)
def test_every_kind_of_action_in_every_schedule(rig, number, schedule):
    """Row 1, 2: F, R and B of two places in turn; every schedule, the executors in turn."""
    kinds = {action.kind for order in schedule.orders for action in order}
    letters = ["F", "B", *(["R"] if fp.Kind.R in kinds else [])]
    executor = Executors(EXECUTORS[number % 3])
    for nth, kind in enumerate(letters):
        one = letter(schedule, kind)
        found = [
            (a.stage, a.microbatch)
            for order in schedule.orders
            for a in order
            if a.kind.value == one
        ]
        stage, microbatch = found[(number + nth) % len(found)]
        shown = letter(schedule, kind, stage)
        plan = rig.plan(schedule, rig.fault(stage, microbatch, kind))
        go = lambda plan=plan: rig.run(plan, executor(plan))
        assert_invariant(
            rig, go, go, at=f"{stage}{shown}{microbatch}", **place(plan, stage, microbatch)
        )
    executor.close()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=ids)
@pytest.mark.parametrize("kind", ["F", "B"])
def test_first_middle_and_last(rig, schedule, kind, executor):
    """Row 1, 2: stages by microbatches. Nothing of a lane starts after the fault."""
    for stage, microbatch in EVERYWHERE:
        plan = rig.plan(schedule, rig.fault(stage, microbatch, kind))
        go = lambda plan=plan: rig.run(plan, executor(plan))
        action = f"{stage}{letter(schedule, kind, stage)}{microbatch}"
        started = []
        assert_invariant(
            rig,
            lambda go=go, started=started: watching(go, rig, started),
            go,
            at=action,
            **place(plan, stage, microbatch),
        )
        begun = {a for a in started if a.stage == stage and a.kind is fp.Kind.F}
        if kind == "F":
            assert set(range(microbatch + 1)) == {a.microbatch for a in begun}


def watching(go, rig, started):
    """Run, and keep which actions began."""
    try:
        return go()
    finally:
        started += rig.calls


@pytest.mark.slow
def test_the_whole_process_holds_no_tensor_more(rig, executor):
    """Row 1, 2: not only what stages make: every tensor object is counted."""
    for kind in "FB":
        plan = rig.plan(SCHEDULES[0], rig.fault(1, 1, kind))
        go = functools.partial(rig.run, plan, executor(plan))
        go()  # stages keep a copy of their module, plans their programs
        assert_invariant(rig, go, whole=True, at=f"1{kind}1")


class InBackward:
    """Ways to fail in a backward, other than `FaultAt`'s."""

    def function(self, rig, x):
        return Trip.apply(x, lambda: rig.strike())

    def tensor_hook(self, rig, x):
        if x.requires_grad:
            x.register_hook(lambda gradient: rig.strike())
        return x * 1

    def node_hook(self, rig, x):
        y = x * 1
        if y.grad_fn is not None:
            y.grad_fn.register_prehook(lambda gradients: rig.strike())
        return y

    def checkpoint(self, rig, x):
        calls = []

        def again(x):
            calls.append(1)
            if len(calls) > 1:
                rig.strike()
            return x * torch.ones_like(x)

        return torch.utils.checkpoint.checkpoint(again, x, use_reentrant=False)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=ids)
@pytest.mark.parametrize("way", ["function", "tensor_hook", "node_hook", "checkpoint"])
def test_ways_to_fail_in_a_backward(rig, way, schedule, executor):
    """Row 2: custom function, hooks on tensors and nodes, recomputation: the forward stage is
    named, torch says none."""
    trip = fp.stage(lambda p, x: getattr(InBackward(), way)(rig, x), name="trip")
    middle = fp.compose(rig.stages[1], trip)
    plan = fp.make_plan(
        (rig.stages[0], middle, rig.stages[2]), schedule, loss=F.mse_loss, devices="cpu"
    )
    params, state = ((t[0], (t[1], ()), t[2]) for t in (rig.params, rig.state))
    go = lambda: fp.run(
        plan, **rig.given(plan, {"params": params, "state": state, "executor": executor(plan)})
    )
    first = 0 if schedule.is_ascending else M - 1
    action = f"1{letter(schedule, 'B')}{first}"

    def again():
        result = go()
        assert torch.equal(rig.expected.loss, result.loss)
        assert all(map(torch.equal, fp.leaves(rig.expected.grads), fp.leaves(result.grads)))

    assert_invariant(rig, go, again, at=action, **place(plan, 1, first))


# -- row 3: loss, commit, callbacks
# -------------------------------------------------------------------------------


def in_loss(rig, microbatch=1):
    """A loss that fails at a microbatch: it counts its calls, for it is called once for each. The
    calls that check its first one have no grad."""
    calls = []

    def loss(y, target):
        calls.extend([1] * torch.is_grad_enabled())
        if torch.is_grad_enabled() and len(calls) % M == microbatch + 1:
            rig.strike()
        return F.mse_loss(y, target)

    return loss


@pytest.mark.parametrize("schedule", SCHEDULES, ids=ids)
def test_the_loss_fails(rig, schedule, executor):
    """Row 3: forward and backward of the loss; it stands in the place of the stage's action."""
    plan = rig.plan(schedule, loss=in_loss(rig))
    go = functools.partial(rig.run, plan, executor(plan))
    assert_invariant(rig, go, at=rf"{S - 1}F1 \(loss\)", **place(plan, S - 1, 1))
    backward = lambda y, t: F.mse_loss(Trip.apply(y, rig.strike), t)
    plan = rig.plan(schedule, loss=backward)
    go = functools.partial(rig.run, plan, executor(plan))
    first = 0 if schedule.is_ascending else M - 1
    assert_invariant(
        rig, go, go, at=f"{S - 1}{letter(schedule, 'B')}{first}", **place(plan, S - 1, first)
    )


def commits(rig, make):
    """The rig's stages, the last with statistics whose merge fails; with their parameters and
    state."""

    def commit(state, stats):
        rig.strike(make)
        return state.add_(sum(stats))  # in place: into its own copy

    counts = fp.stage(
        lambda p, x, *, state: fp.Out(x, stats=x.detach().sum()), name="counts", commit=commit
    )
    last = fp.compose(rig.stages[-1], counts)
    stages = (*rig.stages[:-1], last)
    trees = {
        "params": (*rig.params[:-1], (rig.params[-1], ())),
        "state": (*rig.state[:-1], (rig.state[-1], torch.zeros(()))),
    }
    return stages, trees


@pytest.mark.parametrize(
    "make", [Boom, KeyboardInterrupt, StopIteration], ids=lambda kind: kind.__name__
)
def test_the_merge_of_state_fails(rig, make, executor):
    """Row 3, 4: "commit" stands in the place of the action; the state given is untouched."""
    stages, trees = commits(rig, make)
    plan = fp.make_plan(stages, SCHEDULES[0], loss=F.mse_loss, devices="cpu")
    before = trees["state"][-1][1].clone()
    kept = isinstance(executor(plan), fp.typing.Lanes)
    if kept:
        fp.run(plan, **rig.given(plan, trees), executor=executor(plan))
    go = lambda: fp.run(plan, **rig.given(plan, trees), executor=executor(plan))
    assert_invariant(
        rig,
        go,
        lambda: go().state,
        kind=make,
        at="commit",
        stage=S - 1,
        name=stages[-1].name,
        device=f"{S - 1} (cpu)",
        kept=True,
        whole=True,
    )
    assert torch.equal(before, trees["state"][-1][1])


@pytest.mark.parametrize("make", [Boom, KeyboardInterrupt], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("word", ["weight", "trainable"])
def test_a_callback_fails(rig, word, make, executor):
    """Row 3, 4: what is called before the first action has its name in the place of the action."""

    def weight(target):
        rig.strike(make)
        return len(target)

    def trainable(name, leaf):
        rig.strike(make)
        return True

    plan = rig.plan(SCHEDULES[0], **({"weight": weight} if word == "weight" else {}))
    options = {"trainable": trainable} if word == "trainable" else {}
    go = lambda: rig.run(plan, executor(plan), **options)
    called = []
    assert_invariant(rig, lambda: watching(go, rig, called), go, kind=make, at=word, kept=True)
    assert [] == called  # before any stage


# -- row 4: exits
# -------------------------------------------------------------------------------


class Quit(BaseException):
    """A user's own, no Exception."""


EXITS = [KeyboardInterrupt, SystemExit, GeneratorExit, asyncio.CancelledError, Quit]


def test_an_interruption_while_lanes_are_being_ended(monkeypatch):
    """Row 4: Ctrl-C during the clean-up of a failure leaves no lane that waits."""

    def interrupted(self, error):
        raise KeyboardInterrupt

    monkeypatch.setattr(fp.typing.Lanes, "ending", interrupted)
    stages = FaultAt(0, 2, "F", error=Boom("first"))([fp.stage(lambda p, x: x * p)] * S)
    plan = fp.make_plan(stages, SCHEDULES[0], loss=F.mse_loss, devices="cpu")
    x, params = torch.ones(4, 3), tuple(torch.ones(3) for _ in range(S))
    with pytest.raises(KeyboardInterrupt), fp.lanes(plan) as lanes:
        fp.run(plan, params, (x, x), executor=lanes)
    deadline = time.monotonic() + 5
    while any(each.name.startswith("funcpipe lane") for each in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("make", EXITS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("kind", ["F", "B"])
def test_exits_leave_nothing_behind(rig, kind, make, executor):
    """Row 4: the very object; the schedules in turn."""
    schedule = SCHEDULES[EXITS.index(make) % len(SCHEDULES)]
    plan = rig.plan(schedule, rig.fault(1, 1, kind, make))
    go = functools.partial(rig.run, plan, executor(plan))
    assert_invariant(rig, go, go, kind=make, at=f"1{letter(schedule, kind)}1", **place(plan, 1, 1))


# -- row 6: two at once
# -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kinds",
    [(Boom, KeyboardInterrupt), (KeyboardInterrupt, Boom), (SystemExit, Quit), (Boom, Boom)],
    ids=str,
)
def test_two_lanes_fail_at_once(rig, kinds, monkeypatch):
    """Row 6: of an error and an exit in two lanes the earlier in plan order arrives, the other is a
    note of it."""
    # On a loaded machine the one that fails first would else have the other interrupted before that
    # one fails.
    monkeypatch.setattr("funcpipe._src.engine.lanes._PATIENCE", 10.0)
    meet = threading.Barrier(2)

    def together(make):
        def fail(tensor):
            if rig.armed:
                meet.wait(5)
                rig.strike(make)

        return fail

    faults = [
        FaultAt(0, 1, "F", error=together(kinds[0])),
        FaultAt(1, 0, "F", error=together(kinds[1])),
    ]
    plan = rig.plan(fp.schedules.fill_drain(S, M), *faults)
    order = [str(plan.program.action(code)) for code in plan.program.order]
    first = min(("0F1", "1F0"), key=order.index)
    winner = kinds[("0F1", "1F0").index(first)]
    other = kinds[1 - ("0F1", "1F0").index(first)]
    for _ in range(5):
        failure = assert_invariant(
            rig,
            functools.partial(rig.run, plan, "threads"),
            functools.partial(rig.run, plan, "threads"),
            kind=winner,
            at="0F1|1F0",
        )
        assert first == failure.where.action
        assert str(failure.where) == failure.notes[0]
        assert len(failure.notes) == 1 or (
            "also failed: " in failure.notes[1] and other.__name__ in failure.notes[1]
        )


# -- row 7: exceptions that end loops
# -------------------------------------------------------------------------------


ENDS = [StopIteration, StopAsyncIteration, EOFError, queue.Empty]


@pytest.mark.parametrize("make", ENDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("kind", ["F", "B"])
def test_exceptions_that_end_loops(rig, kind, make, executor):
    """Row 7: they end no loop of the library's; they are errors of the stage. The schedules in
    turn."""
    schedule = SCHEDULES[ENDS.index(make) % len(SCHEDULES)]
    plan = rig.plan(schedule, rig.fault(S - 1, M - 1, kind, make))
    go = functools.partial(rig.run, plan, executor(plan))
    assert_invariant(
        rig,
        go,
        go,
        kind=make,
        at=f"{S - 1}{letter(schedule, kind)}{M - 1}",
        **place(plan, S - 1, M - 1),
    )


@pytest.mark.parametrize(
    "make", [build for build, _ in ODD], ids=lambda make: type(make()).__name__
)
def test_odd_exceptions_leave_nothing_behind(rig, make, executor):
    """Types that are hard to build again; the one that cannot be arrives as a plain StageError."""
    plan = rig.plan(SCHEDULES[0], rig.fault(1, 1, "B", make))
    go = functools.partial(rig.run, plan, executor(plan))
    assert_invariant(
        rig, go, go, kind=fp.StageError if type(make()) is Final else type(make()), at="1B1"
    )


# -- row 8: out of memory
# -------------------------------------------------------------------------------

MEMORY = {
    "torch": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB."),
    "python": MemoryError,
    "runtime": lambda: RuntimeError(
        "[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    ),
}


@pytest.mark.parametrize("make", MEMORY.values(), ids=list(MEMORY))
@pytest.mark.parametrize("kind", ["F", "B"])
def test_out_of_memory_says_what_is_held(rig, kind, make, executor):
    """Row 8: residuals that live, their bytes, what to do; tried once."""
    schedule = fp.schedules.fill_drain(S, M)
    microbatch = (
        2 if kind == "F" else 1
    )  # two were kept before; two are left, the one in use among them
    plan = rig.plan(schedule, rig.fault(1, microbatch, kind, make))
    go = functools.partial(rig.run, plan, executor(plan))
    words = (
        rf"device 1 holds 2 residuals \(the schedule's most is {M}\) with \d+\.\d MiB",
        "more microbatches of fewer rows",
        r"fp\.schedules\.remat\(schedule\)",
        "one_f_one_b",
    )
    assert_invariant(rig, go, go, kind=type(make()), words=words, **place(plan, 1, microbatch))
    other = rig.plan(schedule, rig.fault(1, 1, kind, lambda: RuntimeError("shapes differ")))
    failure = assert_invariant(
        rig, functools.partial(rig.run, other, executor(other)), kind=RuntimeError
    )
    assert [str(failure.where)] == failure.notes


@pytest.mark.parametrize(
    ("allocate", "kind"),
    [
        (lambda: torch.empty(1 << 58, dtype=torch.uint8), RuntimeError),
        (lambda: bytearray(1 << 62), MemoryError),
    ],
    ids=["torch", "python"],
)
def test_out_of_memory_for_real(rig, allocate, kind, executor):
    """Row 8: what torch and Python say when an allocation cannot be; no second attempt."""
    tries = []

    def says():
        tries.append(1)
        try:
            allocate()
        except Exception as error:
            return error
        raise AssertionError("there is too much memory")

    plan = rig.plan(SCHEDULES[0], rig.fault(1, 0, "F", says))
    go = functools.partial(rig.run, plan, executor(plan))
    assert_invariant(
        rig, go, go, kind=kind, at="1F0", words=("to use less memory",), **place(plan, 1, 0)
    )
    assert [1] == tries


# -- rows 9 and 10: checks and timeouts
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES, ids=ids)
@pytest.mark.parametrize("kind", ["F", "B"])
def test_numbers_that_are_not_finite(rig, kind, schedule, executor):
    """Row 9: the refusal leaves as little behind as a fault does."""
    spoil = lambda tensor: tensor * float("nan") if rig.armed else None
    plan = rig.plan(schedule, FaultAt(1, 1, kind, error=spoil))
    go = functools.partial(rig.run, plan, executor(plan), check="finite")
    assert_invariant(
        rig,
        go,
        go,
        kind=fp.NotFiniteError,
        at=f"1{letter(schedule, kind)}1",
        words=("NaN",),
        **place(plan, 1, 1),
    )


@pytest.mark.parametrize("kind", ["F", "B"])
def test_a_timeout_leaves_nothing_behind(rig, kind, executor):
    """Row 10: the lanes that waited and the one that stood still are joined, and their tensors
    gone."""

    def sleep(tensor):
        end = time.monotonic() + 60
        while rig.armed and time.monotonic() < end:
            time.sleep(0.01)

    for schedule in SCHEDULES[:2]:
        plan = rig.plan(schedule, FaultAt(1, 1, kind, error=sleep))
        go = functools.partial(rig.run, plan, executor(plan), timeout=0.2)
        assert_invariant(
            rig,
            go,
            functools.partial(rig.run, plan, executor(plan)),
            kind=fp.RunTimeout,
            words=(f"is in 1{kind}1 of stage 1", "in sleep"),
        )


# -- the two halves of a vjp
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Boom, KeyboardInterrupt], ids=lambda kind: kind.__name__)
def test_both_halves_of_a_vjp(rig, make, executor):
    """Rows 1, 2, 4: a forward fails in the first half, a backward in the second; the pullback is
    spent, not broken."""
    for kind in "FB":
        plan = rig.plan(fp.schedules.fill_drain(S, M), rig.fault(1, 1, kind, make), loss=None)

        def go(plan=plan):
            result, pullback = fp.vjp(
                plan, rig.params, rig.x, state=rig.state, seed=3, executor=executor(plan)
            )
            try:
                return pullback(torch.ones_like(result.outputs))
            finally:
                with pytest.raises(fp.FuncpipeError, match="spent"):
                    pullback(torch.ones_like(result.outputs))

        good = [tensor.clone() for tensor in fp.leaves(go()[0])]
        again = lambda go=go, good=good: (
            all(map(torch.equal, good, fp.leaves(go()[0]))) or pytest.fail("other numbers")
        )
        assert_invariant(rig, go, again, kind=make, at=f"1{kind}1", **place(plan, 1, 1))
