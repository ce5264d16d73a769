"""What processes do whose lanes are on devices: streams that a recorder follows, and a group that
stands for NCCL's.

The group is one of gloo. What it sends it reads, in the recorder's eyes, on the stream that is
current, and what it receives it writes there, as NCCL's does.
"""

import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import cpu_plan, same, schedules
from rank_tasks import (
    alone,
    batch,
    differences,
    everything,
    everything_of,
    joined,
    local,
    loss_with_aux,
    owners,
    unequal,
    unless,
    unlike,
    unlike_gradients,
)
from torch.distributed.device_mesh import init_device_mesh

import funcpipe as fp
from funcpipe import schedules as S
from funcpipe._src.core.tree import map_tensors
from funcpipe._src.devices.stream import Place, StreamBackend
from funcpipe._src.engine import lanes
from funcpipe._src.processes.device_stream import DeviceStream
from funcpipe._src.replicas.replicas import Replicas

sys.path.insert(0, str(Path(__file__).parents[1] / "streams"))
from recorder import Recorder


@fp.stage
def layer(p, x):
    return torch.tanh(x @ p["w"] + p["b"])


class Done:
    """What was begun is over for the stream."""

    def wait(self):
        return True


class RecordedGroup:
    """A group of devices over gloo."""

    def __init__(self, group, recorder, device):
        self.group, self.recorder, self.device, self.sent, self.aborted = (
            group,
            recorder,
            device,
            [],
            False,
        )

    def size(self):
        return self.group.size()

    def abort(self):
        self.aborted = True

    def eager_connect_single_device(self, device):
        assert device == self.device

    def _leave(self, tensor, to, tag):
        if tensor.numel():
            recorder = self.recorder
            with recorder.lock:
                recorder.read(recorder.block(tensor), recorder.current_stream(self.device))
            recorder.local.quiet = True
            try:
                copy = tensor.clone()
            finally:
                recorder.local.quiet = False
            self.sent = [*self.sent[-64:], (copy, self.group.send([copy], to, tag))]

    def _come(self, tensor, source, tag):
        if tensor.numel():
            self.group.recv([tensor], source, tag).wait(timedelta(seconds=30))
            recorder = self.recorder
            with recorder.lock:
                recorder.write(recorder.block(tensor), recorder.current_stream(self.device))

    def send(self, tensors, to, tag):
        self._leave(tensors[0], to, tag)
        return Done()

    def recv(self, tensors, source, tag):
        self._come(tensors[0], source, tag)
        return Done()

    def alltoall(self, rooms, tensors):
        for to, tensor in enumerate(tensors):
            self._leave(tensor, to, 3)
        for source, room in enumerate(rooms):
            self._come(room, source, 3)
        return Done()


class JoinedRecorder(Recorder):
    """A recorder whose devices are joined with those of other processes; or not, or all are one
    device."""

    def __init__(self, way, skip=None):
        super().__init__(skip)
        self.way, self.groups = way, []

    def identity(self, device):
        if self.way == "host" or not self.asynchronous(device):
            return ""
        return "one" if self.way == "one device" else f"{os.getpid()} {device}"

    def joined(self, store, rank, size, device):
        self.groups.append(
            RecordedGroup(
                dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30)), self, device
            )
        )
        return self.groups[-1]


