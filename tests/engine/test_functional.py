"""A functional optimizer is stepped in runs and after them like the pure functions by themselves,
bit for bit; results of functions that do not fit are refused, and nothing has changed then."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from common import cpu_plan, same, snapshot
from functional_rules import MAKERS, PlainRule, adamw, moments, sgd
from small import residual, residual_params
from torch import nn

import funcpipe as fp
from funcpipe.optim import FunctionalOptimizer

GENERATOR = torch.Generator().manual_seed(1)
BATCHES = [tuple(torch.randn(8, 6, generator=GENERATOR) for _ in range(2)) for _ in range(4)]


def plan_of(schedule=None, *, steps=True, **options):
    schedule = schedule or fp.schedules.one_f_one_b(3, 4)
    schedule = fp.schedules.step_params(schedule) if steps else schedule
    return cpu_plan([fp.stage(residual)] * 3, schedule, **options)


def plain(name, batches, max_norm=None, frozen=()):
    """The parameters after plain PyTorch: a loop over microbatches, and the rule."""
    rule, norms = PlainRule(name, fp.leaves(residual_params(3))), []
    for x, target in batches:
        leaves = [tensor.clone().requires_grad_() for tensor in rule.tensors]
        params = [dict(zip("ab", leaves[2 * k : 2 * k + 2], strict=True)) for k in range(3)]
        for rows, to in zip(x.split(2), target.split(2), strict=True):
            y = rows
            for each in params:
                y = residual(each, y)
            (F.mse_loss(y, to) * 0.25).backward()
        gradients = [leaf.grad for leaf in leaves]
        norms.append(nn.utils.get_total_norm(gradients))
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(leaves, max_norm, norms[-1])
        rule.step([None if place in frozen else each for place, each in enumerate(gradients)])
    return rule, norms


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize("way", ["after", "inside", "batches"])
@pytest.mark.parametrize(("name", "executor"), [("sgd", "threads"), ("adamw", "serial")])
def test_as_the_functions_in_a_plain_loop(name, executor, way, max_norm):
    rule, norms = plain(name, BATCHES, max_norm)
    params = residual_params(3)
    optimizer = MAKERS[name](fp.leaves(params))
    plan, options = plan_of(steps=way != "after"), {"executor": executor, "threads_per_lane": 1}
    if way == "batches":
        results = fp.run_batches(
            plan, params, BATCHES, optimizer=optimizer, max_norm=max_norm, **options
        )
        got = [result.norm for result in results]
    elif way == "inside":
        options |= {"optimizer": optimizer, "max_norm": max_norm}
        got = [fp.run(plan, params, batch, **options).norm for batch in BATCHES]
    else:
        runs = (fp.run(plan, params, batch, **options) for batch in BATCHES)
        got = [fp.step(optimizer, params, result, max_norm=max_norm) for result in runs]
    assert same(norms, got)
    assert same(rule.tensors, fp.leaves(params))
    states = [[*optimizer.state[leaf].values()] for leaf in fp.leaves(params)]
    assert same([snapshot(state) for state in rule.states], states)


def test_a_stage_steps_on_its_lane():
    """Before the last backward of the first stage, as with an optimizer of torch."""
    params = residual_params(3)
    options = {"optimizer": MAKERS["adamw"](fp.leaves(params)), "executor": "serial"}
    result = fp.run(plan_of(), params, BATCHES[0], record=True, **options)
    spans = {str(span.action): span for span in result.timeline.spans}
    assert spans["2S"].end <= spans["0B3"].start
    assert min(result.timeline.cost().step) > 0


def test_frozen_leaves_and_their_states_stay():
    rule, _ = plain("adamw", BATCHES, frozen=(0, 5))
    params = residual_params(3)
    for leaf in fp.leaves(params):
        leaf.requires_grad_()
    params[0]["a"].requires_grad_(False)
    params[2]["b"].requires_grad_(False)
    optimizer = MAKERS["adamw"](fp.leaves(params))
    for batch in BATCHES:
        fp.run(plan_of(), params, batch, optimizer=optimizer)
    assert same(rule.tensors, [leaf.detach() for leaf in fp.leaves(params)])
    assert params[0]["a"] not in optimizer.state


@pytest.mark.parametrize("steps", [True, False])
def test_a_tied_leaf_is_stepped_once(steps):
    """With the sum of its gradients; its count says how often."""
    params = residual_params(3)
    params[2]["a"] = params[0]["a"]
    plan = plan_of(steps=steps, ties=[[(0, "a"), (2, "a")]])
    optimizer, rule = (make(fp.leaves(params)) for make in (MAKERS["adamw"], fresh_rule))
    for batch in BATCHES[:2]:
        wanted = fp.run(plan_of(steps=False, ties=plan.ties), params, batch).grads
        rule.step([dict(fp.named_leaves(wanted))[name] for name, _ in fp.named_leaves(params)])
        result = fp.run(plan, params, batch, optimizer=optimizer if steps else None)
        if not steps:
            fp.step(optimizer, params, result)
        assert same(rule.tensors, fp.leaves(params))
    assert all(int(state[".count"]) == 2 for state in optimizer.state.values())


def fresh_rule(leaves):
    return PlainRule("adamw", [leaf.clone() for leaf in leaves])


def test_groups_options_and_a_scheduler():
    """Each group has its own rate, and the scheduler changes both, also ahead of batches."""
    rows, optimizers, schedulers = [residual_params(3) for _ in range(2)], [], []
    for params, kind in zip(rows, (FunctionalOptimizer, torch.optim.SGD), strict=True):
        groups = [{"params": fp.leaves(params[:1]), "lr": 0.3}, {"params": fp.leaves(params[1:])}]
        rest = (torch.zeros_like, sgd) if kind is FunctionalOptimizer else ()
        more = {} if rest else {"momentum": 0.9}
        optimizers.append(kind(groups, *rest, lr=0.1, **more))
        schedulers.append(torch.optim.lr_scheduler.StepLR(optimizers[-1], 1, 0.5))
    for params, optimizer, scheduler in zip(rows, optimizers, schedulers, strict=True):
        fp.run_batches(plan_of(), params, BATCHES, optimizer=optimizer, scheduler=scheduler)
    torch.testing.assert_close(rows[0], rows[1], rtol=1e-5, atol=1e-6)
    assert optimizers[0].param_groups[0]["lr"] == 0.3 / 16


class Planted(ArithmeticError):
    """The failure that the tests plant."""


@pytest.mark.parametrize("way", ["after", "inside", "batches"])
@pytest.mark.parametrize("call", [2, 6, 8])
def test_an_update_that_raises_leaves_all_as_it_was(way, call):
    """Inside, a stage has stepped by then; afterwards, other leaves have their updates."""
    calls = []

    def update(gradient, state, param):
        calls.append(1)
        if fails and len(calls) == call:
            raise Planted
        return adamw(gradient, state, param)

    params = residual_params(3)
    optimizer = FunctionalOptimizer(fp.leaves(params), moments, update)
    plan, fails = plan_of(steps=way != "after"), False

    def train():
        if way == "batches":
            fp.run_batches(plan, params, BATCHES, optimizer=optimizer)
        elif way == "inside":
            fp.run(plan, params, BATCHES[0], optimizer=optimizer, max_norm=0.01)
        else:
            fp.step(optimizer, params, fp.run(plan, params, BATCHES[0]))

    for fails in (True, False, True):
        before = snapshot((params, copy.deepcopy(optimizer.state_dict()["state"])))
        calls.clear()
        if not fails or (way == "after" and call == 8):
            train()
        else:
            with pytest.raises(Planted):
                train()
            now = snapshot((params, copy.deepcopy(optimizer.state_dict()["state"])))
            assert same(before, now)


@pytest.mark.parametrize("stages", [4, 2, 1])
@pytest.mark.parametrize("name", MAKERS)
def test_saved_at_four_stages_and_continued_at_others(tmp_path, name, stages):
    pytest.importorskip("safetensors")

    class Training:
        def __init__(self, count):
            torch.manual_seed(1)
            self.split = fp.split(nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]), count)
            schedule = fp.schedules.step_params(fp.schedules.one_f_one_b(count, 4))
            self.plan = cpu_plan(self.split, schedule)
            self.optimizer = MAKERS[name](fp.leaves(self.split.params))

        def train(self, batches):
            for batch in batches:
                fp.run(self.plan, self.split.params, batch, optimizer=self.optimizer)
            return self.split.merge(self.split.params)

    first, other = Training(4), Training(stages)
    first.train(BATCHES[:2])
    fp.save(tmp_path, first.split, first.split.params, optimizer=first.optimizer)
    other.train(BATCHES[:1])
    fp.load(tmp_path, other.split, optimizer=other.optimizer)
    saved, loaded = (each.optimizer.state_dict()["state"] for each in (first, other))
    assert same([*map(snapshot, saved.values())], [*map(snapshot, loaded.values())])
    torch.testing.assert_close(other.train(BATCHES[2:]), first.train(BATCHES[2:]))

    before = snapshot(other.split.params)
    wrong = MAKERS["sgd" if name == "adamw" else "adamw"](fp.leaves(other.split.params))
    with pytest.raises(fp.CheckpointError, match="init returns"):
        fp.load(tmp_path, other.split, optimizer=wrong)
    assert same(before, snapshot(other.split.params))
    assert not wrong.state


def test_states_keep_their_types_in_a_state_dict():
    """torch would cast the count and the wider moments to bfloat16."""

    def init(param):
        return {"count": torch.zeros((), dtype=torch.int64), "sum": param.float() * 0, "step": 0}

    def update(gradient, state, param):
        total = state["sum"] + gradient.float() / 3
        new = {"count": state["count"] + 1, "sum": total, "step": state["step"] + 1}
        return -0.1 * total, new

    leaf = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    first = FunctionalOptimizer([leaf], init, update)
    for _ in range(3):
        leaf.grad = torch.ones(3, dtype=torch.bfloat16)
        first.step()
    other = FunctionalOptimizer([leaf.detach().clone()], init, update)
    other.load_state_dict(torch_saved(first.state_dict()))
    assert same([*first.state.values()], [*other.state.values()])
    assert leaf.dtype == torch.bfloat16
    groups = [{"params": [leaf]}, {"params": [torch.ones(1)]}]
    two = FunctionalOptimizer(groups, init, update)
    with pytest.raises(ValueError, match="parameter groups"):
        two.load_state_dict(first.state_dict())


def torch_saved(value):
    return pickle.loads(pickle.dumps(value))


def test_copies_step_like_the_original():
    params = residual_params(3)
    optimizer = MAKERS["sgd"](fp.leaves(params))
    fp.run(plan_of(), params, BATCHES[0], optimizer=optimizer)
    other_params, other = copy.deepcopy((params, optimizer))
    for tree, each in ((params, optimizer), (other_params, other)):
        fp.run(plan_of(), tree, BATCHES[1], optimizer=each)
    assert same(params, other_params)
    assert same([*optimizer.state.values()], [*other.state.values()])


def test_a_state_may_be_the_parameter_itself():
    """The parameter changes in place, so the state gets a copy of its old numbers."""

    def update(gradient, state, param):
        return -0.1 * gradient, {"old": param, "gradient": gradient}

    leaf = torch.ones(2)
    optimizer = FunctionalOptimizer(
        [leaf], lambda param: {"old": param, "gradient": param[:]}, update
    )
    for number in range(2):
        before, leaf.grad = leaf.clone(), torch.ones(2) + number
        optimizer.step()
        leaf.grad.zero_()
        assert same([before, torch.ones(2) + number], fp.leaves(optimizer.state[leaf])[::-1])


@pytest.mark.parametrize("way", ["after", "inside"])
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda g, s, p: g, r"returns \(update, new_state\); got float32 \[6, 6\]"),
        (lambda g, s, p: (None, s), r"update is None, the parameter float32 \[6, 6\]"),
        (lambda g, s, p: (g[:1], s), r"update is float32 \[1, 6\], the parameter float32 \[6, 6\]"),
        (lambda g, s, p: (g * 1j, s), r"update is complex64 \[6, 6\]"),
        (lambda g, s, p: (g, s["v"]), r"new state is float32 \[6, 6\]; the state was \['n'\] a"),
        (lambda g, s, p: (g, {**s, "v": s["v"][0]}), r"new state is .*\[6\]; the state was"),
        (lambda g, s, p: (g, {**s, "v": s["v"].double()}), r"new state is .*float64 \[6, 6\]; "),
        (lambda g, s, p: (g, {**s, "n": 0.5}), r"new state is \['n'\] a float, .* \['n'\] a int"),
    ],
)
def test_results_that_do_not_fit_are_refused(returned, message, way):
    """By the second leaf that is stepped, so one could have changed."""
    calls = []

    def update(gradient, state, param):
        calls.append(1)
        return (gradient, state) if len(calls) == 1 else returned(gradient, state, param)

    params = residual_params(3)
    optimizer = FunctionalOptimizer(
        fp.leaves(params), lambda param: {"v": torch.zeros_like(param), "n": 0}, update
    )
    before, inside = snapshot(params), way == "inside"
    plan = plan_of(steps=inside)
    step = partial(fp.run, plan, params, BATCHES[0], optimizer=optimizer)
    if not inside:
        step = partial(fp.step, optimizer, params, fp.run(plan, params, BATCHES[0]))
    with pytest.raises(fp.PlanError, match=f"nothing was stepped:\n.*{message}"):
        step()
    assert same(before, snapshot(params))
    assert not optimizer.state


def test_an_update_of_a_wider_type_is_added_as_in_optax():
    leaf = torch.ones(2, dtype=torch.bfloat16)
    leaf.grad = torch.ones(2, dtype=torch.bfloat16)
    FunctionalOptimizer([leaf], lambda _: (), lambda g, s, p: (g.float() * 1e-3, s)).step()
    assert same(torch.full((2,), 1.001).bfloat16(), leaf)


@pytest.mark.parametrize(
    ("init", "update", "options", "message"),
    [
        (None, sgd, {"lr": 1.0}, r"calls init\(param\), but None is not a callable"),
        (lambda: 0, sgd, {"lr": 1.0}, r"calls init\(param\), but too many positional"),
        (torch.zeros_like, sgd, {}, r"calls update\(gradient, state, param\), but missing .*'lr'"),
        (torch.zeros_like, sgd, {"rate": 1.0}, r"and the keywords rate, but .*'lr'"),
        (torch.zeros_like, lambda g, s, *, params: (g, s), {}, r"params=p, inplace=False\)"),
    ],
)
def test_functions_that_cannot_be_called_are_refused(init, update, options, message):
    with pytest.raises(fp.PlanError, match=message):
        FunctionalOptimizer(fp.leaves(residual_params(3)), init, update, **options)


def test_an_option_of_one_group_only_is_refused():
    leaf = torch.ones(2)
    with pytest.raises(fp.PlanError, match=r"option 'decay', .*FunctionalOptimizer\(..., decay="):
        FunctionalOptimizer([{"params": [leaf], "decay": 1}], torch.zeros_like, sgd, lr=0.1)


def test_torchopt_in_a_schedule():
    """As `torchopt` over all trees after the run."""
    torchopt = pytest.importorskip("torchopt")
    rule = torchopt.adamw(lr=0.01, weight_decay=0.1)
    params, wanted = residual_params(3), residual_params(3)
    optimizer = FunctionalOptimizer(
        fp.leaves(params), rule.init, lambda g, s, p: rule.update(g, s, params=p, inplace=False)
    )
    state = rule.init(wanted)
    for batch in BATCHES:
        fp.run(plan_of(), params, batch, optimizer=optimizer)
        grads = fp.run(plan_of(steps=False), wanted, batch).grads
        with torch.no_grad():
            updates, state = rule.update(grads, state, params=wanted, inplace=False)
            wanted = torchopt.apply_updates(wanted, updates, inplace=False)
    assert same(wanted, params)
