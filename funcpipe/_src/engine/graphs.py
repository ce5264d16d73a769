"""graphs: whole runs as graphs of the device (CUDA graphs): recorded once for each form of input,
then played."""

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
from funcpipe._src.engine.executors import Serial, suiting
from funcpipe._src.engine.options import RunOptions
from funcpipe._src.engine.prepare import checked_seed, split_batch
from funcpipe._src.stages.context import RUNNING, checked_plan, not_carried, refuse_transforms
from funcpipe._src.stages.trainable import trainable_leaves

_MOST = 8
"""How many forms of input are recorded; each holds memory of its own."""

_Make = Callable[[Sequence[Tensor]], Tree]

_FIELDS = ("loss", "losses", "aux", "grads", "state", "outputs")
"""The fields of a result that have tensors."""


class _RecordedRun(NamedTuple):
    """A recorded run: the recording, how its tensors become trees, and the rest of its result."""

    recorded: Recorded
    make: _Make
    like: Result


class Graphs:
    """An executor that plays whole runs of one plan as graphs of its device. Made by `graphs`.

    Attributes:
        plan: whose runs.
        count: how many forms of input are recorded.
        nbytes: of the copies of what runs were given that these read from.
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
        """Forget every graph and its memory; these graphs run nothing more."""
        self.closed = True
        if self._busy.acquire(blocking=False):  # else the run that goes on does it
            self._found.clear()
            self._busy.release()

    @property
    def _steps(self) -> list[_RecordedRun]:
        return [run for run in self._found.values() if isinstance(run, _RecordedRun)]

    @property
    def count(self) -> int:
        """See the class."""
        return len(self._steps)

    @property
    def nbytes(self) -> int:
        """See the class."""
        return sum(run.recorded.nbytes for run in self._steps)

    def run(self, plan: Plan, params: Sequence[Tree], batch: Any, options: RunOptions) -> Result:
        """A run: played if it is recorded, recorded and played if it can be, as any other if
        not."""
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
        decided(self, "a run of %s is no graph: %s", plan.schedule.name, reason)
        result = suiting(plan).run(plan, params, batch, options)
        return replace(result, stats=replace(result.stats, reason=f"not a graph: {reason}"))

    @contextmanager
    def _alone(self, plan: Plan) -> Generator[None]:
        if plan is not self.plan:
            raise PlanError("these graphs are of another plan; make them with fp.graphs(plan)")
        if self.closed:
            raise FuncpipeError("these graphs are closed; run inside of their with block")
        if not self._busy.acquire(blocking=False):
            raise FuncpipeError(
                "these graphs are busy with another run; give each concurrent run its own "
                "fp.graphs(plan)"
            )
        try:
            yield
        finally:
            self._busy.release()
            if self.closed:  # meanwhile
                self._found.clear()

    def _unfit(self, options: RunOptions) -> str:
        """Why no run with these options can be a graph; "" where one may be."""
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
        """The recorded run for input of this form (the first is recorded now) and its tensors; or
        why there is none."""
        if not isinstance(params, (tuple, list)) or len(params) != self.plan.num_stages:  # pyright: ignore
            return "params are not one tree for each stage"
        # No seed, so that a run refuses to draw: a graph would draw with the seed of its recording.
        names = ("feeds", "loss_scale", "threads_per_lane", "check")
        others = {name: getattr(options, name) for name in names}
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
        if not all(same_device(tensor.device, device) for tensor in taken.tensors[:count]):
            return f"parameters or state do not lie on {device}"
        if any(tensor.is_meta for tensor in taken.tensors):
            return "it gets tensors without numbers"
        key = tuple(taken.words or ())
        recording = self._found.get(key)
        if recording is None:
            if len(self._found) >= _MOST:
                return (
                    f"its input has had {_MOST} other forms (shapes, types, values that are no "
                    "tensors) before"
                )
            recording = self._found[key] = self._record(
                plan, lambda copies: (*make_params(copies), *make_batch(copies)), taken.tensors
            )
        return recording if isinstance(recording, str) else (recording, taken.tensors)

    def _record(self, plan: Plan, make: _Make, tensors: list[Tensor]) -> _RecordedRun | str:
        device = plan_devices(self.plan)[0]
        graph = Place.backend.graph(device)
        assert graph is not None
        parts: list[Any] = []

        def step(copies: Sequence[Tensor]) -> list[Tensor]:
            params, state, batch, others = make(copies)
            result = Serial().run(plan, params, batch, RunOptions(state=state, **others))
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
            return "a stage draws random numbers, and a graph would draw the same ones each time"
        except Unrecordable as error:
            return f"it cannot be recorded: {error}"


def _obstacle(plan: Plan) -> str:
    """Why no run of a plan can be a graph; "" where some may be."""
    devices = dict.fromkeys(plan_devices(plan))
    if len(devices) > 1:
        return (
            f"its lanes lie on {', '.join(map(str, devices))}, and a graph is of one device; "
            "compiled stages can be "
            'graphs each: fp.compile_stage(stage, backend="cudagraphs")'
        )
    device = next(iter(devices))
    if Place.backend.graph(device) is None:
        return f"{device} has none"
    if any(action.kind is Kind.O for order in plan.schedule.orders for action in order):
        return "the host keeps step with what is offloaded"
    if plan.schedule.steps:
        return "its schedule steps, and what was a step too many is undone"
    if any(getattr(stage.program, "backend", None) == "cudagraphs" for stage in plan.stages):
        return "its programs are graphs themselves"
    return ""


def _kernels() -> Hashable:
    """The key of what picks kernels besides `switches_key` and is frozen by a recording."""
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    values: list[Hashable] = [
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.cudnn_sdp_enabled(),
    ]
    for module, flag in _FLAGS:
        try:
            values.append(getattr(module, flag))
        except RuntimeError:  # set in two ways at once
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
"""Torch's flags that pick kernels."""


