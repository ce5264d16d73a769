"""Training as users do it, against plain PyTorch on the whole model: groups, frozen parts,
schedulers, EMA, resuming."""

import copy
import gc
import io

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import cpu_plan, same, snapshot
from plain import STEPS, Pair
from torch.optim import lr_scheduler, swa_utils

import funcpipe as fp


def test_parameter_groups_by_name():
    """Weight decay on matrices alone, another learning rate for the head: as the same groups of the
    plain model."""
    pair = Pair()

    def groups(named):
        named = list(named)
        head = [leaf for name, leaf in named if name.startswith("5.")]
        matrices = [leaf for name, leaf in named if leaf.ndim >= 2 and not name.startswith("5.")]
        rest = [leaf for name, leaf in named if leaf.ndim < 2 and not name.startswith("5.")]
        assert (2, 2, 4) == (len(head), len(matrices), len(rest))
        return [
            {"params": head, "lr": 0.1},
            {"params": matrices, "weight_decay": 0.3},
            {"params": rest, "weight_decay": 0.0},
        ]

    named = [(name.split(".", 1)[1], leaf) for name, leaf in fp.named_leaves(pair.params)]
    mine = torch.optim.AdamW(groups(named), lr=0.02)
    theirs = torch.optim.AdamW(groups(pair.plain.named_parameters()), lr=0.02)
    assert STEPS == len(list(pair.train(mine, theirs, pair.batches())))
    pair.assert_equal()


def test_named_leaves_are_named_parameters():
    """An optimizer made over ``named_leaves`` keeps the names in its state."""
    pair = Pair()
    optimizer = torch.optim.AdamW(fp.named_leaves(pair.params), lr=0.1)
    names = optimizer.state_dict()["param_groups"][0]["param_names"]
    assert [name for name, _ in fp.named_leaves(pair.params)] == names
    fp.step(optimizer, pair.params, fp.run(pair.plan, pair.params, pair.batches(1)[0]).grads)
    assert len(names) == len(optimizer.state)


@pytest.mark.parametrize("how", ["requires_grad", "tree", "function"])
def test_frozen_leaves_stay(how):
    """Frozen by flag, by a tree of bools or by a function: no gradient, no optimizer state, the
    numbers of eager."""
    pair = Pair()
    frozen = {"0.weight", "3.weight", "3.bias"}
    trainable = None
    for name, leaf in pair.plain.named_parameters():
        leaf.requires_grad_(name not in frozen)
    if how == "requires_grad":
        for name, leaf in fp.named_leaves(pair.params):
            leaf.requires_grad_(name.split(".", 1)[1] not in frozen)
    elif how == "tree":
        trainable = tuple({name: name not in frozen for name in tree} for tree in pair.params)
    else:
        trainable = lambda name, leaf: name.split(".", 1)[1] not in frozen
    before = {name: leaf.detach().clone() for name, leaf in fp.named_leaves(pair.params)}
    mine = torch.optim.AdamW(fp.leaves(pair.params), lr=0.05)
    theirs = torch.optim.AdamW(pair.plain.parameters(), lr=0.05)
    options = {"max_norm": 0.5, "trainable": trainable}
    for result, _ in pair.train(mine, theirs, pair.batches(), **options):
        assert frozen == {
            name for tree in result.grads for name, gradient in tree.items() if gradient is None
        }
    pair.assert_equal()
    assert len(before) - len(frozen) == len(mine.state)
    changed = {
        name.split(".", 1)[1]
        for name, leaf in fp.named_leaves(pair.params)
        if not leaf.equal(before[name])
    }
    assert {name for name, _ in pair.plain.named_parameters()} - frozen == changed


@fp.stage
def adapted(params, x):
    """A frozen linear layer with a low-rank adapter in a nested tree."""
    base, lora = params["base"], params["lora"]
    return torch.tanh(F.linear(x, base["weight"], base["bias"]) + x @ lora["down"] @ lora["up"])


