"""`save`: write parameters, state and an optimizer into a checkpoint, by one or several processes.

`files` writes the files, and `optimizer` encodes the optimizer.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
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
    """A checkpoint whose files a thread writes. `finish` makes it the current checkpoint.

    ``fp.save(..., wait=False)`` returns a `Saving`. Call `finish` before the next `save` to the
    same path, and at the end of the program.

    Attributes:
        path: the folder of the checkpoint, absolute.
    """

    def __init__(
        self, path: Path, group: SaveGroup, manifest: Manifest, files: Future[Files]
    ) -> None:
        self.path, self._group, self._manifest, self._files = path, group, manifest, files
        self._over = False
        _unfinished.add(self)
        # Without `finish`, the files are removed as soon as they are written.
        self._dropped = finalize(
            self, files.add_done_callback, lambda _: _discard(group, path, manifest.folder)
        )
        self._dropped.atexit = False

    @guarded
    def __repr__(self) -> str:
        state = "written, call finish()" if self.written else "being written"
        return f"<Saving to {str(self.path)!r}: {'finished' if self._over else state}>"

    @property
    def written(self) -> bool:
        """Whether the files of this process are written, so that `finish` does not wait for
        them."""
        return self._files.done()

    def finish(self) -> None:
        """Wait for the files, then make this the current checkpoint. All ranks call `finish`.

        Until then, `load` reads the previous checkpoint. A second call is a no-op.

        Raises:
            OSError, RanksError, PeerError: as in `save`. The previous checkpoint stays.
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


_unfinished: WeakSet[Saving] = WeakSet()  # all unfinished savings that are still referenced


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
    """Write a checkpoint of parameters, state and optimizer; keep the previous one if that fails.

    Files are in the safetensors format. With a split, tensors have the names of the model, and a
    tied tensor is written once. `load` reads them into any number of stages and processes.
    transformers reads the folder within ``path`` with ``from_pretrained``.

    >>> import tempfile
    >>> split = fp.split(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fp.save(folder, split, split.params, step=7)
    ...     loaded = fp.load(folder, split)
    >>> loaded.step
    7

    Args:
        path: a folder. `save` creates a missing folder, and keeps one finished checkpoint there.
            Several processes give the same folder.
        model: the split of the model. For stages of your own, the plan. Then a tensor's name
            contains its stage, so the checkpoint fits the same stages only.
        params: a tuple with one tree per stage, as given to `run`.
        state: a tuple with one tree per stage. None, the default: the state of the split, or no
            state. If training changes the state, None raises `CheckpointError`.
        optimizer: an optimizer over ``params``. `save` writes its state and options. None, the
            default: no optimizer.
        step: an int from 0, which `load` returns. The default is 0.
        ranks: the processes of `fp.ranks`. All of them call `save`, and each writes its own stages.
            None, the default: one process.
        wait: True, the default: return when the checkpoint is complete. False: copy all tensors and
            return a `Saving`. A thread writes the files, and ``finish()`` completes the checkpoint.

    Returns:
        None, or a `Saving` with ``wait=False``.

    Raises:
        CheckpointError: params, state or optimizer do not fit the model, or cannot be written; a
            save to this path with ``wait=False`` is not finished; another pipeline of this job
            saves to this path; or safetensors is not installed.
        RanksError, PeerError: the processes do not fit together, or one of them failed. The
            previous checkpoint stays.
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
        title = "these tensors cannot be written, and nothing was written:"
        raise_all(title, faults, CheckpointError, most=8)
        target = Path(path).resolve()
        header = SaveHeader(
            step=step,
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
        headers: list[SaveHeader] = group.exchange("fp.save: the contents of a checkpoint", header)
    first = headers[: len(headers) // group.replicas]  # of the replica that writes
    _refuse(target, headers, first)  # all processes have all headers, so each raises by itself
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
        if not folder.is_dir():
            raise CheckpointError(
                f"this process saves to {target}, but the first process has made no folder "
                f"{folder.name} there; give all ranks one path, on a file system that they share"
            )
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

    step: int
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
    """Raise CheckpointError if another save uses the path, RanksError if steps or replicas differ."""
    claimed = next((header.claimed for header in headers if header.claimed), ())
    if claimed:
        raise CheckpointError(
            f"the pipeline of processes {', '.join(map(str, claimed))} already saves to {path}, "
            "and two pipelines that save to one path destroy each other's checkpoints; give each "
            "pipeline its own path, or, if they are replicas of one model, name their mesh "
            "dimension: fp.ranks(plan, mesh, dp=...)"
        )
    unfinished = [str(rank) for rank, header in enumerate(headers) if header.unfinished]
    if unfinished:
        who = f" (of rank {', '.join(unfinished)})" if len(headers) > 1 else ""
        raise CheckpointError(
            f"an earlier save to {path} with wait=False{who} is not finished, and would later "
            "replace this checkpoint; call saving.finish() first, on every rank, or save to "
            "another path"
        )
    if any(header.step != headers[0].step for header in headers):
        steps = ", ".join(f"rank {rank} saves {header.step}" for rank, header in enumerate(headers))
        raise RanksError(f"the ranks give different step=: {steps}; nothing was written")
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
    """Gather spread tensors from all replicas; return whole tensors in the first replica."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in sorted(row.items()):  # the optimizers of replicas may have another order
        gathered = group.whole(tensor)
        if group.replica == 0:
            tensors[name] = gathered.detach().clone() if copy else gathered
    return tensors


def _discard(group: SaveGroup, path: Path, folder: str) -> None:
    if _leads(group):  # another process could remove a folder that the first has just committed
        discard(path, folder)


@contextmanager
def _whole_or_removed(group: SaveGroup, path: Path, folder: str) -> Generator[None]:
    """Send an error in this context to the other processes, and remove the new folder."""
    try:
        with group.telling():
            yield
    except BaseException:
        _discard(group, path, folder)
        raise
