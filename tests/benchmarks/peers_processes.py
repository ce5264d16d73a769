"""Arms of two processes, started once, one step at each signal: torch.distributed.pipelining and
`fp.ranks`.

Over gloo; on a GPU, which both share, by NCCL, which is told that they are on two machines: it
refuses two processes on one device of one host.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import perf_counter, process_time
from typing import Any, Self

import torch
import torch.nn as nn
import torch.nn.functional as F
from peers_samples import Spent, peak
from peers_work import LANES, Work, gradients

SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "LoopedBFS": 2,
    "Interleaved1F1B": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
"""torch's schedules by the names that it gives them, and the stages that each rank holds."""

OWN = {
    "funcpipe, processes, 1F1B": ("one_f_one_b", 1, ""),
    "funcpipe, processes, fill-drain": ("fill_drain", 1, ""),
    "funcpipe, processes, eager 1F1B": ("eager_one_f_one_b", 1, ""),
    "funcpipe, processes, ZB-H2": ("zb_h2", 1, ""),
    "funcpipe, processes, ZB-V": ("zbv", 2, ""),
    "funcpipe, processes, interleaved": ("interleaved", 2, ""),
    "funcpipe, processes, looped BFS": ("looped_bfs", 2, ""),
    "funcpipe, compiled, processes, 1F1B": ("one_f_one_b", 1, "graph"),
    "funcpipe, compiled, processes, zero-bubble": ("zero_bubble", 1, "graph"),
    "funcpipe, compiled, processes, eager 1F1B": ("eager_one_f_one_b", 1, "graph"),
    "funcpipe, compiled, processes, ZB-H2": ("zb_h2", 1, "graph"),
    "funcpipe, compiled, processes, ZB-V": ("zbv", 2, "graph"),
    "funcpipe, inductor, processes, 1F1B": ("one_f_one_b", 1, "inductor"),
    "funcpipe, inductor, processes, zero-bubble": ("zero_bubble", 1, "inductor"),
    "funcpipe, inductor, processes, eager 1F1B": ("eager_one_f_one_b", 1, "inductor"),
    "funcpipe, inductor, processes, ZB-H2": ("zb_h2", 1, "inductor"),
    "funcpipe, inductor, processes, ZB-V": ("zbv", 2, "inductor"),
}
"""Our arms: the family, the stages that each rank holds, the backend of compiled ones."""

ALONE = {
    "limit, processes, eager": "",
    "limit, processes, compiled": "graph",
    "limit, processes, inductor": "inductor",
}
"""Each rank does its half of the model by itself: what no schedule of these programs goes below.
Their backends."""

os.environ.setdefault(
    "TORCHINDUCTOR_COMPILE_THREADS", "1"
)  # its workers would be children of daemons

_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
_PATIENCE = 60.0
"""Seconds until a rank that does not answer has failed."""


class RankError(Exception):
    """A rank failed, or did not answer."""


class Ranks:
    """The processes of one schedule. Leave the with block to end them."""

    def __init__(self, schedule: str, folder: Path, device: str) -> None:
        """They start with the first step; ``folder`` has the work in ``work.pt``, to do on
        ``device``."""
        self.schedule, self._folder, self._device = schedule, folder, device
        self._store: Any = None
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def _start(self) -> None:
        # A store as torchrun's: who waits at one of a file asks it a hundred times a second.
        self._store = torch.distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False
        )
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            ["torch.distributed.pipelining"]
        )  # imported once, not once a process
        for rank in range(LANES):
            mine, its = context.Pipe()
            task = rank, self.schedule, self._folder, self._device, self._store.port, its
            process = context.Process(target=_main, args=task, daemon=True)
            process.start()
            its.close()
            self._processes.append(process)
            self._pipes.append(mine)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send("end")
        for process in self._processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()

    def step(self) -> Spent:
        """One step on all ranks: from the first start to the last end, by the clock that they
        share."""
        starts, ends, cpus = zip(*self._ask("step"), strict=True)
        return Spent(max(ends) - min(starts), sum(cpus))

    def memory(self) -> float:
        """MiB by which the processes grow in a step: the sum of what each grows at most."""
        return sum(self._ask("memory"))

    def error(self) -> float:
        """How far the gradients of the last step are from the wanted ones."""
        return max(self._ask("error"))

    def _ask(self, request: str) -> list[Any]:
        if not self._pipes:
            self._start()
        for pipe in self._pipes:
            with suppress(BrokenPipeError):  # why, it has said before
                pipe.send(request)
        replies: dict[Connection, Any] = {}
        while missing := [pipe for pipe in self._pipes if pipe not in replies]:
            ready = wait(missing, _PATIENCE)
            if not ready:
                raise RankError(
                    f"ranks {[self._pipes.index(pipe) for pipe in missing]} did not answer "
                    f"{request!r}"
                )
            for pipe in ready:
                replies[pipe] = self._reply(pipe)
        return [replies[pipe] for pipe in self._pipes]

    def _reply(self, pipe: Any) -> Any:
        try:
            reply = pipe.recv()
        except EOFError:
            raise RankError(f"rank {self._pipes.index(pipe)} ended") from None
        if isinstance(reply, str):
            raise RankError(reply)
        return reply


