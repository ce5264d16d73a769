"""Streams proven without a GPU: the same runtime against a recording backend, its order proven by
vector clocks."""

from __future__ import annotations

import functools
import gc
import sys
import threading
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import assert_same_result, ids, same

import funcpipe as fp
from funcpipe._src.devices.host_link import HostStream
from funcpipe._src.schedules.transforms import offload

sys.path.insert(0, str(Path(__file__).parent))
from recorder import Missed

S, M, ROWS = 4, 3, 8


def stages():
    """Skips with two pops, values handed on unchanged, an in-place first operation, a feed, batch
    norm, dropout."""

    @fp.stage(stash=["far"])
    def first(p, x):
        h = torch.tanh(x @ p["w"])
        return fp.Out((h, x), stash={"far": h * 2})  # the input goes on as it came

    @fp.stage(pop=["far"], feeds=["scale"])
    def second(p, x, *, skips, feeds):
        h, x0 = x
        return F.relu(h.mul_(1.5) @ p["w"] + skips["far"] * feeds["scale"]), x0

    @fp.stage
    def third(p, x):
        h, x0 = x
        return h @ p["w"] + x0

    @fp.stage(pop=["far"])
    def fourth(p, x, *, skips):
        return x.add_(skips["far"]) @ p["w"]

    g = torch.Generator().manual_seed(0)
    params = tuple({"w": torch.randn(4, 4, generator=g)} for _ in range(S))
    return (first, second, third, fourth), params, ((),) * S


def modules():
    torch.manual_seed(3)
    nets = [
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Dropout(0.2))
        for _ in range(S)
    ]
    made = [fp.from_module(net, name=f"part{i}") for i, net in enumerate(nets)]
    return tuple(zip(*made, strict=True))


SCHEDULES = [
    fp.schedules.one_f_one_b(S, M, num_devices=2),
    fp.schedules.remat(fp.schedules.fill_drain(S, M, num_devices=2)),
    fp.schedules.interleaved(S, M, num_devices=2),
    fp.schedules.zero_bubble(S, M),
    offload(fp.schedules.one_f_one_b(S, M, num_devices=2)),
    offload(fp.schedules.zero_bubble(S, M), move=lambda action: action.microbatch != 1, ahead=0),
    fp.schedules.dualpipe_v(S, S),
    fp.schedules.pair(fp.schedules.interleaved(S, S, num_devices=2)),
    offload(fp.schedules.pair(fp.schedules.zero_bubble(S, S, num_devices=2))),
    fp.Schedule.parse(
        """
        (0F0 0F1) 1F0 (1F1 0F2) 1F2 1B0 (0B0 1B1) (0B1 1B2) 0B2
        2F0 3F0 (2F1 3B0) (3F1 2B0) (3B1 2F2) (3F2 2B1) 3B2 2B2
        """,
        name="pairs of any kind",
    ),
]
PLACES = {
    "two devices": lambda lane: f"cpu:{lane % 2}",
    "one device": lambda lane: "cpu:0",
    "a device and the host": lambda lane: "cpu:0" if lane % 2 else "cpu",
    "the host and a device": lambda lane: "cpu" if lane % 2 else "cpu:0",
}


def go(recorder, net, schedule, where, *, executor="serial", half=False, rows=ROWS):
    """A run (or a vjp) under the recorder."""
    parts, params, state = net()
    devices = [where(lane) for lane in range(schedule.num_devices)]
    for stage, tree in enumerate(zip(params, state, strict=True)):
        device = torch.device(devices[schedule.device_of[stage]])
        if device.index is not None:
            recorder.put(tree, device)
    g = torch.Generator().manual_seed(1)
    x, target, scale = (torch.randn(rows, 4, generator=g) for _ in range(3))
    options = {
        "state": state,
        "feeds": {"scale": scale} if net is stages else None,
        "seed": 1,
        "threads_per_lane": 1,
    }
    plan = fp.make_plan(parts, schedule, loss=None if half else F.mse_loss, devices=devices)

    def call():
        if half:
            result, pullback = fp.vjp(plan, params, x, executor=executor, **options)
            return (result.outputs, result.state, pullback(torch.ones(ROWS, 4)))
        result = fp.run(plan, params, (x, target), executor=executor, **options)
        return result

    if executor == "serial":
        with recorder.watching():
            return call()
    return call()


