"""Worker threads: jobs in order with the caller's context variables, interruption inside of a job
only, Python's end."""

from __future__ import annotations

import contextvars
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from funcpipe._src.engine.worker import Worker, compute_with, end_all

ROOT = Path(__file__).parent.parent.parent
NAME = contextvars.ContextVar("name", default="nobody")


def started(name="funcpipe test") -> Worker:
    worker = Worker(name)
    worker.start()
    return worker


def test_jobs_are_done_in_order_and_see_the_callers_variables():
    done = []
    worker = started()
    for number in range(3):
        token = NAME.set(f"caller {number}")
        worker.give(lambda: done.append((NAME.get(), NAME.set("job"))[0]))
        NAME.reset(token)
    worker.end()
    assert done == ["caller 0", "caller 1", "caller 2"]
    assert not worker.alive


def test_an_interruption_ends_the_job_and_not_the_worker():
    begun, after = threading.Event(), []

    def endless():
        begun.set()
        while True:
            time.sleep(0.001)

    worker = started()
    worker.interrupt()  # it does nothing: there is no job
    worker.give(endless)
    assert begun.wait(10)
    worker.interrupt()
    worker.give(lambda: after.append("next"))
    worker.end(10)
    assert after == ["next"]
    assert not worker.alive


def test_a_worker_may_end_itself_and_one_that_never_began():
    worker = started()
    worker.give(worker.end)
    end_all([worker], None)
    assert not worker.alive
    end_all([Worker("funcpipe never"), worker], 0.1)


def test_all_end_within_one_time():
    release = threading.Event()
    workers = [started() for _ in range(4)]
    for worker in workers:
        worker.give(lambda: release.wait(20))
    start = time.monotonic()
    end_all(workers, 0.2)
    assert time.monotonic() - start < 0.7
    assert all(worker.alive for worker in workers)
    release.set()
    end_all(workers, None)


def test_the_number_of_threads_is_the_workers_own():
    before, seen = torch.get_num_threads(), []
    worker = started()
    worker.give(lambda: compute_with(before + 1))
    worker.give(lambda: seen.append(torch.get_num_threads()))
    worker.end()
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


def test_pythons_end_stops_those_that_say_how_and_waits():
    code = """
import threading, time
from funcpipe._src.engine.worker import Worker
stop = threading.Event()
def job():
    stop.wait(20)
    time.sleep(0.2)
    print("done", flush=True)
worker = Worker("w", stop.set, 10.0)
worker.start()
worker.give(job)
Worker("idle").start()
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    end = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=100
    )
    assert (end.returncode, end.stdout, end.stderr) == (0, "done\n", "")
