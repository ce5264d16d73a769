"""Memory from shapes alone: what autograd keeps, stages from layers, peaks of schedules,
optimizers, published tables."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from common import snapshot
from measuring import amoebanet, unet
from torch import nn

import funcpipe as fp
from funcpipe import schedules as S
from funcpipe._src.measuring.measured import Live
from funcpipe._src.measuring.memory import memory
from funcpipe._src.measuring.optimizer_state import optimizer_state

GiB = 2**30


class Both(nn.Module):
    """Two outputs, one of them what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        a, b = x if isinstance(x, tuple) else (x, x)
        return self.linear(a) + b, a


class Pick(nn.Module):
    def forward(self, x):
        return x[0]


def models() -> dict[str, tuple[nn.Sequential, torch.Tensor]]:
    """Models whose graphs keep inputs, outputs, both, neither, masks, statistics, indices."""
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    images = torch.randn(2, 3, 8, 8)
    conv = nn.Conv2d(3, 4, 3, padding=1)
    return {
        "mlp": (
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)),
            x,
        ),
        "in-place": (
            nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 2)),
            x,
        ),
        "no linear": (
            nn.Sequential(nn.Sigmoid(), nn.Flatten(), nn.Identity(), nn.LogSoftmax(-1)),
            x,
        ),
        "images": (
            nn.Sequential(
                conv, nn.BatchNorm2d(4), nn.LeakyReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.5)
            ),
            images,
        ),
        "tuples": (nn.Sequential(Both(), Both(), Both(), Pick(), nn.Linear(6, 1)), x),
        "attention": (
            nn.Sequential(nn.TransformerEncoderLayer(6, 2, 8), nn.LayerNorm(6)),
            torch.randn(5, 2, 6),
        ),
        "tokens": (
            nn.Sequential(nn.Embedding(9, 6), nn.GELU(), nn.Linear(6, 9)),
            torch.randint(9, (4, 3)),
        ),
    }


NAMES = list(models())


def kept(model: nn.Module, x: torch.Tensor) -> int:
    """The oracle: bytes of the storages that autograd saves in a real forward, of the input and of
    the output."""
    stage, params, state = fp.from_module(model)
    own = {one.untyped_storage()._cdata for one in fp.leaves((params, state))}
    held: list[torch.Tensor] = []

    def pack(tensor):
        held.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = stage(params, x, state=state, train=True)
    y = y.y if isinstance(y, fp.Out) else y
    found = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in (*held, x, y)}
    return sum(size for key, size in found.items() if key not in own)


@pytest.mark.parametrize("name", NAMES)
def test_activations_are_what_autograd_keeps(name):
    """The residual of the whole model is, to the byte, what a real forward saves."""
    model, x = models()[name]
    assert kept(model, x.clone()) == memory(model, x).total.activations


@pytest.mark.parametrize("name", NAMES)
def test_layers_join_to_stages(name):
    """What `group` makes of layers is what measuring the stages gives."""
    model, x = models()[name]
    layers = memory(model, x)
    for cut in range(1, len(model)):
        sizes = [cut, len(model) - cut]
        split = fp.split(model, balance=sizes)
        stages = memory(split, x)
        for expected, found in zip(stages, layers.group(sizes), strict=True):
            for key in (
                "parameters",
                "buffers",
                "gradients",
                "optimizer",
                "activations",
                "input",
                "output",
            ):
                assert getattr(expected, key) == getattr(found, key), (key, sizes)
            # Of layers, the most of each is taken as if it came at the worst moment: a bound, a
            # close one.
            border = max(layer.input + layer.output for layer in layers)
            assert abs(expected.forward - found.forward) <= border
            assert expected.backward <= found.backward <= expected.backward + border


def test_layers_by_hand():
    """Linear keeps its input, ReLU its output; dropout on the CPU a mask of floats; bytes of
    float32."""
    model = nn.Sequential(
        nn.Linear(10, 20), nn.ReLU(), nn.Dropout(0.1), nn.Linear(20, 5, bias=False)
    )
    rows = memory(model, torch.zeros(3, 10), optimizer="adamw")
    assert (
        [880, 0, 0, 400]
        == [layer.parameters for layer in rows]
        == [layer.gradients for layer in rows]
    )
    assert [1760, 0, 0, 800] == [layer.optimizer for layer in rows]
    assert [120, 240, 240, 240] == [layer.activations for layer in rows]
    assert [120, 240, 240, 240] == [layer.input for layer in rows]
    assert [240, 240, 240, 60] == [layer.output for layer in rows]
    assert 120 + 240 + 240 + 240 + 60 == rows.total.activations
    assert ["0", "1", "2", "3"] == [layer.name for layer in rows]
    # The first layer has no gradient to hand on: W is its whole backward, and waits with the
    # gradient of its output.
    assert [120 + 240, 0, 0, 240 + 60] == [layer.weight_residual for layer in rows]


