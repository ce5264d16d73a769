"""Which layers of a Sequential make which stage, and on which device: what `Pipe` decides before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby, pairwise
from operator import index
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from funcpipe.core.errors import PlacementError, PlanError, raise_all
from funcpipe.modules.balance import evenly

_LANES = 2
"""Stages on a machine without CUDA, where nothing else says how many: two lanes of the CPU compute at the same time."""


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
    sizes = [_bytes(own) for own in _first_held(layers)]
    if not layers:
        return Layout((), ())
    wanted = None if devices is None else _known(devices, balance, len(layers))
    if balance is not None:
        counts = _checked(balance, sizes)
        where = _where_they_are(layers, counts) if wanted is None else wanted
        if len(where) < len(counts):
            raise PlacementError(
                f"too few devices to hold these stages (devices: {len(where)}, stages: {len(counts)}); name one for "
                f"each, the same may stand many times: devices=['cpu'] * {len(counts)}, or "
                f"balance={evenly(sizes, len(where))}"
            )
        return Layout(counts, where[: len(counts)])
    if wanted is None:
        found = _runs(layers)
        if len(found) > 1:
            return Layout(tuple(count for count, _ in found), tuple(device for _, device in found))
        wanted = _all_there_are()
    counts = tuple(evenly(sizes, min(len(wanted), len(layers))))
    return Layout(counts, wanted[: len(counts)])


def _checked(balance: Any, sizes: Sequence[int]) -> tuple[int, ...]:
    """The balance as a tuple of counts. Raises PlanError."""
    total = len(sizes)
    try:
        counts = tuple(index(one) for one in cast("Iterable[Any]", balance))
    except TypeError:
        raise PlanError(
            f"balance is a sequence with the number of layers of each stage; got {balance!r}; e.g. "
            f"balance={evenly(sizes, min(_LANES, total))}"
        ) from None
    fault = ""
    if not counts:
        fault = "balance has no stage"
    elif min(counts) < 1:
        fault = f"all numbers of balance must be positive: every stage has a layer (balance: {list(counts)})"
    elif sum(counts) != total:
        fault = f"module and sum of balance have different length (module: {total}, sum of balance: {sum(counts)})"
    if fault:
        even = evenly(sizes, min(max(len(counts), 1), total))
        raise PlanError(f"{fault}; by bytes of parameters: balance={even}")
    return counts


def _known(devices: Any, balance: Any, num_layers: int) -> tuple[torch.device, ...]:
    """The devices that the caller names; one alone is for every stage. Raises PlacementError."""
    alone = isinstance(devices, (str, int, torch.device))
    if not alone and not isinstance(devices, Iterable):
        raise PlacementError(f"devices is a sequence with a torch device for each stage; got {devices!r}")
    named: list[Any] = [devices] if alone else list(cast("Iterable[Any]", devices))
    faults: list[str] = [] if named else ["devices names none; give one for each stage"]
    out: list[torch.device] = []
    for place, name in enumerate(named):
        try:
            device = torch.device(name)
        except (RuntimeError, TypeError) as error:
            faults.append(f"device {place} is {name!r}: {str(error).splitlines()[0]}")
            continue
        seen = torch.cuda.device_count() if device.type == "cuda" else 0
        if device.type == "meta":
            faults.append(f"device {place} is the meta device, where nothing can be computed")
        elif device.type == "cuda" and (not seen or (device.index or 0) >= seen):
            faults.append(f"device {place} is {name}, but torch sees {seen} CUDA devices")
        elif str(device) == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        out.append(device)
    raise_all("these devices cannot hold the stages:", faults, PlacementError)
    if not alone:
        return tuple(out)
    try:
        return tuple(out) * (min(_LANES, num_layers) if balance is None else len(balance))
    except TypeError:
        return tuple(out)  # the balance is refused next


def _all_there_are() -> tuple[torch.device, ...]:
    """Every CUDA device, or two lanes of the CPU."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(torch.device("cuda", number) for number in range(count)) or (torch.device("cpu"),) * _LANES


def _first_held(layers: Sequence[tuple[str, nn.Module]]) -> list[list[Tensor]]:
    """The parameters and buffers of each layer that no layer before it holds."""
    seen: set[int] = set()
    out: list[list[Tensor]] = []
    for _, layer in layers:
        own: list[Tensor] = []
        for tensor in (*layer.parameters(), *layer.buffers()):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                own.append(tensor)
        out.append(own)
    return out


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors if not is_lazy(tensor))


def _layer_devices(layers: Sequence[tuple[str, nn.Module]]) -> list[torch.device | None]:
    """Where each layer is; None for one without tensors of its own. Raises PlacementError."""
    out: list[torch.device | None] = []
    faults: list[str] = []
    for (name, _), own in zip(layers, _first_held(layers), strict=True):
        found = list(dict.fromkeys(tensor.device for tensor in own))
        if len(found) > 1:
            faults.append(f"layer {name!r} lies on {' and '.join(map(str, found))}")
        if any(device.type == "meta" for device in found):
            faults.append(
                f"layer {name!r} lies on the meta device and has no numbers; first module.to_empty(device=...)"
            )
        out.append(found[0] if found else None)
    raise_all(
        "one layer runs on one device; name the devices (devices=[...]) and the layers are moved there:",
        faults,
        PlacementError,
    )
    return out


def _filled(devices: Sequence[torch.device | None]) -> list[torch.device]:
    """Layers without tensors go with those before them, at the start with those after; [] where there are no tensors."""
    last = next((device for device in devices if device is not None), None)
    filled: list[torch.device] = []
    for device in devices:
        last = last if device is None else device
        filled += [] if last is None else [last]
    return filled


def _runs(layers: Sequence[tuple[str, nn.Module]]) -> list[tuple[int, torch.device]]:
    """Neighbours on one device."""
    return [(len(list(run)), device) for device, run in groupby(_filled(_layer_devices(layers)))]


def _where_they_are(layers: Sequence[tuple[str, nn.Module]], counts: Sequence[int]) -> tuple[torch.device, ...]:
    """The devices of stages that the caller cut but did not place. Raises PlacementError."""
    devices = _layer_devices(layers)
    filled = _filled(devices)
    if len(set(filled)) <= 1:
        there = _all_there_are()
        return there if there[0].type == "cuda" else (there[0],) * len(counts)
    placed: list[torch.device] = []
    faults: list[str] = []
    for stage, (start, end) in enumerate(pairwise([0, *accumulate(counts)])):
        own = list(dict.fromkeys(device for device in devices[start:end] if device is not None)) or [filled[start]]
        if len(own) > 1:
            faults.append(f"stage {stage} has layers on {' and '.join(map(str, own))}")
        placed.append(own[0])
    raise_all(
        "a stage runs on one device; give devices=[...], one for each stage, and the layers are moved there, or leave "
        "balance= out to cut where the device changes:",
        faults,
        PlacementError,
    )
    return tuple(placed)
