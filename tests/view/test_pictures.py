"""Pictures of several timelines, of memory, and of very many actions: aligned, small, complete."""

from __future__ import annotations

import html
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from funcpipe._src.core.errors import ScheduleError
from funcpipe._src.data.cost import Cost
from funcpipe._src.data.result import Span, Timeline
from funcpipe._src.data.schedule import Kind, Schedule
from funcpipe._src.schedules.families import interleaved, one_f_one_b, zero_bubble
from funcpipe._src.view.draw import Drawing, draw
from funcpipe._src.view.memory_levels import Level, coarse, highest_in_slices, levels
from funcpipe._src.view.palette import hexadecimal, kind_colour, stage_colour
from funcpipe._src.view.simulate import simulate

SVG = "{http://www.w3.org/2000/svg}"
OFFLOAD = Schedule.parse(
    """0F0 0O0 0F1 0O1 0F2 0F3 0L0 0B0 0L1 0B1 0B2 0B3
    1F0 1B0 1F1 1O1 1F2 1L1 1B1 1B2 1F3 1B3""",
    name="offload",
)


def in_seconds(timeline: Timeline, factor: float = 1e-3) -> Timeline:
    """As if measured: in seconds, no steps of memory."""
    spans = tuple(
        Span(device, a * factor, b * factor, action) for device, a, b, action in timeline.spans
    )
    return replace(timeline, spans=spans, unit="s", memory=())


def panels(content: str) -> list[list[ET.Element]]:
    """The groups of lanes of each panel: those that begin with a device's name, device 0 first."""
    out: list[list[ET.Element]] = []
    for group in ET.fromstring(content).findall(f"{SVG}g"):
        name = group.find(f"{SVG}text")
        if name is not None and (name.text or "").startswith("device"):
            out += [[]] if name.text == "device 0" else []
            out[-1].append(group)
    return out


def bars(group: ET.Element) -> dict[str, tuple[float, float]]:
    """Left edge and width of each rectangle, by what it says."""
    return {
        r[0].text or "": (float(r.get("x", "")), float(r.get("width", "")))
        for r in group.iter(f"{SVG}rect")
    }


def test_two_schedules_have_one_time_axis() -> None:
    content = draw(one_f_one_b(4, 8), zero_bubble(4, 8)).svg()
    first, second = panels(content)
    assert (len(first), len(second)) == (4, 4)
    a, b = bars(first[0]), bars(second[0])
    assert (
        a["0F3 forward, stage 0, microbatch 3: 3 to 4 units"]
        == b["0F3 forward, stage 0, microbatch 3: 3 to 4 units"]
    )
    assert a["0B7 backward, stage 0, microbatch 7: 31 to 33 units"][0] == 31 * 24
    assert b["0W7 backward of weights, stage 0, microbatch 7: 26 to 27 units"][0] == 26 * 24
    tracks = [panel[0].find(f".//{SVG}path[@class='lane']").get("d") for panel in (first, second)]  # pyright: ignore
    assert tracks == ["M0 0h792v30H0z", "M0 0h648v30H0z"]  # each ends where its timeline does
    grids = [
        path.get("d")
        for path in ET.fromstring(content).iter(f"{SVG}path")
        if path.get("class") == "grid"
    ]
    assert len(grids) == 2
    assert len({tuple(re.findall(r"M([\d.]+)", grid or "")) for grid in grids}) == 1
    assert content.count('<g class="legend">') == 1


def test_a_measured_and_a_simulated_timeline_share_seconds_and_work() -> None:
    measured = in_seconds(simulate(one_f_one_b(4, 8), Cost(2, 2, 2, comm=0.5)))
    drawn = draw(measured, one_f_one_b(4, 8))
    content = drawn.svg()
    assert "scaled to the same work, 1 unit is 2 ms" in content
    assert "scaled to the same work, 1 unit is 2 ms" in re.sub(r"\s+", " ", drawn.text(150))
    assert [">1F1B, measured in ms<" in content, ">1F1B, simulated in ms<" in content] == [
        True,
        True,
    ]
    first, second = panels(content)
    long = [
        bars(panel[0])[name]
        for panel, name in (
            (first, "0F1 forward, stage 0, microbatch 1: 2 to 4 ms"),
            (second, "0F1 forward, stage 0, microbatch 1: 2 to 4 ms"),
        )
    ]
    assert long[0] == long[1]
    assert drawn.others == (simulate(one_f_one_b(4, 8)),)  # kept as given


