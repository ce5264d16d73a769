"""Steps inside of runs, and batches that follow each other without a pause, on devices of a
recorder: in order, the same bits."""

import gc
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import same

import funcpipe as fp
from funcpipe._src.devices.stream import Place
from funcpipe._src.engine.executors import Serial
from funcpipe._src.engine.lanes import Lanes

sys.path.insert(0, str(Path(__file__).parent))
from recorder import Recorder

S, M = 4, 3
TOGETHER = {"together": "threads", "together, on one thread": "serial"}
PLACES = {"two devices": ["cpu:0", "cpu:1"], "one device": ["cpu:0", "cpu:0"]}


def net(norm):
    """Four stages: whether they have statistics, functions of a stage, parameters and states."""
    torch.manual_seed(0)
    kind = nn.BatchNorm1d if norm else nn.LayerNorm
    made = [
        fp.from_module(nn.Sequential(nn.Linear(4, 4), kind(4), nn.Tanh()), name=f"part {n}")
        for n in range(S)
    ]
    return tuple(zip(*made, strict=True))


def train(stages, params, state, schedule, devices, how, watching=nullcontext):
    """Three batches: what came out, used by the caller, and the parameters."""
    generator = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randn(8, 4, generator=generator) for _ in range(2)) for _ in range(3)]
    plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices=devices, outputs=True)
    optimizer = torch.optim.AdamW(fp.leaves(params), lr=0.05, foreach=False)
    given = {"optimizer": optimizer, "threads_per_lane": 1}
    if how in TOGETHER:
        results = fp.run_batches(
            plan, params, batches, state=state, executor=TOGETHER[how], **given
        )
    else:
        results = []
        for batch in batches:
            results.append(fp.run(plan, params, batch, state=state, executor=how, **given))
            state = results[-1].state
    with watching():
        used = [
            (one.loss * 2, one.outputs + 1, [leaf * 2 for leaf in fp.leaves(one.state)])
            for one in results
        ]
        del results
        gc.collect()
    return used, [leaf.detach().clone() for leaf in fp.leaves(params)]


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
# Statistics of runs that are alone are committed by the caller, whom the recorder does not see.
@pytest.mark.parametrize(
    ("how", "norm"),
    [("threads", False), *((how, norm) for how in TOGETHER for norm in (False, True))],
)
@pytest.mark.parametrize(
    "family", [fp.schedules.one_f_one_b, fp.schedules.interleaved, fp.schedules.zero_bubble]
)
def test_steps_are_in_order(family, how, norm, place, monkeypatch):
    """Nothing is read before it is written, or given out while it is in use, from one batch to the
    next either."""
    schedule = fp.schedules.step_params(family(S, M, num_devices=2))
    stages, params, state = net(norm)
    want = train(stages, params, state, schedule, "cpu", "serial")
    _, params, state = net(norm)
    recorder, walks = Recorder(), []
    monkeypatch.setattr(Place, "backend", recorder)
    for executor in (Lanes, Serial):
        walk = executor.walk
        noted = lambda self, all_of, walk=walk: (walks.append(len(all_of)), walk(self, all_of))[1]
        monkeypatch.setattr(executor, "walk", noted)
    devices = PLACES[place]
    for stage, tree in enumerate(zip(params, state, strict=True)):
        recorder.put(tree, torch.device(devices[schedule.device_of[stage]]))
    got = train(stages, params, state, schedule, devices, how, recorder.watching)
    assert recorder.finish() == []
    assert same(want, got)
    assert walks == ([3] if how in TOGETHER else [1] * 3)
    assert len(recorder.points) > 50


def test_the_recorder_sees_batches_on_other_streams(monkeypatch):
    """What a lane does for the next batch would race with its step for the last one."""
    schedule = fp.schedules.step_params(fp.schedules.one_f_one_b(S, M, num_devices=2))
    stages, params, state = net(norm=False)
    train(stages, params, state, schedule, "cpu", "serial")
    _, params, state = net(norm=False)
    recorder = Recorder()
    monkeypatch.setattr(Place, "backend", recorder)
    monkeypatch.setattr(recorder, "own_streams", dict)
    for stage, tree in enumerate(params):
        recorder.put(tree, torch.device(PLACES["one device"][schedule.device_of[stage]]))
    train(stages, params, state, schedule, PLACES["one device"], "together")
    assert recorder.finish() != []
