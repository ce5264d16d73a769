"""Does a split compute what its model computes: outputs, gradients and buffers, on two different inputs."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe.core.errors import PlanError, bullets
from funcpipe.core.tree import flatten, locations, map_leaves, unflatten
from funcpipe.modules.export import shell
from funcpipe.modules.losses import ModelLoss
from funcpipe.modules.module import all_tensors, first_names
from funcpipe.modules.signature import Signature, as_call, as_input
from funcpipe.modules.split import Split
from funcpipe.modules.ties import innermost
from funcpipe.modules.traced import GraphFn, Norm
from funcpipe.runtime.apply import apply

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Relative to the largest number of a tensor: rounding differs, the mathematics must not."""


def verify(model: nn.Module, split: Split, inputs: Any, *, train: bool, once: bool = False) -> None:
    """Compare a split with the model as it is (``train``) or in evaluation mode; the model is untouched.

    Both run twice, the second time on other inputs, so that what a trace took for a constant shows (``once``: they do
    not). Then on one row, which export takes for no number of rows: where that differs, the stages refuse one row.

    Raises:
        PlanError: with every value that differs.
    """
    own = shell(model) if train else shell(model).eval()
    canonical = first_names(all_tensors(model))
    buffers = {name: one.detach().clone() for name, one in model.named_buffers() if canonical[name] == name}
    params = {name: one.detach().requires_grad_(one.requires_grad) for name, one in model.named_parameters()}
    state: Any = split.state
    for number, x in enumerate((inputs,) if once else (inputs, other_inputs(inputs, functions(split)[0].signature))):
        kept = {name: one.clone() for name, one in buffers.items()}
        try:
            wanted = _eager(own, params, buffers, x, split.loss)
        except Exception as error:
            if not number:
                raise PlanError(f"the model itself fails on the example: {type(error).__name__}: {error}") from error
            buffers, x = kept, inputs  # what we made of the example is no input of this model
            wanted = _eager(own, params, buffers, x, split.loss)
        found, state = _staged(split, x, state, train=train)
        faults = _faults(split, wanted, found, buffers, state, kept)
        if faults:
            which = (
                "the example"
                if not number
                else "inputs other than the example (the trace took something for a constant: a counter, a random number "
                "of Python, a number read from a tensor)"
            )
            raise PlanError(
                bullets(
                    f"the traced stages do not compute what the model computes, on {which}; cut without tracing "
                    "(split without example=), or write the stages yourself:",
                    faults[:12],
                )
            )
    if not once:
        _try_one_row(model, split, inputs, train=train)


def _try_one_row(model: nn.Module, split: Split, inputs: Any, *, train: bool) -> None:
    """Where the stages do not do with one row what the model does, they shall refuse it."""
    signature = functions(split)[0].signature
    leaves, spec = flatten(as_call(inputs))
    rows = [guard.rows for guard in signature.guards]
    if all(axis is None for axis in rows):
        return
    pairs = zip(leaves, rows, strict=True)
    single = as_input(*unflatten(spec, [leaf if axis is None else leaf.narrow(axis, 0, 1) for leaf, axis in pairs]))
    own = shell(model) if train else shell(model).eval()
    tensors = {name: one.detach().clone() for name, one in [*model.named_parameters(), *model.named_buffers()]}
    try:
        with torch.no_grad():
            wanted = _call(own, tensors, single)
    except Exception:
        return  # the model wants more rows, and says so itself
    try:
        with torch.no_grad(), _seeded(single):
            found = apply(split.stages, split.params, single, state=_copied(split.state), train=train).y
        differs = bool(_differences([("output", wanted, found)]))
    except Exception:
        differs = True
    if differs:
        several = replace(signature, guards=tuple(guard.several() for guard in signature.guards))
        for fn in functions(split):
            fn.signature = several


def verify_evaluation(model: nn.Module, split: Split, inputs: Any) -> None:
    """Do the traced stages compute what the model computes in evaluation mode as well; else they refuse it from now on."""
    for fn in functions(split):
        fn.evaluates = True
    try:
        verify(model, split, inputs, train=False, once=True)
    except Exception:
        for fn in functions(split):
            fn.evaluates = False


def functions(split: Split) -> list[GraphFn]:
    """The graphs of a traced split."""
    return [fn for fn in map(innermost, split.stages) if isinstance(fn, GraphFn)]


