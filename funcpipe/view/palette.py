"""The colours of actions: by kind, lighter for a device's later stages, or by stage."""

from __future__ import annotations

from typing import Literal, NamedTuple

from funcpipe.core.result import Span, Timeline
from funcpipe.core.schedule import Action, Kind
from funcpipe.view import facts

By = Literal["kind", "stage"]
"""What colours tell."""

Colour = tuple[int, int, int]

_RAMP: tuple[Colour, ...] = (
    (112, 131, 243),
    (52, 154, 191),
    (91, 195, 140),
    (123, 203, 70),
    (235, 223, 62),
    (255, 255, 183),
)
"""From the first stage to the last: darker to lighter, so that the order shows to all; all carry dark letters."""


class Shade(NamedTuple):
    """A colour and its name in a picture's style.

    Attributes:
        name: says the colour, so it means the same in every picture of a page.
        colour: red, green, blue.
    """

    name: str
    colour: Colour

    @property
    def hex(self) -> str:
        """The colour as CSS writes it."""
        return "#" + "".join(f"{part:02x}" for part in self.colour)

    @property
    def rule(self) -> str:
        """The rule of the style."""
        return f".funcpipe .{self.name}{{fill:{self.hex}}}"


class Palette:
    """The shade of every action of a timeline; the last stage of all timelines in a picture ends the colours of stages."""

    def __init__(self, timeline: Timeline, by: By, last: int) -> None:
        self.by: By = by
        self._ranks = facts.ranks(timeline)
        self._last = last
        self.most = max(self._ranks.values(), default=0)
        """How many stages a device has besides its first."""
        self._known: dict[tuple[Kind, int, int], Shade] = {}

    def __call__(self, device: int, action: Action) -> Shade:
        """The shade of an action."""
        key = (action.kind, action.stage, device)
        found = self._known.get(key)
        if found is None:
            if self.by == "stage" and action.kind not in facts.MOVES:
                found = stage_shade(action.stage, self._last)
            else:
                found = kind_shade(action.kind, tint(self._ranks[device, action.stage], self.most))
            self._known[key] = found
        return found

    def of(self, span: Span) -> Shade:
        """The shade of a span."""
        return self(span.device, span.action)


def tint(rank: int, most: int) -> int:
    """How many percent of white a device's stage gets: none for its first."""
    return round(min(62, 38 + 8 * (most - 1)) * rank / most) if most else 0


def kind_shade(kind: Kind, tint: int = 0) -> Shade:
    """The colour of a kind, with some percent of white."""
    return Shade(f"{kind.value}{tint}", _mixed(facts.look(kind).colour, (255, 255, 255), tint / 100))


def stage_shade(stage: int, last: int) -> Shade:
    """The colour of a stage: its place between the first and the last one."""
    place = (len(_RAMP) - 1) * (stage / last if last else 0.0)
    below = min(int(place), len(_RAMP) - 2)
    colour = _mixed(_RAMP[below], _RAMP[below + 1], place - below)
    return Shade("s" + "".join(f"{part:02x}" for part in colour), colour)


def _mixed(one: Colour, other: Colour, share: float) -> Colour:
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(one, other, strict=True))
    return red, green, blue
