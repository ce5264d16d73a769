"""Trees: nested containers with tensors and anything else at the leaves. The one importer of
optree.

A leaf is whatever is not a container; ``None`` is a leaf. Containers are optree's, and, registered
when they are first met: subclasses of dict and ``UserDict`` (Hugging Face's ``ModelOutput`` and
``BatchEncoding`` are such), dataclasses, and every class of torch's own registry (TensorDict). What
else holds tensors is refused where that matters, `refuse_hidden`.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias, cast

import optree
import torch
from torch import Tensor

from funcpipe._src.core.containers import Attribute, flatten_fns_of, unflatten_fn_of
from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.core.hidden import ATOMS, built_in_the_stage, fault_of, hides_tensors, only_plain
from funcpipe._src.core.torch_names import FakeTensor, FunctionalTensor, lazy_clone, transforms

Tree: TypeAlias = Any
Leaves: TypeAlias = list[Any]
Spec: TypeAlias = optree.PyTreeSpec
Path: TypeAlias = tuple[Any, ...]

_NAMESPACE = "funcpipe"
LEAF: Spec = optree.tree_structure(cast("Any", None), none_is_leaf=True, namespace=_NAMESPACE)
"""The structure of a tree that is one leaf."""
_EMPTY: Spec = optree.tree_structure(cast("Any", ()), none_is_leaf=True, namespace=_NAMESPACE)
_registering = threading.Lock()
_registered: set[type] = set()


def flatten(tree: Tree, whole: Callable[[Any], bool] | None = None) -> tuple[Leaves, Spec]:
    """The leaves of a tree in a fixed order (dict keys sorted), and the structure that puts them
    back.

    ``whole`` says which containers are leaves all the same.

    Raises:
        PlanError: the tree contains itself.
    """
    kind = type(tree)
    if kind is Tensor or tree is None:  # much of what a run takes apart is one tensor, or nothing
        return [tree], LEAF
    if kind is tuple and not tree and whole is None:
        return [], _EMPTY
    try:
        leaves, spec = optree.tree_flatten(
            tree, is_leaf=whole, none_is_leaf=True, namespace=_NAMESPACE
        )
    except RecursionError:
        raise PlanError(_endless(tree)) from None
    for leaf in leaves:
        if type(leaf) not in ATOMS and not (whole and whole(leaf)) and _register(leaf):
            return flatten(tree, whole)
    return leaves, spec


def unflatten(spec: Spec, leaves: Iterable[Any]) -> Tree:
    """The tree with this structure and these leaves; inverse of `flatten`.

    Raises:
        PlanError: a registered class, or its constructor, refuses them.
    """
    try:
        return optree.tree_unflatten(spec, leaves)
    except Exception as error:
        raise PlanError(
            f"a container cannot be put together with other leaves, {type(error).__name__}: "
            f"{error}. A tree of gradients has None where a leaf has none (it is frozen, or no "
            "floating tensor), a microbatch fewer rows; so hand such leaves in beside the "
            "container, or let what it is registered with (its constructor) take any. The tree "
            f"is {str(spec)[:200]}"
        ) from error


def structure(tree: Tree) -> Spec:
    """The structure of a tree."""
    return flatten(tree)[1]


def map_leaves(fn: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Apply ``fn`` to the leaves of ``tree`` (and of trees of the same structure), keeping the
    structure."""
    leaves, spec = flatten(tree)
    columns = [flatten(other)[0] for other in others]
    return unflatten(spec, [fn(*row) for row in zip(leaves, *columns, strict=True)])


