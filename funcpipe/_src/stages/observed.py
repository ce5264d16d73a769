"""Wrappers of bound stages that see the values of each action: `ObservedBound` for ``observe=``,
and `FiniteBound` for ``check="finite"``. Other runs are bound to no code of this file."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcpipe._src.core.errors import NotFiniteError, PlanError, bullets
from funcpipe._src.core.torch_names import version
from funcpipe._src.core.tree import Tree, flatten, is_differentiable, locations, map_tensors
from funcpipe._src.data.exchange import entire, numbers
from funcpipe._src.data.schedule import Action
from funcpipe._src.data.stage import CARRY, Stage
from funcpipe._src.stages.bound import (
    Bound,
    Cotangents,
    Gradients,
    Shares,
    StageArgs,
    StageOut,
)
from funcpipe._src.stages.context import RUNNING

ObserveFn: TypeAlias = Callable[[Action, str, Tree], object]
"""``(action, name, value)``, see `funcpipe.run`."""

Values: TypeAlias = Sequence[tuple[str, Tree]]  # the values of an action, each with its name

_SUMS = "parameter gradients"


class WatchedBound(ABC):
    """A bound stage whose subclass sees the inputs and results of each action.

    It wraps the stage, not the executor, so that the oracle, all executors and all kinds of stages
    show the same values under the same names.
    """

    def __init__(self, inner: Bound, stage: Stage, params: Tree, root: str) -> None:
        self.inner, self.params, self.stage = inner, inner.params, stage
        self.rebase, self.release = inner.rebase, inner.release
        self.names = locations(params, root)

    @property
    def phase(self) -> str:
        """The phase of the inner stage."""
        return self.inner.phase

    @abstractmethod
    def before(self, values: Values) -> None:
        """See the inputs of an action, before it runs."""

    @abstractmethod
    def after(self, inputs: Values, values: Values) -> None:
        """See the results of an action."""

    def forward(self, args: StageArgs, *, keep: bool) -> StageOut:
        """Run F or R of the inner stage."""
        inputs = [*self._inputs(args)]
        self.before(inputs)
        out = self.inner.forward(args, keep=keep)
        self.after(inputs, [*self._results(out, args.microbatch)])
        return out

    def backward(
        self,
        residual: Any,
        y: Gradients | None,
        stash: dict[str, list[Gradients]],
        *,
        split: bool = False,
    ) -> tuple[Cotangents, Any]:
        """Run B or I of the inner stage."""
        inputs: list[tuple[str, Tree]] = [("output gradient", () if y is None else tuple(y))]
        for name, parts in stash.items():
            label = _label("stash gradient", name, "carry out gradient")
            inputs += [(label, tuple(part)) for part in parts]
        self.before(inputs)
        cotangents, weight_residual = self.inner.backward(residual, y, stash, split=split)
        results: list[tuple[str, Tree]] = [("input gradient", tuple(cotangents.x))]
        for name, leaves in zip((*self.stage.pop, CARRY), cotangents.skips, strict=False):
            results.append((_label("skip gradient", name, "carry in gradient"), tuple(leaves)))
        self.after(inputs, [*results, self._sums()])
        return cotangents, (weight_residual, inputs) if split else None

    def backward_weight(self, residual: Any) -> None:
        """Run W of the inner stage."""
        weight_residual, inputs = residual
        self.inner.backward_weight(weight_residual)
        self.after(inputs, [self._sums()])

    def _inputs(self, args: StageArgs) -> Iterator[tuple[str, Tree]]:
        yield "input", args.x.tree()
        # A first slice has no carry, so there may be one value less than names.
        for name, skip in zip((*self.stage.pop, CARRY), args.skips, strict=False):
            yield _label("skip", name, "carry in"), skip.tree()
        for name, feed in zip(self.stage.feeds, args.feeds, strict=True):
            yield f"feed {name}", feed.tree()
        if args.target is not None:
            yield "target", args.target.tree()

    def _results(self, out: StageOut, microbatch: int) -> Iterator[tuple[str, Tree]]:
        yield "output", out.y.tree()
        for name, value in out.stash.items():
            yield _label("stash", name, "carry out"), value.tree()
        if out.report.loss is not None:
            yield "loss", out.report.loss.sum
        if out.report.side is not None:
            yield "auxiliary loss", out.report.side[0]

    def _sums(self) -> tuple[str, Tree]:
        sums = zip(self.names, self.params.present_grads(), strict=True)
        return _SUMS, {name: leaf for name, leaf in sums if leaf is not None}


class ObservedBound(WatchedBound):
    """Shows the values to a function of the user."""

    def __init__(
        self, inner: Bound, stage: Stage, params: Tree, observer: ObserveFn, lock: threading.Lock
    ) -> None:
        super().__init__(inner, stage, params, "params")
        self.observer, self.lock = observer, lock

    def before(self, values: Values) -> None:
        """Call the observer, for one lane at a time. Raises PlanError if it wrote to a tensor."""
        where = RUNNING.get()
        assert where is not None
        action = Action.parse(where().action)
        with self.lock:
            for name, value in values:
                shown = map_tensors(Tensor.detach, value)
                leaves = [leaf for leaf in flatten(shown)[0] if isinstance(leaf, Tensor)]
                versions = [version(leaf) for leaf in leaves]
                self.observer(action, name, shown)
                if versions != [version(leaf) for leaf in leaves]:
                    raise PlanError(
                        f"the function given as observe= wrote to {name!r} of {action}; observers "
                        "may only read: write to a copy, tensor.clone()"
                    )

    def after(self, inputs: Values, values: Values) -> None:
        """Call the observer."""
        self.before(values)


class FiniteBound(WatchedBound):
    """Refuses NaN and Inf in outputs, losses and gradients.

    A microbatch with weight 0 may have the loss NaN, which is the mean over no elements.
    """

    def __init__(
        self, inner: Bound, stage: Stage, params: Tree, index: int, shares: Shares
    ) -> None:
        super().__init__(inner, stage, params, f"params[{index}]")
        self.shares, self.leaves = shares, flatten(params)[0]

    def before(self, values: Values) -> None:
        """Inputs are only read if a result is not finite."""

    def _results(self, out: StageOut, microbatch: int) -> Iterator[tuple[str, Tree]]:
        # If the model computes its own loss, the output contains the loss: weigh both alike.
        loss = out.report.loss
        if loss is None or self.shares.factor(loss, microbatch):
            yield from super()._results(out, microbatch)

    def after(self, inputs: Values, values: Values) -> None:
        """Raise NotFiniteError for values that are not finite, and say where they came from."""
        faults = _not_finite(values)
        if not faults:
            return
        params = zip(self.names, self.leaves, strict=True)
        came = [
            f"an argument was not finite: {source}" for source in _not_finite([*inputs, *params])
        ]
        is_forward = inputs[0][0] == "input"
        remedy = (
            "call the stage alone to find the operation"
            if is_forward
            else "torch.autograd.set_detect_anomaly(True) around the run finds the operation"
        )
        came = came or [f"all arguments were finite; {remedy}"]
        raise NotFiniteError(
            bullets("this stage made numbers that are not finite:", [*faults, *came])
        )


def _label(kind: str, name: str, carry: str) -> str:
    """The name of a skip or a stash by kind; a carry travels among them under the name `CARRY`."""
    return carry if name == CARRY else f"{kind} {name}"


def _not_finite(values: Values) -> list[str]:
    """Return a line for each tensor with NaN or Inf."""
    lines: list[str] = []
    for name, tree in values:
        if name == _SUMS:
            pairs = [(f"the gradient of {parameter}", leaf) for parameter, leaf in tree.items()]
        else:
            pairs = zip(locations(tree, name), flatten(tree)[0], strict=True)
        lines += [f"{place} has {text}" for place, leaf in pairs if (text := _count(leaf))]
    return lines


def _count(leaf: Any) -> str:
    if not is_differentiable(leaf) or leaf.is_meta:
        return ""
    # 8-bit types as float32, because torch has no isfinite for them.
    leaf = numbers(leaf.detach().float() if leaf.dtype.itemsize == 1 else leaf.detach())
    if bool(entire(torch.isfinite(leaf).all())):
        return ""
    nans = int(entire(leaf.isnan().sum()))
    infinite = leaf.numel() - int(entire(torch.isfinite(leaf).sum())) - nans
    return f"{nans} NaN and {infinite} Inf among {leaf.numel()} numbers"
