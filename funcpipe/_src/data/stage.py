"""Stages: pure functions that declare their stash, pop, feeds and state.

This module makes stages and calls them alone. `lower` decides what a stage receives in a plan.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from functools import partial
from pkgutil import resolve_name
from typing import Any, Protocol, TypeAlias, overload, runtime_checkable

from funcpipe._src.core.captured import captured_values
from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.core.shown import function_words, guarded, line, some
from funcpipe._src.core.tree import Tree, flatten
from funcpipe._src.data.declared import (
    arguments_of,
    check_declaration,
    check_function,
    checked_names,
    keywords_of,
)
from funcpipe._src.data.exchange import entire
from funcpipe._src.data.identity import words_of_function
from funcpipe._src.data.out import Out

StageFn: TypeAlias = Callable[..., Any]
Commit: TypeAlias = Callable[[Tree, tuple[Tree, ...]], Tree]


CARRY = ""
"""The key of a carry among the stashes of a stage during a run. No skip can have an empty name."""


class BoundFn(Protocol):
    """A stage function with its parameters bound. One run calls it from one thread, then drops
    it."""

    @property
    def places(self) -> Mapping[int, str]:
        """The path of each layer, by the id of its module. The path keys the layer's random
        numbers."""
        ...

    def __call__(self, x: Tree, **extras: Any) -> Any:
        """Call the function on one microbatch with the extras that its stage declares."""
        ...

    def release(self) -> None:
        """Drop the parameters at the end of the run."""
        ...


class Origin(Protocol):
    """A model of the user whose copies run inside stages."""

    def refuse_changes(self) -> None:
        """Raise PlanError if the model's attributes have changed since the copy was made."""
        ...

    def replaced(self) -> Mapping[str, Any]:
        """Return the parameters that the model had then, and now has no longer, by their names."""
        ...

    def written_by_forwards(
        self, names: Collection[str], modules: Collection[int]
    ) -> Iterable[str]:
        """Return the paths of attributes with these names that forwards write, in some modules (by
        id)."""
        ...


class Bindable(ABC):
    """A stage function that binds its parameters once per run: a module stage or a composition."""

    @abstractmethod
    def bind(self, params: Tree, state: Tree) -> BoundFn:
        """Bind parameters and state. Raises PlanError if they do not fit the function."""

    def __repr__(self) -> str:
        return str(getattr(self, "who", type(self).__name__))

    def __call__(self, params: Tree, x: Tree, **extras: Any) -> Any:
        """Call the function outside of a run."""
        return self.bind(params, extras.get("state", ()))(x, **extras)

    @property
    def sliceable(self) -> bool:
        """Whether the function can run slices of a sequence. False only if it is known to fail."""
        return True

    def layers(self) -> Iterable[str]:
        """The paths of the layers, which key their random numbers. A composition has no own
        layers."""
        return ()

    def parts(self) -> Iterable[Stage]:
        """The stages that a composition calls."""
        return ()

    def described(self) -> Iterable[tuple[str, str]]:
        """Return (path, words) of the layers, equal in all processes of a program; see
        `identity`."""
        return [entry for part in self.parts() for entry in part.described()]

    def origins(self) -> Iterable[Origin]:
        """Return the models whose copies compute in this stage."""
        return [origin for part in self.parts() for origin in part.origins()]


class _Plain(partial[Any]):
    """A plain function with its parameters bound as first argument."""

    @property
    def places(self) -> Mapping[int, str]:
        """An empty mapping: funcpipe does not know the layers of a plain function."""
        return {}

    def release(self) -> None:
        """Do nothing: the parameters end with this object."""


SCOPE: ContextVar[Stage | None] = ContextVar("funcpipe_scope", default=None)
"""The inner stage of a composition that runs now; None outside of compositions.

Random numbers are keyed by this stage, so an inner stage draws the same numbers as if it ran alone.
"""


@dataclass(frozen=True, eq=False)
class Shared:
    """One parameter that several stages contain. Compared by identity."""

    name: str  # the parameter's name in the model


@dataclass(eq=False)
class StageFacts:
    """Facts that runs found out about a stage, kept so that each fact is looked up once.

    A copy of a stage starts without facts. A mode is True for training and False for evaluation.
    """

    # The modes in which the stage drew random numbers.
    draws: set[bool] = field(default_factory=set)
    # The modes in which the stage's graph had a reentrant checkpoint.
    reentrant: set[bool] = field(default_factory=set)
    # The modes in which a whole run left the stage's parameters unchanged.
    kept: set[bool] = field(default_factory=set)
    # Weak references to leaves of the stage's graph that the run did not create.
    foreign: list[Any] = field(default_factory=list)
    # Weak references to the inputs of the microbatch whose graph a run checked last.
    inputs: list[Any] = field(default_factory=list)
    # Whether the plan's loss after the stage returned weights that were not known before.
    late: bool = False
    # Whether a plan found the globals and closures of the function as they were at the stage's
    # creation.
    settled: bool = False


