"""Join neighbouring stages into one stage: declarations, binding, calls and commits."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.core.shown import some
from funcpipe._src.core.tree import Tree, cow_clone, map_tensors
from funcpipe._src.data.stage import (
    SCOPE,
    Bindable,
    BoundFn,
    Out,
    Stage,
    carried,
    refuse_others,
    refuse_uncommitted,
    side_loss,
)


def compose(*stages: Stage, name: str = "") -> Stage:
    """Join neighbouring stages into one stage.

    The parameters and the state of the new stage are tuples with one entry per inner stage. Inner
    stages keep their names and their keys for random numbers. A value that one inner stage stashes
    and another pops stays inside, unless a later stage of the plan pops it too.

    >>> double, add = fp.stage(lambda p, x: p * x), fp.stage(lambda p, x: p + x)
    >>> fp.compose(double, add)((2, 5), 10)
    25

    Args:
        *stages: the stages, in the order in which they run.
        name: the name of the new stage; by default the inner names joined with ``+``.

    Returns:
        The new stage.

    Raises:
        PlanError: no stages are given, or the inner stash and pop names do not match.
    """
    if not stages:
        raise PlanError("compose needs at least one stage")
    refuse_others("compose", stages, "compose(first, second)")
    inside: set[str] = set()
    popped: set[str] = set()
    outside: dict[str, None] = {}
    faults: list[str] = []
    for part in stages:
        for pop_name in part.pop:
            (popped.add if pop_name in inside else outside.setdefault)(pop_name)
        for stash_name in (*part.stash, *part.offers):
            if stash_name in inside:
                faults.append(f"{part.name!r} stashes {stash_name!r} again")
            if stash_name in outside:
                faults.append(f"{part.name!r} stashes {stash_name!r} after it was popped")
            inside.add(stash_name)
    raise_all("stash and pop do not match inside compose:", faults)
    offered = {name for part in stages for name in part.offers} | popped
    return Stage(
        _Composition(stages),
        name or "+".join(part.name or "?" for part in stages),
        stash=tuple(n for part in stages for n in part.stash if n not in offered),
        pop=tuple(outside),
        feeds=tuple(dict.fromkeys(n for part in stages for n in part.feeds)),
        state=any(part.state for part in stages),
        commit=partial(_commit_each, stages) if any(part.commit for part in stages) else None,
        offers=tuple(n for part in stages for n in (*part.stash, *part.offers) if n in offered),
        takes_train=any(part.takes_train for part in stages),
        shares=tuple(
            (_inside(n, path), shared)
            for n, part in enumerate(stages)
            for path, shared in part.shares
        ),
        evaluation=all(part.evaluation for part in stages),
        carry=any(part.carry for part in stages),
    )


def _inside(part: int, path: Any) -> tuple[Any, ...]:
    """Return the path, in a composition's params, of a leaf of the inner stage number ``part``."""
    return (part, *(path if isinstance(path, tuple) else (path,)))


@contextmanager
def _running(part: Stage) -> Generator[None]:
    """Return a context in which random numbers are keyed by an inner stage."""
    token = SCOPE.set(part)
    try:
        yield
    finally:
        SCOPE.reset(token)


