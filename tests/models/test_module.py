"""from_module: names, flags, arguments, ties inside, copies of its own; modules of every kind
against plain autograd."""

import pickle
import threading
from collections import namedtuple

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import EXECUTORS, same, snapshot
from torch.utils.checkpoint import checkpoint

import funcpipe as fp

Pair = namedtuple("Pair", ["a", "b"])


def small():
    return nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2)))


def test_names_and_flags_are_the_modules_own():
    """Parameters under the names and with the requires_grad of the module, the very same
    objects."""
    model = small()
    model[0].bias.requires_grad_(False)
    _, params, state = fp.from_module(model)
    assert dict(model.named_parameters()).keys() == params.keys()
    assert all(params[name] is parameter for name, parameter in model.named_parameters())
    assert [name != "0.bias" for name in params] == [
        parameter.requires_grad for parameter in params.values()
    ]
    assert () == state


def test_buffers_are_copied_persistent_or_not():
    """State has every buffer by name, and is not the module's memory."""
    model = nn.Module()
    model.register_buffer("kept", torch.ones(2))
    model.register_buffer("rotary", torch.arange(3.0), persistent=False)
    model.register_buffer("absent", None)
    _, _, state = fp.from_module(model)
    assert ["kept", "rotary"] == list(state)
    assert all(
        state[name].data_ptr() != buffer.data_ptr() for name, buffer in model.named_buffers()
    )


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_module_is_untouched(executor):
    """Numbers, .grad, mode, buffers and identity of everything, after making the stage and after a
    run."""
    model = nn.Sequential(
        nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(inplace=True), nn.Linear(3, 2)
    )
    model[0].weight.grad = torch.full((3, 4), 7.0)
    before, objects = snapshot(model.state_dict()), list(model.state_dict(keep_vars=True).values())
    part, params, state = fp.from_module(model)
    plan = fp.make_plan(
        [part], fp.schedules.remat(fp.schedules.fill_drain(1, 3)), loss=F.mse_loss, devices="cpu"
    )
    fp.run(
        plan, (params,), (torch.randn(7, 4), torch.zeros(7, 2)), state=(state,), executor=executor
    )
    assert same(before, snapshot(model.state_dict()))
    assert all(
        a is b for a, b in zip(objects, model.state_dict(keep_vars=True).values(), strict=True)
    )
    assert [7.0] == model[0].weight.grad.unique().tolist()
    assert [None] * 5 == [p.grad for p in list(model.parameters())[1:]]
    assert model.training
    assert nn.BatchNorm1d is type(model[1])