def test_a_simulation_with_the_measured_cost_needs_no_scaling() -> None:
    measured = in_seconds(simulate(zero_bubble(3, 5), Cost(2, 3, 1, comm=0.5)))
    drawn = draw(measured, simulate(zero_bubble(3, 5), measured.cost()))
    assert "scaled" not in drawn.svg()
    assert "simulated" in drawn.svg()


def test_what_cannot_share_an_axis_is_refused() -> None:
    one, two = (
        in_seconds(simulate(one_f_one_b(2, 2))),
        replace(simulate(one_f_one_b(2, 2)), unit="cycles"),
    )
    with pytest.raises(ValueError, match="one time axis has one unit; got 'cycles', 's'"):
        draw(one, two)
    with pytest.raises(ValueError, match="'1F1B' has no work"):
        draw(one, simulate(one_f_one_b(2, 2), Cost(0, 0, 0)))
    with pytest.raises(ValueError, match='colours are by "kind" or by "stage"; got by=\'mood\''):
        draw(one, by="mood")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="got int"):
        draw(one, 3)  # pyright: ignore[reportArgumentType]


def test_text_of_two_schedules_with_memory() -> None:
    assert (
        draw(one_f_one_b(2, 3), zero_bubble(2, 3), memory=True).text(80)
        == """\
1F1B, simulated in units: makespan 12 units, bubble 25.0%, idle 25.0%
                                                busy  peak
device 0 │F0 F1 ······B0─── F2 B1─── ···B2─── │  75%     2
device 1 │···F0 B0─── F1 B1─── F2 B2─── ······│  75%     1
memory, █ is 2:
device 0 │▄▄▄████████████████████████▄▄▄▄▄▄▄▄▄│
device 1 │   ▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄      │
         └───────────────┴──────────────┴─────┘
          0              5              10 units

ZB-H1, simulated in units: makespan 10 units, bubble 10.0%, idle 10.0%
                                                busy  peak
device 0 │F0 F1 ···I0 W0 F2 I1 W1 I2 W2       │  90%     2
device 1 │···F0 I0 F1 I1 W0 F2 I2 W1 W2       │  90%   1.5
memory, █ is 2:
device 0 │▄▄▄█████████▆▆▆██████▆▆▆▄▄▄▂▂▂      │
device 1 │   ▄▄▄▄▄▄▆▆▆▆▆▆▄▄▄▆▆▆▆▆▆▄▄▄▂▂▂      │
         └───────────────┴──────────────┴─────┘
          0              5              10 units
F forward  B backward  I backward of input  W backward of weights  · idle"""
    )


def test_text_has_rows_for_the_links_to_the_host() -> None:
    lines = draw(simulate(OFFLOAD, Cost(offload=1.5))).text(90).split("\n")
    rows = {line[:9].strip() + str(at): line for at, line in enumerate(lines) if "│" in line}
    assert list(rows) == ["device 02", "O3", "L4", "device 15", "O6", "L7"]
    assert rows["O3"].split("│")[1].strip("· ") == "O0── O1─"
    assert rows["L4"].split("│")[1].replace("·", " ").split() == ["L0──", "L1─"]
    assert "B0" in rows["device 02"]
    assert "O offload  L load" in lines[-1]
    assert all(len(line) <= 40 for line in draw(OFFLOAD).text(40).split("\n"))


def test_offload_and_load_are_strips_below_the_work_and_no_work() -> None:
    timeline = simulate(OFFLOAD, Cost(offload=1.5))
    (rows,) = panels(draw(timeline).svg())
    ends: dict[str, set[tuple[float, float]]] = {}
    for group in rows:
        for rect in group.iter(f"{SVG}rect"):
            top = float(rect.get("y", "0"))
            kind = re.sub(r"\d", "", (rect[0].text or "").split()[0])
            ends.setdefault(kind, set()).add((top, top + float(rect.get("height", ""))))
    assert ends == {
        "F": {(0.0, 21.0)},
        "B": {(0.0, 21.0)},
        "O": {(22.0, 26.0)},
        "L": {(26.0, 30.0)},
    }
    work = sum(
        span.end - span.start
        for span in timeline.spans
        if span.device == 0 and span.action.kind in (Kind.F, Kind.B)
    )
    assert f">{work / timeline.makespan:.0%}<" in draw(timeline).svg()


