"""Verify that a split computes what its model computes: outputs, gradients and buffers, on two
inputs."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.core.tree import flatten, locations, map_tensors, unflatten
from funcpipe._src.engine.apply import apply
from funcpipe._src.models.example import row_axes
from funcpipe._src.models.losses import ModelLoss
from funcpipe._src.models.module import first_names, named_tensors
from funcpipe._src.models.split_model import Split
from funcpipe._src.models.ties import innermost
from funcpipe._src.models.traced.export import shell
from funcpipe._src.models.traced.signature import as_call, as_input
from funcpipe._src.models.traced.traced import GraphFn

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""The allowed rounding error, relative to the largest number of a tensor."""


def verify(model: nn.Module, split: Split, inputs: Any, *, train: bool = True) -> None:
    """Compare a split with the model in its own mode (``train``) or in evaluation mode. The model
    does not change.

    Both run on the example. In the model's own mode, they also run on other inputs, to find values
    that a trace treated as constants, and on one row, because export does not treat one row as a
    dynamic size. If the results for one row differ, the stages accept only two rows or more.

    Raises:
        PlanError: the message lists the values that differ.
    """
    module = shell(model) if train else shell(model).eval()
    canonical = first_names(named_tensors(model, all_names=True))
    buffers = {
        name: buffer.detach().clone()
        for name, buffer in model.named_buffers()
        if canonical[name] == name
    }
    params = {
        name: param.detach().requires_grad_(param.requires_grad)
        for name, param in model.named_parameters()
    }
    state: Any = split.state
    traced = functions(split)
    axes = [guard.rows for guard in traced[0].signature.guards] if traced else row_axes(inputs)
    for number, x in enumerate((inputs, other_inputs(inputs, axes)) if train else (inputs,)):
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        try:
            expected = _eager(module, params, buffers, x, split.loss)
        except Exception as error:
            if not number:
                raise _fails(error) from error
            buffers, x = before, inputs  # the model does not accept the changed example
            expected = _eager(module, params, buffers, x, split.loss)
        actual, state = _staged(split, x, state, train=train)
        faults = _faults(split, expected, actual, buffers, state, before)
        where = "inputs other than the example" if number else "the example"
        kind, other = "stages", "trace it"
        if traced:
            kind, other = "traced stages", "cut without tracing (split without example=)"
            if number:
                where += (
                    " (the trace treated a value as a constant: a counter, a random number of "
                    "Python, or a number read from a tensor)"
                )
        raise_all(
            f"the {kind} do not compute what the model computes, on {where}; {other}, or write "
            "the stages yourself:",
            faults[:12],
        )
    if train and traced:
        _try_one_row(model, split, inputs)


def _try_one_row(model: nn.Module, split: Split, inputs: Any) -> None:
    """Compare stages and model on one row. If they differ, the stages refuse one row."""
    signature = functions(split)[0].signature
    rows = [guard.rows for guard in signature.guards]
    if all(axis is None for axis in rows):
        return
    single = _changed(
        inputs, rows, lambda leaf, axis: leaf if axis is None else leaf.narrow(axis, 0, 1)
    )
    try:
        with torch.no_grad():
            expected = _call_copy(model, single)
    except Exception:
        return  # the model itself does not accept one row
    try:
        with torch.no_grad(), seeded(single):
            actual = apply(
                split.stages, split.params, single, state=_copied(split.state), train=True
            ).y
        differs = bool(_differences([("output", expected, actual)]))
    except Exception:
        differs = True
    if differs:
        several = replace(signature, guards=tuple(guard.several() for guard in signature.guards))
        for fn in functions(split):
            fn.signature = several


def verify_evaluation(model: nn.Module, split: Split, inputs: Any) -> None:
    """Compare stages and model in evaluation mode. If they differ, the stages refuse that mode."""
    for fn in functions(split):
        fn.evaluates = True
    try:
        verify(model, split, inputs, train=False)
    except Exception:
        for fn in functions(split):
            fn.evaluates = False


def functions(split: Split) -> list[GraphFn]:
    """The functions of a traced split's stages."""
    return [fn for fn in map(innermost, split.stages) if isinstance(fn, GraphFn)]


def try_once(model: nn.Module, inputs: Any) -> None:
    """Run the model on the example before the trace, so that its cached tables are numbers.

    Raises PlanError if the model fails, or draws with generators that are not torch's.
    """
    generators = [("random", random.getstate, random.setstate)]
    if "numpy" in sys.modules:
        numpy: Any = sys.modules["numpy"]
        generators.append(("numpy.random", numpy.random.get_state, numpy.random.set_state))
    states = [get() for _, get, _ in generators]
    drawn: list[str] = []
    try:
        try:
            with torch.no_grad():
                _call_copy(model, inputs)
        except RuntimeError:  # perhaps the forward computes gradients itself
            with torch.enable_grad():
                _call_copy(model, inputs)
    except PlanError:
        raise
    except Exception as error:
        raise _fails(error) from error
    finally:
        for (name, get, put), state in zip(generators, states, strict=True):
            if str(get()) != str(state):
                drawn.append(name)
                put(state)
    if drawn:
        raise PlanError(
            f"the forward draws with {' and '.join(drawn)}, which a trace would treat as a "
            "constant; draw with torch"
        )


