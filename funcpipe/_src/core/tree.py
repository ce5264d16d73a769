"""Trees: nested containers with tensors and other values as leaves. Only this file imports optree.

A leaf is an object that is not a container; ``None`` is a leaf. Containers are those of optree.
Others are registered when a tree first contains them: subclasses of dict and ``UserDict`` (such as
Hugging Face's ``ModelOutput`` and ``BatchEncoding``), dataclasses, and all classes of torch's own
registry (TensorDict). Other objects with tensors raise in `refuse_hidden`.

`containers.py` knows how to flatten other classes, `hidden.py` finds tensors in objects.
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
    """Return the leaves of a tree in a fixed order (dict keys sorted), and its structure.

    Containers for which ``whole`` returns True are leaves.

    Raises:
        PlanError: the tree contains itself.
    """
    kind = type(tree)
    if kind is Tensor or tree is None:  # fast path: most trees of a run are one tensor or None
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
    """Return the tree with a structure and leaves: the inverse of `flatten`.

    Raises:
        PlanError: a registered class, or its constructor, raises for these leaves.
    """
    try:
        return optree.tree_unflatten(spec, leaves)
    except Exception as error:
        raise PlanError(
            f"a container cannot be rebuilt with other leaves, {type(error).__name__}: {error}. "
            "Trees of gradients contain None for leaves without a gradient (frozen, or not "
            "floating-point), and microbatches contain fewer rows. So pass such leaves beside the "
            "container, or let its constructor (or its registered unflatten function) accept all "
            f"values. The tree is {str(spec)[:200]}"
        ) from error


def structure(tree: Tree) -> Spec:
    """Return the structure of a tree."""
    return flatten(tree)[1]


def map_leaves(fn: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """Apply ``fn`` to the leaves of trees of one structure, and return a tree like them."""
    leaves, spec = flatten(tree)
    columns = [flatten(other)[0] for other in others]
    return unflatten(spec, [fn(*row) for row in zip(leaves, *columns, strict=True)])


def map_tensors(fn: Callable[[Tensor], Any], tree: Tree) -> Tree:
    """Apply ``fn`` to the tensors of a tree; other leaves stay as they are."""
    if isinstance(tree, Tensor):
        return fn(tree)
    return map_leaves(lambda leaf: fn(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def paths(tree: Tree) -> list[Path]:
    """Return the path of keys to each leaf, in the order of `flatten`."""
    return optree.treespec_paths(structure(tree))


def locations(tree: Tree, root: str, whole: Callable[[Any], bool] | None = None) -> list[str]:
    """Return the location of each leaf as Python code: ``params[0]['1.weight']``.

    Containers for which ``whole`` returns True are leaves.
    """
    spec = flatten(tree, whole)[1]
    return [accessor.codify(root) for accessor in optree.treespec_accessors(spec)]


def spread(prefix: Tree, tree: Tree, whole: Callable[[Any], bool] | None = None) -> Leaves:
    """Return, for each leaf of ``tree``, the leaf of ``prefix`` above it.

    Raises ValueError if ``prefix`` is not a prefix of the tree's structure.
    """
    for root in (prefix, tree):
        flatten(root, whole)  # registers new container classes, which optree would see as leaves
    return optree.broadcast_prefix(
        prefix, tree, is_leaf=whole, none_is_leaf=True, namespace=_NAMESPACE
    )


def named_leaves(tree: Tree) -> list[tuple[str, Tensor]]:
    """Return the tensors of a tree with dotted names, in the order of `leaves`.

    A tensor that appears several times is listed once, with its first name.

    >>> [name for name, _ in fp.named_leaves(({"0.bias": torch.zeros(1)}, [torch.ones(1)]))]
    ['0.0.bias', '1.0']

    Args:
        tree: any tree, such as the params of all stages.

    Raises:
        PlanError: an object in the tree hides tensors.
    """
    values, spec = flatten(tree)
    faults = refuse_hidden(tree, "tree", values, spec)
    raise_all(
        "this is not a tree of tensors; give the params of a run (fp.split(model, n).params, or "
        "the params of stage, params, state = fp.from_module(module)), or "
        "list(module.parameters()):",
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
    """Return the tensors of a tree, each once, for example for an optimizer of ``torch.optim``.

    None and values that are not tensors are left out. So the leaves of params and of gradients may
    differ in number: to pair them, use the names of `named_leaves`.

    >>> w = torch.zeros(2)
    >>> len(fp.leaves(({"w": w, "tied": w}, {"steps": 3, "b": torch.ones(1)})))
    2

    Args:
        tree: any tree, such as the params of all stages.

    Raises:
        PlanError: an object in the tree hides tensors.
    """
    return [leaf for _, leaf in named_leaves(tree)]


def at(tree: Tree, path: str | Path) -> Any:
    """Return the leaf or the container at a path: a tuple of keys, or the key of a flat dict.

    Raises KeyError if there is no such path.
    """
    structure(tree)  # registers new container classes
    for key in path if isinstance(path, tuple) else (path,):
        tree = {step: child for step, _, child in _branches(tree)}[key]
    return tree


def under_transform() -> bool:
    """Return whether this call is inside a transform of torch.func, such as grad or vmap."""
    return transforms() is not None


def cow_clone(tensor: Tensor) -> Tensor:
    """Return a differentiable copy-on-write copy of a tensor: it takes memory at the first write.

    With such a copy, a layer that writes in place at a border does not change the original.
    """
    if under_transform():  # torch.func has no rule for the lazy kind
        return tensor.clone()
    return cow_clone_unchecked(tensor)


def cow_clone_unchecked(tensor: Tensor, otherwise: Callable[[Tensor], Any] = Tensor.clone) -> Any:
    """Do the work of `cow_clone`, without looking for transforms of torch.func.

    ``otherwise`` is called if no lazy copy is possible. On devices with streams the copy is always
    made at once, for three reasons. Torch makes the late copy on the legacy default stream, which
    lanes do not wait for. Its allocator forgets streams recorded on shared memory. And a device
    graph does not contain the late copy.
    """
    if tensor.is_cpu or tensor.is_meta or isinstance(tensor, (FakeTensor, FunctionalTensor)):
        # Memory from ``torch.load`` has no allocator. Torch notices that only at the first write to
        # a lazy copy, and then crashes. Such memory is not resizable.
        try:
            if tensor.untyped_storage().resizable():
                return lazy_clone(tensor)
        except RuntimeError:  # memory that torch did not allocate (numpy, shared), odd layouts
            pass
    return otherwise(tensor)


def is_differentiable(leaf: Any) -> bool:
    """Return whether a leaf can have a gradient: whether it is a floating or complex tensor."""
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def take_apart(node: Any) -> tuple[list[Any], Any]:
    """Return the children of a container, and the data to rebuild it."""
    children, kept, *_ = optree.tree_flatten_one_level(
        node, none_is_leaf=True, namespace=_NAMESPACE
    )
    return list(children), kept


def is_registered(kind: type) -> bool:
    """Return whether a class itself is registered as a container, by a user or by `flatten`."""
    entry = optree.register_pytree_node.get(kind, namespace=_NAMESPACE)
    return entry is not None and entry.type is kind


def put_together_by(kind: type) -> Callable[[Any, Any], Any] | None:
    """Return the function (data, children) -> container of a class; None if its instances are
    leaves.

    `take_apart` returns these arguments in the other order.
    """
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
    """Register the class of a leaf as a container, if possible. Return whether it is one now."""
    kind, functions = type(leaf), flatten_fns_of(leaf)
    if functions is None:
        return False
    with _registering:
        if kind in _registered:
            if optree.tree_is_leaf(leaf, namespace=_NAMESPACE):
                raise TypeError(
                    f"cannot flatten {kind.__name__}: optree sees its instances as leaves"
                )
            return True  # another thread has registered the class meanwhile
        optree.register_pytree_node(
            kind, *functions, path_entry_type=_PathEntry, namespace=_NAMESPACE
        )
        _registered.add(kind)
    return True


# -- trees that hide tensors, or contain themselves
# -------------------------------------------------------------------------------


def refuse_hidden(tree: Tree, root: str, leaves: Leaves, spec: Spec) -> list[str]:
    """Return the faults of a tree that hides tensors: they would not be cut, moved or trained.

    Args:
        tree: the tree.
        root: the name of the tree in messages.
        leaves: the leaves of the flattened tree, or other objects in their places. []: only
            containers are checked.
        spec: the structure of the flattened tree.
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
    rows += [(place, _fault_of_node(node)) for place, node, _ in _nodes(tree, root)]
    return [f"{place} {fault}" for place, fault in rows if fault]


