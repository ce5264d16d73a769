"""Lane programs by the clock, against the clock of schedules: any schedule, any cost."""

import sys
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

import funcpipe as fp
from funcpipe.core.stage import Stage
from funcpipe.schedules.memory import running_sum
from funcpipe.view.play import Play

sys.path.insert(0, str(Path(__file__).parents[1] / "lower"))
from test_programs_random import schedules


@st.composite
def costs(draw, stages):
    """Any cost of so many stages, in whole numbers: sums are exact."""
    number = st.integers(0, 4).map(float)
    each = lambda: draw(st.lists(number, min_size=stages, max_size=stages))
    pairs = [(stash, pop) for stash in range(stages) for pop in range(stash + 1, stages)]
    chosen = draw(st.lists(st.sampled_from(pairs), max_size=3, unique=True)) if pairs else []
    return fp.Cost(
        each(),
        each(),
        each(),
        backward=each(),
        remat=each(),
        offload=each(),
        comm=draw(number),
        bandwidth=draw(st.sampled_from([None, 1.0, 2.0])),
        output=each(),
        skips=[(*pair, draw(number)) for pair in chosen],
        residual=each(),
    )


def stages_of(schedule, cost):
    """Stages that do nothing, with the skips of the cost."""
    names = [(skip.stash, skip.pop, f"s{number}") for number, skip in enumerate(cost.skips)]
    return [
        Stage(
            lambda p, x, **extras: x,
            stash=tuple(name for stash, _, name in names if stash == stage),
            pop=tuple(name for _, pop, name in names if pop == stage),
        )
        for stage in range(schedule.num_stages)
    ]


@settings(max_examples=300)
@given(st.data())
def test_with_slots_enough_a_program_takes_the_time_of_its_schedule(data):
    """Spans and memory, for any schedule and any cost."""
    schedule = data.draw(schedules())
    cost = data.draw(costs(schedule.num_stages))
    plan = fp.make_plan(stages_of(schedule, cost), schedule, loss=print if schedule.has_backward else None)
    play = Play(plan.program, cost, bounded=False)
    play.run()
    expected = fp.simulate(schedule, cost)
    found = {action: (start, end) for lane in play.lanes for action, start, end in lane.spans}
    assert {span.action: (span.start, span.end) for span in expected.spans} == found
    assert expected.memory == tuple(running_sum(lane.changes) for lane in play.lanes)
