"""The gradients of nn.Embedding(sparse=True) are sparse, as in torch, for every schedule and
executor."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import cpu_plan

import funcpipe as fp

S = fp.schedules
ids = torch.randint(0, 50, (8, 5), generator=torch.Generator().manual_seed(0))
target = torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(1))
BATCH = ids, target


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


def split_of(*, sparse=True):
    torch.manual_seed(0)
    return fp.split(
        nn.Sequential(nn.Embedding(50, 4, sparse=sparse), Mean(), nn.Linear(4, 3)).double(), 2
    )


def plan_of(split, schedule=None):
    return fp.make_plan(split, schedule or S.one_f_one_b(2, 4), loss=F.cross_entropy, devices="cpu")


SCHEDULES = {
    "1F1B": S.one_f_one_b(2, 4),
    "remat": S.remat(S.one_f_one_b(2, 4)),
    "zero bubble": S.zero_bubble(2, 4),
    "one": S.one_f_one_b(2, 1),
}


@pytest.mark.parametrize(
    "options", [{}, {"loss_scale": 8.0}, {"check": ["finite", "used"]}], ids=str
)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("executor", ["serial", "threads"])
def test_sums_are_sparse_and_of_the_same_bits(name, options, executor):
    split = split_of()
    plan = plan_of(split, SCHEDULES[name])
    found = fp.run(plan, split.params, BATCH, executor=executor, **options)
    expected = fp.run_sequential(plan, split.params, BATCH, **options)
    dense = fp.run(plan_of(split_of(sparse=False), SCHEDULES[name]), split.params, BATCH, **options)
    ours, theirs = found.grads[0]["0.weight"], expected.grads[0]["0.weight"]
    assert ours.is_sparse
    assert ours.is_coalesced()
    assert torch.equal(ours.indices(), theirs.indices())
    assert torch.equal(ours.values(), theirs.values())
    torch.testing.assert_close(ours.to_dense(), dense.grads[0]["0.weight"])
    torch.testing.assert_close(fp.global_norm(found), fp.global_norm(dense))
    assert found.finite
    assert "gradients 3 tensors" in repr(found)


OPTIMIZERS = {
    "SGD": lambda leaves: torch.optim.SGD(leaves, lr=0.1),
    "Adagrad": lambda leaves: torch.optim.Adagrad(leaves, lr=0.1),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("max_norm", [None, 1e-2])
@pytest.mark.parametrize("how", ["step", "scaler", "in the run", "batches", "accumulated"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_dense_gradients(name, how, max_norm):
    trained = []
    for sparse in (True, False):
        split = split_of(sparse=sparse)
        optimizer = OPTIMIZERS[name](fp.leaves(split.params))
        if how in ("in the run", "batches"):
            plan = plan_of(split, S.step_params(S.one_f_one_b(2, 4)))
            if how == "batches":
                fp.run_batches(
                    plan, split.params, [BATCH] * 3, optimizer=optimizer, max_norm=max_norm
                )
            else:
                fp.run(plan, split.params, BATCH, optimizer=optimizer, max_norm=max_norm)
        elif how == "scaler":
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            result = fp.run(plan_of(split), split.params, BATCH, loss_scale=8.0)
            fp.step(optimizer, split.params, result, max_norm=max_norm, scaler=scaler)
        else:
            result = fp.run(plan_of(split), split.params, BATCH)
            result = fp.accumulate([result, result]) if how == "accumulated" else result
            before = result.grads[0]["0.weight"].clone()
            fp.step(optimizer, split.params, result, max_norm=max_norm)
            assert torch.equal(before.to_dense(), result.grads[0]["0.weight"].to_dense())
        trained.append(fp.leaves(split.params))
    torch.testing.assert_close(*trained)


def test_sparse_adam_steps_the_table():
    split = split_of()
    model = nn.Sequential(nn.Embedding(50, 4, sparse=True), Mean(), nn.Linear(4, 3)).double()
    model.load_state_dict(split.state_dict())
    table = torch.optim.SparseAdam([split.params[0]["0.weight"]], lr=0.1)
    F.cross_entropy(model(ids), target).backward()
    torch.optim.SparseAdam([model[0].weight], lr=0.1).step()
    fp.step(table, split.params, fp.run(plan_of(split), split.params, BATCH))
    torch.testing.assert_close(split.params[0]["0.weight"], model[0].weight)


def test_sparse_adam_says_which_gradients_are_dense():
    split = split_of()
    result = fp.run(plan_of(split), split.params, BATCH)
    before = copy.deepcopy(split.params)
    with pytest.raises(
        fp.PlanError,
        match=r"SparseAdam takes sparse gradients, but the gradients of leaves of shapes \[\(3,\)",
    ):
        fp.step(torch.optim.SparseAdam(fp.leaves(split.params)), split.params, result)
    assert all(
        torch.equal(a, b) for a, b in zip(fp.leaves(before), fp.leaves(split.params), strict=True)
    )
    assert all(leaf.grad is None for leaf in fp.leaves(split.params))


def test_sums_over_a_window_are_sparse():
    split = split_of()
    plan = plan_of(split)
    window = [BATCH] * 2
    total = fp.batches.accumulate_grads(
        lambda batch: (fp.run(plan, split.params, batch).grads, 1.0), window
    )
    once = fp.run(plan, split.params, BATCH).grads[0]["0.weight"]
    assert total.grads[0]["0.weight"].is_sparse
    torch.testing.assert_close(total.grads[0]["0.weight"].to_dense(), once.to_dense())


def test_an_infinite_row_skips_the_step():
    split = split_of()
    with torch.no_grad():
        split.params[0]["0.weight"][ids[0, 0]] = float("inf")
    result = fp.run(plan_of(split), split.params, BATCH, loss_scale=8.0)
    before = copy.deepcopy(split.params)
    fp.step(torch.optim.SGD(fp.leaves(split.params), lr=0.1), split.params, result)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    fp.step(torch.optim.SGD(fp.leaves(split.params), lr=0.1), split.params, result, scaler=scaler)
    scaler.update()
    assert scaler.get_scale() == 4.0
    for one, other in zip(fp.leaves(before), fp.leaves(split.params), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(fp.NotFiniteError):
        fp.run(plan_of(split), split.params, BATCH, check="finite")


class Rare(nn.Module):
    """A table that few microbatches use."""

    def __init__(self):
        super().__init__()
        self.often, self.rare = nn.Embedding(50, 4, sparse=True), nn.Embedding(50, 4, sparse=True)

    def forward(self, x):
        out = self.often(x).mean(1)
        return out + self.rare(x).mean(1) if (x[:, 0] == 7).any() else out


@pytest.mark.parametrize("row", [None, 0, 7])
def test_a_table_that_few_microbatches_use(row):
    torch.manual_seed(0)
    stages, params, _ = zip(fp.from_module(Rare()), fp.from_module(nn.Linear(4, 3)), strict=True)
    tokens = ids.clone()
    tokens[:, 0] = 3
    if row is not None:
        tokens[row, 0] = 7
    plan = fp.make_plan(stages, S.one_f_one_b(2, 4), loss=F.cross_entropy, devices="cpu")
    result = fp.run(plan, params, (tokens, target))
    assert (row is None) == ((0, "rare.weight") in result.unused)
    assert result.grads[0]["rare.weight"].is_sparse == (row is not None)
    before = copy.deepcopy(params)
    tables = [params[0]["often.weight"], params[0]["rare.weight"]]
    fp.step(torch.optim.SparseAdam(tables, lr=0.1), params, result)
    assert not torch.equal(before[0]["often.weight"], params[0]["often.weight"])
    assert (row is None) == torch.equal(before[0]["rare.weight"], params[0]["rare.weight"])
    more = fp.accumulate([result, fp.run(plan, params, (ids, target))])
    assert more.grads[0]["often.weight"].is_sparse


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.middle, self.head = (
            nn.Embedding(50, 4, sparse=True),
            nn.Linear(4, 4),
            nn.Linear(4, 50),
        )
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(self.middle(self.table(x)).mean(1))


@pytest.mark.parametrize("stages", [1, 2])
def test_a_table_that_is_tied_to_a_head_has_a_dense_gradient(stages):
    """In torch the sum of a dense and a sparse gradient is dense, too."""
    torch.manual_seed(0)
    model = Tied().double()
    split = fp.split(model, stages, example=ids)
    plan = fp.make_plan(split, S.one_f_one_b(stages, 4), loss=F.cross_entropy, devices="cpu")
    found = split.merge(fp.run(plan, split.params, BATCH).grads)["table.weight"]
    expected = split.merge(fp.run_sequential(plan, split.params, BATCH).grads)["table.weight"]
    F.cross_entropy(model(ids), target).backward()
    assert torch.equal(found, expected)
    torch.testing.assert_close(found, model.table.weight.grad)


def test_one_table_in_two_stages_has_a_sparse_gradient():
    torch.manual_seed(0)
    table = torch.randn(50, 4, dtype=torch.float64, requires_grad=True)
    look = fp.stage(lambda p, x: (x, F.embedding(x, p["t"], sparse=True).mean(1)))
    again = fp.stage(lambda p, x: x[1] * F.embedding(x[0], p["t"], sparse=True).mean(1))
    ties = (((0, "t"), (1, "t")),)
    plan = cpu_plan([look, again], S.one_f_one_b(2, 4), ties=ties)
    params = ({"t": table}, {"t": table})
    batch = ids, torch.ones(8, 4, dtype=torch.float64)
    found, expected = fp.run(plan, params, batch), fp.run_sequential(plan, params, batch)
    F.mse_loss(F.embedding(ids, table).mean(1).square(), batch[1]).backward()
    for stage in (0, 1):
        assert found.grads[stage]["t"].is_sparse
        assert torch.equal(
            found.grads[stage]["t"].to_dense(), expected.grads[stage]["t"].to_dense()
        )
        torch.testing.assert_close(found.grads[stage]["t"].to_dense(), table.grad)
    table.grad = None
    torch.testing.assert_close(fp.global_norm(found), found.grads[0]["t"].to_dense().norm())
    fp.step(torch.optim.SparseAdam([table], lr=0.1), params, found)
