"""Trace a whole forward as one graph by ``torch.export``, with all tensors of the model as inputs.

The graph is the non-strict training IR. The functionalised IR would be purer, but it drops
``no_grad`` and autocast regions, and the right gradients with them. `graph` restores purity at the
borders of the stages. If export would be silently wrong, this module raises PlanError with the
remedy.
"""

from __future__ import annotations

import inspect
import re
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from funcpipe._src.core.errors import PACKAGE, PlanError, raise_all
from funcpipe._src.core.torch_names import rename
from funcpipe._src.core.tree import Spec, flatten, is_differentiable, paths, unflatten
from funcpipe._src.core.words import similar
from funcpipe._src.models.configs import without_cache
from funcpipe._src.models.copying import copied
from funcpipe._src.models.module import first_names, named_tensors
from funcpipe._src.models.norms.batchnorm import Running
from funcpipe._src.models.norms.norm_layers import is_deferrable, without_processes
from funcpipe._src.models.traced import custom_functions
from funcpipe._src.models.traced.nodes import dependents_of, layer_of, norms_of, writes_of
from funcpipe._src.models.traced.signature import Guard, Signature
from funcpipe._src.models.traced.traced import CommitBuffer, Norm, mean_by_rows, refit


@dataclass(frozen=True)
class Captured:
    """A model's forward as one graph over flat values."""

    module: fx.GraphModule  # its placeholders: parameters, buffers, constants and leaves of inputs
    # Placeholder -> ("param" | "buffer", first name) or ("const", itself).
    sources: Mapping[str, tuple[str, str]]
    consts: Mapping[str, Tensor]  # tensors that the forward uses and that are not registered
    outputs: tuple[tuple[str, Any], ...]  # ("value", a node) or ("constant", a leaf of the output)
    signature: Signature
    written: frozenset[str]  # buffers that the forward writes, without batch norm's
    evaluation: bool  # whether the whole model was in evaluation mode
    commits: Mapping[str, CommitBuffer]  # by first names of buffers

    def sample_output(self) -> Any:
        """The model's output on the example, with tensors without numbers."""
        samples = {node.name: node.meta.get("val") for node in self.module.graph.nodes}
        return self.signature.output(self.outputs, samples)

    @property
    def body(self) -> list[fx.Node]:
        """The nodes that compute, in order."""
        return [n for n in self.module.graph.nodes if n.op in ("call_function", "call_module")]


def split_point() -> None:
    """Mark a place in a model's forward where `split` cuts the model.

    The function does nothing outside of a trace, so give ``fp.split(example=)``. ``at``,
    ``balance`` and ``policy`` override the marks.

    >>> class Net(nn.Module):
    ...     def forward(self, x):
    ...         x = x + 1
    ...         fp.models.split_point()
    ...         return x * 2
    >>> split = fp.split(Net(), example=torch.ones(4, 2))
    >>> len(split.stages)
    2
    """
    if _capturing.on:
        _marker()()


class _Capturing(threading.local):
    on = False


_capturing = _Capturing()


@cache
def _marker() -> Any:
    """The operation that represents a `split_point` in a graph, registered at its first use."""
    torch.library.define("funcpipe::split_point", "() -> ()")
    torch.library.impl("funcpipe::split_point", "default", lambda: None)
    return fx.has_side_effect(torch.ops.funcpipe.split_point.default)


def is_marker(node: fx.Node) -> bool:
    """Whether a node is a `split_point`."""
    return node.target is _marker()


def callers(model: nn.Module) -> list[str]:
    """The classes of a model whose forward names `split_point`."""
    kinds = dict.fromkeys(type(module) for module in model.modules())
    codes = {kind.__name__: getattr(kind.forward, "__code__", None) for kind in kinds}
    return [
        name
        for name, code in codes.items()
        if code is not None and split_point.__name__ in code.co_names
    ]


