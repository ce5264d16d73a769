"""The weights of microbatches in the loss of a batch.

A loss may give its weight itself, by ``(sum, weight)``, `Loss` or a method ``weigh``. For torch's
own losses this module knows the divisor of their mean.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, Protocol, runtime_checkable

import torch.nn.functional as F
from torch import Tensor, nn

from funcpipe._src.core.errors import PlanError, StageError
from funcpipe._src.core.tree import Tree, flatten, unflatten
from funcpipe._src.data.exchange import entire
from funcpipe._src.data.result import Loss

Weigh = Callable[[Tree, Tree], Any]
"""``(inputs, target) -> weight`` of a microbatch, called before any forward. A result of None means
the number of rows."""


@runtime_checkable
class Weighing(Protocol):
    """A loss that returns the mean over a microbatch, and knows the mean's divisor beforehand."""

    def __call__(self, y: Any, target: Any, /) -> Any:
        """Return the mean loss of a microbatch."""
        ...

    def weigh(self, inputs: Any, target: Any, /) -> Any:
        """Return the microbatch's weight: a number or 0-dim tensor of at least 0; None: its
        rows."""
        ...


@dataclass(frozen=True)
class Counts:
    """The rule that combines the losses of microbatches to the loss of the batch."""

    # The function that returns the weight of a microbatch; None: its number of rows.
    weigh: Weigh | None = None
    # Whether losses are sums. Sums are added, and divided by weights only if the plan has a
    # ``weight``.
    summed: bool = False
    # Whether the divisor of a mean is known. If not, microbatches count by rows, and a run raises
    # BatchError if it sees that the loss ignores some targets.
    known: bool = False
    # Whether all microbatches count equally if they have no weights, whatever their rows.
    alike: bool = False
    # The loss that the rule was read from. None: any loss.
    loss: Any = field(default=None, repr=False, compare=False)


BY_ROWS = Counts(known=True)  # microbatches count by their rows

ALIKE = Counts(known=True, alike=True)
"""The plain mean over microbatches, as in torch.distributed.pipelining."""


_LOSSES = {
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.cosine_embedding_loss: nn.CosineEmbeddingLoss,
    F.cross_entropy: nn.CrossEntropyLoss,
    F.ctc_loss: nn.CTCLoss,
    F.gaussian_nll_loss: nn.GaussianNLLLoss,
    F.hinge_embedding_loss: nn.HingeEmbeddingLoss,
    F.huber_loss: nn.HuberLoss,
    F.kl_div: nn.KLDivLoss,
    F.l1_loss: nn.L1Loss,
    F.margin_ranking_loss: nn.MarginRankingLoss,
    F.mse_loss: nn.MSELoss,
    F.multi_margin_loss: nn.MultiMarginLoss,
    F.multilabel_margin_loss: nn.MultiLabelMarginLoss,
    F.multilabel_soft_margin_loss: nn.MultiLabelSoftMarginLoss,
    F.nll_loss: nn.NLLLoss,
    F.poisson_nll_loss: nn.PoissonNLLLoss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.soft_margin_loss: nn.SoftMarginLoss,
    F.triplet_margin_loss: nn.TripletMarginLoss,
    F.triplet_margin_with_distance_loss: nn.TripletMarginWithDistanceLoss,
}
_KNOWN = {*_LOSSES, *(module.forward for module in _LOSSES.values())}
"""Torch's losses: functions, and the forwards of modules. The divisor of a mean is proportional to
the rows, except for the losses in `_INDEXED`."""

_INDEXED = {F.cross_entropy, F.nll_loss, nn.CrossEntropyLoss.forward, nn.NLLLoss.forward}
"""Losses whose mean is divided by the weights of the targets, which are class indices."""


def counts_of(loss: Callable[..., Any] | None) -> Counts:
    """Return the weighting rule of a plan's loss.

    Raises:
        PlanError: the loss takes other arguments than (y, target), or is a loss of torch that
            returns one number per element.
    """
    if loss is None:
        return BY_ROWS
    _refuse_other_arguments(loss)
    body = _body(loss)
    if (
        not isinstance(body, FunctionType | BuiltinFunctionType) or body not in _KNOWN
    ):  # a callable object may have no hash, so its type is checked first
        # The result of a user's module is not known, but its reduction="sum" is believed.
        summed = isinstance(loss, nn.Module) and getattr(loss, "reduction", None) == "sum"
        weighing = isinstance(loss, Weighing)
        known = weighing and getattr(loss, "is_known", True)
        return Counts(loss.weigh if weighing else None, summed, known, loss=loss)
    reduction = _reduction(loss)
    if reduction not in ("mean", "batchmean", "sum"):
        name = _name(loss)
        raise PlanError(
            f"loss is {name} with reduction={reduction!r}, but the loss of a microbatch must be "
            "one number; take reduction='mean' or 'sum', or reduce it yourself: loss=lambda y, "
            f"target: (({name}(y, target) * weights).sum(), weights.sum())"
        )
    weigh = CountedTargets(loss) if body in _INDEXED and reduction == "mean" else None
    return Counts(weigh, reduction == "sum", known=True, loss=loss)


