"""``ranges=True``: a real profiler sees every action of every lane by its name; without it nothing
is recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

import funcpipe as fp
from funcpipe._src.devices.ranges import named_range
from funcpipe._src.engine import execute

pytestmark = pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
ALL_THREADS = _ExperimentalConfig(profile_all_threads=True)


def product(w: Any, x: Any) -> Any:
    """One matrix product, that profilers show as aten::mm."""
    return x @ w


STAGES = [fp.stage(product, name="first"), fp.stage(product, name="last")]
PLAN = fp.make_plan(STAGES, fp.schedules.one_f_one_b(2, 3), loss=F.mse_loss, devices="cpu")
PARAMS = (torch.eye(8), torch.eye(8))
BATCH = (torch.ones(6, 8), torch.ones(6, 8))
EVERY = sorted(str(action) for order in PLAN.schedule.orders for action in order)


def profiled(work: Callable[[], Any], config: Any = ALL_THREADS) -> profile:
    """A profile of some work, on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
        work()
    return profiler


def ranges(profiler: profile) -> list[Any]:
    """The events that have the name of an action, by start."""
    events = [event for event in profiler.events() or [] if event.name.startswith("action ")]
    return sorted(events, key=lambda event: event.time_range.start)


def names(profiler: profile) -> list[str]:
    return [event.name.removeprefix("action ") for event in ranges(profiler)]


def test_every_action_of_every_lane_is_seen_in_its_thread():
    """A row for each lane, in the lane's order, and one row alone."""
    found = ranges(profiled(lambda: fp.run(PLAN, PARAMS, BATCH, executor="threads", ranges=True)))
    threads: dict[int, list[str]] = {}
    for event in found:
        threads.setdefault(event.thread, []).append(event.name.removeprefix("action "))
    assert sorted(threads.values()) == [
        [str(action) for action in order] for order in PLAN.schedule.orders
    ]


def test_names_of_all_stages_survive_the_profiler():
    """torch shows a name that looks like a C++ symbol without its length: 2F0 would be F0."""
    stages = [fp.stage(lambda p, x: x * p["w"])] * 12
    params = tuple({"w": torch.ones(())} for _ in stages)
    plan = fp.make_plan(stages, fp.schedules.fill_drain(12, 11, backward=False), devices="cpu")
    work = lambda: fp.run(plan, params, torch.ones(11), executor="serial", ranges=True)
    wanted = sorted(f"{stage}F{number}" for stage in range(12) for number in range(11))
    assert sorted(names(profiled(work))) == wanted


def test_threads_that_are_kept_are_seen():
    """They began before the profiler did."""
    with fp.lanes(PLAN) as lanes:
        fp.run(PLAN, PARAMS, BATCH, executor=lanes)
        found = names(profiled(lambda: fp.run(PLAN, PARAMS, BATCH, executor=lanes, ranges=True)))
    assert sorted(found) == EVERY


def test_serial_ones_are_seen_by_any_profiler_in_plan_order():
    profiler = profiled(lambda: fp.run(PLAN, PARAMS, BATCH, executor="serial", ranges=True), None)
    program = PLAN.program
    assert names(profiler) == [str(program.action(code)) for code in program.order]


def test_a_profiler_of_one_thread_does_not_see_lanes():
    """Why the how-to says what to switch on. Should torch change this, the page can be shorter."""
    assert (
        names(profiled(lambda: fp.run(PLAN, PARAMS, BATCH, executor="threads", ranges=True), None))
        == []
    )


