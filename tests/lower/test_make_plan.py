"""What make_plan refuses, and what it makes of its options."""

import copy
import gc
import pickle
import tracemalloc
from typing import Any

import pytest
import torch

from funcpipe._src.core.errors import PlanError, ScheduleError
from funcpipe._src.data.program import CALLER, Pool, Role, spans
from funcpipe._src.data.schedule import Action, Kind, Schedule
from funcpipe._src.data.stage import Stage, stage
from funcpipe._src.lower.plan import make_plan, program_for
from funcpipe._src.schedules.families import fill_drain, interleaved, one_f_one_b, zero_bubble
from funcpipe._src.schedules.transforms import remat


def keep(params: Any, x: Any) -> Any:
    """A stage function that pickle finds."""
    return x


def pass_on(params: Any, x: Any, *, skips: Any) -> Any:
    """A stage function that pops."""
    return x


def plain(count: int) -> list[Stage]:
    """Stages that do nothing."""
    return [Stage(keep)] * count


def faults_of(*args: Any, **options: Any) -> list[str]:
    """The lines of a refusal, its title first."""
    with pytest.raises(PlanError) as error:
        make_plan(*args, **options)
    return [line.removeprefix("  * ") for line in str(error.value).splitlines()]


def test_things_of_the_wrong_kind_are_refused_all_at_once() -> None:
    """Stages, schedule, loss and weight, each with the call that makes one."""
    assert [
        "no such plan:",
        "stage 1 is a function; make it one with fp.stage(fn) or fp.from_module(module)",
        "stage 2 is a str; make it one with fp.stage(fn) or fp.from_module(module)",
        "schedule is a str; make one with fp.schedules.one_f_one_b(...) or Schedule.parse(text)",
        (
            "loss is a int, not a function (y, target) -> loss; give the function itself, not its "
            "name or what it returned"
        ),
        (
            "weight is a str, not a function (target) -> number; give the function itself, not "
            "its name or what it returned"
        ),
    ] == faults_of([Stage(keep), keep, "mlp"], "1F1B", loss=3, weight="rows")


def test_a_weight_without_a_loss_is_refused() -> None:
    """It would weigh nothing."""
    expected = "weight= is the share of each microbatch in the loss, but there is no loss="
    assert ["no such plan:", expected] == faults_of(plain(2), fill_drain(2, 2), weight=len)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_another_number_of_stages_is_refused(count: int) -> None:
    """Both counts are named."""
    word = "is" if count == 1 else "are"
    mend = "make the schedule for as many, or join stages with fp.compose"
    expected = f"the schedule has 2 stages, but {count} {word} given; {mend}"
    assert [expected] == faults_of(plain(count), fill_drain(2, 2), loss=print)


def test_a_schedule_that_is_not_legal_is_refused_as_a_schedule() -> None:
    """make_plan checks: a ScheduleError, as the numbers alone show it."""
    with pytest.raises(ScheduleError, match="microbatch 0 is missing, but microbatch 1 appears"):
        make_plan(plain(1), Schedule.parse("0F1"))


def test_one_stage_may_stand_alone() -> None:
    """A single Stage is a tuple of one."""
    assert 1 == make_plan(Stage(keep), fill_drain(1, 2), loss=print).num_stages  # pyright: ignore[reportArgumentType]


def test_every_mismatch_of_stash_and_pop_is_listed() -> None:
    """Twice, too early, never stashed, never popped; stages by number and name."""
    stages = [
        Stage(pass_on, "in", stash=("a", "lost"), pop=("late",)),
        Stage(keep, "", stash=("a", "late")),
        Stage(pass_on, "out", pop=("a", "unknown")),
    ]
    assert [
        "stash and pop do not match:",
        "stage 0 ('in') pops 'late', but only stage 1, which comes later, stashes it",
        "stage 1 stashes 'a' again; stage 0 ('in') did already",
        "stage 2 ('out') pops 'unknown', but no stage stashes it",
        "stage 0 ('in') stashes 'lost', but no later stage pops it",
        "stage 1 stashes 'late', but no later stage pops it",
    ] == faults_of(stages, fill_drain(3, 1))


