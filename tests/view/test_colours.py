"""Colours: told apart by everybody, and dark letters can be read on all."""

from __future__ import annotations

import itertools
from math import dist

import pytest

from funcpipe._src.data.kinds import KINDS, Kind
from funcpipe._src.view.palette import hexadecimal, kind_colour, stage_colour, tint

# How the world looks without one of the three cones, for linear red, green, blue: Machado, Oliveira
# and Fernandes 2009, "A physiologically-based model for simulation of color vision deficiency",
# severity 1.
EYES = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.01182, 0.04294, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.3039),
    ),
}
INK = (0x1F, 0x23, 0x28)


def linear(colour: tuple[int, int, int]) -> list[float]:
    parts = [part / 255 for part in colour]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def lab(colour: tuple[int, int, int], eye: str) -> tuple[float, float, float]:
    """CIE L*a*b* of a colour as an eye sees it."""
    seen = [
        min(1.0, max(0.0, sum(a * b for a, b in zip(row, linear(colour), strict=True))))
        for row in EYES[eye]
    ]
    white = (0.95047, 1.0, 1.08883)
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    x, y, z = (
        sum(a * b for a, b in zip(row, seen, strict=True)) / top
        for row, top in zip(rows, white, strict=True)
    )
    x, y, z = (
        part ** (1 / 3) if part > 0.008856 else 7.787 * part + 16 / 116 for part in (x, y, z)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def contrast(colour: tuple[int, int, int]) -> float:
    """WCAG's, of the ink on the colour."""
    light, dark = (
        sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear(one), strict=True))
        for one in (colour, INK)
    )
    return (light + 0.05) / (dark + 0.05)


def test_the_measure_itself() -> None:
    """White is light, grey has no hue, and red and green that differ for most do not without the
    second cone."""
    assert lab((255, 255, 255), "all cones") == pytest.approx((100, 0, 0), abs=0.05)
    assert lab((128, 128, 128), "deuteranopia")[1:] == pytest.approx((0, 0), abs=0.1)
    red, green = (200, 80, 60), (118, 118, 52)
    assert dist(lab(red, "all cones"), lab(green, "all cones")) > 50
    assert dist(lab(red, "deuteranopia"), lab(green, "deuteranopia")) < 15


@pytest.mark.parametrize("eye", EYES)
def test_any_two_kinds_can_be_told_apart(eye: str) -> None:
    """A distance of 2.3 is just seen side by side; 20 is seen at once."""
    seen = {kind: lab(KINDS[kind].colour, eye) for kind in Kind}
    close = {(a.value, b.value): dist(seen[a], seen[b]) for a, b in itertools.combinations(Kind, 2)}
    assert {} == {pair: distance for pair, distance in close.items() if distance < 20}


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_shades_of_a_kind_become_lighter(eye: str, most: int) -> None:
    for kind in Kind:
        lights = [lab(kind_colour(kind, tint(rank, most)), eye)[0] for rank in range(most + 1)]
        assert lights == sorted(lights)
        assert lights[-1] - lights[0] > 5


@pytest.mark.parametrize("eye", EYES)
def test_stages_become_lighter_and_an_eighth_of_them_is_seen(eye: str) -> None:
    seen = [lab(stage_colour(stage, 63), eye) for stage in range(64)]
    assert all(b[0] > a[0] - 0.6 for a, b in itertools.pairwise(seen))
    assert seen[-1][0] - seen[0][0] > 30
    assert all(dist(a, b) > 6 for a, b in zip(seen, seen[8:], strict=False))


def test_dark_letters_can_be_read_on_every_colour() -> None:
    """WCAG's contrast of the ink on each colour is at least 4.5."""
    colours = {kind.value: KINDS[kind].colour for kind in Kind}
    colours |= {f"stage {stage}": stage_colour(stage, 100) for stage in range(101)}
    assert {} == {
        name: contrast(colour) for name, colour in colours.items() if contrast(colour) < 4.5
    }
    assert len({KINDS[kind].word for kind in Kind}) == len(Kind)


def test_colours_of_terminals_are_different() -> None:
    codes = [KINDS[kind].codes for kind in Kind]
    assert len({code[0] for code in codes}) == len(Kind)
    assert all(len(code) == 3 and all(16 <= one <= 255 for one in code) for code in codes)


def test_colours_are_written_as_svg_reads_them() -> None:
    assert hexadecimal(kind_colour(Kind.F)) == "#5ac8fa"
    assert hexadecimal(stage_colour(0, 0)) == "#7083f3"
    assert hexadecimal(stage_colour(5, 5)) == "#ffffb7"
