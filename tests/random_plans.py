"""Random legal schedules, nets with random skips and feeds, and plans of these; strategies of
hypothesis."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from funcpipe._src.data.plan import Plan
from funcpipe._src.data.schedule import Action, Kind, Schedule
from funcpipe._src.data.stage import Stage
from funcpipe._src.lower.plan import make_plan
from funcpipe._src.schedules.pairs import may_overlap, together


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any legal schedule: any placement of stages, any order that can run, any mix of B, I W and R,
    slices, pairs or none."""
    stages, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    slices = draw(st.sampled_from([1, 1, 2, 3]))
    pieces = [
        (m, None if slices == 1 else number)
        for m in range(microbatches)
        for number in range(slices)
    ]
    places = draw(st.lists(st.integers(0, 3), min_size=stages, max_size=stages))
    device_of = [sorted(set(places)).index(place) for place in places]
    backward = draw(st.sampled_from(["", "B", "IW", "mixed"]))
    again = draw(st.sampled_from(["never", "always", "some"])) if backward else "never"
    left: dict[tuple[int, int, int | None], list[Kind]] = {}
    for at in [(s, *piece) for s in range(stages) for piece in pieces]:
        ending = (
            (draw(st.sampled_from(["B", "IW"])) if backward == "mixed" else backward)
            if backward
            else ""
        )
        remat = "R" if again == "always" or (again == "some" and draw(st.booleans())) else ""
        left[at] = [Kind[letter] for letter in f"F{remat}{ending}"]
    orders: list[list[Action]] = [[] for _ in set(device_of)]
    chance = draw(st.randoms(use_true_random=False))
    while left:
        ready = [at for at in left if _may(left, at, stages)]
        at = chance.choice(ready)
        kinds = left[at]
        orders[device_of[at[0]]].append(Action(kinds.pop(0), *at))
        if not kinds:
            del left[at]
    schedule = Schedule(tuple(map(tuple, orders)))
    if not draw(st.booleans()):
        return schedule
    places: list[list[int]] = []
    for order in schedule.orders:
        places.append([])
        for at, (one, other) in enumerate(pairwise(order)):
            if at - 1 not in places[-1] and may_overlap(one, other) and chance.random() < 0.5:
                places[-1].append(at)
    return together(schedule, places)


def _may(
    left: dict[tuple[int, int, int | None], list[Kind]],
    at: tuple[int, int, int | None],
    stages: int,
) -> bool:
    """May the next action of a (stage, microbatch, slice) run."""
    (stage, microbatch, number), kind = at, left[at][0]

    def lacks(stage: int, number: int | None, kinds: set[Kind]) -> bool:
        return bool(kinds & set(left.get((stage, microbatch, number), ())))

    if kind is Kind.F:
        before = lacks(stage, number - 1, {Kind.F}) if number else False
        return not before and (stage == 0 or not lacks(stage - 1, number, {Kind.F}))
    if kind is Kind.B or kind is Kind.I:
        waits = {Kind.F, Kind.R, Kind.B, Kind.I}
        after = lacks(stage, number + 1, waits) if number is not None else False
        return not after and (stage == stages - 1 or not lacks(stage + 1, number, waits))
    return True


@st.composite
def nets(draw: st.DrawFn, count: int) -> list[Stage]:
    """Stages with random skips, each popped by one or several later stages, and random feeds,
    shared or not."""
    stash: list[list[str]] = [[] for _ in range(count)]
    pop: list[list[str]] = [[] for _ in range(count)]
    for number in range(draw(st.integers(0, 4)) if count > 1 else 0):
        source = draw(st.integers(0, count - 2))
        stash[source].append(f"e{number}")
        for popper in draw(st.sets(st.integers(source + 1, count - 1), min_size=1)):
            pop[popper].append(f"e{number}")
    feeds = [draw(st.sets(st.sampled_from(["mask", "scale"]))) for _ in range(count)]
    return [
        Stage(
            lambda p, x, **extras: x,
            stash=tuple(a),
            pop=tuple(b),
            feeds=tuple(sorted(c)),
            carry=draw(st.booleans()),
        )
        for a, b, c in zip(stash, pop, feeds, strict=True)
    ]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A plan of a random net under a random schedule, with or without loss and outputs."""
    schedule = draw(schedules())
    loss = print if draw(st.booleans()) else None
    outputs = draw(st.sampled_from([None, True, False]))
    return make_plan(draw(nets(schedule.num_stages)), schedule, loss=loss, outputs=outputs)


@st.composite
def unequal(draw, cost, microbatches):
    """The cost with factors of so many microbatches: none, of times and memory, or of each."""
    factors = st.lists(st.sampled_from([1, 2, 3]), min_size=microbatches, max_size=microbatches)
    none = st.just(())
    times, sizes = draw(none | factors), draw(none | factors)
    return replace(cost, microbatches=times, microbatch_sizes=sizes)
