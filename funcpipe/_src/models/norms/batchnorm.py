"""Batch norm that returns its statistics instead of writing them, so that they can be deferred.

A forward normalises by its own microbatch, as ``nn.BatchNorm`` does, and returns the size, mean and
variance of the microbatch. Once per batch, `BatchNorm.commit` merges the statistics of all
microbatches (Chan, Golub, LeVeque 1979). The new state equals one update by ``nn.BatchNorm`` on all
inputs of the batch. `CommitLayers` does so for each layer of a module stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from funcpipe._src.core.errors import BatchError, PlanError
from funcpipe._src.core.torch_names import BatchNorm as AnyBatchNorm
from funcpipe._src.core.tree import Tree, under_transform
from funcpipe._src.models.norms.written_buffers import NormCall


class Moments(NamedTuple):
    """Statistics of some values per channel."""

    size: int  # the number of values per channel
    mean: Tensor  # [C]; float64 for few values or low precision, if the device supports float64
    var: Tensor  # [C], unbiased


class BatchNorm:
    """The type of `batch_norm`: a function with ``init`` and ``commit`` for its state.

    >>> state = fp.models.batch_norm.init(3)
    >>> y, stats = fp.models.batch_norm(torch.randn(8, 3), None, None, state)
    >>> fp.models.batch_norm.commit(state, [stats])["num_batches_tracked"]
    tensor(1)
    """

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
        """Normalise each channel over all other dimensions, without writing to the state.

        The function works for 1d, 2d and 3d inputs.

        >>> state = batch_norm.init(3)
        >>> y, stats = batch_norm(torch.randn(8, 3), None, None, state)
        >>> batch_norm.commit(state, (stats,))["num_batches_tracked"]
        tensor(1)

        Args:
            x: the input, [N, C, ...].
            weight: the scale, [C]. None: 1.
            bias: the shift, [C]. None: 0.
            state: a dict with ``running_mean`` and ``running_var``, each [C]; see `init`.
            train: True: normalise by the statistics of this microbatch. False: by the running
                statistics.
            eps: added to the variance.

        Returns:
            The output, shaped like ``x``, and the statistics for `commit`; empty in evaluation.

        Raises:
            BatchError: training with a single value per channel, which has no variance.
        """
        call = NormCall(
            x, state["running_mean"], state["running_var"], weight, bias, train, eps=eps
        )
        return _normalised(call)

    def init(
        self, num_features: int, *, device: Any = None, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Return the state of a new layer: mean 0, variance 1, no batches.

        Args:
            num_features: the number of channels, C.
            device: the device of the tensors. None: torch's default.
            dtype: the type of mean and variance. None: torch's default.
        """
        return {
            "running_mean": torch.zeros(num_features, device=device, dtype=dtype),
            "running_var": torch.ones(num_features, device=device, dtype=dtype),
            "num_batches_tracked": torch.zeros((), device=device, dtype=torch.long),
        }

    def commit(
        self,
        state: dict[str, Tensor],
        stats: Sequence[Sequence[Moments]],
        *,
        momentum: float | None = 0.1,
    ) -> dict[str, Tensor]:
        """Return the state after one batch.

        Args:
            state: the state before the batch; it does not change.
            stats: for each microbatch, in order, the statistics of each call of the layer.
            momentum: the weight of this batch in the running averages. None: the plain average of
                all batches.

        Returns:
            A new dict with the same keys.
        """
        for calls in zip_longest(*stats):  # the n-th calls of all microbatches make one update
            _, mean, var = merge([call for call in calls if call is not None])
            state = _updated(state, mean, var, momentum)
        return state


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
            "batch norm in training needs more than one value per channel, but a microbatch has "
            f"shape {tuple(x.shape)}; use fewer microbatches, a larger batch, or "
            "DataLoader(drop_last=True)"
        )
    # torch's own kernel fills these two: with momentum 1 the "running" statistics are exactly the
    # statistics of this microbatch. So the forward is bit-identical to nn.BatchNorm.
    # Made from x, so that vmap gives them a batch dimension if x has one.
    sample_mean, sample_var = [x.new_zeros(like.shape, dtype=like.dtype) for like in (mean, var)]
    y = torch.batch_norm(
        x, weight, bias, sample_mean, sample_var, True, 1.0, eps, torch.backends.cudnn.enabled
    )
    # All other operations wait for the commit, which does them once for all microbatches. Here they
    # would cost the lane time for each microbatch.
    if not _is_fine(x, count, sample_mean):
        sample_mean = x.detach().mean([0, *range(2, x.dim())], dtype=wide(x))
    return y, (Moments(count, sample_mean, sample_var),)


_MANY = 256  # from this number of values on, torch's mean in float32 is precise enough


def _is_fine(x: Tensor, count: int, by_kernel: Tensor) -> bool:
    """Whether the kernel's mean of each channel is precise enough for merging.

    Merging needs more precision than running means do. Means of n values differ by their deviation
    over the root of n, and float32 rounds a mean by about 1e-7 of itself. So with many values, the
    merged variance has a relative error of about 1e-4 if the mean is 1e4 deviations large.

    For few values, the caller computes the mean again in float64. For many values that would take
    as long as batch norm itself, because torch copies them first. On a CPU with channels_last the
    kernel's mean is much less precise, so the caller computes it again too.
    """
    many = type(count) is int and count >= _MANY  # in an export for any batch size it is symbolic
    exact = not x.is_cpu or under_transform() or x.is_contiguous()
    return many and by_kernel.dtype.itemsize >= 4 and exact


