"""Values at the borders of stages: detached, dense, and never written to: who writes gets a
copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.core.torch_names import storage_number, version
from funcpipe._src.core.tree import (
    LEAF,
    Spec,
    Tree,
    cow_clone,
    cow_clone_unchecked,
    flatten,
    refuse_hidden,
    under_transform,
    unflatten,
)


class Border:
    """A tree between stages: its leaves, its structure, and which leaves carry gradients back.

    Tensors are detached and dense. They and the border are immutable by agreement: who may write
    gets a `cow_clone`. A border of gradients has no flags. ``words`` is its cache key
    (`cache_key.border_key`), None until it is asked for. ``versions`` has, for leaves without a
    graph, their count of writes at the stage's return: a stage may keep their memory and write
    there again. ``shared`` lists the leaves that share memory: without a border, an in-place write
    into one would change the others, too.
    """

    __slots__ = ("flags", "leaves", "shared", "spec", "versions", "words")

    def __init__(
        self, leaves: list[Any], spec: Spec, flags: Sequence[bool], words: Hashable = None
    ) -> None:
        self.leaves, self.spec, self.flags, self.words = leaves, spec, flags, words
        self.versions: list[tuple[int, int]] | None = None
        self.shared: Sequence[int] = ()

    def refuse_rewritten(self) -> None:
        """Raise PlanError for leaves that were written to after their stage returned them."""
        if self.versions and any(
            version(self.leaves[index]) != before for index, before in self.versions
        ):
            raise PlanError(
                "a stage wrote into a tensor after it had handed it on, so its readers get the "
                "numbers of another microbatch; return a tensor of its own for each microbatch: "
                "y.clone()"
            )

    def tree(self) -> Tree:
        """The tree itself."""
        return unflatten(self.spec, self.leaves)

    def mapped(self, fn: Callable[[Tensor], Tensor]) -> Border:
        """The border with what ``fn`` makes of its tensors."""
        leaves = [fn(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        border = Border(leaves, self.spec, self.flags)
        border.shared = self.shared
        return border


def mark_memory_handed_on_twice(border: Border) -> None:
    """Mark the leaves of a border that share memory. A skip is a separate value, even where it
    shares memory."""
    places: dict[int, list[int]] = {}
    for index, leaf in enumerate(border.leaves):
        if isinstance(leaf, Tensor) and leaf.layout is _strided and leaf.numel():
            places.setdefault(storage_number(leaf.untyped_storage()), []).append(index)
    border.shared = [index for found in places.values() if len(found) > 1 for index in found]


def refuse_shared_writes(border: Border, opened: Sequence[Any]) -> None:
    """Raise PlanError if a stage wrote in place into leaves that share memory with other leaves."""
    if any(version(opened[index]) for index in border.shared):
        raise PlanError(
            "the stage writes in place into a value whose memory the stage before handed on "
            "twice, so numbers would depend on the place of the cut: without it the other one "
            "would change, too. Write into a copy (x = x.clone(), inplace=False), or hand on "
            "copies"
        )


def given(tree: Tree) -> Border:
    """The border of a tree that the caller gives: no gradients flow back into it."""
    if isinstance(tree, Tensor):
        return Border([tree], LEAF, (False,))
    leaves, spec = flatten(tree)
    return Border(leaves, spec, (False,) * len(leaves))


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself if it fills its memory from the start, else a copy that does.

    A slice or an expanded tensor would be compacted by a copy to another device but not by a
    hand-over on the same one, and kernels round differently by layout and alignment: made dense
    always, both are the same.
    """
    if tensor.is_nested:
        raise PlanError(
            "a stage hands on a nested tensor (torch.nested), which borders do not take: hand on "
            "its padded values and lengths, and make it nested in the stage that needs it. "
            "nn.TransformerEncoder makes one in evaluation where it gets a padding mask: give it "
            "enable_nested_tensor=False"
        )
    if tensor.layout is not _strided:
        return tensor.to_dense()
    if tensor.storage_offset() == 0 and (tensor.is_contiguous() or fills(tensor)):
        return tensor
    return tensor.clone(memory_format=torch.preserve_format)


