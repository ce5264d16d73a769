"""apply: the composed pure function of some stages; torch.func transforms it."""

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
    """Call stages one after the other on the whole inputs: the function whose gradients a plan
    computes.

    No autograd call, no microbatches, no devices: ``torch.func.grad``, ``vmap``, ``jvp`` and
    ``functional_call`` work on it and inside of it.

    >>> fp.apply([fp.stage(lambda p, x: p * x), fp.stage(lambda p, x: p + x)], (2.0, 1.0), 5.0).y
    11.0

    Args:
        stages: in order.
        params: one tree per stage.
        inputs: the first stage's input.
        state: one tree per stage; None if none has state.
        feeds: by name.
        seed: keys random numbers as microbatch 0 of a run; None leaves them to torch's generators.
        train: what stages that take ``train`` get.

    Returns:
        ``y`` of the last stage, ``stash`` of all, ``stats`` one per stage, ``loss`` the sum of
        auxiliary losses.

    Raises:
        PlanError: lengths, stash and pop, feeds or state do not fit.
    """
    argument: Any = stages
    parts: tuple[Stage, ...] = tuple(argument) if isinstance(argument, Iterable) else (argument,)
    refuse_others("apply", parts, "apply([first, second], params, inputs)")
    routes(parts)
    refuse_changed_models(parts)
    faults = [
        f"{name} has {len(trees)} trees for {len(parts)} stages"
        for name, trees in (("params", params), ("state", state))
        if trees is not None and len(trees) != len(parts)
    ]
    for label, part in zip(names_of(parts), parts, strict=True):
        missing = [name for name in part.feeds if name not in (feeds or {})]
        faults += [f"{label} declares the feed {name!r}, which is not given" for name in missing]
        if part.state and state is None:
            faults.append(f"{label} has state, which is not given")
    raise_all("apply cannot call these stages:", faults)
    states = ((),) * len(parts) if state is None else tuple(state)
    bound = [
        part.bind(weights, values)
        for part, weights, values in zip(parts, params, states, strict=True)
    ]
    keys = Keys(seed, parts)
    calls = (
        bound if seed is None else [_keyed(keys, index, call) for index, call in enumerate(bound)]
    )
    return chain(parts, calls, inputs, {"feeds": feeds or {}, "train": train}, states)


def _keyed(keys: Keys, index: int, call: BoundFn) -> Callable[..., Any]:
    """The stage's function, its random numbers keyed as in microbatch 0 of a run."""

    def keyed(x: Tree, **extras: Any) -> Any:
        with KeyedDraws(keys, index, call.places, 0):
            return call(x, **extras)

    return keyed
