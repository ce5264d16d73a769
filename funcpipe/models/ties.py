"""One parameter in several stages: each holds it and gradients are summed, or one owns it and its value travels."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from funcpipe.core.errors import PlanError, bullets
from funcpipe.core.plan import Ties
from funcpipe.core.stage import BoundFn, Out, Shared, Stage, normalise
from funcpipe.core.tree import Tree


class Owner(NamedTuple):
    """A place in the trees of a split: "params" or "state", the stage, the key."""

    kind: str
    stage: int
    key: str


@dataclass(frozen=True)
class Home:
    """Where a name of the model lives in a split.

    Attributes:
        owners: the places that hold it; the first speaks for all.
        shape: of the tensor.
        saved: does it belong to the model's ``state_dict``.
    """

    owners: tuple[Owner, ...]
    shape: tuple[int, ...]
    saved: bool

    def among(self, params: Sequence[Mapping[str, Any]]) -> Home:
        """The home without the places that gave their parameter away."""
        kept = tuple(one for one in self.owners if one.kind != "params" or one.key in params[one.stage])
        return replace(self, owners=kept)


def groups(params: Sequence[Mapping[str, Tensor]]) -> Ties:
    """The parameters that several places hold, by identity, as ``make_plan(ties=)`` takes them."""
    holders: dict[int, list[tuple[int, Any]]] = {}
    for stage, tree in enumerate(params):
        for key, tensor in tree.items():
            holders.setdefault(id(tensor), []).append((stage, key))
    return tuple(tuple(group) for group in holders.values() if len({stage for stage, _ in group}) > 1)


def mark(stages: Sequence[Stage], ties: Ties) -> tuple[Stage, ...]:
    """The stages, each of which knows which of its parameters others hold too."""
    rows: list[list[tuple[Any, Shared]]] = [[] for _ in stages]
    for group in ties:
        shared = Shared(str(group[0][1]))
        for stage, key in group:
            rows[stage].append((key, shared))
    return tuple(replace(one, shares=tuple(row)) if row else one for one, row in zip(stages, rows, strict=True))


def transmit(
    stages: Sequence[Stage], params: Sequence[dict[str, Tensor]], ties: Ties, how: Any
) -> tuple[tuple[Stage, ...], tuple[dict[str, Tensor], ...], Ties]:
    """Make ties that travel: the first stage of a group owns the parameter and stashes it, the others pop it.

    Args:
        stages, params: of a split, as they were cut.
        ties: the groups.
        how: "replicate" or "transmit" for all, or for each name (any name of the group; "replicate" where it has none).

    Returns:
        Stages, params, and the groups that are still replicated.

    Raises:
        PlanError: no such way, or a name that is not tied.
    """
    ways = _ways(ties, how)
    made, trees = list(stages), [dict(tree) for tree in params]
    kept: list[Any] = []
    borrowed: dict[int, dict[str, str]] = {}
    for group, way in zip(ties, ways, strict=True):
        if way == "replicate":
            kept.append(group)
            continue
        owner, key = group[0]
        skip = f"parameter:{key}"
        made[owner] = replace(made[owner], fn=_Giving(made[owner], key, skip), stash=(*made[owner].stash, skip))
        for stage, name in group[1:]:
            if stage != owner:
                borrowed.setdefault(stage, {})[name] = skip
                del trees[stage][name]
    for stage, skips in borrowed.items():
        pop = (*made[stage].pop, *dict.fromkeys(skips.values()))
        made[stage] = replace(made[stage], fn=_Taking(made[stage], skips), pop=pop)
    return tuple(made), tuple(trees), tuple(kept)


def _ways(ties: Ties, how: Any) -> list[str]:
    words = ("replicate", "transmit")
    if isinstance(how, str):
        if how not in words:
            raise PlanError(f"ties is 'replicate', 'transmit', or one of them for each name; got {how!r}")
        return [how] * len(ties)
    if not isinstance(how, Mapping):
        raise PlanError(f"ties is 'replicate', 'transmit', or a dict from names to them; got a {type(how).__name__}")
    given: dict[Any, Any] = dict(how)  # pyright: ignore[reportUnknownArgumentType]
    names = {name: number for number, group in enumerate(ties) for _, name in group}
    faults = [
        f"{name!r}: {way!r} is neither 'replicate' nor 'transmit'" for name, way in given.items() if way not in words
    ]
    for name in given:
        if name not in names:
            near = difflib.get_close_matches(str(name), [str(one) for one in names], 1)
            faults.append(f"{name!r} is not used by several stages" + (f"; did you mean {near[0]!r}?" if near else ""))
    if faults:
        raise PlanError(bullets("ties= does not fit the split:", faults))
    chosen = ["replicate"] * len(ties)
    for name, way in given.items():
        chosen[names[name]] = way
    return chosen


class _Around:
    """A stage function around another stage's."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    @property
    def inner(self) -> Any:
        """The innermost function."""
        return getattr(self.stage.fn, "inner", self.stage.fn)

    def layers(self) -> set[str]:
        """Those of the stage inside."""
        return self.stage.layers()

    def parts(self) -> tuple[Stage, ...]:
        """It draws as the stage itself, so it is no composition."""
        return ()


