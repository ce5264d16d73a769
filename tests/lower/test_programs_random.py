"""Any legal schedule of any net, walked instruction by instruction: nothing is read before it is
there, nothing is left over."""

import functools
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import plans, schedules

from funcpipe._src.data.plan import Plan
from funcpipe._src.data.program import CALLER, FROM, Free, Receive, Role, Run, Send, Value
from funcpipe._src.data.schedule import Kind, Schedule
from funcpipe._src.lower.plan import make_plan
from funcpipe._src.schedules.legal import check

random_plans = settings(deadline=None, database=None, max_examples=250)


@functools.cache
def drawn() -> list[Plan]:
    """Plans that all laws read, those of few actions first: a law that fails shows such a one."""
    found: list[Plan] = []

    @random_plans
    @given(plans())
    def draw(plan: Plan) -> None:
        found.append(plan)

    draw()
    return sorted(found, key=lambda plan: sum(map(len, plan.schedule.orders)))


@pytest.fixture(scope="module", autouse=True)
def _drawn_before_the_laws():
    """Not within a law, which is an example of hypothesis already."""
    assert len(drawn()) >= 200


drawn_plans = st.deferred(lambda: st.sampled_from(drawn()))


@dataclass
class Walk:
    """What lies in the slots of each lane, and what was sent there and not received yet: values by
    slot."""

    plan: Plan
    held: list[dict[int, Value]]
    sent: list[dict[int, Value]]
    made: set[tuple[Value, int]] = field(default_factory=set)
    most: dict[tuple[int, int, Role], int] = field(default_factory=lambda: defaultdict(int))

    def receive(self, lane: int, instruction: Receive) -> None:
        """It has been sent, or the caller has it."""
        value, (source, role) = (
            self.plan.program.value(instruction.value),
            self.slot(lane, instruction.slot),
        )
        assert (source, role) == (instruction.source, value.role)
        if source == CALLER:
            assert value.role in (Role.INPUT, Role.TARGET, Role.FEED, Role.GRAD)
            self.count(source, lane, role, 1)
        else:
            assert self.sent[lane].pop(instruction.slot) == value
        self.put(lane, instruction.slot, value)

    def run(self, lane: int, run: Run) -> None:
        """Everything read is there, everything written is new."""
        program = self.plan.program.lanes[lane]
        call, m = program.calls[run.call], run.microbatch
        see = lambda wire, piece=m: program.value(wire * program.num_pieces + piece)
        pieces = [m + FROM.get(program.wires[wire].role, 0) for wire, _ in call.reads]
        read = [see(wire, piece) for (wire, _), piece in zip(call.reads, pieces, strict=True)]
        assert read == [self.held[lane][slot] for slot in run.reads]
        assert len(run.reads) == len({*run.reads})
        for wire, slot in zip(call.writes, run.writes, strict=True):
            assert self.slot(lane, slot) == (lane, see(wire).role)
            self.put(lane, slot, see(wire))

    def send(self, lane: int, send: Send) -> None:
        """Into a slot that is free, for values of this kind from this lane."""
        value = self.held[lane][send.slot]
        assert lane != send.to
        assert self.slot(send.to, send.into) == (lane, value.role)
        assert (send.to, send.into) in self.plan.program.lanes[lane].outgoing
        assert send.into not in {**self.held[send.to], **self.sent[send.to]}
        self.sent[send.to][send.into] = value
        self.count(lane, send.to, value.role, 1)

    def free(self, lane: int, free: Free) -> None:
        """What is there."""
        for slot in free.slots:
            del self.held[lane][slot]
            source, role = self.slot(lane, slot)
            self.count(source, lane, role, -1)

    def slot(self, lane: int, slot: int) -> tuple[int, Role]:
        return self.plan.program.lanes[lane].slots[slot]

    def put(self, lane: int, slot: int, value: Value) -> None:
        assert slot not in {**self.held[lane], **self.sent[lane]}
        assert (value, lane) not in self.made
        self.made.add((value, lane))
        self.held[lane][slot] = value

    def count(self, source: int, lane: int, role: Role, change: int) -> None:
        if source != lane:
            slots = {**self.held[lane], **self.sent[lane]}
            live = sum(self.slot(lane, slot) == (source, role) for slot in slots) + (
                change > 0 and source == CALLER
            )
            self.most[source, lane, role] = max(self.most[source, lane, role], live)


