"""Does a split compute what its model computes: outputs, gradients and buffers, on two different inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.core.errors import PlanError, bullets
from funcpipe.core.tree import flatten, locations, map_leaves
from funcpipe.models.export import names_by_tensor, shell
from funcpipe.models.losses import ModelLoss
from funcpipe.models.signature import as_call
from funcpipe.models.split import Split
from funcpipe.models.traced import GraphFn
from funcpipe.runtime.apply import apply

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Relative to the largest number of a tensor: rounding differs, the mathematics must not."""


def verify(model: nn.Module, split: Split, inputs: Any, *, train: bool) -> None:
    """Compare a split with the model as it stands; the model is untouched.

    Both run twice, the second time on other inputs, so that what a trace took for a constant shows.

    Raises:
        PlanError: with every value that differs.
    """
    own = shell(model).train(train) if train != model.training else shell(model)
    canonical = names_by_tensor(model)
    buffers = {name: one.detach().clone() for name, one in model.named_buffers() if canonical[name] == name}
    params = {name: one.detach().requires_grad_(one.requires_grad) for name, one in model.named_parameters()}
    state = split.state
    for number, x in enumerate((inputs, other_inputs(inputs))):
        try:
            wanted, theirs = _eager(own, params, buffers, x, split.loss)
        except Exception as error:
            if not number:
                raise PlanError(f"the model itself fails on the example: {type(error).__name__}: {error}") from error
            continue  # what we made of the example may be no input of this model
        found, ours, state = _staged(split, x, state, train=train)
        faults = _differences(wanted, found, "output")
        for name in {**theirs, **ours}:
            faults += _differences(theirs.get(name), ours.get(name), f"gradient of {name}")
        for name, value in buffers.items():
            for tree in state:
                if tree and name in tree:
                    faults += _differences(value, tree[name], f"buffer {name}")
        if faults:
            which = "the example" if not number else "inputs other than the example (the trace took something for a constant: a counter, a random number of Python, a number read from a tensor)"  # fmt: skip
            raise PlanError(bullets(f"the traced stages do not compute what the model computes, on {which}; cut without tracing (split without example=), or write the stages yourself:", faults[:12]))  # fmt: skip


def same_mode(model: nn.Module, split: Split, inputs: Any, *, train: bool) -> bool:
    """Do the traced stages compute the model's outputs in the other mode as well."""
    for part in split.stages:
        fn = getattr(part.fn, "inner", part.fn)
        assert isinstance(fn, GraphFn)
        fn.modes = frozenset({True, False})
    own = shell(model).train(train)
    params = {name: one.detach() for name, one in model.named_parameters()}
    buffers = {name: one.detach().clone() for name, one in model.named_buffers()}
    try:
        with torch.no_grad():
            wanted = _call(own, {**params, **buffers}, inputs)
            with _seeded(inputs):
                found = apply(split.stages, split.params, inputs, state=split.state, train=train).y
    except Exception:
        return False
    return not _differences(wanted, found, "output")


