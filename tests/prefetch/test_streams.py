"""Batches over streams, proven without a GPU: the recording backend of tests/streams, its order
proven by vector clocks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from common import same

from funcpipe._src.core.tree import map_leaves
from funcpipe._src.devices.stream import Place
from funcpipe.batches import BatchStage, Fold, overlap, to_device

sys.path.insert(0, str(Path(__file__).parent.parent / "streams"))
from recorder import Recorder

DEVICE = "cpu:0"
COUNT = 7


@pytest.fixture
def backend(monkeypatch):
    def install(skip: int | None = None) -> Recorder:
        recorder = Recorder(skip)
        monkeypatch.setattr(Place, "backend", recorder)
        return recorder

    return install


def data():
    g = torch.Generator().manual_seed(0)
    return [
        {"x": torch.randn(3, 4, generator=g), "y": torch.randn(3, generator=g)}
        for _ in range(COUNT)
    ]


def scale(batch):
    return {**batch, "x": batch["x"] * 2}  # y is handed on as it came


def same_batch(batch):
    return batch


def write(batch):
    return {"x": batch["x"].add_(1), "y": batch["y"]}


def look(state, batch):
    return {**batch, "x": batch["x"] * state.sum()}


def step(state, batch):
    error = batch["x"] @ state - batch["y"]
    return state - 0.1 * batch["x"].T @ error, error.square().mean()


FORMS = {
    "maps": lambda: [to_device(DEVICE), scale, same_batch, scale],
    "shared stream": lambda: [
        BatchStage(to_device(DEVICE), stream="side"),
        scale,
        BatchStage(scale, stream="side"),
    ],
    "on the caller's": lambda: [to_device(DEVICE), BatchStage(scale, stream="caller"), scale],
    "two devices": lambda: [to_device({"x": DEVICE, "y": "cpu:1"}), scale, same_batch],
    "writes in place": lambda: [to_device(DEVICE), write, same_batch],
    "fold": lambda: [to_device(DEVICE), scale, Fold(step, torch.ones(4))],
    "fold on the copy": lambda: [to_device(DEVICE), Fold(step, torch.ones(4))],
    "the source's": lambda: [scale, same_batch, Fold(step, torch.ones(4))],
    "lag": lambda: [to_device(DEVICE), BatchStage(look, lag=1), Fold(step, torch.ones(4))],
}
SCALED_TWICE = ("maps", "shared stream", "on the caller's")


def uses(batch):
    """What the loop computes of a batch."""
    return map_leaves(lambda leaf: leaf * 2, batch)


def made_on_the_device(recorder, batches):
    for batch in batches:
        recorder.put(batch, torch.device(DEVICE))
        yield batch


def go(recorder, form, *, depth=2, stop=None, **options):
    """The loop: it uses each result after the next is asked for only where it may, and drops it."""
    batches = data()
    made = FORMS[form]()
    if isinstance(made[-1], Fold):
        recorder.put(made[-1].init, torch.device(DEVICE))
    if form == "the source's":
        batches = made_on_the_device(recorder, batches)
    used = []
    run = overlap(batches, made, depth=depth, devices=[DEVICE], **options)
    with recorder.watching():
        for number, result in enumerate(run):
            used.append(uses(result))
            torch.ones(5)  # the host goes on
            del result
            if number == stop:
                break
        run.close()
        state = run.state
        del run
    return used, state


def expected(form, count=COUNT):
    """What the loop uses of each batch, and the state, by the plain loop."""
    used, state = [], torch.ones(4)
    old = state
    for batch in data()[:count]:
        if form == "writes in place":
            batch = {"x": batch["x"] + 1, "y": batch["y"]}
        elif form == "lag":
            batch = look(old, batch)
        elif form != "fold on the copy":
            batch = scale(scale(batch) if form in SCALED_TWICE else batch)
        if isinstance(FORMS[form]()[-1], Fold):
            old = state
            state, batch = step(state, batch)
        used.append(uses(batch))
    return used, state


@pytest.mark.parametrize("depth", [1, 5])
@pytest.mark.parametrize("form", FORMS)
def test_everything_is_in_order(form, depth, backend):
    """No read before its write, no memory given out while somebody may use it; and the bits."""
    recorder = backend()
    used, state = go(recorder, form, depth=depth)
    assert recorder.finish() == []
    want = expected(form)
    assert same(used, want[0])
    if "fold" in form or form in ("lag", "the source's"):
        assert torch.equal(state, want[1])
    assert len(recorder.streams) > 2
    assert len(recorder.points) > COUNT


@pytest.mark.parametrize("form", FORMS)
def test_a_loop_that_breaks(form, backend):
    """What is under way is dropped while streams work on it."""
    recorder = backend()
    used, _ = go(recorder, form, stop=2)
    assert recorder.finish() == []
    assert same(used, expected(form, 3)[0])


@pytest.mark.parametrize("form", [form for form in FORMS if form != "the source's"])
def test_host_threads_over_streams(form, backend):
    """A stage that makes the host wait has a thread, and its streams all the same."""
    recorder = backend()
    used, _ = go(recorder, form, thread=True)
    assert recorder.finish() == []
    assert same(used, expected(form)[0])


def test_copies_overlap_the_step(backend):
    """The stream of copies waits for nothing that the loop does, and the loop waits for its batch
    alone."""
    recorder = backend()
    go(recorder, "fold")
    copies = f"stream 2 of {DEVICE}"
    waits = [p.words.split(" waits for ") for p in recorder.points if " waits for " in p.words]
    assert COUNT + 1 == sum(
        whom == copies for _, whom in waits
    )  # once for each batch, and at the end
    assert [] == [whom for who, whom in waits if who == copies]


def test_without_depth_a_stream_of_ones_own_is_left_alone(backend):
    """The plain loop queues all on the current stream: nobody would wait for another."""
    recorder = backend()
    stages = [to_device(DEVICE), BatchStage(scale, stream=recorder.Stream(torch.device(DEVICE)))]
    with recorder.watching():
        used = [uses(batch) for batch in overlap(data(), stages, depth=0)]
    assert recorder.finish() == []
    want = [uses(scale(batch)) for batch in data()]
    assert same(used, want)


class Keyed:
    """Stands for torchrec's KeyedJaggedTensor: moves as a whole and records itself."""

    def __init__(self, values, log):
        self.values, self.log = values, log
        self.device = torch.device("cpu")

    def to(self, device, non_blocking=False):
        assert non_blocking
        return Keyed(Place.backend.copy(self.values, device), self.log)

    def record_stream(self, stream):
        self.log.append(stream.name)
        Place.backend.record(self.values, stream)


