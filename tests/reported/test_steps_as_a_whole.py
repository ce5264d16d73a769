"""Steps: hooks of all optimizers, gradients that do not fit, schedulers that end; users' errors
without advice."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import cpu_plan, same
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import funcpipe as fp

S = fp.schedules
X = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))


def setting(*, steps=True):
    torch.manual_seed(0)
    split = fp.split(nn.Sequential(*[nn.Linear(2, 2) for _ in range(3)]), 3)
    schedule = S.one_f_one_b(3, 4)
    plan = cpu_plan(split, S.step_params(schedule) if steps else schedule)
    return plan, split.params, torch.optim.AdamW(fp.leaves(split.params), lr=0.1)


@pytest.fixture(params=["pre", "post", "own pre", "own post"])
def hooked(request):
    """Return a function that hooks an optimizer, or all, and returns the parameter counts of the
    calls."""
    handles = []

    def hook(optimizer):
        calls = []
        register = {
            "pre": register_optimizer_step_pre_hook,
            "post": register_optimizer_step_post_hook,
            "own pre": optimizer.register_step_pre_hook,
            "own post": optimizer.register_step_post_hook,
        }[request.param]
        handles.append(
            register(
                lambda each, *_: calls.append(sum(len(g["params"]) for g in each.param_groups))
            )
        )
        return calls

    yield hook
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("max_norm", [None, 1e-3])
def test_hooks_are_called_once_for_each_step(hooked, executor, max_norm):
    plan, params, optimizer = setting()
    calls = hooked(optimizer)
    fp.run(plan, params, (X, X), optimizer=optimizer, executor=executor, max_norm=max_norm)
    assert [6] == calls
    fp.run_batches(
        plan, params, [(X, X)] * 3, optimizer=optimizer, executor=executor, max_norm=max_norm
    )
    assert [6] * 4 == calls
    before = copy.deepcopy(params)
    fp.run(
        plan, params, (X * float("nan"), X), optimizer=optimizer, executor=executor, loss_scale=2.0
    )
    assert [6] * 4 == calls, "a step that is skipped"
    assert same(before, params)


def test_hooks_do_not_change_the_numbers(hooked):
    plan, params, optimizer = setting()
    fp.run_batches(plan, params, [(X, X)] * 3, optimizer=optimizer)
    other, theirs, again = setting()
    hooked(again)
    fp.run_batches(other, theirs, [(X, X)] * 3, optimizer=again)
    assert same(params, theirs)


WRONG = {
    "type": lambda g: g.double(),
    "shape": lambda g: g[:1],
    "number": lambda g: 3.0,
    "device": lambda g: g.to("meta"),
    "broadcast": lambda g: g.expand(2, *g.shape),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_that_do_not_fit_are_refused_before_any_is_installed(what, scaled):
    plan, params, optimizer = setting(steps=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0) if scaled else None
    result = fp.run(plan, params, (X, X))
    grads = list(copy.deepcopy(result.grads))
    grads[1]["1.bias"] = WRONG[what](grads[1]["1.bias"])
    before = copy.deepcopy(params)
    for leaf in fp.leaves(params):
        leaf.grad = torch.ones_like(leaf)
    with pytest.raises(
        fp.PlanError, match=r"do not fit(.|\n)*grads\[1\]\['1.bias'\] is .*params.*float32 \[2\]"
    ):
        fp.step(optimizer, params, tuple(grads), scaler=scaler)
    assert same(before, params)
    assert not optimizer.state
    fp.step(optimizer, params, result)
    assert all(leaf.grad is None for leaf in fp.leaves(params))


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_a_scheduler_that_ends_too_early_changes_nothing(executor):
    plan, params, optimizer = setting()
    fp.run(plan, params, (X, X), optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2)
    before = copy.deepcopy(
        (params, optimizer.state_dict(), scheduler.state_dict(), scheduler.get_last_lr())
    )
    with pytest.raises(ValueError, match="Tried to step 3 times"):
        fp.run_batches(
            plan, params, [(X, X)] * 3, optimizer=optimizer, scheduler=scheduler, executor=executor
        )
    now = (params, optimizer.state_dict(), scheduler.state_dict(), scheduler.get_last_lr())
    assert same(before[0], now[0])
    assert same(before[1]["state"], now[1]["state"])
    assert before[1]["param_groups"] == now[1]["param_groups"]
    assert before[2:] == now[2:]


OWN = [
    OSError("the tape device is busy"),
    ValueError("fourth dimension not found in my table"),
    RuntimeError("expected scalar type of my own"),
    KeyError("NoneType"),
    TypeError("missing 1 required positional"),
]


@pytest.mark.parametrize("error", OWN, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("where", ["stage", "loss"])
def test_errors_of_users_get_their_coordinates_alone(error, where):
    def fails(*_):
        raise error

    stage, loss = (fails, F.mse_loss) if where == "stage" else (lambda p, x: x * p["w"], fails)
    plan = fp.make_plan([fp.stage(stage)], S.fill_drain(1, 1), loss=loss, devices="cpu")
    with pytest.raises(type(error)) as caught:
        fp.run(
            plan, ({"w": torch.ones(1, requires_grad=True)},), (torch.ones(2, 1), torch.ones(2, 1))
        )
    (note,) = caught.value.__notes__
    assert note.startswith("in 0F0 ")
    assert note.endswith(" at microbatch 0 on device 0 (cpu)")


def test_errors_of_torch_list_what_the_stage_got():
    plan = fp.make_plan(
        [fp.stage(lambda p, x: x @ p["w"])], S.fill_drain(1, 1, backward=False), devices="cpu"
    )
    with pytest.raises(RuntimeError) as caught:
        fp.run(plan, ({"w": torch.ones(3, 2)},), torch.ones(2, 4))
    got, _ = caught.value.__notes__
    assert got == "got x: float32 [2, 4]; params: ['w'] float32 [3, 2]"
