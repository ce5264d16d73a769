"""Pictures, looked at: golden text, widths, well-formed and small SVG, units, and nothing that
disturbs its page."""

import ast
import os
import re
import shutil
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from unicodedata import east_asian_width

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import funcpipe._src.view.draw as module
from funcpipe._src.core.errors import PlanError
from funcpipe._src.data.cost import Cost
from funcpipe._src.data.result import Span, Timeline
from funcpipe._src.data.schedule import Action, Kind, Schedule
from funcpipe._src.data.stage import stage
from funcpipe._src.lower.plan import make_plan
from funcpipe._src.schedules.families import fill_drain, interleaved, one_f_one_b, zero_bubble
from funcpipe._src.schedules.transforms import remat
from funcpipe._src.view.draw import Drawing, draw
from funcpipe._src.view.palette import By, hexadecimal, kind_colour
from funcpipe._src.view.simulate import simulate
from funcpipe._src.view.summary import ticks, time_text

SVG = "{http://www.w3.org/2000/svg}"


def timeline(
    *spans: tuple[int, float, float, str], unit: str = "s", name: str = "t", devices: int = 1
) -> Timeline:
    return Timeline(
        tuple(Span(device, start, end, Action.parse(text)) for device, start, end, text in spans),
        devices,
        unit=unit,
        name=name,
    )


def test_text_of_1f1b_with_labels() -> None:
    assert (
        draw(one_f_one_b(3, 4)).text(100)
        == """\
1F1B, simulated in units: makespan 18 units, bubble 33.3%, idle 33.3%
                                                                  busy  peak
device 0 │F0 F1 F2 ············B0─── F3 B1─── ···B2─── ···B3─── │  67%     3
device 1 │···F0 F1 ······B0─── F2 B1─── F3 B2─── ···B3─── ······│  67%     2
device 2 │······F0 B0─── F1 B1─── F2 B2─── F3 B3─── ············│  67%     1
         └───────────────┴──────────────┴──────────────┴────────┘
          0              5              10             15 units
F forward  B backward  · idle"""
    )


def test_text_has_the_stage_where_a_device_runs_several() -> None:
    assert (
        draw(interleaved(4, 2, num_devices=2)).text(120)
        == """\
interleaved, simulated in units: makespan 15 units, bubble 20.0%, idle 20.0%
                                                                        busy  peak
device 0 │0F0 0F1 2F0 2F1 ········2B0──── ····2B1──── 0B0──── 0B1──── │  80%     4
device 1 │····1F0 1F1 3F0 3B0──── 3F1 3B1──── 1B0──── 1B1──── ········│  80%     3
         └────────────────────┴───────────────────┴───────────────────┘
          0                   5                   10                  15 units
F forward  B backward  · idle  0F0 stage 0, microbatch 0"""
    )


def test_text_without_room_shows_letters_in_proportion_to_time() -> None:
    assert (
        draw(zero_bubble(4, 8)).text(40)
        == """\
ZB-H1, simulated in units:
makespan 27 units, bubble 11.1%,
idle 11.1%
                             busy  peak
dev 0 │FFF··IWFIFWIWFIWIWIW│  89%     4
dev 1 │·FF·IFIWFWIFIWFIWWIW│  89%   3.5
dev 2 │·F·IFIFWFIWIFIWFWIWW│  89%     3
dev 3 │··FIFIFIWFIWIFWFIWWW│  89%   2.5
      └───────┴───────┴────┘
       0      10      20 units
F forward  I backward of input
W backward of weights  · idle
1 column = 1.35 units"""
    )


