"""Careless training: params, batches, seeds, state, optimizers and gradients as habits from
elsewhere have them."""

import copy

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from small import batch, equals_plain, model, parts, plan_of, refused, setup, squares

import funcpipe as fp


def sgd(params):
    return torch.optim.SGD(fp.leaves(params), lr=0.1)


# -- params
# -------------------------------------------------------------------------------


def test_params_are_one_tree_for_each_stage():
    whole, plan, params = setup()
    for given in (
        whole.state_dict(),
        whole.parameters(),
        list(whole.parameters()),
        whole,
        dict(enumerate(params)),
        None,
    ):
        with refused("params is a tuple with one tree for each of 2 stages"):
            fp.run(plan, given, batch())
    with refused(r"params\[0\] is a Sequential, which hides tensors"):
        fp.run(plan, (whole[:2], whole[2:]), batch())


def test_params_of_another_order_are_told_by_their_names():
    split = fp.split(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), 2)
    plan = fp.make_plan(split, fp.schedules.one_f_one_b(2, 2), loss=F.mse_loss, devices="cpu")
    with refused(r"own split, in its order:.*\n.*has '2.weight'"):
        fp.run(plan, split.params[::-1], (torch.randn(8, 4), torch.randn(8, 4)))
    with refused(r"these are not the trees of this split"):
        split.merge(split.params[::-1])


def test_of_functions_by_their_sizes():
    stages = [fp.stage(lambda params, x: x @ params["w"], name=name) for name in ("a", "b")]
    params = {"w": torch.randn(4, 6)}, {"w": torch.randn(6, 2)}
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        fp.run(
            plan_of(stages, loss=F.mse_loss), params[::-1], (torch.randn(8, 4), torch.randn(8, 2))
        )
    assert "got x: float32 [2, 4]; params: ['w'] float32 [6, 2]" in caught.value.__notes__


def test_arrays_are_no_parameters():
    with refused(
        r"params\[0\]\['w'\] is a ndarray, but only tensors get gradients: torch.from_numpy"
    ):
        squares(
            lambda params, x: x @ torch.as_tensor(params["w"]), {"w": np.eye(4, dtype="float32")}
        )
    with_number = {"w": torch.eye(4), "scale": np.float32(1.0)}
    assert squares(lambda params, x: x @ params["w"] * params["scale"], with_number).loss == 1


def test_parameters_made_under_inference_mode_have_gradients_and_torch_refuses_the_step():
    with torch.inference_mode():
        whole, stages, params = parts()
    normal = copy.deepcopy(whole)
    for name, leaf in whole.named_parameters():
        normal.get_parameter(name).data = leaf.clone()
    given = batch()
    result = fp.run(plan_of(stages), params, given)
    equals_plain(normal, given, result)
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        fp.step(torch.optim.SGD(fp.leaves(params), lr=0.1), params, result)


def test_a_model_that_is_frozen_as_a_whole_is_not_trained():
    _, stages, params = parts(model().requires_grad_(False))
    with refused(r"every parameter is frozen.*trainable=True.*schedule.forwards\(\)"):
        fp.run(plan_of(stages), params, batch())
    assert fp.run(plan_of(stages), params, batch(), trainable=True).grads[0]["0.weight"] is not None
    adapters = (
        {"base": nn.Parameter(torch.eye(4), requires_grad=False), "lora": torch.zeros(4, 4)},
    )
    stage = fp.stage(lambda params, x: x @ (params["base"] + params["lora"]))
    given = torch.randn(8, 4), torch.randn(8, 4)
    with refused("every parameter is frozen"):  # or the base would be trained
        fp.run(plan_of([stage], loss=F.mse_loss), adapters, given)
    adapters[0]["lora"].requires_grad_()
    assert fp.run(plan_of([stage], loss=F.mse_loss), adapters, given).grads[0]["base"] is None


def test_one_that_is_frozen_in_part_is_trained_in_part():
    whole = model()
    whole[2].requires_grad_(False)
    _, stages, params = parts(whole)
    given = batch()
    result = fp.run(plan_of(stages), params, given)
    equals_plain(whole, given, result)
    assert set(result.grads[1].values()) == {None}


@pytest.mark.parametrize("trainable", [["0.weight"], ["0.weight", "2.weight"], "0.weight", 3])
def test_what_is_trainable_is_no_list_of_names(trainable):
    _, plan, params = setup()
    with refused(r"trainable.* (is|give) True, False"):
        fp.run(plan, params, batch(), trainable=trainable)


def test_names_that_fit_nothing_leave_nothing_to_step():
    _, plan, params = setup()
    result = fp.run(plan, params, batch(), trainable=lambda name, leaf: name.startswith("layer0"))
    with refused("no leaf has a gradient, so there is nothing to step"):
        fp.step(sgd(params), params, result)


