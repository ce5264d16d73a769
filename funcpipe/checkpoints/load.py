"""load: reads a checkpoint into parameters, state and an optimizer; all of it, or nothing is changed."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from funcpipe.checkpoints.files import Manifest, read_manifest, read_tensors
from funcpipe.checkpoints.names import Holding, leaf_at, names_of
from funcpipe.checkpoints.save import Together, names_by_leaf
from funcpipe.core.errors import CheckpointError, raise_all
from funcpipe.core.plan import Plan
from funcpipe.core.shown import amount_of, guarded, line
from funcpipe.core.tree import Tree, flatten, unflatten
from funcpipe.core.words import similar
from funcpipe.modules.split import Split


class Loaded(NamedTuple):
    """What a checkpoint had.

    Attributes:
        params: one tree per stage, None for stages of other ranks.
        state: likewise.
        step: as it was saved.
    """

    params: tuple[Tree, ...]
    state: tuple[Tree, ...]
    step: int

    @guarded
    def __repr__(self) -> str:
        facts = [("step", str(self.step)), ("parameters", amount_of(self.params)), ("state", amount_of(self.state))]
        return line("Loaded", facts)


def load(
    path: str | os.PathLike[str],
    model: Split | Plan,
    *,
    params: Sequence[Tree] | None = None,
    state: Sequence[Tree] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    ranks: Together | None = None,
) -> Loaded:
    """Read the newest whole checkpoint that `save` wrote, with as many stages and processes as you like.

    Parameters get their numbers in place, so an optimizer and a model that hold them see these; state comes as new trees.
    Those on the meta device come as new ones, and only those of the stages that are here.

    >>> import tempfile
    >>> split = fp.split(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fp.save(folder, split, split.params, step=7)
    ...     other = fp.split(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), 3)
    ...     loaded = fp.load(folder, other)  # into three stages
    >>> loaded.step, torch.equal(other.params[0]["0.weight"], split.params[0]["0.weight"])
    (7, True)

    Args:
        path: the folder that was given to `save`.
        model: the model's split (into any number of stages), or the plan, as for `save`.
        params: those that are run; None: those of the split.
        state: like the new state; None: that of the split, or none.
        optimizer: over these params; gets its state and options back.
        ranks: of several processes, all of which call this.

    Raises:
        CheckpointError: there is none, it is damaged, or it is of another model or optimizer; nothing was changed.
        PeerError: another process could not load.
    """
    with nullcontext() if ranks is None else ranks.telling():
        here = range(len(model.stages)) if ranks is None else ranks.stages
        given = {"params": _given(model, "params", params), "state": _given(model, "state", state)}
        trees = {
            kind: tuple([tree if s in here else None for s, tree in enumerate(row)]) for kind, row in given.items()
        }
        names = names_of(model, trees["params"], trees["state"])
        manifest = read_manifest(Path(path))
        wanted = _wanted(model, names, trees, here, manifest)
        moments = _moments(optimizer, names, trees["params"], here, manifest)
        tensors = read_tensors(Path(path), manifest, [*wanted, *moments])
        faults = [
            f"{name!r} has shape {tuple(tensors[name].shape)} there, and {tuple(leaf.shape)} here"
            for name, leaf in wanted.items()
            if tensors[name].shape != leaf.shape
        ]
        raise_all(f"the checkpoint at {path} is of another model:", faults, CheckpointError)
        if ranks is not None:
            ranks.exchange("the reading of a checkpoint", None)  # all can load, or none does
        new = _filled(names, trees, here, tensors)
        if optimizer is not None:
            _restore(optimizer, names_by_leaf(names, new["params"], here), manifest, tensors)
        return Loaded(new["params"], new["state"], manifest.step)


def _given(model: Any, kind: str, trees: Sequence[Tree] | None) -> Sequence[Tree]:
    if trees is None:
        trees = getattr(model, kind, None)
    if trees is None and kind == "state":
        trees = ((),) * len(model.stages)
    if not isinstance(trees, (tuple, list)) or len(trees) != len(model.stages):
        raise CheckpointError(f"{kind} is a tuple with one tree for each of {len(model.stages)} stages; give {kind}=")
    return trees


def _wanted(
    model: Any,
    names: Mapping[str, Holding],
    trees: Mapping[str, Sequence[Tree]],
    here: Collection[int],
    manifest: Manifest,
) -> dict[str, Tensor]:
    """A leaf for each name that is read here. Raises CheckpointError where the names are not those of the checkpoint."""
    wanted: dict[str, Tensor] = {}
    for name, held in names.items():
        leaves = [leaf for place in held.places if isinstance(leaf := leaf_at(trees, place, here), Tensor)]
        if leaves and (not isinstance(model, Split) or model.homes[name].saved):
            wanted[name] = leaves[0]
    saved = [name for name, file in manifest.tensors.items() if file.startswith("model")]
    faults = [f"it has no {name!r}{similar(name, saved)}" for name in wanted if name not in manifest.tensors]
    if isinstance(model, Split) or len(here) == len(model.stages):
        known = {*names, *(model.homes if isinstance(model, Split) else ())}
        faults += [f"the model has no {name!r}" for name in saved if name not in known]
    raise_all("the checkpoint is of another model:", faults, CheckpointError, most=8)
    return wanted


def _moments(
    optimizer: torch.optim.Optimizer | None,
    names: Mapping[str, Holding],
    params: Sequence[Tree],
    here: Collection[int],
    manifest: Manifest,
) -> list[str]:
    """The names of the tensors that an optimizer gets. Raises CheckpointError where it is another one."""
    if optimizer is None:
        return []
    if manifest.groups is None:
        raise CheckpointError("the checkpoint has no optimizer; it was saved without optimizer=")
    if type(optimizer).__name__ != manifest.optimizer:
        raise CheckpointError(
            f"the checkpoint has the state of {manifest.optimizer}, not of {type(optimizer).__name__}"
        )
    meta = any(getattr(leaf, "is_meta", False) for group in optimizer.param_groups for leaf in group["params"])
    if meta:
        raise CheckpointError(
            "the optimizer holds parameters on the meta device; load them first, then make it, then load it"
        )
    by_leaf = names_by_leaf(dict(names), params, here)
    known = {name for group in manifest.groups for name in group["names"]}
    held = [by_leaf.get(id(leaf)) for group in optimizer.param_groups for leaf in group["params"]]
    if None in held:
        raise CheckpointError(
            "the optimizer holds tensors that are none of params; make it over the params that are loaded"
        )
    faults = [f"{name!r} was not in the optimizer that was saved" for name in held if name not in known]
    raise_all("the checkpoint's optimizer does not fit:", faults, CheckpointError, most=8)
    return [name for name in manifest.tensors if "/" in name and name.rsplit("/", 1)[0] in {*held}]


def _filled(
    names: Mapping[str, Holding],
    trees: Mapping[str, Sequence[Tree]],
    here: Collection[int],
    tensors: Mapping[str, Tensor],
) -> dict[str, tuple[Tree, ...]]:
    """The trees with the numbers that were read: params in place, state and what had no numbers anew."""
    new = {(kind, stage): flatten(tree)[0] for kind, row in trees.items() for stage, tree in enumerate(row)}
    made: dict[int, Tensor] = {}
    with torch.no_grad():
        for name, held in names.items():
            for place in held.places:
                kind, stage, number = place
                leaf = leaf_at(trees, place, here)
                if name not in tensors or not isinstance(leaf, Tensor):
                    continue
                if kind == "params" and not leaf.is_meta:
                    leaf.copy_(_spread(tensors[name], leaf))
                    continue
                if id(leaf) not in made:
                    fresh = tensors[name].to(leaf.dtype).to("cpu" if leaf.is_meta else leaf.device, copy=True)
                    fresh = _spread(fresh, leaf)
                    fresh = nn.Parameter(fresh, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else fresh
                    made[id(leaf)] = fresh.requires_grad_(leaf.requires_grad)
                new[kind, stage][number] = made[id(leaf)]
    return {
        kind: tuple([unflatten(flatten(tree)[1], new[kind, stage]) for stage, tree in enumerate(row)])
        for kind, row in trees.items()
    }


def _restore(
    optimizer: torch.optim.Optimizer, name_of: Mapping[int, str], manifest: Manifest, tensors: Mapping[str, Tensor]
) -> None:
    """Give an optimizer its state and options back."""
    saved = manifest.groups or []
    state: dict[int, dict[str, Any]] = {}
    live = optimizer.state_dict()
    number = 0
    for group, written in zip(optimizer.param_groups, live["param_groups"], strict=True):
        for leaf in group["params"]:
            name = name_of[id(leaf)]
            options = next(each["options"] for each in saved if name in each["names"])
            written.update({key: _like(written.get(key), value) for key, value in options.items()})
            own: dict[str, Any] = {
                key.rsplit("/", 1)[1]: _spread(tensor, leaf)
                for key, tensor in tensors.items()
                if key.rpartition("/")[0] == name
            }
            own.update(manifest.numbers.get(name, {}))
            if own:
                state[number] = own
            number += 1
    optimizer.load_state_dict({"state": state, "param_groups": live["param_groups"]})


def _spread(tensor: Tensor, leaf: Tensor) -> Tensor:
    """What was read for a parameter, as the parameter is: of one that is spread over processes, a part."""
    if not hasattr(leaf, "device_mesh") or tensor.shape != leaf.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    spread: Any = leaf  # every process has read all of it: nothing is sent
    return distribute_tensor(tensor.to(leaf.dtype), spread.device_mesh, spread.placements, src_data_rank=None)


def _like(before: Any, value: Any) -> Any:
    """An option as it was before JSON made a list of a tuple."""
    return tuple(value) if isinstance(before, tuple) and isinstance(value, list) else value
