"""Place the stages of a cost on devices of unequal speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from funcpipe._src.data.cost import Cost, per_stage
from funcpipe._src.data.cost_shares import one_each
from funcpipe._src.data.kinds import KINDS, Kind

_COMPUTING = {
    "forward": Kind.F,
    "backward_input": Kind.I,
    "backward_weight": Kind.W,
    "backward": Kind.B,
    "remat": Kind.R,
    "step": Kind.S,
}
"""The fields of `Cost` with times of computing, and the kind that takes each."""


def placed_cost(cost: Cost, device_of: Sequence[int], num_devices: int) -> Cost:
    """Return the cost of stages on the given devices: a cost without speeds.

    The part of an action that waits for a link keeps its time. Raises ScheduleError if the cost has
    speeds for another number of devices.

    >>> placed_cost(Cost([3, 3], speeds=[1, 2]), (0, 1), 2).forward
    (3.0, 1.5)
    """
    if not cost.speeds:
        return cost
    speeds = one_each("speeds", "devices", cost.speeds, num_devices)

    def times(kind: Kind) -> tuple[float, ...]:
        link = KINDS[kind].link
        waits = per_stage(getattr(cost, link) if link else 0.0, len(device_of))
        return tuple(
            (cost.of(kind, stage) - wait) / speeds[device] + wait
            for stage, (device, wait) in enumerate(zip(device_of, waits, strict=True))
        )

    rows = {name: times(kind) for name, kind in _COMPUTING.items()}
    return replace(cost, **rows, speeds=())
