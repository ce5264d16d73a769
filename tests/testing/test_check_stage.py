"""check_stage names every fault; a good stage has none."""

from __future__ import annotations

import gc
import random

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import same, snapshot
from faulty import BAD, FROZEN, TWO, P, X, clock, counter, keeps_a_table, mixes_rows, plain, raises
from watch import num_tensors

import funcpipe as fp
from funcpipe._src.testing.check import FAULTS
from funcpipe.testing import CheckError, check_stage


def faults(stage, params=P, x=X, **options):
    """The faults of a stage, () if it has none."""
    try:
        check_stage(stage, params, x, **options)
    except CheckError as error:
        return error.faults
    return ()


@pytest.mark.parametrize(("name", "fn", "text", "options"), BAD)
def test_every_fault_is_named(name, fn, text, options):
    """A stage with one kind of fault is refused, with the fault's name and what is wrong."""
    with pytest.raises(CheckError) as error:
        check_stage(
            fp.stage(fn, name="bad"),
            options.get("params", P),
            X,
            **{k: v for k, v in options.items() if k != "params"},
        )
    assert any(name == kind and text in said for kind, said in error.value.faults), error.value
    assert all(f"{said} [{kind}]" in str(error.value) for kind, said in error.value.faults)


def test_faults_can_be_allowed():
    """Those that are named pass and are in the report; others do not."""
    made = fp.stage(mixes_rows, name="mean")
    report = check_stage(made, TWO, X, allow=["unused", "rows"], independent_rows=True)
    assert {"unused", "rows"} == {name for name, _ in report.allowed}
    assert ("params['b']",) == report.unused
    assert "allowed: no gradient reaches params['b']" in str(report)
    with pytest.raises(CheckError) as error:
        check_stage(made, TWO, X, allow=["unused"], independent_rows=True)
    assert ["rows"] == [name for name, _ in error.value.faults]


def test_all_kinds_of_faults_are_tried():
    assert {*FAULTS, "raises"} - {"state", "commit"} == {param.values[0] for param in BAD}


def ints(p, x):
    return F.embedding(x, p["w"])


def passes_through(p, x):
    h, mask, n = x
    return {"h": h * p["w"], "mask": mask, "n": n, "nothing": None}


def slices_params(p, x):
    return x * p["w"], p["w"].view(3)


def draws(p, x):
    return F.dropout(x * p["w"], 0.5)


GOOD = [
    (plain, P, X),
    (draws, P, X),
    (mixes_rows, P, X),
    (keeps_a_table(), P, X),
    (slices_params, P, X),
    (ints, {"w": torch.randn(5, 2)}, torch.tensor([[1, 2], [3, 4], [0, 1]])),
    (passes_through, P, (X, torch.ones(2, 2, dtype=torch.bool), 3)),
    (lambda p, x: x, (), X),
    (lambda p, x: x.sum() * p["w"], P, X),
    (lambda p, x: x.unflatten(1, (3, 1)).expand(-1, -1, 4)[:, 1:] * p["w"].sum(), P, X),
    (lambda p, x: fp.Out(x * p["w"], loss=(x.square().sum(), 4.0)), P, X),
    (lambda p, x: torch.func.vmap(lambda row: row * p["w"])(x), P, X),
    (
        lambda p, x: (
            torch.where(x > 9, x, -torch.inf) * 0 + x * p["w"] if x.isinf().any() else x * p["w"]
        ),
        P,
        X,
    ),
]


@pytest.mark.parametrize(("fn", "params", "x"), GOOD)
def test_good_stages_pass(fn, params, x):
    """No fault is seen where there is none; nothing of the caller's is touched."""
    before, rng, python = snapshot((params, x)), torch.get_rng_state(), random.getstate()
    threads = torch.get_num_threads()
    check_stage(fp.stage(fn, name="good"), params, x)
    assert same(before, snapshot((params, x)))
    assert torch.equal(rng, torch.get_rng_state())
    assert python == random.getstate()
    assert threads == torch.get_num_threads()