@pytest.mark.parametrize("width", [40, 80, 200])
def test_unequal_devices_are_told_of_whatever_the_width(width: int) -> None:
    """The bubble alone would hide that two of three devices wait for most of the time; wrapped,
    never cut."""
    unequal = simulate(one_f_one_b(3, 8), Cost(forward=[8, 3, 3], backward=[16, 6, 6]))
    words = (
        "bubble 1.0%, idle 42.3%, imbalance 41.7%: equal work on all devices would save 41.7% of "
        "the makespan at the same "
    )
    words += "bubble"
    assert words in " ".join(draw(unequal).text(width).split())
    shown = " · ".join(
        "".join(text.itertext()) for text in ET.fromstring(draw(unequal).svg()).iter(f"{SVG}text")
    )
    assert words.replace(", ", " · ") in shown
    assert "imbalance" not in draw(one_f_one_b(3, 8)).text(width)


def test_text_of_a_measured_timeline() -> None:
    drawn = draw(timeline((0, 0.0, 0.00121, "0F0"), (0, 0.0015, 0.0044, "0B0"), name="run"))
    assert (
        drawn.text(60)
        == """\
run, measured in ms: makespan 4.4 ms, bubble 6.6%, idle 6.6%
                    busy
dev 0 │F0 ·B0──── │  93%
      └─────┴────┴┘
       0    2    4 ms
F forward  B backward  · idle"""
    )


@pytest.mark.parametrize(
    ("end", "shown", "labels"),
    [
        (2.5, "2.5 s", ["0", "1", "2"]),
        (0.0321, "32.1 ms", ["0", "20"]),
        (0.000412345, "412.3 us", ["0", "200", "400"]),
        (4e-7, "400 ns", ["0", "200", "400"]),
        (1234.56, "1235 s", ["0", "500", "1000"]),
    ],
)
def test_measured_times_are_shown_in_a_unit_that_fits(
    end: float, shown: str, labels: list[str]
) -> None:
    one = timeline((0, 0.0, end, "0F0"))
    assert time_text(one)(end) == shown
    assert [label for _, label in ticks(one, 3)] == labels
    assert f"makespan {shown}," in draw(one).text(100)
    assert f"makespan {shown}" in draw(one).svg()


def test_ticks_are_round_and_lie_where_they_say() -> None:
    one = timeline((0, 0.0, 0.00104, "0F0"))
    assert [(round(time, 9), label) for time, label in ticks(one, 6)] == [
        (at / 1e4 * 2, f"{at * 0.2:.1f}".replace("0.0", "0").replace("1.0", "1")) for at in range(6)
    ]


def columns(line: str) -> int:
    """What a terminal needs: two columns for a wide letter."""
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in line)


@st.composite
def timelines(draw_one: st.DrawFn) -> Timeline:
    """Simulated and measured ones, of every kind, with names that nobody should give."""
    devices = draw_one(st.integers(1, 12))
    chunks = draw_one(st.integers(1, 3))
    microbatches = draw_one(st.integers(1, 20))
    family = draw_one(st.sampled_from([fill_drain, one_f_one_b, interleaved, zero_bubble]))
    schedule = family(devices * chunks, microbatches, num_devices=devices)
    schedule = remat(schedule) if draw_one(st.booleans()) else schedule
    times = st.sampled_from([0.0, 0.001, 0.37, 1.0, 3.0, 1e9])
    cost = Cost(
        *(draw_one(times) for _ in range(3)),
        residual=draw_one(st.sampled_from([1.0, 0.3, 123456789.0])),
    )
    made = simulate(schedule, cost)
    name = draw_one(st.text(max_size=120))
    unit = draw_one(st.sampled_from(["units", "s", "a very long name of a unit of time & <such>"]))
    peak = made.peak if draw_one(st.booleans()) else ()
    return Timeline(made.spans, made.num_devices, peak, unit, name=name)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(timelines(), st.integers(40, 260))
def test_text_is_never_wider_than_asked_and_has_a_row_for_each_device(
    one: Timeline, width: int
) -> None:
    lines = draw(one).text(width).split("\n")
    for line in lines:
        assert columns(line) <= width
    rows = [line for line in lines if re.match(r"dev(ice)? +\d+ │", line)]
    assert len(rows) == one.num_devices
    assert len({line.rindex("│") for line in rows}) == 1


