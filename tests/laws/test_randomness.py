"""Law 4: what is drawn depends on seed, layer, draw and microbatch only."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import EXECUTORS, assert_same_result, cpu_plan, forward_plan, same, schedules
from torch.utils.checkpoint import checkpoint

import funcpipe as fp

WAYS = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout_": lambda x: F.dropout(x * 1, 0.4, inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "feature_dropout": lambda x: F.dropout1d(x[None], 0.4)[0],
    "rand": lambda x: x * torch.rand(x.shape),
    "randn": lambda x: x + torch.randn(*x.shape),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randint": lambda x: x * torch.randint(1, 5, x.shape),
    "randperm": lambda x: x[:, torch.randperm(x.shape[1])],
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "bernoulli_": lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    "exponential_": lambda x: x * torch.empty_like(x).exponential_(),
    "multinomial": lambda x: (
        x + x.gather(1, torch.multinomial(x.detach().abs() + 0.1, x.shape[1], replacement=True))
    ),
    "normal": lambda x: x + torch.normal(0.0, 1.0, x.shape),
    "normal of means": lambda x: x + torch.normal(x.detach(), 1.0),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel": lambda x: x * F.gumbel_softmax(x, hard=True),
    "attention": lambda x: F.scaled_dot_product_attention(
        *[x.view(1, 1, *x.shape)] * 3, dropout_p=0.4
    )[0, 0],
}


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, dropout=0.4, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(8, 8, num_layers=2, dropout=0.4, batch_first=True)

    def forward(self, x):
        return self.inner(x)[0]


class Noise(nn.Module):
    """Appends columns of fresh random numbers, by two draws."""

    def forward(self, x):
        return torch.cat([x, torch.rand(len(x), 1), torch.rand(len(x), 1)], 1)


LAYERS = {
    "dropout": lambda: nn.Dropout(0.4),
    "rrelu": nn.RReLU,
    "attention": Attention,
    "lstm": Recurrent,
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.4, batch_first=True),
}


def functions(way, count=3):
    return tuple(fp.stage(lambda p, x: WAYS[way](x * p), name=f"s{i}") for i in range(count))


def run_everywhere(stages, params, batch, every=1, seed=3):
    """The one result that schedules, devices, remat choices and executors give."""
    first = None
    for schedule in schedules(len(stages), 3)[::every]:
        plan = cpu_plan(stages, schedule, outputs=True)
        for executor in EXECUTORS:
            result = fp.run(plan, params, batch, seed=seed, executor=executor, threads_per_lane=1)
            if first is None:
                first = fp.run_sequential(plan, params, batch, seed=seed, threads_per_lane=1)
            assert_same_result(first, result)
    return first


def ones(count):
    return tuple(torch.ones(()) for _ in range(count))


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_draw_is_keyed(way):
    """One result over schedules, devices, remat and executors, another by another seed; torch's
    generator rests."""
    before = torch.get_rng_state()
    batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(6, 4)
    stages = functions(way)
    result = run_everywhere(stages, ones(3), batch, every=3)
    other = run_everywhere(stages, ones(3), batch, every=99, seed=4)
    assert same(before, torch.get_rng_state())
    assert not same(result.outputs, other.outputs)


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_draw_the_same_wherever_the_model_is_cut(layer):
    """Attention, LSTM and the rest: loss and gradients are those of 1, 2 and 5 stages (kernels
    round by layout)."""
    batch = torch.randn(6, 5, 8, dtype=torch.float64), torch.randn(6, 5, 8, dtype=torch.float64)
    found = []
    for cuts in ((), (3,), (1, 2, 3, 4)):
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Linear(8, 8), LAYERS[layer](), nn.Linear(8, 8), LAYERS[layer](), nn.Linear(8, 8)
        ).double()
        bounds = [0, *cuts, 5]
        parts = [Part(model, a, b) for a, b in zip(bounds, bounds[1:], strict=False)]
        stages, params, _ = zip(*map(fp.from_module, parts), strict=True)
        result = run_everywhere(stages, params, batch, every=3)
        found.append(
            (result.loss, {key: value for tree in result.grads for key, value in tree.items()})
        )
    for other in found[1:]:
        torch.testing.assert_close(found[0], other, rtol=1e-12, atol=1e-14)


class Part(nn.Module):
    """Some layers of a model under the model's own names."""

    def __init__(self, model, start, end):
        super().__init__()
        for index in range(start, end):
            self.add_module(str(index), model[index])

    def forward(self, x):
        for layer in self.children():
            x = layer(x)
        return x


