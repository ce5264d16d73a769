"""Losses as users write them: torch's own with all their options, sums, padding, what cannot be a
loss of a plan."""

import itertools
import pickle
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from common import assert_same_result
from torch import nn

import funcpipe as fp


def f64(*shape):
    return torch.randn(*shape, dtype=torch.float64)


SCALE = fp.stage(lambda p, x: x * p, name="scale")
STAGES = (SCALE, fp.stage(lambda p, x: x + p, name="shift"))
WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0], dtype=torch.float64)


def numbers():
    return torch.tensor(1.5, dtype=torch.float64), torch.tensor(0.25, dtype=torch.float64)


def plan_of(loss, count=4, stages=STAGES, **options):
    return fp.make_plan(
        stages, fp.schedules.one_f_one_b(2, count), loss=loss, devices="cpu", **options
    )


def whole(loss, x, target):
    """Loss and gradients by plain autograd over the whole batch."""
    params = [one.clone().requires_grad_() for one in numbers()]
    value = loss(x * params[0] + params[1], target)
    value.backward()
    return value.detach(), [one.grad for one in params]


def assert_exact(loss, x, target, plan=None, **options):
    """The plan's result is that of the whole batch. Returns it."""
    value, grads = whole(loss, x, target)
    result = fp.run(plan or plan_of(loss), numbers(), (x, target), **options)
    torch.testing.assert_close(result.loss, value)
    scale = options.get("loss_scale", 1.0)
    for found, grad in zip(result.grads, grads, strict=True):
        torch.testing.assert_close(found, grad * scale)
    return result


def labels(rows=10, classes=5, ignored=(0, 1, 2, 7), ignore_index=-100):
    target = torch.randint(0, classes, (rows,))
    target[list(ignored)] = ignore_index
    return target


# -- what torch's losses mean
# -------------------------------------------------------------------------------


CLASSES = {
    "module": nn.CrossEntropyLoss(),
    "function": F.cross_entropy,
    "partial": partial(F.cross_entropy, label_smoothing=0.1),
    "weighted": nn.CrossEntropyLoss(weight=WEIGHTS),
    "weighted partial": partial(F.cross_entropy, weight=WEIGHTS),
    "weighted, smooth": nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2),
    "ignore_index": nn.CrossEntropyLoss(ignore_index=3),
    "both": partial(F.cross_entropy, weight=WEIGHTS, ignore_index=1),
    "nll": nn.NLLLoss(weight=WEIGHTS, ignore_index=2),
    "nll function": F.nll_loss,
    "sum": nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum"),
    "size_average=False": partial(F.cross_entropy, size_average=False),
}


@pytest.mark.filterwarnings("ignore:size_average")
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("ignored", [(), (0, 1, 2, 7)], ids=["", "padded"])
def test_cross_entropy_is_that_of_the_whole_batch(name, ignored):
    """Class weights, ignored targets (the first microbatch has no other), sums; microbatches have
    3, 3, 2 and 2 rows."""
    loss = CLASSES[name]
    ignore_index = {"ignore_index": 3, "both": 1, "nll": 2}.get(name, -100)
    target = labels(ignored=ignored, ignore_index=ignore_index)
    result = assert_exact(loss, f64(10, 5), target)
    if "sum" in name or "False" in name:
        assert result.weight is None
        torch.testing.assert_close(sum(result.losses), result.loss)
    else:
        weights = WEIGHTS if "weighted" in name or name in ("both", "nll") else torch.ones(5)
        assert float(weights[target[target != ignore_index]].sum()) == pytest.approx(result.weight)


def test_class_weights_count():
    """The numbers of the issue: 1.638, not the mean of the microbatches' means."""
    torch.manual_seed(0)
    loss, x, target = nn.CrossEntropyLoss(weight=WEIGHTS), f64(8, 5), labels(8, ignored=())
    result = assert_exact(loss, x, target)
    assert (
        abs(float(result.loss - sum(loss(*rows) for rows in zip(x.split(2), target.split(2))) / 4))
        > 1e-3
    )
    with pytest.raises(fp.BatchError, match="the loss is a mean with class weights"):
        fp.run(plan_of(lambda y, t: loss(y, t)), numbers(), (x, target))


