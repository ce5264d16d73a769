"""Run one traced stage: a graph over flat values as a stage function, with its draws, statistics
and devices.

`export` makes the graph of the whole model, `graph` cuts it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from funcpipe._src.core.errors import PlanError
from funcpipe._src.core.torch_names import OpOverload, schema
from funcpipe._src.core.tree import Tree, flatten
from funcpipe._src.data.identity import words_of_function
from funcpipe._src.data.stage import Out
from funcpipe._src.models.attributes import ModuleAttributes
from funcpipe._src.models.module import PartFn
from funcpipe._src.models.norms.batchnorm import (
    CommitLayers,
    NormStats,
    Running,
    batch_norm_at,
    wide,
)
from funcpipe._src.models.norms.written_buffers import NormCall
from funcpipe._src.models.traced.nodes import layer_of, regions_of
from funcpipe._src.models.traced.signature import Signature


class _Mode(threading.local):
    """The mode of the graph call on this thread, and the statistics of its norms."""

    train = True
    norms: dict[str, NormStats] | None = None


_mode = _Mode()


class Draw(nn.Module):
    """An operation that draws random numbers, or differs between training and evaluation.

    It follows the run's ``train``. It is a module, so that keyed randomness finds it on the stack:
    the key of a draw is the path of the layer in the model.
    """

    def __init__(self, op: Any, path: str, flag: int | None, rate: int | None) -> None:
        super().__init__()
        self.op, self.path, self.flag, self.rate = op, path, flag, rate

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "op": str(self.op)}  # torch's operations do not pickle

    def __setstate__(self, state: dict[str, Any]) -> None:
        op: Any = torch.ops
        for name in state["op"].split("."):
            op = getattr(op, name)
        super().__setstate__({**state, "op": op})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the operation; in evaluation without its training behaviour."""
        if _mode.train:
            return self.op(*args, **kwargs)
        arguments = list(args)
        if self.flag is not None:
            arguments[self.flag] = False
        if self.rate is not None:
            arguments[self.rate] = 0.0
        return self.op(*arguments, **kwargs)


class Norm(nn.Module):
    """Batch norm in training that returns its statistics: deferred state.

    ``path`` is the path of its layer; or the name of the buffer with the running mean, if that has
    its own name. ``momentum`` None: the plain average of all batches.
    """

    op = torch.ops.aten.batch_norm.default  # the operation in whose place it is

    def __init__(self, running: Running, momentum: float | None, eps: float) -> None:
        super().__init__()
        self.path = running.mean.removesuffix(".running_mean")
        self.running, self.momentum, self.eps = running, momentum, eps

    def forward(
        self, x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, *rest: Any
    ) -> Tensor:
        """Normalise as ``nn.BatchNorm`` does, without writing a buffer."""
        y, stats = batch_norm_at(
            self.path, NormCall(x, mean, var, weight, bias, _mode.train, eps=self.eps)
        )
        if _mode.norms is not None:
            # A layer that runs twice in a microbatch adds the moments of both calls.
            before = _mode.norms.get(self.path, NormStats((), self.momentum))
            _mode.norms[self.path] = before._replace(moments=before.moments + stats)
        return y


def refit(module: fx.GraphModule, norms: Mapping[fx.Node, Norm]) -> None:
    """Replace operations of a graph and its regions by `Draw` and these `Norm`."""
    drawn: dict[str, int] = {}

    def visit(graph_module: fx.GraphModule) -> None:
        for node in list(graph_module.graph.nodes):
            for body, _ in regions_of(graph_module, node):
                visit(body)
            if node.target is torch.ops.aten._assert_tensor_metadata.default:
                # It checks device and type of the example. The guards of `Signature` check the same
                # with a better message.
                graph_module.graph.erase_node(node)
                continue
            layer = norms.get(node) or _draw(node, layer_of(node), drawn)
            if layer is not None:
                path = (layer.path or "model").replace("@", "_call_")
                name = re.sub(r"[.#]", "_", f"{node.name}_of_{path}")
                graph_module.add_module(name, layer)
                with graph_module.graph.inserting_before(node):
                    call = graph_module.graph.call_module(name, node.args, node.kwargs)
                call.meta = dict(node.meta)
                node.replace_all_uses_with(call)
                graph_module.graph.erase_node(node)
        graph_module.recompile()

    visit(module)


def _draw(node: fx.Node, path: str, drawn: dict[str, int]) -> Draw | None:
    op = node.target
    if not isinstance(op, OpOverload) or op is torch.ops.aten.batch_norm.default:
        return None
    names = [argument.name for argument in schema(op).arguments]
    flag = next((names.index(n) for n in ("train", "training") if n in names), None)
    trains = flag is not None and flag < len(node.args) and node.args[flag] is True
    rate = names.index("dropout_p") if "dropout_p" in names else None
    rate = rate if rate is not None and rate < len(node.args) and node.args[rate] else None
    if not (trains or torch.Tag.nondeterministic_seeded in op.tags):
        return None
    # A draw of the model itself: without a path its key would depend on the stage, so on the cuts.
    path = path or "forward"
    # Counted over the whole model, before the cut, so that keys do not depend on cuts.
    nth = drawn[path] = drawn.get(path, -1) + 1
    return Draw(op, f"{path}#{nth}" if nth else path, flag if trains else None, rate)


