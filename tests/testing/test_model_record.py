"""record_model: runs against the model that is not split."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from common import cpu_plan
from torch import nn

import funcpipe as fp
from funcpipe import schedules as S
from funcpipe.testing import first_difference, record_model, record_values


class Net(nn.Module):
    """Blocks in a list, with an in-place activation and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True))
            for _ in range(3)
        )
        self.head = nn.Linear(6, 2)

    def forward(self, x, scale=None):
        for layer in self.layers:
            x = layer(x)
        return self.head(x if scale is None else x * scale)


def case(schedule=S.one_f_one_b, **options):
    """A model, its split, a plan of three stages and a batch."""
    torch.manual_seed(0)
    model = Net()
    split = fp.split(model, balance=[1, 1, 1], layers="layers")
    plan = cpu_plan(split, schedule(3, 4), **options)
    return model, split, plan, (torch.randn(14, 6), torch.randn(14, 2))


ENDS = ["layers.0", "layers.1"]
OPTIONS = {"threads_per_lane": 1}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("schedule", [S.one_f_one_b, S.zero_bubble, S.fill_drain])
def test_a_run_is_the_model(schedule):
    model, split, plan, batch = case(schedule)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wanted = record_model(model, ENDS, plan, split.params, batch, state=split.state)
    found = record_values(plan, split.params, batch, state=split.state, **OPTIONS)
    assert first_difference(wanted, found) is None
    names = {(action.kind.value, name) for action, name in wanted.values}
    backward = "I" if schedule is S.zero_bubble else "B"
    assert names == {("F", "output"), ("F", "loss"), (backward, "output gradient")}
    assert len(wanted.values) == 3 * 4 + 4 + 2 * 4
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(leaf.grad is None for leaf in model.parameters())


def test_the_first_stage_that_differs():
    model, split, plan, batch = case()
    with torch.no_grad():
        model.layers[1][0].weight.add_(1e-3)
    other = Net()
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        other.layers[1][0].weight.sub_(1e-3)
    wanted = record_model(other, ENDS, plan, split.params, batch, state=split.state)
    found = record_values(plan, split.params, batch, state=split.state, **OPTIONS)
    difference = first_difference(wanted, found)
    assert difference is not None
    assert (difference.stage, difference.microbatch, difference.name) == (1, 0, "output")


def test_a_loss_that_differs_shows_in_gradients():
    model, split, plan, batch = case()
    wanted = record_model(model, ENDS, plan, split.params, batch, state=split.state)
    other = fp.make_plan(
        split, plan.schedule, loss=lambda y, t: F.mse_loss(y, t) + y.mean() * 0.1, devices="cpu"
    )
    found = record_values(other, split.params, batch, state=split.state, **OPTIONS)
    difference = first_difference(wanted, found)
    assert difference is not None
    assert difference.name in ("loss", "output gradient")


def test_forwards_and_keywords():
    model, split, plan, batch = case()
    look = fp.make_plan(split, plan.schedule.forwards(), devices="cpu", train=True)
    inputs = {"x": batch[0], "scale": torch.full((14, 6), 2.0)}
    given = {"state": split.state}
    wanted = record_model(model, ENDS, look, split.params, inputs, **given)
    found = record_values(look, split.params, inputs, **given, **OPTIONS)
    assert first_difference(wanted, found) is None
    by_hand = record_model(
        model, ENDS, look, split.params, inputs, call=lambda m, x: m(x["x"], x["scale"]), **given
    )
    assert first_difference(wanted, by_hand) is None
    assert {name for _, name in wanted.values} == {"output"}


def test_wrong_calls():
    model, split, plan, batch = case()
    given = plan, split.params, batch
    with pytest.raises(fp.PlanError, match="one module for each of 2 stages, all but the last"):
        record_model(model, ["layers.0"], *given)
    with pytest.raises(fp.PlanError, match="the model has no module 'layers.9'"):
        record_model(model, ["layers.0", "layers.9"], *given)
    with pytest.raises(fp.PlanError, match="takes the model as an nn.Module; got a Split"):
        record_model(split, ENDS, *given)
    with pytest.raises(fp.PlanError, match="'layers' was called 0 times"):
        record_model(model, ["layers.0", "layers"], *given, state=split.state)
    feeding = fp.stage(lambda p, x, *, feeds: x, feeds=["mask"])
    fed = cpu_plan([feeding], S.one_f_one_b(1, 2))
    with pytest.raises(fp.PlanError, match="feeds or slices"):
        record_model(model, [], fed, ((),), batch)
