"""Law 3: nothing of the caller's is touched. Law 6: nothing leaks, and what is held is what the
schedule says."""

import gc
import random
import threading
import time

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import EXECUTORS, cpu_plan, ids, same, snapshot
from watch import Watch, num_tensors

import funcpipe as fp

S, M = 4, 6
HELD = [
    (fp.schedules.fill_drain(S, M), lambda s: M),
    (fp.schedules.one_f_one_b(S, M), lambda s: min(M, S - s)),
    (fp.schedules.one_f_one_b(S, 2), lambda s: min(2, S - s)),
    (fp.schedules.zero_bubble(S, M), lambda s: min(M, S - s)),
    (fp.schedules.remat(fp.schedules.fill_drain(S, M)), lambda s: 1),
    (fp.schedules.remat(fp.schedules.one_f_one_b(S, M)), lambda s: 1),
]


def surroundings():
    """Everything process-wide that a run could leave changed."""
    return {
        "torch rng": torch.get_rng_state().tolist(),
        "python rng": random.getstate(),
        "threads": torch.get_num_threads(),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "device": torch.get_default_device(),
        "dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "multithreading": torch.autograd.is_multithreading_enabled(),
        "cores": threading.active_count(),
    }


def model():
    """Two module stages, in-place layers first, batch norm, dropout; gradients and flags set
    before."""
    torch.manual_seed(1)
    first = nn.Sequential(
        nn.ReLU(inplace=True), nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.2)
    )
    second = nn.Sequential(nn.Hardtanh(inplace=True), nn.Linear(5, 2), nn.BatchNorm1d(2).eval())
    for parameter in (*first.parameters(), *second.parameters()):
        parameter.grad = torch.randn_like(parameter)
    return first, second


def touched(modules):
    """All that a module has, to compare."""
    tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
    grads = [p.grad for m in modules for p in m.parameters()]
    flags = [layer.training for m in modules for layer in m.modules()]
    return tensors, grads, flags, [p.requires_grad for m in modules for p in m.parameters()]


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("executor", [*EXECUTORS, "oracle"])
@pytest.mark.parametrize(
    "schedule",
    [
        fp.schedules.one_f_one_b(2, 3),
        fp.schedules.remat(fp.schedules.fill_drain(2, 3)),
        fp.schedules.zero_bubble(2, 3),
    ],
    ids=ids,
)
def test_a_run_touches_nothing(schedule, executor, fails):
    """params, .grad, state, buffers, flags, batch and everything process-wide are the same after
    it."""
    modules = model()
    (one, p1, s1), (two, p2, s2) = (
        fp.from_module(m, name=n) for m, n in zip(modules, "ab", strict=True)
    )

    def loss(y, target):
        if fails and target.sum() > 100:
            raise ValueError("bad target")
        y.mul_(1.0)
        target.add_(0.0)
        return F.mse_loss(y, target)

    plan = cpu_plan((one, two), schedule, loss=loss)
    x, target = torch.randn(9, 5), torch.randn(9, 2)
    target[8] = 100.0
    given = (p1, p2), (s1, s2), (x, target)
    before, values, around = snapshot(given), snapshot(touched(modules)[:2]), surroundings()
    flags, versions = touched(modules)[2:], [leaf._version for leaf in fp.leaves(given)]
    identities = [id(leaf) for leaf in (*p1.values(), *p2.values())]

    def go():
        if executor == "oracle":
            return fp.run_sequential(plan, (p1, p2), (x, target), state=(s1, s2), seed=3)
        return fp.run(plan, (p1, p2), (x, target), state=(s1, s2), seed=3, executor=executor)

    if fails:
        with pytest.raises(ValueError, match="bad target"):
            go()
    else:
        result = go()
        assert not same(result.state[0], s1)
    assert around == surroundings()
    assert same(before, snapshot(given))
    assert same(values, snapshot(touched(modules)[:2]))
    assert flags == touched(modules)[2:]
    assert versions == [leaf._version for leaf in fp.leaves(given)]
    assert identities == [id(leaf) for leaf in (*p1.values(), *p2.values())]


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_in_place_stages_touch_their_own_copy(executor, backward):
    """First operations in place on input, skip, feed and target: nobody else sees them."""

    @fp.stage(stash=["e"])
    def first(p, x):
        x.mul_(2)
        return fp.Out(x * p, stash={"e": x})

    @fp.stage(pop=["e"], feeds=["f"], state=True)
    def second(p, x, *, skips, feeds, state):
        skips["e"].add_(1)
        feeds["f"].zero_()
        return x.mul_(p) + skips["e"] + feeds["f"]

    @fp.stage(pop=["e"], feeds=["f"])
    def third(p, x, *, skips, feeds):
        return x.relu_() * p + skips["e"].sigmoid_() + feeds["f"]

    def loss(y, t):
        return (t.neg_() + y).square().mean()

    schedule = (
        fp.schedules.one_f_one_b(3, 2, num_devices=3)
        if backward
        else fp.schedules.fill_drain(3, 2, num_devices=3, backward=False)
    )
    plan = cpu_plan((first, second, third), schedule, loss=loss, outputs=True)
    x, t, f = torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 3)
    params, state = tuple(torch.full((3,), 1.5 + i) for i in range(3)), ((), torch.ones(2), ())
    before = snapshot((x, t, f, params, state))
    result = fp.run(plan, params, (x, t), state=state, feeds={"f": f}, executor=executor)
    assert same(before, snapshot((x, t, f, params, state)))
    e = 2 * x
    y = (e * params[0] * params[1] + e + 1).relu() * params[2] + e.sigmoid() + f
    torch.testing.assert_close(result.outputs, y)
    torch.testing.assert_close(result.loss, (y - t).square().mean())