@dataclass(eq=False, repr=False)
class GraphFn(PartFn):
    """A part of a traced model as a function of its parameters.

    The function names no layers. Each draw has its own path in the model, wherever the cuts are.
    """

    module: fx.GraphModule
    signature: Signature
    # Of each argument: (kind, name), kind "x", "skip", "param", "buffer" or "const".
    takes: tuple[tuple[str, str], ...]
    x: tuple[str, ...]  # values of the previous stage; several come as a dict
    y: tuple[str, ...]  # values that only the next stage reads
    stash: tuple[str, ...]  # values that later stages read
    writes: tuple[str, ...]  # buffers that the graph writes
    norms: Mapping[str, Running]  # with deferred statistics
    # A value and its axis of rows; None: each microbatch has the same number.
    rows: tuple[str, int] | None
    results: tuple[str, ...]
    # Of the model's output: ("value", name) or ("constant", itself).
    ends: tuple[tuple[str, Any], ...]
    first: bool
    last: bool
    param_shapes: Mapping[str, tuple[int, ...]]
    buffer_shapes: Mapping[str, tuple[int, ...]]
    consts: Mapping[str, Tensor]
    evaluation: bool  # traced in evaluation mode: the graph always runs as traced
    device: torch.device
    origin: ModuleAttributes | None
    evaluates: bool = False  # traced in training, but equal to the model's evaluation mode too
    _moved: dict[torch.device, tuple[fx.GraphModule, dict[str, Tensor]]] = field(
        default_factory=dict, repr=False
    )

    who = "this stage"

    def __repr__(self) -> str:
        return "traced graph"

    def described(self) -> Iterable[tuple[str, str]]:
        """The calls of the graph with their flags and fractions, which no example changes."""
        for node in self.module.graph.nodes:
            if node.op not in ("call_function", "call_module"):
                continue
            call = node.op == "call_function"
            target = node.target if call else self.module.get_submodule(node.target)
            target = target.op if isinstance(target, Draw) else target
            given = [*node.args, *node.kwargs.values()]
            options = [repr(each) for each in given if isinstance(each, (bool, float, str))]
            # "aten::gelu" for aten.gelu.default
            name = (
                str(target).rpartition(".")[0].replace(".", "::")
                if isinstance(target, OpOverload)
                else words_of_function(target)
            )
            yield "", f"{name}({', '.join(options)})"

    def bind(self, params: Any, state: Any) -> BoundGraph:
        """Bind the function to its parameters. The graph keeps nothing, so all runs share it."""
        self.check(params, state)
        return BoundGraph(self, params)

    def run(self, params: Mapping[str, Tensor], x: Tree, extras: Mapping[str, Any]) -> Any:
        """Run the graph on one microbatch."""
        train = bool(extras.get("train", False))
        if not (train or self.evaluation or self.evaluates):
            raise PlanError(
                "this stage was traced in training mode and cannot run in evaluation mode, because "
                "the model computes something else there; call model.eval() and split it again"
            )
        state = extras.get("state") or {}
        # The graph writes these buffers in place, and microbatches must not see each other's
        # writes.
        fresh = {name: state[name].clone() for name in self.writes}
        module, consts = self._on(params, state, x)
        inputs = (
            self.signature.values(x) if self.first else {self.x[0]: x} if len(self.x) == 1 else x
        )
        inputs = {**inputs, **extras.get("skips", {})}
        sources: dict[str, Mapping[str, Any]] = {
            "param": params,
            "buffer": {**state, **fresh},
            "const": consts,
        }
        collected: dict[str, NormStats] | None = {} if train and self.norms else None
        before = _mode.train, _mode.norms
        # A graph traced in evaluation mode runs as traced: in mode ``train``, `Draw` changes no
        # argument.
        _mode.train, _mode.norms = train or self.evaluation, collected
        try:
            results = module(*[sources.get(source, inputs)[name] for source, name in self.takes])
        finally:
            _mode.train, _mode.norms = before
        flat = {**inputs, **dict(zip(self.results, results, strict=True))}
        if self.last:
            y = self.signature.output(self.ends, flat)
        else:
            y = flat[self.y[0]] if len(self.y) == 1 else {name: flat[name] for name in self.y}
        stash = {name: flat[name] for name in self.stash}
        stats: Tree = ()
        if collected is not None or fresh:
            rows = inputs[self.rows[0]].shape[self.rows[1]] if self.rows else 1
            written = {name: value.detach() for name, value in fresh.items()}
            stats = {"norms": collected or {}, "written": written, "rows": rows}
        return Out(y, stash, stats) if stash or stats else y

    def _on(
        self, params: Mapping[str, Tensor], state: Mapping[str, Tensor], x: Tree
    ) -> tuple[fx.GraphModule, Any]:
        """Return the graph and its constants on the stage's device, not that of the example."""
        held = [*params.values(), *state.values()] or flatten(x)[0]
        device = next((leaf.device for leaf in held if isinstance(leaf, Tensor)), self.device)
        if device == self.device:
            return self.module, self.consts
        moved = self._moved.get(device)
        if moved is None:
            consts = {name: tensor.to(device) for name, tensor in self.consts.items()}
            moved = self._moved[device] = (retarget(self.module, self.device, device), consts)
        return moved


