"""Levels of schedules: how they are written, what keeps them, and what they cost."""

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import at_levels, schedules

import funcpipe as fp
from funcpipe.schedules.levels import mixed
from funcpipe.schedules.memory import residual_peak

F = fp.Kind.F
TEXT = "0F0 0F1@1 0R1 0B1 0F2@2 0B0 0B2\n1F0 1F1 1B1 1B0 1F2@1 1B2"


def forwards(schedule):
    return [action for order in schedule.orders for action in order if action.kind is F]


def test_a_level_is_written_at_its_forward():
    schedule = fp.Schedule.parse(TEXT)
    assert TEXT == str(schedule)
    assert {(fp.Action(F, 0, 1), 1), (fp.Action(F, 0, 2), 2), (fp.Action(F, 1, 2), 1)} == schedule.levels
    assert 3 == schedule.num_levels
    assert [1, 1, 1] == [schedule.level(fp.Action(kind, 0, 1)) for kind in (F, fp.Kind.R, fp.Kind.B)]
    assert 0 == schedule.level(fp.Action(F, 0, 0))
    assert 1 == fp.Schedule.parse("0F0 0B0").num_levels
    assert "2 devices, 3 levels>" in repr(schedule)


def test_a_slice_has_one_of_its_own():
    schedule = fp.Schedule.parse("0F0.0 0F0.1@1 0B0.1 0B0.0")
    assert [0, 1] == [schedule.level(fp.Action(fp.Kind.B, 0, 0, number)) for number in range(2)]


def test_they_are_a_part_of_a_schedule():
    """Those of 0 are left out, whatever they were given in."""
    plain = fp.schedules.one_f_one_b(2, 2)
    first = fp.Action(F, 0, 0)
    one = replace(plain, levels={first: 1, fp.Action(F, 1, 0): 0})
    assert one != plain
    assert one == replace(plain, levels=[(first, 1)]) == replace(plain, levels=frozenset({(first, 1)}))
    assert hash(one) == hash(replace(plain, levels=[[first, 1]]))
    assert plain == replace(plain, levels={first: 0})


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_texts_give_them_back(data):
    schedule = data.draw(at_levels(data.draw(schedules())))
    assert schedule == fp.Schedule.parse(str(schedule))
    assert schedule == fp.schedules.from_json(fp.schedules.to_json(schedule))


def test_what_is_made_of_a_schedule_keeps_them():
    schedule = fp.schedules.one_f_one_b(2, 4)
    levels = {forward: forward.microbatch % 3 for forward in forwards(schedule)}
    schedule = replace(schedule, levels=levels)
    again = [
        fp.schedules.remat(schedule),
        fp.schedules.offload(schedule),
        fp.schedules.delay(schedule),
        fp.schedules.step_params(schedule),
        fp.schedules.pair(schedule),
        fp.schedules.unpair(fp.schedules.pair(schedule)),
        fp.schedules.gather_params(schedule),
        schedule.forwards(),
    ]
    assert all(one.levels == schedule.levels for one in again)
    assert {level for level in schedule.levels if level[0].microbatch < 2} == schedule.first(2).levels


def test_what_is_repeated_has_the_levels_of_what_it_repeats():
    schedule = fp.schedules.one_f_one_b(2, 6)
    schedule = replace(schedule, levels={forward: 1 - forward.stage for forward in forwards(schedule)})
    longer = fp.schedules.lengthen(schedule, 11, fp.Cost())
    assert {(forward, 1) for forward in forwards(longer) if forward.stage == 0} == longer.levels


def test_what_is_repeated_holds_no_more():
    """Moments are alike where what is under way has the same levels."""
    schedule = fp.schedules.one_f_one_b(4, 24)
    schedule = replace(schedule, levels={forward: forward.microbatch % 2 for forward in forwards(schedule)})
    costs = [fp.Cost(residual=4), fp.Cost(1, backward=2.5, residual=1)]
    for times in (None, costs):
        longer = fp.schedules.lengthen(schedule, 60, times)
        assert fp.simulate(longer, costs).peak == fp.simulate(schedule, costs).peak
        assert {forward for forward in forwards(longer) if forward.microbatch % 2} == {one for one, _ in longer.levels}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0 0B0@1", "'0B0@1' is no forward at a level: F alone has one, after @, as in 0F3@1"),
        ("0F0@ 0B0", "'0F0@' is no forward at a level"),
        ("0F0@one 0B0", "'0F0@one' is no forward at a level"),
        ("0F0@-1 0B0", "'0F0@-1' is no forward at a level"),
        ("0F0@9999 0B0", "'0F0@9999' is no forward at a level"),
        ("0F0 (0F1@1 0B0)@2", "is no pair"),
    ],
)
def test_what_is_no_level_in_a_text(text, says):
    with pytest.raises(fp.ScheduleError, match="line 1: ") as caught:
        fp.Schedule.parse(text)
    assert says in str(caught.value)
    page = '{"funcpipe": "schedule", "version": 1, "orders": ["TEXT"]}'.replace("TEXT", text)
    with pytest.raises(fp.ScheduleError, match=r"orders\[0\]"):
        fp.schedules.from_json(page)


def test_a_timeline_has_no_levels():
    page = fp.schedules.to_json(fp.simulate(fp.Schedule.parse("0F0@1 0B0")))
    assert "@" not in page
    with pytest.raises(fp.ScheduleError, match=r"spans\[0\]: '0F0@1' has a level, which stands in schedules alone"):
        fp.schedules.from_json(page.replace('"0F0"', '"0F0@1"'))


