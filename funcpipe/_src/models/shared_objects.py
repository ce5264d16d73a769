"""Refuse activations that a layer leaves in a Python object which another stage's layers share.

Stages compute with copies of their layers. So a layer of another stage would read the content that
the object had when the stages were made.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.torch_names import TABLES
from funcpipe._src.core.tree import flatten
from funcpipe._src.models.attribute_uses import uses_of
from funcpipe._src.models.attributes import OPAQUE, contents_of, place_inside

NOTHING_SHARED: Mapping[str, str] = {}
"""The places of layers that share no objects."""


def shared_places(own: Mapping[str, nn.Module], others: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the places of objects in some layers that other layers share, with the other layer.

    A layer that is in both arguments is compared with all others.
    """
    found: dict[int, dict[str, str]] = {}
    for path, layer in {**others, **own}.items():
        for place, value in _objects(layer, path):
            found.setdefault(id(value), {}).setdefault(path, place)
    places: dict[str, str] = {}
    for by_layer in found.values():
        for path in own.keys() & by_layer.keys():
            sharing = [other for other in by_layer if other in others and other != path]
            if sharing:
                places[by_layer[path]] = sharing[0]
    return places


def _objects(layer: nn.Module, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a layer's forward could write to, each once: the modules inside, and
    the objects and containers in their attributes, at any depth."""
    seen: set[int] = set()
    for local, module in layer.named_modules():
        root = ".".join(filter(None, (path, local)))
        yield root, module
        table = {key: value for key, value in vars(module).items() if key not in TABLES}
        todo = [(place_inside(root, key), value) for key, value in table.items()]
        while todo:
            place, value = todo.pop()
            kind = type(value)
            if (
                value is None
                or issubclass(kind, (*OPAQUE, Tensor, nn.Module))
                or kind.__module__.startswith(("torch.", "funcpipe."))
                or id(value) in seen
            ):
                continue
            seen.add(id(value))
            yield place, value
            todo += [(place_inside(place, key), each) for key, each in contents_of(value).items()]


@contextmanager
def refuse_left_activations(
    layers: Mapping[str, nn.Module], shared: Mapping[str, str], remedy: str = ""
) -> Generator[None]:
    """Return a context for a forward, which raises PlanError if it leaves values in shared objects.

    Only tensors with a graph count: tables and masks that a layer computes once are the same in
    every copy. ``shared`` is of `shared_places`, and ``remedy`` is added to the message.
    """
    objects = {
        place: value
        for path, layer in layers.items()
        for place, value in _objects(layer, path)
        if place in shared
    }
    before = {place: dict(_table(value)) for place, value in objects.items()}
    yield
    for place, value in objects.items():
        for key, new in _table(value).items():
            if new is not before[place].get(key) and any(map(_has_graph, flatten(new)[0])):
                raise PlanError(
                    f"a forward leaves an activation in {place_inside(place, key)!r}, an object that "
                    f"{shared[place]!r} shares, but layers have copies of the object, so "
                    f"{shared[place]!r} would read an old value. Pass the activation on: return "
                    f"it with the output, or stash it and pop it (fp.models.skippable){remedy}"
                )


def _table(value: Any) -> Mapping[Any, Any]:
    """Return the contents of an object; of a module, the attributes that its forward only reads."""
    if not isinstance(value, nn.Module):
        return contents_of(value)
    written = uses_of(type(value)).written
    return {
        key: each
        for key, each in vars(value).items()
        if key not in written and not key.startswith("_")
    }


def _has_graph(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf
