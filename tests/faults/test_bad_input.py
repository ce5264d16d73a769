"""Rows 16 to 18, 21, 27: batches, devices, parameters and plans that do not fit, and odd ones that
must work."""

from __future__ import annotations

import functools
import time
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import EXECUTORS, assert_same_result, ids, same, schedules
from fault_nets import assert_plain, function_plan, linear, plain, rows, weights
from fault_rig import SCHEDULES, WIDTH, M, Rig, S, assert_invariant

import funcpipe as fp

FAMILIES = [
    fp.schedules.fill_drain,
    fp.schedules.one_f_one_b,
    fp.schedules.looped_bfs,
    fp.schedules.interleaved,
    fp.schedules.zero_bubble,
]


@pytest.fixture(scope="module")
def rig():
    return Rig()


def refused(rig, call, kind, *words):
    """Before any stage is called, and with invariant I."""
    called = []

    def counted():
        try:
            return call()
        finally:
            called.extend(rig.calls)

    assert_invariant(rig, counted, kind=kind, words=words, kept=True)
    assert [] == called


# -- row 16: the batch
# -------------------------------------------------------------------------------

X, T = torch.ones(7, WIDTH, dtype=torch.float64), torch.zeros(7, WIDTH, dtype=torch.float64)
BATCHES = {
    "no rows": ((X[:0], T[:0]), "inputs", "target", "no rows"),
    "rows differ": ((X, T[:5]), "inputs has 7", "target has 5"),
    "a leaf deep inside": (
        (X, {"y": T, "more": [{"mask": T[:6]}]}),
        r"target\['more'\]\[0\]\['mask'\] has 6",
    ),
    "0-dim": (
        (X, {"y": T, "k": torch.tensor(2.0)}),
        r"target\['k'\] is a 0-dim tensor",
        r"fp\.Replicate\(target\['k'\]\)",
    ),
    "an array": ((X, np.zeros((7, WIDTH))), "target is a ndarray", r"torch\.from_numpy"),
    "no pair": (X, r"\(inputs, target\)", "Tensor"),
    "too many microbatches": (
        (fp.Microbatches([X] * (M + 1)), T),
        f"inputs has {M + 1} ready-made microbatches",
        f"the plan has {M}",
    ),
    "microbatch without rows": (
        (fp.Microbatches([X, X[:0]]), T),
        "microbatch 1 of inputs has no rows",
    ),
    "no such axis": ((fp.Axis(X, 2), T), r"inputs has shape \(7, 4\) and no axis 2"),
}


@pytest.mark.parametrize("bad", BATCHES.values(), ids=list(BATCHES))
def test_a_batch_that_cannot_be_cut_runs_nothing(rig, bad, executor):
    """Row 16: BatchError with the leaf's path and the sizes, before any compute, by every way to
    run."""
    batch, *words = bad
    plan = rig.plan(SCHEDULES[0])
    refused(rig, lambda: rig.run(plan, executor(plan), batch=batch), fp.BatchError, *words)
    refused(rig, lambda: rig.run_sequential(plan, batch=batch), fp.BatchError, *words)


@pytest.mark.parametrize("count", [1, 2, M, M + 1, 2 * M + 1])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=ids)
def test_any_number_of_rows(count, schedule, executor):
    """Row 16: one row, fewer than microbatches, a remainder: the oracle's bits and plain autograd's
    numbers."""
    plan = function_plan(schedule)
    params, batch = weights(), rows(count)
    expected = fp.run_sequential(plan, params, batch, threads_per_lane=1)
    assert_same_result(
        expected, fp.run(plan, params, batch, executor=executor(plan), threads_per_lane=1)
    )
    assert_plain(expected, params, *batch)


