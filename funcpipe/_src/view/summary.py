"""The texts about a timeline that all pictures share: name, numbers, times and ticks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil, floor, log10
from typing import NamedTuple
from unicodedata import east_asian_width

from funcpipe._src.data.result import Span, Timeline, imbalance_of, percent
from funcpipe._src.data.schedule import Kind

_TIME_UNITS = (("s", 1.0), ("ms", 1e3), ("us", 1e6), ("ns", 1e9))
"""The units of measured times, and how many of them make a second."""


class TimeText(NamedTuple):
    """Writes times with one unit and one precision for the whole picture."""

    factor: float  # the factor from the timeline's unit to the shown unit
    unit: str  # the shown unit
    decimals: int  # the number of digits after the point

    def __call__(self, time: float) -> str:
        """Write a time with its unit.

        >>> TimeText(1e3, "ms", 2)(0.0125)
        '12.5 ms'
        """
        return f"{number_text(time * self.factor, self.decimals)} {self.unit}".rstrip()

    def fixed(self, time: float) -> str:
        """Write a time without its unit, with a fixed number of digits after the point."""
        return f"{time * self.factor:.{self.decimals}f}"

    def interval(self, start: float, end: float) -> str:
        """Write an interval, with one more digit."""
        first, last = (number_text(time * self.factor, self.decimals + 1) for time in (start, end))
        return f"{first} to {last} {self.unit}"


def number_text(number: float, decimals: int) -> str:
    """Write a number without trailing zeros, and without an exponent unless it is huge."""
    if abs(number) >= 1e7:
        return f"{number:.4g}"
    text = f"{number:.{decimals}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def time_text(timeline: Timeline) -> TimeText:
    """Choose a readable unit for a timeline, and decimals that give its makespan four digits."""
    return time_text_to(timeline.makespan, timeline.unit)


def time_text_to(end: float, unit: str) -> TimeText:
    """Choose a readable unit for times up to ``end``, and decimals that give it four digits."""
    unit, factor = clean(unit), 1.0
    if unit == "s" and end > 0:
        unit, factor = next(
            ((name, count) for name, count in _TIME_UNITS if end * count >= 1), _TIME_UNITS[-1]
        )
    magnitude = floor(log10(end * factor)) if end > 0 else 0
    return TimeText(factor, unit, min(9, max(0, 3 - magnitude)))


def ticks(timeline: Timeline, limit: int) -> tuple[tuple[float, str], ...]:
    """Return the ticks of the axis as (time, label): 0 and at most ``limit`` more, at round
    steps."""
    times = time_text(timeline)
    end = timeline.makespan * times.factor
    if end <= 0:
        return ((0.0, "0"),)
    shortest = end / max(1, limit)
    power = floor(log10(shortest))
    # With the slack, a step that equals the shortest step up to rounding is long enough.
    steps = (digit * 10.0 ** (power + up) for up in (0, 1) for digit in (1, 2, 5))
    step = next((step for step in steps if step >= shortest * (1 - 1e-9)), 10.0 ** (power + 2))
    decimals = max(0, -floor(log10(step) + 1e-9))
    count = floor(end / step + 1e-9)
    return tuple(
        (at * step / times.factor, number_text(at * step, decimals)) for at in range(count + 1)
    )


def origin(timeline: Timeline, axis: Timeline) -> str:
    """Say whether a timeline is simulated, and the unit of the axis: ``", simulated in units"``."""
    # Only `simulate` returns memory over time. Simulated timelines may be in seconds, to compare
    # with a run, so the unit alone does not decide.
    is_simulated = bool(timeline.memory) or timeline.unit == "units"
    return f", {'simulated' if is_simulated else 'measured'} in {clip(time_text(axis).unit, 10)}"


def numbers(timeline: Timeline, axis: Timeline) -> tuple[str, ...]:
    """Return the numbers of a caption, in the unit of the axis; the span only if it is not the
    makespan."""
    times = time_text(axis)
    makespan, span = times(timeline.makespan), times(timeline.span)
    imbalance = imbalance_of(timeline)
    return (
        f"makespan {makespan}",
        *([f"span {span}"] if span != makespan else []),
        f"bubble {percent(timeline.bubble)}",
        *([f"span bubble {percent(timeline.span_bubble)}"] if span != makespan else []),
        f"idle {percent(timeline.idle)}",
        *([imbalance] if imbalance else []),
    )


def side_columns(timeline: Timeline) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the columns on the right: busy and peak of each device; "" if not known."""
    makespan = timeline.makespan or 1.0
    busy = tuple(f"{time / makespan:.0%}" for time in timeline.busy)
    if len(timeline.peak) != timeline.num_devices:
        return busy, ("",) * timeline.num_devices
    return busy, tuple(map(amount_text, timeline.peak))


def amount_text(memory: float) -> str:
    """Write an amount of memory, without a unit."""
    return f"{memory:.3g}" if memory >= 1e6 else number_text(memory, 2 if memory < 10 else 1)


def kinds_in(*timelines: Timeline) -> tuple[Kind, ...]:
    """Return the kinds that occur, in the order of `Kind`."""
    present = {span.action.kind for timeline in timelines for span in timeline.spans}
    return tuple(kind for kind in Kind if kind in present)


def title(timeline: Timeline) -> str:
    """Return the title of a timeline's picture."""
    return clean(timeline.name) or "timeline"


def device_name(timeline: Timeline, device: int, word: str = "device") -> str:
    """Return the name of a device in pictures, with numbers padded to equal width."""
    if device < len(timeline.lanes):
        return clean(timeline.lanes[device])
    return f"{word} {device:>{len(str(timeline.num_devices - 1))}}"


def clean(text: str) -> str:
    """Return one line for terminals and XML: unprintable characters become blanks."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def size(text: str) -> int:
    """Return the columns that a text takes in a terminal: two for a wide letter."""
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def clip(text: str, width: int) -> str:
    """Return a text, cut if it needs more columns than ``width``."""
    return text if size(text) <= width else start_of(text, width - 1) + "…"


def start_of(text: str, width: int) -> str:
    """Return the longest start of a text that needs at most ``width`` columns."""
    while text and size(text) > width:
        text = text[:-1]
    return text


def fill(
    words: Iterable[str], room: float, gap: str, size: Callable[[str], int] = len
) -> list[str]:
    """Fill lines with words and gaps, on as few lines as possible. Words are not broken."""
    lines: list[str] = []
    for word in words:
        if lines and size(lines[-1] + gap + word) <= room:
            lines[-1] += gap + word
        else:
            lines.append(word)
    return lines


def length_quantile(spans: Iterable[Span], share: float) -> float:
    """Return the quantile of the durations above 0; 1 if there are none."""
    lengths = (span.end - span.start for span in spans)
    ordered = sorted(length for length in lengths if length > 0)
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else 1.0
