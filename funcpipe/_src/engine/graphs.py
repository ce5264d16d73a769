"""`graphs`: record a whole run as one CUDA graph per form of input, and replay the graph.

`device_graph` records and replays; this module decides which runs can be recorded, and keys them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from time import perf_counter
from types import BuiltinFunctionType, FunctionType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from funcpipe._src.batch import microbatch
from funcpipe._src.batch.marks import Axis, Microbatches, Replicate
from funcpipe._src.batch.shares import shares_of, weights_of
from funcpipe._src.core.cache_key import leaf_key, switches_key
from funcpipe._src.core.errors import DrawError, FuncpipeError, PlanError, TraceError
from funcpipe._src.core.log import decided, log
from funcpipe._src.core.shown import guarded, line, named
from funcpipe._src.core.tree import Tree, flatten, structure, unflatten
from funcpipe._src.core.words import size_of
from funcpipe._src.data.plan import Plan
from funcpipe._src.data.result import Result
from funcpipe._src.data.schedule import Kind
from funcpipe._src.devices.device_graph import Recorded, Unrecordable
from funcpipe._src.devices.devices import plan_devices, same_device
from funcpipe._src.devices.stream import Place
from funcpipe._src.engine.arguments import checked_seed, split_batch
from funcpipe._src.engine.executors import Serial, suiting
from funcpipe._src.engine.options import RunOptions
from funcpipe._src.stages.context import (
    LOSS_CHECKS,
    RUNNING,
    checked_plan,
    not_carried,
    refuse_transforms,
)
from funcpipe._src.stages.trainable import trainable_leaves

_MOST = 8  # the most forms of input that one `Graphs` records. Each graph keeps its own memory

_Make = Callable[[Sequence[Tensor]], Tree]

_FIELDS = ("loss", "losses", "aux", "grads", "state", "outputs")
"""The fields of a result that contain tensors."""


class _RecordedRun(NamedTuple):
    """A recorded run."""

    recorded: Recorded  # the graph, with copies of the tensors that it reads
    make: _Make  # makes the trees of a result from the tensors that the graph returns
    like: Result  # the result of the recording, without tensors


class Graphs:
    """An executor that replays whole runs of one plan as CUDA graphs. `graphs` makes it.

    Attributes:
        plan: the plan whose runs are recorded.
        count: the number of recorded forms of input.
        nbytes: the bytes of the input copies that the graphs read.
    """

    def __init__(self, plan: Plan) -> None:
        checked_plan("graphs", plan)
        self.plan = plan
        self.closed = False
        self._obstacle: str | None = None
        self._found: dict[Hashable, _RecordedRun | str] = {}
        self._busy = threading.Lock()

    @guarded
    def __repr__(self) -> str:
        held = (
            f"{named(self.count, 'form')} of input, {size_of(self.nbytes)}"
            if self.count
            else "nothing"
        )
        refused = [
            found
            for found in [self._obstacle, *self._found.values()]
            if found and isinstance(found, str)
        ]
        facts = [
            ("recorded", "closed" if self.closed else held),
            ("not", refused[-1] if refused else ""),
        ]
        return line(f"Graphs of {self.plan.schedule.name}", facts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release all graphs and their memory. A later run with these graphs raises
        `FuncpipeError`."""
        self.closed = True
        if self._busy.acquire(blocking=False):  # otherwise the present run releases them
            self._found.clear()
            self._busy.release()

    @property
    def _steps(self) -> list[_RecordedRun]:
        return [run for run in self._found.values() if isinstance(run, _RecordedRun)]

    @property
    def count(self) -> int:
        """The number of recorded forms of input."""
        return len(self._steps)

    @property
    def nbytes(self) -> int:
        """The bytes of the input copies that the graphs read."""
        return sum(run.recorded.nbytes for run in self._steps)

    def run(self, plan: Plan, params: Sequence[Tree], batch: Any, options: RunOptions) -> Result:
        """Run a plan: replay its graph, record the graph first if needed, or run without a
        graph."""
        refuse_transforms("run")
        checked_seed(options.seed)
        with self._alone(plan):
            reason = self._unfit(options)
            if not reason:
                began = perf_counter()
                by_rows, weight = _by_rows(self.plan, batch, options.feeds)
                recording = self._step(by_rows, params, batch, options) if by_rows else _UNEVEN
                if not isinstance(recording, str):
                    return _played(*recording, began, weight)
                reason = recording
        decided(self, "a run of %s is not a graph: %s", plan.schedule.name, reason)
        result = suiting(plan).run(plan, params, batch, options)
        return replace(result, stats=replace(result.stats, reason=f"not a graph: {reason}"))

    @contextmanager
    def _alone(self, plan: Plan) -> Generator[None]:
        if plan is not self.plan:
            raise PlanError(
                "these graphs were made for another plan; make graphs for this one: fp.graphs(plan)"
            )
        if self.closed:
            raise FuncpipeError("these graphs are closed; call fp.run within their with block")
        if not self._busy.acquire(blocking=False):
            raise FuncpipeError(
                "these graphs are busy with another run; give each concurrent run its own "
                "fp.graphs(plan)"
            )
        try:
            yield
        finally:
            self._busy.release()
            if self.closed:  # close() came during the run and left the release to this thread
                self._found.clear()

    def _unfit(self, options: RunOptions) -> str:
        """Return why no run with these options can be a graph, or "" if one may be."""
        if self._obstacle is None:
            self._obstacle = _obstacle(self.plan)
        if self._obstacle:
            return self._obstacle
        if options.record:
            return "record=True measures its actions"
        if options.observe is not None:
            return "observe= sees its values"
        if options.ranges:
            return "ranges=True names its actions"
        if options.timeout is not None:
            return "timeout= watches its actions"
        if options.check not in ((), "used", ["used"], ("used",)):
            return "check= looks at its values"
        return ", ".join(f"{mode} is on" for mode in not_carried())

    def _step(
        self, plan: Plan, params: Any, batch: Any, options: RunOptions
    ) -> tuple[_RecordedRun, list[Tensor]] | str:
        """Return the recorded run for this form of input and the input's tensors, or why there is
        none.

        Records the run if the form is new.
        """
        if not isinstance(params, (tuple, list)) or len(params) != self.plan.num_stages:  # pyright: ignore
            return "params are not one tree for each stage"
        # No seed, so that a run refuses to draw: a graph would draw with the seed of its recording.
        names = ("feeds", "loss_scale", "threads_per_lane", "check")
        others = {name: getattr(options, name) for name in names}
        # As flags, because a function trainable= may answer differently in the next run.
        flags = trainable_leaves(params, options.trainable)  # pyright: ignore
        others["trainable"] = tuple(
            unflatten(structure(tree), mask) for tree, mask in zip(params, flags, strict=True)
        )  # pyright: ignore
        taken = _Taken(words=[switches_key(), _kernels(), RUNNING.get() is not None])
        try:
            make_params = taken.take((params, options.state))
            count = len(taken.tensors)
            make_batch = taken.take((batch, others))
        except TraceError as error:
            return str(error)
        device = plan_devices(self.plan)[0]
        # Only parameters and state: the batch is copied to the device from anywhere.
        if not all(same_device(tensor.device, device) for tensor in taken.tensors[:count]):
            return f"parameters or state are not on {device}"
        if any(tensor.is_meta for tensor in taken.tensors):
            return "it gets tensors on the meta device"
        key = tuple(taken.words or ())
        recording = self._found.get(key)
        if recording is None:
            if len(self._found) >= _MOST:
                return (
                    f"its input has had {_MOST} other forms (shapes, types, values that are not "
                    "tensors) before"
                )
            # A reason is kept, too, so that later runs do not try to record this form again.
            recording = self._found[key] = self._record(
                plan, lambda copies: (*make_params(copies), *make_batch(copies)), taken.tensors
            )
        return recording if isinstance(recording, str) else (recording, taken.tensors)

    def _record(self, plan: Plan, make: _Make, tensors: list[Tensor]) -> _RecordedRun | str:
        device = plan_devices(self.plan)[0]
        graph = Place.backend.graph(device)
        assert graph is not None
        # `step` runs several times. Its last call is the recording, and leaves its trees here.
        parts: list[Any] = []

        def step(copies: Sequence[Tensor]) -> list[Tensor]:
            params, state, batch, others = make(copies)
            token = LOSS_CHECKS.set(not parts)  # only in the first call, which is not recorded
            try:
                result = Serial().run(plan, params, batch, RunOptions(state=state, **others))
            finally:
                LOSS_CHECKS.reset(token)
            results = _Taken()
            parts[:] = [
                results.take([getattr(result, name) for name in _FIELDS]),
                replace(result, **_NONE),
            ]
            return results.tensors

        try:
            recorded = _RecordedRun(Recorded(graph, device, tensors, step), *parts)
            size = size_of(recorded.recorded.nbytes)
            log.info(
                "recorded form %d of %s on %s, %s of copies",
                self.count + 1,
                plan.schedule.name,
                device,
                size,
            )
            return recorded
        except DrawError:
            return "a stage draws random numbers, and a graph would repeat the same numbers"
        except Unrecordable as error:
            return f"it cannot be recorded: {error}"


