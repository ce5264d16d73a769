"""Commit the statistics of a module stage's batch norm layers, once per batch.

`norm_layers` collects the statistics, `batchnorm` has the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from funcpipe._src.core.torch_names import BatchNorm as AnyBatchNorm
from funcpipe._src.core.tree import Tree
from funcpipe._src.models.norms.batchnorm import Moments, batch_norm

STATE: tuple[str, ...] = ("running_mean", "running_var", "num_batches_tracked")
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