@functools.cache
def in_one_process(net, schedule):
    """The result without devices, which is the same for all of them and for all executors."""
    parts, params, state = net()
    g = torch.Generator().manual_seed(1)
    x, target, scale = (torch.randn(ROWS, 4, generator=g) for _ in range(3))
    plan = fp.make_plan(parts, schedule, loss=F.mse_loss, devices="cpu")
    feeds = {"scale": scale} if net is stages else None
    return fp.run_sequential(
        plan, params, (x, target), state=state, feeds=feeds, seed=1, threads_per_lane=1
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "executor"),
    # The host's own order between threads is that of their inboxes, which the recorder does not
    # see.
    [
        *((place, "serial") for place in PLACES),
        *((place, "threads") for place in PLACES if "host" not in place),
    ],
)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=ids)
@pytest.mark.parametrize("net", [stages, modules])
def test_everything_is_in_order(net, schedule, place, executor, backend):
    """No read before its write, no write before a read, no memory or slot given out while it is in
    use; and the bits."""
    recorder = backend()
    result = go(recorder, net, schedule, PLACES[place], executor=executor)
    assert recorder.finish() == []
    assert_same_result(in_one_process(net, schedule), result)
    assert len(recorder.points) > 10


@pytest.mark.parametrize("change", [fp.schedules.remat, offload])
@pytest.mark.parametrize("place", PLACES)
def test_both_halves_of_a_vjp(place, change, backend):
    schedule = change(fp.schedules.fill_drain(S, M, num_devices=2))
    recorder = backend()
    result = go(recorder, stages, schedule, PLACES[place], half=True)
    assert recorder.finish() == []
    other = backend()
    assert same(result, go(other, stages, schedule, lambda lane: "cpu", half=True))


@pytest.mark.parametrize("schedule", [SCHEDULES[0], SCHEDULES[4]], ids=ids)
@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("place", ["two devices", "one device"])
def test_runs_of_a_thread_have_the_same_streams(place, executor, schedule, backend):
    """Torch keeps memory for each stream: new ones in every run would take a share each. Other
    threads have others."""
    recorder = backend()
    go(recorder, stages, schedule, PLACES[place], executor=executor)
    first = set(recorder.streams)
    go(recorder, stages, schedule, PLACES[place], executor=executor)
    assert first == set(recorder.streams)
    thread = threading.Thread(target=go, args=(recorder, stages, schedule, PLACES[place]))
    thread.start()
    thread.join()
    own = [name for name in first if name.startswith("stream")]
    assert len(recorder.streams) == len(first) + len(own)
    assert recorder.finish() == []


def used_by_the_caller(recorder, where):
    """The caller computes with what he got, and drops it."""
    parts, params, _ = stages()
    schedule = fp.schedules.one_f_one_b(S, M, num_devices=2)
    devices = [where(lane) for lane in range(2)]
    for stage, tree in enumerate(params):
        recorder.put(tree, torch.device(devices[schedule.device_of[stage]]))
    x, scale = torch.randn(6, 4), torch.randn(6, 4)
    recorder.put((x, scale), torch.device("cpu:2"))  # a batch that lies on a third device
    plan = fp.make_plan(
        parts, schedule, loss=lambda y, _: y.square().mean(), devices=devices, outputs=True
    )
    with recorder.watching():
        result = fp.run(plan, params, (x, None), feeds={"scale": scale}, executor="serial")
        used = (
            result.loss * 2 + sum(result.losses),
            result.outputs * 2,
            [g * 2 for g in fp.leaves(result.grads)],
        )
        del result
    return used


@pytest.mark.parametrize("place", ["two devices", "one device"])
def test_the_caller_may_use_and_drop_what_he_got(place, backend):
    recorder = backend()
    used_by_the_caller(recorder, PLACES[place])
    assert recorder.finish() == []


