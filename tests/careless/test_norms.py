"""Batch norm that is not nn.BatchNorm's own forward, and other writes into buffers: exact, or
refused by name."""

import copy
import pickle

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import funcpipe as fp
from funcpipe.testing import check_stage

ROWS, COUNT = 10, 4


def features(dtype=torch.float64):
    return torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0)).to(dtype) * 3 + 2


def square(y, target):
    return y.square().mean()


# -- layers as people write them
# -------------------------------------------------------------------------------


class Copied(nn.BatchNorm1d):
    """Torch's forward, copied and extended, as timm does."""

    def forward(self, x):
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        x = F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            factor,
            self.eps,
        )
        return F.leaky_relu(x)


class Around(nn.BatchNorm1d):
    """Something before and after torch's forward."""

    def forward(self, x):
        return super().forward(x * 2) + x


class Uncounted(nn.BatchNorm1d):
    """Torch's lower function, a momentum of its own, no counter."""

    def forward(self, x):
        return torch.batch_norm(
            x,
            self.weight,
            self.bias,
            self.running_mean,
            self.running_var,
            self.training,
            0.3,
            self.eps,
            True,
        )


class Rebinds(nn.BatchNorm1d):
    """Counts by a new tensor."""

    def forward(self, x):
        self.num_batches_tracked = self.num_batches_tracked + 1
        return F.batch_norm(
            input=x,
            running_mean=self.running_mean,
            running_var=self.running_var,
            training=self.training,
            momentum=0.2,
        )


class Adds(nn.BatchNorm1d):
    """Counts as older versions of torch did, and reads its statistics."""

    def forward(self, x):
        self.num_batches_tracked += 1
        assert not self.num_batches_tracked.dim()
        y = F.batch_norm(
            x, self.running_mean, self.running_var, training=self.training, momentum=0.2
        )
        return y + 0 * self.running_mean + (self.running_var - self.running_var).sum()


class Lends(nn.Module):
    """The layer is never called; its buffers are, with another momentum than its own."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        norm = self.norm
        return F.batch_norm(
            x, norm.running_mean, norm.running_var, norm.weight, norm.bias, self.training, 0.02
        )


class Twice(nn.Module):
    """The same layer at two places of one forward: one update, by all that it saw."""

    def __init__(self):
        super().__init__()
        self.norm = Uncounted(3)

    def forward(self, x):
        return self.norm(torch.cat([x, x + 1]))[: len(x)]


class Recomputed(nn.Module):
    """Runs its layer again in the backward."""

    def __init__(self):
        super().__init__()
        self.norm = Copied(3)

    def forward(self, x):
        return checkpoint(self.norm, x, use_reentrant=False)


LAYERS = {
    "copied": lambda: Copied(3),
    "copied, averaging": lambda: Copied(3, momentum=None),
    "super": lambda: Around(3, momentum=0.4),
    "super, averaging": lambda: Around(3, momentum=None),
    "uncounted": lambda: Uncounted(3),
    "rebinds": lambda: Rebinds(3, affine=False),
    "adds": lambda: Adds(3),
    "lends": Lends,
    "sync": lambda: nn.SyncBatchNorm(3),
    "sync, averaging": lambda: nn.SyncBatchNorm(3, momentum=None),
    "twice": Twice,
}


def model(layer):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 3), layer(), nn.Linear(3, 2)).double()


def after(plain, batches=3):
    """The buffers of the plain model after some batches, by name."""
    plain = copy.deepcopy(plain)
    for number in range(batches):
        plain(features() + number)
    return dict(plain.named_buffers())


def trained(plan, params, state, runner=fp.run, batches=3, **options):
    for number in range(batches):
        state = runner(plan, params, (features() + number, None), state=state, **options).state
    return {name: value for tree in state for name, value in (tree or {}).items()}


def plan_of(*stages, remat=False, count=COUNT, **options):
    schedule = fp.schedules.one_f_one_b(len(stages), count)
    schedule = fp.schedules.remat(schedule) if remat else schedule
    return fp.make_plan(stages, schedule, loss=square, devices="cpu", **options)


def forwards_of(stage):
    schedule = fp.schedules.fill_drain(1, COUNT, backward=False)
    return fp.make_plan([stage], schedule, devices="cpu")


def close(found, wanted):
    for name, value in wanted.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-10, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}"
        )


# -- deferred exactly
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [*LAYERS, "recomputed"])
def test_a_layer_with_a_forward_of_its_own_is_deferred(layer):
    """from_module and a cut Sequential, remat, both executors, the plain loop: as the model by
    whole, uneven batches."""
    plain = model({**LAYERS, "recomputed": Recomputed}[layer])
    made = fp.split(plain, 2)
    plan = plan_of(*made.stages, remat=True)
    wanted = after(plain)
    for options in ({"executor": "serial"}, {"executor": "threads"}, {"runner": fp.run_sequential}):
        close(trained(plan, made.params, made.state, **options), wanted)
    whole, params, state = fp.from_module(plain)
    one = plan_of(pickle.loads(pickle.dumps(whole)))
    close(trained(one, (params,), (state,)), wanted)
    assert all(map(torch.equal, after(plain, 0).values(), dict(plain.named_buffers()).values()))


@pytest.mark.parametrize("layer", ["copied", "rebinds", "lends"])
def test_compiled_they_are_deferred_too(layer):
    plain = model(LAYERS[layer])
    whole, params, state = fp.from_module(plain)
    plan = plan_of(fp.compile_stage(whole))
    close(trained(plan, (params,), (state,)), after(plain))


@pytest.mark.parametrize("deferred", [True, False])
@pytest.mark.parametrize("layer", ["copied", "copied, averaging", "super", "rebinds", "sync"])
def test_in_a_pipe(layer, deferred):
    """Deferred: as the whole batch; else as the layer itself, microbatch after microbatch."""
    plain = model(LAYERS[layer])
    pipe = fp.Pipe(
        copy.deepcopy(plain),
        chunks=COUNT,
        deferred_batch_norm=deferred,
        balance=[1, 2],
        devices="cpu",
    )
    for number in range(3):
        pipe(features() + number).sum().backward()
        for part in [features()] if deferred else features().tensor_split(COUNT):
            plain(part + number)
    close(dict(pipe.named_buffers()), dict(plain.named_buffers()))


class Model(nn.Module):
    """No Sequential, so that it is traced."""

    def __init__(self, layer):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 3), layer(), nn.Linear(3, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


class Given(nn.Module):
    """torch.nn.functional.batch_norm on buffers of any name."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))
        self.register_buffer("spread", torch.ones(3))

    def forward(self, x):
        return F.batch_norm(x, self.centre, self.spread, training=self.training, momentum=0.3)