def test_adapters_train_on_a_frozen_base():
    """LoRA-like: gradients and optimizer for the adapters alone; the base gets None and stays, bit
    for bit."""
    torch.manual_seed(0)
    base = [nn.Linear(5, 5).double() for _ in range(2)]

    def adapter():
        return {
            "down": torch.randn(5, 2, dtype=torch.float64),
            "up": torch.zeros(2, 5, dtype=torch.float64),
        }

    params = tuple({"base": dict(layer.named_parameters()), "lora": adapter()} for layer in base)
    trainable = lambda name, leaf: ".lora." in name
    own = copy.deepcopy(params)
    for leaf in fp.leaves([tree["lora"] for tree in own]):
        leaf.requires_grad_()
    frozen = snapshot([tree["base"] for tree in params])
    plan = cpu_plan([adapted, adapted], fp.schedules.one_f_one_b(2, 4))
    mine = torch.optim.AdamW(fp.leaves([tree["lora"] for tree in params]), lr=0.05)
    theirs = torch.optim.AdamW(fp.leaves([tree["lora"] for tree in own]), lr=0.05)
    for _ in range(STEPS):
        x, t = torch.randn(2, 9, 5, dtype=torch.float64)
        result = fp.run(plan, params, (x, t), trainable=trainable)
        assert all(gradient is None for tree in result.grads for gradient in tree["base"].values())
        fp.step(mine, params, result.grads, max_norm=0.1)
        theirs.zero_grad()
        F.mse_loss(adapted(own[1], adapted(own[0], x)), t).backward()
        nn.utils.clip_grad_norm_(
            [leaf for group in theirs.param_groups for leaf in group["params"]], 0.1
        )
        theirs.step()
    for a, b in zip(params, own, strict=True):
        for key in ("down", "up"):
            torch.testing.assert_close(
                a["lora"][key].detach(), b["lora"][key].detach(), rtol=1e-9, atol=1e-11
            )
    assert params[1]["lora"]["up"].detach().abs().max() > 0.01
    assert same(frozen, snapshot([tree["base"] for tree in params]))


SCHEDULERS = {
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=STEPS + 1),
    "warmup_cosine": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.CosineAnnealingLR(o, STEPS)], [2]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.5),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler")
def test_learning_rates_follow_schedulers(name):
    """Any scheduler of torch.optim: rates and parameters are those of the plain loop."""
    pair = Pair()
    mine = torch.optim.SGD(fp.leaves(pair.params), lr=0.05)
    theirs = torch.optim.SGD(pair.plain.parameters(), lr=0.05)
    my_rates, their_rates = SCHEDULERS[name](mine), SCHEDULERS[name](theirs)
    seen = []
    for result, loss in pair.train(mine, theirs, pair.batches()):
        my_rates.step(*([result.loss] if name == "plateau" else []))
        their_rates.step(*([loss] if name == "plateau" else []))
        seen.append(mine.param_groups[0]["lr"])
        assert theirs.param_groups[0]["lr"] == pytest.approx(seen[-1], rel=1e-12)
    assert len(set(seen)) > 2
    pair.assert_equal()


@pytest.mark.parametrize("replicas", [False, True], ids=["one", "replicas"])
def test_tied_weights_are_clipped_once(replicas):
    """A language model's embedding that is its head too: norm, clipping and steps of the tied plain
    model."""
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Embedding(7, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 7, bias=False)
    ).double()
    plain[3].weight = plain[0].weight
    model = copy.deepcopy(plain)
    stages, params, _ = zip(fp.from_module(model[:2]), fp.from_module(model[2:]), strict=True)
    if replicas:
        params[1]["3.weight"] = nn.Parameter(params[1]["3.weight"].detach().clone())
    ties = [[(0, "0.weight"), (1, "3.weight")]]
    plan = cpu_plan(stages, fp.schedules.one_f_one_b(2, 3), loss=F.cross_entropy, ties=ties)
    mine = torch.optim.AdamW(fp.leaves(params), lr=0.1)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    assert (4 if replicas else 3) == len(mine.param_groups[0]["params"])
    for _ in range(STEPS):
        x, t = torch.randint(0, 7, (2, 10))
        norm = fp.step(
            mine, params, fp.run(plan, params, (x, t)).grads, max_norm=0.1, ties=plan.ties
        )
        theirs.zero_grad()
        F.cross_entropy(plain(x), t).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        theirs.step()
        torch.testing.assert_close(norm, expected, rtol=1e-10, atol=0)
    for key, tree in (("0.weight", params[0]), ("3.weight", params[1])):
        torch.testing.assert_close(
            tree[key].detach(), plain[3].weight.detach(), rtol=1e-8, atol=1e-10
        )


