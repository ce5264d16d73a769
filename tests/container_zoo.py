"""Containers of every kind: those that are trees, with their children found without any library,
and those that hide."""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import optree
import torch
from torch.utils import _pytree as torch_pytree

T = TypeVar("T")
NAMES = ("a", "b", "c")
PAD = "pad"
"""Stands for the children that a class has room for and that were not given."""


class Kind(NamedTuple):
    """Makes a container of one to three children, and finds them again."""

    name: str
    make: Callable[[list], Any]
    find: Callable[[Any], list]
    plain: bool = True
    """May its children be anything; False: tensors only."""


def padded(children):
    return [*children, *[PAD] * (3 - len(children))]


def as_a(one, kind):
    """The thing itself, which must be of the class that was made."""
    assert type(one) is kind, f"a {type(one).__name__} came for a {kind.__name__}"
    return one


def record(make, kind=None, name=""):
    """A class with the attributes a, b, c."""
    kind = kind or make
    find = lambda one: [getattr(as_a(one, kind), key) for key in NAMES]
    return Kind(name or kind.__name__, lambda children: make(*padded(children)), find)


def mapping(make, kind=None, keys=NAMES, name=""):
    """A mapping, made of a dict."""
    kind = kind or make
    find = lambda one: [as_a(one, kind)[key] for key in keys]
    return Kind(
        name or kind.__name__,
        lambda children: make(dict(zip(keys, padded(children), strict=True))),
        find,
    )


def sequence(kind):
    return Kind(kind.__name__, kind, lambda one: list(as_a(one, kind)))


# -- dataclasses
# -------------------------------------------------------------------------------


@dataclasses.dataclass
class Plain:
    a: Any
    b: Any = None
    c: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: Any
    b: Any
    c: Any


@dataclasses.dataclass(kw_only=True)
class Keywords:
    a: Any
    b: Any
    c: Any


@dataclasses.dataclass
class Checking:
    """What its constructor takes is not what it holds; made twice it would hold something else."""

    a: Any
    given: dataclasses.InitVar[Any]
    b: Any = dataclasses.field(init=False)
    c: Any = dataclasses.field(init=False)

    def __post_init__(self, given):
        assert self.a is not None or given is not None
        self.a, (self.b, self.c) = [self.a], given


@dataclasses.dataclass
class Heir(Plain):
    more: int = 3

    def __setattr__(self, name, value):
        assert name not in vars(self), "written twice"
        super().__setattr__(name, value)


@dataclasses.dataclass
class General(Generic[T]):
    a: T
    b: Any
    c: Any


@dataclasses.dataclass(eq=False)
class Cached:
    a: Any
    b: Any
    c: Any

    @functools.cached_property
    def kept(self):
        return self.a


class Slotted:
    __slots__ = ("__own", "b")

    @property
    def a(self):
        return self.__own

    @a.setter
    def a(self, value):
        self.__own = value


@dataclasses.dataclass(slots=True)
class OverSlots(Slotted):
    c: Any


class Shadow:
    """Keeps its fields under other names."""

    def __get__(self, one, kind=None):
        if one is None:
            raise AttributeError
        return one._a[0]

    def __set__(self, one, value):
        one._a = [value]


@dataclasses.dataclass
class Described:
    a: Any = Shadow()
    b: Any = None
    c: Any = None


@dataclasses.dataclass
class Mapped(dict):
    a: Any
    b: Any
    c: Any


@dataclasses.dataclass
class Exported:
    a: Any
    b: Any = None
    c: Any = None


@dataclasses.dataclass
class Dropping:
    a: Any = None
    b: Any = None
    c: Any = None


torch.export.register_dataclass(Exported)
torch_pytree.register_dataclass(Dropping, field_names=["a"], drop_field_names=["b", "c"])


def over_slots(a, b, c):
    one = OverSlots(c)
    one.a, one.b = a, b
    return one


def with_attributes(a, b, c):
    one = Plain(a)
    del one.b, one.c
    one.c, one.b = c, b
    one.also = [3]
    return one


def looked_at(a, b, c):
    one = Cached(a, b, c)
    assert one.kept is a
    return one


def as_cached(one):
    as_a(one, Cached)
    assert one.kept is one.a, "computed for another instance"
    return [one.a, one.b, one.c]