def _obstacle(plan: Plan) -> str:
    """Return why no run of a plan can be a graph, or "" if some runs may be."""
    devices = dict.fromkeys(plan_devices(plan))
    if len(devices) > 1:
        return (
            f"its lanes are on {', '.join(map(str, devices))}, and a graph works on one device; "
            "you can make a graph of each stage: "
            'fp.compile_stage(stage, backend="cudagraphs")'
        )
    device = next(iter(devices))
    if Place.backend.graph(device) is None:
        return f"{device} has no graphs"
    if any(action.kind is Kind.O for order in plan.schedule.orders for action in order):
        return "the host waits for copies of offloaded residuals"
    if plan.carry:
        return "its carry has other shapes in each run"
    if plan.schedule.steps:
        return "its schedule steps, and the host may have to undo a step"
    if any(getattr(stage.program, "backend", None) == "cudagraphs" for stage in plan.stages):
        return "its compiled stages are graphs themselves"
    return ""


def _kernels() -> Hashable:
    """Return a key of torch's settings that select kernels, besides those in `switches_key`.

    A recording freezes the kernels, so a run under other settings needs another recording.
    """
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    values: list[Hashable] = [
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    ]
    for module, flag in _FLAGS:
        try:
            values.append(getattr(module, flag))
        except RuntimeError:  # torch refuses to read a setting that was set by two different APIs
            values.append(None)
    return modes, *values