def test_the_report_says_what_was_seen():
    def fn(p, x, *, skips):
        return fp.Out((torch.tanh(x * p["w"]), 3), stash={"e": skips["s"] + 1})

    report = check_stage(fp.stage(fn, name="two", stash=["e"], pop=["s"]), P, X, skips={"s": X})
    assert "two" == report.name
    assert (
        ("y[0]", "float64 [4, 3]"),
        ("y[1]", "int"),
        ("stash['e']", "float64 [4, 3]"),
    ) == report.outputs
    assert 2 * X.nbytes == report.num_bytes
    assert not report.draws
    assert "independent" == report.rows
    assert () == report.in_place == report.unused == report.allowed
    assert (
        "stage 'two': 192 bytes out; draws random numbers: no; rows: independent\n  y[0]: float64 "
        "[4, 3]" in str(report)
    )
    assert check_stage(fp.stage(draws), P, X).draws
    assert "not compared" == check_stage(fp.stage(draws), P, X).rows
    assert "dependent" == check_stage(fp.stage(mixes_rows), P, X).rows
    assert "not compared" == check_stage(fp.stage(plain), P, X[:1]).rows


def test_all_faults_come_at_once():
    """Independent faults of one stage are all in one message."""
    seen = []

    def fn(p, x):
        seen.append(1)
        x.add_(1)
        p["w"].data.add_(1)
        return fp.Out((x * p["w"] / 0, clock(p, x)), stash={"a": x})

    found = faults(fp.stage(fn, name="awful", stash=["b"]), TWO)
    assert {
        "captured",
        "in-place",
        "params",
        "unused",
        "output",
        "finite",
        "gradient",
        "deterministic",
    } == {n for n, _ in found}
    texts = " ".join(text for _, text in found)
    assert "declares stash 'b' but does not return it" in texts
    assert "returns stash 'a' without declaring it" in texts


def test_state_that_is_written_is_named():
    """By a function, in place or by a key; by a module, whose batch norm is deferred and no
    fault."""
    state = {"n": torch.zeros(3, dtype=torch.float64)}

    def adds(p, x, *, state):
        state["n"] += 1
        return x * p["w"]

    def binds(p, x, *, state):
        state["n"] = state["n"] + 1
        return x * p["w"]

    for fn in (adds, binds):
        assert (
            (
                "state",
                "writes into state['n']; return statistics in Out(stats=...) and fold them in "
                "commit=",
            ),
        ) == faults(fp.stage(fn), state=state)
    good = fp.stage(
        lambda p, x, *, state: fp.Out(x * p["w"] + state["n"], stats=x.sum(0)),
        commit=lambda s, t: s,
    )
    assert () == faults(good, state=state)
    assert torch.equal(torch.zeros(3, dtype=torch.float64), state["n"])

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return x

    made, params, state = fp.from_module(Counts(), name="counts")
    [(name, text)] = faults(made, params, X, state=state)
    assert "state" == name
    assert "writes into its buffers ['calls']" in text
    made, params, state = fp.from_module(
        nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double(), name="norm"
    )
    assert "dependent" == check_stage(made, params, X, state=state).rows
    assert "independent" == check_stage(made, params, X, state=state, train=False).rows


def test_a_commit_must_return_a_state_like_the_old_one():
    state = {"n": torch.zeros(3, dtype=torch.float64)}

    def committing(commit):
        fn = lambda p, x, *, state: fp.Out(x * p["w"] + state["n"], stats=x.detach().sum(0))
        return faults(fp.stage(fn, commit=commit), state=state)

    assert () == committing(lambda s, stats: {"n": s["n"] + sum(stats)})
    is_now = "the state is a dict of (float64 [3])"
    assert (("commit", f"its commit returns None, {is_now}"),) == committing(lambda s, stats: None)
    assert (("commit", f"its commit returns a dict of (), {is_now}"),) == committing(
        lambda s, stats: {}
    )
    assert (("commit", f"its commit returns a dict of (float64 []), {is_now}"),) == committing(
        lambda s, stats: {"n": sum(stats).sum()}
    )
    [(name, text)] = committing(lambda s, stats: s["m"])
    assert (name, text) == ("raises", "its commit raises KeyError: 'm'")


