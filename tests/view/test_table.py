"""Tables: aligned, never wider than asked, nothing left out, and the same rows as HTML."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from funcpipe._src.core.table import Table

LANES = Table(
    "Lanes",
    ("lane", "device", "busy", "idle"),
    (("0", "cpu", "75%", "25%"), ("1", "cuda:0", "100%", "0%")),
    words=(0, 1),
)


def test_words_are_to_the_left_and_numbers_to_the_right() -> None:
    assert (
        LANES.text()
        == "lane  device  busy  idle\n0     cpu      75%   25%\n1     cuda:0  100%    0%"
    )


def test_columns_that_do_not_fit_follow_below() -> None:
    """Each time behind the first column again."""
    assert LANES.text(14) == (
        "lane  device\n0     cpu\n1     cuda:0\n"  # busy needs 18
        "lane  busy\n0      75%\n1     100%\n"
        "lane  idle\n0      25%\n1       0%"
    )
    assert LANES.text(24) == LANES.text()


def test_a_column_that_is_too_wide_is_cut() -> None:
    assert LANES.text(9).split("\n")[:3] == ["lane  dev", "0     cpu", "1     cud"]


def test_facts_have_no_heads() -> None:
    assert (
        Table("Facts", (), (("makespan", "9"), ("idle", "25%")), words=(0, 1)).text()
        == "makespan  9\nidle      25%"
    )
    assert Table("None", (), ()).text() == ""


def test_html_has_the_same_cells() -> None:
    rows = [[cell.text for cell in row] for row in ET.fromstring(LANES.html()).iter("tr")]
    assert rows == [list(LANES.heads), *map(list, LANES.rows)]
