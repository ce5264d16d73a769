"""Actions that overlap: how they are written, which may, what every transformation makes of them,
what they cost."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from common import cpu_plan
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import schedules

import funcpipe as fp
from funcpipe import schedules as S
from funcpipe._src.data.overlapping import pairs_in
from funcpipe._src.data.schedule import words_of
from funcpipe._src.schedules.pairs import joinable, may_overlap, together
from funcpipe.testing import assert_matches_sequential

PAIRED = fp.Schedule.parse("0F0 0F1 (0F2 0B0) 0B1 0B2\n1F0 1B0 (1F1 1F2) 1B1 1B2")


def refused(text: str) -> str:
    with pytest.raises(fp.ScheduleError) as error:
        S.check(fp.Schedule.parse(text))
    return str(error.value)


@settings(deadline=None)
@given(schedules())
def test_every_form_gives_the_pairs_back(schedule: fp.Schedule) -> None:
    """Text, JSON, a copy; and where torch can have it, its CSV."""
    assert schedule == fp.Schedule.parse(str(schedule)) == S.from_json(S.to_json(schedule))
    assert schedule.first(1).pairs <= schedule.pairs
    bare = S.unpair(schedule)
    assert (bare.orders, bare.pairs) == (schedule.orders, frozenset())
    assert (bare == schedule) == (not schedule.pairs)
    for part in (schedule.first(1), schedule.forwards()):
        S.check(part)


def test_pairs_as_words() -> None:
    """Blanks within the parentheses are nothing; half a pair, three, or one that touches its
    neighbour are no words."""
    assert [("0F0",), ("0F1", "0B0"), ("0B1",)] == [*words_of("0F0 ( 0F1   0B0 ) 0B1")]
    for text in (
        "(0F0 0B0",
        "0F0 0B0)",
        "(0F0)",
        "(0F0 0F1 0B0)",
        "((0F0 0B0))",
        "()",
        "(0F0 0B0)0F1",
        "0F1(0F0 0B0)",
    ):
        with pytest.raises(
            fp.ScheduleError, match="is not a pair: write two actions in parentheses"
        ):
            fp.Schedule.parse(text)
        with pytest.raises(
            fp.ScheduleError, match="is not a pair: write two actions in parentheses"
        ):
            S.from_json(f'{{"funcpipe": "schedule", "version": 1, "orders": ["{text}"]}}')


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "(0F0 0B0)",
            "(0F0 0B0) on device 0 depends on itself: 0B0 needs the result of 0F0; write 0F0 0B0",
        ),
        ("0F0 (0R0 0B0)", "(0R0 0B0) on device 0 depends on itself"),
        ("0F0 (0I0 0W0)", "(0I0 0W0) on device 0 depends on itself"),
        ("(0F0 1F0) 1B0 0B0", "(0F0 1F0) on device 0 depends on itself"),
        ("(0F0.0 0F0.1) 0B0.1 0B0.0", "(0F0.0 0F0.1) on device 0 depends on itself"),
        (
            "0F0 0F1 (0O0 0L0) 0B0 0B1",
            "the device works on during 0O0, in a pair or not; write 0O0 0L0",
        ),
    ],
)
def test_what_can_be_no_pair(text: str, says: str) -> None:
    """By what the two are, on one device."""
    assert says in refused(text)


def test_three_do_not_overlap_and_neighbours_must_be() -> None:
    """Written by hand; text cannot say it."""
    a, b, c = (fp.Action(fp.Kind.F, 0, m) for m in range(3))
    orders = ((a, b, c),)
    for pairs, says in [
        ({(a, b), (b, c)}, "begins with the last action of another pair"),
        ({(a, c)}, r"\(0F0 0F2\) is not a pair: these two are not neighbours on any device"),
        ({(b, a)}, r"\(0F1 0F0\) is not a pair"),
        ({"0F0"}, "'0F0' is not a pair of actions"),
        (
            {("0F0", "0F1")},
            r"\('0F0', '0F1'\) is not a pair of actions: write pairs=\{\(first, second\)\}",
        ),
        ((a, b), "is not a pair of actions"),
    ]:
        with pytest.raises(fp.ScheduleError, match=says):
            S.check(fp.Schedule(orders, pairs=frozenset(pairs)))  # pyright: ignore


def test_pairs_may_be_lists_and_must_be_something() -> None:
    """As whoever reads them from a file has them; what is no collection of pairs is told with an
    example."""
    a, b = fp.Action(fp.Kind.F, 0, 1), fp.Action(fp.Kind.B, 0, 0)
    schedule = fp.Schedule.parse("0F0 (0F1 0B0) 0B1")
    assert (
        schedule
        == fp.Schedule(schedule.orders, pairs=[[a, b]])
        == fp.Schedule(schedule.orders, pairs={(a, b)})
    )  # pyright: ignore
    for wrong in (None, 5, [[[a], b]]):
        with pytest.raises(
            fp.ScheduleError, match="pairs must be a set of pairs of actions, as in pairs="
        ):
            fp.Schedule(schedule.orders, pairs=wrong)  # pyright: ignore
    with pytest.raises(fp.ScheduleError, match="some of its pairs are not neighbours"):
        S.to_json(fp.Schedule(schedule.orders, pairs=frozenset({(b, a)})))


def test_pairs_that_wait_for_each_other_are_refused_with_the_picture() -> None:
    """Each needs the second of the other, or what runs in between on another device."""
    assert refused("0F0 (0F1 0B0) 0B1\n1F0 (1B0 1F1) 1B1").splitlines()[1:] == [
        ("  * device 0 cannot start (0F1 0B0) before 1B0; device 1 cannot start 1B0 either"),
        ("  * device 1 cannot start (1B0 1F1) before 0F1; device 0 cannot start 0F1 either"),
    ]
    assert refused("(0F0 2F0) 2B0 0B0\n1F0 1B0").splitlines()[1:] == [
        ("  * device 0 cannot start (0F0 2F0) before 1F0; device 1 cannot start 1F0 either"),
        "  * device 1 cannot start 1F0 before 0F0; device 0 cannot start 0F0 either",
    ]


@settings(deadline=None)
@given(schedules(), st.randoms(use_true_random=False))
def test_pair_joins_what_can_be_and_is_legal(schedule: fp.Schedule, chance: object) -> None:
    """What it took apart cannot be joined beside what it left; it changes no order, and doing it
    again changes nothing."""
    if not schedule.has_backward:
        with pytest.raises(fp.ScheduleError, match="nothing for forwards to overlap with"):
            S.pair(schedule)
        return
    paired = S.pair(schedule)
    S.check(paired)
    assert paired.orders == schedule.orders
    assert paired.pairs >= schedule.pairs
    for one, other in paired.pairs - schedule.pairs:
        assert {one.kind, other.kind} in ({fp.Kind.F, fp.Kind.B}, {fp.Kind.F, fp.Kind.I})
        assert may_overlap(one, other)
    wanted = joinable(schedule)
    assert paired == together(schedule, wanted)
    picked = S.pair(schedule, join=lambda first, second: first.stage == 0)
    assert all(one.stage == 0 for one, _ in picked.pairs - schedule.pairs)


def test_what_pair_refuses() -> None:
    with pytest.raises(fp.ScheduleError, match=r"pair takes a schedule; got a str"):
        S.pair("0F0 0B0")  # pyright: ignore
    with pytest.raises(
        fp.ScheduleError,
        match=r"join must be a function \(action, action\) -> bool, or None; got True",
    ):
        S.pair(PAIRED, join=True)  # pyright: ignore
    with pytest.raises(fp.ScheduleError, match="1F0 is missing"):
        S.pair(fp.Schedule.parse("0F0 0B0\n1B0"))
    with pytest.raises(fp.ScheduleError, match="unpair takes a schedule; got a Plan"):
        S.unpair(fp.make_plan([fp.stage(lambda p, x: x)] * 2, PAIRED, loss=F.mse_loss))  # pyright: ignore


def test_what_is_inserted_stands_outside_of_pairs() -> None:
    """Before both, or after both; a pair stays one."""
    assert str(S.remat(PAIRED)).split("\n")[0] == "0F0 0F1 0R0 (0F2 0B0) 0R1 0B1 0R2 0B2"
    assert str(S.offload(PAIRED)).split("\n")[0] == "0F0 0O0 0F1 0L0 (0F2 0B0) 0B1 0B2"
    longer = fp.Schedule.parse("0F0 0F1 (0F2 0B0) (0F3 0B1) 0B2 0B3")
    assert str(S.offload(longer)) == "0F0 0O0 0F1 0O1 0L0 (0F2 0B0) 0L1 (0F3 0B1) 0B2 0B3"
    first = fp.Schedule.parse("(0F0 0F1) 0B0 0F2 0B1 0B2")
    assert str(S.offload(first)) == "(0F0 0F1) 0O1 0B0 0L1 0F2 0B1 0B2"
    assert str(S.reduce_grads(fp.Schedule.parse("0F0 1F0 1B0 0F1 1F1 (0B0 1B1) 0B1"))).endswith(
        "(0B0 1B1) 1G 0B1 0G"
    )
    assert (
        str(S.gather_params(fp.Schedule.parse("0F0 (1F0 0F1) 1F1"), ahead=0))
        == "0U0 0F0 1U0 (1F0 0F1) 1F1"
    )
    assert str(S.delay(PAIRED, group=2)).split("\n")[0] == "0F0 0F1 (0F2 0I0) 0I1 0W0 0W1 0I2 0W2"
    for change in (S.remat, S.offload, S.reduce_grads, S.gather_params, S.delay):
        S.check(change(S.dualpipe_v(6, 9)))


def test_torch_has_pairs_of_a_forward_and_a_backward_alone() -> None:
    """In either order; others are refused with what to do."""
    text = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,(0B1;0F3)OVERLAP_F_B,0B2,0B3\n"
    schedule = S.from_torch_csv(text)
    assert str(schedule) == "0F0 0F1 (0F2 0B0) (0B1 0F3) 0B2 0B3"
    assert text == S.to_torch_csv(schedule)
    with pytest.raises(
        fp.ScheduleError, match=r"\(1F1 1F2\) overlaps, .* fp.schedules.unpair\(schedule\)"
    ):
        S.to_torch_csv(PAIRED)


@given(
    st.lists(st.floats(0, 8), min_size=4, max_size=4),
    st.lists(st.floats(0, 1), min_size=2, max_size=2),
)
def test_the_time_of_two_at_once(times: list[float], parts: list[float]) -> None:
    """Never less than either, than their computing, than their links; never more than one after the
    other."""
    forward, inward, weight, backward = times
    waits = forward * parts[0], min(inward, backward) * parts[1]
    cost = fp.Cost(
        forward, inward, weight, backward=backward, forward_link=waits[0], backward_link=waits[1]
    )
    both = cost.both((fp.Kind.F, 0, 1.0), (fp.Kind.B, 1, 1.0))
    computing = forward + backward - sum(waits)
    assert both == pytest.approx(max(forward, backward, computing, sum(waits)))
    assert both <= forward + backward + 1e-9
    assert cost.both((fp.Kind.B, 1, 1.0), (fp.Kind.F, 0, 1.0)) == pytest.approx(both)
    assert cost.both((fp.Kind.W, 0, 0.5), (fp.Kind.F, 0, 0.5)) == pytest.approx(
        max(weight, forward, weight + forward - waits[0]) / 2
    )


@pytest.mark.parametrize(
    "odd", [("F", 0, 1.0), fp.Kind.F, fp.Action(fp.Kind.F, 0, 0), (fp.Kind.F, 2, 1.0)], ids=str
)
def test_the_time_of_what_is_no_action_is_refused(odd: object) -> None:
    """A letter, a kind alone, an action, a stage that the cost does not have."""
    with pytest.raises(
        fp.ScheduleError,
        match=r"both takes two tuples \(kind, stage, share\), such as .* got .* and ",
    ):
        fp.Cost([1, 2]).both((fp.Kind.B, 1, 1.0), odd)  # pyright: ignore[reportArgumentType]


def test_links_are_a_part_of_the_time() -> None:
    """Of every kind that waits for them."""
    with pytest.raises(fp.ScheduleError) as error:
        fp.Cost([1, 2], [1, 1], backward=[3, 3], forward_link=[1, 3], backward_link=2)
    assert str(error.value).splitlines()[1:] == [
        "  * forward_link of stage 1 is a part of the time of F, which is 2; got 3",
        "  * backward_link of stage 0 is a part of the time of I, which is 1; got 2",
        "  * backward_link of stage 1 is a part of the time of I, which is 1; got 2",
        "  * forward_link of stage 1 is a part of the time of R, which is 2; got 3",
    ]
    grouped = fp.Cost([1, 2], forward_link=[0.5, 1], backward_link=[0.25, 0.5]).group([2])
    assert (grouped.forward_link, grouped.backward_link) == ((1.5,), (0.75,))


def test_a_device_works_once_where_two_overlap() -> None:
    """Busy, bubble, the cost that a timeline shows, and the pictures."""
    cost = fp.Cost(2, 2, 2, forward_link=1, backward_link=1)
    timeline = fp.simulate(PAIRED, cost)
    (first, second) = (
        span
        for span in timeline.spans
        if span.action in {a for pair in PAIRED.pairs for a in pair if a.stage == 0}
    )
    assert (first.start, first.end) == (second.start, second.end)
    assert second.end - second.start == 4  # 6 one after the other
    assert timeline.busy[0] == 3 * 2 + 3 * 4 - 2
    assert {*pairs_in(timeline.spans).values()} == {0, 1}
    assert timeline.cost().forward == (2, 2)
    assert timeline.cost().backward == (4, 4)
    drawing = fp.draw(timeline)
    assert "+ beside the above" in str(drawing)
    assert sum(line.lstrip().startswith("+ │") for line in str(drawing).splitlines()) == 2
    assert (
        drawing.svg().count("<title>0F2 forward") == drawing.svg().count("<title>0B0 backward") == 1
    )


def test_a_plan_shows_what_overlaps() -> None:
    """In the words of its program; values that both read are received before, and freed after,
    both."""
    plan = fp.make_plan([fp.stage(lambda p, x: x)] * 2, PAIRED, loss=F.mse_loss)
    lines = str(plan.program.lane(0)).splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("0F2 beside 0B0"))
    assert "receive grad[0,0]@" in "".join(lines[at - 2 : at])
    assert [line.split("  ")[0].split("[")[0] for line in lines[at : at + 4]] == [
        "0F2 beside 0B0",
        "send act",
        "free act",
        "0B0",
    ]
    assert lines[at + 4].startswith("free input[0,2]")
    assert fp.make_plan(plan.stages, S.unpair(PAIRED), loss=F.mse_loss).program != plan.program


def test_bits_of_compiled_stages_are_those_of_one_after_the_other() -> None:
    """On every executor, with remat and split backwards; and gradients are plain autograd's.
    `tests/laws` has eager stages."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh()) for _ in range(4))
    )
    split = fp.split(model, 4)
    stages = [fp.compile_stage(stage) for stage in split.stages]
    x, target = torch.randn(16, 6), torch.randn(16, 6)
    F.mse_loss(model(x), target).backward()
    for schedule in (
        S.dualpipe_v(4, 8),
        S.pair(S.remat(S.interleaved(4, 8, num_devices=2))),
        S.pair(S.zb_h2(4, 8)),
    ):
        assert schedule.pairs
        plan = cpu_plan(stages, schedule)
        result = assert_matches_sequential(plan, split.params, (x, target))
        for name, gradient in split.merge(result.grads).items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad)


def test_a_batch_of_fewer_microbatches_keeps_the_pairs_that_are_left() -> None:
    """Its program is that of fewer, and pairs with one action only are none."""
    schedule = S.dualpipe_v(4, 8)
    plan = cpu_plan([fp.stage(lambda p, x: x * p)] * 4, schedule)
    for count in (1, 3, 5):
        lowered = plan.program.first(count)
        found = {
            (lane.action(lane.runs[at]), lane.action(lane.runs[at + 1]))
            for lane in lowered.lanes
            for at in lane.pairs
        }
        assert found == schedule.first(count).pairs
        orders = schedule.first(count).orders
        assert found <= {pair for order in orders for pair in pairwise(order)}
    x = torch.randn(3, 2)
    assert_matches_sequential(plan, [torch.ones(2) for _ in range(4)], (x, x))
