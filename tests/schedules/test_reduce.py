"""`reduce_grads`: one G a stage, straight after its last backward; what it costs, and what may not
stand around it."""

from __future__ import annotations

import pytest
import torch
from common import cpu_plan

import funcpipe as fp
from funcpipe import schedules as S
from funcpipe._src.data.kinds import ADDS, Kind


@pytest.mark.parametrize("family", [S.one_f_one_b, S.interleaved, S.zbv])
def test_it_stands_straight_after_the_last_that_adds(family):
    schedule = S.reduce_grads(family(4, 5, num_devices=2))
    S.check(schedule)
    for stage, device in enumerate(schedule.device_of):
        order = schedule.orders[device]
        at = order.index(fp.Action(Kind.G, stage))
        assert order[at - 1].stage == stage
        assert order[at - 1].kind in ADDS
        assert not [
            action for action in order[at:] if action.stage == stage and action.kind in ADDS
        ]
    assert schedule == fp.Schedule.parse(str(schedule)) == S.from_json(S.to_json(schedule))
    assert schedule.num_microbatches == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0G 0B0", "0B0 on device 0 comes after 0G, which needs all gradients"),
        ("0F0 0I0 0G 0W0", "0W0 on device 0 comes after 0G"),
        ("0F0 0F1 0B0 0G 0B1", "0B1 on device 0 comes after 0G"),
        ("0F0 0B0 0G 0G", "0G on device 0 appears twice"),
        ("0F0 0G", "0B0 is missing"),
    ],
)
def test_what_adds_after_it_is_refused(text, message):
    with pytest.raises(fp.ScheduleError, match=message):
        S.check(fp.Schedule.parse(text))


def test_it_has_no_microbatch():
    orders = ((*fp.Schedule.parse("0F0 0F1 0B0 0B1").orders[0], fp.Action(Kind.G, 0, 1)),)
    with pytest.raises(
        fp.ScheduleError, match=r"0G on device 0 has a microbatch \(1\), but runs once per batch"
    ):
        S.check(fp.Schedule(orders))


def test_wrong_uses_are_refused():
    schedule = S.one_f_one_b(2, 2)
    with pytest.raises(fp.ScheduleError, match="has G already"):
        S.reduce_grads(S.reduce_grads(schedule))
    with pytest.raises(
        fp.ScheduleError, match="has no backwards, so there are no gradients to reduce"
    ):
        S.reduce_grads(schedule.forwards())
    with pytest.raises(fp.ScheduleError, match=r"fp.schedules.reduce_grads\(plan.schedule\)"):
        S.reduce_grads("0F0")


def test_the_device_goes_on_while_it_runs():
    """Two stages of one device: the first G is hidden behind the backwards of the other stage, the
    last one is not."""
    plain = S.interleaved(4, 4, num_devices=2)
    schedule, cost = S.reduce_grads(plain), fp.Cost(reduce=1.0)
    timeline = fp.simulate(schedule, cost)
    assert timeline.makespan == fp.simulate(plain).makespan + 1
    assert timeline.busy == fp.simulate(plain).busy
    assert (
        fp.simulate(schedule).makespan == fp.simulate(plain).makespan
    )  # by default it takes no time
    assert [span.action.kind for span in timeline.spans].count(Kind.G) == 4
    assert timeline.cost().reduce == (1.0,) * 4


def test_one_link_reduces_one_stage_after_the_other():
    schedule = fp.Schedule.parse("0F0 1F0 1B0 1G 0B0 0G")
    spans = {str(span.action): span for span in fp.simulate(schedule, fp.Cost(reduce=5.0)).spans}
    assert (spans["1G"].start, spans["1G"].end) == (4.0, 9.0)
    assert (spans["0B0"].start, spans["0G"].start) == (4.0, 9.0)


def test_pictures_and_traces_show_it():
    timeline = fp.simulate(S.reduce_grads(S.one_f_one_b(2, 2)), fp.Cost(reduce=2.0))
    drawing = fp.draw(timeline)
    assert "G reduce" in str(drawing)
    assert "0G reduce, stage 0: " in drawing.svg()
    events = timeline.chrome_trace()["traceEvents"]
    (event,) = [event for event in events if event["name"] == "0G"]
    assert event["args"] == {"stage": 0, "kind": "G"}
    assert "device 0 network" in [
        event["args"].get("name") for event in events if event["ph"] == "M"
    ]


def test_passes_keep_it_last():
    schedule = S.reduce_grads(S.one_f_one_b(2, 4))
    for other in (
        S.delay(schedule, group=3),
        S.remat(schedule),
        S.offload(schedule),
        schedule.first(2),
    ):
        S.check(other)
        assert [str(order[-1]) for order in other.orders] == ["0G", "1G"]


@pytest.mark.parametrize("change", [S.reduce_grads, S.gather_params, S.step_params])
def test_torch_adds_its_own(change):
    plain = S.zero_bubble(2, 2)
    assert S.to_torch_csv(change(plain)) == S.to_torch_csv(plain)


def test_torch_has_no_moves():
    with pytest.raises(fp.ScheduleError, match="it has O and L"):
        S.to_torch_csv(S.offload(S.fill_drain(2, 4)))


def test_the_timeline_of_a_run_shows_it():
    plan = cpu_plan([fp.stage(lambda p, x: x * p)] * 3, S.reduce_grads(S.zero_bubble(3, 3)))
    params = tuple(torch.ones((), requires_grad=True) for _ in range(3))
    result = fp.run(plan, params, (torch.ones(6, 4), torch.zeros(6, 4)), record=True)
    assert {str(span.action) for span in result.timeline.spans} >= {"0G", "1G", "2G"}
