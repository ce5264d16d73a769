"""Careless plans: stages, schedule, loss, devices and ties that are something else than they should
be."""

import dataclasses

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from small import batch, equals_plain, parts, plan_of, refused, setup

import funcpipe as fp

SCHEDULE = fp.schedules.one_f_one_b(num_stages=2, num_microbatches=4)


def test_stages_come_first_and_are_stages():
    whole, stages, _ = parts()
    for given, mend in (
        (SCHEDULE, r"stages is a Schedule; the stages come first: make_plan\(stages, schedule\)"),
        (
            whole,
            r"stages is a Sequential, a model in one piece: fp.split\(model, num_stages\) cuts it",
        ),
        (nn.ModuleList(whole), "stages is a ModuleList, a model in one piece"),
        (
            fp.Pipe(whole, chunks=2, devices=["cpu", "cpu"]),
            "stages is a Pipe, a model in one piece",
        ),
        (2, "stages is a int; give a sequence of stages"),
    ):
        with refused(mend):
            fp.make_plan(given, SCHEDULE)
    assert fp.make_plan((one for one in stages), SCHEDULE).num_stages == 2


@pytest.mark.parametrize("schedule", [fp.schedules.one_f_one_b, "1f1b", 4])
def test_a_schedule_is_made_by_a_call(schedule):
    with refused(r"make one with fp.schedules.one_f_one_b\(...\) or Schedule.parse"):
        fp.make_plan(parts()[1], schedule)


@pytest.mark.parametrize(
    ("loss", "mend"),
    [
        (nn.CrossEntropyLoss, r"make an instance: loss=CrossEntropyLoss\(\)"),
        (lambda y: y.mean(), r"loss is called with \(y, target\), but <lambda> takes \(y\)"),
        (lambda y, target, mask: y.mean(), r"but <lambda> takes \(y, target, mask\)"),
    ],
)
def test_a_loss_is_a_function_of_output_and_target(loss, mend):
    with refused(mend):
        plan_of(parts()[1], loss=loss)


def test_a_weight_is_a_function_of_the_target():
    with refused("missing a required argument"):
        plan_of(parts()[1], weight=lambda y, target: 1.0)


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (
            lambda y, t: None,
            "the loss is a floating number in a tensor: the mean .* got a NoneType",
        ),
        (
            lambda y, t: F.cross_entropy(y, t).item(),
            "the loss is a floating number in a tensor.* got a float",
        ),
        (lambda y, t: F.cross_entropy(y, t, reduction="none"), r"got a tensor of shape \(2,\)"),
        (lambda y, t: {"loss": F.cross_entropy(y, t)}, "got a dict"),
        (lambda y, t: (y.argmax(1) == t).sum(), r"got a tensor of shape \(\), torch.int64"),
        (
            lambda y, t: (F.cross_entropy(y, t), y),
            r"\(sum, weight\): the weight is a number .*fp.Loss\(loss, aux=...\)",
        ),
        (lambda y, t: (F.cross_entropy(y, t), y.sum()), "which requires a gradient"),
        (lambda y, t: (F.cross_entropy(y, t), {"accuracy": 1}), "got a dict"),
        (
            lambda y, t: fp.Loss(F.cross_entropy(y, t), y),
            r"To return other values beside the loss",
        ),
    ],
)
def test_what_a_loss_returns_is_looked_at_before_any_backward(loss, told):
    _, stages, params = parts()
    with pytest.raises(fp.StageError, match=told) as caught:
        fp.run(plan_of(stages, loss=loss), params, batch())
    assert caught.value.funcpipe.action == "1F0 (loss)"


def test_what_should_come_back_beside_the_loss_is_aux():
    whole, stages, params = parts()
    given = batch(10)
    plan = plan_of(
        stages, loss=lambda y, t: fp.Loss(F.cross_entropy(y, t), aux=(y.argmax(1) == t).sum())
    )
    result = fp.run(plan, params, given)
    equals_plain(whole, given, result)
    assert sum(result.aux) == (whole(given[0]).argmax(1) == given[1]).sum()


def test_a_loss_that_calls_backward_is_refused():
    def loss(y, target):
        found = F.cross_entropy(y, target)
        found.backward(retain_graph=True)
        return found

    _, stages, params = parts()
    with refused("the stage, or the loss, calls backward itself"):
        fp.run(plan_of(stages, loss=loss), params, batch())


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, t: F.cross_entropy(y, t).detach(),
        torch.no_grad()(lambda y, t: F.cross_entropy(y, t)),
    ],
)
def test_a_loss_without_a_graph_is_refused(loss):
    _, stages, params = parts()
    with refused("no gradient reached any parameter: the loss depends on none of them"):
        fp.run(plan_of(stages, loss=loss), params, batch())


def test_a_loss_of_one_element_is_a_number():
    whole, stages, params = parts()
    given = batch()
    equals_plain(
        whole,
        given,
        fp.run(plan_of(stages, loss=lambda y, t: F.cross_entropy(y, t)[None]), params, given),
    )


