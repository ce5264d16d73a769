"""A stage: a pure function with declared stash, pop, feeds and state."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from functools import partial
from pkgutil import resolve_name
from typing import Any, Protocol, TypeAlias, overload, runtime_checkable

from funcpipe._src.core.captured import captured_values
from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.shown import function_words, guarded, line, some
from funcpipe._src.core.tree import Tree
from funcpipe._src.data.declared import (
    arguments_of,
    check_declaration,
    check_function,
    checked_names,
    keywords_of,
)
from funcpipe._src.data.out import Out

StageFn: TypeAlias = Callable[..., Any]
Commit: TypeAlias = Callable[[Tree, tuple[Tree, ...]], Tree]


CARRY = ""
"""The name, which no skip has, under which runs keep what a stage hands to its next slice among its
stashes."""


class BoundFn(Protocol):
    """A stage function with its parameters put in: what one run calls, from one thread, and drops
    at its end."""

    @property
    def places(self) -> Mapping[int, str]:
        """The paths of layers by the ids of their modules, which key what they draw."""
        ...

    def __call__(self, x: Tree, **extras: Any) -> Any:
        """Call the function on one microbatch with the extras that its stage declares."""
        ...

    def release(self) -> None:
        """Drop the parameters; the run is over."""
        ...


class Origin(Protocol):
    """A model whose copies compute in stages."""

    def refuse_changes(self) -> None:
        """Raise PlanError where the model's attributes have changed since the copy was made."""
        ...


class Bindable(ABC):
    """A stage function that wants to know its parameters for a whole run (module stages,
    compositions)."""

    @abstractmethod
    def bind(self, params: Tree, state: Tree) -> BoundFn:
        """Put parameters and state in. Raises PlanError where they do not fit."""

    def __repr__(self) -> str:
        return str(getattr(self, "who", type(self).__name__))

    def __call__(self, params: Tree, x: Tree, **extras: Any) -> Any:
        """Call outside of a run."""
        return self.bind(params, extras.get("state", ()))(x, **extras)

    @property
    def sliceable(self) -> bool:
        """Can it run slices of a sequence; False where it is known that it cannot."""
        return True

    def layers(self) -> Iterable[str]:
        """The paths of its layers, which key what they draw; a composition has none of its own."""
        return ()

    def parts(self) -> Iterable[Stage]:
        """The stages that a composition calls."""
        return ()

    def origins(self) -> Iterable[Origin]:
        """Return the models whose copies compute in this stage."""
        return [origin for part in self.parts() for origin in part.origins()]


class _Plain(partial[Any]):
    """A plain function with its parameters in front."""

    @property
    def places(self) -> Mapping[int, str]:
        """Empty: a function has no layers that are known."""
        return {}

    def release(self) -> None:
        """Do nothing: the parameters go with this object."""


SCOPE: ContextVar[Stage | None] = ContextVar("funcpipe_scope", default=None)
"""The part of a composition that runs, None outside of any: random numbers are the part's, as if it
stood alone."""


@dataclass(frozen=True, eq=False)
class Shared:
    """One parameter that several stages hold, told from others by identity.

    Attributes:
        name: what the model calls it.
    """

    name: str


@dataclass(eq=False)
class StageFacts:
    """Facts about a stage that runs found, kept so that runs look once. Copies of a stage have
    none.

    Attributes:
        draws: in which modes (training or not) it drew random numbers.
        reentrant: in which modes its graph had a reentrant checkpoint.
        kept: in which modes a whole run left its parameters as they were.
        foreign: weak references to leaves of its graph that are not of the run's making.
        inputs: weak references to the inputs of the microbatch whose graph a run checked last.
        late: did the plan's loss behind it give weights that nobody knew before.
        settled: whether a plan found the globals and closures of the function as they were at the
            stage's creation.
    """

    draws: set[bool] = field(default_factory=set)
    reentrant: set[bool] = field(default_factory=set)
    kept: set[bool] = field(default_factory=set)
    foreign: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    late: bool = False
    settled: bool = False