def fails_while_a_residual_comes_back(recorder, where):
    """What a stage did just before it failed is dropped while a copy of it is under way; the caller
    goes on."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("planted")

    fails = fp.stage(lambda p, x: Fails.apply(x))
    part = fp.stage(lambda p, x: torch.tanh(x @ p))
    schedule = fp.Schedule.parse("0F0 0O0 0L0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1")
    params = (torch.eye(4), ())
    recorder.put(params[0], torch.device(where(0)))
    plan = fp.make_plan([part, fails], schedule, loss=F.mse_loss, devices=[where(0), where(1)])
    with recorder.watching():
        with pytest.raises(ValueError, match="planted"):
            fp.run(plan, params, (torch.randn(4, 4), torch.randn(4, 4)), executor="serial")
        gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["two devices", "one device"])
def test_a_run_that_fails_waits_for_what_comes_back(place, backend):
    recorder = backend()
    fails_while_a_residual_comes_back(recorder, PLACES[place])
    assert recorder.finish() == []


def test_moves_go_beside_the_lane(backend, monkeypatch):
    """Copies run on two streams of their own; the lane waits where a backward reads what came back,
    and nowhere else."""
    plain = backend()
    go(plain, stages, SCHEDULES[0], PLACES["two devices"])
    recorder = backend()
    ways: list[HostStream] = []
    real = HostStream.copy
    monkeypatch.setattr(
        HostStream, "copy", lambda self, *rest: (ways.append(self), real(self, *rest))[1]
    )
    schedule = SCHEDULES[4]
    go(recorder, stages, schedule, PLACES["two devices"])
    loads = sum(action.kind is fp.Kind.L for order in schedule.orders for action in order)
    assert len({id(way) for way in ways}) == 4  # out and back of two lanes
    assert len(ways) == 2 * loads > 0
    streams = {way._stream.name for way in ways}
    lanes = {way.place.stream.name for way in ways}
    assert len(streams) == 4
    assert not streams & lanes

    def waits(one):
        found = [
            p
            for p in one.points
            if " waits for " in p.words and p.words.split(" waits for ")[0] in lanes
        ]
        return [p for p in found if p.site.startswith("wait:")]

    assert len(waits(recorder)) - len(waits(plain)) == loads


CASES = {
    **{
        f"{schedule.name}, {place}": lambda r, s=schedule, p=place: go(r, stages, s, PLACES[p])
        for schedule in (*SCHEDULES[:2], SCHEDULES[3])
        for place in PLACES
    },
    **{
        f"{schedule.name}, {place}": lambda r, s=schedule, p=place: go(r, stages, s, PLACES[p])
        for schedule in (SCHEDULES[6], SCHEDULES[9])
        for place in ("two devices", "one device")
    },
    **{
        f"{SCHEDULES[4].name}, {place}": lambda r, p=place: go(r, stages, SCHEDULES[4], PLACES[p])
        for place in ("two devices", "a device and the host")
    },
    "used, two devices": lambda r: used_by_the_caller(r, PLACES["two devices"]),
    "used, one device": lambda r: used_by_the_caller(r, PLACES["one device"]),
    "fails, two devices": lambda r: fails_while_a_residual_comes_back(r, PLACES["two devices"]),
}
ALONE = ("wait: ", "_copy: self._stream(source).wait", "copy: stream.wait_event")
"""Waits that nothing else stands in for: those for a value."""


def test_a_measured_run_has_the_times_of_its_devices(backend):
    """The host queues, the device works later: here a second later for each action."""
    recorder = backend()
    recorder.now = map(float, count()).__next__
    part = fp.stage(lambda p, x: torch.tanh(x @ p["w"]))
    plan = fp.make_plan(
        [part] * 2, fp.schedules.one_f_one_b(2, 3), loss=F.mse_loss, devices=["cpu:0", "cpu"]
    )
    params = tuple({"w": torch.eye(4)} for _ in range(2))
    recorder.put(params[0], torch.device("cpu", 0))
    with recorder.watching():
        timeline = fp.run(plan, params, (torch.ones(6, 4), torch.ones(6, 4)), record=True).timeline
    assert [*plan.schedule.orders[0]] == [
        span.action for span in timeline.spans if span.device == 0
    ]
    assert [1.0] * 6 == [
        pytest.approx(span.end - span.start) for span in timeline.spans if span.device == 0
    ]
    assert all(span.end - span.start < 1 for span in timeline.spans if span.device == 1)
    assert [] == recorder.finish()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_wait_is_needed(backend):
    """Each wait and each recording is left out in turn, and the proof must fail.

    A wait for a value must be missed every time, unless its stream knew already what it waited for.
    A wait for a slot may be implied by the gradient that came back meanwhile, and what guards
    memory or joins the caller may have a stand-in in one plan; in some plan it must be missed, and
    then the others are not asked.
    """
    spared: list[str] = []
    missed: dict[str, int] = {}
    for name, case in CASES.items():
        whole = backend()
        case(whole)
        assert whole.finish() == [], name
        for number, point in enumerate(whole.points):
            missed.setdefault(point.site, 0)
            alone = point.site.startswith(ALONE)
            if not point.news or (missed[point.site] and not alone):
                continue
            recorder = backend(number)
            with suppress(Missed):
                case(recorder)
                recorder.finish()
            if recorder.faults:
                missed[point.site] += 1
            elif alone:
                spared.append(f"{name}, {number}: {point}")
    assert spared == []
    assert [site for site, count in missed.items() if not count] == []
    assert len(missed) >= 9, missed