@contextmanager
def recorded(way, skip=None):
    """Devices of the recorder in place of torch's; what comes is not put into a slot that is
    taken."""
    recorder, freed = JoinedRecorder(way, skip), []
    real = {name: getattr(DeviceStream, name) for name in ("receive", "from_host")}

    def followed(name):
        def come(self, leaves, free, reader):
            ticket = real[name](self, leaves, free, reader)
            freed.append(free)
            if free is not None and self.stream.clock.get(free.stream, 0) < (free.clock or {}).get(
                free.stream, 0
            ):
                recorder.fault(
                    f"a slot is filled on {self.stream.name} before {free.stream} has freed it"
                )
            return ticket

        return come

    def begin(self, gradients, cuts, told):
        """Sums were made outside of the record: they lie on the device."""
        with recorder.lock:
            for gradient in gradients:
                if gradient is not None and self.stream is not None:
                    recorder.block(gradient).device = self.stream.device
        return summed(self, gradients, cuts, told)

    def done(self, tensors):
        """After a gradient is summed its memory goes."""
        event = over(self, tensors)
        if self.stream is not None and len(tensors) == 1:
            recorder.freed(tensors[0])
        return event

    before, summed, over = Place.backend, Replicas.begin, Replicas._over
    Place.backend, Replicas.begin, Replicas._over = recorder, begin, done
    for name in real:
        setattr(DeviceStream, name, followed(name))
    try:
        yield recorder, freed
    finally:
        Place.backend, Replicas.begin, Replicas._over = before, summed, over
        for name, function in real.items():
            setattr(DeviceStream, name, function)


def on(way, lanes):
    """A device for each lane."""
    return [f"cpu:{lane}" if way != "mixed" or lane % 2 else "cpu" for lane in range(lanes)]


def put(recorder, trees, plan):
    for stage, tree in enumerate(trees):
        device = torch.device(plan.devices[plan.schedule.device_of[stage]])
        if tree is not None and device.index is not None:
            recorder.put(tree, device)


def placed(recorder, plan, params, state, ranks):
    """Parameters and state of a rank, which the recorder knows on their devices."""
    own, at = fp.place(plan, params, ranks), fp.place(plan, state, ranks)
    put(recorder, own, plan)
    put(recorder, at, plan)
    return own, at


def on_devices(rank, size, numbers, rows, way):
    """Runs of schedules on devices, against one process on the CPU; (differences, faults of order,
    what was seen).

    One process has the same results over all schedules: the ranks take turns to check that.
    """
    stages, params, state = everything()
    wrong, faults, seen, all_of = [], [], set(), schedules(4, 4)
    options = {"loss": loss_with_aux, "outputs": True}
    first = fp.make_plan(stages, all_of[numbers[0]], **options, devices="cpu")
    wants = {count: alone(first, params, state, count) for count in rows}
    for turn, number in enumerate(numbers):
        schedule = all_of[number]
        names = on(way, schedule.num_devices)
        plan = fp.make_plan(stages, schedule, **options, devices=names)
        plain = fp.make_plan(stages, schedule, **options, devices="cpu")
        with (
            recorded(way) as (recorder, freed),
            fp.ranks(plan, lanes=owners(plan.num_devices, size), timeout=30.0) as ranks,
        ):
            own, at = placed(recorder, plan, params, state, ranks)
            for count in rows:
                x, target, scale = batch(count)
                if turn % size == rank:
                    with plainly():
                        own_want = alone(plain, params, state, count)
                    wrong += [
                        f"{schedule.name} {count} rows, one process: {name}"
                        for name in differences(wants[count], own_want, range(4), last=True)
                    ]
                got = fp.run(
                    plan,
                    own,
                    (x, target),
                    state=at,
                    feeds={"scale": scale},
                    seed=count,
                    executor=ranks,
                )
                last = 3 in ranks.stages
                wrong += [
                    f"{schedule.name} {count} rows: {name}"
                    for name in differences(wants[count], got, ranks.stages, last=last)
                ]
            seen |= {"joined"} if recorder.groups else set()
            seen |= {"freed"} if any(free is not None for free in freed) else set()
        faults += recorder.finish()
        if not all(group.aborted for group in recorder.groups):
            faults.append("a group of devices was not ended")
    return wrong, faults, sorted(seen)


@contextmanager
def plainly():
    """Inside, devices are torch's."""
    recorder, Place.backend = Place.backend, StreamBackend()
    try:
        yield
    finally:
        Place.backend = recorder


