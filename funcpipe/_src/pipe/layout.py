"""Which layers of a Sequential make which stage, and on which device: what `Pipe` decides before
anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby, pairwise
from operator import index
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from funcpipe._src.core.errors import PlacementError, PlanError, raise_all
from funcpipe._src.models.balance import evenly

_LANES = 2
"""Stages on a machine without CUDA, where nothing else says how many: two lanes of the CPU compute
at the same time."""


class Layout(NamedTuple):
    """Stages as counts of layers.

    Attributes:
        balance: layers of each stage.
        devices: of each stage.
    """

    balance: tuple[int, ...]
    devices: tuple[torch.device, ...]


def lay_out(layers: Sequence[tuple[str, nn.Module]], balance: Any, devices: Any) -> Layout:
    """The stages of some layers, by what the caller gave and by where the layers are.

    Raises:
        PlanError: the balance does not fit the layers.
        PlacementError: devices are missing, not there, or too few; a layer lies on several.
    """
    held = _first_held(layers)
    sizes = [sum(tensor.nbytes for tensor in tensors if not is_lazy(tensor)) for tensors in held]
    if not layers:
        return Layout((), ())
    named = None if devices is None else _known(devices, balance, len(layers))
    if balance is not None:
        counts = _checked(balance, sizes)
        placed = _where_they_are(_layer_devices(layers, held), counts) if named is None else named
        if len(placed) < len(counts):
            raise PlacementError(
                f"too few devices to hold these stages (devices: {len(placed)}, stages: "
                f"{len(counts)}); name one for each, the same may stand many times: "
                f"devices=['cpu'] * {len(counts)}, or balance={evenly(sizes, len(placed))}"
            )
        return Layout(counts, placed[: len(counts)])
    if named is None:
        runs = [
            (device, len(list(run)))
            for device, run in groupby(_filled(_layer_devices(layers, held)))
        ]
        if len(runs) > 1:
            return Layout(tuple(count for _, count in runs), tuple(device for device, _ in runs))
        named = _all_there_are()
    counts = tuple(evenly(sizes, min(len(named), len(layers))))
    return Layout(counts, named[: len(counts)])


def _checked(balance: Any, sizes: Sequence[int]) -> tuple[int, ...]:
    """The balance as a tuple of counts. Raises PlanError."""
    total = len(sizes)
    try:
        counts = tuple(index(count) for count in cast("Iterable[Any]", balance))
    except TypeError:
        raise PlanError(
            f"balance is a sequence with the number of layers of each stage; got {balance!r}; "
            f"e.g. balance={evenly(sizes, min(_LANES, total))}"
        ) from None
    fault = ""
    if not counts:
        fault = "balance has no stage"
    elif min(counts) < 1:
        fault = (
            "all numbers of balance must be positive: every stage has a layer (balance: "
            f"{list(counts)})"
        )
    elif sum(counts) != total:
        fault = (
            f"module and sum of balance have different length (module: {total}, sum of balance: "
            f"{sum(counts)})"
        )
    if fault:
        even = evenly(sizes, min(max(len(counts), 1), total))
        raise PlanError(f"{fault}; by bytes of parameters: balance={even}")
    return counts


def _known(devices: Any, balance: Any, num_layers: int) -> tuple[torch.device, ...]:
    """The devices that the caller names; a single one is for every stage. Raises PlacementError."""
    single = isinstance(devices, (str, int, torch.device))
    if not single and not isinstance(devices, Iterable):
        raise PlacementError(
            f"devices is a sequence with a torch device for each stage; got {devices!r}"
        )
    named: list[Any] = [devices] if single else list(cast("Iterable[Any]", devices))
    faults: list[str] = [] if named else ["devices names none; give one for each stage"]
    out: list[torch.device] = []
    for place, name in enumerate(named):
        try:
            device = torch.device(name)
        except (RuntimeError, TypeError) as error:
            faults.append(f"device {place} is {name!r}: {str(error).splitlines()[0]}")
            continue
        visible = torch.cuda.device_count() if device.type == "cuda" else 0
        if device.type == "meta":
            faults.append(f"device {place} is the meta device, where nothing can be computed")
        elif device.type == "cuda" and (not visible or (device.index or 0) >= visible):
            faults.append(f"device {place} is {name}, but torch sees {visible} CUDA devices")
        elif str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        out.append(device)
    raise_all("these devices cannot hold the stages:", faults, PlacementError)
    if not single:
        return tuple(out)
    try:
        return tuple(out) * (min(_LANES, num_layers) if balance is None else len(balance))
    except TypeError:
        return tuple(out)  # the balance is refused next


def _all_there_are() -> tuple[torch.device, ...]:
    """Every CUDA device, or two lanes of the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return (
        tuple(torch.device("cuda", number) for number in range(count))
        or (torch.device("cpu"),) * _LANES
    )


def _first_held(layers: Sequence[tuple[str, nn.Module]]) -> list[list[Tensor]]:
    """The parameters and buffers of each layer that no layer before it holds."""
    seen: set[int] = set()
    out: list[list[Tensor]] = []
    for _, layer in layers:
        tensors = {id(tensor): tensor for tensor in (*layer.parameters(), *layer.buffers())}
        out.append([tensor for key, tensor in tensors.items() if key not in seen])
        seen.update(tensors)
    return out


def _layer_devices(
    layers: Sequence[tuple[str, nn.Module]], held: Sequence[Sequence[Tensor]]
) -> list[torch.device | None]:
    """The device of each layer; None for a layer without tensors of its own. Raises
    PlacementError."""
    out: list[torch.device | None] = []
    faults: list[str] = []
    for (name, _), tensors in zip(layers, held, strict=True):
        devices = list(dict.fromkeys(tensor.device for tensor in tensors))
        if len(devices) > 1:
            faults.append(f"layer {name!r} lies on {' and '.join(map(str, devices))}")
        if any(device.type == "meta" for device in devices):
            faults.append(
                f"layer {name!r} lies on the meta device and has no numbers; first "
                "module.to_empty(device=...)"
            )
        out.append(devices[0] if devices else None)
    raise_all(
        "one layer runs on one device; name the devices (devices=[...]) and the layers are moved "
        "there:",
        faults,
        PlacementError,
    )
    return out


def _filled(devices: Sequence[torch.device | None]) -> list[torch.device]:
    """Layers without tensors go with those before them, at the start with those after; [] where
    none has tensors."""
    last = next((device for device in devices if device is not None), None)
    filled: list[torch.device] = []
    for device in devices:
        last = last if device is None else device
        filled += [] if last is None else [last]
    return filled


def _where_they_are(
    devices: Sequence[torch.device | None], counts: Sequence[int]
) -> tuple[torch.device, ...]:
    """The devices of stages that the caller cut but did not place. Raises PlacementError."""
    filled = _filled(devices)
    if len(set(filled)) <= 1:
        available = _all_there_are()
        return available if available[0].type == "cuda" else (available[0],) * len(counts)
    placed: list[torch.device] = []
    faults: list[str] = []
    for stage, (start, end) in enumerate(pairwise([0, *accumulate(counts)])):
        stage_devices = list(dict.fromkeys(filter(None, devices[start:end]))) or [filled[start]]
        if len(stage_devices) > 1:
            faults.append(f"stage {stage} has layers on {' and '.join(map(str, stage_devices))}")
        placed.append(stage_devices[0])
    raise_all(
        "a stage runs on one device; give devices=[...], one for each stage, and the layers are "
        "moved there, or leave balance= out to cut where the device changes:",
        faults,
        PlacementError,
    )
    return tuple(placed)
