"""When a lane's work begins and ends: by the host's clock, or by events on the streams of its
device.

What a lane queues on a device is done later, so there the host's clock would tell when it was
queued.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

from funcpipe._src.devices.stream import Place


class LaneClock:
    """Marks moments of one lane, which are numbers once the run is over."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._zero: Any = None
        self._began = 0

    def start(self) -> None:
        """Tell the device's time by the host's: waits for the device, once."""
        if self.place.asynchronous and self._zero is None:
            self._zero = self.mark()
            self._zero.synchronize()
            self._began = perf_counter_ns()

    def mark(self) -> Any:
        """This moment: all that the lane has queued so far is over, and nothing more."""
        if not self.place.asynchronous:
            return perf_counter_ns()
        event = self.place.module.Event(enable_timing=True)
        event.record(self.place.stream)
        return event

    def nanoseconds(self, mark: Any) -> int:
        """When that was, by `time.perf_counter_ns`; waits for it."""
        if not self.place.asynchronous:
            return mark
        mark.synchronize()
        return self._began + round(self._zero.elapsed_time(mark) * 1e6)