class _Giving(_Around):
    """Stashes one of its parameters for the stages that share it."""

    def __init__(self, stage: Stage, key: str, skip: str) -> None:
        super().__init__(stage)
        self.key, self.skip = key, skip

    def __call__(self, params: Any, x: Tree, **extras: Any) -> Out:
        return self.give(self.stage.fn(params, x, **extras), params)

    def give(self, returned: Any, params: Any) -> Out:
        """What the stage returned, and the parameter; a view, so that its gradient has a node to come back to."""
        out = normalise(returned)
        value = params[self.key]
        return out._replace(stash={**out.stash, self.skip: value.view_as(value)})

    def bind(self, params: Any, state: Any) -> BoundFn:
        """Bind the stage inside."""
        return _BoundGiving(self, params, self.stage.bind(params, state))


class _BoundGiving:
    def __init__(self, owner: _Giving, params: Any, bound: BoundFn) -> None:
        self.owner, self.params, self.bound = owner, params, bound
        self.places: Any = getattr(bound, "places", {})

    def __call__(self, x: Tree, **extras: Any) -> Out:
        return self.owner.give(self.bound(x, **extras), self.params)

    def release(self) -> None:
        self.params = {}
        self.bound.release()


class _Taking(_Around):
    """Computes with parameters that earlier stages own; they arrive as skips."""

    def __init__(self, stage: Stage, skips: Mapping[str, str]) -> None:
        super().__init__(stage)
        self.skips = dict(skips)

    def __call__(self, params: Any, x: Tree, **extras: Any) -> Any:
        full, rest = self.open(params, extras)
        return self.stage.fn(full, x, **rest)

    def open(self, params: Any, extras: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """All parameters, and the keywords that the stage inside takes."""
        popped = extras["skips"]
        rest = {key: one for key, one in extras.items() if key != "skips"}
        if self.stage.pop:
            rest["skips"] = {name: popped[name] for name in self.stage.pop}
        return {**params, **{key: popped[skip] for key, skip in self.skips.items()}}, rest

    def bind(self, params: Any, state: Any) -> BoundFn:
        """Nothing is bound before the parameter has come."""
        return _BoundTaking(self, params, state)


class _BoundTaking:
    """Binds the stage inside anew for each call, with the parameter as it came; lets all go at the end."""

    def __init__(self, owner: _Taking, params: Any, state: Any) -> None:
        self.owner, self.params, self.state = owner, params, state
        self.calls: list[BoundFn] = []
        self.places: dict[int, str] = {}

    def __call__(self, x: Tree, **extras: Any) -> Any:
        full, rest = self.owner.open(self.params, extras)
        bound = self.owner.stage.bind(full, self.state)
        self.calls.append(bound)  # a checkpoint inside computes again with it in the backward
        self.places.update(getattr(bound, "places", {}))
        return bound(x, **rest)

    def release(self) -> None:
        for bound in self.calls:
            bound.release()
        self.calls, self.params, self.state = [], {}, ()