def shell(model: nn.Module) -> nn.Module:
    """Copy the model's structure around the same tensors, so that attributes can be written.

    The copy has no cache of keys and values: every microbatch would fill it again.
    """
    copy = copied(model)
    without_cache(copy, model)
    return copy


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    axes: Sequence[int | None] | None = None,
    commit: Mapping[str, CommitBuffer] | None = None,
) -> Captured:
    """Trace a model, in the mode in which the stages will run. The model does not change.

    Args:
        model: the model.
        args, kwargs: the arguments of its forward.
        axes: for each leaf of (args, kwargs) the dimension of its rows, which stays dynamic, or
            None. None for all: trace for exactly the rows of the example.
        commit: functions ``(old, written, rows) -> new`` by names of buffers, as in `split`.
    """
    from torch.export.graph_signature import InputKind

    if type(model).__call__ is not nn.Module.__call__:
        raise PlanError(
            f"{type(model).__name__} overrides __call__, but a trace follows forward alone; move "
            "the code into forward, or call the model in the forward of another module"
        )
    canonical = first_names(named_tensors(model, all_names=True))
    commits = _commits(model, commit or {}, canonical)
    copy = shell(model)
    opened = _open_norms(copy)
    flat = _Flat(copy, args, kwargs, axes)
    flat.check_rows()
    program = _export(copy, flat)
    sources: dict[str, tuple[str, str]] = {}
    consts: dict[str, Tensor] = {}
    inputs: list[str] = []
    faults: list[str] = []
    for spec in program.graph_signature.input_specs:
        name, target = spec.arg.name, spec.target
        match spec.kind:
            case InputKind.PARAMETER:
                sources[name] = "param", canonical[target]
            case InputKind.BUFFER:
                sources[name] = "buffer", canonical[target]
            case InputKind.CONSTANT_TENSOR:
                sources[name], consts[name] = ("const", name), program.constants[target]
            case InputKind.USER_INPUT:
                inputs.append(name)
            case _:
                faults.append(
                    f"{target or name} is a {spec.kind.name.lower().replace('_', ' ')}, which "
                    "cannot be cut"
                )
    raise_all("the traced model uses objects that stages cannot contain:", faults)
    nodes = {node.name: node for node in program.graph.nodes}
    placeholders = {number: nodes[name] for number, name in zip(flat.tensors, inputs, strict=True)}
    for number, node in placeholders.items():
        rename(node, flat.names[number])
    guards = tuple(
        Guard.of(placeholders[number], program.range_constraints)
        if number in placeholders
        else Guard(flat.names[number], leaf, None, ())
        for number, leaf in enumerate(flat.leaves)
    )
    assert flat.out_spec is not None
    signature = Signature(guards, tuple(kwargs), flat.spec, flat.out_spec)
    module = program.graph_module
    norms = _norms(module, sources, opened)
    written = _written(
        module,
        {**sources, **{node.name: ("input", node.name) for node in placeholders.values()}},
        norms,
    )
    _refuse_views(model, written.keys())
    dependent = {
        sources.get(node.name) for node in dependents_of(module, placeholders.values(), norms)
    }
    # The running statistics of instance norms are averages over rows.
    instance_norm = torch.ops.aten.instance_norm.default
    averages = [
        name
        for name, writers in written.items()
        if all(node.target is instance_norm for node in writers)
    ]
    commits = {**dict.fromkeys(averages, mean_by_rows), **commits}
    unknown = sorted(
        name for name in written if ("buffer", name) in dependent and name not in commits
    )
    raise_all(
        "the forward writes values that depend on the inputs into buffers, but funcpipe does not "
        "know how to combine the microbatches' values: counters add up, averages do not; give "
        "split(..., commit={name: fn}) with fp.models.mean_by_rows, fp.models.sum_of_changes, or a "
        "function (old, written, rows) -> new:",
        [f"{name!r}" for name in unknown],
    )
    refit(module, norms)
    results: Any = module.graph.output_node().args[0]
    outputs = tuple(
        ("value", result.name) if isinstance(result, fx.Node) else ("constant", result)
        for result in results
    )
    evaluation = not any(layer.training for layer in model.modules())
    return Captured(
        module, sources, consts, outputs, signature, frozenset(written), evaluation, commits
    )


def _commits(
    model: nn.Module, commit: Mapping[str, CommitBuffer], canonical: Mapping[str, str]
) -> dict[str, CommitBuffer]:
    """Return the user's ``commit=`` functions by first names of buffers."""
    buffers = [name for name, _ in model.named_buffers(remove_duplicate=False)]
    faults = [
        f"{name!r} is not a buffer of the model{similar(name, buffers)}"
        for name in commit
        if name not in buffers
    ]
    faults += [
        f"{name!r}: got a {type(fn).__name__}, not a function"
        for name, fn in commit.items()
        if not callable(fn)
    ]
    raise_all(
        "commit needs functions (old, written, rows) -> new for buffers of "
        f"{type(model).__name__}:",
        faults,
    )
    return {canonical[name]: fn for name, fn in commit.items()}


