"""What goes wrong in and around a Pipe: errors that say where and how to mend, layers that fail,
placement, moves."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.nn as nn
from common import same
from pipe.sequentials import assert_close, data, every_checkpoint, grads

import funcpipe as fp
from funcpipe._src.pipe.layout import Layout, lay_out
from funcpipe._src.pipe.stages import Stages


def linears(count=3):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(count)]).double()


class Count:
    """How often each layer ran; copies of a module share it."""

    def __init__(self):
        self.forwards, self.backwards = 0, 0

    def __deepcopy__(self, memo):
        return self


class Fail(nn.Module):
    """Raises in the forward of one call, or in every backward."""

    def __init__(self, error, *, at=0, backward=False):
        super().__init__()
        self.error, self.at, self.back, self.count = error, at, backward, Count()

    def forward(self, x):
        self.count.forwards += 1
        if not self.back and self.count.forwards == self.at + 1:
            raise self.error
        return Boom.apply(x, self) if self.back else x


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.layer.count.backwards += 1
        raise ctx.layer.error


# -- layers that fail
# -------------------------------------------------------------------------------


class Mine(Exception):
    pass


@pytest.mark.parametrize(
    "error", [Mine("x"), SystemExit(3), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
def test_h1_h2_h6_a_failing_layer_reaches_the_caller(error):
    pipe = fp.Pipe(
        nn.Sequential(nn.Linear(4, 4).double(), Fail(error, at=1)), 3, balance=[1, 1], devices="cpu"
    )
    with pytest.raises(type(error)) as caught:
        pipe(data())
    where = caught.value.funcpipe
    assert (where.stage, where.microbatch, where.action) == (1, 1, "1F1")
    pipe(data()).sum().backward()  # the next call works


def test_h3_early_stop():
    """The stage before the failing one does not run on."""
    failed = threading.Event()

    class Slow(nn.Module):
        def __init__(self):
            super().__init__()
            self.count = Count()

        def forward(self, x):
            self.count.forwards += 1
            if self.count.forwards > 1:
                failed.wait(60)
                time.sleep(0.01)  # 2 s in all for the news to arrive
            return x

    class Raise(nn.Module):
        def forward(self, x):
            failed.set()
            raise Mine("x")

    slow = Slow()
    with pytest.raises(Mine):
        fp.Pipe(nn.Sequential(slow, Raise()), 200, balance=[1, 1], devices="cpu")(data(200))
    assert slow.count.forwards < 200


@pytest.mark.parametrize("checkpoint", ["always", "never"])
@pytest.mark.parametrize("error", [Mine("x"), SystemExit(3)], ids=lambda e: type(e).__name__)
def test_h6_a_failing_backward(error, checkpoint):
    layers = (nn.Linear(4, 4).double(), Fail(error, backward=True), nn.Linear(4, 4).double())
    pipe = fp.Pipe(nn.Sequential(*layers), 3, checkpoint, balance=[1, 2], devices="cpu")
    y = pipe(data())
    with pytest.raises(type(error)) as caught:
        y.sum().backward()
    assert (caught.value.funcpipe.stage, caught.value.funcpipe.action[:2]) == (1, "1B")
    assert layers[0].weight.grad is None
    with pytest.raises(fp.FuncpipeError, match="has already run"):
        y.sum().backward()


def test_h6_a_failing_recomputation():
    failing = Fail(Mine("again"), at=3)
    pipe = fp.Pipe(
        nn.Sequential(nn.Linear(4, 4).double(), failing), 3, "always", balance=[1, 1], devices="cpu"
    )
    y = pipe(data())
    with pytest.raises(Mine) as caught:
        y.sum().backward()
    assert caught.value.funcpipe.action == "1R0"


def test_h5_grad_mode_and_autocast_reach_the_stages():
    seen = []

    class See(nn.Module):
        def forward(self, x):
            seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
            return x

    pipe = fp.Pipe(nn.Sequential(nn.Linear(4, 4), See(), See()), 1, balance=[2, 1], devices="cpu")
    x = torch.randn(4, 4)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y = pipe(x)
    assert y.dtype is torch.bfloat16
    pipe(x)
    assert seen == [(False, True)] * 2 + [(True, False)] * 2


# -- arguments
# -------------------------------------------------------------------------------


class Own(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + 1


class OwnCall(nn.Sequential):
    def __call__(self, x):
        return super().__call__(x) + 1


def with_a_parameter():
    model = linears()
    model.register_parameter("scale", nn.Parameter(torch.ones(1)))
    return model


def hooked():
    model = linears()
    model.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Linear(1, 1), r"must be an nn\.Sequential.*got a Linear.*fp\.split"),
        (Own(nn.Linear(1, 1)), "Own has a forward of its own"),
        (OwnCall(nn.Linear(1, 1)), "OwnCall has a __call__ of its own"),
        (hooked(), "has hooks of its own"),
        (with_a_parameter(), r"has tensors of its own \(scale\)"),
        (nn.Sequential(nn.LazyLinear(3)), "not initialised yet"),
    ],
    ids=["no-sequential", "own-forward", "own-call", "hooks", "tensors", "lazy"],
)
def test_modules_that_are_refused(module, words):
    with pytest.raises(fp.PlanError, match=words):
        fp.Pipe(module, devices="cpu")


def test_d7_every_bad_argument_is_listed():
    with pytest.raises(fp.PlanError) as caught:
        fp.Pipe(nn.Linear(1, 1), 0, "sometimes")
    text = str(caught.value)
    assert text.count("  * ") == 3
    assert "checkpoint is not one of 'always', 'except_last', or 'never'; got 'sometimes'" in text


@pytest.mark.parametrize(
    ("balance", "words"),
    [
        ([1, 1], r"module: 3, sum of balance: 2\); by bytes of parameters: balance=\[2, 1\]"),
        ([2, 2], r"module: 3, sum of balance: 4"),
        ([1, 0, 2], r"must be positive.*balance=\[1, 1, 1\]"),
        ([-1, 4], "must be positive"),
        ([], r"balance has no stage; .*balance=\[3\]"),
        (3, r"balance must be a sequence.*balance=\[2, 1\]"),
        ([1.5, 1.5], "balance must be a sequence"),
    ],
)
def test_a_wrong_balance_shows_the_right_one(balance, words):
    with pytest.raises(fp.PlanError, match=words):
        fp.Pipe(linears(), balance=balance, devices="cpu")


def test_i2_devices_too_few_and_too_many():
    with pytest.raises(
        fp.PlacementError, match=r"too few devices .*\(devices: 1, stages: 2\).*balance=\[3\]"
    ):
        fp.Pipe(linears(), balance=[1, 2], devices=["cpu"])
    assert len(fp.Pipe(linears(), balance=[1, 2], devices=["cpu"] * 5).devices) == 2
    assert len(fp.Pipe(linears(), devices=["cpu"] * 5).devices) == 3
    assert fp.Pipe(linears(4), devices="cpu").balance == (2, 2)


def test_bad_devices_are_all_listed():
    with pytest.raises(fp.PlacementError) as caught:
        fp.Pipe(linears(), devices=["cuda:99", "nowhere", "meta", "cpu"])
    assert str(caught.value).count("  * ") == 3
    with pytest.raises(fp.PlacementError, match="devices is empty"):
        fp.Pipe(linears(), devices=[])
    with pytest.raises(fp.PlacementError, match="a sequence"):
        fp.Pipe(linears(), devices=1.5)


# -- placement: two devices without two devices
# -------------------------------------------------------------------------------


class Faraway(torch.Tensor):
    """A tensor that says it lies elsewhere."""

    @property
    def device(self):
        return self.where


def at(where, *layers):
    for layer in layers:
        for name, param in layer.named_parameters():
            fake = nn.Parameter(param.detach().as_subclass(Faraway), requires_grad=False)
            fake.where = torch.device(where)
            setattr(layer, name, fake)
    return layers


def test_i1_i3_cuts_where_the_device_changes():
    a, b, c, d = (nn.Linear(2, 2) for _ in range(4))
    at("cuda:0", a, b)
    at("cuda:1", c)
    at("cuda:0", d)
    layers = [nn.ReLU(), a, b, nn.ReLU(), c, nn.ReLU(), d]
    named = [(str(i), layer) for i, layer in enumerate(layers)]
    found = lay_out(named, None, None)
    assert found.balance == (4, 2, 1)
    assert [str(device) for device in found.devices] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [str(one) for one in lay_out(named, [4, 2, 1], None).devices] == [
        "cuda:0",
        "cuda:1",
        "cuda:0",
    ]
    with pytest.raises(fp.PlacementError, match="stage 0 has layers on cuda:0 and cuda:1"):
        lay_out(named, [5, 2], None)
    assert lay_out(named, [5, 2], ["cpu", "cpu"]).balance == (5, 2)


def test_i1_a_layer_on_two_devices_is_refused():
    (a,), (b,) = at("cuda:0", nn.Linear(2, 2)), at("cuda:1", nn.Linear(2, 2))
    layers = [("0", nn.Sequential(a, b)), ("1", nn.Linear(2, 2))]
    with pytest.raises(fp.PlacementError, match="layer '0' is on cuda:0 and cuda:1"):
        lay_out(layers, None, None)


def test_layers_on_the_meta_device_are_refused():
    with pytest.raises(fp.PlacementError, match=r"layer '0' is on the meta device.*to_empty"):
        fp.Pipe(nn.Sequential(nn.Linear(2, 2, device="meta")))


def test_without_devices_there_are_two_lanes():
    pipe = fp.Pipe(linears(4))
    count = torch.cuda.device_count() or 2
    assert len(pipe.devices) == min(count, 4)


def test_a_tensor_of_stages_on_two_devices_is_copied_in_every_call():
    """It lives where it is used first; the meta device stands for another one."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    made = Stages(
        model, Layout((1, 1), (torch.device("cpu"), torch.device("meta"))), deferred=False
    )
    params, _ = made.gather()
    assert params[0]["0.weight"] is model[0].weight
    assert params[1]["1.weight"].is_meta
    assert made.home == [(0, "0.weight")]
    assert made.ties == (((0, "0.weight"), (1, "1.weight")),)
    model[1].weight = nn.Parameter(torch.ones(4, 4))
    made = Stages(model, made.layout, deferred=False)
    with pytest.raises(fp.PlacementError, match=r"1\.weight is on cpu, but stage 1 runs on meta"):
        made.gather()