def without_a_wait(rank, size, skip):
    """One run in which this process leaves out a wait or a recording: (how many there are, those
    that tell anything, faults)."""
    stages, params, state = everything()
    schedule = S.one_f_one_b(4, 4)
    plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices=on("joined", 4))
    x, target, scale = batch(8)
    with (
        recorded("joined", skip if rank == 1 else None) as (recorder, _),
        fp.ranks(plan, timeout=30.0) as ranks,
    ):
        own, at = placed(recorder, plan, params, state, ranks)
        for seed in range(2):
            fp.run(
                plan, own, (x, target), state=at, feeds={"scale": scale}, seed=seed, executor=ranks
            )
    return [(point.words, point.site, point.news) for point in recorder.points], recorder.finish()


def replicas_on_devices(rank, size, way, reduced):
    """Two replicas of two lanes on devices, against one process with the rows of both."""
    stages, params, state = everything()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    schedule = S.interleaved(4, 4, num_devices=2)
    if reduced:
        schedule = S.reduce_grads(schedule)
    plan = fp.make_plan(stages, schedule, loss=loss_with_aux, devices=on(way, 2))
    whole = cpu_plan(stages, S.fill_drain(4, 8), loss=loss_with_aux)
    batches = [batch(count) for count in (8, 10)]
    *given, feed = joined(batches)
    wrong = []
    with recorded(way) as (recorder, _), fp.ranks(plan, mesh, dp="dp", timeout=30.0) as ranks:
        own, at = placed(recorder, plan, params, state, ranks)
        for seed in range(2):
            x, target, scale = batches[ranks.replica]
            with plainly():
                want = fp.run_sequential(
                    whole, params, given, state=state, feeds={"scale": feed}, seed=seed
                )
            got = fp.run(
                plan, own, (x, target), state=at, feeds={"scale": scale}, seed=seed, executor=ranks
            )
            wrong += unlike(want, got, "loss", "losses", "aux")
            wrong += [f"state[{stage}]" for stage in unequal(want.state, got.state, ranks.stages)]
            wrong += unlike_gradients(want, got, ranks.stages)
    return wrong, recorder.finish(), bool(recorder.groups)


def stuck(rank, size, what):
    """The device of rank 1 does not come to its end in the first run. How both get out of it:
    (error, seconds), and where the next run differs from one process.

    Rank 0 fails once its lanes are done ("fails"), or waits likewise ("waits"), or it fails while
    the lanes of the other stand in their device ("stands").
    """
    stages, params, state = everything()
    failing = {"now": what == "fails", "early": what == "stands"}

    def first(p, x):
        if failing["early"]:
            raise ValueError("stage fails")
        return stages[0].fn(p, x)

    def commit(old, stats):
        if failing["now"]:
            raise ValueError("commit fails")
        return stages[1].commit(old, stats)

    whole = (replace(stages[0], fn=first), replace(stages[1], commit=commit), *stages[2:])
    schedule = S.one_f_one_b(4, 4)
    plan = fp.make_plan(whole, schedule, loss=loss_with_aux, devices=on("joined", 4))
    plain = cpu_plan(stages, schedule, loss=loss_with_aux)
    x, target, scale = batch(8)
    options = {"feeds": {"scale": scale}, "seed": 1}
    with recorded("joined") as (recorder, _), fp.ranks(plan, timeout=2.0) as ranks:
        own, at = placed(recorder, plan, params, state, ranks)
        go = partial(fp.run, plan, own, (x, target), state=at, executor=ranks, **options)
        began = time.monotonic()
        inside = standing if what == "stands" else hanging
        with (
            inside(recorder) if rank == 1 else nullcontext(),
            pytest.raises(fp.FuncpipeError) as caught,
        ):
            go()
        seconds = time.monotonic() - began
        failing.update(now=False, early=False)
        got = go()
        with plainly():
            want = fp.run_sequential(plain, params, (x, target), state=state, **options)
        return (
            type(caught.value).__name__,
            seconds,
            differences(want, got, ranks.stages, last=False),
        )