def test_half_the_types_half_the_bytes():
    """Types are those of the model and of the example."""
    model = nn.Sequential(nn.Linear(10, 20), nn.GELU())
    whole, half = (
        memory(model, torch.zeros(3, 10)),
        memory(model.to(torch.bfloat16), torch.zeros(3, 10, dtype=torch.bfloat16)),
    )
    assert [layer.model for layer in whole] == [2 * layer.model for layer in half]
    assert whole.total.activations == 2 * half.total.activations


def test_frozen_parameters():
    """What is not trained has no gradient, no state, and keeps no input for its weights."""
    model = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 5))
    model[0].requires_grad_(False)
    rows = memory(model, torch.zeros(3, 10))
    assert (880, 0, 0, 0) == (
        rows[0].parameters,
        rows[0].gradients,
        rows[0].optimizer,
        rows[0].activations,
    )
    assert 240 == rows[1].activations
    assert (0, 0, 0) == (
        rows.total.gradients - 420,
        rows[0].backward,
        memory(model, torch.zeros(3, 10), trainable=False).total.gradients,
    )


def test_nothing_is_kept_in_evaluation():
    """train=False: parameters and what is alive in a forward, nothing else."""
    rows = memory(nn.Sequential(nn.Linear(10, 20), nn.Dropout()), torch.zeros(3, 10), train=False)
    assert (880, 0, 0, 0, 0) == tuple(
        getattr(rows.total, key)
        for key in ("parameters", "gradients", "optimizer", "activations", "backward")
    )
    assert (880 + 120 + 240,) == rows.group([2]).peak(S.fill_drain(1, 3, backward=False))
    assert 240 == rows[0].forward


