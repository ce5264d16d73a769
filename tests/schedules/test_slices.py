"""Schedules whose microbatches are cut into slices: their orders, what their papers say of them,
what is refused."""

import json

import pytest

import funcpipe as fp
from funcpipe import schedules as S
from funcpipe._src.schedules.torch_csv import to_torch_csv

FAMILIES = [
    S.fill_drain,
    S.one_f_one_b,
    S.eager_one_f_one_b,
    S.looped_bfs,
    S.interleaved,
    S.zero_bubble,
    S.zb_h2,
]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_count_is_legal(family):
    """And in one order of sums: microbatches up, slices of one down."""
    for stages in range(1, 5):
        for devices in [d for d in range(1, stages + 1) if stages % d == 0]:
            for microbatches in range(1, 5):
                for slices in range(1, 5):
                    schedule = family(stages, microbatches, num_devices=devices, num_slices=slices)
                    S.check(schedule)
                    counts = (
                        schedule.num_stages,
                        schedule.num_microbatches,
                        schedule.num_slices,
                        schedule.num_devices,
                    )
                    assert counts == (stages, microbatches, slices, devices)
                    assert schedule.num_pieces == microbatches * slices
                    assert schedule.is_ascending
                    if slices == 1:
                        assert schedule == family(stages, microbatches, num_devices=devices)


def test_the_order_of_each_device():
    """Read by people: all slices of the first microbatch go forward before the last of them goes
    back."""
    assert str(S.one_f_one_b(2, 2, num_slices=2)).splitlines() == [
        "0F0.0 0F0.1 0F1.0 0B0.1 0F1.1 0B0.0 0B1.1 0B1.0",
        "1F0.0 1F0.1 1B0.1 1F1.0 1B0.0 1F1.1 1B1.1 1B1.0",
    ]
    assert str(S.zero_bubble(2, 1, num_slices=2)).splitlines() == [
        "0F0.0 0F0.1 0I0.1 0W0.1 0I0.0 0W0.0",
        "1F0.0 1F0.1 1I0.1 1I0.0 1W0.1 1W0.0",
    ]
    assert str(S.interleaved(4, 1, num_devices=2, num_slices=2)).splitlines() == [
        "0F0.0 0F0.1 2F0.0 2F0.1 2B0.1 2B0.0 0B0.1 0B0.0",
        "1F0.0 1F0.1 3F0.0 3F0.1 3B0.1 3B0.0 1B0.1 1B0.0",
    ]
    assert str(S.fill_drain(1, 2, num_slices=2, backward=False)) == "0F0.0 0F0.1 0F1.0 0F1.1"


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
@pytest.mark.parametrize("slices", [1, 2, 4, 16])
def test_seq_1f1b_in_closed_form(devices, slices):
    """Seq1F1B (arXiv 2406.03488): warmup min(p - d - 2 + k, m k) as in its code; memory and bubble
    follow from that."""
    microbatches = devices + 2
    schedule = S.one_f_one_b(devices, microbatches, num_slices=slices)
    timeline = fp.simulate(schedule, fp.Cost(forward=1, backward=2))
    for device, order in enumerate(schedule.orders):
        warmup = min(devices - device - 2 + slices, microbatches * slices)
        first = next(at for at, action in enumerate(order) if action.kind is fp.Kind.B)
        assert first == min(warmup + 1, microbatches * slices)
        held = min(devices - device + slices - 1, microbatches * slices)
        assert timeline.peak[device] == pytest.approx(held / slices)
    assert timeline.makespan == pytest.approx(3 * (microbatches + (devices - 1) / slices))


@pytest.mark.parametrize(
    ("devices", "share", "rounds"), [(2, 1, 1), (2, 3, 4), (4, 2, 2), (4, 3, 1), (8, 2, 2)]
)
def test_slimpipe_holds_hardly_more_than_one_microbatch(devices, share, rounds):
    """SlimPipe's order (arXiv 2504.14519): it holds (1 + 2 (p - 1) / (n v)) / p of a microbatch,
    and waits (p - 1) / (n v)."""
    slices, stages = rounds * devices, devices * share
    schedule = S.interleaved(stages, 4, num_devices=devices, num_slices=slices)
    cost = fp.Cost(forward=1 / share, backward=2 / share, residual=1 / stages)
    timeline = fp.simulate(schedule, cost)
    assert max(timeline.peak) == pytest.approx((1 + 2 * (devices - 1) / (slices * share)) / devices)
    assert timeline.makespan == pytest.approx(3 * (4 + (devices - 1) / (slices * share)))


def test_uneven_slices_are_as_slow_as_their_longest_and_balanced_ones_are_not():
    """Equal lengths wait for the last slice, which attends to most."""
    schedule = S.one_f_one_b(4, 4, num_slices=4)
    lengths = S.balanced_slices(4096, 4, attention=0.6)
    equal = fp.simulate(schedule, fp.Cost(backward=2, attention=0.6)).makespan
    balanced = fp.simulate(schedule, fp.Cost(backward=2, attention=0.6, slices=lengths)).makespan
    none = fp.simulate(schedule, fp.Cost(backward=2)).makespan
    assert balanced == pytest.approx(none, rel=1e-3)
    assert equal > 1.1 * balanced