def map_tensors(fn: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """Apply ``fn`` to the tensors of a tree; other leaves stay as they are."""
    if isinstance(tree, Tensor):
        return fn(tree)
    return map_leaves(lambda leaf: fn(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def paths(tree: Tree) -> list[Path]:
    """The keys that lead to each leaf, in the order of `flatten`."""
    return optree.treespec_paths(structure(tree))


def locations(tree: Tree, root: str) -> list[str]:
    """Each leaf as Python would write it: ``params[0]['1.weight']``."""
    return [accessor.codify(root) for accessor in optree.treespec_accessors(structure(tree))]


def spread(prefix: Tree, tree: Tree, whole: Callable[[Any], bool] | None = None) -> Leaves:
    """For each leaf of ``tree`` the leaf of ``prefix`` above it. Raises ValueError where they
    branch in other ways."""
    for root in (prefix, tree):
        flatten(root, whole)  # registers mappings that are met for the first time
    return optree.broadcast_prefix(
        prefix, tree, is_leaf=whole, none_is_leaf=True, namespace=_NAMESPACE
    )


def named_leaves(tree: Tree) -> list[tuple[str, Tensor]]:
    """The tensors of a tree with dotted names, in the order of `leaves`; a tensor that stands twice
    is named once.

    >>> [name for name, _ in fp.named_leaves(({"0.bias": torch.zeros(1)}, [torch.ones(1)]))]
    ['0.0.bias', '1.0']

    Raises:
        PlanError: some things in the tree hide tensors.
    """
    values, spec = flatten(tree)
    faults = refuse_hidden(tree, "tree", values, spec)
    raise_all(
        "this is no tree of tensors; give the params that are run (stage, params, state = "
        "fp.from_module(module), fp.split(model, n).params), or list(module.parameters()):",
        faults,
    )
    named: set[int] = set()
    out: list[tuple[str, Tensor]] = []
    for path, leaf in zip(optree.treespec_paths(spec), values, strict=True):
        if isinstance(leaf, Tensor) and id(leaf) not in named:
            named.add(id(leaf))
            out.append((".".join(map(str, path)), leaf))
    return out


def leaves(tree: Tree) -> list[Tensor]:
    """The tensors of a tree, each once: what ``torch.optim`` wants.

    >>> w = torch.zeros(2)
    >>> len(fp.leaves(({"w": w, "tied": w}, {"steps": 3, "b": torch.ones(1)})))
    2

    Raises:
        PlanError: some things in the tree hide tensors.
    """
    return [leaf for _, leaf in named_leaves(tree)]


def at(tree: Tree, path: str | Path) -> Any:
    """The leaf (or the container) at a path: the keys in order, or the one key of a flat dict.
    Raises KeyError."""
    structure(tree)  # registers what is met for the first time
    for key in path if isinstance(path, tuple) else (path,):
        tree = {step: child for step, _, child in _branches(tree)}[key]
    return tree


def under_transform() -> bool:
    """Is this call inside torch.func's grad, vmap, jvp, ..."""
    return transforms() is not None


def cow_clone(tensor: Tensor) -> Tensor:
    """A copy of a tensor that takes memory only when somebody writes (differentiable).

    So layers that write in place at a border write to no tensor but their own.
    """
    if under_transform():  # torch.func has no rule for the lazy kind
        return tensor.clone()
    return cow_clone_unchecked(tensor)


def cow_clone_unchecked(tensor: Tensor, otherwise: Callable[[Tensor], Any] = Tensor.clone) -> Any:
    """`cow_clone` where no transform of torch.func can be on; ``otherwise`` is called where no lazy
    copy can be made.

    On devices with streams the copy is made at once. Torch makes a late one on the legacy default
    stream, which lanes do not wait for; its allocator forgets streams recorded on shared memory;
    and no graph of the device has it.
    """
    if tensor.is_cpu or tensor.is_meta or isinstance(tensor, (FakeTensor, FunctionalTensor)):
        # Memory that ``torch.load`` read has no allocator, which torch sees only when somebody
        # writes: it crashes then.
        try:
            if tensor.untyped_storage().resizable():
                return lazy_clone(tensor)
        except RuntimeError:  # memory that torch did not allocate (numpy, shared), odd layouts
            pass
    return otherwise(tensor)


def is_differentiable(leaf: Any) -> bool:
    """May this leaf have a gradient: a floating or complex tensor."""
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def take_apart(node: Any) -> tuple[list[Any], Any]:
    """The children of a container of a registered class, and what puts them back. Raises PlanError
    for others."""
    entry = optree.register_pytree_node.get(type(node), namespace=_NAMESPACE)
    if entry is None:
        raise PlanError(
            f"a {type(node).__name__} is none of the containers that are taken apart by their class"
        )
    children, kept, *_ = entry.flatten_func(node)
    return list(children), kept


def is_registered(kind: type) -> bool:
    """Return whether a class itself is registered as a container, by a user or because a tree
    contained one."""
    entry = optree.register_pytree_node.get(kind, namespace=_NAMESPACE)
    return entry is not None and entry.type is kind


def put_together_by(kind: type) -> Callable[[Any, Any], Any] | None:
    """What makes a container of a class out of what `take_apart` returned, the last first; None: it
    makes leaves."""
    entry = optree.register_pytree_node.get(kind, namespace=_NAMESPACE)
    return unflatten_fn_of(kind) if entry is None else entry.unflatten_func


class _PathEntry(optree.PyTreeEntry):
    """A step into a container that `_register` registered."""

    def __call__(self, obj: Any) -> Any:
        return at(obj, (self.entry,))

    def codify(self, /, node: str = "") -> str:
        return (
            f"{node}.{self.entry}"
            if isinstance(self.entry, Attribute)
            else f"{node}[{self.entry!r}]"
        )


def _register(leaf: Any) -> bool:
    """Register the type of a leaf as a container where it can be one. Returns whether it is one
    now."""
    kind, functions = type(leaf), flatten_fns_of(leaf)
    if functions is None:
        return False
    with _registering:
        if kind in _registered:
            if optree.tree_is_leaf(leaf, namespace=_NAMESPACE):
                raise TypeError(
                    f"cannot flatten {kind.__name__}: optree sees its instances as leaves"
                )
            return True  # another thread was faster
        optree.register_pytree_node(
            kind, *functions, path_entry_type=_PathEntry, namespace=_NAMESPACE
        )
        _registered.add(kind)
    return True


# -- trees that hide tensors, or end nowhere
# -------------------------------------------------------------------------------


def refuse_hidden(tree: Tree, root: str, leaves: Leaves, spec: Spec) -> list[str]:
    """The faults of a tree that hides tensors: nobody would cut, move, detach or train these.

    Args:
        tree: the tree.
        root: what to call it.
        leaves, spec: as flattened; the leaves may be others in their places, or none: then only
            containers are seen.
    """
    for leaf in leaves:
        if type(leaf) not in ATOMS and fault_of(leaf):
            break
    else:
        if not _odd(spec):
            return []
    rows = [
        (place, fault_of(leaf))
        for place, leaf in zip(locations(tree, root) if leaves else (), leaves, strict=True)
    ]
    rows += [(place, _fault_of_node(node)) for place, node in _nodes(tree, root)]
    return [f"{place} {fault}" for place, fault in rows if fault]


def _odd(spec: Spec) -> bool:
    """May a structure hold tensors: as keys, as what classes keep besides children, as attributes
    of a named tuple."""
    first, *referents = gc.get_referents(spec)
    if first is Spec and only_plain(referents):  # mostly
        return False
    referents.append(first)
    tuples = any(
        isinstance(kind, type) and issubclass(kind, tuple) and kind.__dictoffset__
        for kind in referents
    )
    return tuples or hides_tensors(referents)


def _fault_of_node(node: Any) -> str:
    """Why a container cannot stand in a tree though its children can; "": it can."""
    spec = optree.tree_structure(node, is_leaf=_below(), none_is_leaf=True, namespace=_NAMESPACE)
    if not hides_tensors(
        (gc.get_referents(spec), vars(node) if _is_tuple_with_attributes(node) else ())
    ):
        return ""
    if built := built_in_the_stage(node):
        return built
    return (
        f"is a {type(node).__name__}, which hides tensors outside of its children (as a key, an "
        "attribute, or in what its class is registered with): they would not be cut, moved or "
        "differentiated. Make them children, or say how it is taken apart: "
        f"optree.register_pytree_node({type(node).__name__}, flatten, unflatten, "
        f"namespace={_NAMESPACE!r})"
    )


def _is_tuple_with_attributes(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "__dict__")


def _below() -> Callable[[Any], bool]:
    """A predicate, for one use, that stops optree one level below where it begins."""
    first = iter([False])
    return lambda _: next(first, True)


def _branches(node: Any) -> list[tuple[Any, Callable[[str], str], Any]]:
    """The children of a container, each with its key, and a function that writes its place after
    the container's."""
    options: dict[str, Any] = {"none_is_leaf": True, "namespace": _NAMESPACE}
    steps, children, _ = optree.tree_flatten_with_accessor(node, is_leaf=_below(), **options)
    return [
        (step[0].entry, step.codify, child)
        for step, child in zip(steps, children, strict=True)
        if step
    ]


def _nodes(tree: Tree, root: str) -> Iterator[tuple[str, Any]]:
    """Every container of a tree, with its place."""
    todo = [(root, tree)]
    while todo:
        place, node = todo.pop()
        if not optree.tree_is_leaf(node, none_is_leaf=True, namespace=_NAMESPACE):
            yield place, node
            todo += reversed([(write(place), child) for _, write, child in _branches(node)])


def _endless(tree: Tree) -> str:
    """Why a tree cannot be walked to its end: it contains itself, or is nested too deep."""
    todo: list[tuple[str, Any, tuple[int, ...]]] = [("tree", tree, ())]
    while todo and len(todo[-1][2]) < 2000:
        place, node, above = todo.pop()
        if id(node) in above:
            name = f"{place} is the {type(node).__name__}"
            return (
                f"this is no tree: {name} that contains it; hand the tensors in without what "
                "refers back"
            )
        todo += [(write(place), child, (*above, id(node))) for _, write, child in _branches(node)]
    return (
        "a tree is nested too deep, in more levels than optree can follow; hand its tensors in as "
        "a flat list or dict"
    )


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape, type and numbers, on any devices. NaN equals
    NaN."""
    if one is other:
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    other = other.to(one.device)
    return bool(((one == other) | ((one != one) & (other != other))).all())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an argument of an operation: a single one, or those in lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in cast("list[Any]", value):
            yield from tensors_in(item)
