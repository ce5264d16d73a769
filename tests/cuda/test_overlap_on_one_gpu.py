"""An overlap on a real GPU: the loop's bits, and memory that nobody gets too early."""

from __future__ import annotations

import pytest
import torch
from common import same

import funcpipe as fp

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda:0"
ROWS = 1 << 18


def batches(count: int, *, pinned: bool):
    for number in range(count):
        g = torch.Generator().manual_seed(number)
        batch = {"x": torch.randn(ROWS, generator=g), "y": torch.randn(ROWS, generator=g)}
        yield {key: value.pin_memory() if pinned else value for key, value in batch.items()}


def scale(batch):
    return {**batch, "x": batch["x"] * 2}


def step(state, batch):
    error = batch["x"] * state - batch["y"]
    torch.cuda._sleep(200_000)  # the consumer is slow, so that too early would be seen
    return state - 0.1 * (error * batch["x"]).mean(), error.square().mean()


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("pinned", [True, False])
def test_it_equals_the_loop(pinned, depth):
    """B6.11."""
    init = torch.tensor(1.0, device=DEVICE)
    state, want = init, []
    for batch in batches(9, pinned=False):
        state, loss = step(state, scale({key: value.to(DEVICE) for key, value in batch.items()}))
        want.append(loss)
    stages = [fp.batches.to_device(DEVICE, pin=not pinned), scale, fp.batches.Fold(step, init)]
    run = fp.batches.overlap(batches(9, pinned=pinned), stages, depth=depth)
    assert same(list(run), want)
    assert same(run.state, state)
    threaded = fp.batches.overlap(batches(9, pinned=pinned), stages, depth=depth, thread=True)
    assert same(list(threaded), want)


def test_nobody_gets_memory_too_early():
    """B6.14: blocks of a batch's size are taken and filled with NaN after each result, while a slow
    consumer still runs."""
    want = [(batch["x"] * 2 + batch["y"]).sum() for batch in batches(12, pinned=False)]
    got = []
    for batch in fp.batches.overlap(
        batches(12, pinned=True), [fp.batches.to_device(DEVICE), scale]
    ):
        torch.cuda._sleep(2_000_000)
        got.append((batch["x"] + batch["y"]).sum())
        del batch
        for _ in range(3):
            torch.empty(ROWS, device=DEVICE).fill_(float("nan"))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-2)