def test_half_precision_parameters_and_a_float_batch():
    _, stages, params = parts(model().half())
    with pytest.raises(RuntimeError, match="same dtype") as caught:
        fp.run(plan_of(stages), params, batch())
    assert any(note.startswith("got x: float32 ") for note in caught.value.__notes__)


def test_a_state_dict_that_is_loaded_later_counts():
    whole, plan, params = setup()
    given = batch()
    whole.load_state_dict({name: value / 2 for name, value in whole.state_dict().items()})
    equals_plain(whole, given, fp.run(plan, params, given))
    whole.double()
    doubled = given[0].double(), given[1]
    equals_plain(whole, doubled, fp.run(plan, params, doubled))


# -- batches
# -------------------------------------------------------------------------------


def test_a_batch_is_inputs_and_target():
    _, plan, params = setup()
    x, y = batch()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)
    for given, told in (
        ({"x": x, "y": y}, "a dict"),
        ((x, y, y), "a tuple of 3"),
        ((one for one in (x, y)), "a generator"),
        (iter([x, y]), "a list_iterator"),
        (loader, "a DataLoader"),
        (None, "a NoneType"),
        (x, "a Tensor"),
    ):
        with pytest.raises(fp.BatchError, match=rf"a batch is \(inputs, target\); got {told}"):
            fp.run(plan, params, given)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda x, y: (x.numpy(), y.numpy()),
            r"inputs is a ndarray with rows, not a tensor: torch.from_numpy\(inputs\)",
        ),
        (lambda x, y: (x, y.numpy()), r"target is a ndarray"),
        (lambda x, y: ({x}, y), "inputs is a set, which hides tensors"),
        (lambda x, y: (list(x), list(y)), r"target\[0\] is a 0-dim tensor and has no rows"),
        (
            lambda x, y: (x[0], y[0]),
            "target is a 0-dim tensor and has no rows; share it: fp.Replicate",
        ),
        (lambda x, y: (x[:0], y[:0]), "the batch has no rows: inputs, target"),
        (
            lambda x, y: (x[:, None].expand(8, 5, 4).transpose(0, 1), y),
            "leaves differ in rows: inputs has 5, target has 8",
        ),
        (lambda x, y: (fp.Axis(x, 5), y), "has shape .* and no axis 5"),
        (
            lambda x, y: (fp.Microbatches(x), y),
            "inputs has 8 ready-made microbatches, but the plan has 4",
        ),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(change, told):
    _, plan, params = setup()
    with pytest.raises(fp.BatchError, match=told):
        fp.run(plan, params, change(*batch()))


def test_a_list_of_inputs_and_target_is_right():
    whole, plan, params = setup()
    given = batch(9)
    equals_plain(whole, given, fp.run(plan, params, list(given)))


def test_two_targets_and_other_forms_of_batches_are_right():
    whole, stages, params = parts()
    x, y = batch()
    both = lambda output, target: (
        F.cross_entropy(output, target["a"]) + F.cross_entropy(output, target["b"])
    )
    plan = plan_of(stages, loss=both)
    equals_plain(whole, (x, {"a": y, "b": y}), fp.run(plan, params, (x, {"a": y, "b": y})), both)
    with torch.inference_mode():
        inference = x + 0
    equals_plain(whole, (x, y), fp.run(plan_of(stages), params, (inference, y)))
    cut = fp.Microbatches(x.chunk(2)), fp.Microbatches(y.chunk(2))
    equals_plain(whole, (x, y), fp.run(plan_of(stages), params, cut))


def test_target_first():
    _, plan, params = setup()
    x, y = batch()
    with pytest.raises(RuntimeError, match="same dtype") as caught:
        fp.run(plan, params, (y, x))
    assert any("got x: int64 [2]" in note for note in caught.value.__notes__)


def test_feeds_are_a_dict_by_name():
    stage = fp.stage(lambda params, x, *, feeds: x * feeds["mask"], feeds=["mask"])
    plan, x = plan_of([stage], loss=F.mse_loss), torch.ones(8, 4)
    for feeds, told in (
        ([x], "feeds is a dict"),
        (None, "feeds lacks 'mask'"),
        ({"mask": x[:4]}, "leaves differ in rows"),
    ):
        with pytest.raises(fp.FuncpipeError, match=told):
            fp.run(plan, ((),), (x, x), feeds=feeds)


# -- seeds and state
# -------------------------------------------------------------------------------


def dropping():
    whole = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 3))
    _, stages, params = parts(whole)
    return plan_of(stages), params