def test_dicts_in_another_order(executor):
    """Row 16: the same numbers whatever the order of keys, in one batch, in ready-made
    microbatches, in params."""

    def first(p, x):
        return torch.tanh((x["a"] - 2 * x["b"]) @ p["w"] + p["c"])

    stages = [fp.stage(first), fp.stage(lambda p, x: x @ p["w"])]
    plan = fp.make_plan(
        stages,
        fp.schedules.one_f_one_b(2, 2),
        loss=lambda y, t: F.mse_loss(y, t["y"]) + t["k"] * 0,
        devices="cpu",
    )
    a, b = rows(4)
    w = weights(2)
    c = torch.ones(WIDTH, dtype=torch.float64)
    go = lambda params, x, t: fp.run(
        plan, params, (x, t), executor=executor(plan), threads_per_lane=1
    )
    expected = go(({"w": w[0]["w"], "c": c}, w[1]), {"a": a, "b": b}, {"y": b, "k": 1})
    swapped = go((OrderedDict(c=c, w=w[0]["w"]), w[1]), {"b": b, "a": a}, {"k": 1, "y": b})
    ready = go(
        ({"c": c, "w": w[0]["w"]}, w[1]),
        fp.Microbatches([{"a": a[:2], "b": b[:2]}, {"b": b[2:], "a": a[2:]}]),
        {"k": 1, "y": b},
    )
    for result in (swapped, ready):
        assert torch.equal(expected.loss, result.loss)
        assert same(expected.grads[1], result.grads[1])
        assert all(torch.equal(expected.grads[0][key], result.grads[0][key]) for key in "wc")


# -- row 17: devices and dtypes
# -------------------------------------------------------------------------------


def test_leaves_on_another_device_are_named(rig, executor):
    """Row 17: of parameters and state, both devices, before anything runs."""
    plan = rig.plan(SCHEDULES[0])
    params, state = list(rig.params), list(rig.state)
    params[1] = {**params[1], "w": params[1]["w"].detach().to("meta")}
    state[1] = {**state[1], "norm.running_var": state[1]["norm.running_var"].to("meta")}
    run = lambda **options: lambda: rig.run(plan, executor(plan), **options)
    refused(
        rig,
        run(params=tuple(params)),
        fp.PlacementError,
        r"params\[1\].*'w'.* meta",
        "stage 1 runs on cpu",
        r"fp\.place",
    )
    refused(
        rig,
        run(state=tuple(state)),
        fp.PlacementError,
        r"state\[1\].*'norm\.running_var'.* meta",
        "stage 1 runs on cpu",
    )


@pytest.mark.parametrize("which", ["inputs", "target", "feeds"])
def test_a_batch_without_numbers_is_refused(which):
    """Row 17: a meta tensor has nothing to copy to the stage's device; its place in the batch is
    named."""
    called = []

    def fn(p, x, *, feeds):
        called.append(1)
        return x * feeds["f"]

    plan = fp.make_plan(
        [fp.stage(fn, feeds=["f"])], fp.schedules.fill_drain(1, 2), loss=F.mse_loss, devices="cpu"
    )
    given = {
        name: torch.ones(4, 2, device="meta" if name == which else "cpu")
        for name in ("inputs", "target", "feeds")
    }
    place = "feeds['f']" if which == "feeds" else which
    for executor in EXECUTORS:
        with pytest.raises((fp.PlacementError, fp.BatchError)) as caught:
            fp.run(
                plan,
                ((),),
                (given["inputs"], given["target"]),
                feeds={"f": given["feeds"]},
                executor=executor,
            )
        assert f"{place} " in str(caught.value)
        assert "meta" in str(caught.value)
    assert [] == called


def test_shapes_without_numbers(executor):
    """Row 17: a plan on meta devices gives shapes; a real batch on it too."""
    schedule = fp.schedules.one_f_one_b(S, M)
    plan = fp.make_plan([fp.stage(linear)] * S, schedule, loss=F.mse_loss, devices="meta")
    params = fp.place(plan, weights())
    for batch in (rows(7), tuple(one.to("meta") for one in rows(7))):
        result = fp.run(plan, params, batch, executor=executor(plan))
        assert result.loss.is_meta
        assert [one.shape for one in fp.leaves(params)] == [
            one.shape for one in fp.leaves(result.grads)
        ]


