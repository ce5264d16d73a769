"""Losses that are no mean over rows, where the first rows, the first microbatch or the first batch
look like one: found in a later microbatch, or in run 2, 4, 8, ..."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import funcpipe as fp

NAMES = ["normalized", "item", "python rows", "length", "class weights"]
PADDED = (5, 9, 10, 11, 14)  # of 16 rows in four microbatches; the first microbatch has none
CLASS_WEIGHTS = torch.tensor([1.0, 9, 1, 1, 1])


def entropies(y, t):
    return F.cross_entropy(y, t.clamp(min=0), reduction="none")


def normalized(y, t):
    mask = (t >= 0).to(y)
    return (entropies(y, t) * (mask / mask.sum())).sum()


def item(y, t):
    return (entropies(y, t) * (t >= 0)).sum() / max((t >= 0).sum().item(), 1)


def python_rows(y, t):
    return entropies(y, t)[[row for row, label in enumerate(t.tolist()) if label >= 0]].mean()


def length(y, t):
    return (entropies(y, t) * (t >= 0)).sum() / len([label for label in t if label >= 0])


def class_weights(y, t):
    weights = CLASS_WEIGHTS[t]
    return (entropies(y, t) * (weights / weights.sum())).sum()


def plan_of(loss, microbatches=4):
    torch.manual_seed(0)
    split = fp.split(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)), 2)
    schedule = fp.schedules.one_f_one_b(2, microbatches)
    return fp.make_plan(split, schedule, loss=loss, devices="cpu"), split.params


def labels(*unlike, value=-1):
    t = torch.arange(16) % 5 if value < 0 else torch.zeros(16, dtype=torch.long)
    t[list(unlike)] = value
    return t


@pytest.mark.parametrize("name", NAMES)
def test_a_later_microbatch_shows_a_divisor(name):
    """The rows of the first microbatch count alike."""
    loss = globals()[name.replace(" ", "_")]
    t = labels(6, 9, 10, 13, value=1) if loss is class_weights else labels(*PADDED)
    plan, params = plan_of(loss)
    with pytest.raises(fp.BatchError, match="not a mean over rows") as caught:
        fp.run(plan, params, (torch.randn(16, 6), t))
    assert caught.value.funcpipe.microbatch >= 1


def test_a_later_batch_shows_a_divisor():
    """A loader that sorts by length: padding comes with run 3, so run 4 raises."""
    plan, params = plan_of(normalized)
    x = torch.randn(16, 6)
    for t in (labels(), labels(), labels()):
        fp.run(plan, params, (x, t))
    with pytest.raises(fp.BatchError, match="not a mean over rows"):
        fp.run(plan, params, (x, labels(*PADDED)))


def test_after_a_refusal_each_run_is_checked():
    """A batch that hides the fault does not end the checks."""
    plan, params = plan_of(normalized)
    x = torch.randn(16, 6)
    with pytest.raises(fp.BatchError):
        fp.run(plan, params, (x, labels(*PADDED)))
    for _ in range(3):
        fp.run(plan, params, (x, labels()))
        with pytest.raises(fp.BatchError):
            fp.run(plan, params, (x, labels(*PADDED)))


class Tagger(nn.Module):
    """A model with a masked mean of its own."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 8), nn.Linear(8, 40)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, ids, tags):
        x = self.embed(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        mask = tags != 0
        ce = F.cross_entropy(self.head(x).transpose(1, 2), tags, reduction="none")
        return {"loss": (ce * mask).sum() / mask.sum()}


@pytest.mark.parametrize("traced", [False, True], ids=["blocks", "trace"])
def test_a_later_batch_shows_the_divisor_of_a_model(traced):
    ids = torch.randint(2, 40, (8, 11))
    ragged = ids.clone()
    for row, count in enumerate((11, 11, 2, 4, 3, 7, 9, 1)):
        ragged[row, count:] = 0
    split = fp.split(Tagger(), 2, **({"example": (ids[:4], ids[:4])} if traced else {}))
    plan = fp.make_plan(split, fp.schedules.one_f_one_b(2, 4), devices="cpu")
    fp.run(plan, split.params, ((ids, ids), None))
    with pytest.raises(fp.BatchError, match="not a mean over rows"):
        fp.run(plan, split.params, ((ids, ragged), None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["kl", "cosine"])
@pytest.mark.parametrize("seed", range(2))
def test_rounding_near_zero_is_no_difference(kind, dtype, seed):
    """A teacher that equals its student, as an average of weights does at step 0."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5)).to(dtype)
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss(y, x):
        if kind == "cosine":
            return (2 - 2 * F.cosine_similarity(y, teacher(x), -1)).mean()
        return F.kl_div(
            F.log_softmax(y, -1),
            F.log_softmax(teacher(x), -1),
            reduction="batchmean",
            log_target=True,
        )

    split = fp.split(model, 2)
    plan = fp.make_plan(split, fp.schedules.one_f_one_b(2, 4), loss=loss, devices="cpu")
    x = torch.randn(16, 6, dtype=dtype)
    assert abs(fp.run(plan, split.params, (x, x)).loss) < 1e-6
