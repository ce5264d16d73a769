"""`compile_stage`: a stage whose forward and backward are programs, traced once for each
signature."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

from funcpipe._src.compiled.advice import advice
from funcpipe._src.compiled.backend import Backend, cudagraphs
from funcpipe._src.compiled.bound import CompiledBound
from funcpipe._src.compiled.hoist import hoist
from funcpipe._src.compiled.inductor import inductor
from funcpipe._src.compiled.joint import trace
from funcpipe._src.compiled.programs import Programs
from funcpipe._src.compiled.python_values import PythonValues, ValuesKey
from funcpipe._src.compiled.recompute import recompute as least_kept
from funcpipe._src.core.border import Border
from funcpipe._src.core.errors import PlanError, TraceError
from funcpipe._src.core.log import log
from funcpipe._src.core.tracing import tracing
from funcpipe._src.core.tree import Tree, flatten, is_differentiable
from funcpipe._src.core.words import size_of
from funcpipe._src.data.stage import Stage
from funcpipe._src.stages.bound import StageArgs
from funcpipe._src.stages.eager import EagerBound
from funcpipe._src.stages.rng import Keys
from funcpipe._src.stages.trainable import Trainable, trainable_leaves

_BACKENDS: dict[str, Backend | None] = {
    "graph": None,
    "inductor": inductor,
    "cudagraphs": cudagraphs,
}
"""By name; None: programs are Python that calls torch's kernels."""


class Compiled:
    """How a compiled stage is made into programs, and those that it has so far.

    Attributes:
        backend: what builds the programs.
        fuse: are products added to their sums in one operation.
        recompute: is what is cheap to compute again not kept for the backward.
        fallback: does a stage that cannot be traced run eagerly.
        max_programs: for how many signatures programs are kept.
        found: the outcome for each of these and the Python values that were read, the longest
            unused first: its programs, or why there are none.
        readers: for each signature what reads these values, by every path that the code has taken.
        made: how many outcomes there were in all.
    """

    def __init__(
        self,
        *,
        backend: Backend | str,
        fuse: bool,
        recompute: bool,
        fallback: bool,
        max_programs: int,
    ) -> None:
        self.backend, self.fuse, self.recompute, self.fallback = backend, fuse, recompute, fallback
        self.max_programs = max_programs
        self.found: dict[tuple[ValuesKey, Hashable], Programs | TraceError] = {}
        self.readers: dict[Hashable, list[PythonValues]] = {}
        self.made = 0
        self._told = False
        self._making, self._turn = threading.Lock(), threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _OPTIONS}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def __call__(
        self, stage: Stage, index: int, params: Tree, state: Tree, **options: Any
    ) -> CompiledBound:
        """Bind a stage for one run, as `Program` says. Raises PlanError where parameters or state
        do not fit."""
        return CompiledBound(self, stage, index, params, state, **options)

    def reasons(self) -> list[str]:
        """Why signatures have no programs."""
        return [str(outcome) for outcome in self.found.values() if isinstance(outcome, TraceError)]

    def programs(self, signature: Hashable, bound: EagerBound, args: StageArgs) -> Programs | None:
        """The programs for a signature, traced when it is first met; None where the stage runs
        eagerly.

        Raises:
            TraceError: the stage cannot be traced and was not asked to fall back.
        """
        outcome = self._look(signature)
        if outcome is None:
            with self._making:  # other threads that wait for them get the same
                outcome = self._look(signature) or self._make(signature, bound, args)
        if isinstance(outcome, Programs):
            return outcome
        if self.fallback:
            return None
        raise TraceError(
            f"stage {bound.stage.name!r} cannot be compiled: {outcome}; leave it eager, or "
            "fp.compile_stage(stage, fallback=True) to run it so where it cannot be"
        )

    def _look(self, signature: Hashable) -> Programs | TraceError | None:
        """The outcome for a signature, now the last used; None: it was not met, or is no longer
        kept."""
        with self._turn:
            for reader in self.readers.get(signature, ()):
                key = reader.key(), signature
                outcome = self.found.pop(key, None)
                if outcome is not None:
                    self.found[key] = outcome
                    return outcome
            return None

    def _make(
        self, signature: Hashable, bound: EagerBound, args: StageArgs
    ) -> Programs | TraceError:
        """Trace a signature that has no outcome yet, and keep its outcome; the longest unused one
        goes.

        Raises:
            TraceError: the stage itself raised, and does not fall back; the cause says more than a
                reason here.
        """
        name, began = bound.stage.name or str(bound.index), perf_counter()
        values = PythonValues(bound.stage, bound.loss)
        try:
            joint = trace(bound, args, values)
            with tracing:
                hoist(joint)
                if self.recompute:
                    least_kept(joint)
                backend = _BACKENDS[self.backend] if isinstance(self.backend, str) else self.backend
                programs = Programs(joint, fuse=self.fuse, backend=backend)
        except TraceError as error:
            fault = TraceError(str(error))  # without its frames
            self._keep(signature, fault, values)
            self._advise(signature, values, bound, args)
            how = "runs eagerly" if self.fallback else "cannot be compiled"
            log.info("stage %s %s, because: %s", name, how, fault)
            if error.cause is not None and not self.fallback:
                raise
            return fault
        self._keep(signature, programs, values)
        kept = size_of(programs.residual_bytes)
        log.info(
            "compiled stage %s for signature %d; %s are kept from F to B", name, self.made, kept
        )
        log.debug(
            "tracing stage %s and cutting its graph took %.3g s", name, perf_counter() - began
        )
        self._advise(signature, values, bound, args)
        return programs

    def _keep(
        self, signature: Hashable, outcome: Programs | TraceError, values: PythonValues
    ) -> None:
        values.look()
        with self._turn:
            self.made += 1
            others = [
                reader for reader in self.readers.get(signature, ()) if not reader.same_code(values)
            ]
            self.readers[signature] = [*others, values]
            self.found[values.key(), signature] = outcome
            oldest = list(self.found)[: -self.max_programs]
            dropped = [
                self.found.pop(old) for old in oldest
            ]  # runs that use it hold it until they end
            kept = {other for _, other in self.found}
            self.readers = {
                other: readers for other, readers in self.readers.items() if other in kept
            }
        if dropped:
            log.info(
                "dropped the programs that were unused for longest: max_programs=%d",
                self.max_programs,
            )
        del dropped  # it may be large, and nobody has to wait for that

    def _advise(
        self, signature: Hashable, values: PythonValues, bound: EagerBound, args: StageArgs
    ) -> None:
        """Warn once of what makes traces come over and over."""
        with self._turn:
            text = "" if self._told else advice(self, bound, args, (values.key(), signature))
            self._told |= bool(text)
        if text:
            warnings.warn(text, stacklevel=2)


