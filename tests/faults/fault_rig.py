"""A training in the middle, faults in it, and invariant I: what must hold after any failed run."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from time import monotonic
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import assert_same_result, same, snapshot
from watch import Watch, num_tensors

import funcpipe as fp
from funcpipe._src.core.tree import flatten
from funcpipe._src.stages.context import RUNNING
from funcpipe._src.testing.fault import running
from funcpipe.testing import FaultAt

S, M, ROWS, WIDTH = 3, 3, 7, 4
EXECUTORS = ("serial", "threads", "lanes")
SCHEDULES = [
    fp.schedules.one_f_one_b(S, M),
    fp.schedules.remat(fp.schedules.fill_drain(S, M, num_devices=1)),
    fp.schedules.zero_bubble(S, M),
]
"""One with as many lanes as stages, one with remat on one lane, one with split backwards."""


class Boom(Exception):
    """A user's own."""


class Executors:
    """Called with a plan it gives an executor of one kind; lanes are kept until another number of
    them is asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lanes: fp.typing.Lanes | None = None

    def __call__(self, plan: fp.Plan) -> Any:
        if self.name != "lanes":
            return self.name
        if self._lanes is None or self._lanes.count != plan.num_devices:
            self.close()
            self._lanes = fp.lanes(plan)
        return self._lanes

    def close(self) -> None:
        """End the lanes."""
        if self._lanes is not None:
            self._lanes.close()
            self._lanes = None


class Strike(NamedTuple):
    """A fault that was raised: which object, when."""

    identity: int
    time: float


class Failure(NamedTuple):
    """What is left of an exception, without a reference to it."""

    text: str
    notes: list[str]
    where: Any


class Rig:
    """Modules with buffers and ``.grad``, an optimizer that has made a step, a batch, stages with a
    skip.

    Args:
        num_stages: the first stashes, the last pops; each is a module with an in-place layer, batch
            norm and dropout.
    """

    def __init__(self, num_stages: int = S) -> None:
        torch.manual_seed(1)
        self.watch, self.calls, self.struck, self.armed = Watch(), [], [], False
        self.modules = [self._layer() for _ in range(num_stages)]
        parts = [fp.from_module(one, name=f"layer{i}") for i, one in enumerate(self.modules)]
        keep = fp.stage(lambda p, x: fp.Out(x, stash={"e": x * 2}), name="keep", stash=["e"])
        join = fp.stage(lambda p, x, *, skips: x + skips["e"], name="join", pop=["e"])
        first = (fp.compose(parts[0][0], keep), (parts[0][1], ()), (parts[0][2], ()))
        last = (fp.compose(join, parts[-1][0]), ((), parts[-1][1]), ((), parts[-1][2]))
        self.stages, self.params, self.state = (
            tuple(one) for one in zip(first, *parts[1:-1], last, strict=True)
        )
        self.x, self.target = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
        self.optimizer = torch.optim.AdamW(fp.leaves(self.params), lr=1e-3)
        self.expected = self.run_sequential(self.plan(fp.schedules.fill_drain(num_stages, M)))
        fp.step(self.optimizer, self.params, self.expected.grads)
        for leaf in fp.leaves(self.params):
            leaf.grad = torch.randn_like(leaf)
        self.expected = self.run_sequential(self.plan(fp.schedules.fill_drain(num_stages, M)))
        self.forget()

    def _layer(self) -> nn.Module:
        watch, calls = self.watch, self.calls

        class Layer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.bound, self.norm, self.drop = (
                    nn.Hardtanh(inplace=True),
                    nn.BatchNorm1d(WIDTH),
                    nn.Dropout(0.2),
                )
                self.w = nn.Parameter(torch.rand(WIDTH) + 0.5)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                calls.append(running())
                return self.drop(self.norm(watch.layer(self.bound(x), self.w)))

        return Layer().double()

    def plan(self, schedule: fp.Schedule, *faults: Callable[..., Any], **options: Any) -> fp.Plan:
        """The stages with faults, in a plan."""
        stages = self.stages
        for fault in faults:
            stages = fault(stages)
        options = {"loss": F.mse_loss, "devices": "cpu", **options}
        return fp.make_plan(stages, schedule, **options)

    def run(self, plan: fp.Plan, executor: Any, **options: Any) -> fp.Result:
        """A run on the rig's batch, on one intra-op thread."""
        return fp.run(plan, executor=executor, **self.given(plan, options))

    def run_sequential(self, plan: fp.Plan, **options: Any) -> fp.Result:
        """The oracle's."""
        return fp.run_sequential(plan, **self.given(plan, options))

    def given(self, plan: fp.Plan, options: dict[str, Any]) -> dict[str, Any]:
        """What a run of the rig takes; ``options`` win."""
        batch = (self.x, self.target) if plan.loss else self.x
        own = {
            "params": self.params,
            "batch": batch,
            "state": self.state,
            "seed": 3,
            "threads_per_lane": 1,
        }
        return {**own, **options}

    # -- faults
    # -------------------------------------------------------------------------------

    def strike(self, make: Callable[[], BaseException] = lambda: Boom("boom")) -> None:
        """Raise what ``make`` makes, and keep a note of it; nothing while the rig is not armed."""
        if not self.armed:
            return
        error = make()
        self.struck.append(Strike(id(error), monotonic()))
        try:
            raise error
        finally:
            del error

    def fault(
        self,
        stage: int,
        microbatch: int,
        kind: str,
        make: Callable[[], BaseException] = lambda: Boom("boom"),
    ) -> FaultAt:
        """`FaultAt` that strikes while the rig is armed."""
        return FaultAt(stage, microbatch, kind, error=lambda _: self.strike(make))

    def forget(self) -> None:
        """Notes of earlier runs."""
        self.calls.clear()
        self.struck.clear()
        self.watch.memory.clear()
        self.watch.graphs.clear()

    # -- what must stay
    # -------------------------------------------------------------------------------

    def everything(self) -> list[Any]:
        """A copy of every number that belongs to the caller: parameters, .grad, buffers, optimizer,
        state, batch."""
        own = [[*m.parameters(), *m.buffers()] for m in self.modules]
        grads = [p.grad for m in self.modules for p in m.parameters()]
        moments = flatten(self.optimizer.state_dict())[0]
        return snapshot((own, grads, moments, self.params, self.state, self.x, self.target))

    def marks(self) -> list[Any]:
        """What has no number: flags, modes, identities, versions of tensors."""
        tensors = [*fp.leaves(self.params), *fp.leaves(self.state), self.x, self.target]
        flags = [(p.requires_grad, id(p), id(p.grad)) for m in self.modules for p in m.parameters()]
        modes = [layer.training for m in self.modules for layer in m.modules()]
        return [[t._version for t in tensors], flags, modes, [t.requires_grad for t in tensors]]