class BoundGraph:
    """A traced stage with its parameters."""

    def __init__(self, owner: GraphFn, params: Mapping[str, Tensor]) -> None:
        self.owner, self.params = owner, params
        self.places = {
            id(draw): draw.path for draw in owner.module.modules() if isinstance(draw, Draw)
        }

    def __call__(self, x: Tree, **extras: Any) -> Any:
        """Run this part of the model on one microbatch."""
        return self.owner.run(self.params, x, extras)

    def release(self) -> None:
        """Forget the parameters."""
        self.params = {}


CommitBuffer = Callable[[Tensor, tuple[Tensor, ...], tuple[int, ...]], Tensor]
"""``(old, written, rows) -> new``: the next value of a buffer from its old value, each
microbatch's value, and each microbatch's number of rows."""


def mean_by_rows(old: Tensor, written: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """Commit an average over rows: the mean of the microbatches' values, weighted by their rows.

    Use it in ``fp.split(commit={name: fn})`` for a buffer that is an average.

    >>> fp.models.mean_by_rows(torch.zeros(1), [torch.ones(1), torch.full((1,), 4.0)], [2, 1])
    tensor([2.])

    Args:
        old: the buffer before the batch; only its type is used.
        written: the value that each microbatch wrote.
        rows: the number of rows of each microbatch.

    Returns:
        The new buffer.
    """
    parts = [
        value.to(wide(value)) * (count / sum(rows))
        for value, count in zip(written, rows, strict=True)
    ]
    return torch.stack(parts).sum(0).to(old.dtype)


def sum_of_changes(old: Tensor, written: Sequence[Tensor], rows: Sequence[int]) -> Tensor:
    """Commit a counter: the old number plus the change of each microbatch.

    Use it in ``fp.split(commit={name: fn})`` for a buffer that counts.

    >>> fp.models.sum_of_changes(torch.tensor([5]), [torch.tensor([7]), torch.tensor([6])], [2, 1])
    tensor([8])

    Args:
        old: the buffer before the batch. Each microbatch started from it.
        written: the value that each microbatch wrote.
        rows: the number of rows of each microbatch; not used.

    Returns:
        The new buffer.
    """
    return old + torch.stack([value - old for value in written]).sum(0).to(old.dtype)


class CommitGraph:
    """The commit of a traced stage: batch norm layers, and other buffers that its forward writes.

    Each microbatch wrote these buffers from the same old state. If a value does not depend on the
    inputs, all microbatches wrote the same value. Other buffers have a function in ``commits``.
    """

    def __init__(
        self,
        norms: Mapping[str, Running],
        written: Sequence[str],
        commits: Mapping[str, CommitBuffer],
    ) -> None:
        self.norms, self.written = CommitLayers(norms), tuple(written)
        self.commits = {name: commits[name] for name in written if name in commits}

    def __call__(self, state: dict[str, Tensor], stats: tuple[Tree, ...]) -> dict[str, Tensor]:
        """Return the buffers after one batch."""
        collected = [entry for entry in stats if entry]
        if not collected:
            return state
        new = self.norms(state, tuple(entry["norms"] for entry in collected))
        rows = tuple(entry["rows"] for entry in collected)
        for name in self.written:
            values = tuple(entry["written"][name] for entry in collected)
            commit, old = self.commits.get(name), state[name]
            new[name] = values[0] if commit is None else commit(old, values, rows)
            made: Any = new[name]
            if not isinstance(made, Tensor) or (made.shape, made.dtype) != (old.shape, old.dtype):
                raise PlanError(
                    f"commit[{name!r}] returned a {type(made).__name__}{_form(made)}, but the "
                    f"buffer is a tensor{_form(old)}; return a tensor of that shape and type"
                )
        return new


def _form(value: Any) -> str:
    return f" of shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else ""


def retarget(module: fx.GraphModule, old: torch.device, new: torch.device) -> fx.GraphModule:
    """Copy a graph and its regions so that they make their tensors on another device."""

    def swap(value: Any) -> Any:
        return new if isinstance(value, torch.device) and value.type == old.type else value

    moved = deepcopy(module)
    for part in moved.modules():
        if isinstance(part, fx.GraphModule):
            for node in part.graph.nodes:
                node.args = map_aggregate(node.args, swap)
                node.kwargs = map_aggregate(node.kwargs, swap)
                # Autocast names its device by a text, which `swap` leaves unchanged.
                autocast = node.target is torch.ops.higher_order.wrap_with_autocast
                if autocast and node.args[0] == old.type:
                    node.args = (new.type, *node.args[1:])
            part.recompile()
    return moved
