"""Parameters at home in host memory, on devices of a recorder: in order, bit-identical, and no more
bytes on a device than the model of memory says."""

from __future__ import annotations

import copy
import functools
import gc
import re
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import assert_same_result, ids, same
from functional_rules import MAKERS as FUNCTIONAL

import funcpipe as fp
from funcpipe._src.devices.stream import Place
from funcpipe._src.replicas.host_params import HostParams

sys.path.insert(0, str(Path(__file__).parent))
from recorder import Missed, Recorder

S, M, ROWS, WIDTH = 4, 3, 6, 8


def gathered(schedule, **options):
    """The schedule with U and G, without steps."""
    return fp.schedules.gather_params(fp.schedules.reduce_grads(schedule), **options)


def homeward(schedule, **options):
    """The schedule with U, G and S."""
    return fp.schedules.step_params(gathered(schedule, **options))


SCHEDULES = [
    gathered(fp.schedules.looped_bfs(S, M, num_devices=1), whole=1),
    gathered(fp.schedules.looped_bfs(S, M, num_devices=2), whole=1, ahead=2),
    gathered(fp.schedules.one_f_one_b(S, M, num_devices=2), whole=2),
    gathered(fp.schedules.zero_bubble(S, M, num_devices=2), whole=1),
    gathered(fp.schedules.remat(fp.schedules.fill_drain(S, M, num_devices=2)), whole=1, ahead=0),
    gathered(fp.schedules.offload(fp.schedules.looped_bfs(S, M, num_devices=2)), whole=1),
    fp.schedules.gather_params(fp.schedules.interleaved(S, M, num_devices=2)),
]


def net(norm=nn.BatchNorm1d):
    """Stages with a norm, dropout, and a frozen leaf."""
    torch.manual_seed(3)
    made = []
    for number in range(S):
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm(WIDTH), nn.Tanh(), nn.Dropout(0.2))
        module[0].bias.requires_grad_(number != 2)
        made.append(fp.from_module(module, name=f"part{number}"))
    return tuple(zip(*made, strict=True))


def batch():
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2))


def go(schedule, devices, executor="serial", make=None, **options):
    """A run, and the parameters and the state after it."""
    stages, params, state = net()
    plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices=devices)
    # State stays on the device; only parameters are at home.
    if devices != "cpu":
        recorder = Place.backend
        for stage, tree in enumerate(state):
            recorder.put(tree, torch.device(devices[schedule.device_of[stage]]))
        params = fp.place(plan, params, home="cpu")
    if make is not None:
        options["optimizer"] = make(fp.leaves(params))
    result = fp.run(
        plan, params, batch(), state=state, seed=1, executor=executor, threads_per_lane=1, **options
    )
    return result, [leaf.detach().clone() for leaf in fp.leaves(params)]


class Bytes(Recorder):
    """A recorder that counts the bytes of gathered parameters on each device."""

    def __init__(self, skip=None, *, hasty=False):
        super().__init__(skip, hasty=hasty)
        self.held, self.most = Counter(), Counter()
        self.device_of = {}

    def grow(self, tensor, device):
        super().grow(tensor, device)
        self.held[device.index] += tensor.nbytes
        self.most[device.index] = max(self.most[device.index], self.held[device.index])
        self.device_of[id(tensor)] = device.index

    def shrink(self, tensor):
        if id(tensor) in self.device_of and tensor.untyped_storage().nbytes():
            self.held[self.device_of[id(tensor)]] -= tensor.nbytes
        super().shrink(tensor)


def devices_of(schedule):
    return [f"cpu:{lane}" for lane in range(schedule.num_devices)]


@pytest.mark.parametrize("executor", ["serial", pytest.param("threads", marks=pytest.mark.slow)])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=ids)
def test_in_order_and_bit_identical(schedule, executor, monkeypatch):
    want, _ = go(schedule, "cpu")
    recorder = Bytes()
    monkeypatch.setattr(Place, "backend", recorder)
    # Threads of lanes are watched by themselves.
    with recorder.watching() if executor == "serial" else nullcontext():
        got, _ = go(schedule, devices_of(schedule), executor)
    assert_same_result(want, got)
    assert all(leaf.is_cpu and recorder.streamed(leaf) is None for leaf in fp.leaves(got.grads))
    del got
    gc.collect()
    assert recorder.finish() == []
    assert not any(recorder.held.values())


