"""A schedule that steps gives what `step` after the run gives, bit for bit: parameters, the
optimizer's state, the norm; and nothing where that would not have stepped, or the run fails."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from common import cpu_plan, ids, same, schedules, snapshot
from functional_rules import MAKERS as FUNCTIONAL
from small import residual, residual_params
from torch import nn

import funcpipe as fp
from funcpipe._src.optimizing.stepping import part_of
from funcpipe.testing import FaultAt

STAGES, MICROBATCHES = 4, 4
X = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
TARGET = torch.randn(12, 6, generator=torch.Generator().manual_seed(2))
MAKERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "nesterov": functools.partial(
        torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True
    ),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1, foreach=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "functional": FUNCTIONAL["adamw"],
}
NORMS = [None, 1e6, 0.05]
SCHEDULE = fp.schedules.one_f_one_b(STAGES, MICROBATCHES)
BROKEN = torch.where(torch.arange(12)[:, None] == 5, torch.inf, TARGET)


def plan_of(schedule, *, loss=F.mse_loss, **options):
    return cpu_plan([fp.stage(residual)] * schedule.num_stages, schedule, loss=loss, **options)


class Twins:
    """The same parameters twice, each with an optimizer: one is stepped in runs, the other one
    after them."""

    def __init__(self, make=MAKERS["adamw"], schedule=SCHEDULE, params=None, **options):
        self.inside = plan_of(fp.schedules.step_params(schedule), **options)
        self.outside = plan_of(schedule, **options)
        params = params or functools.partial(residual_params, STAGES)
        self.params, self.wanted = params(), params()
        self.optimizer, self.other = make(fp.leaves(self.params)), make(fp.leaves(self.wanted))

    def run(self, *, executor=None, max_norm=None, x=X, target=TARGET, **options):
        """One run of each; what both gave."""
        want = fp.run(self.outside, self.wanted, (x, target), **options)
        norm = fp.step(self.other, self.wanted, want, max_norm=max_norm)
        options |= {"executor": executor, "max_norm": max_norm, "optimizer": self.optimizer}
        got = fp.run(self.inside, self.params, (x, target), **options)
        assert same(want.loss, got.loss)
        assert same(want.grads, got.grads)
        assert same(norm, got.norm)
        self.check()
        return want, got

    def check(self):
        """Are the two alike."""
        assert same(self.wanted, self.params)
        mine, its = self.optimizer.state_dict(), self.other.state_dict()
        assert mine["param_groups"] == its["param_groups"]
        assert same(its["state"], mine["state"])
        assert all(leaf.grad is None for leaf in fp.leaves(self.params))


@pytest.mark.parametrize("schedule", schedules(STAGES, MICROBATCHES), ids=ids)
def test_every_schedule(schedule):
    twins = Twins(schedule=schedule)
    for max_norm in NORMS:
        twins.run(max_norm=max_norm)


@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_every_optimizer(make, executor):
    """Of these, Adagrad and SGD with Nesterov's momentum write into gradients where they can."""
    twins = Twins(make, fp.schedules.zero_bubble(STAGES, MICROBATCHES))
    for number, max_norm in enumerate(NORMS):
        twins.run(executor=executor, max_norm=max_norm, x=X * (number + 1))


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_what_is_not_finite(scale):
    """Under a loss scale nothing is stepped, whichever stage has it; without one the step is as
    wrong as without a schedule."""
    twins = Twins()
    twins.run(loss_scale=scale)
    before = snapshot((twins.params, twins.optimizer.state_dict()["state"]))
    _, got = twins.run(loss_scale=scale, target=BROKEN)
    assert not got.norm.isfinite()
    assert same(before, snapshot((twins.params, twins.optimizer.state_dict()["state"]))) == (
        scale != 1.0
    )
    if scale != 1.0:
        twins.run(loss_scale=scale)


def test_a_run_that_fails_leaves_all_as_it_was(monkeypatch):
    """The last stage is stepped before the first one's backward raises, in each run but the first
    with state to restore."""

    def strike(gradient):
        if fails:
            raise ArithmeticError("planted")

    stages = FaultAt(0, MICROBATCHES - 1, "B", error=strike)([fp.stage(residual)] * 3)
    plan = cpu_plan(stages, fp.schedules.step_params(fp.schedules.one_f_one_b(3, MICROBATCHES)))
    params, stepped = residual_params(3), []
    optimizer, own = MAKERS["adamw"](fp.leaves(params)), torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self, *rest: (stepped.append(1), own(self, *rest))
    )
    for fails in (True, False, True):
        before, state = snapshot(params), copy.deepcopy(optimizer.state_dict()["state"])
        stepped.clear()
        if fails:
            with pytest.raises(ArithmeticError, match="planted"):
                fp.run(plan, params, (X, TARGET), optimizer=optimizer, executor="serial")
            assert len(stepped) == 1
            assert same(before, snapshot(params))
            assert same(state, optimizer.state_dict()["state"])
        else:
            fp.run(plan, params, (X, TARGET), optimizer=optimizer, executor="serial")
            assert len(stepped) == 3
            assert not same(before, snapshot(params))


