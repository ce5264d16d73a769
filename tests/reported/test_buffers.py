"""Buffers that a forward writes: as plain torch leaves them, or an error that names them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from common import cpu_plan
from torch import nn

import funcpipe as fp
from funcpipe import schedules as S


class Siamese(nn.Module):
    """One encoder with batch norm, for both inputs."""

    def __init__(self, momentum=0.1, layer=nn.BatchNorm1d):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(4, 4), layer(4, momentum=momentum), nn.ReLU())
        self.head = nn.Linear(4, 2)

    def forward(self, a, b):
        return self.head(self.encode(a) - self.encode(b))


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x):
        self.num_batches_tracked.add_(1)
        return F.batch_norm(
            x,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            self.momentum,
        )


@pytest.mark.parametrize("layer", [nn.BatchNorm1d, OwnNorm])
@pytest.mark.parametrize("momentum", [0.1, 0.7, None])
@pytest.mark.parametrize("how", ["module", "traced"])
def test_batch_norm_that_runs_twice_in_a_forward_is_updated_twice(how, momentum, layer):
    if layer is OwnNorm and momentum is None:
        pytest.skip("its forward takes a number")
    model, a, b = Siamese(momentum, layer), torch.randn(8, 4), torch.randn(8, 4) + 2
    if how == "module":
        stages, params, state = ([one] for one in fp.from_module(model))
    else:
        split = fp.split(model, 2, example=(a, b))
        stages, params, state = split.stages, split.params, split.state
    plan = cpu_plan(stages, S.one_f_one_b(len(stages), 1))
    result = fp.run(plan, tuple(params), ((a, b), torch.zeros(8, 2)), state=tuple(state))
    model(a, b)
    new = {name: value for tree in result.state for name, value in (tree or {}).items()}
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(new[name], buffer, msg=name)


def test_calls_of_several_microbatches_are_updates_by_all_rows():
    """The first calls of all microbatches make one update, the second calls another."""
    a, b = torch.randn(9, 4), torch.randn(9, 4) + 2
    norm = nn.BatchNorm1d(4)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, a, b):
            return self.norm(a) + self.norm(b)

    stage, params, state = fp.from_module(Twice())
    plan = cpu_plan([stage], S.fill_drain(1, 4))
    new = fp.run(plan, (params,), ((a, b), torch.zeros(9, 4)), state=(state,)).state[0]
    norm(a)
    norm(b)
    for name, buffer in norm.named_buffers():
        torch.testing.assert_close(new[f"norm.{name}"], buffer)


# -- other buffers of a trace
# -------------------------------------------------------------------------------


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("used", torch.zeros(4))
        self.register_buffer("tokens", torch.zeros(4, dtype=torch.long))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        h = self.a(x)
        chosen = (h > 0).sum(0)
        self.used += chosen
        self.tokens += chosen
        self.calls += 1
        return self.b(h)


class ByAnotherTensor(Counts):
    """Writes a value of the inputs into the buffer by way of a tensor that is written in place."""

    def forward(self, x):
        scratch = torch.zeros(4)
        scratch[:2].add_(x.detach().sum(0)[:2])
        self.used.copy_(scratch)
        return self.b(self.a(x))


class Noise(Counts):
    def forward(self, x):
        self.used.copy_(torch.rand(4))
        return self.b(self.a(x))


@pytest.mark.parametrize(
    ("kind", "names"),
    [(Counts, ["tokens", "used"]), (ByAnotherTensor, ["used"]), (Noise, ["used"])],
)
def test_buffers_of_unknown_meaning_are_refused_when_the_model_is_cut(kind, names):
    with pytest.raises(fp.PlanError, match="does not know how to combine") as caught:
        fp.split(kind(), 2, example=torch.randn(8, 4))
    assert [f"  * {name!r}" for name in names] == str(caught.value).splitlines()[1:]


def test_counters_add_up_where_commit_says_so():
    model, x = Counts(), torch.randn(10, 4)
    commit = dict.fromkeys(("used", "tokens"), fp.models.sum_of_changes)
    split = fp.split(model, 2, example=x, commit=commit)
    plan = cpu_plan(split, S.one_f_one_b(2, 4))
    result = fp.run(plan, split.params, (x, x), state=split.state)
    model(x)
    merged = split.merge(split.params, result.state)
    for name, buffer in model.named_buffers():
        assert torch.equal(merged[name], buffer), name


def test_commit_must_fit_its_buffer():
    model, x = Counts(), torch.randn(8, 4)
    with pytest.raises(
        fp.PlanError, match=r"'usedd' is not a buffer of the model; did you mean 'used'"
    ):
        fp.split(model, 2, example=x, commit={"usedd": fp.models.mean_by_rows})
    with pytest.raises(fp.PlanError, match="commit= works only with a trace"):
        fp.split(nn.Sequential(nn.Linear(4, 4)), 1, commit={"used": fp.models.mean_by_rows})
    commit = {"used": lambda old, written, rows: 1.0, "tokens": fp.models.sum_of_changes}
    with pytest.raises(
        fp.PlanError,
        match=r"\['used'\] returned a float, but the buffer is a tensor of shape \(4,\)",
    ):
        fp.split(model, 2, example=x, commit=commit)


def test_spectral_norm_is_traced_and_written_once():
    """Every microbatch makes the same step of the power iteration, and the batch makes one."""
    model = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 4)
    )
    x = torch.randn(8, 4)
    split = fp.split(model, 2)
    plan = cpu_plan(split, S.one_f_one_b(2, 4))
    with pytest.raises(
        fp.PlanError, match=r"Trace the model with fp.split\(model, ..., example=...\)"
    ):
        fp.run(plan, split.params, (x, x), state=split.state)
    split = fp.split(model, 2, example=x)
    plan = cpu_plan(split, S.one_f_one_b(2, 4))
    result = fp.run(plan, split.params, (x, x), state=split.state)
    model(x)
    merged = split.merge(split.params, result.state)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(merged[name], buffer)


# -- writes that torch does not count
# -------------------------------------------------------------------------------


WRITES = {
    "permutes": lambda q: q.data.copy_(q.roll(1)),
    "swaps signs": lambda q: q.data.neg_(),
    "moves a bit": lambda q: q.data.view(torch.int32).add_(
        torch.tensor([1, -1, 0, 0], dtype=torch.int32)
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_into_a_buffer_that_keeps_the_sum_of_its_bits_is_refused(name):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("queue", torch.arange(4.0))
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x) * self.queue
            WRITES[name](self.queue)
            return y

    stage, params, state = fp.from_module(Writes())
    plan = fp.make_plan([stage], S.fill_drain(1, 4, backward=False), devices="cpu", outputs=True)
    with pytest.raises(fp.PlanError, match=r"writes into its buffers \['queue'\]"):
        fp.run(plan, (params,), torch.ones(4, 4), state=(state,))
