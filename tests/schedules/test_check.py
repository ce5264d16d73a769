"""check names every fault of a schedule at once; a deadlock comes with the picture of who waits for
what."""

import pytest

from funcpipe._src.core.errors import ScheduleError
from funcpipe._src.data.schedule import Action, Kind, Schedule
from funcpipe._src.schedules.families import interleaved, one_f_one_b, zero_bubble
from funcpipe._src.schedules.legal import check, examine
from funcpipe._src.schedules.transforms import remat


def faults_of(schedule: Schedule | str) -> list[str]:
    """The lines of the refusal, the title left out."""
    with pytest.raises(ScheduleError) as error:
        check(Schedule.parse(schedule, name="mine") if isinstance(schedule, str) else schedule)
    title, *lines = str(error.value).splitlines()
    assert title in (
        "schedule 'mine' is not legal:",
        "schedule 'custom' is not legal:",
        "schedule 'mine' cannot come to its end; move one of these actions before what it blocks:",
    )
    return [line.removeprefix("  * ") for line in lines]


LEGAL = {
    "forwards alone": "0F0 0F1\n1F0 1F1",
    "descending": "0F1 0F0 0B1 0B0",
    "B and I W mixed in a stage": "0F0 0F1 0B0 0I1 0W1",
    "W at the very end": "0F0 0F1 0I0 0I1 0W1 0W0",
    "R right after F": "0F0 0R0 0B0",
    "R of some": "0F0 0F1 0B0 0R1 0B1\n1F0 1R0 1B0 1F1 1I1 1W1",
    "R I W": "0F0 0R0 0I0 0W0",
    "V placement": "0F0 3F0 3B0 0B0\n1F0 2F0 2B0 1B0",
    "devices out of order": "1F0 1B0\n0F0 0B0",
}


@pytest.mark.parametrize("text", LEGAL.values(), ids=LEGAL)
def test_any_order_that_can_run_is_legal(text: str) -> None:
    """Schedules need not come from a family."""
    assert None is check(Schedule.parse(text))


ONE_FAULT = {
    "F missing": ("0F0 0F1\n1F0", ["1F1 is missing"]),
    "B missing": ("0F0 0F1 0B1", ["0B0 is missing (or 0I0 and 0W0)"]),
    "W missing": ("0F0 0I0", ["0W0 is missing: I and W come in pairs"]),
    "B and I": (
        "0F0 0B0 0I0 0W0",
        ["0B0 and 0I0 both appear: backward, or backward of input, not both"],
    ),
    "F twice": ("0F0 0F0\n1F0", ["0F0 on device 0 appears twice"]),
    "B twice": ("0F0 0B0 0B0", ["0B0 on device 0 appears twice"]),
    "W twice": (
        "0F0\n1F0 1I0 1W0 1W0",
        ["1W0 on device 1 appears twice", "0B0 is missing (or 0I0 and 0W0)"],
    ),
    "R twice": ("0F0 0R0 0R0 0B0", ["0R0 on device 0 appears twice"]),
    "R without a backward": ("0F0 0R0", ["0B0 is missing (or 0I0 and 0W0)"]),
    "B before F": ("0B0 0F0", ["0B0 on device 0 comes too early: F must come first"]),
    "B without F": ("0F0 0B0\n1B0", ["1F0 is missing"]),
    "W before I": ("0F0 0W0 0I0", ["0W0 on device 0 comes too early: W must come after I"]),
    "R before F": ("0R0 0F0 0B0", ["0R0 on device 0 comes too early: F must come first"]),
    "L before O": ("0F0 0L0 0O0 0B0", ["0L0 on device 0 comes too early: L must come after O"]),
    "R after B": (
        "0F0 0B0 0R0",
        ["0R0 on device 0 comes too late: R must come before the backward"],
    ),
    "R after I": (
        "0F0 0I0 0R0 0W0",
        ["0R0 on device 0 comes too late: R must come before the backward"],
    ),
    "W without I": (
        "0F0 0W0",
        ["0B0 is missing (or 0I0 and 0W0)", "0I0 is missing: I and W come in pairs"],
    ),
    "W beside B": ("0F0 0B0 0W0", ["0I0 is missing: I and W come in pairs, without 0B0"]),
    "stage on two devices": (
        "0F0 1F0\n0F1 1F1",
        [
            "0F0 on device 0: stage 0 is on device 1 too; a stage runs on one device",
            "1F0 on device 0: stage 1 is on device 1 too; a stage runs on one device",
        ],
    ),
    "microbatch gap": (
        "0F0 0F2",
        ["microbatch 1 is missing, but microbatch 2 appears; number them from 0, without gaps"],
    ),
    "stage gap": (
        "0F0\n2F0",
        ["stage 1 is missing, but stage 2 appears; number them from 0, without gaps"],
    ),
    "counted from 1": (
        "1F1 1B1 1F2 1B2\n2F1 2B1 2F2 2B2",
        [
            "stage 0 is missing, but stage 2 appears; number them from 0, without gaps",
            "microbatch 0 is missing, but microbatch 2 appears; number them from 0, without gaps",
        ],
    ),
}


