"""Commit the statistics of a module stage's batch norm layers, once per batch.

`norm_layers` collects the statistics, `batchnorm` has the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funcpipe._src.core.torch_names import BatchNorm as AnyBatchNorm
from funcpipe._src.core.tree import Tree
from funcpipe._src.models.norms.batchnorm import Moments, merge_rows, updated

_RUNNING = ("running_mean", "running_var")
_TRACKED = "num_batches_tracked"
"""The names of the state of a layer, by torch's convention."""


class Running(NamedTuple):
    """The names of the buffers that one batch norm updates.

    Attributes:
        mean, var: the names of the running statistics.
        tracked: the name of the number of batches. None: batches are not counted.
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
        moments: the statistics of each call of the layer.
        momentum: the momentum of the running averages. None: the plain average of all batches.
        counted: whether the batch is counted.
    """

    IS_APART = True
    """No value here has a graph, and the layer keeps none of them."""

    moments: tuple[Moments, ...]
    momentum: float | None
    counted: bool = True


class CommitLayers:
    """The commit of a module stage: updates the buffers of each batch norm layer by the layer's
    momentum.

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
        new, alike = dict(state), dict[Any, list[_Seen]]()
        for path, names in self.norms.items():
            norms: list[NormStats] = [
                each[path] for each in stats if path in each and each[path].moments
            ]
            if norms:
                seen = _Seen.of(norms, names, state, deferred=self.deferred)
                alike.setdefault(path if seen.momentum is None else seen.kind(), []).append(seen)
        for layers in alike.values():
            new.update(_committed(layers))
        return new


class _Seen(NamedTuple):
    """The statistics of one layer in a batch.

    Attributes:
        updates: the statistics of each update, in order.
        momentum: the momentum of the running averages. None: the plain average of all batches.
        state: the state of the layer before the batch, by torch's names.
        keys: maps torch's names to the names of the buffers.
    """

    updates: list[list[Moments]]
    momentum: float | None
    state: dict[str, Tensor]
    keys: dict[str, str]

    @classmethod
    def of(
        cls,
        norms: Sequence[NormStats],
        names: Running,
        state: Mapping[str, Tensor],
        *,
        deferred: bool,
    ) -> _Seen:
        """Collect the statistics of the layer whose buffers have these names."""
        tracked = names.tracked if norms[-1].counted else None
        named = dict(zip((*_RUNNING, _TRACKED), (names.mean, names.var, tracked), strict=True))
        keys = {name: key for name, key in named.items() if key is not None and key in state}
        if deferred:  # the n-th calls of all microbatches make one update
            columns = zip_longest(*(norm.moments for norm in norms))
            updates = [[call for call in column if call is not None] for column in columns]
        else:
            updates = [[call] for norm in norms for call in norm.moments]
        return cls(
            updates, norms[-1].momentum, {name: state[key] for name, key in keys.items()}, keys
        )

    def kind(self) -> Any:
        """The group key of a layer. Layers with equal keys differ only in their numbers and are
        committed together."""
        calls = [
            (size, mean.dtype, var.dtype) for update in self.updates for size, mean, var in update
        ]
        return (
            self.momentum,
            *map(len, self.updates),
            *calls,
            *[(name, value.dtype, value.device) for name, value in self.state.items()],
        )


def _committed(layers: Sequence[_Seen]) -> dict[str, Tensor]:
    """Update the buffers of layers of one kind as one layer, because small operations cost time
    per operation."""
    first = layers[0]
    joined = {name: torch.cat([layer.state[name] for layer in layers]) for name in _RUNNING}
    # The counter is the first layer's. Only momentum=None reads it, and such a layer is alone in
    # its group.
    state = {**first.state, **joined}
    for number, update in enumerate(first.updates):
        calls = [layer.updates[number][place] for place in range(len(update)) for layer in layers]
        means = torch.cat([call.mean for call in calls]).view(len(update), -1)
        variances = torch.cat([call.var for call in calls]).view(len(update), -1)
        _, mean, var = merge_rows([call.size for call in update], means, variances)
        state = updated(state, mean, var, first.momentum)
    counted = [layer for layer in layers if _TRACKED in layer.keys]
    new = {layer.keys[_TRACKED]: layer.state[_TRACKED] + len(first.updates) for layer in counted}
    widths = [len(layer.state[_RUNNING[0]]) for layer in layers]
    for name in _RUNNING:
        parts: Any = torch.split_with_sizes_copy(state[name], widths)  # views would share a version
        new.update(zip([layer.keys[name] for layer in layers], parts, strict=True))
    return new
