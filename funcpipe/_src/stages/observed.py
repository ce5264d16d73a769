"""``observe=``: show the values of each action to a function of the user. Without it a run is bound
to no code of this file."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.torch_names import version
from funcpipe._src.core.tree import Tree, flatten, locations, map_tensors
from funcpipe._src.data.schedule import Action
from funcpipe._src.data.stage import CARRY, Stage
from funcpipe._src.stages.bound import Bound, Cotangents, Gradients, StageArgs, StageOut
from funcpipe._src.stages.context import RUNNING

ObserveFn: TypeAlias = Callable[[Action, str, Tree], object]
"""``(action, name, value)``, see `funcpipe.run`."""


class ObservedBound:
    """A bound stage that shows the inputs and results of each action to an observer.

    It wraps the stage, not the executor, so that the oracle, all executors and all kinds of stages
    show the same values under the same names.
    """

    def __init__(
        self, inner: Bound, stage: Stage, params: Tree, observer: ObserveFn, lock: threading.Lock
    ) -> None:
        self.inner, self.params, self.stage = inner, inner.params, stage
        self.rebase, self.release = inner.rebase, inner.release
        self.names = locations(params, "params")
        self.observer, self.lock = observer, lock

    @property
    def phase(self) -> str:
        """The phase of the inner stage."""
        return self.inner.phase

    def forward(self, args: StageArgs, *, keep: bool) -> StageOut:
        """Show the inputs, run F or R of the inner stage, and show the results."""
        self._show(self._inputs(args))
        out = self.inner.forward(args, keep=keep)
        self._show(_results(out))
        return out

    def backward(
        self,
        residual: Any,
        y: Gradients | None,
        stash: dict[str, list[Gradients]],
        *,
        split: bool = False,
    ) -> tuple[Cotangents, Any]:
        """Show the gradients of the outputs, run B or I, and show the gradients of the inputs."""
        incoming: list[tuple[str, Tree]] = [("output gradient", () if y is None else tuple(y))]
        for name, parts in stash.items():
            label = _label("stash gradient", name, "carry out gradient")
            incoming += [(label, tuple(part)) for part in parts]
        self._show(incoming)
        cotangents, weight_residual = self.inner.backward(residual, y, stash, split=split)
        outgoing: list[tuple[str, Tree]] = [("input gradient", tuple(cotangents.x))]
        for name, leaves in zip((*self.stage.pop, CARRY), cotangents.skips, strict=False):
            label = _label("skip gradient", name, "carry in gradient")
            outgoing.append((label, tuple(leaves)))
        self._show([*outgoing, self._sums()])
        return cotangents, weight_residual

    def backward_weight(self, residual: Any) -> None:
        """Run W of the inner stage, and show the sums of the parameters' gradients."""
        self.inner.backward_weight(residual)
        self._show([self._sums()])

    def _inputs(self, args: StageArgs) -> Iterator[tuple[str, Tree]]:
        yield "input", args.x.tree()
        # A first slice has no carry, so there may be one value less than names.
        for name, skip in zip((*self.stage.pop, CARRY), args.skips, strict=False):
            yield _label("skip", name, "carry in"), skip.tree()
        for name, feed in zip(self.stage.feeds, args.feeds, strict=True):
            yield f"feed {name}", feed.tree()
        if args.target is not None:
            yield "target", args.target.tree()

    def _sums(self) -> tuple[str, Tree]:
        sums = zip(self.names, self.params.present_grads(), strict=True)
        return "parameter gradients", {name: leaf for name, leaf in sums if leaf is not None}

    def _show(self, values: Sequence[tuple[str, Tree]] | Iterator[tuple[str, Tree]]) -> None:
        """Call the observer, for one lane at a time. Raises PlanError if it wrote to a tensor."""
        where = RUNNING.get()
        assert where is not None
        action = Action.parse(where().action)
        with self.lock:
            for name, value in values:
                shown = map_tensors(Tensor.detach, value)
                leaves = [leaf for leaf in flatten(shown)[0] if isinstance(leaf, Tensor)]
                before = [version(leaf) for leaf in leaves]
                self.observer(action, name, shown)
                if before != [version(leaf) for leaf in leaves]:
                    raise PlanError(
                        f"the function given as observe= wrote to {name!r} of {action}; observers "
                        "may only read: write to a copy, tensor.clone()"
                    )


def _label(kind: str, name: str, carry: str) -> str:
    """The name of a skip or a stash by kind; a carry travels among them under the name `CARRY`."""
    return carry if name == CARRY else f"{kind} {name}"


def _results(out: StageOut) -> Iterator[tuple[str, Tree]]:
    yield "output", out.y.tree()
    for name, value in out.stash.items():
        yield _label("stash", name, "carry out"), value.tree()
    if out.report.loss is not None:
        yield "loss", out.report.loss.sum
    if out.report.side is not None:
        yield "auxiliary loss", out.report.side[0]
