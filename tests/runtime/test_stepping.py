"""A schedule that steps gives what `step` after the run gives, bit for bit: parameters, the optimizer's state, the norm; and nothing
where that would not have stepped, or the run fails."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from common import ids, same, schedules, snapshot
from torch import nn

import funcpipe as fp

STAGES, MICROBATCHES = 4, 4
X = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
TARGET = torch.randn(12, 6, generator=torch.Generator().manual_seed(2))
MAKERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1),
    "nesterov": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
    "fused": functools.partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adagrad": functools.partial(torch.optim.Adagrad, lr=0.1, foreach=True),
    "rmsprop": functools.partial(torch.optim.RMSprop, lr=0.01, momentum=0.5),
}
NORMS = [None, 1e6, 0.05]


def layers():
    generator = torch.Generator().manual_seed(3)
    return tuple({name: torch.randn(6, 6, generator=generator) * 0.3 for name in "ab"} for _ in range(STAGES))


def stage(p, x):
    return x + torch.tanh(x @ p["a"]) @ p["b"]


def plan_of(schedule, *, loss=F.mse_loss, **options):
    return fp.make_plan([fp.stage(stage)] * schedule.num_stages, schedule, loss=loss, devices="cpu", **options)


class Twins:
    """The same parameters twice, each with an optimizer: one is stepped in runs, the other one after them."""

    def __init__(self, schedule, make, **options):
        self.schedule = schedule
        self.inside = plan_of(fp.schedules.step_params(schedule), **options)
        self.outside = plan_of(schedule, **options)
        self.params, self.wanted = layers()[: schedule.num_stages], layers()[: schedule.num_stages]
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


@pytest.mark.parametrize("max_norm", NORMS)
@pytest.mark.parametrize("schedule", schedules(STAGES, MICROBATCHES), ids=ids)
def test_every_schedule(schedule, max_norm):
    if not schedule.has_backward:
        pytest.skip("it trains nothing")
    twins = Twins(schedule, MAKERS["adamw"])
    for _ in range(2):
        twins.run(max_norm=max_norm)


@pytest.mark.parametrize("max_norm", NORMS)
@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_every_optimizer(make, executor, max_norm):
    """Three steps of each; of these Adagrad and SGD with Nesterov's momentum write into gradients where they can."""
    twins = Twins(fp.schedules.zero_bubble(STAGES, MICROBATCHES), make)
    for number in range(3):
        twins.run(executor=executor, max_norm=max_norm, x=X * (number + 1))


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_what_is_not_finite(scale):
    """Under a loss scale nothing is stepped, whichever stage has it; without one the step is as wrong as without a schedule."""
    twins = Twins(fp.schedules.one_f_one_b(STAGES, MICROBATCHES), MAKERS["adamw"])
    twins.run(loss_scale=scale)
    before = snapshot((twins.params, twins.optimizer.state_dict()["state"]))
    broken = torch.where(torch.arange(12)[:, None] == 5, torch.inf, TARGET)
    _, got = twins.run(loss_scale=scale, target=broken)
    assert not got.norm.isfinite()
    assert same(before, snapshot((twins.params, twins.optimizer.state_dict()["state"]))) == (scale != 1.0)
    if scale != 1.0:
        twins.run(loss_scale=scale)


def test_a_run_that_fails_leaves_all_as_it_was():
    """The last stage is stepped before the first one's backward raises, in each run but the first with state to restore."""
    seen = []

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(1)
            if len(seen) % MICROBATCHES == 0 and fails:
                raise ArithmeticError("planted")
            return gradient

    def first(p, x):
        return Raises.apply(stage(p, x))

    schedule = fp.schedules.step_params(fp.schedules.one_f_one_b(3, MICROBATCHES))
    plan = fp.make_plan([fp.stage(first), fp.stage(stage), fp.stage(stage)], schedule, loss=F.mse_loss, devices="cpu")
    params = layers()[:3]
    stepped = []
    optimizer = MAKERS["adamw"](fp.leaves(params))
    handle = optimizer.register_step_post_hook(lambda *_: stepped.append(1))
    for fails in (True, False, True):
        before, state = snapshot(params), copy.deepcopy(optimizer.state_dict())
        seen.clear()
        stepped.clear()
        if fails:
            with pytest.raises(ArithmeticError, match="planted"):
                fp.run(plan, params, (X, TARGET), optimizer=optimizer, executor="serial")
            assert len(stepped) == 1
            assert same(before, snapshot(params))
            assert same(state["state"], optimizer.state_dict()["state"])
        else:
            fp.run(plan, params, (X, TARGET), optimizer=optimizer, executor="serial")
            assert len(stepped) == 3
            assert not same(before, snapshot(params))
    handle.remove()


def test_each_stage_steps_on_its_lane_as_soon_as_it_can():
    """The last stage's step ends before the first one's last backward begins, and a recorded run shows it."""
    schedule = fp.schedules.step_params(fp.schedules.one_f_one_b(3, 3))
    params = layers()[:3]
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
    twins = Twins(fp.schedules.one_f_one_b(STAGES, MICROBATCHES), MAKERS["adamw"], loss=late)
    for _ in range(3):
        twins.run(max_norm=max_norm)