ADAMW = functools.partial(torch.optim.AdamW, lr=0.1, foreach=False)


@pytest.mark.parametrize("make", [ADAMW, FUNCTIONAL["adamw"]], ids=["torch", "functional"])
@pytest.mark.parametrize("schedule", SCHEDULES[:4], ids=ids)
def test_steps_at_home(schedule, make, monkeypatch):
    schedule = fp.schedules.step_params(schedule)
    want, left = go(schedule, "cpu", make=make)
    recorder = Bytes()
    monkeypatch.setattr(Place, "backend", recorder)
    got, there = go(schedule, devices_of(schedule), make=make)
    assert same(left, there)
    assert same(want.norm, got.norm)
    assert recorder.finish() == []


def test_several_batches(monkeypatch):
    """Steps at home between batches whose actions follow each other on the lanes."""
    schedule = homeward(fp.schedules.looped_bfs(S, M, num_devices=2), whole=1)

    def train(devices):
        # The recorder does not see on which stream a lane commits statistics.
        stages, params, state = net(nn.LayerNorm)
        plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices=devices)
        if devices != "cpu":
            params = fp.place(plan, params, home="cpu")
        optimizer = torch.optim.SGD(fp.leaves(params), lr=0.1, momentum=0.9, foreach=False)
        batches = [batch(), batch(), batch()]
        results = fp.run_batches(
            plan, params, batches, state=state, seed=1, optimizer=optimizer, threads_per_lane=1
        )
        losses = [float(result.loss) for result in results]
        return losses, [leaf.detach().clone() for leaf in fp.leaves(params)]

    recorder = Bytes()
    want = train("cpu")
    monkeypatch.setattr(Place, "backend", recorder)
    got = train(devices_of(schedule))
    assert same(want, got)
    assert recorder.finish() == []


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES[:6], ids=ids)
def test_bytes_on_the_device_are_those_of_memory(schedule, monkeypatch):
    stages, params, state = net()
    recorder = Bytes()
    monkeypatch.setattr(Place, "backend", recorder)
    go(schedule, devices_of(schedule))
    sizes = fp.models.memory(stages, batch()[0][: ROWS // M], params=params, state=state)
    whole, home = sizes.peak(schedule), sizes.peak(schedule, home=True)
    per_stage = [sum(leaf.nbytes for leaf in fp.leaves(tree)) for tree in params]
    for device in range(schedule.num_devices):
        own = [stage for stage in range(S) if schedule.device_of[stage] == device]
        others = whole[device] - sum(sizes[s].parameters + sizes[s].optimizer for s in own)
        assert recorder.most[device] <= home[device] <= recorder.most[device] + others
        assert home[device] < whole[device]
    if schedule.num_devices == 1:
        assert recorder.most[0] == 2 * max(per_stage)  # one computes, one is under way


@pytest.mark.slow
def test_each_wait_is_needed(monkeypatch):
    """Leaving out a wait for a copy from or to the host must show."""
    schedule = SCHEDULES[1]
    found = 0
    recorder = Bytes()
    monkeypatch.setattr(Place, "backend", recorder)
    with recorder.watching():
        go(schedule, devices_of(schedule))
    chosen = [
        number
        for number, point in enumerate(recorder.points)
        # Not the recordings: memory that is not given out again shows nothing.
        if point.news and " waits for " in point.words and re.match(r"(_gather|copy): ", point.site)
    ]
    assert {recorder.points[number].site.partition(":")[0] for number in chosen} == {
        "_gather",
        "copy",
    }
    for number in chosen:
        recorder = Bytes(number, hasty=True)
        monkeypatch.setattr(Place, "backend", recorder)
        with recorder.watching():
            try:
                result, _ = go(schedule, devices_of(schedule))
                del result
                gc.collect()
                found += bool(recorder.finish())
            except (Missed, fp.FuncpipeError):
                found += 1
    assert found == len(chosen)


@pytest.mark.parametrize("waits", [True, False])
def test_the_host_waits_for_gradients(waits, monkeypatch):
    """The caller may read gradients at once. Without the host's waits the recorder sees a race."""
    recorder = Bytes()
    monkeypatch.setattr(Place, "backend", recorder)
    if not waits:
        monkeypatch.setattr(recorder.host, "wait", lambda *stream: None)
    with recorder.watching():
        result, _ = go(SCHEDULES[1], devices_of(SCHEDULES[1]))
        used = [leaf * 2 for leaf in fp.leaves(result.grads) if leaf is not None]
    assert len(used) > S
    del result
    gc.collect()
    assert (recorder.finish() == []) is waits


def test_evaluation_ends_after_its_copies(monkeypatch):
    """The caller may change the parameters after a run without gradients."""
    schedule = fp.schedules.gather_params(
        fp.schedules.fill_drain(S, M, num_devices=2, backward=False), whole=1
    )
    stages, params, state = net()
    ended = []
    settle = HostParams.settle
    monkeypatch.setattr(
        HostParams, "settle", lambda self: (settle(self), ended.append(self.stage))[0]
    )
    recorder = Bytes()
    monkeypatch.setattr(Place, "backend", recorder)
    plan = fp.make_plan(stages, schedule, devices=devices_of(schedule), train=False)
    for stage, tree in enumerate(state):
        recorder.put(tree, torch.device(devices_of(schedule)[schedule.device_of[stage]]))
    fp.run(plan, fp.place(plan, params, home="cpu"), batch()[0], state=state, executor="serial")
    host = recorder.host.clock
    assert ended == [0, 1, 2, 3]
    assert any("stream" in name for name in host)  # the host has waited for the copy streams


def test_the_oracle_gathers_too(monkeypatch):
    schedule = SCHEDULES[0]
    want, _ = go(schedule, "cpu")
    monkeypatch.setattr(Place, "backend", Bytes())
    stages, params, state = net()
    plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices=devices_of(schedule))
    given = fp.place(plan, params, home="cpu"), batch()
    got = fp.run_sequential(plan, *given, state=state, seed=1, threads_per_lane=1)
    assert_same_result(want, got)


def test_compiled_stages(monkeypatch):
    schedule = SCHEDULES[0]
    torch.manual_seed(0)
    made = [fp.from_module(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())) for _ in range(S)]
    stages, params, _ = zip(*made, strict=True)
    stages = [fp.compile_stage(stage) for stage in stages]

    def result(devices):
        plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices=devices)
        own = params if devices == "cpu" else fp.place(plan, params, home="cpu")
        return fp.run(plan, own, batch(), executor="serial")

    want = result("cpu")
    recorder = Bytes()
    monkeypatch.setattr(Place, "backend", recorder)
    assert_same_result(want, result(devices_of(schedule)))


