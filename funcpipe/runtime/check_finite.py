"""``check="finite"``: refuses NaN and Inf in what a stage hands on, and names the operation that made them."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from funcpipe.core.errors import NotFiniteError, bullets
from funcpipe.core.exchange import numbers
from funcpipe.core.torch_names import TorchDispatchMode, made_at, running_node
from funcpipe.core.tree import Tree, flatten, is_differentiable, locations
from funcpipe.runtime.border import Border
from funcpipe.runtime.bound import Bound, Cotangents, Gradients, Shares, StageArgs, StageOut

_MOST = 5
"""How many operations an error names."""

_anomaly = threading.Lock()


class FiniteBound:
    """A bound stage whose outputs, losses and gradients are checked after every action.

    A microbatch that does not count by the shares may have a loss that is NaN: the mean of nothing. With ``operations``
    the arguments of actions are kept, and after a fault the action is done again to find the operation.
    """

    def __init__(self, inner: Bound, params: Tree, index: int, shares: Shares, *, operations: bool) -> None:
        self.inner, self.shares, self.operations = inner, shares, operations
        self.names, self.params = locations(params, f"params[{index}]"), flatten(params)[0]
        self.given: dict[int, StageArgs] = {}
        self.grads, self.present_grads, self.unused, self.fixed, self.written = (
            inner.grads,
            inner.present_grads,
            inner.unused,
            inner.fixed,
            inner.written,
        )
        self.forget, self.rebase, self.spend = inner.forget, inner.rebase, inner.spend

    def twin(self) -> FiniteBound:
        """The same around the inner stage's."""
        twin = copy(self)
        twin.inner = self.inner.twin()
        return twin

    @property
    def phase(self) -> str:
        """The inner stage's."""
        return self.inner.phase

    def forward(self, args: StageArgs, *, keep: bool) -> StageOut:
        """Forward of the inner stage. Raises NotFiniteError where it hands on NaN or Inf."""
        out = self.inner.forward(args, keep=keep)
        faults = _border(out.y, "output") + [
            fault
            for name, border in out.stash.items()
            for fault in _border(border, f"stash[{name!r}]" if name else "carry")
        ]
        loss = out.report.loss
        if loss is not None:
            # A model's own loss lies in the output.
            counts = self.shares.factor(loss, args.microbatch)
            faults = faults + _leaves([("the loss", loss.sum)]) if counts else []
        if out.report.side is not None:
            faults += _leaves([("the auxiliary loss", out.report.side[0])])
        if faults:
            self._refuse(faults, args, lambda: self.inner.forward(args, keep=False))
        if self.operations and keep:
            self.given[args.microbatch] = args
        return out

    def backward(self, residual: Any, y: Gradients | None, stash: dict[str, list[Gradients]]) -> Cotangents:
        """Backward of the inner stage. Raises NotFiniteError where gradients have NaN or Inf."""
        args = self.given.pop(residual.microbatch, None)
        cotangents = self.inner.backward(residual, y, stash)
        self._check_gradients(cotangents, args, y, stash)
        return cotangents

    def backward_input(
        self, residual: Any, y: Gradients | None, stash: dict[str, list[Gradients]]
    ) -> tuple[Cotangents, Any]:
        """I of the inner stage. Raises NotFiniteError where gradients have NaN or Inf."""
        args = self.given.pop(residual.microbatch, None)
        cotangents, weight_residual = self.inner.backward_input(residual, y, stash)
        self._check_gradients(cotangents, args, y, stash)
        return cotangents, (weight_residual, args, y, stash)

    def backward_weight(self, residual: Any) -> None:
        """W of the inner stage. Raises NotFiniteError where gradients have NaN or Inf."""
        weight_residual, *begun = residual
        self.inner.backward_weight(weight_residual)
        self._check_gradients(Cotangents([], []), *begun)

    def release(self) -> None:
        """Release the inner stage, and forget what its actions were given."""
        self.given.clear()
        self.inner.release()

    def _check_gradients(
        self, cotangents: Cotangents, args: StageArgs | None, y: Gradients | None, stash: dict[str, list[Gradients]]
    ) -> None:
        faults = _leaves((f"the gradient of input leaf {i}", leaf) for i, leaf in enumerate(cotangents.x))
        for number, skip in enumerate(cotangents.skips):
            faults += _leaves((f"the gradient of skip {number}, leaf {i}", leaf) for i, leaf in enumerate(skip))
        faults += _leaves(
            (f"the gradient of {name}", g) for name, g in zip(self.names, self.inner.present_grads(), strict=True)
        )
        if not faults:
            return

        def again() -> None:
            assert args is not None
            self.inner.backward(self.inner.forward(args, keep=True).residual, y, stash)

        incoming = _leaves((f"the gradient of output leaf {i}", leaf) for i, leaf in enumerate(y or ()))
        self._refuse(faults, args, again if args is not None else None, incoming)

    def _refuse(self, faults: list[str], args: StageArgs | None, again: Any, incoming: Sequence[str] = ()) -> None:
        """Raise NotFiniteError with the faults and where they came from."""
        sources = list(incoming)
        if args is not None:
            sources += _border(args.x, "input") + [fault for skip in args.skips for fault in _border(skip, "skip")]
        sources += _leaves(zip(self.names, self.params, strict=True))
        if sources:
            faults = [*faults, *(f"it came in with {source}" for source in sources)]
        elif self.operations and again is not None:
            # Anomaly mode is the process's: two lanes that fail at once must not leave it on.
            with _anomaly, _Operations() as watched, torch.autograd.set_detect_anomaly(True, check_nan=False):
                again()
            faults = [*faults, *watched.found]
        elif not self.operations:
            faults = [*faults, 'everything that came in was finite; check="finite-op" finds the operation']
        raise NotFiniteError(bullets("this stage made numbers that are not finite:", faults))


