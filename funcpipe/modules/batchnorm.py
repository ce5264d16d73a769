"""Batch norm whose statistics are handed back instead of written: deferred state.

A forward normalises by its own microbatch, as ``nn.BatchNorm`` would, and gives its size, mean and variance. Once per
batch the statistics of all microbatches are merged (Chan, Golub, LeVeque 1979) and committed: the new state is that of
``nn.BatchNorm``'s own update applied once to all inputs that the layer saw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe.core.errors import BatchError, PlanError
from funcpipe.core.torch_names import BatchNorm as AnyBatchNorm
from funcpipe.core.torch_names import buffers_of, check_dimensions
from funcpipe.core.tree import Tree, under_transform
from funcpipe.modules.written_buffers import BATCH_NORMS, Hearing, NormCall, refuse_writes, version


class Moments(NamedTuple):
    """Statistics of some values per channel.

    Attributes:
        size: how many values.
        mean: [C]; of few values, or where the layer keeps less than float32, float64 where the device has it.
        var: [C], unbiased.
    """

    size: int
    mean: Tensor
    var: Tensor


class BatchNorm:
    """``batch_norm``: the function, with ``init`` and ``commit`` for its state beside it."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        state: dict[str, Tensor],
        *,
        train: bool = True,
        eps: float = 1e-5,
    ) -> tuple[Tensor, tuple[Moments, ...]]:
        """Normalise over every dimension but the second, 1d, 2d and 3d alike; nothing is written.

        >>> state = batch_norm.init(3)
        >>> y, stats = batch_norm(torch.randn(8, 3), None, None, state)
        >>> batch_norm.commit(state, (stats,))["num_batches_tracked"]
        tensor(1)

        Args:
            x: [N, C, ...].
            weight: [C], or None.
            bias: [C], or None.
            state: ``running_mean`` and ``running_var``, each [C]; see `init`.
            train: by the microbatch's statistics (True) or by the running ones.
            eps: added to the variance.

        Returns:
            The output, and the statistics to give to `commit` (empty in evaluation).

        Raises:
            BatchError: training with one value per channel, which has no variance.
        """
        call = NormCall(x, state["running_mean"], state["running_var"], weight, bias, train, eps=eps)
        return _normalised(call)

    def init(self, num_features: int, *, device: Any = None, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """The state of a fresh layer: mean 0, variance 1, no batches seen."""
        return {
            "running_mean": torch.zeros(num_features, device=device, dtype=dtype),
            "running_var": torch.ones(num_features, device=device, dtype=dtype),
            "num_batches_tracked": torch.zeros((), device=device, dtype=torch.long),
        }

    def commit(
        self, state: dict[str, Tensor], stats: Sequence[Sequence[Moments]], *, momentum: float | None = 0.1
    ) -> dict[str, Tensor]:
        """The state after one batch.

        Args:
            state: before.
            stats: what each microbatch gave, in their order.
            momentum: of the running averages; None: the plain average of all batches.
        """
        moments = [call for microbatch in stats for call in microbatch]
        if not moments:
            return state
        _, mean, var = merge(moments)
        tracked = state.get("num_batches_tracked")
        new = dict(state)
        if tracked is not None:
            tracked = new["num_batches_tracked"] = tracked + 1
        if momentum is None and tracked is None:
            raise PlanError("momentum=None averages over all batches and needs num_batches_tracked in the state")
        share = momentum if momentum is not None else 1.0 / float(tracked or 1)
        for name, value in (("running_mean", mean), ("running_var", var)):
            old = state[name]
            new[name] = ((1.0 - share) * old.to(value.dtype) + share * value).to(old.dtype)
        return new


batch_norm = BatchNorm()


def _normalised(call: NormCall) -> tuple[Tensor, tuple[Moments, ...]]:
    x, mean, var, weight, bias, train, _, eps = call
    if not train:
        return F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps), ()
    assert mean is not None
    assert var is not None
    count = x.numel() // x.shape[1]
    if count <= 1:
        raise BatchError(
            f"batch norm in training needs more than one value per channel, but a microbatch has shape "
            f"{tuple(x.shape)}; use fewer microbatches, or a larger batch"
        )
    # torch's own kernel fills these: momentum 1 makes the running statistics those of the microbatch.
    lifted = under_transform()
    if lifted:  # made from x, so that vmap batches them where it batches x
        sample_mean, sample_var = [x.new_zeros(like.shape, dtype=like.dtype) for like in (mean, var)]
    else:
        sample_mean, sample_var = torch.zeros_like(mean), torch.zeros_like(var)
    y = torch.batch_norm(x, weight, bias, sample_mean, sample_var, True, 1.0, eps, torch.backends.cudnn.enabled)
    # All else waits for the commit: small operations cost a lane more than they cost there, where one serves all.
    if not _is_fine(x, count, sample_mean, lifted=lifted):
        sample_mean = x.detach().mean([0, *range(2, x.dim())], dtype=wide(x))
    return y, (Moments(count, sample_mean, sample_var),)