def test_modules_and_compositions():
    """In-place layers at the front are reported; draws are keyed by layers; a composition has the
    faults of its parts."""
    module = nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(3, 3)).double()
    made, params, _ = fp.from_module(module, name="layers")
    report = check_stage(made, params, X)
    assert ("x",) == report.in_place
    assert report.draws
    assert "writes in place into x" in str(report)
    assert not check_stage(made, params, X, train=False).draws
    module[2].weight.requires_grad_(False)
    assert () == faults(made, params)
    both = fp.compose(fp.stage(plain, name="good"), made)
    assert check_stage(both, (P, params), X).draws
    [(_, text)] = faults(fp.compose(fp.stage(counter()), made), (P, params))
    assert text.startswith("changes count")
    lstm, weights, _ = fp.from_module(nn.LSTM(3, 3, batch_first=True).double(), name="lstm")
    report = check_stage(lstm, weights, X[:, None])
    assert ("y[1][0]", "float64 [1, 4, 3]") in report.outputs
    assert "independent" == report.rows


def test_frozen_parameters_are_not_unused():
    """By flags, a bool, a function or a tree."""
    assert () == faults(fp.stage(plain), FROZEN)
    for trainable in ({"w": True, "b": False}, lambda name, leaf: name == "w", False):
        assert () == faults(fp.stage(plain), TWO, trainable=trainable)
    assert "unused" in dict(faults(fp.stage(plain), TWO, trainable=True))


def test_draws_without_a_name_are_named():
    [(name, text)] = faults(fp.stage(lambda p, x: F.dropout(x * p["w"])))
    assert "random" == name
    assert "give it one: name=" in text


def test_what_a_stage_raises_is_the_cause():
    with pytest.raises(CheckError) as error:
        check_stage(fp.stage(raises), P, X)
    assert isinstance(error.value, AssertionError)
    assert isinstance(error.value, fp.FuncpipeError)
    assert isinstance(error.value.__cause__, ValueError)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: check_stage(plain, P, X), "make a stage with fp.stage(fn)"),
        (
            lambda: check_stage(fp.stage(lambda p, x, *, skips: x, pop=["a"]), P, X),
            "skips lacks 'a'",
        ),
        (
            lambda: check_stage(fp.stage(plain), P, X, feeds={"m": X}),
            "feeds has 'm', which the stage does not declare",
        ),
        (lambda: check_stage(fp.stage(lambda p, x, *, state: x), P, X), "give state="),
        (
            lambda: check_stage(fp.stage(plain), P, X, allow=["inplace"]),
            "allow contains 'inplace', which is not a fault; the faults are output",
        ),
    ],
)
def test_arguments_that_do_not_fit(call, text):
    with pytest.raises(fp.PlanError) as error:
        call()
    assert text in str(error.value)


@pytest.mark.slow
def test_checking_leaves_nothing():
    """No tensor stays, whether the stage is good, bad, or raises."""
    counted = []
    for _ in range(2):
        for fn in (plain, clock, raises):
            faults(fp.stage(fn))
        gc.collect()
        counted.append(num_tensors())
    assert counted[0] == counted[1]


def test_a_module_that_lends_its_code_is_no_fault():
    """functional_call in a function: the module's own parameters are there, but no output comes
    from them."""
    layer = nn.Linear(3, 3).double()
    made = fp.stage(lambda p, x: torch.func.functional_call(layer, p, (x,)), name="lent")
    assert () == faults(made, dict(layer.named_parameters()))


def test_a_table_for_each_shape_is_no_fault():
    tables = {}

    def fn(p, x):
        if len(x) not in tables:
            tables[len(x)] = torch.arange(len(x), dtype=x.dtype)[:, None]
        return x * p["w"] + tables[len(x)]

    assert () == faults(fp.stage(fn))