class InRegion(nn.Module):
    """Under no_grad, in a graph of its own."""

    def __init__(self):
        super().__init__()
        self.norm = Copied(3)

    def forward(self, x):
        with torch.no_grad():
            y = self.norm(x)
        return x + y


TRACED = {
    **{
        name: LAYERS[name]
        for name in ("copied", "copied, averaging", "super", "uncounted", "lends", "sync")
    },
    "given": Given,
    "region": InRegion,
}


@pytest.mark.parametrize("layer", TRACED)
def test_a_traced_batch_norm_is_deferred_whoever_calls_it(layer):
    torch.manual_seed(1)
    plain = Model(TRACED[layer]).double()
    made = fp.split(plain, at=["last"], example=features())
    plan = plan_of(*made.stages, remat=True)
    wanted = {
        name: value for name, value in after(plain).items() if name in made.state[0] or value.any()
    }
    close(trained(plan, made.params, made.state), wanted)
    close(trained(plan, made.params, made.state, runner=fp.run_sequential), wanted)


class Returns(nn.BatchNorm1d):
    """Hands out its buffers."""

    def forward(self, x):
        y = super().forward(x)
        return {"y": y, "mean": self.running_mean, "batches": [self.num_batches_tracked]}


@pytest.mark.parametrize("train", [True, False])
def test_a_returned_buffer_is_a_plain_tensor(train):
    """With the numbers before the batch, and the batches as the forward counted them."""
    part, params, state = fp.from_module(Returns(3).double())
    y = part.fn(params, features(), state=state, train=train)
    out = y.y if train else y
    assert type(out["mean"]) is type(out["batches"][0]) is torch.Tensor
    assert torch.equal(out["mean"], state["running_mean"])
    assert int(train) == int(out["batches"][0])
    assert 0 == int(state["num_batches_tracked"])


def test_a_training_layer_in_evaluation_defers_nothing():
    """layer.eval() inside a training model: running statistics are used and kept, whatever forward
    it has."""
    plain = model(LAYERS["copied"])
    plain[1].eval()
    plain[1].running_mean += 1
    made = fp.split(plain, 2)
    plan = plan_of(*made.stages, outputs=True)
    result = fp.run(plan, made.params, (features(), None), state=made.state)
    torch.testing.assert_close(result.outputs, plain(features()), rtol=1e-12, atol=1e-12)
    close(
        {name: value for tree in result.state for name, value in (tree or {}).items()},
        dict(plain.named_buffers()),
    )


class Insists(nn.BatchNorm1d):
    """Statistics of the batch in any mode, as meta-learning wants them."""

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, training=True)


def test_a_layer_that_insists_on_the_batch_in_evaluation():
    """Its model would update it in evaluation too: so does a plan that trains; one that does not
    keeps the state."""
    plain = model(lambda: Insists(3)).eval()
    part, params, state = fp.from_module(plain)
    plan = plan_of(part)
    assert part.evaluation
    close(trained(plan, (params,), (state,)), after(plain))
    evaluate = forwards_of(part)
    assert fp.run(evaluate, (params,), features(), state=(state,)).state[0] is state


def test_one_value_per_channel_names_the_layer():
    part, params, state = fp.from_module(model(LAYERS["copied"]))
    with pytest.raises(
        fp.BatchError, match=r"layer '1': batch norm in training needs more than one value"
    ):
        fp.run(plan_of(part, count=ROWS), (params,), (features(), None), state=(state,))


# -- refused by name
# -------------------------------------------------------------------------------


