"""Links, skips, residuals at the host and what waits for its reader: against a second, plainer
simulator."""

import itertools
import math
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import funcpipe as fp

TIMES = st.sampled_from([0.25, 0.5, 1.0, 1.75, 2.0, 3.5])


@st.composite
def cases(draw):
    """A schedule of any family, with remat or offload of some residuals, and a cost with
    everything."""
    devices, share, microbatches = (
        draw(st.integers(1, 4)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 5)),
    )
    stages = devices * share
    families = [
        fp.schedules.one_f_one_b,
        fp.schedules.fill_drain,
        fp.schedules.zb_h2,
        fp.schedules.interleaved,
        fp.schedules.zero_bubble,
        *([fp.schedules.zbv, fp.schedules.v_min] * (share == 2)),
    ]
    schedule = draw(st.sampled_from(families))(stages, microbatches, num_devices=devices)
    some = draw(st.sets(st.tuples(st.integers(0, stages - 1), st.integers(0, microbatches - 1))))
    change = draw(st.sampled_from(["no", "remat", "offload", "forwards"]))
    if change == "remat":
        schedule = fp.schedules.remat(schedule, keep=lambda a: (a.stage, a.microbatch) not in some)
    elif change == "offload":
        schedule = fp.schedules.offload(
            schedule, move=lambda a: (a.stage, a.microbatch) in some, ahead=draw(st.integers(0, 2))
        )
    elif change == "forwards":
        schedule = schedule.forwards()
    row = st.lists(TIMES, min_size=stages, max_size=stages)
    pairs = st.tuples(st.integers(0, stages - 1), st.integers(0, stages - 1), TIMES).filter(
        lambda s: s[0] < s[1]
    )
    skips = draw(st.lists(pairs, max_size=3)) if stages > 1 else []
    comm = draw(st.one_of(TIMES, st.lists(TIMES, min_size=stages - 1, max_size=stages - 1)))
    whole = draw(row)
    cost = fp.Cost(
        draw(row),
        draw(row),
        draw(row),
        offload=draw(row),
        comm=comm,
        bandwidth=draw(st.none() | TIMES),
        output=draw(row),
        skips=skips,
        residual=whole,
        weight_residual=[one / 2 for one in whole],
    )
    return schedule, cost


class Plain:
    """Every action as soon as all it needs is known, asked for again and again."""

    def __init__(self, schedule, cost):
        self.schedule, self.cost, self.home = schedule, cost, schedule.device_of
        self.start, self.end = {}, {}
        # (backward, source, to, microbatch) -> (when it has crossed, when it can be read)
        self.there = {}
        self.links, self.now, self.hosts = (
            defaultdict(float),
            [0.0] * schedule.num_devices,
            defaultdict(float),
        )
        sizes = (
            [cost.output] * schedule.num_stages if isinstance(cost.output, float) else cost.output
        )
        self.edges = [(s, s + 1, sizes[s]) for s in range(schedule.num_stages - 1)] + [
            tuple(skip) for skip in cost.skips
        ]
        todo = [list(order) for order in schedule.orders]
        while any(todo):
            before = sum(map(len, todo))
            for device, order in enumerate(todo):
                while order and self.try_to(device, order[0]):
                    order.pop(0)
            assert sum(map(len, todo)) < before

    def try_to(self, device, action):
        kind, stage, m, _ = action
        back = kind in (fp.Kind.B, fp.Kind.I)
        ready = self.now[device]
        if kind is fp.Kind.F or back:
            for number, (stash, pop, _) in enumerate(self.edges):
                if (stash if back else pop) == stage:
                    if (back, number, m) not in self.there:
                        return False
                    ready = max(ready, self.there[back, number, m][1])
        if back and fp.Action(fp.Kind.L, stage, m) in self.end:
            ready = max(ready, self.end[fp.Action(fp.Kind.L, stage, m)])
        length = self.cost.of(kind, stage)
        if kind in (fp.Kind.O, fp.Kind.L):
            ready = max(
                ready, self.hosts[device, kind], self.end.get(fp.Action(fp.Kind.O, stage, m), 0.0)
            )
            self.hosts[device, kind] = ready + length
        else:
            self.now[device] = ready + length
        self.start[action], self.end[action] = ready, ready + length
        for number, (stash, pop, size) in (
            enumerate(self.edges) if kind is fp.Kind.F or back else ()
        ):
            if (pop if back else stash) == stage:
                self.send(back, number, m, ready + length, size)
        return True

    def send(self, back, number, m, time, size):
        stash, pop, _ = self.edges[number]
        link = (self.home[pop], self.home[stash]) if back else (self.home[stash], self.home[pop])
        latency = 0.0
        if link[0] != link[1]:
            if self.cost.bandwidth is not None:
                time = self.links[link] = max(time, self.links[link]) + size / self.cost.bandwidth
            latency = self.cost.latency(stash, pop)
        self.there[back, number, m] = time, time + latency

    def held(self):
        """For each device (from, to, how much). What is at one time comes by the device's order,
        and arrivals last."""
        rows = [[] for _ in self.now]
        place = {action: at for order in self.schedule.orders for at, action in enumerate(order)}
        start = {action: (time, 2 * place[action]) for action, time in self.start.items()}
        end = {action: (time, 2 * place[action] + 1) for action, time in self.end.items()}
        there = {key: (crossed, math.inf) for key, (crossed, _) in self.there.items()}
        cost, K = self.cost, fp.Kind
        residual, rest = cost.residual, cost.weight_residual
        for kind, stage, m, _ in start:
            if kind is not K.F:
                continue
            row = rows[self.home[stage]]
            taken = start.get(fp.Action(K.R, stage, m), start[fp.Action(kind, stage, m)])
            if not self.schedule.has_backward:
                taken = end[fp.Action(kind, stage, m)]
            else:
                done = (
                    fp.Action(K.B, stage, m)
                    if fp.Action(K.B, stage, m) in end
                    else fp.Action(K.I, stage, m)
                )
                begin = taken
                if fp.Action(K.O, stage, m) in end:
                    row.append((begin, end[fp.Action(K.O, stage, m)], residual[stage]))
                    begin = start[fp.Action(K.L, stage, m)]
                left = rest[stage] if done[0] is K.I else 0.0
                row.append((begin, end[done], residual[stage] - left))
                if left:
                    row.append((begin, end[fp.Action(K.W, stage, m)], left))
            for number, (stash, pop, size) in enumerate(self.edges):
                if pop == stage:
                    row.append((there[False, number, m], taken, size))
                if stash == stage and self.schedule.has_backward:
                    row.append((there[True, number, m], end[done], size))
        return rows