_NONE: dict[str, Any] = dict.fromkeys(_FIELDS)

_UNEVEN = (
    "how much its microbatches count depends on the numbers in its target, and is not as many as "
    "they have rows"
)


def _by_rows(plan: Plan, batch: Any, feeds: Any) -> tuple[Plan | None, float | None]:
    """The plan with a loss that counts rows, which needs no numbers on the host, and what the loss
    is divided by.

    None where the microbatches of this batch do not count as their rows: labels are padded, classes
    are weighted.
    """
    if plan.weight is not None or plan.counts.weigh is None:
        return plan, None
    cut = microbatch.cut(plan, *split_batch(plan, batch), feeds)
    shares = shares_of(cut.rows, weights_of(cut, plan), plan, 1.0)
    pairs = zip(shares.weights, cut.rows, strict=True)
    if shares.total and all(
        weight * sum(cut.rows) == rows * shares.total for weight, rows in pairs
    ):
        return replace(plan, counts=replace(plan.counts, weigh=None)), shares.total
    return None, None


def _played(
    step: _RecordedRun, tensors: list[Tensor], began: float, weight: float | None
) -> Result:
    """The result of a recorded run for these tensors."""
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
"""Types that are compared by identity and do not change; functions count as such, unchecked."""

_CONSTANT = (*_FIXED, bool, int, float, complex, str, bytes, torch.device, torch.Size)
"""Types that hold no tensor and do not change."""

_HOLDS: dict[type, tuple[str, ...]] = {
    Replicate: ("value",),
    Axis: ("value", "axis", "sequence"),
    Microbatches: ("trees",),
}
"""Leaves that hold a tree: their arguments, the tree first."""


class _Taken:
    """Takes trees apart into tensors and words.

    Attributes:
        tensors: of the trees, each once.
        words: what a recording depends on besides the tensors' numbers; None where the trees are
            results.
    """

    def __init__(self, words: list[Hashable] | None = None) -> None:
        self.tensors: list[Tensor] = []
        self.words = words
        self._numbers: dict[int, int] = {}

    def take(self, tree: Tree) -> _Make:
        """Take a tree apart, and the trees that `Replicate`, `Axis` and `Microbatches` hold in it.

        Returns:
            A function that makes such a tree of other tensors.

        Raises:
            TraceError: a value cannot be compared with another.
            Unrecordable: a result is no tensor and no constant.
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
                    f"a result holds a {type(leaf).__name__}, and nobody knows what is in it"
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
    """Whole runs as CUDA graphs: ``with fp.graphs(plan) as graphs: fp.run(plan, params, batch,
    executor=graphs)``.

    The first run with input of a form (structure, shapes, types, layouts, devices; values that are
    no tensors; which leaves are trained; loss scale, grad mode, autocast) runs three times and is
    then recorded with everything that it queues: all lanes with their streams, the loss, the sums,
    the commits. Later ones copy their tensors into the recording's, play it, and copy the results
    out: no Python of stages, no launch of single kernels. That pays where kernels are so short that
    the host is late.

    Numbers are those of other executors, and a run stays pure. What it costs is memory: a graph has
    its own copies of parameters, state and batch, and holds all memory of a run for itself.

    A run that cannot be a graph is run as with ``executor=None``; ``result.stats.reason`` says why:
    lanes on several devices, or on one without graphs; random draws (dropout); a loss that brings
    (sum, weight), ``plan.weight`` or anything else that needs numbers on the host; targets that are
    padded unevenly (`F.cross_entropy`: looked at before each run); `offload`; ``record=``,
    ``ranges=``, ``timeout=``, ``check="finite"``; a ninth form of input.

    As with any recording, what stages do in Python is done when they are recorded and not again,
    and tensors that they close over are read where they lay.

    >>> layer = fp.Stage(lambda w, x: x * w)
    >>> plan = fp.make_plan([layer], fp.schedules.fill_drain(1, 2, backward=False), devices="cpu")
    >>> with fp.graphs(plan) as played:
    ...     fp.run(plan, (torch.ones(3),), torch.ones(4, 3), executor=played).stats.reason
    'not a graph: cpu has none'

    Args:
        plan: whose runs; on one device.

    Returns:
        An executor for ``run``; its graphs are forgotten at the end of the ``with`` block, or by
        ``close()``.

    Raises:
        PlanError: this is no plan.
    """
    return Graphs(plan)