@pytest.mark.parametrize("max_norm", NORMS)
def test_tied_parameters_wait_for_all(max_norm):
    """Stages of a tie are stepped at the end, the others where they stand."""
    schedule = fp.schedules.one_f_one_b(STAGES, MICROBATCHES)
    ties = [((0, ("a",)), (3, ("a",)))]
    plans = [plan_of(one, ties=ties) for one in (fp.schedules.step_params(schedule), schedule)]
    rows = [layers() for _ in plans]
    for params in rows:
        params[3]["a"] = params[0]["a"]
    optimizers = [MAKERS["adamw"](list(dict.fromkeys(fp.leaves(params)))) for params in rows]
    for _ in range(2):
        got = fp.run(plans[0], rows[0], (X, TARGET), optimizer=optimizers[0], max_norm=max_norm)
        norm = fp.step(optimizers[1], rows[1], fp.run(plans[1], rows[1], (X, TARGET)), max_norm=max_norm)
        assert same(norm, got.norm)
        assert same(rows[0], rows[1])


def test_leaves_that_the_optimizer_does_not_hold_stay():
    twins = Twins(fp.schedules.one_f_one_b(STAGES, MICROBATCHES), MAKERS["sgd"])
    rows = [params[:2] for params in (twins.params, twins.wanted)]
    twins.optimizer, twins.other = (MAKERS["sgd"](fp.leaves(row)) for row in rows)
    before = snapshot(twins.params[2:])
    twins.run()
    twins.run(max_norm=0.05)
    assert same(before, snapshot(twins.params[2:]))


def test_groups_and_a_scheduler():
    """Groups keep their own numbers; a scheduler sees that there was a step."""
    twins = Twins(fp.schedules.one_f_one_b(STAGES, MICROBATCHES), MAKERS["sgd"])
    makers = [
        lambda params: torch.optim.AdamW(
            [
                {"params": fp.leaves(params[:2]), "lr": 0.01},
                {"params": fp.leaves(params[2:]), "lr": 0.03, "weight_decay": 0.2},
            ]
        )
    ] * 2
    twins.optimizer, twins.other = (
        make(params) for make, params in zip(makers, (twins.params, twins.wanted), strict=True)
    )
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (twins.optimizer, twins.other)]
    for _ in range(3):
        twins.run()
        for scheduler in schedulers:
            scheduler.step()


@pytest.mark.parametrize("compiled", [False, True])
def test_modules_with_state(compiled):
    """BatchNorm, dropout and compiled stages: a stage that was stepped wrote into its own parameters, and that is no fault."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 6))
    plans, rows = [], []
    for wrap in (fp.schedules.step_params, lambda schedule: schedule):
        split = fp.split(copy.deepcopy(model), balance=[2, 2])
        stages = [fp.compile_stage(one) for one in split.stages] if compiled else split.stages
        schedule = wrap(fp.schedules.zero_bubble(2, 3))
        plans.append(fp.make_plan(stages, schedule, loss=F.mse_loss, devices="cpu"))
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
        ({}, "steps .S., and the run was given no optimizer"),
        ({"optimizer": torch.optim.SGD}, "SGD is a class"),
        ({"optimizer": 3}, "optimizer first"),
        ({"optimizer": torch.optim.SGD([torch.ones(2, requires_grad=True)])}, "holds none of the leaves"),
        ({"optimizer": MAKERS["sgd"], "max_norm": -1.0}, "max_norm is a number from 0"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS"),
    ],
)
def test_what_cannot_step_is_refused_before_anything_runs(options, message):
    params = layers()
    plan = plan_of(fp.schedules.step_params(fp.schedules.one_f_one_b(STAGES, MICROBATCHES)))
    maker = options.get("optimizer")
    if isinstance(maker, functools.partial) or maker is torch.optim.LBFGS:
        options = {**options, "optimizer": maker(fp.leaves(params))}
    before = snapshot(params)
    with pytest.raises(fp.PlanError, match=message):
        fp.run(plan, params, (X, TARGET), **options)
    assert same(before, snapshot(params))


def test_an_optimizer_for_a_schedule_that_does_not_step():
    params = layers()
    plan = plan_of(fp.schedules.one_f_one_b(STAGES, MICROBATCHES))
    with pytest.raises(fp.PlanError, match=r"has no S.*step_params\(schedule\)"):
        fp.run(plan, params, (X, TARGET), optimizer=MAKERS["sgd"](fp.leaves(params)))


def test_halves_do_not_step_and_the_oracle_leaves_it_alone():
    params = layers()
    schedule = fp.schedules.step_params(fp.schedules.fill_drain(STAGES, MICROBATCHES))
    with pytest.raises(fp.PlanError, match=r"steps \(S\), and vjp"):
        fp.vjp(fp.make_plan([fp.stage(stage)] * STAGES, schedule, devices="cpu", outputs=True), params, X)
    before = snapshot(params)
    fp.run_sequential(plan_of(schedule), params, (X, TARGET))
    assert same(before, snapshot(params))


def test_a_result_that_was_stepped_is_not_stepped_again():
    """Nor are gradients of several such runs one batch's."""
    params = layers()
    plan = plan_of(fp.schedules.step_params(fp.schedules.one_f_one_b(STAGES, MICROBATCHES)))
    optimizer = MAKERS["sgd"](fp.leaves(params))
    result = fp.run(plan, params, (X, TARGET), optimizer=optimizer)
    before = snapshot(params)
    with pytest.raises(fp.PlanError, match=r"the run has stepped .*leave fp\.step out"):
        fp.step(optimizer, params, result)
    with pytest.raises(fp.PlanError, match="these runs stepped"):
        fp.accumulate([result, result])
    assert same(before, snapshot(params))
    assert same(result.norm, fp.global_norm(result))
