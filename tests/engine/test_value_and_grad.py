"""The loss and the gradients of a plan with the signature of JAX; names of other libraries."""

import pytest
import torch
from torch import nn

import funcpipe as fp


@pytest.fixture
def plan():
    """Two linear stages."""
    stages = [fp.stage(lambda p, x: x @ p["w"])] * 2
    schedule = fp.schedules.one_f_one_b(2, 3)
    return fp.make_plan(stages, schedule, loss=nn.functional.mse_loss, devices="cpu")


PARAMS = ({"w": torch.randn(4, 4)}, {"w": torch.randn(4, 2)})
BATCH = torch.randn(7, 4), torch.randn(7, 2)


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_it_is_a_run_and_the_gradients_of_torch_func(plan, executor):
    """The loss is the loss of `run`, and the gradients are those of torch.func."""
    (loss, result), grads = fp.value_and_grad(plan, executor=executor)(PARAMS, BATCH)
    assert isinstance(result, fp.Result)
    assert grads is result.grads

    def whole(params, x, target):
        return nn.functional.mse_loss(x @ params[0]["w"] @ params[1]["w"], target)

    wanted, value = torch.func.grad_and_value(whole)(PARAMS, *BATCH)
    torch.testing.assert_close(loss, value)
    torch.testing.assert_close(grads, wanted)


def test_options_of_a_call_replace_those_of_the_function(plan):
    """Options may be given early or late."""
    computed = fp.value_and_grad(plan, trainable=False, record=True)
    _, grads = computed(PARAMS, BATCH, trainable=True)
    assert all(leaf is not None for leaf in fp.leaves(grads))
    assert computed(PARAMS, BATCH)[0][1].timeline is not None


def test_plans_without_backwards_are_refused(plan):
    """Before anything runs, with the call that fixes it."""
    stages, schedule = plan.stages, plan.schedule
    for bad in (
        fp.make_plan(stages, schedule.forwards(), devices="cpu"),
        fp.make_plan(stages, schedule.forwards(), loss=nn.functional.mse_loss, devices="cpu"),
        None,
    ):
        with pytest.raises(fp.PlanError, match=r"make_plan\(stages, schedule, loss=fn\)"):
            fp.value_and_grad(bad)


def test_unknown_options_are_refused(plan):
    """Before the function is called."""
    with pytest.raises(TypeError, match="'has_aux'"):
        fp.value_and_grad(plan, has_aux=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'has_aux'"):
        fp.value_and_grad(plan)(PARAMS, BATCH, has_aux=True)
    with pytest.raises(
        TypeError, match=r"takes \(params, batch\), where batch is \(inputs, target\)"
    ):
        fp.value_and_grad(plan)(PARAMS, *BATCH)


@pytest.mark.parametrize("name", ["gpipe", "GPipe", "ScheduleGPipe", "AFAB"])
def test_names_of_other_libraries_are_answered(name):
    """A name that people type names the function here."""
    with pytest.raises(AttributeError, match=r"fp\.schedules\.fill_drain"):
        getattr(fp.schedules, name)


def test_every_answer_is_a_function_and_other_names_have_none():
    """No answer leads nowhere."""
    for name, here in fp.schedules._OTHER_NAMES.items():
        assert callable(getattr(fp.schedules, here.partition("(")[0]))
        assert not hasattr(fp.schedules, name)
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        _ = fp.schedules.nothing
