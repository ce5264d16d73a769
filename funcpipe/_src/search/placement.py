"""Placements of stages on devices: lines, loops, Vs, and given devices."""

from __future__ import annotations

from collections.abc import Sequence

from funcpipe._src.core.errors import ScheduleError
from funcpipe._src.schedules.counts import blocks


def placed(shape: str | Sequence[int], num_stages: int, num_devices: int) -> tuple[int, ...]:
    """Return the device of each stage for `search`'s ``placement=``. Raises ScheduleError."""
    if not isinstance(shape, str):
        device_of = tuple(shape)
        numbers = all(type(device) is int for device in device_of)
        if (
            not numbers
            or len(device_of) != num_stages
            or sorted(set(device_of)) != list(range(num_devices))
        ):
            raise ScheduleError(
                f"placement= names the device of each of {num_stages} stages, and uses all devices "
                f"from 0 to {num_devices - 1}; got {device_of!r}"
            )
        return device_of
    needs = _needs(num_stages, num_devices)
    if shape not in needs:
        raise ScheduleError(
            f"placement is 'line', 'loop', 'v', or the device of each stage; got {shape!r}"
        )
    fits, need = needs[shape]
    if not fits:
        raise ScheduleError(
            f"placement {shape!r} takes {need}; got {num_stages} stages on {num_devices} devices"
        )
    if shape == "v":
        return (*range(num_devices), *reversed(range(num_devices)))
    if shape == "loop":
        return tuple(stage % num_devices for stage in range(num_stages))
    lines = enumerate(blocks(num_stages, num_devices))
    return tuple(device for device, block in lines for _ in block)


def shapes_for(num_stages: int, num_devices: int) -> list[str]:
    """Return the shapes that the counts allow, without shapes that give equal placements."""
    if num_stages == num_devices:
        return ["line"]
    return [shape for shape, (fits, _) in _needs(num_stages, num_devices).items() if fits]


def _needs(num_stages: int, num_devices: int) -> dict[str, tuple[bool, str]]:
    """Return, for each shape, whether the counts allow it, and the counts that it takes."""
    return {
        "v": (num_stages == 2 * num_devices, "twice as many stages as devices"),
        "loop": (num_stages % num_devices == 0, "a multiple of the devices"),
        "line": (num_stages >= num_devices, "a stage for each device"),
    }