def test_draws_differ_by_microbatch_layer_draw_and_seed():
    """No two columns, rows' halves or seeds share a number."""
    stages, params, _ = zip(
        fp.from_module(nn.Sequential(Noise(), Noise()), name="a"),
        fp.from_module(nn.Sequential(Noise()), name="b"),
        strict=True,
    )
    plan = forward_plan(stages, 2)
    outputs = [fp.run(plan, params, torch.zeros(2, 0), seed=seed).outputs for seed in (0, 1)]
    assert (2, 6) == outputs[0].shape
    assert 24 == torch.cat(outputs).unique().numel()


def test_the_same_key_draws_the_same_again():
    """A run again, on the same plan or another of as many microbatches, repeats every number."""
    stages, params, _ = zip(
        fp.from_module(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), name="a"), strict=True
    )
    batch = torch.randn(4, 4), torch.zeros(4, 4)
    plans = [cpu_plan(stages, fp.schedules.fill_drain(1, 2)) for _ in range(2)]
    results = [fp.run(plan, params, batch, seed=9).grads for plan in (*plans, *plans)]
    assert all(same(results[0], one) for one in results)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("way", WAYS)
def test_drawing_without_a_seed_names_the_argument(way, executor):
    """seed=None is an error as soon as something draws, and torch's generator has not moved."""
    plan = cpu_plan(functions(way, 2), fp.schedules.one_f_one_b(2, 2))
    before = torch.get_rng_state()
    with pytest.raises(fp.StageError, match=r"seed="):
        fp.run(
            plan,
            ones(2),
            (torch.randn(4, 4, generator=torch.Generator()), torch.zeros(4, 4)),
            executor=executor,
        )
    assert same(before, torch.get_rng_state())


QUIET = {
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, *x.shape)] * 3)[0, 0],
    "dropout 0": lambda x: F.dropout(x, 0.0),
    "dropout off": lambda x: F.dropout(x, 0.5, training=False),
    "rrelu off": lambda x: F.rrelu(x, training=False),
}


@pytest.mark.parametrize("way", QUIET)
def test_nothing_drawn_needs_no_seed(way):
    """Operations that could draw but do not pass without a seed."""
    plan = cpu_plan([fp.stage(lambda p, x: QUIET[way](x * p))], fp.schedules.fill_drain(1, 2))
    assert fp.run(plan, ones(1), (torch.randn(4, 4), torch.zeros(4, 4))).loss.isfinite()


def test_attention_without_dropout_needs_no_seed():
    """nn.MultiheadAttention and nn.LSTM with dropout=0, and dropout layers in evaluation."""
    for module in (
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        nn.LSTM(8, 8, 2),
    ):
        part, params, _ = fp.from_module(module)
        plan = cpu_plan(
            [part],
            fp.schedules.fill_drain(1, 2),
            loss=lambda y, t: (y if torch.is_tensor(y) else y[0]).mean(),
        )
        assert fp.run(plan, (params,), (torch.randn(4, 3, 8), None)).loss.isfinite()
    part, params, _ = fp.from_module(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
    )
    plan = forward_plan([part], 2)
    assert (4, 3, 8) == fp.run(plan, (params,), torch.randn(4, 3, 8)).outputs.shape


