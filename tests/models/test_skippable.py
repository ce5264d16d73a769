"""Skips between modules: torchgpipe's tests as tests of ours, and what its skips could not do."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import EXECUTORS
from torch.utils.checkpoint import checkpoint

import funcpipe as fp
from funcpipe._src.models.sequential import cut_sequential
from funcpipe._src.models.skippable import skips_of

DOUBLE = torch.float64


@fp.models.skippable(stash=["1to3"])
class Layer1(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, input):
        yield fp.models.stash("1to3", input)
        return self.conv(input)


class Layer2(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, input):
        return self.conv(input)


@fp.models.skippable(pop=["1to3"])
class Layer3(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, input):
        skip = yield fp.models.pop("1to3")
        return self.conv(input) + skip


@fp.models.skippable(stash=["skip"])
class Stash(nn.Module):
    """Any value that `made` makes of its input."""

    def __init__(self, made=lambda x: x):
        super().__init__()
        self.made = made

    def forward(self, x):
        yield fp.models.stash("skip", self.made(x))
        return x


@fp.models.skippable(pop=["skip"])
class Pop(nn.Module):
    """The other form of forward: skips as a keyword."""

    def __init__(self, use=lambda x, skip: x + skip):
        super().__init__()
        self.use = use

    def forward(self, x, *, skips):
        return self.use(x, skips["skip"])


KEEPS = {
    "never": lambda a: True,
    "except_last": lambda a: a.microbatch == 2,
    "always": lambda a: False,
}


def run(parts, x, *, executor="serial", seed=None, keep=KEEPS["never"]):
    """Loss, gradients by name, state by name of the mean of squares of what the stages give."""
    stages, params, state = zip(*parts, strict=True)
    order = fp.schedules.remat(fp.schedules.one_f_one_b(len(stages), 3), keep=keep)
    plan = fp.make_plan(stages, order, loss=lambda y, _: y.square().mean(), devices="cpu")
    result = fp.run(plan, params, (x, None), state=state, executor=executor, seed=seed)
    grads = {name: value for tree in result.grads for name, value in tree.items()}
    return (
        result.loss,
        grads,
        {name: value for tree in result.state if tree for name, value in tree.items()},
    )


def plain(model, x):
    """Loss and gradients of plain autograd."""
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(expected, got):
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            got[name], value, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


# -- F1 to F10: what torchgpipe tests
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("balance", [[3], [1, 2], [1, 1, 1]], ids=str)
def test_one_to_three(balance, keep):
    """F1: a skip over one layer, any cut, any remat: output, input gradient and gradients are the
    plain model's."""
    model = nn.Sequential(Layer1(), Layer2(), Layer3()).double()
    x = torch.rand(6, 3, 4, 4, dtype=DOUBLE, requires_grad=True)
    expected, grads = plain(model, x)
    parts = cut_sequential(model, balance)
    loss, found, _ = run(parts, x.detach(), keep=KEEPS[keep], executor="threads")
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert_same_gradients(grads, found)
    stages, params, _ = zip(*parts, strict=True)
    plan = fp.make_plan(
        stages,
        fp.schedules.remat(fp.schedules.fill_drain(len(balance), 3), keep=KEEPS[keep]),
        devices="cpu",
    )
    result, pullback = fp.vjp(plan, params, x.detach(), executor="threads")
    torch.testing.assert_close(result.outputs.norm(), model(x).norm(), rtol=1e-12, atol=0)
    _, back = pullback(2 * result.outputs / result.outputs.numel())
    torch.testing.assert_close(back, x.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("sizes", [[3], [1, 1, 1]])
def test_none_and_other_trees(sizes):
    """F2, F10: None, ints, bools, masks, nothing at all, in any tree; what carries no gradient
    leaves no node behind."""
    made = lambda x: {"none": None, "mask": x > 0, "ids": (torch.arange(len(x)), "word"), "x": [x]}
    use = lambda x, skip: (
        x + torch.where(skip["mask"], skip["x"][0], 0.0) if skip["none"] is None else None
    )
    model = nn.Sequential(Stash(made), nn.Linear(4, 4), Pop(use)).double()
    x = torch.randn(6, 4, dtype=DOUBLE)
    expected, grads = plain(model, x)
    loss, found, _ = run(cut_sequential(model, sizes), x)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert_same_gradients(grads, found)
    empty = nn.Sequential(Stash(lambda x: None), Pop(lambda x, skip: x if skip is None else x * 0))
    leaf = torch.ones(2, requires_grad=True)
    assert empty(leaf) is leaf


@pytest.mark.parametrize("sizes", [[3], [1, 2]])
def test_popped_but_unused(sizes):
    """F10: it gives no gradient; torchgpipe's backward crashed."""
    model = nn.Sequential(
        nn.Sequential(nn.Linear(4, 4), Stash()), nn.Linear(4, 4), Pop(lambda x, skip: x)
    ).double()
    x = torch.randn(6, 4, dtype=DOUBLE)
    _, grads = plain(model, x)
    assert_same_gradients(grads, run(cut_sequential(model, sizes), x, keep=KEEPS["always"])[1])


class Leaf:
    """Something in a skip whose end can be seen."""


LEAVES = []


def watched(x):
    """A skip that is remembered, weakly."""
    leaf = Leaf()
    LEAVES.append(weakref.ref(leaf))
    return x, leaf


def alive():
    return sum(one() is not None for one in LEAVES)


@pytest.mark.parametrize("sizes", [[4], [1, 1, 1, 1]])
@pytest.mark.parametrize("keep", [None, "never", "always"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_nothing_leaks(executor, keep, sizes):
    """F3, F4: after a run, in training with and without remat and in evaluation, every skip is
    gone, without gc."""
    model = nn.Sequential(
        Stash(watched), nn.Linear(4, 4), Pop(lambda x, skip: x + skip[0]), nn.Linear(4, 4)
    )
    parts = cut_sequential(model, sizes)
    stages, params, _ = zip(*parts, strict=True)
    loss = lambda y, _: y.square().mean()
    if keep is None:
        plan = fp.make_plan(
            stages, fp.schedules.fill_drain(len(sizes), 3, backward=False), devices="cpu"
        )
    else:
        order = fp.schedules.remat(fp.schedules.one_f_one_b(len(sizes), 3), keep=KEEPS[keep])
        plan = fp.make_plan(stages, order, loss=loss, devices="cpu")
    x = torch.randn(6, 4)
    gc.disable()
    try:
        LEAVES.clear()
        fp.run(plan, params, x if keep is None else (x, None), executor=executor)
        assert len(LEAVES) >= 3
        assert 0 == alive()
    finally:
        gc.enable()


@pytest.mark.parametrize("end", ["popped", "not popped", "failed", "failed at a yield"])
def test_nothing_leaks_without_a_plan(end):
    """F3: the end of the outermost call frees skips, popped or not, also when it is aborted."""
    rest = {
        "popped": Pop(lambda x, skip: x + skip[0]),
        "not popped": nn.Identity(),
        "failed": Fails(),
        "failed at a yield": odd(yields_other),
    }
    model = nn.Sequential(Stash(watched), nn.Linear(4, 4), rest[end])
    gc.disable()
    try:
        LEAVES.clear()
        try:
            model(torch.randn(2, 4))
            failed = False
        except (ConnectionError, fp.PlanError):
            failed = True
        assert (1, 0) == (len(LEAVES), alive())
        assert end.startswith("failed") == failed
    finally:
        gc.enable()


def test_copies_go_straight():
    """F7: a skip is copied from the stage that makes it to the one that pops it, past those
    between."""
    stages, _, _ = zip(
        *cut_sequential(nn.Sequential(Stash(), nn.ReLU(), nn.ReLU(), Pop()), [1, 1, 1, 1]),
        strict=True,
    )
    plan = fp.make_plan(stages, fp.schedules.fill_drain(4, 1, backward=False), devices="cpu")
    copies = [line for line in plan.program.lines() if "send skip" in line]
    assert 1 == len(copies)
    assert copies[0].startswith("0: send")
    assert "to 3@" in copies[0]


@pytest.mark.parametrize(
    "stage_of", [lambda m: fp.from_module(m)[0], lambda m: cut_sequential(m, [3])[0][0]]
)
def test_a_skip_inside_of_a_stage_is_not_the_plans(stage_of):
    """F8: no value, no copy."""
    stages = fp.stage(lambda p, x: x, name="a"), stage_of(nn.Sequential(Stash(), nn.ReLU(), Pop()))
    plan = fp.make_plan(
        stages, fp.schedules.one_f_one_b(2, 2), loss=lambda y, t: y.sum() / len(y), devices="cpu"
    )
    assert [] == [line for line in plan.program.lines() if "skip" in line]


# -- without a plan
# -------------------------------------------------------------------------------


def test_plain_calls():
    """F9: no pipeline at all: a Sequential, functional_call, vmap, another call inside, 8 threads
    at once."""
    model = nn.Sequential(Stash(), nn.Linear(4, 4), Pop())
    x = torch.randn(5, 4)
    expected = model[1](x) + x
    assert torch.equal(expected, model(x))
    params = {name: p.detach() * 2 for name, p in model.named_parameters()}
    torch.testing.assert_close(torch.func.functional_call(model, params, x), 2 * model[1](x) + x)
    torch.testing.assert_close(torch.func.vmap(model)(x), expected)
    torch.testing.assert_close(torch.func.jvp(model, (x,), (x,))[1], x @ model[1].weight.T + x)
    wrong = []

    def work(scale):
        for _ in range(10):
            if not torch.equal(model(x * scale), model[1](x * scale) + x * scale):
                wrong.append(scale)

    threads = [threading.Thread(target=work, args=(scale,)) for scale in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [] == wrong


class Fails(nn.Module):
    def forward(self, x):
        raise ConnectionError("lost")


class Patched(nn.Sequential):
    """A model whose forward is an attribute of the instance, as some libraries wrap it."""

    def __init__(self, *layers):
        super().__init__(*layers)
        self.forward = super().forward


@pytest.mark.parametrize("kind", [nn.Sequential, Patched])
def test_an_aborted_call_leaves_nothing(kind):
    """F9: the next call finds no skip of it, while its exception is kept and after; torchgpipe's
    next pop took it."""
    broken, rest, model = kind(Stash(), Fails()), kind(nn.Identity(), Pop()), kind(Stash(), Pop())
    x = torch.full((2,), 5.0)
    with pytest.raises(ConnectionError) as kept:
        broken(x)
    for _ in range(2):
        with pytest.raises(
            fp.PlanError,
            match=r"pops 'skip', but no layer stashed it before \(stashed so far: \[\]\)",
        ):
            rest(x)
        with pytest.raises(fp.PlanError, match="no layer stashed it before"):
            Pop()(x)
        assert torch.equal(2 * x, model(x))
        kept.value.__traceback__ = None


def test_hooks_do_not_matter():
    """With hooks torch calls a module by another way."""
    model = nn.Sequential(Stash(), nn.ReLU(), Pop())
    seen = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: (args, dict(kwargs)), with_kwargs=True
    )
    model.register_forward_hook(
        lambda module, args, kwargs, y: seen.append(kwargs), with_kwargs=True
    )
    assert torch.equal(torch.full((2,), 2.0), model(torch.ones(2)))
    assert [{}] == seen


def test_compiled_and_exported():
    """torch.compile breaks its graph at a skippable layer and is right; export has the skip as an
    edge."""
    model = nn.Sequential(Stash(), nn.Linear(4, 4), Pop())
    x = torch.randn(3, 4)
    with torch.no_grad():  # with a graph torch warns about itself where it breaks one
        torch.testing.assert_close(torch.compile(model, backend="eager")(x), model(x))
    torch.testing.assert_close(torch.export.export(model, (x,), strict=False).module()(x), model(x))


# -- in-place, values
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[5], [2, 3], [1, 1, 1, 1, 1]])
def test_a_skip_is_what_it_was_when_stashed(sizes):
    """In-place layers after a stash, and those who write into what they popped, reach nobody,
    wherever the cuts are."""
    write = lambda x, skip: x + skip.mul_(3)
    model = nn.Sequential(
        nn.Linear(4, 4), Stash(), nn.ReLU(inplace=True), Pop(write), Pop(write)
    ).double()
    linear = model[0]
    x = torch.randn(6, 4, dtype=DOUBLE)
    expected = linear(x).relu() + 6 * linear(x)
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=0)
    _, grads = plain(model, x)
    loss, found, _ = run(cut_sequential(model, sizes), x)
    torch.testing.assert_close(loss, expected.square().mean(), rtol=1e-12, atol=0)
    assert_same_gradients(grads, found)


