"""Laws 1, 2 and 9 on random chains: the oracle's bits in any schedule, plain autograd's numbers
over the whole batch."""

from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from common import EXECUTORS, assert_same_result, same, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st

import funcpipe as fp

WIDTH = 3
FAMILIES = (
    fp.schedules.fill_drain,
    fp.schedules.one_f_one_b,
    fp.schedules.looped_bfs,
    fp.schedules.interleaved,
    fp.schedules.zero_bubble,
)


@dataclass
class Spec:
    """One random stage."""

    inplace: str = "none"
    body: str = "linear"
    beside: str = "none"
    feed: bool = False
    pops: list[str] = field(default_factory=list)
    stashes: dict[str, str] = field(default_factory=dict)
    aux: bool = False
    unused: bool = False
    frozen: bool = False


INPLACE = {
    "none": lambda h: h,
    "mul_": lambda h: h.mul_(1.5),
    "relu_": lambda h: F.relu(h, inplace=True),
    "row": lambda h: h.index_fill_(1, torch.tensor([0]), 0.5),
    "add_": lambda h: h.add_(1.0),
}
BODIES = {
    "linear": lambda p, h: torch.tanh(h @ p["w"].T + p["b"]),
    "scale": lambda p, h: h * p["b"],
    "none": lambda p, h: h + 0,
    "view": lambda p, h: torch.sin(h * p["b"]).flip(1)[:, :WIDTH],
    "twice": lambda p, h: F.silu(h @ p["w"]) @ p["w"] + h,
}
BESIDE = {
    "none": lambda h: None,
    "ids": lambda h: h.argmax(-1),
    "mask": lambda h: (h > 0, "word", 3),
    "constant": lambda h: h.detach() * 2,
    "grad": lambda h: [h.sigmoid(), {"n": 1.5}],
}
SKIPS = {
    "h": lambda h: h,
    "tree": lambda h: {"h": h * 2, "ids": h.argmax(-1), "n": 3},
    "slice": lambda h: (h[:, 1:], None),
    "ints": lambda h: [(h > 0).long()],
}


def value(tree, rows):
    """(rows, 1) from anything: what a later stage uses of a skip or of what stands beside an
    activation."""
    tensors = [
        leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)
    ]
    return sum(
        (t.double().reshape(rows, -1).sum(1, keepdim=True) for t in tensors),
        torch.zeros(rows, 1, dtype=torch.float64),
    )


def stage_of(index, spec):
    def fn(p, x, *, skips=None, feeds=None):
        h, beside = x
        rows = len(h)
        h = BODIES[spec.body](p, INPLACE[spec.inplace](h)) + 0.1 * value(beside, rows)
        for number, name in enumerate(spec.pops):
            h = h + value(skips[name], rows) * (0.3 + 0.1 * number)
        if spec.feed:
            h = h * feeds["f"]
        stash = {name: SKIPS[kind](h) for name, kind in spec.stashes.items()}
        loss = (h.square().mean(1).sum() * 0.1, rows) if spec.aux else None
        return fp.Out((h.clone(), BESIDE[spec.beside](h)), stash=stash, loss=loss)

    return fp.stage(
        fn,
        name=f"s{index}",
        stash=list(spec.stashes),
        pop=spec.pops,
        feeds=["f"] if spec.feed else [],
    )


@st.composite
def chains(draw):
    count = draw(st.integers(2, 5))
    pick = lambda names: draw(st.sampled_from(sorted(names)))
    flag = lambda: draw(st.integers(0, 4)) == 0
    specs = [
        Spec(pick(INPLACE), pick(BODIES), pick(BESIDE), flag(), [], {}, flag(), flag(), flag())
        for _ in range(count)
    ]
    specs[draw(st.integers(0, count - 1))].body = "linear"
    for number in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, count - 2))
        ends = draw(st.sets(st.integers(start + 1, count - 1), min_size=1))
        specs[start].stashes[f"k{number}"] = pick(SKIPS)
        for end in sorted(ends):
            specs[end].pops.append(f"k{number}")
    return specs


@st.composite
def legal_schedules(draw, num_stages):
    num_microbatches = draw(st.integers(1, 5))
    devices = draw(st.sampled_from([d for d in range(1, num_stages + 1) if num_stages % d == 0]))
    schedule = draw(st.sampled_from(FAMILIES))(num_stages, num_microbatches, num_devices=devices)
    cells = [(s, m) for s in range(num_stages) for m in range(num_microbatches)]
    again = draw(st.one_of(st.just(None), st.sets(st.sampled_from(cells)), st.just(set(cells))))
    if again:
        return fp.schedules.remat(
            schedule, keep=lambda action: (action.stage, action.microbatch) not in again
        )
    return schedule