def test_attention_that_draws_nothing_is_held_to_no_rule():
    """With a seed too: no name, no path of its own, in and out of checkpoint regions, beside layers
    that do draw."""
    attend = QUIET["attention"]
    region = lambda x: checkpoint(lambda h: F.dropout(attend(h), 0.5), x, use_reentrant=False)
    stages = (
        fp.stage(lambda p, x: attend(attend(x) * p)),
        fp.stage(lambda p, x: region(attend(x) * p), name="b"),
        fp.stage(lambda p, x: attend(x * p), name="b"),
    )
    run_everywhere(stages, ones(3), (torch.randn(6, 4), torch.zeros(6, 4)), every=9)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.drop = (
                nn.MultiheadAttention(8, 2, batch_first=True),
                nn.Dropout(0.5),
            )

        def forward(self, x):
            return checkpoint(
                lambda h: self.drop(self.attention(h, h, h)[0]), x, use_reentrant=False
            )

    part, params, _ = fp.from_module(Block())
    run_everywhere([part], [params], (torch.randn(6, 5, 8), torch.zeros(6, 5, 8)))


def dropouts(*names):
    return zip(
        *[fp.from_module(nn.Sequential(nn.Dropout(0.5), nn.Identity()), name=n) for n in names],
        strict=True,
    )


def test_stages_whose_layers_clash_want_names():
    """Two modules with a drawing layer "0" are refused without names, and draw different masks with
    them."""
    stages, params, _ = dropouts("", "")
    plan = forward_plan(stages, 1, train=True)
    with pytest.raises(fp.StageError, match=r"name="):
        fp.run(plan, params, torch.ones(2, 50), seed=0)
    stages, params, _ = dropouts("a", "a")
    plan = forward_plan(stages, 1, train=True)
    with pytest.raises(fp.StageError, match=r"name="):
        fp.run(plan, params, torch.ones(2, 50), seed=0)
    stages, params, _ = dropouts("a", "b")
    plan = forward_plan(stages, 1, train=True)
    y = fp.run(plan, params, torch.ones(2, 50), seed=0).outputs
    assert {0.0, 4.0} == set(y.unique().tolist())
    assert 10 < int((y == 4).sum()) < 40  # about a quarter; a half if the masks were one


def test_function_stages_draw_by_unique_names():
    """Two of one name are refused, one without a name too."""
    drop = lambda p, x: F.dropout(x, 0.5)
    for stages, reason in (([fp.stage(drop, name="d")] * 2, "'d'"), ([fp.stage(drop)], "name=")):
        plan = forward_plan(stages, 1)
        with pytest.raises(fp.StageError, match=reason):
            fp.run(plan, ((),) * len(stages), torch.ones(4, 4), seed=0)


def test_a_generator_of_the_stages_own_is_refused():
    """It would be state outside of the stage."""
    own = torch.Generator()
    plan = forward_plan(
        [fp.stage(lambda p, x: x + torch.rand(x.shape, generator=own), name="a")], 1
    )
    with pytest.raises(fp.StageError, match="generator"):
        fp.run(plan, ((),), torch.ones(4, 4), seed=0)


def test_compose_keeps_the_keys_of_the_inner_stages():
    """Four stages, two compositions of two, one of a composition: the same bits; modules and
    functions."""
    f = fp.stage(lambda p, x: F.dropout(x * p, 0.3), name="f")
    g = fp.stage(lambda p, x: x + torch.rand_like(x) * p, name="g")
    (m, n), (pm, pn), _ = dropouts("m", "n")
    pf, pg = ones(2)
    batch = torch.randn(6, 4), torch.randn(6, 4)
    forms = [
        ((f, m, g, n), (pf, pm, pg, pn)),
        ((fp.compose(f, m), fp.compose(g, n)), ((pf, pm), (pg, pn))),
        ((fp.compose(fp.compose(f, m), g), n), (((pf, pm), pg), pn)),
        ((fp.compose(f, m, g, n),), ((pf, pm, pg, pn),)),
    ]
    results = [run_everywhere(stages, params, batch, every=5) for stages, params in forms]
    for result in results[1:]:
        assert same(results[0].outputs, result.outputs)
        assert same(fp.leaves(results[0].grads), fp.leaves(result.grads))


class Masked(torch.nn.Module):
    """A layer that draws, in a checkpoint or not."""

    def __init__(self, wrap):
        super().__init__()
        self.drop, self.wrap = torch.nn.Dropout(0.4), wrap

    def forward(self, x):
        body = lambda h: self.drop(torch.tanh(h))
        return checkpoint(body, x, use_reentrant=False) if self.wrap else body(x)