def watched(schedule, watch, before=lambda stage: None):
    """A plan whose tensors and graphs are watched: one watch for each stage."""

    def part(index):
        def fn(p, x):
            before(index)
            return watch[index].layer(x, p)

        return fp.stage(fn)

    backward = schedule.has_backward
    loss = F.mse_loss if backward else None
    return cpu_plan([part(i) for i in range(schedule.num_stages)], schedule, loss=loss)


def go(plan, executor):
    """Run a plan of `watched`, two rows per microbatch."""
    params = tuple(torch.full((3,), 1.0 + i) for i in range(plan.num_stages))
    x = torch.randn(2 * plan.num_microbatches, 3)
    return fp.run(plan, params, (x, x) if plan.loss else x, executor=executor)


@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    "schedule", [*(s for s, _ in HELD), fp.schedules.fill_drain(S, M, backward=False)], ids=ids
)
def test_nothing_of_a_run_lives_after_its_result(schedule, executor):
    """All memory and graphs are gone with the result, without the garbage collector: no cycles."""
    watch = [Watch() for _ in range(schedule.num_stages)]
    plan = watched(schedule, watch)
    gc.collect()
    before = num_tensors()
    gc.disable()
    try:
        result = go(plan, executor)
        assert all(w.memory for w in watch)
        assert 0 == sum(w.live_graphs for w in watch)
        del result
        assert 0 == sum(w.alive for w in watch)
        assert before == num_tensors()
    finally:
        gc.enable()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_module_stages_forget_a_run(executor):
    """Neither the stages nor kept threads hold a tensor of a run that went well."""
    watch = Watch()

    class Seen(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.norm(watch.layer(x, self.w))

    stages, params, state = zip(*(fp.from_module(Seen(), name=n) for n in "ab"), strict=True)
    plan = cpu_plan(stages, fp.schedules.one_f_one_b(2, 3))
    x = torch.randn(6, 3)
    with fp.lanes(plan) as lanes:
        go = lambda executor: fp.run(plan, params, (x, x), state=state, executor=executor)
        go("serial")  # stages make and keep a copy of their module
        gc.collect()
        before = num_tensors()
        gc.disable()
        try:
            result = go(lanes if executor == "threads" else "serial")
            assert result.grads
            del result
            assert watch.memory
            assert 0 == watch.alive
            assert before == num_tensors()
        finally:
            gc.enable()


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("schedule", "bound"), HELD, ids=lambda v: ids(v) if isinstance(v, fp.Schedule) else ""
)
def test_residuals_held_are_the_closed_forms(schedule, bound, executor):
    """The most graphs that live at a time at each stage are what the papers say."""
    watch = [Watch() for _ in range(schedule.num_stages)]
    most = [0] * schedule.num_stages

    def before(stage):
        if torch.is_grad_enabled():  # a forward that keeps; its own graph comes on top
            most[stage] = max(most[stage], watch[stage].live_graphs + 1)

    go(watched(schedule, watch, before), executor)
    assert [bound(s) for s in range(schedule.num_stages)] == most