def test_a_seed_is_an_int():
    plan, params = dropping()
    given = batch()
    for seed in (3.0, "3", torch.Generator()):
        with refused("seed is an int; got a"):
            fp.run(plan, params, given, seed=seed)
    with pytest.raises(RuntimeError, match=r"no seed was given: run\(..., seed=step\)"):
        fp.run(plan, params, given)
    losses = {
        float(fp.run(plan, params, given, seed=seed).loss)
        for seed in (3, np.int64(3), torch.tensor(3))
    }
    assert len(losses) == 1


def test_fold_in_takes_ints_of_any_kind_and_names():
    assert (
        fp.fold_in(0, 3) == fp.fold_in(0, torch.tensor(3)) == fp.fold_in(np.int64(0), np.int32(3))
    )
    for data in (1.5, (1, 2), None):
        with refused(r"fold_in takes a seed and an int or a name: fold_in\(seed, step\)"):
            fp.fold_in(0, data)


def normed():
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)]
    split = fp.split(nn.Sequential(*layers), balance=[2, 2])
    return split, fp.make_plan(
        split, fp.schedules.one_f_one_b(2, 2), loss=F.mse_loss, devices="cpu"
    )


def test_state_that_is_forgotten_or_of_another_order_is_refused():
    split, plan = normed()
    given = torch.randn(8, 4), torch.randn(8, 4)
    with refused("state= is missing: .* state=result.state of the previous run"):
        fp.run(plan, split.params, given)
    with refused(r"own split, in its order:.*\n.*has '3.running_mean'"):
        fp.run(plan, split.params, given, state=split.state[::-1])
    _, bare, params = setup()
    with refused(r"stage 0 declares no state, but state\[0\] is not \(\)"):
        fp.run(bare, params, batch(), state=({"a": torch.ones(1)}, ()))


def test_state_is_threaded_or_it_stands_still():
    split, plan = normed()
    given, state = (torch.randn(8, 4), torch.randn(8, 4)), split.state
    for _ in range(3):
        state = fp.run(plan, split.params, given, state=state).state
        still = fp.run(plan, split.params, given, state=split.state).state
    assert [int(one[0]["1.num_batches_tracked"]) for one in (state, still, split.state)] == [
        3,
        1,
        0,
    ]


# -- optimizers
# -------------------------------------------------------------------------------


def test_torchs_habit_of_backward_is_told_what_to_do():
    _, plan, params = setup()
    optimizer = sgd(params)
    result = fp.run(plan, params, batch())
    optimizer.zero_grad()
    with refused(r"the backwards have already run: .* fp.step\(optimizer, params, result\)"):
        result.loss.backward()


def test_zero_grad_and_old_gradients_do_not_matter():
    whole, plan, params = setup()
    given = batch()
    expected = copy.deepcopy(whole)
    F.cross_entropy(expected(given[0]), given[1]).backward()
    torch.optim.SGD(expected.parameters(), lr=0.1).step()
    F.cross_entropy(whole(given[0]), given[1]).backward()  # left there, by a habit
    optimizer = torch.optim.SGD(
        whole.parameters(), lr=0.1
    )  # the model's: on their device they are the very params
    result = fp.run(plan, fp.place(plan, params), given)
    optimizer.zero_grad(set_to_none=False)
    fp.step(optimizer, params, result)
    torch.testing.assert_close(list(whole.parameters()), list(expected.parameters()))


def test_optimizers_over_other_tensors_are_refused():
    whole, plan, params = setup()
    other = torch.optim.SGD(copy.deepcopy(whole).parameters(), lr=0.1)
    with refused(r"the optimizer holds none .* make it after fp.place, with the params"):
        fp.step(other, params, fp.run(plan, params, batch()))


def test_step_takes_an_optimizer_the_params_and_a_result():
    whole, plan, params = setup()
    optimizer, result = sgd(params), fp.run(plan, params, batch())
    before = copy.deepcopy(params)
    for given, mend in (
        (
            (params, optimizer, result),
            r"step takes the optimizer first, fp.step\(optimizer, params, result\); got a tuple",
        ),
        (
            (torch.optim.SGD, params, result),
            r"SGD is a class; make an optimizer: torch.optim.SGD\(fp.leaves\(params\), lr=...\)",
        ),
        ((optimizer, whole, result), "is not a tree of tensors; give the params of a run"),
        ((optimizer, fp.leaves(params), result), "params and grads differ in structure"),
        ((optimizer, params, result.loss), r"got one tensor \(a loss\?\)"),
    ):
        with refused(mend):
            fp.step(*given)
    assert all(map(torch.equal, fp.leaves(before), fp.leaves(params)))