def test_tied_parameters_count_once():
    """In one stage a tensor is one; each of several stages has its own."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    assert [64, 0, 0] == [layer.parameters for layer in memory(model, torch.zeros(1, 4))]
    assert [64, 64] == [
        layer.parameters for layer in memory(fp.split(model, balance=[2, 1]), torch.zeros(1, 4))
    ]


def test_nothing_is_touched():
    """Parameters, gradients, buffers, mode, the example, random generators, grad mode: all as
    before."""
    model = nn.Sequential(
        nn.ReLU(inplace=True), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
    ).eval()
    model[2].train()
    model[1].weight.grad = torch.ones(6, 6)
    x = torch.randn(4, 6)
    before = snapshot((dict(model.state_dict()), x, torch.get_rng_state()))
    modes = [layer.training for layer in model.modules()]
    expected = memory(model, x)
    with torch.no_grad():
        assert str(expected) == str(memory(model, x))
        assert not torch.is_grad_enabled()
    with torch.inference_mode():
        assert str(expected) == str(memory(model, x))
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            before, snapshot((dict(model.state_dict()), x, torch.get_rng_state())), strict=True
        )
    )
    assert modes == [layer.training for layer in model.modules()]
    assert torch.equal(model[1].weight.grad, torch.ones(6, 6))
    assert model[1].bias.grad is None


def test_stages_with_skips_feeds_and_state():
    """Stages are measured as they are; a skip is held where it is made and where it is taken."""

    @fp.stage(stash=["early"])
    def first(params, x):
        h = x * params
        return fp.Out(h.relu(), stash={"early": h})

    @fp.stage(pop=["early"], feeds=["mask"], state=True)
    def second(params, x, *, skips, feeds, state):
        return (x + skips["early"]) * params * feeds["mask"] + state

    x, w = torch.zeros(4, 6), torch.ones(6)
    rows = memory(
        [first, second],
        x,
        params=(w, w),
        state=((), torch.zeros(6)),
        feeds={"mask": torch.ones(4, 1)},
        optimizer=0,
    )
    assert ["first", "second"] == [layer.name for layer in rows]
    assert [0, 24] == [layer.buffers for layer in rows]
    # x, x * w (stashed), relu's output; then both of these, their sum, sum * w (for the mask has
    # none, w needs it), y.
    assert 96 * 3 == rows[0].activations
    assert [96, 192] == [layer.input for layer in rows]
    assert [192, 96] == [layer.output for layer in rows]
    joined = rows.group([2])[0]
    assert {} == joined.measured.stash == joined.measured.pops
    # The skip waits on the second device while the first is in its other forwards.
    one, many = (rows.peak(S.fill_drain(2, m))[1] for m in (1, 5))
    assert many > one


@pytest.mark.parametrize("name", ["mlp", "tuples"])
@pytest.mark.parametrize("recompute", [False, True])
def test_peak_is_what_a_run_holds(name, recompute):
    """On one device: the peak of a real run, storages counted as they come and go, is the predicted
    one."""
    model, x = models()[name]
    schedule = S.fill_drain(2, 3, num_devices=1)
    schedule = S.remat(schedule) if recompute else schedule
    split = fp.split(model, balance=[2, len(model) - 2])
    plan = fp.make_plan(split.stages, schedule, loss=lambda y, _: y.sum() / len(y), devices="cpu")
    batch = (x.repeat(3 * 16, 1), torch.zeros(3 * 16 * len(x)))
    live = Live()
    live.known(batch)
    with live:
        fp.run(plan, split.params, batch, executor="serial")
    predicted = memory(split, x.repeat(16, 1), optimizer="sgd").peak(schedule)[0]
    assert live.peak == pytest.approx(
        predicted - batch[0].nbytes, rel=0.01 if name == "mlp" else 0.1
    )  # inputs are views


def test_what_a_layer_keeps_for_itself_is_its_own():
    """A layer that hoards does not make the next ones look bigger."""
    hoard = []

    @fp.stage
    def hoards(params, x):
        hoard.append(x * 2)
        return x.sin()

    plain = fp.stage(lambda params, x: x * params, name="plain")
    w = torch.ones(6)
    alone, after = (
        memory(stages, torch.zeros(4, 6), params=(w,) * len(stages))
        for stages in ([plain], [hoards, plain])
    )
    assert alone[0].activations == after[1].activations == 2 * 96
    assert 96 * 3 == after[0].activations


def test_peaks_of_schedules():
    """1F1B holds fewer residuals than fill-drain, remat one and the inputs; a plan is as good as
    its schedule."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8)) for _ in range(4)))
    rows = memory(model, torch.zeros(16, 8), optimizer="sgd")
    model_bytes = rows[0].model
    drain, steady = (rows.peak(S.fill_drain(4, 8)), rows.peak(S.one_f_one_b(4, 8)))
    per = rows.group([1, 1, 1, 1])[0].activations
    # At its peak, the first backward, fill-drain has no sums of gradients yet.
    assert drain[0] - steady[0] == 4 * per - rows[0].gradients
    assert steady[3] < steady[0]
    saved = rows.peak(S.remat(S.fill_drain(4, 8)))
    assert saved[0] - model_bytes < per + 9 * 16 * 8 * 4 + rows[0].backward + 1
    stages = fp.split(model, 4).stages
    plan = fp.make_plan(stages, S.one_f_one_b(4, 8), loss=F.mse_loss)
    assert steady == rows.peak(plan)
    assert sum(rows.peak(S.fill_drain(4, 8, backward=False))) < sum(saved)


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adam": (torch.optim.Adam, {}),
    "amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "adamw": (torch.optim.AdamW, {}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "rmsprop, all": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "rprop": (torch.optim.Rprop, {}),
    "asgd": (torch.optim.ASGD, {}),
    "adafactor": (torch.optim.Adafactor, {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_table(name):
    """The table tells what each optimizer of torch really keeps, step counts aside."""
    kind, options = OPTIMIZERS[name]
    params = [
        torch.ones(6, 4, requires_grad=True),
        torch.ones(5, requires_grad=True),
        torch.ones(3, 6, 4, requires_grad=True),
    ]
    optimizer = kind(params, lr=0.1, **options)
    for one in params:
        one.grad = torch.ones_like(one)
    optimizer.step()
    state = [value for one in optimizer.state.values() for value in one.values()]
    real = sum(one.numel() for one in state if isinstance(one, torch.Tensor) and one.dim())
    assert real == sum(optimizer_state(optimizer)[1](tuple(one.shape)) for one in params)
    if "," not in name:
        assert real == sum(optimizer_state(name)[1](tuple(one.shape)) for one in params)
    if not options:
        assert real == sum(optimizer_state(kind)[1](tuple(one.shape)) for one in params)


def test_refusals():
    """What is wrong, where, and what would be right."""
    model, x = nn.Sequential(nn.Linear(4, 8), nn.Linear(9, 2)), torch.zeros(3, 4)
    with pytest.raises(fp.StageError, match="reduction dim") as found:
        memory(model, x)
    assert (1, "1") == (found.value.funcpipe.stage, found.value.funcpipe.name)
    assert "it got x: float32 [3, 8]" in found.value.__notes__
    right = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    for optimizer, said in (
        ("adamwx", "did you mean 'adamw'"),
        (torch.optim.LBFGS, "optimizer=2"),
        (-1, "the table has|The table has"),
    ):
        with pytest.raises(fp.PlanError, match=said):
            memory(right, x, optimizer=optimizer)
    rows = memory(right, x)
    with pytest.raises(fp.PlanError, match=r"sum to the 2 layers; got \[1, 2\]"):
        rows.group([1, 2])
    with pytest.raises(fp.PlanError, match=r"memory\.group\(sizes\)"):
        rows.peak(S.fill_drain(3, 2))
    with pytest.raises(fp.PlanError, match="fp.split"):
        memory(nn.Linear(2, 2), x)
    with pytest.raises(fp.PlanError, match="the list is empty"):
        memory([], x, params=())
    with pytest.raises(fp.PlanError, match="params= is missing"):
        memory([fp.stage(lambda p, x: x)], x)
    if not torch.cuda.is_available():
        with pytest.raises(fp.PlacementError, match="torch does not see this device"):
            memory(right, x, device="cuda")


# -- published
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", unet.PUBLISHED)
def test_unet_parameters(name):
    """Parameters of torchgpipe's U-Nets, to the last published place; nothing is allocated."""
    row = unet.PUBLISHED[name]
    with torch.device("meta"):
        model = unet.unet(row.convs, row.channels)
    assert row.parameters == round(sum(one.numel() for one in model.parameters()) / 1e6, 1)
    assert sum(row.balance) == len(model) == 44 * row.convs + 21


@pytest.mark.parametrize("name", amoebanet.PUBLISHED)
def test_amoebanet_parameters(name):
    """Parameters and model memory of torchgpipe's AmoebaNets: weights, gradients, one average of
    RMSprop."""
    row = amoebanet.PUBLISHED[name]
    with torch.device("meta"):
        model = amoebanet.amoebanet(row.num_layers, row.filters)
    numbers = sum(one.numel() for one in model.parameters())
    assert row.parameters == round(numbers / 1e6, 1)
    per = 2 + optimizer_state(torch.optim.RMSprop)[1]((1,))
    assert row.model == round(4 * per * numbers / GiB, 2)
    assert sum(row.balance) == len(model) == row.num_layers + 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ratio"), [("baseline", 0.97), ("pipeline-2", 0.90), ("pipeline-8", 0.57)]
)
def test_unet_peaks(name, ratio):
    """What is alive, as a part of what was reserved; test_reserved.py comes to that."""
    row = unet.PUBLISHED[name]
    with torch.device("meta"):
        model = unet.unet(row.convs, row.channels)
    images = torch.empty(max(1, 32 // row.chunks), 3, 192, 192)
    stages = memory(model, images, optimizer="sgd").group(row.balance)
    schedule = (
        unet.except_last(len(row.balance), row.chunks) if row.chunks > 1 else S.fill_drain(1, 1)
    )
    assert 8 * row.parameters * 1e6 == pytest.approx(stages.total.model, abs=0.01 * GiB)
    published = row.total - stages.total.model / GiB
    assert ratio == pytest.approx(
        (sum(stages.peak(schedule)) - stages.total.model) / GiB / published, abs=0.02
    )


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ratio"), [("pipeline-2", 0.50), ("pipeline-8", 0.64)])
def test_amoebanet_peaks(name, ratio):
    """What is alive, as a part of what was reserved; test_reserved.py comes to that."""
    row = amoebanet.PUBLISHED[name]
    with torch.device("meta"):
        model = amoebanet.amoebanet(row.num_layers, row.filters)
    stages = memory(model, torch.empty(1, 3, 224, 224), optimizer=torch.optim.RMSprop).group(
        row.balance
    )
    peaks = stages.peak(unet.except_last(len(row.balance), 128))
    assert ratio == pytest.approx(
        (sum(peaks) - stages.total.model) / GiB / row.activations, abs=0.02
    )


def test_garbage_does_not_count():
    """Values that only a reference cycle keeps count the same, whenever Python collects them."""

    class Cyclic(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            box = [x * 2]
            box.append(box)
            return torch.tanh(self.linear(x))

    model = nn.Sequential(Cyclic(), Cyclic())
    found = []
    threshold = gc.get_threshold()
    try:
        for first in (1, 50_000):
            gc.set_threshold(first)
            found.append(str(fp.models.memory(model, torch.randn(4, 8))))
    finally:
        gc.set_threshold(*threshold)
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)])
    found.append(str(fp.models.memory(plain, torch.randn(4, 8))))
    assert found[0] == found[1]
    assert found[0].split("\n")[1:] == found[2].split("\n")[1:]
