"""Any legal schedule of any net, walked task by task: nothing is read before it is there, nothing is left over."""

from collections import defaultdict
from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from funcpipe.core.plan import Plan
from funcpipe.core.schedule import Action, Kind, Schedule
from funcpipe.core.stage import Stage
from funcpipe.core.task import CALLER, Role, Task, TaskKind, Value
from funcpipe.lower.plan import make_plan
from funcpipe.schedules.check import check

random_plans = settings(deadline=None, database=None, max_examples=250)


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


@dataclass
class Walk:
    """One store per lane, and the slots that are taken at each lane, by (source, role)."""

    stores: list[set[Value]]
    made: set[tuple[Value, int]] = field(default_factory=set)
    taken: dict[tuple[int, int, Role], dict[int, Value]] = field(default_factory=lambda: defaultdict(dict))
    most: dict[tuple[int, int, Role], int] = field(default_factory=lambda: defaultdict(int))

    def copy(self, task: Task) -> None:
        """A value arrives in a slot of its own, once."""
        ((value,), (slot,)) = task.reads, task.slots
        assert (value,) == task.writes
        assert task.lane != task.source
        if task.source == CALLER:
            assert value.role in (Role.INPUT, Role.TARGET, Role.FEED, Role.GRAD)
        else:
            assert value in self.stores[task.source]
        self._put(value, task.lane)
        edge = (task.source, task.lane, value.role)
        assert slot not in self.taken[edge]
        self.taken[edge][slot] = value
        self.most[edge] = max(self.most[edge], len(self.taken[edge]))

    def compute(self, task: Task) -> None:
        """Everything read is there, everything written is new."""
        assert task.source == task.lane
        assert set(task.reads) <= self.stores[task.lane]
        assert len(task.reads) == len(set(task.reads))
        for value in task.writes:
            self._put(value, task.lane)

    def free(self, lane: int, values: tuple[Value, ...]) -> None:
        """Drop values that are there, and their slots."""
        assert len(values) == len(set(values))
        for value in values:
            self.stores[lane].remove(value)
            for edge, slots in self.taken.items():
                if edge[1] == lane and edge[2] is value.role:
                    self.taken[edge] = {slot: other for slot, other in slots.items() if other != value}

    def _put(self, value: Value, lane: int) -> None:
        assert (value, lane) not in self.made
        self.made.add((value, lane))
        self.stores[lane].add(value)


def walk(plan: Plan) -> Walk:
    """Walk the tasks in order; a copy frees at the lane that it comes from."""
    state = Walk([set() for _ in range(plan.num_devices)])
    for task in plan.tasks:
        if task.kind is TaskKind.COPY:
            state.copy(task)
            state.free(task.source, task.frees)
        else:
            state.compute(task)
            state.free(task.lane, task.frees)
    return state


@random_plans
@given(schedules())
def test_the_random_schedules_are_legal(schedule: Schedule) -> None:
    """check accepts every order that was played by the rules."""
    assert None is check(schedule)


@random_plans
@given(plans())
def test_stores_are_empty_at_the_end_but_for_what_the_caller_takes(plan: Plan) -> None:
    """The walk itself asserts that reads are there, writes new, frees present; here: nothing is left over."""
    state = walk(plan)
    left = {(lane, value) for lane, store in enumerate(state.stores) for value in store}
    device_of, last = plan.schedule.device_of, plan.num_stages - 1
    expected = {
        (device_of[s], Value(Role.REPORT, s, m)) for s in range(plan.num_stages) for m in range(plan.num_microbatches)
    }
    if plan.outputs:
        expected |= {(device_of[last], Value(Role.OUTPUT, last, m)) for m in range(plan.num_microbatches)}
    assert expected == left
    assert {} == {edge: slots for edge, slots in state.taken.items() if slots}


@random_plans
@given(plans())
def test_a_pool_has_as_many_slots_as_values_that_lie_there_at_a_time(plan: Plan) -> None:
    """Not one more; every pool is used."""
    assert {(pool.source, pool.lane, pool.role): pool.slots for pool in plan.program.pools} == walk(plan).most