def try_once(model: nn.Module, inputs: Any) -> None:
    """Run the model on the example before anything is traced.

    What its code caches (tables, masks) is then made of numbers, not by the trace; and what no trace can hold is named.

    Raises:
        PlanError: the model fails on the example, or draws with generators that are not torch's.
    """
    others = [("random", random.getstate, random.setstate)]
    if "numpy" in sys.modules:
        numpy: Any = sys.modules["numpy"]
        others.append(("numpy.random", numpy.random.get_state, numpy.random.set_state))
    before = [get() for _, get, _ in others]
    tensors = {name: one.detach().clone() for name, one in [*model.named_parameters(), *model.named_buffers()]}
    drew: list[str] = []
    try:
        with torch.no_grad():
            _call(shell(model), tensors, inputs)
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(f"the model itself fails on the example: {type(error).__name__}: {error}") from error
    finally:
        for (name, get, put), old in zip(others, before, strict=True):
            if str(get()) != str(old):
                drew.append(name)
                put(old)
    if drew:
        raise PlanError(
            f"the forward draws with {' and '.join(drew)}, which a trace would take for a constant; draw with torch"
        )


def _faults(
    split: Split, wanted: Any, found: Any, buffers: Mapping[str, Tensor], state: Any, kept: Mapping[str, Tensor]
) -> list[str]:
    """What differs: outputs, gradients, buffers."""
    faults = _differences([("output", wanted[0], found[0])])
    names = {**wanted[1], **found[1]}
    faults += _differences([(f"gradient of {name}", wanted[1].get(name), found[1].get(name)) for name in names])
    norms = Counter(one.running for fn in functions(split) for one in fn.module.modules() if isinstance(one, Norm))
    # A batch norm that runs twice is updated once, by all that it saw.
    twice = {name for running, count in norms.items() if count > 1 for name in running}
    for name, value in buffers.items():
        held = [tree[name] for tree in state if tree and name in tree] or [kept[name]]
        if name not in twice:
            faults += [fault for one in held for fault in _differences([(f"buffer {name}", value, one)])]
    return faults


def other_inputs(inputs: Any, signature: Signature) -> Any:
    """Inputs of the same kind with other numbers: rows turned by one, floating numbers scaled."""

    def one(leaf: Any, axis: int | None) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            return leaf.detach() if isinstance(leaf, Tensor) else leaf
        along = axis or 0
        turned = leaf.detach().roll(1, along if leaf.shape[along] > 1 else -1)
        return turned * 0.75 if leaf.is_floating_point() else turned

    leaves, spec = flatten(as_call(inputs))
    made = [one(leaf, guard.rows) for leaf, guard in zip(leaves, signature.guards, strict=True)]
    return as_input(*unflatten(spec, made))


def _eager(
    own: nn.Module, params: Mapping[str, Tensor], buffers: dict[str, Tensor], x: Any, loss: Any
) -> tuple[Any, dict[str, Tensor]]:
    with torch.enable_grad():
        y = _call(own, {**params, **buffers}, x)
        return map_leaves(_plain, y), _gradients(_objective(y, loss), dict(params))


def _staged(split: Split, x: Any, state: Any, *, train: bool) -> tuple[tuple[Any, dict[str, Tensor]], tuple[Any, ...]]:
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
    given = _copied(state)
    with torch.enable_grad(), _seeded(x):
        out = apply(split.stages, trees, x, state=given, train=train)
        first: dict[int, str] = {}
        unique = {name: leaf for name, leaf in named.items() if first.setdefault(id(leaf), name) == name}
        gradients = _gradients(_objective(out.y, split.loss), unique)
    writes = [
        name
        for old, new in zip(state, given, strict=True)
        for name in old or ()
        if not torch.equal(old[name].nan_to_num(), new[name].nan_to_num())
    ]
    if writes:
        raise PlanError(
            f"the forward writes into its buffers {writes} by an operation that does not say so; cut without tracing "
            "(split without example=), or write the stage yourself"
        )
    after = tuple(
        part.commit(own, (stats,)) if part.commit is not None and train else own
        for part, own, stats in zip(split.stages, state, out.stats, strict=True)
    )
    return (map_leaves(_plain, out.y), gradients), after


