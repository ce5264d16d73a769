"""Turn a stage's forward and backward into programs, traced once for each signature.

`joint` traces, `cut` divides the graph into programs, `bound` runs them. This module owns the
cache.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from funcpipe._src.compiled.advice import advice
from funcpipe._src.compiled.backend import Backend, cudagraphs, inductor
from funcpipe._src.compiled.bound import CompiledBound
from funcpipe._src.compiled.hoist import hoist
from funcpipe._src.compiled.joint import trace
from funcpipe._src.compiled.programs import Programs
from funcpipe._src.compiled.python_values import PythonValues, ValuesKey
from funcpipe._src.compiled.recompute import recompute as least_kept
from funcpipe._src.core.border import Border
from funcpipe._src.core.errors import PlanError, TraceError
from funcpipe._src.core.log import log
from funcpipe._src.core.remembered import declared_fields
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
"""The backends by name. None: programs are Python code that calls torch's kernels."""


@dataclass(eq=False)
class Compiled:
    """The programs of a compiled stage by signature, and the options that make new ones."""

    backend: Backend | str  # builds the programs
    fuse: bool  # whether weight-gradient products are added to their sums in one operation
    recompute: bool  # whether values that are cheap to compute again are not kept for the backward
    fallback: bool  # whether a stage that cannot be traced runs eagerly
    max_programs: int  # the number of signatures whose programs are kept

    def __post_init__(self) -> None:
        # The outcome for each signature and the Python values that the trace read, least recently
        # used first: programs, or the reason why there are none.
        self.found: dict[tuple[ValuesKey, Hashable], Programs | TraceError] = {}
        # For each signature, the functions that read these Python values, one for each path that
        # the code has taken.
        self.readers: dict[Hashable, list[PythonValues]] = {}
        self.made = 0  # the number of outcomes in total
        self._has_warned = False
        self._trace_lock, self._cache_lock = threading.Lock(), threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return Compiled, tuple(declared_fields(self).values())

    def __call__(
        self, stage: Stage, index: int, params: Tree, state: Tree, **options: Any
    ) -> CompiledBound:
        """Bind a stage for one run, with the arguments of `EagerBound`."""
        return CompiledBound(self, stage, index, params, state, **options)

    def reasons(self) -> list[str]:
        """The reasons why signatures have no programs."""
        return [str(outcome) for outcome in self.found.values() if isinstance(outcome, TraceError)]

    def programs(self, signature: Hashable, bound: EagerBound, args: StageArgs) -> Programs | None:
        """Return the programs for a signature, traced at the first call. None: the stage runs
        eagerly.

        Raises:
            TraceError: the stage cannot be traced, and has no fallback.
        """
        outcome = self._find(signature)
        if outcome is None:
            # A thread that waited here finds the outcome of the other thread.
            with self._trace_lock:
                outcome = self._find(signature) or self._trace(signature, bound, args)
        if isinstance(outcome, Programs):
            return outcome
        if self.fallback:
            return None
        raise TraceError(
            f"stage {bound.stage.name!r} cannot be compiled: {outcome}; leave the stage eager, or "
            "use fp.compile_stage(stage, fallback=True) to run it eagerly where needed"
        )

    def _find(self, signature: Hashable) -> Programs | TraceError | None:
        """Return the outcome for a signature, and mark it as the most recently used. None: there
        is none."""
        with self._cache_lock:
            for reader in self.readers.get(signature, ()):
                key = reader.key(), signature
                outcome = self.found.pop(key, None)
                if outcome is not None:
                    self.found[key] = outcome
                    return outcome
            return None

    def _trace(
        self, signature: Hashable, bound: EagerBound, args: StageArgs
    ) -> Programs | TraceError:
        """Trace a signature, and keep the outcome; the least recently used outcome is dropped.

        Raises:
            TraceError: the stage itself raised, and has no fallback. Its cause explains more than
                the reason.
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
            fault = TraceError(str(error))  # without the traceback, which would keep tensors alive
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
        with self._cache_lock:
            self.made += 1
            others = [
                reader for reader in self.readers.get(signature, ()) if not reader.same_code(values)
            ]
            self.readers[signature] = [*others, values]
            self.found[values.key(), signature] = outcome
            # `_find` moves a used entry to the end, so the first entries are the least recently
            # used.
            oldest = list(self.found)[: -self.max_programs]
            # A running plan has its own reference, so its programs live until it ends.
            dropped = [self.found.pop(old) for old in oldest]
            kept = {other for _, other in self.found}
            self.readers = {
                other: readers for other, readers in self.readers.items() if other in kept
            }
        if dropped:
            log.info("dropped the least recently used programs: max_programs=%d", self.max_programs)
        del dropped  # freeing may take long, so it happens outside of the lock

    def _advise(
        self, signature: Hashable, values: PythonValues, bound: EagerBound, args: StageArgs
    ) -> None:
        """Warn once about the cause of repeated traces."""
        with self._cache_lock:
            text = "" if self._has_warned else advice(self, bound, args, (values.key(), signature))
            self._has_warned |= bool(text)
        if text:
            warnings.warn(text, stacklevel=2)


def compile_stage(
    stage: Stage,
    *,
    backend: Backend | str = "graph",
    fuse: bool = True,
    recompute: bool = False,
    fallback: bool = False,
    max_programs: int = 16,
) -> Stage:
    """Return the stage with its forward, backward, input backward and weight backward as programs.

    When a run first meets a signature, it traces the stage and its backward on tensors without
    numbers. The signature consists of the shapes, types and layouts of all arguments, the trained
    leaves, the mode, autocast, and the plan's loss. The joint graph becomes three programs: F
    computes the outputs, I the gradients of the inputs, and W the other gradients. No value is
    computed twice, W keeps only what it needs, and weight gradients are added to their sums in
    place.

    With ``fuse=False`` and backend "graph", results are bit-identical to the eager stage, in any
    order of W. With ``fuse=True``, a weight gradient that is a product is added to its sum in one
    operation, which rounds once instead of twice.

    Python values that the stage or the loss reads besides its arguments (globals, closures,
    attributes, containers) are part of the signature. If such a value changes, the next run traces
    again.

    `run` raises TraceError, with the reason, for these stages:

    - the function closes over tensors;
    - the function branches on numbers in tensors;
    - Python state changes from call to call;
    - Python or numpy draw random numbers;
    - the backward draws random numbers.

    A direct call of a compiled stage calls the original function, so torch.func transforms work.

    >>> layer = fp.compile_stage(fp.Stage(lambda w, x: torch.tanh(x @ w), "layer"))
    >>> layer(torch.zeros(2, 2), torch.ones(1, 2))
    tensor([[0., 0.]])

    Args:
        stage: any stage. A composition is compiled as one stage.
        backend: the builder of programs. "graph", the default: Python that calls torch's kernels
            one by one. "inductor": torch's compiler, which fuses operations and rounds differently.
            It takes seconds to minutes, at the first call or in `warmup`. "cudagraphs": each
            program is recorded as a CUDA graph, with copies of its inputs and outputs; `graphs`
            records whole runs on one device instead. Or a function ``(graph, example inputs) ->
            function of the inputs``, as for ``torch.compile``. Programs that draw random numbers
            use "graph" with any backend.
        fuse: whether weight-gradient products are added to their sums in one operation; see above.
        recompute: True: keep as few bytes for the backward as possible (min-cut rematerialization).
            Pointwise operations, norms and softmax are computed again where that keeps fewer bytes;
            products and random draws are not. The results are bit-identical.
            `Programs.residual_bytes` is the number of kept bytes. `remat` recomputes whole stages
            instead.
        fallback: True: a stage that cannot be traced runs eagerly, and `make_programs` reports the
            reason. False: `run` raises TraceError.
        max_programs: the number of signatures whose programs are kept. Each has F, B, I and W; a
            few large layers take some MiB, and with "cudagraphs" device memory. The stage drops the
            least recently used programs, and their memory is freed when the runs that use them end.
            If traces repeat, one warning names the cause.

    Returns:
        A stage for the same parameters and state.

    Raises:
        PlanError: the argument is not a stage, or an option has a wrong value.
    """
    if not isinstance(stage, Stage):
        raise PlanError(
            f"compile_stage takes a stage; got a {type(stage).__name__}; make a stage with "
            "fp.stage(fn), fp.from_module(module) or fp.split(model, ...)"
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
            "max_programs is a positive int, the number of signatures whose programs are kept; "
            f"got {max_programs!r}"
        )
    compiled = Compiled(backend, fuse, recompute, fallback, max_programs)
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
    """Return the programs of a compiled stage for arguments of these shapes, to read or to measure.

    The function traces the stage and computes nothing.

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
        stage: a stage from `compile_stage`.
        params, x, skips, feeds, state: the arguments of the stage, as in a direct call.
        target, loss: the target and the loss of the plan, for its last stage. None: no loss.
        trainable: which leaves of ``params`` have gradients: a tree of bools, or as in `run`.
        train: the mode.
        input_grads: whether gradients flow back to the input. In the first stage of a plan they do
            not.

    Returns:
        The `Programs`. ``str`` returns their Python code; ``residual_bytes`` is what F keeps.

    Raises:
        PlanError: the argument is not a compiled stage, or parameters do not fit.
        TraceError: the stage cannot be traced. TraceError is a PlanError.
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
