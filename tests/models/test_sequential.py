"""Cutting a Sequential: names, draws, tuples and ties do not depend on the place of the cuts; what
cannot be cut."""

import copy
from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import EXECUTORS, same, snapshot

import funcpipe as fp
from funcpipe._src.models.sequential import cut_sequential, units_of

DOUBLE = torch.float64
Two = namedtuple("Two", ["a", "b"])


def nested():
    """Five units counted flat, three as layers; draws and statistics at every depth."""
    inner = nn.Sequential(
        nn.Linear(4, 4), nn.Dropout(0.5), nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(inplace=True))
    )
    return nn.Sequential(
        nn.Linear(4, 4),
        inner,
        nn.Sequential(OrderedDict(drop=nn.Dropout(0.3), head=nn.Linear(4, 2))),
    ).double()


def run(parts, batch, *, seed=0, executor="serial", chunks=3, loss=F.mse_loss, **options):
    stages, params, state = zip(*parts, strict=True)
    schedule = fp.schedules.remat(fp.schedules.one_f_one_b(len(stages), chunks))
    plan = fp.make_plan(stages, schedule, loss=loss, outputs=True, devices="cpu", **options)
    return fp.run(plan, params, batch, state=state, seed=seed, executor=executor)


def by_name(trees):
    return {name: value for tree in trees if tree for name, value in tree.items()}


def test_units():
    """The layers, or those of Sequentials inside, with the paths of the model; an empty one inside
    is a layer."""
    model = nn.Sequential(
        nn.ReLU(), nn.Sequential(), nn.Sequential(nn.Sequential(nn.Tanh()), nn.ModuleList())
    )
    assert [("0", model[0]), ("1", model[1]), ("2", model[2])] == units_of(model)
    assert ["0", "1", "2.0.0", "2.1"] == [path for path, _ in units_of(model, flat=True)]
    assert units_of(model, flat=True)[2][1] is model[2][0][0]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_place_of_the_cuts_does_not_matter(executor):
    """Law 4 for every cut: names, dropout, statistics and gradients are the same, bit for bit, and
    the model untouched."""
    model = nested()
    before = snapshot(model.state_dict())
    batch = torch.randn(8, 4, dtype=DOUBLE), torch.randn(8, 2, dtype=DOUBLE)
    whole = run(cut_sequential(model, [3]), batch)
    assert whole.outputs.abs().sum() > 0
    for sizes, flat in (
        ([1, 2], False),
        ([2, 1], False),
        ([1, 1, 1], False),
        ([7], True),
        ([2, 5], True),
        ([1, 1, 1, 1, 1, 1, 1], True),
        ([4, 3], True),
    ):
        result = run(cut_sequential(model, sizes, flat=flat), batch, executor=executor)
        assert same(whole.outputs, result.outputs)
        assert same(by_name(whole.grads), by_name(result.grads))
        assert same(by_name(whole.state), by_name(result.state))
    assert list(dict(model.named_parameters())) == list(by_name(whole.grads))
    assert list(dict(model.named_buffers())) == list(by_name(whole.state))
    assert same(before, snapshot(model.state_dict()))
    assert same(whole.outputs, run([fp.from_module(model)], batch).outputs)


def test_stages_are_named_by_their_layers_and_hold_the_models_tensors():
    """The very parameters, under the model's names; buffers are copies."""
    model = nested()
    parts = cut_sequential(model, [1, 2, 4], flat=True)
    assert ["0", "1.0-1.1", "1.2.0-2.head"] == [stage.name for stage, _, _ in parts]
    assert all(
        tensor is model.get_parameter(name)
        for _, params, _ in parts
        for name, tensor in params.items()
    )
    assert ((), ()) == (parts[0][2], parts[1][2])
    assert parts[2][2]["1.2.0.running_mean"].data_ptr() != model[1][2][0].running_mean.data_ptr()
    model = nn.Sequential(
        OrderedDict(_row=nn.Linear(2, 2), row=nn.Linear(2, 2), units=nn.Linear(2, 2))
    )
    assert ["_row", "row-units"] == [stage.name for stage, _, _ in cut_sequential(model, [1, 2])]


