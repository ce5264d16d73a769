"""Refuse modules that cannot be stages, because a copy would not compute what the module computes.

Stages compute with copies of their layers. So values must not be in memory that a buffer and a
parameter share, in objects that layers of several stages share, or in attributes from call to call.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from funcpipe._src.core.errors import PlanError, raise_all
from funcpipe._src.core.torch_names import TABLES, storage_number
from funcpipe._src.core.tree import flatten, locations
from funcpipe._src.models.attribute_uses import uses_of
from funcpipe._src.models.attributes import OPAQUE, Change, contents_of, place_inside
from funcpipe._src.models.norms.written_buffers import has_numbers

NOTHING_SHARED: Mapping[str, str] = {}  # the places of layers that share no objects


def unfit(module: nn.Module) -> list[str]:
    """List the reasons why a module cannot be a stage: it shares parameters, or is TorchScript."""
    library = sys.modules.get("torch.distributed.fsdp")
    names = ("FSDPModule", "FullyShardedDataParallel")
    kinds = (
        nn.parallel.DistributedDataParallel,
        *(getattr(library, name) for name in names if library is not None),
    )
    shared = [path for path, layer in module.named_modules() if isinstance(layer, kinds)]
    if shared:
        return [
            f"{repr(shared[0]) if shared[0] else 'it'} shares its parameters with other processes "
            "in its own forward (fully_shard, DistributedDataParallel), but a plan must share them "
            'in its own order; give the module without the wrapper, fp.ranks(plan, mesh, dp="dp") '
            "and fp.place(plan, params, ranks, shard=True)"
        ]
    outermost: dict[str, nn.Module] = {}
    for path, layer in module.named_modules():
        inside = any(not outer or path.startswith(f"{outer}.") for outer in outermost)
        if isinstance(layer, torch.jit.ScriptModule) and not inside:
            outermost[path] = layer
    return [
        f"{repr(path) if path else 'it'} is TorchScript (a {type(layer).__name__}), "
        "which cannot be copied as a Python module; give the module before torch.jit.script or "
        "torch.jit.trace"
        for path, layer in outermost.items()
    ]


def refuse_unfit(module: nn.Module, *, copies_buffers: bool = True) -> None:
    """Raise PlanError if a module cannot be a stage (`unfit`), parameters or buffers have no shape
    yet, or a buffer to copy shares memory with a parameter."""
    raise_all(f"this {type(module).__name__} cannot be a stage:", unfit(module))
    named = (*module.named_parameters(), *module.named_buffers())
    lazy = [name for name, tensor in named if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise PlanError(
            f"parameters {lazy} are not initialised yet; call the module once on an example first"
        )
    if copies_buffers:
        _refuse_shared_memory(module)


# -- memory and objects that others share
# -------------------------------------------------------------------------------


def _refuse_shared_memory(module: nn.Module) -> None:
    """Raise PlanError if a buffer shares memory with a parameter.

    ``register_buffer("w", linear.weight.detach())`` makes such a buffer. In the module, it changes
    with each step of an optimizer. The stage's state is a copy, which would keep the old numbers.
    """
    # By storage, because tensors that were read from one file may share a storage without an
    # overlap.
    places: dict[int, list[tuple[str, int, int]]] = {}
    for name, parameter in module.named_parameters():
        if bounds := _bounds(parameter):
            places.setdefault(bounds[0], []).append((name, *bounds[1:]))
    faults: list[str] = []
    for name, buffer in module.named_buffers():
        storage, start, end = _bounds(buffer) or (0, 0, 0)
        for parameter, first, last in places.get(storage, ()):
            if start < last and first < end:
                faults.append(
                    f"the buffer {name!r} shares memory with the parameter {parameter!r}, so it "
                    "changes with the parameter, but a stage has a copy of the buffer, which would "
                    f"keep the old numbers; compute the value from {parameter!r} in the forward, "
                    "or register a clone, which keeps its numbers"
                )
                break
    raise_all(f"this {type(module).__name__} cannot be a stage:", faults)


def _bounds(tensor: Tensor) -> tuple[int, int, int] | None:
    """Return the number of a tensor's storage, and its first byte and its end there, or None."""
    if (
        not has_numbers(tensor)
        or nn.parameter.is_lazy(tensor)
        or tensor.layout is not torch.strided
        or not tensor.numel()
    ):
        return None
    span = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    ends = start * tensor.itemsize, (start + span + 1) * tensor.itemsize
    return storage_number(tensor.untyped_storage()), *ends