_OPTIONS = ("backend", "fuse", "recompute", "fallback", "max_programs")


def compile_stage(
    stage: Stage,
    *,
    backend: Backend | str = "graph",
    fuse: bool = True,
    recompute: bool = False,
    fallback: bool = False,
    max_programs: int = 16,
) -> Stage:
    """The stage with its forward, backward, input backward and weight backward as programs.

    When a run first meets a signature (shapes, types and layouts of everything that the stage gets,
    which leaves are trained, the mode, autocast, the plan's loss) the stage is traced once, with
    its backward, on tensors without numbers. The joint graph is cut: F is what outputs need, I what
    the gradients of inputs need besides, W the rest. Nothing is computed twice, W keeps only what
    it needs, and weight gradients are added into their sums in place.

    Results are eager ones: the same operations on the same numbers. With ``fuse`` a weight gradient
    that is a product is added to its sum in one operation, which rounds once instead of twice;
    without it (and with backend "graph") every bit is eager's, in every order of W.

    Python values that the stage or the loss reads besides its arguments (globals, closures,
    attributes, containers) are part of the signature: when a value changes, the next run traces
    anew. Tensors that the function closes over, branches on numbers in tensors, Python state that
    changes from call to call, random numbers of Python and numpy, draws in a backward are refused,
    each with its reason. Called directly, a compiled stage runs its function, so torch.func
    transforms it as before.

    >>> layer = fp.compile_stage(fp.Stage(lambda w, x: torch.tanh(x @ w), "layer"))
    >>> layer(torch.zeros(2, 2), torch.ones(1, 2))
    tensor([[0., 0.]])

    Args:
        stage: any stage; of a composition, the whole.
        backend: "graph": Python that calls torch's kernels, one by one. "inductor": each program is
            built by torch's compiler, which fuses operations and rounds differently; it takes
            seconds to minutes, at the first call or in `warmup`. "cudagraphs": each program is
            recorded as a CUDA graph, with copies of what it reads and gives (`graphs` does it to
            whole runs on one device). Or a function ``(graph, example inputs) -> function of the
            inputs``, as for ``torch.compile``. Programs that draw random numbers are "graph"
            always.
        fuse: see above.
        recompute: keep as few bytes for the backward as a cut through the forward can have:
            pointwise operations, norms and softmax are computed again where that is less (min-cut
            rematerialization); products and random draws are not. The bits are the same.
            `Programs.residual_bytes` says what is kept; see `remat` for the coarse way.
        fallback: run eagerly what cannot be traced, instead of raising; `make_programs` says why it
            cannot.
        max_programs: for how many signatures programs are kept, each of them with F, B, I, W; of a
            few large layers that is some MiB, with "cudagraphs" it holds memory of the device.
            Another one takes the place of what is unused for longest, whose memory is freed when
            the runs that use it end. Where traces come over and over, a warning says once what
            makes them.

    Returns:
        A stage for the same parameters and state.

    Raises:
        PlanError: this is no stage, there is no such backend, recompute is no bool, or
            max_programs is no number from 1. (A run raises it for a stage that cannot be traced.)
    """
    if not isinstance(stage, Stage):
        raise PlanError(
            f"compile_stage takes a stage; got a {type(stage).__name__}; make one: fp.stage(fn), "
            "fp.from_module(module), fp.split(model, ...)"
        )
    if not (isinstance(backend, str) and backend in _BACKENDS) and not callable(backend):
        raise PlanError(
            f"backend is one of {sorted(_BACKENDS)} or a function (graph, example inputs) -> "
            f"function; got {backend!r}"
        )
    if not isinstance(recompute, bool):
        raise PlanError(f"recompute is True or False; got {recompute!r}")
    if not isinstance(max_programs, int) or isinstance(max_programs, bool) or max_programs < 1:
        raise PlanError(
            "max_programs is an int from 1, for how many signatures programs are kept; got "
            f"{max_programs!r}"
        )
    compiled = Compiled(
        backend=backend,
        fuse=fuse,
        recompute=recompute,
        fallback=fallback,
        max_programs=max_programs,
    )
    return replace(stage, program=compiled)