# -- nested, isolated, used twice
# -------------------------------------------------------------------------------


def unet(depth=3, width=4):
    """Skippable layers two Sequentials deep, one block used at every level."""
    levels = [fp.models.Namespace() for _ in range(depth)]
    down = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), Stash().isolate(ns)) for ns in levels]
    cat = lambda x, skip: torch.cat([x, skip], 1)
    up = [
        nn.Sequential(Pop(cat).isolate(ns), nn.Linear(2 * width, width), nn.Tanh())
        for ns in reversed(levels)
    ]
    return nn.Sequential(nn.Sequential(*down), nn.Linear(width, width), nn.Sequential(*up)).double()


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("sizes", [[3, 7, 9], [4, 4, 1, 10]])
def test_unet(sizes, executor):
    """Every skip of a U-Net across different stages, with remat: plain autograd's gradients to
    1e-10."""
    model = unet()
    x = torch.randn(7, 4, dtype=DOUBLE)
    expected, grads = plain(model, x)
    parts = cut_sequential(model, sizes, flat=True)
    for keep in ("never", "always"):
        loss, found, _ = run(parts, x, keep=KEEPS[keep], executor=executor)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        assert_same_gradients(grads, found)


@fp.models.skippable(stash=["out"], pop=["in"])
class Around(nn.Module):
    """A skippable layer with skippable layers inside, whose skips cross its own."""

    def __init__(self):
        super().__init__()
        self.later = Pop()  # registered before the layer that runs before it
        self.inner = nn.Sequential(nn.Linear(4, 4), Stash())

    def forward(self, x):
        start = yield fp.models.pop("in")
        x = self.inner(x + start)
        yield fp.models.stash("out", x)
        return self.later(x * 2)


@fp.models.skippable(stash=["in"])
class First(nn.Module):
    def forward(self, x):
        return fp.Out(x, stash={"in": x * 3})


@fp.models.skippable(pop=["out"])
class Last(nn.Module):
    def forward(self, x):
        return x + (yield fp.models.pop("out"))


@pytest.mark.parametrize("sizes", [[3], [2, 1], [1, 1, 1]])
def test_skippables_inside_of_skippables(sizes):
    """At any depth; of a module whose forward is its own nothing is assumed about the order of its
    layers."""
    model = nn.Sequential(First(), Around(), Last()).double()
    x = torch.randn(6, 4, dtype=DOUBLE)
    expected, grads = plain(model, x)
    loss, found, _ = run(cut_sequential(model, sizes), x)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert_same_gradients(grads, found)
    around, _, _ = fp.from_module(model[1])
    assert (("out",), ("in",), ("skip",)) == (around.stash, around.pop, around.offers)


def test_a_stage_alone():
    """The unit test of a layer: skips go in as an argument and come out in Out."""
    stage, params, state = fp.from_module(nn.Sequential(First(), Pop()))
    assert ((), ("skip",), ("in",)) == (state, stage.pop, stage.stash)
    out = stage(params, torch.ones(2), skips={"skip": torch.ones(2)})
    assert [2.0, 2.0] == out.y.tolist()
    assert [3.0, 3.0] == out.stash["in"].tolist()
    batched = torch.func.vmap(lambda x: stage(params, x, skips={"skip": x}))(torch.ones(3, 2))
    assert (3, 2) == batched.stash["in"].shape