@pytest.mark.parametrize("mode", [True, False])
def test_train_or_eval_is_the_plans_matter(mode):
    """For a module in training; one in evaluation stays there. What the mode becomes later changes
    nothing."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train(mode)
    part, params, _ = fp.from_module(model)
    model.train(not mode)
    x = torch.ones(6, 4)
    evaluate = fp.make_plan([part], fp.schedules.fill_drain(1, 2, backward=False), devices="cpu")
    expected = torch.cat(
        [model[0](part) for part in x.chunk(2)]
    )  # kernels may round six rows otherwise than three
    assert torch.equal(expected, fp.run(evaluate, (params,), x).outputs)
    train = fp.make_plan(
        [part], fp.schedules.fill_drain(1, 2, backward=False), train=True, devices="cpu"
    )
    zeros = int((fp.run(train, (params,), x, seed=0).outputs == 0).sum())
    assert 0 < zeros < 24 if mode else zeros == 0


def test_wrong_keys_are_all_named_with_the_nearest():
    """Missing, unknown, of another shape, not a tensor, not a dict: before anything runs."""
    part, params, _ = fp.from_module(small(), name="head")
    plan = fp.make_plan([part], fp.schedules.fill_drain(1, 1, backward=False), devices="cpu")
    wrong = {**params, "1.0.weigth": params["1.0.weight"]}
    del wrong["1.0.weight"]
    with pytest.raises(fp.PlanError, match="head") as caught:
        fp.run(plan, (wrong,), torch.ones(1, 4))
    assert "'1.0.weigth', which the module does not; did you mean '1.0.weight'?" in str(
        caught.value
    )
    assert "lacks '1.0.weight'; is it '1.0.weigth'?" in str(caught.value)
    with pytest.raises(fp.PlanError) as caught:
        part({**params, "0.bias": torch.ones(5), "1.0.bias": [0.0] * 3}, torch.ones(1, 4))
    assert "'0.bias' has shape (5,), but the module needs (3,)" in str(caught.value)
    assert "'1.0.bias' is a list, not a tensor" in str(caught.value)
    with pytest.raises(fp.PlanError, match="params is a list, not a dict"):
        part(list(params.values()), torch.ones(1, 4))
    norm, params, state = fp.from_module(nn.BatchNorm1d(3))
    with pytest.raises(
        fp.PlanError, match="state has 'running_men', .* did you mean 'running_mean'"
    ):
        norm(params, torch.ones(2, 3), state={**state, "running_men": torch.ones(3)})


class Echo(nn.Module):
    def forward(self, *args, **kwargs):
        return len(args), type(args[0]).__name__, sorted(kwargs)


def test_only_a_tuple_is_spread():
    """A named tuple, a list, a dict and a tensor are one argument; feeds arrive as keywords."""
    part, params, _ = fp.from_module(Echo(), feeds=["mask"])
    one = torch.ones(2)
    for x, expected in (
        ((one, one), (2, "Tensor", [])),
        ((one,), (1, "Tensor", [])),
        (Pair(one, one), (1, "Pair", [])),
        ([one, one], (1, "list", [])),
        ({"a": one}, (1, "dict", [])),
        (one, (1, "Tensor", [])),
    ):
        count, kind, _ = expected
        assert (count, kind, ["mask"]) == part(params, x, feeds={"mask": one})
        plan = fp.make_plan([part], fp.schedules.fill_drain(1, 1, backward=False), devices="cpu")
        assert (count, kind, ["mask"]) == fp.run(plan, (params,), x, feeds={"mask": one}).outputs


class Tied(nn.Module):
    """One weight at two places, one submodule at two paths."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.head.weight = self.embed.weight
        self.first = self.again = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.again(torch.tanh(self.first(self.embed(x))))))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cell = kind(4, 4, 2, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.cell(x[:, None].expand(-1, 3, -1))[0].flatten(1)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return checkpoint(lambda h: self.b(torch.tanh(self.a(h))), x, use_reentrant=False) + x


class Holder(nn.Module):
    """Parameters in lists and dicts, and a bare one."""

    def __init__(self):
        super().__init__()
        self.many = nn.ParameterList([torch.randn(4) for _ in range(2)])
        self.named = nn.ParameterDict({"w": torch.randn(4)})
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, x):
        return x * self.many[0] + self.many[1] * self.named["w"]


MODULES = {
    "tied": Tied,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    "checkpoint": Checkpointed,
    "holder": Holder,
    "bilinear": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Flatten()
    ),
}


@pytest.mark.parametrize("kind", MODULES)
def test_gradients_are_those_of_plain_autograd(kind):
    """Two such modules in a pipeline with remat, 10 rows over 4: 1e-10 of the whole batch; unused
    ones are zeros."""
    torch.manual_seed(0)
    models = [MODULES[kind]().double() for _ in range(2)]
    x, target = torch.randn(10, 4, dtype=torch.float64), torch.randn(10, dtype=torch.float64)
    y = x
    for model in models:
        y = model(y)[:, :4]
    parts = [fp.from_module(model, name=f"part{i}") for i, model in enumerate(models)]
    (a, b), (pa, pb), (sa, sb) = zip(*parts, strict=True)
    narrow = fp.stage(lambda p, h: h[:, :4], name="narrow")
    stages, params = (a, narrow, b, narrow), (pa, (), pb, ())
    loss = lambda y, t: (y.square().sum(1) - t).square().mean()
    loss(y, target).backward()
    for schedule in (
        fp.schedules.one_f_one_b(4, 4),
        fp.schedules.remat(fp.schedules.zero_bubble(4, 4, num_devices=2)),
    ):
        plan = fp.make_plan(stages, schedule, loss=loss, devices="cpu")
        result = fp.run(plan, params, (x, target), state=(sa, (), sb, ()), executor="threads")
        for index, model in ((0, models[0]), (2, models[1])):
            for name, parameter in model.named_parameters():
                expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.testing.assert_close(
                    result.grads[index][name], expected, rtol=1e-10, atol=1e-10
                )
    assert (((0, "unused"), (2, "unused")) if kind == "holder" else ()) == result.unused


