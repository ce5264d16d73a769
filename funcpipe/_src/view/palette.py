"""The colours of actions, by kind (lighter for later stages) or by stage, and the legend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from funcpipe._src.data.kinds import KINDS, MOVES, Kind
from funcpipe._src.data.result import Span, Timeline
from funcpipe._src.view.summary import kinds_in

By = Literal["kind", "stage"]  # the meaning of colours

Colour = tuple[int, int, int]  # red, green, blue

_RAMP: tuple[Colour, ...] = (
    (112, 131, 243),
    (52, 154, 191),
    (91, 195, 140),
    (123, 203, 70),
    (235, 223, 62),
    (255, 255, 183),
)
"""The colours from the first stage to the last, light enough for dark letters."""
_FEW = 4  # the most shades of a kind in a legend, and half of the most stages


def kind_colour(kind: Kind, white: int = 0) -> Colour:
    """Return the colour of a kind, mixed with a percentage of white."""
    return _mixed(KINDS[kind].colour, (255, 255, 255), white / 100)


def stage_colour(stage: int, last: int) -> Colour:
    """Return the colour of a stage, by its place between the first stage and the last."""
    place = (len(_RAMP) - 1) * (stage / last if last else 0.0)
    below = min(int(place), len(_RAMP) - 2)
    return _mixed(_RAMP[below], _RAMP[below + 1], place - below)


def tint(rank: int, last: int) -> int:
    """Return the percentage of white for a device's stage with a rank; 0 for its first stage."""
    return round(min(62, 38 + 8 * (last - 1)) * rank / last) if last else 0


def colours_of(timeline: Timeline, by: By, last: int) -> dict[tuple[int, Kind, int], Colour]:
    """Return the colour of each action, by `colour_key`; ``last`` is the figure's last stage."""
    ranks = stage_ranks(timeline)
    last_rank = max(ranks.values(), default=0)
    return {
        (device, kind, stage): stage_colour(stage, last)
        if by == "stage" and kind not in MOVES
        else kind_colour(kind, tint(ranks[device, stage], last_rank))
        for device, kind, stage in set(map(colour_key, timeline.spans))
    }


def colour_key(span: Span) -> tuple[int, Kind, int]:
    """Return the facts that an action's colour depends on: device, kind, stage."""
    return span.device, span.action.kind, span.action.stage


def stage_ranks(timeline: Timeline) -> dict[tuple[int, int], int]:
    """Return, for each (device, stage), the number of earlier stages of the device."""
    pairs = sorted({(span.device, span.action.stage) for span in timeline.spans})
    first: dict[int, int] = {}
    return {
        (device, stage): at - first.setdefault(device, at)
        for at, (device, stage) in enumerate(pairs)
    }


def legend(
    timelines: Sequence[Timeline], by: By, last: int
) -> Iterable[tuple[tuple[Colour, ...], str]]:
    """Yield the swatches of each entry, and their meaning; ``last`` is the last stage in the
    figure."""
    tints, note = [0], ""
    if by == "stage":
        stages = sorted({round(last * at / (2 * _FEW - 1)) for at in range(2 * _FEW)})
        yield (
            tuple(stage_colour(stage, last) for stage in stages),
            f"stage 0 to {last}" if last else "stage 0",
        )
        note = "upper edge: kind"
    elif last_rank := max(
        (rank for timeline in timelines for rank in stage_ranks(timeline).values()), default=0
    ):
        few = min(last_rank, _FEW - 1)
        tints = sorted({tint(rank * last_rank // few, last_rank) for rank in range(few + 1)})
        note = "lighter: later stages"
    for kind in kinds_in(*timelines):
        yield tuple(kind_colour(kind, white) for white in tints), f"{kind.value} {KINDS[kind].word}"
    if note:
        yield (), note


def hexadecimal(colour: Colour) -> str:
    """Write a colour in the form that all SVG renderers read: ``"#5ac8fa"``."""
    return "#" + "".join(f"{part:02x}" for part in colour)


def _mixed(colour: Colour, other: Colour, share: float) -> Colour:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(colour, other, strict=True))
    return red, green, blue
