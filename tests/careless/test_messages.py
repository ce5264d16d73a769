"""Torch's own errors inside of a run: what the stage or the loss got, where, and what to do."""

import re

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import funcpipe as fp

linear = lambda p, x: x @ p
X, W = torch.randn(4, 3), torch.randn(3, 2)
SQUARE = torch.randn(2, 2)


def embedding():
    stage, params, _ = fp.from_module(nn.Embedding(3, 2))
    return stage, params


def bilinear():
    """Its forward takes two arguments."""
    stage, params, _ = fp.from_module(nn.Bilinear(3, 3, 2))
    return stage, params


CASES = {
    "types": (
        [fp.stage(linear)],
        [W],
        (X.double(), SQUARE),
        F.mse_loss,
        r"got x: float64 \[2, 3\]; params: float32 \[3, 2\]",
        0,
    ),
    "sizes": (
        [fp.stage(linear)] * 2,
        [W, W.clone()],
        (X, SQUARE),
        F.mse_loss,
        r"got x: float32 \[2, 2\]; params: float32 \[3, 2\]",
        1,
    ),
    "no target": (
        [fp.stage(linear)],
        [W],
        (X, None),
        F.mse_loss,
        r"got y: float32 \[2, 2\]; target: None",
        0,
    ),
    "int labels": (
        [fp.stage(linear)],
        [W],
        (X, torch.zeros(4, dtype=torch.int32)),
        F.cross_entropy,
        r"target: int32 \[2\]",
        0,
    ),
    "float labels": (
        [fp.stage(linear)],
        [W],
        (X, torch.zeros(4)),
        F.cross_entropy,
        r"target: float32 \[2\]",
        0,
    ),
    "classes": (
        [fp.stage(linear)],
        [W],
        (X, torch.full((4,), 7)),
        F.cross_entropy,
        r"target: int64 \[2\]",
        0,
    ),
    "arguments": (
        [bilinear()[0]],
        [bilinear()[1]],
        (X, SQUARE),
        F.mse_loss,
        r"got x: float32",
        0,
    ),
    "ids": (
        [embedding()[0]],
        [embedding()[1]],
        (X, X),
        F.mse_loss,
        r"params: \['weight'\] float32 \[3, 2\]",
        0,
    ),
}


by_name = lambda p, x: x["item"] @ p["w"]
CASES |= {
    "key": (
        [fp.stage(by_name)],
        [{"w": W}],
        {"user": X},
        None,
        r"x: \['user'\] float32 \[2, 3\]",
        0,
    ),
    "params": ([fp.stage(by_name)], [{"v": W}], {"item": X}, None, r"params: \['v'\] float32", 0),
    "list": (
        [fp.stage(lambda p, x: [x]), fp.stage(by_name)],
        [(), {"w": W}],
        X,
        None,
        r"x: \[0\] float32 \[2, 3\]",
        1,
    ),
    "number": ([fp.stage(lambda p, x: x * p.exp())], [2.0], X, None, r"params: a float", 0),
    "no loss, a pair": (
        [fp.stage(lambda p, x: F.embedding(x, p))],
        [W],
        ({"tokens": X.long()}, None),
        None,
        r"x: \[0\]\['tokens'\] int64 \[2, 3\], \[1\] None",
        0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_it_got(name):
    stages, params, batch, loss, got, stage = CASES[name]
    schedule = fp.schedules.fill_drain(len(stages), 2, backward=loss is not None)
    plan = fp.make_plan(stages, schedule, loss=loss, devices="cpu")
    if loss is not None and batch[1] is not None and len(batch[1]) != 4:
        batch = batch[0], torch.zeros(4, 2)
    with pytest.raises(fp.StageError) as caught:
        fp.run(plan, tuple(params), batch)
    notes = "\n".join(caught.value.__notes__)
    for match in (got, f"of stage {stage} at microbatch 0"):
        assert re.search(match, notes), (match, notes)


def test_long_trees_are_cut_short_and_errors_of_users_stay_as_they_are():
    def breaks(p, x):
        if "w0" in p:
            return x["x"] @ p["w0"].T
        raise RuntimeError("size of tensor a")

    plan = fp.make_plan(
        [fp.stage(breaks)], fp.schedules.fill_drain(1, 2, backward=False), devices="cpu"
    )
    with pytest.raises(RuntimeError, match="size of tensor a") as caught:
        fp.run(plan, ((),), {"x": X, "n": 3})
    assert len(caught.value.__notes__) == 1
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        fp.run(plan, ({f"w{number}": W for number in range(9)},), {"x": X, "n": 3})
    assert caught.value.__notes__[0] == (
        "got x: ['n'] a int, ['x'] float32 [2, 3]; params: "
        + ", ".join(f"['w{number}'] float32 [3, 2]" for number in range(6))
        + ", and 3 more"
    )
    assert len(caught.value.__notes__) == 2
