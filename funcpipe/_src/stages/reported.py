"""Detach the values that a forward reports for the end of a batch from their autograd graphs."""

from __future__ import annotations

from typing import Any

from funcpipe._src.core.errors import StageError, raise_all
from funcpipe._src.core.tree import Tree, flatten, refuse_hidden, unflatten
from funcpipe._src.data.losses import cut_off, detached
from funcpipe._src.data.stage import Stage, refuse_uncommitted


def is_empty(tree: Tree) -> bool:
    """Return whether a tree is None or ()."""
    return tree is None or (type(tree) is tuple and not tree)


def kept_statistics(stage: Stage, stats: Tree) -> Tree:
    """Return detached statistics for the commit of a stage.

    Raises PlanError if there is no commit, or if they hide tensors, which would keep their graphs
    alive.
    """
    if is_empty(stats) or _is_apart(stats):
        return stats
    refuse_uncommitted(stage, stats)
    leaves, spec = flatten(stats)
    raise_all(
        "the stage returned statistics that cannot be kept until the commit:",
        refuse_hidden(stats, "stats", leaves, spec),
    )
    return unflatten(spec, [cut_off(leaf) for leaf in leaves])


def _is_apart(stats: Tree) -> bool:
    """Return whether these are statistics of deferred layers, which are already detached."""
    return type(stats) is dict and all(
        getattr(type(each), "IS_APART", False) for each in stats.values()
    )  # pyright: ignore


def detached_side(side: Any) -> tuple[Any, Any] | None:
    """Return a stage's auxiliary loss (sum, weight), detached, or None. Raises StageError."""
    if side is None:
        return None
    if not isinstance(side, tuple) or len(side) != 2:  # pyright: ignore[reportUnknownArgumentType]
        raise StageError(f"Out.loss is (sum, weight); got {type(side).__name__}")
    total, weight = side  # pyright: ignore[reportUnknownVariableType]
    return (detached(total), detached(weight))
