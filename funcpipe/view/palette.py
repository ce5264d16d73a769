"""Colours: of kinds, lighter for a device's later stages, or of stages; and the legend that explains them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from funcpipe.core.kinds import KINDS, MOVES, Kind
from funcpipe.core.result import Span, Timeline
from funcpipe.view.summary import kinds_in

By = Literal["kind", "stage"]
"""What colours tell."""

Colour = tuple[int, int, int]
"""Red, green, blue."""

_RAMP: tuple[Colour, ...] = (
    (112, 131, 243),
    (52, 154, 191),
    (91, 195, 140),
    (123, 203, 70),
    (235, 223, 62),
    (255, 255, 183),
)
"""From the first stage to the last: darker to lighter, so that the order shows to all; all carry dark letters."""
_FEW = 4
"""Of many shades a legend shows so many; of stages twice as many."""


class Shade(NamedTuple):
    """A colour and its name in a style sheet, which says the colour: it means the same in every picture of a page."""

    name: str
    colour: Colour

    @property
    def rule(self) -> str:
        """Its rule in the style sheet."""
        return f".funcpipe .{self.name}{{fill:#{_hexadecimal(self.colour)}}}"


def kind_shade(kind: Kind, tint: int = 0) -> Shade:
    """The colour of a kind, with some percent of white."""
    return Shade(f"{kind.value}{tint}", _mixed(KINDS[kind].colour, (255, 255, 255), tint / 100))


def stage_shade(stage: int, last: int) -> Shade:
    """The colour of a stage: its place between the first and the last one."""
    place = (len(_RAMP) - 1) * (stage / last if last else 0.0)
    below = min(int(place), len(_RAMP) - 2)
    colour = _mixed(_RAMP[below], _RAMP[below + 1], place - below)
    return Shade(f"s{_hexadecimal(colour)}", colour)


def tint(rank: int, last: int) -> int:
    """How many percent of white a device's stage gets: none for its first."""
    return round(min(62, 38 + 8 * (last - 1)) * rank / last) if last else 0


def shades_of(timeline: Timeline, by: By, last: int) -> dict[tuple[int, Kind, int], Shade]:
    """The shade of every action, by its key; ``last`` is the last stage of all timelines in a picture."""
    ranks = stage_ranks(timeline)
    last_rank = max(ranks.values(), default=0)
    present = set(map(shade_key, timeline.spans))
    return {
        (device, kind, stage): stage_shade(stage, last)
        if by == "stage" and kind not in MOVES
        else kind_shade(kind, tint(ranks[device, stage], last_rank))
        for device, kind, stage in present
    }


def shade_key(span: Span) -> tuple[int, Kind, int]:
    """What a shade hangs on: device, kind, stage."""
    return span.device, span.action.kind, span.action.stage


def stage_ranks(timeline: Timeline) -> dict[tuple[int, int], int]:
    """For (device, stage): how many earlier stages the device has. Shades tell these apart."""
    pairs = sorted({(span.device, span.action.stage) for span in timeline.spans})
    first: dict[int, int] = {}
    return {(device, stage): at - first.setdefault(device, at) for at, (device, stage) in enumerate(pairs)}


def legend(timelines: Sequence[Timeline], by: By) -> Iterable[tuple[tuple[Shade, ...], str]]:
    """Swatches, and what they mean."""
    tints, note = [0], ""
    if by == "stage":
        last = max((span.action.stage for timeline in timelines for span in timeline.spans), default=0)
        stages = sorted({round(last * at / (2 * _FEW - 1)) for at in range(2 * _FEW)})
        yield tuple(stage_shade(stage, last) for stage in stages), f"stage 0 to {last}" if last else "stage 0"
        note = "upper edge: kind"
    elif last_rank := max((rank for timeline in timelines for rank in stage_ranks(timeline).values()), default=0):
        few = min(last_rank, _FEW - 1)
        tints = sorted({tint(rank * last_rank // few, last_rank) for rank in range(few + 1)})
        note = "lighter: later stages"
    for kind in kinds_in(*timelines):
        yield tuple(kind_shade(kind, white) for white in tints), f"{kind.value} {KINDS[kind].word}"
    if note:
        yield (), note


def _mixed(colour: Colour, other: Colour, share: float) -> Colour:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(colour, other, strict=True))
    return red, green, blue


def _hexadecimal(colour: Colour) -> str:
    return "".join(f"{part:02x}" for part in colour)
