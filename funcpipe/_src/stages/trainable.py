"""Find the leaves that get gradients, and the leaves that are one parameter in several stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from funcpipe._src.core.errors import PlanError, Where, fail, raise_all
from funcpipe._src.core.plain_tensors import address
from funcpipe._src.core.tensor_layout import TensorLayout
from funcpipe._src.core.torch_names import is_shared_lazily
from funcpipe._src.core.tree import Path, Tree, flatten, is_differentiable, paths
from funcpipe._src.core.words import similar
from funcpipe._src.data.plan import Plan

Trainable: TypeAlias = bool | Callable[[str, Tensor], bool] | Sequence[Any] | None
"""The argument ``trainable=``; see `run`."""


def is_marked(leaves: Iterable[Iterable[Any]]) -> bool:
    """Return whether any leaf of any stage requires a gradient."""
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for row in leaves for leaf in row)


def trainable_leaves(
    trees: Sequence[Tree],
    trainable: Trainable,
    *,
    marked: bool | None = None,
    leaves: Sequence[Sequence[Any]] | None = None,
) -> list[list[bool]]:
    """Return for each leaf of each stage whether it gets a gradient. Raises PlanError.

    Args:
        trees: one tree per stage.
        trainable: as given to `run`.
        marked: whether any leaf in any process requires a gradient. None: look at these trees.
        leaves: the leaves of the trees, if the caller has them.
    """
    flat = leaves or [flatten(tree)[0] for tree in trees]
    if trainable is None:
        marked = is_marked(flat) if marked is None else marked
        return [
            [is_differentiable(leaf) and (leaf.requires_grad or not marked) for leaf in row]
            for row in flat
        ]
    if isinstance(trainable, bool):
        return [[trainable and is_differentiable(leaf) for leaf in row] for row in flat]
    if callable(trainable):
        chosen: list[list[bool]] = []
        for stage, tree in enumerate(trees):
            names = [".".join(map(str, (stage, *path))) for path in paths(tree)]
            pairs = zip(names, flat[stage], strict=True)
            try:
                chosen.append(
                    [
                        is_differentiable(leaf) and bool(trainable(name, leaf))
                        for name, leaf in pairs
                    ]
                )
            except BaseException as error:
                fail(error, Where(None, "", None, "trainable", ""))
        return chosen
    if isinstance(trainable, str) or not isinstance(trainable, Sequence):
        raise PlanError(
            "trainable is True, False, a function (name, leaf) -> bool, or a tuple with a tree "
            f"of bools for each stage; got {trainable!r}"
        )
    if len(trainable) != len(trees):
        raise PlanError(
            f"trainable has {len(trainable)} entries for {len(trees)} stages; give True, False or "
            "a tree of them for each"
        )
    return [_flags(stage, tree, trainable[stage]) for stage, tree in enumerate(trees)]


def _flags(stage: int, tree: Tree, choice: Any) -> list[bool]:
    if tree is None:  # no leaves, or the stage is in another process
        return [False]
    leaves, spec = flatten(tree)
    if isinstance(choice, bool):
        return [choice and is_differentiable(leaf) for leaf in leaves]
    flags, choice_spec = flatten(choice)
    if choice_spec != spec or not all(isinstance(flag, bool) for flag in flags):
        raise PlanError(
            f"trainable[{stage}] is True, False, or a tree of them like params[{stage}] ({spec}); "
            f"got {choice_spec}"
        )
    pairs = zip(paths(tree), leaves, flags, strict=True)
    if wrong := [str(path) for path, leaf, flag in pairs if flag and not is_differentiable(leaf)]:
        raise PlanError(
            f"trainable[{stage}] is True for leaves that cannot have gradients, because they are "
            f"not floating-point tensors: {', '.join(wrong)}"
        )
    return flags


def resolve_ties(
    plan: Plan,
    trees: Sequence[Tree],
    trained: list[list[bool]],
    here: Collection[int] | None = None,
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the plan's ties as groups of (stage, leaf number).

    The number is -1 for stages that are not ``here``.

    Raises:
        PlanError: a tie names a missing leaf, or its leaves differ in shape or in trainability.
    """
    faults: list[str] = []
    groups: list[tuple[tuple[int, int], ...]] = []
    for group in plan.ties:
        members: list[tuple[int, int]] = []
        for stage, key in group:
            if here is not None and stage not in here:
                members.append((stage, -1))
                continue
            leaf_paths = paths(trees[stage])
            path: Path = key if isinstance(key, tuple) else (key,)
            if path in leaf_paths:
                members.append((stage, leaf_paths.index(path)))
            else:
                faults.append(
                    f"params[{stage}] has no leaf at {key!r}{similar(key, map(key_of, leaf_paths))}"
                )
        known = [(stage, number) for stage, number in members if number >= 0]
        shapes = {tuple(flatten(trees[stage])[0][number].shape) for stage, number in known}
        if len(shapes) > 1:
            faults.append(f"the leaves of {group} differ in shape: {sorted(shapes)}")
        if len({trained[stage][number] for stage, number in known}) > 1:
            faults.append(f"some leaves of {group} are trainable and some are not")
        groups.append(tuple(members))
    raise_all("the plan's ties do not fit params:", faults)
    return tuple(groups)