_MATMUL, _CUDNN = torch.backends.cuda.matmul, torch.backends.cudnn
_FLAGS: tuple[tuple[Any, str], ...] = (
    (_MATMUL, "allow_tf32"),
    (_MATMUL, "allow_fp16_accumulation"),
    (_MATMUL, "allow_fp16_reduced_precision_reduction"),
    (_MATMUL, "allow_fp16_reduced_precision_reduction_split_k"),
    (_MATMUL, "allow_bf16_reduced_precision_reduction"),
    (_MATMUL, "allow_bf16_reduced_precision_reduction_split_k"),
    (_CUDNN, "allow_tf32"),
    (_CUDNN, "enabled"),
    (_CUDNN, "benchmark"),
    (_CUDNN, "deterministic"),
)
"""Torch's flags that select kernels."""


_NONE: dict[str, Any] = dict.fromkeys(_FIELDS)

_UNEVEN = (
    "the weights of its microbatches depend on the numbers in its target, and differ from the "
    "numbers of rows"
)


def _by_rows(plan: Plan, batch: Any, feeds: Any) -> tuple[Plan | None, float | None]:
    """Return the plan with microbatches weighted by rows, and the weight of the whole batch.

    Weights by rows need no numbers from the device. The plan is None if this batch has other
    weights, because labels are padded or classes are weighted.
    """
    if plan.weight is not None or plan.counts.weigh is None:
        return plan, None
    cut = microbatch.cut(plan, *split_batch(plan, batch), feeds)
    shares = shares_of(cut.rows, weights_of(cut, plan), plan, 1.0)
    pairs = zip(shares.weights, cut.rows, strict=True)
    # Products of whole numbers are exact. Quotients would round, and equal shares would differ.
    if shares.total and all(
        weight * sum(cut.rows) == rows * shares.total for weight, rows in pairs
    ):
        return replace(plan, counts=replace(plan.counts, weigh=None)), shares.total
    return None, None


def _played(
    step: _RecordedRun, tensors: list[Tensor], began: float, weight: float | None
) -> Result:
    """Replay a recorded run with these input tensors, and return its result."""
    fields = step.make(step.recorded(tensors))
    stats = replace(
        step.like.stats, executor="graph", reason="asked for", seconds=perf_counter() - began
    )
    weight = step.like.weight if weight is None else weight
    return replace(step.like, **dict(zip(_FIELDS, fields, strict=True)), weight=weight, stats=stats)


_FIXED = (
    type(None),
    type,
    Enum,
    FunctionType,
    BuiltinFunctionType,
    torch.dtype,
    torch.layout,
    torch.memory_format,
    Tensor,
)
"""Types that are compared by identity. Functions count as unchangeable, which is not checked."""

_CONSTANT = (*_FIXED, bool, int, float, complex, str, bytes, torch.device, torch.Size)
"""Types that cannot change. Apart from `Tensor` itself they contain no tensors."""

_HOLDS: dict[type, tuple[str, ...]] = {
    Replicate: ("value",),
    Axis: ("value", "axis", "sequence"),
    Microbatches: ("trees",),
}
"""Leaves that contain a tree, and their constructor arguments; the tree is the first."""