@pytest.mark.parametrize(
    ("inputs", "target", "at"),
    [
        (torch.zeros(7, WIDTH), torch.zeros(7, dtype=torch.int32), "2F0 (loss)"),
        (torch.zeros(7, WIDTH, dtype=torch.float64), torch.zeros(7, dtype=torch.int64), "0F0"),
        (torch.zeros(7, WIDTH, dtype=torch.int64), torch.zeros(7, dtype=torch.int64), "0F0"),
    ],
    ids=["labels", "inputs", "integers"],
)
def test_a_wrong_dtype_says_where(rig, inputs, target, at, executor):
    """Row 17: torch's own words, with the stage, the microbatch and whether it was the loss."""
    plan = function_plan(SCHEDULES[0], loss=F.cross_entropy)
    params = tuple({"w": p["w"].float()} for p in weights())
    go = lambda: fp.run(plan, params, (inputs, target), executor=executor(plan))
    failure = assert_invariant(rig, go, kind=RuntimeError, words=("dtype|type",), microbatch=0)
    assert at == failure.where.action


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_devices_that_are_not_here(rig, executor):
    """Row 27: a plan for CUDA is data and can be made anywhere; a run says what is missing and what
    to write."""
    plan = rig.plan(SCHEDULES[0], devices=[f"cuda:{i}" for i in range(S)])
    refused(
        rig,
        lambda: rig.run(plan, executor(plan)),
        fp.PlacementError,
        r"fp\.devices\(n\)",
        "device 0 is cuda:0",
        "sees no CUDA device",
    )
    refused(rig, lambda: rig.run_sequential(plan), fp.PlacementError, "device 2 is cuda:2")
    refused(rig, lambda: fp.place(plan, rig.params), fp.PlacementError, r"fp\.devices\(n\)")
    assert ("cpu",) * 3 == tuple(map(str, fp.devices(3)))


@pytest.mark.parametrize("word", ["xpu", "mps", "mtia:0"])
def test_devices_of_kinds_that_this_torch_has_not(rig, word, executor):
    try:
        torch.empty(0, device=word)
    except (RuntimeError, AssertionError):
        plan = rig.plan(SCHEDULES[0], devices=word)
        says = f"device 0 is {word!r}"
        refused(rig, lambda: fp.place(plan, rig.params), fp.PlacementError, says)
        refused(rig, lambda: rig.run(plan, executor(plan)), fp.PlacementError, says)
    else:
        pytest.skip(f"this machine has {word}")


@pytest.mark.parametrize("word", ["gpu7", "cuda:x", "", 3.5])
def test_words_that_are_no_device(rig, word, executor):
    """Row 17: a plan is made without torch, so its run refuses them, by lane and word."""
    plan = rig.plan(SCHEDULES[0], devices=word)
    refused(
        rig,
        lambda: rig.run(plan, executor(plan)),
        fp.PlacementError,
        f"device 0 is {word!r}",
        "device 2 is",
    )


# -- row 18: parameters
# -------------------------------------------------------------------------------


def changed(rig, **leaves):
    """The rig's parameters with leaves of stage 1 changed; None: left out."""
    own = {**rig.params[1], **leaves}
    return (
        rig.params[0],
        {key: leaf for key, leaf in own.items() if leaf is not None},
        rig.params[2],
    )


def test_keys_and_shapes_run_nothing(rig, executor):
    """Row 18: missing, unknown, another shape, no tensor, too few trees: named, before any stage is
    called."""
    plan = rig.plan(SCHEDULES[0])
    w = rig.params[1]["w"]
    for params, words in (
        (changed(rig, w=None), ("layer1", "lacks 'w'")),
        (changed(rig, ww=w), ("layer1", "'ww'", "did you mean 'w'")),
        (changed(rig, w=w[:2]), ("layer1", r"'w' has shape \(2,\)", r"needs \(4,\)")),
        (changed(rig, w=1.0), ("layer1", "'w' is a float")),
        (rig.params[:2], ("each of 3 stages", "layer1", "got 2")),
        (dict(enumerate(rig.params)), ("a tuple", "dict")),
    ):
        refused(
            rig,
            lambda params=params: rig.run(plan, executor(plan), params=params),
            fp.PlanError,
            *words,
        )


