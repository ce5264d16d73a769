"""save: writes parameters, state and an optimizer into a checkpoint, by one process or by several together."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, overload
from weakref import WeakSet

import torch
from torch import Tensor

from funcpipe.checkpoints.files import Manifest, commit, write_tensors
from funcpipe.checkpoints.names import Holding, leaf_at, names_of
from funcpipe.core.errors import CheckpointError, RanksError, raise_all
from funcpipe.core.exchange import alone, entire
from funcpipe.core.plan import Plan
from funcpipe.core.shown import guarded
from funcpipe.core.tree import Tree
from funcpipe.modules.split import Split


class Together(Protocol):
    """The processes that save or load together: what `fp.ranks` returns."""

    rank: int
    replica: int
    replicas: int
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


Files = tuple[dict[str, tuple[int, str]], dict[str, str]]
"""What was written: size and hash of each file, and the file of each tensor."""


class Saving:
    """A checkpoint whose files are being written, while you go on; `finish` makes it the newest one."""

    def __init__(self, files: Future[Files], telling: Telling, commit: Callable[[Files], None], path: Path) -> None:
        self._files, self._telling, self._commit, self.path = files, telling, commit, path
        self._over = False
        _unfinished.add(self)

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
            finally:  # one that failed is in nobody's way
                _unfinished.discard(self)


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
        state: likewise; None: as it was split, or none.
        optimizer: its state, by the names of the parameters, and its options.
        step: a number of yours, which `load` returns.
        ranks: of several processes, all of which call this; each writes its own stages.
        wait: False: copy everything and come back; a thread writes, and ``finish()`` of what is returned ends it.

    Returns:
        None; with ``wait=False`` a `Saving`.

    Raises:
        CheckpointError: params, state or optimizer are not those of the model, what was saved to this path with
            ``wait=False`` is not finished, or safetensors is not installed.
        RanksError, PeerError: the processes do not fit together, or one of them failed; the checkpoint before stays.
        OSError: the files cannot be written.
    """
    exchange, rank, replica = (alone, 0, 0) if ranks is None else (ranks.exchange, ranks.rank, ranks.replica)
    replicas, whole_of = (1, entire) if ranks is None else (ranks.replicas, ranks.whole)
    telling: Telling = nullcontext if ranks is None else ranks.telling
    leads = rank == replica == 0
    with telling():
        states = _states(model, state)
        _check(model, params, states, step)
        names = names_of(model, params, states)
        here = range(len(params)) if ranks is None else ranks.stages
        tensors = _saved(model, names, params, states, here, first=rank == 0)
        kept, numbers, groups = _optimizer(optimizer, names, params, here)
        rows = {"model": tensors, "optimizer": kept}
        target = Path(path).resolve()
        folder = f"step-{step:012d}-{os.urandom(4).hex()}"
        unfinished = any(saving.path == target for saving in [*_unfinished])
        said = exchange("what a checkpoint has", _Said(folder, unfinished, _forms(rows)))
    _refuse(path, said, replicas)  # all know the same: nothing is to be told
    with telling():
        folder = said[0].folder
        if leads:
            (target / folder).mkdir(parents=True)
        exchange("the making of a checkpoint's folder", None)
        whole = {
            f"{kind}-{rank:05d}.safetensors": _whole(row, whole_of, keep=replica == 0, copy=not wait)
            for kind, row in rows.items()
        }
        optimizer_kind = type(optimizer).__name__ if optimizer is not None else ""

        def end(files: Files) -> None:
            everyone = exchange("the files of a checkpoint", (*files, numbers, groups, optimizer_kind))
            if leads:
                commit(target, _manifest(step, folder, everyone))
            exchange("the end of a checkpoint", None)

        if wait:
            end(_write(target / folder, whole))
            return None
        writer = ThreadPoolExecutor(1, "funcpipe save")
        files = writer.submit(_write, target / folder, whole)
        writer.shutdown(wait=False)  # it ends with the files
        return Saving(files, telling, end, target)