def test_pixels_and_probabilities():
    """Targets (rows, height, width) with ignored pixels; probabilities count by rows, whatever the
    class weights."""
    target = torch.randint(0, 5, (10, 2, 3))
    target[:3] = -100
    target[5, 0] = -100
    assert_exact(nn.CrossEntropyLoss(weight=WEIGHTS), f64(10, 5, 2, 3), target)
    assert_exact(nn.CrossEntropyLoss(weight=WEIGHTS), f64(10, 5), f64(10, 5).softmax(1))


ELEMENTS = {
    "BCE": (nn.BCELoss, F.binary_cross_entropy),
    "BCEWithLogits": (
        partial(nn.BCEWithLogitsLoss, pos_weight=WEIGHTS[:3]),
        F.binary_cross_entropy_with_logits,
    ),
    "Huber": (nn.HuberLoss, F.huber_loss),
    "KLDiv": (nn.KLDivLoss, F.kl_div),
    "L1": (nn.L1Loss, F.l1_loss),
    "MSE": (nn.MSELoss, F.mse_loss),
    "PoissonNLL": (nn.PoissonNLLLoss, F.poisson_nll_loss),
    "SmoothL1": (nn.SmoothL1Loss, F.smooth_l1_loss),
    "SoftMargin": (nn.SoftMarginLoss, F.soft_margin_loss),
    "HingeEmbedding": (nn.HingeEmbeddingLoss, F.hinge_embedding_loss),
    "MultiLabelSoftMargin": (
        partial(nn.MultiLabelSoftMarginLoss, weight=WEIGHTS[:3]),
        F.multilabel_soft_margin_loss,
    ),
    "MultiLabelMargin": (nn.MultiLabelMarginLoss, F.multilabel_margin_loss),
    "MultiMargin": (partial(nn.MultiMarginLoss, weight=WEIGHTS[:3]), F.multi_margin_loss),
}


