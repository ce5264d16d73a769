"""Measure when a lane's work begins and ends: with the host's clock on the CPU, else with events.

On a device with streams, the host's clock would measure when work is queued, not when it runs.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

from funcpipe._src.devices.stream import Place


class LaneClock:
    """Marks moments of one lane. `nanoseconds` converts marks to times after the run."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._zero: Any = None
        self._began = 0

    def start(self) -> None:
        """Align the device's clock with the host's. Waits for the device, once."""
        if self.place.asynchronous and self._zero is None:
            self._zero = self.mark()
            self._zero.synchronize()
            self._began = perf_counter_ns()

    def mark(self) -> Any:
        """Mark the moment at which all work that the lane has queued so far is done."""
        if not self.place.asynchronous:
            return perf_counter_ns()
        event = self.place.module.Event(enable_timing=True)
        event.record(self.place.stream)
        return event

    def nanoseconds(self, mark: Any) -> int:
        """Return the time of a mark, comparable with `time.perf_counter_ns`. Waits for the mark."""
        if not self.place.asynchronous:
            return mark
        mark.synchronize()
        return self._began + round(self._zero.elapsed_time(mark) * 1e6)
