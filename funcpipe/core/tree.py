"""Trees: nested containers with tensors and anything else at the leaves. The one importer of optree.

A leaf is whatever is not a container; ``None`` is a leaf. Subclasses of dict and ``UserDict`` (Hugging Face's
``ModelOutput`` and ``BatchEncoding`` are such) are containers too: they are registered when they are first met.
"""

from __future__ import annotations

import threading
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeAlias, cast

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

Tree: TypeAlias = Any
Leaves: TypeAlias = list[Any]
Spec: TypeAlias = optree.PyTreeSpec
Path: TypeAlias = tuple[Any, ...]

_NAMESPACE = "funcpipe"
_registering = threading.Lock()
_registered: set[type] = set()


def flatten(tree: Tree, whole: Callable[[Any], bool] | None = None) -> tuple[Leaves, Spec]:
    """The leaves of a tree in a fixed order (dict keys sorted), and the structure that puts them back.

    ``whole`` says which containers are leaves all the same.
    """
    leaves, spec = optree.tree_flatten(tree, is_leaf=whole, none_is_leaf=True, namespace=_NAMESPACE)
    for leaf in leaves:
        if isinstance(leaf, (dict, UserDict)) and not (whole and whole(leaf)):
            _register(cast("MutableMapping[Any, Any]", leaf))
            return flatten(tree, whole)
    return leaves, spec


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
    """
    seen: set[int] = set()
    out: list[tuple[str, Tensor]] = []
    for path, leaf in zip(paths(tree), flatten(tree)[0], strict=True):
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
    """
    return [leaf for _, leaf in named_leaves(tree)]


def at(tree: Tree, path: str | Path) -> Any:
    """The leaf at a path: the keys in order, or the one key of a flat dict."""
    for key in path if isinstance(path, tuple) else (path,):
        tree = tree[key] if not isinstance(key, str) or isinstance(tree, Mapping) else getattr(tree, key)
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


_lazy_clone = torch._lazy_clone if hasattr(torch, "_lazy_clone") else torch.clone  # pyright: ignore


def is_differentiable(leaf: Any) -> bool:
    """May this leaf have a gradient: a floating or complex tensor."""
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _register(leaf: MutableMapping[Any, Any]) -> None:
    """Make the type of a mapping a container, its items in sorted order, rebuilt by its own class."""
    kind = type(leaf)
    with _registering:
        if kind in _registered:
            if optree.tree_is_leaf(cast("Any", leaf), namespace=_NAMESPACE):
                raise TypeError(f"cannot flatten {kind.__name__}: optree sees its instances as leaves")
            return  # another thread was faster

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

        optree.register_pytree_node(kind, take, give, namespace=_NAMESPACE)  # pyright: ignore[reportArgumentType]
        _registered.add(kind)
