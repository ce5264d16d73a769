"""Row 26: 1,000 runs, every tenth with a fault: threads, file descriptors, memory and objects stay
as they were."""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
from dataclasses import replace

import pytest
import torch.nn.functional as F
from common import assert_same_result
from fault_rig import SCHEDULES, Boom, Rig
from watch import num_tensors

import funcpipe as fp
from funcpipe.testing import FaultAt

RUNS = 1000
PAGE = os.sysconf("SC_PAGE_SIZE")


class Faulty:
    """A rig with one plan for each way to fail; each plan runs well too, while nothing is armed."""

    def __init__(self) -> None:
        self.rig = rig = Rig()
        self.options: dict[str, dict] = {"nan": {"check": "finite"}, "timeout": {"timeout": 0.2}}
        schedule = SCHEDULES[0]
        spoil = lambda tensor: tensor * float("nan") if rig.armed else None
        self.plans = {
            "F": rig.plan(schedule, rig.fault(1, 1, "F")),
            "B": rig.plan(schedule, rig.fault(1, 1, "B")),
            "loss": rig.plan(schedule, loss=self.loss),
            "commit": fp.make_plan(self.committing(), schedule, loss=F.mse_loss, devices="cpu"),
            "nan": rig.plan(schedule, FaultAt(1, 1, "F", error=spoil)),
            "keyboard": rig.plan(schedule, rig.fault(1, 2, "F", KeyboardInterrupt)),
            "timeout": rig.plan(schedule, FaultAt(1, 1, "B", error=self.sleep)),
        }
        self.expected = {
            "nan": fp.NotFiniteError,
            "keyboard": KeyboardInterrupt,
            "timeout": fp.RunTimeout,
        }

    def loss(self, y, target):
        self.rig.strike()
        return F.mse_loss(y, target)

    def sleep(self, tensor):
        end = time.monotonic() + 30
        while self.rig.armed and time.monotonic() < end:
            time.sleep(0.005)

    def committing(self):
        """The rig's stages; the middle one's merge of statistics fails."""
        middle = self.rig.stages[1]

        def commit(state, stats):
            self.rig.strike()
            return middle.commit(state, stats)

        return (self.rig.stages[0], replace(middle, commit=commit), self.rig.stages[2])

    def run(self, way, executor, *, fault):
        """One run; it fails as it must, or gives the right numbers."""
        rig, plan = self.rig, self.plans[way]
        rig.armed = fault
        go = functools.partial(
            rig.run, plan, executor, **(self.options.get(way, {}) if fault else {})
        )
        try:
            if not fault:
                assert_same_result(rig.expected, go())
                return
            with pytest.raises(self.expected.get(way, Boom)):
                go()
        finally:
            rig.armed = False
            rig.forget()


def measures():
    """Threads, open files, tensors, objects, bytes of memory."""
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * PAGE
    return (
        threading.active_count(),
        len(os.listdir("/proc/self/fd")),
        num_tensors(),
        len(gc.get_objects()),
        resident,
    )


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc")
def test_a_thousand_runs_leave_no_trace():
    """Fresh threads, kept lanes and none in turn; F, B, loss, commit, NaN, KeyboardInterrupt,
    timeout in turn."""
    faulty = Faulty()
    ways = list(faulty.plans)
    with fp.lanes(faulty.plans["F"]) as lanes:

        def several(start, stop):
            for number in range(start, stop):
                executor = ("threads", "serial", lanes)[number % 3]
                faulty.run(ways[(number // 10) % len(ways)], executor, fault=number % 10 == 9)

        several(0, 210)  # each way on each executor, so that what is made once is made
        faulty.run(
            "F", lanes, fault=False
        )  # a failed run ends its lanes, the next starts them again
        threads, files, tensors, objects, resident = measures()
        several(0, RUNS)
        faulty.run("F", lanes, fault=False)
        after = measures()
    assert threads == after[0]
    assert files == after[1]
    assert tensors == after[2]
    assert abs(after[3] - objects) < 200
    assert after[4] - resident < 32 * 2**20
