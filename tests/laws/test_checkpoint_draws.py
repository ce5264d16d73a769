"""Law 4 in ``torch.utils.checkpoint``: a recomputation repeats the draws of its forward, so the
gradients are bit-identical to those of the same stage without checkpoint."""

import functools

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import EXECUTORS, assert_same_result, cpu_plan, same, schedules
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import funcpipe as fp


def drop(z, weight):
    return F.dropout(torch.tanh(F.linear(z, weight)), 0.5)


def twice(z, weight):
    return drop(drop(z, weight), weight)


def noisy_end(z, weight):
    """Torch's recomputation ends early, before the last draw."""
    return drop(z, weight) + torch.rand_like(z)


def attention(z, weight):
    return F.scaled_dot_product_attention(*[(z @ weight)[None, None]] * 3, dropout_p=0.5)[0, 0]


class Block(nn.Module):
    """A layer with regions of one form.

    ``region(function, x, ...)`` calls the function, within a checkpoint or not.
    """

    def __init__(self, form, region):
        super().__init__()
        self.linear, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.layers = nn.Sequential(self.linear, self.drop, self.other, nn.Dropout(0.5))
        self.form, self.region = form, region

    def forward(self, x):
        return FORMS[self.form](self, self.linear(x), self.region)

    def own(this, z):
        return F.dropout(torch.tanh(this.other(z)), 0.5)

    def bound(self, z):
        return F.dropout(torch.tanh(self.other(z)), 0.5)

    @staticmethod
    def static(z, weight):
        return drop(z, weight)


def nested(block, z, region):
    """The outer recomputation computes the first half of the inner regions."""

    def outer(z):
        z = region(drop, F.dropout(torch.tanh(z), 0.5), block.other.weight)
        return region(twice, block.drop(z), block.linear.weight) + torch.rand_like(z)

    return region(outer, z)


def nested_deeply(block, z, region):
    inner = lambda z: region(drop, torch.tanh(z), block.other.weight)
    middle = lambda z: region(inner, F.dropout(inner(z), 0.5)) * 2
    return F.dropout(region(lambda z: middle(F.dropout(region(middle, z), 0.5)).exp(), z), 0.5)


FORMS = {
    "function": lambda b, z, region: region(drop, z, b.other.weight),
    "lambda": lambda b, z, region: region(lambda z: F.dropout(b.other(z).tanh(), 0.5), z),
    "partial": lambda b, z, region: region(functools.partial(drop, weight=b.other.weight), z),
    "method": lambda b, z, region: region(b.bound, z),
    "method of another first name": lambda b, z, region: region(b.own, z),
    "static method": lambda b, z, region: region(b.static, z, b.other.weight),
    "layers": lambda b, z, region: region(b.layers, z),
    "one function, two regions": lambda b, z, region: region(
        drop, region(drop, z, b.other.weight), b.other.weight
    ),
    "two functions": lambda b, z, region: region(
        twice, region(drop, z, b.other.weight), b.other.weight
    ),
    "in and around": lambda b, z, region: F.dropout(
        region(drop, F.dropout(z, 0.5), b.other.weight), 0.5
    ),
    "early end": lambda b, z, region: region(
        noisy_end, region(noisy_end, z, b.other.weight), b.linear.weight
    ),
    "attention": lambda b, z, region: region(attention, region(attention, z, z.T @ z), z.T @ z),
    "a loop": lambda b, z, region: functools.reduce(
        lambda z, _: region(lambda z: F.dropout(torch.tanh(b.other(z)), 0.5), z), range(3), z
    ),
    "two outputs": lambda b, z, region: sum(
        region(lambda z: (drop(z, b.other.weight), b.drop(z)), z)
    ),
    "unused": lambda b, z, region: (region(drop, z, b.other.weight), drop(z, b.other.weight))[1],
    "nested": nested,
    "nested deeply": nested_deeply,
    "child": lambda b, z, region: b.inner(region(lambda z: F.dropout(b.other(z).tanh(), 0.5), z)),
    "inner block": lambda b, z, region: region(
        lambda z: F.dropout(torch.tanh(b.inner(z)), 0.5), b.inner(b.inner(z))
    ),
}