@dataclass(frozen=True, eq=False)
class Stage:
    """A pure function with declared stash, pop, feeds and state. Made by `stage`, `from_module`,
    `compose`.

    Calling it returns what the function returned, so a stage is its own unit test::

        decoder(params, x, skips={"e1": t})

    Attributes:
        fn: ``fn(params, x, **what it declares)``.
        name: what errors and pictures call it; keys its random numbers.
        stash: names that it hands to later stages.
        pop: names that it takes from earlier stages; they arrive as ``skips``.
        feeds: names of values of the batch that it gets besides ``x``; they arrive as ``feeds``.
        state: does it read state (running statistics, tables); it arrives as ``state``.
        commit: ``(state, stats of the microbatches) -> state``, once per batch; None: the state
            never changes.
        offers: stashed names that nobody has to pop, because a composition already popped them
            inside.
        program: how a run calls it: None: as it is; else what `compile` made.
        shares: which of its parameters other stages hold too: (path, what is shared). A plan ties
            them by itself.
        carry: does it hand something from each slice of a microbatch to the next; it arrives as
            ``carry``, None for the first.
        evaluation: stays in evaluation mode whatever the plan's ``train`` says, because its module
            was as a whole.
        closed: what the free names of its function held when it was made; the first plan looks
            whether they still do.
        seen: what runs found out about it.
    """

    fn: StageFn
    name: str = ""
    stash: tuple[str, ...] = ()
    pop: tuple[str, ...] = ()
    feeds: tuple[str, ...] = ()
    state: bool = False
    commit: Commit | None = None
    offers: tuple[str, ...] = field(default=(), repr=False)
    takes_train: bool = field(default=False, repr=False)
    program: Any = field(default=None, repr=False)
    shares: tuple[tuple[Any, Shared], ...] = field(default=(), repr=False)
    carry: bool = field(default=False, repr=False)
    evaluation: bool = field(default=False, repr=False)
    closed: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    seen: StageFacts = field(default_factory=StageFacts, init=False, repr=False)

    @guarded
    def __repr__(self) -> str:
        declared = {"stash": self.stash, "pop": self.pop, "feeds": self.feeds}
        kept = [word for word in ("state", "carry") if getattr(self, word)]
        words = [
            ("", function_words(self.fn)),
            *[(name, some(names)) for name, names in declared.items()],
        ]
        kept += ["compiled"] * (self.program is not None)
        words += [("", word) for word in kept]
        return line(f"Stage {self.name!r}" if self.name else "Stage", words)

    def __call__(
        self,
        params: Tree,
        x: Tree,
        *,
        skips: Mapping[str, Tree] | None = None,
        feeds: Mapping[str, Tree] | None = None,
        state: Tree = None,
        train: bool = False,
        carry: Tree = None,
    ) -> Any:
        """Run the stage alone; no pipeline, no autograd of ours: torch.func transforms it.

        Raises:
            PlanError: a declared skip, feed or the state is missing.
        """
        skips, feeds = skips or {}, feeds or {}
        missing = [f"skips={{{name!r}: ...}}" for name in self.pop if name not in skips]
        missing += [f"feeds={{{name!r}: ...}}" for name in self.feeds if name not in feeds]
        missing += ["state=..."] if self.state and state is None else []
        if missing:
            raise PlanError(
                f"stage {self.name!r} declares more than it was given; add " + ", ".join(missing)
            )
        refuse_changed_models([self])
        declared = (
            {name: skips[name] for name in self.pop},
            {name: feeds[name] for name in self.feeds},
        )
        return self.fn(params, x, **self.extras(*declared, state, train, carry))

    def extras(
        self,
        skips: Mapping[str, Tree],
        feeds: Mapping[str, Tree],
        state: Tree,
        train: bool,
        carry: Tree = None,
    ) -> dict[str, Any]:
        """The keywords that the function gets: those that the stage declares, no others."""
        out: dict[str, Any] = {}
        if self.pop:
            out["skips"] = skips
        if self.feeds:
            out["feeds"] = feeds
        if self.state:
            out["state"] = state
        if self.takes_train:
            out["train"] = train
        if self.carry:
            out["carry"] = carry
        return out

    def bind(self, params: Tree, state: Tree) -> BoundFn:
        """The function with parameters and state put in, for one run."""
        return (
            self.fn.bind(params, state)
            if isinstance(self.fn, Bindable)
            else _Plain(self.fn, params)
        )

    def layers(self) -> set[str]:
        """The paths of the layers of a module stage; a function has none."""
        return set(self.fn.layers()) if isinstance(self.fn, Bindable) else set()

    def origins(self) -> Iterable[Origin]:
        """Return the models whose copies compute in this stage."""
        return self.fn.origins() if isinstance(self.fn, Bindable) else ()

    def simple(self) -> list[Stage]:
        """The stages that this one is made of, itself if it is no composition."""
        inner = self.fn.parts() if isinstance(self.fn, Bindable) else ()
        return [simple for part in inner for simple in part.simple()] or [self]

    def __reduce__(self) -> Any:
        location = _importable(self)
        if location:
            return resolve_name, (location,)
        if inspect.isfunction(self.fn) and not _importable(self.fn):
            raise PlanError(
                f"stage {self.name!r} cannot be pickled: its function {self.fn.__qualname__} is "
                "not importable; define it at the top of a module"
            )
        return Stage, tuple(
            getattr(self, each.name) for each in fields(self) if each.name not in ("closed", "seen")
        )


@runtime_checkable
class Divided(Protocol):
    """A model in stages, with what a plan must know of it besides: what `split` gives."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages in order."""
        ...

    @property
    def state(self) -> tuple[Tree, ...]:
        """The state as it was in the model, one tree per stage."""
        ...

    @property
    def loss(self) -> Callable[..., Any] | None:
        """The model's own loss, None for none."""
        ...


def normalise(result: Any) -> Out:
    """What a stage function returned, as an Out."""
    return result if isinstance(result, Out) else Out(result)