def test_memory_is_what_the_timeline_says() -> None:
    """At each instant the level drawn is the last step; the highest is the peak, which has a line
    on it."""
    timeline = simulate(zero_bubble(4, 8), Cost(output=0.25))
    found = levels(timeline)
    for steps, lane, peak in zip(timeline.memory, found, timeline.peak, strict=True):
        assert max(level.amount for level in lane) == peak
        for level in lane:
            now = (level.start + level.end) / 2
            if level.end > level.start:
                assert level.amount == [amount for time, amount in steps if time <= now][-1]
    gantt, held = panels(draw(timeline, memory=True).svg())
    assert len(held) == 4
    tallest = max(
        float(rect.get("height", "")) for group in held for rect in group.iter(f"{SVG}rect")
    )
    assert tallest == 30.0  # one scale: the highest of all devices fills its lane
    for group, peak in zip(held, timeline.peak, strict=True):
        assert max(
            float(rect.get("height", "")) for rect in group.iter(f"{SVG}rect")
        ) == pytest.approx(30 * peak / max(timeline.peak), abs=0.06)
        assert [path.get("class") for path in group.iter(f"{SVG}path")].count("top") == 1
    assert "holds 4" in "".join(title.text or "" for title in held[0].iter(f"{SVG}title"))
    assert len(gantt) == 4


def test_a_peak_of_no_duration_is_drawn() -> None:
    one = Timeline(
        simulate(one_f_one_b(1, 1)).spans,
        1,
        (7.0,),
        memory=(((0.0, 2.0), (1.0, 7.0), (1.0, 1.0), (3.0, 0.0)),),
    )
    assert [tuple(level) for level in levels(one)[0]] == [
        (0.0, 1.0, 2.0),
        (1.0, 1.0, 7.0),
        (1.0, 3.0, 1.0),
    ]
    assert "holds 7: 1 to 1 units" in draw(one, memory=True).svg()


def test_measured_memory_is_counted_where_the_peaks_are_counts() -> None:
    simulated = simulate(zero_bubble(3, 6), Cost(1, 1.5, 0.75, comm=0.25))
    assert [
        [level.amount for level in lane if level.end > level.start]
        for lane in levels(in_seconds(simulated))
    ] == [[level.amount for level in lane if level.end > level.start] for lane in levels(simulated)]
    other = replace(in_seconds(simulated), peak=(1e9,) * 3)
    assert levels(other) == ()
    drawn = draw(other, memory=True)
    assert "not known for this timeline" in drawn.svg()
    assert "memory is not known" in drawn.text(80)
    assert len(panels(drawn.svg())) == 1


def test_by_stage_has_a_colour_for_each_stage_and_an_edge_for_each_kind() -> None:
    content = draw(interleaved(8, 8, num_devices=4), by="stage").svg()
    (rows,) = panels(content)
    used = {
        group.get("fill")
        for row in rows
        for group in row.iter(f"{SVG}g")
        if group.find(f"{SVG}rect") is not None
    }
    assert used == {hexadecimal(stage_colour(stage, 7)) for stage in range(8)}
    kinds = [hexadecimal(kind_colour(kind)) for kind in (Kind.F, Kind.B)]
    for group in rows:
        edges = [path for path in group.iter(f"{SVG}path") if path.get("class") == "edge"]
        assert [path.get("fill") for path in edges] == kinds
        assert [(path.get("d") or "").count("z") for path in edges] == [16, 16]
    numbers = [text.text for group in rows for text in group.iter(f"{SVG}text") if text.text]
    assert {"F0", "B7"} <= set(numbers)
    assert "stage 0 to 7" in content
    assert draw(one_f_one_b(2, 2), by="stage") != draw(one_f_one_b(2, 2))