# -- tied and repeated layers
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("balance", [[4], [1, 2, 1]], ids=str)
@every_checkpoint
def test_i4_tied_parameters_and_repeated_layers(balance, checkpoint):
    def build():
        model = linears(4)
        model[2] = model[0]
        model[3].weight = model[1].weight
        return model

    model, tied = build(), build()
    pipe = fp.Pipe(tied, 3, checkpoint, balance=balance, devices="cpu")
    assert list(pipe.state_dict()) == list(model.state_dict())
    assert len(list(pipe.parameters())) == len(list(model.parameters())) == 5
    for one in (model, pipe):
        one(data()).square().sum().backward()
    assert_close(grads(model), grads(pipe))
    assert pipe[2] is pipe[0]


def test_copies_of_what_is_tied_are_trained_with_it(monkeypatch):
    """A stage on another device computes with a copy; here every tensor of the second one is
    elsewhere."""
    models = [linears(2) for _ in range(2)]
    for model in models:
        model[1].weight, model[1].bias = model[0].weight, model[0].bias
    monkeypatch.setattr(
        "funcpipe._src.pipe.stages.same_device", lambda lies, wanted: wanted.index != 1
    )
    pipe = fp.Pipe(models[1], 2, balance=[1, 1], devices=["cpu", "cpu:1"])
    for model in (models[0], pipe):
        model(data()).square().sum().backward()
    assert_close(grads(models[0]), grads(pipe))


