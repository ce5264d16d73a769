"""A model in plain PyTorch beside its stages: what training through a pipeline is compared with."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import same, snapshot

import funcpipe as fp

STEPS = 6


class Pair:
    """A model in plain PyTorch, and the same numbers in two stages; names are the model's own after
    the stage's."""

    def __init__(self, dtype=torch.float64, loss=F.cross_entropy, num_microbatches=3):
        torch.manual_seed(1)
        self.plain = nn.Sequential(
            nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
        ).to(dtype)
        model = copy.deepcopy(self.plain)
        stages, self.params, _ = zip(
            fp.from_module(model[:3]), fp.from_module(model[3:]), strict=True
        )
        self.loss, self.dtype = loss, dtype
        self.plan = fp.make_plan(
            stages, fp.schedules.one_f_one_b(2, num_microbatches), loss=loss, devices="cpu"
        )

    def batches(self, count=STEPS, rows=10):
        torch.manual_seed(2)
        return [
            (torch.randn(rows, 6, dtype=self.dtype), torch.randint(0, 3, (rows,)))
            for _ in range(count)
        ]

    def backward(self, x, t):
        """The plain model's gradients, into .grad."""
        self.plain.zero_grad()
        loss = self.loss(self.plain(x), t)
        loss.backward()
        return loss.detach()

    def train(self, mine, theirs, batches, *, max_norm=None, trainable=None):
        """Steps of both, by an optimizer of the leaves and one of the plain model's parameters;
        after each, the result and the plain model's loss. Norms are equal, and a step writes into
        no gradient of the result."""
        for x, t in batches:
            result = fp.run(self.plan, self.params, (x, t), trainable=trainable)
            before = snapshot(result.grads)
            norm = fp.step(mine, self.params, result.grads, max_norm=max_norm)
            assert same(before, snapshot(result.grads))
            loss = self.backward(x, t)
            expected = nn.utils.clip_grad_norm_(self.plain.parameters(), max_norm or float("inf"))
            torch.testing.assert_close(norm, expected, rtol=1e-10, atol=0)
            theirs.step()
            yield result, loss

    def in_order(self):
        """The plain model's parameters in the order of the leaves."""
        return [
            self.plain.get_parameter(name.split(".", 1)[1])
            for name, _ in fp.named_leaves(self.params)
        ]

    def assert_equal(self, rtol=1e-9, atol=1e-11):
        for name, leaf in fp.named_leaves(self.params):
            theirs = self.plain.get_parameter(name.split(".", 1)[1])
            torch.testing.assert_close(
                leaf.detach(),
                theirs.detach(),
                rtol=rtol,
                atol=atol,
                msg=lambda m, n=name: f"{n}: {m}",
            )
            assert leaf.grad is None
