"""The legend of a picture: which colour means what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from funcpipe.core.result import Timeline
from funcpipe.core.schedule import Kind
from funcpipe.view import facts
from funcpipe.view.palette import By, Shade, kind_shade, stage_shade, tint

_FEW = 4
"""Of many shades these show the idea; of stages twice as many."""


class Item(NamedTuple):
    """One entry.

    Attributes:
        x: of its left edge.
        shades: its swatches.
        word: what they mean.
    """

    x: float
    shades: tuple[Shade, ...]
    word: str


def legend(timelines: Sequence[Timeline], by: By, left: float, right: float, letter: float) -> list[list[Item]]:
    """Lines of entries that fit between left and right."""
    lines: list[list[Item]] = [[]]
    x = left
    for shades, word in _entries(timelines, by):
        wide = 12 * len(shades) + (6 if shades else 0) + letter * len(word)
        if lines[-1] and x + wide > right:
            lines.append([])
            x = left
        lines[-1].append(Item(x, shades, word))
        x += wide + 18
    return lines


def _entries(timelines: Sequence[Timeline], by: By) -> Iterable[tuple[tuple[Shade, ...], str]]:
    found = {kind for timeline in timelines for kind in facts.kinds(timeline)}
    kinds = [kind for kind in Kind if kind in found]
    most = max((rank for timeline in timelines for rank in facts.ranks(timeline).values()), default=0)
    if by == "stage":
        last = max((span.action.stage for timeline in timelines for span in timeline.spans), default=0)
        stages = sorted({round(last * at / (2 * _FEW - 1)) for at in range(2 * _FEW)})
        yield tuple(stage_shade(stage, last) for stage in stages), f"stage 0 to {last}" if last else "stage 0"
        for kind in kinds:
            yield (kind_shade(kind),), f"{kind.value} {facts.look(kind).word}"
        yield (), "upper edge: kind"
        return
    few = min(most, _FEW - 1)
    tints = sorted({tint(rank * most // few, most) for rank in range(few + 1)}) if most else [0]
    for kind in kinds:
        yield tuple(kind_shade(kind, one) for one in tints), f"{kind.value} {facts.look(kind).word}"
    if most:
        yield (), "lighter: later stages"