def test_a_stage_cannot_pop_what_it_stashes_itself() -> None:
    """A skip goes to later stages."""
    with pytest.raises(PlanError, match="both stashes and pops 'e'"):
        stage(pass_on, stash=["e"], pop=["e"])


@pytest.mark.parametrize("count", [1, 3])
def test_devices_are_one_for_each_lane(count: int) -> None:
    """Both counts are named, with the call that makes the right number."""
    expected = (
        f"the schedule has 2 devices, but devices= names {count}; give one for each (a device "
        "may appear several times), or fp.devices(2)"
    )
    assert [expected] == faults_of(plain(2), fill_drain(2, 2), devices=["cpu"] * count)


def test_one_device_serves_all_lanes() -> None:
    """A name, a list of names, or None: chosen at the run."""
    made = [
        make_plan(plain(2), fill_drain(2, 2), devices=given).devices
        for given in ("cpu", ["cpu", "cpu"], None)
    ]
    assert [("cpu", "cpu"), ("cpu", "cpu"), None] == made


def test_every_wrong_tie_is_listed() -> None:
    """No (stage, path), no such stage, a group of one, a member of two groups."""
    ties = [
        [(0, "w"), (5, "w")],
        [(1, "b")],
        [(0, "w"), (1, "w")],
        [("0", "w"), (1, "v", 2)],
        [(-1, "w"), (0, "u")],
    ]
    assert [
        "ties do not fit the stages (stage 0, stage 1):",
        "group 0: (5, 'w') is not (stage, path): a stage from 0 to 1, a key or a tuple of keys",
        "group 1 has 1 member; a tie has two or more",
        "group 2: (0, 'w') is in group 0 already",
        "group 3: ('0', 'w') is not (stage, path): a stage from 0 to 1, a key or a tuple of keys",
        "group 3: (1, 'v', 2) is not (stage, path): a stage from 0 to 1, a key or a tuple of keys",
        "group 4: (-1, 'w') is not (stage, path): a stage from 0 to 1, a key or a tuple of keys",
    ] == faults_of(plain(2), fill_drain(2, 2), ties=ties)


def test_ties_become_tuples() -> None:
    """Lists come in, data stays."""
    ties: Any = [[[0, "w"], (1, ("a", "w"))]]
    plan = make_plan(plain(2), fill_drain(2, 2), ties=ties)
    assert (((0, "w"), (1, ("a", "w"))),) == plan.ties


@pytest.mark.parametrize(
    ("backward", "options", "expected"),
    [
        (True, {}, (True, False)),
        (False, {}, (False, True)),
        (True, {"train": False, "outputs": True}, (False, True)),
        (False, {"train": True, "outputs": False}, (True, False)),
    ],
)
def test_train_and_outputs_follow_the_schedule_unless_they_are_given(
    backward: bool, options: dict[str, Any], expected: tuple[bool, bool]
) -> None:
    """Backwards mean training; forwards alone mean outputs."""
    plan = make_plan(plain(2), fill_drain(2, 2, backward=backward), loss=print, **options)
    assert expected == (plan.train, plan.outputs)


def test_a_plan_knows_its_counts() -> None:
    """Stages, microbatches, devices."""
    plan = make_plan(plain(4), interleaved(4, 6, num_devices=2), loss=print)
    assert (4, 6, 2) == (plan.num_stages, plan.num_microbatches, plan.num_devices)