def _odd(spec: Spec) -> bool:
    """Return whether a structure may contain tensors.

    Tensors can be keys, data that a class keeps besides its children, or attributes of a named
    tuple.
    """
    first, *referents = gc.get_referents(spec)
    if first is Spec and only_plain(referents):  # the usual case
        return False
    referents.append(first)
    tuples = any(
        isinstance(kind, type) and issubclass(kind, tuple) and kind.__dictoffset__
        for kind in referents
    )
    return tuples or hides_tensors(referents)


def _fault_of_node(node: Any) -> str:
    """Say why a container cannot be part of a tree although its children can; "" if it can."""
    spec = optree.tree_structure(node, is_leaf=_below(), none_is_leaf=True, namespace=_NAMESPACE)
    if not hides_tensors(
        (gc.get_referents(spec), vars(node) if _is_tuple_with_attributes(node) else ())
    ):
        return ""
    if built := built_in_the_stage(node):
        return built
    return (
        f"is a {type(node).__name__}, which hides tensors outside of its children (as a key, an "
        "attribute, or data of its registered flatten function): they would not be cut, moved or "
        "differentiated. Make them children, or register the class: "
        f"optree.register_pytree_node({type(node).__name__}, flatten, unflatten, "
        f"namespace={_NAMESPACE!r})"
    )