def tied_members(
    plan: Plan,
    trees: Sequence[Tree],
    leaves: Sequence[Sequence[Any]],
    trainable: Trainable,
    here: Collection[int],
) -> tuple[tuple[tuple[int, TensorLayout, bool, bool], ...], ...]:
    """Return the members of each tie in this process.

    Each member is (place, layout, trained if some leaf of any stage requires a gradient, trained if
    none does).

    Raises:
        PlanError: a tie names a missing leaf.
    """
    if not plan.ties:
        return ()
    either = [trainable_leaves(trees, trainable, marked=marked) for marked in (True, False)]
    out: list[tuple[tuple[int, TensorLayout, bool, bool], ...]] = []
    for group in resolve_ties(plan, trees, either[0], here):
        members: list[tuple[int, TensorLayout, bool, bool]] = []
        for place, (stage, number) in enumerate(group):
            if number >= 0:
                leaf = leaves[stage][number]
                some, none = (flags[stage][number] for flags in either)
                members.append((place, TensorLayout.of(leaf), some, none))
        out.append(tuple(members))
    return tuple(out)


def refuse_undeclared_ties(
    trees: Sequence[Tree],
    leaves: Sequence[Sequence[Any]],
    trained: list[list[bool]],
    ties: Sequence[Sequence[tuple[int, int]]],
) -> None:
    """Raise PlanError for a tensor in two stages without a tie: its gradients would not be summed.

    Also for two tensors in one memory, such as a detached or a transposed weight.
    """
    if len(trees) == 1:
        return
    declared = {member: number for number, group in enumerate(ties) for member in group}
    first: dict[int, tuple[int, int]] = {}
    for stage, row in enumerate(leaves):
        for number, leaf in enumerate(row):
            if not trained[stage][number]:
                continue
            other = first.setdefault(_memory_of(leaf), (stage, number))
            if other[0] == stage:
                continue
            group = declared.get((stage, number))
            if group is None or group != declared.get(other):
                here, there = paths(trees[stage])[number], paths(trees[other[0]])[other[1]]
                places = (
                    f"params[{other[0]}] at {key_of(there)!r} and params[{stage}] at "
                    f"{key_of(here)!r}"
                )
                tie = (
                    f"make_plan(..., ties=[(({other[0]}, {key_of(there)!r}), ({stage}, "
                    f"{key_of(here)!r}))])"
                )
                if leaves[other[0]][other[1]] is leaf:
                    raise PlanError(
                        f"{places} are one tensor in two stages; tie them, so that their gradients "
                        f"are summed: {tie}"
                    )
                raise PlanError(
                    f"{places} are two tensors in one memory, such as a detached or transposed "
                    "weight, and each would get a part of the gradient alone. Give both stages the "
                    f"same tensor, transpose it within the stage, and tie it: {tie}; or give each "
                    "stage a copy"
                )


def _memory_of(leaf: Tensor) -> int:
    """Return the address of a leaf's first number; its id if it has no memory of its own."""
    plain = type(leaf) in (Tensor, nn.Parameter) and leaf.layout is torch.strided
    start = address(leaf) if plain and not is_shared_lazily(leaf) else 0
    return start + int(leaf.storage_offset()) * leaf.itemsize if start else id(leaf)


def key_of(path: Path) -> Any:
    """Return a path as users write it: the only key, or the tuple of keys."""
    return path[0] if len(path) == 1 else path