@pytest.mark.parametrize("attention", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_balanced_slices_take_equally_long(attention, count):
    """To the rounding of lengths to whole numbers, and they are the whole sequence."""
    lengths = S.balanced_slices(100_000, count, attention=attention)
    assert sum(lengths) == 100_000
    assert list(lengths) == sorted(lengths, reverse=True) or attention == 0
    times = [time for time, _ in fp.Cost(slices=lengths, attention=attention).slice_shares(count)]
    assert times == pytest.approx([1 / count] * count, abs=1e-4)
    assert S.balanced_slices(count, count, attention=attention) == (1,) * count


def test_a_slice_has_its_share_of_every_cost():
    """Times by lengths and attention, memory by lengths; copies of residuals too; the links between
    devices."""
    cost = fp.Cost(
        forward=8,
        backward=16,
        offload=4,
        output=2,
        bandwidth=0.5,
        residual=6,
        slices=[3, 1],
        attention=0.5,
    )
    schedule = fp.Schedule.parse("0F0.0 0O0.0 0F0.1 0L0.0 0B0.1 0B0.0\n1F0.0 1F0.1 1B0.1 1B0.0")
    spans = {str(span.action): span.end - span.start for span in fp.simulate(schedule, cost).spans}
    expected = {
        "0F0.0": 5.25,
        "0F0.1": 2.75,
        "0O0.0": 3.0,
        "0L0.0": 3.0,
        "0B0.1": 5.5,
        "0B0.0": 10.5,
    }
    assert {name: spans[name] for name in expected} == pytest.approx(expected)
    timeline = fp.simulate(schedule, cost)
    starts = {str(span.action): span.start for span in timeline.spans}
    assert starts["1F0.0"] == pytest.approx(
        5.25 + 3.0
    )  # three quarters of 2 over a bandwidth of a half
    assert max(timeline.peak[:1]) >= 4.5


def test_the_cost_of_a_measured_timeline_is_that_of_whole_microbatches():
    """What the slices took together; they are as long as they took."""
    cost = fp.Cost(forward=4, backward=8, slices=[3, 1])
    schedule = S.one_f_one_b(2, 3, num_slices=2)
    timeline = fp.simulate(schedule, cost)
    found = timeline.cost()
    assert found.forward == pytest.approx((4, 4))
    assert found.backward == pytest.approx((8, 8))
    assert fp.simulate(schedule, found).makespan == pytest.approx(timeline.makespan)


def faults(text):
    with pytest.raises(fp.ScheduleError) as error:
        S.check(fp.Schedule.parse(text))
    return [line.removeprefix("  * ") for line in str(error.value).splitlines()[1:]]


def test_what_is_not_legal():
    """Carries that are read before they are written, slices that are missing, some that are cut and
    some that are not."""
    assert faults("0F0.1 0F0.0 0B0.1 0B0.0") == [
        "0F0.1 on device 0 comes before 0F0.0, from which it gets its carry"
    ]
    assert faults("0F0.0 0F0.1 0I0.0 0I0.1 0W0.0 0W0.1") == [
        "0I0.0 on device 0 comes before 0I0.1, from which it gets the gradient of its carry"
    ]
    assert faults("0F0.0 0F0.1 0F1.0") == ["0F1.1 is missing"]
    assert faults("0F0.0 0F0.2") == [
        "slice 1 is missing, but slice 2 appears; number them from 0, without gaps"
    ]
    assert faults("0F0.0 0F0.1 0F0.2 0F1.0 0F1.2") == [
        "0F1.2 on device 0 comes before 0F1.1, from which it gets its carry",
        "0F1.1 is missing",
    ]
    assert faults("0F0 0F1.0") == [
        "0F0 is for a whole microbatch, but 0F1.0 is for a slice: cut all microbatches, or none"
    ]
    assert faults("0F0.0") == [
        "0F0.0 is the only slice of its microbatch, so the microbatch is whole: write 0F0"
    ]
    assert faults("0U0.0 0F0.0 0F0.1")[0].startswith("0U0.0 on device 0 is not an action: ")
    assert faults("0F0.0 0F0.999999") == [
        "slice 1 is missing, but slice 999999 appears; number them from 0, without gaps"
    ]


def test_devices_that_wait_for_each_other_are_told_with_their_slices():
    """The picture of who waits."""
    stuck = fp.Schedule.parse("""
        0F0.0 0F0.1 0B0.1 0F1.0 0F1.1 0B0.0 0B1.1 0B1.0
        1F0.0 1F0.1 1F1.0 1B0.1 1B0.0 1F1.1 1B1.1 1B1.0
    """)
    with pytest.raises(fp.ScheduleError) as error:
        S.check(stuck)
    text = str(error.value)
    assert (
        "device 0 cannot start 0B0.1 before 1B0.1; device 1 runs 1B0.1 1 action after 1F1.0" in text
    )
    assert "device 1 cannot start 1F1.0 before 0F1.0" in text


@pytest.mark.parametrize("slices", [0, -1, 1.5, "2", True])
def test_counts_of_slices_that_are_none(slices):
    """Named like the other counts."""
    with pytest.raises(fp.ScheduleError, match="num_slices must be"):
        S.one_f_one_b(2, 2, num_slices=slices)


def test_rounds_of_a_group_are_of_whole_microbatches():
    """GIS has no slices."""
    with pytest.raises(fp.ScheduleError, match="leave out group= or num_slices="):
        S.interleaved(4, 2, num_devices=2, group=1, num_slices=2)


@pytest.mark.parametrize(
    "wrong",
    [{"slices": [1, 0]}, {"slices": "12"}, {"slices": 3}, {"attention": 1.5}, {"attention": "a"}],
)
def test_costs_that_are_none(wrong):
    """Lengths are above 0, attention is a share."""
    with pytest.raises(fp.ScheduleError, match="no such cost"):
        fp.Cost(**wrong)


def test_a_cost_of_other_slices():
    """Said with both counts."""
    with pytest.raises(fp.ScheduleError, match="the lengths of 3 slices, and a microbatch has 2"):
        fp.simulate(S.one_f_one_b(2, 2, num_slices=2), fp.Cost(slices=[1, 1, 1]))


@pytest.mark.parametrize(
    ("length", "count", "attention"),
    [(3, 4, 0.5), (0, 1, 0.5), (4, 2, 2.0), (4, 2, "a"), (4.5, 2, 0.5), (4, 0, 0.5)],
)
def test_slices_that_cannot_be_balanced(length, count, attention):
    """Every argument."""
    with pytest.raises(fp.ScheduleError, match="no such slices"):
        S.balanced_slices(length, count, attention=attention)


def test_files_and_pictures_have_slices():
    """JSON and text come back; traces and pictures name them; torch's CSV has none."""
    schedule = S.remat(S.one_f_one_b(2, 2, num_slices=2))
    assert fp.Schedule.parse(str(schedule)) == schedule
    assert S.from_json(S.to_json(schedule)) == schedule
    cost = fp.Cost(slices=[2, 1], attention=0.25)
    assert S.from_json(S.to_json(cost)) == cost
    timeline = fp.simulate(schedule, cost)
    events = [
        event
        for event in json.loads(json.dumps(timeline.chrome_trace()))["traceEvents"]
        if event["ph"] == "X"
    ]
    assert {event["args"]["slice"] for event in events} == {0, 1}
    picture = fp.draw(timeline)
    assert "2 slices" in picture.svg()
    assert "slice 1" in picture.svg()
    with pytest.raises(fp.ScheduleError, match="its microbatches are cut into slices"):
        to_torch_csv(S.one_f_one_b(2, 2, num_slices=2))
    assert repr(schedule).startswith(
        "<Schedule 1F1B, 2 slices+remat: 2 stages, 2 microbatches of 2 slices, 2 devices>"
    )


def test_the_first_microbatches_keep_their_slices():
    """As a batch with fewer rows runs it."""
    schedule = S.one_f_one_b(2, 3, num_slices=2)
    assert schedule.first(1) == fp.Schedule.parse(
        "0F0.0 0F0.1 0B0.1 0B0.0\n1F0.0 1F0.1 1B0.1 1B0.0"
    )
    assert schedule.forwards() == S.fill_drain(2, 3, num_slices=2, backward=False)


def test_a_schedule_may_hold_anything_until_it_is_checked():
    """It prints, and its check says what is wrong."""
    for entry in ((fp.Kind.F, 0, 0), fp.Action(fp.Kind.F, 0, 0, "a")):
        schedule = fp.Schedule(((entry, fp.Action(fp.Kind.B, 0, 0)),))
        assert repr(schedule).startswith("<Schedule custom: 1 stage,")
        with pytest.raises(fp.ScheduleError, match="is not an action"):
            fp.make_plan([fp.stage(lambda params, x: x)], schedule, loss=print)


def test_the_cost_of_a_timeline_with_remat_of_some_slices():
    """The times of slices are of what all run, other times of those that ran."""
    schedule = S.remat(S.one_f_one_b(2, 2, num_slices=2), keep=lambda action: action.slice == 1)
    timeline = fp.simulate(schedule, fp.Cost(1.0, backward=2.0, slices=(3, 1)))
    found = timeline.cost()
    assert found.remat == pytest.approx((1.0, 1.0))
    assert found.slice_times[0] / found.slice_times[1] == pytest.approx(3)
    assert fp.simulate(schedule, found).makespan == pytest.approx(timeline.makespan)


def test_measured_memory_is_of_whole_microbatches():
    """It says so."""
    import torch

    made = fp.models.memory(
        torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), torch.zeros(4, 2)
    )
    with pytest.raises(fp.PlanError, match="cuts them into slices"):
        made.peak(S.one_f_one_b(2, 2, num_slices=2))


def test_lengths_that_are_too_large():
    """Before their sum overflows."""
    with pytest.raises(fp.ScheduleError, match="numbers above 0"):
        fp.Cost(slices=(1e308, 1e308))