# -- tuples
# -------------------------------------------------------------------------------


class Fork(nn.Module):
    def forward(self, x):
        return x, 2 * x


class Swap(nn.Module):
    """Several inputs, several outputs."""

    def forward(self, a, b):
        return b, a


class Join(nn.Module):
    def forward(self, a, b):
        return a - b


class One(nn.Module):
    """One input, whatever it is."""

    def __init__(self, made):
        super().__init__()
        self.made = made

    def forward(self, x):
        return self.made(x)


def all_cuts(model):
    count = len(units_of(model, flat=True))
    for bits in range(2 ** (count - 1)):
        ends = [place + 1 for place in range(count - 1) if bits >> place & 1] + [count]
        yield [end - start for start, end in zip([0, *ends], ends)]


ROWS = {
    "spread": (fp.models.PipeSequential(Fork(), Swap(), Swap(), Join()), torch.ones(3)),
    "spread at the start": (
        fp.models.PipeSequential(Swap(), Join()),
        (torch.ones(3), torch.zeros(3)),
    ),
    "spread of one": (
        fp.models.PipeSequential(One(lambda x: (x,)), One(lambda x: x + 1)),
        torch.ones(3),
    ),
    "plain": (nn.Sequential(Fork(), One(lambda x: (*x, x[0])), One(lambda x: x[2])), torch.ones(3)),
    "plain at the start": (
        nn.Sequential(One(lambda x: x[0] - x[1]), nn.ReLU()),
        (torch.ones(3), torch.zeros(3)),
    ),
    "one argument": (
        fp.models.PipeSequential(
            One(lambda x: [x, x]),
            One(lambda x: Two(*x)),
            One(lambda x: {"a": x}),
            One(lambda x: x["a"].b),
        ),
        torch.ones(3),
    ),
    "spread in plain": (
        nn.Sequential(
            Fork(), fp.models.PipeSequential(One(lambda x: (x[1], x[0])), Swap(), Join())
        ),
        torch.ones(3),
    ),
    "plain in spread": (
        fp.models.PipeSequential(nn.Sequential(Fork(), One(lambda x: x)), Swap(), Join()),
        torch.ones(3),
    ),
}


@pytest.mark.parametrize("kind", ROWS)
def test_tuples(kind):
    """Row A7: a PipeSequential spreads exactly tuples, a plain Sequential nothing, at every border
    as inside."""
    model, x = ROWS[kind]
    expected = (
        model(*x)
        if isinstance(model, fp.models.PipeSequential) and isinstance(x, tuple)
        else model(x)
    )
    for sizes in all_cuts(model):
        stages, params, _ = zip(*cut_sequential(model, sizes, flat=True), strict=True)
        plan = fp.make_plan(
            stages, fp.schedules.fill_drain(len(sizes), 1, backward=False), devices="cpu"
        )
        assert same(expected, fp.run(plan, params, x).outputs), sizes


def test_pipe_sequential():
    """Alone: as it says; empty ones give back what they got; slices keep the class."""
    model = fp.models.PipeSequential(Swap(), Swap(), Join())
    assert 3.0 == model(torch.tensor(5.0), torch.tensor(2.0)).item()
    assert type(model[:2]) is fp.models.PipeSequential
    assert 1 == fp.models.PipeSequential()(1)
    assert (1, 2) == fp.models.PipeSequential()(1, 2)
    assert (1, 2) == fp.models.PipeSequential(Fork())(1)
    with pytest.raises(TypeError, match="positional argument"):
        nn.Sequential(Fork(), Join())(torch.ones(1))