def _is_tuple_with_attributes(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "__dict__")


def _below() -> Callable[[Any], bool]:
    """Return a predicate, for one use, that stops optree one level below its start."""
    first = iter([False])
    return lambda _: next(first, True)


def _branches(node: Any) -> list[tuple[Any, Callable[[str], str], Any]]:
    """Return (key, write, child) for each child of a container.

    ``write`` turns the container's location into the child's location.
    """
    options: dict[str, Any] = {"none_is_leaf": True, "namespace": _NAMESPACE}
    steps, children, _ = optree.tree_flatten_with_accessor(node, is_leaf=_below(), **options)
    return [
        (step[0].entry, step.codify, child)
        for step, child in zip(steps, children, strict=True)
        if step
    ]


def _nodes(tree: Tree, root: str) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """Yield each container of a tree, with its location and the ids of the containers above."""
    todo: list[tuple[str, Any, tuple[int, ...]]] = [(root, tree, ())]
    while todo:
        place, node, above = todo.pop()
        if not optree.tree_is_leaf(node, none_is_leaf=True, namespace=_NAMESPACE):
            yield place, node, above
            inside = (*above, id(node))
            todo += [(write(place), child, inside) for _, write, child in _branches(node)][::-1]


def _endless(tree: Tree) -> str:
    """Say why a tree cannot be flattened: it contains itself, or is nested too deep."""
    for place, node, above in _nodes(tree, "tree"):
        if id(node) in above:
            return (
                f"this is not a tree: {place} is the {type(node).__name__} that contains it; pass "
                "the tensors without the object that refers back"
            )
        if len(above) >= 2000:
            break
    return (
        "a tree is nested too deep, in more levels than optree can follow; pass its tensors as a "
        "flat list or dict"
    )


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Return whether tensors on any devices have one shape, type and numbers. NaN equals NaN."""
    if one is other:
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    other = other.to(one.device)
    return bool(((one == other) | ((one != one) & (other != other))).all())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an argument of an operation: the argument itself, or items of lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in cast("list[Any]", value):
            yield from tensors_in(item)