def _open_norms(model: nn.Module) -> dict[str, tuple[Running, float | None]]:
    """Let torch's batch norm layers trace as one operation.

    Returns, for each path, the buffers that the layer would update, and its momentum. Of layers
    that override forward, only those that average over all batches are included.
    """
    opened: dict[str, tuple[Running, float | None]] = {}
    layers: dict[int, tuple[Running, float | None]] = {}
    for path, layer in model.named_modules(remove_duplicate=False):
        plain = type(layer).forward in (nn.BatchNorm1d.forward, nn.SyncBatchNorm.forward)
        if is_deferrable(layer) and id(layer) not in layers and (plain or layer.momentum is None):
            layers[id(layer)] = Running.of(layer, path), layer.momentum
            layer.momentum = 0.1  # None would read the number in the counter, which a trace cannot
            layer.num_batches_tracked = None  # the commit counts
            if plain and isinstance(layer, nn.SyncBatchNorm):
                without_processes(layer)
        if id(layer) in layers:
            opened[path] = layers[id(layer)]
    return opened


def _norms(
    module: fx.GraphModule,
    sources: Mapping[str, tuple[str, str]],
    opened: Mapping[str, tuple[Running, float | None]],
) -> dict[fx.Node, Norm]:
    """Make the `Norm` for each batch norm that updates buffers. Raises PlanError."""
    norms: dict[fx.Node, Norm] = {}
    known: dict[str, tuple[Running, float | None]] = {}
    faults: list[str] = []
    for node, statistics in norms_of(module).items():
        kinds = [sources.get(getattr(source, "name", ""), ("", "")) for source in statistics]
        if any(kind != "buffer" for kind, _ in kinds):
            continue
        mean, var = (name for _, name in kinds)
        call: Any = Running(mean, var, None), node.args[6]
        layer = opened.get(layer_of(node).partition("@")[0])
        running, momentum = layer if layer is not None and layer[0].mean == mean else call
        if known.setdefault(mean, (running, momentum)) != (running, momentum):
            faults.append(f"{mean!r} is updated in several ways, in {node.name}")
        norms[node] = Norm(running, momentum, float(node.args[7]))  # pyright: ignore[reportArgumentType]
    raise_all("the running statistics of the model cannot be deferred:", faults)
    return norms


def _refuse_views(model: nn.Module, written: Set[str]) -> None:
    """Raise PlanError for written buffers that share memory, because each stage has its own."""
    where: dict[int, list[str]] = {}
    for name, buffer in model.named_buffers():
        if not buffer.is_meta:
            where.setdefault(buffer.untyped_storage().data_ptr(), []).append(name)
    for names in where.values():
        if len(names) > 1 and not written.isdisjoint(names):
            raise PlanError(
                f"the buffers {names} share memory and the forward writes into it; make them one "
                "buffer"
            )


class _Flat:
    """A forward from the tensors of its inputs to the leaves of its output.

    So export sees no container of the user. Our trees accept more containers than export does, and
    leaves that are not tensors are constants of a trace in any case.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        axes: Sequence[int | None] | None,
    ) -> None:
        self.forward = model.forward
        try:
            bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        except TypeError as error:
            raise PlanError(
                f"the example does not fit the forward of {type(model).__name__}: {error}"
            ) from None
        self.leaves, self.spec = flatten((args, kwargs))  # of the example
        self.axes = [None] * len(self.leaves) if axes is None else list(axes)
        parameters = list(bound)
        self.names = [_leaf_name(path, parameters) for path in paths((args, kwargs))]
        for number, name in enumerate(self.names):
            while name in self.names[:number]:
                name += "_"
            self.names[number] = name
        self.tensors = [
            number for number, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)
        ]
        # After the trace: the structure of the output, and the Python autograd.Functions before it.
        self.out_spec: Spec | None = None
        self.functions: set[str] = set()

    def check_rows(self) -> None:
        """Raise PlanError if an example for any number of rows has fewer than two."""
        for name, leaf, axis in zip(self.names, self.leaves, self.axes, strict=True):
            if axis is not None and leaf.shape[axis] < 2:
                raise PlanError(
                    f"{name} of the example has {leaf.shape[axis]} rows; give an example with at "
                    "least two rows, so that the number of rows stays dynamic, or any_rows=False"
                )

    def rows(self) -> list[str]:
        """The names of the leaves that have rows, with the dimension if that is not the first."""
        pairs = zip(self.names, self.axes, strict=True)
        return [
            f"dimension {axis} of {name}" if axis else name
            for name, axis in pairs
            if axis is not None
        ]

    def open_rows(self) -> dict[str, Any] | None:
        """The dynamic shapes for ``torch.export``: all numbers of rows are one symbol."""
        batch = torch.export.Dim("batch")
        opened = [
            None if self.axes[number] is None else {self.axes[number]: batch}
            for number in self.tensors
        ]
        return {"tensors": tuple(opened)} if any(opened) else None

    def call(self, *tensors: Tensor) -> tuple[Any, ...]:
        """Run the forward with these tensors in the places of the example's."""
        inputs = list(self.leaves)
        for number, tensor in zip(self.tensors, tensors, strict=True):
            inputs[number] = tensor
        args, kwargs = unflatten(self.spec, inputs)
        leaves, self.out_spec = flatten(self.forward(*args, **kwargs))
        self.functions = custom_functions.on_the_way_to(leaves)
        return tuple(leaves)


