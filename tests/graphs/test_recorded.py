"""Recordings by themselves: a device's graph with a stand-in for torch's module, the rehearsal,
what cannot be given."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from common import cpu_plan

import funcpipe as fp
from funcpipe._src.devices.device_graph import DeviceGraph, Recorded, Rehearsal, Unrecordable
from funcpipe._src.devices.stream import Place

sys.path.insert(0, str(Path(__file__).parent))
from tape import Tape

CPU = torch.device("cpu")


class Module:
    """torch.cuda, as far as a graph needs it: streams that note what waits for what, and a
    recording that may fail to end."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.refuses, self.log = refuses, []
        self.default = self.now = self.Stream(CPU)
        self.recording = 0

    def Stream(self, device):
        return _Stream(self)

    def Event(self):
        return _Event(self)

    def CUDAGraph(self):
        return _Graph(self)

    def current_stream(self, device):
        return self.now

    @contextmanager
    def device(self, device):
        yield

    @contextmanager
    def stream(self, stream):
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def graph(self, graph, *, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        return _Recording(self, graph, stream)


class _Stream:
    def __init__(self, module):
        self.module = module

    def wait_stream(self, other):
        self.module.log.append(("wait", self, other))

    def wait_event(self, event):
        self.module.log.append(("wait", self, event.stream))


class _Event:
    stream = None

    def __init__(self, module):
        self.module = module

    def record(self, stream):
        self.stream = stream


class _Graph:
    def __init__(self, module):
        self.module, self.tape = module, Tape()

    def replay(self):
        self.module.log.append(("play", self.module.now))
        self.tape.play()


class _Recording:
    """As torch's: the stream is entered first, and left last, if the end does not fail."""

    def __init__(self, module, graph, stream):
        self.module, self.graph, self.stream = module, graph, stream

    def __enter__(self):
        assert self.module.recording == 0, "another thread records"
        self.module.recording += 1
        self.before, self.module.now = self.module.now, self.stream

    def __exit__(self, kind, error, trace):
        self.module.recording -= 1
        if kind is not None or self.module.refuses:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.module.now = self.before


class Taped(DeviceGraph):
    """Its operations are noted by a tape."""

    def record(self, work):
        return super().record(lambda: self._graph.tape.record(work))


def made(module, work=lambda own: [own[0] * 2], given=None):
    return Recorded(Taped(module, CPU), CPU, [torch.ones(3)] if given is None else given, work)


def test_on_which_streams():
    """Warmed and recorded on its own stream, played on the caller's; turns follow each other
    whatever the streams."""
    module, seen = Module(), []

    def work(own):
        seen.append(module.now)
        return [own[0] * 2]

    found = made(module, work)
    assert len(seen) == 4
    assert len(set(seen)) == 1
    assert seen[0] is not module.default
    assert module.now is module.default
    assert found([torch.ones(3) * 3])[0].tolist() == [6] * 3
    other, module.log = module.Stream(CPU), []
    recorded = []
    real, torch.Tensor.record_stream = (
        torch.Tensor.record_stream,
        lambda self, stream: recorded.append(stream),
    )
    try:
        with module.stream(other):
            assert found([torch.ones(3)])[0].tolist() == [2] * 3
    finally:
        torch.Tensor.record_stream = real
    assert module.log == [("wait", other, module.default), ("play", other)]
    assert recorded == [other]


@pytest.mark.parametrize("late", [False, True])
def test_a_recording_that_is_refused(late):
    """The caller's stream is his again, and the reason is the first error, not that of the end."""
    module, calls = Module(refuses=late), []

    def work(own):
        calls.append(1)
        if len(calls) == 4 and not late:
            raise ValueError("first\nsecond")
        return [own[0] * 2]

    reason = "ValueError: first$" if not late else "RuntimeError: operation failed due to"
    with pytest.raises(Unrecordable, match=reason):
        made(module, work)
    assert module.now is module.default
    assert module.recording == 0
    assert made(Module())([torch.ones(3)])[0].tolist() == [2] * 3


def test_one_recording_at_a_time():
    """To begin one waits for the whole device, which torch forbids while another is made."""
    module = Module()
    inside, go = threading.Event(), threading.Event()

    def slow(own):
        if module.recording:
            inside.set()
            assert go.wait(20)
        return [own[0] * 2]

    errors = []

    def start(work):
        try:
            made(module, work)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=start, args=(slow,))]
    threads[0].start()
    assert inside.wait(20)
    threads.append(threading.Thread(target=start, args=(lambda own: [own[0] + 1],)))
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive()
    go.set()
    for thread in threads:
        thread.join(20)
    assert errors == []


