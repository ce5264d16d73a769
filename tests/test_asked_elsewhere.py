"""What users of other pipeline libraries asked for, and what runs here: one short test for each row
of ``docs/asked_elsewhere.md``. Plain PyTorch is the reference."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import funcpipe as fp
from funcpipe.testing import first_difference, record_values

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "asked_elsewhere.md").read_text()


def mlp() -> nn.Sequential:
    """Four layers, for up to four stages."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3))


def batch(rows: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows for `mlp`, with a target."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 3, generator=generator)


def plan_of(stages, schedule, loss=F.mse_loss, **options) -> fp.Plan:
    """A plan on CPU lanes."""
    return fp.make_plan(stages, schedule, loss=loss, devices="cpu", **options)


def assert_gradients(split: fp.Split, grads, model: nn.Module) -> None:
    """The gradients of a run are those that a backward left in the model."""
    found = split.merge(grads)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def test_shared_weight_used_twice_under_zero_bubble():
    """pytorch#180952."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, 8)
            self.middle = nn.Linear(8, 8)

        def forward(self, tokens):
            x = self.table(tokens)
            fp.models.split_point()
            x = self.middle(x)
            fp.models.split_point()
            return x @ self.table.weight.T

    torch.manual_seed(0)
    model, tokens = Tied(), torch.randint(0, 11, (8, 5))
    split = fp.split(model, example=(tokens[:2],))
    loss = lambda y, target: F.cross_entropy(y.flatten(0, 1), target.flatten())
    schedule = fp.schedules.zero_bubble(3, 4)
    result = fp.run(plan_of(split, schedule, loss), split.params, (tokens, tokens))
    loss(model(tokens), tokens).backward()
    assert_gradients(split, result.grads, model)


def test_several_outputs_of_a_stage():
    """pytorch#170277: the loss gets both, and both have gradients."""
    heads = fp.stage(lambda p, x: {"mean": x @ p["a"], "scale": (x @ p["b"]).exp()})
    loss = lambda y, target: ((y["mean"] - target) ** 2 / y["scale"] + y["scale"].log()).mean()
    params = ({"a": torch.randn(6, 3), "b": torch.randn(6, 3)},)
    x, target = batch()
    result = fp.run(plan_of([heads], fp.schedules.one_f_one_b(1, 3), loss), params, (x, target))
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params[0].items()}
    loss({"mean": x @ leaves["a"], "scale": (x @ leaves["b"]).exp()}, target).backward()
    for name, leaf in leaves.items():
        torch.testing.assert_close(result.grads[0][name], leaf.grad)


def test_custom_autograd_function_under_zero_bubble():
    """pytorch#166577 and #174017."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(x, weight):
            return x * weight

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            return grad * weight, (grad * x).sum(0)

    scale = fp.stage(lambda p, x: Scale.apply(x, p["w"]))
    params = ({"w": torch.rand(6)}, {"w": torch.rand(6)})
    x, _ = batch()
    plan = plan_of([scale, scale], fp.schedules.zero_bubble(2, 4))
    result = fp.run(plan, params, (x, torch.zeros_like(x)))
    leaves = [tree["w"].clone().requires_grad_() for tree in params]
    F.mse_loss(x * leaves[0] * leaves[1], torch.zeros_like(x)).backward()
    for grads, leaf in zip(result.grads, leaves, strict=True):
        torch.testing.assert_close(grads["w"], leaf.grad)


def test_evaluation_before_training():
    """pytorch#162822."""
    model, (x, target) = mlp(), batch()
    split, schedule = fp.split(model, 2), fp.schedules.one_f_one_b(2, 4)
    evaluated = fp.run(plan_of(split, schedule.forwards()), split.params, (x, target))
    trained = fp.run(plan_of(split, schedule), split.params, (x, target))
    F.mse_loss(model(x), target).backward()
    assert torch.equal(evaluated.loss, trained.loss)
    assert_gradients(split, trained.grads, model)


def test_mappings_none_and_numbers_between_stages():
    """pytorch#159711, #130055 and #53952."""
    first = fp.stage(lambda p, x: {"x": x @ p["w"], "mask": None, "heads": 2})
    last = fp.stage(lambda p, y: y["x"] * y["heads"] if y["mask"] is None else y["x"])
    x, _ = batch()
    params = ({"w": torch.eye(6)}, ())
    plan = plan_of([first, last], fp.schedules.one_f_one_b(2, 3))
    result = fp.run(plan, params, (x, 2 * x))
    assert float(result.loss) == 0