def make_programs(
    stage: Stage,
    params: Tree,
    x: Tree,
    *,
    skips: Mapping[str, Tree] | None = None,
    feeds: Mapping[str, Tree] | None = None,
    state: Tree = (),
    target: Tree = None,
    loss: Callable[..., Any] | None = None,
    trainable: Trainable = None,
    train: bool = True,
    input_grads: bool = True,
) -> Programs:
    """The programs of a compiled stage for arguments of these shapes, to read and to measure;
    nothing runs.

    >>> layer = fp.compile_stage(fp.Stage(lambda w, x: x @ w))
    >>> print(fp.make_programs(layer, torch.ones(3, 3), torch.ones(2, 3)).backward_weight)
    def W(P, L, S):
        l0, l1, = L
        L.clear()
        t = torch.t(l0); del l0
        S[0].addmm_(t, l1); del t, l1
        return None
    <BLANKLINE>

    Args:
        stage: what `compile_stage` gave.
        params, x, skips, feeds, state: as the stage is called.
        target, loss: of the plan; for its last stage.
        trainable: which leaves of ``params`` have gradients: a tree of bools, or as in ``run``.
        train: the mode.
        input_grads: do gradients flow back to the input (in the first stage of a plan they do not).

    Returns:
        The programs; ``str`` of them is Python, ``residual_bytes`` what F keeps.

    Raises:
        PlanError: this is no compiled stage, parameters do not fit, or the stage cannot be traced.
    """
    compiled = stage.program if isinstance(stage, Stage) else None
    if not isinstance(compiled, Compiled):
        raise PlanError("make_programs takes a compiled stage: fp.compile_stage(stage)")
    of_all = trainable is None or isinstance(trainable, bool) or callable(trainable)
    flags = trainable_leaves([params], trainable if of_all else [trainable])[0]

    def border(tree: Tree) -> Border:
        leaves, spec = flatten(tree)
        return Border(leaves, spec, [input_grads and is_differentiable(leaf) for leaf in leaves])

    borders = (
        [border((skips or {})[name]) for name in stage.pop],
        [border((feeds or {})[name]) for name in stage.feeds],
    )
    args = StageArgs(border(x), *borders, None if loss is None else border(target), 0)
    options: dict[str, Any] = {
        "trainable": flags,
        "train": train,
        "backwards": True,
        "keys": Keys(None, [stage]),
    }
    bound = compiled(stage, 0, params, state, loss=loss, shares=None, **options)
    programs = bound.find(args)
    if programs is None:
        raise TraceError(f"stage {stage.name!r} cannot be compiled: {compiled.reasons()[-1]}")
    return programs