def test_two_optimizers_share_one_norm():
    """Muon for the matrices, AdamW for the rest: each step clips by the norm of everything, as the
    plain loop does."""
    pair = Pair()
    split = [
        [leaf for leaf in found if (leaf.ndim == 2) == flat]
        for flat in (True, False)
        for found in (fp.leaves(pair.params), list(pair.plain.parameters()))
    ]
    mine = torch.optim.Muon(split[0], lr=0.02), torch.optim.AdamW(split[2], lr=0.02)
    theirs = torch.optim.Muon(split[1], lr=0.02), torch.optim.AdamW(split[3], lr=0.02)
    for x, t in pair.batches():
        grads = fp.run(pair.plan, pair.params, (x, t)).grads
        norms = [fp.step(one, pair.params, grads, max_norm=0.3) for one in mine]
        pair.backward(x, t)
        expected = nn.utils.clip_grad_norm_(pair.plain.parameters(), 0.3)
        for one in theirs:
            one.step()
        assert norms[0].equal(norms[1])
        torch.testing.assert_close(norms[0], expected, rtol=1e-10, atol=0)
    pair.assert_equal(rtol=1e-2, atol=1e-3)  # Muon orthogonalises in bfloat16


def test_loss_scales_may_differ():
    """Runs with other loss scales are brought to the scale of the last."""
    pair = Pair()
    x, t = pair.batches(1)[0]
    once = fp.run(pair.plan, pair.params, (x, t))
    parts = [slice(0, 3), slice(3, 4), slice(4, 10)]
    runs = [
        fp.run(pair.plan, pair.params, (x[a], t[a]), loss_scale=s)
        for a, s in zip(parts, (3.0, 1.0, 7.0), strict=True)
    ]
    total = fp.accumulate(one for one in runs)
    assert 7.0 == total.loss_scale
    torch.testing.assert_close(total.loss, once.loss, rtol=1e-12, atol=0)
    for a, b in zip(fp.leaves(total.grads), fp.leaves(once.grads), strict=True):
        torch.testing.assert_close(a / 7.0, b, rtol=1e-10, atol=1e-13)


def test_moving_averages():
    """torch's own EMA over leaves: the numbers of an AveragedModel, on a copy that is run like any
    parameters."""
    pair = Pair()
    update = swa_utils.get_ema_multi_avg_fn(0.8)
    reference = swa_utils.AveragedModel(pair.plain, multi_avg_fn=update)
    reference.update_parameters(pair.plain)  # the first call copies
    average = copy.deepcopy(pair.params)
    mine = torch.optim.SGD(fp.leaves(pair.params), lr=0.5)
    theirs = torch.optim.SGD(pair.plain.parameters(), lr=0.5)
    batches = pair.batches()
    for _ in pair.train(mine, theirs, batches):
        update(fp.leaves(average), fp.leaves(pair.params), None)
        reference.update_parameters(pair.plain)
    x, _ = batches[-1]
    evaluation = fp.make_plan(pair.plan.stages, pair.plan.schedule.forwards(), devices="cpu")
    outputs = fp.run(evaluation, average, x).outputs
    torch.testing.assert_close(outputs, reference(x).detach(), rtol=1e-9, atol=1e-11)
    assert not torch.allclose(outputs, pair.plain(x), rtol=1e-3)