def test_hooks_do_not_pile_up():
    """pytorch#185331: a hook on a value inside a stage is called once for each microbatch."""
    calls = []

    def first(params, x):
        y = x @ params["w"]
        y.register_hook(lambda grad: calls.append(1))
        return y

    stages = [fp.stage(first), fp.stage(lambda p, x: x)]
    plan, (x, _) = plan_of(stages, fp.schedules.one_f_one_b(2, 4)), batch()
    for runs in range(1, 4):
        fp.run(plan, ({"w": torch.eye(6)}, ()), (x, x))
        assert len(calls) == 4 * runs


@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_microbatches_than_stages(count):
    """pytorch#171312."""
    model, (x, target) = mlp(), batch()
    split = fp.split(model, 4)
    for schedule in (fp.schedules.one_f_one_b(4, count), fp.schedules.zero_bubble(4, count)):
        result = fp.run(plan_of(split, schedule), split.params, (x, target))
        model.zero_grad()
        F.mse_loss(model(x), target).backward()
        assert_gradients(split, result.grads, model)


@pytest.mark.parametrize("rows", [1, 7, 10])
def test_a_last_batch_with_fewer_rows(rows):
    """pytorch#126600, #159942 and torchtitan#431."""
    model, (x, target) = mlp(), batch(rows)
    split = fp.split(model, 2)
    result = fp.run(plan_of(split, fp.schedules.one_f_one_b(2, 4)), split.params, (x, target))
    loss = F.mse_loss(model(x), target)
    loss.backward()
    torch.testing.assert_close(result.loss, loss.detach())
    assert_gradients(split, result.grads, model)


def test_metadata_of_each_microbatch():
    """torchtitan#4098: each microbatch gets objects of its own."""
    scale = fp.stage(lambda p, x, *, feeds: x * feeds["factor"], feeds=["factor"])
    x, _ = batch(6)
    plan = fp.make_plan([scale], fp.schedules.fill_drain(1, 3, backward=False), devices="cpu")
    result = fp.run(plan, ((),), x, feeds={"factor": fp.Microbatches([1, 2, 3])})
    assert torch.equal(result.outputs, x * torch.tensor([[1], [1], [2], [2], [3], [3]]))


def test_split_on_meta_then_load(tmp_path):
    """PiPPy#988 and pytorch#156541: the whole model is never in memory."""
    model, (x, target) = mlp(), batch()
    whole = fp.split(model, 2)
    fp.save(tmp_path / "model", whole, whole.params)
    with torch.device("meta"):
        empty = mlp()
    split = fp.split(empty, 2)
    plan = plan_of(split, fp.schedules.one_f_one_b(2, 4))
    params = fp.load(tmp_path / "model", split).params
    result = fp.run(plan, params, (x, target))
    F.mse_loss(model(x), target).backward()
    assert_gradients(split, result.grads, model)


def test_skip_connections_over_stages():
    """pytorch#127964."""
    encode = fp.stage(lambda p, x: fp.Out(x @ p["w"], stash={"x": x}), stash=["x"])
    middle = fp.stage(lambda p, x: torch.tanh(x))
    decode = fp.stage(lambda p, x, *, skips: x + skips["x"], pop=["x"])
    (x, _), params = batch(), ({"w": torch.randn(6, 6)}, (), ())
    plan = plan_of([encode, middle, decode], fp.schedules.zero_bubble(3, 4))
    result = fp.run(plan, params, (x, torch.zeros_like(x)))
    weight = params[0]["w"].clone().requires_grad_()
    F.mse_loss(torch.tanh(x @ weight) + x, torch.zeros_like(x)).backward()
    torch.testing.assert_close(result.grads[0]["w"], weight.grad)


def test_compiled_stages_under_zero_bubble():
    """pytorch#161904."""
    model, (x, target) = mlp(), batch()
    split = fp.split(model, 2)
    stages = [fp.compile_stage(stage) for stage in split.stages]
    result = fp.run(plan_of(stages, fp.schedules.zero_bubble(2, 4)), split.params, (x, target))
    F.mse_loss(model(x), target).backward()
    assert_gradients(split, result.grads, model)


def test_losses_of_inner_stages():
    """torchtitan#2061 and #3000: an auxiliary loss of the first stage."""

    def first(params, x):
        y = x @ params["w"]
        return fp.Out(y, loss=(1e-2 * y.square().mean(1).sum(), len(x)))

    last = fp.stage(lambda p, x: x @ p["w"])
    params = ({"w": torch.randn(6, 6)}, {"w": torch.randn(6, 3)})
    x, target = batch()
    plan = plan_of([fp.stage(first), last], fp.schedules.one_f_one_b(2, 4))
    result = fp.run(plan, params, (x, target))
    a, b = (tree["w"].clone().requires_grad_() for tree in params)
    (F.mse_loss(x @ a @ b, target) + 1e-2 * (x @ a).square().mean()).backward()
    torch.testing.assert_close(result.grads[0]["w"], a.grad)
    torch.testing.assert_close(result.grads[1]["w"], b.grad)