class Outer(Block):
    """A layer whose child has a region of its own."""

    def __init__(self, form, region):
        super().__init__(form, region)
        self.inner = Block("lambda", region)


def regions(use_reentrant, **options):
    return lambda function, *args: checkpoint(
        function, *args, use_reentrant=use_reentrant, **options
    )


def plain(function, *args):
    return function(*args)


REGIONS = {
    "reentrant": regions(True),
    "early stop": regions(False),
    "to the end": regions(False, early_stop=False, preserve_rng_state=False),
}


def stages_of(form, region, count=3):
    torch.manual_seed(0)
    return zip(
        *[fp.from_module(Outer(form, region), name=f"s{i}")[:2] for i in range(count)], strict=True
    )


BATCH = torch.linspace(-1, 1, 24).reshape(6, 4), torch.zeros(6, 4)


# Torch warns at a reentrant region within another one, whose forward records no graph.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("kind", REGIONS)
@pytest.mark.parametrize("form", FORMS)
def test_a_recomputation_repeats_its_draws(form, kind):
    """On lanes and in a loop, with remat and with split backwards.

    A reentrant region adds its gradients to those of other uses of a parameter in another order, so
    they are equal up to rounding.
    """
    family = fp.schedules
    plans = [
        family.one_f_one_b(2, 3),
        family.zero_bubble(2, 3),
        family.remat(family.one_f_one_b(2, 3)),
    ]
    expected = None
    for region in (plain, REGIONS[kind]):
        for schedule in plans[1:] if kind == "early stop" else plans[:1]:
            stages, params = stages_of(form, region, 2)
            plan = cpu_plan(stages, schedule, outputs=True)
            for executor in EXECUTORS:
                result = fp.run(plan, params, BATCH, seed=1, executor=executor)
                expected = expected or result
                if kind == "reentrant":
                    assert torch.equal(expected.loss, result.loss)
                    torch.testing.assert_close(expected.grads, result.grads, rtol=1e-4, atol=1e-6)
                else:
                    assert_same_result(expected, result)


@pytest.mark.parametrize("form", ["in and around", "nested", "inner block"])
def test_in_every_schedule(form):
    """All families and executors; the stages are parts of one model."""
    stages, params = stages_of(form, plain)
    first = cpu_plan(stages, fp.schedules.fill_drain(3, 3))
    expected = fp.run_sequential(first, params, BATCH, seed=1)
    stages, params = stages_of(form, REGIONS["early stop"])
    for schedule in schedules(3, 3)[::3]:
        plan = cpu_plan(stages, schedule)
        for executor in EXECUTORS:
            assert_same_result(expected, fp.run(plan, params, BATCH, seed=1, executor=executor))


@pytest.mark.parametrize("num_stages", [1, 2])
def test_closures_of_a_layer_and_its_child(num_stages):
    """A recomputed closure has no frame of its layer, and the stage has the path of the other
    layer."""
    results = []
    for region in (plain, REGIONS["early stop"]):
        torch.manual_seed(0)
        split = fp.split(nn.Sequential(Outer("child", region), nn.Linear(4, 4)), num_stages)
        plan = cpu_plan(split, fp.schedules.one_f_one_b(num_stages, 3))
        results.append(fp.run(plan, split.params, BATCH, seed=1))
    assert_same_result(*results)