def test_each_stage_steps_on_its_lane_as_soon_as_it_can():
    """The last stage's step ends before the first one's last backward begins, and a recorded run
    shows it."""
    schedule = fp.schedules.step_params(fp.schedules.one_f_one_b(3, 3))
    params = residual_params(3)
    result = fp.run(
        plan_of(schedule),
        params,
        (X, TARGET),
        optimizer=MAKERS["sgd"](fp.leaves(params)),
        record=True,
        executor="serial",
    )
    spans = {str(span.action): span for span in result.timeline.spans}
    assert spans["2S"].end <= spans["0B2"].start
    assert {spans[f"{number}S"].device for number in range(3)} == {0, 1, 2}
    assert min(result.timeline.cost().step) > 0


def late(y, target):
    """A sum, and how much it counts, which nobody knew before."""
    return (y - target).square().sum(), target.numel()


@pytest.mark.parametrize("max_norm", NORMS)
def test_a_loss_that_weighs_late(max_norm):
    """The first run finds out, undoes and steps at the end; later ones do so at once."""
    twins = Twins(loss=late)
    for _ in range(3):
        twins.run(max_norm=max_norm)


@pytest.mark.parametrize("max_norm", NORMS)
def test_tied_parameters_wait_for_all(max_norm):
    """Stages of a tie are stepped at the end, the others where they stand."""

    def tied():
        params = residual_params(STAGES)
        params[3]["a"] = params[0]["a"]
        return params

    twins = Twins(params=tied, ties=[((0, ("a",)), (3, ("a",)))])
    for _ in range(2):
        twins.run(max_norm=max_norm)


def test_leaves_that_the_optimizer_does_not_hold_stay():
    twins = Twins(lambda leaves: MAKERS["sgd"](leaves[:4]))
    before = snapshot(twins.params[2:])
    twins.run()
    twins.run(max_norm=0.05)
    assert same(before, snapshot(twins.params[2:]))


def test_groups_and_a_scheduler():
    """Groups keep their own numbers; a scheduler sees that there was a step."""

    def make(leaves):
        rest = {"params": leaves[4:], "lr": 0.03, "weight_decay": 0.2}
        return torch.optim.AdamW([{"params": leaves[:4], "lr": 0.01}, rest])

    twins = Twins(make)
    schedulers = [
        torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (twins.optimizer, twins.other)
    ]
    for _ in range(3):
        twins.run()
        for scheduler in schedulers:
            scheduler.step()