def sample(name):
    """Outputs and a target that the loss takes."""
    x = torch.rand(10, 3, dtype=torch.float64) * 0.3
    if name == "MultiLabelMargin":
        return x, torch.tensor([[0, 2, -1], [1, -1, 0]] * 5)
    if name == "MultiMargin":
        return x, torch.randint(0, 3, (10,))
    if name in ("SoftMargin", "HingeEmbedding"):
        return x, torch.randint(0, 2, (10, 3)) * 2.0 - 1
    return x, torch.rand(10, 3, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:reduction. .mean. divides")
@pytest.mark.parametrize(
    ("name", "reduction"),
    [*itertools.product(ELEMENTS, ["mean", "sum"]), ("KLDiv", "batchmean")],
)
def test_every_other_loss_is_that_of_the_whole_batch(name, reduction):
    """Their means are divided by rows, or by elements, of which each row has as many."""
    module, function = ELEMENTS[name]
    for loss in (module(reduction=reduction), partial(function, reduction=reduction)):
        result = assert_exact(loss, *sample(name))
        assert (None if reduction == "sum" else 10.0) == result.weight


@pytest.mark.parametrize(("compiled", "executor"), [(False, "serial"), (True, "threads")])
@pytest.mark.parametrize("name", ["sum", "weighted", "ignore_index"])
def test_every_executor_and_the_oracle(name, compiled, executor):
    """With programs, with remat, with a loss scale; a microbatch that counts nothing adds exactly
    nothing."""
    loss, x, target = (
        CLASSES[name],
        f64(10, 5),
        labels(ignore_index=3 if name == "ignore_index" else -100),
    )
    if name == "sum" and compiled:
        loss = nn.CrossEntropyLoss(
            reduction="sum"
        )  # a program refuses tensors that it was not given
    stages = (
        [fp.compile_stage(one, fuse=False, fallback=name == "weighted") for one in STAGES]
        if compiled
        else STAGES
    )
    for schedule in (
        fp.schedules.zero_bubble(2, 4),
        fp.schedules.remat(fp.schedules.one_f_one_b(2, 4)),
    ):
        plan = fp.make_plan(stages, schedule, loss=loss, devices="cpu")
        result = assert_exact(loss, x, target, plan, executor=executor, loss_scale=8.0)
        assert_same_result(fp.run_sequential(plan, numbers(), (x, target), loss_scale=8.0), result)
    forwards = fp.make_plan(
        stages, fp.schedules.fill_drain(2, 4, backward=False), loss=loss, devices="cpu"
    )
    torch.testing.assert_close(fp.run(forwards, numbers(), (x, target)).loss, result.loss)


@pytest.mark.parametrize(
    "loss", [nn.MSELoss(reduction="sum"), CLASSES["weighted"]], ids=["sum", "weighted"]
)
def test_accumulated_parts_are_one_batch(loss):
    """Sums add up, means count by what divided them; also where the parts have other loss
    scales."""
    summed = isinstance(loss, nn.MSELoss)
    x, target = f64(10, 5), f64(10, 5) if summed else labels()
    parts = [
        fp.run(plan_of(loss, 2), numbers(), (x[:7], target[:7]), loss_scale=4.0),
        fp.run(plan_of(loss, 2), numbers(), (x[7:], target[7:])),
    ]
    value, grads = whole(loss, x, target)
    total = fp.accumulate(parts)
    torch.testing.assert_close(total.loss, value)
    torch.testing.assert_close(list(total.grads), grads)
    again = fp.accumulate([fp.accumulate(parts[:1]), parts[1]])
    torch.testing.assert_close(again.loss, value)
    assert total.weight == again.weight
    mean = fp.run(plan_of(F.mse_loss, 2), numbers(), (x, x))
    with pytest.raises(
        fp.PlanError if summed else AssertionError,
        match="are means and some are sums" if summed else "no match",
    ):
        assert not fp.accumulate([parts[0], mean]), "no match"


def test_the_weight_of_the_user_goes_first():
    """Rows for a weighted loss; a sum is divided by all that counts."""
    x, target = f64(10, 5), labels()
    by_rows = fp.run(plan_of(F.mse_loss, weight=lambda t: 1.0), numbers(), (x, x))
    torch.testing.assert_close(by_rows.loss, torch.stack(by_rows.losses).mean())
    total = partial(F.cross_entropy, reduction="sum")
    plan = plan_of(total, weight=lambda t: (t != -100).sum())
    result = assert_exact(F.cross_entropy, x, target, plan)
    assert 6.0 == result.weight
    assert 0.0 == result.losses[0]
    torch.testing.assert_close(
        result.losses[1], F.cross_entropy((x * 1.5 + 0.25)[3:6], target[3:6])
    )


def test_a_loss_that_weighs_its_microbatches():
    """A method ``weigh(inputs, target)``: a number before any forward; None: rows."""

    class Masked:
        def __call__(self, y, target):
            return F.mse_loss(y[target["mask"]], target["y"][target["mask"]])

        def weigh(self, inputs, target):
            assert inputs.shape == target["y"].shape
            return target["mask"].sum()

    class ByRows(Masked):
        def weigh(self, inputs, target):
            return None

    x, target = f64(10, 3), {"y": f64(10, 3), "mask": torch.rand(10, 3) < 0.5}
    target["mask"][:3] = False
    result = assert_exact(Masked(), x, target)
    assert float(target["mask"].sum()) == result.weight
    everything = {**target, "mask": torch.ones(10, 3, dtype=torch.bool)}
    assert 10.0 == assert_exact(ByRows(), x, everything).weight


def test_modules_of_your_own_that_say_sum():
    """``reduction="sum"`` of a subclass with its own forward is believed; a subclass without one is
    torch's."""

    class Own(nn.MSELoss):
        def forward(self, y, target):
            return (
                (y - target).abs().sum() if self.reduction == "sum" else (y - target).abs().mean()
            )

    class Same(nn.CrossEntropyLoss):
        pass

    x = f64(10, 3)
    assert assert_exact(Own(reduction="sum"), x, f64(10, 3)).weight is None
    assert 10.0 == assert_exact(Own(), x, f64(10, 3)).weight
    assert 6.0 == assert_exact(Same(), f64(10, 5), labels()).weight


def test_auxiliary_losses_count_by_rows():
    """Beside a loss whose targets are padded a stage's own loss keeps its rows."""

    def aside(p, x):
        y = x * p
        return fp.Out(y, loss=(y.square().mean(1).sum(), len(y)))

    x, target = f64(10, 5), labels()
    stages = (fp.stage(aside), STAGES[1])
    result = fp.run(plan_of(F.cross_entropy, stages=stages), numbers(), (x, target))
    value, grads = whole(F.cross_entropy, x, target)
    scale = numbers()[0].requires_grad_()
    (x * scale).square().mean().backward()
    torch.testing.assert_close(result.loss, value + (x * scale.detach()).square().mean())
    torch.testing.assert_close(result.grads, (grads[0] + scale.grad, grads[1]))
    with pytest.raises(fp.BatchError, match=r"nothing divides; give make_plan\(\.\.\., weight="):
        fp.run(
            plan_of(partial(F.cross_entropy, reduction="sum"), stages=stages),
            numbers(),
            (x, target),
        )


def test_a_nan_that_does_not_count_is_no_fault():
    """check="finite" looks at what counts."""
    x, target = f64(10, 5), labels()
    assert_exact(F.cross_entropy, x, target, check="finite")
    x[9] = float("nan")
    with pytest.raises(fp.NotFiniteError):
        fp.run(plan_of(F.cross_entropy), numbers(), (x, target), check="finite")


def test_plans_travel():
    """A plan with a known loss can be pickled, and read."""
    plan = plan_of(nn.CrossEntropyLoss(weight=WEIGHTS))
    counts = pickle.loads(pickle.dumps(plan.counts))
    assert float(counts.weigh(None, torch.tensor([1, 2, -100]))) == 4.0
    assert (
        plan_of(F.mse_loss).counts
        == plan_of(nn.L1Loss()).counts
        != plan_of(lambda y, t: y.sum() / len(y)).counts
    )


# -- what is refused
# -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (
            nn.MSELoss(reduction="none"),
            r"MSELoss with reduction='none'.*one number.*reduction='mean' or 'sum'",
        ),
        (partial(F.cross_entropy, reduction="none"), r"cross_entropy with reduction='none'"),
        (partial(F.l1_loss, reduce=False), r"l1_loss with reduction='none'"),
        (partial(F.l1_loss, reduction="average"), r"reduction='average'"),
        (
            nn.CTCLoss(),
            r"\(y, target\), but CTCLoss takes \(log_probs.*lambda y, target: loss\(y, \*target\)",
        ),
        (F.triplet_margin_loss, r"triplet_margin_loss takes \(anchor"),
        (nn.CosineEmbeddingLoss(), r"CosineEmbeddingLoss takes"),
    ],
)
def test_what_cannot_be_the_loss_of_a_plan(loss, reason):
    """Refused where the plan is made, with the mend."""
    with pytest.raises(fp.PlanError, match=reason):
        plan_of(loss)