@settings(max_examples=150)
@given(cases())
def test_times_and_peaks_are_those_of_a_plainer_simulator(case):
    """Every start, and the most that every device holds."""
    schedule, cost = case
    timeline, plain = fp.simulate(schedule, cost), Plain(schedule, cost)
    assert {span.action: span.start for span in timeline.spans} == pytest.approx(plain.start)
    for device, row in enumerate(plain.held()):
        moments = [begin for begin, end, _ in row if begin < end]
        peak = max(
            (sum(size for begin, end, size in row if begin <= now < end) for now in moments),
            default=0.0,
        )
        assert peak == pytest.approx(timeline.peak[device])
        steps = timeline.memory[device]
        assert all(a <= b for (a, _), (b, _) in itertools.pairwise(steps))
        assert max((level for _, level in steps), default=0.0) == timeline.peak[device]
        assert not steps or abs(steps[-1][1]) < 1e-9


def test_values_wait_for_each_other_on_a_link():
    """Two microbatches of 3 over a link of 1 take 3 each, the second after the first; then the
    latency."""
    cost = fp.Cost(1, 1, 1, bandwidth=1, output=3, comm=0.5)
    timeline = fp.simulate(fp.schedules.fill_drain(2, 2, backward=False), cost)
    starts = {str(span.action): span.start for span in timeline.spans}
    assert {"0F0": 0, "0F1": 1, "1F0": 4.5, "1F1": 7.5} == starts


def test_a_device_works_while_residuals_move():
    """O and L take time of the link to the host; the backward waits for what is not back."""
    schedule = fp.Schedule.parse("0F0 0O0 0F1 0F2 0B2 0L0 0B1 0B0")
    timeline = fp.simulate(schedule, fp.Cost(1, 1, 1, offload=4.5))
    starts = {str(span.action): span.start for span in timeline.spans}
    assert {
        "0F0": 0,
        "0O0": 1,
        "0F1": 1,
        "0F2": 2,
        "0B2": 3,
        "0L0": 5.5,
        "0B1": 5,
        "0B0": 10,
    } == starts
    assert (9.0, 12.0, 3.0) == (timeline.busy[0], timeline.makespan, timeline.peak[0])
    assert "0F0 0O0 0L0 0B0" == " ".join(map(str, timeline.critical_path))


def test_what_is_sent_lies_at_its_reader():
    """An output from its arrival to the forward that reads it; a rematted one until it is computed
    again."""
    cost = fp.Cost([1, 2], 2, 2, output=10, residual=1, weight_residual=1)
    drained = fp.schedules.fill_drain(2, 3)
    plain, again = fp.simulate(drained, cost), fp.simulate(fp.schedules.remat(drained), cost)
    assert 2 + 10 == plain.peak[1]  # two ran, the third waits while the second runs
    assert 30 == again.peak[1]  # all three wait until they are computed again


def test_a_skip_takes_room_on_the_way_and_its_gradient_on_the_way_back():
    """At the popper from its arrival to its forward; at the stasher from its arrival to the end of
    its backward."""
    none, some = (
        fp.simulate(fp.schedules.one_f_one_b(3, 3), fp.Cost(skips=skips))
        for skips in ([], [(0, 2, 5.0)])
    )
    assert (3.0, 2.0, 1.0) == none.peak
    assert (3.0 + 2 * 5, 2.0, 1.0 + 2 * 5) == some.peak


def test_what_comes_and_goes_at_one_time_is_not_held_twice():
    """A value that has crossed just when another is taken, at times that floats cannot hold (1/7):
    latency is not in them."""
    quarters = (0.25,) * 8
    cost = fp.Cost(
        (0.25, 0.5, *quarters[2:]), quarters, quarters, comm=1.0, bandwidth=1.75, output=quarters
    )
    assert (0.25, 0.5, 0.5, 0.5) == fp.simulate(
        fp.schedules.one_f_one_b(8, 4, num_devices=4).forwards(), cost
    ).peak