@pytest.mark.parametrize("nested_stage", [False, True])
def test_in_a_composition(nested_stage):
    """Parts with and without layers, of equal paths; no part is around the recomputation."""
    results = []
    for region in (plain, REGIONS["early stop"]):
        (a, b), (pa, pb) = stages_of("inner block", region, 2)
        noise = fp.stage(lambda p, x, region=region: region(drop, x, p), name="noise")
        weight = torch.eye(4)
        whole = fp.compose(fp.compose(a, noise), b) if nested_stage else fp.compose(a, noise, b)
        params = ((pa, weight), pb) if nested_stage else (pa, weight, pb)
        plan = cpu_plan([whole], fp.schedules.fill_drain(1, 3))
        results.append(fp.run(plan, (params,), BATCH, seed=1))
    assert_same_result(*results)


def test_sequential_checkpoints():
    results = []
    for segments in (0, 2):

        class Layers(nn.Sequential):
            def forward(self, x, segments=segments):
                if not segments:
                    return super().forward(x)
                return checkpoint_sequential([*self], segments, x, use_reentrant=False)

        torch.manual_seed(0)
        layers = [nn.Linear(4, 4), nn.Dropout(0.5), nn.RReLU(), nn.Linear(4, 4), nn.Dropout(0.5)]
        part, params, _ = fp.from_module(Layers(*layers))
        plan = cpu_plan([part], fp.schedules.fill_drain(1, 2))
        results.append(fp.run(plan, (params,), BATCH, seed=1))
    assert_same_result(*results)


def test_gradients_within_a_forward():
    """The recomputation runs in the forward, and once more in the backward."""
    results = []
    for region in (plain, REGIONS["early stop"]):

        def body(p, x, region=region):
            x = x * 1
            y = region(noisy_end, x.requires_grad_(), p)
            (slope,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
            return y + region(drop, slope, p)

        plan = cpu_plan(
            [fp.stage(body, name="a"), fp.stage(body, name="b")], fp.schedules.one_f_one_b(2, 2)
        )
        results.append(fp.run(plan, (torch.eye(4), torch.eye(4)), BATCH, seed=1))
    assert_same_result(*results)


@pytest.mark.parametrize("mode", ["never", "always"])
def test_in_a_pipe(mode):
    gradients = []
    for region in (plain, REGIONS["early stop"]):
        torch.manual_seed(0)
        model = nn.Sequential(Outer("inner block", region), Outer("nested", region))
        pipe = fp.Pipe(model, chunks=3, devices=["cpu", "cpu"], checkpoint=mode)
        torch.manual_seed(1)
        F.mse_loss(pipe(BATCH[0]), BATCH[1]).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert same(*gradients)


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.rand_like(gradient)


def run_region(function):
    """Run a stage with a region that repeats its draws, and with the region of a function."""

    def body(p, x):
        x = checkpoint(drop, x, p, use_reentrant=False)
        return checkpoint(function, x, p, use_reentrant=False)

    plan = cpu_plan([fp.stage(body, name="a")], fp.schedules.fill_drain(1, 2))
    return fp.run(plan, (torch.eye(4),), BATCH, seed=1)


def test_a_draw_in_the_backward_beside_regions_is_refused():
    with pytest.raises(fp.StageError, match="only what torch.utils.checkpoint computes again"):
        run_region(lambda z, weight: InBackward.apply(z * weight.sum()))


@pytest.mark.parametrize("change", ["one more", "another operation", "the first"])
def test_a_region_that_draws_otherwise_is_refused(change):
    """Its gradients would be those of other numbers than the loss."""
    calls = []

    def region(z, weight):
        calls.append(z)
        again = len(calls) > 2  # there are two microbatches
        if change == "one more":
            z = F.dropout(F.dropout(z, 0.5), 0.5) if again else F.dropout(z, 0.5)
        elif change == "another operation":
            z = z * (torch.rand_like(z) if again else torch.randn_like(z))
        elif again:
            z = z * torch.rand_like(z)
        return torch.tanh(z @ weight).exp()

    with pytest.raises(fp.StageError, match=r"draws other random numbers there.*remat"):
        run_region(region)