@pytest.mark.parametrize("compiled", [False, True])
def test_modules_with_state(compiled):
    """BatchNorm, dropout and compiled stages: a stage that was stepped wrote into its own
    parameters, and that is no fault."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 6))
    plans, rows = [], []
    for wrap in (fp.schedules.step_params, lambda schedule: schedule):
        split = fp.split(copy.deepcopy(model), balance=[2, 2])
        stages = [fp.compile_stage(one) for one in split.stages] if compiled else split.stages
        schedule = wrap(fp.schedules.zero_bubble(2, 3))
        plans.append(cpu_plan(stages, schedule))
        rows.append([split.params, split.state, MAKERS["adamw"](fp.leaves(split.params))])
    for seed in range(3):
        options = {"seed": seed, "state": rows[0][1]}
        got = fp.run(plans[0], rows[0][0], (X, TARGET), optimizer=rows[0][2], **options)
        want = fp.run(plans[1], rows[1][0], (X, TARGET), **{**options, "state": rows[1][1]})
        fp.step(rows[1][2], rows[1][0], want)
        assert same(want.state, got.state)
        assert same(rows[1][0], rows[0][0])
        rows[0][1], rows[1][1] = got.state, want.state


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "steps .S., but the run got no optimizer"),
        ({"optimizer": torch.optim.SGD}, "SGD is a class"),
        ({"optimizer": 3}, "optimizer first"),
        (
            {"optimizer": torch.optim.SGD([torch.ones(2, requires_grad=True)])},
            "holds none of the leaves",
        ),
        ({"optimizer": MAKERS["sgd"], "max_norm": -1.0}, "max_norm is a number from 0"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS"),
    ],
)
def test_what_cannot_step_is_refused_before_anything_runs(options, message):
    params = residual_params(STAGES)
    plan = plan_of(fp.schedules.step_params(SCHEDULE))
    maker = options.get("optimizer")
    if isinstance(maker, functools.partial) or maker is torch.optim.LBFGS:
        options = {**options, "optimizer": maker(fp.leaves(params))}
    before = snapshot(params)
    with pytest.raises(fp.PlanError, match=message):
        fp.run(plan, params, (X, TARGET), **options)
    assert same(before, snapshot(params))


def test_an_optimizer_for_a_schedule_that_does_not_step():
    params, plan = residual_params(STAGES), plan_of(SCHEDULE)
    with pytest.raises(fp.PlanError, match=r"has no S.*step_params\(schedule\)"):
        fp.run(plan, params, (X, TARGET), optimizer=MAKERS["sgd"](fp.leaves(params)))


def test_halves_do_not_step_and_the_oracle_leaves_it_alone():
    params = residual_params(STAGES)
    schedule = fp.schedules.step_params(fp.schedules.fill_drain(STAGES, MICROBATCHES))
    with pytest.raises(fp.PlanError, match=r"steps \(S\), but vjp"):
        fp.vjp(
            fp.make_plan([fp.stage(residual)] * STAGES, schedule, devices="cpu", outputs=True),
            params,
            X,
        )
    before = snapshot(params)
    fp.run_sequential(plan_of(schedule), params, (X, TARGET))
    assert same(before, snapshot(params))


def test_a_result_that_was_stepped_is_not_stepped_again():
    """Nor are gradients of several such runs one batch's."""
    params, plan = residual_params(STAGES), plan_of(fp.schedules.step_params(SCHEDULE))
    optimizer = MAKERS["sgd"](fp.leaves(params))
    result = fp.run(plan, params, (X, TARGET), optimizer=optimizer)
    before = snapshot(params)
    with pytest.raises(fp.PlanError, match=r"the run has already stepped .*leave fp\.step out"):
        fp.step(optimizer, params, result)
    with pytest.raises(fp.PlanError, match="these runs have already stepped"):
        fp.accumulate([result, result])
    assert same(before, snapshot(params))
    assert same(result.norm, fp.global_norm(result))


class Counts(torch.optim.Optimizer):
    """Counts steps in its group and on itself, and looks at all leaves: not to be stepped in
    parts."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "k": 0})
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["k"] += 1
            total = sum(leaf.grad.abs().sum() for leaf in group["params"] if leaf.grad is not None)
            for leaf in group["params"]:
                if leaf.grad is not None:
                    leaf.sub_(leaf.grad * (group["lr"] / group["k"] / total))


class Holds(torch.optim.Optimizer):
    """Holds another optimizer, with a state of its own."""

    def __init__(self, params):
        self.base = torch.optim.AdamW(params, lr=0.01)
        super().__init__(self.base.param_groups, self.base.defaults)
        self.param_groups = self.base.param_groups

    def step(self, closure=None):
        self.base.step()


@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("make", [Counts, Holds])
def test_an_optimizer_of_ones_own_is_stepped_as_a_whole(make, executor):
    """Who knows what it looks at; under a loss scale with an inf it is not stepped at all."""
    twins = Twins(make)
    for target, max_norm in ((TARGET, None), (BROKEN, None), (TARGET, 0.05), (TARGET, 1e6)):
        twins.run(executor=executor, loss_scale=4.0, target=target, max_norm=max_norm)
    if make is Counts:
        assert 3 == twins.optimizer.count == twins.other.count
    else:
        assert same(
            twins.other.base.state_dict()["state"], twins.optimizer.base.state_dict()["state"]
        )


def test_hooks_get_the_optimizer_itself():
    """Once a run, and what they write stays."""
    twins = Twins(MAKERS["sgd"])
    seen = []

    def halve(optimizer, *_):
        seen.append(optimizer)
        optimizer.param_groups[0]["lr"] *= 0.5

    for optimizer in (twins.optimizer, twins.other):
        optimizer.register_step_pre_hook(halve)
    twins.run()
    twins.run(max_norm=0.05)
    assert [id(one) for one in seen] == [id(one) for one in (twins.other, twins.optimizer) * 2]
    assert 0.025 == twins.optimizer.param_groups[0]["lr"]


def test_a_step_that_was_put_on_an_optimizer_is_called():
    twins = Twins(MAKERS["sgd"])
    calls = []
    for optimizer in (twins.optimizer, twins.other):
        own = optimizer.step
        optimizer.step = functools.wraps(own)(lambda own=own: (calls.append(1), own()))
    twins.run()
    twins.run(max_norm=0.05)
    assert 4 == len(calls)


def test_a_frozen_leaf_with_an_old_gradient_stays():
    twins = Twins()
    for params in (twins.params, twins.wanted):
        for leaf in fp.leaves(params):
            leaf.requires_grad_()
        params[0]["b"].requires_grad_(False)
        params[0]["b"].grad = torch.ones(6, 6)
    before = snapshot(twins.params[0]["b"])
    twins.run()
    twins.run(max_norm=0.05)
    assert same(before, snapshot(twins.params[0]["b"]))


def test_views_of_one_buffer_are_stepped_at_the_end():
    """A write into one counts as a write into all."""

    def views():
        buffer = torch.randn(STAGES, 2, 6, 6, generator=torch.Generator().manual_seed(3)) * 0.3
        return tuple({"a": both[0].detach(), "b": both[1].detach()} for both in buffer)

    twins = Twins(params=views)
    for max_norm in NORMS:
        twins.run(max_norm=max_norm)


class Replaces(torch.optim.SGD):
    """Its state gets other tensors at each step."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for leaf in group["params"]:
                state = self.state[leaf]
                state["all"] = torch.cat([state.get("all", leaf.new_zeros(0, 6)), leaf])