@pytest.mark.parametrize(
    "schedule", [fp.schedules.one_f_one_b(2, M), fp.schedules.zero_bubble(2, M)], ids=ids
)
def test_parameters_that_share_memory(schedule, executor):
    """Row 18: slices of one buffer, overlapping ones, expanded, transposed: gradients of plain
    autograd, nothing written."""
    buffer = torch.randn(
        3 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    cases = {
        "slices": (buffer[:WIDTH], buffer[WIDTH : 2 * WIDTH]),
        "overlapping": (buffer[:WIDTH], buffer[1 : WIDTH + 1]),
        "expanded": (buffer[:1].expand(WIDTH, WIDTH), buffer[:WIDTH]),
        "transposed": (buffer[:WIDTH], buffer[:WIDTH].T),
        "strided": (buffer[::3], buffer[1::3]),
    }
    plan = function_plan(schedule, count=2)
    before, batch = buffer.clone(), rows(7)
    for first, second in cases.values():
        params = ({"w": first}, {"w": second})
        result = fp.run(plan, params, batch, executor=executor(plan))
        assert_plain(result, params, *batch)
        assert torch.equal(before, buffer)


def test_parameters_of_every_kind(executor):
    """Row 18: results of other operations (non-leaf), inference tensors, frozen, nn.Parameter:
    right numbers, no graph touched."""
    plan, batch = function_plan(SCHEDULES[0]), rows(7)
    source = [p["w"].clone().requires_grad_() for p in weights()]
    computed = tuple({"w": w * 1.5} for w in source)
    with torch.inference_mode():
        inference = tuple({"w": p["w"].clone()} for p in weights())
    kinds = {
        "non-leaf": computed,
        "inference": inference,
        "parameter": tuple({"w": torch.nn.Parameter(p["w"].clone())} for p in weights()),
        "requires grad": tuple({"w": p["w"].clone().requires_grad_()} for p in weights()),
    }
    for params in kinds.values():
        result = fp.run(plan, params, batch, executor=executor(plan))
        assert_plain(result, params, *batch)
        assert all(
            gradient.grad_fn is None and not gradient.requires_grad
            for gradient in fp.leaves(result.grads)
        )
        assert all(p["w"].grad is None for p in params if p["w"].is_leaf)
    assert all(w.grad is None for w in source)
    sum(p["w"].sum() for p in computed).backward()  # the user's own graph is whole
    assert all(torch.equal(torch.full_like(w, 1.5), w.grad) for w in source)
    frozen = tuple(
        {"w": torch.nn.Parameter(p["w"].clone(), requires_grad=i == 1)}
        for i, p in enumerate(weights())
    )
    result = fp.run(plan, frozen, batch, executor=executor(plan))
    assert [None, None] == [result.grads[i]["w"] for i in (0, 2)]
    torch.testing.assert_close(
        result.grads[1]["w"], plain(weights(), *batch)[1][1], rtol=1e-10, atol=1e-12
    )


def test_inference_tensors_everywhere(rig, executor):
    """Row 18: batch, parameters and state made under inference_mode; modules with buffers and
    in-place layers."""
    plan = rig.plan(SCHEDULES[0])
    made = lambda tree: fp._src.core.tree.map_leaves(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, tree
    )
    with torch.inference_mode():
        options = {
            "params": made(rig.params),
            "state": made(rig.state),
            "batch": (rig.x.clone(), rig.target.clone()),
        }
    assert all(leaf.is_inference() for leaf in fp.leaves(options["params"]))
    result = rig.run(plan, executor(plan), **options)
    assert_same_result(rig.expected, result)
    assert not any(leaf.is_inference() for leaf in (*fp.leaves(result.grads), result.loss))


def test_a_tie_that_nobody_declared(rig, executor):
    """Row 18: one tensor in two stages; the error is the argument to paste, and nothing has run."""
    plan = function_plan(SCHEDULES[0])
    w = weights(1)[0]["w"]
    shared = ({"w": w}, {"w": w.clone()}, {"w": w})
    words = (
        r"params\[0\] at 'w' and params\[2\] at 'w' are one tensor",
        r"ties=\[\(\(0, 'w'\), \(2, 'w'\)\)\]",
    )
    refused(
        rig, lambda: fp.run(plan, shared, rows(7), executor=executor(plan)), fp.PlanError, *words
    )
    tied = function_plan(SCHEDULES[0], ties=[((0, "w"), (2, "w"))])
    result = fp.run(tied, shared, rows(7), executor=executor(plan))
    _, grads = plain(shared, *rows(7))
    torch.testing.assert_close(result.grads[0]["w"], grads[0] + grads[2], rtol=1e-10, atol=1e-12)


# -- row 21: schedules and plans
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
@pytest.mark.parametrize(
    "counts", [(0, 2), (2, 0), (-1, 2), (2, -3), (2.0, 2), ("2", 2), (None, 2)], ids=str
)
def test_counts_that_are_none(family, counts):
    """Row 21: no stages, no microbatches, no whole number: refused by name, in every family."""
    word = (
        "num_stages"
        if (counts[1] == 2 and counts[0] != 2) or not isinstance(counts[0], int)
        else "num_microbatches"
    )
    with pytest.raises(
        fp.ScheduleError, match=f"{word}.*{counts[0] if word == 'num_stages' else counts[1]!r}"
    ):
        family(*counts)


@pytest.mark.parametrize(
    "build",
    [
        lambda: fp.Schedule.parse("0F0 0F0\n1F0"),
        lambda: fp.Schedule.parse("0B0 0F0"),
        lambda: fp.Schedule.parse("0F0 2F0"),
        lambda: fp.Schedule.parse("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0"),
        lambda: fp.Schedule.parse("0F0 0W0"),
        lambda: fp.Schedule.parse(""),
        lambda: fp.Schedule(((),)),
    ],
    ids=[
        "duplicate",
        "backward first",
        "gap",
        "cycle",
        "W without I",
        "empty text",
        "empty device",
    ],
)
def test_no_wrong_schedule_gets_to_a_run(build):
    """Row 21: whatever is wrong is seen when the plan is made, at the latest; never a hang."""
    with pytest.raises(fp.ScheduleError):
        fp.make_plan([fp.stage(linear)] * 2, build(), loss=F.mse_loss, devices="cpu")


@pytest.mark.slow
def test_a_million_actions_are_checked_in_seconds():
    """Row 21: a schedule of 10^6 actions, and a plan of it."""
    schedule = fp.schedules.one_f_one_b(64, 7813)
    assert sum(map(len, schedule.orders)) >= 10**6
    began = time.monotonic()
    fp.schedules.check(schedule)
    assert time.monotonic() - began < 20
    began = time.monotonic()
    plan = fp.make_plan([fp.stage(linear)] * 64, schedule, loss=F.mse_loss, devices="cpu")
    assert 64 * 7813 * 2 == len(plan.program.order)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("schedule", schedules(S, M)[::5], ids=ids)
def test_too_few_lanes_are_refused(rig, schedule):
    """Row 21: kept lanes of another number; names both and the call."""
    plan = rig.plan(schedule)
    with fp.lanes(plan) as lanes:
        other = rig.plan(
            fp.schedules.fill_drain(S, M, num_devices=1 if plan.num_devices == S else S)
        )
        go = functools.partial(rig.run, other, lanes)
        refused(
            rig,
            go,
            fp.PlanError,
            f"these are {plan.num_devices} lanes",
            f"the plan has {other.num_devices}",
            r"fp\.lanes\(plan\)",
        )
