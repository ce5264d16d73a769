"""save: writes parameters, state and an optimizer into a checkpoint, by one process or by several together."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, overload
from weakref import WeakSet, finalize

import torch
from torch import Tensor

from funcpipe.checkpoints.entries import Entry, entries, per_stage, refuse_forgotten_state, tied_names
from funcpipe.checkpoints.files import Manifest, commit, discard, make_folder, sync_folder, unwritable, write_tensors
from funcpipe.checkpoints.optimizer import Written, optimizer_entries, together
from funcpipe.core.errors import CheckpointError, RanksError, raise_all
from funcpipe.core.exchange import alone, claimed_by, entire
from funcpipe.core.plan import Plan
from funcpipe.core.shown import guarded
from funcpipe.core.tree import Tree
from funcpipe.modules.split import Split


class Together(Protocol):
    """The processes that save or load together: what `fp.ranks` returns."""

    rank: int
    replica: int
    replicas: int
    members: Collection[int]
    stages: Collection[int]

    def exchange(self, about: str, mine: Any) -> list[Any]:
        """What each of them gives, by rank."""
        ...

    def telling(self) -> AbstractContextManager[object]:
        """Inside, an error is told to the others."""
        ...

    def whole(self, tensor: Any) -> Tensor:
        """All of a tensor, of which replicas may have parts."""
        ...


Files = tuple[dict[str, tuple[int, str]], dict[str, str], dict[str, str]]
"""What was written: size and hash of each file; the file of each tensor of the model, and of the optimizer."""


class Saving:
    """A checkpoint whose files are being written, while you go on; `finish` makes it the newest one."""

    def __init__(
        self,
        files: Future[Files],
        telling: Telling,
        commit: Callable[[Files], None],
        path: Path,
        discard: Callable[[], None],
    ) -> None:
        self._files, self._telling, self._commit, self.path = files, telling, commit, path
        self._over, self._discard = False, discard
        _unfinished.add(self)
        self._dropped = finalize(self, files.add_done_callback, lambda _: discard())
        self._dropped.atexit = False

    @guarded
    def __repr__(self) -> str:
        state = "finished" if self._over else "written, call finish()" if self.written else "being written"
        return f"<Saving to {str(self.path)!r}: {state}>"

    @property
    def written(self) -> bool:
        """Are the files of this process written, so that `finish` does not wait for them."""
        return self._files.done()

    def finish(self) -> None:
        """Wait for the files, then make this the newest checkpoint; until then the one before is. Of ranks all call it.

        Raises:
            OSError, RanksError, PeerError: as `save` does; the checkpoint before stays.
        """
        if not self._over:
            try:
                with self._telling():
                    self._commit(self._files.result())
                self._over = True
            except BaseException:
                self._discard()
                raise
            finally:  # one that failed is in nobody's way
                _unfinished.discard(self)
                self._dropped.detach()


_unfinished: WeakSet[Saving] = WeakSet()
"""Those that are not finished, and that somebody still has."""


Telling = Callable[[], AbstractContextManager[object]]
"""Makes what tells an error inside of it to other processes."""


@overload
def save(
    path: str | os.PathLike[str],
    model: Split | Plan,
    params: Sequence[Tree],
    *,
    state: Sequence[Tree] | None = ...,
    optimizer: torch.optim.Optimizer | None = ...,
    step: int = ...,
    ranks: Together | None = ...,
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
    ranks: Together | None = ...,
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
    ranks: Together | None = None,
    wait: bool = True,
) -> Saving | None:
    """Write a checkpoint: all of it, or, whatever happens, the one before stays.

    The files are safetensors, by the model's own names where ``model`` is a split, tied names once; transformers reads
    them (``from_pretrained(path / folder)``), and `load` into any number of stages and processes.

    >>> import tempfile
    >>> split = fp.split(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), 2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     fp.save(folder, split, split.params, step=7)
    ...     loaded = fp.load(folder, split)
    >>> loaded.step
    7

    Args:
        path: a folder, made if it is not there; it keeps the newest whole checkpoint. Of several processes the same one.
        model: what `split` returned; or, for stages of your own, the plan (names are stages and keys then, for the same
            stages).
        params: as they are run, one tree per stage.
        state: likewise. None: the state of the split, or none; where training changes it, CheckpointError.
        optimizer: its state, by the names of the parameters, and its options.
        step: a number of yours, which `load` returns.
        ranks: of several processes, all of which call this; each writes its own stages.
        wait: False: copy everything and come back; a thread writes, and ``finish()`` of what is returned ends it.

    Returns:
        None; with ``wait=False`` a `Saving`.

    Raises:
        CheckpointError: params, state or optimizer do not fit the model, or cannot be written; a save to this path with
            ``wait=False`` is not finished; another pipeline of this job saves to this path; or safetensors is not
            installed.
        RanksError, PeerError: the processes do not fit together, or one of them failed; the checkpoint before stays.
        OSError: the files cannot be written.
    """
    exchange, rank, replica = (alone, 0, 0) if ranks is None else (ranks.exchange, ranks.rank, ranks.replica)
    replicas, whole_of = (1, entire) if ranks is None else (ranks.replicas, ranks.whole)
    telling: Telling = nullcontext if ranks is None else ranks.telling
    leads = rank == replica == 0
    with telling():
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise CheckpointError(f"step is a whole number from 0; got {step!r}")
        params, states = per_stage(model, "params", params), per_stage(model, "state", state)
        if state is None:
            refuse_forgotten_state(model)
        here = range(len(params)) if ranks is None else ranks.stages
        found = entries(model, params, states, here)
        written, kept = optimizer_entries(optimizer, found)
        rows = {"model": _saved(found, first=rank == 0), "optimizer": kept}
        faults = [fault for row in rows.values() for fault in unwritable(row)]
        raise_all("these tensors cannot be written, and nothing was:", faults, CheckpointError, most=8)
        target = Path(path).resolve()
        folder = f"step-{step:012d}-{os.urandom(4).hex()}"
        unfinished = any(saving.path == target for saving in [*_unfinished])
        claimed = claimed_by(str(target), ranks.members) if ranks is not None and leads else ()
        said = exchange("what a checkpoint has", _Said(folder, unfinished, claimed, _forms(rows), written))
    _refuse(path, said, replicas)  # all know the same: nothing is to be told
    folder, written = said[0].folder, together([each.written for each in said])

    def removed() -> None:
        if leads:
            discard(target, folder)

    def end(files: Files) -> None:
        everyone = exchange("the files of a checkpoint", files)
        if leads:
            rows = [{name: value for row in column for name, value in row.items()} for column in zip(*everyone)]
            sizes, of_model, of_optimizer = rows
            commit(target, Manifest(step, folder, sizes, of_model, tied_names(model), of_optimizer, written))
        exchange("the end of a checkpoint", None)

    with telling():
        try:
            if leads:
                make_folder(target / folder)
            exchange("the making of a checkpoint's folder", None)
            tensors = {
                f"{kind}-{rank:05d}.safetensors": _whole(row, whole_of, keep=replica == 0, copy=not wait)
                for kind, row in rows.items()
            }
            if wait:
                end(_write(target / folder, tensors))
                return None
        except BaseException:
            removed()
            raise
        writer = ThreadPoolExecutor(1, "funcpipe save")
        files = writer.submit(_write, target / folder, tensors)
        writer.shutdown(wait=False)  # it ends with the files
        return Saving(files, telling, end, target, removed)


class _Said(NamedTuple):
    """The message of a process to all others before anything is written.

    Attributes:
        folder: the name of one; the first process's is made.
        unfinished: has it not finished what it saves to this path.
        claimed: the processes of another pipeline that saves to this path, or ().
        forms: shape and type of each tensor that it has, by name.
        written: the state and options of its optimizer.
    """

    folder: str
    unfinished: bool
    claimed: tuple[int, ...]
    forms: dict[str, str]
    written: Written | None


def _forms(rows: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    """Shape and type of each tensor, and how it is spread, by name."""
    return {
        f"{name!r} of the {kind}": " ".join(
            [f"{tuple(tensor.shape)} {tensor.dtype}", *map(str, getattr(tensor, "placements", ()))]
        )
        for kind, row in rows.items()
        for name, tensor in row.items()
    }


def _refuse(path: Any, said: Sequence[_Said], replicas: int) -> None:
    """Raise CheckpointError where another save has the path, RanksError where replicas differ in what they save."""
    claimed = next((each.claimed for each in said if each.claimed), ())
    if claimed:
        raise CheckpointError(
            f"the pipeline of processes {', '.join(map(str, claimed))} saves to {path}, and two that save to one path "
            "destroy each other's checkpoints; give each pipeline a path of its own, with its coordinates in the mesh, "
            "or replicas of one model one pipeline: fp.ranks(plan, mesh, dp=...)"
        )
    unfinished = [rank for rank, each in enumerate(said) if each.unfinished]
    if unfinished:
        who = f" (of rank {', '.join(map(str, unfinished))})" if len(said) > 1 else ""
        raise CheckpointError(
            f"what was saved to {path} with wait=False{who} is not finished, and would replace this one later; "
            "call saving.finish() first, of ranks on each, or save to another path"
        )
    size = len(said) // replicas
    faults = [
        f"{name}: rank {rank} has {each.forms.get(name)}, rank {rank % size} has {said[rank % size].forms.get(name)}"
        for rank, each in enumerate(said)
        for name in sorted({*each.forms, *said[rank % size].forms})
        if each.forms.get(name) != said[rank % size].forms.get(name)
    ]
    raise_all("the replicas do not save the same:", faults, RanksError, most=8)


def _write(folder: Path, tensors: Mapping[str, dict[str, Tensor]]) -> Files:
    """Write the files of this process: tensors by name, by file."""
    files: dict[str, tuple[int, str]] = {}
    rows: list[dict[str, str]] = []
    for name, row in tensors.items():
        if row:
            file, size, digest = write_tensors(folder, name, row)
            files[file] = (size, digest)
        rows.append(dict.fromkeys(row, name))
    sync_folder(folder)
    model, moments = rows
    return files, model, moments


def _saved(found: Sequence[Entry], *, first: bool) -> dict[str, Tensor]:
    """Return this process's part of the model: each name once, at its first entry. The ``first`` rank adds the rest."""
    owners: dict[str, Entry] = {}
    for entry in found:
        owners.setdefault(entry.name, entry)
    return {
        name: entry.leaf for name, entry in owners.items() if entry.leaf is not None and (first or entry.kind != "rest")
    }


def _whole(
    tensors: dict[str, Tensor], whole_of: Callable[[Any], Tensor], *, keep: bool, copy: bool
) -> dict[str, Tensor]:
    """The tensors, whole, where they are kept. All replicas give their parts of those that are spread over them."""
    whole: dict[str, Tensor] = {}
    for name, tensor in sorted(tensors.items()):  # the optimizers of replicas may have another order
        all_of_it = whole_of(tensor)
        if keep:
            whole[name] = all_of_it.detach().clone() if copy else all_of_it
    return whole