def shared_places(own: Mapping[str, nn.Module], others: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the places of objects in some layers that other layers share, with the other layer.

    A layer that is in both arguments is compared with all others.
    """
    found: dict[int, dict[str, str]] = {}
    for path, layer in {**others, **own}.items():
        for place, value in _objects(layer, path):
            found.setdefault(id(value), {}).setdefault(path, place)
    places: dict[str, str] = {}
    for by_layer in found.values():
        for path in own.keys() & by_layer.keys():
            sharing = [other for other in by_layer if other in others and other != path]
            if sharing:
                places[by_layer[path]] = sharing[0]
    return places


def _objects(layer: nn.Module, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a layer's forward could write to, each once: the modules inside, and
    the objects and containers in their attributes, at any depth."""
    seen: set[int] = set()
    for root, module in layer.named_modules(prefix=path):
        yield root, module
        table = {key: value for key, value in vars(module).items() if key not in TABLES}
        todo = [(place_inside(root, key), value) for key, value in table.items()]
        while todo:
            place, value = todo.pop()
            kind = type(value)
            if (
                value is None
                or issubclass(kind, (*OPAQUE, Tensor, nn.Module))
                or kind.__module__.startswith(("torch.", "funcpipe."))
                or id(value) in seen
            ):
                continue
            seen.add(id(value))
            yield place, value
            todo += [(place_inside(place, key), each) for key, each in contents_of(value).items()]


@contextmanager
def refuse_left_activations(
    layers: Mapping[str, nn.Module], shared: Mapping[str, str], remedy: str = ""
) -> Generator[None]:
    """Return a context for a forward, which raises PlanError if it leaves values in shared objects.

    Only tensors with a graph count: tables and masks that a layer computes once are the same in
    every copy. ``shared`` is of `shared_places`, and ``remedy`` is added to the message.
    """
    objects = {
        place: value
        for path, layer in layers.items()
        for place, value in _objects(layer, path)
        if place in shared
    }
    before = {place: dict(_table(value)) for place, value in objects.items()}
    yield
    for place, value in objects.items():
        for key, new in _table(value).items():
            if new is not before[place].get(key) and any(map(_has_graph, flatten(new)[0])):
                raise PlanError(
                    f"a forward leaves an activation in {place_inside(place, key)!r}, an object that "
                    f"{shared[place]!r} shares, but layers have copies of the object, so "
                    f"{shared[place]!r} would read an old value. Pass the activation on: return "
                    f"it with the output, or stash it and pop it (fp.models.skippable){remedy}"
                )


def _table(value: Any) -> Mapping[Any, Any]:
    """Return the contents of an object; of a module, the attributes that its forward only reads."""
    if not isinstance(value, nn.Module):
        return contents_of(value)
    written = uses_of(type(value)).written
    return {
        key: each
        for key, each in vars(value).items()
        if key not in written and not key.startswith("_")
    }


def _has_graph(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and not leaf.is_leaf


# -- values that are kept from call to call
# -------------------------------------------------------------------------------


def refuse_kept(left: dict[str, Any], changes: Sequence[Change], who: str) -> None:
    """Raise PlanError for values that a run left on its copy and that the module would use in its
    next call.

    A run begins with the attributes that the module had. Masks and tables are the same in each run,
    so nothing is lost. Values computed from parameters or inputs differ between runs, and the
    module itself would continue with the old value. Integers pass, except counts that the forward
    increases and also uses. Attributes that the forward only writes pass.

    Args:
        left: the numbers that the earlier run left, by place. Updated with the numbers of this run.
        changes: the attributes that this run changed on its copy.
        who: the class of the module.
    """
    for change in changes:
        # Written before it is read: no old value reaches a later call.
        if change.name not in change.uses.kept:
            continue
        if (
            change.name in change.uses.used_counts
            and type(change.old) is int is type(change.new)
            and change.old != change.new
        ):
            raise PlanError(
                f"the forward of {who} counts its calls in {change.place!r} and also reads the "
                "count, but each run begins with the count at the time when the stage was made, so "
                "the stage would not compute what the module computes. Count in your training "
                "loop, and give each microbatch the number: an input, or a feed with "
                "fp.Replicate(number)"
            )
        leaves = zip(locations(change.new, change.place), flatten(change.new)[0], strict=True)
        for place, leaf in leaves:
            new = leaf.detach() if isinstance(leaf, Tensor) else leaf
            if not _is_number(new):
                continue
            if _differ(change.old, new) or _differ(left.get(place), new):
                raise PlanError(
                    f"the forward of {who} keeps {place!r} in an attribute from call to call, but "
                    "each run begins with the value at the time when the stage was made, so the "
                    "stage would not compute what the module computes. Compute the value before "
                    "the stage is made and register it as a buffer, or compute it in each call. If "
                    "batches change the value, it is a statistic: write a function stage that "
                    "returns it in Out(stats=...) and folds it in commit=..."
                )
            left[place] = new


def _is_number(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return has_numbers(leaf) and leaf.layout is torch.strided
    return isinstance(leaf, float)


def _differ(old: Any, new: Any) -> bool:
    """Return whether two values are different numbers of one kind and shape."""
    if isinstance(old, float) and isinstance(new, float):
        return old != new
    if not (isinstance(old, Tensor) and isinstance(new, Tensor)):
        return False
    alike = old.shape == new.shape and old.dtype == new.dtype and old.device == new.device
    return alike and not torch.equal(old, new)
