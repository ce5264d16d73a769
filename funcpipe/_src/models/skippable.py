"""Stash values by name in one layer of a model and pop them in a later layer.

In a plan, the store of skips belongs to the call of a stage. Otherwise it belongs to the outermost
call of a module.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import torch
from torch import nn

from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.core.frames import MODULE_CALL, frames, own_dict
from funcpipe._src.core.torch_names import backward_number, children_of
from funcpipe._src.core.tree import Tree, cow_clone, map_tensors
from funcpipe._src.data.stage import Out, checked_names

_Class = TypeVar("_Class", bound=type[nn.Module])

_number = itertools.count()


@dataclass(init=False, repr=False, order=True, unsafe_hash=True, slots=True)
class Namespace:
    """A key that separates skips with equal names: ``Layer().isolate(Namespace())``.

    Skips without a namespace have the namespace None. Namespaces are values: a copy or a pickle
    equals its original, and two namespaces with the same name are equal. A namespace without a name
    equals no other namespace and gets a number as its name. If several processes build the same
    model, give names, so that the plans can be compared.

    >>> fp.models.Namespace("deep") == fp.models.Namespace("deep"), fp.models.Namespace() == fp.models.Namespace()
    (True, False)

    Args:
        name: a string without "/". Plans and errors show a skip as ``deep/skip``. "", the default:
            a new, unique namespace.

    Attributes:
        name: the given name, or the number as ``ns0``.

    Raises:
        PlanError: the name is not a string, or contains "/".
    """

    name: str
    _unique: str

    def __init__(self, name: str = "") -> None:
        if not isinstance(name, str) or "/" in name:
            raise PlanError(f"the name of a namespace is a str without '/'; got {name!r}")
        self.name = name or f"ns{next(_number)}"
        self._unique = "" if name else uuid.uuid4().hex

    def __repr__(self) -> str:
        return f"Namespace({self.name!r})"


Key: TypeAlias = tuple[Namespace | None, str]
Store: TypeAlias = dict[Key, Tree]


def label(key: Key) -> str:
    """The name of a skip outside of its module: its namespace if it has one, and its own name."""
    namespace, name = key
    return name if namespace is None else f"{namespace.name}/{name}"


class stash(NamedTuple):
    """A command that hands a value to later layers: ``yield stash(name, value)``.

    Use it in the forward of a `skippable` module. A later write into the tensors in place does not
    change the stashed value.

    >>> @fp.models.skippable(stash=["early"])
    ... class Encoder(nn.Module):
    ...     def forward(self, x):
    ...         yield fp.models.stash("early", x)
    ...         return x * 2

    Attributes:
        name: a name that the class declares in ``skippable(stash=)``.
        value: any tree of tensors, or None.
    """

    name: str
    value: Tree


class pop(NamedTuple):
    """A command that takes the value of an earlier layer: ``value = yield pop(name)``.

    Use it in the forward of a `skippable` module. Each layer that pops gets its own copy-on-write
    value, so it may write into the value.

    >>> @fp.models.skippable(pop=["early"])
    ... class Decoder(nn.Module):
    ...     def forward(self, x):
    ...         early = yield fp.models.pop("early")
    ...         return x + early

    Attributes:
        name: a name that the class declares in ``skippable(pop=)``.
    """

    name: str


class Declared(NamedTuple):
    """The declaration of a skippable class."""

    stash: tuple[str, ...]
    pop: tuple[str, ...]
    forward: Callable[..., Any]  # the driver that replaces the class's own forward
    here: bool  # whether the class itself has the decorator; False: inherited


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[_Class], _Class]:
    """Declare the values that a module hands to later layers, or takes from earlier layers.

    A class decorator. Parameter names, pickles and ``isinstance`` work as before. The forward of
    the class has one of two forms:

    - a generator that yields `stash` and `pop` commands;
    - a function that takes the popped values as the keyword ``skips`` and returns ``Out(y,
      stash={...})``.

    In a plan, a skip crosses the border of a stage only if another stage stashes or pops it.
    Without a plan, in ``nn.Sequential(...)(x)``, skips exist until the call of the outermost module
    ends.

    >>> @fp.models.skippable(stash=["early"])
    ... class Encoder(nn.Module):
    ...     def forward(self, x):
    ...         yield fp.models.stash("early", x)
    ...         return x * 2
    >>> @fp.models.skippable(pop=["early"])
    ... class Decoder(nn.Module):
    ...     def forward(self, x, *, skips):
    ...         return x + skips["early"]
    >>> nn.Sequential(Encoder(), nn.ReLU(), Decoder())(torch.tensor([1.0, -1.0]))
    tensor([ 3., -1.])

    The decorator adds a method ``isolate(ns, *, only=None) -> self``. It puts the module's skips,
    or only the named skips, into a `Namespace`. So a block with skips inside can occur in a model
    twice.

    A subclass inherits the declaration, and its own decorator replaces the inherited declaration.
    In a subclass, ``super().forward(x)`` calls the forward as it was written. For a generator,
    write ``y = yield from super().forward(x)``.

    Args:
        stash: names that the module stashes, each in every call.
        pop: names that the module pops, each in every call.

    Returns:
        The decorator.

    Raises:
        PlanError: the decorated object is not a module class, or is already skippable. funcpipe
            finds stashes and pops that do not match when it makes stages of a model.
    """
    names = _names(stash, "stash"), _names(pop, "pop")

    def decorate(cls: _Class) -> _Class:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise PlanError(f"skippable decorates a class of modules; got {cls!r}")
        inherited: Declared | None = getattr(cls, "_skips", None)
        if "_skips" in vars(cls) and inherited is not None and inherited.here:
            raise PlanError(
                f"{cls.__name__} is skippable already: declare everything in one decorator, or "
                "decorate a subclass of it"
            )
        _install(cls, *names, here=True)
        cls.isolate = _isolate  # pyright: ignore[reportAttributeAccessIssue]
        if inherited is None:
            _watch_subclasses(cls)
        return cls

    return decorate


def _names(names: Iterable[str], keyword: str) -> tuple[str, ...]:
    unique = tuple(dict.fromkeys(checked_names(names, keyword)))
    if wrong := [name for name in unique if not isinstance(name, str)]:
        raise PlanError(f"the names in {keyword}= are strings; got {wrong}")
    return unique


def _install(
    cls: type[nn.Module], stash: tuple[str, ...], pop: tuple[str, ...], *, here: bool
) -> None:
    """Replace the class's forward by a driver that executes the skip commands."""
    raw: Callable[..., Any] = cls.forward
    # An inherited forward may be a driver already. A driver around a driver would run each command
    # twice.
    raw = getattr(raw, "_written", raw)
    takes_skips = "skips" in inspect.signature(raw).parameters

    @functools.wraps(raw)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        declared: Declared = type(self)._skips  # pyright: ignore
        if declared.forward is not forward:  # a subclass calls super().forward
            return raw(self, *args, **kwargs)
        call = _LayerCall(self, declared, current())
        if takes_skips:
            kwargs["skips"] = {name: call.pop(name) for name in declared.pop}
        result = raw(self, *args, **kwargs)
        if inspect.isgenerator(result):
            result = call.drive(result)
        return call.finish(result)

    vars(forward)["_written"] = raw
    cls.forward = forward
    cls._skips = Declared(stash, pop, forward, here)  # pyright: ignore[reportAttributeAccessIssue]


