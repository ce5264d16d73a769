"""`gather_params`: U in time for what a stage computes; what it costs, how many stages are whole,
what may not stand."""

from __future__ import annotations

import contextlib

import pytest
import torch.nn.functional as F

import funcpipe as fp
from funcpipe import schedules as S
from funcpipe._src.data.kinds import MOVES, Kind

FAMILIES = [S.one_f_one_b, S.interleaved, S.zbv, S.looped_bfs]


def whole_stages(order: tuple[fp.Action, ...]) -> list[set[int]]:
    """Of each computing action, the stages that are whole meanwhile: from their U to their last use
    before the next."""
    uses: dict[tuple[int, int], list[int]] = {}
    time: dict[int, int] = {}
    for at, (kind, stage, number, _) in enumerate(order):
        if kind is Kind.U:
            time[stage] = number
            uses[stage, number] = [at]
        elif kind not in MOVES:
            uses[stage, time[stage]].append(at)
    return [
        {stage for (stage, _), places in uses.items() if places[0] <= at <= places[-1]}
        for at, action in enumerate(order)
        if action.kind not in MOVES
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("whole", [None, 1, 2])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_no_more_are_whole_than_are_allowed(family, whole, ahead):
    plain = family(4, 8, num_devices=2)
    schedule = S.gather_params(plain, whole=whole, ahead=ahead)
    S.check(schedule)
    assert plain.orders == tuple(
        tuple(a for a in order if a.kind is not Kind.U) for order in schedule.orders
    )
    assert (plain.num_stages, plain.num_microbatches) == (
        schedule.num_stages,
        schedule.num_microbatches,
    )
    for order in schedule.orders:
        stages = {action.stage for action in order}
        assert all(
            action.stage in held
            for action, held in zip(compute(order), whole_stages(order), strict=True)
        )
        if ahead == 0:
            assert max(map(len, whole_stages(order))) <= (whole or len(stages))
        if whole is None:
            assert sorted(stages) == sorted(
                action.stage for action in order if action.kind is Kind.U
            )
    assert schedule == fp.Schedule.parse(str(schedule)) == S.from_json(S.to_json(schedule))


def compute(order):
    return [action for action in order if action.kind not in MOVES]


def test_breadth_first_gathers_each_stage_twice():
    """Once for its forwards and once for its backwards (arXiv 2211.05953); the last stage of a
    device only once."""
    schedule = S.gather_params(S.looped_bfs(8, 4, num_devices=2), whole=1)
    times = [sum(action.kind is Kind.U for action in order) for order in schedule.orders]
    assert [7, 7] == times


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0 0U0 0B0", "0U0 on device 0 comes after 0F0, which needs the parameters"),
        ("0U1 0F0 0B0 0F1 0B1", "0U1 on device 0 is the U number 0 of its stage: write 0U0"),
        ("0U0 0F0 0U0 0B0", "0U0 on device 0 is the U number 1 of its stage: write 0U1"),
        (
            "0U0 0F0 0B0 0G 0U1",
            "0U1 on device 0 comes after 0G, after which its stage does not compute",
        ),
        ("0U0", "0U0 on device 0 is not needed: stage 0 does not compute after it; leave it out"),
        (
            "0U0 0U1 0F0 0B0 0F1 0B1",
            "0U0 on device 0 is not needed: stage 0 does not compute before 0U1; leave it out",
        ),
        (
            "0U0 0F0 0F1 0U1",
            "0U1 on device 0 is not needed: stage 0 does not compute after it; leave it out",
        ),
        (
            "0U0 0F0 0F1 0B0 0B1 0U1 0G",
            "0U1 on device 0 is not needed: stage 0 does not compute after it; leave it out",
        ),
    ],
)
def test_what_is_not_legal(text, message):
    with pytest.raises(fp.ScheduleError, match=message):
        S.check(fp.Schedule.parse(text))


@pytest.mark.parametrize(
    ("text", "count", "fewer"),
    [
        ("0U0 0F0 0B0 0F1 0B1 0U1 0F2 0B2 0F3 0B3", 2, "0U0 0F0 0B0 0F1 0B1"),
        ("0U0 0F0 0F1 0F2 0U1 0F3 0U2 0B0 0B1 0B2 0B3 0G", 3, "0U0 0F0 0F1 0F2 0U1 0B0 0B1 0B2 0G"),
        ("0U0 0F2 0U1 0F0 0F1 0U2 0F3", 2, "0U0 0F0 0F1"),
        ("0U0 0F0 0F1 0U1 0B0 0B1", 1, "0U0 0F0 0U1 0B0"),
    ],
)
def test_fewer_microbatches_keep_what_serves_them(text, count, fewer):
    schedule = fp.Schedule.parse(text)
    S.check(schedule)
    assert str(schedule.first(count)) == fewer
    S.check(schedule.first(count))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("whole", [None, 1, 2, 3])
