"""Causal stages: what they give for a slice hangs on that slice and what the slices before it
left."""

import torch
import torch.nn.functional as F

import funcpipe as fp

WIDTH = 6


def _attend(params, x, *, carry):
    """One head of causal attention; keys and values of all slices so far travel as two tensors that
    grow."""
    query, key, value = (x @ params["qkv"]).chunk(3, -1)
    if carry is not None:
        key, value = torch.cat([carry["key"], key], 1), torch.cat([carry["value"], value], 1)
    seen, own = key.shape[1], query.shape[1]
    mask = torch.ones(own, seen, dtype=torch.bool).tril(seen - own)
    y = F.scaled_dot_product_attention(
        query[:, None], key[:, None], value[:, None], attn_mask=mask
    )[:, 0]
    return fp.Out(x + torch.tanh(y @ params["out"]), carry={"key": key, "value": value})


def _recur(params, x, *, carry):
    """A recurrence: the last hidden state travels, and where the sequence is, a number that is no
    tensor."""
    hidden, at = (x.new_zeros(x.shape[0], WIDTH), 0) if carry is None else carry
    rows = []
    for row in x.unbind(1):
        at += 1
        hidden = torch.tanh(row @ params["in"] + hidden @ params["self"]) + 0.01 * at
        rows.append(hidden)
    return fp.Out(torch.stack(rows, 1), carry=(hidden, at))


def _pile(params, x, *, carry):
    """The outputs of all slices so far, a tuple that grows: most of it is handed on as it came."""
    x = torch.sin(x @ params["in"])
    slices = (*(carry or ()), x)
    return fp.Out(x + sum(piece.mean(1, keepdim=True) for piece in slices[:-1]), carry=slices)


def _point(params, x):
    """No carry at all."""
    return x * params["scale"] + 0.1 * x.roll(1, -1)


def stage_of(kind: str, name: str = "") -> fp.Stage:
    """A stage of one of these kinds."""
    return fp.stage(
        {"attend": _attend, "recur": _recur, "pile": _pile, "point": _point}[kind],
        name=name or kind,
    )


KINDS = ("attend", "recur", "point")
"""Those that give for a sequence in slices what they give for it whole."""


def params_of(kind: str, generator: torch.Generator):
    """Parameters of such a stage."""
    make = lambda *size: torch.randn(*size, generator=generator, dtype=torch.float64) / 3
    return {
        "attend": lambda: {"qkv": make(WIDTH, 3 * WIDTH), "out": make(WIDTH, WIDTH)},
        "recur": lambda: {"in": make(WIDTH, WIDTH), "self": make(WIDTH, WIDTH)},
        "pile": lambda: {"in": make(WIDTH, WIDTH)},
        "point": lambda: {"scale": make(WIDTH)},
    }[kind]()


def chain(kinds, seed: int = 0):
    """Stages of these kinds, and their parameters."""
    generator = torch.Generator().manual_seed(seed)
    return [stage_of(kind, f"{kind}{at}") for at, kind in enumerate(kinds)], tuple(
        params_of(kind, generator) for kind in kinds
    )


def batch(rows: int, length: int, seed: int = 1):
    """Inputs and a target for it."""
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randn(2, rows, length, WIDTH, generator=generator, dtype=torch.float64)
    return x, target


def whole(stages, params, x, target, loss=F.mse_loss):
    """Loss, gradients and output by plain autograd over whole sequences."""
    leaves = [
        {key: value.detach().clone().requires_grad_() for key, value in tree.items()}
        for tree in params
    ]
    y = x
    for stage, tree in zip(stages, leaves, strict=True):
        out = stage(tree, y)
        y = out.y if isinstance(out, fp.Out) else out
    total = loss(y, target)
    total.backward()
    return (
        total.detach(),
        [{key: value.grad for key, value in tree.items()} for tree in leaves],
        y.detach(),
    )