def test_remat_has_the_bits_of_the_oracle_where_kernels_depend_on_grad_mode():
    """Law 1 for float32 LSTM, which has a kernel of its own without autograd."""
    stages, params, _ = zip(
        fp.from_module(nn.Sequential(nn.Linear(4, 4), Recurrent(nn.LSTM))), strict=True
    )
    x = torch.randn(6, 4)
    plan = fp.make_plan(
        stages,
        fp.schedules.remat(fp.schedules.fill_drain(1, 2)),
        loss=lambda y, t: y.square().mean(),
        outputs=True,
        devices="cpu",
    )
    expected = fp.run_sequential(plan, params, (x, None), threads_per_lane=1)
    result = fp.run(plan, params, (x, None), threads_per_lane=1)
    assert torch.equal(expected.outputs, result.outputs)


@pytest.mark.parametrize(
    ("schedule", "executor"),
    [
        (fp.schedules.fill_drain(3, 3), "serial"),
        (fp.schedules.remat(fp.schedules.one_f_one_b(3, 3)), "threads"),
        (fp.schedules.zero_bubble(3, 3), "threads"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_the_reentrant_checkpoint_gives_right_gradients(schedule, executor):
    """torch's older kind wants a backward for all leaves; gradients are those of plain autograd."""

    class Old(Checkpointed):
        def forward(self, x):
            return checkpoint(lambda h: self.b(torch.tanh(self.a(h))), x, use_reentrant=True) + x

    model = nn.Sequential(nn.Linear(4, 4), Old(), Old()).double()
    stages, params, _ = zip(*(fp.from_module(model[at : at + 1]) for at in range(3)), strict=True)
    x, target = torch.randn(7, 4).double(), torch.randn(7, 4).double()
    plan = fp.make_plan(stages, schedule, loss=F.mse_loss, devices="cpu")
    expected = fp.run_sequential(plan, params, (x, target), threads_per_lane=1)
    result = fp.run(plan, params, (x, target), executor=executor, threads_per_lane=1)
    assert all(map(torch.equal, fp.leaves(expected.grads), fp.leaves(result.grads)))
    assert all(parameter.grad is None for parameter in model.parameters())
    F.mse_loss(model(x), target).backward()
    grads = {key: value for tree in result.grads for key, value in tree.items()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-10, atol=1e-10)


def test_what_cannot_be_copied_is_refused():
    """A tensor with a graph as an attribute, lazy parameters, things that are no module."""
    kept = nn.Linear(2, 2)
    kept.cache = kept(torch.ones(2))
    with pytest.raises(fp.PlanError, match="cannot be copied.*attributes"):
        fp.from_module(kept)
    with pytest.raises(fp.PlanError, match=r"'weight'.*not initialised"):
        fp.from_module(nn.LazyLinear(3))
    with pytest.raises(fp.PlanError, match="not initialised"):
        fp.from_module(nn.Sequential(nn.LazyBatchNorm1d()))
    with pytest.raises(fp.PlanError, match="fp.stage"):
        fp.from_module(lambda x: x)
    with pytest.raises(fp.PlanError, match=r"got a type"):
        fp.from_module(nn.Linear)


def test_a_stage_is_a_function_under_torch_func():
    """grad, vmap and jvp of a module stage's call; functional_call inside of a function stage."""
    model = small().double()
    part, params, _ = fp.from_module(model)
    x = torch.randn(5, 4, dtype=torch.float64)
    torch.testing.assert_close(part(params, x), model(x), rtol=0, atol=0)
    loss = lambda p, x: part(p, x).square().sum()
    for name, gradient in torch.func.grad(loss)(params, x).items():
        expected = torch.autograd.grad(
            model(x).square().sum(), dict(model.named_parameters())[name]
        )[0]
        torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(torch.func.vmap(lambda one: part(params, one))(x), model(x))
    stacked = {name: torch.stack([p, p * 2]) for name, p in params.items()}
    both = torch.func.vmap(lambda p: part(p, x))(stacked)
    torch.testing.assert_close(
        both[1], torch.func.functional_call(model, {n: p * 2 for n, p in params.items()}, x)
    )
    torch.testing.assert_close(
        torch.func.jvp(lambda z: part(params, z), (x,), (x,)), torch.func.jvp(model, (x,), (x,))
    )
    per_row = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, x)
    torch.testing.assert_close(
        per_row["0.weight"].sum(0), torch.func.grad(loss)(params, x)["0.weight"]
    )
    inside = fp.stage(
        lambda p, h: torch.func.vmap(
            torch.func.grad(lambda z: torch.func.functional_call(model, p, z).sum())
        )(h)
    )
    plan = fp.make_plan(
        [inside],
        fp.schedules.fill_drain(1, 2),
        loss=lambda y, t: y.sum() / len(y),
        outputs=True,
        devices="cpu",
    )
    torch.testing.assert_close(fp.run(plan, (params,), (x, None)).outputs, inside(params, x))


def test_many_threads_may_call_one_stage():
    """8 threads with parameters of their own, at the same time: each gets its own answer; runs
    beside each other too."""
    part, params, _ = fp.from_module(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]))
    x = torch.randn(3, 8)
    plan = fp.make_plan([part], fp.schedules.fill_drain(1, 3, backward=False), devices="cpu")
    wrong = []

    def work(number):
        mine = {name: p.detach() * (number + 1) / 4 for name, p in params.items()}
        expected = part(mine, x)
        for _ in range(5):
            if not torch.equal(expected, part(mine, x)):
                wrong.append(number)
            torch.testing.assert_close(
                fp.run(plan, (mine,), x, executor="serial").outputs, expected
            )

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == wrong
    assert 8 == len(
        {part({n: p * k for n, p in params.items()}, x).sum().item() for k in range(1, 9)}
    )