@pytest.mark.parametrize("kind", ["layer", "function", "both", "layers of one path"])
def test_a_part_of_a_composition_replays_its_draws(kind):
    """No part is around its recomputation, which finds its draws all the same."""

    def whole(wrap):
        masked = lambda p, x: F.dropout(x * p, 0.4)
        fn = (lambda p, x: checkpoint(masked, p, x, use_reentrant=False)) if wrap else masked
        function = (fp.stage(fn, name="noise"), torch.ones(3))
        layers = [fp.from_module(Masked(wrap), name=name)[:2] for name in ("one", "other")]
        plain = (fp.stage(lambda p, x: x * p, name="plain"), torch.ones(3))
        rows = {
            "layer": [plain, layers[0]],
            "function": [function, plain],
            "both": [function, layers[0]],
            "layers of one path": [layers[0], plain],
        }[kind]
        stages, params = zip(*rows, strict=True)
        first = [fp.compose(*stages)]
        if kind == "layers of one path":  # the other one draws in a stage of its own
            first, params = [*first, layers[1][0]], (params, layers[1][1])
        else:
            params = (params,)
        plan = cpu_plan(first, fp.schedules.one_f_one_b(len(first), 3))
        x = torch.linspace(-1, 1, 18).reshape(6, 3)
        return fp.run(plan, params, (x, x), seed=5)

    assert same(whole(False).grads, whole(True).grads)


def checkpointed(use_reentrant, wrap):
    """Three stages, the middle one with a checkpointed (or plain) region that draws."""

    def middle(p, x):
        region = lambda h: F.dropout(torch.tanh(h * p), 0.5) + F.dropout(h, 0.2)
        return checkpoint(region, x, use_reentrant=use_reentrant) if wrap else region(x)

    return (
        fp.stage(lambda p, x: x * p, name="a"),
        fp.stage(middle, name="b"),
        fp.stage(lambda p, x: F.dropout(x * p, 0.3), name="c"),
    )


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_an_inner_checkpoint_replays_its_draws(use_reentrant):
    """The recomputation draws the same masks, in both kinds of checkpoint."""
    batch = torch.randn(6, 4), torch.randn(6, 4)
    expected = run_everywhere(checkpointed(use_reentrant, False), ones(3), batch, every=7)
    stages = checkpointed(use_reentrant, True)
    assert_same_result(expected, run_everywhere(stages, ones(3), batch, every=7))


def test_an_inner_checkpoint_of_layers_replays_their_draws():
    """The same inside of a module, where the layers have paths of their own."""

    class Block(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.a, self.d, self.e, self.wrap = (
                nn.Linear(4, 4),
                nn.Dropout(0.5),
                nn.Dropout(0.5),
                wrap,
            )

        def forward(self, x):
            x = self.e(x)
            return (
                checkpoint(lambda h: self.d(self.a(h)), x, use_reentrant=False)
                if self.wrap
                else self.d(self.a(x))
            )

    batch = torch.randn(6, 4), torch.randn(6, 4)
    found = []
    for wrap in (False, True):
        torch.manual_seed(0)
        stages, params, _ = zip(
            *[fp.from_module(Block(wrap), name=f"block{i}") for i in range(2)], strict=True
        )
        found.append(run_everywhere(stages, params, batch, every=4))
    assert_same_result(*found)


def test_a_function_that_checkpoint_decorates_replays_its_draws():
    """As one that is given to it."""
    draw = lambda z: F.dropout(torch.tanh(z), 0.5)
    try:
        curried = checkpoint(use_reentrant=False)(draw)
    except TypeError:
        pytest.skip("torch 2.15 is the first that has this form")
    batch, found = (torch.randn(6, 4), torch.randn(6, 4)), []
    for body in (draw, curried):
        stages = [fp.stage(lambda p, x, body=body: body(x * p), name="a")]
        plan = cpu_plan(stages, fp.schedules.fill_drain(1, 2))
        found.append(fp.run(plan, ones(1), batch, seed=0))
    assert_same_result(*found)
