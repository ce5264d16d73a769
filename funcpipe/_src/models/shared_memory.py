"""Refuse buffers that share memory with parameters, because the buffers of stages are copies."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from funcpipe._src.core.errors import raise_all
from funcpipe._src.core.torch_names import storage_number
from funcpipe._src.models.norms.written_buffers import has_numbers


def refuse_shared_memory(module: nn.Module) -> None:
    """Raise PlanError if a buffer shares memory with a parameter.

    ``register_buffer("w", linear.weight.detach())`` makes such a buffer. In the module, it changes
    with each step of an optimizer. The stage's state is a copy, which would keep the old numbers.
    """
    # By storage, because tensors that were read from one file may share a storage without an
    # overlap.
    places: dict[int, list[tuple[str, int, int]]] = {}
    for name, parameter in module.named_parameters():
        if bounds := _bounds(parameter):
            places.setdefault(bounds[0], []).append((name, *bounds[1:]))
    faults: list[str] = []
    for name, buffer in module.named_buffers():
        storage, start, end = _bounds(buffer) or (0, 0, 0)
        for parameter, first, last in places.get(storage, ()):
            if start < last and first < end:
                faults.append(
                    f"the buffer {name!r} shares memory with the parameter {parameter!r}, so it "
                    "changes with the parameter, but a stage has a copy of the buffer, which would "
                    f"keep the old numbers; compute the value from {parameter!r} in the forward, "
                    "or register a clone, which keeps its numbers"
                )
                break
    raise_all(f"this {type(module).__name__} cannot be a stage:", faults)


def _bounds(tensor: Tensor) -> tuple[int, int, int] | None:
    """Return the number of a tensor's storage, and its first byte and its end there, or None."""
    if (
        not has_numbers(tensor)
        or nn.parameter.is_lazy(tensor)
        or tensor.layout is not torch.strided
        or not tensor.numel()
    ):
        return None
    span = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    ends = start * tensor.itemsize, (start + span + 1) * tensor.itemsize
    return storage_number(tensor.untyped_storage()), *ends
