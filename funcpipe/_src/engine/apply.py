"""`apply`: call stages as one pure function, which torch.func can transform. Runs no schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from funcpipe._src.core.errors import raise_all
from funcpipe._src.core.tree import Tree
from funcpipe._src.data.compose import chain
from funcpipe._src.data.stage import (
    BoundFn,
    Out,
    Stage,
    names_of,
    refuse_changed_models,
    refuse_others,
)
from funcpipe._src.lower.skips import routes
from funcpipe._src.stages.rng import KeyedDraws, Keys


def apply(
    stages: Sequence[Stage],
    params: Sequence[Tree],
    inputs: Tree,
    *,
    state: Sequence[Tree] | None = None,
    feeds: Mapping[str, Tree] | None = None,
    seed: int | None = None,
    train: bool = False,
) -> Out:
    """Call stages one after the other on a whole batch, as one pure function.

    A plan computes the gradients of this function. `apply` calls no autograd, cuts no microbatches
    and moves no tensors. So you can use it with ``torch.func.grad``, ``vmap``, ``jvp`` and
    ``functional_call``, and inside a function that these transform.

    >>> fp.apply([fp.stage(lambda p, x: p * x), fp.stage(lambda p, x: p + x)], (2.0, 1.0), 5.0).y
    11.0

    Args:
        stages: the stages in order.
        params: the parameters, one tree per stage.
        inputs: the input of the first stage, a tree.
        state: the state, one tree per stage. None if no stage has state.
        feeds: the values of all feeds, by name.
        seed: the seed of all random numbers. The draws equal the draws of microbatch 0 in a run
            with this seed. None: draws use torch's global generators.
        train: the value of the argument ``train`` for stages that declare it.

    Returns:
        An `Out`. ``y`` is the output of the last stage. ``stash`` contains the stashed values of
        all stages. ``stats`` has one entry per stage. ``loss`` is the sum of the auxiliary losses.

    Raises:
        PlanError: ``params`` or ``state`` has another length than ``stages``; a stash and its pop,
            a feed or a state is missing.
    """
    argument: Any = stages
    listed: tuple[Stage, ...] = tuple(argument) if isinstance(argument, Iterable) else (argument,)
    refuse_others("apply", listed, "apply([first, second], params, inputs)")
    # Called for its check: a pop without a stash raises PlanError.
    routes(listed)
    refuse_changed_models(listed, params)
    faults = [
        f"{name} has {len(trees)} trees for {len(listed)} stages"
        for name, trees in (("params", params), ("state", state))
        if trees is not None and len(trees) != len(listed)
    ]
    for label, stage in zip(names_of(listed), listed, strict=True):
        missing = [name for name in stage.feeds if name not in (feeds or {})]
        faults += [
            f"{label} declares the feed {name!r}, which is not given: feeds={{{name!r}: ...}}"
            for name in missing
        ]
        if stage.state and state is None:
            faults.append(f"{label} has state, which is not given: state=(one tree per stage)")
    raise_all("apply cannot call these stages:", faults)
    states = ((),) * len(listed) if state is None else tuple(state)
    bound = [
        stage.bind(weights, values)
        for stage, weights, values in zip(listed, params, states, strict=True)
    ]
    keys = Keys(seed, listed)
    calls = (
        bound if seed is None else [_keyed(keys, index, call) for index, call in enumerate(bound)]
    )
    return chain(listed, calls, inputs, {"feeds": feeds or {}, "train": train}, states)


def _keyed(keys: Keys, index: int, call: BoundFn) -> Callable[..., Any]:
    """Wrap a stage's function so that it draws as in microbatch 0 of a run."""

    def keyed(x: Tree, **extras: Any) -> Any:
        with KeyedDraws(keys, index, call.places, 0):
            return call(x, **extras)

    return keyed
