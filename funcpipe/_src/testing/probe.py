"""Make the calls of `check_stage`, and compare their results.

`observe` notes the side effects of each call.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from funcpipe._src.core.border import Border, caller_copy, dense
from funcpipe._src.core.errors import DrawError, PlanError
from funcpipe._src.core.shown import shape_of
from funcpipe._src.core.torch_names import storage_number
from funcpipe._src.core.tree import Tree, flatten, is_differentiable, leaves, locations, map_leaves
from funcpipe._src.data.stage import Stage
from funcpipe._src.stages.bound import Gradients, Shares, StageArgs, StageOut
from funcpipe._src.stages.drawing import CatchDraws
from funcpipe._src.stages.eager import EagerBound
from funcpipe._src.stages.reached import Reached
from funcpipe._src.stages.rng import Keys
from funcpipe._src.stages.trainable import Trainable, trainable_leaves
from funcpipe._src.testing.match import differences
from funcpipe._src.testing.observe import Observer
from funcpipe._src.testing.snapshot import Snapshot, named


class Probe:
    """One check of one stage.

    Args:
        stage: the stage to check.
        trees: params, x, skips, feeds and state, of which the stage gets copies.
        train, seed, trainable: as in `check_stage`.

    Attributes:
        watch: notes faults, and inputs that are written in place.
        outputs: the leaves that the stage returns: place -> type and shape.
        num_bytes: bytes of the returned tensors.
        draws, unused, rows: see `StageReport`.
    """

    def __init__(
        self,
        stage: Stage,
        trees: Mapping[str, Any],
        *,
        train: bool,
        seed: int,
        trainable: Any,
    ) -> None:
        self.stage, self.train, self.seed = stage, train, seed
        copies: dict[int, Tensor] = {}

        def copy(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in copies:  # a tensor that occurs twice gets one copy
                copies[id(leaf)] = dense(leaf.detach().clone()).requires_grad_(leaf.requires_grad)
            return copies[id(leaf)]

        self.params, self.x = (map_leaves(copy, trees[name]) for name in ("params", "x"))
        self.skips, self.feeds = (
            map_leaves(copy, dict(trees[name])) for name in ("skips", "feeds")
        )
        self.state = () if trees["state"] is None else map_leaves(copy, trees["state"])
        self.num_rows = next((leaf.shape[0] for leaf in leaves(self.x) if leaf.dim()), 0)
        self.floating = any(is_differentiable(leaf) for leaf in leaves(self.x))
        self.finite = all(bool(leaf.isfinite().all()) for leaf in copies.values())
        self.wanted = trainable_leaves([self.params], _for_all_stages(trainable))[0]
        self.names = locations(self.params, "params")
        self.watch = Observer(stage, finite=self.finite)
        self._note = self.watch.note
        self.watched = self.watch.watched()
        self.watched.seen.kept.update((True, False))  # the observer itself checks kept parameters
        self.outputs: dict[str, str] = {}
        self.num_bytes = 0
        self.draws, self.rows = False, "not compared"
        self.unused: list[str] = []

    def run(self, *, independent_rows: bool) -> BaseException | None:
        """Make all calls, until one raises. Returns the error of the stage, or None."""
        try:
            self._first_call()
            # Recorded after the first call, because tables that it fills are legal.
            before, captured = self._alive(), Snapshot(Reached(self.stage).found)
            self._repeated_calls()
            self._fewer_rows(independent_rows)
        except _Raised as raised:
            return raised.__cause__
        reached = Reached(self.stage).found
        values = [*leaves(self.params), *leaves(self.state), *captured.values.values()]
        strided = [
            value for value in values if isinstance(value, Tensor) and value.layout is torch.strided
        ]
        storages = {storage_number(value.untyped_storage()) for value in strided}
        if self._alive() - before - storages:
            self._note(
                "kept",
                "keeps its input, or its result, after the run; return the tensor instead (stash, "
                "Out(stats=...))",
            )
        for name in captured.changes(reached):
            self._note(
                "captured",
                f"changes {name}, which it closes over; return it in Out(stats=...), fold it in "
                "commit=",
            )
        for name, value in captured.values.items():
            if id(value) in self.watch.parameters:
                self._note(
                    "captured",
                    f"closes over {name}, which requires a gradient but gets none; take it from "
                    "params",
                )
        return None

    def _alive(self) -> set[int]:
        """The storages of the calls so far that are still alive."""
        if not all(ref.expired() for ref in self.watch.memory):
            gc.collect()
        return {ref.cdata for ref in self.watch.memory if not ref.expired()}

    # -- calls

    def _bind(self) -> EagerBound:
        bound = EagerBound(
            self.watched,
            0,
            self.params,
            self.state,
            trainable=self.wanted,
            train=self.train,
            backwards=True,
            keys=Keys(self.seed, [self.stage]),
            shares=Shares((1.0, 1.0), 2.0, False, 1.0, (0.5, 0.5)),
        )
        bound.graphs_to_check = 0  # the observer notes these faults, and the calls continue
        return bound

    def _args(self, microbatch: int, rows: int | None = None) -> StageArgs:
        """The arguments of a forward, as values between stages: all rows, or the first few."""

        def border(tree: Tree) -> Border:
            values, spec = flatten(tree)
            values = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in values]
            values = values if rows is None else [self._first(leaf, rows) for leaf in values]
            return Border(values, spec, [is_differentiable(leaf) for leaf in values])

        skips = [border(self.skips[name]) for name in self.stage.pop]
        feeds = [border(self.feeds[name]) for name in self.stage.feeds]
        return StageArgs(border(self.x), skips, feeds, None, microbatch)

    def _first(self, leaf: Any, rows: int) -> Any:
        """The first rows of a leaf that has as many rows as the input; other leaves unchanged."""
        has_rows = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == self.num_rows
        return leaf[:rows] if has_rows else leaf

    def _forward(self, bound: EagerBound, microbatch: int) -> StageOut:
        return self._attempt(lambda: bound.forward(self._args(microbatch), keep=True), "raises")

    def _attempt(self, call: Callable[[], Any], prefix: str) -> Any:
        try:
            return call()
        except Exception as error:
            # The runtime itself raises for draws without a key and for buffers that a module
            # writes. Its messages already explain the fault.
            if isinstance(error, DrawError | PlanError):
                self._note("random" if isinstance(error, DrawError) else "state", str(error))
            else:
                self._note("raises", f"{prefix} {type(error).__name__}: {error}")
            raise _Raised from error

    def _first_call(self) -> None:
        """Call once without judging, because a table that is filled now is not a fault."""
        bound = self._bind()
        out = self._forward(bound, 0)
        self.draws = self.train in self.watched.seen.draws
        if self.num_rows > 1:
            with suppress(Exception):  # `_fewer_rows` reports it
                bound.forward(self._args(0, self.num_rows - 1), keep=False)
        for name, tree in _parts(out):
            self.outputs |= {place: shape_of(leaf) for place, leaf in named(tree, name).items()}
            self.num_bytes += sum(leaf.nbytes for leaf in leaves(tree))
        bound.release()

    def _repeated_calls(self) -> None:
        """Call with microbatch 0, 1, 0 again as remat does, and 0 in a second run."""
        bound = self._bind()
        first, other, again = [self._forward(bound, microbatch) for microbatch in (0, 1, 0)]
        self._compare(other, first, "for another microbatch", values=False)
        self._compare(again, first, "at the second call, as remat makes it")
        self._gradients(bound, first, again)
        bound.release()
        self._commit(first, other)
        bound = self._bind()
        self._compare(self._forward(bound, 0), first, "in a second run")
        bound.release()

    def _commit(self, *outs: StageOut) -> None:
        """Commit the statistics of two microbatches: a state like the old one must come of it."""
        commit, state = self.stage.commit, self.state
        if commit is None or not self.train:
            return
        stats = tuple(out.report.stats for out in outs)
        new = self._attempt(
            lambda: commit(map_leaves(caller_copy, state), stats), "its commit raises"
        )
        if _kinds(new) != _kinds(state):
            self._note("commit", f"its commit returns {_show(new)}, the state is {_show(state)}")

    def _compare(
        self, actual: StageOut, expected: StageOut, when: str, *, values: bool = True
    ) -> None:
        for (name, a), (_, b) in zip(_parts(actual), _parts(expected), strict=True):
            if _kinds(a) != _kinds(b):
                self._note("structure", f"{name} {when} is {_show(a)}, before it was {_show(b)}")
            elif values:
                for line in differences(a, b, name)[0]:
                    self._note(
                        "deterministic", f"gives another {line.replace(':', f' {when}:', 1)}"
                    )

    # -- gradients

    def _gradients(self, bound: EagerBound, first: StageOut, again: StageOut) -> None:
        if not any(self.wanted) and not self.floating:
            return
        if not self.watch.connected:
            self._note(
                "gradient",
                "returns no tensor that requires a gradient, although parameters or input can have "
                "one; the result is detached, or computed under no_grad",
            )
            return
        gradients = self._attempt(lambda: self._backward(bound, first, 1), "in its backward raises")
        self.unused = [self.names[number] for number in bound.params.unused()]
        repeated = self._attempt(
            lambda: self._backward(bound, again, 2), "in its second backward raises"
        )
        for name, gradient in repeated.items():
            for line in differences(gradient, gradients[name], name)[0]:
                self._note(
                    "deterministic",
                    f"gives another gradient of {line.replace(':', ' at the second backward:', 1)}",
                )
        for name, gradient in gradients.items():
            if self.finite and gradient is not None and not gradient.isfinite().all():
                self._note(
                    "gradient",
                    f"the gradient of {name} is not finite although the inputs are finite",
                )
        for name in self.unused:
            self._note(
                "unused",
                f"no gradient reaches {name}; if that is intended, freeze it (requires_grad=False, "
                "or trainable=)",
            )
        if self.floating and all(gradients[name] is None for name in locations(self.x, "x")):
            self._note("gradient", "no gradient reaches x, so earlier stages would not train")

    def _backward(self, bound: EagerBound, out: StageOut, number: int) -> dict[str, Tensor | None]:
        """Make backward ``number``, from 1, for fixed gradients of the outputs.

        Returns the gradients of parameters and inputs by name.
        """
        generator = torch.Generator().manual_seed(0)

        def some(border: Border) -> Gradients:
            pairs = zip(border.leaves, border.flags, strict=True)
            return [
                torch.randn(leaf.shape, generator=generator).to(leaf) if flag else None
                for leaf, flag in pairs
            ]

        stash = {name: [some(stashed)] for name, stashed in out.stash.items()}
        with CatchDraws():
            grads, _ = bound.backward(out.residual, some(out.y), stash)
        names = [*self.names, *locations(self.x, "x")]
        for name in self.stage.pop:
            names += locations(self.skips[name], f"skips[{name!r}]")
        # A sum contains ``number`` equal gradients. x + x is exact, so half of it is exactly x.
        sums = [None if grad is None else grad / number for grad in bound.params.grads()]
        return dict(zip(names, chain(sums, grads.x, *grads.skips), strict=True))

    # -- rows

    def _fewer_rows(self, independent: bool) -> None:
        """Call without the last row, because microbatches differ by a row, and compare."""
        fewer = self.num_rows - 1
        if fewer < 1:
            return
        bound = self._bind()
        all_rows = self._forward(bound, 0)
        try:
            without_last_row = bound.forward(self._args(0, fewer), keep=False)
        except Exception as error:
            self._note(
                "rows",
                f"with {fewer} of {fewer + 1} rows it raises {type(error).__name__}: {error}",
            )
            return
        finally:
            bound.release()
        compared, depends = False, list[str]()
        for (name, a), (_, b) in zip(_parts(without_last_row), _parts(all_rows), strict=True):
            if _kinds(a, sizes=False) != _kinds(b, sizes=False):
                self._note(
                    "structure",
                    f"{name} for {fewer} rows is {_show(a)}, for {fewer + 1} rows it was "
                    f"{_show(b)}",
                )
            elif name not in ("stats", "loss"):  # those are sums over rows
                cut = map_leaves(lambda leaf: self._first(leaf, fewer), b)
                for where, x, y in zip(
                    locations(a, name), flatten(a)[0], flatten(cut)[0], strict=True
                ):
                    if shape_of(x) == shape_of(y):  # else the rows are not along the first axis
                        compared = True
                        depends += differences(x, y, where, allowed=_rounding(y))[0]
        # The numbers drawn for a row may depend on the number of rows.
        if not compared or self.draws:
            return
        self.rows = "dependent" if depends else "independent"
        if independent and depends:
            self._note("rows", f"without the last row the others give another {depends[0]}")


def _for_all_stages(trainable: Any) -> Trainable:
    """Convert ``trainable`` of one stage to the form for all stages of a run."""
    if trainable is None or isinstance(trainable, (bool, str)):
        return trainable
    if callable(trainable):
        return lambda name, leaf: bool(trainable(name.removeprefix("0.").removeprefix("0"), leaf))
    return [trainable]


class _Raised(Exception):
    """The stage itself raised: the probe ends with this fault."""


def _parts(out: StageOut) -> list[tuple[str, Tree]]:
    """The trees that a stage returned, by the names of `Out`."""
    stashed = {
        f"stash[{name!r}]" if name else "carry": border.tree() for name, border in out.stash.items()
    }
    side = () if out.report.side is None else out.report.side
    return [("y", out.y.tree()), *stashed.items(), ("stats", out.report.stats), ("loss", side)]


def _kinds(tree: Tree, *, sizes: bool = True) -> tuple[Any, list[Any]]:
    """The structure, and of each leaf type and shape; without sizes, type and number of axes."""
    values, spec = flatten(tree)
    if sizes:
        return spec, [shape_of(leaf) for leaf in values]
    return spec, [
        (leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else type(leaf) for leaf in values
    ]


def _show(tree: Tree) -> str:
    inside = ", ".join(map(shape_of, flatten(tree)[0]))
    is_leaf = tree is None or isinstance(tree, Tensor)
    return inside if is_leaf else f"a {type(tree).__name__} of ({inside})"


def _rounding(leaf: Any) -> float:
    """The relative tolerance for a row among fewer rows: kernels sum in other orders."""
    return torch.finfo(leaf.dtype).eps ** 0.7 if is_differentiable(leaf) else 0.0
