"""A small net with everything in it: skips, state, draws, a module."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from faulty import P

import funcpipe as fp
from funcpipe._src.core.tree import map_leaves

Q = {"w": torch.ones(3, dtype=torch.float64)}


def net(count=3):
    def first(p, x):
        h = F.dropout(torch.tanh(x * p["w"]), 0.25)
        return fp.Out(h, stash={"e": h * 2})

    def last(p, x, *, skips, state):
        return fp.Out(x * p["w"] + skips["e"], stats=x.detach().sum(0))

    middle, weights, _ = fp.from_module(nn.Linear(3, 3, dtype=torch.float64), name="middle")
    stages = [
        fp.stage(first, name="first", stash=["e"]),
        *[middle for _ in range(count - 2)],
        fp.stage(last, name="last", pop=["e"], commit=lambda s, t: s + sum(t)),
    ]
    params = [P, *[map_leaves(torch.clone, weights) for _ in range(count - 2)], Q]
    state = [(), *[() for _ in range(count - 2)], torch.zeros(3, dtype=torch.float64)]
    return stages, tuple(params), tuple(state)
