"""Calls on the Python stack: which modules and checkpointed regions run, and what belongs to one
call alone."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from funcpipe._src.core.frames import MODULE_CALL, REGIONS, frames, own_dict, region_of


class Thing:
    """What a weak reference can be had of."""


def region_calls() -> list[dict]:
    return [own_dict(frame) for frame in frames() if frame.f_code in REGIONS]


class Looking(nn.Module):
    """Puts a thing into the dict of the outermost call around it."""

    def forward(self, x, **others):
        assert {} == others
        calls = [frame for frame in frames() if frame.f_code is MODULE_CALL]
        self.depth = len(calls)
        store = own_dict(calls[-1]).setdefault(Thing, Thing())
        self.kept = weakref.ref(store)
        if x is None:
            raise KeyboardInterrupt
        return x


@pytest.mark.parametrize("fails", [False, True])
def test_what_lies_with_a_call_goes_when_it_ends(fails):
    """Both layers find the same thing, no forward gets it as an argument, and nobody finds it
    afterwards."""
    first, second = Looking(), Looking()
    if fails:
        with pytest.raises(KeyboardInterrupt):
            nn.Sequential(first, second)(None)
    else:
        nn.Sequential(first, second, first)(torch.ones(1))
        assert 2 == first.depth == second.depth
    gc.collect()
    assert first.kept() is None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_each_region_is_a_call_of_its_own(use_reentrant):
    """The same function in two regions, one after the other and one inside of the other."""
    seen: list[list[dict]] = []

    def look(x, inner=None):
        seen.append(region_calls())
        return x * 2 if inner is None else inner(x)

    region = lambda x, *inner: checkpoint(look, x, *inner, use_reentrant=use_reentrant)
    x = torch.ones(2, requires_grad=True)
    region(region(x), region)
    one, two, three = seen
    assert [1, 1, 2] == [len(calls) for calls in seen]
    assert one[0] is not two[0]
    assert three[1] is two[0]
    assert three[0] is not two[0]
    assert [] == region_calls()


def test_a_decorated_function_is_a_region():
    try:
        curried = checkpoint(use_reentrant=False)(lambda x: x * len(region_calls()))
    except TypeError:
        pytest.skip("torch 2.15 is the first that has this form")
    assert torch.equal(curried(torch.ones(2)), torch.ones(2))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_region_has_one_identity_in_all_its_computations(use_reentrant):
    """Also the same function in two regions; each recomputation is told from the others."""
    seen = []

    def look(x):
        seen.append([region for frame in frames() if (region := region_of(frame))])
        return x.exp()

    region = lambda x: checkpoint(look, x, use_reentrant=use_reentrant)
    x = torch.ones(2, requires_grad=True)
    y = region(region(x)).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert [1] * 6 == [len(regions) for regions in seen]
    first, second, *again = [region for regions in seen for region in regions]
    assert first.identity is not second.identity
    assert None is first.repetition is second.repetition
    order = [second, first, second, first]
    for one, other in zip(order, again, strict=True):
        assert one.identity is other.identity
        assert other.repetition is not None
    if not use_reentrant:  # the id of a frame may come again
        assert again[0].repetition != again[2].repetition
    del one, other, again, order, second
    identity = weakref.ref(first.identity)
    del first, y, seen[:]
    gc.collect()
    assert identity() is None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_an_inner_region_is_a_new_one_in_a_recomputation(use_reentrant):
    seen = []

    def look(x):
        seen.append([region for frame in frames() if (region := region_of(frame))])
        return x.exp()

    def outer(x):
        return checkpoint(look, x * 1, use_reentrant=False).exp()

    x = torch.ones(2, requires_grad=True)
    checkpoint(outer, x, use_reentrant=use_reentrant).sum().backward()
    forward, in_recomputation, *_ = seen
    assert forward[1].identity is in_recomputation[1].identity
    assert forward[0].identity is not in_recomputation[0].identity
    assert [True, True, True, False] == [
        region.repetition is None for region in (*forward, *in_recomputation)
    ]