def _watch_subclasses(cls: type[nn.Module]) -> None:
    """Install the driver also in subclasses that define their own forward."""
    original = vars(cls).get("__init_subclass__")

    def __init_subclass__(sub: type[nn.Module], **kwargs: Any) -> None:
        if original is not None:
            original.__get__(None, sub)(**kwargs)
        else:
            super(cls, sub).__init_subclass__(**kwargs)
        if "forward" in vars(sub):
            inherited: Declared = sub._skips  # pyright: ignore
            _install(sub, inherited.stash, inherited.pop, here=False)

    cls.__init_subclass__ = classmethod(__init_subclass__)  # pyright: ignore


def _isolate(
    self: nn.Module, ns: Namespace | None, *, only: str | Iterable[str] | None = None
) -> nn.Module:
    """Put the skips of this module, or those in ``only``, into a namespace."""
    if ns is not None and not isinstance(ns, Namespace):
        raise PlanError(
            f"isolate takes a namespace; got {ns!r}. Make one with fp.models.Namespace() or "
            "fp.models.Namespace('name')"
        )
    declared: Declared = type(self)._skips  # pyright: ignore
    known = (*declared.stash, *declared.pop)
    names = known if only is None else (only,) if isinstance(only, str) else tuple(only)
    if unknown := [name for name in names if name not in known]:
        raise PlanError(
            f"{type(self).__name__} has no skips {unknown} to isolate; it declares {list(known)}"
        )
    vars(self)["_namespaces"] = {**_namespaces(self), **dict.fromkeys(names, ns)}
    return self


