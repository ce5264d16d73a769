"""save: write parameters, state and an optimizer into a checkpoint, by one process or by
several."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, overload
from weakref import WeakSet, finalize

import torch
from torch import Tensor

from funcpipe._src.checkpoints.entries import (
    Entry,
    OneProcess,
    SaveGroup,
    entries,
    stage_trees,
)
from funcpipe._src.checkpoints.files import (
    Files,
    Manifest,
    commit,
    discard,
    make_folder,
    unwritable,
    write_files,
)
from funcpipe._src.checkpoints.optimizer import Written, join_optimizers, write_optimizer
from funcpipe._src.core.errors import CheckpointError, RanksError, raise_all
from funcpipe._src.core.shown import guarded
from funcpipe._src.core.tree import Tree
from funcpipe._src.data.exchange import claimed_by
from funcpipe._src.data.plan import Plan
from funcpipe._src.models.split_model import Split


class Saving:
    """A checkpoint whose files are being written, while you go on; `finish` makes it the newest
    one."""

    def __init__(
        self, path: Path, group: SaveGroup, manifest: Manifest, files: Future[Files]
    ) -> None:
        self.path, self._group, self._manifest, self._files = path, group, manifest, files
        self._over = False
        _unfinished.add(self)
        drop = partial(_discard, group, path, manifest.folder)
        self._dropped = finalize(
            self, files.add_done_callback, lambda _: drop()
        )  # when they are written
        self._dropped.atexit = False

    @guarded
    def __repr__(self) -> str:
        state = "written, call finish()" if self.written else "being written"
        return f"<Saving to {str(self.path)!r}: {'finished' if self._over else state}>"

    @property
    def written(self) -> bool:
        """Are the files of this process written, so that `finish` does not wait for them."""
        return self._files.done()

    def finish(self) -> None:
        """Wait for the files, then make this the newest checkpoint. Of ranks all call this.

        Until then the checkpoint before is the newest.

        Raises:
            OSError, RanksError, PeerError: as `save` does; the checkpoint before stays.
        """
        if self._over:
            return
        try:
            with _whole_or_removed(self._group, self.path, self._manifest.folder):
                rows = self._group.exchange("the files of a checkpoint", self._files.result())
                if _leads(self._group):
                    files = {name: known for row in rows for name, known in row.items()}
                    commit(self.path, replace(self._manifest, files=files))
                self._group.exchange("the end of a checkpoint", None)
            self._over = True
        finally:  # a Saving that failed does not block the next one
            _unfinished.discard(self)
            self._dropped.detach()


_unfinished: WeakSet[Saving] = WeakSet()
"""Those that are not finished, and that somebody still has."""


@overload
def save(
    path: str | os.PathLike[str],
    model: Split | Plan,
    params: Sequence[Tree],
    *,
    state: Sequence[Tree] | None = ...,
    optimizer: torch.optim.Optimizer | None = ...,
    step: int = ...,
    ranks: SaveGroup | None = ...,
    wait: Literal[True] = ...,
) -> None: ...
@overload
def save(
    path: str | os.PathLike[str],
    model: Split | Plan,
    params: Sequence[Tree],
    *,
    state: Sequence[Tree] | None = ...,
    optimizer: torch.optim.Optimizer | None = ...,
    step: int = ...,
    ranks: SaveGroup | None = ...,
    wait: Literal[False],
) -> Saving: ...
def save(
    path: str | os.PathLike[str],
    model: Split | Plan,
    params: Sequence[Tree],
    *,
    state: Sequence[Tree] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    step: int = 0,
    ranks: SaveGroup | None = None,
    wait: bool = True,
) -> Saving | None:
    """Write a checkpoint: all of it, or, whatever happens, the one before stays.

    The files are safetensors, by the model's own names where ``model`` is a split, tied names once;
    transformers reads them (``from_pretrained(path / folder)``), and `load` into any number of
    stages and processes.

    >>> import tempfile
    >>> split = fp.split(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fp.save(folder, split, split.params, step=7)
    ...     loaded = fp.load(folder, split)
    >>> loaded.step
    7

    Args:
        path: a folder, made if it is not there; it keeps the newest whole checkpoint. Of several
            processes the same one.
        model: what `split` returned; or, for stages of your own, the plan (names are stages and
            keys then, for the same stages).
        params: as they are run, one tree per stage.
        state: likewise. None: the state of the split, or none; where training changes it,
            CheckpointError.
        optimizer: its state, by the names of the parameters, and its options.
        step: a number of yours, which `load` returns.
        ranks: of several processes, all of which call this; each writes its own stages.
        wait: False: copy everything and come back; a thread writes, and ``finish()`` of what is
            returned ends it.

    Returns:
        None; with ``wait=False`` a `Saving`.

    Raises:
        CheckpointError: params, state or optimizer do not fit the model, or cannot be written; a
            save to this path with ``wait=False`` is not finished; another pipeline of this job
            saves to this path; or safetensors is not installed.
        RanksError, PeerError: the processes do not fit together, or one of them failed; the
            checkpoint before stays.
        OSError: the files cannot be written.
    """
    group = OneProcess() if ranks is None else ranks
    with group.telling():
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise CheckpointError(f"step is a whole number from 0; got {step!r}")
        trees = stage_trees(model, params, state, group.stages, saving=True)
        found = entries(model, trees, group.stages)
        written, moments = write_optimizer(optimizer, found)
        end = f"-{group.rank:05d}.safetensors"
        rows = {
            f"model{end}": _own_tensors(found, first=group.rank == 0),
            f"optimizer{end}": moments,
        }
        faults = [fault for row in rows.values() for fault in unwritable(row)]
        title = "these tensors cannot be written, and nothing was:"
        raise_all(title, faults, CheckpointError, most=8)
        target = Path(path).resolve()
        header = SaveHeader(
            folder=f"step-{step:012d}-{os.urandom(4).hex()}",
            unfinished=any(saving.path == target for saving in [*_unfinished]),
            claimed=claimed_by(str(target), group.members)
            if group.members and _leads(group)
            else (),
            forms={
                file: {name: _form(leaf) for name, leaf in row.items()}
                for file, row in rows.items()
            },
            written=written,
        )
        headers: list[SaveHeader] = group.exchange("what a checkpoint has", header)
    first = headers[: len(headers) // group.replicas]  # of the replica that writes
    _refuse(target, headers, first)  # every process raises by itself, so none is told
    manifest = Manifest(
        step,
        headers[0].folder,
        files={},
        model=_file_of("model", first),
        tied={other: entry.name for entry in found for other in entry.ties},
        moments=_file_of("optimizer", first),
        optimizer=join_optimizers(each.written for each in headers),
    )
    folder = target / manifest.folder
    with _whole_or_removed(group, target, manifest.folder):
        if _leads(group):
            make_folder(folder)
        group.exchange("the making of a checkpoint's folder", None)
        tensors = {file: _gather(group, row, copy=not wait) for file, row in rows.items()}
        files: Future[Files] = Future()
        if wait:
            files.set_result(write_files(folder, tensors))
        else:
            writer = ThreadPoolExecutor(1, "funcpipe save")
            files = writer.submit(write_files, folder, tensors)
            writer.shutdown(wait=False)  # the thread ends with the files
    saving = Saving(target, group, manifest, files)
    if not wait:
        return saving
    saving.finish()
    return None


class SaveHeader(NamedTuple):
    """The message of a process to all others before anything is written."""

    folder: str  # a name for the new folder; the name of the first process is used
    unfinished: bool  # has this process not finished a save to this path
    claimed: tuple[int, ...]  # the processes of another pipeline that saves to this path
    forms: dict[str, dict[str, str]]  # by file and name, what each tensor is that it saves
    written: Written | None


def _own_tensors(found: Sequence[Entry], *, first: bool) -> dict[str, Tensor]:
    """Return the tensors of the model that this process saves. The ``first`` rank saves the rest,
    too."""
    saved = {entry.name: entry for entry in reversed(found)}  # the first entry of each name
    tensors = {name: entry.leaf for name, entry in saved.items() if first or entry.kind != "rest"}
    return {name: leaf for name, leaf in tensors.items() if leaf is not None}


def _leads(group: SaveGroup) -> bool:
    """Return whether this process makes the folder and writes the manifest."""
    return group.rank == group.replica == 0


def _form(tensor: Tensor) -> str:
    """Return the shape and type of a tensor, and how it is spread over processes."""
    parts = [tuple(tensor.shape), tensor.dtype, *getattr(tensor, "placements", ())]
    return " ".join(map(str, parts))


def _file_of(kind: str, headers: Sequence[SaveHeader]) -> dict[str, str]:
    """Return the file of each tensor of a kind, "model" or "optimizer", by the tensor's name."""
    files = {file: forms for header in headers for file, forms in header.forms.items()}
    return {name: file for file, forms in files.items() if file.startswith(kind) for name in forms}


def _refuse(path: Path, headers: Sequence[SaveHeader], first: Sequence[SaveHeader]) -> None:
    """Raise CheckpointError if another save has the path, RanksError if replicas differ."""
    claimed = next((header.claimed for header in headers if header.claimed), ())
    if claimed:
        raise CheckpointError(
            f"the pipeline of processes {', '.join(map(str, claimed))} saves to {path}, and two "
            "that save to one path destroy each other's checkpoints; give each pipeline a path "
            "of its own, with its coordinates in the mesh, or replicas of one model one "
            "pipeline: fp.ranks(plan, mesh, dp=...)"
        )
    unfinished = [str(rank) for rank, header in enumerate(headers) if header.unfinished]
    if unfinished:
        who = f" (of rank {', '.join(unfinished)})" if len(headers) > 1 else ""
        raise CheckpointError(
            f"what was saved to {path} with wait=False{who} is not finished, and would replace "
            "this one later; call saving.finish() first, of ranks on each, or save to another path"
        )
    faults: list[str] = []
    for rank, header in enumerate(headers):
        of = rank % len(first)
        for file, mine in header.forms.items():
            theirs = first[of].forms[file]
            faults += [
                f"{name!r} of the {file.split('-')[0]}: rank {rank} has {mine.get(name)}, rank "
                f"{of} has {theirs.get(name)}"
                for name in sorted({*mine, *theirs})
                if mine.get(name) != theirs.get(name)
            ]
    raise_all("the replicas do not save the same:", faults, RanksError, most=8)


def _gather(group: SaveGroup, row: Mapping[str, Tensor], *, copy: bool) -> dict[str, Tensor]:
    """Return whole tensors in the first replica. All replicas give their parts of spread
    tensors."""
    whole: dict[str, Tensor] = {}
    for name, tensor in sorted(row.items()):  # the optimizers of replicas may have another order
        gathered = group.whole(tensor)
        if group.replica == 0:
            whole[name] = gathered.detach().clone() if copy else gathered
    return whole


def _discard(group: SaveGroup, path: Path, folder: str) -> None:
    if _leads(group):  # another process could remove what the first one is making the newest
        discard(path, folder)


@contextmanager
def _whole_or_removed(group: SaveGroup, path: Path, folder: str) -> Generator[None]:
    """Tell the other processes of an error inside, and remove the new folder then."""
    try:
        with group.telling():
            yield
    except BaseException:
        _discard(group, path, folder)
        raise
