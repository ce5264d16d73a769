"""The weights of microbatches: exact where known, otherwise an error that names the call that
helps."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import funcpipe as fp
from funcpipe import schedules as S

SAY_IT = r"make_plan\(weight=target -> number\)"


def tokens():
    """Make a small tagger, tokens, and labels that are padded in the first half of the rows."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20)), torch.randint(0, 20, (8, 6))
    labels = x.clone()
    labels[:4, 2:] = -100
    return model, x, labels


def run(model, loss, batch, *, microbatches=4, compiled=False, **options):
    split = fp.split(model, 2)
    stages = [fp.compile_stage(stage) for stage in split.stages] if compiled else split.stages
    plan = fp.make_plan(stages, S.one_f_one_b(2, microbatches), loss=loss, devices="cpu", **options)
    return fp.run(plan, split.params, batch, state=split.state)


class Criterion(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.inner = nn.CrossEntropyLoss(**options)

    def forward(self, y, t):
        return self.inner(y.flatten(0, 1), t.flatten())


PADDED = {
    "lambda": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
    "log-softmax": lambda y, t: F.nll_loss(y.log_softmax(-1).flatten(0, 1), t.flatten()),
    "smoothed": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), label_smoothing=0.1),
    "module": Criterion(),
    "sum of two": lambda y, t: (
        F.cross_entropy(y.flatten(0, 1), t.flatten()) + 0.1 * y.square().mean()
    ),
    "masked": lambda y, t: (
        (F.cross_entropy(y.transpose(1, 2), t, reduction="none") * (t >= 0)).sum() / (t >= 0).sum()
    ),
    "selected": lambda y, t: F.cross_entropy(y[t >= 0], t[t >= 0]),
    "selected values": lambda y, t: y.square().sum(-1).masked_select(t >= 0).mean(),
}


COMPILE = [
    name for name in PADDED if "selected" not in name
]  # a mask selects a number of elements that is unknown to a trace


@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in PADDED), *((name, True) for name in COMPILE)]
)
def test_a_mean_of_ones_own_over_padded_targets_is_refused(name, compiled):
    model, x, labels = tokens()
    for _ in range(2):  # in every run
        with pytest.raises(fp.BatchError, match=SAY_IT):
            run(model, PADDED[name], (x, labels), compiled=compiled)


def test_padding_of_another_number_is_refused():
    model, x, labels = tokens()
    loss = lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), ignore_index=0)
    with pytest.raises(fp.BatchError, match="leaves out targets of 0"):
        run(model, loss, (x, labels.clamp(min=0)))
    whole = labels.clamp(min=1)
    torch.testing.assert_close(run(model, loss, (x, whole)).loss, loss(model(x), whole).detach())


def test_padding_that_comes_in_a_later_run_is_refused():
    model, x, labels = tokens()
    loss = PADDED["lambda"]
    torch.testing.assert_close(run(model, loss, (x, x)).loss, loss(model(x), x).detach())
    with pytest.raises(fp.BatchError, match="leaves out targets of -100"):
        run(model, loss, (x, labels))


def test_weights_of_classes_inside_a_loss_of_ones_own_are_refused():
    model, x, _ = tokens()
    with pytest.raises(fp.BatchError, match="the loss is a mean with class weights"):
        run(model, Criterion(weight=torch.rand(20)), (x, x))


@pytest.mark.parametrize("how", ["weight", "pair", "one microbatch"])
def test_the_calls_that_help_give_the_models_loss(how):
    model, x, labels = tokens()
    loss, options = PADDED["lambda"], {}
    want = loss(model(x), labels).detach()
    if how == "weight":
        options["weight"] = lambda t: (t != -100).sum()
    elif how == "pair":
        loss = lambda y, t: (
            F.cross_entropy(y.flatten(0, 1), t.flatten(), reduction="sum"),
            (t != -100).sum(),
        )
    else:
        options["microbatches"] = 1
    torch.testing.assert_close(run(model, loss, (x, labels), **options).loss, want)