# -- registered classes
# -------------------------------------------------------------------------------


class Bare:
    def __init__(self, a, b, c):
        self.a, self.b, self.c = a, b, c


def registered(name, put):
    """A subclass of Bare that ``put`` registers: (class, take, give)."""
    kind = type(name, (Bare,), {})
    put(kind, lambda one: ([one.a, one.b, one.c], None))
    return kind


def with_keys(one):
    return [(torch_pytree.GetAttrKey(key), getattr(one, key)) for key in NAMES], None


def in_torch(kind, take, keys=None):
    torch_pytree.register_pytree_node(kind, take, lambda c, _: kind(*c), flatten_with_keys_fn=keys)


def in_optree(kind, take, namespace="funcpipe"):
    optree.register_pytree_node(kind, take, lambda _, c: kind(*c), namespace=namespace)


EVERYWHERE = getattr(optree.registry, "__GLOBAL_NAMESPACE")
REGISTERED = [
    registered("InTorch", in_torch),
    registered("InTorchWithKeys", lambda kind, take: in_torch(kind, take, with_keys)),
    registered("InOptree", in_optree),
    registered("InOptreeEverywhere", lambda kind, take: in_optree(kind, take, EVERYWHERE)),
]


# -- mappings and named tuples
# -------------------------------------------------------------------------------


class Doubling(dict):
    """A constructor that computes: rebuilt by it, everything would be there twice."""

    def __init__(self, items):
        super().__init__({key: (value, "twice") for key, value in items.items()})


class Holding(dict):
    """An item, and two attributes."""

    b = c = None

    def __init__(self, a, b, c):
        super().__init__(a=a)
        self.b, self.c = b, c


class Ordered(collections.OrderedDict):
    pass


class Defaults(collections.defaultdict):
    pass


class Users(collections.UserDict):
    pass


Untyped = collections.namedtuple("Untyped", NAMES)


class Typed(NamedTuple):
    a: Any
    b: Any = None
    c: Any = None


def tensordict_kinds():
    """Those of tensordict and transformers, where they are installed."""
    out = []
    try:
        from tensordict import TensorDict
    except ImportError:
        pass
    else:
        make = lambda children: TensorDict(dict(zip(NAMES, children, strict=False)), batch_size=[])
        find = lambda one: [as_a(one, TensorDict)[key] for key in NAMES if key in one.keys()]  # noqa: SIM118
        out.append(Kind("TensorDict", make, find, plain=False))
    try:
        from transformers import BatchEncoding
        from transformers.utils import ModelOutput
    except ImportError:
        return out

    @dataclasses.dataclass
    class Answer(ModelOutput):
        a: Any = None
        b: Any = None
        c: Any = None
        never: Any = None

    return [*out, mapping(BatchEncoding), record(Answer)]


TREES = [
    *map(
        record,
        (Plain, Frozen, Heir, Described, Exported, Dropping, Mapped, Untyped, Typed, *REGISTERED),
    ),
    record(lambda a, b, c: Keywords(a=a, b=b, c=c), Keywords),
    record(General[torch.Tensor], General),
    record(over_slots, OverSlots),
    record(with_attributes, Plain, "with attributes"),
    Kind(
        "Holding",
        lambda c: Holding(*padded(c)),
        lambda one: [as_a(one, Holding)["a"], one.b, one.c],
    ),
    Kind(
        "Checking",
        lambda c: Checking(padded(c)[0], padded(c)[1:]),
        lambda one: [*as_a(one, Checking).a, one.b, one.c],
    ),
    Kind("Cached", lambda children: looked_at(*padded(children)), as_cached),
    Kind(
        "Doubling",
        lambda c: Doubling(dict(enumerate(c))),
        lambda one: [v[0] for v in as_a(one, Doubling).values()],
    ),
    *map(mapping, (dict, collections.OrderedDict, Ordered, Users)),
    mapping(dict, keys=(3, "b", (1, 2)), name="dict with odd keys"),
    mapping(lambda items: collections.defaultdict(list, items), collections.defaultdict),
    mapping(lambda items: Defaults(list, items), Defaults),
    mapping(lambda items: Ordered(reversed(items.items())), Ordered, name="Ordered backwards"),
    *map(sequence, (list, tuple, collections.deque)),
    *tensordict_kinds(),
]
