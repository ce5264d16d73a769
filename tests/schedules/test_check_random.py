"""check against an independent judge: schedules broken at random are refused exactly where they
cannot run."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from funcpipe._src.core.errors import ScheduleError
from funcpipe._src.data.schedule import Action, Kind, Schedule
from funcpipe._src.schedules.families import (
    fill_drain,
    interleaved,
    looped_bfs,
    one_f_one_b,
    zero_bubble,
)
from funcpipe._src.schedules.legal import check
from funcpipe._src.schedules.transforms import gather_params, reduce_grads, remat, step_params

Orders = list[list[Action]]


def runs_to_the_end(orders: Orders) -> bool:
    """The judge, written from the definition: sweep over the devices until nothing moves."""
    everything = Counter(action for order in orders for action in order)
    done: set[Action] = set()
    at = [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for device, order in enumerate(orders):
            while at[device] < len(order) and is_ready(order[at[device]], done, everything):
                done.add(order[at[device]])
                at[device] += 1
                moved = True
    return all(here == len(order) for here, order in zip(at, orders, strict=True))


def is_ready(action: Action, done: set[Action], everything: Counter[Action]) -> bool:
    """Are the things that this action needs done."""
    kind, stage, microbatch, _ = action

    def has(what: Kind, where: int) -> bool:
        return Action(what, where, microbatch) in done

    first, reduced, stepped = Action(Kind.U, stage), Action(Kind.G, stage), Action(Kind.S, stage)
    if kind is Kind.U:
        early = not any(other.stage == stage and other.kind is not Kind.U for other in done)
        return {reduced, stepped}.isdisjoint(done) and (
            Action(Kind.U, stage, microbatch - 1) in done if microbatch else early
        )
    if first in everything and first not in done:
        return False
    if kind is Kind.F:
        return stage == 0 or has(Kind.F, stage - 1)
    if kind is Kind.R:
        return has(Kind.F, stage)
    if kind is Kind.W:
        return has(Kind.I, stage)
    if kind in (Kind.G, Kind.S):
        adding = (Kind.B, Kind.I, Kind.W)
        if kind is Kind.G and stepped in done:
            return False
        return all(
            other in done for other in everything if other.stage == stage and other.kind in adding
        )
    later = (
        stage + 1 > max(action.stage for action in everything)
        or has(Kind.B, stage + 1)
        or has(Kind.I, stage + 1)
    )
    again = Action(Kind.R, stage, microbatch)
    return has(Kind.F, stage) and later and (again not in everything or again in done)


def is_complete(orders: Orders) -> bool:
    """Does every (stage, microbatch) have its one F and its one backward, on one device, without
    gaps."""
    counts = Counter(action for order in orders for action in order)
    stages = {action.stage for action in counts}
    microbatches = {action.microbatch for action in counts if action.kind is not Kind.U}
    homes = {(action.stage, device) for device, order in enumerate(orders) for action in order}
    backward = any(action.kind not in (Kind.F, Kind.U) for action in counts)
    return (
        all(orders)
        and set(counts.values()) == {1}
        and stages == set(range(len(stages)))
        and microbatches == set(range(len(microbatches)))
        and len(homes) == len(stages)
        and {action.stage for action in counts if action.kind is Kind.U} in (set(), stages)
        and all(
            serves(order, at)
            for order in orders
            for at, action in enumerate(order)
            if action.kind is Kind.U
        )
        and all(
            is_whole({k for k in Kind if Action(k, s, m) in counts}, backward, m)
            for s in stages
            for m in microbatches
        )
    )


def serves(order: list[Action], at: int) -> bool:
    """Does the stage of a U compute after it, before its next."""
    once = (Kind.G, Kind.S)
    after = [
        action.kind
        for action in order[at + 1 :]
        if action.stage == order[at].stage and action.kind not in once
    ]
    return bool(after) and after[0] is not Kind.U


def is_whole(kinds: set[Kind], backward: bool, microbatch: int) -> bool:
    """F alone, or F with B or I W, with or without R; of the first microbatch, which stands for
    all, with or without G and S."""
    kinds = kinds - {Kind.U}  # its number is no microbatch's
    if backward and not microbatch:
        kinds = kinds - {Kind.G, Kind.S}
    rest = kinds - {Kind.F, Kind.R}
    return Kind.F in kinds and (
        rest in ({Kind.B}, {Kind.I, Kind.W}) if backward else kinds == {Kind.F}
    )


def accepts(orders: Orders) -> bool:
    """The answer of check."""
    try:
        check(Schedule(tuple(map(tuple, orders))))
    except ScheduleError:
        return False
    return True


@st.composite
def legal(draw: st.DrawFn) -> Orders:
    """A family at a small size, perhaps with remat of some."""
    family = draw(st.sampled_from([fill_drain, one_f_one_b, looped_bfs, interleaved, zero_bubble]))
    devices = draw(st.integers(1, 4))
    schedule = family(
        devices * draw(st.integers(1, 2)), draw(st.integers(1, 4)), num_devices=devices
    )
    if draw(st.booleans()):
        kept = draw(st.sets(st.integers(0, 3)))
        schedule = remat(schedule, keep=lambda action: action.microbatch in kept)
    if draw(st.booleans()):
        schedule = reduce_grads(schedule)
    if draw(st.booleans()):
        schedule = gather_params(schedule, ahead=draw(st.integers(0, 2)))
    if draw(st.booleans()):
        schedule = step_params(schedule)
    return [list(order) for order in schedule.orders]


def places(orders: Orders) -> list[tuple[int, int]]:
    """Every (device, position)."""
    return [(device, at) for device, order in enumerate(orders) for at in range(len(order))]


@st.composite
def broken(draw: st.DrawFn) -> Orders:
    """A legal schedule after a few blows: drop, duplicate, swap, move, rename."""
    orders = draw(legal())
    for _ in range(draw(st.integers(1, 3))):
        if not places(orders):
            break
        device, at = draw(st.sampled_from(places(orders)))
        other, to = draw(st.sampled_from(places(orders)))
        blow = draw(st.sampled_from(["drop", "duplicate", "swap", "next", "move", "rename"]))
        action = orders[device][at]
        if blow == "drop":
            del orders[device][at]
        elif blow == "duplicate":
            orders[other].insert(to, action)
        elif blow == "swap":
            orders[device][at], orders[other][to] = orders[other][to], action
        elif blow == "next" and at + 1 < len(orders[device]):
            orders[device][at : at + 2] = orders[device][at : at + 2][::-1]
        elif blow == "move":
            orders[other].insert(to, orders[device].pop(at))
        elif blow == "rename":
            orders[device][at] = action._replace(kind=draw(st.sampled_from(Kind)))
    return orders


@settings(deadline=None, database=None, max_examples=100)
@given(legal())
def test_what_a_family_makes_runs_to_the_end(orders: Orders) -> None:
    """The judge agrees that legal schedules are complete and run."""
    assert (True, True, True) == (is_complete(orders), runs_to_the_end(orders), accepts(orders))


@settings(deadline=None, database=None, max_examples=400)
@given(broken())
def test_check_accepts_exactly_what_is_complete_and_runs_to_the_end(orders: Orders) -> None:
    """No legal schedule is refused, no illegal one gets through."""
    assert (is_complete(orders) and runs_to_the_end(orders)) == accepts(orders)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0F0 0B0", True),
        ("0B0 0F0", False),
        ("1F0 0F0", False),
        ("0F0 0W0", False),
        ("0F0 0F1", True),
    ],
)
def test_the_judge_itself_can_say_no(text: str, expected: bool) -> None:
    """A judge that accepts everything would prove nothing."""
    assert expected == runs_to_the_end([list(order) for order in Schedule.parse(text).orders])