_strided = torch.strided  # looked up once: `dense` compares it for every tensor at every border


def fills(tensor: Tensor) -> bool:
    """Whether a strided tensor lies in memory without gaps and without overlap, in any order of
    axes."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def share(leaves: Iterable[Any]) -> list[Any]:
    """Copies of the caller's tensors; while they live, `cow_clone` of the same memory is safe from
    any thread.

    Turning memory into copy-on-write is not safe from two threads at once, and two runs may be
    given the same tensors.
    """
    with _sharing:
        return [caller_copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def mark_shared(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Handles like those of `share` for memory that can be shared; other memory every `cow_clone`
    copies at once."""
    if under_transform():
        return []
    with _sharing:
        return [
            handle
            for tensor in tensors
            if (handle := cow_clone_unchecked(tensor, lambda _: None)) is not None
        ]


def caller_copy(tensor: Tensor) -> Tensor:
    """A copy of a tensor from or for the caller: made on the CPU when someone writes, elsewhere at
    once."""
    return cow_clone(tensor.detach())


_sharing = threading.Lock()


def open_border(border: Border, *, grad: bool) -> tuple[Tree, dict[int, Tensor]]:
    """The tree that a stage gets, and its leaves that gradients are taken of, by number."""
    if border.versions is not None:
        border.refuse_rewritten()
    if border.spec is LEAF and isinstance(border.leaves[0], Tensor):  # most of the time
        tensor = border.leaves[0]
        if not (grad and border.flags[0]):
            return cow_clone_unchecked(tensor), {}
        leaf = tensor.detach().requires_grad_()
        return cow_clone_unchecked(leaf), {0: leaf}
    leaves: dict[int, Tensor] = {}
    values: list[Any] = []
    for index, value in enumerate(border.leaves):
        if isinstance(value, Tensor):
            if grad and border.flags[index]:
                value = leaves[index] = value.detach().requires_grad_()
            value = cow_clone_unchecked(value)  # a run refuses transforms
        values.append(value)
    return unflatten(border.spec, values), leaves


def close_border(tree: Tree, name: str, *, stays: bool = False) -> tuple[Border, list[Any]]:
    """The border of a tree that a stage returns, and its leaves with their graphs.

    Raises:
        PlanError: the tree, called ``name``, hides tensors; leaves may hide some where it ``stays``
            for a loss.
    """
    if isinstance(tree, Tensor):  # most of the time
        tensor = dense(tree)
        border = Border([tensor.detach()], LEAF, (tensor.requires_grad,))
        if not border.flags[0] and not tensor.is_inference():
            border.versions = [(0, version(tensor))]
        return border, [tensor]
    leaves, spec = flatten(tree)
    faults = refuse_hidden(tree, name, [] if stays else leaves, spec)
    raise_all("a stage returned what cannot be handed on:", faults)
    flags = [False] * len(leaves)
    graph = leaves[:]
    border = Border(leaves, spec, flags)
    border.versions = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            graph[index] = leaf = dense(leaf)
            flags[index] = leaf.requires_grad
            leaves[index] = leaf.detach()
            if not leaf.requires_grad and not leaf.is_inference():
                border.versions.append((index, version(leaf)))
    return border, graph


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def add_gradients(
    first: list[Tensor | None] | None, *others: list[Tensor | None] | None
) -> list[Tensor | None] | None:
    """Sum gradients of one value leaf by leaf, in the order given, out of place. None is no
    gradient."""
    total = first
    for gradients in others:
        if total is None:
            total = gradients
        elif gradients is not None:
            total = [_plus(a, b) for a, b in zip(total, gradients, strict=True)]
    return total
