"""List the tensors of a model for `save`, `load` and the optimizer's state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from funcpipe.core.errors import CheckpointError, raise_all
from funcpipe.core.plan import Plan, forgotten_state
from funcpipe.core.tree import Tree, flatten, paths
from funcpipe.modules.split import Split


class Entry(NamedTuple):
    """One place where a model or a stage has a tensor.

    Attributes:
        name: of the tensor in the file. Tied parameters have one name; the first entry of a name is the one to save.
        kind: "params" or "state", the trees that contain the tensor; "rest" for a tensor of the model that no stage uses.
        stage: the stage; -1 for the rest.
        leaf: the tensor; None where another process has the stage.
    """

    name: str
    kind: str
    stage: int
    leaf: Any


def entries(model: Split | Plan, params: Sequence[Tree], state: Sequence[Tree], here: Collection[int]) -> list[Entry]:
    """List every place of every tensor that a checkpoint contains, in the model's order.

    Raises:
        CheckpointError: the trees do not fit the model, or two tensors have one name.
    """
    trees = {"params": params, "state": state}
    return _of_split(model, trees, here) if isinstance(model, Split) else _of_plan(model, trees, here)


def tied_names(model: Split | Plan) -> dict[str, str]:
    """Map each further name of a tied parameter to the name of its entries."""
    first: dict[Any, str] = {}
    out: dict[str, str] = {}
    for name, home in model.homes.items() if isinstance(model, Split) else ():
        if home.saved and home.owners and first.setdefault(home.owners, name) != name:
            out[name] = first[home.owners]
    return out


def _of_split(split: Split, trees: Mapping[str, Sequence[Tree]], here: Collection[int]) -> list[Entry]:
    tied = tied_names(split)
    out: list[Entry] = []
    faults: list[str] = []
    for name, home in split.homes.items():
        if not home.saved or name in tied:
            continue
        if not home.owners:
            out.append(Entry(name, "rest", -1, split.rest[name]))
        for kind, stage, key in home.owners:
            tree = trees[kind][stage]
            if stage not in here or tree is None:
                out.append(Entry(name, kind, stage, None))
            elif not isinstance(tree, Mapping) or not isinstance(tree.get(key), Tensor):
                faults.append(f"{kind}[{stage}] has no tensor {key!r}")
            else:
                out.append(Entry(name, kind, stage, tree[key]))
    raise_all("these are not the trees of this split:", faults, CheckpointError, most=8)
    return out


def _of_plan(plan: Plan, trees: Mapping[str, Sequence[Tree]], here: Collection[int]) -> list[Entry]:
    first_of = {member: group[0] for group in plan.ties for member in group}
    out: list[Entry] = []
    owners: dict[str, Any] = {}
    faults: list[str] = []
    for kind, row in trees.items():
        for stage, tree in enumerate(row):
            if stage not in here:
                continue
            for path, leaf in zip(paths(tree), flatten(tree)[0], strict=True):
                if not isinstance(leaf, Tensor):
                    continue
                short = path[0] if len(path) == 1 else path
                owner = first_of.get((stage, path), first_of.get((stage, short), (stage, short)))
                keys = owner[1] if isinstance(owner[1], tuple) else (owner[1],)
                name = ".".join(map(str, (kind, owner[0], *keys)))
                if owners.setdefault(name, owner) != owner:
                    faults.append(f"{kind}[{stage}] has {owners[name][1]!r} and {owner[1]!r}: both would be {name!r}")
                if owner[0] not in here:  # the process of the tie's first stage saves the tensor
                    out.append(Entry(name, kind, owner[0], None))
                out.append(Entry(name, kind, stage, leaf))
    raise_all("two tensors would have one name in a checkpoint; rename one of each pair:", faults, CheckpointError)
    return out


def per_stage(model: Split | Plan, kind: str, trees: Any) -> Sequence[Tree]:
    """Return one tree for each stage; without trees, those of the model. Raises CheckpointError for other trees."""
    if not isinstance(model, (Split, Plan)):
        raise CheckpointError(
            f"save and load take what fp.split returns, or a plan; got a {type(model).__name__}; for stages of your own "
            "give the plan"
        )
    count = len(model.stages)
    if trees is None:
        trees = getattr(model, kind, None)
    if trees is None and kind == "state":
        trees = ((),) * count
    if not isinstance(trees, (tuple, list)) or len(trees) != count:
        raise CheckpointError(
            f"{kind} is a tuple with one tree for each of {count} stages; got a {type(trees).__name__}; give {kind}="
        )
    return trees


def refuse_forgotten_state(model: Split | Plan) -> None:
    """Raise CheckpointError where training changes the state of a stage. Called where the caller gave no state."""
    origin = "split" if isinstance(model, Split) else "" if model.state is None else "plan"
    fault = forgotten_state(model.stages, origin)
    if fault:
        raise CheckpointError(fault)