def _copied(state: Any) -> tuple[Any, ...]:
    return tuple({name: one.clone() for name, one in tree.items()} if tree else tree for tree in state)


def _call(own: nn.Module, tensors: dict[str, Tensor], x: Any) -> Any:
    args, kwargs = as_call(map_leaves(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, x))
    with _seeded(x):
        return torch.func.functional_call(own, tensors, args, kwargs)


class _seeded:
    """The same random numbers each time, and torch's generators as they were afterwards."""

    def __init__(self, x: Any) -> None:
        found = {leaf.device for leaf in flatten(x)[0] if isinstance(leaf, Tensor) and leaf.device.type == "cuda"}
        self.devices = sorted(found, key=str)
        self.fork = torch.random.fork_rng(devices=self.devices)

    def __enter__(self) -> None:
        self.fork.__enter__()
        # Not torch.manual_seed: it seeds every device there is, and forgets none.
        torch.default_generator.manual_seed(0)
        for device in self.devices:
            torch.cuda.default_generators[device.index or 0].manual_seed(0)

    def __exit__(self, *error: Any) -> None:
        self.fork.__exit__(*error)


def _objective(y: Any, loss: Callable[[Any, Any], Any] | None) -> Tensor | None:
    """The model's loss, or a sum that weighs every number of the output differently."""
    if loss is not None and not (isinstance(loss, ModelLoss) and loss.find(y) is None):
        return loss(y, None)
    total: Tensor | None = None
    for number, leaf in enumerate(flatten(y)[0]):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf = torch.view_as_real(leaf) if leaf.is_complex() else leaf
            weights = torch.linspace(0.5, 1.5 + number, max(1, leaf.numel()), dtype=leaf.dtype, device=leaf.device)
            part = (leaf * weights[: leaf.numel()].view(leaf.shape)).sum()
            total = part if total is None else total + part.to(total)
    return total


def _gradients(objective: Tensor | None, named: dict[str, Tensor]) -> dict[str, Tensor]:
    wanted = {name: leaf for name, leaf in named.items() if leaf.requires_grad}
    if not wanted or not isinstance(objective, Tensor) or not objective.requires_grad:
        return {}
    found: Any = torch.autograd.grad(objective, list(wanted.values()), allow_unused=True)
    return {name: one for name, one in zip(wanted, found, strict=True) if one is not None}


def _plain(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _differences(rows: list[tuple[str, Any, Any]]) -> list[str]:
    """Where trees differ by more than rounding: relative to a tensor's largest number, or 1e-3 of the largest of all."""
    faults: list[str] = []
    pairs: list[tuple[str, Tensor, Tensor]] = []
    for what, wanted, came in rows:
        if wanted is None or came is None:  # no gradient, and a gradient of zeros
            only: Any = came if wanted is None else wanted
            if only is not None and only.count_nonzero():
                faults.append(f"{what} is {'there' if wanted is None else 'missing'}")
            continue
        (wanted_leaves, wanted_spec), (leaves, spec) = flatten(wanted), flatten(came)
        if spec != wanted_spec:
            faults.append(f"{what} is built as {spec}, the model's as {wanted_spec}")
            continue
        for name, right, leaf in zip(locations(wanted, what), wanted_leaves, leaves, strict=True):
            if isinstance(right, Tensor) and isinstance(leaf, Tensor):
                pairs.append((name, right, leaf))
            elif type(right) is not type(leaf) or (isinstance(right, (int, float, str, bool)) and right != leaf):
                faults.append(f"{name} is {_shown(leaf)}, the model's {_shown(right)}")
    sizes = [_largest(right) for _, right, _ in pairs]
    least = 1e-3 * max(sizes, default=0.0)
    for (name, right, leaf), size in zip(pairs, sizes, strict=True):
        exact = not (right.is_floating_point() or right.is_complex())
        allowed = 0.0 if exact else _TOLERANCE.get(right.dtype.to_real(), 1e-3) * max(size, least) + 1e-30
        try:
            torch.testing.assert_close(leaf, right, rtol=0.0, atol=allowed, equal_nan=True, check_device=False)
        except AssertionError as error:
            faults.append(f"{name} differs from the model's: {' '.join(str(error).split())}")
    return faults


def _largest(tensor: Tensor) -> float:
    """The largest finite number of a tensor that is rounded."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    finite = tensor[tensor.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _shown(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
