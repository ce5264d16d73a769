"""Record the attributes of modules at one time, to find later changes: `ModuleAttributes`.

Stages compute with copies of modules, so later changes of the originals do not reach the stages.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from functools import partial
from itertools import chain, count
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from funcpipe._src.core.errors import raise_all
from funcpipe._src.core.torch_names import (
    FLAT_WEIGHTS,
    TABLES,
    buffers_of,
    children_of,
    parameters_of,
)
from funcpipe._src.models.attribute_uses import AttributeUses, uses_of
from funcpipe._src.models.norms.norm_layers import is_deferrable
from funcpipe._src.models.norms.written_buffers import version

_NUMBERS_AND_TEXTS = (str, bytes, int, float, complex, torch.Size, torch.dtype, torch.device)

_PLAIN = (*_NUMBERS_AND_TEXTS, tuple, list, frozenset, range)
"""Types that are compared by equality. All other values are the same only if they are the same
object."""

OPAQUE = (
    *(*_NUMBERS_AND_TEXTS, type, Enum, FunctionType, BuiltinFunctionType, ModuleType),
    *(logging.Logger, nn.Parameter, *weakref.ProxyTypes),
)
"""Types without contents that a copy could miss: for example, a copy of a function is the
function itself."""

_MISSING, _WRITTEN = object(), object()
_APART = frozenset({"training", FLAT_WEIGHTS, "_compiled_call_impl", *TABLES})
"""Attributes of modules that are not settings: tensors, and modes, which a run sets itself."""


_FILLED_IN = frozenset({"problem_type"})
"""Settings that transformers writes into a configuration in the first call with labels. A user
may make that call at any time."""


class Change(NamedTuple):
    """One attribute that has changed."""

    place: str  # the path, such as ``"0.temperature"`` or ``"0.cfg['scale']"``
    name: str  # the module's attribute that contains the changed value
    uses: AttributeUses  # in that module's forward
    old: Any  # a sentinel where there is no value, as in `new`
    new: Any

    def __str__(self) -> str:
        if isinstance(self.new, Tensor) and self.old is _WRITTEN:
            return f"{self.place} was written to"
        absent = [value is _MISSING for value in (self.old, self.new)]
        if any(absent):
            return f"{self.place} was {'set' if absent[0] else 'deleted'}"
        old, new = _shown(self.old), _shown(self.new)
        return (
            f"{self.place} was {old}, is {new}"
            if old != new
            else f"{self.place} is another {type(self.new).__name__}"
        )


class _Weak(weakref.ref[Any]):
    """A weak reference that also keeps the name of the class, for messages."""

    __slots__ = ("kind",)
    kind: str

    def __new__(cls, value: Any) -> Self:
        """Refer to a module or a parameter."""
        made = super().__new__(cls, value)
        made.kind = type(value).__name__
        return made


class _NotedModule(NamedTuple):
    """The recorded class, children and parameters of one module. None: a child that is None."""

    path: str
    reference: weakref.ref[nn.Module]
    kind: type
    children: Mapping[str, _Weak | None]
    parameters: Mapping[str, _Weak | None]


class _Noted(NamedTuple):
    """The recorded contents of one module, object or container."""

    place: str  # as `name` and `uses` in `Change`
    name: str  # empty for the table of a module
    uses: AttributeUses
    contents: Callable[[], Mapping[Any, Any] | None]  # None after the module's end
    size: int
    keys: tuple[Any, ...]
    values: tuple[Any, ...]


class ModuleAttributes:
    """A record of a model's attributes at the time of construction, at any depth.

    `changes` compares plain values by equality, objects by identity and by their attributes, and
    tensors by their count of writes. Numbers in parameters and buffers, and training flags, are not
    compared. `replaced` compares parameters by identity. References to modules and parameters are
    weak.

    Args:
        model: a module, with all modules inside.
        all_names: True: also record attributes that forwards write.
    """

    def __init__(self, model: nn.Module, *, all_names: bool = False) -> None:
        self.who, self.all_names = type(model).__name__, all_names
        self.layers: list[_NotedModule] = []
        self.tables: list[_Noted] = []
        self.empty: list[Any] = []  # containers without contents, most of them tables of hooks
        self.tensors: list[tuple[str, str, AttributeUses, Tensor, int]] = []
        self.seen: set[int] = set()
        # Keeps values alive: otherwise a new object could get an id that is in `seen`.
        self.kept: list[Any] = []
        modules = dict(model.named_modules())
        # The path in the model names a module, not an attribute that also leads to it.
        self.own = {id(module) for module in modules.values()}
        for path, module in modules.items():
            self._module(path, module)
        self.seen, self.kept, self.own = set(), [], set()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleAttributes:
        return self

    def __reduce__(self) -> Any:
        # A copy in another process has no original to compare with.
        return ModuleAttributes, (nn.Module(),)

    # -- noting
    # -------------------------------------------------------------------------------

    def _module(self, path: str, module: nn.Module) -> None:
        if id(module) in self.seen:
            return
        self.seen.add(id(module))
        uses, reference = uses_of(type(module)), weakref.ref(module)
        tables = children_of(module), parameters_of(module)
        weak = [
            {name: None if each is None else _Weak(each) for name, each in table.items()}
            for table in tables
        ]
        self.layers.append(_NotedModule(path, reference, type(module), *weak))
        self._table(path, "", uses, partial(_attributes_of, reference))
        for name, value in vars(module).items():
            # A forward changes the attributes that it writes in each call, so they are not
            # settings. Strings are: PEFT lists merged adapters, and its forward may unmerge them.
            compared = self.all_names or name not in uses.written or _has_strings(value)
            if name not in _APART and compared:
                self._walk(value, _joined(path, name), name, uses)

    def _walk(self, value: Any, place: str, name: str, uses: AttributeUses) -> None:
        """Record the contents of a value, and of values inside."""
        if value is None or issubclass(type(value), OPAQUE) or id(value) in self.seen:
            return
        # Equality compares a flat tuple, so its contents need no record.
        if isinstance(value, (tuple, frozenset)) and all(
            each is None or isinstance(each, OPAQUE) for each in value
        ):  # pyright: ignore[reportUnknownVariableType]
            return
        if isinstance(value, nn.Module):
            for path, module in value.named_modules():
                if id(module) not in self.own:
                    self._module(f"{place}.{path}" if path else place, module)
            return
        self.seen.add(id(value))
        self.kept.append(value)
        if isinstance(value, Tensor):
            self.tensors.append((place, name, uses, value, version(value)))
        elif isinstance(value, (dict, list, set, deque)) and not value:  # pyright: ignore[reportUnknownArgumentType]
            self.empty.append((place, name, uses, value))
        # Objects of torch and of this package change their attributes themselves.
        elif not type(value).__module__.startswith(("torch.", "funcpipe.")):
            self._table(place, name, uses, partial(contents_of, value))

    def _table(
        self, place: str, name: str, uses: AttributeUses, contents: Callable[[], Any]
    ) -> None:
        now: Mapping[Any, Any] | None = contents()
        if now is None:
            return
        keys = tuple(key for key in now if name or key not in TABLES)
        # Weak references: the record of a model must not keep the model's tensors alive.
        values = tuple(_weakly(now[key]) for key in keys)
        self.tables.append(_Noted(place, name, uses, contents, len(now), keys, values))
        if name:
            for key, value in now.items():
                if self.all_names or key not in uses.written:
                    self._walk(value, place_inside(place, key), name, uses)

    # -- looking
    # -------------------------------------------------------------------------------

    def refuse_changes(self) -> None:
        """Raise PlanError if the model has changed."""
        raise_all(
            f"attributes of this {self.who} were changed after stages were made of it, but stages "
            "compute with copies, which do not have the changes; make the stages again, and the "
            "plan (fp.split(model, ...), fp.from_module(model); split.load_state_dict(...) and "
            "params= keep the numbers), or undo the changes:",
            [str(change) for change in self.changes()],
        )

    def replaced(self) -> dict[str, Tensor]:
        """Return the recorded parameters that the model has no longer, by the model's names."""
        out: dict[str, Tensor] = {}
        for layer, module in self._existing():
            now = parameters_of(module)
            # Fast path, because each run compares all parameters.
            if not layer.parameters or _are_same(layer.parameters, now):
                continue
            for name, weak in layer.parameters.items():
                old = _alive(weak)
                if old is not None and now.get(name) is not old:
                    out[_joined(layer.path, name)] = old
        return out

    def written_by_forwards(
        self, names: Collection[str], modules: Collection[int]
    ) -> Iterable[str]:
        """Return the paths of attributes with these names that forwards write, in some modules (by
        id). Among them are the running statistics of batch norm."""
        found: list[str] = []
        for layer, module in self._existing():
            if id(module) in modules:
                statistics = buffers_of(module) if is_deferrable(module) else {}
                written = uses_of(type(module)).written.union(statistics).intersection(names)
                found += [_joined(layer.path, name) for name in sorted(written)]
        return found

    def _existing(self) -> Iterator[tuple[_NotedModule, nn.Module]]:
        """Yield the recorded modules that still exist."""
        for layer in self.layers:
            if (module := layer.reference()) is not None:
                yield layer, module

    def changes(self) -> Iterator[Change]:
        """Yield the changes since construction."""
        for layer, module in self._existing():
            if type(module) is not layer.kind:
                place = _joined(layer.path, "__class__")
                kinds = layer.kind.__name__, type(module).__name__
                yield Change(place, "__class__", uses_of(layer.kind), *kinds)
            now = children_of(module)
            if _are_same(layer.children, now):
                continue
            for name in dict.fromkeys((*layer.children, *now)):
                old, new = layer.children.get(name, _MISSING), now.get(name, _MISSING)
                if _alive(old) is not new:
                    place, uses = _joined(layer.path, name), uses_of(type(module))
                    yield Change(place, name, uses, old, new)
        for table in self.tables:
            now = table.contents()
            if now is None or (
                len(now) == table.size and all(map(is_, map(now.get, table.keys), table.values))
            ):
                continue
            before = dict(zip(table.keys, table.values, strict=True))
            for key in dict.fromkeys((*table.keys, *now)):
                old, new = before.get(key, _MISSING), now.get(key, _MISSING)
                if not _same(old, new) and self._counts(table, key, old, new):
                    place = place_inside(table.place, key)
                    yield Change(place, table.name or key, table.uses, old, new)
        for place, name, uses, container in self.empty:
            is_setting = self.all_names or name not in uses.written or _has_strings(container)
            if container and is_setting:
                yield Change(place, name, uses, type(container)(), container)
        for place, name, uses, tensor, writes in self.tensors:
            if version(tensor) != writes:
                yield Change(place, name, uses, _WRITTEN, tensor)

    def _counts(self, table: _Noted, key: Any, old: Any, new: Any) -> bool:
        """Return whether a changed attribute is a setting, not a value that a forward leaves."""
        if table.name:
            return self.all_names or not (
                key in table.uses.written or (key in _FILLED_IN and old is None)
            )
        if key in _APART or self.all_names:
            return key not in _APART
        if key in table.uses.written:
            return isinstance(old, str) and isinstance(new, str)
        # Other new attributes that no forward mentions come from hooks or callers.
        return old is not _MISSING or key in table.uses.mentioned or key == "forward"