def _namespaces(layer: nn.Module) -> dict[str, Namespace | None]:
    return vars(layer).get("_namespaces", {})


def _key(layer: nn.Module, name: str) -> Key:
    return (_namespaces(layer).get(name), name)


# -- the store
# -------------------------------------------------------------------------------


_OPEN: ContextVar[Store | None] = ContextVar("funcpipe_skips", default=None)


class carrying:
    """A context in which layers on this thread stash into and pop from one store."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __enter__(self) -> Self:
        self.token = _OPEN.set(self.store)
        return self

    def __exit__(self, *error: object) -> None:
        _OPEN.reset(self.token)


def current() -> Store:
    """Return the store for the layer that is running now.

    Outside of a stage no hook marks where a call of the model begins and ends, and an aborted call
    must leave nothing to the next call. So the store is a local of the outermost module call on the
    Python stack, and disappears when that call ends.
    """
    store = _OPEN.get()
    if store is not None:
        return store
    if torch.compiler.is_dynamo_compiling():  # dynamo cannot trace code that reads the stack
        uncompiled: Any = torch.compiler.disable(_of_the_call)
        return uncompiled()
    return _of_the_call()


def _of_the_call() -> Store:
    outermost = None
    for frame in frames():
        if frame.f_code is MODULE_CALL:
            outermost = frame
    if outermost is None:
        return Store()  # layer.forward(x) was called directly: no other layer can pop
    return own_dict(outermost).setdefault(_STORE, Store())


_STORE = object()
"""The key of the store in a frame's locals. An object, so it cannot equal the name of an
argument."""


# -- one call of a layer
# -------------------------------------------------------------------------------


class _LayerCall:
    """One call of a skippable layer, which compares the commands with the declaration."""

    def __init__(self, layer: nn.Module, declared: Declared, store: Store) -> None:
        self.layer, self.declared, self.store = layer, declared, store
        self.done: set[tuple[str, str]] = set()

    def _note(self, verb: str, name: str, declared: Sequence[str]) -> None:
        """Note a command. Raises PlanError for a name that is not declared."""
        if name not in declared:
            does = {"stash": "stashes", "pop": "pops"}[verb]
            raise PlanError(
                f"{self._who} {does} {name!r} without declaring it: "
                f"@fp.models.skippable({verb}=[{name!r}])"
            )
        self.done.add((verb, name))

    def stash(self, name: str, value: Tree) -> None:
        self._note("stash", name, self.declared.stash)
        # A copy-on-write clone: the layer may still write into its own tensors.
        self.store[_key(self.layer, name)] = map_tensors(cow_clone, value)

    def pop(self, name: str) -> Tree:
        self._note("pop", name, self.declared.pop)
        key = _key(self.layer, name)
        if key in self.store:
            return map_tensors(cow_clone, self.store[key])
        if backward_number() != -1:
            raise PlanError(
                f"{self._who} pops {label(key)!r} in a backward: torch.utils.checkpoint computes "
                "the layer again there, when its skip no longer exists; pop outside of the "
                "checkpointed part and pass the value in, or use fp.schedules.remat for the stage"
            )
        stashed = sorted(map(label, self.store))
        raise PlanError(
            f"{self._who} pops {label(key)!r}, but no layer stashed it before (stashed so far: "
            f"{stashed}); call both layers within one module, such as nn.Sequential(...), or make "
            "them stages of one plan"
        )

    def drive(self, generator: Generator[Any, Any, Any]) -> Any:
        """Run a generator forward. A fault in a command is raised at the line of its ``yield``."""
        resume: Callable[[Any], Any] = generator.send
        value: Any = None
        while True:
            try:
                command = resume(value)
            except StopIteration as stop:
                return stop.value
            finally:
                # This frame is in the error's traceback. A reference here would keep the error
                # alive by a cycle, and a skip longer than the forward needs it.
                value = None
            try:
                resume, value = generator.send, self._obey(command)
            except PlanError as error:
                resume, value = generator.throw, error

    def _obey(self, command: Any) -> Tree:
        if isinstance(command, stash):
            return self.stash(*command)
        if isinstance(command, pop):
            return self.pop(*command)
        raise PlanError(
            f"{self._who} yields a {type(command).__name__}; it may yield fp.models.stash(name, "
            "value) and fp.models.pop(name)"
        )

    def finish(self, result: Any) -> Any:
        """Return the layer's output, once the forward did all that it declares."""
        if isinstance(result, Out):
            for name, value in result.stash.items():
                self.stash(name, value)
            if result.stats != () or (result.loss is not None and result.loss != ()):
                raise PlanError(
                    f"{self._who} returns stats or a loss in its Out; a layer returns Out(y, "
                    f"stash={{...}})"
                )
            result = result.y
        faults = [
            f"declares {verb} {name!r} but did not {verb} it"
            for verb, names in (("stash", self.declared.stash), ("pop", self.declared.pop))
            for name in names
            if (verb, name) not in self.done
        ]
        raise_all(
            f"{self._who} did not do what it declares (yield fp.models.stash(name, value), value "
            f"= yield fp.models.pop(name), or Out(y, stash={{...}}) and a keyword skips): it",
            faults,
        )
        return result

    @property
    def _who(self) -> str:
        return type(self.layer).__name__