class _Taken:
    """Separates trees into tensors and a key of everything else.

    Attributes:
        tensors: the tensors of the trees, each once.
        words: the key: everything except the tensors' numbers that a recording depends on. None if
            the trees are results, which need no key.
    """

    def __init__(self, words: list[Hashable] | None = None) -> None:
        self.tensors: list[Tensor] = []
        self.words = words
        self._numbers: dict[int, int] = {}

    def take(self, tree: Tree) -> _Make:
        """Separate a tree, including trees within `Replicate`, `Axis` and `Microbatches`.

        Returns:
            A function that makes a tree of the same form from other tensors.

        Raises:
            TraceError: a value may change and stay equal to itself, so it cannot be part of a key.
            Unrecordable: a leaf of a result is neither a tensor nor a constant.
        """
        leaves, spec = flatten(tree)
        makers = [self._leaf(leaf) for leaf in leaves]
        self._say(spec)
        return lambda tensors: unflatten(spec, [make(tensors) for make in makers])

    def _leaf(self, leaf: Any) -> _Make:
        if isinstance(leaf, Tensor):
            number = self._numbers.setdefault(id(leaf), len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(leaf)
            self._say(number, leaf.requires_grad, leaf)
            return lambda tensors: tensors[number]
        if not isinstance(leaf, tuple(_HOLDS)):
            if self.words is None and not isinstance(leaf, _CONSTANT):
                raise Unrecordable(
                    f"a result contains a {type(leaf).__name__}, which may contain tensors that "
                    "funcpipe does not see"
                )
            self._say(leaf)
            return lambda tensors: leaf
        kind = next(kind for kind in _HOLDS if isinstance(leaf, kind))
        held, *arguments = [getattr(leaf, name) for name in _HOLDS[kind]]
        inner = self.take(held)
        self._say(kind, *arguments)
        return lambda tensors: kind(inner(tensors), *arguments)

    def _say(self, *values: Any) -> None:
        if self.words is None:
            return
        for value in values:
            if type(value).__eq__ is object.__eq__ and not isinstance(value, _FIXED):
                raise TraceError(
                    f"it gets a {type(value).__name__}, which may change and stays equal to itself"
                )
        self.words.append(tuple(map(leaf_key, values)))


def graphs(plan: Plan) -> Graphs:
    """Record whole runs of a plan as CUDA graphs, and replay them.

    Use graphs if kernels are so short that the GPU waits for Python. A replay runs no Python of the
    stages and launches no single kernels. Results equal the results of other executors. A graph
    needs more memory: it has its own copies of parameters, state and batch, and keeps all memory of
    a run.

    ``with fp.graphs(plan) as graphs: fp.run(plan, params, batch, executor=graphs)``

    A graph fits one *form* of input. The first run with a new form runs three times, and is then
    recorded with all lanes, the loss, the gradient sums and the commits. A later run copies its
    tensors into the graph's tensors, replays the graph and copies the results. A form consists of:

    - structure, shapes, types, layouts and devices of the input;
    - all values in the input that are not tensors;
    - the trained leaves, the loss scale, grad mode and autocast.

    These runs cannot be graphs. They run as with ``executor=None``, and ``result.stats.reason`` has
    the reason:

    - lanes on several devices, or on a device without graphs;
    - stages with random draws, such as dropout;
    - a loss or ``plan.weight`` that needs numbers on the host, such as a loss that returns ``(sum,
      weight)``;
    - targets with uneven padding, which `graphs` checks before each run;
    - a schedule with `schedules.offload` or `schedules.step_params`, or a plan with ``carry=True``;
    - runs with ``record=``, ``ranges=``, ``timeout=`` or ``check="finite"``;
    - a ninth form of input.

    A recording runs the Python code of the stages once. A replay reads tensors that stages close
    over at their old memory addresses.

    >>> layer = fp.Stage(lambda w, x: x * w)
    >>> plan = fp.make_plan([layer], fp.schedules.fill_drain(1, 2, backward=False), devices="cpu")
    >>> with fp.graphs(plan) as played:
    ...     fp.run(plan, (torch.ones(3),), torch.ones(4, 3), executor=played).stats.reason
    'not a graph: cpu has no graphs'

    Args:
        plan: a plan whose lanes are all on one CUDA device.

    Returns:
        An executor for `run`. The end of the ``with`` block, or ``close()``, releases the graphs.

    Raises:
        PlanError: ``plan`` is not a plan.
    """
    return Graphs(plan)