def _elsewhere(ask: Callable[[], Any]) -> Any:
    """The answer in a new thread."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(ask()))
    thread.start()
    thread.join()
    return answers[0]


def surroundings() -> dict[str, Any]:
    """Everything of the process and of this thread that a run could leave changed."""
    return {
        "torch rng": torch.get_rng_state().tolist(),
        "python rng": random.getstate(),
        "threads": torch.get_num_threads(),
        "threads of a new thread": _elsewhere(torch.get_num_threads),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "multithreading": torch.autograd.is_multithreading_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "device": torch.get_default_device(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "ctrl-c": signal.getsignal(signal.SIGINT),
        "running": RUNNING.get(),
    }


def lane_threads() -> set[threading.Thread]:
    """Threads of the library that live."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("funcpipe")}


@contextmanager
def nothing_unheard():
    """No exception may end in a thread or in a finaliser, where nobody hears of it."""
    heard: list[str] = []
    hooks = threading.excepthook, sys.unraisablehook
    threading.excepthook = lambda args: heard.append(f"in {args.thread}: {args.exc_value!r}")
    sys.unraisablehook = lambda args: heard.append(f"{args.err_msg}: {args.exc_value!r}")
    try:
        yield
    finally:
        threading.excepthook, sys.unraisablehook = hooks
    assert [] == heard


