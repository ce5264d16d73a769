"""A compiled stage for one run: programs called on the tensors of a task."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from funcpipe.core.errors import TraceError
from funcpipe.core.result import Loss
from funcpipe.core.stage import Stage
from funcpipe.core.tree import Tree, unflatten
from funcpipe.compiled.backend import Built
from funcpipe.compiled.draws import Keyring
from funcpipe.compiled.joint import Ask, Form, tensors
from funcpipe.compiled.programs import Half, Programs
from funcpipe.compiled.source import Code, laid_out
from funcpipe.runtime.border import LEAF, Border, add_gradients, dense
from funcpipe.runtime.eager import EagerBound, no_autocast
from funcpipe.runtime.host import Way
from funcpipe.runtime.plain import address, plain
from funcpipe.runtime.program import Cotangents, Gradients, Report, StageArgs, StageOut
from funcpipe.runtime.residual import EagerResidual
from funcpipe.runtime.signature import look, said, switches, word

if TYPE_CHECKING:
    from funcpipe.compiled.compile import Compiled

_NOTHING = Report((), None, None)
_ALL_THERE: frozenset[int] = frozenset()


class Tensors:
    """What F keeps for its backward, or I for W: tensors in a list, which the program empties.

    Attributes:
        values: the tensors.
        programs: whose they are.
        microbatch: its index.
        loss: the loss's (sum, weight) and the stage's own, whose weights scale the gradients.
    """

    __slots__ = ("_away", "_event", "loss", "microbatch", "missing", "programs", "side", "values")

    def __init__(self, values: list[Tensor], programs: Programs, microbatch: int) -> None:
        self.values, self.programs, self.microbatch = values, programs, microbatch
        self.loss: Loss | None = None
        self.side: tuple[Any, Any] | None = None
        self.missing: frozenset[int] = frozenset()
        self._away: dict[int, tuple[Any, Any]] = {}
        self._event: Any = None

    @property
    def nbytes(self) -> int:
        """Bytes of those that are on the device; memory that several share counts once."""
        here = [one for number, one in enumerate(self.values) if number not in self._away]
        return sum({address(one): one.untyped_storage().nbytes() for one in here}.values())

    def move(self, to: Way, *, fixed: frozenset[int] = frozenset()) -> Any:
        """Move them to the host, or back, but for memory at the fixed addresses.

        Returns:
            The event after which they are there; None: they are.
        """
        return self._leave(to, fixed) if to.out else self._return(to)

    def _leave(self, to: Way, fixed: frozenset[int]) -> Any:
        moving = {
            number: one
            for number, one in enumerate(self.values)
            if _movable(one) and to.takes(one) and address(one) not in fixed
        }
        copies, self._event = to.copy([one.as_strided((one.numel(),), (1,)) for one in moving.values()])
        self._away = {number: (one.shape, one.stride()) for number, one in moving.items()}
        for number, copy in zip(moving, copies, strict=True):
            self.values[number] = copy
        return self._event

    def _return(self, to: Way) -> Any:
        copies, event = to.copy([self.values[number] for number in self._away], self._event)
        for (number, form), copy in zip(self._away.items(), copies, strict=True):
            self.values[number] = copy.as_strided(*form)
        self._away, self._event = {}, None
        return event


def _movable(tensor: Tensor) -> bool:
    return plain(tensor) and tensor.numel() > 0 and bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


class CompiledBound(EagerBound):
    """A stage run by its programs; parameters, sums and checks are those of an eager one."""

    def __init__(self, compiled: Compiled, stage: Stage, index: int, params: Tree, state: Tree, **options: Any) -> None:
        super().__init__(stage, index, params, state, **options)
        self.compiled, self.trainable = compiled, options["trainable"]
        self.bare = [leaf.detach() for leaf in tensors(self.leaves, self.state_leaves)]
        self.given: dict[Programs, list[Tensor]] = {}
        self.signature: list[Hashable] | None = None
        self.sums: list[Tensor | None] = []
        self.ends: dict[tuple[Programs, float], dict[str, Tensor]] = {}
        self.programs: Programs | None = None
        self.met: dict[Hashable, Programs | None] = {}
        self.waiting: list[tuple[Half, Any]] = []
        self.fixed_words: Hashable = None

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(self, args: StageArgs, *, keep: bool) -> StageOut:
        """F, as its program; a stage that cannot be one runs eagerly where that is wanted."""
        leaves, signature = _read(args)
        try:
            programs = self._programs(args, signature)
        except TraceError as error:
            if error.cause is not None:
                super().forward(args, keep=False)  # a mistake in the stage itself says so, at its place
            programs = self._programs(args, signature)  # which says how to go on
        if programs is None:
            return super().forward(args, keep=keep)
        joint, program = programs.joint, programs.forward if keep else programs.alone
        if joint.draws:
            found = self._run(programs, program, leaves, Keyring(self.keys, self.index, joint.draws, args.microbatch))
        else:
            found = self._run(programs, program, leaves)
        outs, kept = found if keep else (found, [])
        y, report, stash = _close(joint.form, outs)
        if program.gives is None:
            program.gives = look(y)
        y.words = program.gives  # a program lays out what it gives the same way each time
        if not keep:
            return StageOut(y, report, None, stash)
        residual = Tensors(kept, programs, args.microbatch)
        residual.loss, residual.side = report.loss, report.side
        return StageOut(y, report, residual, stash)

    def _run(self, programs: Programs, program: Code | Built, *values: Any) -> Any:
        """Run a program. Casts are in it, so autocast is off."""
        if self.autocast:
            with no_autocast():
                return program.call(self._given(programs), *values)
        return program.call(self._given(programs), *values)

    def _given(self, programs: Programs) -> list[Tensor]:
        """What its programs get of parameters and state: computed once, by the lane that runs them."""
        found = self.given.get(programs)
        if found is None:
            found = self.given[programs] = programs.complete(self.bare)
        return found

    def find(self, args: StageArgs) -> Programs | None:
        """The programs for these shapes; None: run eagerly."""
        return self._programs(args, _read(args)[1])

    def _programs(self, args: StageArgs, signature: list[Hashable]) -> Programs | None:
        if signature != self.signature:
            form = tuple(signature)
            if form not in self.met:  # what a run has it keeps, whatever else is made meanwhile
                if self.fixed_words is None:
                    self.fixed_words = self._words()
                self.met[form] = self.compiled.programs((self.fixed_words, *form), lambda: self._ask(args))
            self.programs, self.signature = self.met[form], signature
        return self.programs

    def _ask(self, args: StageArgs) -> Ask:
        """What is to be traced."""
        params = unflatten(self.spec, self.leaves)
        return Ask(self.stage, params, self.state, self.trainable, self.train, self.backwards, self.loss, args)

    def _words(self) -> Hashable:
        """What a program depends on besides the leaves that a forward gets."""
        flags = (self.train, self.backwards, tuple(self.trainable), self.loss)
        return (flags, switches(), self.spec, self.state_spec, *map(word, (*self.leaves, *self.state_leaves)))

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(self, residual: Any, y: Gradients | None, stash: dict[str, list[Gradients]]) -> Cotangents:
        """B, as one program."""
        if isinstance(residual, EagerResidual):
            return super().backward(residual, y, stash)
        given, missing = self._roots(residual, y, stash)
        x, *skips = self._run(
            residual.programs, residual.programs.half(missing).whole, residual.values, given, self._sums()
        )
        return Cotangents(x, skips)

    def backward_input(
        self, residual: Any, y: Gradients | None, stash: dict[str, list[Gradients]]
    ) -> tuple[Cotangents, Any]:
        """I: the gradients of the inputs, and what W needs."""
        if isinstance(residual, EagerResidual):
            return super().backward_input(residual, y, stash)
        given, missing = self._roots(residual, y, stash)
        (x, *skips), left = self._run(residual.programs, residual.programs.half(missing).inputs, residual.values, given)
        rest = Tensors(left, residual.programs, residual.microbatch)
        rest.missing = missing
        return Cotangents(x, skips), rest

    def backward_weight(self, residual: Any, *, more: bool = False) -> None:
        """W: adds the gradients of the parameters into their sums."""
        if residual is None:
            return
        half, sums = residual.programs.half(residual.missing), self._sums()
        if not self.compiled.merge or not (more or self.waiting):
            self._run(residual.programs, half.weights, residual.values, sums)
            return
        if self.waiting and self.waiting[0][0] is not half:
            self._merge()
        self.waiting.append((half, self._run(residual.programs, half.operands, residual.values, sums)))
        if not more:
            self._merge()

    def _merge(self) -> None:
        """Add the products that wait."""
        half = self.waiting[0][0]
        half.merge([factors for _, factors in self.waiting], self._sums())
        self.waiting = []

    def _sums(self) -> list[Tensor | None]:
        if not self.sums:
            self._begun()
            self.sums = [alias.grad for alias in self.inputs]
        return self.sums

    def _roots(
        self, residual: Tensors, y: Gradients | None, stash: dict[str, list[Gradients]]
    ) -> tuple[list[Tensor | None], frozenset[int]]:
        """The gradients that come in, by root, and the roots that have none."""
        given: list[Tensor | None] = []
        missing = _ALL_THERE
        added = {name: add_gradients(None, *parts) or () for name, parts in stash.items()} if stash else {}
        ends = self.loss_cotangents(residual) if residual.loss is not None or residual.side is not None else {}
        for what, name, leaf, stride in residual.programs.joint.roots:
            if what == "y":
                one = y[leaf] if y is not None else None
            elif what == "stash":
                one = added[name][leaf] if name in added else None
            else:
                one = ends.get(what)
            if one is None:
                missing |= {len(given)}
            elif one.stride() != stride:
                one = laid_out(one, stride)
            given.append(one)
        return given, missing

    def loss_cotangents(self, residual: Any) -> dict[str, Tensor]:
        """As an eager stage's, made once for all microbatches that count alike: no program writes into what it gets."""
        loss, side = residual.loss, residual.side
        if self.shares is None or side is not None or loss is None or loss.weight is not None or isinstance(residual, EagerResidual):  # fmt: skip
            return super().loss_cotangents(residual)
        key = residual.programs, self.shares.factor(loss, residual.microbatch)
        found = self.ends.get(key)
        if found is None:
            found = self.ends[key] = super().loss_cotangents(residual)
        return found

    def release(self) -> None:
        """Forget every tensor."""
        super().release()
        self.bare, self.sums = [], []
        self.given.clear()
        self.ends.clear()
        self.met.clear()
        self.programs = self.signature = None


