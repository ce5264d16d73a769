"""Losses: means, sums with weights, aux, auxiliary losses of stages; which leaves get gradients;
ties."""

import gc

import pytest
import torch
import torch.nn.functional as F
from common import EXECUTORS, assert_same_result, cpu_plan, same
from small import row_mean
from watch import num_tensors

import funcpipe as fp


def f64(*shape):
    return torch.randn(*shape, dtype=torch.float64)


SCALE = fp.stage(lambda p, x: x * p, name="scale")


def plan_of(loss, stages=(SCALE,), count=4, **options):
    return cpu_plan(stages, fp.schedules.one_f_one_b(len(stages), count), loss=loss, **options)


def run(loss, x, target=None, count=4, p=None, weight=None, **options):
    p = torch.ones((), dtype=torch.float64) if p is None else p
    return fp.run(plan_of(loss, count=count, weight=weight), (p,), (x, target), **options)


def whole(fn):
    """Loss and gradient by plain autograd over the whole batch."""
    p = torch.ones((), dtype=torch.float64, requires_grad=True)
    loss = fn(p)
    loss.backward()
    return loss.detach(), p.grad


FORMS = {
    "mean": (lambda y, t: F.mse_loss(y, t), None),
    "sum and rows": (lambda y, t: ((y - t).square().mean(1).sum(), len(y)), None),
    "Loss": (lambda y, t: fp.Loss((y - t).square().mean(1).sum(), len(y), {"rows": len(y)}), None),
    "Loss of a mean": (lambda y, t: fp.Loss(F.mse_loss(y, t), aux=y.detach().sum()), None),
    "mean, weight=": (lambda y, t: F.mse_loss(y, t), lambda t: len(t)),
    "sum and rows, weight=": (
        lambda y, t: ((y - t).square().mean(1).sum(), len(y)),
        lambda t: torch.tensor(len(t)),
    ),
    "shape (1,)": (lambda y, t: F.mse_loss(y, t).reshape(1), None),
}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_loss_of_the_whole_batch(form, executor):
    """10 rows over 4: loss, gradient and weight of plain autograd; losses are the means of the
    microbatches."""
    x, t = f64(10, 3), f64(10, 3)
    loss, gradient = whole(lambda p: F.mse_loss(x * p, t))
    fn, weight = FORMS[form]
    result = run(fn, x, t, weight=weight, executor=executor)
    assert () == result.loss.shape
    assert not result.loss.requires_grad
    assert 10.0 == result.weight
    torch.testing.assert_close(result.loss, loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(result.grads[0], gradient, rtol=1e-12, atol=0)
    means = [F.mse_loss(a, b) for a, b in zip(x.tensor_split(4), t.tensor_split(4), strict=True)]
    torch.testing.assert_close(torch.stack(result.losses), torch.stack(means), rtol=1e-12, atol=0)
    assert {"Loss": tuple({"rows": n} for n in (3, 3, 2, 2))}.get(form, result.aux) == result.aux
    assert 4 == len(result.aux)


def test_padded_tokens_are_exact_with_weight():
    """cross_entropy(ignore_index): the mean over what counts in the whole batch, to 1e-10."""
    logits, t = f64(10, 5), torch.randint(0, 5, (10,))
    t[[0, 1, 3, 8]] = -100
    loss, gradient = whole(lambda p: F.cross_entropy(logits * p, t))
    for fn, weight in (
        (F.cross_entropy, lambda t: (t != -100).sum()),
        (lambda y, t: (F.cross_entropy(y, t, reduction="sum"), (t != -100).sum()), None),
    ):
        result = run(fn, logits, t, weight=weight)
        torch.testing.assert_close(result.loss, loss, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(result.grads[0], gradient, rtol=1e-10, atol=1e-10)
        assert 6.0 == result.weight


@pytest.mark.parametrize("executor", EXECUTORS)
def test_weight_0_adds_exactly_0(executor):
    """A microbatch of padding has a nan mean; it touches neither loss nor gradients, in any
    stage."""
    logits, t = f64(8, 5), torch.randint(0, 5, (8,))
    t[:2] = -100
    loss, gradient = whole(lambda p: F.cross_entropy(logits * p, t))
    result = run(F.cross_entropy, logits, t, weight=lambda t: (t != -100).sum(), executor=executor)
    assert result.losses[0].isnan()
    torch.testing.assert_close(result.loss, loss)
    torch.testing.assert_close(result.grads[0], gradient)
    schedule = fp.schedules.remat(fp.schedules.one_f_one_b(3, 4))
    weight = lambda t: (t != -100).sum()
    plan = cpu_plan([SCALE] * 3, schedule, loss=F.cross_entropy, weight=weight)
    params = tuple(torch.ones((), dtype=torch.float64) for _ in range(3))
    for one in fp.run(plan, params, (logits, t), executor=executor).grads:
        torch.testing.assert_close(one, gradient)


def test_a_nan_sum_of_weight_0_adds_exactly_0():
    """Also where the loss itself brings the weights."""
    x = f64(4, 3)
    nan_of_none = lambda y, t: (y.sum() * float("nan"), 0) if t.sum() == 0 else (y.sum(), len(y))
    result = run(nan_of_none, x, torch.tensor([0.0, 1, 1, 1]))
    torch.testing.assert_close(result.loss, x[1:].sum() / 3)
    torch.testing.assert_close(result.grads[0], x[1:].sum() / 3)


def test_weights_are_checked_before_anything_runs():
    """All 0, negative, nan, no number; and what weight() itself raises."""
    ran = []
    loss = lambda y, t: (ran.append(1), y.sum() / len(y))[1]
    for weight, reason in (
        (lambda t: 0, "0 for every"),
        (lambda t: -1, "number from 0"),
        (lambda t: float("nan"), "number from 0"),
        (lambda t: t, "number from 0"),
        (lambda t: "many", "number from 0"),
    ):
        with pytest.raises(fp.BatchError, match=reason):
            run(loss, f64(4, 2), f64(4, 2), weight=weight)
    with pytest.raises(ZeroDivisionError) as caught:
        run(loss, f64(4, 2), f64(4, 2), weight=lambda t: 1 / 0)
    assert 0 == caught.value.funcpipe.microbatch
    assert [] == ran
    with pytest.raises(fp.BatchError, match="0 for every microbatch"):
        run(lambda y, t: (y.sum(), 0), f64(4, 2))
    with pytest.raises(fp.PlanError, match="no loss="):
        fp.make_plan([SCALE], fp.schedules.fill_drain(1, 1), weight=len)


def test_one_form_for_all_microbatches():
    """A mean here and a pair there is refused."""
    with pytest.raises(fp.BatchError, match="always return the same form"):
        run(
            lambda y, t: y.mean() if y[0, 0] > 0 else (y.sum(), 1),
            torch.tensor([[1.0], [-1.0]], dtype=torch.float64),
            count=2,
        )


@pytest.mark.parametrize(
    "value",
    [
        lambda y: y,
        lambda y: y.sum().item(),
        lambda y: None,
        lambda y: y.sum().long(),
        lambda y: (1.0, 2),
        lambda y: (y.sum(), 1, 2),
        lambda y: {"loss": y.sum()},
    ],
)
def test_what_is_no_loss_is_refused_with_what_came(value):
    """Rows, a float, None, an int, a dict: the error says the forms."""
    with pytest.raises(
        fp.StageError, match=r"\(sum, weight\), or fp.Loss\(sum, weight, aux\); got a"
    ) as caught:
        run(lambda y, t: value(y), f64(4, 2))
    assert "loss" in caught.value.funcpipe.action


@pytest.mark.parametrize("executor", EXECUTORS)
def test_the_loss_is_called_once_per_microbatch(executor):
    """M calls, also with remat of other stages; never for shapes or planning. In runs 1, 2, 4, ...
    each is followed by three with up to four rows, until one shows a mean of several rows."""
    calls, params = [], (torch.ones(()), torch.ones(()))
    loss = lambda y, t: (calls.append(len(y)), y.sum() / len(y))[1]
    plan = plan_of(loss, (SCALE, SCALE), 3)
    checked = [3, 3, 1, 2, 2, 2, 1, 1, 2, 2, 1, 1]
    for rows, expected in (
        (7, checked),
        (7, checked),
        (7, [3, 2, 2]),
        (2, [1, 2, 1, 1, 1]),
        (2, [1, 1]),
    ):
        calls.clear()
        fp.run(plan, params, (torch.ones(rows, 1), None), executor=executor)
        assert expected == calls
    calls.clear()
    keep = fp.schedules.remat(fp.schedules.one_f_one_b(2, 3), keep=lambda action: action.stage == 1)
    plan = cpu_plan([SCALE] * 2, keep, loss=loss)
    fp.run(plan, params, (torch.ones(3, 1), None), executor=executor)
    assert [1, 1, 1] == calls


def test_loss_scale_multiplies_gradients_only():
    """Exactly, for every form, auxiliary losses too."""
    side = fp.stage(lambda p, x: fp.Out(x * p, loss=((x * p).square().sum(), len(x))), name="side")
    x, t = f64(10, 3), f64(10, 3)
    for form in ("mean", "sum and rows", "mean, weight="):
        fn, weight = FORMS[form]
        stages = (side, SCALE) if form != "sum and rows" else (SCALE, SCALE)
        plan = plan_of(fn, stages, weight=weight)
        params = tuple(torch.ones((), dtype=torch.float64) for _ in stages)
        plain, scaled = (fp.run(plan, params, (x, t), loss_scale=s) for s in (1.0, 1024.0))
        assert torch.equal(plain.loss, scaled.loss)
        assert same([1024 * one for one in plain.grads], list(scaled.grads))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("form", ["mean", "sum and rows, weight="])
def test_auxiliary_losses_count_by_their_microbatch(form, executor):
    """Two stages add (sum, weight): their means over the whole batch are added to the loss."""
    side = fp.stage(lambda p, x: fp.Out(x * p, loss=((x * p).square().sum(), len(x))), name="side")
    last = fp.stage(
        lambda p, x: fp.Out(x * p, loss=((x * p).abs().sum(1).mean(), 1.0)), name="last"
    )
    x, t = f64(10, 3), f64(10, 3)

    def total(p):
        a = x * p
        b = a * 1.0
        return F.mse_loss(b, t) + a.square().sum() / 10 + b.abs().sum(1).mean()

    loss, gradient = whole(total)
    fn, weight = FORMS[form]
    for schedule in (
        fp.schedules.one_f_one_b(2, 4),
        fp.schedules.remat(fp.schedules.zero_bubble(2, 4)),
    ):
        plan = cpu_plan([side, last], schedule, loss=fn, weight=weight)
        params = tuple(torch.ones((), dtype=torch.float64) for _ in range(2))
        result = fp.run(plan, params, (x, t), executor=executor)
        torch.testing.assert_close(result.loss, loss, rtol=1e-12, atol=0)
        torch.testing.assert_close(result.grads[0], gradient, rtol=1e-12, atol=0)
        assert_same_result(fp.run_sequential(plan, params, (x, t)), result)


def test_auxiliary_losses_need_weights_known_before():
    """With sums that bring their weights the share of a microbatch is unknown; the error names
    weight=."""
    side = fp.stage(lambda p, x: fp.Out(x * p, loss=(x.sum(), 1)), name="side")
    with pytest.raises(fp.BatchError, match=r"weight="):
        fp.run(
            plan_of(lambda y, t: (y.sum(), len(y)), (side, SCALE)),
            (torch.ones(()), torch.ones(())),
            (torch.ones(4, 1), None),
        )
    for wrong in (3.0, (1, 2, 3)):
        bad = fp.stage(lambda p, x, wrong=wrong: fp.Out(x * p, loss=wrong), name="bad")
        with pytest.raises(fp.StageError, match=r"Out.loss is \(sum, weight\)"):
            fp.run(plan_of(row_mean, (bad,)), (torch.ones(()),), (torch.ones(4, 1), None))


def params_of():
    return (
        {
            "w": torch.ones(2),
            "steps": torch.tensor(3),
            "name": "a",
            "none": None,
            "unused": torch.ones(1),
        },
        {"w": torch.ones(2)},
    )


TREE = fp.stage(lambda p, x: x * p["w"], name="tree")


def run_tree(params, *, ties=(), **options):
    """A run of two stages that multiply, over ones."""
    plan = plan_of(row_mean, (TREE, TREE), ties=ties)
    return fp.run(plan, params, (torch.ones(4, 2), None), **options)


@pytest.mark.parametrize(
    ("trainable", "expected"),
    [
        (None, {(0, "w"), (0, "unused"), (1, "w")}),
        (True, {(0, "w"), (0, "unused"), (1, "w")}),
        (False, set()),
        (lambda name, leaf: name.endswith("w"), {(0, "w"), (1, "w")}),
        ((True, False), {(0, "w"), (0, "unused")}),
        (
            ({"w": False, "steps": False, "name": False, "none": False, "unused": True}, True),
            {(0, "unused"), (1, "w")},
        ),
    ],
)
def test_which_leaves_get_gradients(trainable, expected):
    """Every form; None elsewhere, zeros and a mention where unused."""
    params = params_of()
    result = run_tree(params, trainable=trainable)
    found = {
        (s, k) for s, tree in enumerate(result.grads) for k, g in tree.items() if g is not None
    }
    assert expected == found
    assert [tree.keys() for tree in params] == [tree.keys() for tree in result.grads]
    assert (((0, "unused"),) if (0, "unused") in expected else ()) == result.unused
    if (0, "unused") in expected:
        assert torch.equal(torch.zeros(1), result.grads[0]["unused"])


def test_marked_leaves_win_over_floating_ones():
    """Where some leaf has requires_grad, exactly those are trained: a frozen trunk and a trained
    head."""
    params = params_of()
    params[1]["w"].requires_grad_()
    grads = run_tree(params).grads
    assert [None, None] == [grads[0]["w"], grads[0]["unused"]]
    assert torch.equal(torch.full((2,), 1.0), grads[1]["w"])
    assert params[1]["w"].grad is None


def test_wrong_trainable_is_refused():
    """A word, another number of stages, another structure, leaves that are not floating."""
    for trainable, reason in (
        ((True,), "1 entries for 2"),
        ("all", r"trainable is True, False, a function.*got .all."),
        (({"w": True}, True), r"trainable\[0\]"),
        ((dict.fromkeys(params_of()[0], True), True), "not floating-point tensors.*steps"),
    ):
        with pytest.raises(fp.PlanError, match=reason):
            run_tree(params_of(), trainable=trainable)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_declared_ties_get_the_sum(executor):
    """One tensor in two stages, or two replicas: each holder gets the sum, as a tensor of its
    own."""
    x = f64(6, 2)
    w = f64(2)
    leaf = w.clone().requires_grad_()
    (x * leaf * 2 * leaf).square().mean().backward()
    double = fp.stage(lambda p, x: x * 2, name="double")
    ties = [[(0, "w"), (2, "w")]]
    plan = plan_of(lambda y, t: y.square().mean(), (TREE, double, TREE), 3, ties=ties)
    for params in (({"w": w}, (), {"w": w}), ({"w": w}, (), {"w": w.clone()})):
        grads = fp.run(plan, params, (x, None), executor=executor).grads
        torch.testing.assert_close(grads[0]["w"], leaf.grad)
        assert torch.equal(grads[0]["w"], grads[2]["w"])
        assert grads[0]["w"].data_ptr() != grads[2]["w"].data_ptr()
        torch.testing.assert_close(fp.global_norm(grads, ties=ties), leaf.grad.norm())


def test_a_shared_tensor_that_nobody_declared_is_refused_with_the_fix():
    """The error is the argument to paste; wrong ties name the nearest leaf, shapes and flags."""
    w = torch.ones(2)
    with pytest.raises(fp.PlanError) as caught:
        run_tree(({"w": w}, {"w": w}))
    assert "make_plan(..., ties=[((0, 'w'), (1, 'w'))])" in str(caught.value)
    assert run_tree(({"w": w}, {"w": w}), ties=[((0, "w"), (1, "w"))]).grads
    for params, group, reason in (
        (({"weight": w}, {"w": w}), [(0, "wieght"), (1, "w")], "did you mean 'weight'"),
        (({"w": w}, {"w": torch.ones(3)}), [(0, "w"), (1, "w")], "differ in shape"),
        (({"w": w}, {"w": w.clone().requires_grad_()}), [(0, "w"), (1, "w")], "some are not"),
    ):
        with pytest.raises(fp.PlanError, match=reason):
            run_tree(params, ties=[group])


# -- losses of one's own that are not means over rows

ROOT = torch.tensor([[2.0, -1.0], [0.5, 3.0]], dtype=torch.float64)
NO_MEANS = {
    "sum": lambda y, t: (y - t).square().sum(),
    "half a sum": lambda y, t: (y - t).square().sum() / 2,
    "root": lambda y, t: (y - t).square().mean().sqrt(),
    "largest": lambda y, t: (y - t).abs().max(),
    "contrastive": lambda y, t: F.cross_entropy(y @ t.T, torch.arange(len(y))),
    "centred": lambda y, t: (y - y.mean(0)).square().mean(),
}
MEANS = {
    "mean": lambda y, t: (y - t).square().mean(),
    "mean and a constant": lambda y, t: (y - t).square().mean() + 3,
    "mean of sums": lambda y, t: (y - t).square().sum(1).mean(),
    "sum over rows": lambda y, t: (y - t).square().sum() / len(y),
    "Mahalanobis": lambda y, t: ((y - t) @ ROOT).square().mean(),
    "in place": lambda y, t: y.sub_(t).square_().mean(),
    "single precision only": lambda y, t: F.mse_loss(y.float(), t.float()).double(),
    "zero": lambda y, t: (y * 0).mean(),
    "nan": lambda y, t: (y * float("nan")).mean(),
    "cross entropy": lambda y, t: F.cross_entropy(y, t.argmax(1)),
}


@pytest.mark.parametrize("rows", [4, 6, 16], ids=["1 row", "1 or 2 rows", "4 rows"])
@pytest.mark.parametrize("name", NO_MEANS)
def test_a_loss_that_is_no_mean_over_rows_is_refused(name, rows):
    """The loss of the batch would be another number than that of plain PyTorch. Each run raises,
    not only the first, until the weights are stated."""
    loss = NO_MEANS[name]
    x, t = f64(rows, 2), f64(rows, 2)
    if name in ("centred", "root", "largest") and rows == 4:
        result = run(loss, x, t)  # one row has nothing to compare: means of microbatches
        assert same(result.loss, torch.stack(result.losses).mean())
        return
    for _ in range(2):
        with pytest.raises(
            fp.BatchError, match="the loss (is not a mean over rows|returned a sum over .*): for"
        ):
            run(loss, x, t)
    if "sum" in name:  # no weight makes a sum a mean
        with pytest.raises(fp.BatchError, match="the loss returned a sum over the microbatch"):
            run(loss, x, t, weight=len)
        return
    result = run(loss, x, t, weight=len)
    sizes = torch.tensor([len(part) for part in torch.tensor_split(x, 4)], dtype=torch.float64)
    torch.testing.assert_close(result.loss, (torch.stack(result.losses) * sizes).sum() / rows)
    assert run(loss, x, t, count=1).loss == loss(x, t)  # one microbatch is the whole batch


@pytest.mark.parametrize("name", MEANS)
def test_a_loss_that_is_a_mean_over_rows_runs(name):
    loss, x, t = MEANS[name], f64(10, 2), f64(10, 2)
    torch.testing.assert_close(
        run(loss, x, t).loss.double(), loss(x.clone(), t).double(), equal_nan=True
    )


def test_the_check_does_not_change_draws_of_the_loss():
    """A random loss is not a mean over rows in any call, so it is not checked, and draws the same
    numbers in a second plan, which does not check."""
    x, t = f64(8, 3), f64(8, 3)

    def noisy(y, t):
        return F.mse_loss(F.dropout(y), t)

    assert same(run(noisy, x, t, seed=1).losses, run(noisy, x, t, seed=1).losses)


def test_other_rows_are_not_checked():
    """Along axis 1 a loss may look at neighbours; a loss that cannot take fewer rows runs."""
    x, t = f64(6, 8), f64(6, 8)

    def steps(y, t):
        return (y[1:] - t[:-1]).square().mean()

    batch = (fp.Axis(x, 1), fp.Axis(t, 1))
    result = fp.run(plan_of(steps), (torch.ones((), dtype=torch.float64),), batch)
    torch.testing.assert_close(result.loss, steps(x, t))

    def pairs(y, t):
        return F.mse_loss(y.reshape(4, 2, -1), t.reshape(4, 2, -1))

    x, t = f64(32, 3), f64(32, 3)
    torch.testing.assert_close(run(pairs, x, t).loss, F.mse_loss(x, t))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_compiled_loss_is_not_compiled_again():
    """The check calls the function itself, because other rows would compile the loss anew."""
    sizes = []

    def backend(graph, inputs):
        sizes.extend(len(value) for value in inputs if isinstance(value, torch.Tensor))
        return graph

    def loss(y, t):
        return F.mse_loss(y, t)

    compiled = torch.compile(loss, backend=backend, dynamic=False)
    x, t = f64(12, 3), f64(12, 3)
    torch.testing.assert_close(run(compiled, x, t, count=2).loss, F.mse_loss(x, t))
    assert {*sizes} == {6}
    summed = torch.compile(lambda y, t: (y - t).square().sum(), backend=backend, dynamic=False)
    with pytest.raises(fp.BatchError, match="the loss returned a sum over the microbatch"):
        run(summed, x, t, count=2)


# -- models that compute their own loss


class WithLoss(torch.nn.Module):
    """The end of a model: it returns its loss, beside what it computed."""

    def __init__(self, loss, *, norm=False, dropout=0.0, positions=False):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2).double()
        self.norm = torch.nn.BatchNorm1d(2).double() if norm else torch.nn.Identity()
        self.dropout, self.loss, self.positions = torch.nn.Dropout(dropout), loss, positions

    def forward(self, given):
        x, t = given[:2]
        y = self.dropout(self.norm(self.linear(x)))
        y = y + given[2] if self.positions else y
        return {"loss": self.loss(y, t), "y": y}


def run_model(loss, given, *, compiled=False, fp_weight=None, count=4, **options):
    model = WithLoss(loss, **options)
    stage, params, state = fp.from_module(model, name="end")
    start = fp.stage(lambda p, x: x, name="start")
    if compiled:
        stage = fp.compile_stage(stage)
    plan = plan_of(lambda y, _: y["loss"], (start, stage), count, weight=fp_weight)
    target = torch.zeros(len(given[0]))
    result = fp.run(plan, ((), params), (given, target), state=((), state), seed=1)
    return result, model


@pytest.mark.parametrize(("positions", "compiled"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("name", ["sum", "root", "centred"])
def test_a_model_whose_own_loss_is_no_mean_over_rows_is_refused(name, positions, compiled):
    """Each run raises, until the weights are stated. Tensors without rows do not hinder it."""
    given = [f64(16, 2), f64(16, 2), *([fp.Replicate(f64(1, 2))] if positions else [])]
    options = {"positions": positions, "compiled": compiled}
    with pytest.raises(
        fp.BatchError, match=r"the loss (is not a mean|returned a sum)[^\n]*\nin 1F0"
    ):
        run_model(NO_MEANS[name], given, **options)
    if name == "sum":  # no weight makes a sum a mean
        with pytest.raises(fp.BatchError, match="the loss returned a sum over the microbatch"):
            run_model(NO_MEANS[name], given, fp_weight=len, **options)
        return
    result, _ = run_model(NO_MEANS[name], given, fp_weight=len, **options)
    torch.testing.assert_close(result.loss, torch.stack(result.losses).mean())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["mean", "mean of sums", "sum over rows", "cross entropy"])
def test_a_model_whose_own_loss_is_a_mean_over_rows_runs(name, compiled):
    given = [f64(10, 2), f64(10, 2)]
    result, model = run_model(MEANS[name], given, compiled=compiled)
    torch.testing.assert_close(result.loss, model(given)["loss"].detach())


def test_layers_that_look_at_all_rows_and_random_ones_are_checked_in_evaluation_mode():
    """In training, fewer rows have other statistics and draws, so the numbers would show nothing."""
    given = [f64(16, 2), f64(16, 2)]
    for options in ({"norm": True}, {"dropout": 0.5}):
        result, _ = run_model(MEANS["mean"], given, **options)
        torch.testing.assert_close(result.loss, torch.stack(result.losses).mean())
        with pytest.raises(fp.BatchError, match="the loss returned a sum over the microbatch"):
            run_model(NO_MEANS["sum"], given, **options)


def test_the_check_of_a_model_s_loss_leaves_no_tensors():
    """The copies of the stage that it runs are gone without the garbage collector."""
    stage, params, state = fp.from_module(WithLoss(MEANS["mean"], norm=True), name="end")
    given = [f64(16, 2), f64(16, 2)]

    def run_anew():  # a new loss is checked
        plan = plan_of(lambda y, _: y["loss"], (stage,))
        fp.run(plan, (params,), (given, torch.zeros(16)), state=(state,), seed=1)

    run_anew()  # what is made once is made
    gc.collect()
    before = num_tensors()
    gc.disable()
    try:
        run_anew()
        assert before == num_tensors()
    finally:
        gc.enable()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_reason_to_refuse_a_model_s_loss(dtype):
    head = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    stage, params, _ = fp.from_module(head.to(dtype), name="head")

    def end(p, x):
        return F.cross_entropy(stage.fn(p, x).float(), x.argmax(1))

    plan = plan_of(lambda y, _: y, (SCALE, fp.stage(end, name="end")))
    x = torch.randn(64, 64, dtype=dtype)
    result = fp.run(plan, (torch.ones((), dtype=dtype), params), (x, None))
    torch.testing.assert_close(
        result.loss, F.cross_entropy(head(x).float(), x.argmax(1)).detach(), rtol=1e-2, atol=0
    )