WAITS = {
    "a number": lambda x: float(x.sum()),
    "a branch": lambda x: x if x.sum() > 0 else -x,
    "a comparison": lambda x: torch.equal(x, x),
    "rows that are counted": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "another device": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("name", WAITS)
def test_the_rehearsal_refuses(name):
    with (
        pytest.raises(
            Unrecordable, match=r"waits for numbers on cpu|copies numbers from cpu to meta"
        ),
        Rehearsal(CPU),
    ):
        WAITS[name](torch.ones(3))


def test_the_rehearsal_lets_through():
    """What computes, draws nothing, and what other devices do."""
    with Rehearsal(CPU):
        x = torch.ones(3, 3, requires_grad=True)
        F.mse_loss(torch.tanh(x @ x), torch.zeros(3, 3)).backward()
        x.grad.zero_()
        F.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 8)] * 3, dropout_p=0.0)
    with Rehearsal(torch.device("meta")):
        assert float(torch.ones(3).sum()) == 3


def test_keys_of_what_attention_draws_may_lie_on_the_host():
    """They lie on the device while that is recorded."""
    with torch.library._scoped_library("funcpipe_tests", "FRAGMENT") as library:
        library.define("some_attention(Tensor x) -> (Tensor, Tensor)")
        library.define("another(Tensor x) -> (Tensor, Tensor)")
        for name in ("some_attention", "another"):
            library.impl(name, lambda x: (x, torch.tensor(3)), "Meta")
        with Rehearsal(torch.device("meta")):
            x = torch.ones(3, device="meta")
            assert all(result.is_meta for result in torch.ops.funcpipe_tests.some_attention(x))
            with pytest.raises(Unrecordable, match="another.* copies numbers from meta to cpu"):
                torch.ops.funcpipe_tests.another(x)


def test_a_refusal_before_the_recording():
    """The work was not recorded: that would cost torch memory for good."""
    module = Module()
    with pytest.raises(Unrecordable, match="waits for numbers on cpu"):
        made(module, lambda own: [own[0] * float(own[0].sum())])
    assert module.recording == 0
    assert module.now is module.default


def test_results_of_many_forms_are_copied_out():
    """Types, strides, gaps, expanded ones, views of one memory, and none at all: the numbers, and
    memory of their own."""

    def work(own):
        x = own[0] + 1
        return [
            x,
            x.t(),
            x[:, ::2],
            x[:, :1].expand(3, 4),
            (x > 1).long(),
            x.double(),
            x.new_empty(0),
            x.sum(),
            x,
        ]

    recorded = Recorded(Tape(), CPU, [torch.arange(12.0).view(3, 4)], work)
    for factor in (1.0, 2.0):
        given = torch.arange(12.0).view(3, 4) * factor
        results, wanted = recorded([given]), work([given])
        for one, other in zip(results, wanted, strict=True):
            assert (one.dtype, one.size()) == (other.dtype, other.size())
            assert torch.equal(one, other)
        assert (
            len({one.untyped_storage().data_ptr() for one in results if one.numel()})
            == len(results) - 1
        )
        kept = [one.clone() for one in results]
        recorded([given * 5])
        assert all(map(torch.equal, kept, results))


def test_results_that_cannot_be_given():
    with pytest.raises(Unrecordable, match="a result is a Tensor on meta"):
        Recorded(Tape(), CPU, [torch.ones(3)], lambda own: [torch.ones(3, device="meta")])
    with pytest.raises(Unrecordable, match="a result is a Tensor on cpu, not a plain tensor"):
        Recorded(Tape(), CPU, [torch.ones(3, 3)], lambda own: [own[0].to_sparse()])


def test_a_failure_is_told_though_streams_fail_too(monkeypatch):
    """What a device says to streams that a failure has spoilt hides nothing, and the next run is no
    run in a run."""
    plan = cpu_plan([fp.stage(lambda p, x: 1 / 0)], fp.schedules.one_f_one_b(1, 2))
    good = cpu_plan([fp.stage(lambda p, x: x)], fp.schedules.one_f_one_b(1, 2))

    def spoilt(self):
        raise RuntimeError("operation not permitted")

    x = torch.ones(2, 2)
    with monkeypatch.context() as patch:
        patch.setattr(Place, "join", spoilt)
        with pytest.raises(ZeroDivisionError):
            fp.run(plan, ((),), (x, x), executor="serial")
        with pytest.raises(
            RuntimeError, match="not permitted"
        ):  # no other failure: it is the run's
            fp.run(good, ((),), (x, x), executor="serial")
    fp.run(good, ((),), (x, x), executor="serial")
