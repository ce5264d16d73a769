"""Trace a stage as one graph on fake tensors: its forward, the plan's loss, and their backward.

`cut` divides the graph into programs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from funcpipe._src.compiled.draws import DrawOp, Watch, draws
from funcpipe._src.compiled.python_values import GlobalDraws, PythonValues
from funcpipe._src.compiled.tidy import tidy
from funcpipe._src.core.border import LEAF, Border
from funcpipe._src.core.errors import TraceError
from funcpipe._src.core.gradient_graph import nodes_of
from funcpipe._src.core.torch_names import (
    FakeTensorMode,
    FunctionalTensorMode,
    NumbersWanted,
    functionalized,
)
from funcpipe._src.core.tracing import tracing
from funcpipe._src.core.tree import Spec, flatten, unflatten
from funcpipe._src.stages.bound import StageArgs, StageOut
from funcpipe._src.stages.context import no_autocast, no_autocast_cache
from funcpipe._src.stages.eager import EagerBound
from funcpipe._src.stages.rng import Keys
from funcpipe._src.stages.split_backward import numbers_that_wait


class Root(NamedTuple):
    """A leaf of the outputs, where a gradient comes in."""

    what: str  # "y", "stash", "loss" or "side"
    name: str  # the name of the stash
    leaf: int  # the index among the leaves of that tree
    stride: tuple[int, ...]  # the layout that its gradient must have


class OutputSpec(NamedTuple):
    """How to build the outputs of a forward from the tensors of its program."""

    # `y`, `stash`: structure and flags of the borders.
    y: tuple[Spec, tuple[bool, ...]]
    stash: dict[str, tuple[Spec, tuple[bool, ...]]]
    report: Spec | None  # structure of ``(stats, loss, side)``. None: there is nothing to report
    leaves: list[Any]  # all leaves; leaves that are not tensors as they are
    slots: list[int]  # the indices of the tensors
    # Whether the output is a single tensor, with no report except a loss that is a mean.
    plain: bool
    shared: Sequence[int] = ()  # as in `Border`, for the output


@dataclass
class Joint:
    """The graph of a stage with its backward."""

    module: fx.GraphModule  # contains the graph and its constants
    # Placeholders of the tensors of parameters and state, and of the values in ``once``.
    params: list[fx.Node]
    inputs: list[fx.Node]  # placeholders of the tensors of input, skips, feeds and target
    cotangents: list[fx.Node]  # placeholders, one for each root
    outs: list[fx.Node]  # the results of the forward, in the order of ``spec.slots``
    # Gradients of input leaves: a list for the input, and a list for each skip. None: no gradient.
    wanted: list[list[fx.Node | None]]
    sums: list[fx.Node | None]  # gradients of the trainable leaves
    # `spec`, `roots`, `draws`: see `OutputSpec`, `Root`, `DrawOp`.
    spec: OutputSpec
    roots: list[Root]
    draws: list[DrawOp]
    # Maps the indices of roots without a gradient to the indices of sums to which I of the eager
    # stage adds.
    early: Callable[[frozenset[int]], set[int]]
    # Values computed from parameters and state alone, once per run (`hoist`).
    once: list[fx.Node] = field(default_factory=list[fx.Node])


def tensors(*trees: Sequence[Any]) -> list[Tensor]:
    """The tensors among some leaves."""
    return [leaf for leaves in trees for leaf in leaves if isinstance(leaf, Tensor)]


def trace(bound: EagerBound, args: StageArgs, values: PythonValues) -> Joint:
    """Trace a bound stage with its backward, for arguments like these. ``values`` records the code
    that runs.

    Raises:
        TraceError: the stage cannot be a program. The message has the reason.
    """
    with tracing:
        try:
            with no_autocast_cache():  # with the cache, a second call would not contain the casts
                return _trace(bound, args, values)
        except TraceError:
            raise
        except Exception as error:
            raise _trace_error(error) from error


def _trace(real: EagerBound, args: StageArgs, values: PythonValues) -> Joint:
    from torch.fx.experimental.proxy_tensor import make_fx

    fixed = tensors(real.params.leaves, real.params.state_leaves)
    arguments = tensors(*(border.leaves for border in args.borders()))
    kind: Any = FakeTensorMode
    if not torch.cuda.is_available():
        # A torch with CUDA on a machine without: torch 2.11 then installs a guard that ends with
        # this thread, and the next trace in another thread aborts the process.
        kind = type("Fakes", (FakeTensorMode,), {"avoid_device_init": False})
    mode = kind(static_shapes=True)
    with torch.no_grad():
        fakes = [mode.from_tensor(tensor.detach()) for tensor in fixed]
    with mode:
        # Fresh tensors, not views: the position of a microbatch in the batch's memory is not in the
        # signature, so the trace must not depend on it.
        fakes += [
            torch.empty_strided(
                tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )
            for tensor in arguments
        ]
    with mode, torch.set_grad_enabled(real.backwards):
        draws = GlobalDraws()
        with values.executed:
            first = _TracedForward(real, args, fakes)
        draws.look()
        values.look()
        # The second call must run the same operations. A difference shows Python state, which a
        # program would freeze.
        again = _TracedForward(real, args, fakes, first.bound)
        draws.look()
    _refuse_changes(first, again, draws.named(values.executed) + values.changes())
    cotangents = (
        [mode.from_tensor(torch.empty_like(root)) for root in first.ends] if first.ends else []
    )
    calls: list[_TracedForward] = []

    def joint(*flat: Tensor) -> Any:
        call = _TracedForward(real, args, flat[: len(fakes)])
        calls[:] = [call]
        return call.outs, *call.gradients(flat[len(fakes) :])

    def graph(function: Callable[..., Any]) -> fx.GraphModule:
        functional: Any = functionalized(function, FunctionalTensorMode())
        return make_fx(functional, tracing_mode="fake")(*fakes, *cotangents)

    # Recording the code that runs makes a trace twice as slow, so it is done only if needed.
    watched = values.executed if first.has_own_backward(values.executed.names) else nullcontext()
    with mode, torch.set_grad_enabled(real.backwards), watched:
        try:
            module = graph(joint)
        except NumbersWanted:
            # Some code (masks in transformers) reads numbers unless it gets fake tensors, and does
            # not recognise functional tensors. So trace with fake tensors, and make that graph
            # functional.
            module = graph(make_fx(joint, tracing_mode="fake")(*fakes, *cotangents))
    call = calls[0]
    for bound in (first.bound, call.bound):
        bound.release()
    _name_draws(module.graph, call.watch.draws)
    tidy(module)
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    outs, wanted, sums = next(node for node in module.graph.nodes if node.op == "output").args[0]
    params = placeholders[: len(fixed)]
    inputs = placeholders[len(fixed) : len(fakes)]
    ends = placeholders[len(fakes) :]
    return Joint(
        module,
        params,
        inputs,
        ends,
        outs,
        wanted,
        sums,
        first.spec,
        first.roots,
        call.watch.draws,
        first.early,
    )


class _TracedForward:
    """One forward of the stage on given tensors, with its autograd graph."""

    def __init__(
        self,
        real: EagerBound,
        args: StageArgs,
        flat: Sequence[Tensor],
        bound: EagerBound | None = None,
    ) -> None:
        values = iter(flat)

        def put(leaves: Sequence[Any]) -> list[Any]:
            return [next(values) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

        def border(old: Border) -> Border:
            new = Border(put(old.leaves), old.spec, old.flags)
            new.shared = old.shared
            return new

        params = unflatten(real.params.spec, put(real.params.leaves))
        state = unflatten(real.state_spec, put(real.params.state_leaves))
        x = border(args.x)
        skips = [border(skip) for skip in args.skips]
        feeds = [border(feed) for feed in args.feeds]
        traced = StageArgs(x, skips, feeds, args.target and border(args.target), args.microbatch)
        if bound is None:
            options: dict[str, Any] = {
                "trainable": real.params.trainable,
                "train": real.train,
                "backwards": real.backwards,
            }
            options |= {"keys": Keys(None, [real.stage]), "loss": real.loss}
            bound = EagerBound(real.stage, 0, params, state, **options)
            bound.watched = real.watched
        self.bound, self.parameters = bound, bound.params.inputs  # the bound forgets them
        self.watch = Watch(bound.fn.places)
        with self.watch:
            out = bound.evaluate(traced, keep=True)
        if bound.params.written():
            raise TraceError("it writes into its parameters; a stage is pure")
        self.residual = out.residual
        self.spec, self.outs = _output(out)
        self.roots, self.ends = self._ends()

    def _ends(self) -> tuple[list[Root], list[Tensor]]:
        """Return the roots, and the tensor at each root with its autograd graph."""
        residual = self.residual
        places: list[tuple[str, str, int, Any]] = []
        if self.bound.loss is None:
            places += [("y", "", leaf, end) for leaf, end in enumerate(residual.y)]
        for name, ends in residual.stash.items():
            places += [("stash", name, leaf, end) for leaf, end in enumerate(ends)]
        if residual.total is not None:
            places.append(("loss", "", 0, residual.total))
        if residual.side is not None:
            places.append(("side", "", 0, residual.side[0]))
        live = [
            place for place in places if isinstance(place[3], Tensor) and place[3].requires_grad
        ]
        ends = [end for *_, end in live]
        return [Root(kind, name, leaf, tuple(end.stride())) for kind, name, leaf, end in live], ends

    def has_own_backward(self, names: Collection[str]) -> bool:
        """Whether the code that ran, which used these names, has a custom backward or a hook."""
        nodes = nodes_of(self.ends)
        return any(name.startswith("register_") for name in names) or any(
            isinstance(node, torch.autograd.function.BackwardCFunction) for node in nodes
        )

    def early(self, missing: frozenset[int]) -> set[int]:
        """The indices of the sums to which I of the eager stage adds, if these roots have no
        gradient."""
        parameters = self.parameters
        roots = [end for number, end in enumerate(self.ends) if number not in missing]
        count = len(parameters)
        if self.bound.whole:
            return {*range(count)}
        return {*range(count)} - numbers_that_wait(roots, self.residual.inputs(), parameters)

    def gradients(
        self, cotangents: Sequence[Tensor]
    ) -> tuple[list[list[Tensor | None]], list[Tensor | None]]:
        """Return the gradients of the input leaves, in the layout of the leaves, and of the
        trainable parameters."""
        residual = self.residual
        borders = [(residual.x_count, residual.x), *residual.skips]
        leaves = [
            *(leaf for _, by_number in borders for leaf in by_number.values()),
            *self.bound.params.inputs,
        ]
        gradients: list[Tensor | None] = [None] * len(leaves)
        if leaves and self.ends:
            with no_autocast():
                gradients = list(
                    torch.autograd.grad(self.ends, leaves, list(cotangents), allow_unused=True)
                )
        rest = iter(gradients)
        rows: list[list[Tensor | None]] = []
        for count, by_number in borders:
            row: list[Tensor | None] = [None] * count
            for number, leaf in by_number.items():
                row[number] = _like(next(rest), leaf)
            rows.append(row)
        return rows, [
            gradient
            if gradient is None or gradient.layout is torch.strided
            else gradient.to_dense()
            for gradient in rest
        ]


def _like(gradient: Tensor | None, leaf: Tensor) -> Tensor | None:
    """A gradient in the layout of its leaf. Autograd keeps the same layout when it adds to
    ``.grad``."""
    if gradient is None or gradient.stride() == leaf.stride():
        return gradient
    return torch.empty_like(leaf).copy_(gradient)


def _output(out: StageOut) -> tuple[OutputSpec, list[Tensor]]:
    """Return how the tensors of a forward make its outputs, and these tensors."""
    stats, loss, side = out.report
    reported, report = flatten((stats, loss, side))
    silent = loss is None and side is None and not flatten(stats)[0]
    leaves = [leaf for border in (out.y, *out.stash.values()) for leaf in border.leaves]
    leaves += [] if silent else reported
    slots = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    no_stats = type(stats) is tuple and not stats
    mean = silent or (
        no_stats and side is None and loss is not None and loss.weight is None and loss.aux is None
    )
    spec = OutputSpec(
        y=(out.y.spec, tuple(out.y.flags)),
        stash={name: (border.spec, tuple(border.flags)) for name, border in out.stash.items()},
        report=None if silent else report,
        leaves=[None if isinstance(leaf, Tensor) else leaf for leaf in leaves],
        slots=slots,
        plain=mean
        and out.y.spec is LEAF
        and not out.stash
        and slots == list(range(1 if silent else 2)),
        shared=out.y.shared,
    )
    return spec, [leaves[number] for number in slots]


def _refuse_changes(first: _TracedForward, again: _TracedForward, changes: Sequence[str]) -> None:
    """Raise TraceError if a second call differs from the first, because a program would freeze
    its Python state."""
    if first.watch.steps == again.watch.steps and first.spec == again.spec and not changes:
        return
    pairs = zip(first.watch.steps, again.watch.steps, strict=False)
    differing = [*changes, *(f"{a} in one call, {b} in the next" for a, b in pairs if a != b)]
    detail = f": {differing[0]}" if differing else ""
    raise TraceError(
        f"it does something else in its second call{detail}. It keeps state in Python (a "
        "counter, a cache, random numbers that are not torch's), which a program would freeze; "
        "pass the state in by feeds or state"
    )


def _name_draws(graph: fx.Graph, drawn: Sequence[DrawOp]) -> None:
    """Mark each node that draws with the index of its draw. Raises TraceError."""
    calls = [node for node in graph.nodes if node.op == "call_function"]
    nodes = [
        node for node in calls if draws(node.target, node.args, node.kwargs, node.meta.get("val"))
    ]
    if len(nodes) > len(drawn):
        raise TraceError(
            "it draws random numbers in its backward (torch.utils.checkpoint around a dropout?), "
            "where a program would draw other numbers; use fp.schedules.remat instead of checkpoint"
        )
    if len(nodes) < len(drawn):
        raise TraceError(f"it draws random numbers ({drawn[0].what}) that the trace does not show")
    for number, node in enumerate(nodes):
        node.meta["draw"], node.meta["drawn_by"] = number, drawn[number].what


NOT_GIVEN = (
    "it computes with a tensor that is not an argument (closed over, or an attribute of a module "
    "that is not a buffer); pass the tensor in by params, state or feeds. For a tensor of the loss, "
    "such as class weights: compile_stage(stage, fallback=True) leaves the last stage eager"
)
_TAKEN_OUT = "it reads the numbers of a tensor outside of torch (numpy, an extension)"
_BRANCH = "its computation depends on numbers in tensors (a branch, .item(), a shape)"
_REASONS = {
    "allow_non_fake_inputs": NOT_GIVEN,
    ".numpy()": _TAKEN_OUT,
    "Cannot access data pointer": _TAKEN_OUT,
    "DataDependent": _BRANCH,
    "data-dependent": _BRANCH,
    "DynamicOutputShape": (
        "the shape of a result depends on numbers in tensors (nonzero, a mask, unique)"
    ),
}


def _trace_error(error: Exception) -> TraceError:
    """The error with the reason why a stage cannot be traced."""
    text = f"{type(error).__name__}: {error}"
    known = next((reason for mark, reason in _REASONS.items() if mark in text), None)
    fault = TraceError(f"{known or 'it cannot be traced'} ({text.splitlines()[0]})")
    fault.cause = None if known else error
    return fault
