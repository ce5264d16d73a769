"""What an overlap shows: its plan as data, pictures, statistics, progress; and that it can go on
for long."""

from __future__ import annotations

import gc
import io
import os
import pickle
import threading

import pytest
import torch

import funcpipe as fp
from funcpipe._src.prefetch.stats import Bar
from funcpipe.batches import BatchStage, Fold, overlap


def h2d(x):
    return x


def dist_start(x):
    return x


def dist_wait(x):
    return x


def forward(state, x):
    return x


def backward(state, x):
    return state, x


TORCHREC = [
    BatchStage(h2d, lead=2),
    BatchStage(dist_start, lead=1),
    BatchStage(dist_wait, lead=1),
    BatchStage(forward, lead=0, lag=0),
    Fold(backward, 0),
]


def test_the_plan_prints():
    run = overlap([], TORCHREC, thread=False)
    assert str(run.plan) == (
        "at tick t, batch t is made ready:\n"
        "  dist_start  batch t+1         on loop\n"
        "  dist_wait   batch t+1         on loop\n"
        "  source      batch t+2         on loop\n"
        "  h2d         batch t+2         on loop\n"
        "  forward     batch t           on loop, reads the state of 0 before\n"
        "  backward    batch t           on loop"
    )
    run = overlap([], [h2d, Fold(backward, 0)], depth=3)
    assert str(run.plan) == (
        "at tick t, batch t is made ready:\n"
        "  source    up to batch t+3   on source\n"
        "  h2d       up to batch t+3   on h2d\n"
        "  backward  batch t           on loop"
    )
    assert pickle.loads(pickle.dumps(run.plan)) == run.plan
    assert hash(run.plan) == hash(overlap([], [h2d, Fold(backward, 0)], depth=3).plan)


def test_what_was_measured_is_a_timeline():
    run = overlap(range(6), [h2d, Fold(backward, 0)], record=True)
    list(run)
    timeline = run.timeline
    assert timeline.unit == "s"
    assert timeline.lanes == ("source", "h2d", "loop")
    assert pickle.loads(pickle.dumps(timeline)) == timeline
    names = [
        e["args"]["name"]
        for e in timeline.chrome_trace()["traceEvents"]
        if e["name"] == "thread_name"
    ]
    assert names == list(timeline.lanes)
    assert sum(span.action.stage == 2 for span in timeline.spans) == 6
    assert str(fp.draw(timeline)).startswith("overlap, measured in ")
    assert "h2d" in fp.draw(timeline, memory=True).svg()
    with pytest.raises(TypeError, match="got TickPlan"):
        fp.draw(run.plan)  # pyright: ignore
    with pytest.raises(fp.FuncpipeError, match="record=True"):
        overlap([], [h2d]).timeline  # noqa: B018


@pytest.mark.parametrize("thread", [True, False])
def test_statistics(thread):
    import time

    def slow(x):
        time.sleep(0.01)
        return x

    run = overlap(range(5), [BatchStage(slow, name="slow")], thread=thread)
    list(run)
    source, stage, loop = run.stats()
    assert (source.name, stage.name, loop.name) == ("source", "slow", "loop")
    assert stage.batches == 5
    assert stage.busy >= 0.05
    assert (loop.input > 0.03) == thread
    assert str(stage).startswith("slow: 5 batches, ")
    run = overlap(range(5), [Fold(lambda s, x: (s, slow(x)), 0, name="step")], thread=thread)
    list(run)
    assert [one.name for one in run.stats()] == ["source", "step"]
    assert run.stats()[1].batches == 5


def test_progress(capsys):
    told = []
    run = overlap(range(3), [h2d], progress=told.append)
    list(run)
    assert [(one.done, one.total) for one in told] == [(1, 3), (2, 3), (3, 3)]
    assert str(told[-1]).startswith("[####################] 3/3, ")
    assert "loop waits" in str(told[-1])
    list(overlap((x for x in range(3)), [h2d], progress=True))
    line = capsys.readouterr().err
    assert line.startswith("\r")
    assert line.endswith("\n")
    assert "3 batches, " in line
    out = io.StringIO()
    bar = Bar(out)
    for one in told:
        bar(one)
    bar.end(told[-1])
    assert out.getvalue().count("3/3") == 2


def test_the_length_is_hinted():
    from operator import length_hint

    run = overlap([1, 2, 3], [h2d])
    assert length_hint(run) == 3
    next(run)
    assert length_hint(run) == 2
    run.close()
    assert length_hint(overlap((x for x in "abc"), [h2d]), 7) == 7


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
def test_four_thousand_batches():
    """Memory, threads and files stay as they are, with a fault every 100th batch."""

    def stage(x):
        if int(x[0]) % 100 == 99:
            raise OSError(f"batch {int(x[0])}")
        return x * 2

    def source(start):
        for i in range(start, 4_000):
            yield torch.full((1000,), float(i))

    done, faults, marks, places = 0, 0, [], []
    while done < 4_000:
        run = overlap(
            source(done), [stage, Fold(lambda s, x: (s + 1, float(x[0])), 0)], start_index=done
        )
        try:
            for result in run:
                assert result == 2.0 * done
                done += 1
        except OSError as error:
            places.append((error.funcpipe.batch, done))
            faults += 1
            done += 1
        del run
        if done % 1000 == 0:
            gc.collect()
            marks.append((threading.active_count(), len(os.listdir("/proc/self/fd")), _resident()))
    assert faults == 40
    assert all(batch == at for batch, at in places)
    assert len({mark[0] for mark in marks}) == 1
    assert len({mark[1] for mark in marks}) == 1
    assert marks[-1][2] - marks[1][2] < 16 * 2**20
    # One overlap, no fault: what is kept does not grow with the batches.
    run = overlap((torch.full((1000,), float(i)) for i in range(4_000)), [lambda x: x * 2])
    sizes = []
    for number, _ in enumerate(run):
        if number % 1000 == 999:
            gc.collect()
            sizes.append((len(gc.get_objects()), _resident()))
    assert sizes[-1][0] - sizes[0][0] < 200
    assert sizes[-1][1] - sizes[0][1] < 16 * 2**20
