"""Batch norm layers of a stage's private copy, which return their statistics instead of writing
buffers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.torch_names import BatchNorm as AnyBatchNorm
from funcpipe._src.core.torch_names import buffers_of, check_dimensions, parameters_of
from funcpipe._src.models.norms.batchnorm import Moments, batch_norm_at
from funcpipe._src.models.norms.norm_commit import NormStats, Running
from funcpipe._src.models.norms.written_buffers import (
    BATCH_NORMS,
    NormCall,
    NormInterceptor,
    refuse_writes,
    version,
)


@dataclass
class Deferral:
    """The extra data of a deferred layer.

    The layer keeps it in one attribute, so that it hides no attribute of the user's class.

    Attributes:
        path: the path of the layer.
        kind: the original class of the layer.
        momentum: the momentum of its running averages.
        counted: whether the layer counts batches.
        collected: the statistics of this microbatch. None: they do not count.
    """

    path: str
    kind: type[AnyBatchNorm]
    momentum: float | None
    counted: bool = True
    collected: list[Moments] | None = None

    def take(self) -> NormStats:
        """Take the statistics of one microbatch. Statistics of later calls, in a backward, do
        not count."""
        moments, self.collected = tuple(self.collected or ()), None
        return NormStats(moments, self.momentum, self.counted)


class DeferredBatchNorm(AnyBatchNorm):
    """A batch norm layer of a stage's private copy that collects statistics instead of writing its
    buffers.

    The layer's class becomes a subclass of this class and of its own class, so methods of a user's
    subclass remain.
    """

    deferral: Deferral

    @classmethod
    def convert(cls, layer: AnyBatchNorm, path: str) -> Running:
        """Turn a layer of a private copy into a deferred layer, in place. Returns the names of
        its buffers."""
        vars(layer)["deferral"] = Deferral(path, type(layer), layer.momentum)
        layer.__class__ = _deferred(type(layer))
        return Running.of(layer, path)

    @staticmethod
    def converts(layer: nn.Module) -> TypeGuard[AnyBatchNorm]:
        """Whether the running statistics of a layer can be deferred."""
        return (
            isinstance(layer, AnyBatchNorm)
            and layer.track_running_stats
            and layer.running_mean is not None
        )

    @staticmethod
    def has_own_forward(kind: type[nn.Module]) -> bool:
        """Whether a class overrides torch's forward."""
        return kind.forward not in (AnyBatchNorm.forward, nn.SyncBatchNorm.forward)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickle cannot find a class that was made at run time, so unpickling makes it again.
        return (_blank, (self.deferral.kind,), self.__dict__)

    def forward(self, input: Tensor) -> Tensor:
        """Normalise as ``nn.BatchNorm`` does, without writing a buffer."""
        check_dimensions(self, input)
        if self.training and isinstance(self, nn.SyncBatchNorm):
            refuse_processes(self)
        # Direct table lookups: nn.Module.__getattr__ is slow, and this runs for each microbatch.
        tensors = {**parameters_of(self), **buffers_of(self)}
        mean, var, weight, bias = [
            tensors[name] if name in tensors else getattr(self, name) for name in _TENSORS
        ]
        return _normalise(
            self, NormCall(input, mean, var, weight, bias, self.training, eps=self.eps)
        )


_TENSORS = ("running_mean", "running_var", "weight", "bias")
"""The tensors of a layer that a call of batch norm gets, in this order."""


class _OwnForward(DeferredBatchNorm):
    """A deferred layer whose class overrides forward: its calls of torch's batch norm are deferred.

    The forward counts batches on a copy of the counter, which is dropped.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Run the layer's own forward; its calls of torch's batch norm go to `_defer_call`."""
        counter = buffers_of(self).get("num_batches_tracked")
        # The forward counts on a copy. Whether it counts at all shows in the copy's version.
        scratch = buffers_of(self)["num_batches_tracked"] = (
            None if counter is None else counter.clone()
        )
        start = version(scratch)
        try:
            with NormInterceptor(
                {id(self.running_mean), id(self.running_var)},
                BATCH_NORMS,
                partial(_defer_call, self),
            ):
                y = self.deferral.kind.forward(self, *args, **kwargs)
            left = buffers_of(self)["num_batches_tracked"]
            self.deferral.counted = (
                left is not scratch or version(left) != start or _moved(left, counter)
            )
        finally:
            buffers_of(self)["num_batches_tracked"] = counter
        return y


def _defer_call(layer: DeferredBatchNorm, call: NormCall) -> Tensor:
    """Defer a call of torch's batch norm in training. Raises PlanError if its buffers are not
    the layer's."""
    deferral = layer.deferral
    if call.running_mean is not layer.running_mean or call.running_var is not layer.running_var:
        refuse_writes(
            deferral.kind.__name__,
            [f"{deferral.path}.running_mean", f"{deferral.path}.running_var"],
        )
    if layer.momentum is not None:  # with None, the forward computes momentum from the counter
        deferral.momentum = call.momentum
    return _normalise(layer, call)


def _normalise(layer: DeferredBatchNorm, call: NormCall) -> Tensor:
    deferral = layer.deferral
    y, stats = batch_norm_at(deferral.path, call)
    if deferral.collected is not None:
        deferral.collected += stats
    return y


def _moved(after: Tensor | None, before: Tensor | None) -> bool:
    """Whether a counter was written to under inference mode, where torch counts no versions."""
    return (
        after is not None
        and before is not None
        and after.is_inference()
        and not torch.equal(after, before)
    )


def refuse_processes(layer: nn.SyncBatchNorm) -> None:
    """Raise PlanError if the layer would share statistics with other processes."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and torch.distributed.get_world_size(layer.process_group) > 1:
        raise PlanError(
            "SyncBatchNorm exchanges the statistics of each microbatch with other processes, but "
            "their lanes may be at another action of the schedule; use nn.BatchNorm"
        )


@lru_cache(maxsize=256)
def _deferred(kind: type[AnyBatchNorm]) -> type[DeferredBatchNorm]:
    base = _OwnForward if DeferredBatchNorm.has_own_forward(kind) else DeferredBatchNorm
    subclass: Any = type(f"Deferred{kind.__name__}", (base, kind), {})
    return subclass


def _blank(kind: type[AnyBatchNorm]) -> DeferredBatchNorm:
    subclass = _deferred(kind)
    return subclass.__new__(subclass)