@dataclass(frozen=True, eq=False)
class Stage:
    """A pure function for one part of a model, with declared stash, pop, feeds and state.

    `stage`, `from_module`, `compose` and `split` make stages. To test a stage, call it outside of a
    pipeline: the call returns the function's result.

    >>> scale = fp.stage(lambda params, x: params * x, name="scale")
    >>> scale(2.0, 3.0)
    6.0

    Attributes:
        fn: the function ``fn(params, x, **declared)``, where ``declared`` are the keywords below.
        name: the name in errors and pictures; "" for none. The name also keys the random numbers of
            a plain function; layers of a module are keyed by their paths.
        stash: names of the values that the stage passes to later stages.
        pop: names of the values that the stage receives from earlier stages, as ``skips``.
        feeds: names of the batch's values that the stage receives besides ``x``, as ``feeds``.
        state: whether the stage reads state, such as running statistics; passed as ``state``.
        commit: ``(state, stats) -> state``, called once per batch; ``stats`` is a tuple with one
            entry per microbatch. None: the state never changes.
        offers: stashed names that no later stage has to pop, because a composition already popped
            them inside.
        takes_train: whether the function takes the keyword ``train``.
        program: the compiled programs that a run calls in place of ``fn``; None: not compiled.
        shares: the parameters that other stages contain too, as (path, shared parameter). A plan
            ties these parameters.
        carry: whether each slice of a microbatch passes a value to the next slice. The value
            arrives as ``carry``, and is None for the first slice.
        evaluation: whether the stage stays in evaluation mode whatever the plan's ``train`` says,
            because its whole module was in that mode.
        closed: the values of the function's free names at the stage's creation. The first plan
            checks that they are unchanged.
        seen: facts that runs found out about the stage.
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
        """Call the function once, outside of a pipeline.

        funcpipe adds no autograd graph of its own, so transforms of torch.func apply.

        Args:
            params: the parameters, any tree.
            x: the input, any tree.
            skips: a tree for each name in ``pop``.
            feeds: a tree for each name in ``feeds``.
            state: the state, if the stage reads one.
            train: the value of the keyword ``train``, if the function takes it.
            carry: the carry of the previous slice, if the stage has one; None for the first slice.

        Returns:
            The function's result: the output, or an `Out`.

        Raises:
            PlanError: a declared skip, a declared feed or the state is missing.
        """
        skips, feeds = skips or {}, feeds or {}
        missing = [f"skips={{{name!r}: ...}}" for name in self.pop if name not in skips]
        missing += [f"feeds={{{name!r}: ...}}" for name in self.feeds if name not in feeds]
        missing += ["state=..."] if self.state and state is None else []
        if missing:
            raise PlanError(
                f"stage {self.name!r} declares more than it was given; add " + ", ".join(missing)
            )
        refuse_changed_models([self], params)
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
        """Return the keyword arguments for the function: only those that the stage declares."""
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
        """Return the function with parameters and state bound, for one run."""
        if isinstance(self.fn, Bindable):
            return self.fn.bind(params, state)
        return _Plain(self.fn, params)

    def layers(self) -> set[str]:
        """Return the paths of a module stage's layers; an empty set for a plain function."""
        return set(self.fn.layers()) if isinstance(self.fn, Bindable) else set()

    def described(self) -> Iterable[tuple[str, str]]:
        """Return (path, words) of the layers; for a plain function, its name."""
        if isinstance(self.fn, Bindable):
            return self.fn.described()
        return [("", words_of_function(self.fn))]

    def origins(self) -> Iterable[Origin]:
        """Return the models whose copies compute in this stage."""
        return self.fn.origins() if isinstance(self.fn, Bindable) else ()

    def simple(self) -> list[Stage]:
        """Return the innermost stages of a composition; for other stages, a list of this stage."""
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
    """A model cut into stages, with the state and the loss that a plan needs. `split` returns
    one."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages in order."""
        ...

    @property
    def state(self) -> tuple[Tree, ...]:
        """The state of the model at the time of the split, one tree per stage."""
        ...

    @property
    def loss(self) -> Callable[..., Any] | None:
        """The model's own loss; None if it has none."""
        ...


def normalise(result: Any) -> Out:
    """Return the result of a stage function as an `Out`."""
    return result if isinstance(result, Out) else Out(result)


def carried(stage: Stage, result: Any) -> Out:
    """Return the result of a stage as an `Out`.

    Raises PlanError if the stage takes a carry but returned none, or returned a carry that it does
    not take.
    """
    if stage.carry and not isinstance(result, Out):
        raise PlanError(
            "the stage takes a carry and returned none: return Out(y, carry=...), with carry=() "
            "for an empty carry"
        )
    out = normalise(result)
    if not stage.carry and not (out.carry is None or (type(out.carry) is tuple and not out.carry)):
        raise PlanError(
            "the stage returned a carry but its function does not take one: add the keyword "
            "argument carry to the function"
        )
    return out


