"""Lane programs by the clock: any schedule, any cost; against the clock of schedules, and against a
real run."""

import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import unequal

import funcpipe as fp
from funcpipe._src.data.overlapping import pairs_in
from funcpipe._src.data.program import Receive, Role
from funcpipe._src.data.stage import Stage
from funcpipe._src.engine.execute import LaneExecutor
from funcpipe._src.schedules.clock import CODED, clock, coded, edges_of, shares_column
from funcpipe._src.schedules.memory import residual_peak
from funcpipe._src.view.play import Play
from funcpipe.testing import assert_matches_sequential

sys.path.insert(0, str(Path(__file__).parents[1] / "lower"))
from test_programs_random import schedules


@st.composite
def costs(draw, stages, least=0):
    """Any cost of so many stages, in whole numbers: sums are exact."""
    number = st.integers(least, 4).map(float)
    each = lambda: draw(st.lists(number, min_size=stages, max_size=stages))
    pairs = [(stash, pop) for stash in range(stages) for pop in range(stash + 1, stages)]
    chosen = draw(st.lists(st.sampled_from(pairs), max_size=3, unique=True)) if pairs else []
    forward, remat, inward, backward = each(), each(), each(), each()
    waits = st.sampled_from([0.0, 0.5, 1.0])
    return fp.Cost(
        forward,
        inward,
        each(),
        backward=backward,
        remat=remat,
        forward_link=[draw(waits) * min(times) for times in zip(forward, remat, strict=True)],
        backward_link=[draw(waits) * min(times) for times in zip(inward, backward, strict=True)],
        offload=each(),
        comm=draw(number),
        bandwidth=draw(st.sampled_from([None, 1.0, 2.0])),
        output=each(),
        skips=[(*pair, draw(number)) for pair in chosen],
        residual=each(),
    )


def skipping(count, cost):
    """Stages that do nothing, with the skips of the cost."""
    names = [(skip.stash, skip.pop, f"s{number}") for number, skip in enumerate(cost.skips)]
    return [
        Stage(
            lambda p, x, **extras: x,
            stash=tuple(name for stash, _, name in names if stash == stage),
            pop=tuple(name for _, pop, name in names if pop == stage),
        )
        for stage in range(count)
    ]


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data())
def test_a_program_starts_its_actions_when_the_clock_of_its_schedule_does(data):
    """The clock knows no programs; where there are slots enough, for any schedule and any cost, it
    sees the same."""
    schedule = data.draw(schedules())
    cost = data.draw(unequal(data.draw(costs(schedule.num_stages)), schedule.num_microbatches))
    count, device_of, slices = schedule.num_stages, schedule.device_of, schedule.num_slices
    factors = cost.factors(schedule.num_microbatches)
    both = {
        pair: cost.both(*((*action[:2], factors[action.microbatch][0] / slices) for action in pair))
        for pair in schedule.pairs
    }
    starts, stuck = clock(
        coded(schedule.orders, slices),
        device_of,
        schedule.num_pieces,
        [[cost.of(kind, stage) / slices for stage in range(count)] for kind in CODED],
        [edge._replace(link=edge.link / slices) for edge in edges_of(cost, device_of)],
        [
            {at: both[order[at], order[at + 1]] for at in schedule.joined(order)}
            for order in schedule.orders
        ],
        shares=[factor for factor in factors for _ in range(slices)],
    )
    assert not stuck
    expected = {
        action: start
        for order, row in zip(schedule.orders, starts, strict=True)
        for action, start in zip(order, row)
    }
    timeline = fp.simulate(schedule, cost)
    equal = (lambda value: value) if slices == 1 else pytest.approx
    assert {span.action: span.start for span in timeline.spans} == equal(expected)
    together = {action: time for pair, time in both.items() for action in pair}
    for span in timeline.spans:
        column = shares_column(span.action.kind)
        factor = 1 if column is None else factors[span.action.microbatch][column]
        alone = cost.of(span.action.kind, span.action.stage) / slices * factor
        assert span.end - span.start == equal(together.get(span.action, alone))
    assert {span.action for span in timeline.spans if together.get(span.action)} == {
        *pairs_in(timeline.spans)
    }


@settings(max_examples=200)
@given(st.data())
def test_residuals_are_those_of_the_order(data):
    """Where nothing lies between stages, what devices hold follows from their orders."""
    schedule = data.draw(schedules())
    cost = replace(data.draw(costs(schedule.num_stages)), output=0.0, skips=())
    cost = data.draw(unequal(cost, schedule.num_microbatches))
    peaks = [residual_peak(order, schedule, cost) for order in schedule.orders]
    # The two of a pair free at one moment, and the order adds what they free in another order than
    # the clock.
    assert list(fp.simulate(schedule, cost).peak) == pytest.approx(peaks, rel=1e-12, abs=1e-12)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.data())
def test_a_plan_is_its_schedule_and_waits_for_slots(data):
    """Never earlier; as early where there is room."""
    schedule = data.draw(schedules())
    cost = data.draw(unequal(data.draw(costs(schedule.num_stages)), schedule.num_microbatches))
    plan = fp.make_plan(
        skipping(schedule.num_stages, cost), schedule, loss=print if schedule.has_backward else None
    )
    alone = {span.action: span.start for span in fp.simulate(schedule, cost).spans}
    assert all(span.start >= alone[span.action] for span in fp.simulate(plan, cost).spans)
    roomy = Play(plan.program, cost, bounded=False)
    roomy.run()
    assert {span.action: span.start for lane in roomy.lanes for span in lane.spans} == alone


