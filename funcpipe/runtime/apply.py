"""apply: the composed pure function of some stages; torch.func transforms it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from funcpipe.core.errors import PlanError, bullets
from funcpipe.core.stage import Bindable, Out, Stage, names_of, normalise, scope
from funcpipe.core.tree import Tree
from funcpipe.lower.skips import routes
from funcpipe.runtime.rng import Keyed, Keys


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
    """Call stages one after the other on the whole inputs: the function whose gradients a plan computes.

    No autograd call, no microbatches, no devices: ``torch.func.grad``, ``vmap``, ``jvp`` and ``functional_call`` work
    on it and inside of it.

    >>> from funcpipe.core.stage import stage
    >>> apply([stage(lambda p, x: p * x), stage(lambda p, x: p + x)], (2.0, 1.0), 5.0).y
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
        ``y`` of the last stage, ``stash`` of all, ``stats`` one per stage, ``loss`` the sum of auxiliary losses.

    Raises:
        PlanError: lengths, stash and pop, feeds or state do not fit.
    """
    parts = tuple(stages)
    routes(parts)
    faults = [f"{what} has {len(given)} trees for {len(parts)} stages" for what, given in (("params", params), ("state", state)) if given is not None and len(given) != len(parts)]  # fmt: skip
    faults += [f"{label} declares the feed {name!r}, which is not given" for label, part in zip(names_of(parts), parts, strict=True) for name in part.feeds if name not in (feeds or {})]  # fmt: skip
    faults += [f"{label} has state, which is not given" for label, part in zip(names_of(parts), parts, strict=True) if part.state and state is None]  # fmt: skip
    if faults:
        raise PlanError(bullets("apply cannot call these stages:", faults))
    keys = Keys(seed, parts)
    x: Tree = inputs
    skips: dict[str, Tree] = {}
    stats: list[Tree] = []
    loss: tuple[Any, Any] | None = None
    for index, part in enumerate(parts):
        own = part.extras(
            {name: skips[name] for name in part.pop},
            {name: (feeds or {})[name] for name in part.feeds},
            None if state is None else state[index],
            train,
        )
        bound = part.bind(params[index], () if state is None else state[index])
        places: Mapping[int, str] = getattr(bound, "places", {})
        mode = nullcontext() if seed is None else Keyed(keys, index, places, 0)
        with mode, scope("" if isinstance(part.fn, Bindable) else part.name):
            out = normalise(bound(x, **own))
        x = out.y
        skips.update(out.stash)
        stats.append(out.stats)
        loss = _plus(loss, out.loss)
    return Out(x, skips, tuple(stats), loss)


def _plus(a: tuple[Any, Any] | None, b: tuple[Any, Any] | None) -> tuple[Any, Any] | None:
    if a is None or b is None:
        return b if a is None else a
    return (a[0] / a[1] + b[0] / b[1], 1.0)
