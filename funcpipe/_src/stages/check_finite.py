"""``check="finite"``: refuse NaN and Inf in the values that a stage returns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.border import Border
from funcpipe._src.core.errors import NotFiniteError, bullets
from funcpipe._src.core.tree import Tree, flatten, is_differentiable, locations
from funcpipe._src.data.exchange import entire, numbers
from funcpipe._src.stages.bound import Bound, Cotangents, Gradients, Shares, StageArgs, StageOut


class FiniteBound:
    """Wraps a bound stage, and checks outputs, losses and gradients after each action.

    A microbatch with weight 0 may have the loss NaN, which is the mean over no elements.
    """

    def __init__(self, inner: Bound, params: Tree, index: int, shares: Shares) -> None:
        self.inner, self.shares, self.params = inner, shares, inner.params
        self.names, self.leaves = locations(params, f"params[{index}]"), flatten(params)[0]
        self.rebase, self.release = inner.rebase, inner.release

    @property
    def phase(self) -> str:
        """The phase of the inner stage."""
        return self.inner.phase

    def forward(self, args: StageArgs, *, keep: bool) -> StageOut:
        """Run the forward of the inner stage. Raises NotFiniteError for NaN or Inf in its
        values."""
        out = self.inner.forward(args, keep=keep)
        faults = _border(out.y, "output") + [
            fault
            for name, border in out.stash.items()
            for fault in _border(border, f"stash[{name!r}]" if name else "carry")
        ]
        loss = out.report.loss
        if loss is not None:
            # If the model computes its own loss, the output contains the loss: weigh both alike.
            counts = self.shares.factor(loss, args.microbatch)
            faults = faults + _leaves([("the loss", loss.sum)]) if counts else []
        if out.report.side is not None:
            faults += _leaves([("the auxiliary loss", out.report.side[0])])
        if faults:
            skips = [fault for skip in args.skips for fault in _border(skip, "skip")]
            self._refuse(
                faults,
                _border(args.x, "input") + skips,
                "call the stage alone to find the operation",
            )
        return out

    def backward(
        self,
        residual: Any,
        y: Gradients | None,
        stash: dict[str, list[Gradients]],
        *,
        split: bool = False,
    ) -> tuple[Cotangents, Any]:
        """Run the backward of the inner stage. Raises NotFiniteError for NaN or Inf in
        gradients."""
        cotangents, weight_residual = self.inner.backward(residual, y, stash, split=split)
        self._check_gradients(cotangents, y)
        return cotangents, (weight_residual, y) if split else None

    def backward_weight(self, residual: Any) -> None:
        """Run W of the inner stage. Raises NotFiniteError for NaN or Inf in gradients."""
        weight_residual, y = residual
        self.inner.backward_weight(weight_residual)
        self._check_gradients(Cotangents([], []), y)

    def _check_gradients(self, cotangents: Cotangents, y: Gradients | None) -> None:
        faults = _leaves(
            (f"the gradient of input leaf {number}", leaf)
            for number, leaf in enumerate(cotangents.x)
        )
        for skip, leaves in enumerate(cotangents.skips):
            faults += _leaves(
                (f"the gradient of skip {skip}, leaf {number}", leaf)
                for number, leaf in enumerate(leaves)
            )
        faults += _leaves(
            (f"the gradient of {name}", gradient)
            for name, gradient in zip(self.names, self.params.present_grads(), strict=True)
        )
        if faults:
            incoming = _leaves(
                (f"the gradient of output leaf {number}", leaf)
                for number, leaf in enumerate(y or ())
            )
            self._refuse(
                faults,
                incoming,
                "torch.autograd.set_detect_anomaly(True) around the run finds the operation",
            )

    def _refuse(self, faults: list[str], incoming: Sequence[str], remedy: str) -> None:
        """Raise NotFiniteError with the faults and where they came from."""
        sources = [*incoming, *_leaves(zip(self.names, self.leaves, strict=True))]
        came = [f"an argument was not finite: {source}" for source in sources]
        came = came or [f"all arguments were finite; {remedy}"]
        raise NotFiniteError(
            bullets("this stage made numbers that are not finite:", [*faults, *came])
        )


def _border(border: Border, name: str) -> list[str]:
    return _leaves(zip(locations(border.tree(), name), border.leaves, strict=True))


def _leaves(named: Iterable[tuple[str, Any]]) -> list[str]:
    """Return a line for each tensor with NaN or Inf."""
    return [f"{name} has {text}" for name, leaf in named if (text := _count(leaf))]


def _count(leaf: Any) -> str:
    if not is_differentiable(leaf) or leaf.is_meta:
        return ""
    leaf = numbers(_wide(leaf))
    if bool(entire(torch.isfinite(leaf).all())):
        return ""
    nans = int(entire(leaf.isnan().sum()))
    infinite = leaf.numel() - int(entire(torch.isfinite(leaf).sum())) - nans
    return f"{nans} NaN and {infinite} Inf among {leaf.numel()} numbers"


def _wide(leaf: Tensor) -> Tensor:
    """Return the leaf without its graph. 8-bit types become float32, because torch has no isfinite
    for them."""
    return leaf.detach().float() if leaf.dtype.itemsize == 1 else leaf.detach()
