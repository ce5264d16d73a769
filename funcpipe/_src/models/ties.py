"""Handle a parameter that several stages use: each stage has a copy, or one stage owns it and
its value travels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.core.tree import Tree
from funcpipe._src.core.words import similar
from funcpipe._src.data.plan import Ties
from funcpipe._src.data.stage import Bindable, BoundFn, Origin, Shared, Stage, normalise


class Owner(NamedTuple):
    """A place in the trees of a split: "params" or "state", the stage, and the key."""

    kind: str
    stage: int
    key: str


class Home(NamedTuple):
    """The places of a name of the model in a split."""

    owners: tuple[Owner, ...]  # the first represents all
    shape: tuple[int, ...]
    saved: bool  # whether the name is in the model's ``state_dict``


def groups(params: Sequence[Mapping[str, Tensor]]) -> Ties:
    """Group the parameters that several stages contain, in the form for ``make_plan(ties=)``."""
    holders: dict[int, list[tuple[int, Any]]] = {}
    for stage, tree in enumerate(params):
        for key, tensor in tree.items():
            holders.setdefault(id(tensor), []).append((stage, key))
    return tuple(
        tuple(group) for group in holders.values() if len({stage for stage, _ in group}) > 1
    )


def mark(stages: Sequence[Stage], ties: Ties) -> tuple[Stage, ...]:
    """Record in each stage which of its parameters other stages share."""
    rows: list[list[tuple[Any, Shared]]] = [[] for _ in stages]
    for group in ties:
        shared = Shared(str(group[0][1]))
        for number, key in group:
            rows[number].append((key, shared))
    return tuple(
        replace(stage, shares=tuple(row)) if row else stage
        for stage, row in zip(stages, rows, strict=True)
    )


def transmit(
    stages: Sequence[Stage], params: Sequence[dict[str, Tensor]], ties: Ties, how: Any
) -> tuple[tuple[Stage, ...], tuple[dict[str, Tensor], ...], Ties]:
    """Make the ties that travel: the first stage of a group owns the parameter and stashes it, the
    others pop it.

    ``how`` is "replicate" or "transmit" for all, or a dict by any name of a group. Returns stages,
    params, and the groups that are still replicated.
    """
    trees = [dict(tree) for tree in params]
    replicated: list[Any] = []
    gives: list[dict[str, str]] = [{} for _ in stages]
    takes: list[dict[str, str]] = [{} for _ in stages]
    for group, way in zip(ties, _ways(ties, how), strict=True):
        if way == "replicate":
            replicated.append(group)
            continue
        owner, key = group[0]
        # The prefix keeps the skip apart from skips of the model that have the same name.
        gives[owner][key] = skip = f"parameter:{key}"
        for stage, name in group[1:]:
            if stage != owner:
                takes[stage][name] = skip
                del trees[stage][name]
    travelling = tuple(
        _travelling(*row) if any(row[1:]) else row[0]
        for row in zip(stages, gives, takes, strict=True)
    )
    return travelling, tuple(trees), tuple(replicated)


def _travelling(stage: Stage, gives: Mapping[str, str], takes: Mapping[str, str]) -> Stage:
    stash, pop = (*stage.stash, *gives.values()), (*stage.pop, *dict.fromkeys(takes.values()))
    return replace(stage, fn=_Travelling(stage, gives, takes), stash=stash, pop=pop)


def _ways(ties: Ties, how: Any) -> list[str]:
    known = ("replicate", "transmit")
    if isinstance(how, str) and how in known:
        return [how] * len(ties)
    if not isinstance(how, Mapping):
        raise PlanError(
            f"ties must be 'replicate', 'transmit', or a dict from names to these; got {how!r}"
        )
    ways: dict[Any, Any] = dict(how)  # pyright: ignore[reportUnknownArgumentType]
    names = {name: number for number, group in enumerate(ties) for _, name in group}
    faults = [
        f"{name!r}: {way!r} is neither 'replicate' nor 'transmit'"
        for name, way in ways.items()
        if way not in known
    ]
    faults += [
        f"{name!r} is not used by several stages{similar(name, names)}"
        for name in ways
        if name not in names
    ]
    raise_all("ties= does not fit the split:", faults)
    chosen = ["replicate"] * len(ties)
    for name, way in ways.items():
        chosen[names[name]] = way
    return chosen


class _Travelling(Bindable):
    """A stage's function whose tied parameters travel as skips.

    ``gives`` and ``takes`` map parameters to skips. The draws have the keys of the inner stage, so
    it is not a composition.
    """

    def __init__(self, stage: Stage, gives: Mapping[str, str], takes: Mapping[str, str]) -> None:
        self.stage, self.gives, self.takes = stage, gives, takes

    def layers(self) -> set[str]:
        """The layers of the inner stage."""
        return self.stage.layers()

    def described(self) -> Iterable[tuple[str, str]]:
        """The layers of the inner stage, in words."""
        return self.stage.described()

    def origins(self) -> Iterable[Origin]:
        """The models of the inner stage."""
        return self.stage.origins()

    def bind(self, params: Any, state: Any) -> BoundFn:
        """Bind the inner stage: now, or in each call if a parameter travels to it."""
        return _BoundTravelling(self, params, state)


class _BoundTravelling:
    """The inner stage with its parameters; travelling parameters come with each call."""

    def __init__(self, owner: _Travelling, params: Any, state: Any) -> None:
        self.owner, self.params, self.state = owner, params, state
        # All bindings are kept until `release`: a checkpoint inside runs its call again in the
        # backward, and needs the parameters of that call.
        self.bound: list[BoundFn] = []
        self.places: dict[int, str] = {}
        if not owner.takes:
            self._bind(params)

    def _bind(self, params: Any) -> None:
        self.bound.append(self.owner.stage.bind(params, self.state))
        self.places.update(self.bound[-1].places)

    def __call__(self, x: Tree, **extras: Any) -> Any:
        stage, gives, takes = self.owner.stage, self.owner.gives, self.owner.takes
        if takes:
            skips = extras.pop("skips")
            self._bind({**self.params, **{key: skips[skip] for key, skip in takes.items()}})
            if stage.pop:
                extras["skips"] = {name: skips[name] for name in stage.pop}
        returned = self.bound[-1](x, **extras)
        if not gives:
            return returned
        out = normalise(returned)
        # Views: the stashed leaf itself would have no autograd node at which its gradient arrives.
        stashed = {skip: self.params[key].view_as(self.params[key]) for key, skip in gives.items()}
        return out._replace(stash={**out.stash, **stashed})

    def release(self) -> None:
        for bound in self.bound:
            bound.release()
        self.bound, self.params, self.state = [], {}, ()


def innermost(stage: Stage) -> Any:
    """The function of a split's stage, without the wrapper for travelling parameters."""
    return stage.fn.stage.fn if isinstance(stage.fn, _Travelling) else stage.fn