def halve(params, x):
    return x / 2 * params


@fp.stage(name="decorated")
def decorated(params, x):
    return x * params


def test_stages_pickle_where_python_can_find_them():
    """By name where importable, a module stage by its copy without numbers; a lambda is refused
    clearly."""
    assert pickle.loads(pickle.dumps(fp.stage(halve, name="h"))).name == "h"
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    model = small()
    part, params, _ = fp.from_module(model, name="m")
    data = pickle.dumps(part)
    x = torch.randn(2, 4)
    assert torch.equal(model(x), pickle.loads(data)(params, x))
    both = pickle.loads(pickle.dumps(fp.compose(part, fp.stage(halve))))
    assert torch.equal(model(x) / 2, both((params, 1.0), x))
    with pytest.raises(fp.PlanError, match=r"top of a module"):
        pickle.dumps(fp.stage(lambda p, x: x))
    large, _, _ = fp.from_module(nn.Linear(1000, 1000))
    assert len(pickle.dumps(large)) < 10_000


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # the compiler reads it
def test_a_compiled_function_is_a_stage():
    """torch.compile'd functions run as they are: gradients of plain autograd."""
    body = torch.compile(lambda p, x: torch.tanh(x @ p) * 2, backend="aot_eager", dynamic=False)
    w, x = torch.randn(4, 4), torch.randn(4, 4)
    leaf = w.clone().requires_grad_()
    torch.tanh((torch.tanh(x @ leaf) * 2) @ leaf).mul(2).square().mean().backward()
    stages = (
        fp.stage(lambda p, x: body(p, x), name="a"),
        fp.stage(lambda p, x: body(p, x), name="b"),
    )
    plan = fp.make_plan(
        stages,
        fp.schedules.one_f_one_b(2, 2),
        loss=lambda y, t: y.square().mean(),
        ties=[((0, ()), (1, ()))],
        devices="cpu",
    )
    result = fp.run(plan, (w, w), (x, None), executor="threads")
    torch.testing.assert_close(result.grads[0], leaf.grad, rtol=1e-5, atol=1e-6)
