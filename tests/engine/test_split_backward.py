"""Eager stages split their backward: I gives what others wait for, W the weights of products and
convolutions."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from common import cpu_plan
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from watch import num_tensors

import funcpipe as fp
from funcpipe._src.stages.eager import EagerBound


class Calls(nn.Module):
    """A module of layers, and what is done with them."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.layers, self.does = nn.ModuleDict(layers), forward

    def forward(self, x):
        return self.does(x, **self.layers)


class Tied(nn.Module):
    """One weight in two products, and another in one."""

    def __init__(self):
        super().__init__()
        self.twice, self.once = (nn.Parameter(torch.randn(6, 6) / 2) for _ in range(2))

    def forward(self, x):
        return (x @ self.twice).tanh() @ self.once @ self.twice


class Computed(Tied):
    """A weight that is computed once and used in two products, and one that is computed for one."""

    def forward(self, x):
        both = self.twice.tanh()
        return (x @ both).tanh() @ self.once.sin() @ both


class Square(torch.autograd.Function):
    """Something of the user's, with a weight."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        return gradient @ w.t(), x.flatten(0, -2).t() @ gradient.flatten(0, -2)


class Own(Tied):
    def forward(self, x):
        return Square.apply(x @ self.once, self.twice)


class Scaled(Tied):
    """A parameter that products need, and what is no product as well."""

    def forward(self, x):
        return (x @ self.once) * self.once.sum() @ self.twice


def linear(rows=6, columns=6):
    return nn.Linear(rows, columns)


def frozen():
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    model[0].requires_grad_(False)
    model[2].bias.requires_grad_(False)
    return model


def region(x, a, b):
    return b(checkpoint(a, x, use_reentrant=False).tanh())


def dropping():
    return nn.Sequential(linear(), nn.Dropout(0.5))


def reentrant(x, a, b):
    return b(checkpoint(a, x, use_reentrant=True).tanh())


CHAIN = lambda: nn.Sequential(linear(), nn.LayerNorm(6), nn.GELU(), linear())
MODELS = {
    "chain": (CHAIN, ["0.weight", "3.weight"]),
    "residual": (
        lambda: Calls(
            lambda x, a, b: x + b(F.relu(a(x), inplace=True)),
            a=linear(),
            b=nn.Linear(6, 6, bias=False),
        ),
        ["layers.a.weight", "layers.b.weight"],
    ),
    "norms alone": (lambda: nn.Sequential(nn.LayerNorm(6), nn.GELU()), []),
    "frozen": (frozen, ["2.weight"]),
    "tied": (Tied, ["once"]),
    "computed": (Computed, ["once"]),
    "own": (Own, ["once"]),
    "scaled": (Scaled, ["twice"]),
    "weight norm": (
        lambda: Calls(lambda x, a: a(x).tanh(), a=weight_norm(linear())),
        [
            "layers.a.parametrizations.weight.original0",
            "layers.a.parametrizations.weight.original1",
        ],
    ),
    "region": (lambda: Calls(region, a=linear(), b=linear()), ["layers.b.weight"]),
    "region that draws": (lambda: Calls(region, a=dropping(), b=linear()), []),
    "reentrant region": (lambda: Calls(reentrant, a=linear(), b=linear()), []),
    "attention": (
        lambda: Calls(lambda x, a: a(x, x, x)[0], a=nn.MultiheadAttention(6, 2, batch_first=True)),
        ["layers.a.in_proj_weight", "layers.a.out_proj.weight"],
    ),
    "recurrent": (lambda: Calls(lambda x, a: a(x)[0], a=nn.GRU(6, 6, batch_first=True)), None),
    "convolutions": (
        lambda: Calls(
            lambda x, a, n, b: b(n(a(x[:, None])).relu())[:, 0],
            a=nn.Conv2d(1, 4, 3, padding=1),
            n=nn.BatchNorm2d(4),
            b=nn.ConvTranspose2d(4, 1, 3, padding=1, bias=False),
        ),
        ["layers.a.weight", "layers.b.weight"],
    ),
    "bilinear": (lambda: Calls(lambda x, a: a(x, x.sin()), a=nn.Bilinear(6, 6, 6)), None),
}


def run_each(modules, schedules, batch, **options):
    """The results of a pipeline of modules with each schedule, and its params."""
    made = [fp.from_module(module.to(batch[0].dtype)) for module in modules]
    stages, params, state = zip(*made, strict=True)
    plans = [cpu_plan(stages, schedule) for schedule in schedules]
    return [fp.run(plan, params, batch, state=state, **options) for plan in plans], params


def both(model, schedules, *, dtype=torch.float64, first=linear, amp=False, **options):
    """The same for two stages, the second of which is the model."""
    torch.manual_seed(0)
    modules = first(), model
    batch = torch.randn(8, 5, 6, dtype=dtype), torch.randn(8, 5, 6, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        return run_each(modules, schedules, batch, seed=0, **options)


SPLIT, WHOLE = fp.schedules.zero_bubble(2, 4), fp.schedules.one_f_one_b(2, 4)


class Bare(Tied):
    """A parameter that a product needs, and that is handed on as well."""

    def forward(self, x):
        return x @ self.once, self.once


class Sum(nn.Module):
    def forward(self, x, w):
        return (x @ w).tanh()


def assert_same_bits(first, second):
    for one, other in zip(first.grads, second.grads, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert (one[name] is None) == (other[name] is None), name
            assert one[name] is None or torch.equal(one[name], other[name]), name
    assert torch.equal(first.loss, second.loss)


@pytest.fixture
def waited(monkeypatch):
    """By stage, the names of the leaves that each W goes to."""
    seen: dict[int, list[set[str]]] = {}
    weights = EagerBound.backward_weight

    def spy(self, residual):
        walks = () if residual is None else residual.waiting
        later = {id(leaf) for walk in walks for leaf in walk.leaves}
        names = zip(sorted(self.params.tree), self.params.aliases, strict=True)
        seen.setdefault(self.index, []).append(
            {name for name, alias in names if id(alias) in later}
        )
        weights(self, residual)

    monkeypatch.setattr(EagerBound, "backward_weight", spy)
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_what_waits_and_that_nothing_changes(name, waited):
    """The gradients of whole backwards, to the bit; of the first stage all waits."""
    make, expected = MODELS[name]
    torch.manual_seed(1)
    model = make()
    (whole, split), params = both(model, [WHOLE, SPLIT])
    assert_same_bits(whole, split)
    assert any(gradient is not None and gradient.any() for gradient in split.grads[1].values())
    if expected is not None:
        assert [{*expected}] * 4 == waited[1]
    assert [{*params[0]}] * 4 == waited[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("schedule", [SPLIT, fp.schedules.zb_h2(2, 4)])
def test_other_types_and_schedules(dtype, schedule):
    (whole, split), _ = both(CHAIN(), [WHOLE, schedule], dtype=dtype)
    assert_same_bits(whole, split)


@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_under_autocast(executor, waited):
    """The casts of weights are part of what waits."""
    (whole, split), _ = both(
        CHAIN(), [WHOLE, SPLIT], dtype=torch.float32, amp=True, executor=executor
    )
    assert_same_bits(whole, split)
    assert [{"0.weight", "3.weight"}] * 4 == waited[1]


@pytest.mark.parametrize(
    "first",
    [
        CHAIN,
        lambda: Calls(region, a=linear(), b=linear()),
        lambda: Calls(region, a=dropping(), b=linear()),
    ],
)
def test_the_first_stage_does_all_of_it_later(first):
    """Also where a region is computed again, and draws."""
    (whole, split), _ = both(CHAIN(), [WHOLE, SPLIT], first=first)
    assert_same_bits(whole, split)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # of dynamo
def test_a_compiled_region_is_walked_once(waited):
    """torch.compile frees what it has in its backward."""
    model = Calls(lambda x, a, b: b(a(x)), a=nn.Sequential(linear(), nn.Tanh()), b=linear())
    compiled = torch.compile(lambda x: x.sigmoid().exp().tanh(), backend="aot_eager")
    model.does = lambda x, a, b: b(compiled(a(x)))
    (whole, split), _ = both(model, [WHOLE, SPLIT], executor="serial")
    assert_same_bits(whole, split)
    assert [set()] * 4 == waited[1]


def test_a_parameter_that_is_handed_on_as_it_is():
    """A leaf among the roots has no operation behind it."""
    x = torch.randn(8, 6, dtype=torch.float64)
    schedules = fp.schedules.one_f_one_b(3, 4), fp.schedules.zero_bubble(3, 4)
    (whole, split), _ = run_each((linear(), Bare(), Sum()), schedules, (x, x))
    assert_same_bits(whole, split)


def test_what_others_train_is_left_alone():
    """A critic in the loss has no gradient of the run, and is frozen for it."""
    critic = linear().double().requires_grad_(False)
    stages, params, _ = zip(*(fp.from_module(linear().double()) for _ in range(2)), strict=True)
    x = torch.randn(8, 6, dtype=torch.float64)
    plan = cpu_plan(stages, SPLIT, loss=lambda y, t: F.mse_loss(critic(y), t))
    fp.run(plan, params, (x, x))
    assert [None, None] == [parameter.grad for parameter in critic.parameters()]


def test_hooks_on_what_a_product_gave_change_its_gradient_once():
    def forward(x, a, b):
        h = a(x.flatten(0, 1))
        h.register_hook(lambda gradient: gradient * 2)
        return b(h.tanh()).view_as(x)

    (whole, split), _ = both(Calls(forward, a=linear(), b=linear()), [WHOLE, SPLIT])
    assert_same_bits(whole, split)


def test_a_backward_that_writes_into_its_gradient_is_refused():
    """Torch says that it must not, and others read it later."""

    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.mul_(3)

    model = Calls(
        lambda x, a: (Writes.apply(x).flatten(0, 1) + a(x.flatten(0, 1))).view_as(x), a=linear()
    )
    with pytest.raises(
        fp.PlanError, match=r"writes into its incoming gradient.*return a new tensor: grad \* 2"
    ):
        both(model, [SPLIT], executor="serial")


def test_what_waits_does_not_depend_on_how_the_input_lies():
    """Torch adds a bias in the product of few rows and after that of others."""
    attention = nn.MultiheadAttention(6, 2, kdim=4, vdim=3, batch_first=True)
    model = Calls(lambda x, a: a(x, x[..., :4], x[..., :3])[0], a=attention)
    x = torch.randn(6, 5, 6, dtype=torch.float64)  # 2, 2, 1 and 1 rows
    (whole, split), _ = run_each((linear(), model), (WHOLE, SPLIT), (x, x))
    assert_same_bits(whole, split)


def test_slices_do_all_of_it_in_i():
    """They differ in what could wait, and sums are in one order."""

    @fp.stage
    def slices(p, x, *, carry):
        z = x @ p if carry is None else x @ p + carry @ p
        return fp.Out(z.tanh(), carry=z.mean(1, keepdim=True))

    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    p, x = (make(6, 6), make(6, 6)), make(8, 4, 6)
    whole, split = (
        fp.run(cpu_plan([slices, slices], family(2, 4, num_slices=2)), p, (x, x)).grads
        for family in (fp.schedules.one_f_one_b, fp.schedules.zero_bubble)
    )
    assert all(map(torch.equal, whole, split))


def test_a_region_around_a_weight_and_the_way_to_the_input_runs_twice():
    """Once more by the backward, and not again by W."""
    runs = []

    def inner(x, w):
        runs.append(1)
        return x.sin().mul(2).tanh(), w.sin().tanh()

    def forward(x, a):
        y, w = checkpoint(inner, x, a.weight, use_reentrant=False)
        return y @ w

    (_, split), _ = both(Calls(forward, a=linear()), [SPLIT, SPLIT], executor="serial")
    assert split.loss is not None
    assert 2 * 2 * 4 == len(runs)


def test_skips_get_their_gradients_in_time():
    """A stage whose input needs none gives those of its skips in I."""
    first = fp.stage(lambda p, x: fp.Out(x, stash={"h": x * p}), stash=["h"])
    last = fp.stage(lambda p, x, *, skips: skips["h"] @ p, pop=["h"])
    p = torch.randn(6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64)
    x = torch.randn(8, 6, dtype=torch.float64)
    whole, split = (
        fp.run(cpu_plan([first, last], schedule), p, (x, x)) for schedule in (WHOLE, SPLIT)
    )
    assert all(map(torch.equal, whole.grads, split.grads))


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func.overloadpacket.__name__] += func.overloadpacket.__name__ in ("mm", "addmm")
        return func(*args, **(kwargs or {}))


def test_no_product_is_made_twice(monkeypatch):
    """Each half makes its own: one product a layer and microbatch."""
    found: dict[str, Counter] = {}

    def counted(name):
        half = getattr(EagerBound, name)

        def call(self, *args, **kwargs):
            if self.index != 1:
                return half(self, *args, **kwargs)
            with Products() as products:
                result = half(self, *args, **kwargs)
            found[name] = found.get(name, Counter()) + products.count
            return result

        monkeypatch.setattr(EagerBound, name, call)

    counted("backward")
    counted("backward_weight")
    both(
        nn.Sequential(linear(), nn.Tanh(), linear(), nn.Tanh(), linear()),
        [SPLIT],
        executor="serial",
    )
    assert {"backward": {"mm": 12}, "backward_weight": {"mm": 12}} == found


def test_nothing_is_left(monkeypatch):
    """Graphs go with the last W, also when a run fails between the halves."""

    def fails(self, residual):
        raise RuntimeError("in W")

    both(CHAIN(), [SPLIT], executor="serial")
    gc.collect()
    before = num_tensors()
    both(CHAIN(), [SPLIT], executor="serial")
    monkeypatch.setattr(EagerBound, "backward_weight", fails)
    with pytest.raises(RuntimeError, match="in W"):
        both(CHAIN(), [SPLIT], executor="serial")
    gc.collect()
    assert before == num_tensors()


def test_a_residual_that_came_back_from_the_host_is_split(waited):
    """What funcpipe packs itself can be read twice."""
    moved = fp.schedules.offload(SPLIT)
    (whole, split), _ = both(CHAIN(), [WHOLE, moved])
    assert_same_bits(whole, split)
    assert [{"0.weight", "3.weight"}] * 4 == waited[1]