def test_receives_and_sends_stand_around_their_action() -> None:
    """What comes in just before, what goes to other lanes just after; every value is freed as soon
    as it can be."""
    program = make_plan(plain(2), fill_drain(2, 1), loss=print).program
    assert [
        "0: receive input[0,0]@0 from caller",
        "0: 0F0  reads input[0,0]@0  writes act[0,0]@2 report[0,0]@3 residual[0,0]@4",
        "0: free input[0,0]@0",
        "0: send act[0,0]@2 to 1@0",
        "0: free act[0,0]@2",
        "1: receive act[0,0]@0 from 0",
        "1: receive target[1,0]@1 from caller",
        "1: 1F0  reads act[0,0]@0 target[1,0]@1  writes report[1,0]@2 residual[1,0]@3",
        "1: free act[0,0]@0 target[1,0]@1",
        "1: 1B0  reads residual[1,0]@3  writes grad[0,0]@4",
        "1: free residual[1,0]@3",
        "1: send grad[0,0]@4 to 0@1",
        "1: free grad[0,0]@4",
        "0: receive grad[0,0]@1 from 1",
        "0: 0B0  reads residual[0,0]@4 grad[0,0]@1",
        "0: free residual[0,0]@4 grad[0,0]@1",
    ] == list(program.lines())


def test_the_program_of_a_lane_prints() -> None:
    """Its slots, then its instructions."""
    lines = str(make_plan(plain(2), one_f_one_b(2, 3), loss=print).program.lane(0)).splitlines()
    assert (
        "lane 0, slots: 0 input from caller, 1 grad from 1, 2 act, 3 5 7 report, 4 6 residual"
        == lines[0]
    )
    assert "receive input[0,0]@0 from caller" == lines[1]
    assert ["0-2", "1 3", ""] == [spans([0, 1, 2]), spans([1, 3]), spans([])]


def test_programs_compare_hash_and_pickle_without_functions_or_caches() -> None:
    """Plain data: equal for equal stages and schedules, whatever their functions."""
    schedule = remat(one_f_one_b(3, 4))
    a = make_plan(plain(3), schedule, loss=print).program
    b = make_plan([Stage(lambda p, x: x)] * 3, schedule, loss=max).program
    bare = len(pickle.dumps(a))
    assert 3 == len(a.lanes)
    assert [*a.lanes] == [pickle.loads(pickle.dumps(lane)) for lane in a.lanes]
    assert [*map(hash, a.lanes)] == [*map(hash, b.lanes)]
    copied = pickle.loads(pickle.dumps(a))
    assert (a, hash(a), bare) == (b, hash(b), len(pickle.dumps(a)))
    assert (a, hash(a)) == (copied, hash(copied)) == (copy.deepcopy(a), hash(copy.deepcopy(a)))


def test_programs_of_other_schedules_differ() -> None:
    """Equality sees the order, what is kept, and the copies."""
    made = [
        fill_drain(2, 2),
        one_f_one_b(2, 2),
        remat(fill_drain(2, 2)),
        fill_drain(2, 2, num_devices=1),
        zero_bubble(2, 2),
    ]
    assert len(made) == len(
        {make_plan(plain(2), schedule, loss=print).program for schedule in made}
    )


def test_a_plan_pickles_where_its_functions_are_importable() -> None:
    """A process that gets it has the same lanes and the same fingerprint."""
    plan = make_plan([Stage(_half)] * 2, one_f_one_b(2, 3), loss=torch.nn.functional.cross_entropy)
    again = pickle.loads(pickle.dumps(plan))
    assert (plan.program, plan.fingerprint, plan.program.lanes) == (
        again.program,
        again.fingerprint,
        again.program.lanes,
    )


_half = pickle.loads  # a function that every process can import


def test_fingerprints_leave_functions_and_devices_out() -> None:
    """Equal plans in two processes agree, though their lambdas differ."""
    schedule = one_f_one_b(2, 3)
    a = make_plan([Stage(lambda p, x: x, "s")] * 2, schedule, loss=lambda y, t: y)
    b = make_plan(
        [Stage(lambda p, x: x * 2, "s")] * 2,
        Schedule.parse(str(schedule), name="other"),
        loss=max,
        devices="cpu",
    )
    assert a.fingerprint == b.fingerprint


