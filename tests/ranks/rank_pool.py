"""Processes that are kept and do one task after the other, all the same one at a time."""

import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
IMPORTED_ONCE = [
    "pytest",
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "funcpipe",
    "funcpipe.testing",
]
"""What the tasks need: the server that forks the processes has it, so no process imports it."""


def within(seconds: float) -> float:
    """A limit in seconds on a machine that is free; one that does other things too gets twice as
    long."""
    beside_others = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1
    return seconds * (
        2.0 if beside_others or max(os.getloadavg()[:2]) > 1 + (os.cpu_count() or 1) else 1.0
    )


class Failed(NamedTuple):
    """What a task raised in a process."""

    kinds: tuple[str, ...]
    text: str
    rank: Any
    notes: tuple[str, ...]
    seconds: float
    trace: str

    def is_a(self, kind: type) -> bool:
        return kind.__name__ in self.kinds


class Pool:
    """``size`` processes with one process group; the store lives in this one."""

    def __init__(self, size: int) -> None:
        self.size, self.whole = size, True
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED_ONCE)
        self.ends, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, size, self.store.port, there), daemon=True
            )
            process.start()
            there.close()
            self.ends.append(here)
            self.processes.append(process)

    def run(self, task: str, *args: Any, seconds: float = 60.0) -> list[Any]:
        """What a task of `rank_tasks` (or of "module.task") returns, or how it `Failed`, by rank;
        None of those that are dead or hang."""
        for end in self.ends:
            end.send((task, args))
        return self.results(seconds)

    def results(self, seconds: float) -> list[Any]:
        """The results of the task that runs."""
        deadline, results = time.monotonic() + seconds, []
        for end in self.ends:
            try:
                results.append(
                    end.recv() if end.poll(max(0.0, deadline - time.monotonic())) else None
                )
            except (EOFError, OSError):
                results.append(None)
        self.whole &= None not in results
        return results

    def all(self, task: str, *args: Any, seconds: float = 60.0) -> list[Any]:
        """The results of a task that does not fail."""
        results = self.run(task, *args, seconds=seconds)
        wrong = [
            f"rank {rank}: {self._end_of(rank) if each is None else each.trace}"
            for rank, each in enumerate(results)
            if each is None or isinstance(each, Failed)
        ]
        assert not wrong, "\n".join(wrong)
        return results

    def _end_of(self, rank: int) -> str:
        process = self.processes[rank]
        process.join(1.0)
        return "hangs" if process.is_alive() else f"its process ended with {process.exitcode}"

    def signal(self, rank: int, number: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def end(self) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
            process.join()
        for end in self.ends:
            end.close()


def _serve(rank: int, size: int, port: int, pipe: Any) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "reported")]
    torch.set_num_threads(1)
    faulthandler.enable()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    import device_tasks
    import rank_tasks

    while True:
        try:
            task, args = pipe.recv()
        except (EOFError, OSError):
            return
        began = time.monotonic()
        try:
            module = (
                device_tasks
                if hasattr(device_tasks, task) and not hasattr(rank_tasks, task)
                else rank_tasks
            )
            name, _, function = task.rpartition(".")
            module = importlib.import_module(name) if name else module
            result = getattr(module, function)(rank, size, *args)
        except BaseException as error:
            kinds = tuple(kind.__name__ for kind in type(error).__mro__)
            notes = tuple(getattr(error, "__notes__", ()))
            trace = traceback.format_exc()
            result = Failed(
                kinds,
                str(error),
                getattr(error, "rank", None),
                notes,
                time.monotonic() - began,
                trace,
            )
        pipe.send(result)