def other_inputs(inputs: Any) -> Any:
    """Inputs of the same kind with other numbers: rows turned by one, floating numbers scaled."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        turned = leaf.detach().roll(1, 0) if leaf.dim() else leaf.detach()
        return turned * 0.75 if leaf.is_floating_point() and leaf.dim() else turned

    return map_leaves(one, inputs)


def _eager(
    own: nn.Module, params: Mapping[str, Tensor], buffers: dict[str, Tensor], x: Any, loss: Any
) -> tuple[Any, dict[str, Tensor]]:
    with torch.enable_grad():
        y = _call(own, {**params, **buffers}, x)
        return map_leaves(_plain, y), _gradients(_objective(y, loss), dict(params))


def _staged(split: Split, x: Any, state: Any, *, train: bool) -> tuple[Any, dict[str, Tensor], tuple[Any, ...]]:
    aliases: dict[int, Tensor] = {}

    def alias(leaf: Tensor) -> Tensor:
        return aliases.setdefault(id(leaf), leaf.detach().requires_grad_(leaf.requires_grad))

    trees = tuple({key: alias(leaf) for key, leaf in tree.items()} for tree in split.params)
    named = {name: trees[s][key] for name, home in split.homes.items() for kind, s, key in home.owners[:1] if kind == "params"}  # fmt: skip
    with torch.enable_grad(), _seeded(x):
        out = apply(split.stages, trees, x, state=state, train=train)
        first: dict[int, str] = {}
        unique = {name: leaf for name, leaf in named.items() if first.setdefault(id(leaf), name) == name}
        gradients = _gradients(_objective(out.y, split.loss), unique)
    after = tuple(
        part.commit(own, (stats,)) if part.commit is not None and train else own
        for part, own, stats in zip(split.stages, state, out.stats, strict=True)
    )
    return map_leaves(_plain, out.y), gradients, after


def _call(own: nn.Module, tensors: dict[str, Tensor], x: Any) -> Any:
    args, kwargs = as_call(map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, x))
    with _seeded(x):
        return torch.func.functional_call(own, tensors, args, kwargs)


class _seeded:
    """The same random numbers each time, and torch's generators as they were afterwards."""

    def __init__(self, x: Any) -> None:
        found = {leaf.device for leaf in flatten(x)[0] if isinstance(leaf, Tensor) and leaf.device.type == "cuda"}
        self.fork = torch.random.fork_rng(devices=sorted(found, key=str))

    def __enter__(self) -> None:
        self.fork.__enter__()
        torch.manual_seed(0)

    def __exit__(self, *error: Any) -> None:
        self.fork.__exit__(*error)


def _objective(y: Any, loss: Callable[[Any, Any], Any] | None) -> Tensor | None:
    """The model's loss, or a sum that weighs every number of the output differently."""
    if loss is not None and not (isinstance(loss, ModelLoss) and loss.find(y) is None):
        return loss(y, None)
    total: Tensor | None = None
    for number, leaf in enumerate(flatten(y)[0]):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.requires_grad:
            weights = torch.linspace(0.5, 1.5 + number, max(1, leaf.numel()), dtype=leaf.dtype, device=leaf.device)
            part = (leaf * weights[: leaf.numel()].view(leaf.shape)).sum()
            total = part if total is None else total + part.to(total)
    return total


def _gradients(objective: Tensor | None, named: dict[str, Tensor]) -> dict[str, Tensor]:
    wanted = {name: leaf for name, leaf in named.items() if leaf.requires_grad}
    if not wanted or not isinstance(objective, Tensor) or not objective.requires_grad:
        return {}
    found: Any = torch.autograd.grad(objective, list(wanted.values()), allow_unused=True)
    return {name: one for name, one in zip(wanted, found, strict=True) if one is not None}


def _plain(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _differences(wanted: Any, found: Any, what: str) -> list[str]:
    """Where two trees differ by more than rounding."""
    a, b = flatten(wanted), flatten(found)
    if a[1] != b[1]:
        return [f"{what} is built as {b[1]}, the model's as {a[1]}"]
    out: list[str] = []
    for name, left, right in zip(locations(wanted, what), a[0], b[0], strict=True):
        if not isinstance(left, Tensor) or not isinstance(right, Tensor):
            if left is None and isinstance(right, Tensor) and not right.count_nonzero():
                continue
            if right is None and isinstance(left, Tensor) and not left.count_nonzero():
                continue
            if type(left) is not type(right) or (isinstance(left, (int, float, str, bool)) and left != right):
                out.append(f"{name} is a {type(right).__name__}, the model's a {type(left).__name__}")
            continue
        if left.shape != right.shape or left.dtype != right.dtype:
            out.append(f"{name} is {right.dtype} {tuple(right.shape)}, the model's {left.dtype} {tuple(left.shape)}")
        elif not left.dtype.is_floating_point:
            out += [] if torch.equal(left, right) else [f"{name} differs"]
        elif left.numel():
            size = float(left.nan_to_num().abs().max())
            error = float((left.nan_to_num() - right.nan_to_num()).abs().max())
            if error > _TOLERANCE.get(left.dtype, 1e-3) * (1.0 + size) or not torch.equal(left.isnan(), right.isnan()):
                out.append(f"{name} differs by {error:.2g} where the model's numbers reach {size:.2g}")
    return out