@settings(max_examples=200)
@given(st.data())
def test_the_critical_path_is_a_chain_of_causes(data):
    """It begins at 0, and nothing on it starts before what it waits for has ended."""
    schedule = data.draw(schedules())
    cost = data.draw(unequal(data.draw(costs(schedule.num_stages)), schedule.num_microbatches))
    plan = fp.make_plan(
        skipping(schedule.num_stages, cost), schedule, loss=print if schedule.has_backward else None
    )
    timeline = fp.simulate(plan, cost)
    at = {span.action: span for span in timeline.spans}
    path = [at[action] for action in timeline.critical_path]
    assert (path[0].start, path[-1].end) == (0.0, timeline.makespan)
    assert all(before.end <= after.start for before, after in pairwise(path))


class Events(Play):
    """A play that writes down when it did each instruction: (time, how many before it, lane)."""

    def run(self):
        self.events = []
        self.latest = [0.0] * len(self.lanes)
        super().run()

    def step(self, lane, instruction, values):
        super().step(lane, instruction, values)
        number = lane.program.lane
        came = lane.ready.get(instruction.slot) if type(instruction) is Receive else None
        self.latest[number] = max(self.latest[number], lane.now.time, came.time if came else 0.0)
        self.events.append((self.latest[number], len(self.events), number))

    def order(self):
        """The lane of each instruction, by when it was done."""
        return [number for _, _, number in sorted(self.events)]


class InOrder(LaneExecutor):
    """One thread that does instructions in an order of its own, and notes what each lane holds
    after each action.

    Instructions and not actions: while what an action made waits for a slot, the slots that it read
    are free already.
    """

    threaded = False

    def __init__(self, order):
        super().__init__("a test")
        self.order, self.held = order, []

    def check(self, plan):
        pass

    def walk(self, executions):
        (execution,) = executions
        actions = [lane.parts for lane in execution.lanes]
        for lane in execution.lanes:
            lane.parts = [(instruction,) for instruction in lane.program.instructions]
        for number in self.order:
            lane = execution.lanes[number]
            lane.advance()
            if lane.done not in lane.program.ends:
                continue
            roles = [
                kind.role
                for kind, value in zip(lane.program.slots, lane.slots)
                if value is not None
            ]
            self.held.append((number, roles.count(Role.RESIDUAL)))
        for lane, parts in zip(execution.lanes, actions, strict=True):
            lane.parts, lane.done = parts, len(parts)


def test_a_slot_is_free_while_what_was_made_of_it_waits():
    """2F1 waits for the slot of stage 3, so 1F3 arrives before 2F1 is all done."""
    schedule = fp.Schedule.parse(
        "0F0 0F1 0F2 0F3 1F0 1F1 1F2 1F3\n3F0 3F1 3F2 3F3\n2F0 2F1 2F2 2F3"
    )
    plan = fp.make_plan(computing(4, []), schedule, devices="cpu")
    play = Events(plan.program, fp.Cost(comm=1.0), bounded=True)
    play.run()
    params = tuple(torch.tensor(0.5 + 0.1 * stage) for stage in range(4))
    assert_matches_sequential(
        plan, params, torch.linspace(-1, 1, 4), executors=[InOrder(play.order())]
    )


def computing(count, skips):
    """Stages that compute, and hand on what is asked for."""

    def make(stash, pop):
        def forward(p, x, *, skips=None):
            y = torch.tanh(p * x) + sum((skips or {}).values(), torch.zeros(()))
            return fp.Out(y, stash=dict.fromkeys(stash, y)) if stash else y

        return Stage(forward, stash=stash, pop=pop)

    names = [(stash, pop, f"s{number}") for number, (stash, pop) in enumerate(skips)]
    return [
        make(
            tuple(name for stash, _, name in names if stash == stage),
            tuple(name for _, pop, name in names if pop == stage),
        )
        for stage in range(count)
    ]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_is_simulated_can_be_run(data):
    """In the order of the simulated events, on one thread; what lanes hold is what was simulated,
    action by action."""
    schedule = data.draw(schedules())
    kinds = {action.kind for order in schedule.orders for action in order}
    if kinds > {fp.Kind.F} and fp.Kind.R not in kinds and data.draw(st.booleans()):
        schedule = fp.schedules.offload(schedule, ahead=data.draw(st.integers(0, 2)))
    count = schedule.num_stages
    cost = data.draw(costs(count, least=1))
    residual = float(schedule.num_slices)  # each slice counts as one
    cost = replace(
        cost, output=0.0, residual=residual, weight_residual=0.0
    )  # nothing waits in these stages
    stages = computing(count, [(skip.stash, skip.pop) for skip in cost.skips])
    cost = replace(cost, skips=())
    loss = torch.nn.functional.mse_loss if schedule.has_backward else None
    plan = fp.make_plan(stages, schedule, loss=loss, devices="cpu")
    play = Events(plan.program, cost, bounded=True)
    play.run()
    x = torch.linspace(-1, 1, schedule.num_pieces).reshape(schedule.num_microbatches, -1)
    params = tuple(torch.tensor(0.5 + 0.1 * stage) for stage in range(count))
    batch = (x, x) if loss else x
    executor = InOrder(play.order())
    assert_matches_sequential(plan, params, batch, executors=[executor])
    for number, lane in enumerate(play.lanes):
        level, expected = 0.0, []
        by_action = Counter()
        for _, place, change in lane.changes:
            by_action[place // 2] += change
        for at in range(len(lane.spans)):
            level += by_action[at]
            expected.append(level)
        assert [held for taken, held in executor.held if taken == number] == pytest.approx(expected)
