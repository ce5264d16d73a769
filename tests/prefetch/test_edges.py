"""Ends and edges of an overlap: who closes it and when, what a process leaves behind, streams at
the border, odd batches."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from prefetch.sources import Numbers, threads_of_overlaps

import funcpipe as fp
from funcpipe._src.devices.stream import Place
from funcpipe.batches import (
    BatchStage,
    Fold,
    accumulate_grads,
    agree,
    loss_scale,
    overlap,
    select,
    to_device,
    unscale,
    update_scale,
    windows,
)

sys.path.insert(0, str(Path(__file__).parent.parent / "streams"))
from recorder import Recorder

ROOT = Path(__file__).parent.parent.parent
HOSTS = [True, False]
DEVICE = "cpu:0"


def script(code: str, **options) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        **options,
    )


WORK = """
import torch
from funcpipe.batches import Fold, overlap
def prepare(x):
    a = torch.randn(400, 400)
    for _ in range(10): a = a @ a; a = a / a.norm()
    return a
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    [
        "for batch in overlap(range(100), [prepare, prepare], depth=4): break",
        "run = overlap(range(100), [prepare, prepare], depth=4); next(run)",
        (
            "run = overlap(range(100), [prepare, Fold(lambda s, x: 1 / 0, "
            "0)], "
            "depth=4)\ntry: next(run)\nexcept ZeroDivisionError: pass"
        ),
    ],
    ids=["break", "held", "error"],
)
def test_a_process_ends_in_order(end):
    """A thread that is in torch's code when Python ends would abort it."""
    for _ in range(2):
        done = script(WORK + end)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_fork_is_told():
    def attempt(run):
        try:
            next(run)
        except fp.FuncpipeError as error:
            return "forked process has none of its threads" in str(error)

    run = overlap(range(5), [lambda x: x])
    next(run)
    if (child := os.fork()) == 0:
        os._exit(0 if attempt(run) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert list(run) == [1, 2, 3, 4]


# ---- close
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", [False, True])
def test_close_from_another_thread_ends_the_loop(nested):
    release = threading.Event()

    def source():
        yield 0
        release.wait(20)
        yield 1

    inner = overlap(source(), [lambda x: x])
    run = overlap(inner, [lambda x: x]) if nested else inner
    assert next(run) == 0
    timer = threading.Timer(0.05, inner.close)
    timer.start()
    threads = threads_of_overlaps()
    assert next(run, "end") == "end"
    release.set()
    timer.join()
    for one in threads:
        one.join(20)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs signals")
@pytest.mark.parametrize("thread", HOSTS)
def test_close_from_a_signal_ends_the_loop(thread):
    before = signal.signal(signal.SIGALRM, lambda *_: run.close())
    try:
        run = overlap(range(10**9), [lambda x: time.sleep(0.001) or x], thread=thread)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        last = -1
        for got in run:
            assert got == last + 1
            last = got
        assert last >= 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        run.close()


@pytest.mark.parametrize("thread", HOSTS)
def test_close_from_a_stage_ends_the_loop(thread):
    def closes(x):
        if x == 3:
            run.close()
        return x

    run = overlap(range(9), [closes], thread=thread)
    got = list(run)
    assert got == list(range(len(got)))
    assert len(got) <= 4


def test_what_ends_everything_is_not_taken_for_a_close():
    def leaves(x):
        if x == 3:
            raise SystemExit(5)
        return x

    stages = [BatchStage(leaves, thread=True), BatchStage(lambda x: x, thread=False, lead=1)]
    run = overlap(range(9), stages, depth=5)
    with pytest.raises(SystemExit):
        list(time.sleep(0.02) for _ in run)  # noqa: C400


def test_an_error_is_not_hidden_by_a_slow_source():
    """The with block waits a moment, and says in a note who is left."""
    release = threading.Event()

    def source():
        yield 0
        release.wait(20)

    with pytest.raises(KeyError) as caught, overlap(source(), [lambda x: x]) as run:  # noqa: PT012
        next(run)
        threads = threads_of_overlaps()
        raise KeyError("mine")
    assert "these threads still work: funcpipe source" in caught.value.__notes__
    release.set()
    for one in threads:
        one.join(20)


@pytest.mark.parametrize("case", ["stage", "inline", "fold"])
def test_an_error_is_no_cycle(case):
    """What a failed batch held is free with its error, without the collector."""
    alive = []

    class Local:
        pass

    def fails(x):
        local = Local()
        alive.append(weakref.ref(local))
        raise ValueError

    stages = [Fold(lambda s, x: fails(x), 0)] if case == "fold" else [fails]
    gc.disable()
    try:
        run = overlap(range(6), stages, thread=False if case == "inline" else None)
        with pytest.raises(ValueError):  # noqa: PT011
            next(run)
        del run
        assert [ref() for ref in alive] == [None] * len(alive)
    finally:
        gc.enable()


def test_a_loader_can_be_used_again_after_a_break():
    """The thread that draws has ended before another overlap draws from the same iterator."""
    drawing = []

    class Loader:
        def __iter__(self):
            return self

        def __next__(self):
            drawing.append(1)
            assert len(drawing) == 1
            time.sleep(0.01)
            drawing.pop()
            return 0

    loader = Loader()
    for _ in range(5):
        for _ in overlap(loader, [lambda x: x]):
            break
        assert next(loader) == 0


@pytest.mark.parametrize("thread", HOSTS)
@pytest.mark.parametrize("end", ["close", "exhausted", "error"])
def test_an_ended_overlap_lets_go_of_its_source(end, thread):
    """Worker processes of a loader end with its iterator, also while somebody keeps the overlap for
    its statistics."""

    loader = Numbers(3, OSError) if end == "error" else Numbers(6)
    run = overlap(loader, [lambda x: x], thread=thread)
    assert next(run) == 0
    if end == "close":
        run.close()
    elif end == "exhausted":
        assert list(run) == [1, 2, 3, 4, 5]
    else:
        with pytest.raises(OSError):  # noqa: PT011
            list(run)
    gone = weakref.ref(loader)
    del loader
    assert gone() is None
    assert run.stats()[0].batches >= 1


def test_an_error_of_the_fold_waits_for_nothing():
    def source():
        yield from (0, 1)
        pytest.fail("drawn after the error")

    def step(state, x):
        if x == 0:
            raise OSError
        return state, x

    run = overlap(
        source(),
        [BatchStage(lambda x: x, name="copy"), Fold(step, 0, name="step")],
        depth=1,
        thread=False,
    )
    with pytest.raises(OSError) as caught:  # noqa: PT011
        next(run)
    assert caught.value.funcpipe.batch == 0


def test_a_progress_function_that_fails_ends_the_overlap():
    def tells(progress):
        if progress.done == 2:
            raise ValueError("bar")

    run = overlap(range(5), [lambda x: x], progress=tells)
    assert next(run) == 0
    with pytest.raises(ValueError, match="bar"):
        next(run)
    assert next(run, "end") == "end"


def test_leads_fit_around_those_that_are_asked_for():
    stages = [
        lambda x: x,
        lambda x: x,
        BatchStage(lambda x: x, lead=2),
        Fold(lambda s, x: (s, x), 0),
    ]
    plan = overlap([], stages, depth=2).plan
    assert [row.lead for row in plan.rows] == [2, 2, 2, 2, 0]
    assert list(overlap(range(3), stages, depth=0)) == [0, 1, 2]  # to find a fault, as it stands


def test_a_slow_snapshot_is_never_ahead():
    class Slow(Numbers):
        def state_dict(self):
            time.sleep(0.005)
            return {"at": self.asked}

    loader = Slow(12)
    run = overlap(loader, [Fold(lambda s, x: (s, x), 0)], snapshot=loader.state_dict)
    for got in run:
        assert run.source_state == {"at": got + 1}


@pytest.mark.parametrize("thread", HOSTS)
def test_a_snapshot_that_fails_is_an_error(thread):
    def fails():
        raise StopIteration

    run = overlap(range(3), [lambda x: x], snapshot=fails, thread=thread)
    with pytest.raises(RuntimeError, match="'source' raised StopIteration"):
        next(run)


def test_the_end_is_no_batch():
    run = overlap(range(3), [lambda x: x], record=True)
    list(run)
    assert run.stats()[0].batches == 3
    assert sum(span.action.stage == 0 for span in run.timeline.spans) == 3


def test_windows_ask_nobody_after_the_end():
    source = Numbers(3)
    assert [list(window) for window in windows(source, 2)] == [[0, 1], [2]]
    assert source.asked == 4
    source = Numbers(3)
    done = iter([False, False, True])  # this rank has no more: have the others
    padded = agree(source, lambda mine: mine and next(done), pad=lambda last: "pad")
    assert list(padded) == [0, 1, 2, "pad", "pad"]
    assert source.asked == 4


# ---- odd batches
# -------------------------------------------------------------------------------

Pair = namedtuple("Pair", "x y")


class Plain:
    def __init__(self, x):
        self.x = x


class Data(dict):
    """As transformers' BatchEncoding: a mapping that moves itself, and has something beside its
    items."""

    note = ""

    def to(self, device):
        self.note += f"to {device}"
        return self


def test_containers_that_move_themselves_are_whole():
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    data = Data(x=torch.ones(2))
    data.note = "mine, "
    out, moved, pair = next(
        overlap([(packed, data, Pair(torch.ones(1), None))], [to_device("meta")])
    )
    assert out.data.device.type == "meta"
    assert out.batch_sizes.tolist() == [2, 2, 1]
    assert type(moved) is Data
    assert moved.note == "mine, to meta"
    assert data.note == "mine, "  # the loader's own stays as it was
    assert pair.x.device.type == "meta"
    assert pair.y is None


def test_a_batch_that_cannot_move_says_so():
    with pytest.raises(fp.BatchError, match="a Plain is not a tree and has no method to"):
        next(overlap([Plain(torch.ones(1))], [to_device("meta")]))
    assert list(overlap([1, "two"], [to_device("cpu")])) == [1, "two"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: overlap([], [BatchStage(abs, stream=3)]), "stream= is a name"),
        (
            lambda: overlap([], [BatchStage(abs, autocast="bfloat16")]),
            r"autocast= is a torch\.dtype",
        ),
        (lambda: overlap([], [BatchStage(abs, grad="no")]), "grad= is True, False or None"),
        (lambda: overlap([], [BatchStage(abs, thread="yes")]), "thread= is True, False or None"),
        (lambda: overlap([], [BatchStage(abs, seed="x")]), "seed= is a whole number"),
        (lambda: overlap([], [BatchStage(abs, name=3)]), "name= is a string"),
        (lambda: overlap([], [Fold(abs, 0, earlier=3)]), "earlier= is a tuple of states"),
        (lambda: overlap([], [abs], thread="yes"), "thread is True, False or None"),
        (lambda: overlap([], [abs], snapshot=3), "snapshot is a function; got 3"),
        (lambda: overlap([], [abs], snapshot=True), "snapshot is a function; got True"),
        (lambda: overlap([], [abs], progress=3), "progress is a function, True or False; got 3"),
        (lambda: overlap([], [abs], devices=["nope"]), "devices is a sequence of torch devices"),
        (lambda: overlap([], [abs], devices=5), "devices is a sequence of torch devices"),
        (lambda: to_device(None), "to_device takes a device"),
        (lambda: loss_scale(1e39), "within single precision"),
    ],
)
def test_wrong_input_is_refused_before_any_work(call, words):
    with pytest.raises(fp.PlanError, match=words):
        call()