_MANY = 256
"""Of so many values torch's mean in float32 is good enough."""


def _is_fine(x: Tensor, count: int, by_kernel: Tensor, *, lifted: bool) -> bool:
    """Is the mean of each channel by torch's kernel good enough for merging, which needs it finer than running means are.

    Means of n values differ by their deviation over the root of n, and float32 rounds a mean to some 1e-7 of itself. So
    where a mean is 1e4 deviations large the variance of all is right to some 1e-4 with many values. Of few the mean is made
    anew in float64; of many that would take as long as batch norm itself, for torch copies them all first. It is made anew
    also on a CPU where channels lie next to each other (channels_last): the kernel's mean is much coarser there.
    """
    many = type(count) is int and count >= _MANY  # in an export that is for any size it is no int
    return many and by_kernel.dtype.itemsize >= 4 and (not x.is_cpu or lifted or x.is_contiguous())


def batch_norm_at(path: str, call: NormCall) -> tuple[Tensor, tuple[Moments, ...]]:
    """`batch_norm` for a call of torch's in the layer at this path, which errors name."""
    try:
        return _normalised(call)
    except BatchError as error:
        raise BatchError(f"layer {path!r}: {error}") from None


def merge(moments: Sequence[Moments]) -> tuple[int, Tensor, Tensor]:
    """How many values there are together, their mean, [C], and their unbiased variance, [C].

    >>> parts = [Moments(2, torch.tensor([0.5]), torch.tensor([0.5])), Moments(1, torch.tensor([2.0]), torch.zeros(1))]
    >>> merge(parts)
    (3, tensor([1.], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    if len(moments) == 1:
        size, mean, var = moments[0]
        return size, mean.to(wide(mean)), var.to(wide(mean))
    by_size = groupby(sorted(moments, key=itemgetter(0)), itemgetter(0))
    count, mean, squares = reduce(_together, [_of_one_size(size, list(group)) for size, group in by_size])
    return count, mean, squares / (count - 1)


_Sums: TypeAlias = tuple[int, Tensor, Tensor]
"""How many values, their mean, and the sum of squared distances from it. Counts stay Python's: one in a tensor would
have to be copied to a device."""


def _of_one_size(size: int, moments: Sequence[Moments]) -> _Sums:
    means = torch.stack([call.mean for call in moments])
    means = means.to(wide(means))
    variances = torch.stack([call.var for call in moments]).to(means.dtype)
    mean = means.mean(0)
    return size * len(moments), mean, (size - 1) * variances.sum(0) + size * (means - mean).square().sum(0)


def _together(first: _Sums, second: _Sums) -> _Sums:
    """The sums of two sets of values together, by Chan, Golub, LeVeque 1979."""
    count, other = first[0], second[0]
    total, delta = count + other, second[1] - first[1]
    mean = first[1] + delta * (other / total)
    mean = torch.where(delta.isfinite(), mean, first[1] + second[1])  # inf and nan as a sum of all has them
    return total, mean, first[2] + second[2] + delta * delta * (count * other / total)


class Running(NamedTuple):
    """The names of the buffers that one batch norm updates.

    Attributes:
        mean, var: of the running statistics.
        tracked: of the number of batches; None: it is not counted.
    """

    mean: str
    var: str
    tracked: str | None

    @classmethod
    def of(cls, layer: AnyBatchNorm, path: str) -> Running:
        """The names for a layer at this path."""
        start = f"{path}." if path else ""
        tracked = None if layer.num_batches_tracked is None else f"{start}num_batches_tracked"
        return cls(f"{start}running_mean", f"{start}running_var", tracked)


class NormStats(NamedTuple):
    """The statistics of one batch norm layer over one microbatch, and how they are committed.

    Attributes:
        moments: of each of its calls.
        momentum: of the running averages; None: the plain average of all batches.
        counted: is the batch counted.
    """

    IS_APART = True
    """Nothing here has a graph, and the layer keeps none of it."""

    moments: tuple[Moments, ...]
    momentum: float | None
    counted: bool = True


@dataclass
class Deferral:
    """What a deferred layer has besides its own attributes; one attribute, so that it hides none of them.

    Attributes:
        path: of the layer.
        kind: its class.
        momentum: of its running averages.
        counted: does it count batches.
        collected: the statistics of this microbatch; None: they do not count.
    """

    path: str
    kind: type[AnyBatchNorm]
    momentum: float | None
    counted: bool = True
    collected: list[Moments] | None = None

    def take(self) -> NormStats:
        """Take out the statistics of one microbatch; what comes later, in a backward, does not count."""
        moments, self.collected = tuple(self.collected or ()), None
        return NormStats(moments, self.momentum, self.counted)


class DeferredBatchNorm(AnyBatchNorm):
    """A batch norm layer of a stage's private copy: collects statistics instead of writing its buffers.

    Its class is this one before the layer's own, so that what a user's subclass brings stays.
    """

    deferral: Deferral

    @classmethod
    def convert(cls, layer: AnyBatchNorm, path: str) -> None:
        """Turn a layer of a private copy into a deferred one, in place."""
        vars(layer)["deferral"] = Deferral(path, type(layer), layer.momentum)
        layer.__class__ = _deferred(type(layer))

    @staticmethod
    def converts(layer: nn.Module) -> TypeGuard[AnyBatchNorm]:
        """Is this a layer whose running statistics can be deferred."""
        return isinstance(layer, AnyBatchNorm) and layer.track_running_stats and layer.running_mean is not None

    @staticmethod
    def has_own_forward(kind: type[nn.Module]) -> bool:
        """Whether a class has another forward than torch's."""
        return kind.forward not in (AnyBatchNorm.forward, nn.SyncBatchNorm.forward)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A class made at run time cannot be found by pickle: it is made again.
        return (_blank, (self.deferral.kind,), self.__dict__)

    def forward(self, input: Tensor) -> Tensor:
        """As ``nn.BatchNorm`` does, without touching a buffer."""
        check_dimensions(self, input)
        if self.training and isinstance(self, nn.SyncBatchNorm):
            refuse_processes(self)
        mean, var = self.running_mean, self.running_var
        return _normalise(self, NormCall(input, mean, var, self.weight, self.bias, self.training, eps=self.eps))