def test_nothing_that_counts():
    """A batch of ignored targets alone has no loss; nothing has run."""
    ran = []
    stages = (fp.stage(lambda p, x: ran.append(1)), STAGES[1])
    with pytest.raises(fp.BatchError, match="0 for every microbatch"):
        fp.run(
            plan_of(F.cross_entropy, stages=stages), numbers(), (f64(8, 5), torch.full((8,), -100))
        )
    negative = nn.CrossEntropyLoss(weight=-WEIGHTS)
    with pytest.raises(fp.BatchError, match="number from 0; for microbatch 0"):
        fp.run(
            plan_of(negative, stages=stages),
            numbers(),
            (f64(8, 5), torch.zeros(8, dtype=torch.long)),
        )
    assert [] == ran


def test_a_class_that_is_none_is_torchs_error_with_coordinates():
    """A target out of range is refused by the loss, not by what counts it."""
    with pytest.raises(IndexError, match="out of bounds") as caught:
        fp.run(plan_of(CLASSES["weighted"]), numbers(), (f64(8, 5), torch.full((8,), 7)))
    assert 0 == caught.value.funcpipe.microbatch


def test_ready_made_microbatches():
    """Padding counts in microbatches that are cut already, too."""
    x, target = f64(10, 5), labels()
    cut = [fp.Microbatches(one.split([1, 4, 5])) for one in (x, target)]
    value, grads = whole(F.cross_entropy, x, target)
    result = fp.run(plan_of(F.cross_entropy), numbers(), tuple(cut))
    torch.testing.assert_close(result.loss, value)
    torch.testing.assert_close(list(result.grads), grads)