# ---- numbers
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("factors", [(1.1, 0.7), (1.3, 0.3), (2.0, 0.5)])
def test_any_factors_round_as_grad_scaler_does(factors):
    growth, backoff = factors
    scale, tracker = torch.tensor([1000.0]), torch.zeros(1, dtype=torch.int32)
    state = loss_scale(1000.0)
    for i in range(200):
        found = torch.tensor([float(i % 7 == 3)])
        torch._amp_update_scale_(scale, tracker, found, growth, backoff, 2)
        state = update_scale(state, found[0] > 0, growth=growth, backoff=backoff, interval=2)
        assert state.scale.item() == scale.item()
        assert state.good_steps.item() == tracker.item()


@pytest.mark.filterwarnings(
    "ignore:Sparse invariant"
)  # torch 2.11 says so at the first sparse tensor
def test_gradients_of_every_kind_are_unscaled():
    state = loss_scale(1000.0)
    sparse = torch.sparse_coo_tensor(
        [[0, 2]], torch.tensor([2000.0, 1.0]), (3,), check_invariants=True
    )
    grads = {
        "zero": torch.tensor(3.0, dtype=torch.bfloat16),
        "sparse": sparse,
        "none": None,
        "count": torch.tensor(7),
    }
    found, bad = unscale(state, grads)
    assert not bad
    assert found["zero"].dtype == torch.bfloat16
    assert found["sparse"].to_dense().tolist() == pytest.approx([2.0, 0.0, 0.001])
    assert found["count"] is grads["count"]
    _, bad = unscale(
        state,
        {
            "s": torch.sparse_coo_tensor(
                [[0]], torch.tensor([float("nan")]), (3,), check_invariants=True
            )
        },
    )
    assert bad
    assert not unscale(state, {})[1]


