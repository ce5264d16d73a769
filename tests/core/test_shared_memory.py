"""Which views of one memory have numbers in common."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcpipe._src.core.border import sharing_memory

SHAPES = [(2, 3, 4), (6, 4), (24,)]
STEPS = st.tuples(
    st.sampled_from(["transpose", "narrow", "first", "flat", "every other"]),
    *[st.integers(0, 5)] * 3,
)


def view_of(base, steps):
    view = base
    for kind, axis, start, length in steps:
        if not view.dim():
            break
        axis %= view.dim()
        if kind == "transpose":
            view = view.transpose(0, axis)
        elif kind == "narrow":
            start = min(start, view.shape[axis])
            view = view.narrow(axis, start, min(length, view.shape[axis] - start))
        elif kind == "first" and view.shape[axis]:
            view = view.select(axis, 0)
        elif kind == "flat" and view.is_contiguous():
            view = view.reshape(-1)
        elif kind == "every other":
            view = view[::2]
    return view


@given(st.sampled_from(SHAPES), st.lists(st.lists(STEPS, max_size=3), min_size=2, max_size=4))
def test_no_common_number_is_overlooked(shape, steps):
    base = torch.arange(24).reshape(shape)
    views = [view_of(base, each) for each in steps]
    sets = [{*view.flatten().tolist()} for view in views]
    common = {
        index
        for one, other in combinations(range(len(views)), 2)
        if sets[one] & sets[other]
        for index in (one, other)
    }
    assert common <= {*sharing_memory(views)}


X = torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("leaves", "sharing"),
    [
        ([X, X], [0, 1]),
        ([X, X.T, torch.zeros(2)], [0, 1]),
        ([*X.chunk(3, 1)], []),
        ([*X.chunk(2)], []),
        ([*X.view(4, 3, 2).unbind(1)], []),
        ([X[:, 1:3], X[:, 2:4], X[:, 4:]], [0, 1]),
        ([X[1], X.view(-1)[3:7]], [0, 1]),
        ([X[0], X.view(-1)[6:7]], []),
        ([X[:1].expand(3, 6), X[2]], [0, 1]),  # in doubt
        ([X.clone(), X, 3, None], []),
    ],
)
def test_views_that_models_hand_on(leaves, sharing):
    assert sharing_memory(leaves) == sharing