@random_plans
@given(plans())
def test_a_value_is_copied_to_each_lane_that_reads_it_and_to_no_other(plan: Plan) -> None:
    """Exactly one copy for each (value, lane) that reads what it did not make."""
    copies = [(task.reads[0], task.lane) for task in plan.tasks if task.kind is TaskKind.COPY]
    computes = [task for task in plan.tasks if task.kind is TaskKind.COMPUTE]
    made = {(value, task.lane) for task in computes for value in task.writes}
    read = {(value, task.lane) for task in computes for value in task.reads}
    assert sorted(map(str, read - made)) == sorted(map(str, copies))


@random_plans
@given(plans())
def test_the_program_runs_every_action_in_the_order_of_its_device(plan: Plan) -> None:
    """What runs is, action for action, what the schedule says."""
    rows: list[list[Action]] = [[] for _ in range(plan.num_devices)]
    for task in plan.tasks:
        if task.action is not None:
            rows[task.lane].append(task.action)
    assert plan.schedule.orders == tuple(map(tuple, rows))


@random_plans
@given(plans())
def test_a_value_is_freed_by_the_last_task_of_its_lane_that_reads_it(plan: Plan) -> None:
    """Liveness: not a task later."""
    last: dict[tuple[Value, int], int] = {}
    freed: dict[tuple[Value, int], int] = {}
    for at, task in enumerate(plan.tasks):
        home = task.lane if task.kind is TaskKind.COMPUTE else task.source
        last.update({(value, home): at for value in task.reads if home != CALLER})
        last.update({(value, task.lane): at for value in task.writes})
        freed.update({(value, home): at for value in task.frees})
    assert {key: at for key, at in last.items() if key[0].role not in (Role.REPORT, Role.OUTPUT)} == freed


@random_plans
@given(plans())
def test_lanes_list_the_order_by_position(plan: Plan) -> None:
    """Each lane's part of the order, for those that run it alone."""
    program = plan.program
    everything = sorted(entry for lane in program.lanes for entry in lane)
    assert list(enumerate(program.order)) == everything
    assert all(
        lane == program.rows[code // program.num_microbatches].lane
        for lane, part in enumerate(program.lanes)
        for _, code in part
    )


@random_plans
@given(plans())
def test_a_forward_keeps_its_residual_only_for_a_backward_without_remat(plan: Plan) -> None:
    """R makes it again; without backwards nobody wants it."""
    again = {a[1:] for order in plan.schedule.orders for a in order if a.kind is Kind.R}
    for task in plan.tasks:
        if task.action is not None and task.action.kind is Kind.F:
            keeps = any(value.role is Role.RESIDUAL for value in task.writes)
            assert (plan.schedule.has_backward and task.action[1:] not in again) == keeps


@random_plans
@given(plans(), st.randoms(use_true_random=False))
def test_lanes_that_run_ahead_as_slots_allow_all_come_to_their_end(plan: Plan, chance: Random) -> None:
    """Waiting for a slot is a dependency too: whoever is let run next, no order of lanes ends in a knot."""
    work: list[list[tuple[str, Task]]] = [[] for _ in range(plan.num_devices)]
    for task in plan.tasks:
        if task.kind is TaskKind.COMPUTE:
            work[task.lane].append(("compute", task))
        elif task.source != CALLER:
            work[task.source].append(("send", task))
    slots = {(pool.source, pool.lane, pool.role): pool.slots for pool in plan.program.pools}
    there: set[tuple[Value, int]] = set()
    came: dict[tuple[Value, int], tuple[int, int, Role]] = {}

    def may(lane: int) -> bool:
        word, task = work[lane][0]
        if word == "send":
            return slots[lane, task.lane, task.reads[0].role] > 0
        given = (Role.INPUT, Role.TARGET, Role.FEED)
        own = [
            v
            for v in task.reads
            if v.role not in given and not (v.role is Role.GRAD and v.stage == plan.num_stages - 1)
        ]
        return all((value, lane) in there for value in own)

    def step(lane: int) -> None:
        word, task = work[lane].pop(0)
        there.update((value, task.lane) for value in task.writes)
        if word == "send":
            edge = came[task.reads[0], task.lane] = (lane, task.lane, task.reads[0].role)
            slots[edge] -= 1
        for value in task.frees:
            if (value, lane) in came:
                slots[came[value, lane]] += 1

    while ready := [lane for lane, tasks in enumerate(work) if tasks and may(lane)]:
        step(chance.choice(ready))
    assert [[]] * plan.num_devices == work