def test_no_graph_grows_over_steps():
    w = torch.ones(2, requires_grad=True)
    taken = select(torch.tensor(False), w, w * 2)
    assert not taken.requires_grad
    assert not unscale(loss_scale(), w)[0].requires_grad


def test_what_has_no_weight_may_be_nan():
    found = accumulate_grads(
        lambda x: (x / x.sum(), None),
        [torch.zeros(2), torch.ones(2)],
        weight=lambda x: float(x.sum()),
    )
    assert found.grads.tolist() == [0.5, 0.5]
    assert found.count == 2


# ---- streams
# -------------------------------------------------------------------------------


@pytest.fixture
def recorder(monkeypatch):
    made = Recorder()
    monkeypatch.setattr(Place, "backend", made)
    return made


def data(count=9):
    return [{"x": torch.randn(3, 4), "y": torch.randn(3)} for _ in range(count)]


@pytest.mark.parametrize("last", [False, True])
def test_back_to_the_host(last, recorder):
    """Nothing on the host could wait for a stream later, so the copy is waited for."""
    tail = [] if last else [lambda b: b["x"].sum()]
    stages = [to_device(DEVICE), lambda b: {**b, "x": b["x"] * 2}, to_device("cpu"), *tail]
    with recorder.watching():
        for batch in overlap(data(), stages):
            (batch["x"] if last else batch) * 2
    assert recorder.finish() == []


def test_memory_that_nobody_can_record_is_told(recorder):
    class Blind:
        def __init__(self, value):
            self.value = value

        def to(self, device):
            return Blind(Place.backend.copy(self.value, device))

    batches = [Blind(torch.ones(3)) for _ in range(5)]
    with (
        recorder.watching(),
        pytest.warns(UserWarning, match=r"batch \(Blind\) cannot record a stream"),
    ):
        next(overlap(batches, [to_device(DEVICE)]))
