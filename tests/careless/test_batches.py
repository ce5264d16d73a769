"""Careless batches: lists with a value for each row, inputs that carry a graph, marks around
trees."""

import collections

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import EXECUTORS

import funcpipe as fp


def plan_of(fn, count=2, **options):
    return fp.make_plan(
        [fp.stage(fn)], fp.schedules.fill_drain(1, count), loss=F.mse_loss, devices="cpu", **options
    )


def linear(p, x):
    return x["x"] @ p if isinstance(x, dict) else x @ p


@pytest.mark.parametrize(
    ("ids", "kind"),
    [
        ([3, 1, 4, 1, 5, 9, 2, 6], "list with one int"),
        (["a"] * 8, "list with one str"),
        (("a",) * 8, "tuple with one str"),
        ([0.5] * 8, "list with one float"),
        ([[0], [1], [2, 3], []] * 2, "list with one list"),
        (collections.deque(range(8)), "deque with one int"),
        (range(8), "range with one value"),
        (set(range(8)), "set with one value"),
        (dict.fromkeys(range(8)).keys(), "dict_keys with one value"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_list_with_a_value_for_each_row_is_refused(ids, kind):
    """In every tree of the batch, with its place and the ways out."""
    x, y = torch.ones(8, 2), torch.ones(8, 2)
    plan = plan_of(linear)
    with pytest.raises(
        fp.BatchError, match=rf"inputs\['ids'\] is a {kind} for each of 8 rows.*fp.Replicate"
    ):
        fp.run(plan, (torch.eye(2),), ({"x": x, "ids": ids}, y))
    with pytest.raises(fp.BatchError, match=rf"target\['t'\]\[1\] is a {kind}"):
        fp.run(plan, (torch.eye(2),), (x, {"t": (y, ids)}))


def test_other_values_beside_tensors_are_shared():
    """Sizes, lists of another length, lists that are marked: each microbatch gets them whole, in
    their structure."""
    seen = []

    def stage(p, x):
        seen.append({key: value for key, value in x.items() if key != "x"})
        return x["x"] @ p

    other = {"size": (8, 8, 8, 8, 8, 8, 8, 8), "names": ["a", "b"], "flag": True, "none": None}
    marked = {"ids": fp.Replicate([1, 2, 3, 4, 5, 6, 7, 8])}
    batch = ({"x": torch.ones(8, 2), **other, **marked}, torch.ones(8, 2))
    fp.run(plan_of(stage), (torch.eye(2),), batch)
    assert seen == [{**other, "ids": [1, 2, 3, 4, 5, 6, 7, 8]}] * 2


def test_marks_around_trees_hold_for_their_leaves():
    table = {"a": torch.randn(3, 2), "b": [torch.randn(5, 2)]}
    turned = {"m": torch.randn(2, 6)}
    seen = []

    def stage(p, x):
        x, table, turned = x
        seen.append((table, turned["m"].shape))
        return x @ p

    batch = ((torch.ones(6, 2), fp.Replicate(table), fp.Axis(turned, 1)), torch.ones(6, 2))
    fp.run(plan_of(stage, 3), (torch.eye(2),), batch)
    assert len(seen) == 3
    for found, shape in seen:
        assert torch.equal(found["a"], table["a"])
        assert torch.equal(found["b"][0], table["b"][0])
        assert shape == (2, 2)


@pytest.mark.parametrize("executor", [*EXECUTORS, None])
def test_inputs_that_carry_a_graph_are_refused(executor):
    """Whatever made them would not be trained; every place is named, and the ways out."""
    encoder, x, y = nn.Linear(2, 2), torch.ones(4, 2), torch.ones(4, 2)
    plan = plan_of(linear)
    for batch, place in [
        ((encoder(x), y), "inputs was computed by AddmmBackward0"),
        (({"x": encoder(x)}, y), r"inputs\['x'\] was"),
        ((x, encoder(y)), "target was"),
        ((fp.Axis(encoder(x), 0), y), "inputs was"),
        ((fp.Microbatches([encoder(x), encoder(x)]), fp.Microbatches([y, y])), "inputs"),
        ((x.clone().requires_grad_(), y), "inputs requires a gradient"),
    ]:
        with pytest.raises(fp.BatchError, match=r"fp\.vjp.*fp\.Pipe.*detach(.|\n)*" + place):
            fp.run(plan, (torch.eye(2),), batch, executor=executor)
    with pytest.raises(fp.BatchError, match="computes no gradients of its batch"):
        fp.run_sequential(plan, (torch.eye(2),), (encoder(x), y))
    assert encoder.weight.grad is None
    fp.run(plan, (torch.eye(2),), (encoder(x).detach(), y), executor=executor)


def test_feeds_and_state_that_ask_for_gradients_are_refused():
    fed = fp.stage(lambda p, x, *, feeds: x @ p * feeds["f"], feeds=["f"])
    plan = fp.make_plan([fed], fp.schedules.fill_drain(1, 2), loss=F.mse_loss, devices="cpu")
    x, scale = torch.ones(4, 2), nn.Parameter(torch.ones(4, 2))
    with pytest.raises(fp.BatchError, match=r"feeds\['f'\] was computed by MulBackward0"):
        fp.run(plan, (torch.eye(2),), (x, x), feeds={"f": scale * 2})
    kept = fp.stage(lambda p, x, *, state: x @ p * state["s"])
    plan = fp.make_plan([kept], fp.schedules.fill_drain(1, 2), loss=F.mse_loss, devices="cpu")
    with pytest.raises(
        fp.PlanError, match=r"state\[0\]\['s'\] requires a gradient, but state gets none"
    ):
        fp.run(plan, (torch.eye(2),), (x, x), state=({"s": nn.Parameter(torch.ones(2))},))


def test_where_no_gradients_are_asked_for_inputs_may_have_a_graph():
    """An evaluation detaches them; vjp gives their gradients."""
    x = nn.Linear(2, 2)(torch.ones(4, 2))
    stage = fp.stage(linear)
    plan = fp.make_plan([stage], fp.schedules.fill_drain(1, 2, backward=False), devices="cpu")
    assert not fp.run(plan, (torch.eye(2),), x).outputs.requires_grad
    result, pullback = fp.vjp(
        fp.make_plan([stage], fp.schedules.fill_drain(1, 2), devices="cpu"), (torch.eye(2),), x
    )
    assert torch.equal(pullback(torch.ones_like(result.outputs))[1], torch.ones(4, 2))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_loaded_batch_for_a_first_layer_that_writes_in_place(tmp_path, executor):
    """What ``torch.load`` read has memory without an allocator: a copy that torch makes late
    crashes the process."""
    torch.save({"x": torch.randn(8, 2), "w": torch.randn(2, 2)}, tmp_path / "all.pt")
    loaded = torch.load(tmp_path / "all.pt")
    before = loaded["x"].clone()

    def stage(p, x):
        return x.relu_() @ p

    result = fp.run(
        plan_of(stage), (loaded["w"],), (loaded["x"], torch.ones(8, 2)), executor=executor
    )
    assert torch.equal(loaded["x"], before)
    torch.testing.assert_close(
        result.loss, F.mse_loss(before.relu() @ loaded["w"], torch.ones(8, 2))
    )