def walk(plan: Plan) -> Walk:
    """Go through the instructions in plan order."""
    state = Walk(plan, [{} for _ in range(plan.num_devices)], [{} for _ in range(plan.num_devices)])
    for lane, instruction, held in plan.program.walk():
        match instruction:
            case Receive():
                state.receive(lane, instruction)
            case Run():
                state.run(lane, instruction)
            case Send():
                state.send(lane, instruction)
            case Free():
                state.free(lane, instruction)
        assert isinstance(instruction, (Free, Send)) or state.held[lane] == {
            slot: plan.program.value(number) for slot, number in held.items()
        }
    return state


@random_plans
@given(schedules())
def test_the_random_schedules_are_legal(schedule: Schedule) -> None:
    """check accepts every order that was played by the rules."""
    assert None is check(schedule)


@random_plans
@given(drawn_plans)
def test_slots_are_empty_at_the_end_but_for_what_the_caller_takes(plan: Plan) -> None:
    """The walk itself asserts that reads are there, writes new, frees present; here: nothing is
    left over."""
    state = walk(plan)
    left = {(lane, value) for lane, held in enumerate(state.held) for value in held.values()}
    device_of, last = plan.schedule.device_of, plan.num_stages - 1
    slices = [None] if plan.schedule.num_slices == 1 else range(plan.schedule.num_slices)
    pieces = [(m, number) for m in range(plan.num_microbatches) for number in slices]
    expected = {
        (device_of[s], Value(Role.REPORT, s, m, slice=number))
        for s in range(plan.num_stages)
        for m, number in pieces
    }
    if plan.outputs:
        expected |= {
            (device_of[last], Value(Role.OUTPUT, last, m, slice=number)) for m, number in pieces
        }
    assert expected == left
    assert not any(state.sent)
    said = {
        (lane.lane, lane.value(number)) for lane in plan.program.lanes for number, _ in lane.left
    }
    assert expected == said


@random_plans
@given(drawn_plans)
def test_a_pool_has_as_many_slots_as_values_that_lie_there_at_a_time(plan: Plan) -> None:
    """Not one more; every pool is used."""
    assert {(pool.source, pool.lane, pool.role): pool.slots for pool in plan.program.pools} == walk(
        plan
    ).most


@random_plans
@given(drawn_plans)
def test_a_lane_has_no_more_slots_of_its_own_than_it_fills_at_a_time(plan: Plan) -> None:
    """For each role: its slots are those that lie there at once."""
    for lane in plan.program.lanes:
        most: Counter[Role] = Counter()
        for _, held in lane.contents():
            live = Counter(
                lane.slots[slot].role for slot in held if lane.slots[slot].source == lane.lane
            )
            most |= live
        assert most == Counter(slot.role for slot in lane.slots if slot.source == lane.lane)


@random_plans
@given(drawn_plans)
def test_a_value_is_sent_to_each_lane_that_reads_it_and_to_no_other(plan: Plan) -> None:
    """Exactly one for each (value, lane) that reads what it did not make; and received once."""
    came: list[tuple[Value, int]] = []
    received: list[tuple[Value, int]] = []
    made: set[tuple[Value, int]] = set()
    read: set[tuple[Value, int]] = set()
    for lane, instruction, held in plan.program.walk():
        see = lambda slot, held=held: plan.program.value(held[slot])
        match instruction:
            case Send(slot, to, _):
                came.append((see(slot), to))
            case Receive(value, source, _):
                received.append((plan.program.value(value), lane))
                came += [(plan.program.value(value), lane)] if source == CALLER else []
            case Run(_, _, reads, writes):
                read |= {(see(slot), lane) for slot in reads}
                made |= {(see(slot), lane) for slot in writes}
            case _:
                pass
    assert sorted(map(str, read - made)) == sorted(map(str, came)) == sorted(map(str, received))