class CountedTargets:
    """The divisor of a mean cross entropy: the class weights of the targets that are not
    ignored."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        self.loss = loss

    def __call__(self, inputs: Tree, target: Tree) -> Any:
        """Return the sum of the weights; None for probabilities, where all rows count equally."""
        if not isinstance(target, Tensor) or target.is_floating_point() or target.is_meta:
            return None
        counted = target != _option(self.loss, "ignore_index", -100)
        weights: Tensor | None = _option(self.loss, "weight", None)
        if weights is None:
            return counted.sum()
        # The loss itself raises for a class out of range, with a better message than this lookup.
        classes = target.clamp(0, len(weights) - 1)
        return weights.detach().to(target.device)[classes].mul(counted).sum()


def _body(loss: Any) -> Any:
    """Return the function that a loss calls; None for a partial with positional arguments."""
    if isinstance(loss, partial):
        return None if loss.args else loss.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return type(loss).forward if isinstance(loss, nn.Module) else loss


def _option(loss: Any, name: str, default: Any) -> Any:
    """Return the present value of an option of a torch loss."""
    if isinstance(loss, partial):
        return loss.keywords.get(name, default)
    return getattr(loss, name, default) if isinstance(loss, nn.Module) else default


def _reduction(loss: Any) -> Any:
    average, reduce = _option(loss, "size_average", None), _option(loss, "reduce", None)
    if average is None and reduce is None:
        return _option(loss, "reduction", "mean")
    return "none" if reduce is False else "sum" if average is False else "mean"


def _refuse_other_arguments(loss: Any) -> None:
    call = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # some built-ins have none
        return
    try:
        signature.bind(None, None)
    except TypeError:
        names = [*signature.parameters]
        raise PlanError(
            f"loss is called with (y, target), but {_name(loss)} takes ({', '.join(names)}); give a "
            f"function of these two, such as loss=lambda y, target: loss(y, *target), where loss is "
            f"this {_name(loss)} and target is a tuple ({', '.join(names[1:])})"
        ) from None


def _name(loss: Any) -> str:
    function = loss.func if isinstance(loss, partial) else loss  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return str(getattr(function, "__name__", type(function).__name__))  # pyright: ignore[reportUnknownArgumentType]


def check_weight(weight: Any) -> None:
    """Raise StageError if a microbatch's weight is not a number, or requires a gradient."""
    tensor = isinstance(weight, Tensor) and weight.numel() == 1 and not weight.requires_grad
    if weight is None or tensor or isinstance(weight, (int, float)):
        return
    kind = f"a {type(weight).__name__}"
    if isinstance(weight, Tensor):
        kind += (
            f" of shape {tuple(weight.shape)}"
            + ", which requires a gradient" * weight.requires_grad
        )
    raise StageError(
        "the loss returned a pair, which must be (sum, weight): the weight is a number without a "
        f"gradient; got {kind}. To return other values beside the loss, return "
        "fp.Loss(loss, aux=...)"
    )


def read_loss(value: Any) -> tuple[Tensor, Loss]:
    """Return the loss as a tensor with its graph, and as a detached `Loss`.

    The ``weight`` is None for a mean. Raises StageError.
    """
    total, weight, aux = value, None, None
    if isinstance(value, Loss):
        total, weight, aux = value
    elif isinstance(value, tuple) and len(value) == 2:  # pyright: ignore[reportUnknownArgumentType]
        total, weight = value  # pyright: ignore[reportUnknownVariableType]
    if hasattr(total, "full_tensor"):  # `entire`, without a call in each microbatch
        total = total.full_tensor()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if weight is not None:
        check_weight(weight)
    if (
        not isinstance(total, Tensor)
        or total.numel() != 1
        or not (total.is_floating_point() or total.is_complex())
    ):
        got = f"a {type(total).__name__}"
        if isinstance(total, Tensor):
            got = f"a tensor of shape {tuple(total.shape)}, {total.dtype}"
        raise StageError(
            "the loss is a floating number in a tensor: the mean over the microbatch, (sum, "
            f"weight), or fp.Loss(sum, weight, aux); got {got}"
        )
    return total, Loss(
        total.detach(),
        None if weight is None else detached(weight),
        None if aux is None else detached(aux),
    )


def detached(tree: Tree) -> Tree:
    """Return the tree with its tensors detached from their graphs, and DTensors as full tensors."""
    leaves, spec = flatten(tree)
    return unflatten(spec, [entire(cut_off(leaf)) for leaf in leaves])


def cut_off(leaf: Any) -> Any:
    """Return a leaf, detached if it requires a gradient."""
    return leaf.detach() if isinstance(leaf, Tensor) and leaf.requires_grad else leaf
