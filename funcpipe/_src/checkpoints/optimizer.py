"""Write an optimizer's state and options as JSON with tensors beside it, and restore them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.checkpoints.entries import Entry, spread_like
from funcpipe._src.core.errors import CheckpointError, RanksError, raise_all
from funcpipe._src.core.shown import count_text, some

Written = dict[str, Any]
"""``class``: the name of the optimizer's class. ``groups``: for each its ``options`` and the
``names`` of its parameters. ``state``: what the optimizer keeps for a parameter, by name."""


def write_optimizer(
    optimizer: torch.optim.Optimizer | None, found: Sequence[Entry]
) -> tuple[Written | None, dict[str, Tensor]]:
    """Return an optimizer's state and options, and the tensors of its state by their keys.

    Raises:
        CheckpointError: the optimizer holds tensors that are not in params, or its state cannot be
            written.
    """
    if optimizer is None:
        return None, {}
    held = _held(optimizer, found, "save the params that it steps")
    name_of = {id(leaf): name for row in held for name, leaf in row}
    tensors: dict[str, Tensor] = {}
    faults: list[str] = []
    groups: list[dict[str, Any]] = []
    for number, (group, row) in enumerate(zip(optimizer.param_groups, held, strict=True)):
        options = {key: group[key] for key in group if key not in ("params", "param_names")}
        encoded = _encoded(options, f"group {number}", None, faults)
        groups.append({"options": encoded, "names": [name for name, _ in row]})
    state: dict[str, Any] = {}
    for leaf, kept in optimizer.state.items():
        if kept and id(leaf) in name_of:
            name = name_of[id(leaf)]
            state[name] = _encoded(dict(kept), _escaped(name), tensors, faults)
        elif kept:
            faults.append("its state has an entry for a parameter that is not in its groups")
    kind = type(optimizer).__name__
    title = f"the state of {kind} cannot be written, and nothing was written:"
    raise_all(title, faults, CheckpointError, most=8)
    return {"class": kind, "groups": groups, "state": state}, tensors


def join_optimizers(everyone: Iterable[Written | None]) -> Written | None:
    """Join the optimizers of all ranks. Raises RanksError if classes, groups or options differ."""
    given = {rank: written for rank, written in enumerate(everyone) if written is not None}
    if not given:
        return None
    lead, first = next(iter(given.items()))
    faults: list[str] = []
    for rank, written in given.items():
        if written["class"] != first["class"]:
            faults.append(f"rank {rank} has {written['class']}, rank {lead} has {first['class']}")
        elif _options(written) != _options(first):
            faults.append(f"rank {rank} has other options or groups than rank {lead}")
    raise_all("the optimizers of the ranks do not fit together:", faults, RanksError, most=8)
    groups: list[dict[str, Any]] = []
    for same in zip(*[written["groups"] for written in given.values()], strict=True):
        names = dict.fromkeys(name for group in same for name in group["names"])
        groups.append({"options": same[0]["options"], "names": [*names]})
    state = {name: kept for written in given.values() for name, kept in written["state"].items()}
    return {"class": first["class"], "groups": groups, "state": state}


def moments_of(found: Sequence[Entry], keys: Iterable[str]) -> list[str]:
    """Return the keys of the tensors that an optimizer keeps for these entries."""
    names = {_escaped(entry.name) for entry in found}
    return [key for key in keys if key.partition("/")[0] in names]


def read_optimizer(
    optimizer: torch.optim.Optimizer,
    written: Written | None,
    found: Sequence[Entry],
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, Any], str]:
    """Return a checkpoint's optimizer as a ``state_dict`` for this optimizer, without loading it.

    Returns:
        The ``state_dict``, and a warning about parameters whose state is not used, or "".

    Raises:
        CheckpointError: the checkpoint has no optimizer, or one that does not fit.
    """
    if written is None:
        raise CheckpointError("the checkpoint has no optimizer; it was saved without optimizer=")
    kind = type(optimizer).__name__
    if kind != written["class"]:
        raise CheckpointError(f"the checkpoint has the state of {written['class']}, not of {kind}")
    if any(leaf.is_meta for group in optimizer.param_groups for leaf in group["params"]):
        raise CheckpointError(
            "the optimizer holds parameters on the meta device; first load the parameters, then "
            "make the optimizer, then load the optimizer"
        )
    held = _held(optimizer, found, "make it over the params that are loaded")
    options_of = {name: group["options"] for group in written["groups"] for name in group["names"]}
    groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    faults: list[str] = []
    for number, (group, row) in enumerate(zip(groups, held, strict=True)):
        unknown = [name for name, _ in row if name not in options_of]
        faults += [f"{name!r} was not in the optimizer that was saved" for name in unknown]
        saved = [options_of[name] for name, _ in row if name in options_of]
        if any(options != saved[0] for options in saved):
            faults.append(
                f"group {number} has parameters of several groups of the checkpoint, whose options "
                "differ"
            )
        for key, value in _decoded(saved[0], {}).items() if saved else ():
            before = group.get(key)
            if isinstance(value, Tensor) and isinstance(before, Tensor):
                value = value.to(before.device)
            group[key] = value
    raise_all("the checkpoint's optimizer does not fit:", faults, CheckpointError, most=8)
    pairs = [pair for row in held for pair in row]
    state = {
        number: _decoded(written["state"][name], tensors, leaf)
        for number, (name, leaf) in enumerate(pairs)
        if name in written["state"]
    }
    names = {entry.name for entry in found if entry.kind == "params"}
    left = sorted(names & {*options_of} - {name for name, _ in pairs})
    warning = (
        f"the optimizer holds {len(pairs)} parameters, and the checkpoint's held more: "
        f"{some(map(repr, left))}; the state of {count_text(len(left), 'parameter')} is not loaded"
    )
    restored = {"state": state, "param_groups": groups}
    getattr(optimizer, "fitted", dict)(restored)  # a FunctionalOptimizer of other functions raises
    return restored, warning if left else ""


def _options(written: Written) -> list[Any]:
    return [group["options"] for group in written["groups"]]


def _held(
    optimizer: torch.optim.Optimizer, found: Sequence[Entry], remedy: str
) -> list[list[tuple[str, Tensor]]]:
    """Return each group's parameters with their names. Raises CheckpointError for unknown ones."""
    if not hasattr(optimizer, "param_groups"):
        raise CheckpointError(
            f"optimizer= takes a torch.optim.Optimizer; got a {type(optimizer).__name__}; give the "
            "optimizer itself, not its state_dict()"
        )
    # Reversed, so that the first entry of a tensor gives its name.
    names = {id(entry.leaf): entry.name for entry in reversed(found) if entry.kind == "params"}
    groups = [group["params"] for group in optimizer.param_groups]
    unknown = [leaf for group in groups for leaf in group if id(leaf) not in names]
    if unknown:
        raise CheckpointError(
            f"the optimizer holds {len(unknown)} tensors that are not in params, the first of "
            f"shape {tuple(unknown[0].shape)}; {remedy}"
        )
    return [[(names[id(leaf)], leaf) for leaf in group] for group in groups]


def _escaped(name: str) -> str:
    """Escape "/" and "~". So the first "/" of a key ends the parameter's name, and keys differ."""
    return name.replace("~", "~0").replace("/", "~1")


def _encoded(value: Any, key: str, tensors: dict[str, Tensor] | None, faults: list[str]) -> Any:
    """Encode a value as JSON. Tensors go into ``tensors``; without ``tensors`` they are numbers."""
    if isinstance(value, Tensor) and tensors is not None:
        tensors[key] = value
        return {"tensor": key}
    if isinstance(value, Tensor):
        numbers = _encoded(value.tolist(), key, None, faults)
        return {"numbers": [numbers, str(value.dtype).removeprefix("torch.")]}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) in (list, tuple):
        row = [_encoded(each, f"{key}/{n}", tensors, faults) for n, each in enumerate(value)]
        return row if type(value) is list else {"tuple": row}
    if isinstance(value, Mapping) and all(type(name) in (str, int) for name in value):
        pairs = [
            [name, _encoded(own, f"{key}/{_escaped(str(name))}", tensors, faults)]
            for name, own in value.items()
        ]
        return {"dict": pairs}
    kind = type(value).__name__
    faults.append(f"{key} is a {kind}, not a number, a text, a tensor, or a container of these")
    return None


def _decoded(value: Any, tensors: Mapping[str, Tensor], leaf: Tensor | None = None) -> Any:
    """Return the value that `_encoded` encoded, tensors spread like their parameter ``leaf``."""
    match value:
        case list():
            return [_decoded(each, tensors, leaf) for each in value]
        case {"tensor": key}:  # a copy, because unaligned memory of the file may change rounding
            fresh = tensors[key].clone()
            return fresh if leaf is None else spread_like(leaf, fresh)
        case {"float": text}:
            return float(text)
        case {"numbers": [numbers, dtype]}:
            return torch.tensor(_decoded(numbers, tensors), dtype=getattr(torch, dtype))
        case {"tuple": row}:
            return tuple([_decoded(each, tensors, leaf) for each in row])
        case {"dict": pairs}:
            return {key: _decoded(own, tensors, leaf) for key, own in pairs}
        case _:
            return value
