"""What goes over an edge between processes: the number of a value's form, and its tensors, small ones in one piece."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcpipe.runtime.wire_format import TensorLayout, TreeForm, memory

HEAD = 16
"""Bytes of what goes with a value: the number of its form, and how long the form is that follows."""


class Message(NamedTuple):
    """All tensors of a small value in one piece of memory, with the number of its form behind them.

    Attributes:
        form: of the value.
        whole: what is sent.
        places: of the tensors in it, those without numbers left out.
    """

    form: TreeForm
    whole: Tensor
    places: list[Tensor]

    @classmethod
    def of(cls, form: TreeForm, number: int, length: int = 0) -> Message:
        """One for values of a form; at the other end they have the form with this number."""
        sizes = [leaf.nbytes for leaf in form.leaves if isinstance(leaf, TensorLayout) and leaf.nbytes]
        with torch.inference_mode(False):  # it is filled again in runs that are in no such mode
            whole = torch.zeros(form.nbytes + HEAD, dtype=torch.uint8, device="cpu")
            *places, head = whole.split([*sizes, HEAD])
            head.copy_(head_of(number, length))
        return cls(form, whole, places)


def head_of(number: int, length: int) -> Tensor:
    """What goes with a value: the number of its form, and how long the form is that follows."""
    return torch.frombuffer(bytearray(struct.pack("<qq", number, length)), dtype=torch.uint8)


def number_of(message: Tensor) -> tuple[int, int]:
    """The number of the form, and how long the form is that follows, which a message ends with."""
    head = bytes(message[-HEAD:].tolist())  # not by numpy: torch takes memory that it has seen for no memory of its own
    number, length = struct.unpack("<qq", head)
    return number, length


def unpacked(packed: Tensor, form: TreeForm, room: Callable[[TensorLayout], Tensor] | None) -> list[Any]:
    """The leaves of a form whose tensors are in one message.

    With no ``room`` of a special kind the first stays where it came: its memory begins where that of the message does,
    as kernels round differently by alignment.
    """
    leaves, start = list[Any](), 0
    for leaf in form.leaves:
        if isinstance(leaf, TensorLayout):
            piece = packed[start : start + leaf.nbytes]
            start += leaf.nbytes
            if room is None and piece.storage_offset() == 0:
                leaf = piece.view(leaf.dtype).as_strided(leaf.size, leaf.strides)
            else:
                leaf = (room or TensorLayout.room)(leaf)
                memory(leaf).copy_(piece)
        leaves.append(leaf)
    return leaves


def rooms(form: TreeForm, room: Callable[[TensorLayout], Tensor] = TensorLayout.room) -> tuple[list[Any], list[Tensor]]:
    """Leaves of a form with new memory, and those of them that travel."""
    leaves = [room(leaf) if isinstance(leaf, TensorLayout) else leaf for leaf in form.leaves]
    return leaves, [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()]
