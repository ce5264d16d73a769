"""Random legal schedules, nets with random skips and feeds, and plans of these; strategies of hypothesis."""

from hypothesis import strategies as st

from funcpipe.core.plan import Plan
from funcpipe.core.schedule import Action, Kind, Schedule
from funcpipe.core.stage import Stage
from funcpipe.lower.plan import make_plan


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Any legal schedule: any placement of stages, any order that can run, any mix of B, I W and R."""
    stages, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    places = draw(st.lists(st.integers(0, 3), min_size=stages, max_size=stages))
    device_of = [sorted(set(places)).index(place) for place in places]
    backward = draw(st.sampled_from(["", "B", "IW", "mixed"]))
    again = draw(st.sampled_from(["never", "always", "some"])) if backward else "never"
    left: dict[tuple[int, int], list[Kind]] = {}
    for at in [(s, m) for s in range(stages) for m in range(microbatches)]:
        ending = (draw(st.sampled_from(["B", "IW"])) if backward == "mixed" else backward) if backward else ""
        remat = "R" if again == "always" or (again == "some" and draw(st.booleans())) else ""
        left[at] = [Kind[letter] for letter in f"F{remat}{ending}"]
    orders: list[list[Action]] = [[] for _ in set(device_of)]
    chance = draw(st.randoms(use_true_random=False))
    while left:
        ready = [at for at in left if _may(left, *at, stages)]
        stage, microbatch = chance.choice(ready)
        kinds = left[stage, microbatch]
        orders[device_of[stage]].append(Action(kinds.pop(0), stage, microbatch))
        if not kinds:
            del left[stage, microbatch]
    return Schedule(tuple(map(tuple, orders)))


def _may(left: dict[tuple[int, int], list[Kind]], stage: int, microbatch: int, stages: int) -> bool:
    """May the next action of a (stage, microbatch) run."""
    kind = left[stage, microbatch][0]
    if kind is Kind.F:
        return stage == 0 or Kind.F not in left.get((stage - 1, microbatch), ())
    if kind is Kind.B or kind is Kind.I:
        return stage == stages - 1 or not {Kind.F, Kind.R, Kind.B, Kind.I} & set(left.get((stage + 1, microbatch), ()))
    return True


@st.composite
def nets(draw: st.DrawFn, count: int) -> list[Stage]:
    """Stages with random skips, each popped by one or several later stages, and random feeds, shared or not."""
    stash: list[list[str]] = [[] for _ in range(count)]
    pop: list[list[str]] = [[] for _ in range(count)]
    for number in range(draw(st.integers(0, 4)) if count > 1 else 0):
        source = draw(st.integers(0, count - 2))
        stash[source].append(f"e{number}")
        for popper in draw(st.sets(st.integers(source + 1, count - 1), min_size=1)):
            pop[popper].append(f"e{number}")
    feeds = [draw(st.sets(st.sampled_from(["mask", "scale"]))) for _ in range(count)]
    return [
        Stage(lambda p, x, **extras: x, stash=tuple(a), pop=tuple(b), feeds=tuple(sorted(c)))
        for a, b, c in zip(stash, pop, feeds, strict=True)
    ]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """A plan of a random net under a random schedule, with or without loss and outputs."""
    schedule = draw(schedules())
    loss = print if draw(st.booleans()) else None
    outputs = draw(st.sampled_from([None, True, False]))
    return make_plan(draw(nets(schedule.num_stages)), schedule, loss=loss, outputs=outputs)