def _has_strings(value: Any) -> bool:
    """Return whether a value is a list or a set of strings alone; also if it is empty."""
    return isinstance(value, (list, set)) and all(isinstance(each, str) for each in value)  # pyright: ignore[reportUnknownVariableType]


def _alive(value: Any) -> Any:
    """Return the object of a weak reference, None after its end; any other value as it is."""
    return value() if isinstance(value, _Weak) else value


def _are_same(before: Mapping[str, _Weak | None], now: Mapping[str, Any]) -> bool:
    """Return whether two tables have the same objects."""
    return len(now) == len(before) and all(map(is_, map(_alive, before.values()), now.values()))


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def contents_of(value: Any) -> Mapping[Any, Any]:
    """Return the contents of a container or an object, by key or name."""
    if isinstance(value, dict):
        return value  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, (list, tuple, deque)):
        return dict(zip(count(), value, strict=False))  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, (set, frozenset)):
        return dict.fromkeys(value, True)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords, **vars(value)}
    if isinstance(value, MethodType):
        return {"__self__": value.__self__}
    if type(value).__module__ == "numpy":
        return {"numbers": value.tobytes(), "shape": getattr(value, "shape", ())}
    slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    names = chain.from_iterable((each,) if isinstance(each, str) else each for each in slots)
    slotted = {
        name: getattr(value, name)
        for name in names
        if hasattr(value, name) and not name.startswith("__")
    }
    named: Mapping[str, Any] = getattr(value, "__dict__", {})
    return {**slotted, **named} if slotted else named