@pytest.mark.parametrize(
    ("levels", "says"),
    [
        ({fp.Action(F, 0, 7): 1}, "0F7 has level 1, but does not stand on any device"),
        ({fp.Action(fp.Kind.B, 0, 0): 1}, "0B0 has level 1, but is no F; each F has one, for all of its microbatch"),
        ({fp.Action(F, 0, 0): -1}, "0F0 has level -1; they are numbers from 0 to 999"),
        ({fp.Action(F, 0, 0): 1000}, "0F0 has level 1000; they are numbers from 0 to 999"),
        ({fp.Action(F, "a", 0): 1}, "has level 1, but does not stand on any device"),
        ({fp.Action(F, 0, 0): 1.5}, "levels has the level of each forward, as"),
        ({fp.Action(F, 0, 0): True}, "slice=None), True)"),
        ({(F, 0, 0, None): 5}, "None), 5)"),
        ({"0F0": 1}, "got ('0F0', 1)"),
        ([(fp.Action(F, 0, 0), 1), (fp.Action(F, 0, 0), 2)], "0F0 has two levels"),
        ([(fp.Action(F, 0, 0),)], "levels has the level of each forward"),
        ([(fp.Action(F, 0, 0), 1, 2)], "levels has the level of each forward"),
        ("0F0", "got '0F0'"),
        (3, "levels has the level of each forward, as levels={fp.Action(fp.Kind.F, 0, 1): 1}; got 3"),
        ([3], "levels has the level of each forward"),
    ],
)
def test_what_are_no_levels(levels, says):
    with pytest.raises(fp.ScheduleError) as caught:
        fp.schedules.check(replace(fp.schedules.one_f_one_b(1, 2), levels=levels))
    assert says in str(caught.value)


def test_what_cannot_be_written():
    schedule = replace(fp.schedules.one_f_one_b(1, 2), levels={fp.Action(F, 0, 7): 1})
    with pytest.raises(fp.ScheduleError, match="some of its levels are of no forward that it has"):
        fp.schedules.to_json(schedule)
    with pytest.raises(fp.ScheduleError, match="it has levels, which torch's stages do not"):
        fp.schedules.to_torch_csv(fp.Schedule.parse("0F0@1 0B0"))


# -- what they cost ----------------------------------------------------------------------------------------------------


def costs(seed, stages, links=False):
    """Three levels."""
    rng = Random(seed)

    def row(low=1):
        return [rng.randint(low, 9) for _ in range(stages)]

    shared = {"comm": rng.randint(0, 2), "output": row(0), "bandwidth": 4.0}
    links = {"forward_link": 0.5, "backward_link": [1] * stages} if links else {}
    return [
        fp.Cost(row(), row(), row(), residual=row(4), weight_residual=row(0), offload=row(), **shared, **links)
        for _ in range(3)
    ]


def test_each_microbatch_takes_the_time_and_the_memory_of_its_level():
    schedule = fp.Schedule.parse("0F0@1 0F1 0B0 0B1")
    keep, again = fp.Cost(1, backward=2, residual=4), fp.Cost(1.5, backward=3, residual=1)
    timeline = fp.simulate(schedule, [keep, again])
    assert [1.5, 1, 3, 2] == [span.end - span.start for span in timeline.spans]
    assert [(0.0, 1), (1.5, 5), (5.5, 4), (7.5, 0)] == [*timeline.memory[0]]
    assert fp.simulate(fp.Schedule.parse("0F0 0F1 0B0 0B1"), keep).memory == fp.simulate(schedule, keep).memory


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_where_a_stage_has_one_level_it_is_a_cost_of_its_own(data):
    """Pairs, remat, slices, links: all that a clock knows."""
    schedule = data.draw(schedules())
    stages = schedule.num_stages
    chosen = data.draw(st.lists(st.integers(0, 2), min_size=stages, max_size=stages))
    levels = costs(data.draw(st.integers(0, 99)), stages, links=data.draw(st.booleans()))
    cost = mixed(levels, chosen)
    leveled = replace(schedule, levels={forward: chosen[forward.stage] for forward in forwards(schedule)})
    one, other = fp.simulate(schedule, cost), fp.simulate(leveled, levels)
    assert one == other
    assert [residual_peak(order, schedule, cost) for order in schedule.orders] == [
        residual_peak(order, leveled, levels) for order in leveled.orders
    ]


def test_every_level_that_a_schedule_has_costs_something():
    with pytest.raises(fp.ScheduleError, match="has 3 levels, and the costs of 2 are given; give one for each"):
        fp.simulate(fp.Schedule.parse("0F0@2 0B0"), [fp.Cost(), fp.Cost()])
    with pytest.raises(fp.ScheduleError, match="not levels of the same stages"):
        fp.simulate(fp.Schedule.parse("0F0@1 0B0"), [fp.Cost(), fp.Cost(comm=1)])
    with pytest.raises(fp.ScheduleError, match=r"simulate takes a Cost.* or several.*got \[\]"):
        fp.simulate(fp.Schedule.parse("0F0@1 0B0"), [])


def test_the_program_says_at_which_level_what_runs():
    layer = fp.stage(lambda p, x: p * x)
    plan = fp.make_plan(fp.levels(layer, layer), fp.Schedule.parse("0F0@1 0F1 0B0 0B1"), loss=print, devices="cpu")
    words = [line.split("  ")[0] for line in plan.program.lane(0).lines()]
    assert ["0F0@1", "0F1", "0B0@1", "0B1"] == [word for word in words if word[0] == "0"]
    assert {(F, 0), (F, 1), (fp.Kind.B, 0), (fp.Kind.B, 1)} == {(call.kind, call.level) for call in plan.program.calls}
