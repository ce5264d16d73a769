"""Schedules as data: what the text form says, what compares equal, what a schedule knows of
itself."""

import pickle
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from funcpipe._src.core.errors import FuncpipeError, ScheduleError
from funcpipe._src.data.kinds import ONCE, WHOLE
from funcpipe._src.data.schedule import Action, Kind, Schedule
from funcpipe._src.schedules.families import (
    fill_drain,
    interleaved,
    looped_bfs,
    one_f_one_b,
    zero_bubble,
)
from funcpipe._src.schedules.legal import check
from funcpipe._src.schedules.transforms import remat

random_sizes = settings(deadline=None, database=None, max_examples=40)

indices = st.integers(0, 12) | st.integers(0, 999_999_999)
actions = st.builds(Action, st.sampled_from(Kind), indices, indices, st.none() | indices).map(
    lambda action: action._replace(
        microbatch=0 if action.kind in ONCE else action.microbatch,
        slice=None if action.kind in WHOLE else action.slice,
    )
)
orders = st.lists(st.lists(actions, min_size=1, max_size=12).map(tuple), max_size=5).map(tuple)

FAMILIES = [fill_drain, one_f_one_b, looped_bfs, interleaved, zero_bubble]


@pytest.mark.parametrize("kind", Kind)
def test_an_action_prints_as_stage_letter_microbatch(kind: Kind) -> None:
    """The text of an action is what the papers write."""
    assert f"12{kind.name}{'' if kind in ONCE else 3}" == str(Action(kind, 12, 3))


@random_sizes
@given(actions)
def test_an_action_reads_back_what_it_prints(action: Action) -> None:
    """parse is the inverse of str."""
    assert action == Action.parse(str(action))


JUNK = [
    *["", "F", "1F", "F0", "G", "2G0", "1FF0", "1X0", "1f0"],  # parts missing or unknown
    *["1F0xyz", "x1F0", "1F0 ", " 1F0", "1F0\n", "1F0,"],  # something around
    *["-1F0", "1F-1", "+1F0", "1.0F0", "1_0F0", "0x1F0", "1234567890F0", "1F1234567890"],
    *["\u0663F0", "1F\u0663", "\uff12F0", "1F\u00b2"],  # digits of other scripts
]


@pytest.mark.parametrize("text", JUNK)
def test_text_that_is_no_action_is_refused_by_name(text: str) -> None:
    """Nothing around, nothing missing, ASCII digits only; the message shows the text and how to
    write it."""
    with pytest.raises(ScheduleError) as error:
        Action.parse(text)
    assert (
        f"{text!r} is not an action: write stage, one of F B I W R O L U, microbatch, as in 2F0 "
        "(2F0.1: its slice 1); or stage and one of G S, as in 2G" == str(error.value)
    )


@random_sizes
@given(orders)
def test_a_schedule_reads_back_what_it_prints_legal_or_not(
    rows: tuple[tuple[Action, ...], ...],
) -> None:
    """Any order survives the round trip through text; legality is for check."""
    assert rows == Schedule.parse(str(Schedule(rows))).orders


def test_comments_blank_lines_and_wide_spaces_are_skipped() -> None:
    """A schedule file may be laid out and commented."""
    text = "\n# one device\n  0F0\t 0F1   0B0 0B1  # the end: 9X9\n\n#0F2\n1F0 1F1 1B0 1B1#tail\n"
    assert "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1" == str(Schedule.parse(text))


def test_a_text_without_actions_has_no_devices() -> None:
    """Empty text is an empty schedule, which check refuses."""
    empty = Schedule.parse("# nothing\n\n")
    assert ((), 0, 0, 0) == (
        empty.orders,
        empty.num_devices,
        empty.num_stages,
        empty.num_microbatches,
    )


def test_every_bad_word_is_named_at_once_with_its_line() -> None:
    """One message has all of them, in reading order, and no good word."""
    with pytest.raises(ScheduleError) as error:
        Schedule.parse("0F0 1F 0B0\n\n1F0xyz 1F1 # 7Q7\n-1F0 1X0")
    assert [
        "write stage, one of F B I W R O L U, microbatch, as in 2F0 (2F0.1: its slice 1); or "
        "stage and one of G S, as in 2G; two overlapping actions as in (0F3 1B1):",
        "  * line 1: '1F' is not an action",
        "  * line 3: '1F0xyz' is not an action",
        "  * line 4: '-1F0' is not an action",
        "  * line 4: '1X0' is not an action",
    ] == str(error.value).splitlines()


def test_a_schedule_error_is_a_funcpipe_error_and_a_value_error() -> None:
    """Callers may catch either."""
    assert (FuncpipeError, ValueError) == ScheduleError.__bases__


def test_equal_orders_are_equal_schedules_whatever_their_name() -> None:
    """The name is a label: it takes no part in == and hash."""
    a, b = Schedule.parse("0F0 0B0", name="a"), Schedule.parse("0F0 0B0", name="b")
    assert (a, hash(a), {a}) == (b, hash(b), {b})


def test_another_order_is_another_schedule() -> None:
    """Equality sees the order of actions and the place of devices."""
    texts = ["0F0 0F1\n1F0 1F1", "0F1 0F0\n1F0 1F1", "1F0 1F1\n0F0 0F1", "0F0 0F1 1F0 1F1"]
    assert len(texts) == len({Schedule.parse(text) for text in texts})


def test_lists_and_generators_become_tuples_so_that_a_schedule_always_hashes() -> None:
    """Whatever comes in, the data is frozen."""
    row = [Action(Kind.F, 0, 0)]
    assert hash(Schedule(((row[0],),))) == hash(Schedule([row]))  # pyright: ignore[reportArgumentType]
    made = Schedule((Action(Kind.F, s, m) for m in range(2)) for s in range(2))  # pyright: ignore[reportArgumentType]
    assert Schedule.parse("0F0 0F1\n1F0 1F1") == made