@pytest.mark.parametrize(("text", "expected"), ONE_FAULT.values(), ids=ONE_FAULT)
def test_each_kind_of_fault_is_named_by_action_and_device(text: str, expected: list[str]) -> None:
    """Word for word, so that nobody makes the messages vaguer unseen."""
    assert expected == faults_of(text)


def test_faults_of_all_kinds_come_in_one_message() -> None:
    """One run of check, one list to mend."""
    expected = [
        "1B0 on device 1 comes too early: F must come first",
        "1W1 on device 1 comes too early: W must come after I",
        "2F0 on device 2 appears twice",
        "0F2 is missing",
        "2F2 is missing",
        "0B1 is missing (or 0I1 and 0W1)",
        "2B0 is missing (or 2I0 and 2W0)",
        "2B1 is missing (or 2I1 and 2W1)",
        "2B2 is missing (or 2I2 and 2W2)",
        "0I1 is missing: I and W come in pairs",
        "2I1 is missing: I and W come in pairs",
    ]
    text = "0F0 0F1 0B0 0W1 0B2\n1B0 1F0 1F1 1W1 1I1 1F2 1B2\n2F0 2F1 2F0 2W1"
    assert set(expected) <= set(faults_of(text))


def test_a_very_wrong_schedule_shows_twenty_faults_and_counts_the_rest() -> None:
    """A message is for reading."""
    lines = faults_of("\n".join(f"{stage}F{stage} {stage}B{stage}" for stage in range(5)))
    assert (21, "and 20 more") == (len(lines), lines[-1])


def test_what_is_no_schedule_is_refused() -> None:
    """Text, rows of another library: check says what it takes, and who reads text."""
    with pytest.raises(
        ScheduleError,
        match=r"^check takes a schedule; got a str; Schedule.parse\(text\) reads one$",
    ):
        check("0F0 0B0")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ScheduleError, match=r"^check takes a schedule; got a list$"):
        check([["0F0"]])  # pyright: ignore[reportArgumentType]


def test_a_schedule_without_devices_is_refused() -> None:
    """Empty is not legal."""
    assert ["it has no devices"] == faults_of(Schedule(()))


def test_devices_without_work_are_named() -> None:
    """A lane that runs nothing is a mistake in the counts."""
    schedule = Schedule(((), Schedule.parse("0F0").orders[0], ()))
    assert [f"device {d} runs nothing; leave it out" for d in (0, 2)] == faults_of(schedule)


