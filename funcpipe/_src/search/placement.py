"""Placements of stages on devices: lines, loops, Vs, and given devices."""

from __future__ import annotations

from collections.abc import Sequence

from funcpipe._src.core.errors import ScheduleError
from funcpipe._src.schedules.counts import blocks

SHAPES = ("line", "loop", "v")


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
    if shape == "v" and num_stages == 2 * num_devices:
        return (*range(num_devices), *reversed(range(num_devices)))
    if shape == "loop" and num_stages % num_devices == 0:
        return tuple(stage % num_devices for stage in range(num_stages))
    if shape == "line" and num_stages >= num_devices:
        return tuple(
            device for device, block in enumerate(blocks(num_stages, num_devices)) for _ in block
        )
    needs = {
        "v": "twice as many stages as devices",
        "loop": "a multiple of the devices",
        "line": "a stage for each device",
    }
    if shape not in needs:
        raise ScheduleError(
            f"placement is {', '.join(map(repr, SHAPES))}, or the device of each stage; got "
            f"{shape!r}"
        )
    raise ScheduleError(
        f"placement {shape!r} takes {needs[shape]}; got {num_stages} stages on {num_devices} "
        "devices"
    )


def shapes_for(num_stages: int, num_devices: int) -> list[str]:
    """Return the shapes that the counts allow, without shapes that give equal placements."""
    if num_stages == num_devices:
        return ["line"]
    shapes = ["v"] if num_stages == 2 * num_devices else []
    return [*shapes, *(["loop"] if num_stages % num_devices == 0 else []), "line"]