def refuse_uncommitted(stage: Stage, stats: Tree) -> None:
    """Raise PlanError if a stage returned statistics that no commit folds: they would be lost."""
    if stage.commit is None and stats is not None and flatten(stats)[0]:
        raise PlanError(
            "the stage returned statistics (Out(stats=...)), but it has no commit, so they would "
            "be lost; give one: fp.stage(..., commit=(state, stats) -> state)"
        )


def side_loss(out: Out) -> tuple[Any, Any] | None:
    """Return the auxiliary loss of a stage as (sum, weight); None if there is none."""
    loss: Any = out.loss
    # Full tensors: the float() of a DTensor with the placement Partial is that of its local part.
    return (tuple(map(entire, loss)) or None) if isinstance(loss, tuple) else loss  # pyright: ignore


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
    """Make a stage from a pure function; usable as a decorator, with or without arguments.

    The simplest function is ``fn(params, x) -> y``. A function can also take the keywords
    ``skips``, ``feeds``, ``state``, ``train`` and ``carry``, and return an `Out`.

    A function with the keyword ``carry`` can run slices: parts of a microbatch along its sequence,
    as in schedules with ``num_slices``. Each slice receives the value that the previous slice
    returned as ``Out(carry=...)``. The first slice receives None.

    >>> @fp.stage(pop=["e1"])
    ... def decoder(params, x, *, skips):
    ...     return params["w"] * (x + skips["e1"])
    >>> decoder({"w": 2.0}, 3.0, skips={"e1": 1.0})
    8.0

    Args:
        fn: the function.
        name: the name of the stage; by default the function's own name.
        stash: names of the values that the stage passes to later stages
            (``Out(stash={name: tree})``). Default: none.
        pop: names of the values that the stage receives from earlier stages, as a dict in the
            keyword ``skips``. Default: none.
        feeds: names of values of the batch that the stage receives, as a dict in the keyword
            ``feeds``. Default: none.
        state: whether the stage reads state. A ``commit`` or a keyword ``state`` implies True.
        commit: ``(state, stats) -> state``, called once per batch; ``stats`` is a tuple with one
            entry per microbatch. Its random numbers depend on the seed of the run. None: the state
            never changes.

    Returns:
        The stage. Without ``fn``: a decorator that makes a stage.

    Raises:
        PlanError: ``fn`` is not a function, or its arguments do not match the declaration.
    """
    if fn is None:
        return lambda f: stage(
            f, name=name, stash=stash, pop=pop, feeds=feeds, state=state, commit=commit
        )
    if isinstance(fn, Stage):
        raise PlanError(
            f"{fn.name or 'this'!r} is a stage already; pass name=, stash=, pop= and the other "
            "options where that stage is made, or make another stage from its function: "
            "fp.stage(made.fn, ...)"
        )
    check_function(fn)
    label = name or getattr(fn, "__name__", "")
    arguments = arguments_of(fn)
    keywords = keywords_of(arguments or ())
    # All lambdas have the same name, which would give their stages the same random numbers.
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
    """Return the ``module:name`` under which pickle finds this object; "" if pickle cannot."""
    fn = value.fn if isinstance(value, Stage) else value
    location = f"{getattr(fn, '__module__', None)}:{getattr(fn, '__qualname__', None)}"
    try:
        return location if resolve_name(location) is value else ""
    except (AttributeError, ImportError, ValueError):
        return ""


def refuse_others(name: str, stages: Iterable[Any], usage: str) -> None:
    """Raise PlanError if some of the given objects are not stages."""
    kinds = [type(entry).__name__ for entry in stages if not isinstance(entry, Stage)]
    if kinds:
        raise PlanError(
            f"{name} takes stages, {usage}; got other objects: {', '.join(kinds)}; make stages "
            "with fp.stage(fn), fp.from_module(module), or fp.split(model, n).stages"
        )


def refuse_changed_models(stages: Iterable[Stage], params: Tree) -> None:
    """Raise PlanError if a model has changed since its stages were made.

    Changed are attributes, or parameters of which ``params`` still has the old tensors. Stages can
    run with other tensors than the model's, so a replaced parameter alone is no error.
    """
    for origin in {id(origin): origin for stage in stages for origin in stage.origins()}.values():
        origin.refuse_changes()
        if replaced := origin.replaced():
            given = {id(leaf) for leaf in flatten(params)[0]}
            raise_all(
                "the model has other parameters than at the time of its split, and would not be "
                "trained, because params has the old tensors; make the stages and the plan again "
                "(fp.split(model, ...), fp.from_module(model)), or copy numbers into the old "
                "parameters (model.load_state_dict(...) without assign=True):",
                [f"{name} is another tensor" for name, old in replaced.items() if id(old) in given],
            )


def names_of(stages: Iterable[Stage]) -> list[str]:
    """Return ``stage 2 ('decoder')`` for each stage, as errors write it."""
    return [f"stage {i}" + (f" ({s.name!r})" if s.name else "") for i, s in enumerate(stages)]
