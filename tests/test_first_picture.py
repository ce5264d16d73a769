"""The picture on the first page is what its code draws of the recorded step;
``FUNCPIPE_PAGES=write`` draws it anew."""

import importlib.util
import os
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
WRITE = os.environ.get("FUNCPIPE_PAGES") == "write"


def script(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def first_picture():
    return script("first_picture")


def test_the_picture_of_data_flow_is_drawn_from_the_plan_of_its_page():
    """Every pool of the plan has an arrow, and every lane a mailbox."""
    data_flow = script("data_flow")
    plan = data_flow.small_plan()
    drawn = data_flow.drawn(plan)
    if WRITE:
        data_flow.PICTURE.write_text(drawn, newline="\n")
    assert data_flow.PICTURE.read_text() == drawn
    assert drawn.count("mailbox</text>") == len(plan.program.lanes)
    for pool in plan.program.pools:
        assert f"{pool.role.value}: {pool.slots} slot" in drawn


def test_it_is_drawn_by_its_code(first_picture):
    """A change of how pictures are drawn shows on the first page, too."""
    drawn = first_picture.drawn(first_picture.recorded())
    if WRITE:
        first_picture.PICTURE.write_text(drawn, newline="\n")
    assert first_picture.PICTURE.read_text() == drawn


def test_its_step_is_one_of_its_schedule(first_picture):
    """What was recorded is what the code runs now, and it can be recorded anew."""
    recorded = first_picture.recorded()
    again = first_picture.measure(width=8, rows=2, steps=2)
    for timeline in (recorded, again):
        orders = [
            [span.action for span in timeline.spans if span.device == device] for device in range(2)
        ]
        assert orders == [list(order) for order in first_picture.SCHEDULE.orders]
        assert timeline.unit == "s"


def test_it_has_a_ground_of_its_own_before_anything_is_drawn(first_picture):
    """A page in another mode than the viewer's must not swallow its letters."""
    picture = first_picture.PICTURE.read_text()
    assert picture.index('class="card"') < picture.index("<text")
    assert ".card{fill:#fff}" in picture
    assert "@media (prefers-color-scheme:dark){.card{fill:" in picture
