"""Which layers of a Sequential make which stage, and on which device: what `Pipe` decides before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from funcpipe.core.errors import PlacementError, PlanError, bullets
from funcpipe.runtime.place import same_device

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
                f"too few devices to hold these stages (devices: {len(where)}, stages: {len(counts)}); name one for each, the same may stand many times: devices=['cpu'] * {len(counts)}, or balance={list(even(sizes, len(where)))}"
            )
        return Layout(counts, where[: len(counts)])
    if wanted is None:
        found = _runs(layers)
        if len(found) > 1:
            return Layout(tuple(count for count, _ in found), tuple(device for _, device in found))
        wanted = _all_there_are()
    counts = even(sizes, min(len(wanted), len(layers)))
    return Layout(counts, wanted[: len(counts)])


def even(sizes: Sequence[int], parts: int) -> tuple[int, ...]:
    """Counts of neighbours that make the largest sum as small as can be; each part has at least one.

    >>> even([1, 2, 3, 4, 5, 6], 2), even([5, 0, 5, 0], 2)
    ((4, 2), (2, 2))
    """
    costs = list(sizes) if any(sizes) else [1] * len(sizes)
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_filled(costs, middle, 1)) <= parts else (middle + 1, high)
    return tuple(_filled(costs, low, parts))


def _filled(costs: Sequence[int], capacity: int, parts: int) -> list[int]:
    """Parts filled one after the other up to a capacity; what is left is enough for ``parts`` parts."""
    counts: list[int] = []
    room = -1
    for number, cost in enumerate(costs):
        if cost > room or len(costs) - number < parts - len(counts) + 1:
            counts.append(0)
            room = capacity
        counts[-1] += 1
        room -= cost
    return counts


def _checked(balance: Any, sizes: Sequence[int]) -> tuple[int, ...]:
    """The balance as a tuple of counts. Raises PlanError."""
    total = len(sizes)
    try:
        counts = tuple(index(one) for one in cast("Iterable[Any]", balance))
    except TypeError:
        raise PlanError(
            f"balance is a sequence with the number of layers of each stage; got {balance!r}; e.g. balance={list(even(sizes, min(_LANES, total)))}"
        ) from None
    stages = min(max(len(counts), 1), total)
    mend = f"by bytes of parameters: balance={list(even(sizes, stages))}"
    if not counts:
        raise PlanError(f"balance has no stage; {mend}")
    if any(one <= 0 for one in counts):
        raise PlanError(
            f"all numbers of balance must be positive: every stage has a layer (balance: {list(counts)}); {mend}"
        )
    if sum(counts) != total:
        raise PlanError(
            f"module and sum of balance have different length (module: {total}, sum of balance: {sum(counts)}); {mend}"
        )
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
    if faults:
        raise PlacementError(bullets("these devices cannot hold the stages:", faults))
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
    if faults:
        raise PlacementError(
            bullets(
                "one layer runs on one device; name the devices (devices=[...]) and the layers are moved there:", faults
            )
        )
    return out


def _runs(layers: Sequence[tuple[str, nn.Module]]) -> list[tuple[int, torch.device]]:
    """Neighbours on one device; layers without tensors go with those before them (at the start: after)."""
    runs: list[tuple[int, torch.device]] = []
    waiting = 0
    for device in _layer_devices(layers):
        if device is None and not runs:
            waiting += 1
        elif device is None or (runs and same_device(runs[-1][1], device)):
            count, old = runs[-1]
            runs[-1] = (count + 1, old)
        else:
            runs.append((waiting + 1, device))
            waiting = 0
    return runs


def _where_they_are(layers: Sequence[tuple[str, nn.Module]], counts: Sequence[int]) -> tuple[torch.device, ...]:
    """The devices of stages that the caller cut but did not place. Raises PlacementError."""
    found = _layer_devices(layers)
    if len({device for device in found if device is not None}) <= 1:
        there = _all_there_are()
        return there if there[0].type == "cuda" else (there[0],) * len(counts)
    out: list[torch.device] = []
    faults: list[str] = []
    start = 0
    first = next(device for device in found if device is not None)
    for stage, count in enumerate(counts):
        own = list(dict.fromkeys(device for device in found[start : start + count] if device is not None))
        if len(own) > 1:
            faults.append(f"stage {stage} has layers on {' and '.join(map(str, own))}")
        out.append(own[0] if own else out[-1] if out else first)
        start += count
    if faults:
        raise PlacementError(
            bullets(
                "a stage runs on one device; give devices=[...], one for each stage, and the layers are moved there, or leave balance= out to cut where the device changes:",
                faults,
            )
        )
    return tuple(out)