def chain(
    stages: Sequence[Stage],
    calls: Sequence[Callable[..., Any]],
    x: Tree,
    extras: Mapping[str, Any],
    states: Sequence[Tree],
) -> Out:
    """Call stages in order, pass skips between them, and combine their auxiliary losses.

    ``calls[i](x, **extras)`` runs the i-th stage.
    """
    skips = dict(extras.get("skips", {}))
    stats: list[Tree] = []
    stash: dict[str, Tree] = {}
    losses: list[tuple[Any, Any]] = []
    carries = extras.get("carry") or (None,) * len(stages)
    carry: list[Tree] = []
    for part, call, state, before in zip(stages, calls, states, carries, strict=True):
        feeds = extras.get("feeds", {})
        # Each inner stage gets its own copies, as in a plan. Without them an in-place write would
        # change the skip or feed that another inner stage reads.
        taken = {name: map_tensors(cow_clone, skips[name]) for name in part.pop}
        own_feeds = {name: map_tensors(cow_clone, feeds[name]) for name in part.feeds}
        own_extras = part.extras(
            taken, own_feeds, state, extras["train"], map_tensors(cow_clone, before)
        )
        with _running(part):
            out = carried(part, call(map_tensors(cow_clone, x), **own_extras))
        x = out.y
        skips.update(out.stash)
        stash.update(out.stash)
        stats.append(out.stats)
        carry.append(out.carry)
        side = side_loss(out)
        if side is not None:
            losses.append(side)
    loss: tuple[Any, ...] = ()
    if len(losses) == 1:
        loss = losses[0]
    elif losses:
        counted = [total / weight for total, weight in losses if float(weight)]
        loss = (sum(counted), 1.0) if counted else losses[0]
    return Out(
        x, stash, tuple(stats), loss, tuple(carry) if any(part.carry for part in stages) else ()
    )


class _Composition(Bindable):
    """The function of a composition: calls its inner stages in order."""

    def __init__(self, stages: tuple[Stage, ...]) -> None:
        self.stages = stages
        self.who = f"compose({some(part.name or '?' for part in stages)})"

    def __call__(self, params: Tree, x: Tree, **extras: Any) -> Any:
        _check_length("params", params, self.stages)
        calls = [partial(part.fn, p) for part, p in zip(self.stages, params, strict=True)]
        return self._call(calls, x, extras)

    def _call(self, calls: Sequence[Callable[..., Any]], x: Tree, extras: dict[str, Any]) -> Any:
        states = extras.get("state")
        if states is None:
            states = ((),) * len(self.stages)
        _check_length("state", states, self.stages)
        out = chain(self.stages, calls, x, {"train": False, **extras}, states)
        for part, stats in zip(self.stages, out.stats, strict=True):
            refuse_uncommitted(part, stats)
        plain = not out.stash and side_loss(out) is None
        plain &= not any(part.commit or part.carry for part in self.stages)
        return out.y if plain else out

    def bind(self, params: Tree, state: Tree) -> BoundFn:
        """Bind every inner stage."""
        _check_length("params", params, self.stages)
        states = state if any(part.state for part in self.stages) else ((),) * len(self.stages)
        _check_length("state", states, self.stages)
        bound = [part.bind(p, s) for part, p, s in zip(self.stages, params, states, strict=True)]
        return _BoundComposition(self, bound)

    def parts(self) -> tuple[Stage, ...]:
        """The inner stages."""
        return self.stages


class _BoundComposition:
    def __init__(self, composition: _Composition, bound: list[BoundFn]) -> None:
        self.composition, self.bound = composition, bound
        self.places = {module: path for part in bound for module, path in part.places.items()}

    def __call__(self, x: Tree, **extras: Any) -> Any:
        return self.composition._call(self.bound, x, extras)  # pyright: ignore[reportPrivateUsage]

    def release(self) -> None:
        for part in self.bound:
            part.release()


def _commit_each(stages: tuple[Stage, ...], state: Tree, stats: tuple[Tree, ...]) -> Tree:
    """Let each inner stage commit its own statistics."""
    new = list(state)
    for index, part in enumerate(stages):
        if part.commit is not None:
            with _running(part):
                new[index] = part.commit(state[index], tuple(row[index] for row in stats))
    return tuple(new)


def _check_length(label: str, trees: Any, stages: Sequence[Stage]) -> None:
    if not isinstance(trees, (tuple, list)) or len(trees) != len(stages):  # pyright: ignore[reportUnknownArgumentType]
        length = f" of {len(trees)}" if isinstance(trees, Sequence) else ""
        names = ", ".join(part.name or "?" for part in stages)
        raise PlanError(
            f"{label} of a composition of {len(stages)} stages ({names}) must be a tuple with one "
            f"tree per stage; got a {type(trees).__name__}{length}"
        )
