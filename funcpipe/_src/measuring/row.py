"""Convert the argument of `profile` and `memory` to a chain of layers, each a stage with
parameters and state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import nn

from funcpipe._src.core.errors import PlacementError, PlanError, Where, located, raise_all
from funcpipe._src.core.tree import Tree
from funcpipe._src.data.stage import Stage
from funcpipe._src.lower.skips import routes
from funcpipe._src.models.module import from_module
from funcpipe._src.models.sequential import cut_sequential, units_of
from funcpipe._src.models.split_model import Split
from funcpipe._src.stages.explain import described


class Layer(NamedTuple):
    """One layer or stage to measure."""

    stage: Stage  # the stage to call
    # `params`, `state`: its tensors, which are only read.
    params: Tree
    state: Tree
    name: str  # its name in tables and errors
    whole: bool  # True: a stage that runs as it is. False: a layer, of which stages will be made


def layers_of(
    layers: Any,
    params: Sequence[Tree] | None,
    state: Sequence[Tree] | None,
    feeds: Mapping[str, Tree] | None,
) -> tuple[Layer, ...]:
    """Convert a Sequential, a list of modules, a `Split`, or stages to layers.

    Raises:
        PlanError: ``layers`` is none of these, or numbers, skips or feeds do not fit.
    """
    if isinstance(layers, Split):
        row = _stages(
            layers.stages,
            layers.params if params is None else params,
            layers.state if state is None else state,
        )
    elif isinstance(layers, nn.Sequential):
        _refuse_numbers(params, state)
        names = [path for path, _ in units_of(layers)]
        row = tuple(
            Layer(*part, name, False)
            for part, name in zip(cut_sequential(layers, [1] * len(names)), names, strict=True)
        )
    elif isinstance(layers, nn.Module) or not isinstance(layers, Iterable):
        raise PlanError(
            "layers are an nn.Sequential, a list of modules, a split (fp.split(model, ...)), or "
            f"stages with params=; got a {type(layers).__name__}"
        )
    else:
        entries = tuple(cast("Iterable[Any]", layers))
        if entries and all(isinstance(module, nn.Module) for module in entries):
            _refuse_numbers(params, state)
            row = tuple(
                Layer(*from_module(module, name=str(i)), str(i), False)
                for i, module in enumerate(entries)
            )
        else:
            row = _stages(entries, params, state)
    routes([layer.stage for layer in row])
    faults = [
        f"{layer.name or number!r} takes the feed {name!r}; add feeds={{{name!r}: ...}}"
        for number, layer in enumerate(row)
        for name in layer.stage.feeds
        if name not in (feeds or {})
    ]
    raise_all("these layers cannot be called:", faults)
    return row


def _stages(entries: Sequence[Any], params: Any, state: Any) -> tuple[Layer, ...]:
    faults = [
        (
            f"entry {i} is a {type(entry).__name__}, not a stage; make a stage with fp.stage(fn) "
            "or fp.from_module(module)"
        )
        for i, entry in enumerate(entries)
        if not isinstance(entry, Stage)
    ]
    if not entries:
        faults.append("the list is empty")
    if params is None:
        faults.append(
            "params= is missing; give one tree per stage, () for a stage without parameters"
        )
    faults += [
        f"{option} has {len(trees)} trees for {len(entries)} stages"
        for option, trees in (("params", params), ("state", state))
        if trees is not None and len(trees) != len(entries)
    ]
    if state is None:
        faults += [
            f"stage {i} ({entry.name!r}) has state; add state="
            for i, entry in enumerate(entries)
            if isinstance(entry, Stage) and entry.state
        ]
    raise_all("these stages cannot be measured:", faults)
    assert params is not None
    rows = zip(entries, params, ((),) * len(entries) if state is None else state, strict=True)
    return tuple(
        Layer(stage, p, s, stage.name or str(number), True)
        for number, (stage, p, s) in enumerate(rows)
    )


def _refuse_numbers(params: Any, state: Any) -> None:
    if params is not None or state is not None:
        raise PlanError(
            "params= and state= are for stages, because modules have their own parameters"
        )


def refuse_counts(*counts: tuple[str, Any, int]) -> None:
    """Raise PlanError for the first (name, value, least) that is not an int, or is less than
    ``least``."""
    for name, value, least in counts:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise PlanError(f"{name} is an int from {least}; got {value!r}")


def known_device(device: Any) -> torch.device:
    """Return the device. Raises PlacementError if torch does not have it."""
    resolved = torch.device(device)
    if resolved.type == "meta" or not torch.get_device_module(resolved).is_available():
        raise PlacementError(
            f"device={device!r}: torch does not see this device, so its kernels cannot be "
            "measured; "
            "leave device= out to use the CPU"
        )
    return resolved


def blame(error: Exception, number: int, layer: Layer, phase: str, x: Tree) -> NoReturn:
    """Raise the error of a layer, with its name and a description of its input."""
    failure = located(error, Where(number, layer.name, None, phase, ""))
    failure.add_note(f"it got x: {described(x)}")
    raise failure