def _fails(error: Exception) -> PlanError:
    return PlanError(f"the model itself fails on the example: {type(error).__name__}: {error}")


def _faults(
    split: Split,
    expected: Any,
    actual: Any,
    buffers: Mapping[str, Tensor],
    state: Any,
    before: Mapping[str, Tensor],
) -> list[str]:
    """Describe the outputs, gradients and buffers that differ."""
    (y, gradients), (actual_y, actual_gradients) = expected, actual
    faults = _differences([("output", y, actual_y)])
    faults += _differences(
        [
            (f"gradient of {name}", gradients.get(name), actual_gradients.get(name))
            for name in {**gradients, **actual_gradients}
        ]
    )
    for name, value in buffers.items():
        for copy in [tree[name] for tree in state if tree and name in tree] or [before[name]]:
            faults += _differences([(f"buffer {name}", value, copy)])
    return faults


def other_inputs(inputs: Any, axes: Sequence[int | None]) -> Any:
    """Make inputs of the same kind with other numbers: rows rotated by one, floating numbers
    scaled."""

    def other(leaf: Any, axis: int | None) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf.detach() if isinstance(leaf, Tensor) else leaf
        dim = axis or 0
        turned = leaf.detach().roll(1, dim if leaf.shape[dim] > 1 else -1)
        return turned * 0.75 if leaf.is_floating_point() else turned

    return _changed(inputs, axes, other)


def _changed(
    inputs: Any, axes: Sequence[int | None], change: Callable[[Any, int | None], Any]
) -> Any:
    """Pass each leaf of the inputs and its axis of rows through a function."""
    leaves, spec = flatten(as_call(inputs))
    return as_input(*unflatten(spec, map(change, leaves, axes)))


def _eager(
    module: nn.Module, params: Mapping[str, Tensor], buffers: dict[str, Tensor], x: Any, loss: Any
) -> tuple[Any, dict[str, Tensor]]:
    with torch.enable_grad():
        y = _call(module, {**params, **buffers}, x)
        return map_tensors(Tensor.detach, y), _gradients(_objective(y, loss), dict(params))


def _staged(
    split: Split, x: Any, state: Any, *, train: bool
) -> tuple[tuple[Any, dict[str, Tensor]], tuple[Any, ...]]:
    # One alias for each tensor. With two, the gradient of a tied parameter would be divided between
    # them.
    aliases: dict[int, Tensor] = {}

    def alias(leaf: Tensor) -> Tensor:
        return aliases.setdefault(id(leaf), leaf.detach().requires_grad_(leaf.requires_grad))

    trees = tuple({key: alias(leaf) for key, leaf in tree.items()} for tree in split.params)
    named = {
        name: trees[s][key]
        for name, home in split.homes.items()
        for kind, s, key in home.owners[:1]
        if kind == "params"
    }
    written = _copied(state)
    with torch.enable_grad(), seeded(x):
        outputs = apply(split.stages, trees, x, state=written, train=train)
        unique = {name: named[name] for name in first_names(named).values()}
        gradients = _gradients(_objective(outputs.y, split.loss), unique)
    writes = [
        name
        for old, new in zip(state, written, strict=True)
        for name in old or ()
        if not torch.equal(old[name].nan_to_num(), new[name].nan_to_num())
    ]
    if writes:
        raise PlanError(
            f"the forward writes into its buffers {writes} by an operation that does not declare "
            "the write; write the stage yourself"
        )
    after = tuple(
        part.commit(tree, (stats,)) if part.commit is not None and train else tree
        for part, tree, stats in zip(split.stages, state, outputs.stats, strict=True)
    )
    return (map_tensors(Tensor.detach, outputs.y), gradients), after


def _copied(state: Any) -> tuple[Any, ...]:
    return tuple(
        {name: tensor.clone() for name, tensor in tree.items()} if tree else tree for tree in state
    )


def _call_copy(model: nn.Module, x: Any) -> Any:
    """Call the model on copies of its tensors."""
    tensors = {name: tensor.detach().clone() for name, tensor in named_tensors(model).items()}
    return _call(shell(model), tensors, x)


def _call(module: nn.Module, tensors: dict[str, Tensor], x: Any) -> Any:
    args, kwargs = as_call(map_tensors(Tensor.clone, x))
    with seeded(x):
        return torch.func.functional_call(
            module, _by_attribute(module, tensors), args, kwargs, tie_weights=False
        )