class _OwnForward(DeferredBatchNorm):
    """A deferred layer whose class has a forward of its own: its calls of torch's batch norm are deferred.

    The forward counts batches on a copy of the counter that is dropped.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The layer's own forward; its calls of torch's batch norm go to `_hear`."""
        counter = buffers_of(self).get("num_batches_tracked")
        scratch = buffers_of(self)["num_batches_tracked"] = None if counter is None else counter.clone()
        start = version(scratch)
        try:
            with Hearing({id(self.running_mean), id(self.running_var)}, BATCH_NORMS, partial(_hear, self)):
                y = self.deferral.kind.forward(self, *args, **kwargs)
            left = buffers_of(self)["num_batches_tracked"]
            self.deferral.counted = left is not scratch or version(left) != start or _moved(left, counter)
        finally:
            buffers_of(self)["num_batches_tracked"] = counter
        return y


def _hear(layer: DeferredBatchNorm, call: NormCall) -> Tensor:
    """Defer a call of torch's batch norm in training. Raises PlanError where its buffers are not the layer's."""
    deferral = layer.deferral
    if call.running_mean is not layer.running_mean or call.running_var is not layer.running_var:
        refuse_writes(deferral.kind.__name__, [f"{deferral.path}.running_mean", f"{deferral.path}.running_var"])
    if layer.momentum is not None:  # else the call's momentum comes from the counter
        deferral.momentum = call.momentum
    return _normalise(layer, call)