def test_step_of_an_evaluation_is_refused():
    _, stages, params = parts()
    plan = fp.make_plan(stages, fp.schedules.fill_drain(2, 2, backward=False), devices="cpu")
    with refused("the result has no gradients: its schedule has no backwards"):
        fp.step(sgd(params), params, fp.run(plan, params, batch()[0]))


def test_a_norm_is_of_gradients_alone():
    whole, plan, params = setup()
    result = fp.run(plan, params, batch(), loss_scale=8.0)
    plain = fp.run(plan, params, batch(), loss_scale=1.0)
    torch.testing.assert_close(fp.global_norm(result) * 8, fp.global_norm(result.grads))
    assert (
        fp.global_norm(plain)
        == fp.global_norm(plain.grads)
        == fp.global_norm(fp.leaves(plain.grads))
    )
    for strange in (whole, whole.parameters()):
        with refused(r"is not a tree of tensors; give the params .* list\(module.parameters\(\)\)"):
            fp.global_norm(strange)


def test_leaves_are_of_trees():
    whole = model()
    for strange in (whole, whole.parameters(), [whole[0]], (whole[0], whole[2])):
        for leaves in (fp.leaves, fp.named_leaves):
            with refused(r"is not a tree of tensors; give the params of a run"):
                leaves(strange)
    assert len(fp.leaves(list(whole.parameters()))) == 4


def test_place_takes_a_tree_for_each_stage():
    whole, plan, params = setup()
    for strange in (whole, params[0], params[:1]):
        with pytest.raises(
            fp.PlacementError, match="place takes a tuple with one tree for each of 2 stages"
        ):
            fp.place(plan, strange)


def test_accumulate_takes_results_of_one_plan():
    _, plan, params = setup()
    result = fp.run(plan, params, batch())
    _, stages, others = parts(nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 3)))
    for given, mend in (
        (result, r"accumulate\(\[first, second\]\)"),
        ([], "one or more results"),
        ([result.grads], "takes results of fp.run; some are not results: tuple"),
        (
            [result, fp.run(plan_of(stages), others, batch())],
            "result 1 has gradients of other leaves",
        ),
    ):
        with refused(mend):
            fp.accumulate(given)


@pytest.mark.parametrize("scale", [torch.tensor(8.0), torch.amp.GradScaler("cpu")], ids=type)
def test_a_loss_scale_is_a_number(scale):
    _, plan, params = setup()
    with refused(r"loss_scale is a number above 0 \(a scaler's get_scale\(\)\)"):
        fp.run(plan, params, batch(), loss_scale=scale)


def test_the_functions_of_loss_scaling_take_the_state_first():
    _, plan, params = setup()
    result, state = fp.run(plan, params, batch(), loss_scale=8.0), fp.batches.loss_scale(8.0)
    for given in ((result.grads, state), (8.0, result.grads)):
        with refused(r"unscale takes the state first, unscale\(state, grads\)"):
            fp.batches.unscale(*given)
    with refused(r"unscale\(state, result.grads\)"):
        fp.batches.unscale(state, result)
    with refused(r"update_scale takes the state first"):
        fp.batches.update_scale(8.0, state)
    for found in (True, torch.tensor(True)):  # a bool will do
        assert fp.batches.update_scale(state, found).scale == 4.0
        assert fp.batches.select(found, torch.ones(1), torch.zeros(1)) == 1.0


# -- vjp
# -------------------------------------------------------------------------------


def forwards_first():
    _, stages, params = parts()
    return fp.make_plan(stages, fp.schedules.fill_drain(2, 4), devices="cpu"), params, batch()[0]


def test_a_pullback_is_called_once_with_cotangents_like_the_outputs():
    plan, params, x = forwards_first()
    result, pullback = fp.vjp(plan, params, x)
    for strange in (
        torch.tensor(1.0),
        torch.ones(8, 1),
        torch.ones(4, 3),
        torch.ones(8, 3).double(),
        np.ones((8, 3)),
    ):
        with pytest.raises(fp.BatchError, match="these cotangents do not fit the outputs"):
            pullback(strange)
    pullback(torch.ones_like(result.outputs))
    with pytest.raises(fp.FuncpipeError, match=r"this pullback is spent: .* call fp.vjp again"):
        pullback(torch.ones_like(result.outputs))


def test_a_step_before_the_pullback_is_refused():
    plan, params, x = forwards_first()
    _, pullback = fp.vjp(plan, params, x)
    with torch.no_grad():
        params[0]["0.weight"].mul_(2)
    with refused("step the optimizer after the backward"):
        pullback(torch.ones(8, 3))


def test_vjp_is_for_plans_without_a_loss():
    _, plan, params = setup()
    with refused("vjp takes a plan without a loss, .* fp.run computes its gradients"):
        fp.vjp(plan, params, batch()[0])
