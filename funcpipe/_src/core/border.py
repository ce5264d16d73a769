"""Borders: the values between two stages, detached, dense, and not written to.

A stage that may write in place gets a copy-on-write copy. This file does not own transfers between
devices or processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.core.plain_tensors import here
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
    """A tree between stages: leaves, structure, and which leaves need gradients.

    Tensors are detached and dense. No one writes into them or into the border: a stage that may
    write gets a `cow_clone`.

    Attributes:
        leaves: the leaves of the tree.
        spec: the structure of the tree.
        flags: for each leaf, whether gradients flow back into it. Empty for a border of gradients.
        words: the cache key (`cache_key.border_key`); None until it is first needed.
        versions: (leaf, number of writes at the stage's return) of each leaf without a graph. A
            stage may keep the memory of such a leaf and write into it later, by mistake.
        shared: the leaves that share memory with other leaves. In the uncut model, an in-place
            write into one of them would change the others too.
    """

    __slots__ = ("flags", "leaves", "shared", "spec", "versions", "words")

    def __init__(
        self, leaves: list[Any], spec: Spec, flags: Sequence[bool], words: Hashable = None
    ) -> None:
        self.leaves, self.spec, self.flags, self.words = leaves, spec, flags, words
        self.versions: list[tuple[int, int]] | None = None
        self.shared: Sequence[int] = ()

    def refuse_rewritten(self) -> None:
        """Raise PlanError if a leaf was written to after its stage returned it."""
        if self.versions and any(
            version(self.leaves[index]) != before for index, before in self.versions
        ):
            raise PlanError(
                "a stage wrote into a tensor after it had handed it on, so later stages would read "
                "the numbers of another microbatch; return a new tensor for each microbatch: "
                "y.clone()"
            )

    def shapes(self) -> list[Any]:
        """Return the shapes of the leaves; None for a leaf without a shape."""
        return [getattr(leaf, "shape", None) for leaf in self.leaves]

    def tree(self) -> Tree:
        """Return the tree."""
        return unflatten(self.spec, self.leaves)

    def mapped(self, fn: Callable[[Tensor], Tensor]) -> Border:
        """Return a border with ``fn`` applied to the tensors."""
        leaves = [fn(leaf) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        border = Border(leaves, self.spec, self.flags)
        border.shared = self.shared
        return border


def sharing_memory(leaves: Sequence[Any]) -> list[int]:
    """Return the leaves (by number) that have numbers in common with other leaves.

    Pass the leaves before `dense`, which copies views.
    """
    places: dict[int, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.layout is _strided and leaf.numel():
            places.setdefault(storage_number(here(leaf).untyped_storage()), []).append(index)
    pairs = [pair for found in places.values() for pair in combinations(found, 2)]
    found = [pair for pair in pairs if _overlap(*(here(leaves[index]) for index in pair))]
    return sorted({index for pair in found for index in pair})


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two views of one memory may have a number in common.

    Exact for slices, transposes and chunks of one dense tensor. True for others in doubt.
    """
    strides = sorted({*_long_strides(one), *_long_strides(other)} - {0}, reverse=True)
    first, second = _digits(one, strides), _digits(other, strides)
    if first is None or second is None:
        return True
    pairs = zip(first, second, strict=True)
    return all(max(a.start, b.start) < min(a.stop, b.stop) for a, b in pairs)


def _long_strides(view: Tensor) -> list[int]:
    """Return the strides of the dimensions that have several entries."""
    return [stride for size, stride in zip(view.shape, view.stride(), strict=True) if size > 1]


def _digits(view: Tensor, strides: Sequence[int]) -> list[range] | None:
    """Write the places of a view's numbers with one digit per stride: the range of each digit.

    None for expanded views, windows, and views whose rows do not fit between two strides.
    """
    own = _long_strides(view)
    if 0 in own or len({*own}) < len(own):
        return None
    sizes = {stride: n for n, stride in zip(view.shape, view.stride(), strict=True) if n > 1}
    digits: list[range] = []
    rest, larger = view.storage_offset(), 0
    for stride in strides:
        first, rest = divmod(int(rest), stride)
        digits.append(range(first, first + int(sizes.get(stride, 1))))
        if larger and digits[-1].stop * stride > larger:
            return None
        larger = stride
    return [*digits, range(int(rest), int(rest) + 1)]


def refuse_shared_writes(border: Border, opened: Sequence[Any]) -> None:
    """Raise PlanError if a stage wrote in place into leaves that share memory with other leaves."""
    if any(version(opened[index]) for index in border.shared):
        raise PlanError(
            "the stage writes in place into a value whose memory the stage before, or the batch, "
            "handed on twice, so the results would depend on the place of the cut: in the uncut "
            "model, the other value would change too. Write into a copy (x = x.clone(), "
            "inplace=False), or return copies from the stage before"
        )


def given(tree: Tree) -> Border:
    """Return the border of a tree of the caller. No gradients flow back into it."""
    if isinstance(tree, Tensor):
        return Border([tree], LEAF, (False,))
    leaves, spec = flatten(tree)
    return Border(leaves, spec, (False,) * len(leaves))


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor itself if it fills its memory from the start, else a dense copy.

    A copy to another device compacts a slice or an expanded tensor, but passing the tensor on the
    same device does not. Kernels round differently for other layouts and alignments. So tensors are
    always made dense, and results do not depend on the placement of stages.
    """
    if tensor.is_nested:
        raise PlanError(
            "a stage hands on a nested tensor (torch.nested), which cannot cross between stages: "
            "return its padded values and lengths, and make the nested tensor in the stage that "
            "needs it. nn.TransformerEncoder makes a nested tensor in evaluation with a padding "
            "mask: construct it with enable_nested_tensor=False"
        )
    if tensor.layout is not _strided:
        return tensor.to_dense()
    if tensor.storage_offset() == 0 and (tensor.is_contiguous() or fills(tensor)):
        return tensor
    return tensor.clone(memory_format=torch.preserve_format)


_strided = torch.strided  # looked up once: `dense` compares it for every tensor at every border


def fills(tensor: Tensor) -> bool:
    """Return whether a strided tensor fills its memory without gaps, with axes in any order."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def share(leaves: Iterable[Any]) -> list[Any]:
    """Return copy-on-write copies of the caller's tensors.

    During the lifetime of the copies, any thread may call `cow_clone` for the same memory. Without
    them that would be a race: turning memory into copy-on-write memory is not thread-safe, and two
    runs may get the same tensors.
    """
    with _sharing:
        return [caller_copy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def mark_shared(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return handles with the effect of `share`, for tensors whose memory can be copy-on-write.

    `cow_clone` copies other tensors at once, which is safe without a handle.
    """
    if under_transform():
        return []
    with _sharing:
        return [
            handle
            for tensor in tensors
            if (handle := cow_clone_unchecked(tensor, lambda _: None)) is not None
        ]


def caller_copy(tensor: Tensor) -> Tensor:
    """Return a detached copy of a tensor from or for the caller, as `cow_clone` makes it."""
    return cow_clone(tensor.detach())


_sharing = threading.Lock()


def open_border(border: Border, *, grad: bool) -> tuple[Tree, dict[int, Tensor]]:
    """Return the tree for a stage, and the leaves that need gradients, by number."""
    if border.versions is not None:
        border.refuse_rewritten()
    if border.spec is LEAF and isinstance(border.leaves[0], Tensor):  # the usual case
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
            value = cow_clone_unchecked(value)  # unchecked, because a run refuses transforms
        values.append(value)
    return unflatten(border.spec, values), leaves


def close_border(tree: Tree, name: str, *, stays: bool = False) -> tuple[Border, list[Any]]:
    """Return the border of a tree that a stage returned, and the leaves with their graphs.

    Args:
        tree: the tree.
        name: the name of the tree in messages.
        stays: whether the tree goes to the loss and not to another stage. Its leaves may then hide
            tensors.

    Raises:
        PlanError: the tree hides tensors.
    """
    if isinstance(tree, Tensor):  # the usual case
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
    """Sum gradients of one value leaf by leaf, in the given order, out of place.

    None means no gradient. The order matters: another order rounds differently.
    """
    total = first
    for gradients in others:
        if total is None:
            total = gradients
        elif gradients is not None:
            total = [_plus(a, b) for a, b in zip(total, gradients, strict=True)]
    return total