def test_weight_decay_by_hand_inside_of_the_loss_is_refused():
    whole, stages, params = parts()

    def loss(y, target):
        return F.cross_entropy(y, target) + sum(p.square().sum() for p in whole.parameters())

    with refused(r"the loss closes over parameters of the stages, .* fp.Out\(y, loss="):
        fp.run(plan_of(stages, loss=loss), params, batch())


def test_devices_exist():
    _, stages, params = parts()
    for devices in ("gpu", ["cpu", "nowhere"]):
        plan = fp.make_plan(stages, SCHEDULE, loss=F.cross_entropy, devices=devices)
        for call in (lambda p=plan: fp.place(p, params), lambda p=plan: fp.run(p, params, batch())):
            with pytest.raises(
                fp.PlacementError,
                match=r"devices that this process does not have; .*devices=fp.devices\(n\)\)",
            ):
                call()


@pytest.mark.parametrize("word", ["train", "outputs"])
def test_flags_are_true_or_false(word):
    with refused(rf"{word}= is True, False or None; got 'no'"):
        plan_of(parts()[1], **{word: "no"})


def test_ties_are_groups_of_places():
    with refused(r"write ties=\[\[\(0, path\), \(1, path\)\], ...\]"):
        plan_of(parts()[1], ties=[("0.weight", "2.weight")])


@pytest.mark.parametrize(
    ("group", "told"),
    [
        (
            [(0, "0.weight"), (1, "2.wieght")],
            r"params\[1\] has no leaf at '2.wieght'; did you mean '2.weight'",
        ),
        ([(0, "0.weight"), (1, "2.weight")], "differ in shape"),
    ],
)
def test_ties_name_leaves_of_one_shape(group, told):
    _, stages, params = parts()
    with refused(told):
        fp.run(plan_of(stages, ties=[group]), params, batch())


def test_one_layer_twice_is_tied_or_refused():
    layer = nn.Linear(4, 4)
    whole = nn.Sequential(layer, nn.Tanh(), layer)
    given = torch.randn(8, 4), torch.randn(8, 4)
    _, stages, params = parts(whole)
    with refused(r"one tensor in two stages; tie them.*make_plan\(..., ties=\["):
        fp.run(plan_of(stages, loss=F.mse_loss), params, given)
    split = fp.split(whole, 2)
    plan = fp.make_plan(split, SCHEDULE, loss=F.mse_loss, devices="cpu")
    equals_plain(whole, given, fp.run(plan, split.params, given), F.mse_loss)


def test_a_plan_is_what_calls_take_first():
    _, plan, params = setup()
    given = batch()
    calls = {
        "run": lambda: fp.run(params, plan, given),
        "run_sequential": lambda: fp.run_sequential(plan.schedule, params, given),
        "vjp": lambda: fp.vjp(plan.stages, params, given[0]),
        "place": lambda: fp.place(params, plan),
        "lanes": lambda: fp.lanes(2),
        "graphs": lambda: fp.graphs(plan.stages),
        "warmup": lambda: fp.warmup(fp.compile_stage(plan.stages[0]), params[0], given),
    }
    for name, call in calls.items():
        with refused(rf"^{name} takes a plan; got a \w+; make one: fp.make_plan"):
            call()


def test_a_plan_that_backs_up_is_not_run_without_gradients():
    _, plan, params = setup()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, refused(r"to evaluate, make a plan of forwards: .*schedule.forwards\(\)"):
            fp.run(plan, params, batch())


def test_evaluation_under_inference_mode_is_right():
    whole, stages, params = parts()
    x, _ = batch()
    plan = fp.make_plan(stages, SCHEDULE.forwards(), devices="cpu")
    with torch.inference_mode():
        torch.testing.assert_close(fp.run(plan, params, x).outputs, whole(x))


def test_a_plan_without_a_loss_takes_the_inputs_alone():
    _, stages, params = parts()
    with pytest.raises(TypeError, match="takes 2 positional") as caught:
        fp.run(fp.make_plan(stages, SCHEDULE.forwards(), devices="cpu"), params, batch())
    assert any(note.startswith("got x: [0] float32 ") for note in caught.value.__notes__)


def test_replaced_fields_of_a_plan():
    """A plan has the program of its schedule, and the weights of its loss."""
    plan = fp.make_plan(
        [fp.stage(lambda p, x: x * p)], fp.schedules.one_f_one_b(1, 2), loss=F.cross_entropy
    )
    for changed in (
        {"loss": nn.CrossEntropyLoss(ignore_index=1)},
        {"schedule": fp.schedules.one_f_one_b(1, 4)},
        {"schedule": plan.schedule.forwards()},
    ):
        (name,) = changed
        with refused(f"call make_plan again:\n  \\* {name}="):
            dataclasses.replace(plan, **changed)
    assert dataclasses.replace(plan, devices=("cpu",)).loss is F.cross_entropy
