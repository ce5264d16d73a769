"""Names of the tensors of a checkpoint: a model's own where a split knows them, else stages and keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from funcpipe.core.errors import CheckpointError
from funcpipe.core.plan import Plan
from funcpipe.core.tree import Tree, flatten, paths
from funcpipe.modules.split import Split


class Holding(NamedTuple):
    """Where a name lives.

    Attributes:
        places: ("params" or "state", stage, number of the leaf) of all that hold it; the first one is saved.
    """

    places: tuple[tuple[str, int, int], ...]


def names_of(model: Split | Plan, params: Sequence[Tree], state: Sequence[Tree]) -> dict[str, Holding]:
    """The places of each name, of trees of which some may be None. Raises CheckpointError: no model has names."""
    trees: dict[str, Sequence[Tree]] = {"params": params, "state": state}
    if isinstance(model, Split):
        known = {(kind, stage): tree for kind, row in trees.items() for stage, tree in enumerate(row)}
        return {
            name: Holding(tuple((kind, stage, _number(known[kind, stage], key)) for kind, stage, key in home.owners))
            for name, home in model.homes.items()
            if home.owners
        }
    if not isinstance(model, Plan):
        raise CheckpointError(
            f"save and load take what fp.split returns, or a plan; got a {type(model).__name__}; for stages of your own "
            "give the plan"
        )
    tied = {member: group[0] for group in model.ties for member in group}
    out: dict[str, list[tuple[str, int, int]]] = {}
    for kind, row in trees.items():
        for stage, tree in enumerate(row):
            for number, (path, leaf) in enumerate(zip(paths(tree), flatten(tree)[0], strict=True)):
                if isinstance(leaf, Tensor):
                    first, key = tied.get(
                        (stage, path), tied.get((stage, path[0] if len(path) == 1 else path), (stage, path))
                    )
                    words = key if isinstance(key, tuple) else (key,)
                    name = ".".join(map(str, (kind, first, *words)))
                    out.setdefault(name, []).append((kind, stage, number))
    return {name: Holding(tuple(places)) for name, places in out.items()}


def _number(tree: Tree, key: str) -> int:
    """The number of a leaf in a flat dict; -1 where it is not here."""
    if not isinstance(tree, Mapping):
        return -1
    return [path[0] for path in paths(tree)].index(key)


def leaf_at(trees: Mapping[str, Sequence[Tree]], place: tuple[str, int, int], here: Collection[int]) -> Any:
    """The leaf at a place; None where it is not here."""
    kind, stage, number = place
    tree = trees[kind][stage]
    return flatten(tree)[0][number] if stage in here and number >= 0 and tree is not None else None