# -- the skips of a whole module
# -------------------------------------------------------------------------------


class Skips(NamedTuple):
    """The skips of a module, by the names that its stage uses."""

    stash: Mapping[str, Key]  # stashed inside and popped by no layer inside
    pop: Mapping[str, Key]  # popped inside and stashed by no layer inside
    offers: Mapping[str, Key]  # stashed and popped inside; later stages may pop them too
    inside: bool  # whether any layer stashes or pops


def skips_of(module: nn.Module, *, whole: bool = False) -> Skips:
    """Collect the stashes and pops of a module's layers at any depth, in the order of registration.

    Raises PlanError for all faults. ``whole``: each stash needs a pop inside, and the reverse.
    """
    stashes: dict[Key, str] = {}
    pops: list[tuple[Key, str]] = []
    faults: list[str] = []

    def where(path: str) -> str:
        kind = type(module.get_submodule(path)).__name__
        return f"{path!r} ({kind})" if path else kind

    for path, layer in module.named_modules(remove_duplicate=False):
        declared: Declared | None = getattr(type(layer), "_skips", None)
        if declared is None:
            continue
        both = [name for name in declared.stash if name in declared.pop]
        faults += [
            f"{where(path)} both stashes and pops {label(_key(layer, name))!r}" for name in both
        ]
        for key in (_key(layer, name) for name in declared.stash if name not in both):
            if key in stashes:
                faults.append(
                    f"{where(path)} stashes {label(key)!r} again, which {stashes[key]!r} "
                    "already stashes; separate them: isolate(fp.models.Namespace())"
                )
            stashes.setdefault(key, path)
        pops += [(_key(layer, name), path) for name in declared.pop if name not in both]
    for key, path in pops:
        if key in stashes and _before(module, path, stashes[key]):
            faults.append(
                f"{where(path)} pops {label(key)!r}, but only {stashes[key]!r}, which comes later, "
                "stashes it"
            )
        elif whole and key not in stashes:
            faults.append(f"{where(path)} pops {label(key)!r}, but no layer stashes it")
    popped = {key for key, _ in pops}
    faults += [
        f"{where(path)} stashes {label(key)!r}, but no layer pops it"
        for key, path in stashes.items()
        if whole and key not in popped
    ]
    faults += _ambiguous([*stashes, *popped])
    raise_all("stash and pop do not match:", faults)
    return Skips(
        {label(key): key for key in stashes if key not in popped},
        {label(key): key for key, _ in pops if key not in stashes},
        {label(key): key for key in stashes if key in popped},
        bool(stashes or pops),
    )


def _before(module: nn.Module, first: str, second: str) -> bool:
    """Whether one layer surely runs before another: a Sequential is innermost around both."""
    common = module
    for a, b in zip(first.split("."), second.split("."), strict=False):
        if a != b:
            order = list(children_of(common))
            return isinstance(common, nn.Sequential) and order.index(a) < order.index(b)
        common = common.get_submodule(a)
    return False  # one path contains the other, so their order is unknown


def _ambiguous(keys: list[Key]) -> list[str]:
    """List a fault for each name that several skips share."""
    by_label: dict[str, Key] = {}
    unlike = {label(key) for key in keys if by_label.setdefault(label(key), key) != key}
    advice = "give their namespaces different names: fp.models.Namespace('name')"
    return [f"two skips have the same name {name!r}; {advice}" for name in sorted(unlike)]