PLAIN = {
    "square": lambda y, t: (y - F.one_hot(t, 20)).square().mean(),
    "by a number": lambda y, t: (y.sum(-1) - t).abs().mean() / 2,
    "by rows": lambda y, t: y.square().sum() / len(y),
    "by a constant tensor": lambda y, t: y.square().mean() / torch.tensor(3.0),
    "cosine": lambda y, t: 1 - F.cosine_similarity(y, F.one_hot(t, 20).float(), dim=-1).mean(),
    "cross entropy": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_means_by_rows_of_ones_own_run_as_before(name, compiled):
    model, x, _ = tokens()
    result = run(model, PLAIN[name], (x, x), compiled=compiled)
    torch.testing.assert_close(result.loss, PLAIN[name](model(x), x).detach())


# -- losses that models compute themselves
# -------------------------------------------------------------------------------


class Tagger(nn.Module):
    """Computes its loss itself, on labels that it changes: 0 is padding."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, tokens, answers):
        x = self.embed(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {
            "loss": F.cross_entropy(self.head(x).flatten(0, 1), answers.flatten(), ignore_index=0)
        }


@pytest.mark.parametrize("traced", [False, True])
def test_a_models_own_loss_over_padded_labels_is_refused(traced):
    model, x = Tagger(), torch.randint(1, 20, (8, 6))
    padded = x.clone()
    padded[:4, 2:] = 0
    given = {"tokens": x, "answers": padded}
    split = fp.split(
        model, 2, **({"example": {"tokens": x[:4], "answers": x[:4]}} if traced else {})
    )
    plan = fp.make_plan(split, S.one_f_one_b(2, 4), devices="cpu")
    with pytest.raises(fp.BatchError, match="leaves out targets of 0"):
        fp.run(plan, split.params, (given, None))
    right = fp.run(plan, split.params, ({"tokens": x, "answers": x}, None))
    torch.testing.assert_close(right.loss, model(x, x)["loss"].detach())


def test_question_answering_with_positions_outside_is_refused():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.BertForQuestionAnswering(
        transformers.BertConfig(**sizes, intermediate_size=32)
    ).eval()
    batch = {
        "input_ids": torch.randint(3, 50, (6, 8)),
        "start_positions": torch.tensor([1, 8, 8, 3, 0, 4]),
        "end_positions": torch.tensor([2, 8, 8, 5, 1, 6]),
    }
    split = fp.split(model, 2)
    plan = fp.make_plan(split, S.one_f_one_b(2, 3), devices="cpu")
    with pytest.raises(fp.BatchError, match="leaves out targets of 8"):
        fp.run(plan, split.params, (batch, None), state=split.state)
    inside = {name: value.clamp(max=7) for name, value in batch.items()}
    inside["input_ids"] = batch["input_ids"]
    result = fp.run(plan, split.params, (inside, None), state=split.state)
    torch.testing.assert_close(result.loss, model(**inside).loss.detach())


# -- microbatches that are cut already
# -------------------------------------------------------------------------------


class Graph(nn.Module):
    def __init__(self, edges):
        super().__init__()
        self.edges, self.linear = edges, nn.Linear(3, 1)

    def forward(self, batch):
        source, target = batch[self.edges]
        return self.linear(batch["x"].index_add(0, target, batch["x"][source]))


def graphs(key):
    nodes = [5, 1, 3]
    xs, ys = [torch.randn(n, 3) for n in nodes], [torch.randn(n, 1) for n in nodes]
    edges = [torch.randint(0, n, (2, 4)) for n in nodes]
    return [{"x": x, key: one} for x, one in zip(xs, edges, strict=True)], ys


@pytest.mark.parametrize("key", ["edge_index", "z_edges"])
@pytest.mark.parametrize("loss", [F.mse_loss, lambda y, t: (y - t).square().mean()])
def test_rows_of_the_target_count_whatever_other_leaves_are_called(key, loss):
    parts, ys = graphs(key)
    model = nn.Sequential(Graph(key), nn.Tanh())
    result = run(model, loss, (fp.Microbatches(parts), fp.Microbatches(ys)), microbatches=3)
    want = F.mse_loss(torch.cat([model(part) for part in parts]), torch.cat(ys))
    torch.testing.assert_close(result.loss, want.detach())


@pytest.mark.parametrize("key", ["edge_index", "z_edges"])
def test_leaves_that_differ_in_rows_are_refused_where_rows_would_count(key):
    parts, _ = graphs(key)
    model = nn.Sequential(Graph(key), nn.Tanh())
    with pytest.raises(fp.BatchError, match="have different numbers of rows"):
        run(model, lambda y, t: y.square().mean(), (fp.Microbatches(parts), None), microbatches=3)
    pair = run(
        model,
        lambda y, t: (y.square().sum(), len(y)),
        (fp.Microbatches(parts), None),
        microbatches=3,
    )
    want = torch.cat([model(part) for part in parts]).square().mean()
    torch.testing.assert_close(pair.loss, want.detach())


def test_targets_of_several_sizes_are_refused_where_rows_would_count():
    """Means of images of two sizes: by images, or by pixels."""
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Tanh())
    images = [torch.randn(1, 1, size, size) for size in (2, 4)]
    batch = fp.Microbatches(images), fp.Microbatches(images)
    with pytest.raises(fp.BatchError, match="have different numbers of rows"):
        run(model, F.mse_loss, batch, microbatches=2)
    result = run(model, F.mse_loss, batch, microbatches=2, weight=lambda t: t.numel())
    want = sum(F.mse_loss(model(one), one, reduction="sum") for one in images) / 20
    torch.testing.assert_close(result.loss, want.detach())


def test_ready_made_rows_of_the_inputs_do_not_cut_other_leaves_by_chance():
    parts, ys = graphs("edge_index")
    model = nn.Sequential(Graph("edge_index"), nn.Tanh())
    with pytest.raises(fp.BatchError, match="not known how to cut the other leaves"):
        run(model, F.mse_loss, (fp.Microbatches(parts), torch.cat(ys)[:6]), microbatches=3)


# -- losses that a model computes itself, and losses that do not take a single row

FREQUENCIES = torch.linspace(0.5, 2.0, 6)[:, None]


class Encoder(nn.Module):
    """A model that computes its loss itself. Its norm and dropout do not count as comparisons of
    rows."""

    def __init__(self, loss):
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.1)) for _ in range(3)
        )
        self.head = nn.Linear(6, 6)
        self.loss = loss

    def forward(self, x, labels):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        y = self.head(x)
        return {"loss": self.loss(y, labels), "y": y, "rows": x.shape[0]}


def contrastive(y, t):
    return F.cross_entropy(y @ t.T, torch.arange(y.shape[0]))


OWN = {
    "sum": (F.mse_loss, {"reduction": "sum"}, "returned a sum"),
    "rows times a mean": (lambda y, t: y.shape[0] * F.mse_loss(y, t), {}, "returned a sum"),
    "contrastive": (contrastive, {}, "is not a mean over rows"),
    "root": (lambda y, t: F.mse_loss(y, t).sqrt(), {}, "is not a mean over rows"),
    "deviation": (lambda y, t: F.mse_loss(y, t) - y.std(0).mean(), {}, "is not a mean over rows"),
}


@pytest.mark.parametrize("traced", [False, True], ids=["blocks", "traced"])
@pytest.mark.parametrize("name", OWN)
def test_a_loss_inside_the_model_that_is_no_mean_over_rows_is_refused(name, traced):
    """The loss of the batch would be another number than that of the model in one piece."""
    torch.manual_seed(0)
    loss, options, message = OWN[name]
    x, t = torch.randn(12, 6), torch.randn(12, 6)
    model = Encoder(partial(loss, **options))
    if traced:  # a traced model with norms or dropout does not run in evaluation mode
        for layer in model.layers:
            del layer[1:]
    split = fp.split(model, 2, example=(x[:4], t[:4]) if traced else None)
    schedule = S.one_f_one_b(2, 4)
    plan = fp.make_plan(split, schedule, devices="cpu")
    with pytest.raises(fp.BatchError, match=message) as caught:
        fp.run(plan, split.params, ((x, t), None), state=split.state, seed=0)
    if "sum" in message:
        return
    assert "state their weights: a loss with a method weigh(inputs, target)" in str(caught.value)

    class ByRows:
        def __call__(self, output, target):
            return output["loss"]

        def weigh(self, inputs, target):
            return len(inputs[0])

    plan = fp.make_plan(split, schedule, loss=ByRows(), devices="cpu")
    result = fp.run(plan, split.params, ((x, t), None), state=split.state, seed=0)
    torch.testing.assert_close(result.loss, torch.stack(result.losses).mean())


@pytest.mark.parametrize("traced", [False, True], ids=["blocks", "traced"])
def test_a_mean_inside_a_model_with_norms_and_dropout_runs(traced):
    x, t = torch.randn(12, 6), torch.randn(12, 6)
    split = fp.split(Encoder(F.mse_loss), 2, example=(x[:4], t[:4]) if traced else None)
    plan = fp.make_plan(split, S.one_f_one_b(2, 4), devices="cpu")
    result = fp.run(plan, split.params, ((x, t), None), state=split.state, seed=0)
    torch.testing.assert_close(result.loss, torch.stack(result.losses).mean())


NOT_OF_ONE_ROW = {
    "deviation": lambda y, t: F.mse_loss(y, t) - y.std(0).mean(),
    "hardest rows": lambda y, t: (y - t).square().mean(1).topk(2).values.mean(),
    "a layer of its own": lambda y, t: ((y - t) @ FREQUENCIES).square().sum(),
}


@pytest.mark.parametrize("name", NOT_OF_ONE_ROW)
def test_a_loss_that_takes_no_single_row_or_no_double_precision_is_checked(name):
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    batch = torch.randn(12, 6), torch.randn(12, 6)
    with pytest.raises(fp.BatchError, match="is not a mean over rows|returned a sum"):
        run(model, NOT_OF_ONE_ROW[name], batch)


def test_a_number_of_rows_in_the_output_is_no_constant():
    """A loss that divides by the rows that the model returns is a mean."""
    torch.manual_seed(0)
    x, t = torch.randn(12, 6), torch.randn(12, 6)
    model = Encoder(F.mse_loss)
    for layer in model.layers:
        del layer[1:]
    split = fp.split(model, 2)

    def mean(output, target):
        return (output["y"] - target).square().sum() / output["rows"]

    plan = fp.make_plan(split, S.one_f_one_b(2, 3), loss=mean, devices="cpu")
    result = fp.run(plan, split.params, ((x, t), t))
    torch.testing.assert_close(result.loss, mean(model(x, t), t).detach())
