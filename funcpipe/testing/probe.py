"""The calls that `check_stage` makes of a stage, and what follows from comparing them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from funcpipe.core.errors import DrawError, PlanError
from funcpipe.core.stage import Stage
from funcpipe.core.torch_names import storage_number
from funcpipe.core.tree import Tree, flatten, is_differentiable, leaves, locations, map_leaves
from funcpipe.runtime.border import Border, dense
from funcpipe.runtime.bound import Gradients, Shares, StageArgs, StageOut
from funcpipe.runtime.eager import EagerBound
from funcpipe.runtime.reached import Reached
from funcpipe.runtime.rng import Keys
from funcpipe.runtime.trainable import Trainable, trainable_leaves
from funcpipe.testing.match import differences
from funcpipe.testing.observe import Observer
from funcpipe.testing.snapshot import Snapshot, named


class Arguments:
    """What a stage is called with: copies, laid out as values between stages are."""

    def __init__(
        self, params: Tree, x: Tree, skips: Mapping[str, Tree], feeds: Mapping[str, Tree], state: Tree
    ) -> None:
        copies: dict[int, Tensor] = {}

        def copy(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in copies:  # what is one tensor stays one
                copies[id(leaf)] = dense(leaf.detach().clone()).requires_grad_(leaf.requires_grad)
            return copies[id(leaf)]

        self.params, self.state = map_leaves(copy, params), () if state is None else map_leaves(copy, state)
        self.x, self.skips, self.feeds = (
            map_leaves(copy, x),
            map_leaves(copy, dict(skips)),
            map_leaves(copy, dict(feeds)),
        )
        self.rows = next((leaf.shape[0] for leaf in leaves(self.x) if leaf.dim()), 0)
        self.floating = any(is_differentiable(leaf) for leaf in leaves(self.x))
        self.finite = all(bool(leaf.isfinite().all()) for leaf in copies.values())

    def args(self, stage: Stage, microbatch: int, rows: int | None = None) -> StageArgs:
        """The arguments of a forward: all rows, or the first few."""

        def border(tree: Tree) -> Border:
            values, spec = flatten(tree)
            values = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in values]
            values = values if rows is None else [self.first(leaf, rows) for leaf in values]
            return Border(values, spec, [is_differentiable(leaf) for leaf in values])

        skips = [border(self.skips[name]) for name in stage.pop]
        return StageArgs(border(self.x), skips, [border(self.feeds[name]) for name in stage.feeds], None, microbatch)

    def first(self, leaf: Any, rows: int) -> Any:
        """The first rows of what has as many as the input."""
        has = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == self.rows
        return leaf[:rows] if has else leaf


class Probe:
    """One check of one stage.

    Attributes:
        faults: (name, what is wrong), each once.
        outputs: the leaves that the stage returns: where, and type and shape.
        num_bytes: of the tensors among them.
        draws, in_place, unused, rows: see `StageReport`.
    """

    def __init__(self, stage: Stage, given: Arguments, *, train: bool, seed: int, trainable: Any) -> None:
        self.stage, self.given, self.train, self.seed = stage, given, train, seed
        self.wanted = trainable_leaves([given.params], _of_one(trainable))[0]
        self.names = locations(given.params, "params")
        self.watch = Observer(stage, finite=given.finite)
        self.watched = self.watch.watched()
        self.watched.seen.kept.update((True, False))  # the observer looks after the parameters
        self.outputs: dict[str, str] = {}
        self.num_bytes = 0
        self.draws, self.rows = False, "not compared"
        self.unused: list[str] = []

    @property
    def faults(self) -> tuple[tuple[str, str], ...]:
        """All that was found."""
        return tuple(dict.fromkeys(self.watch.faults))

    def run(self, *, independent_rows: bool) -> BaseException | None:
        """Make all calls. Returns what the stage itself raised, if it did: the faults are then those until there."""
        try:
            self._first_call()
            before, captured = self._alive(), Snapshot(Reached(self.stage).found)
            self._same_again()
            self._fewer_rows(independent_rows)
        except _Raised as raised:
            return raised.__cause__
        now = Reached(self.stage).found
        there = [*leaves(self.given.params), *leaves(self.given.state), *captured.values.values()]
        own = {storage_number(one.untyped_storage()) for one in there if _is_strided(one)}
        if self._alive() - before - own:
            self.watch.note(
                "kept",
                "keeps its input, or what it returned, after the run; hand it on instead (stash, Out(stats=...))",
            )
        for name in captured.changes(now):
            self.watch.note(
                "captured", f"changes {name}, which it closes over; return it in Out(stats=...), fold it in commit="
            )
        for name, value in captured.values.items():
            if id(value) in self.watch.parameters:
                self.watch.note(
                    "captured",
                    f"closes over {name}, which requires a gradient and will get none; take it from params",
                )
        return None

    def _alive(self) -> set[int]:
        """The memory of the calls so far that somebody still holds."""
        if not all(ref.expired() for ref in self.watch.memory):
            gc.collect()
        return {ref.cdata for ref in self.watch.memory if not ref.expired()}

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _bind(self) -> EagerBound:
        options: dict[str, Any] = {"trainable": self.wanted, "train": self.train, "backwards": True}
        options |= {"keys": Keys(self.seed, [self.watched]), "shares": Shares((1.0, 1.0), 2.0, False, 1.0, (0.5, 0.5))}
        bound = EagerBound(self.watched, 0, self.given.params, self.given.state, **options)
        bound.looked = True  # what a run would refuse is noted here, and the calls go on
        return bound

    def _forward(self, bound: EagerBound, microbatch: int) -> StageOut:
        return self._attempt(lambda: bound.forward(self.given.args(self.stage, microbatch), keep=True), "raises")

    def _attempt(self, call: Callable[[], Any], what: str) -> Any:
        try:
            return call()
        except Exception as error:
            # Draws without a key, and buffers that a module writes, are refused by the runtime in its own words.
            known = "random" if isinstance(error, DrawError) else "state" if isinstance(error, PlanError) else ""
            self.watch.note(known or "raises", str(error) if known else f"{what} {type(error).__name__}: {error}")
            raise _Raised from error

    def _first_call(self) -> None:
        """What only the first call of a shape fills, a table, is no fault. It also tells whether the stage draws."""
        bound = self._bind()
        out = self._forward(bound, 0)
        self.draws = self.train in self.watched.seen.draws
        if self.given.rows > 1:
            with suppress(Exception):  # it comes again
                bound.forward(self.given.args(self.stage, 0, self.given.rows - 1), keep=False)
        for name, tree in _parts(out):
            self.outputs |= {place: _shape(leaf) for place, leaf in named(tree, name).items()}
            self.num_bytes += sum(leaf.nbytes for leaf in leaves(tree))
        bound.release()

    def _same_again(self) -> None:
        """Microbatch 0, another one, 0 again as remat does, 0 in a second run: same numbers, same gradients."""
        bound = self._bind()
        first, other, again = [self._forward(bound, microbatch) for microbatch in (0, 1, 0)]
        self._compare(other, first, "for another microbatch", values=False)
        self._compare(again, first, "at the second call, as remat makes it")
        self._gradients(bound, first, again)
        bound.release()
        bound = self._bind()
        self._compare(self._forward(bound, 0), first, "in a second run")
        bound.release()

    def _compare(self, came: StageOut, wanted: StageOut, when: str, *, values: bool = True) -> None:
        for (name, a), (_, b) in zip(_parts(came), _parts(wanted), strict=True):
            if _kinds(a) != _kinds(b):
                self.watch.note("structure", f"{name} {when} is {_show(a)}, before it was {_show(b)}")
            elif values:
                for line in differences(a, b, name)[0]:
                    self.watch.note("deterministic", f"gives another {line.replace(':', f' {when}:', 1)}")

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _gradients(self, bound: EagerBound, first: StageOut, again: StageOut) -> None:
        if not any(self.wanted) and not self.given.floating:
            return
        if not self.watch.connected:
            self.watch.note(
                "gradient",
                "returns nothing that requires a gradient, though parameters or input could have one: it is "
                "detached, or computed under no_grad",
            )
            return
        inputs = self._attempt(lambda: self._backward(bound, first), "in its backward raises")
        once = [None if one is None else one.clone() for one in bound.grads()]
        self.unused = [self.names[number] for number in bound.unused()]
        repeated = self._attempt(lambda: self._backward(bound, again), "in its second backward raises")
        # The same added to itself is twice the same, exactly.
        second = [None if one is None else one / 2 for one in bound.grads()]
        found = {**dict(zip(self.names, once, strict=True)), **inputs}
        for name, gradient in {**dict(zip(self.names, second, strict=True)), **repeated}.items():
            for line in differences(gradient, found[name], name)[0]:
                self.watch.note(
                    "deterministic", f"gives another gradient of {line.replace(':', ' at the second backward:', 1)}"
                )
        for name, gradient in found.items():
            if self.given.finite and gradient is not None and not gradient.isfinite().all():
                self.watch.note("gradient", f"the gradient of {name} is not finite, for finite inputs")
        for name in self.unused:
            self.watch.note(
                "unused",
                f"no gradient reaches {name}; if that is meant, freeze it (requires_grad=False, or trainable=)",
            )
        if self.given.floating and all(inputs[name] is None for name in locations(self.given.x, "x")):
            self.watch.note("gradient", "no gradient reaches x, so stages before this one would never learn")

    def _backward(self, bound: EagerBound, out: StageOut) -> dict[str, Tensor | None]:
        """The gradients of the inputs by name, for fixed gradients of the outputs."""
        dice = torch.Generator().manual_seed(0)

        def some(border: Border) -> Gradients:
            pairs = zip(border.leaves, border.flags, strict=True)
            return [torch.randn(leaf.shape, generator=dice).to(leaf) if flag else None for leaf, flag in pairs]

        got = bound.backward(out.residual, some(out.y), {name: [some(one)] for name, one in out.stash.items()})
        trees = [self.given.x, *(self.given.skips[name] for name in self.stage.pop)]
        roots = ["x", *(f"skips[{name!r}]" for name in self.stage.pop)]
        places = [place for tree, root in zip(trees, roots, strict=True) for place in locations(tree, root)]
        return dict(zip(places, [gradient for row in (got.x, *got.skips) for gradient in row], strict=True))

    # -- rows ----------------------------------------------------------------------------------------------------------

    def _fewer_rows(self, independent: bool) -> None:
        """All rows against all but the last: microbatches differ by a row."""
        fewer = self.given.rows - 1
        if fewer < 1:
            return
        bound = self._bind()
        whole = self._forward(bound, 0)
        try:
            part = bound.forward(self.given.args(self.stage, 0, fewer), keep=False)
        except Exception as error:
            self.watch.note("rows", f"with {fewer} of {fewer + 1} rows it raises {type(error).__name__}: {error}")
            return
        finally:
            bound.release()
        compared, depends = False, list[str]()
        for (name, a), (_, b) in zip(_parts(part), _parts(whole), strict=True):
            if _kinds(a, sizes=False) != _kinds(b, sizes=False):
                self.watch.note(
                    "structure", f"{name} for {fewer} rows is {_show(a)}, for {fewer + 1} rows it was {_show(b)}"
                )
            elif name not in ("stats", "loss"):  # those are sums over rows
                cut = map_leaves(lambda leaf: self.given.first(leaf, fewer), b)
                for where, x, y in zip(locations(a, name), flatten(a)[0], flatten(cut)[0], strict=True):
                    if _shape(x) == _shape(y):  # else its rows are not along its first axis
                        compared, depends = True, depends + differences(x, y, where, allowed=_rounding(y))[0]
        if not compared or self.draws:  # what a row draws may depend on how many there are
            return
        self.rows = "dependent" if depends else "independent"
        if independent and depends:
            self.watch.note("rows", f"without the last row the others give another {depends[0]}")


def _is_strided(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def _of_one(trainable: Any) -> Trainable:
    """What was meant for one stage, as a run wants it for all."""
    if trainable is None or isinstance(trainable, (bool, str)):
        return trainable
    if callable(trainable):
        return lambda name, leaf: bool(trainable(name.removeprefix("0.").removeprefix("0"), leaf))
    return [trainable]


class _Raised(Exception):
    """The stage itself raised: a fault, after which nothing more can be seen."""


def _parts(out: StageOut) -> list[tuple[str, Tree]]:
    """What a stage returned, by the names of `Out`."""
    parts = [("y", out.y.tree()), *((f"stash[{name!r}]", border.tree()) for name, border in out.stash.items())]
    return [*parts, ("stats", out.report.stats), ("loss", () if out.report.side is None else out.report.side)]


def _shape(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"
    return type(leaf).__name__


def _kinds(tree: Tree, *, sizes: bool = True) -> tuple[Any, list[Any]]:
    """The structure, and what each leaf is; without sizes: its type and how many axes it has."""
    values, spec = flatten(tree)
    if sizes:
        return spec, [_shape(leaf) for leaf in values]
    return spec, [(leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else type(leaf) for leaf in values]


def _show(tree: Tree) -> str:
    inside = ", ".join(_shape(leaf) for leaf in flatten(tree)[0])
    return inside if isinstance(tree, Tensor) else f"a {type(tree).__name__} of ({inside})"


def _rounding(leaf: Any) -> float:
    """How much of the largest number a row may change with the number of rows: kernels sum in other orders."""
    return torch.finfo(leaf.dtype).eps ** 0.7 if is_differentiable(leaf) else 0.0
