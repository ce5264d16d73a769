"""`load`: read a checkpoint into parameters, state and an optimizer, or change nothing.

`files` reads the files, and `optimizer` decodes the optimizer.
"""

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
    """The contents of a checkpoint, as `load` returns them.

    Attributes:
        params: a tuple with one tree per stage, None for stages of other ranks.
        state: the state of the stages, in the same form.
        step: the number that was given to `save`.
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
    """Restore parameters, state and an optimizer from a checkpoint of `save`.

    The number of stages and processes may differ from the run that saved. `load` writes the numbers
    into the parameters in place, so the model and its optimizer see the numbers. `load` also
    restores tensors of the model that no stage uses. It does not change your state or the model's
    buffers: continue with ``loaded.state``. Parameters on the meta device are returned as new
    tensors, for the stages of this process.

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
        model: the split of the model, into any number of stages. For a checkpoint of a plan, a plan
            with the same stages.
        params: a tuple with one tree per stage, as given to `run`. None, the default: the
            parameters of the split.
        state: a tuple with one tree per stage, whose shapes the new state gets. None, the default:
            the state of the split or the plan, if there is one.
        optimizer: an optimizer over ``params``. `load` restores its state and options.
        ranks: the processes of `fp.ranks`. All of them call `load`. None, the default: one process.

    Returns:
        A `typing.Loaded` with params, state and step.

    Warns:
        UserWarning: a cast loses precision or range, or the saved optimizer had more parameters.

    Raises:
        CheckpointError: there is no checkpoint, or the files are damaged; the checkpoint is of
            another model or optimizer; or the model ties parameters that differ in the checkpoint.
            Nothing was changed.
        PeerError: another process could not load. Nothing was changed.
    """
    group = OneProcess() if ranks is None else ranks
    with group.telling():
        trees = stage_trees(model, params, state, group.stages, saving=False)
        found = [entry for entry in entries(model, trees, group.stages) if entry.leaf is not None]
        manifest = read_manifest(Path(path))
        entry_of = {entry.name: entry for entry in found}
        tensors = _read_model(Path(path), manifest, model, entry_of, group.stages)
        notes = _casts(entry_of, tensors)
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
    # By name, the keys in the checkpoint: several if the model ties separate tensors there.
    keys: dict[str, list[str]] = {}
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
        shape = own[name].leaf.shape
        faults += [
            f"{key!r} has shape {tuple(tensors[key].shape)} in the checkpoint, and {tuple(shape)} "
            "in the model"
            for key in row
            if tensors[key].shape != shape
        ]
    raise_all(f"the checkpoint at {path} is of another model:", faults, CheckpointError, most=8)
    faults = [
        f"{first!r} and {other!r}"
        for first, *others in keys.values()
        for other in others
        if not same_numbers(tensors[first], tensors[other])
    ]
    title = (
        f"the model ties parameters that are separate in the checkpoint at {path} and have "
        "different numbers there; untie them:"
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
        f"{count_text(len(names), 'tensor')}: {some(map(repr, names))}; to keep the numbers, "
        "convert the model before fp.split"
        for (there, here), names in casts.items()
    ]


def _fill(
    model: Split | Plan, found: Sequence[Entry], tensors: Mapping[str, Tensor]
) -> dict[int, Tensor]:
    """Write numbers into parameters and unused tensors in place.

    Returns:
        New tensors for state and for leaves on the meta device, by the id of the old leaf.
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
                if isinstance(leaf, nn.Parameter):
                    new = nn.Parameter(new, leaf.requires_grad)
                fresh[id(leaf)] = new.requires_grad_(leaf.requires_grad)
                if entry.kind == "rest" and isinstance(model, Split):
                    model.rest[entry.name] = fresh[id(leaf)]
    return fresh