@settings(max_examples=40, deadline=None)
@given(timelines())
def test_svg_is_xml_with_one_rectangle_for_each_action(one: Timeline) -> None:
    root = ET.fromstring(draw(one).svg())
    rects = root.findall(f".//{SVG}rect")
    assert len(rects) == len(one.spans)
    assert all(float(rect.get("width", "0")) > 0 for rect in rects)
    assert {rect[0].text.split()[0] for rect in rects if rect[0].text} == {
        str(span.action) for span in one.spans
    }
    assert ET.fromstring(draw(one)._repr_html_()).find(f"{SVG}svg") is not None


def test_rectangles_lie_where_their_times_say() -> None:
    root = ET.fromstring(draw(one_f_one_b(4, 8)).svg())
    lanes = [group for group in root.findall(f"{SVG}g") if group.find(f".//{SVG}rect") is not None]
    assert len(lanes) == 4
    at = {
        r[0].text: (float(r.get("x", "")), float(r.get("width", "")))
        for r in root.iter(f"{SVG}rect")
    }
    scale = 24.0
    assert at["0F0 forward, stage 0, microbatch 0: 0 to 1 units"] == (0, scale - 1)
    assert at["2B1 backward, stage 2, microbatch 1: 9 to 11 units"] == (9 * scale, 2 * scale - 1)
    assert [text.text for text in lanes[3].findall(f".//{SVG}g[@class='num']/{SVG}text")].count(
        "7"
    ) == 2


def test_every_other_action_has_the_colour_of_its_kind_and_shade() -> None:
    root = ET.fromstring(draw(interleaved(8, 8, num_devices=4)).svg())
    shades = {
        (group.get("fill"), rect[0].text.split()[0][1], int(rect[0].text.split()[0][0]) >= 4)
        for group in root.iter(f"{SVG}g")
        for rect in group.findall(f"{SVG}rect")
        if rect[0].text
    }
    colours = {
        (kind, white): hexadecimal(kind_colour(kind, white))
        for kind in (Kind.F, Kind.B)
        for white in (0, 38)
    }
    assert shades == {
        (colour, kind.value, white == 38) for (kind, white), colour in colours.items()
    }


def test_svg_stays_small_and_readable_when_large() -> None:
    drawn = draw(one_f_one_b(32, 128))
    content = drawn.svg()
    assert content.count("<rect") == 8192
    assert len(content.encode()) < 1_200_000
    assert 'class="num"' not in content  # no number would fit
    rows = [line for line in drawn.text(100).split("\n") if line.startswith("device")]
    assert len(rows) == 32
    steady = rows[0].partition("│")[2][20:60]
    assert 0.6 < steady.count("B") / len(steady) < 0.73  # two thirds of the time


def test_styles_of_several_drawings_in_a_page_agree() -> None:
    rules: dict[str, str] = {}
    ids: list[str] = []
    deep = [
        fill_drain(8, 2, num_devices=1),
        interleaved(12, 4, num_devices=4),
        remat(zero_bubble(6, 3, num_devices=3)),
    ]
    for what in (*deep, one_f_one_b(2, 2)):
        content = draw(what)._repr_html_()
        ids += re.findall(r"\bid=", content)
        style = re.search(r"<style>(.*?)</style>", content)
        assert style is not None
        for selector, body in re.findall(r"([^{}]+)\{([^{}]*)\}", style[1]):
            assert selector.startswith(".funcpipe ") or selector == ".funcpipe"
            assert rules.setdefault(selector, body) == body
    assert ids == []
    assert rules


DRAWN = {f"{SVG}{tag}" for tag in ("rect", "path", "text")}


