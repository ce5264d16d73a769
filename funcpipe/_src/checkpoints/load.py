"""load: read a checkpoint into parameters, state and an optimizer; all of it, or nothing
changes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from funcpipe._src.checkpoints.entries import (
    Entry,
    OneProcess,
    SaveGroup,
    entries,
    spread_like,
    stage_trees,
)
from funcpipe._src.checkpoints.files import Manifest, read_manifest, read_tensors
from funcpipe._src.checkpoints.optimizer import moments_of, read_optimizer
from funcpipe._src.core.errors import CheckpointError, raise_all
from funcpipe._src.core.shown import amount_of, count_text, guarded, line, some
from funcpipe._src.core.tree import Tree, map_leaves, same_numbers
from funcpipe._src.core.words import similar
from funcpipe._src.data.plan import Plan
from funcpipe._src.models.split_model import Split


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
        amounts = [("parameters", amount_of(self.params)), ("state", amount_of(self.state))]
        return line("Loaded", [("step", str(self.step)), *amounts])


def load(
    path: str | os.PathLike[str],
    model: Split | Plan,
    *,
    params: Sequence[Tree] | None = None,
    state: Sequence[Tree] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    ranks: SaveGroup | None = None,
) -> Loaded:
    """Read the newest whole checkpoint that `save` wrote, with as many stages and processes as you
    like.

    `load` writes numbers into the parameters in place, so the model and its optimizer see them.
    Tensors of the model that no stage uses are loaded, too. State comes as new trees. Parameters on
    the meta device come as new ones, for the stages of this process only.

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

    Warns where numbers are cast to a type with less precision or range, and where the saved
    optimizer held more parameters.

    Raises:
        CheckpointError: there is no checkpoint; it is damaged; it is of another model or optimizer;
            or the model ties parameters that differ in the checkpoint. Nothing was changed.
        PeerError: another process could not load.
    """
    group = OneProcess() if ranks is None else ranks
    with group.telling():
        trees = stage_trees(model, params, state, group.stages, saving=False)
        found = [entry for entry in entries(model, trees, group.stages) if entry.leaf is not None]
        manifest = read_manifest(Path(path))
        own = {entry.name: entry for entry in found}
        tensors = _read_model(Path(path), manifest, model, own, group.stages)
        notes = _casts(own, tensors)
        restored: dict[str, Any] = {}
        if optimizer is not None:
            wanted = {key: manifest.moments[key] for key in moments_of(found, manifest.moments)}
            moments = read_tensors(Path(path), manifest, wanted)
            restored, note = read_optimizer(optimizer, manifest.optimizer, found, moments)
            notes += [note] if note else []
        for note in notes:  # before anything changes, because a warning may be an error
            warnings.warn(note, stacklevel=2)
        group.exchange("the reading of a checkpoint", None)  # all can load, or none does
        fresh = _fill(model, found, tensors)
        if optimizer is not None:
            optimizer.load_state_dict(restored)
        new_params, new_state = [
            tuple([map_leaves(lambda leaf: fresh.get(id(leaf), leaf), tree) for tree in row])
            for row in trees.values()
        ]
        return Loaded(new_params, new_state, manifest.step)


def _read_model(
    path: Path,
    manifest: Manifest,
    model: Split | Plan,
    own: Mapping[str, Entry],
    here: Collection[int],
) -> dict[str, Tensor]:
    """Return the checkpoint's tensors by the names of the entries.

    Raises:
        CheckpointError: names or shapes differ, or tied parameters have different numbers.
    """
    saved = [*manifest.model, *manifest.tied]
    known = {*own, *(model.homes if isinstance(model, Split) else ())}
    faults: list[str] = []
    keys: dict[str, list[str]] = {}  # several where the model ties what is apart in the checkpoint
    for name, entry in own.items():
        row = dict.fromkeys(manifest.tied.get(each, each) for each in (name, *entry.ties))
        keys[name] = [key for key in row if key in manifest.model]
        if not keys[name]:
            faults.append(f"it has no {name!r}{similar(name, saved)}")
    if isinstance(model, Split) or all(stage in here for stage in range(len(model.stages))):
        faults += [f"the model has no {name!r}" for name in saved if name not in known]
    raise_all("the checkpoint is of another model:", faults, CheckpointError, most=8)

    wanted = {key: manifest.model[key] for row in keys.values() for key in row}
    tensors = read_tensors(path, manifest, wanted)
    for name, row in keys.items():
        shape = tuple(own[name].leaf.shape)
        shapes = {key: tuple(tensors[key].shape) for key in row}
        others = {key: there for key, there in shapes.items() if there != shape}
        faults += [
            f"{key!r} has shape {there} there, and {shape} here" for key, there in others.items()
        ]
    raise_all(f"the checkpoint at {path} is of another model:", faults, CheckpointError, most=8)
    faults = [
        f"{first!r} and {other!r}"
        for first, *others in keys.values()
        for other in others
        if not same_numbers(tensors[first], tensors[other])
    ]
    title = (
        f"the model ties parameters that are apart in the checkpoint at {path}, with other "
        "numbers each; untie them:"
    )
    raise_all(title, faults, CheckpointError, most=8)
    return {name: tensors[row[0]] for name, row in keys.items()}


def _casts(own: Mapping[str, Entry], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return a warning for each pair of types whose numbers lose digits or range."""
    casts: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        there, here = tensor.dtype, own[name].leaf.dtype
        kinds = {(dtype.is_floating_point, dtype.is_complex) for dtype in (there, here)}
        if here != there and (len(kinds) > 1 or here.itemsize <= there.itemsize):
            casts.setdefault((there, here), []).append(name)
    return [
        f"the checkpoint has {there} and the model {here}, which is no wider; load rounds "
        f"{count_text(len(names), 'tensor')}: {some(map(repr, names))}; to keep the numbers "
        "convert the model before it is split"
        for (there, here), names in casts.items()
    ]


def _fill(
    model: Split | Plan, found: Sequence[Entry], tensors: Mapping[str, Tensor]
) -> dict[int, Tensor]:
    """Write numbers into parameters and the rest in place; return other leaves, new, by identity.

    State, and leaves on the meta device, get new tensors.
    """
    fresh: dict[int, Tensor] = {}
    with torch.no_grad():
        for entry in found:
            leaf, tensor = entry.leaf, tensors[entry.name]
            if entry.kind != "state" and not leaf.is_meta:
                leaf.copy_(spread_like(leaf, tensor))
            elif id(leaf) not in fresh:
                device = "cpu" if leaf.is_meta else leaf.device
                new = spread_like(leaf, tensor.to(leaf.dtype).to(device, copy=True))
                new = (
                    nn.Parameter(new, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else new
                )
                fresh[id(leaf)] = new.requires_grad_(leaf.requires_grad)
                if entry.kind == "rest" and isinstance(model, Split):
                    model.rest[entry.name] = fresh[id(leaf)]
    return fresh