def carried(stage: Stage, result: Any) -> Out:
    """What a stage returned, as an Out. Raises PlanError where it returned a carry and takes none,
    or the other way."""
    if stage.carry and not isinstance(result, Out):
        raise PlanError(
            "the stage takes a carry and returned none: return Out(y, carry=...), () for nothing"
        )
    out = normalise(result)
    if not stage.carry and not (out.carry is None or (type(out.carry) is tuple and not out.carry)):
        raise PlanError(
            "the stage returned a carry, and its function takes none: add the keyword carry"
        )
    return out


def side_loss(out: Out) -> tuple[Any, Any] | None:
    """The auxiliary loss of a stage, None for none."""
    loss: Any = out.loss
    return None if isinstance(loss, tuple) and not loss else loss


@overload
def stage(
    fn: StageFn,
    /,
    *,
    name: str = ...,
    stash: Sequence[str] = ...,
    pop: Sequence[str] = ...,
    feeds: Sequence[str] = ...,
    state: bool = ...,
    commit: Commit | None = ...,
) -> Stage: ...
@overload
def stage(
    fn: None = None,
    /,
    *,
    name: str = ...,
    stash: Sequence[str] = ...,
    pop: Sequence[str] = ...,
    feeds: Sequence[str] = ...,
    state: bool = ...,
    commit: Commit | None = ...,
) -> Callable[[StageFn], Stage]: ...
def stage(
    fn: StageFn | None = None,
    /,
    *,
    name: str = "",
    stash: Sequence[str] = (),
    pop: Sequence[str] = (),
    feeds: Sequence[str] = (),
    state: bool = False,
    commit: Commit | None = None,
) -> Stage | Callable[[StageFn], Stage]:
    """Make a stage of a pure function; also a decorator, with or without arguments.

    The function is ``fn(params, x) -> y``, or with what it declares ``fn(params, x, *, skips,
    feeds, state, train, carry) -> Out(y, stash=..., stats=..., loss=..., carry=...)``. With a
    keyword ``carry`` it runs slice after slice of a microbatch that is cut along its sequence, as
    schedules with ``num_slices`` do: each gets what the one before returned as ``Out(carry=...)``,
    the first None.

    >>> @fp.stage(pop=["e1"])
    ... def decoder(params, x, *, skips):
    ...     return params["w"] * (x + skips["e1"])
    >>> decoder({"w": 2.0}, 3.0, skips={"e1": 1.0})
    8.0

    Args:
        fn: the function.
        name: default: the function's own name.
        stash: names of the values that it hands to later stages (``Out(stash={name: tree})``).
        pop: names of the values that it takes from earlier stages; the keyword ``skips`` has them.
        feeds: names of values given with the batch; the keyword ``feeds`` has them.
        state: does it read state; implied by ``commit`` and by a keyword ``state``.
        commit: ``(state, stats: tuple over microbatches) -> state``.

    Raises:
        PlanError: this is no function, or the declaration and the function's keywords do not fit.
    """
    if fn is None:
        return lambda f: stage(
            f, name=name, stash=stash, pop=pop, feeds=feeds, state=state, commit=commit
        )
    if isinstance(fn, Stage):
        raise PlanError(
            f"{fn.name or 'this'!r} is a stage already; say name=, stash=, pop= and the like "
            "where it is made, or make another one of its function: fp.stage(made.fn, ...)"
        )
    check_function(fn)
    label = name or getattr(fn, "__name__", "")
    arguments = arguments_of(fn)
    keywords = keywords_of(arguments or ())
    new = Stage(
        fn,
        "" if label == "<lambda>" else label,
        checked_names(stash, "stash"),
        checked_names(pop, "pop"),
        checked_names(feeds, "feeds"),
        state or commit is not None or "state" in keywords,
        commit,
        takes_train="train" in keywords,
        carry="carry" in keywords,
        closed=captured_values(fn),
    )
    if arguments is not None:
        check_declaration(new, arguments)
    return new


def _importable(value: Any) -> str:
    """``module:name`` under which pickle finds this very object; "" where it does not."""
    fn = value.fn if isinstance(value, Stage) else value
    location = f"{getattr(fn, '__module__', None)}:{getattr(fn, '__qualname__', None)}"
    try:
        return location if resolve_name(location) is value else ""
    except (AttributeError, ImportError, ValueError):
        return ""


def refuse_others(name: str, stages: Iterable[Any], usage: str) -> None:
    """Refuse what is no stage among stages. Raises PlanError."""
    kinds = [type(entry).__name__ for entry in stages if not isinstance(entry, Stage)]
    if kinds:
        raise PlanError(
            f"{name} takes stages, {usage}; among them came: {', '.join(kinds)}; make them with "
            "fp.stage(fn), fp.from_module(module), or fp.split(model, n).stages"
        )


def refuse_changed_models(stages: Iterable[Stage]) -> None:
    """Raise PlanError for stages of models whose attributes have changed since the stages were
    made."""
    for origin in {id(origin): origin for stage in stages for origin in stage.origins()}.values():
        origin.refuse_changes()


def names_of(stages: Iterable[Stage]) -> list[str]:
    """``stage 2 ('decoder')`` for each stage, as errors write it."""
    return [f"stage {i}" + (f" ({s.name!r})" if s.name else "") for i, s in enumerate(stages)]
