"""Choose the stages and devices of a `Pipe`: which layers make which stage, and where it runs.

`stages` makes the stages.
"""

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
"""The number of stages on a machine without CUDA, by default: two lanes of the CPU compute at
the same time."""


class Layout(NamedTuple):
    """The number of layers of each stage, and its device."""

    balance: tuple[int, ...]
    devices: tuple[torch.device, ...]


def lay_out(layers: Sequence[tuple[str, nn.Module]], balance: Any, devices: Any) -> Layout:
    """Choose the stages of some layers, from the caller's arguments and the layers' devices."""
    held = _own_tensors(layers)
    sizes = [sum(tensor.nbytes for tensor in tensors if not is_lazy(tensor)) for tensors in held]
    if not layers:
        return Layout((), ())
    named = None if devices is None else _named_devices(devices, balance, len(layers))
    if balance is not None:
        counts = _checked_balance(balance, sizes)
        placed = _stage_devices(_layer_devices(layers, held), counts) if named is None else named
        if len(placed) < len(counts):
            raise PlacementError(
                f"too few devices to hold these stages (devices: {len(placed)}, stages: "
                f"{len(counts)}); give a device for each stage; a device may appear several times: "
                f"devices=['cpu'] * {len(counts)}, or balance={evenly(sizes, len(placed))}"
            )
        return Layout(counts, placed[: len(counts)])
    if named is None:
        runs = groupby(_with_neighbours_devices(_layer_devices(layers, held)))
        found = [(len([*run]), device) for device, run in runs]
        if len(found) > 1:
            return Layout(*zip(*found, strict=True))
        named = _default_devices()
    counts = tuple(evenly(sizes, min(len(named), len(layers))))
    return Layout(counts, named[: len(counts)])


def _checked_balance(balance: Any, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the balance as a tuple of counts."""
    total = len(sizes)
    try:
        counts = tuple(index(count) for count in cast("Iterable[Any]", balance))
    except TypeError:
        raise PlanError(
            f"balance must be a sequence with the number of layers of each stage; got {balance!r}; "
            f"e.g. balance={evenly(sizes, min(_LANES, total))}"
        ) from None
    fault = ""
    if not counts:
        fault = "balance has no stage"
    elif min(counts) < 1:
        words = "all numbers of balance must be positive: every stage has a layer"
        fault = f"{words} (balance: {list(counts)})"
    elif sum(counts) != total:
        words = "module and sum of balance have different length"
        fault = f"{words} (module: {total}, sum of balance: {sum(counts)})"
    if fault:
        even = evenly(sizes, min(max(len(counts), 1), total))
        raise PlanError(f"{fault}; by bytes of parameters: balance={even}")
    return counts


def _named_devices(devices: Any, balance: Any, num_layers: int) -> tuple[torch.device, ...]:
    """Return the devices that the caller names. A single device is for all stages."""
    single = isinstance(devices, (str, int, torch.device))
    if not single and not isinstance(devices, Iterable):
        raise PlacementError(
            f"devices must be a sequence with a torch device for each stage; got {devices!r}"
        )
    named: list[Any] = [devices] if single else list(cast("Iterable[Any]", devices))
    faults: list[str] = [] if named else ["devices is empty; give a device for each stage"]
    out: list[torch.device] = []
    for place, name in enumerate(named):
        try:
            device = torch.device(name)
        except (RuntimeError, TypeError) as error:
            faults.append(f"device {place} is {name!r}: {str(error).splitlines()[0]}")
            continue
        visible = torch.cuda.device_count() if device.type == "cuda" else 0
        if device.type == "meta":
            faults.append(f"device {place} is the meta device, which cannot compute")
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
        return tuple(out)  # `_checked_balance` raises the error about the balance


def _default_devices() -> tuple[torch.device, ...]:
    """Every CUDA device, or two lanes of the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return (
        tuple(torch.device("cuda", number) for number in range(count))
        or (torch.device("cpu"),) * _LANES
    )


def _own_tensors(layers: Sequence[tuple[str, nn.Module]]) -> list[list[Tensor]]:
    """The parameters and buffers of each layer that no earlier layer has."""
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
    """The device of each layer; None for a layer without its own tensors."""
    out: list[torch.device | None] = []
    faults: list[str] = []
    for (name, _), tensors in zip(layers, held, strict=True):
        devices = list(dict.fromkeys(tensor.device for tensor in tensors))
        if len(devices) > 1:
            faults.append(f"layer {name!r} is on {' and '.join(map(str, devices))}")
        if any(device.type == "meta" for device in devices):
            faults.append(
                f"layer {name!r} is on the meta device and has no numbers; call "
                "module.to_empty(device=...) first"
            )
        out.append(devices[0] if devices else None)
    raise_all(
        "each layer must be on one device; give devices=[...], and the Pipe moves the layers "
        "there:",
        faults,
        PlacementError,
    )
    return out


def _with_neighbours_devices(devices: Sequence[torch.device | None]) -> list[torch.device]:
    """Give layers without tensors the device of a neighbour. [] if no layer has tensors."""
    last = next((device for device in devices if device is not None), None)
    filled: list[torch.device] = []
    for device in devices:
        last = last if device is None else device
        filled += [] if last is None else [last]
    return filled


def _stage_devices(
    devices: Sequence[torch.device | None], counts: Sequence[int]
) -> tuple[torch.device, ...]:
    """The devices of stages that the caller cut but did not place."""
    filled = _with_neighbours_devices(devices)
    if len(set(filled)) <= 1:
        available = _default_devices()
        return available if available[0].type == "cuda" else (available[0],) * len(counts)
    placed: list[torch.device] = []
    faults: list[str] = []
    for stage, (start, end) in enumerate(pairwise([0, *accumulate(counts)])):
        stage_devices = list(dict.fromkeys(filter(None, devices[start:end]))) or [filled[start]]
        if len(stage_devices) > 1:
            faults.append(f"stage {stage} has layers on {' and '.join(map(str, stage_devices))}")
        placed.append(stage_devices[0])
    raise_all(
        "each stage must be on one device; give devices=[...], one for each stage, and the Pipe "
        "moves the layers there, or leave balance= out to cut where the device changes:",
        faults,
        PlacementError,
    )
    return tuple(placed)
