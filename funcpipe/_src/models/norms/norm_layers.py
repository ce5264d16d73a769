"""Batch norm layers of a stage's private copy, which return their statistics instead of writing
buffers.

The layers and their forwards stay as they are. Their buffers become `NormBuffer` tensors, and
torch's batch norm asks these what to do. So layers, subclasses with their own forward, and
functions that borrow the buffers of a layer are all deferred in the same way, also in a
recomputation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeGuard
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.torch_names import BatchNorm as AnyBatchNorm
from funcpipe._src.core.torch_names import buffers_of, wrapper_tensor
from funcpipe._src.core.tree import is_differentiable
from funcpipe._src.models.norms.batchnorm import STATE, Moments, NormStats, Running, batch_norm_at
from funcpipe._src.models.norms.written_buffers import (
    BATCH_NORMS,
    NormCall,
    norm_call,
    refuse_writes,
)


def is_deferrable(layer: nn.Module) -> TypeGuard[AnyBatchNorm]:
    """Whether the running statistics of a layer can be deferred."""
    return (
        isinstance(layer, AnyBatchNorm)
        and layer.track_running_stats
        and layer.running_mean is not None
    )


class UnsyncedBatchNorm(nn.SyncBatchNorm):
    """A SyncBatchNorm layer within one process, on any device: it computes the same as BatchNorm."""

    forward = nn.BatchNorm1d.forward  # pyright: ignore[reportAssignmentType]


def without_processes(layer: nn.SyncBatchNorm) -> None:
    """Let a layer of a private copy compute within one process, or raise PlanError."""
    if type(layer) is nn.SyncBatchNorm:
        layer.__class__ = UnsyncedBatchNorm
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if layer.training and distributed and torch.distributed.get_world_size(layer.process_group) > 1:
        raise PlanError(
            "SyncBatchNorm exchanges the statistics of each microbatch with other processes, but "
            "their lanes may be at another action of the schedule; use nn.BatchNorm"
        )


class NormBuffer(Tensor):
    """A buffer of a batch norm layer in a stage's copy, which the layer does not write.

    Operations get the stage's tensor instead. A batch norm in training goes to ``answer``. An
    addition in place is only noted, because the commit counts batches.
    """

    tensor: Tensor | None  # of the stage; None: the copy is idle
    # Runs a batch norm that would write. Weak: a cycle would keep tensors until a collection.
    answer: WeakMethod[Callable[[NormCall], Tensor]]
    added: Any  # by the forward in this microbatch, in sum; None: nothing

    def __new__(cls, answer: Callable[[NormCall], Tensor]) -> Self:
        """Make a buffer without a tensor."""
        made = wrapper_tensor(cls, (0,))
        made.tensor, made.answer, made.added = None, WeakMethod(answer), None
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer a batch norm or an addition, or run an operation with the stage's tensors."""
        keywords = kwargs or {}
        if func in BATCH_NORMS:
            call = norm_call(func, args, keywords)
            for buffer in (call.running_mean, call.running_var):
                if call.training and isinstance(buffer, NormBuffer):
                    answer = buffer.answer()
                    assert answer is not None  # the stage's copy, which runs this, has its owner
                    return answer(call)
        if func in (Tensor.add_, Tensor.__iadd__) and _counts(args[0]):
            args[0].added = (args[0].added or 0) + args[1]
            return args[0]
        return func(*with_numbers(args), **with_numbers(keywords))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation that did not ask ``__torch_function__`` with the stage's tensors."""
        return func(*with_numbers(args), **with_numbers(kwargs or {}))


def _counts(buffer: Any) -> bool:
    """Whether this is a counter: additions to running statistics are writes, which are refused."""
    return isinstance(buffer, NormBuffer) and not is_differentiable(buffer.tensor)


def with_numbers(value: Any) -> Any:
    """Replace each `NormBuffer` in a value or among the arguments of an operation by its numbers."""
    if isinstance(value, NormBuffer):
        return value.tensor if value.added is None else value.tensor + value.added
    if type(value) in (tuple, list):
        return type(value)(map(with_numbers, value))
    if type(value) is dict:
        return {name: with_numbers(item) for name, item in value.items()}  # pyright: ignore[reportUnknownVariableType]
    return value


def stage_tensor(buffer: Any) -> Any:
    """The stage's tensor for a `NormBuffer`; any other value as it is."""
    return buffer.tensor if isinstance(buffer, NormBuffer) else buffer


class DeferredNorm:
    """The buffers of one batch norm layer in a stage's copy, and its statistics of a microbatch."""

    def __init__(self, layer: AnyBatchNorm, path: str) -> None:
        self.path, self._names, self._kind = path, Running.of(layer, path), type(layer).__name__
        self._momentum, self._averages = layer.momentum, layer.momentum is None
        self._table = buffers_of(layer)
        self._norm_buffers = [NormBuffer(self._normalised) for _ in STATE]
        self._mean, self._var, self._counter = self._norm_buffers
        self._moments: list[Moments] | None = None
        if isinstance(layer, nn.SyncBatchNorm):
            without_processes(layer)

    def install(self) -> None:
        """Put the buffers in the places of the stage's tensors."""
        for name, buffer in zip(STATE, self._norm_buffers, strict=True):
            buffer.tensor = self._table.get(name)
            if buffer.tensor is not None:
                self._table[name] = buffer

    def release(self) -> None:
        """Forget the stage's tensors."""
        for buffer in self._norm_buffers:
            buffer.tensor = None

    def begin(self, *, collects: bool) -> None:
        """Begin a microbatch, whose statistics count or not."""
        self._moments, self._counter.added = [] if collects else None, None

    def end(self) -> NormStats:
        """Return the statistics of the microbatch. Those of a later recomputation do not count."""
        moments, self._moments = tuple(self._moments or ()), None
        rebound = self._table.get("num_batches_tracked") is not self._counter
        if rebound and self._counter.tensor is not None:
            self._table["num_batches_tracked"] = self._counter
        return NormStats(moments, self._momentum, rebound or self._counter.added is not None)

    def _normalised(self, call: NormCall) -> Tensor:
        """Answer a batch norm on these buffers. Raises PlanError if it has other buffers too."""
        if call.running_mean is not self._mean or call.running_var is not self._var:
            refuse_writes(self._kind, [self._names.mean, self._names.var])
        if not self._averages:  # otherwise, the forward computes the momentum from the counter
            self._momentum = call.momentum
        y, stats = batch_norm_at(
            self.path, call._replace(running_mean=self._mean.tensor, running_var=self._var.tensor)
        )
        if self._moments is not None:
            self._moments += stats
        return y