def test_objects_that_move_are_leaves(backend):
    recorder = backend()
    log = []
    batches = [{"ids": Keyed(torch.full((3,), float(i)), log), "name": str(i)} for i in range(5)]
    with recorder.watching():
        run = overlap(batches, [to_device(DEVICE), lambda b: b])
        out = [(batch["ids"].values * 2, batch["name"]) for batch in run]
    assert recorder.finish() == []
    assert [(float(v[0]), n) for v, n in out] == [(2.0 * i, str(i)) for i in range(5)]
    assert len(log) == 10


CASES = [(form, stop) for form in FORMS for stop in (None, 2)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_wait_is_needed(backend):
    """Each wait and each recording is left out in turn, and the proof must fail: everywhere for
    those that only hand a batch on, in some plan for those that guard memory."""
    missed: dict[str, int] = {}
    spared: list[str] = []
    for form, stop in CASES:
        whole = backend()
        go(whole, form, stop=stop)
        assert whole.finish() == []
        for number, point in enumerate(whole.points):
            missed.setdefault(point.site, 0)
            if not point.news:
                continue
            recorder = backend(number)
            go(recorder, form, stop=stop)
            if recorder.finish():
                missed[point.site] += 1
            elif "wait(item.marks)" in point.site and stop is None:
                spared.append(f"{form}, {stop}, {number}: {point}")
    assert spared == []
    assert [site for site, count in missed.items() if not count] == [], missed
    assert len(missed) >= 6, missed
