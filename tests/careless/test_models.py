"""Careless use of a split model: ties, state, loss and loss scale that nobody hands on."""

import copy
import pickle

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import same

import funcpipe as fp


class Tied(nn.Module):
    """An embedding whose weight is the head's too; its output has its own loss."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        logits = self.head(self.body(self.embed(x)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), x.flatten()), "logits": logits}


@pytest.fixture(scope="module")
def split():
    torch.manual_seed(0)
    return fp.split(Tied(), 3, example=torch.randint(0, 11, (4, 5)))


def plan_of(stages, **options):
    """1F1B of two microbatches."""
    schedule = fp.schedules.one_f_one_b(len(stages), 2)
    return fp.make_plan(stages, schedule, **{"devices": "cpu", **options})


def apart(params):
    """The same numbers, every tensor its own."""
    return tuple(
        {name: one.detach().clone().requires_grad_() for name, one in tree.items()}
        for tree in params
    )


def whole(split, x):
    model = Tied()
    model.load_state_dict(split.state_dict())
    model(x)["loss"].backward()
    return model


def test_a_plan_of_a_split_has_its_stages_loss_ties_and_state(split):
    plan = plan_of(split)
    for name in ("stages", "loss", "ties", "state"):
        assert getattr(plan, name) == getattr(split, name)
    assert fp.make_plan(split, fp.schedules.fill_drain(3, 2, backward=False)).loss is None
    assert plan_of(split, loss=F.mse_loss).loss is F.mse_loss
    assert pickle.loads(pickle.dumps(plan)).ties == split.ties


def test_ties_are_not_forgotten(split):
    """Tied weights in separate tensors (copies on devices, a checkpoint) get one gradient, though
    nobody gives ties=."""
    x = torch.randint(0, 11, (4, 5))
    for plan in (
        plan_of(split),
        plan_of(split.stages, loss=split.loss),
        plan_of(split.stages, loss=split.loss, ties=split.ties),
    ):
        params = apart(split.params)
        model, optimizer = whole(split, x), torch.optim.SGD(fp.leaves(params), lr=0.1)
        result = fp.run(plan, params, (x, None), state=plan.state)
        torch.testing.assert_close(result.grads[0]["embed.weight"], model.embed.weight.grad)
        norm = fp.step(optimizer, params, result)
        torch.testing.assert_close(
            norm, nn.utils.get_total_norm([one.grad for one in model.parameters()])
        )
        homes = [
            tree[name]
            for tree in params
            for name in tree
            if name in ("embed.weight", "head.weight")
        ]
        assert len(homes) == 2
        assert torch.equal(*homes)


def test_ties_of_composed_and_compiled_stages_stay(split):
    first, *rest = split.stages
    both = fp.compose(first, rest[0])
    plan = plan_of([both, fp.compile_stage(rest[1])], loss=split.loss)
    assert plan.ties == (((0, (0, "embed.weight")), (1, split.ties[0][1][1])),)
    params = apart(split.params)
    x = torch.randint(0, 11, (4, 5))
    result = fp.run(plan, (params[:2], params[2]), (x, None))
    torch.testing.assert_close(
        result.grads[0][0]["embed.weight"], whole(split, x).embed.weight.grad
    )
    inside = plan_of([fp.compose(*split.stages)], loss=split.loss)
    result = fp.run(inside, (params,), (x, None))
    torch.testing.assert_close(
        result.grads[0][0]["embed.weight"], whole(split, x).embed.weight.grad
    )


def test_ties_that_name_some_of_a_group_are_refused(split):
    ((first, _),) = split.ties
    with pytest.raises(
        fp.PlanError, match=r"are one parameter \('embed.weight'\), and ties= names only some"
    ):
        plan_of(split, ties=[[first, (1, "body.0.weight")]])


def test_placing_tied_parameters_apart_needs_a_tie():
    """Copies on two devices would drift: said before they are made."""
    weight = nn.Parameter(torch.ones(2, 2))
    stages = [fp.stage(lambda p, x: x @ p["w"])] * 2
    params = ({"w": weight}, {"w": weight})
    options = {"loss": F.mse_loss, "devices": ["cpu", "meta"]}
    with pytest.raises(fp.PlanError, match="are one tensor in two stages"):
        fp.place(plan_of(stages, **options), params)
    tied = plan_of(stages, ties=[[(0, "w"), (1, "w")]], **options)
    assert [tree["w"].device.type for tree in fp.place(tied, params)] == ["cpu", "meta"]


def test_state_that_a_batch_changes_is_asked_for_and_other_state_is_the_models():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    split = fp.split(model, 2)
    batch = torch.randn(4, 2), torch.randn(4, 2)
    plan = plan_of(split, loss=F.mse_loss)
    with pytest.raises(
        fp.PlanError, match=r"a batch changes the state of stage [01].*split\.state.*result\.state"
    ):
        fp.run(plan, split.params, batch)
    assert fp.run(plan, split.params, batch, state=plan.state).state is not None
    still = fp.make_plan(split, fp.schedules.fill_drain(2, 2, backward=False), devices="cpu")
    with pytest.raises(
        fp.PlanError,
        match=r"training changes the state of stage [01].*result\.state, or split\.state",
    ):
        fp.run(still, split.params, batch[0])
    result = fp.run(still, split.params, batch[0], state=plan.state)
    model.eval()
    torch.testing.assert_close(result.outputs, model(batch[0]))


@pytest.fixture
def setting():
    params = ({"w": torch.ones(2, 2)}, {"w": torch.full((2, 2), 2.0)})
    stages = [fp.stage(lambda p, x: x @ p["w"])] * 2
    plan = plan_of(stages, loss=F.mse_loss)
    return plan, params, (torch.randn(4, 2), torch.randn(4, 2))


def test_a_step_of_a_result_takes_its_loss_scale(setting):
    """1024 times the gradients are 1 times the step."""
    plan, params, batch = setting
    stepped = []
    for scale in (1.0, 1024.0):
        own = copy.deepcopy(params)
        result = fp.run(plan, own, batch, loss_scale=scale)
        norm = fp.step(torch.optim.SGD(fp.leaves(own), lr=0.1), own, result, max_norm=1.0)
        stepped.append((own, norm))
        assert result.loss_scale == scale
    assert same(stepped[0], stepped[1])


def test_a_step_of_a_result_that_overflowed_changes_nothing(setting):
    plan, params, batch = setting
    before = copy.deepcopy(params)
    result = fp.run(plan, params, batch, loss_scale=3e38)
    optimizer = torch.optim.Adam(fp.leaves(params))
    assert not fp.step(optimizer, params, result).isfinite()
    assert same(before, params)
    assert not optimizer.state


def test_a_step_of_a_result_with_a_scaler(setting):
    plan, params, batch = setting
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    result = fp.run(plan, params, batch, loss_scale=scaler.get_scale())
    before = copy.deepcopy(params)
    fp.step(torch.optim.SGD(fp.leaves(params), lr=1.0), params, result, scaler=scaler)
    torch.testing.assert_close(params[0]["w"], before[0]["w"] - result.grads[0]["w"] / 8)
    other = fp.run(plan, params, batch, loss_scale=4.0)
    with pytest.raises(fp.PlanError, match="scaler's scale is 8, but the run had the loss scale 4"):
        fp.step(torch.optim.SGD(fp.leaves(params), lr=1.0), params, other, scaler=scaler)


def test_results_that_cannot_be_stepped_say_why(setting):
    plan, params, batch = setting
    optimizer = torch.optim.SGD(fp.leaves(params), lr=1.0)
    result = fp.run(plan, params, batch)
    with pytest.raises(
        fp.PlanError,
        match=r"params\[0\]\['v'\] has no gradient(.|\n)*grads\[0\]\['w'\] belongs to no",
    ):
        fp.step(optimizer, ({"v": params[0]["w"]}, params[1]), result)
    assert float(pickle.loads(pickle.dumps(result.loss))) == float(result.loss)


def test_accumulated_results_keep_ties_and_scale(split):
    plan = plan_of(split)
    params = apart(split.params)
    x = torch.randint(0, 11, (4, 5))
    parts = [
        fp.run(plan, params, (one, None), state=plan.state, loss_scale=4.0)
        for one in (x[:2], x[2:])
    ]
    total = fp.accumulate(parts)
    before = params[0]["embed.weight"].clone()
    fp.step(torch.optim.SGD(fp.leaves(params), lr=1.0), params, total)
    torch.testing.assert_close(
        params[0]["embed.weight"], before - whole(split, x).embed.weight.grad
    )


def test_a_tuple_of_from_module_and_a_bare_tree_are_named(setting):
    plan, params, batch = setting
    with pytest.raises(
        fp.PlanError, match=r"returns \(stage, params, state\): stages, params, state = zip"
    ):
        plan_of([fp.from_module(nn.Linear(2, 2)), fp.from_module(nn.Linear(2, 2))])
    one = plan_of(plan.stages[:1], loss=F.mse_loss)
    with pytest.raises(fp.PlanError, match=r"got a dict; for one stage that is \(params,\)"):
        fp.run(one, params[0], batch)
