"""Bind a compiled stage for one run: call its programs on the tensors of each action.

`compile` owns the programs, `eager` in `stages` is the counterpart without programs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from funcpipe._src.compiled.draws import Keyring
from funcpipe._src.compiled.joint import OutputSpec, tensors
from funcpipe._src.compiled.programs import Programs
from funcpipe._src.compiled.residual import ProgramResidual
from funcpipe._src.compiled.source import Code, laid_out
from funcpipe._src.core.border import (
    LEAF,
    Border,
    add_gradients,
    dense,
)
from funcpipe._src.core.cache_key import border_key, border_key_or_none, leaf_key, switches_key
from funcpipe._src.core.errors import TraceError
from funcpipe._src.core.tree import Tree, unflatten
from funcpipe._src.data.result import Loss
from funcpipe._src.stages.bound import Cotangents, ForwardReport, Gradients, StageArgs, StageOut
from funcpipe._src.stages.context import no_autocast
from funcpipe._src.stages.divisors import refuse_left_out
from funcpipe._src.stages.drawing import MeanOverTargets
from funcpipe._src.stages.eager import EagerBound
from funcpipe._src.stages.residual import EagerResidual
from funcpipe._src.stages.split_backward import EagerWeights

if TYPE_CHECKING:
    from funcpipe._src.compiled.compile import Compiled

_NOTHING = ForwardReport((), None, None)
_ALL_THERE: frozenset[int] = frozenset()  # every root has a gradient


class CompiledBound:
    """A stage that runs its programs, as ``compiled`` makes them.

    Attributes:
        eager: the same stage under autograd, for calls that have no program. It owns parameters,
            state and losses.
    """

    def __init__(self, compiled: Compiled, *bound: Any, **options: Any) -> None:
        self.compiled, self.eager = compiled, EagerBound(*bound, **options)
        self.params = self.eager.params
        self.params.forget = self._forget
        self._bare = self._all_bare()
        self._complete: dict[Programs, list[Tensor]] = {}
        self._sums: list[Tensor] = []
        self._met: dict[Hashable, Programs | None] = {}
        self._last: tuple[list[Hashable], Programs | None] = ([], None)

    def _all_bare(self) -> list[Tensor]:
        return [leaf.detach() for leaf in tensors(self.params.leaves, self.params.state_leaves)]

    @property
    def phase(self) -> str:
        """The phase of the eager stage."""
        return self.eager.phase

    def rebase(self, state: Tree | None) -> None:
        """Take the state that an earlier batch left."""
        self.eager.rebase(state)
        if state is not None:
            self._bare = self._all_bare()
            self.__dict__.pop("_words", None)  # it may have another structure
        self._met, self._last = {}, ([], None)

    def _forget(self) -> None:
        """Forget the results of C, and the tensors of the sums."""
        self._complete.clear()
        self._sums = []

    def release(self) -> None:
        """Forget every tensor."""
        self.eager.release()
        self._bare, self._sums, self._last = [], [], ([], None)
        for remembered in (self._complete, self._met):
            remembered.clear()

    # -- forward
    # -------------------------------------------------------------------------------

    def forward(self, args: StageArgs, *, keep: bool) -> StageOut:
        """Run F. A stage without a program runs eagerly, if it has a fallback."""
        leaves, signature = _read(args)
        try:
            programs = self._programs(args, signature)
        except TraceError as error:
            if error.cause is not None:
                # The stage itself raised in the trace. An eager forward raises the same error at
                # its own line, without torch's tracing frames.
                self.eager.forward(args, keep=False)
            programs = self._programs(args, signature)  # raises again, with advice
        if programs is None:
            return self.eager.forward(args, keep=keep)
        joint, program = programs.joint, programs.forward if keep else programs.alone
        keys = (
            [Keyring(self.eager.keys, self.eager.index, joint.draws, args.microbatch)]
            if joint.draws
            else []
        )
        result = self._run(programs, program, leaves, *keys)
        outs, kept = result if keep else (result, [])
        y, report, stash = _close(joint.spec, outs)
        if (
            self.eager.guessed
            and programs.means
            and report.loss is not None
            and report.loss.weight is None
        ):
            refuse_left_out(_means(programs.means, args))
        if self.eager.unproven and report.loss is not None and args.target is not None:
            self.eager.check_mean(y, args, report.loss)
        if program.gives is None:
            program.gives = border_key_or_none(y)
        y.words = program.gives  # a program's output has the same layout in each call
        if not keep:
            return StageOut(y, report, None, stash)
        residual = ProgramResidual(kept, programs, args.microbatch, report.loss, report.side)
        return StageOut(y, report, residual, stash)

    def _run(self, programs: Programs, program: Code, *values: Any) -> Any:
        """Run a program. Autocast is off, because the program contains the casts."""
        complete = self._complete.get(programs)
        if complete is None:  # once per run, or after each gather, on the lane of this stage
            complete = self._complete[programs] = programs.complete(self._bare)
        if self.eager.autocast:
            with no_autocast():
                return program.call(complete, *values)
        return program.call(complete, *values)

    def find(self, args: StageArgs) -> Programs | None:
        """Return the programs for these shapes. None: the stage runs eagerly."""
        return self._programs(args, _read(args)[1])

    def build(self, *, split: bool, remat: bool) -> None:
        """Write or build all programs that a step with the shapes of the last forward needs."""
        programs = self._last[1]
        if programs is not None and self.eager.backwards:
            programs.build(split=split, remat=remat)

    def _programs(self, args: StageArgs, signature: list[Hashable]) -> Programs | None:
        if signature != self._last[0]:
            form = tuple(signature)
            if form not in self._met:  # a run keeps its programs, even if `Compiled` drops them
                self._met[form] = self.compiled.programs((self._words, *form), self.eager, args)
            self._last = signature, self._met[form]
        return self._last[1]

    @cached_property
    def _words(self) -> Hashable:
        """The part of the signature that is the same for all forwards of a run."""
        eager, params = self.eager, self.params
        # `PythonValues` of this signature keep the loss alive, so its id stays unique.
        flags = (eager.train, eager.backwards, tuple(params.trainable), id(eager.loss))
        leaves = (*params.leaves, *params.state_leaves)
        return (flags, switches_key(), params.spec, eager.state_spec, *map(leaf_key, leaves))

    # -- backward
    # -------------------------------------------------------------------------------

    def backward(
        self,
        residual: Any,
        y: Gradients | None,
        stash: dict[str, list[Gradients]],
        *,
        split: bool = False,
    ) -> tuple[Cotangents, Any]:
        """Run B as one program. With ``split`` run I, and return also the residual for W."""
        if isinstance(residual, EagerResidual):
            return self.eager.backward(residual, y, stash, split=split)
        programs = residual.programs
        cotangents, missing = self._roots(residual, y, stash)
        half, values = programs.half(missing), (residual.values, cotangents)
        if not split:
            x, *skips = self._run(programs, half.whole, *values, self._totals())
            return Cotangents(x, skips), None
        sums = [] if half.inputs.part.sums is None else [self._totals()]
        (x, *skips), left = self._run(programs, half.inputs, *values, *sums)
        weights = ProgramResidual(left, programs, residual.microbatch, missing=missing)
        return Cotangents(x, skips), weights

    def backward_weight(self, residual: Any) -> None:
        """Run W: add the gradients of the parameters to their sums."""
        if residual is None or isinstance(residual, EagerWeights):
            self.eager.backward_weight(residual)
            return
        programs = residual.programs
        weights = programs.half(residual.missing).weights
        self._run(programs, weights, residual.values, self._totals())

    def _totals(self) -> list[Tensor]:
        """The sums of the trainable leaves."""
        if not self._sums:
            self._sums = self.params.sums.begin()
        return self._sums

    def _roots(
        self, residual: ProgramResidual, y: Gradients | None, stash: dict[str, list[Gradients]]
    ) -> tuple[list[Tensor | None], frozenset[int]]:
        """Return the incoming gradients by root, and the roots without a gradient."""
        cotangents: list[Tensor | None] = []
        missing = _ALL_THERE
        added = {name: add_gradients(None, *parts) or () for name, parts in stash.items()}
        ends: dict[str, Tensor | None] = {}
        if residual.loss is not None:
            ends["loss"] = self.eager.loss_gradient(residual.loss, residual.microbatch)
        if residual.side is not None:
            ends["side"] = self.eager.side_gradient(residual.side, residual.microbatch)
        for kind, name, leaf, stride in residual.programs.joint.roots:
            if kind == "y":
                gradient = y[leaf] if y is not None else None
            elif kind == "stash":
                gradient = added[name][leaf] if name in added else None
            else:
                gradient = ends.get(kind)
            if gradient is None:
                missing |= {len(cotangents)}
            # The program was traced with this layout, and its views depend on it.
            elif gradient.stride() != stride:
                gradient = laid_out(gradient, stride)
            cotangents.append(gradient)
        return cotangents, missing


def _means(means: Sequence[tuple[bool, int]], args: StageArgs) -> list[MeanOverTargets]:
    """The means of a program, each with every tensor that may be its targets: the plan's target,
    or any integers."""
    target = [] if args.target is None else tensors(args.target.leaves)
    leaves = [
        leaf
        for leaf in target or tensors(*(border.leaves for border in args.borders()))
        if not leaf.is_complex()
    ]
    return [MeanOverTargets(leaf, *mean) for mean in means for leaf in leaves]


def _close(
    spec: OutputSpec, outs: Sequence[Tensor]
) -> tuple[Border, ForwardReport, dict[str, Border]]:
    """Build output, report and stash of a forward from its program's tensors."""
    if spec.plain:  # most of the time
        report = _NOTHING if spec.report is None else ForwardReport((), Loss(outs[1]), None)
        return Border([dense(outs[0])], LEAF, spec.y[1]), report, {}
    leaves = list(spec.leaves)
    for slot, tensor in zip(spec.slots, outs, strict=True):
        leaves[slot] = tensor
    rest = iter(leaves)

    def border(structure: Any, flags: Sequence[bool]) -> Border:
        part = [next(rest) for _ in flags]
        return Border(
            [dense(leaf) if isinstance(leaf, Tensor) else leaf for leaf in part], structure, flags
        )

    y, stash = border(*spec.y), {name: border(*part) for name, part in spec.stash.items()}
    y.shared = spec.shared
    return (
        y,
        _NOTHING if spec.report is None else ForwardReport(*unflatten(spec.report, list(rest))),
        stash,
    )


def _read(args: StageArgs) -> tuple[list[Tensor], list[Hashable]]:
    """Return the tensors that a forward gets, and the signature of all its arguments."""
    borders = args.borders()
    leaves = [leaf for border in borders for leaf in border.leaves if isinstance(leaf, Tensor)]
    return leaves, [border.words or border_key(border) for border in borders]
