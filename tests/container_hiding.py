"""Things that hold tensors and are no trees: each is made around one value."""

import collections
import dataclasses
import functools
import types
from typing import Any

import numpy as np
import optree
import torch
from container_zoo import Bare, Untyped
from torch import nn
from torch.utils import _pytree as torch_pytree


class PrivateSlots:
    __slots__ = ("__own",)

    def __init__(self, own):
        self.__own = own


class Named(Untyped):
    """A named tuple that has attributes too."""


class Attributes(list):
    pass


class Items(collections.abc.Mapping):
    def __init__(self, items):
        self._items = items

    def __getitem__(self, key):
        return self._items[key]

    def __iter__(self):
        return iter(self._items)

    def __len__(self):
        return len(self._items)


@dataclasses.dataclass
class Failure(Exception):
    held: Any


@dataclasses.dataclass
class Sequence(list):
    held: Any


class Layer(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.held = held


class TorchContext(Bare):
    pass


class OptreeContext(Bare):
    pass


class Constant(Bare):
    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


torch_pytree.register_pytree_node(
    TorchContext, lambda one: ([], one.a), lambda c, held: TorchContext(held, 0, 0)
)
optree.register_pytree_node(
    OptreeContext,
    lambda one: ((), [one.a]),
    lambda held, c: OptreeContext(held[0], 0, 0),
    namespace="funcpipe",
)
torch_pytree.register_constant(Constant)


def named(held):
    one = Named(1, 2, 3)
    one.held = held
    return one


def attributes(held):
    one = Attributes([1, 2])
    one.held = held
    return one


def deep(held):
    for _ in range(9):
        held = types.SimpleNamespace(held=held)
    return held


def generated(held):
    yield held


def boxed(held):
    out = np.empty(1, dtype=object)
    out[0] = held
    return types.SimpleNamespace(held=out)


HIDING = {
    "namespace": lambda held: types.SimpleNamespace(held=held),
    "proxy": lambda held: types.MappingProxyType({"held": held}),
    "object": lambda held: Bare(held, 1, 2),
    "slots": PrivateSlots,
    "set": lambda held: {types.MethodType(Bare, held)},
    "deep": deep,
    "partial": lambda held: functools.partial(torch.add, held),
    "method": lambda held: types.SimpleNamespace(held=held).__eq__,
    "closure": lambda held: lambda: held,
    "default": lambda held: lambda one=held: one,
    "values": lambda held: {"held": held}.values(),
    "module": Layer,
    "numpy": boxed,
    "mapping": lambda held: Items({"held": held}),
    "chain": lambda held: collections.ChainMap({"held": held}),
    "list": lambda held: collections.UserList([held]),
    "attributes of a list": attributes,
    "attributes of a named tuple": named,
    "exception": ValueError,
    "dataclass exception": Failure,
    "dataclass list": Sequence,
    "torch context": lambda held: TorchContext(held, 0, 0),
    "optree context": lambda held: OptreeContext(held, 0, 0),
    "constant": lambda held: Constant(held, 0, 0),
    "key": lambda held: {PrivateSlots(held): 1},
}
READ_ONCE = {
    "generator": generated,
    "iterator": lambda held: iter([held]),
    "map": lambda held: map(abs, [held]),
}
