"""Write an optimizer's state and options as JSON with tensors beside it, and restore them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from funcpipe.checkpoints.entries import Entry
from funcpipe.core.errors import CheckpointError, RanksError, raise_all

Written = dict[str, Any]
"""``class``: the name of the optimizer's class. ``groups``: for each its ``options`` and the ``names`` of its parameters.
``state``: by the name of a parameter what the optimizer keeps for it. `_encoded` says how values are written."""


def optimizer_entries(
    optimizer: torch.optim.Optimizer | None, found: Sequence[Entry]
) -> tuple[Written | None, dict[str, Tensor]]:
    """Return an optimizer's state and options, and the tensors in them by their keys in the file.

    Raises:
        CheckpointError: the optimizer holds tensors that are not in params, or its state cannot be written.
    """
    if optimizer is None:
        return None, {}
    names = names_by_leaf(found)
    held = held_names(optimizer, names, "save the params that it steps")
    tensors: dict[str, Tensor] = {}
    faults: list[str] = []
    groups: list[dict[str, Any]] = []
    state: dict[str, Any] = {}
    for number, (group, own) in enumerate(zip(optimizer.param_groups, held, strict=True)):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({"options": _encoded(options, f"group {number}", None, faults), "names": own})
        for name, leaf in zip(own, group["params"], strict=True):
            kept = optimizer.state.get(leaf)
            if kept:
                state[name] = _encoded(dict(kept), _key(name), tensors, faults)
    leaves = {id(leaf) for group in optimizer.param_groups for leaf in group["params"]}
    strange = sum(bool(kept) and id(leaf) not in leaves for leaf, kept in optimizer.state.items())
    faults += [f"{strange} entries of its state are of no parameter of its groups"] * bool(strange)
    title = f"what {type(optimizer).__name__} keeps cannot be written; nothing was:"
    raise_all(title, faults, CheckpointError, most=8)
    return {"class": type(optimizer).__name__, "groups": groups, "state": state}, tensors


def names_by_leaf(found: Sequence[Entry]) -> dict[int, str]:
    """Map each parameter of this process, by identity, to its name."""
    out: dict[int, str] = {}
    for name, kind, _, leaf in found:
        if kind == "params" and leaf is not None:
            out.setdefault(id(leaf), name)
    return out


def held_names(optimizer: torch.optim.Optimizer, names: Mapping[int, str], remedy: str) -> list[list[str]]:
    """Return the names of each group's parameters. Raises CheckpointError for parameters that are not in params."""
    unknown = [leaf for group in optimizer.param_groups for leaf in group["params"] if id(leaf) not in names]
    if unknown:
        raise CheckpointError(
            f"the optimizer holds {len(unknown)} tensors that are none of params, the first of shape "
            f"{tuple(unknown[0].shape)}; {remedy}"
        )
    return [[names[id(leaf)] for leaf in group["params"]] for group in optimizer.param_groups]


def together(everyone: Sequence[Written | None]) -> Written | None:
    """Join the optimizers of all ranks to one. Raises RanksError where classes, groups or options differ."""
    given = {rank: written for rank, written in enumerate(everyone) if written is not None}
    if not given:
        return None
    first = next(iter(given.values()))
    kinds = sorted({written["class"] for written in given.values()})
    faults = [f"optimizers of other classes: {', '.join(kinds)}"] if len(kinds) > 1 else []
    faults += [
        f"rank {rank} has other options or groups than the ranks before it"
        for rank, written in given.items()
        if [group["options"] for group in written["groups"]] != [group["options"] for group in first["groups"]]
    ]
    raise_all("the optimizers of the ranks do not fit together:", faults, RanksError)
    groups = [
        {
            "options": group["options"],
            "names": [*dict.fromkeys(name for each in given.values() for name in each["groups"][number]["names"])],
        }
        for number, group in enumerate(first["groups"])
    ]
    state = {name: kept for each in given.values() for name, kept in each["state"].items()}
    return {"class": first["class"], "groups": groups, "state": state}