@pytest.mark.parametrize("sizes", [[4], [2, 2], [1, 1, 1, 1]])
def test_many_pops(sizes):
    """Any number of layers may pop one skip, in the stage that made it and in later ones."""
    model = nn.Sequential(nn.Linear(4, 4), Stash(), Pop(), Pop(lambda x, skip: x * skip)).double()
    x = torch.randn(6, 4, dtype=DOUBLE)
    _, grads = plain(model, x)
    assert_same_gradients(grads, run(cut_sequential(model, sizes), x)[1])


@fp.models.skippable(stash=["noise"])
class Noisy(nn.Module):
    def forward(self, x):
        yield fp.models.stash("noise", F.dropout(x, 0.5))
        return F.dropout(x, 0.5)


@fp.models.skippable(pop=["noise"])
class Hears(nn.Module):
    def forward(self, x, *, skips):
        return F.dropout(x + skips["noise"], 0.5)


def test_draws_do_not_depend_on_the_cuts():
    """Law 4 inside of forwards that are generators or take skips."""
    model = nn.Sequential(nn.Linear(4, 4), Noisy(), nn.Linear(4, 4), Hears()).double()
    x = torch.randn(6, 4, dtype=DOUBLE)
    losses = {
        run(cut_sequential(model, sizes), x, seed=3, executor=executor)[0].item()
        for sizes in ([4], [2, 2], [1, 1, 1, 1])
        for executor in EXECUTORS
    }
    assert 1 == len(losses)
    assert losses != {run([fp.from_module(model)], x, seed=4)[0].item()}
    assert losses == {run([fp.from_module(model)], x, seed=3)[0].item()}


