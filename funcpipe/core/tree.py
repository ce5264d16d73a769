"""Trees: nested containers with tensors and anything else at the leaves. The one importer of optree.

A leaf is whatever is not a container; ``None`` is a leaf. Containers are optree's, and, registered when they are first met:
subclasses of dict and ``UserDict`` (Hugging Face's ``ModelOutput`` and ``BatchEncoding`` are such), dataclasses, and every
class of torch's own registry (``torch.export.register_dataclass``, TensorDict).
"""

from __future__ import annotations

import dataclasses
import threading
from collections import UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from enum import Enum
from types import ModuleType
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as torch_pytree

from funcpipe.core.errors import PlanError
from funcpipe.core.torch_names import private

Tree: TypeAlias = Any
Leaves: TypeAlias = list[Any]
Spec: TypeAlias = optree.PyTreeSpec
Path: TypeAlias = tuple[Any, ...]

_NAMESPACE = "funcpipe"
_registering = threading.Lock()
_registered: set[type] = set()

_PLAIN = {bool, int, float, complex, str, bytes, type(None), range, slice}
_ATOMS = _PLAIN | {
    Tensor,
    nn.Parameter,
    FakeTensor,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    torch.Generator,
}
"""Types of leaves that need no second look."""


def flatten(tree: Tree, whole: Callable[[Any], bool] | None = None) -> tuple[Leaves, Spec]:
    """The leaves of a tree in a fixed order (dict keys sorted), and the structure that puts them back.

    ``whole`` says which containers are leaves all the same.
    """
    leaves, spec = optree.tree_flatten(tree, is_leaf=whole, none_is_leaf=True, namespace=_NAMESPACE)
    for leaf in leaves:
        if type(leaf) not in _ATOMS and not (whole and whole(leaf)) and _register(leaf):
            return flatten(tree, whole)
    return leaves, spec


def refuse_hidden(leaves: Leaves, places: Callable[[], Iterable[str]]) -> list[str]:
    """What is wrong with leaves that hold tensors: nobody would cut, move, detach or train these.

    Args:
        leaves: of a tree.
        places: where they are, asked only if something is wrong.
    """
    if not any(type(leaf) not in _ATOMS and hides_tensors(leaf) for leaf in leaves):
        return []
    return [
        f"{place} is a {type(leaf).__name__}, which hides tensors: they would not be cut, moved or differentiated. Use a dict, "
        f"a tuple or a dataclass, or say how it is taken apart: optree.register_pytree_node({type(leaf).__name__}, flatten, "
        f"unflatten, namespace={_NAMESPACE!r})"
        for place, leaf in zip(places(), leaves, strict=True)
        if type(leaf) not in _ATOMS and hides_tensors(leaf)
    ]


def hides_tensors(leaf: Any) -> bool:
    """Does something that is no tensor hold any: in its attributes or entries, some levels deep."""
    todo: list[tuple[Any, int]] = [(leaf, 0)]
    seen: set[int] = set()
    while todo:
        value, depth = todo.pop()
        if isinstance(value, Tensor):
            return value is not leaf
        if type(value) in _ATOMS or id(value) in seen or isinstance(value, (type, ModuleType, Enum)):
            continue
        seen.add(id(value))
        if depth < 4:
            todo += [(inner, depth + 1) for inner in _held(value)]
    return False


def _held(value: Any) -> list[Any]:
    """What a thing has in its attributes and, if it is a container of Python's, its entries."""
    out = list(vars(value).values()) if hasattr(value, "__dict__") else []
    slots = [name for kind in type(value).__mro__ for name in _many(vars(kind).get("__slots__", ()))]
    out += [getattr(value, name, None) for name in slots if not name.startswith("__")]
    if isinstance(value, Mapping):
        out += value.values()
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        out += value
    return out


def _many(names: Any) -> Iterable[str]:
    return (names,) if isinstance(names, str) else names


def unflatten(spec: Spec, leaves: Iterable[Any]) -> Tree:
    """The tree with this structure and these leaves; inverse of `flatten`."""
    return optree.tree_unflatten(spec, leaves)


def structure(tree: Tree) -> Spec:
    """The structure of a tree alone."""
    return flatten(tree)[1]