def test_tying_after_wrapping():
    pipe = fp.Pipe(linears(2), 2, devices="cpu")
    pipe(data())
    pipe[1].weight = pipe[0].weight
    pipe(data()).sum().backward()
    model = linears(2)
    model[1].weight = model[0].weight
    model(data()).sum().backward()
    torch.testing.assert_close(model[0].weight.grad, pipe[0].weight.grad, rtol=1e-10, atol=1e-12)


def test_shared_buffers():
    class Table(nn.Module):
        def __init__(self, table):
            super().__init__()
            self.register_buffer("table", table, persistent=False)

        def forward(self, x):
            return x * self.table

    table = torch.arange(4.0, dtype=torch.float64)
    pipe = fp.Pipe(nn.Sequential(Table(table), Table(table)), 2, devices="cpu")
    assert same(pipe(data()), data() * table * table)
    table.add_(1)  # read in every call
    assert same(pipe(data()), data() * table * table)


# -- moves
# -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "move",
    [
        lambda pipe: pipe.to("cpu"),
        lambda pipe: pipe.to(torch.device("cuda", 0), torch.float32),
        lambda pipe: pipe.to(device="cpu"),
        lambda pipe: pipe.to(torch.ones(1)),
        lambda pipe: pipe.cuda(),
        lambda pipe: pipe.cuda(0),
        lambda pipe: pipe.cpu(),
        lambda pipe: pipe.to_empty(device="meta"),
        lambda pipe: nn.ModuleList([pipe]).to("meta"),
    ],
)
def test_moves_are_denied(move):
    pipe = fp.Pipe(linears(), devices="cpu")
    for kind in (TypeError, fp.PlacementError):
        with pytest.raises(
            kind, match=r"cannot be moved, .*; choose the devices when you make the Pipe"
        ):
            move(pipe)
    assert all(
        param.device.type == "cpu" and param.dtype is torch.float64 for param in pipe.parameters()
    )


def test_dtypes_and_moves_to_where_it_is_are_not():
    pipe = fp.Pipe(linears(), devices="cpu")
    weight = pipe[0].weight
    assert pipe.half() is pipe
    assert pipe.to(torch.float32)[0].weight is weight
    assert weight.dtype is torch.float32
    nn.ModuleList([pipe]).to("cpu", torch.float64)
    assert weight.dtype is torch.float64


def test_layers_that_were_moved_are_noticed():
    pipe = fp.Pipe(linears(), devices="cpu")
    pipe[1].to("meta")
    with pytest.raises(fp.PlacementError, match=r"1\.weight is on meta, but stage \d runs on cpu"):
        pipe(data())


def test_a_buffer_write_names_the_layer():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            return x

    with pytest.raises(fp.PlanError, match=r"writes into its buffers \['0\.count'\]"):
        fp.Pipe(nn.Sequential(Writes()), 2, devices="cpu")(data())