def test_batch_norm_and_skips_in_one_stage():
    """A stage hands back both; running statistics are those of one update with all rows."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Stash(), nn.ReLU(), Pop()).double()
    x = torch.randn(9, 4, dtype=DOUBLE)
    _, _, state = run(cut_sequential(model, [3, 2]), x)
    rows = model[0](x).detach()
    torch.testing.assert_close(state["1.running_mean"], 0.1 * rows.mean(0))
    torch.testing.assert_close(state["1.running_var"], 0.9 + 0.1 * rows.var(0))


def test_namespaces():
    """Equal after copies and pickles, different from each other, ordered, called by their names or
    numbers."""
    one, other, named = fp.models.Namespace(), fp.models.Namespace(), fp.models.Namespace("deep")
    for ns in (one, named):
        assert ns == copy.deepcopy(ns) == pickle.loads(pickle.dumps(ns))
        assert hash(ns) == hash(copy.copy(ns))
    assert one != other
    assert len({one, other, named, fp.models.Namespace("deep")}) == 3
    assert sorted([other, one]) == sorted([one, other])
    assert "Namespace('deep')" == repr(named)
    assert one.name != other.name
    assert one != "ns0"
    with pytest.raises(fp.PlanError, match="without '/'"):
        fp.models.Namespace("a/b")
    with pytest.raises(TypeError):
        _ = one < 1


@fp.models.skippable(stash=["a", "b"], pop=["c"])
class Several(nn.Module):
    def forward(self, x):
        c = yield fp.models.pop("c")
        yield fp.models.stash("a", x)
        yield fp.models.stash("b", x)
        return x + c


def test_isolate():
    """All names, some names, one; the last one counts; None is the default; copies keep it."""
    assert ("ns/a", "ns/b") == fp.from_module(Several().isolate(fp.models.Namespace("ns")))[0].stash
    some = (
        Several()
        .isolate(fp.models.Namespace("x"), only=["a"])
        .isolate(fp.models.Namespace("y"), only="b")
    )
    for layer in (some, copy.deepcopy(some), pickle.loads(pickle.dumps(some))):
        stage, _, _ = fp.from_module(layer)
        assert (("x/a", "y/b"), ("c",)) == (stage.stash, stage.pop)
    some.isolate(fp.models.Namespace("z")).isolate(None, only=["c"])
    assert (("z/a", "z/b"), ("c",)) == (fp.from_module(some)[0].stash, fp.from_module(some)[0].pop)
    with pytest.raises(
        fp.PlanError, match=r"no skips \['d'\] to isolate; it declares \['a', 'b', 'c'\]"
    ):
        Several().isolate(fp.models.Namespace(), only=["a", "d"])
    with pytest.raises(fp.PlanError, match=r"takes a namespace; got 'ns'.*fp.models.Namespace"):
        Several().isolate("ns")


# -- classes
# -------------------------------------------------------------------------------


def test_the_class_stays_itself():
    """Same class, same keys, copies, pickles and isinstance; the user's own attributes
    untouched."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x, *, skips):
            "Doc."
            return x

    assert fp.models.skippable(pop=["a"])(Own) is Own
    assert ["weight"] == list(Own().state_dict())
    assert "Doc." == Own.forward.__doc__
    layer = Layer1().isolate(fp.models.Namespace("n"))
    again = pickle.loads(pickle.dumps(layer))
    assert type(again) is Layer1
    assert fp.from_module(again)[0].stash == ("n/1to3",)
    stage, params, _ = fp.from_module(nn.Sequential(Stash(_same), nn.Linear(2, 2)))
    twin = pickle.loads(pickle.dumps(stage))
    assert torch.equal(stage(params, torch.ones(2)).y, twin(params, torch.ones(2)).y)


def _same(x):
    return x