@pytest.mark.parametrize("by", ["kind", "stage"])
def test_every_shape_of_a_file_has_a_plain_colour(by: By) -> None:
    """Its own attribute or a group's: renderers outside browsers read little CSS, no variables and
    no media."""
    for what in (
        fill_drain(9, 2, num_devices=1),
        remat(zero_bubble(6, 3, num_devices=3)),
        one_f_one_b(32, 4),
    ):
        content = draw(what, memory=True, by=by).svg()
        shapes = 0

        def look(element: ET.Element, fill: str | None) -> None:
            nonlocal shapes
            fill = element.get("fill", fill)
            assert "style" not in element.attrib, "a size that is no number: cairosvg drew nothing"
            assert not [
                value
                for value in element.attrib.values()
                if "var(" in value or "currentColor" in value
            ]
            if element.tag in DRAWN:
                shapes += 1
                assert fill is not None
                assert re.fullmatch("#[0-9a-f]{6}", fill)
            for child in element:
                look(child, fill)

        look(ET.fromstring(content), None)
        assert shapes > 2 * sum(map(len, what.orders))
        (style,) = re.findall(r"<style>(.*?)</style>", content)
        everywhere = re.sub(r"@media[^{]*\{[^{}]*\{[^}]*\}\}", "", style)
        assert "@" not in everywhere
        assert not re.search(r"var\(|light-dark|auto|fill:|[^-]color:|display", everywhere)


def test_a_file_follows_dark_mode_and_a_page_lends_its_colour() -> None:
    drawn = draw(one_f_one_b(2, 2))
    assert "@media (prefers-color-scheme:dark)" in drawn.svg()
    assert "color-scheme:light dark" in drawn.svg()
    assert ' fill="currentColor"' in drawn._repr_html_()
    assert "prefers-color-scheme" not in drawn._repr_html_()


@pytest.mark.parametrize(
    "name", ["<script>alert('x')</script> & \"co\"", "a\x00b\x1b[31m\ud800\uffff\n\nc", "名" * 300]
)
def test_names_are_escaped(name: str) -> None:
    drawn = draw(timeline((0, 0.0, 1.0, "0F0"), name=name, unit='<u>&"'))
    root = ET.fromstring(drawn.svg())
    assert "<script" not in drawn.svg()
    text = root.find(f"{SVG}text")
    assert text is not None
    assert text.text is not None
    assert name[:1] == text.text[:1]
    assert max(map(columns, drawn.text(80).split("\n"))) <= 80
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", drawn.text(80))
    assert "<u>" not in drawn.svg()


def test_colour_changes_no_letter() -> None:
    for what in (interleaved(4, 4, num_devices=2), one_f_one_b(8, 32), zero_bubble(2, 3)):
        for width in (40, 100, 200):
            painted = draw(what).text(width, color=True)
            assert "\x1b[" in painted
            plain = draw(what).text(width)
            assert "\x1b" not in plain
            assert [
                line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", painted).split("\n")
            ] == plain.split("\n")


def test_empty_timelines_and_actions_without_duration() -> None:
    empty = draw(Timeline((), 3, name="nothing"))
    assert empty.text(60) == "nothing, simulated in units: no actions on 3 devices"
    assert "no actions" in "".join(ET.fromstring(empty.svg()).itertext())
    assert draw(Timeline((), 0)).text(60) == "timeline, simulated in units: no actions on 0 devices"
    at_once = draw(timeline((0, 0.0, 0.0, "0F0")))
    assert "dev 0 │·│   0%" in at_once.text(60)
    assert at_once.svg().count("<rect") == 1


def test_actions_too_short_to_see_do_not_move_the_others() -> None:
    drawn = draw(
        timeline(
            (0, 0.0, 1e-6, "0F0"),
            (0, 1e-6, 10.0, "0B0"),
            (0, 10.0, 20.0, "0B1"),
            (0, 25.0, 40.0, "0B2"),
        )
    )
    row = next(line for line in drawn.text(60).split("\n") if line.startswith("dev 0"))
    cells = row.split("│")[1]
    scale = len(cells) / 40
    assert cells.startswith("B0")
    assert abs(cells.index("B1") - 10 * scale) <= 1
    assert abs(cells.index("B2") - 25 * scale) <= 1