def training(schedule):
    """A net with batch norm, dropout, momentum, a scheduler and a scaler, from the start."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
    stages, params, state = zip(fp.from_module(model[:3]), fp.from_module(model[3:]), strict=True)
    plan = cpu_plan(stages, schedule, loss=F.cross_entropy)
    optimizer = torch.optim.AdamW(fp.named_leaves(params), lr=0.1)
    rates = lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return (
        plan,
        params,
        state,
        optimizer,
        rates,
        torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2),
    )


def train(made, first, last):
    plan, params, state, optimizer, rates, scaler = made
    for number in range(first, last):
        torch.manual_seed(100 + number)
        batch = torch.randn(10, 6), torch.randint(0, 3, (10,))
        result = fp.run(
            plan,
            params,
            batch,
            state=state,
            seed=fp.fold_in(7, number),
            loss_scale=scaler.get_scale(),
        )
        fp.step(optimizer, params, result.grads, max_norm=1.0, scaler=scaler)
        scaler.update()
        rates.step()
        state = result.state
    return state


def test_training_resumes_bit_for_bit():
    """Saved after three steps, loaded into freshly made trees and optimizer, on another schedule:
    the bits of six."""
    straight = training(fp.schedules.one_f_one_b(2, 4))
    expected = train(straight, 0, 6)
    made = training(fp.schedules.one_f_one_b(2, 4))
    state = train(made, 0, 3)
    file = io.BytesIO()
    names = ("optimizer", "rates", "scaler")
    saved = {name: one.state_dict() for name, one in zip(names, made[3:], strict=True)}
    saved |= {
        "params": dict(fp.named_leaves(made[1])),
        "state": dict(fp.named_leaves(state)),
        "step": 3,
    }
    torch.save(saved, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    again = training(fp.schedules.fill_drain(2, 4))
    with torch.no_grad():
        for what, tree in (("params", again[1]), ("state", again[2])):
            assert set(loaded[what]) == {name for name, _ in fp.named_leaves(tree)}
            for name, leaf in fp.named_leaves(tree):
                leaf.copy_(loaded[what][name])
    for name, one in zip(names, again[3:], strict=True):
        one.load_state_dict(loaded[name])
    end = train(again, loaded["step"], 6)
    assert same(snapshot(straight[1]), snapshot(again[1]))
    assert same(expected, end)
    assert same(straight[3].state_dict(), again[3].state_dict())


def test_closures_are_refused_by_step_and_work_by_hand():
    """LBFGS wants to evaluate the loss itself: `step` says so, and a closure over `run` is the
    plain closure."""
    pair = Pair()
    options = {"lr": 1.0, "max_iter": 5, "line_search_fn": "strong_wolfe"}
    mine = torch.optim.LBFGS(fp.leaves(pair.params), **options)
    theirs = torch.optim.LBFGS(pair.plain.parameters(), **options)
    x, t = pair.batches(1, rows=30)[0]
    with pytest.raises(fp.PlanError, match=r"LBFGS.*step\(closure\)"):
        fp.step(mine, pair.params, fp.run(pair.plan, pair.params, (x, t)).grads)
    evaluations = [0, 0]

    def closure():
        evaluations[0] += 1
        result = fp.run(pair.plan, pair.params, (x, t))
        gradients = dict(fp.named_leaves(result.grads))
        for name, leaf in fp.named_leaves(pair.params):
            leaf.grad = gradients.get(name)
        return result.loss

    def plain_closure():
        evaluations[1] += 1
        return pair.backward(x, t)

    for _ in range(3):
        torch.testing.assert_close(
            mine.step(closure), theirs.step(plain_closure), rtol=1e-8, atol=0
        )
    for leaf in fp.leaves(pair.params):
        leaf.grad = None
    assert evaluations[0] == evaluations[1] > 5
    pair.assert_equal(rtol=1e-5, atol=1e-7)


def test_a_recorded_run_keeps_the_garbage_collector_off():
    """A collection would count as the time of an action. Afterwards it is as before, also after a
    failure."""
    seen = []

    @fp.stage
    def looking(p, x):
        seen.append(gc.isenabled())
        if p is None:
            raise ValueError("boom")
        return x * p

    plan = fp.make_plan([looking], fp.schedules.fill_drain(1, 1, backward=False), devices="cpu")
    params, x = (torch.tensor(2.0),), torch.ones(4)
    for record in (False, True):
        fp.run(plan, params, x, record=record)
    with pytest.raises(ValueError, match="boom"):
        fp.run(plan, (None,), x, record=True)
    assert seen == [True, False, False]
    assert gc.isenabled()
