"""Optimizers as pairs of pure functions: SGD with momentum, and AdamW."""

import functools
from typing import NamedTuple

import torch

import funcpipe as fp


def sgd(gradient, velocity, param, lr):
    """SGD with momentum; its state is one tensor."""
    velocity = 0.9 * velocity + gradient
    return -lr * velocity, velocity


class Moments(NamedTuple):
    """The state of `adamw`: a count as a tensor, and two moments."""

    count: torch.Tensor
    mu: torch.Tensor
    nu: torch.Tensor


def moments(param):
    count = torch.zeros((), dtype=torch.int64)
    return Moments(count, torch.zeros_like(param), torch.zeros_like(param))


def adamw(gradient, state, param):
    """AdamW, whose rate falls with the count in its state."""
    count = state.count + 1
    mu = 0.9 * state.mu + 0.1 * gradient
    nu = 0.999 * state.nu + 0.001 * gradient * gradient
    rate = 0.02 * 0.9 ** int(count)
    mean, square = mu / (1 - 0.9 ** int(count)), nu / (1 - 0.999 ** int(count))
    return -rate * (mean / (square.sqrt() + 1e-8) + 0.01 * param), Moments(count, mu, nu)


RULES = {
    "sgd": (torch.zeros_like, functools.partial(sgd, lr=0.1)),
    "adamw": (moments, adamw),
}
MAKERS = {
    "sgd": lambda leaves: fp.optim.FunctionalOptimizer(leaves, torch.zeros_like, sgd, lr=0.1),
    "adamw": lambda leaves: fp.optim.FunctionalOptimizer(leaves, moments, adamw),
}


class PlainRule:
    """A rule in a plain loop over tensors, without an optimizer."""

    def __init__(self, name, tensors):
        self.init, self.update = RULES[name]
        self.tensors = list(tensors)
        self.states = [self.init(tensor) for tensor in self.tensors]

    def step(self, gradients):
        for place, (tensor, gradient) in enumerate(zip(self.tensors, gradients, strict=True)):
            if gradient is not None:
                update, self.states[place] = self.update(gradient, self.states[place], tensor)
                self.tensors[place] = tensor + update