class Restore:
    """An optimizer and the part of a checkpoint that restores it.

    Args:
        optimizer: over some of the params that are loaded.
        written: the checkpoint's optimizer; None: it has no optimizer.
        found: the entries that are loaded.

    Attributes:
        keys: the keys of the tensors that `restore` needs.

    Raises:
        CheckpointError: the checkpoint has no optimizer, or one that does not fit.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, written: Written | None, found: Sequence[Entry]) -> None:
        if written is None:
            raise CheckpointError("the checkpoint has no optimizer; it was saved without optimizer=")
        if type(optimizer).__name__ != written["class"]:
            raise CheckpointError(
                f"the checkpoint has the state of {written['class']}, not of {type(optimizer).__name__}"
            )
        if any(getattr(leaf, "is_meta", False) for group in optimizer.param_groups for leaf in group["params"]):
            raise CheckpointError(
                "the optimizer holds parameters on the meta device; load them first, then make it, then load it"
            )
        names = names_by_leaf(found)
        self.optimizer, self.state = optimizer, written["state"]
        self.names = held_names(optimizer, names, "make it over the params that are loaded")
        groups: list[dict[str, Any]] = written["groups"]
        group_of = {name: number for number, group in enumerate(groups) for name in group["names"]}
        held = {name for own in self.names for name in own}
        faults = [f"{name!r} was not in the optimizer that was saved" for name in held if name not in group_of]
        self.options: list[Any] = []
        for number, own in enumerate(self.names):
            theirs = [
                groups[saved]["options"] for saved in sorted({group_of[name] for name in own if name in group_of})
            ]
            self.options.append(theirs[0] if theirs else {})
            if any(options != theirs[0] for options in theirs):
                faults.append(f"group {number} has parameters of several groups there, whose options differ")
        raise_all("the checkpoint's optimizer does not fit:", faults, CheckpointError, most=8)
        self.keys = _tensor_keys([self.state.get(name) for name in sorted(held)])
        self.left = sorted({*names.values()} & {*group_of} - held)

    def warn(self) -> None:
        """Warn of parameters whose saved state no optimizer gets."""
        if self.left:
            warnings.warn(
                f"the optimizer holds {sum(map(len, self.names))} parameters, and the checkpoint's held more: "
                f"{listed(self.left)}; their state is not loaded",
                stacklevel=3,
            )

    def restore(
        self, leaves: Mapping[str, Tensor], tensors: Mapping[str, Tensor], fitted: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """Give the optimizer its state and options.

        ``fitted(tensor, leaf)`` gives a tensor the layout of its parameter.
        """
        live = self.optimizer.state_dict()
        state: dict[int, Any] = {}
        names = [name for own in self.names for name in own]
        for number, name in enumerate(names):
            kept = self.state.get(name)
            if kept is not None:
                state[number] = _decoded(kept, tensors, lambda tensor, leaf=leaves[name]: fitted(tensor, leaf))
        for group, options in zip(live["param_groups"], self.options, strict=True):
            for key, value in _decoded(options, tensors, lambda tensor: tensor).items():
                before = group.get(key)
                group[key] = (
                    value.to(before.device) if isinstance(value, Tensor) and isinstance(before, Tensor) else value
                )
        self.optimizer.load_state_dict({"state": state, "param_groups": live["param_groups"]})


def listed(names: Collection[str], most: int = 6) -> str:
    """Join the first few names, and the number of the others."""
    return ", ".join(map(repr, [*names][:most])) + f" and {len(names) - most} more" * (len(names) > most)


def _key(name: str) -> str:
    """Escape "/" and "~" in a name. So the first "/" of a key ends the name, and keys stay distinct."""
    return name.replace("~", "~0").replace("/", "~1")


def _encoded(value: Any, key: str, tensors: dict[str, Tensor] | None, faults: list[str]) -> Any:
    """Encode a value as JSON. Tensors go into ``tensors``; where that is None, they become numbers."""
    if isinstance(value, Tensor) and tensors is not None:
        tensors[key] = value
        return {"tensor": key}
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"numbers": [_encoded(value.tolist(), key, None, faults), dtype]}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if type(value) in (list, tuple):
        row = [_encoded(each, f"{key}/{number}", tensors, faults) for number, each in enumerate(value)]
        return row if type(value) is list else {"tuple": row}
    if isinstance(value, Mapping) and all(type(each) in (str, int) for each in value):
        pairs = [[each, _encoded(own, f"{key}/{_key(str(each))}", tensors, faults)] for each, own in value.items()]
        return {"dict": pairs}
    faults.append(f"{key} is a {type(value).__name__}, not a number, a text, a tensor, or a container of these")
    return None


def _decoded(value: Any, tensors: Mapping[str, Tensor], fitted: Callable[[Tensor], Tensor]) -> Any:
    """Return the value that `_encoded` encoded."""
    if isinstance(value, list):
        return [_decoded(each, tensors, fitted) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind == "tensor":
        return fitted(tensors[inside].clone())  # unaligned memory of the file may change rounding
    if kind == "float":
        return float(inside)
    if kind == "numbers":
        return torch.tensor(_decoded(inside[0], tensors, fitted), dtype=getattr(torch, inside[1]))
    if kind == "tuple":
        return tuple([_decoded(each, tensors, fitted) for each in inside])
    return {key: _decoded(own, tensors, fitted) for key, own in inside}


def _tensor_keys(value: Any) -> list[str]:
    """Return the keys of all tensors in an encoded value."""
    if isinstance(value, dict):
        return [value["tensor"]] if "tensor" in value else _tensor_keys([*value.values()])
    return [key for each in value for key in _tensor_keys(each)] if isinstance(value, list) else []