def _attributes_of(reference: weakref.ref[nn.Module]) -> Mapping[str, Any] | None:
    module = reference()
    return None if module is None else vars(module)


def _weakly(value: Any) -> Any:
    """Return a value to compare with later: modules and parameters as weak references."""
    return _Weak(value) if isinstance(value, (nn.Module, nn.Parameter)) else value


def _same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if isinstance(old, _Weak):
        # A replaced parameter has other numbers, and numbers are not settings.
        return old() is new or isinstance(new, nn.Parameter)
    if type(old) is not type(new) or not isinstance(old, _PLAIN):
        return False
    if isinstance(old, (tuple, list)):  # pyright: ignore[reportUnknownArgumentType]
        return len(old) == len(new) and all(map(_same, map(_weakly, old), new))
    # NaN differs from itself, but an unchanged NaN is not a change.
    return bool(old == new) or (old != old and new != new)  # NaN


def place_inside(place: str, key: Any) -> str:
    """Return the place of a value with a key or a name, inside the object at a place."""
    if isinstance(key, str) and key.isidentifier():
        return f"{place}.{key}" if place else key
    return f"{place}[{key!r}]"


def _shown(value: Any) -> str:
    if isinstance(value, _Weak):
        return f"a {value.kind}"
    if isinstance(value, (int, float, complex, str, bool, type(None))):
        return repr(value)
    empty = "an empty" if isinstance(value, (dict, list, set, deque)) and not value else "a"
    return f"{empty} {type(value).__name__}"