def together(*users: Callable[[], Any]) -> list[Any]:
    """Call all at once, each in a thread of its own; what each returns, or raises."""
    start = threading.Barrier(len(users))
    results: list[Any] = [None] * len(users)

    def work(index: int) -> None:
        start.wait(5)
        try:
            results[index] = users[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(users))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


def assert_invariant(
    rig: Rig,
    call: Callable[[], Any],
    again: Callable[[], Any] | None = None,
    *,
    kind: type[BaseException] = Boom,
    at: str | None = None,
    stage: int | None = None,
    name: str | None = None,
    microbatch: int | None = None,
    device: str | None = None,
    words: tuple[str, ...] = (),
    whole: bool = False,
    kept: bool = False,
    cycles: bool = False,
) -> Failure:
    """Invariant I. ``call`` fails as it must and leaves nothing behind; ``again``, unarmed, gives
    the right numbers.

    Args:
        rig: whose faults strike; armed for ``call`` only.
        call: the run that fails.
        again: the next run; a Result is compared with the oracle's.
        kind: what arrives: a base of a StageError whose cause is the original, or (no Exception)
            the very object. An error of the library's own has no cause; then no fault of the rig
            struck.
        at, stage, name, microbatch, device: the coordinates; ``at`` is a pattern for the action.
            None: not looked at.
        words: patterns, each to be found in message and notes.
        whole: also count all tensors of the process (slow).
        kept: lanes of the executor live on (nothing has run).
        cycles: the caller's own code makes cycles, so the garbage collector may run first; the
            library needs none.
    """
    before, marks, around, threads = rig.everything(), rig.marks(), surroundings(), lane_threads()
    rig.forget()
    if whole:
        gc.collect()
    counted = num_tensors() if whole else 0
    rig.armed, error = True, None
    with nothing_unheard():
        try:
            call()
        except BaseException as caught:
            error = caught
        finally:
            ended, rig.armed = monotonic(), False
    assert error is not None, "nothing was raised"
    text = "".join(traceback.format_exception_only(error))
    if rig.struck:
        assert ended - rig.struck[0].time < 2
    _assert_kind(error, kind, rig.struck)
    _assert_place(error, text, at, stage, name, microbatch, device)
    for word in words:
        assert re.search(word, text), f"{word!r} is not in: {text}"
    failure = Failure(text, list(getattr(error, "__notes__", ())), getattr(error, "funcpipe", None))
    del error
    assert (threads if kept else set()) == lane_threads()
    if cycles:
        gc.collect()
    assert 0 == rig.watch.alive
    if whole:
        # Fewer is right: a failed run drops an idle copy of a stage, whose buffers of batch norm are
        # tensor objects without memory.
        assert num_tensors() <= counted
    assert around == surroundings()
    assert same(before, rig.everything())
    assert marks == rig.marks()
    if again is not None:
        rig.forget()
        result = again()
        if isinstance(result, fp.Result):
            assert_same_result(rig.expected, result)
    return failure


def _assert_kind(error: BaseException, kind: type[BaseException], struck: list[Strike]) -> None:
    assert isinstance(error, kind), repr(error)
    raised = {strike.identity for strike in struck}
    if not isinstance(error, Exception):
        assert kind is type(error)
        assert not struck or id(error) in raised
    elif struck:
        assert isinstance(error, fp.StageError)
        assert id(error.__cause__) in raised
        if kind is not fp.StageError:  # the one type that refuses to be inherited from
            assert isinstance(error.__cause__, kind)
            assert str(error.__cause__) == str(error)
    else:
        assert isinstance(error, fp.FuncpipeError)


def _assert_place(
    error: Any, text: str, at: Any, stage: Any, name: Any, microbatch: Any, device: Any
) -> None:
    if at is not None:
        assert re.fullmatch(at, error.funcpipe.action), error.funcpipe
        assert f"in {error.funcpipe.action}" in text
    for field, value, shown in (
        ("stage", stage, f"stage {stage}"),
        ("name", name, repr(name)),
        ("microbatch", microbatch, f"microbatch {microbatch}"),
        ("device", device, f"device {device}"),
    ):
        if value is not None:
            assert value == getattr(error.funcpipe, field), error.funcpipe
            assert shown in text