class _Rude:
    """A thing whose repr fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("entry", "shown"),
    [
        ("0F0", "'0F0'"),
        (None, "None"),
        ((Kind.F, 0, 0), "(<Kind.F: 'F'>, 0, 0)"),
        (Action(Kind.F, -1, 0), "-1F0"),
        (Action(Kind.F, 0, -2), "0F-2"),
        (Action(Kind.F, True, 0), "TrueF0"),
        (Action(Kind.F, 0, 1.0), "0F1.0"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_entries_that_are_no_actions_are_shown(entry: object, shown: str) -> None:
    """None (another library's bubble), text, plain tuples, other numbers; check may not fail on
    any."""
    schedule = Schedule(((Action(Kind.F, 0, 0),), (entry,)))  # pyright: ignore[reportArgumentType]
    rest = (
        "on device 1 is not an action: write Action(Kind.F, stage, microbatch) with numbers from 0"
    )
    if isinstance(entry, str):
        rest += ", or read words: Action.parse('0F0'), Schedule.parse('0F0 0B0')"
    assert [f"{shown} {rest}"] == faults_of(schedule)


def test_an_entry_that_cannot_be_shown_does_not_hide_the_fault() -> None:
    """A repr or str that raises is replaced."""
    odd = Action("F", 0, 0)  # pyright: ignore[reportArgumentType]
    lines = faults_of(Schedule(((_Rude(), odd),)))  # pyright: ignore[reportArgumentType]
    assert ["_Rude object at", "Action(kind='F', stage=0,"] == [
        word
        for word, line in zip(("_Rude object at", "Action(kind='F', stage=0,"), lines, strict=True)
        if word in line
    ]


def test_all_malformed_entries_and_empty_devices_come_at_once() -> None:
    """Words first: one message for all of them."""
    schedule = Schedule(((None, Action(Kind.B, -1, 0)), (), ("x",)))  # pyright: ignore[reportArgumentType]
    expected = [
        "None on device 0",
        "-1B0 on device 0",
        "device 1 runs nothing; leave it out",
        "'x' on device 2",
    ]
    assert expected == [line.partition(" is not an action")[0] for line in faults_of(schedule)]


@pytest.mark.parametrize("what", ["stage", "microbatch"])
def test_an_absurd_number_is_a_gap_not_an_allocation(what: str) -> None:
    """A typo by twenty zeros is named at once, before anything is allocated by the largest
    index."""
    schedule = Schedule(((Action(Kind.F, 0, 0), Action(Kind.F, 0, 0)._replace(**{what: 10**20})),))
    assert [
        f"{what} 1 is missing, but {what} {10**20} appears; number them from 0, without gaps"
    ] == faults_of(schedule)


def test_devices_that_wait_for_each_other_are_drawn() -> None:
    """Who waits before what, for what, where that stands, and behind what."""
    assert [
        (
            "device 0 cannot start 0B0 before 1B0; "
            "device 1 runs 1B0 1 action after 1F1, where it waits itself"
        ),
        (
            "device 1 cannot start 1F1 before 0F1; "
            "device 0 runs 0F1 1 action after 0B0, where it waits itself"
        ),
    ] == faults_of("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")


def test_the_picture_shows_devices_that_are_done_and_waits_for_i() -> None:
    """Three devices: one at its end, two in a knot; split backwards are named as they stand."""
    assert [
        "device 0 cannot start 0I0 before 1I0; device 1 cannot start 1I0 either",
        (
            "device 1 cannot start 1I0 before 2I0; "
            "device 1 runs 2I0 2 actions after 1I0, where it waits itself"
        ),
    ] == faults_of("0F0 0I0 0W0\n1F0 2F0 1I0 1W0 2I0 2W0")
    assert "device 2 is done" == faults_of("0F0 1F0 0B0 1B0\n2F0 2B0\n3F0 3B0")[-1]


def test_a_device_may_wait_for_itself() -> None:
    """Two stages on one device in an order that cannot be."""
    assert [
        (
            "device 0 cannot start 1F0 before 0F0; "
            "device 0 runs 0F0 1 action after 1F0, where it waits itself"
        )
    ] == (faults_of("1F0 0F0"))


def test_the_plan_order_holds_every_action_once_and_after_what_it_needs() -> None:
    """What check hands to lowering is an order in which one thread can run."""
    schedule = remat(zero_bubble(6, 7, num_devices=3), keep=lambda action: action.stage == 1)
    actions = [action for order in schedule.orders for action in order]
    order = [actions[number] for number in examine(schedule)]
    at = {action: place for place, action in enumerate(order)}
    assert len(order) == len(at) == sum(map(len, schedule.orders))
    for row in schedule.orders:
        assert sorted(at[action] for action in row) == [at[action] for action in row]
    for kind, stage, microbatch, _ in order:
        if kind is Kind.F and stage:
            assert at[Action(Kind.F, stage - 1, microbatch)] < at[Action(kind, stage, microbatch)]
        if kind is Kind.I and stage < 5:
            assert at[Action(Kind.I, stage + 1, microbatch)] < at[Action(kind, stage, microbatch)]


def test_check_is_remembered_on_the_schedule() -> None:
    """A legal schedule is examined once."""
    schedule = one_f_one_b(3, 4)
    assert examine(schedule) is examine(schedule)


def test_a_large_schedule_is_checked_in_one_go() -> None:
    """64 devices, 128 stages, 256 microbatches: 65,536 actions, each in the plan order once."""
    plan_order = examine(interleaved(128, 256, num_devices=64))
    assert [*range(2 * 128 * 256)] == sorted(plan_order)


def test_the_clock_looks_at_each_action_a_bounded_number_of_times() -> None:
    """Linear: a device that waits is woken by what it waits for, not asked again and again."""

    class Counted(list[tuple[int, int, int]]):
        looks = 0

        def __getitem__(self, at: object) -> tuple[int, int, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
            Counted.looks += 1
            return super().__getitem__(at)  # pyright: ignore[reportArgumentType, reportCallIssue]

    from funcpipe._src.schedules.clock import chain, clock, coded

    for devices, count in ((4, 16), (16, 64)):
        Counted.looks = 0
        lanes = tuple(map(Counted, coded(one_f_one_b(devices, count).orders)))
        stuck = clock(
            lanes, range(devices), count, [[1.0] * devices] * len(Kind), chain(devices)
        ).stuck
        assert [] == stuck
        assert Counted.looks <= 2 * sum(map(len, lanes))