def test_fingerprints_differ_where_plans_do() -> None:
    """Schedule, options, ties, and what stages declare."""
    schedule = one_f_one_b(2, 3)
    loss = {"loss": print}
    made = [
        make_plan(plain(2), schedule, loss=print),
        make_plan(plain(2), schedule),
        make_plan(plain(2), fill_drain(2, 3), loss=print),
        make_plan(plain(2), schedule.first(2), loss=print),
        make_plan(plain(2), schedule, **loss, train=False),
        make_plan(plain(2), schedule, **loss, outputs=True),
        make_plan(plain(2), schedule, **loss, ties=[[(0, "w"), (1, "w")]]),
        make_plan([Stage(keep, "a"), Stage(keep)], schedule, loss=print),
        make_plan([Stage(keep, feeds=("m",)), Stage(keep)], schedule, loss=print),
        make_plan([Stage(keep, state=True), Stage(keep)], schedule, loss=print),
        make_plan([Stage(keep, state=True, commit=max), Stage(keep)], schedule, loss=print),
        make_plan([Stage(keep, stash=("e",)), Stage(pass_on, pop=("e",))], schedule, loss=print),
    ]
    assert len(made) == len({plan.fingerprint for plan in made})


def test_slots_of_a_small_plan() -> None:
    """1F1B on three lanes: what may lie at the end of each edge at a time."""
    pools = make_plan(plain(3), one_f_one_b(3, 4), loss=print).program.pools
    assert {
        Pool(CALLER, 0, Role.INPUT, 1),
        Pool(CALLER, 2, Role.TARGET, 1),
        Pool(0, 1, Role.ACT, 2),
        Pool(1, 2, Role.ACT, 2),
        Pool(2, 1, Role.GRAD, 1),
        Pool(1, 0, Role.GRAD, 1),
    } == set(pools)


def test_fewer_microbatches_drop_the_actions_of_the_others() -> None:
    """A short batch runs the program of the first microbatches, which is remembered."""
    plan = make_plan(plain(4), interleaved(4, 6, num_devices=2), loss=print)
    short = program_for(plan, 4)
    lanes = [[str(lane.action(run)) for run in lane.runs] for lane in short.lanes]
    assert [[str(action) for action in order] for order in plan.schedule.first(4).orders] == lanes
    assert short is program_for(plan, 4)
    assert plan.program is program_for(plan, 6)
    assert 4 * 4 * 2 == len(short.order)


def test_a_plan_takes_little_memory_besides_its_schedule() -> None:
    """8 bytes an action: its place in plan order, as the check found it and as the program has
    it."""
    schedule, stages = one_f_one_b(32, 256), plain(32)
    gc.collect()
    tracemalloc.start()
    try:
        plan = make_plan(stages, schedule, loss=print)
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert taken < 16 * len(plan.program.order) + 200_000


def test_actions_and_values_are_built_from_their_numbers() -> None:
    """The order's codes and the wires' numbers mean what is printed."""
    program = make_plan(plain(2), fill_drain(2, 2), loss=print).program
    assert "0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1" == " ".join(
        str(program.action(code)) for code in program.order
    )
    assert [Action(Kind.F, 0, 0), Action(Kind.F, 0, 1)] == [
        program.action(code) for code in program.order[:2]
    ]
    assert ["input[0,0]", "input[0,1]"] == [str(program.value(number)) for number in range(2)]


@pytest.mark.parametrize("ties", [[(0, "w"), (1, "w")], [[(0, ["a"]), (1, ["a"])]], [3]])
def test_ties_of_a_wrong_shape_are_refused(ties: list[object]) -> None:
    """One pair of brackets left out, a path that is no key, no group at all."""
    with pytest.raises(PlanError, match="ties do not fit"):
        make_plan(plain(2), fill_drain(2, 1), ties=ties)  # pyright: ignore[reportArgumentType]


def test_stages_and_devices_may_be_iterators() -> None:
    """They are read once."""
    plan = make_plan(iter(plain(2)), fill_drain(2, 1), devices=iter(["cpu", "meta"]))  # pyright: ignore[reportArgumentType]
    assert (2, ("cpu", "meta")) == (plan.num_stages, plan.devices)