def test_a_schedule_pickles_with_its_name_and_without_its_caches() -> None:
    """What check remembers stays behind; the copy is equal, hashes alike and keeps its label."""
    schedule = interleaved(4, 4, num_devices=2)
    bare = len(pickle.dumps(schedule))
    check(schedule)
    assert schedule.is_ascending
    data = pickle.dumps(schedule)
    copy = pickle.loads(data)
    assert (schedule, hash(schedule), "interleaved", bare) == (
        copy,
        hash(copy),
        copy.name,
        len(data),
    )


def test_kinds_stay_singletons_through_pickle() -> None:
    """Identity is their hash, so a copy of a kind must be the kind."""
    assert all(kind is pickle.loads(pickle.dumps(kind)) for kind in Kind)


def test_a_schedule_is_frozen() -> None:
    """Data does not change."""
    with pytest.raises(AttributeError):
        fill_drain(1, 1).orders = ()  # pyright: ignore[reportAttributeAccessIssue]


def test_counts_are_one_more_than_the_largest_index() -> None:
    """Stages, microbatches, devices are read off the orders."""
    schedule = Schedule.parse("0F0 3F1\n1F4")
    assert (4, 5, 2) == (schedule.num_stages, schedule.num_microbatches, schedule.num_devices)


def test_device_of_tells_where_each_stage_lives() -> None:
    """Blocks, loops and V placements, and -1 for a stage without actions."""
    v_shape = Schedule.parse("0F0 3F0\n1F0 2F0")
    gap = Schedule.parse("2F0\n0F0")
    schedules = [one_f_one_b(5, 1, num_devices=2), interleaved(4, 1, num_devices=2), v_shape, gap]
    assert [(0, 0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0), (1, -1, 0)] == [
        one.device_of for one in schedules
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0 0F1", False),
        ("0F0 0B0", True),
        ("0F0 0I0 0W0", True),
        ("0F0\n1F0 1B0", True),
        ("0F0 0R0", True),
        ("", False),
    ],
)
def test_has_backward_is_anything_but_forwards(text: str, expected: bool) -> None:
    """A schedule of forwards alone is for evaluation."""
    assert expected == Schedule.parse(text).has_backward


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0 0F1 0B0 0B1", True),
        ("0F0 0F1 0B1 0B0", False),
        ("0F1 0F0 0B0 0B1", True),
        ("0F0 0F1 0R1 0R0 0B0 0B1", True),
        ("0F0 0F1 1F0 1F1 1B0 1B1 0B0 0B1", True),
        ("0F0 0F1 1F0 1F1 1B0 1B1 0B1 0B0", False),
        ("0F0 0F1 0I0 0I1 0W0 0W1", True),
        ("0F0 0F1 0I0 0I1 0W1 0W0", False),
        ("0F0 0F1 0I1 0I0 0W0 0W1", False),
        ("0F0 0F1 0I1 0B0 0W1", False),
        ("0F0 0F1 0I0 0B1 0W0", False),  # B puts its weights before those of the earlier microbatch
        ("0F0 0F1 0I0 0W0 0B1", True),
        ("0F0 0F1\n1F0 1F1 1B1 1B0", False),
        ("0F0 0F1", True),
    ],
)
def test_is_ascending_looks_at_backwards_of_each_stage_only(text: str, expected: bool) -> None:
    """Schedules agree bit for bit if every stage accumulates in ascending order; B, I and W all
    count."""
    assert expected == Schedule.parse(text).is_ascending


def test_lines_end_at_newlines_only() -> None:
    """A form feed in a comment makes no new device."""
    assert 1 == Schedule.parse("0F0 # page\f0F1\r\n").num_devices


def test_backward_order_is_that_of_the_backwards() -> None:
    """B, I and W, each stage for itself."""
    schedule = Schedule.parse("0F0 0R0 0F1 0F2 0B1 0B0 0B2\n1F0 1F1 1F2 1I0 1I1 1I2 1W2 1W0 1W1")
    texts = [" ".join(map(str, schedule.backward_order(stage))) for stage in range(2)]
    assert ["0B1 0B0 0B2", "1I0 1I1 1I2 1W2 1W0 1W1"] == texts
    assert () == fill_drain(2, 3, backward=False).backward_order(1)


def test_first_drops_the_actions_of_the_other_microbatches() -> None:
    """The order of the rest and the name stay."""
    fewer = one_f_one_b(2, 4).first(2)
    assert ("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", "1F1B") == (str(fewer), fewer.name)


@pytest.mark.parametrize("count", [3, 100])
def test_first_of_enough_microbatches_is_the_schedule_itself(count: int) -> None:
    """Nothing to drop, nothing to build."""
    schedule = fill_drain(2, 3)
    assert schedule is schedule.first(count)


@random_sizes
@given(st.sampled_from(FAMILIES), st.integers(1, 6), st.integers(1, 12), st.integers(1, 12))
def test_first_of_a_legal_schedule_is_legal(
    family: Callable[..., Schedule], stages: int, microbatches: int, count: int
) -> None:
    """Dropping microbatches leaves nobody waiting."""
    fewer = remat(family(stages, microbatches)).first(count)
    check(fewer)
    assert (stages, min(count, microbatches)) == (fewer.num_stages, fewer.num_microbatches)


def test_repr_names_the_schedule_and_its_counts() -> None:
    """A schedule in a notebook or a traceback is one short line."""
    expected = "<Schedule interleaved: 4 stages, 8 microbatches, 2 devices>"
    assert expected == repr(interleaved(4, 8, num_devices=2))