def _close(form: Form, outs: Sequence[Tensor]) -> tuple[Border, Report, dict[str, Border]]:
    """What a forward hands out, from the program's tensors."""
    (spec, flags), stashes, report = form.y, form.stash, form.report
    if form.plain:  # most of the time
        found = _NOTHING if report is None else Report((), Loss(outs[1]), None)
        return Border([dense(outs[0])], LEAF, flags), found, {}
    leaves = list(form.leaves)
    for slot, out in zip(form.slots, outs, strict=True):
        leaves[slot] = out
    at = len(flags)
    y = Border([dense(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves[:at]], spec, flags)
    stash: dict[str, Border] = {}
    for name, (own_spec, own_flags) in stashes.items():
        part = leaves[at : at + len(own_flags)]
        stash[name] = Border([dense(leaf) if isinstance(leaf, Tensor) else leaf for leaf in part], own_spec, own_flags)
        at += len(own_flags)
    return y, _NOTHING if report is None else Report(*unflatten(report, leaves[at:])), stash


def _read(args: StageArgs) -> tuple[list[Tensor], list[Hashable]]:
    """The tensors that a forward gets, and the signature of all that it gets."""
    found: list[Tensor] = []
    words: list[Hashable] = []
    borders = [args.x, *args.skips, *args.feeds]
    if args.target is not None:
        borders.append(args.target)
    for border in borders:
        words.append(said(border))
        for leaf in border.leaves:
            if isinstance(leaf, Tensor):
                found.append(leaf)
    return found, words