class Hidden(nn.Module):
    """Writes past torch's count of versions."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(3))

    def forward(self, x):
        self.average.data.lerp_(x.detach().mean(0), 0.1)
        return x - self.average


class ByHand(nn.BatchNorm1d):
    def __init__(self):
        super().__init__(3)

    def forward(self, x):
        self.running_mean.lerp_(x.detach().mean(0), self.momentum)
        return x - x.mean(0)


class Swapped(ByHand):
    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_mean, training=self.training)


REFUSED = {
    "given": (Given, ["centre", "spread"]),
    "instance norm": (
        lambda: nn.InstanceNorm1d(3, track_running_stats=True),
        ["running_mean", "running_var"],
    ),
    "hidden": (Hidden, ["average"]),
    "by hand": (ByHand, ["running_mean"]),
    "swapped": (Swapped, ["running_mean", "running_var"]),
}


@pytest.mark.parametrize(
    ("kind", "compiled"),
    [*((kind, False) for kind in REFUSED), ("hidden", True), ("by hand", True)],
)
def test_what_cannot_be_deferred_is_refused_before_a_gradient(kind, compiled):
    """In runs, the plain loop, check_stage and a Pipe; the message says which buffers, and what to
    do."""
    layer, names = REFUSED[kind]
    images = [nn.Unflatten(1, (3, 1)), nn.Linear(1, 4)] if kind == "instance norm" else []
    plain = nn.Sequential(*images, layer()).double()
    part, params, state = fp.from_module(plain)
    part = fp.compile_stage(part) if compiled else part
    plan = plan_of(part)
    where = len(plain) - 1
    listed = str([f"{where}.{name}" for name in names])[1:-1]
    for call in (
        lambda: fp.run(plan, (params,), (features(), None), state=(state,)),
        lambda: fp.run_sequential(plan, (params,), (features(), None), state=(state,)),
        lambda: fp.Pipe(plain, chunks=COUNT, devices="cpu")(features()),
    ):
        with pytest.raises(fp.PlanError, match="writes into its buffers") as caught:
            call()
        assert listed in str(caught.value)
        assert "fp.models.batch_norm" in str(caught.value)
        assert "evaluation mode" in str(caught.value)
    if not compiled:
        with pytest.raises(AssertionError, match="writes into its buffers"):
            check_stage(part, params, features(), state=state)
    part, params, state = fp.from_module(plain.eval())
    plan = plan_of(part)
    # The others write in evaluation too, or compute without parameters.
    if kind in ("given", "instance norm"):
        assert fp.run(plan, (params,), (features(), None), state=(state,)).loss.isfinite()


def test_a_refused_norm_has_written_nothing():
    part, params, state = fp.from_module(Given().double())
    before = {name: one.clone() for name, one in state.items()}
    plan = plan_of(part)
    with pytest.raises(fp.PlanError, match="writes into its buffers"):
        fp.run(plan, (params,), (features(), None), state=(state,))
    assert all(map(torch.equal, before.values(), state.values()))


def test_a_forward_is_looked_at_once(monkeypatch):
    """Once per stage and mode, and never where there are no buffers."""
    from funcpipe._src.models import module

    looks = []
    real = module.looked_at
    monkeypatch.setattr(module, "looked_at", lambda *args: (looks.append(args[2]), real(*args))[1])
    for layer, count in ((LAYERS["copied"], 1), (nn.Identity, 0)):
        looks.clear()
        whole, params, state = fp.from_module(model(layer))
        plan = plan_of(whole)
        trained(plan, (params,), (state,) if state else None, batches=2)
        assert count == len(looks)
        evaluate = forwards_of(whole)
        for _ in range(2):
            fp.run(evaluate, (params,), features(), state=(state,) if state else None)
        assert 2 * count == len(looks)


class Slices(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("centre", torch.zeros(6))
        self.register_buffer("spread", torch.ones(6))

    def forward(self, x):
        return F.batch_norm(x, self.centre[:3], self.spread[:3], training=self.training)


class Decays(Given):
    def forward(self, x):
        y = super().forward(x)
        self.centre.mul_(0.5)
        return y


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (Slices, "batch norm updates a part of 'norm.centre'"),
        (Decays, "writes into 'norm.centre', which a batch norm"),
    ],
)
def test_a_trace_that_cannot_be_deferred_is_refused(layer, text):
    with pytest.raises(fp.PlanError, match="not pure") as caught:
        fp.split(Model(layer).double(), at=["last"], example=features())
    assert text in str(caught.value)


# -- other buffers of a traced model
# -------------------------------------------------------------------------------


class Average(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.calls.add_(1)
        return x


@pytest.mark.parametrize("first", [True, False])
def test_averages_count_rows_of_uneven_microbatches(first):
    """10 rows in 4 microbatches of 3, 3, 2, 2, in the first stage and in a later one."""
    torch.manual_seed(1)
    plain = Model(Average).double()
    commit = {"norm.average": fp.models.mean_by_rows}
    made = fp.split(plain, at=["last" if first else "norm"], example=features(), commit=commit)
    plan = plan_of(*made.stages)
    close(trained(plan, made.params, made.state), after(plain))
