"""The picture on the first page: one recorded training step over its simulation.

    python docs/pictures/first_picture.py

Trains eight blocks of a Linear and a GELU on two CPU lanes, under the zero-bubble schedule on a V,
and keeps the quickest of many recorded steps in ``first_picture.json``: on a machine that others
use too, the one that was disturbed least. From that the picture is drawn, and drawn again whenever
its code changes (``FUNCPIPE_PAGES=write python -m pytest tests/test_first_picture.py``).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import funcpipe as fp

HERE = Path(__file__).parent
STEP = HERE / "first_picture.json"
PICTURE = HERE / "first_picture.svg"
SCHEDULE = fp.schedules.zbv(4, 4)  # four stages on two devices, four microbatches

_CARD = (
    "<style>.card{fill:#fff}@media (prefers-color-scheme:dark){.card{fill:#0d1117}}</style>"
    '<rect class="card" width="100%" height="100%" rx="6"/>'
)
"""A ground of its own. The viewer's mode decides about the letters' colour, the page around the
picture may have another."""


def measure(*, width: int, rows: int, steps: int) -> fp.Timeline:
    """The quickest of so many recorded steps, with ``rows`` rows a microbatch."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8)))
    split = fp.split(layers, SCHEDULE.num_stages)
    stages = [
        fp.compile_stage(stage) for stage in split.stages
    ]  # their backwards come in two parts, I and W
    plan = fp.make_plan(stages, SCHEDULE, loss=nn.functional.mse_loss, devices="cpu")
    x = torch.randn(rows * SCHEDULE.num_microbatches, width)
    timelines: list[fp.Timeline] = []
    with fp.lanes(plan) as lanes:
        for _ in range(steps):
            timeline = fp.run(plan, split.params, (x, x), record=True, executor=lanes).timeline
            assert timeline is not None
            timelines.append(timeline)
    return min(timelines, key=lambda timeline: timeline.makespan)


def recorded() -> fp.Timeline:
    """The step that was kept."""
    step = json.loads(STEP.read_text())
    spans = [fp.typing.Span(*times, fp.Action.parse(action)) for *times, action in step["spans"]]
    return fp.Timeline(
        tuple(spans), SCHEDULE.num_devices, tuple(step["peak"]), unit="s", name=SCHEDULE.name
    )


def drawn(measured: fp.Timeline) -> str:
    """The step over the simulation of its schedule with the mean times that were measured, as
    SVG."""
    simulated = fp.simulate(SCHEDULE, measured.cost())
    drawing = fp.draw(
        replace(measured, name="one step on two CPU lanes"),
        replace(
            simulated, name="the same schedule, nothing lost between actions", unit=measured.unit
        ),
    )
    head, mark, body = drawing.svg().partition("<style>")
    return f"{head}{_CARD}{mark}{body}\n"


def main() -> None:
    """Measure a step, keep it, draw it."""
    measured = measure(width=384, rows=128, steps=1000)
    rows = ",\n  ".join(json.dumps([*times, str(action)]) for *times, action in measured.spans)
    STEP.write_text(f'{{\n "peak": {[*measured.peak]},\n "spans": [\n  {rows}\n ]\n}}\n')
    PICTURE.write_text(drawn(measured), newline="\n")
    print(fp.draw(measured))


if __name__ == "__main__":
    main()
