"""Takes what autograd saved out of a graph, so that it can be moved: slots, and the memory that
they share.

Autograd lets hooks be put on a saved tensor after the forward, so a forward that is not moved pays
nothing, and stages may use what refuses saved-tensor hooks (torch.func).

What stays on the device:

- parameters, state and the batch, which others keep anyway, and what shares their memory;
- single numbers (torch takes those of the program, as the 2 in ``x * 2``, for numbers again);
- tensors that are not torch's own dense ones (subclasses, sparse, quantized, conjugate views), that
  lie elsewhere, or whose memory torch did not allocate;
- what torch does not show: saved by operations written in C++, by an in-place operation on a view
  (``CopySlices``), or as an attribute of the ``ctx`` of an ``autograd.Function``;
- what another hook has packed (in a ``torch.utils.checkpoint`` region nothing is kept but its
  inputs, which move).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from funcpipe._src.core.gradient_graph import nodes_of
from funcpipe._src.core.plain_tensors import address, is_plain
from funcpipe._src.core.remembered import Remembered
from funcpipe._src.core.torch_names import inputs_of_region, saved_names
from funcpipe._src.devices.host_link import HostStream

_ALIGNED = 64
"""Torch's allocations on the CPU begin at a multiple of so many bytes."""
_BLOCK = 512
"""On CUDA at a multiple of this: such an offset can be taken off, and kernels see the same
alignment."""

_names_of = Remembered(saved_names)


class SavedSlot:
    """The place of one saved tensor: autograd holds the slot, the slot the tensor while that is on
    the device."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def pack(self, tensor: Tensor) -> SavedSlot:
        """Take the tensor; called by autograd."""
        self.tensor = tensor.detach()  # of an output, else it would hold the graph that holds it
        return self


def _unpack(slot: SavedSlot) -> Tensor:
    if slot.tensor is None:
        raise RuntimeError("internal error: a backward needs a residual that is in host memory")
    return slot.tensor


def take_out(roots: Iterable[Any], to: HostStream, fixed: frozenset[int]) -> list[SavedSlot]:
    """Put every saved tensor that can be moved, in the graph behind some tensors or edges, into a
    slot.

    Raises:
        RuntimeError: autograd's own, where a saved tensor was modified in place.
    """
    slots: list[SavedSlot] = []
    for node in nodes_of(roots):
        for handle, tensor in _saved_by(node):
            if isinstance(tensor, Tensor) and _moves(tensor, to, fixed):
                slot = SavedSlot()
                handle.register_hooks(slot.pack, _unpack)
                slots.append(slot)
    return slots


def _saved_by(node: Any) -> Iterator[tuple[Any, Any]]:
    """What a node saved, as pairs of autograd's handle and the tensor.

    The tensor is read as a backward would read it, which checks whether it was modified since. One
    that is packed already is left alone: to read it would be to unpack it.
    """
    for hidden, name in _names_of(type(node)):
        handles = _many(getattr(node, hidden))
        hooks = [handle.unpack_hook for handle in handles]
        if all(hook is None for hook in hooks):
            yield from zip(handles, _many(getattr(node, name)), strict=True)
        for hook in hooks:
            yield from inputs_of_region(hook)


def is_packed(node: Any) -> bool:
    """Did another hook pack what a node saved, as ``torch.utils.checkpoint`` does."""
    handles = [
        handle for hidden, _ in _names_of(type(node)) for handle in _many(getattr(node, hidden))
    ]
    return any(handle.unpack_hook not in (None, _unpack) for handle in handles)


def _many(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list)) else (value,)  # pyright: ignore[reportUnknownVariableType]


def _moves(tensor: Tensor, to: HostStream, fixed: frozenset[int]) -> bool:
    if not tensor.dim() or not tensor.numel() or not is_plain(tensor) or not to.takes(tensor):
        return False
    at = address(tensor)
    return at not in fixed and at % _ALIGNED == 0


class SavedView(NamedTuple):
    """The place of a slot's tensor in its piece."""

    slot: weakref.ref[SavedSlot]
    dtype: Any
    size: Sequence[int]
    stride: Sequence[int]
    offset: int


class SavedPiece:
    """A stretch of memory with all slots that lie in it; copied once, and then all of them are
    views of the copy.

    Attributes:
        flat: the stretch, as numbers of the smallest type in it.
        views: one for each slot.
    """

    def __init__(self, slots: Sequence[SavedSlot]) -> None:
        tensors = [slot.tensor for slot in slots if slot.tensor is not None]
        smallest = min(tensors, key=lambda tensor: tensor.itemsize)
        low = min(_offset(tensor) * tensor.itemsize for tensor in tensors) // _BLOCK * _BLOCK
        high = max(map(_end, tensors))
        size = smallest.itemsize
        self.flat = smallest.as_strided(((high - low) // size,), (1,), low // size)
        self.views = [
            SavedView(
                weakref.ref(slot),
                tensor.dtype,
                tensor.size(),
                tensor.stride(),
                _offset(tensor) - low // tensor.itemsize,
            )
            for slot, tensor in zip(slots, tensors, strict=True)
        ]

    @property
    def alive(self) -> bool:
        """Does autograd still hold one of the slots."""
        return any(view.slot() is not None for view in self.views)

    def empty(self) -> None:
        """The slots let go of their tensors."""
        for view in self.views:
            slot = view.slot()
            if slot is not None:
                slot.tensor = None

    def restore(self) -> None:
        """The slots get their tensors, in the memory of ``flat``."""
        for ref, dtype, size, stride, offset in self.views:
            slot = ref()
            if slot is not None:
                slot.tensor = self.flat.view(dtype).as_strided(size, stride, offset)


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def _end(tensor: Tensor) -> int:
    """The byte after the last of a tensor, from where its memory begins."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
    )
    return (_offset(tensor) + last + 1) * tensor.itemsize


def saved_pieces(slots: Sequence[SavedSlot]) -> list[SavedPiece]:
    """One piece for all slots that share memory."""
    groups: dict[tuple[int, int], list[SavedSlot]] = {}
    for slot in slots:
        if slot.tensor is not None:
            groups.setdefault(
                (address(slot.tensor), slot.tensor.untyped_storage().nbytes()), []
            ).append(slot)
    return [SavedPiece(group) for group in groups.values()]
