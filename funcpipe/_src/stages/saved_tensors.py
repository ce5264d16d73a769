"""Take the tensors that autograd saved out of a graph, so that they can be moved to the host.

Autograd allows hooks on a saved tensor after the forward. So forwards that are not offloaded cost
nothing extra, and stages may use functions that refuse saved-tensor hooks, such as torch.func.

These tensors stay on the device:

- parameters, state, the batch, and tensors that share their memory, because others keep them;
- tensors with a single number, such as the 2 in ``x * 2``;
- tensors that are not plain dense tensors (subclasses, sparse, quantized, conjugate views), that
  are on another device, or whose memory torch did not allocate;
- tensors that torch does not show: saved by operations written in C++, by an in-place operation on
  a view (``CopySlices``), or as an attribute of the ``ctx`` of an ``autograd.Function``;
- tensors that another hook has packed. A ``torch.utils.checkpoint`` region keeps only its inputs,
  which move.
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

_ALIGNED = 64  # torch's allocations on the CPU begin at a multiple of this many bytes
_BLOCK = 512
"""Torch's allocations on CUDA begin at a multiple of this many bytes. Offsets shrink by multiples
of it, so that kernels see the same alignment after a move; another alignment may change rounding."""

_names_of = Remembered(saved_names)


class SavedSlot:
    """The place of one saved tensor.

    Autograd holds the slot. The slot holds the tensor while the tensor is on the device.
    """

    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None

    def pack(self, tensor: Tensor) -> SavedSlot:
        """Take the tensor. Autograd calls this hook."""
        # Detached: a saved output refers to the graph, which refers to this slot. A cycle.
        self.tensor = tensor.detach()
        return self


def _unpack(slot: SavedSlot) -> Tensor:
    if slot.tensor is None:
        raise RuntimeError("internal error: a backward needs a residual that is in host memory")
    return slot.tensor


def take_out(roots: Iterable[Any], to: HostStream, fixed: frozenset[int]) -> list[SavedSlot]:
    """Put every movable saved tensor in the graph behind ``roots`` into a slot.

    Raises:
        RuntimeError: autograd's error for a saved tensor that was modified in place.
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
    """Yield the saved tensors of a node, as pairs of autograd's handle and the tensor.

    The tensor is read as a backward reads it, which checks that it was not modified. A tensor that
    another hook has packed is skipped, because reading would unpack it.
    """
    for hidden, name in _names_of(type(node)):
        handles = _many(getattr(node, hidden))
        hooks = [handle.unpack_hook for handle in handles]
        if all(hook is None for hook in hooks):
            yield from zip(handles, _many(getattr(node, name)), strict=True)
        for hook in hooks:
            yield from inputs_of_region(hook)


def is_packed(node: Any) -> bool:
    """Return whether another hook has packed saved tensors of a node, as
    ``torch.utils.checkpoint`` does."""
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
    """The position of a slot's tensor within its piece."""

    slot: weakref.ref[SavedSlot]
    dtype: Any
    size: Sequence[int]
    stride: Sequence[int]
    offset: int


class SavedPiece:
    """A stretch of memory that several slots share.

    It is copied once. Then all tensors of its slots are views of the copy.

    Attributes:
        flat: the stretch as a flat tensor, with the smallest dtype of its tensors.
        views: a `SavedView` for each slot.
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
        """Whether autograd still holds one of the slots."""
        return any(view.slot() is not None for view in self.views)

    def empty(self) -> None:
        """Drop the tensors of all slots."""
        for view in self.views:
            slot = view.slot()
            if slot is not None:
                slot.tensor = None

    def restore(self) -> None:
        """Give all slots their tensors again, as views of ``flat``."""
        for ref, dtype, size, stride, offset in self.views:
            slot = ref()
            if slot is not None:
                slot.tensor = self.flat.view(dtype).as_strided(size, stride, offset)


def _offset(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def _end(tensor: Tensor) -> int:
    """Return the byte offset after a tensor's last number, within its storage."""
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
    )
    return (_offset(tensor) + last + 1) * tensor.itemsize


def saved_pieces(slots: Sequence[SavedSlot]) -> list[SavedPiece]:
    """Group slots that share memory into pieces."""
    groups: dict[tuple[int, int], list[SavedSlot]] = {}
    for slot in slots:
        if slot.tensor is not None:
            groups.setdefault(
                (address(slot.tensor), slot.tensor.untyped_storage().nbytes()), []
            ).append(slot)
    return [SavedPiece(group) for group in groups.values()]
