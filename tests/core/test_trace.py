"""Traces for Perfetto: rows with the names of their stages, and arrows that join events that are
there."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import funcpipe as fp
from funcpipe._src.data.program import Run, Send
from funcpipe._src.data.result import Timeline

SCHEDULES = {
    "1F1B": fp.schedules.one_f_one_b(4, 3),
    "looped": fp.schedules.interleaved(4, 3, num_devices=2),
    "split backwards": fp.schedules.zero_bubble(4, 4),
    "V": fp.schedules.zbv(4, 3),
    "remat": fp.schedules.remat(fp.schedules.one_f_one_b(4, 3)),
    "one device": fp.schedules.fill_drain(4, 2, num_devices=1),
}


@fp.stage(stash=["early"])
def stem(params: Any, x: Any) -> Any:
    """Stashes what two others pop."""
    return fp.Out(x * params, stash={"early": x * params})


@fp.stage
def body(params: Any, x: Any) -> Any:
    """Plain."""
    return x * params


@fp.stage(pop=["early"])
def neck(params: Any, x: Any, *, skips: Any) -> Any:
    """Pops."""
    return x * params + skips["early"]


@fp.stage(pop=["early"])
def head(params: Any, x: Any, *, skips: Any) -> Any:
    """Pops, too."""
    return x * params + skips["early"]


def plan_of(schedule: fp.Schedule) -> fp.Plan:
    return fp.make_plan([stem, body, neck, head], schedule, loss=F.mse_loss, devices="cpu")


def measured(schedule: fp.Schedule) -> Timeline:
    params = tuple(torch.tensor(1.0, requires_grad=True) for _ in range(4))
    rows = torch.ones(schedule.num_microbatches, 2)
    timeline = fp.run(plan_of(schedule), params, (rows, rows), record=True).timeline
    assert timeline is not None
    return timeline


def simulated(schedule: fp.Schedule) -> Timeline:
    return fp.simulate(plan_of(schedule), fp.Cost(comm=0.3))


def pairs(timeline: Timeline) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The arrows of a trace: where each begins and where it ends."""
    events = json.loads(json.dumps(timeline.chrome_trace()))["traceEvents"]
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert 2 * len(starts) == sum(event["ph"] in "stf" for event in events), (
        "each has a number of its own"
    )
    return [(starts[number], ends[number]) for number in starts]


def bound(timeline: Timeline, end: dict[str, Any]) -> str:
    """The event of its row that is open at its time: what Perfetto binds it to."""
    events = [event for event in timeline.chrome_trace()["traceEvents"] if event["ph"] == "X"]
    found = [
        e["name"]
        for e in events
        if e["tid"] == end["tid"] and e["ts"] <= end["ts"] < e["ts"] + e["dur"]
    ]
    assert len(found) == 1, (end, found)
    return found[0]


@pytest.mark.parametrize("make", [measured, simulated])
@pytest.mark.parametrize("name", SCHEDULES)
def test_arrows_are_what_the_program_sends(name, make):
    """From the action that makes a value to one that reads it, on every lane that it is sent to; no
    other crosses."""
    timeline, program = make(SCHEDULES[name]), plan_of(SCHEDULES[name]).program
    sent: Counter[tuple[str, int]] = Counter()
    for lane in program.lanes:
        action = ""
        for instruction in lane.instructions:
            if isinstance(instruction, Run):
                action = str(lane.action(instruction))
            elif isinstance(instruction, Send):
                sent[action, instruction.to] += 1
    arrows = pairs(timeline)
    crossing = {
        (bound(timeline, start), start["name"], end["tid"])
        for start, end in arrows
        if start["cat"] == "copy"
    }
    assert sent == Counter((action, lane) for action, _, lane in crossing)


@pytest.mark.parametrize("make", [measured, simulated])
@pytest.mark.parametrize("name", SCHEDULES)
def test_arrows_join_events_that_are_there(name, make):
    """Forward in time, the same microbatch, and the one that reads it needs it."""
    timeline = make(SCHEDULES[name])
    for start, end in pairs(timeline):
        source, target = (fp.Action.parse(bound(timeline, place)) for place in (start, end))
        assert source.microbatch == target.microbatch
        assert start["ts"] <= end["ts"]
        assert (start["name"], start["cat"], start["pid"]) == (end["name"], end["cat"], end["pid"])
        assert end["bp"] == "e"
        if "skip" not in start["name"]:
            assert abs(source.stage - target.stage) == 1
        assert (source.kind is fp.Kind.F) == (start["name"] in ("act", "skip early"))


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_skip_has_its_arrows(name):
    """There, and its gradients back, from each stage that pops it: on one device too."""
    timeline = simulated(SCHEDULES[name])
    count = SCHEDULES[name].num_microbatches
    names = Counter(start["name"] for start, _ in pairs(timeline))
    assert names["skip early"] == names["gradient of skip early"] == 2 * count
    if name == "one device":
        assert set(names) == {"skip early", "gradient of skip early"}
        assert {start["cat"] for start, _ in pairs(timeline)} == {"skip"}


def test_rows_and_events_have_the_names_of_stages():
    timeline = simulated(SCHEDULES["looped"])
    events = timeline.chrome_trace()["traceEvents"]
    rows = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert rows == ["device 0: stem, neck", "device 1: body, head"]
    named = {
        event["args"]["stage"]: event["args"]["name"] for event in events if event["ph"] == "X"
    }
    assert named == {0: "stem", 1: "body", 2: "neck", 3: "head"}


def test_a_schedule_alone_has_arrows_without_names():
    timeline = fp.simulate(fp.schedules.one_f_one_b(2, 2))
    assert [start["name"] for start, _ in pairs(timeline)] == ["act", "act", "gradient", "gradient"]
    assert (
        "name"
        not in next(
            event for event in timeline.chrome_trace()["traceEvents"] if event["ph"] == "X"
        )["args"]
    )


def test_names_and_arrows_are_labels():
    """Timelines are equal without them; copies have them."""
    timeline = simulated(SCHEDULES["1F1B"])
    bare = replace(timeline, stages=(), arrows=())
    assert bare == timeline
    assert pairs(bare) == []
    assert pairs(pickle.loads(pickle.dumps(timeline))) == pairs(timeline)


def test_slices_have_arrows_of_their_own():
    timeline = fp.simulate(fp.schedules.one_f_one_b(2, 2, num_slices=2))
    assert len(pairs(timeline)) == 2 * 2 * 2
    sources = {bound(timeline, start) for start, _ in pairs(timeline)}
    assert {"0F0.0", "0F0.1", "1B1.0"} <= sources
