"""Cut a traced forward into stages: values that only the next stage reads are its input, all others
are skips.

`units` finds where cuts may lie, `traced` runs a stage.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.core.words import similar
from funcpipe._src.data.stage import Stage
from funcpipe._src.models.attributes import ModuleAttributes
from funcpipe._src.models.module import named_tensors
from funcpipe._src.models.traced.export import Captured, is_marker
from funcpipe._src.models.traced.nodes import layer_of, layers_of, regions_of, row_bytes
from funcpipe._src.models.traced.traced import CommitGraph, GraphFn, Norm
from funcpipe._src.models.traced.units import bonds


class CutEdge(NamedTuple):
    """A value that goes from one stage to others."""

    name: str  # the name of the value in the traced graph
    source: int  # the stage that computes the value
    targets: tuple[int, ...]  # the stages that read the value
    # `dtype`, `shape`: the type and shape for one microbatch, with ``rows`` for the dynamic size.
    # "int" and () for a number.
    dtype: str
    shape: tuple[Any, ...]
    # Bytes of one row if the first dimension is dynamic, otherwise of the whole value.
    row_bytes: int

    @property
    def skip(self) -> bool:
        """Whether the value passes over a stage or has several readers."""
        return self.targets != (self.source + 1,)


def positions(captured: Captured, at: Mapping[str, str], model: nn.Module) -> list[int]:
    """The indices of the nodes that begin a stage, for cuts by name."""
    body = captured.body
    layers = [layers_of(captured.module, node) for node in body]
    known = [name for name, _ in model.named_modules() if name]
    starts: set[int] = set()
    faults: list[str] = []
    for name, side in at.items():
        if side not in ("before", "after"):
            faults.append(f"at[{name!r}] must be 'before' or 'after'; got {side!r}")
            continue
        hits = [i for i, inside in enumerate(layers) if any(_within(path, name) for path in inside)]
        if not hits:
            reason = "no operation of its forward was traced"
            if name.partition("@")[0] not in known:
                reason = f"the model has no such module{similar(name, known)}"
            faults.append(f"at[{name!r}]: {reason}")
            continue
        edge, start = (hits[0], hits[0]) if side == "before" else (hits[-1], hits[-1] + 1)
        others = {
            path
            for path in layers[edge]
            if not _within(path, name) and not _within(name, path.partition("@")[0])
        }
        if regions_of(captured.module, body[edge]) and others:
            faults.append(
                f"at[{name!r}]: it runs inside a no_grad or autocast region ({body[edge].name}), "
                "which stays whole; put autocast around fp.run instead of inside the model, or "
                "cut before or after the region"
            )
        elif not _computes(body[:start]) or not _computes(body[start:]):
            faults.append(
                f"at[{name!r}] {side}: no operation runs {side} it, so a stage would be empty"
            )
        else:
            starts.add(start)
    raise_all("the model cannot be cut there:", faults)
    return sorted(starts)


def marked(captured: Captured) -> list[int]:
    """The indices of the calls of `split_point`. Raises PlanError if a stage would be empty."""
    body = captured.body
    markers = [i for i, node in enumerate(body) if is_marker(node)]
    if markers and not all(_computes(body[a:b]) for a, b in pairwise([0, *markers, len(body)])):
        raise PlanError(
            "a split_point() is before the first operation of the forward, after the last "
            "operation, or next to another split_point(), so a stage would be empty; remove it"
        )
    return markers


def _within(path: str, name: str) -> bool:
    inside = "@" not in name and path.startswith((f"{name}.", f"{name}@"))
    return path == name or inside


def _computes(nodes: Sequence[fx.Node]) -> bool:
    return any(not is_marker(node) and node.target is not operator.getitem for node in nodes)


class _Cutter:
    """A captured graph with a stage for each node."""

    def __init__(self, captured: Captured, starts: Collection[int]) -> None:
        self.captured, self.module = captured, captured.module
        self.nodes = {node.name: node for node in captured.module.graph.nodes}
        self.stage: dict[fx.Node, int] = {}
        self.last = 0
        for index, node in enumerate(captured.body):
            self.last += index in starts
            self.stage[node] = self.last
        # An item of a tuple result stays with the node that computes the tuple: a tuple cannot
        # cross a border.
        for node in captured.body:
            if node.target is operator.getitem:
                self.stage[node] = self.stage.get(node.all_input_nodes[0], self.stage[node])
        self.readers: dict[fx.Node, set[int]] = {}
        for node, stage in self.stage.items():
            for value in node.all_input_nodes:
                self.readers.setdefault(value, set()).add(stage)
        for kind, name in captured.outputs:
            if kind == "value":
                self.readers.setdefault(self.nodes[name], set()).add(self.last)
        faults = [fault for bond in bonds(captured) if (fault := bond.fault(self.stage))]
        raise_all(
            "these cuts separate operations that must be in one stage; move the cuts:", faults
        )

    def crossing(self) -> list[tuple[fx.Node, int, tuple[int, ...]]]:
        """List each value that leaves its stage, as (value, source stage, reading stages)."""
        out: list[tuple[fx.Node, int, tuple[int, ...]]] = []
        for node in self.module.graph.nodes:
            if node.op in ("get_attr", "output") or node.name in self.captured.sources:
                continue
            # Inputs of the model have no stage of their own: they arrive at stage 0.
            source = self.stage.get(node, 0)
            targets = tuple(sorted(s for s in self.readers.get(node, ()) if s > source))
            if targets:
                out.append((node, source, targets))
        return out


def cut(
    captured: Captured, starts: Collection[int], model: nn.Module
) -> tuple[list[tuple[Stage, Any, Any]], list[CutEdge]]:
    """Make the stages of a captured model, each with params and state, and the values between them.

    ``starts`` has the indices of the nodes that begin a stage, except the first stage. Raises
    PlanError if a cut separates the operations of a `Bond`.
    """
    cutter = _Cutter(captured, starts)
    crossing = cutter.crossing()
    edges = [_edge(*value) for value in crossing]
    tensors = named_tensors(model)
    origin = ModuleAttributes(model)
    parts = [_part(cutter, stage, edges, tensors, origin) for stage in range(cutter.last + 1)]
    return parts, edges


def _part(
    cutter: _Cutter,
    stage: int,
    edges: Sequence[CutEdge],
    tensors: Mapping[str, Tensor],
    origin: ModuleAttributes,
) -> tuple[Stage, Any, Any]:
    captured = cutter.captured
    last = stage == cutter.last
    received = [edge for edge in edges if stage in edge.targets]
    leaving = [edge for edge in edges if edge.source == stage]
    # Only values for exactly the next stage go along the pipeline. All others are skips.
    straight = tuple(edge.name for edge in received if not edge.skip)
    ends = captured.outputs if last else ()
    outgoing = dict.fromkeys(
        [*(edge.name for edge in leaving), *(value for kind, value in ends if kind == "value")]
    )
    module, takes, results = _graph(cutter, stage, set(straight), outgoing)
    norms = {norm.path: norm.running for norm in module.modules() if isinstance(norm, Norm)}
    buffers = [name for kind, name in takes if kind == "buffer"]
    buffers += [running.tracked for running in norms.values() if running.tracked is not None]
    fn = GraphFn(
        module,
        captured.signature,
        takes=tuple(takes),
        x=straight,
        y=() if last else tuple(edge.name for edge in leaving if not edge.skip),
        stash=tuple(edge.name for edge in leaving if edge.skip),
        writes=tuple(name for name in dict.fromkeys(buffers) if name in captured.written),
        norms=norms,
        rows=_rows(cutter.nodes, takes),
        results=tuple(results),
        ends=ends,
        first=stage == 0,
        last=last,
        param_shapes={name: tuple(tensors[name].shape) for kind, name in takes if kind == "param"},
        buffer_shapes={name: tuple(tensors[name].shape) for name in buffers},
        consts={name: captured.consts[name] for kind, name in takes if kind == "const"},
        evaluation=captured.evaluation,
        device=next((tensor.device for tensor in tensors.values()), torch.device("cpu")),
        origin=origin,
    )
    return fn.part(
        tensors,
        _title(cutter, stage),
        stash=fn.stash,
        pop=tuple(edge.name for edge in received if edge.skip),
        commit=CommitGraph(norms, fn.writes, captured.commits) if norms or fn.writes else None,
    )


def _rows(nodes: Mapping[str, fx.Node], takes: Sequence[tuple[str, str]]) -> tuple[str, int] | None:
    """The first outside value with an axis of rows, and that axis. None: there is none."""
    for kind, name in takes:
        sample = nodes[name].meta.get("val") if kind in ("x", "skip") else None
        for axis, size in enumerate(sample.shape if isinstance(sample, Tensor) else ()):
            if isinstance(size, torch.SymInt):
                return name, axis
    return None


def _graph(
    cutter: _Cutter, stage: int, straight: set[str], outgoing: Mapping[str, None]
) -> tuple[fx.GraphModule, list[tuple[str, str]], list[str]]:
    """Return one stage's nodes as a graph, the sources of its arguments, and its results' names."""
    graph, root = fx.Graph(), nn.Module()
    env: dict[fx.Node, fx.Node] = {}
    takes: list[tuple[str, str]] = []
    body = [node for node, owner in cutter.stage.items() if owner == stage and not is_marker(node)]
    needed = dict.fromkeys(
        value for node in body for value in node.all_input_nodes if cutter.stage.get(value) != stage
    )
    # The model may return a parameter or a buffer itself.
    needed |= dict.fromkeys(
        cutter.nodes[name] for name in outgoing if name in cutter.captured.sources
    )
    # Placeholders first: a graph must begin with them.
    for value in sorted(needed, key=lambda value: value.op == "get_attr"):
        if value.op == "get_attr":
            _attach(root, cutter.module, str(value.target))
            env[value] = graph.node_copy(value)
        else:
            origin = "x" if not stage or value.name in straight else "skip", value.name
            takes.append(cutter.captured.sources.get(value.name, origin))
            env[value] = graph.placeholder(value.name)
    for node in body:
        if node.op == "call_module":
            _attach(root, cutter.module, str(node.target))
        env[node] = graph.node_copy(node, lambda value: env[value])
    # The others are values that the stage only hands on: `GraphFn.run` has them as inputs.
    results = [name for name in outgoing if cutter.nodes[name] in env]
    graph.output(tuple(env[cutter.nodes[name]] for name in results))
    graph.lint()
    return fx.GraphModule(root, graph, f"Stage{stage}"), takes, results


def _attach(root: nn.Module, module: fx.GraphModule, path: str) -> None:
    setattr(root, path, module.get_submodule(path))


def _title(cutter: _Cutter, stage: int) -> str:
    """The name of a stage: its first and last innermost layer, ``model.layers.2..model.norm``."""
    paths = [
        layer_of(node).partition("@")[0] for node, owner in cutter.stage.items() if owner == stage
    ]
    inside = {path[:i] for path in paths for i, letter in enumerate(path) if letter == "."}
    named = [path for path in paths if path and path not in inside]
    return f"{named[0]}..{named[-1]}" if named else f"part {stage}"


def _edge(value: fx.Node, source: int, targets: tuple[int, ...]) -> CutEdge:
    sample = value.meta.get("val")
    if not isinstance(sample, Tensor):
        return CutEdge(value.name, source, targets, "int", (), 0)
    dtype = str(sample.dtype).removeprefix("torch.")
    shape = tuple(size if isinstance(size, int) else "rows" for size in sample.shape)
    return CutEdge(value.name, source, targets, dtype, shape, row_bytes(sample))