@contextmanager
def four_lanes():
    """A run of 1F1B on four joined devices; with its recorder."""
    stages, params, state = everything()
    plan = fp.make_plan(stages, S.one_f_one_b(4, 4), loss=loss_with_aux, devices=on("joined", 4))
    x, target, scale = batch(8)
    with recorded("joined") as (recorder, _), fp.ranks(plan, timeout=6.0) as ranks:
        own, at = placed(recorder, plan, params, state, ranks)
        given = {"state": at, "feeds": {"scale": scale}, "seed": 1, "executor": ranks}
        yield partial(fp.run, plan, own, (x, target), **given), recorder


def lost(rank, size, way):
    """What both processes say when rank 0 hears from its group of devices that rank 1 is gone; and
    then it is back."""

    def broken(*args):
        raise torch.distributed.DistBackendError(
            "NCCL error in: /torch/ProcessGroupNCCL.cpp:90, remote process exited, NCCL version "
            "2.28.9\nLast error:"
        )

    with four_lanes() as (go, _):
        go()
        with pytest.MonkeyPatch.context() as patch:
            if rank == 0:
                patch.setattr(RecordedGroup, way, broken)
            with pytest.raises(fp.PeerError) as caught:
                go()
        return str(caught.value), caught.value.rank, float(go().loss)


@contextmanager
def standing(recorder):
    """Inside, lanes stand in a call of C until the groups of their device are ended, as in
    ``.item()``."""
    do = lanes._do

    def stands(*lane):
        over = threading.Lock()
        over.acquire()
        while not recorder.groups:
            time.sleep(0.01)
        threading.Thread(target=ended, args=(over,), daemon=True).start()
        over.acquire()
        return do(*lane)

    def ended(over):
        while not all(group.aborted for group in recorder.groups):
            time.sleep(0.01)
        over.release()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "_do", stands)
        yield


@contextmanager
def hanging(recorder):
    """Inside, once the lanes are done, the device does not come to its end before its groups are
    ended."""
    event, main = Place.event, threading.current_thread()

    def until_aborted():
        while not all(group.aborted for group in recorder.groups):
            time.sleep(0.01)
        raise RuntimeError("NCCL communicator was aborted")

    def hangs(self):
        made = event(self)
        if threading.current_thread() is main:
            made.synchronize = until_aborted
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Place, "event", hangs)
        yield


def not_joined(rank, size):
    """What both processes say when the devices of rank 1 cannot be joined; and then they can."""

    def broken(*args):
        raise RuntimeError(
            "NCCL error in: NCCLUtils.cpp:90, unhandled system error\nncclSystemError: System call"
        )

    with four_lanes() as (go, recorder):
        if rank == 1:
            recorder.joined = broken
        with pytest.raises(fp.PeerError) as caught:
            go()
        vars(recorder).pop("joined", None)
        return str(caught.value), float(go().loss)


