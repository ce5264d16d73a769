"""Skips through a Pipe: the same numbers wherever it is cut, any value, freed after the last
use."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.nn as nn
from pipe.sequentials import assert_close, data, every_checkpoint, grads

import funcpipe as fp


@fp.models.skippable(stash=["skip"])
class Stash(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x):
        yield fp.models.stash("skip", x)
        return self.linear(x)


@fp.models.skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x):
        skip = yield fp.models.pop("skip")
        return x if skip is None else x * 2 + skip


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4).double(), Stash(), nn.Tanh(), Pop())


@pytest.mark.parametrize("balance", [[4], [2, 2], [1, 1, 1, 1]], ids=str)
@every_checkpoint
def test_f1_right_wherever_it_is_cut(balance, checkpoint):
    model = net()
    pipe = fp.Pipe(copy.deepcopy(model), 3, checkpoint, balance=balance, devices="cpu")
    inputs = [data().requires_grad_() for _ in range(2)]
    outputs = [one(x) for one, x in zip((model, pipe), inputs, strict=True)]
    for y in outputs:
        y.square().sum().backward()
    assert_close(outputs[:1], outputs[1:])
    assert_close([inputs[0].grad, *grads(model)], [inputs[1].grad, *grads(pipe)])


@fp.models.skippable(stash=["none", "int", "bool", "unused"])
class Odd(nn.Module):
    def forward(self, x):
        yield fp.models.stash("none", None)
        yield fp.models.stash("int", (x > 0).long())
        yield fp.models.stash("bool", True)
        yield fp.models.stash("unused", x * 3)
        return x * 2


@fp.models.skippable(pop=["none", "int", "bool", "unused"])
class Take(nn.Module):
    def forward(self, x):
        none = yield fp.models.pop("none")
        mask = yield fp.models.pop("int")
        flag = yield fp.models.pop("bool")
        yield fp.models.pop("unused")
        return x * mask if none is None and flag else x


@every_checkpoint
def test_f2_f10_any_value_and_values_that_nobody_uses(checkpoint):
    model = nn.Sequential(Odd(), nn.Identity(), nn.Sequential(Take()))
    pipe = fp.Pipe(model, 3, checkpoint, balance=[1, 1, 1], devices="cpu")
    a, b = (data().requires_grad_() for _ in range(2))
    pipe(a).sum().backward()
    model(b).sum().backward()
    assert torch.equal(a.grad, b.grad)


class Token:
    """Lives as long as the skip that it is a part of."""


@every_checkpoint
@pytest.mark.parametrize("train", [True, False])
def test_f3_freed_after_the_last_use(checkpoint, train):
    """Without gradients when it was popped, else when the backwards are done; no garbage collection
    is needed."""
    tokens = []

    def alive():
        return sum(token() is not None for token in tokens)

    @fp.models.skippable(stash=["skip"])
    class Watch(nn.Module):
        def forward(self, x):
            token = Token()
            tokens.append(weakref.ref(token))
            yield fp.models.stash("skip", (x.detach() + 1, token))
            return x * 1

    @fp.models.skippable(pop=["skip"])
    class Use(nn.Module):
        def forward(self, x):
            skip, token = yield fp.models.pop("skip")
            assert isinstance(token, Token)
            return x * skip

    model = nn.Sequential(Watch(), nn.Identity(), Use())
    pipe = fp.Pipe(model, 3, checkpoint, balance=[1, 1, 1], devices="cpu").train(train)
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            pipe(data())
        assert (len(tokens), alive()) == (3, 0)
        y = pipe(data().requires_grad_())
        assert alive() > 0
        y.sum().backward()
        assert alive() == 0
    finally:
        gc.enable()


def test_f5_what_does_not_match_is_refused_at_once():
    with pytest.raises(fp.PlanError) as caught:
        fp.Pipe(nn.Sequential(Pop(), nn.Linear(4, 4), Odd()), devices="cpu")
    text = str(caught.value)
    assert "'0' (Pop) pops 'skip', but no layer stashes it" in text
    assert text.count("but no layer pops it") == 4
    with pytest.raises(fp.PlanError, match="stashes 'skip' again"):
        fp.Pipe(nn.Sequential(Stash(), Stash(), Pop()), devices="cpu")
    one, two = fp.models.Namespace(), fp.models.Namespace()
    layers = (Stash().isolate(one), Stash().isolate(two), Pop().isolate(two), Pop().isolate(one))
    fp.Pipe(nn.Sequential(*layers), devices="cpu")(data())


def test_f6_a_layer_that_does_not_do_what_it_declares():
    @fp.models.skippable(stash=["skip"])
    class Forgets(nn.Module):
        def forward(self, x):
            return x

    pipe = fp.Pipe(nn.Sequential(Forgets(), Pop()), 2, balance=[1, 1], devices="cpu")
    with pytest.raises(fp.PlanError, match="declares stash 'skip' but did not stash it"):
        pipe(data())