def _border(border: Border, name: str) -> list[str]:
    return _leaves(zip(locations(border.tree(), name), border.leaves, strict=True))


def _leaves(named: Iterable[tuple[str, Any]]) -> list[str]:
    """A line for each tensor that has NaN or Inf."""
    return [f"{name} has {text}" for name, leaf in named if (text := _count(leaf))]


def _count(leaf: Any) -> str:
    if not is_differentiable(leaf) or leaf.is_meta:
        return ""
    leaf = numbers(_wide(leaf))
    if bool(torch.isfinite(leaf).all()):
        return ""
    nans = int(leaf.isnan().sum())
    infinite = leaf.numel() - int(torch.isfinite(leaf).sum()) - nans
    return f"{nans} NaN and {infinite} Inf among {leaf.numel()} numbers"


def _wide(leaf: Tensor) -> Tensor:
    """The leaf without its graph, as float32 if it is of an 8-bit type: in these torch looks for no NaN."""
    return leaf.detach().float() if leaf.dtype.itemsize == 1 else leaf.detach()


class _Operations(TorchDispatchMode):
    """Notes the operations that make Inf or NaN of operands that have none.

    It notes the first few, for the first need not be the culprit: masks of attention are Inf by intent.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and check its result."""
        before = {word for leaf in flatten((args, kwargs or {}))[0] for word in _words(leaf)}
        result = func(*args, **(kwargs or {}))
        if "empty" not in str(func):  # memory that nobody has filled
            after = {word for leaf in flatten(result)[0] for word in _words(leaf)}
            if after - before and len(self.found) < _MOST:
                self.found.setdefault(f"{' and '.join(sorted(after - before))} made by {func}, {_place()}")
        return result


def _words(leaf: Any) -> list[str]:
    if not is_differentiable(leaf) or leaf.is_meta:
        return []
    leaf = _wide(leaf)
    return ["NaN"] * bool(leaf.isnan().any()) + ["Inf"] * bool(leaf.isinf().any())


def _place() -> str:
    """The line of the user's code that runs or, in a backward, that made the node."""
    node = running_node()
    if node is not None:
        frames = made_at(node).split("  File ")
        lines = [frame for frame in frames if _is_users(frame.split('"')[1] if '"' in frame else "")]
        origin = f": made by {lines[-1].splitlines()[0].strip()}" if lines else ""
        return f"in the backward of {node.name()}{origin}"
    for frame, line in traceback.walk_stack(sys._getframe(2)):
        if _is_users(frame.f_code.co_filename):
            return f'at "{frame.f_code.co_filename}", line {line}, in {frame.f_code.co_name}'
    return "outside of Python"


def _is_users(file: str) -> bool:
    path = file.replace("\\", "/")
    return bool(path) and "/torch/" not in path and "/funcpipe/" not in path and not path.startswith("<frozen")