def map_leaves(fn: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply ``fn`` to the leaves of ``tree`` (and of trees of the same structure), keeping the structure."""
    leaves, spec = flatten(tree)
    others = [flatten(other)[0] for other in rest]
    return unflatten(spec, [fn(*row) for row in zip(leaves, *others, strict=True)])


def paths(tree: Tree) -> list[Path]:
    """The keys that lead to each leaf, in the order of `flatten`."""
    return optree.treespec_paths(structure(tree))


def locations(tree: Tree, root: str) -> list[str]:
    """Each leaf as Python would write it: ``params[0]['1.weight']``."""
    return [accessor.codify(root) for accessor in optree.treespec_accessors(structure(tree))]


def spread(prefix: Tree, tree: Tree, whole: Callable[[Any], bool] | None = None) -> Leaves:
    """For each leaf of ``tree`` the leaf of ``prefix`` above it. Raises ValueError where they branch in other ways."""
    for one in (prefix, tree):
        flatten(one, whole)  # registers mappings that are met for the first time
    return optree.broadcast_prefix(prefix, tree, is_leaf=whole, none_is_leaf=True, namespace=_NAMESPACE)


def named_leaves(tree: Tree) -> list[tuple[str, Tensor]]:
    """The tensors of a tree with dotted names, in the order of `leaves`; a tensor that stands twice is named once.

    >>> import torch
    >>> [name for name, _ in named_leaves(({"0.bias": torch.zeros(1)}, [torch.ones(1)]))]
    ['0.0.bias', '1.0']

    Raises:
        PlanError: a module, or a generator, which hides its tensors.
    """
    seen: set[int] = set()
    out: list[tuple[str, Tensor]] = []
    every = flatten(tree)[0]
    strange = next((leaf for leaf in every if isinstance(leaf, (nn.Module, Iterator))), None)
    if strange is not None:
        raise PlanError(
            f"a {type(strange).__name__} is no tree of tensors; give the params that are run (stage, params, state = "
            "fp.from_module(module), fp.split(model, n).params), or list(module.parameters())"
        )
    for path, leaf in zip(paths(tree), every, strict=True):
        if isinstance(leaf, Tensor) and id(leaf) not in seen:
            seen.add(id(leaf))
            out.append((".".join(map(str, path)), leaf))
    return out


def leaves(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, each once: what ``torch.optim`` wants.

    >>> import torch
    >>> w = torch.zeros(2)
    >>> len(leaves(({"w": w, "tied": w}, {"steps": 3, "b": torch.ones(1)})))
    2

    Raises:
        PlanError: a module, or a generator, which hides its tensors.
    """
    return [leaf for _, leaf in named_leaves(tree)]


def at(tree: Tree, path: str | Path) -> Any:
    """The leaf at a path: the keys in order, or the one key of a flat dict."""
    for key in path if isinstance(path, tuple) else (path,):
        by_key = not isinstance(key, str) or isinstance(tree, Mapping) or hasattr(tree, "keys")
        tree = tree[key] if by_key else getattr(tree, key)
    return tree


def under_transform() -> bool:
    """Is this call inside torch.func's grad, vmap, jvp, ..."""
    return torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore


def own(tensor: Tensor) -> Tensor:
    """A copy of one's own that is made only when someone writes (differentiable).

    In-place layers at a border then work and touch nobody else's tensor.
    """
    if under_transform():  # torch.func has no rule for the lazy kind
        return tensor.clone()
    return lazy(tensor)


def lazy(tensor: Tensor) -> Tensor:
    """`own` where no transform of torch.func can be on.

    On devices with streams the copy is made at once. Torch makes a late one on the legacy default stream, which lanes do
    not wait for; its allocator forgets streams recorded on shared memory; and no graph of the device has it.
    """
    if not (tensor.is_cpu or tensor.is_meta or isinstance(tensor, (FakeTensor, FunctionalTensor))):
        return tensor.clone()
    try:
        return _lazy_clone(tensor)
    except RuntimeError:  # memory that torch did not allocate (numpy, shared), odd layouts
        return tensor.clone()


_lazy_clone: Any = private(
    "_lazy_clone", instead=torch.clone, lost="stages get copies of what they are handed, at once"
)


def is_differentiable(leaf: Any) -> bool:
    """May this leaf have a gradient: a floating or complex tensor."""
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _register(leaf: Any) -> bool:
    """Make the type of a leaf a container, if it is a kind that can be one. Returns whether it is one now."""
    kind = type(leaf)
    way = _way(kind)
    if way is None:
        return False
    with _registering:
        if kind in _registered:
            if optree.tree_is_leaf(leaf, namespace=_NAMESPACE):
                raise TypeError(f"cannot flatten {kind.__name__}: optree sees its instances as leaves")
            return True  # another thread was faster
        take, give, entry = way(kind, leaf)
        optree.register_pytree_node(kind, take, give, path_entry_type=entry, namespace=_NAMESPACE)
        _registered.add(kind)
    return True


_Way: TypeAlias = tuple[Callable[[Any], Any], Callable[[Any, Any], Any], type[optree.PyTreeEntry]]
"""How a container is taken apart, how it is put together, and how a path goes into it."""


def _way(kind: type) -> Callable[[type, Any], _Way] | None:
    if issubclass(kind, (dict, UserDict)):
        return _mapping
    if kind in torch_pytree.SUPPORTED_NODES:
        return _torch_node
    if dataclasses.is_dataclass(kind) and not issubclass(kind, (Tensor, nn.Module, Exception)):
        return _dataclass
    return None


def _mapping(kind: type, _: Any) -> _Way:
    """The items of a mapping in sorted order, rebuilt by its own class."""

    def take(mapping: MutableMapping[Any, Any]) -> tuple[Any, tuple[Any, ...], tuple[Any, ...]]:
        keys = sorted(mapping, key=lambda key: (type(key).__name__, str(key)))
        return [mapping[key] for key in keys], (tuple(keys), tuple(mapping)), tuple(keys)

    def give(keys: tuple[Any, ...], values: Iterable[Any]) -> Any:
        # Some classes (ModelOutput) want their items as keywords, some (UserDict) as one mapping.
        by_key = dict(zip(keys[0], values, strict=True))
        items = {key: by_key[key] for key in keys[1]}
        try:
            return kind(items) if issubclass(kind, UserDict) else kind(**items)
        except TypeError:
            new: Any = object.__new__(kind) if issubclass(kind, UserDict) else kind.__new__(kind)  # pyright: ignore
            new.update(items)
            return new

    return take, give, optree.MappingEntry


def _dataclass(kind: type, _: Any) -> _Way:
    """The fields of a dataclass, and what else its instance holds; rebuilt without its ``__init__``, which may check."""
    fields = tuple(field.name for field in dataclasses.fields(kind))

    def take(value: Any) -> tuple[Any, tuple[str, ...], tuple[str, ...]]:
        names = [name for name in fields if hasattr(value, name)]
        names += [name for name in getattr(value, "__dict__", ()) if name not in fields]
        return [getattr(value, name) for name in names], tuple(names), tuple(names)

    def give(names: tuple[str, ...], values: Iterable[Any]) -> Any:
        new = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(new, name, value)
        return new

    return take, give, optree.GetAttrEntry


def _torch_node(kind: type, example: Any) -> _Way:
    """A class as torch's own registry takes it apart."""
    node = torch_pytree.SUPPORTED_NODES[kind]
    keyed = node.flatten_with_keys_fn
    step = keyed(example)[0][0][0] if keyed is not None and keyed(example)[0] else None

    def take(value: Any) -> Any:
        children, context = node.flatten_fn(value)
        if keyed is None:
            return children, _Context(context)
        entries = [getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))) for key, _ in keyed(value)[0]]
        return children, _Context(context), entries

    def give(context: _Context, values: Iterable[Any]) -> Any:
        return node.unflatten_fn(list(values), context.value)

    if isinstance(step, torch_pytree.MappingKey):
        return take, give, optree.MappingEntry
    return take, give, optree.GetAttrEntry if isinstance(step, torch_pytree.GetAttrKey) else optree.SequenceEntry


class _Context:
    """What torch's registry keeps of a container besides its children, in a form that every structure can have."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        try:
            return isinstance(other, _Context) and bool(self.value == other.value)
        except Exception:  # it holds what cannot be compared
            return self.value is other.value if isinstance(other, _Context) else False

    def __hash__(self) -> int:
        return hash(type(self.value))

    def __repr__(self) -> str:
        return repr(self.value)