def test_subclasses():
    """They inherit the declaration; forwards of their own are driven, super() is what was
    written."""

    class Child(Stash):
        pass

    class Doubling(Stash):
        def forward(self, x):
            y = yield from super().forward(x * 2)
            return y + 1

    class Plain(Pop):
        def forward(self, x, *, skips):
            return super().forward(x, skips=skips) * 10

    @fp.models.skippable(stash=["other"])
    class Other(Stash):
        def forward(self, x):
            yield fp.models.stash("other", x)
            return x

    one = torch.ones(2)
    assert torch.equal(2 * one, nn.Sequential(Child(), Pop())(one))
    assert torch.equal(50 * one, nn.Sequential(Doubling(), Plain())(one))
    assert ("other",) == fp.from_module(Other())[0].stash
    assert ("skip",) == fp.from_module(Stash())[0].stash
    assert torch.equal(one, nn.Sequential(Other(), nn.Identity())(one))


def test_wrong_declarations():
    """At the class, before any layer is made."""
    with pytest.raises(
        fp.PlanError, match=r"stash='skip': give a sequence of names, stash=\['skip'\]"
    ):
        fp.models.skippable(stash="skip")
    with pytest.raises(fp.PlanError, match=r"names in pop= are strings; got \[3\]"):
        fp.models.skippable(pop=[3])
    with pytest.raises(fp.PlanError, match="decorates a class of modules; got Stash"):
        fp.models.skippable(stash=["a"])(Stash())
    with pytest.raises(fp.PlanError, match="Stash is skippable already.*subclass"):
        fp.models.skippable(pop=["a"])(Stash)


# -- F5, F6: faults
# -------------------------------------------------------------------------------


@fp.models.skippable(stash=["same"], pop=["same"])
class Both(nn.Module):
    def forward(self, x):
        yield fp.models.stash("same", x)
        return (yield fp.models.pop("same"))


def test_all_faults_of_a_model_are_listed():
    """F5: unmatched, in the wrong order, twice, both ways: found when stages are made, by the
    layers' names."""
    model = nn.Sequential(
        Pop(),
        nn.Sequential(Stash(), Stash()),
        Both(),
        Layer1(),
        Several(),
        Pop().isolate(fp.models.Namespace("deep")),
    )
    expected = [
        (
            "'1.1' (Stash) stashes 'skip' again, which '1.0' already stashes; separate them: "
            "isolate(fp.models.Namespace())"
        ),
        "'2' (Both) both stashes and pops 'same'",
        "'0' (Pop) pops 'skip', but only '1.0', which comes later, stashes it",
        "'4' (Several) pops 'c', but no layer stashes it",
        "'5' (Pop) pops 'deep/skip', but no layer stashes it",
        "'3' (Layer1) stashes '1to3', but no layer pops it",
        "'4' (Several) stashes 'a', but no layer pops it",
        "'4' (Several) stashes 'b', but no layer pops it",
    ]
    with pytest.raises(fp.PlanError) as caught:
        cut_sequential(model, [3, 3])
    title, *lines = str(caught.value).splitlines()
    assert "stash and pop do not match:" == title
    assert expected == [line.removeprefix("  * ") for line in lines]
    with pytest.raises(fp.PlanError) as caught:  # a part of a model may exchange skips with others
        fp.from_module(model)
    assert expected[:3] == [
        line.removeprefix("  * ") for line in str(caught.value).splitlines()[1:]
    ]


def test_names_that_would_meet():
    """Two skips of one name for the plan are refused."""

    @fp.models.skippable(stash=["deep/skip"])
    class Slash(nn.Module):
        def forward(self, x):
            yield fp.models.stash("deep/skip", x)
            return x

    with pytest.raises(fp.PlanError, match="two skips have the same name 'deep/skip'"):
        skips_of(nn.Sequential(Slash(), Stash().isolate(fp.models.Namespace("deep"))))


def test_stages_that_do_not_match():
    """Between stages made by from_module the plan finds what does not match."""
    stages = [
        fp.from_module(layer, name=type(layer).__name__)[0]
        for layer in (Stash(), nn.ReLU(), Last())
    ]
    with pytest.raises(fp.PlanError) as caught:
        fp.make_plan(stages, fp.schedules.fill_drain(3, 1, backward=False), devices="cpu")
    assert "stage 2 ('Last') pops 'out', but no stage stashes it" in str(caught.value)
    assert "stage 0 ('Stash') stashes 'skip', but no later stage pops it" in str(caught.value)


def odd(forward, **declared):
    """A skippable layer with this forward."""
    return fp.models.skippable(**declared)(type("Odd", (nn.Module,), {"forward": forward}))()