def parts_on_devices(rank, size, way, rows):
    """Two replicas that have parts of their parameters on devices, against one process with the
    rows of both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))

    g = torch.Generator().manual_seed(1)
    params = tuple(
        {"w": torch.randn(6, 6, generator=g).double(), "b": torch.randn(6, generator=g).double()}
        for _ in "1234"
    )
    schedule = S.reduce_grads(S.looped_bfs(4, 4, num_devices=2))
    schedule = S.gather_params(schedule, whole=1)
    plan = fp.make_plan([layer] * 4, schedule, loss=F.mse_loss, devices=on(way, 2))
    whole = cpu_plan([layer] * 4, S.fill_drain(4, 8))
    batches = [[torch.randn(count, 6, generator=g).double() for _ in "xy"] for count in rows]
    given = joined(batches)
    wrong = []
    with recorded(way) as (recorder, _), fp.ranks(plan, mesh, dp="dp", timeout=30.0) as ranks:
        own = fp.place(plan, params, ranks, shard=True)
        put(
            recorder,
            [tree and {key: leaf.to_local() for key, leaf in tree.items()} for tree in own],
            plan,
        )
        for _ in range(2):
            with plainly():
                want = fp.run_sequential(whole, params, given)
            got = fp.run(plan, own, batches[ranks.replica], executor=ranks)
            faults = [*recorder.finish()]
            wrong += unless(same(want.losses, got.losses), "losses")
            wrong += unlike_gradients(want, got, ranks.stages)
            with plainly():
                wrong += unless(torch.allclose(fp.global_norm(want), fp.global_norm(got)), "norm")
    return wrong, faults


def at_home(tree):
    """Tensors of a tree on the CPU."""
    return map_tensors(torch.Tensor.cpu, tree)


def on_cpu(result):
    fields = ("loss", "losses", "aux", "grads", "state", "outputs")
    return replace(result, **{name: at_home(getattr(result, name)) for name in fields})


JOINED: list[torch.device] = []
"""Devices that this process has joined with those of others."""


def use_gpu(rank, size, way):
    """This process's device, from now on: the first for all, over the host or joined by NCCL all
    the same, or its own.

    NCCL refuses two processes on one device of one host, so it is told that they are on two, whose
    sockets it then takes.
    """
    torch.cuda.set_device(rank if way == "two devices" else 0)
    if way == "one device, joined":
        os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        StreamBackend.identity = lambda self, device: f"{rank} {device}"
    joined = StreamBackend.joined

    def noted(self, store, seat, count, device):
        JOINED.append(device)
        return joined(self, store, seat, count, device)

    StreamBackend.joined = noted
    return True


def on_gpus(rank, size, number, rows):
    """Runs on real devices, against one process on one of them: (what differs, whether devices were
    joined)."""
    stages, params, state = everything()
    schedule = [
        S.one_f_one_b(4, 4),
        S.remat(S.fill_drain(4, 4)),
        S.interleaved(4, 4, num_devices=2),
        S.offload(S.one_f_one_b(4, 4)),
        S.zero_bubble(4, 4),
    ][number]
    plan = fp.make_plan(stages, schedule, loss=loss_with_aux, outputs=True, devices="cuda")
    here = torch.device("cuda", torch.cuda.current_device())
    plain = fp.make_plan(stages, schedule, loss=loss_with_aux, outputs=True, devices=here)
    whole, whole_state = fp.place(plain, params), fp.place(plain, state)
    wrong = []
    JOINED.clear()
    with fp.ranks(plan, timeout=60.0) as ranks:
        own, at = fp.place(plan, params, ranks), fp.place(plan, state, ranks)
        for count in rows:
            x, target, scale = batch(count)
            options = {"feeds": {"scale": scale}, "seed": count}
            want = fp.run_sequential(plain, whole, (x, target), state=whole_state, **options)
            got = fp.run(plan, own, (x, target), state=at, executor=ranks, **options)
            last = 3 in ranks.stages
            wrong += [
                f"{count} rows: {name}"
                for name in differences(on_cpu(want), on_cpu(got), ranks.stages, last=last)
            ]
            fp.global_norm(got)
    return wrong, bool(JOINED)


def faults_on_gpus(rank, size, what):
    """A run that does not end on rank 1 of 2: (error, seconds) of each, and what differs in the run
    after it."""
    stages, params, state = everything()
    failing = {"now": False}

    def third(p, x, *, skips):
        if failing["now"]:
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("planted")
        return stages[2].fn(p, x, skips=skips)

    whole = (*stages[:2], replace(stages[2], fn=third), stages[3])
    plan = fp.make_plan(whole, S.one_f_one_b(4, 4), loss=loss_with_aux, devices="cuda")
    here = torch.device("cuda", torch.cuda.current_device())
    plain = fp.make_plan(stages, plan.schedule, loss=loss_with_aux, devices=here)
    x, target, scale = batch(8)
    options = {"feeds": {"scale": scale}, "seed": 1}
    with fp.ranks(plan, timeout=5.0) as ranks:
        own, at = fp.place(plan, params, ranks), fp.place(plan, state, ranks)
        go = partial(fp.run, plan, own, (x, target), state=at, executor=ranks, **options)
        go()
        failing["now"] = True
        began = time.monotonic()
        with pytest.raises((fp.FuncpipeError, ValueError)) as caught:
            go()
        seconds = time.monotonic() - began
        failing["now"] = False
        if what == "kill":
            return type(caught.value).__name__, seconds, []
        want = fp.run_sequential(
            plain, fp.place(plain, params), (x, target), state=fp.place(plain, state), **options
        )
        got = go()
        return (
            type(caught.value).__name__,
            seconds,
            differences(on_cpu(want), on_cpu(got), ranks.stages, last=False),
        )


def steps_on_devices(rank, size, way, kind, together=False):
    """Two replicas of two lanes that step inside of runs, on devices of a recorder, and after runs,
    before the record.

    With ``together`` the runs are batches that follow each other without a pause.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))

    schedule = S.interleaved(4, 4, num_devices=2)
    if kind == "sharded":
        schedule = S.gather_params(S.looped_bfs(4, 4, num_devices=2), whole=1)
    if kind != "plain":
        schedule = S.reduce_grads(schedule)
    plain = cpu_plan([layer] * 4, schedule)
    stepping = fp.make_plan(
        [layer] * 4, S.step_params(schedule), loss=F.mse_loss, devices=on(way, 2)
    )
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(7, 6, generator=generator, dtype=torch.float64) for _ in range(4)]
    batches = torch.randn(2, 2, 8, 6, generator=generator, dtype=torch.float64)

    def fresh(plan, ranks):
        leaves = tuple(
            {"w": w[:6].clone().requires_grad_(), "b": w[6].clone().requires_grad_()} for w in start
        )
        params = fp.place(plan, leaves, ranks, shard=kind == "sharded")
        return params, torch.optim.AdamW(fp.leaves(params), lr=0.05, foreach=False)

    wants = []
    with fp.ranks(plain, mesh, dp="dp", timeout=30.0) as ranks:
        params, optimizer = fresh(plain, ranks)
        for _ in range(3):
            result = fp.run(plain, params, tuple(batches[ranks.replica]), executor=ranks)
            norm = fp.step(optimizer, params, result)
            wants.append((result.loss, norm, everything_of(params, optimizer)))
    wrong = []
    with recorded(way) as (recorder, _), fp.ranks(stepping, mesh, dp="dp", timeout=30.0) as ranks:
        params, optimizer = fresh(stepping, ranks)
        put(
            recorder,
            [tree and {key: local(leaf) for key, leaf in tree.items()} for tree in params],
            stepping,
        )
        given = {"executor": ranks, "optimizer": optimizer}
        if together:
            results = fp.run_batches(
                stepping, params, [tuple(batches[ranks.replica])] * len(wants), **given
            )
            with plainly():
                wrong += unless(same(wants[-1][-1], everything_of(params, optimizer)), "bits")
                told = [(result.loss, result.norm) for result in results]
                wrong += unless(same([want[:2] for want in wants], told), "losses, norms")
        for want in [] if together else wants:
            result = fp.run(stepping, params, tuple(batches[ranks.replica]), **given)
            with plainly():
                got = result.loss, result.norm, everything_of(params, optimizer)
                wrong += unless(same(want, got), "bits")
    return wrong, recorder.finish()