def test_a_loss_over_tokens():
    """torchtitan#2206, #4194 and verl#3994: the mean over all tokens of the batch."""
    model, (x, _) = mlp(), batch(8)
    labels = torch.tensor([0, 1, 2, -100, -100, -100, -100, 1])
    split = fp.split(model, 2)
    plan = plan_of(split, fp.schedules.one_f_one_b(2, 4), F.cross_entropy)
    result = fp.run(plan, split.params, (x, labels))
    loss = F.cross_entropy(model(x), labels)
    loss.backward()
    torch.testing.assert_close(result.loss, loss.detach())
    assert_gradients(split, result.grads, model)


@pytest.mark.parametrize("kind", [torch.uint8, torch.float8_e4m3fn], ids=str)
def test_a_frozen_base_of_few_bits_under_zero_bubble(kind):
    """diffusion-pipe#124: low-rank adapters on a base that is frozen."""

    def adapted(params, x):
        return x @ params["base"].to(torch.float32) + x @ params["a"] @ params["b"]

    torch.manual_seed(0)
    params = tuple(
        {
            "base": torch.randint(0, 2, (6, 6)).to(kind),
            "a": torch.randn(6, 2).requires_grad_(),
            "b": torch.randn(2, 6).requires_grad_(),
        }
        for _ in range(2)
    )
    x, _ = batch()
    plan = plan_of([fp.stage(adapted)] * 2, fp.schedules.zero_bubble(2, 4))
    result = fp.run(plan, params, (x, torch.zeros_like(x)))
    F.mse_loss(adapted(params[1], adapted(params[0], x)), torch.zeros_like(x)).backward()
    for grads, tree in zip(result.grads, params, strict=True):
        assert grads["base"] is None
        torch.testing.assert_close(grads["a"], tree["a"].grad)
        torch.testing.assert_close(grads["b"], tree["b"].grad)


def test_parts_of_equal_time():
    """pytorch#53438: stages balanced by measured times, not by layers."""
    cost = fp.Cost(forward=[1, 1, 1, 5], backward=[2, 2, 2, 10])
    assert (3, 1) == fp.models.balance(cost, 2)


def test_a_function_sees_each_action():
    """pytorch#167897: hooks on the actions of a schedule."""
    split, seen = fp.split(mlp(), 2), []
    plan = plan_of(split, fp.schedules.one_f_one_b(2, 2))
    fp.run(
        plan,
        split.params,
        batch(),
        executor="serial",
        observe=lambda action, name, value: seen.append(f"{action} {name}"),
    )
    assert seen[:3] == ["0F0 input", "0F0 output", "0F1 input"]


def test_the_first_action_that_differs():
    """pytorch#169152: where two runs begin to differ."""
    split = fp.split(mlp(), 2)
    plan = plan_of(split, fp.schedules.one_f_one_b(2, 2))
    other = {name: value + 1e-3 for name, value in split.params[1].items()}
    records = [
        record_values(plan, params, batch()) for params in (split.params, (split.params[0], other))
    ]
    found = first_difference(*records)
    assert found is not None
    assert (str(found.action), found.name) == ("1F0", "output")


def test_every_row_has_its_test_and_every_test_its_row():
    """The page names each test of this file, and only these."""
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    here = {name for name in globals() if name.startswith("test_")}
    assert named == here - {"test_every_row_has_its_test_and_every_test_its_row"}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_block_mask_is_cut_with_the_batch():
    """pytorch#164111: each row has documents of its own."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    x, documents = torch.randn(4, 1, 128, 16), torch.randint(0, 3, (4, 128)).sort(-1).values
    same_document = lambda b, h, q, k: (documents[b, q] == documents[b, k]) & (q >= k)
    mask = create_block_mask(same_document, 4, None, 128, 128, device="cpu")
    attend = fp.stage(lambda p, b: flex_attention(b[0], b[0], b[0], block_mask=b[1]))
    plan = plan_of([attend], fp.schedules.fill_drain(1, 2, backward=False), None)
    got = fp.run(plan, ((),), (x, mask), executor="serial").outputs
    torch.testing.assert_close(got, flex_attention(x, x, x, block_mask=mask))
