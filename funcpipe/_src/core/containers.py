"""Flatten and rebuild containers that optree does not know.

These are subclasses of dict and UserDict, dataclasses, and containers registered with torch.
`tree.py` registers them with optree.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections import UserDict
from collections.abc import Callable, Iterable
from enum import Enum
from types import MemberDescriptorType
from typing import Any, TypeAlias

from torch import Tensor, nn

from funcpipe._src.core.errors import native
from funcpipe._src.core.torch_names import pytree

FlattenFns: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]
"""(container) -> (children, structure, entries), and (structure, children) -> container."""

_OF_ALL_ROWS = ("_encodings", "_n_sequences")
"""Attributes of transformers' BatchEncoding for the whole batch. A microbatch gets None instead."""


class Attribute(str):
    """A path entry that is an attribute. Other path entries are keys."""

    __slots__ = ()


def flatten_fns_of(leaf: Any) -> FlattenFns | None:
    """Return the functions for a value's class; None if the value is a leaf."""
    kind = type(leaf)
    if issubclass(kind, (dict, UserDict)):
        return _mapping(kind)
    if _is_record(leaf):
        return _record(kind)
    return _torch_node(kind) if kind in pytree.SUPPORTED_NODES else None


def unflatten_fn_of(kind: type) -> Callable[[Any, Any], Any] | None:
    """Return the unflatten function of a class that no tree contained yet; None for leaves."""
    if issubclass(kind, (dict, UserDict)):
        return _mapping(kind)[1]
    return _record(kind)[1] if _may_be_record(kind) else None


def _may_be_record(kind: type) -> bool:
    plain = dataclasses.is_dataclass(kind) and not issubclass(kind, (Tensor, nn.Module, Enum))
    return plain and native(kind) is object


def _is_record(leaf: Any) -> bool:
    """Return whether a value is an instance of a plain dataclass that stores its own fields."""
    kind = type(leaf)
    if not _may_be_record(kind):
        return False
    # TensorDict's tensorclass stores its fields elsewhere; torch's registry can flatten it.
    names = {field.name for field in dataclasses.fields(kind)}
    return kind not in pytree.SUPPORTED_NODES or not names.isdisjoint(_Attributes(kind).of(leaf))


class _Attributes:
    """Reads and writes slots and ``__dict__`` of a class's instances, bypassing properties."""

    def __init__(self, kind: type) -> None:
        members = {
            name: value for base in reversed(kind.__mro__) for name, value in vars(base).items()
        }
        self.slots = {
            name: value
            for name, value in members.items()
            if isinstance(value, MemberDescriptorType)
        }
        self.computed = {
            name for name, value in members.items() if isinstance(value, functools.cached_property)
        }

    def of(self, instance: Any) -> dict[str, Any]:
        """Return all attributes by name, without cached properties."""
        out = {
            name: slot.__get__(instance)
            for name, slot in self.slots.items()
            if hasattr(instance, name)
        }
        out |= getattr(instance, "__dict__", {})
        return {
            name: value
            for name, value in out.items()
            if name not in self.computed and not name.startswith("__")
        }

    def put(self, instance: Any, names: Iterable[str], values: Iterable[Any]) -> None:
        """Set the attributes of a new instance."""
        for name, value in zip(names, values, strict=True):
            if name in self.slots:
                self.slots[name].__set__(instance, value)
            else:
                instance.__dict__[name] = value


def _record(kind: Any) -> FlattenFns:
    """Return the functions of a dataclass, for fields and other attributes.

    Instances are rebuilt without ``__init__``, whose checks may reject gradients or None.
    """
    fields = [field.name for field in dataclasses.fields(kind)]
    attributes = _Attributes(kind)
    # A field with init=False and a default may exist on the class only.
    defaults = {
        name: value
        for name in fields
        if not hasattr(value := inspect.getattr_static(kind, name, kind), "__get__")
    }

    def take(instance: Any) -> tuple[list[Any], tuple[str, ...], tuple[Attribute, ...]]:
        values = {**defaults, **attributes.of(instance)}
        names = [name for name in fields if name in values]
        names = (*names, *sorted(values.keys() - names))
        return [values[name] for name in names], names, tuple(map(Attribute, names))

    def give(names: tuple[str, ...], values: Iterable[Any]) -> Any:
        new = object.__new__(kind)
        attributes.put(new, names, values)
        return new

    return take, give