def _normalise(layer: DeferredBatchNorm, call: NormCall) -> Tensor:
    deferral = layer.deferral
    y, stats = batch_norm_at(deferral.path, call)
    if deferral.collected is not None:
        deferral.collected += stats
    return y


def _moved(after: Tensor | None, before: Tensor | None) -> bool:
    """Was a counter written to under inference mode, where torch counts no versions."""
    return after is not None and before is not None and after.is_inference() and not torch.equal(after, before)


def refuse_processes(layer: nn.SyncBatchNorm) -> None:
    """Raises PlanError where statistics would be shared with other processes."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if distributed and torch.distributed.get_world_size(layer.process_group) > 1:
        raise PlanError(
            "SyncBatchNorm shares the statistics of each microbatch with other processes, whose lanes may be "
            "elsewhere in their schedules; use nn.BatchNorm"
        )


@lru_cache(maxsize=256)
def _deferred(kind: type[AnyBatchNorm]) -> type[DeferredBatchNorm]:
    base = _OwnForward if DeferredBatchNorm.has_own_forward(kind) else DeferredBatchNorm
    subclass: Any = type(f"Deferred{kind.__name__}", (base, kind), {})
    return subclass


def _blank(kind: type[AnyBatchNorm]) -> DeferredBatchNorm:
    subclass = _deferred(kind)
    return subclass.__new__(subclass)


class CommitLayers:
    """The commit of a module stage: updates the buffers of each batch norm layer by the layer's momentum.

    State is the flat dict of the module's buffers; statistics are ``{path: NormStats}`` per microbatch. With
    ``deferred`` those of all microbatches make one update; without, every call of a layer makes its own, in their
    order, as plain batch norm does.
    """

    def __init__(self, norms: Mapping[str, Running], *, deferred: bool = True) -> None:
        self.norms, self.deferred = dict(norms), deferred

    def written(self) -> list[str]:
        """The names of the buffers that it may change."""
        return [name for names in self.norms.values() for name in names if name is not None]

    def __call__(self, state: dict[str, Tensor], stats: tuple[Tree, ...]) -> dict[str, Tensor]:
        """The module's buffers after one batch."""
        new = dict(state)
        for path, names in self.norms.items():
            layer_stats: list[NormStats] = [
                microbatch[path] for microbatch in stats if path in microbatch and microbatch[path].moments
            ]
            if not layer_stats:
                continue
            last = layer_stats[-1]
            tracked = names.tracked if last.counted else None
            keys = {"running_mean": names.mean, "running_var": names.var, "num_batches_tracked": tracked}
            layer_state = {name: state[key] for name, key in keys.items() if key in state}
            microbatches = [norm.moments for norm in layer_stats]
            for update in (
                [microbatches] if self.deferred else [[(moments,)] for calls in microbatches for moments in calls]
            ):
                layer_state = batch_norm.commit(layer_state, update, momentum=last.momentum)
            new.update({str(keys[name]): value for name, value in layer_state.items()})
        return new


def wide(x: Tensor) -> torch.dtype:
    """The widest floating type on the device of a tensor, for means and sums."""
    return torch.float32 if x.device.type == "mps" else torch.float64