@random_plans
@given(drawn_plans)
def test_a_lane_runs_every_action_in_the_order_of_its_device(plan: Plan) -> None:
    """What runs is, action for action, what the schedule says."""
    rows = [tuple(lane.action(run) for run in lane.runs) for lane in plan.program.lanes]
    assert plan.schedule.orders == tuple(rows)
    assert all(
        len(lane.ends) == len(lane.runs) and lane.ends[-1] == len(lane.instructions)
        for lane in plan.program.lanes
    )


@random_plans
@given(drawn_plans)
def test_a_value_is_freed_at_once_after_its_last_use(plan: Plan) -> None:
    """Liveness: between the last instruction that uses a slot and its free stands none but other
    frees and sends.

    What the first of two that overlap has read is used until both have run.
    """
    for lane in plan.program.lanes:
        used: dict[int, int] = {}
        runs = 0
        for at, instruction in enumerate(lane.instructions):
            match instruction:
                case Run(_, _, reads, writes):
                    used |= dict.fromkeys((*reads, *writes), at)
                    if runs - 1 in lane.pairs:
                        used |= dict.fromkeys(lane.runs[runs - 1].reads, at)
                    runs += 1
                case Send(slot, _, _):
                    used[slot] = at
                case Receive(_, _, slot):
                    used[slot] = at
                case Free(slots):
                    for slot in slots:
                        between = lane.instructions[used.pop(slot) + 1 : at]
                        assert all(isinstance(one, (Free, Send)) for one in between)


@random_plans
@given(drawn_plans, st.data())
def test_one_lane_alone_is_what_it_is_among_all(plan: Plan, data: st.DataObject) -> None:
    """A process builds its own, and needs no other."""
    alone = make_plan(plan.stages, plan.schedule, loss=plan.loss, outputs=plan.outputs).program
    number = data.draw(st.integers(0, plan.num_devices - 1))
    assert plan.program.lanes[number] == alone.lane(number)


@random_plans
@given(drawn_plans)
def test_a_forward_keeps_its_residual_only_for_a_backward_without_remat(plan: Plan) -> None:
    """R makes it again; without backwards nobody wants it."""
    again = {a[1:] for order in plan.schedule.orders for a in order if a.kind is Kind.R}
    for lane in plan.program.lanes:
        for run in lane.runs:
            action = lane.action(run)
            if action.kind is Kind.F:
                keeps = Role.RESIDUAL in {lane.slots[slot].role for slot in run.writes}
                assert (plan.schedule.has_backward and action[1:] not in again) == keeps


@random_plans
@given(drawn_plans, st.randoms(use_true_random=False))
def test_lanes_that_run_ahead_as_slots_allow_all_come_to_their_end(
    plan: Plan, chance: Random
) -> None:
    """Waiting for a slot is a dependency too: whoever is let run next, no order of lanes ends in a
    knot."""
    lanes = plan.program.lanes
    at = [0] * len(lanes)
    free = {end for lane in lanes for end in lane.outgoing}
    there: set[tuple[int, int]] = set()

    def may(lane: int) -> bool:
        match lanes[lane].instructions[at[lane]]:
            case Receive(_, source, slot):
                return source == CALLER or (lane, slot) in there
            case Send(_, to, into):
                return (to, into) in free
            case _:
                return True

    def step(lane: int) -> None:
        match lanes[lane].instructions[at[lane]]:
            case Send(_, to, into):
                free.remove((to, into))
                there.add((to, into))
            case Receive(_, source, slot) if source != CALLER:
                there.remove((lane, slot))
            case Free(slots):
                free.update(
                    (lane, slot)
                    for slot in slots
                    if lanes[lane].slots[slot].source not in (CALLER, lane)
                )
            case _:
                pass
        at[lane] += 1

    while ready := [
        lane for lane in range(len(lanes)) if at[lane] < len(lanes[lane].instructions) and may(lane)
    ]:
        step(chance.choice(ready))
    assert [len(lane.instructions) for lane in lanes] == at