def _mapping(kind: Any) -> FlattenFns:
    """Return the functions of a mapping, for its sorted items and then its attributes.

    Instances are rebuilt without ``__init__``, which may compute or check.
    """
    base, user = native(kind), issubclass(kind, UserDict)
    attributes = _Attributes(kind)
    fields = _fields_that_are_items(kind, base)
    dropped = _OF_ALL_ROWS if any(each.__name__ == "BatchEncoding" for each in kind.__mro__) else ()

    def take(mapping: Any) -> tuple[list[Any], tuple[Any, ...], tuple[Any, ...]]:
        extras = attributes.of(mapping)
        items: dict[Any, Any] = (
            dict(extras.pop("data"))
            if user
            else {key: dict.__getitem__(mapping, key) for key in base.__iter__(mapping)}
        )
        keys = tuple(sorted(items, key=lambda key: (type(key).__name__, str(key))))
        omitted = {*dropped, *(name for name in fields if extras.get(name) is items.get(name))}
        names = tuple(sorted(extras.keys() - omitted))
        values = [items[key] for key in keys] + [extras[name] for name in names]
        return values, (keys, tuple(items), names), (*keys, *map(Attribute, names))

    def give(structure: tuple[Any, ...], values: Iterable[Any]) -> Any:
        keys, order, names = structure
        values = list(values)
        by_key = dict(zip(keys, values, strict=False))
        items = {key: by_key[key] for key in order}
        new = base.__new__(kind)
        if user:
            new.__dict__["data"] = items
        else:
            for key, value in items.items():
                base.__setitem__(new, key, value)
        attributes.put(new, (*fields, *dropped), [*map(items.get, fields), *[None] * len(dropped)])
        attributes.put(new, names, values[len(keys) :])
        return new

    return take, give


def _fields_that_are_items(kind: Any, base: Any) -> tuple[str, ...]:
    """Return the fields of a class that stores each field as attribute and as item (ModelOutput).

    A missing item means that the attribute is None. Returns () for other classes.
    """
    if not dataclasses.is_dataclass(kind) or getattr(kind, "__setitem__") is base.__setitem__:  # noqa: B009
        return ()
    return tuple(field.name for field in dataclasses.fields(kind))


def _torch_node(kind: type) -> FlattenFns:
    """Return the functions of a class in torch's own registry."""
    node = pytree.SUPPORTED_NODES[kind]
    keyed = node.flatten_with_keys_fn

    def take(value: Any) -> Any:
        children, context = node.flatten_fn(value)
        if keyed is None:
            return children, _ContainerKey(context)
        return children, _ContainerKey(context), [_entry(key) for key, _ in keyed(value)[0]]

    def give(context: _ContainerKey, values: Iterable[Any]) -> Any:
        new = node.unflatten_fn(list(values), context.value)
        if type(new) is not kind:  # a TensorDict that contains None becomes None
            raise TypeError(
                f"the unflatten function of {kind.__name__} returned a {type(new).__name__}"
            )
        return new

    return take, give


def _entry(key: Any) -> Any:
    """Convert a key of torch's registry to a path entry."""
    if isinstance(key, pytree.GetAttrKey):
        return Attribute(key.name)
    return getattr(key, "key", getattr(key, "idx", key))


class _ContainerKey:
    """Wraps the context of torch's registry so that it can be hashed and compared in a structure."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        try:
            return isinstance(other, _ContainerKey) and bool(self.value == other.value)
        except Exception:  # contexts that cannot be compared are equal only to themselves
            return self.value is other.value if isinstance(other, _ContainerKey) else False

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __repr__(self) -> str:
        return repr(self.value)
