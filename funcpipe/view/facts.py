"""What every picture says of a timeline: its words, colours, numbers and ticks."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, floor, log10
from typing import NamedTuple, assert_never

from funcpipe.core.result import Timeline, imbalance_of, percent
from funcpipe.core.schedule import Kind

_TIMES = (("s", 1.0), ("ms", 1e3), ("us", 1e6), ("ns", 1e9))
"""Names of measured times, and how many of them make a second."""


class Look(NamedTuple):
    """How a kind is shown.

    Attributes:
        word: what it does.
        colour: red, green, blue: near those of Okabe and Ito, moved apart until everybody can tell any two of them
            apart, also without one of the three cones; all are light enough for dark letters.
        codes: the nearest of a terminal's 256 colours, then lighter ones for a device's further stages.
    """

    word: str
    colour: tuple[int, int, int]
    codes: tuple[int, ...]


def look(kind: Kind) -> Look:
    """How to show a kind."""
    match kind:
        case Kind.F:
            return Look("forward", (90, 200, 250), (75, 117, 153))
        case Kind.B:
            return Look("backward", (244, 172, 12), (214, 221, 229))
        case Kind.I:
            return Look("backward of input", (222, 112, 46), (208, 216, 223))
        case Kind.W:
            return Look("backward of weights", (40, 162, 108), (36, 79, 158))
        case Kind.R:
            return Look("remat", (178, 128, 172), (139, 182, 225))
        case Kind.O:
            return Look("offload", (176, 208, 196), (152, 188, 194))
        case Kind.L:
            return Look("load", (222, 210, 130), (186, 229, 230))
        case _:
            assert_never(kind)


MOVES = (Kind.O, Kind.L)
"""The kinds that run on a device's links to its host, one for each way, while the device works."""


class TimeText(NamedTuple):
    """How times are written: one unit and one precision for the whole picture.

    Attributes:
        factor: from the timeline's unit to the one shown.
        unit: the one shown.
        decimals: digits behind the point.
    """

    factor: float
    unit: str
    decimals: int

    def number(self, time: float, extra: int = 0) -> str:
        """A time without its unit, with some extra decimals."""
        return plain(time * self.factor, self.decimals + extra)

    def __call__(self, time: float) -> str:
        """A time with its unit.

        >>> TimeText(1e3, "ms", 2)(0.0125)
        '12.5 ms'
        """
        return f"{self.number(time)} {self.unit}".rstrip()


def plain(number: float, decimals: int) -> str:
    """A number without zeros at its end, and without an exponent unless it is huge."""
    if abs(number) >= 1e7:
        return f"{number:.4g}"
    text = f"{number:.{decimals}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def time_text(timeline: Timeline) -> TimeText:
    """The unit in which a timeline reads best, and the decimals that give its makespan four digits."""
    return time_text_to(timeline.makespan, timeline.unit)


def time_text_to(end: float, unit: str) -> TimeText:
    """The unit in which times up to ``end`` read best, and the decimals that give it four digits."""
    unit, factor = clean(unit), 1.0
    if unit == "s" and end > 0:
        unit, factor = next(((name, many) for name, many in _TIMES if end * many >= 1), _TIMES[-1])
    digits = floor(log10(end * factor)) if end > 0 else 0
    return TimeText(factor, unit, min(9, max(0, 3 - digits)))


def ticks(timeline: Timeline, most: int) -> tuple[tuple[float, str], ...]:
    """Times, in the timeline's unit, and their labels: 0 and up to ``most`` more, a round step apart."""
    shown = time_text(timeline)
    end = timeline.makespan * shown.factor
    if end <= 0:
        return ((0.0, "0"),)
    least = end / max(1, most)
    power = floor(log10(least))
    # The slack: a step that is as long as the least but for rounding is long enough.
    steps = (many * 10.0 ** (power + up) for up in (0, 1) for many in (1, 2, 5))
    step = next((step for step in steps if step >= least * (1 - 1e-9)), 10.0 ** (power + 2))
    decimals = max(0, -floor(log10(step) + 1e-9))
    count = floor(end / step + 1e-9)
    return tuple((at * step / shown.factor, plain(at * step, decimals)) for at in range(count + 1))


def facts(timeline: Timeline, axis: Timeline | None = None) -> tuple[str, ...]:
    """The numbers of the header, in the unit of the axis if another timeline gives it."""
    shown = time_text(axis or timeline)
    return (
        f"makespan {shown(timeline.makespan)}",
        f"span {shown(timeline.span)}",
        f"bubble {percent(timeline.bubble)}",
        f"span bubble {percent(timeline.span_bubble)}",
        f"idle {percent(timeline.idle)}",
        *((unequal,) if (unequal := imbalance_of(timeline)) else ()),
    )


def called(timeline: Timeline, device: int, word: str = "device", digits: int = 0) -> str:
    """The name of a device in pictures."""
    if device < len(timeline.lanes):
        return clean(timeline.lanes[device])
    return f"{word} {device:>{digits}}"


def sides(timeline: Timeline) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What stands right of the devices, as texts: how busy each is, and its peak (empty where it is not known)."""
    whole = timeline.makespan or 1.0
    busy = tuple(f"{one / whole:.0%}" for one in timeline.busy)
    peak = timeline.peak if len(timeline.peak) == timeline.num_devices else ()
    return busy, tuple(map(amount, peak))


def amount(memory: float) -> str:
    """Some memory, in no unit."""
    return f"{memory:.3g}" if memory >= 1e6 else plain(memory, 2 if memory < 10 else 1)


def kinds(timeline: Timeline) -> tuple[Kind, ...]:
    """The kinds that occur, in the order of `Kind`."""
    found = {span.action.kind for span in timeline.spans}
    return tuple(kind for kind in Kind if kind in found)


def ranks(timeline: Timeline) -> dict[tuple[int, int], int]:
    """For (device, stage): how many earlier stages the device has. Shades tell these apart."""
    pairs = sorted({(span.device, span.action.stage) for span in timeline.spans})
    count: dict[int, int] = {}
    out: dict[tuple[int, int], int] = {}
    for device, stage in pairs:
        out[device, stage] = count.get(device, 0)
        count[device] = out[device, stage] + 1
    return out


def title(timeline: Timeline) -> str:
    """What the picture is called."""
    return clean(timeline.name) or "timeline"


def clean(text: str) -> str:
    """One line that terminals and XML can hold: what cannot be printed becomes a blank."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def quantile(numbers: Iterable[float], share: float) -> float:
    """The number that this share of the positive ones does not exceed; 1 if there is none."""
    ordered = sorted(number for number in numbers if number > 0)
    return ordered[max(0, ceil(share * len(ordered)) - 1)] if ordered else 1.0