def test_a_fast_producer_stays_within_its_slots():
    """Forward-only, the consumer slow: as many activations wait on the edge as the plan has slots,
    not more."""
    count = 12
    made, ahead = [], []

    def fast(p, x):
        made.append(x)
        return x * p

    def slow(p, x):
        time.sleep(0.01)
        ahead.append(len(made) - len(ahead))  # made and not yet done with, the one here included
        return x.sum(-1)

    schedule = fp.schedules.fill_drain(2, count, backward=False)
    plan = fp.make_plan([fp.stage(fast), fp.stage(slow)], schedule, devices="cpu")
    slots = {pool.role: pool.slots for pool in plan.program.pools}[fp.typing.Role.ACT]
    result = fp.run(plan, (torch.ones(3), ()), torch.randn(count, 3), executor="threads")
    assert slots + 1 == max(ahead)  # one more lies with its producer, who waits for a slot
    most = {
        pool.role: used for pool, used in zip(plan.program.pools, result.stats.slots, strict=True)
    }
    assert slots == most[fp.typing.Role.ACT]


@pytest.mark.parametrize("schedule", [s for s, _ in HELD], ids=ids)
def test_slots_hold_when_lanes_run_at_odd_speeds(schedule):
    """Whatever the speeds, no pool holds more than the plan says."""
    dice = random.Random(1)
    watch = [Watch() for _ in range(schedule.num_stages)]
    plan = watched(schedule, watch, lambda stage: time.sleep(dice.random() * 0.002))
    for _ in range(3):
        stats = go(plan, "threads").stats
        assert [] == [
            pool
            for pool, most in zip(plan.program.pools, stats.slots, strict=True)
            if most > pool.slots
        ]


@pytest.mark.slow
def test_many_runs_leave_no_trace():
    """90 runs on fresh threads, kept threads and none: as many threads and objects as before."""
    plan = watched(fp.schedules.one_f_one_b(2, 3), [Watch(), Watch()])
    stage, params, state = fp.from_module(
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), name="m"
    )
    modules = cpu_plan([stage], fp.schedules.fill_drain(1, 2))
    x = torch.randn(6, 3)

    def several(count, lanes):
        for index in range(count):
            go(plan, ("threads", "serial", lanes)[index % 3])
            fp.run(modules, (params,), (x, x), state=(state,))
        for part in plan.stages:
            for cell in part.fn.__closure__:
                if isinstance(cell.cell_contents, list):
                    for watch in cell.cell_contents:
                        watch.memory.clear()
                        watch.graphs.clear()
        gc.collect()
        return threading.active_count(), len(gc.get_objects())

    with fp.lanes(plan) as lanes:
        several(30, lanes)
        threads, objects = several(30, lanes)
        after = several(90, lanes)
    assert threads == after[0]
    assert abs(after[1] - objects) < 50