Replaces.__module__ = "torch.optim.replaces"  # so that it is stepped in parts


def test_a_state_whose_tensors_are_replaced_comes_back():
    twins = Twins(functools.partial(Replaces, lr=0.1))
    twins.run(loss_scale=4.0)
    state = [twins.optimizer.state[leaf]["all"] for leaf in fp.leaves(twins.params)]
    twins.run(loss_scale=4.0, target=BROKEN)
    for leaf, own in zip(fp.leaves(twins.params), state, strict=True):
        assert twins.optimizer.state[leaf]["all"] is own
    twins.run(loss_scale=4.0, max_norm=0.05)


@pytest.mark.parametrize("call", [1, STAGES, STAGES + 1])
def test_a_step_that_fails_leaves_all_as_it_was(monkeypatch, call):
    """The first stage's, the last one's, or that of all with clipped gradients."""
    params, plan = residual_params(STAGES), plan_of(fp.schedules.step_params(SCHEDULE))
    optimizer = MAKERS["adamw"](fp.leaves(params))
    fp.run(plan, params, (X, TARGET), optimizer=optimizer)
    before, state = snapshot(params), copy.deepcopy(optimizer.state_dict()["state"])
    own, calls = torch.optim.AdamW.step, []

    def fails(self, *rest):
        own(self, *rest)
        calls.append(1)
        if len(calls) == call:
            raise ArithmeticError("planted")

    monkeypatch.setattr(torch.optim.AdamW, "step", fails)
    with pytest.raises(ArithmeticError, match="planted"):
        fp.run(plan, params, (X, TARGET), optimizer=optimizer, max_norm=0.01, executor="serial")
    assert same(before, snapshot(params))
    assert same(state, optimizer.state_dict()["state"])
    assert all(leaf.grad is None for leaf in fp.leaves(params))


def test_autocast_is_of_the_stages():
    """As around `fp.run` alone: Adafactor multiplies matrices."""
    twins = Twins(functools.partial(torch.optim.Adafactor, lr=0.01))
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            want = fp.run(twins.outside, twins.wanted, (X, TARGET))
            fp.run(twins.inside, twins.params, (X, TARGET), optimizer=twins.optimizer)
        fp.step(twins.other, twins.wanted, want)
        twins.check()


def test_names_of_parameters_and_the_order_of_the_state():
    """Parts have the names of theirs; what is saved has the order of the leaves, whichever stage
    was first."""
    params = residual_params(STAGES)
    optimizer = torch.optim.AdamW(fp.named_leaves(params), lr=0.01)
    plan = plan_of(fp.schedules.step_params(SCHEDULE))
    fp.run(plan, params, (X, TARGET), optimizer=optimizer, executor="serial")
    assert [*optimizer.state] == fp.leaves(params)
    assert [*range(2 * STAGES)] == [*optimizer.state_dict()["state"]]
    part = part_of(optimizer, [params[1]["b"], params[2]["a"]])
    assert ["1.b", "2.a"] == part.param_groups[0]["param_names"]
