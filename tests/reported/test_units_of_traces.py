"""A traced model has one list of units: num_stages=, balance=, policy=, profile and errors count the
same ones, and any cut between two of them is legal."""

import pytest
import torch
import torch.nn.functional as F
from common import cpu_plan
from torch import nn

import funcpipe as fp


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.relu(self.norm(self.conv(x)))


class UNet(nn.Module):
    """Nested lists, and writes in place at which no stage can begin."""

    def __init__(self):
        super().__init__()
        pair = lambda inputs, outputs: nn.Sequential(
            Block(inputs, outputs), Block(outputs, outputs)
        )
        self.downs = nn.ModuleList([pair(2, 4), pair(4, 8)])
        self.middle = Block(8, 8)
        self.ups = nn.ModuleList([nn.ConvTranspose2d(8, 4, 2, stride=2)])
        self.convs = nn.ModuleList([pair(8, 4)])
        self.act = nn.ReLU(inplace=True)
        self.out = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        skip = self.downs[0](x)
        x = self.middle(self.downs[1](F.max_pool2d(skip, 2)))
        x = self.act(self.ups[0](x))
        return self.out(self.convs[0](torch.cat([x, skip], 1)))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return UNet()


@pytest.fixture(scope="module")
def x():
    return torch.randn(4, 2, 8, 8)


def names(split):
    return [stage.name for stage in split.stages]


@pytest.mark.parametrize("count", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 10))])
def test_the_sizes_of_a_policy_are_a_balance(model, x, count):
    """Also for so many stages that the inner lists count."""
    seen = []

    def policy(units, num_stages):
        seen.append(units)
        return fp.models.by_parameters(units, num_stages)

    by_policy = fp.split(model, count, policy=policy, example=x)
    sizes = fp.models.by_parameters(seen[0], count)
    assert len(sizes) == count
    assert names(by_policy) == names(fp.split(model, balance=sizes, example=x))
    assert names(by_policy) == names(fp.split(model, count, example=x))


@pytest.mark.slow
def test_each_cut_between_two_units_is_legal(model, x):
    count = sum(1 for _ in fp.models.profile(model, x, repeats=1, measure_memory=False).forward)
    assert count > 4
    for first in range(1, count):
        split = fp.split(model, balance=[first, count - first], example=x, check=False)
        assert len(split) == 2


def test_profile_then_balance_then_split(model, x):
    """The route of the documents for a Sequential, for a traced model too."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cost = fp.models.profile(model, x, repeats=1, warmup=1, threads_per_lane=1)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert len(cost.forward) == len(cost.backward) == len(cost.residual)
    assert min(cost.forward) > 0
    sizes = fp.models.balance(cost, 3)
    split = fp.split(model, balance=sizes, example=x)
    plan = cpu_plan(split, fp.schedules.one_f_one_b(3, 2))
    y = torch.zeros(4, 2, 8, 8)
    result = fp.run(plan, split.params, (x, y), state=split.state)
    whole = [F.mse_loss(model(half), torch.zeros(2, 2, 8, 8)) for half in x.split(2)]
    torch.testing.assert_close(result.loss, torch.stack(whole).mean().detach())


def test_profile_takes_the_example_of_split(x):
    """Keywords by name, with marks of rows."""

    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

        def forward(self, inputs, scale):
            for layer in self.layers:
                inputs = layer(inputs) * scale
            return inputs

    example = {"inputs": torch.ones(4, 3), "scale": fp.Replicate(torch.ones(3))}
    assert 2 == len(fp.models.profile(Named(), example, repeats=1).forward)


def test_errors_list_the_units(model, x):
    with pytest.raises(
        fp.PlanError, match=r"sum to the 9 units of the model \(downs.0, downs.1, "
    ) as caught:
        fp.split(model, balance=[1, 1], example=x)
    assert "out)" in str(caught.value)
    with pytest.raises(
        fp.PlanError, match=r"num_stages is 60, but the model has only \d+ units"
    ) as caught:
        fp.split(model, 60, example=x)
    assert "downs.0.0.conv, downs.0.0.norm" in str(caught.value)
    shown = str(caught.value).partition("(")[2].partition(")")[0].split(", ")
    assert len(shown) <= 20


def test_a_buffer_that_joins_all_layers_is_named():
    """A step counter is written first and used last, so no cut can be between."""

    class Annealed(nn.Module):
        def __init__(self, late):
            super().__init__()
            self.late = late
            self.first, self.norm, self.last = nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)
            self.register_buffer("step", torch.zeros(()))

        def forward(self, x):
            if not self.late:
                self.step += 1
            x = self.last(self.norm(self.first(x)))
            if self.late:
                self.step += 1
            return x * (self.step / 10).clamp(max=1)

    with pytest.raises(fp.PlanError, match="from the first to the last use of step are one unit"):
        fp.split(Annealed(late=False), 2, example=torch.ones(4, 2))
    assert 2 == len(fp.split(Annealed(late=True), 2, example=torch.ones(4, 2)))
    with pytest.raises(fp.PlanError, match=r"only \d units \([^)]*\)$"):
        fp.split(Annealed(late=True), 9, example=torch.ones(4, 2))


@pytest.mark.slow
def test_the_sum_chooses_between_outer_and_inner_units(model, x):
    inner = []
    fp.split(
        model,
        10,
        policy=lambda units, n: inner.append(units) or fp.models.by_parameters(units, n),
        example=x,
    )
    total = len(inner[0])
    split = fp.split(model, balance=[total - 3, 3], example=x)
    assert 2 == len(split)


def test_by_time_with_the_cost_of_other_units_names_the_calls_that_measure():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(fp.PlanError, match="needs one number for each of the 2 units") as caught:
        fp.split(model, 2, policy=fp.models.by_time(fp.Cost([1.0] * 3)))
    assert "fp.models.profile(model, example)" in str(caught.value)
    cost = fp.models.profile(model, torch.ones(2, 2), repeats=1)
    assert 2 == len(fp.split(model, 2, policy=fp.models.by_time(cost)))


def test_sizes_may_count_layers_as_the_model_lists_them():
    """Then the cut must be legal: each ReLU writes in place into the layer before."""
    layers = [layer for _ in range(2) for layer in (nn.Linear(2, 2), nn.ReLU(inplace=True))]
    model, x = nn.Sequential(*layers), torch.ones(4, 2)
    split = fp.split(model, balance=[2, 2], example=x)
    assert [["0.weight", "0.bias"], ["2.weight", "2.bias"]] == [[*tree] for tree in split.params]
    assert 2 == len(fp.split(model, balance=[1, 1], example=x))  # the units of a policy
    with pytest.raises(fp.PlanError, match="writes in place"):
        fp.split(model, balance=[1, 3], example=x)
    with pytest.raises(fp.PlanError, match="sum to the 2 units"):
        fp.split(model, balance=[1, 4], example=x)