def replicas_on_gpus(rank, size, shard):
    """Two replicas on real devices, against one process with the rows of both: (what differs,
    whether they were joined)."""

    mesh = init_device_mesh("cuda", (2, 1), mesh_dim_names=("dp", "pp"))
    schedule = S.reduce_grads(S.looped_bfs(4, 4, num_devices=1))
    if shard:
        schedule = S.gather_params(schedule, whole=1)
    g = torch.Generator().manual_seed(1)
    numbers = [
        {"w": torch.randn(6, 6, generator=g).double(), "b": torch.randn(6, generator=g).double()}
        for _ in "1234"
    ]
    here = torch.device("cuda", torch.cuda.current_device())
    plan = fp.make_plan([layer] * 4, schedule, loss=F.mse_loss, devices="cuda")
    whole = fp.make_plan([layer] * 4, S.fill_drain(4, 8), loss=F.mse_loss, devices=here)
    x, target = (torch.randn(16, 6, generator=g).double() for _ in "xy")
    want = fp.run_sequential(whole, fp.place(whole, tuple(numbers)), (x, target))
    wrong = []
    JOINED.clear()
    with fp.ranks(plan, mesh, dp="dp", timeout=60.0) as ranks:
        own = fp.place(plan, tuple(numbers), ranks, shard=shard)
        rows = slice(8 * ranks.replica, 8 * ranks.replica + 8)
        for _ in range(3):
            got = fp.run(plan, own, (x[rows], target[rows]), executor=ranks)
            wrong += unless(same(at_home(want.losses), at_home(got.losses)), "losses")
            for one, other in zip(fp.leaves(want.grads), fp.leaves(got.grads), strict=True):
                # Not its full_tensor(): gloo's own gathering of tensors of devices ends processes
                # (pytorch/pytorch#152645).
                one, other = (
                    (one.chunk(2)[ranks.replica], other.to_local()) if shard else (one, other)
                )
                wrong += unless(torch.allclose(one, other, rtol=1e-12, atol=1e-12), "gradients")
            wrong += unless(
                torch.allclose(fp.global_norm(want).cpu(), fp.global_norm(got).cpu()), "norm"
            )
    return wrong, bool(JOINED)