class _Said(NamedTuple):
    """What a process says before anything is written.

    Attributes:
        folder: the name of one; the first process's is made.
        unfinished: has it not finished what it saves to this path.
        forms: shape and type of each tensor that it has, by name.
    """

    folder: str
    unfinished: bool
    forms: dict[str, str]


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
    """Raise CheckpointError where an earlier save goes on, RanksError where the replicas do not save the same."""
    unfinished = [rank for rank, each in enumerate(said) if each.unfinished]
    if unfinished:
        who = f" (of rank {', '.join(map(str, unfinished))})" if len(said) > 1 else ""
        raise CheckpointError(
            f"what was saved to {path} with wait=False{who} is not finished, and this save would remove its files; "
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
    written: dict[str, tuple[int, str]] = {}
    where: dict[str, str] = {}
    for name, row in tensors.items():
        if row:
            file, size, digest = write_tensors(folder, name, row)
            written[file] = (size, digest)
            where.update(dict.fromkeys(row, file))
    return written, where


def _states(model: Any, state: Sequence[Tree] | None) -> Sequence[Tree]:
    """The state that is saved."""
    if state is not None:
        return state
    known = getattr(model, "state", None)
    return known if known is not None else ((),) * len(getattr(model, "stages", ()))


def _check(model: Any, params: Any, state: Any, step: Any) -> None:
    count = len(getattr(model, "stages", ()))
    for name, trees in (("params", params), ("state", state)):
        if count and (not isinstance(trees, (tuple, list)) or len(trees) != count):
            raise CheckpointError(
                f"{name} is a tuple with one tree for each of {count} stages; got a {type(trees).__name__}"
            )
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise CheckpointError(f"step is a whole number from 0; got {step!r}")


def _saved(
    model: Any,
    names: dict[str, Holding],
    params: Sequence[Tree],
    state: Sequence[Tree],
    here: Collection[int],
    *,
    first: bool,
) -> dict[str, Tensor]:
    """What this process writes of the model: each name once, where its first place is."""
    trees = {"params": params, "state": state}
    out: dict[str, Tensor] = {}
    for name, held in names.items():
        leaf = leaf_at(trees, held.places[0], here)
        if isinstance(leaf, Tensor) and (not isinstance(model, Split) or model.homes[name].saved):
            if leaf.is_meta:
                raise CheckpointError(f"{name!r} is on the meta device and has no numbers; load or initialize it first")
            out[name] = leaf
    if isinstance(model, Split) and first:
        out.update({name: tensor for name, tensor in model.rest.items() if model.homes[name].saved})
    return out


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


def _optimizer(
    optimizer: torch.optim.Optimizer | None, names: dict[str, Holding], params: Sequence[Tree], here: Collection[int]
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]], list[dict[str, Any]] | None]:
    """What an optimizer keeps: tensors as ``name/key``, other values by name, and its groups. Raises CheckpointError."""
    if optimizer is None:
        return {}, {}, None
    name_of = names_by_leaf(names, params, here)
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        unknown = [leaf for leaf in group["params"] if id(leaf) not in name_of]
        if unknown:
            raise CheckpointError(
                f"the optimizer holds {len(unknown)} tensors that are none of params, the first of shape "
                f"{tuple(unknown[0].shape)}; save the params that it steps"
            )
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({"options": options, "names": [name_of[id(leaf)] for leaf in group["params"]]})
        for leaf in group["params"]:
            for key, value in optimizer.state.get(leaf, {}).items():
                name = name_of[id(leaf)]
                if isinstance(value, Tensor):
                    tensors[f"{name}/{key}"] = value
                else:
                    numbers.setdefault(name, {})[key] = value
    return tensors, numbers, groups


def names_by_leaf(names: dict[str, Holding], params: Sequence[Tree], here: Collection[int]) -> dict[int, str]:
    """The name of each leaf of params, by identity."""
    out: dict[int, str] = {}
    for name, held in names.items():
        for place in held.places:
            leaf = leaf_at({"params": params}, place, here) if place[0] == "params" else None
            if leaf is not None:
                out.setdefault(id(leaf), name)
    return out


def _manifest(step: int, folder: str, everyone: Sequence[tuple[Any, ...]]) -> Manifest:
    """What all processes have written, as one. Raises RanksError where their optimizers differ."""
    files: dict[str, tuple[int, str]] = {}
    tensors: dict[str, str] = {}
    numbers: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] | None = None
    kinds = sorted({kind for *_, kind in everyone if kind})
    faults = [f"optimizers of other classes: {', '.join(kinds)}"] if len(kinds) > 1 else []
    for rank, (written, where, own, theirs, _) in enumerate(everyone):
        files |= written
        tensors |= where
        numbers |= own
        if theirs is None:
            continue
        if groups is None:
            groups = [{"options": group["options"], "names": []} for group in theirs]
        if [group["options"] for group in theirs] != [group["options"] for group in groups]:
            faults.append(f"rank {rank} has other options or groups than the ranks before it")
            continue
        for group, more in zip(groups, theirs, strict=True):
            group["names"] += [name for name in more["names"] if name not in group["names"]]
    raise_all("the optimizers of the ranks do not fit together:", faults, RanksError)
    return Manifest(step, folder, files, tensors, groups, numbers, kinds[0] if kinds else "")
