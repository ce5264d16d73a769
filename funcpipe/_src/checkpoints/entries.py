"""List the tensors of a model with their names, for `save`, `load` and the optimizer's state."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from funcpipe._src.core.errors import CheckpointError, raise_all
from funcpipe._src.core.tree import Tree, flatten, paths
from funcpipe._src.data.exchange import entire
from funcpipe._src.data.plan import Plan, forgotten_state
from funcpipe._src.models.split_model import Split


class SaveGroup(Protocol):
    """The processes that save or load together, as `fp.ranks` returns them.

    The methods here are for one process alone.
    """

    rank: int = 0
    replica: int = 0
    replicas: int = 1

    @property
    def members(self) -> Collection[int]:
        """The global ranks of the processes; empty for a process alone."""
        return ()

    @property
    def stages(self) -> Collection[int]:
        """The stages of this process; all for a process alone."""
        return range(sys.maxsize)

    def exchange(self, about: str, mine: Any) -> list[Any]:
        """Return the values of all processes, by replica and rank."""
        return [mine]

    def telling(self) -> AbstractContextManager[object]:
        """Return a context. An error inside the context is sent to the other processes."""
        return nullcontext()

    def whole(self, tensor: Any) -> Tensor:
        """Return the whole of a tensor. Replicas that have parts of the tensor call this
        together."""
        return entire(tensor)


class OneProcess(SaveGroup):
    """A process that saves or loads alone."""


Trees = dict[str, tuple[Tree, ...]]
"""By kind ("params", "state"), one tree per stage, None for stages of other processes."""


class Entry(NamedTuple):
    """One place where a model or a stage has a tensor.

    If several entries have the same name, the first is saved.
    """

    name: str  # the name of the tensor in the file
    ties: tuple[str, ...]  # the other names of a tied parameter
    kind: str  # "params" or "state"; "rest" for a tensor of the model that no stage uses
    leaf: Any  # the tensor; None if another process has the stage


def stage_trees(
    model: Split | Plan, params: Any, state: Any, here: Collection[int], *, saving: bool
) -> Trees:
    """Return the trees of the stages ``here``. None means those of the model, but to save, the
    params must be given.

    Raises:
        CheckpointError: ``model`` is neither a split nor a plan; there is not one tree per stage;
            the tree of one of these stages is missing; or the state is missing although training
            changes it.
    """
    if not isinstance(model, (Split, Plan)):
        raise CheckpointError(
            f"save and load take the result of fp.split, or a plan; got a {type(model).__name__}; "
            "for stages of your own give the plan"
        )
    count = len(model.stages)
    trees: Trees = {}
    faults: list[str] = []
    for kind, given in (("params", params), ("state", state)):
        # `save` without params must not write the parameters from before the training.
        default = None if saving and kind == "params" else getattr(model, kind, None)
        row = default if given is None else given
        if row is None and kind == "state":
            row = ((),) * count
        if not isinstance(row, (tuple, list)) or len(row) != count:
            raise CheckpointError(
                f"{kind} is a tuple with one tree for each of {count} stages; got a "
                f"{type(row).__name__}; give {kind}="
            )
        trees[kind] = tuple([tree if stage in here else None for stage, tree in enumerate(row)])
        faults += [
            f"{kind}[{stage}] is None"
            for stage, tree in enumerate(trees[kind])
            if tree is None and stage in here and _has_tensors(model, kind, stage)
        ]
    if saving:  # an incomplete checkpoint would replace the complete one before it
        raise_all(_INCOMPLETE, faults, CheckpointError, most=8)
    # `load` needs no state if the model has one, because `load` replaces its numbers.
    if state is None and (saving or model.state is None):
        origin = "split" if isinstance(model, Split) else "" if model.state is None else "plan"
        if fault := forgotten_state(model.stages, origin):
            raise CheckpointError(fault)
    return trees


_INCOMPLETE = (
    "this is only a part of the model, and nothing was written; in several processes call "
    "fp.save(..., ranks=ranks) on all ranks, and in one process give the tree of each stage, () "
    "for a stage without tensors:"
)


def _has_tensors(model: Split | Plan, kind: str, stage: int) -> bool:
    """Return whether a stage has tensors of a kind. A plan does not know its parameters: True."""
    if isinstance(model, Split):
        return bool(getattr(model, kind)[stage])
    return kind == "params" or model.stages[stage].state


def entries(model: Split | Plan, trees: Trees, here: Collection[int]) -> list[Entry]:
    """List every place of every tensor that a checkpoint contains, in the model's order. Raises
    CheckpointError if the trees do not fit the model, or two tensors have one name."""
    return _of_split(model, trees) if isinstance(model, Split) else _of_plan(model, trees, here)


def _of_split(split: Split, trees: Trees) -> list[Entry]:
    # By the places of a tensor; names with the same places are tied.
    names_at: dict[Any, list[str]] = {}
    for name, home in split.homes.items():
        if home.saved:
            names_at.setdefault(home.owners or name, []).append(name)
    found: list[Entry] = []
    faults: list[str] = []
    for name, *ties in names_at.values():
        owners = split.homes[name].owners
        if not owners:
            found.append(Entry(name, (), "rest", split.rest[name]))
        for kind, stage, key in owners:
            tree = trees[kind][stage]
            leaf = tree.get(key) if isinstance(tree, Mapping) else None
            if tree is not None and not isinstance(leaf, Tensor):
                faults.append(f"{kind}[{stage}] has no tensor {key!r}")
            found.append(Entry(name, tuple(ties), kind, leaf))
    raise_all("these are not the trees of this split:", faults, CheckpointError, most=8)
    return found


def _of_plan(plan: Plan, trees: Trees, here: Collection[int]) -> list[Entry]:
    first_of = {_place(*member): _place(*group[0]) for group in plan.ties for member in group}
    owners: dict[str, Any] = {}
    found: list[Entry] = []
    faults: list[str] = []
    for kind, row in trees.items():
        for stage, tree in enumerate(row):
            for path, leaf in zip(paths(tree), flatten(tree)[0], strict=True):
                if not isinstance(leaf, Tensor):
                    continue
                place = (stage, path)
                owner = first_of.get(place, place) if kind == "params" else place
                name = ".".join(map(str, (kind, owner[0], *owner[1])))
                other = owners.setdefault(name, owner)
                if other != owner:
                    both = f"{other[1]} and {owner[1]}"
                    faults.append(f"{kind}[{stage}] has {both}: both would be {name!r}")
                if owner[0] not in here:  # the process of the tie's first stage saves the tensor
                    found.append(Entry(name, (), kind, None))
                found.append(Entry(name, (), kind, leaf))
    title = "two tensors would have one name in a checkpoint; rename one of each pair:"
    raise_all(title, faults, CheckpointError)
    return found


def _place(stage: int, key: Any) -> tuple[int, tuple[Any, ...]]:
    """Return the stage and the path of a tie's member, whose path may be a single key."""
    return stage, key if isinstance(key, tuple) else (key,)


def spread_like(leaf: Tensor, tensor: Tensor) -> Tensor:
    """Return a read tensor in the form of its parameter: this process's part for a DTensor."""
    if not hasattr(leaf, "device_mesh") or tensor.shape != leaf.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    spread: Any = leaf  # every process has read the whole tensor, so nothing is sent
    whole = tensor.to(leaf.dtype)
    return distribute_tensor(whole, spread.device_mesh, spread.placements, src_data_rank=None)