def stashes_undeclared(self, x):
    yield fp.models.stash("a", x)
    return x


def pops_undeclared(self, x):
    yield fp.models.pop("a")
    return x


def yields_other(self, x):
    yield x
    return x


def does_nothing(self, x):
    return x


def keeps_stats(self, x):
    return fp.Out(x, stats=x)


FAULTS = {
    "stash": (
        odd(stashes_undeclared),
        r"Odd stashes 'a' without declaring it: @fp.models.skippable\(stash=\['a'\]\)",
    ),
    "pop": (
        odd(pops_undeclared),
        r"Odd pops 'a' without declaring it: @fp.models.skippable\(pop=\['a'\]\)",
    ),
    "yield": (
        odd(yields_other),
        r"Odd yields a Tensor; it may yield fp.models.stash\(name, value\) and fp.models.pop\(name\)",
    ),
    "not stashed": (
        odd(does_nothing, stash=["a", "b"]),
        r"declares stash 'a' but did not stash it\n.*declares stash 'b'",
    ),
    "not popped": (odd(does_nothing, pop=["a"]), r"declares pop 'a' but did not pop it"),
    "stats": (odd(keeps_stats), r"returns stats or a loss in its Out"),
    "too early": (
        Pop(),
        r"Pop pops 'skip', but no layer stashed it before \(stashed so far: \[\]\)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_a_forward(fault):
    """F6: in a plain call, and with coordinates in a run; a generator is told at its own line."""
    layer, message = FAULTS[fault]
    with pytest.raises(fp.PlanError, match=message) as caught:
        nn.Sequential(nn.Identity(), layer)(torch.ones(2))
    lines = [entry.name for entry in caught.traceback]
    assert (fault in ("stash", "pop", "yield")) == bool(
        {"stashes_undeclared", "pops_undeclared", "yields_other"} & set(lines)
    )
    if fault == "too early":
        return  # the plan gives it
    stages = [
        fp.from_module(layer, name="odd")[0],
        fp.stage(lambda p, x, *, skips: x, name="end", pop=["a", "b"]),
    ]
    giver = fp.stage(
        lambda p, x: fp.Out(x, stash=dict.fromkeys("ab", x)), name="give", stash=["a", "b"]
    )
    stages = stages if stages[0].stash else [giver, stages[0], stages[1]]
    plan = fp.make_plan(
        stages, fp.schedules.fill_drain(len(stages), 1, backward=False), devices="cpu"
    )
    with pytest.raises(fp.PlanError, match=message) as caught:
        fp.run(plan, [{} if stage.name == "odd" else () for stage in stages], torch.ones(2))
    assert "odd" == caught.value.funcpipe.name


def test_a_forward_may_return_nothing():
    """A generator without return, and None as an output, as Python has it."""

    def nothing(self, x):
        yield fp.models.stash("a", x)

    assert odd(nothing, stash=["a"])(torch.ones(2)) is None


# -- recomputation
# -------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """torch's own recomputation around some layers."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return checkpoint(self.layers, x, use_reentrant=False)


@pytest.mark.parametrize("sizes", [None, [1, 1], [2]])
def test_torch_checkpoint(sizes):
    """A stash may be computed again; a pop in the backward is refused with the way out."""
    x = torch.randn(6, 4, dtype=DOUBLE)

    def gradients(model):
        return plain(model, x)[1] if sizes is None else run(cut_sequential(model, sizes), x)[1]

    linear, tanh = nn.Linear(4, 4), nn.Tanh()
    model = nn.Sequential(
        Checkpointed(linear, tanh, Stash(), tanh), nn.Sequential(nn.Linear(4, 4), Pop())
    ).double()
    bare = nn.Sequential(nn.Sequential(linear, tanh, Stash(), tanh), model[1])
    expected = {
        name.replace("0.", "0.layers.", 1) if name[0] == "0" else name: grad.clone()
        for name, grad in plain(bare, x)[1].items()
    }
    assert_same_gradients(expected, gradients(model))
    refused = nn.Sequential(
        nn.Sequential(linear, Stash()), Checkpointed(tanh, Pop(), nn.Linear(4, 4), tanh)
    ).double()
    with pytest.raises(fp.PlanError, match=r"pops 'skip' in a backward.*fp.schedules.remat"):
        gradients(refused)