def test_wrong_uses():
    stages, params, _ = net()
    plain = fp.make_plan(stages, fp.schedules.one_f_one_b(S, M), loss=F.mse_loss, devices="cpu")
    with pytest.raises(fp.PlacementError, match=r"stages \[0, 1, 2, 3\] have no U.*gather_params"):
        fp.place(plain, params, home="cpu")
    plan = fp.make_plan(stages, SCHEDULES[0], loss=F.mse_loss, devices="cpu")
    with pytest.raises(fp.PlacementError, match='home= is "cpu"'):
        fp.place(plan, params, home="cuda")
    with pytest.raises(fp.PlacementError, match="is for plans with one replica"):
        fp.place(plan, params, home="cpu", shard=True)
    placed = fp.place(plan, params, home="cpu")
    assert all(a is b for a, b in zip(fp.leaves(placed), fp.leaves(params), strict=True))


def test_other_tensors_are_refused(monkeypatch):
    """A parameter whose memory is not its numbers cannot be gathered."""
    schedule = fp.schedules.gather_params(fp.schedules.fill_drain(1, 1, backward=False))
    monkeypatch.setattr(Place, "backend", Bytes())
    plan = fp.make_plan([fp.stage(lambda p, x: x)], schedule, devices=["cpu:0"])
    params = ({"w": torch.eye(2, dtype=torch.complex64).conj()},)
    with pytest.raises(fp.PlacementError, match=r"(?s)fp.place.*params\[0\]\['w'\] is a Tensor"):
        fp.run(plan, params, torch.ones(1))


def test_parameters_may_be_a_copy_of_the_model():
    """`place` leaves the given tensors as they are."""
    stages, params, _ = net()
    before = copy.deepcopy([leaf.detach() for leaf in fp.leaves(params)])
    plan = fp.make_plan(stages, SCHEDULES[0], loss=F.mse_loss, devices="cpu")
    fp.place(plan, params, home="cpu")
    assert same(before, [leaf.detach() for leaf in fp.leaves(params)])