def test_coarse_levels_never_show_less() -> None:
    fine = levels(simulate(zero_bubble(8, 64)))[3]
    rough = coarse(fine, 7.0)
    assert len(rough) < len(fine) / 3
    for level in fine:
        assert all(
            one.amount >= level.amount
            for one in rough
            if one.start < level.end and one.end > level.start
        )
    assert max(level.amount for level in rough) == max(level.amount for level in fine)
    assert coarse((), 1.0) == ()


def test_what_ends_where_a_slice_begins_is_not_in_it() -> None:
    """Also where 0.07 times 100 is more than 7: rounding makes no device hold more for longer."""
    high, low = Level(0.0, 0.07, 5.0), Level(0.07, 0.1, 1.0)
    assert 0.07 * 100 > 7
    assert highest_in_slices([high, low], 100, 10) == [5.0] * 7 + [1.0] * 3
    assert [level.amount for level in coarse([high, low], 0.01)] == [5.0, 1.0]
    assert coarse([high, low], 0.01)[1].start == pytest.approx(0.07)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drawn", "most"),
    [
        (lambda: draw(one_f_one_b(2, 4)), 30_000),
        (lambda: draw(one_f_one_b(32, 156), memory=True), 2_000_000),
        (lambda: draw(zero_bubble(16, 128), one_f_one_b(16, 64)), 1_300_000),
    ],
    ids=["2x4", "the largest, with memory", "two"],
)
def test_files_stay_small(drawn: Any, most: int, tmp_path: Path) -> None:
    one: Drawing = drawn()
    one.save(tmp_path / "x.svg")
    assert (tmp_path / "x.svg").stat().st_size < most
    root = ET.parse(tmp_path / "x.svg").getroot()
    actions = sum("microbatch " in (r[0].text or "") for r in root.iter(f"{SVG}rect"))
    assert actions == sum(len(timeline.spans) for timeline in (one.timeline, *one.others))


def test_more_actions_than_a_picture_has_are_refused_with_the_trace(tmp_path: Path) -> None:
    """Of all its timelines together; text shows any number."""
    large = draw(one_f_one_b(32, 157))
    says = r"10,048 actions are too many .* at most 10,000; save a Perfetto trace instead: "
    says += r"drawing\.timeline\.to_chrome_trace\('trace\.json'\)"
    for write in (large.svg, lambda: large.save(tmp_path / "x.svg")):
        with pytest.raises(ScheduleError, match=says):
            write()
    told = large._repr_html_()  # a notebook would bury an error under a traceback
    assert "<svg" not in told
    assert re.search(says, html.unescape(told))
    assert not [*tmp_path.iterdir()]
    with pytest.raises(ScheduleError, match="16,384 actions"):
        draw(one_f_one_b(32, 128), one_f_one_b(32, 128)).svg()
    large.save(tmp_path / "x.txt")
    shown = large.timeline._repr_html_()
    assert "<svg" not in shown
    assert "save a Perfetto trace instead: it.to_chrome_trace(" in shown


def test_a_page_shrinks_a_picture_no_further_than_it_can_be_read() -> None:
    """Of a file nothing is said: in a document or on a slide a width that the viewer cannot change
    would be cut off."""
    drawing = draw(one_f_one_b(4, 8))
    inline = drawing._repr_html_()
    width = float(re.search(r' width="([\d.]+)"', inline)[1])
    least = float(re.search(r"min-width:([\d.]+)px", inline)[1])
    assert 12 * least / width == pytest.approx(9, abs=0.01)  # letters of 12 pixels
    assert "min-width" not in drawing.svg()


def test_an_svg_needs_nothing_else_and_tells_of_every_action_and_level() -> None:
    drawn = draw(one_f_one_b(4, 8), memory=True)
    content = drawn.svg()
    assert not re.search(
        r"<(script|link|img|image|use|foreignObject)\b|\b(src|href)=|url\(|@import", content
    )
    assert re.findall(r"https?://[^\"']*", content) == ["http://www.w3.org/2000/svg"]
    levels_held = sum(level.amount > 0 for lane in levels(drawn.timeline) for level in lane)
    assert content.count("<title>") == 64 + levels_held