def numbers(specs, rows, seed):
    g = torch.Generator().manual_seed(seed)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    params = tuple(
        {
            "w": make(WIDTH, WIDTH),
            "b": make(WIDTH),
            **({"unused": make(2)} if spec.unused else {}),
            "steps": torch.tensor(3),
            "name": "n",
        }
        for spec in specs
    )
    return params, (make(rows, WIDTH), None), make(rows, WIDTH), {"f": make(rows, WIDTH)}


def loss_of(y, target):
    return F.mse_loss(y[0] + 0.1 * value(y[1], len(target)), target)


def plain(stages, params, inputs, target, feeds):
    """Plain autograd over the whole batch, without a plan."""
    leaves = [
        {
            k: v.clone().requires_grad_()
            if isinstance(v, torch.Tensor) and v.is_floating_point()
            else v
            for k, v in p.items()
        }
        for p in params
    ]
    out = fp.apply(stages, leaves, (inputs[0].clone(), None), feeds=feeds)
    loss = loss_of(out.y, target)
    if out.loss:
        loss = loss + out.loss[0] / out.loss[1]
    loss.backward()
    return loss.detach(), leaves


@settings(max_examples=120)
@given(st.data())
def test_any_chain_in_any_schedule(data):
    """Both executors have the oracle's bits; its numbers are those of plain autograd; the caller's
    tensors rest."""
    specs = data.draw(chains(), label="stages")
    schedule = data.draw(legal_schedules(len(specs)), label="schedule")
    rows = data.draw(st.integers(1, 9), label="rows")
    params, inputs, target, feeds = numbers(
        specs, rows, data.draw(st.integers(0, 99), label="seed")
    )
    if not any(spec.feed for spec in specs):
        feeds = {}
    stages = [stage_of(index, spec) for index, spec in enumerate(specs)]
    trainable = tuple(not spec.frozen for spec in specs)
    plan = fp.make_plan(stages, schedule, loss=loss_of, outputs=True, devices="cpu")
    options = {"feeds": feeds, "trainable": trainable, "threads_per_lane": 1}
    before = snapshot((params, inputs, target, feeds))
    loss, leaves = plain(stages, params, inputs, target, feeds)

    trained = [
        p[key] for p, spec in zip(leaves, specs, strict=True) if not spec.frozen for key in "wb"
    ]
    if trained and all(leaf.grad is None for leaf in trained):
        for call in (
            fp.run_sequential,
            *(partial(fp.run, executor=executor) for executor in EXECUTORS),
        ):
            with pytest.raises(fp.PlanError, match="no gradient reached any parameter"):
                call(plan, params, (inputs, target), **options)
        return
    expected = fp.run_sequential(plan, params, (inputs, target), **options)
    for executor in EXECUTORS:
        assert_same_result(
            expected, fp.run(plan, params, (inputs, target), executor=executor, **options)
        )
    assert same(before, snapshot((params, inputs, target, feeds)))

    torch.testing.assert_close(expected.loss, loss, rtol=1e-10, atol=1e-10)
    for spec, mine, theirs in zip(specs, expected.grads, leaves, strict=True):
        assert theirs.keys() == mine.keys()
        for key in ("w", "b", *(["unused"] if spec.unused else [])):
            if spec.frozen:
                assert mine[key] is None
            else:
                gradient = (
                    torch.zeros_like(theirs[key]) if theirs[key].grad is None else theirs[key].grad
                )
                torch.testing.assert_close(mine[key], gradient, rtol=1e-10, atol=1e-10)


@settings(max_examples=30)
@given(st.data())
def test_any_chain_evaluates(data):
    """Forward-only plans give the outputs and the loss of the whole batch."""
    specs = data.draw(chains(), label="stages")
    count, rows = (
        data.draw(st.integers(1, 5), label="M"),
        data.draw(st.integers(1, 9), label="rows"),
    )
    params, inputs, target, feeds = numbers(specs, rows, 0)
    feeds = feeds if any(spec.feed for spec in specs) else {}
    stages = [stage_of(index, spec) for index, spec in enumerate(specs)]
    plan = fp.make_plan(
        stages,
        fp.schedules.fill_drain(len(specs), count, num_devices=2, backward=False),
        loss=loss_of,
        devices="cpu",
    )
    loss, _ = plain(stages, params, inputs, target, feeds)
    y = fp.apply(stages, params, (inputs[0].clone(), None), feeds=feeds).y
    for executor in EXECUTORS:
        result = fp.run(plan, params, (inputs, target), feeds=feeds, executor=executor)
        assert result.grads is None
        torch.testing.assert_close(result.loss, loss, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(result.outputs[0], y[0].detach(), rtol=1e-10, atol=1e-10)