def _main(rank: int, schedule: str, folder: Path, device: str, port: int, pipe: Connection) -> None:
    """One rank, on its share of the cores: do what is asked until the end; what fails goes back as
    text."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    _pin(rank)
    try:
        backend = "gloo" if device == "cpu" else "cuda:nccl,cpu:gloo"
        if device != "cpu":
            _share(rank, device)
        patience = timedelta(seconds=_PATIENCE)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=patience)
        dist.init_process_group(backend, store=store, rank=rank, world_size=LANES, timeout=patience)
        work = Work.load(folder / "work.pt").to(device)
        make = _own if schedule in OWN else _alone if schedule in ALONE else _pipeline
        step, grads, clear = make(rank, schedule, work)
        while (request := pipe.recv()) != "end":
            if request == "step":
                start, cpu = perf_counter(), process_time()
                step()
                work.wait()
                pipe.send((start, perf_counter(), process_time() - cpu))
            elif request == "memory":
                pipe.send(peak(step, clear) if device == "cpu" else float("nan"))
            else:
                pipe.send(
                    max(
                        (work.error(found, layers=layers) for layers, found in grads()), default=0.0
                    )
                )
    except EOFError:
        pass  # the benchmark has ended
    except BaseException as error:
        pipe.send(f"rank {rank}: {type(error).__name__}: {error}")


def _share(rank: int, device: str) -> None:
    """One GPU for all ranks, joined by NCCL over sockets; funcpipe's ranks take each for one of its
    own likewise."""
    from funcpipe._src.devices.stream import StreamBackend

    os.environ |= {"NCCL_HOSTID": str(rank), "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    StreamBackend.identity = lambda self, device: f"{rank} {device}"
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def _pin(rank: int) -> None:
    """As funcpipe does with its lanes: torch's V schedules were 6 and 11 % faster with it on two
    cores."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        share = len(cores) // LANES
        if share:
            os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share])


Pipeline = tuple[Callable[[], None], Callable[[], list[tuple[slice, Any]]], Callable[[], Any]]
"""A step of one rank; its gradients by layers; what drops them."""


def _own(rank: int, name: str, work: Work) -> Pipeline:
    """The pipeline of one rank with `fp.ranks`."""
    import funcpipe as fp

    family, each, backend = OWN[name]
    count, model = LANES * each, work.model(fp.models)
    per = work.depth // count
    parts: list[nn.Sequential] = [model[i * per : (i + 1) * per] for i in range(count)]
    stages, params, state = zip(*map(fp.from_module, parts), strict=True)
    stages = (
        tuple([fp.compile_stage(stage, backend=backend) for stage in stages]) if backend else stages
    )
    schedule = getattr(fp.schedules, family)(count, work.microbatches, num_devices=LANES)
    # torch's stages have memory to receive in for each microbatch.
    plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices=str(work.device), spare_slots=1)
    ranks = fp.ranks(plan, timeout=_PATIENCE).__enter__()
    params, state = fp.place(plan, params, ranks), fp.place(plan, state, ranks)
    grads: Any = None

    def step() -> None:
        nonlocal grads
        with work.casting():
            grads = fp.run(
                plan, params, (work.x, work.target), state=state, executor=ranks, threads_per_lane=1
            ).grads

    def found() -> list[tuple[slice, Any]]:
        return [
            (slice(i * per, (i + 1) * per), [grads[i][key] for key in params[i]])
            for i in ranks.stages
        ]

    def clear() -> None:
        nonlocal grads
        grads = None

    return step, found, clear


def _alone(rank: int, name: str, work: Work) -> Pipeline:
    """A rank that does its part of the model with inputs that lie ready; what it gives has no
    gradients to compare."""
    import funcpipe as fp

    model, per = work.model(fp.models), work.depth // LANES
    with torch.no_grad(), work.casting():
        chunks = work.x.chunk(work.microbatches)
        x = torch.cat([model[: rank * per](chunk) for chunk in chunks]) if rank else work.x
        target = (
            work.target
            if rank == LANES - 1
            else torch.cat([model[:per](chunk) for chunk in chunks])
        )
    stage, params, state = fp.from_module(model[rank * per : (rank + 1) * per])
    stage = fp.compile_stage(stage, backend=ALONE[name]) if ALONE[name] else stage
    schedule = fp.schedules.one_f_one_b(1, work.microbatches)
    plan = fp.make_plan([stage], schedule, loss=F.mse_loss, devices=str(work.device))

    def step() -> None:
        with work.casting():
            fp.run(
                plan, (params,), (x, target), state=(state,), executor="serial", threads_per_lane=1
            )

    return step, list, lambda: None


def _pipeline(rank: int, name: str, work: Work) -> Pipeline:
    """The pipeline of one rank with torch's schedules."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    each = SCHEDULES[name]
    count, model = LANES * each, work.model()
    per = work.depth // count
    second = count - 1 - rank if name in _V_SHAPED else rank + LANES
    parts: dict[int, nn.Module] = {i: model[i * per : (i + 1) * per] for i in (rank, second)[:each]}
    stages = [PipelineStage(part, i, count, work.device) for i, part in parts.items()]
    made: Any = get_schedule_class(name)
    schedule = made(
        stages[0] if each == 1 else stages, n_microbatches=work.microbatches, loss_fn=F.mse_loss
    )
    inputs = (work.x,) if 0 in parts else ()
    target: dict[str, Any] = {"target": work.target} if count - 1 in parts else {}

    def step() -> None:
        for part in parts.values():
            part.zero_grad()
        losses: dict[str, Any] = {"losses": []} if target else {}
        with work.casting():
            schedule.step(*inputs, **target, **losses, return_outputs=False)

    def grads() -> list[tuple[slice, Any]]:
        return [(slice(i * per, (i + 1) * per), gradients(part)) for i, part in parts.items()]

    return step, grads, lambda: [part.zero_grad() for part in parts.values()]