def _leaf_name(path: tuple[Any, ...], parameters: Sequence[str]) -> str:
    """The name of a leaf of (args, kwargs): its parameter's name, then its keys."""
    side, first, *rest = path
    if side == 0:
        first = parameters[first] if first < len(parameters) else f"argument{first}"
    return re.sub(r"\W", "_", "_".join(map(str, (first, *rest))))


def _export(model: nn.Module, flat: _Flat) -> Any:
    """Export the forward. Its inputs require gradients, to find custom functions on them, too."""
    example = tuple(flat.leaves[number] for number in flat.tensors)
    shapes = flat.open_rows()
    model.forward = lambda *tensors: flat.call(*tensors)  # noqa: PLW0108  export wants a plain function
    _marker()
    _capturing.on = True
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                tracked = tuple(
                    tensor.detach().requires_grad_() if is_differentiable(tensor) else tensor
                    for tensor in example
                )
                program = torch.export.export(model, tracked, dynamic_shapes=shapes, strict=False)
            except RuntimeError as error:
                if "leaf Variable that requires grad" not in str(error):
                    raise
                # It writes into an input: the graph names it, and `_written` refuses it.
                program = torch.export.export(model, example, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise PlanError(_reason(error, flat)) from error
    finally:
        _capturing.on = False
    custom_functions.refuse(flat.functions, program.graph_module)
    return program


def _reason(error: Exception, flat: _Flat) -> str:
    """The message of a failed trace: the cause, the remedy, and the first line of torch's error."""
    text = str(error).strip()
    first = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    otherwise = (
        "cut without tracing: split(model, num_stages) without example=, or write the stages "
        "yourself with fp.stage"
    )
    said = f"{type(error).__name__}: {text}"
    if any(
        words in said for words in ("data-dependent", "GuardOnDataDependent", "Could not guard")
    ):
        why = (
            "its Python code branches on the numbers in a tensor, which one graph cannot "
            "represent; use torch.where or torch.cond"
        )
        if "labels" in flat.names:  # the loss of a model may branch on the numbers of its labels
            otherwise = (
                "leave labels out of the example, and give make_plan(loss=) a function; or "
                + otherwise
            )
    elif any(
        words in said for words in ("Constraints violated", "specialized", "ConstraintViolation")
    ):
        why = (
            "its code fixes the number of rows (a Python branch, loop or reshape on the batch "
            "size); make it independent of the batch size (taken for rows: "
            f"{', '.join(flat.rows()) or 'nothing'}), or give an example with the rows of one "
            "microbatch and any_rows=False"
        )
    else:
        why = "torch.export does not support it"
    own = (PACKAGE, str(Path(torch.__file__).parent))
    places = [
        f" (at {frame.filename}:{frame.lineno})"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(own)
    ]
    return (
        f"the model cannot be traced: {why}. torch says: {type(error).__name__}: {first[:300]}"
        f"{''.join(places[-1:])}. Otherwise {otherwise}"
    )


def _written(
    module: fx.GraphModule, sources: Mapping[str, tuple[str, str]], norms: Mapping[fx.Node, Norm]
) -> dict[str, list[fx.Node]]:
    """The buffers that the forward writes, with the operations that write each.

    Raises PlanError for writes to parameters, constants and inputs.
    """
    written: dict[str, list[fx.Node]] = {}
    faults: list[str] = []
    statistics = {name for norm in norms.values() for name in norm.running[:2]}
    batch_norms = norms_of(module)
    for node, root in writes_of(module, norms):
        kind, name = sources.get(root.name, ("", ""))
        fault = {
            "param": f"it writes into its parameter {name!r}",
            "const": f"it writes into the tensor {name!r}, which is not a registered buffer",
            "input": f"it writes into its input {name!r}; clone it first",
        }.get(kind, "")  # none for a value of the forward
        if kind == "buffer":
            written.setdefault(name, []).append(node)
            if name in statistics:
                fault = f"it writes into {name!r}, which a batch norm updates"
            elif node in batch_norms:
                fault = f"batch norm updates a part of {name!r}, or after another write"
        faults += [f"{fault}, in {node.name}"] if fault else []
    raise_all("the model's forward is not pure:", faults)
    return written