def batch_norm_at(path: str, call: NormCall) -> tuple[Tensor, tuple[Moments, ...]]:
    """Call batch norm for the layer at this path; errors contain the path."""
    try:
        return _normalised(call)
    except BatchError as error:
        raise BatchError(f"layer {path!r}: {error}") from None


def _updated(
    state: Mapping[str, Tensor], mean: Tensor, var: Tensor, momentum: float | None
) -> dict[str, Tensor]:
    """Return the state after one update by this mean and variance, each [C]."""
    tracked = state.get("num_batches_tracked")
    new = dict(state)
    if tracked is not None:
        tracked = new["num_batches_tracked"] = tracked + 1
    if momentum is None and tracked is None:
        raise PlanError(
            "momentum=None averages over all batches and needs num_batches_tracked in the state"
        )
    share = momentum if momentum is not None else 1.0 / float(tracked or 1)
    for name, value in (("running_mean", mean), ("running_var", var)):
        old = state[name]
        new[name] = ((1.0 - share) * old.to(value.dtype) + share * value).to(old.dtype)
    return new


def merge(moments: Sequence[Moments]) -> tuple[int, Tensor, Tensor]:
    """Merge statistics: the number of values, their mean [C], and their unbiased variance [C].

    >>> parts = [Moments(2, torch.tensor([0.5]), torch.tensor([0.5])), Moments(1, torch.tensor([2.0]), torch.zeros(1))]
    >>> merge(parts)
    (3, tensor([1.], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    sizes, *columns = zip(*moments, strict=True)
    means, variances = [torch.stack(rows).to(wide(rows[0])) for rows in columns]
    total = sum(sizes)
    if len(sizes) == 1:
        return total, means[0], variances[0]
    mean = _weighted(means, sizes) / total
    within = _weighted(variances, [size - 1 for size in sizes])
    between = _weighted((means - mean).square(), sizes)
    return total, mean, (within + between) / (total - 1)


def _weighted(rows: Tensor, weights: Sequence[int]) -> Tensor:
    """The sum of the rows of a matrix, each times its weight."""
    if len({*weights}) == 1:
        return rows.sum(0) * weights[0]
    # Python numbers, because a tensor of weights would need a copy to the device.
    weighted = [row * weight for row, weight in zip(rows, weights, strict=True)]
    return torch.stack(weighted).sum(0)


def wide(x: Tensor) -> torch.dtype:
    """The widest floating type on the device of a tensor, for means and sums."""
    return torch.float32 if x.device.type == "mps" else torch.float64


STATE: tuple[str, ...] = ("running_mean", "running_var", "num_batches_tracked")
"""The names of the state of a layer, by torch's convention."""


class Running(NamedTuple):
    """The names of the buffers that a batch norm updates. None: it does not count batches."""

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
    """The statistics of one batch norm layer over one microbatch, and how they are committed."""

    IS_APART = True  # no value here has a graph, and the layer keeps none of them

    moments: tuple[Moments, ...]  # of each call of the layer
    momentum: float | None  # None: the plain average of all batches
    counted: bool = True  # whether the batch is counted


class CommitLayers:
    """The commit of a module stage: updates the buffers of each batch norm layer.

    State is the flat dict of the module's buffers; statistics are ``{path: NormStats}`` per
    microbatch. With ``deferred``, each call of the layer in a forward makes one update from all
    microbatches, in the order of the calls. Without ``deferred``, each call in each microbatch
    makes an update, as plain batch norm does.
    """

    def __init__(self, norms: Mapping[str, Running], *, deferred: bool = True) -> None:
        self.norms, self.deferred = dict(norms), deferred

    def written(self) -> list[str]:
        """The names of the buffers that the commit may change."""
        return [name for names in self.norms.values() for name in names if name is not None]

    def __call__(self, state: dict[str, Tensor], stats: tuple[Tree, ...]) -> dict[str, Tensor]:
        """Return the module's buffers after one batch."""
        new = dict(state)
        for path, names in self.norms.items():
            norms = [each[path] for each in stats if path in each and each[path].moments]
            if norms:
                new |= self._updated(state, names, norms)
        return new

    def _updated(
        self, state: Mapping[str, Tensor], names: Running, norms: Sequence[NormStats]
    ) -> dict[str, Tensor]:
        """Return the new buffers of one layer."""
        last = norms[-1]
        keys = dict(
            zip(STATE, names if last.counted else names._replace(tracked=None), strict=True)
        )
        layer = {name: state[key] for name, key in keys.items() if key is not None and key in state}
        batches = [[norm.moments for norm in norms]]
        if not self.deferred:
            batches = [[(call,)] for norm in norms for call in norm.moments]
        for batch in batches:
            layer = batch_norm.commit(layer, batch, momentum=last.momentum)
        return {str(keys[name]): tensor for name, tensor in layer.items()}
