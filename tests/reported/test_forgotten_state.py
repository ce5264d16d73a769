"""A forgotten state= raises where the untrained model's statistics would be used; merge returns its
trees."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import cpu_plan, same

import funcpipe as fp

SCHEDULE = fp.schedules.one_f_one_b(2, 4)


class Setting:
    def __init__(self, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4))
        self.x = 5 + torch.randn(16, 4)
        self.split = fp.split(
            self.model,
            2,
            **({"example": self.x} if options.pop("traced", False) else {}),
            **options,
        )
        self.plan = cpu_plan(self.split, SCHEDULE)
        self.params = fp.place(self.plan, self.split.params)
        self.batch = self.x, self.x.sin()
        self.result = fp.run(self.plan, self.params, self.batch, state=self.split.state)


@pytest.fixture(params=[False, True], ids=["cut", "traced"])
def setting(request):
    return Setting(traced=request.param)


MISSING = r"state= is missing: training changes the state of stage \d.*; give result\.state, or (split\.state|plan\.state|the state)"


def test_merging_parameters(setting):
    with pytest.raises(fp.PlanError, match=MISSING):
        setting.split.merge(setting.params)
    whole = setting.split.merge(setting.params, setting.result.state)
    setting.model.load_state_dict(whole)
    assert int(setting.model[1].num_batches_tracked) == 1


def test_merging_gradients_needs_no_state(setting):
    grads = setting.split.merge(setting.result.grads)
    assert grads.keys() == {name for name, _ in setting.model.named_parameters()}
    assert not any(
        same(grads[name], leaf.detach()) for name, leaf in setting.model.named_parameters()
    )


def test_saving_and_loading(setting, tmp_path):
    pytest.importorskip("safetensors")
    with pytest.raises(fp.CheckpointError, match=MISSING):
        fp.save(tmp_path / "new", setting.split, setting.params)
    with pytest.raises(fp.CheckpointError, match=MISSING):
        fp.save(tmp_path / "new", setting.plan, setting.params)
    assert not (tmp_path / "new").exists()
    fp.save(tmp_path, setting.split, setting.params, state=setting.result.state)
    assert same(fp.load(tmp_path, setting.split).state, setting.result.state)


def test_stages_of_ones_own_are_loaded_with_state(tmp_path):
    pytest.importorskip("safetensors")
    mean = fp.stage(
        lambda p, x, *, state: fp.Out(x * p, stats=x.mean()), commit=lambda s, stats: s + sum(stats)
    )
    plan = cpu_plan([mean], fp.schedules.fill_drain(1, 2))
    fp.save(tmp_path, plan, (torch.ones(1),), state=(torch.ones(1),))
    with pytest.raises(fp.CheckpointError, match=MISSING):
        fp.load(tmp_path, plan, params=(torch.ones(1),))
    assert (
        fp.load(tmp_path, plan, params=(torch.ones(1),), state=(torch.zeros(1),)).state[0].item()
        == 1
    )


@pytest.mark.parametrize("executor", ["serial", "threads", "sequential"])
@pytest.mark.parametrize(
    "schedule", [SCHEDULE.forwards(), SCHEDULE], ids=["forwards", "with backwards"]
)
def test_evaluating(setting, executor, schedule):
    test = cpu_plan(setting.split, schedule, train=False)
    run = (
        fp.run_sequential
        if executor == "sequential"
        else lambda *a, **k: fp.run(*a, executor=executor, **k)
    )
    with pytest.raises(fp.PlanError, match=MISSING):
        run(test, setting.params, setting.batch)
    loss = run(test, setting.params, setting.batch, state=setting.result.state).loss
    setting.model.load_state_dict(setting.split.merge(setting.params, setting.result.state))
    with torch.no_grad():
        torch.testing.assert_close(
            loss.detach(), F.mse_loss(setting.model.eval()(setting.x), setting.x.sin())
        )


def test_state_that_training_does_not_change_need_not_be_given(tmp_path):
    pytest.importorskip("safetensors")

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.arange(4.0))

        def forward(self, x):
            return x + self.table

    split = fp.split(nn.Sequential(nn.Linear(4, 4), Table(), nn.Linear(4, 4)), 2)
    plan = fp.make_plan(split, SCHEDULE.forwards(), devices="cpu")
    fp.run(plan, split.params, torch.ones(4, 4))
    fp.save(tmp_path, split, split.params)
    assert "1.table" in split.merge(split.params)
    frozen = fp.split(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).eval(), 2)
    plan = fp.make_plan(frozen, SCHEDULE.forwards(), devices="cpu")
    assert fp.run(plan, frozen.params, torch.ones(4, 4), state=frozen.state).outputs.shape == (4, 4)


class Spare(nn.Module):
    """A head that only inference uses, a frozen layer, and a buffer that a stage reads."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.spare, self.frozen = (nn.Linear(4, 4) for _ in range(4))
        self.frozen.requires_grad_(False)
        self.register_buffer("table", torch.randn(4))
        self.register_buffer("unused", torch.randn(4))

    def forward(self, x):
        return self.b(self.frozen(torch.tanh(self.a(x))) + self.table)


def test_merged_gradients_are_gradients_alone():
    """Without a gradient the name is absent: never a parameter or a buffer."""
    torch.manual_seed(0)
    model, x = Spare(), torch.randn(12, 4)
    split = fp.split(model, 2, example=x)
    plan = cpu_plan(split, SCHEDULE)
    result = fp.run(plan, split.params, (x, x))
    F.mse_loss(model(x), x).backward()
    expected = {name: leaf.grad for name, leaf in model.named_parameters() if leaf.grad is not None}
    for grads in (
        split.merge(result.grads),
        split.merge(tuple(dict(tree) for tree in result.grads)),
    ):
        assert expected.keys() == grads.keys()
        for name, gradient in grads.items():
            torch.testing.assert_close(gradient, expected[name])
    assert {"spare.weight", "spare.bias"}.isdisjoint(split.merge(result.grads, result.state))
    whole = split.merge(split.params)
    assert same(whole, dict(model.state_dict()))
    plain = tuple({key: leaf.detach() for key, leaf in tree.items()} for tree in split.params)
    assert same(split.state_dict() | split.merge(plain, split.state), dict(model.state_dict()))