def _by_attribute(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Map the name of each attribute that has a tensor to the tensor, each attribute once.

    If a module occurs twice, ``functional_call`` with both names of an attribute would restore a
    replaced tensor.
    """
    first = first_names(named_tensors(module, all_names=True))
    names = [
        f"{path}.{local}".lstrip(".")
        for path, layer in module.named_modules()
        for table in (layer.named_parameters, layer.named_buffers)
        for local, _ in table(recurse=False, remove_duplicate=False)
    ]
    return {name: tensors[first[name]] for name in names if first[name] in tensors}


@contextmanager
def seeded(x: Any) -> Generator[None]:
    """A context with the same random numbers each time, which restores torch's generators."""
    found = {
        leaf.device
        for leaf in flatten(x)[0]
        if isinstance(leaf, Tensor) and leaf.device.type == "cuda"
    }
    devices = sorted(found, key=str)
    with torch.random.fork_rng(devices=devices):
        # Not torch.manual_seed: it also seeds devices whose generators are not restored.
        torch.default_generator.manual_seed(0)
        for device in devices:
            torch.cuda.default_generators[device.index or 0].manual_seed(0)
        yield


def _objective(y: Any, loss: Callable[[Any, Any], Any] | None) -> Tensor | None:
    """The model's loss, or a sum that weighs each element of the output differently."""
    if loss is not None and not (isinstance(loss, ModelLoss) and loss.find(y) is None):
        return loss(y, None)
    total: Tensor | None = None
    for number, leaf in enumerate(flatten(y)[0]):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            weights = torch.linspace(
                0.5, 1.5 + number, max(1, leaf.numel()), dtype=leaf.dtype, device=leaf.device
            )
            part = (leaf * weights[: leaf.numel()].view(leaf.shape)).sum()
            total = part if total is None else total + part.to(total)
    return total


def _gradients(objective: Tensor | None, named: dict[str, Tensor]) -> dict[str, Tensor]:
    trained = {name: leaf for name, leaf in named.items() if leaf.requires_grad}
    if not trained or not isinstance(objective, Tensor) or not objective.requires_grad:
        return {}
    gradients: Any = torch.autograd.grad(objective, list(trained.values()), allow_unused=True)
    return {
        name: gradient
        for name, gradient in zip(trained, gradients, strict=True)
        if gradient is not None
    }


def _differences(rows: list[tuple[str, Any, Any]]) -> list[str]:
    """List the trees that differ by more than rounding.

    Rounding is relative to a tensor's largest number, or to 1e-3 of the largest of all tensors.
    """
    faults: list[str] = []
    pairs: list[tuple[str, Tensor, Tensor]] = []
    for label, expected, actual in rows:
        if expected is None or actual is None:  # no gradient, and a gradient of zeros
            present: Any = actual if expected is None else expected
            if present is not None and present.count_nonzero():
                faults.append(f"{label} is {'unexpected' if expected is None else 'missing'}")
            continue
        (expected_leaves, expected_spec), (leaves, spec) = flatten(expected), flatten(actual)
        if spec != expected_spec:
            faults.append(f"{label} is built as {spec}, the model's as {expected_spec}")
            continue
        for name, expected_leaf, leaf in zip(
            locations(expected, label), expected_leaves, leaves, strict=True
        ):
            if isinstance(expected_leaf, Tensor) and isinstance(leaf, Tensor):
                pair = expected_leaf, leaf
                # Few operations of torch take sparse tensors, such as gradients of embeddings.
                if expected_leaf.is_sparse or leaf.is_sparse:
                    pair = expected_leaf.to_dense(), leaf.to_dense()
                pairs.append((name, *pair))
            elif type(expected_leaf) is not type(leaf) or (
                isinstance(expected_leaf, (int, float, str, bool)) and expected_leaf != leaf
            ):
                faults.append(f"{name} is {_shown(leaf)}, the model's {_shown(expected_leaf)}")
    sizes = [_largest(expected_leaf) for _, expected_leaf, _ in pairs]
    least = 1e-3 * max(sizes, default=0.0)
    for (name, expected_leaf, leaf), size in zip(pairs, sizes, strict=True):
        tolerance = _TOLERANCE.get(expected_leaf.dtype.to_real(), 1e-3)
        fault = _difference(leaf, expected_leaf, tolerance * max(size, least) + 1e-30)
        faults += [f"{name} {fault}"] if fault else []
    return faults


def _difference(actual: Tensor, expected: Tensor, allowed: float) -> str:
    """How a tensor differs from the model's, by more than ``allowed``; "" if it does not."""
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        return (
            f"is {actual.dtype} {tuple(actual.shape)}, the model's {expected.dtype} "
            f"{tuple(expected.shape)}"
        )
    expected = expected.to(actual.device)
    equal = actual == expected
    if _is_floating(actual):
        equal |= (actual - expected).abs() <= allowed
        equal |= actual.isnan() & expected.isnan()
    if equal.all():
        return ""
    first = tuple((~equal).nonzero()[0].tolist())
    return (
        f"differs from the model's in {int((~equal).sum())} of {actual.numel()} numbers, first at "
        f"{first}: {actual[first].item()}, the model's {expected[first].item()}"
    )


def _largest(tensor: Tensor) -> float:
    """The largest finite magnitude of a floating tensor; 0 for other tensors."""
    if not (_is_floating(tensor) and tensor.numel()):
        return 0.0
    finite = tensor.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return float(torch.linalg.vector_norm(finite, float("inf")))


def _is_floating(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _shown(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