# -- one thing at several places
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[4], [2, 2], [1, 3], [3, 1], [1, 1, 1, 1]])
def test_one_layer_at_several_places(sizes):
    """It draws by its place, whatever the cuts; its tensors are the same objects, and gradients of
    ties are summed."""
    linear, drop = nn.Linear(3, 3).double(), nn.Dropout(0.5)
    parts = cut_sequential(nn.Sequential(linear, drop, linear, drop), sizes)
    holders = [
        (stage, name)
        for stage, (_, params, _) in enumerate(parts)
        for name in params
        if name.endswith("weight")
    ]
    assert all(parts[stage][1][name] is linear.weight for stage, name in holders)
    apart = sizes in ([2, 2], [1, 3], [1, 1, 1, 1])
    assert (["0.weight", "2.weight"] if apart else ["0.weight"]) == [name for _, name in holders]
    ties = [
        [(stage, name.replace("weight", leaf)) for stage, name in holders]
        for leaf in ("weight", "bias")
    ]
    batch = torch.randn(8, 3, dtype=DOUBLE), torch.randn(8, 3, dtype=DOUBLE)
    result = run(parts, batch, ties=ties if apart else ())
    distinct = nn.Sequential(*(copy.deepcopy(layer) for layer in (linear, drop, linear, drop)))
    expected = run(cut_sequential(distinct, [1, 3]), batch)
    assert same(expected.outputs, result.outputs)
    total = expected.grads[0]["0.weight"] + expected.grads[1]["2.weight"]
    torch.testing.assert_close(result.grads[0]["0.weight"], total, rtol=1e-12, atol=1e-14)


def test_layers_of_many_kinds():
    """Recurrent ones, whose output is a tuple, parametrized ones: plain autograd's gradients, any
    cut."""
    norm = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    model = nn.Sequential(
        nn.Linear(3, 4), nn.Sequential(nn.GRU(4, 4), One(lambda out: out[0] * 2)), norm
    ).double()
    x = torch.randn(6, 3, dtype=DOUBLE)[None].transpose(0, 1)
    y = torch.cat([model(row) for row in x.split(1)])
    y.square().mean().backward()
    for sizes in all_cuts(model):
        result = run(
            cut_sequential(model, sizes, flat=True),
            (x, None),
            chunks=6,
            loss=lambda y, _: y.square().mean(),
        )
        torch.testing.assert_close(result.outputs, y, rtol=1e-12, atol=0)
        for name, gradient in by_name(result.grads).items():
            expected = model.get_parameter(name).grad
            torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14)