class Tagger(nn.Module):
    """Computes its loss itself, if it gets labels."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, tokens, labels=None):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return {"logits": x, "loss": None if labels is None else F.cross_entropy(x, labels)}


@pytest.mark.parametrize(
    "target", [None, torch.zeros(4, dtype=torch.long)], ids=["no labels", "labels as the target"]
)
def test_a_model_that_computes_its_loss_gets_its_labels_among_the_inputs(target):
    """Where they were forgotten, or are the target as elsewhere, the message says where they go."""
    split = fp.split(Tagger(), 2)
    plan = fp.make_plan(split, fp.schedules.one_f_one_b(2, 2), loss=split.loss, devices="cpu")
    tokens = torch.arange(4)
    with pytest.raises(
        fp.PlanError,
        match=r"output has no loss; .* put them among the inputs: \({..., 'labels': labels}, None\)",
    ):
        fp.run(plan, split.params, ({"tokens": tokens}, target))
    assert fp.run(plan, split.params, ({"tokens": tokens, "labels": tokens % 4}, None)).loss > 0


# -- what rows cannot weigh


SUMS = {
    "squares": lambda y, t: ((y - t) ** 2).sum(),
    "torch's, summed": lambda y, t: F.mse_loss(y, t, reduction="sum"),
    "classes": lambda y, t: F.cross_entropy(y, t.argmax(1), reduction="sum"),
    "an autoencoder": lambda y, t: (y - t).square().sum() - 0.5 * (1 + y - y.exp()).sum(),
    "two sums": lambda y, t: -(t * y.log_softmax(1)).sum() + y.square().sum((0, 1)),
}
NO_SUMS = {
    "a sum over columns": lambda y, t: (y - t).square().sum(1).mean(),
    "a sum of means": lambda y, t: (y - t).square().mean(0).sum(),
    "divided": lambda y, t: (y - t).square().sum() / len(y),
    "two terms times a number": lambda y, t: (
        (y - t).square().sum() * (1 / len(y)) + y.sum() * (2 / len(y))
    ),
    "times a number": lambda y, t: (y - t).square().sum() * (1 / len(y)),
    "a mean and a sum of means": lambda y, t: F.mse_loss(y, t) + y.mean(0).sum(),
    "several losses": lambda y, t: torch.stack([F.mse_loss(y, t), F.l1_loss(y, t)]).sum(),
    "torch's mean": lambda y, t: F.mse_loss(y, t),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_of_your_own_is_refused(name):
    """A sum taken for a mean would be too small by the number of microbatches."""
    x, target = f64(10, 3), f64(10, 3)
    with pytest.raises(fp.BatchError, match="returned a sum over the microbatch"):
        fp.run(plan_of(SUMS[name]), numbers(), (x, target))
    with pytest.raises(fp.BatchError, match="returned a sum over the microbatch"):
        fp.run(plan_of(SUMS[name], weight=len), numbers(), (x, target))
    assert_exact(SUMS[name], x, target, plan_of(SUMS[name], count=1))


@pytest.mark.parametrize("name", NO_SUMS)
def test_means_with_sums_inside_are_exact(name):
    assert_exact(NO_SUMS[name], f64(10, 3), f64(10, 3))


class Annealed(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, y, target):
        self.calls += 1
        return F.mse_loss(y, target) * 0.9**self.calls


class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(5, dtype=torch.float64))

    def forward(self, y, target):
        loss = F.mse_loss(y - self.center, target)
        self.center.mul_(0.9).add_(y.detach().mean(0) * 0.1)
        return loss


@pytest.mark.parametrize("loss", [Annealed(), Centered()], ids=lambda loss: type(loss).__name__)
def test_a_loss_with_a_state_of_its_own_is_refused(loss):
    """Its result would depend on the order of the microbatches."""
    x, target = f64(8, 5), f64(8, 5)
    with pytest.raises(fp.BatchError, match="in a second call with the same rows .* keeps a state"):
        fp.run(plan_of(loss), numbers(), (x, target))
    fp.run(plan_of(loss, weight=len), numbers(), (x, target))


def right(y, t):
    return (y.argmax(1) == t.argmax(1)).to(y.dtype)


def masked(y, t):
    mask = t[:, 0] > 0
    return ((y - t).square().mean(1) * mask).sum(), mask.sum()


METRICS = {
    "accuracy": lambda y, t: (F.mse_loss(y, t), right(y, t).mean()),
    "accuracy as a number": lambda y, t: (F.mse_loss(y, t), right(y, t).mean().item()),
    "another loss": lambda y, t: (F.mse_loss(y, t), F.l1_loss(y, t).detach()),
}
MEANS_WITH_WEIGHTS = {
    "rows": lambda y, t: (F.mse_loss(y, t), len(y)),
    "elements": lambda y, t: fp.Loss(F.mse_loss(y, t), t.numel()),
    "a mask": lambda y, t: (masked(y, t)[0] / masked(y, t)[1], masked(y, t)[1]),
}
MEANS_WITH_COUNTS = {
    "hits": lambda y, t: (F.mse_loss(y, t), right(y, t).sum()),
    "rows of a kind": lambda y, t: (F.mse_loss(y, t), (t[:, 0] > 0).sum()),
    "a constant": lambda y, t: (F.mse_loss(y, t), 16.0),
}
PAIRS_WITHOUT_SUMS = {
    "rows that are compared": lambda y, t: ((y @ y.T).logsumexp(1).sum(), len(y)),
    "a norm": lambda y, t: ((y - t).norm(), len(y)),
    "a sum of a broadcast": lambda y, t: ((y[:, :1] - t[:, 0]).square().sum(), len(y)),
}
PAIRS = {
    "rows": lambda y, t: (F.mse_loss(y, t, reduction="sum"), t.numel()),
    "a mask": masked,
    "each microbatch alike": lambda y, t: (F.mse_loss(y, t), 1.0),
    "each microbatch with a row that counts": lambda y, t: (
        masked(y, t)[0] / masked(y, t)[1].clamp(min=1),
        (t[:, 0] > 0).any(),
    ),
    "zeros": lambda y, t: (0 * y.sum(), len(y)),
    "a constant weight": lambda y, t: (F.mse_loss(y, t, reduction="sum"), 9.0),
    "a metric beside": lambda y, t: fp.Loss(
        F.mse_loss(y, t, reduction="sum"), t.numel(), aux=right(y, t).mean()
    ),
}


@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in METRICS), ("accuracy", True)]
)
def test_a_metric_in_the_place_of_the_weight_is_refused(name, compiled):
    """The loss of the batch would be divided by the accuracy."""
    stages = [fp.compile_stage(stage) for stage in STAGES] if compiled else STAGES
    with pytest.raises(fp.BatchError, match=r"second value is a mean over rows.*aux=metric"):
        fp.run(plan_of(METRICS[name], stages=stages), numbers(), (f64(48, 3), f64(48, 3)))


@pytest.mark.parametrize("name", MEANS_WITH_WEIGHTS)
def test_a_mean_in_the_place_of_the_sum_is_refused(name):
    x, target = f64(48, 3), f64(48, 3)
    loss = MEANS_WITH_WEIGHTS[name]
    for count in (1, 4):
        with pytest.raises(
            fp.BatchError, match=r"returned \(mean, weight\).*mean \* weight, weight"
        ):
            fp.run(plan_of(loss, count=count), numbers(), (x, target))
    with pytest.raises(fp.BatchError, match=r"returned \(mean, weight\)"):
        fp.run(plan_of(lambda y, t: loss(y, t), weight=len), numbers(), (x, target))

    def mended(y, t):
        mean, weight = loss(y, t)[:2]
        return mean * weight, weight

    result = fp.run(plan_of(mended), numbers(), (x, target))
    params = numbers()
    torch.testing.assert_close(result.loss, loss(x * params[0] + params[1], target)[0])


@pytest.mark.parametrize(
    ("name", "count"), [*((name, 4) for name in MEANS_WITH_COUNTS), ("hits", 1)]
)
def test_a_mean_beside_a_count_is_refused(name, count):
    with pytest.raises(fp.BatchError, match=r"first value is a mean over rows.*aux=metric"):
        fp.run(plan_of(MEANS_WITH_COUNTS[name], count=count), numbers(), (f64(96, 3), f64(96, 3)))


@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in PAIRS_WITHOUT_SUMS), ("a norm", True)]
)
def test_a_pair_whose_sum_does_not_add_up_is_refused(name, compiled):
    """The loss of the batch would depend on the number of microbatches."""
    loss, batch = PAIRS_WITHOUT_SUMS[name], (f64(12, 3), f64(12, 3))
    stages = [fp.compile_stage(stage) for stage in STAGES] if compiled else STAGES
    with pytest.raises(fp.BatchError, match=r"no sum over rows: it is .* for the parts.*weight="):
        fp.run(plan_of(loss, stages=stages), numbers(), batch)
    total, weight = loss(batch[0] * numbers()[0] + numbers()[1], batch[1])
    result = fp.run(plan_of(loss, stages=stages, count=1), numbers(), batch)
    torch.testing.assert_close(result.loss, total / weight)
    fp.run(plan_of(lambda y, t: loss(y, t)[0], stages=stages, weight=len), numbers(), batch)


def masked_mean(y, t):
    """0 / 0 for rows of which none counts."""
    counted = t[:, 0] > -9
    return ((y - t).square().mean(1) * counted).sum() / counted.sum(), counted.sum()


@pytest.mark.parametrize("loss", [masked_mean, MEANS_WITH_WEIGHTS["a mask"]])
@pytest.mark.parametrize(
    "padded",
    [[], [0], [0, 1], [4, 5], [1, 3, 5], [0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]],
    ids=str,
)
def test_rows_that_do_not_count_hide_no_mean(padded, loss):
    """Wherever the padding is in the first microbatch, if two rows of it count."""
    x, target = f64(12, 3), f64(12, 3).abs()
    target[padded] = -10.0
    plan = plan_of(lambda y, t: loss(y, t), count=2)
    with pytest.raises(fp.BatchError, match="is a mean over rows|returned \\(mean, weight\\)"):
        fp.run(plan, numbers(), (x, target))


class SummedCrossEntropy(nn.Module):
    reduction = "sum"

    def forward(self, y, target):
        return F.binary_cross_entropy_with_logits(y, target, reduction="sum")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("form", ["pair", "weight=", "pair and weight="])
def test_a_sum_of_weight_zero_counts(form, compiled):
    """A microbatch without positives has a loss of its negatives."""
    x, target = f64(6, 5), torch.zeros(6, 5, dtype=torch.float64)
    target[0, 0] = target[1, 2] = target[2, 1] = 1.0  # the second of two microbatches has none
    summed = SummedCrossEntropy()
    loss = (lambda y, t: (summed(y, t), t.sum())) if "pair" in form else summed
    options = {"weight": lambda t: t.sum()} if "weight=" in form else {}
    stages = [fp.compile_stage(stage) for stage in STAGES] if compiled else STAGES
    plan = plan_of(loss, count=2, stages=stages, **options)
    assert_exact(lambda y, t: summed(y, t) / t.sum(), x, target, plan)


def test_a_mean_of_no_rows_times_zero_does_not_count():
    """It is NaN, and so would be the gradients."""

    def loss(y, target):
        count = (target[:, 0] > -9).sum()
        mean = ((y - target).square().mean(1) * (target[:, 0] > -9)).sum() / count
        return mean * count, count

    x, target = f64(6, 5), f64(6, 5)
    target[3:] = -10.0
    result = fp.run(plan_of(loss, count=2), numbers(), (x, target))
    expected = fp.run(plan_of(nn.MSELoss(), count=1), numbers(), (x[:3], target[:3]))
    torch.testing.assert_close(result.loss, expected.loss)
    torch.testing.assert_close(result.grads, expected.grads)


def test_a_pair_is_checked_by_its_first_row_too():
    """Halves that count equally many rows add up, whatever the sum contains."""

    def composed(y, t):
        count = (t > -9).sum()
        term = F.cross_entropy(y, t.clamp(min=0), reduction="none") * (t > -9)
        return (term.sum() / count.clamp(min=1) + y.square().mean()) * count, count

    target = torch.tensor([1, -10, 2, -10, 0, 0, 0, 0])
    with pytest.raises(fp.BatchError, match="no sum over rows"):
        fp.run(plan_of(composed, count=2), numbers(), (f64(8, 5), target))


def test_weights_in_a_message_fit_the_target():
    """``len`` of a tuple would be 2 for every microbatch."""
    root = lambda y, t: F.mse_loss(y, t[0]).sqrt()
    x = f64(12, 3)
    with pytest.raises(fp.BatchError, match=r"lambda target: len\(fp.leaves\(target\)\[0\]\)"):
        fp.run(plan_of(root), numbers(), (x, (x + 1, x)))


def test_a_pair_is_checked_again_as_long_as_no_two_rows_count():
    """The mean of one row is its sum."""
    plan = plan_of(lambda y, t: masked_mean(y, t), count=2)
    x, target = f64(4, 3), f64(4, 3).abs()
    target[::2] = -10.0
    for _ in range(2):
        fp.run(plan, numbers(), (x, target))
    target[2] = 1.0
    with pytest.raises(fp.BatchError, match=r"returned \(mean, weight\)"):
        fp.run(plan, numbers(), (x, target))


@pytest.mark.parametrize("name", PAIRS)
def test_other_pairs_are_taken_as_they_are(name):
    """Weights that do not add up may be meant."""
    x, target = f64(12, 3), f64(12, 3)
    result = fp.run(plan_of(PAIRS[name]), numbers(), (x, target))
    params = numbers()
    parts = zip(x.chunk(4), target.chunk(4), strict=True)
    pairs = [PAIRS[name](rows * params[0] + params[1], t) for rows, t in parts]
    total = sum(float(pair[1]) for pair in pairs)
    torch.testing.assert_close(result.loss, sum(pair[0] for pair in pairs) / total)
    assert result.weight == total


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(("reduction", "compiled"), [("mean", False), ("sum", True)])
@pytest.mark.parametrize("kind", [nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss])
def test_a_loss_of_torch_that_compares_rows_by_accident_is_refused(kind, reduction, compiled):
    """``[B, 1]`` against ``[B]`` is ``[B, B]``."""
    stages = [fp.compile_stage(stage) for stage in STAGES] if compiled else STAGES
    plan = plan_of(kind(reduction=reduction), stages=stages)
    x, target = f64(12, 1), f64(12)
    match = r"broadcasts the output \[3, 1\] against the target \[3\].*target.unsqueeze\(-1\)"
    with pytest.raises(fp.BatchError, match=match):
        fp.run(plan, numbers(), (x, target))
    assert_exact(kind(reduction=reduction), x, target[:, None], plan)


class SumAndMean(nn.Module):
    reduction = "sum"

    def forward(self, y, target):
        return F.cross_entropy(y, target, reduction="sum") + y.square().mean()


def test_a_loss_that_only_claims_to_be_a_sum_is_refused_for_what_it_is():
    match = "has reduction='sum'.* no sum over rows: .* contains a mean or a root"
    with pytest.raises(fp.BatchError, match=match):
        fp.run(plan_of(SumAndMean()), numbers(), (f64(12, 5), torch.randint(0, 5, (12,))))


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_loss_of_torch_that_broadcasts_within_rows_is_exact():
    assert_exact(nn.MSELoss(), f64(12, 5), f64(12, 1))
