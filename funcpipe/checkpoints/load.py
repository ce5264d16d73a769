"""load: reads a checkpoint into parameters, state and an optimizer; all of it, or nothing is changed."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from funcpipe.checkpoints.entries import Entry, entries, per_stage, refuse_forgotten_state, tied_names
from funcpipe.checkpoints.files import Manifest, read_manifest, read_tensors
from funcpipe.checkpoints.optimizer import Restore, listed
from funcpipe.checkpoints.save import Together
from funcpipe.core.errors import CheckpointError, raise_all
from funcpipe.core.plan import Plan
from funcpipe.core.shown import amount_of, guarded, line
from funcpipe.core.tree import Tree, map_leaves, same_numbers
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

    `load` writes numbers into the parameters in place, so the model and its optimizer see them. Tensors of the model
    that no stage uses are loaded, too. State comes as new trees. Parameters on the meta device come as new ones, for
    the stages of this process only.

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

    Warns where numbers are cast to a type with less precision or range, and where the saved optimizer held more
    parameters.

    Raises:
        CheckpointError: there is no checkpoint; it is damaged; it is of another model or optimizer; or the model ties
            parameters that differ in the checkpoint. Nothing was changed.
        PeerError: another process could not load.
    """
    with nullcontext() if ranks is None else ranks.telling():
        if state is None and isinstance(model, Plan) and model.state is None:
            refuse_forgotten_state(model)
        here = range(len(model.stages)) if ranks is None else ranks.stages
        own_params, own_state = [
            tuple([tree if stage in here else None for stage, tree in enumerate(per_stage(model, kind, given))])
            for kind, given in (("params", params), ("state", state))
        ]
        found = [entry for entry in entries(model, own_params, own_state, here) if entry.leaf is not None]
        manifest = read_manifest(Path(path))
        stored = _stored(model, found, here, manifest)
        restore = None if optimizer is None else Restore(optimizer, manifest.optimizer, found)
        keys = [] if restore is None else restore.keys
        wanted = {key: manifest.model[key] for row in stored.values() for key in row}
        tensors = read_tensors(Path(path), manifest, wanted)
        moments = read_tensors(Path(path), manifest, {key: manifest.moments[key] for key in keys})
        _check(path, found, stored, tensors)
        if ranks is not None:
            ranks.exchange("the reading of a checkpoint", None)  # all can load, or none does
        _warn_of_casts(found, stored, tensors)
        new = _filled(model, found, {name: tensors[row[0]] for name, row in stored.items()})
        if restore is not None:
            restore.warn()
            leaves: dict[str, Any] = {
                entry.name: new.get(id(entry.leaf), entry.leaf) for entry in found if entry.kind == "params"
            }
            restore.restore(leaves, moments, _spread)
        own_params, own_state = [
            tuple([map_leaves(lambda leaf: new.get(id(leaf), leaf), tree) for tree in row])
            for row in (own_params, own_state)
        ]
        return Loaded(own_params, own_state, manifest.step)


def _stored(model: Any, found: Sequence[Entry], here: Collection[int], manifest: Manifest) -> dict[str, list[str]]:
    """Map each name to the checkpoint's tensors of that name, or of another name of the tied parameter.

    Raises:
        CheckpointError: the model and the checkpoint have different names.
    """
    names: dict[str, list[str]] = {entry.name: [entry.name] for entry in found}
    tied = tied_names(model)
    for other, name in tied.items():
        if name in names:
            names[name].append(other)
    stored = {name: manifest.stored(row) for name, row in names.items()}
    saved = [*manifest.model, *manifest.tied]
    faults = [f"it has no {name!r}{similar(name, saved)}" for name, row in stored.items() if not row]
    if isinstance(model, Split) or len(here) == len(model.stages):
        known = {*names, *(model.homes if isinstance(model, Split) else ())}
        faults += [f"the model has no {name!r}" for name in saved if name not in known]
    raise_all("the checkpoint is of another model:", faults, CheckpointError, most=8)
    return stored


def _check(
    path: Any, found: Sequence[Entry], stored: Mapping[str, Sequence[str]], tensors: Mapping[str, Tensor]
) -> None:
    """Raise CheckpointError where shapes differ, or tied parameters have different numbers."""
    shapes = {entry.name: tuple(entry.leaf.shape) for entry in found}
    faults = [
        f"{key!r} has shape {tuple(tensors[key].shape)} there, and {shapes[name]} here"
        for name, row in stored.items()
        for key in row
        if tuple(tensors[key].shape) != shapes[name]
    ]
    raise_all(f"the checkpoint at {path} is of another model:", faults, CheckpointError, most=8)
    faults = [
        f"{first!r} and {other!r}"
        for first, *others in stored.values()
        for other in others
        if not same_numbers(tensors[first], tensors[other])
    ]
    title = (
        f"the model ties parameters that are apart in the checkpoint at {path}, with other numbers each; untie them:"
    )
    raise_all(title, faults, CheckpointError, most=8)


def _warn_of_casts(found: Sequence[Entry], stored: Mapping[str, Sequence[str]], tensors: Mapping[str, Tensor]) -> None:
    """Warn of parameters whose numbers lose digits or range."""
    casts: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for name, leaf in {entry.name: entry.leaf for entry in found}.items():
        there = tensors[stored[name][0]].dtype
        if not _holds(leaf.dtype, there):
            casts.setdefault((there, leaf.dtype), []).append(name)
    for (there, here), names in casts.items():
        warnings.warn(
            f"the checkpoint has {there} and the model {here}, which is no wider: {listed(names)} are rounded; to keep "
            "the numbers convert the model before it is split",
            stacklevel=3,
        )


def _holds(here: torch.dtype, there: torch.dtype) -> bool:
    """Return whether dtype ``here`` represents all numbers of ``there``: the same dtype, or a wider one of its kind."""
    same_kind = (here.is_floating_point, here.is_complex) == (there.is_floating_point, there.is_complex)
    return here == there or (same_kind and here.itemsize > there.itemsize)


def _filled(model: Any, found: Sequence[Entry], read: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Write into leaves in place where they have memory; return new leaves for the others, by identity.

    State and leaves on the meta device get new tensors.
    """
    made: dict[int, Tensor] = {}
    with torch.no_grad():
        for entry in found:
            leaf = entry.leaf
            if entry.kind != "state" and not leaf.is_meta:
                leaf.copy_(_spread(read[entry.name], leaf))
            elif id(leaf) not in made:
                fresh = read[entry.name].to(leaf.dtype).to("cpu" if leaf.is_meta else leaf.device, copy=True)
                fresh = _spread(fresh, leaf)
                fresh = nn.Parameter(fresh, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else fresh
                made[id(leaf)] = fresh.requires_grad_(leaf.requires_grad)
                if entry.kind == "rest":
                    model.rest[entry.name] = made[id(leaf)]
    return made


def _spread(tensor: Tensor, leaf: Tensor) -> Tensor:
    """What was read for a parameter, as the parameter is: of one that is spread over processes, a part."""
    if not hasattr(leaf, "device_mesh") or tensor.shape != leaf.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    spread: Any = leaf  # every process has read all of it: nothing is sent
    return distribute_tensor(tensor.to(leaf.dtype), spread.device_mesh, spread.placements, src_data_rank=None)