def test_tied_parameters():
    """Two layers with one weight: the same object in both stages, once in one."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    (_, first, _), (_, second, _) = cut_sequential(model, [1, 1])
    assert first["0.weight"] is second["1.weight"] is model[0].weight
    assert ["0.weight"] == list(cut_sequential(model, [2])[0][1])


def test_frozen_layers_modes_and_own_tensors():
    """Evaluation mode of single layers stays; a Sequential's own tensors belong to the first
    stage."""

    class Own(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
            self.scale = nn.Parameter(torch.ones(1))
            self.register_buffer("steps", torch.zeros(()), persistent=False)

    model = Own()
    model[1].eval()
    parts = cut_sequential(model, [1, 2])
    assert ["0.bias", "0.weight", "scale"] == sorted(parts[0][1])
    assert ["steps"] == list(parts[0][2])
    assert model.training
    result = run(parts, (torch.randn(6, 4), torch.zeros(6, 4)))
    assert torch.equal(torch.zeros(4), result.state[1]["1.running_mean"])
    assert ((0, "scale"),) == result.unused


def test_statistics_per_microbatch():
    """deferred=False is handed on."""
    model = nn.Sequential(nn.BatchNorm1d(2), nn.ReLU())
    x = torch.randn(6, 2)
    counts = [
        run(cut_sequential(model, [1, 1], deferred=deferred), (x, x))
        .state[0]["0.num_batches_tracked"]
        .item()
        for deferred in (True, False)
    ]
    assert [1, 3] == counts


# -- what cannot be cut
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[], [0, 3], [2, -1, 2], [1, 1], [2, 2], [4]])
def test_sizes_that_do_not_fit(sizes):
    """All shapes of wrong sizes, with sizes that would do."""
    with pytest.raises(
        fp.PlanError, match=r"positive numbers that sum to the 3 layers; got .*e\.g\. \["
    ) as caught:
        cut_sequential(nn.Sequential(*[nn.ReLU() for _ in range(3)]), sizes)
    example = eval(str(caught.value).rpartition("e.g. ")[2])
    assert 3 == sum(example)
    assert min(len(sizes) or 1, 3) == len(example)


def test_things_that_are_no_sizes():
    for sizes in (3, ["a"], [1.5, 1.5]):
        with pytest.raises(fp.PlanError, match="how many of the 3 layers each stage gets; got"):
            cut_sequential(nn.Sequential(nn.ReLU(), nn.ReLU(), nn.ReLU()), sizes)


class OtherForward(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + x


class OtherCall(nn.Sequential):
    def __call__(self, x):
        return super().__call__(x) + x


def hooked():
    model = nn.Sequential(nn.ReLU())
    model.register_forward_hook(lambda *_: None)
    model.register_full_backward_hook(lambda *_: None)
    return model


SHARED = nn.BatchNorm1d(2)
REFUSED = {
    "no Sequential": (
        nn.Linear(1, 1),
        r"got Linear: it is not an nn.Sequential\. To cut other models, use fp.split",
    ),
    "its own forward": (
        OtherForward(nn.ReLU()),
        "got OtherForward: its class overrides forward or __call__ of nn.Sequential",
    ),
    "its own call": (
        OtherCall(nn.ReLU()),
        r"got OtherCall: .* use fp.split\(model, num_stages, example=example\)",
    ),
    "hooks": (
        hooked(),
        r"forward hooks, which stages would not run.*\n.*backward hooks, which stages would not run; register them on a layer",
    ),
    "None": (
        nn.Sequential(OrderedDict(a=None, b=nn.ReLU(), c=None)),
        r"layer 'a' is None\n.*layer 'c' is None",
    ),
    "empty": (nn.Sequential(), "it has no layers, but a stage needs at least one"),
    "lazy": (
        nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d(affine=False)),
        r"'0.weight', '0.bias', '1.running_mean'.*not initialised",
    ),
    "statistics": (
        nn.Sequential(SHARED, nn.Sequential(nn.ReLU(), SHARED)),
        "the batch norm layer at 0 and 1.1",
    ),
    "a graph": (
        nn.Sequential(nn.ReLU(), One(torch.ones(1, requires_grad=True) * 2)),
        "cannot be copied",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind):
    """Before anything runs, with what to do."""
    model, message = REFUSED[kind]
    with pytest.raises(fp.PlanError, match=message):
        cut_sequential(model, [len(model) if isinstance(model, nn.Sequential) else 1])


def test_what_is_no_row_is_one_layer():
    """Sequentials inside with a forward, hooks or tensors of their own are called as they are, also
    when counted flat."""
    inner = nn.Sequential(nn.ReLU(), nn.ReLU())
    inner.register_forward_hook(lambda module, args, y: y + 1)
    owning = nn.Sequential(nn.ReLU())
    owning.register_buffer("kept", torch.ones(1))
    model = nn.Sequential(
        OtherForward(nn.ReLU(), nn.ReLU()), inner, owning, OtherCall(nn.Tanh(), nn.ReLU())
    )
    assert ["0", "1", "2", "3"] == [path for path, _ in units_of(model, flat=True)]
    x = torch.randn(4, 2)
    stages, params, state = zip(*cut_sequential(model, [1, 3], flat=True), strict=True)
    plan = fp.make_plan(stages, fp.schedules.fill_drain(2, 2, backward=False), devices="cpu")
    assert torch.equal(model(x), fp.run(plan, params, x, state=state).outputs)


def test_a_model_that_overrides_its_call_cannot_be_traced():
    """A trace follows forward alone."""
    with pytest.raises(fp.PlanError, match="OtherCall overrides __call__, but a trace follows"):
        fp.split(OtherCall(nn.Linear(2, 2), nn.ReLU()), 2, example=torch.ones(2, 2))
