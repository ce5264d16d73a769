"""Draw the picture of ``docs/internals/data_flow.md`` from a plan: ``python docs/pictures/data_flow.py``.

Boxes and arrows follow from the plan's program. An arrow is a pool: the slots for one kind of value
between two lanes, or between the caller and a lane.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.nn.functional as F

import funcpipe as fp

PICTURE = Path(__file__).with_suffix(".svg")
CALLER = -1
WIDTH, HEIGHT, GAP, LEFT, TOP = 190, 190, 150, 40, 150
STYLE = """\
.card{fill:#fff}.box{fill:#f3f6fa;stroke:#7a8797}.mail{fill:#fdf1d6;stroke:#b58a2a}
.team{fill:#e9f3ea;stroke:#5d8f63;stroke-dasharray:5 3}text{font:13px sans-serif;fill:#1d2733}
.head{font-weight:bold}.small{font-size:11px}.line{stroke:#4a5768;fill:none;marker-end:url(#tip)}
@media (prefers-color-scheme:dark){.card{fill:#15191e}.box{fill:#232a33;stroke:#8a98a9}
.mail{fill:#3a3220;stroke:#c9a04a}.team{fill:#1f2d22;stroke:#79ad80}text{fill:#e4e9ef}
.line{stroke:#a9b5c3}}"""


def small_plan() -> fp.Plan:
    """Return the plan of the page: two linear stages, two microbatches."""
    stages = [fp.stage(lambda params, x: x @ params["w"])] * 2
    schedule = fp.schedules.one_f_one_b(num_stages=2, num_microbatches=2)
    return fp.make_plan(stages, schedule, loss=F.mse_loss, devices="cpu")


def drawn(plan: fp.Plan) -> str:
    """Return the picture of a plan as SVG."""
    program = plan.program
    lanes = program.lanes
    width = 2 * LEFT + len(lanes) * WIDTH + (len(lanes) - 1) * GAP
    parts = [_box("box", LEFT, 20, width - 2 * LEFT, 50)]
    parts += _text(LEFT + 12, 40, "caller: fp.run(plan, params, batch)", "head")
    parts += _text(
        LEFT + 12,
        58,
        "prepare: check, cut the batch, bind the stages; finish: make the Result",
        "small",
    )
    for lane in lanes:
        parts += _lane(lane, program.lane_order.count(lane.lane), plan)
    rows = {lane.lane: 0 for lane in lanes}
    for pool in program.pools:
        parts += _arrow(pool, rows)
    below = TOP + HEIGHT + 50
    for lane in lanes:
        x = _left(lane.lane) + WIDTH // 2
        parts.append(f'<path class="line" d="M{x} {below}V{TOP + HEIGHT}"/>')
        parts += _text(x + 8, below - 20, "values, sums, failures", "small")
    parts.append(_box("team", LEFT, below, width - 2 * LEFT, 50))
    parts += _text(
        LEFT + 12, below + 20, "team: the processes that have the other lanes, or nobody", "head"
    )
    parts += _text(
        LEFT + 12, below + 38, "agree at prepare and finish; sum and gather over replicas", "small"
    )
    height = below + 70
    return "\n".join(
        [
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                f'width="{width}" role="img"'
            ),
            (
                ' aria-label="The caller, the lanes with their mailboxes and slots, and the team '
                "of "
                'processes">'
            ),
            f"<style>{STYLE}</style>",
            (
                '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
                'markerHeight="7" orient="auto">'
            ),
            '<path d="M0 0 8 4 0 8z" fill="#7a8797"/></marker></defs>',
            f'<rect class="card" width="{width}" height="{height}"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _left(lane: int) -> int:
    return LEFT + lane * (WIDTH + GAP)


def _lane(lane: Any, actions: int, plan: fp.Plan) -> list[str]:
    """Return the box of a lane, with its mailbox and its program."""
    x = _left(lane.lane)
    stages = sorted({call.stage for call in lane.calls})
    names = ", ".join(f"stage {stage}" for stage in stages)
    lines = [
        f"{len(lane.instructions)} instructions, {actions} actions",
        f"{len(lane.slots)} slots",
        names + ": parameters, sums",
    ]
    parts = [
        _box("box", x, TOP, WIDTH, HEIGHT),
        *_text(x + 12, TOP + 22, f"lane {lane.lane}", "head"),
    ]
    parts += [_box("mail", x + 12, TOP + 34, WIDTH - 24, 40), *_text(x + 22, TOP + 58, "mailbox")]
    for number, line in enumerate(lines):
        parts += _text(x + 12, TOP + 100 + 20 * number, line, "small")
    return parts


def _arrow(pool: Any, rows: dict[int, int]) -> list[str]:
    """Return the arrow of a pool, into the mailbox of its lane."""
    words = f"{pool.role.value}: {pool.slots} slot{'s' if pool.slots > 1 else ''}"
    if pool.source == CALLER:
        row, rows[pool.lane] = rows[pool.lane], rows[pool.lane] + 1
        x = _left(pool.lane) + 30 + 80 * row
        return [
            f'<path class="line" d="M{x} 70V{TOP + 34}"/>',
            *_text(x + 6, 105 + 18 * row, words, "small"),
        ]
    left, right = sorted((pool.source, pool.lane))
    start, end = _left(left) + WIDTH - 12, _left(right) + 12
    if pool.source == left:
        y = TOP + 46
        return [
            f'<path class="line" d="M{start} {y}H{end}"/>',
            *_text(start + 24, y - 8, words, "small"),
        ]
    y = TOP + 64
    return [
        f'<path class="line" d="M{end} {y}H{start}"/>',
        *_text(start + 24, y + 16, words, "small"),
    ]


def _box(kind: str, x: int, y: int, width: int, height: int) -> str:
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>'


def _text(x: int, y: int, words: str, kind: str = "plain") -> list[str]:
    return [f'<text class="{kind}" x="{x}" y="{y}">{words}</text>']


if __name__ == "__main__":
    PICTURE.write_text(drawn(small_plan()), newline="\n")