def test_operations_lie_inside_of_their_actions():
    profiler = profiled(lambda: fp.run(PLAN, PARAMS, BATCH, executor="threads", ranges=True))
    products = [event for event in profiler.events() or [] if event.name == "aten::mm"]
    forwards = [event for event in ranges(profiler) if "F" in event.name]
    assert len(forwards) == 6
    for forward in forwards:
        inside = [
            event
            for event in products
            if event.thread == forward.thread
            and forward.time_range.start <= event.time_range.start
            and event.time_range.end <= forward.time_range.end
        ]
        assert len(inside) == 1


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_off_records_nothing_and_wraps_nothing(executor, monkeypatch):
    """The steps of a lane are the very ones without the option, so it costs a run one look."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("nobody asked for ranges")

    monkeypatch.setattr(execute, "ranged", refuse)
    assert names(profiled(lambda: fp.run(PLAN, PARAMS, BATCH, executor=executor))) == []


@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("compiled", [False, True])
def test_bits_are_the_same(executor, compiled):
    stages = [fp.compile_stage(part) if compiled else part for part in STAGES]
    plan = fp.make_plan(stages, fp.schedules.zero_bubble(2, 3), loss=F.mse_loss, devices="cpu")
    plain, seen = (
        fp.run(plan, PARAMS, BATCH, executor=executor, ranges=on, record=True)
        for on in (False, True)
    )
    assert torch.equal(plain.loss, seen.loss)
    assert all(map(torch.equal, fp.leaves(plain.grads), fp.leaves(seen.grads)))
    assert seen.timeline is not None
    assert len(seen.timeline.spans) == len(plan.program.order)


def test_both_halves_of_a_vjp():
    plan = fp.make_plan(STAGES, fp.schedules.fill_drain(2, 3), devices="cpu")

    def work() -> None:
        result, pullback = fp.vjp(plan, PARAMS, BATCH[0], ranges=True)
        pullback(torch.ones_like(result.outputs))

    assert sorted(names(profiled(work))) == sorted(
        str(a) for order in plan.schedule.orders for a in order
    )
    assert names(profiled(lambda: fp.vjp(plan, PARAMS, BATCH[0]))) == []


def test_a_pipe():
    def pipe(on: bool) -> fp.Pipe:
        return fp.Pipe(
            nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
            chunks=2,
            devices=["cpu", "cpu"],
            ranges=on,
        )

    def work(on: bool) -> None:
        pipe(on)(BATCH[0]).sum().backward()

    found = names(profiled(lambda: work(True)))
    assert {"0F0", "1F1", "0B0", "1B1"} <= set(found)
    assert names(profiled(lambda: work(False))) == []
    with torch.no_grad():
        assert sorted(names(profiled(lambda: pipe(True)(BATCH[0])))) == ["0F0", "0F1", "1F0", "1F1"]


@pytest.mark.parametrize("thread", [True, False])
def test_an_overlap(thread):
    """Its rows are ranges with the number of the batch: the source, each stage, the fold."""

    def decode(x: int) -> int:
        return x + 1

    def work(on: bool) -> None:
        stages = [decode, fp.batches.Fold(lambda state, x: (state + x, x), 0, name="step")]
        assert list(fp.batches.overlap([1, 2], stages, thread=thread, ranges=on)) == [2, 3]

    found = [event.name for event in profiled(lambda: work(True)).events() or []]
    expected = {f"{row} {batch}" for row in ("decode", "step") for batch in (0, 1)}
    assert expected | {"source 0", "source 1"} <= set(found)
    assert not expected & {event.name for event in profiled(lambda: work(False)).events() or []}


def test_a_stage_that_raises_closes_its_range():
    """What was under way has an end, and the error is the one without ranges."""

    def fail(w: Any, x: Any) -> Any:
        raise KeyError("missing")

    plan = fp.make_plan(
        [STAGES[0], fp.stage(fail)], fp.schedules.one_f_one_b(2, 3), loss=F.mse_loss, devices="cpu"
    )
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with pytest.raises(KeyError, match="missing"):
            fp.run(plan, PARAMS, BATCH, executor="serial", ranges=True)
        with torch.profiler.record_function("afterwards"):
            pass
    after = next(event for event in profiler.events() or [] if event.name == "afterwards")
    assert after.cpu_parent is None
    assert names(profiler)[-1] == "1F0"


PROFILED_ALONE = """
import torch, funcpipe as fp, tests.engine.test_ranges as page
with fp.lanes(page.PLAN) as lanes:
    run = lambda: fp.run(page.PLAN, page.PARAMS, page.BATCH, executor=lanes, ranges=True)
    run()
    page.profiled(run).export_chrome_trace("trace.json")
"""


def test_exported_traces_have_the_names_of_lanes(tmp_path):
    """Perfetto shows a row ``lane 0``. In a process of its own: torch's profiler notes threads once
    in each."""
    root = str(Path(__file__).parent.parent.parent)
    command = [sys.executable, "-c", PROFILED_ALONE]
    subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        check=True,
        capture_output=True,
    )
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for lane in (0, 1):
        threads = {event["tid"] for event in events if event.get("name") == f"action {lane}F0"}
        rows = {
            event["tid"]
            for event in events
            if f"(lane {lane})" in str(event.get("args", {}).get("name"))
        }
        assert len(threads) == 1
        assert threads == rows


def test_on_a_cuda_device_they_are_nvtx_ranges_too(monkeypatch):
    """Without a GPU: what is called, and that a range that is left by an error is closed."""
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: calls.append(f"push {name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    with pytest.raises(ZeroDivisionError), named_range("2F3", torch.device("cuda", 1)):
        _ = calls.append("work") or 1 / 0
    assert calls == ["push 2F3", "work", "pop"]
    with named_range("2F3", torch.device("cpu")):
        pass
    assert len(calls) == 3


def test_ranges_is_true_or_false():
    with pytest.raises(fp.PlanError, match="ranges is True or False; got 'nvtx'"):
        fp.run(PLAN, PARAMS, BATCH, ranges="nvtx")  # pyright: ignore[reportArgumentType]


def test_the_system_knows_the_threads_by_name():
    """For profilers, debuggers and htop; a name of Python alone is none for them."""
    found: dict[str, str] = {}

    def note(w: Any, x: Any) -> Any:
        found[threading.current_thread().name] = Path("/proc/thread-self/comm").read_text().strip()
        return x * w

    plan = fp.make_plan(
        [fp.stage(note)] * 2, fp.schedules.one_f_one_b(2, 2), loss=F.mse_loss, devices="cpu"
    )
    fp.run(plan, (torch.ones(8), torch.ones(8)), BATCH, executor="threads")
    assert found == {"funcpipe lane 0": "lane 0", "funcpipe lane 1": "lane 1"}