def test_drawing_is_deterministic_and_compares() -> None:
    first, second = draw(zero_bubble(4, 6)), draw(zero_bubble(4, 6))
    assert first == second
    assert (first.text(90), first.svg()) == (second.text(90), second.svg())
    shuffled = Drawing(Timeline(first.timeline.spans[::-1], 4, first.timeline.peak, name="ZB-H1"))
    assert shuffled.text(90) == first.text(90)


def test_str_has_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = draw(one_f_one_b(4, 8))
    for columns in (1, 60, 150):
        monkeypatch.setattr(
            shutil, "get_terminal_size", lambda _, c=columns: os.terminal_size((c, 24))
        )
        assert str(drawn) == repr(drawn) == drawn.text(max(40, columns))


def test_a_plan_is_drawn_as_its_schedule() -> None:
    @stage
    def double(params: object, x: float) -> float:
        return 2 * x

    schedule = one_f_one_b(2, 3)
    plan = make_plan((double, double), schedule, loss=lambda y, target: y)
    assert draw(plan) == draw(schedule) == draw(simulate(schedule))


def test_save_writes_what_the_suffix_says(tmp_path: Path) -> None:
    drawn = draw(one_f_one_b(2, 2))
    drawn.save(tmp_path / "a.svg")
    drawn.save(str(tmp_path / "a.txt"))
    assert (tmp_path / "a.svg").read_text(encoding="utf-8") == drawn.svg()
    assert (tmp_path / "a.txt").read_text(encoding="utf-8") == drawn.text(120) + "\n"
    with pytest.raises(ValueError, match=r"saved as \.svg or \.txt; got '\.png'"):
        drawn.save(tmp_path / "a.png")
    with pytest.raises(
        ValueError, match=r"To zoom, write drawing\.timeline\.to_chrome_trace\('trace\.json'\)"
    ):
        drawn.save(tmp_path / "a.html")


@pytest.mark.parametrize("wrong", ["0F0", None, [1], draw(Schedule.parse("0F0"))])
def test_other_things_are_refused(wrong: object) -> None:
    with pytest.raises(
        TypeError, match=rf"draw takes a Schedule, a Plan or a Timeline; got {type(wrong).__name__}"
    ):
        draw(wrong)  # pyright: ignore[reportArgumentType]


def test_too_narrow_is_refused() -> None:
    drawn = draw(one_f_one_b(2, 2))
    with pytest.raises(ValueError, match="at least 40 columns wide; got width=39"):
        drawn.text(39)
    with pytest.raises(TypeError):
        drawn.text(80.0)  # pyright: ignore[reportArgumentType]


def test_drawing_needs_the_standard_library_only() -> None:
    folder = Path(str(module.__file__)).parent
    files = (
        "draw",
        "text",
        "svg",
        "summary",
        "memory_levels",
        "palette",
        "figure",
        "svg_lanes",
    )
    for file in (f"{name}.py" for name in files):
        for node in ast.walk(ast.parse((folder / file).read_text(encoding="utf-8"))):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name.partition(".")[0] for name in names} <= {
                *sys.stdlib_module_names,
                "funcpipe",
            }


def test_a_timeline_of_some_lanes_is_refused() -> None:
    """Each device of a legal schedule works, so an empty row is a lane of another process."""
    own = timeline((1, 0.0, 1.0, "1F0"), (1, 2.0, 4.0, "1B0"), devices=2)
    assert (0.0, 3.0) == own.busy
    assert "has the lanes of 1 device (1) of 2" in str(own)
    assert "ranks.timeline(result)" in str(own)
    shown = own._repr_html_()
    assert shown is not None
    assert "ranks.timeline(result)" in shown
    assert "<svg" not in shown
    for misread in (draw, lambda own: draw(one_f_one_b(2, 1), own), lambda own: own.idle):
        with pytest.raises(PlanError, match="lanes of 1 device"):
            misread(own)