def test_fewer_microbatches_are_legal(family, whole):
    made = []
    for ahead in (0, 1, 5):
        with contextlib.suppress(
            fp.ScheduleError
        ):  # gathered more often than there are microbatches
            made.append(S.gather_params(family(4, 8, num_devices=2), whole=whole, ahead=ahead))
    assert made or whole == 1
    for schedule in made:
        for count in range(1, 8):
            S.check(S.remat(schedule.first(count)))


def test_wrong_uses_are_refused():
    schedule = S.one_f_one_b(2, 2)
    with pytest.raises(fp.ScheduleError, match="has U already"):
        S.gather_params(S.gather_params(schedule))
    with pytest.raises(fp.ScheduleError, match="takes a schedule; got a str"):
        S.gather_params("0F0")
    for options in ({"whole": 0}, {"whole": True}, {"ahead": -1}, {"ahead": 1.5}):
        with pytest.raises(fp.ScheduleError, match=f"{next(iter(options))} is the number of"):
            S.gather_params(schedule, **options)


def test_forwards_alone_are_gathered_too():
    schedule = S.gather_params(S.one_f_one_b(2, 2).forwards())
    assert not schedule.has_backward
    S.check(schedule)
    assert str(schedule) == "0U0 0F0 0F1\n1U0 1F0 1F1"
    timeline = fp.simulate(schedule, fp.Cost(gather=2.0))
    assert timeline.makespan == 5  # the second stage gathers while the first does
    assert schedule.forwards() == S.one_f_one_b(2, 2).forwards()


def test_the_stage_waits_and_the_device_goes_on():
    schedule = fp.Schedule.parse("0U0 0F0 1U0 0F1 1F0 1F1 1B0 1B1 0B0 0B1")
    timeline = fp.simulate(schedule, fp.Cost(gather=3.0))
    spans = {str(span.action): (span.start, span.end) for span in timeline.spans}
    assert (spans["0U0"], spans["0F0"]) == ((0.0, 3.0), (3.0, 4.0))
    assert (spans["1U0"], spans["0F1"], spans["1F0"]) == ((4.0, 7.0), (4.0, 5.0), (7.0, 8.0))
    assert timeline.makespan == fp.simulate(schedule).makespan + 5
    assert timeline.cost().gather == (3.0, 3.0)
    assert "1U0" in map(str, timeline.critical_path)
    assert fp.simulate(
        fp.make_plan([fp.stage(lambda p, x: x)] * 2, schedule, loss=F.mse_loss), fp.Cost(gather=3.0)
    ) == (timeline)


def test_gathering_and_reducing_share_the_link():
    schedule = fp.Schedule.parse("0U0 0F0 0F1 1U0 1F0 1F1 1B0 1B1 1G 0U1 0B0 0B1 0G")
    spans = {
        str(span.action): span
        for span in fp.simulate(schedule, fp.Cost(gather=2.0, reduce=5.0)).spans
    }
    assert spans["0U1"].start == spans["1G"].end
    assert spans["0B0"].start == spans["0U1"].end


def test_pictures_and_traces_show_it():
    schedule = S.reduce_grads(S.gather_params(S.one_f_one_b(2, 2)))
    timeline = fp.simulate(schedule, fp.Cost(gather=2.0, reduce=2.0))
    drawing = fp.draw(timeline)
    assert "U unshard" in str(drawing)
    assert "0U0 unshard, stage 0, time 0: " in drawing.svg()
    events = timeline.chrome_trace()["traceEvents"]
    (event,) = [event for event in events if event["name"] == "0U0"]
    assert event["args"] == {"stage": 0, "kind": "U", "time": 0}
    names = [event["args"].get("name") for event in events if event["ph"] == "M"]
    assert names.count("device 0 network") == 1


def test_passes_keep_it_before_what_it_is_for():
    schedule = S.gather_params(S.looped_bfs(4, 4, num_devices=2), whole=1)
    for other in (
        S.delay(schedule, group=2),
        S.remat(schedule),
        S.offload(schedule),
        S.reduce_grads(schedule),
        schedule.first(2),
    ):
        S.check(other)
        assert all(order[0].kind is Kind.U for order in other.orders)


def test_ahead_for_each_stage():
    plain = S.fill_drain(2, 2, num_devices=1, backward=False)
    wanted = {
        (0, 0): "0U0 0F0 1U0 1F0 0F1 1F1",
        (0, 1): "0U0 1U0 0F0 1F0 0F1 1F1",
        (2, 0): "0U0 0F0 1U0 1F0 0F1 1F1",
    }
    for ahead, text in wanted.items():
        assert str(S.gather_params(plain, ahead=ahead)) == text
    for ahead in ([1], [1, 2, 3], [1, -1], [1, 0.5], "ab", -1, 1.0, True):
        with pytest.raises(fp.ScheduleError, match="or one number for each of 2 stages"):
            S.gather_params(plain, ahead=ahead)