def steps_on_gpus(rank, size, kind):
    """Steps in runs, and in batches without a pause, against those after runs: (what differs,
    whether they were joined).

    Two lanes, or two replicas whose gradients are summed, or whose parameters are gathered.
    """

    if kind == "lanes":
        mesh, options = init_device_mesh("cuda", (2,), mesh_dim_names=("pp",)), {}
        schedule = S.interleaved(4, 4, num_devices=2)
    else:
        mesh, options = init_device_mesh("cuda", (2, 1), mesh_dim_names=("dp", "pp")), {"dp": "dp"}
        schedule = S.reduce_grads(S.looped_bfs(4, 4, num_devices=1))
    if kind == "sharded":
        schedule = S.gather_params(schedule, whole=1)
    generator = torch.Generator().manual_seed(1)
    start = [torch.randn(7, 6, generator=generator, dtype=torch.float64) for _ in range(4)]
    batches = torch.randn(2, 2, 8, 6, generator=generator, dtype=torch.float64)

    def trained(steps, together):
        """Losses, norms and parameters of three batches."""
        own = S.step_params(schedule) if steps else schedule
        plan = fp.make_plan([layer] * 4, own, loss=F.mse_loss, devices="cuda")
        with fp.ranks(plan, mesh, timeout=60.0, **options) as ranks:
            leaves = tuple(
                {"w": w[:6].clone().requires_grad_(), "b": w[6].clone().requires_grad_()}
                for w in start
            )
            params = fp.place(plan, leaves, ranks, shard=kind == "sharded")
            optimizer = torch.optim.AdamW(fp.leaves(params), lr=0.05, foreach=False)
            batch = tuple(batches[ranks.replica])
            if together:
                results = fp.run_batches(
                    plan, params, [batch] * 3, optimizer=optimizer, executor=ranks
                )
                told = [(result.loss, result.norm) for result in results]
            elif steps:
                results = [
                    fp.run(plan, params, batch, optimizer=optimizer, executor=ranks)
                    for _ in range(3)
                ]
                told = [(result.loss, result.norm) for result in results]
            else:
                told = []
                for _ in range(3):
                    result = fp.run(plan, params, batch, executor=ranks)
                    told.append((result.loss, fp.step(optimizer, params, result)))
            return at_home((told, [local(leaf).detach() for leaf in fp.leaves(params)]))

    JOINED.clear()
    want = trained(steps=False, together=False)
    wrong = [
        name
        for name, together in (("steps in runs", False), ("batches together", True))
        if not same(want, trained(steps=True, together=together))
    ]
    return wrong, bool(JOINED)
