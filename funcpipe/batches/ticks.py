"""The plan of an overlap as plain data: which row works on which batch at a tick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from funcpipe.batches.stage import BatchStage, Fold
from funcpipe.core.errors import PlanError, raise_all


class TickRow(NamedTuple):
    """A row of the plan: the source, a stage or the fold.

    Attributes:
        name: of the stage.
        lead: at tick t it works on batch ``t + lead`` (in a thread: on batches up to that one).
        lane: which of `TickPlan.lanes` does the work.
        thread: has it a thread of its own.
        lag: of the stage.
    """

    name: str
    lead: int
    lane: int
    thread: bool
    lag: int | None = None


@dataclass(frozen=True)
class TickPlan:
    """What happens at tick t, while batch t is made ready to be handed out. Compares, hashes, pickles and prints.

    Attributes:
        rows: the source, the stages, the fold, as a batch goes through them.
        order: numbers of the rows in the order in which the thread of the loop takes them up within a tick. Rows with
            threads go on by themselves, as far ahead as their leads let them.
        lanes: names of what works side by side: threads, or streams of devices.
    """

    rows: tuple[TickRow, ...]
    order: tuple[int, ...]
    lanes: tuple[str, ...]

    @property
    def depth(self) -> int:
        """How many batches may be under way besides the one that is handed out next."""
        return max(row.lead for row in self.rows)

    def __str__(self) -> str:
        wide = max(len(row.name) for row in self.rows)
        lines = ["at tick t, batch t is made ready:"]
        for number in self.order:
            row = self.rows[number]
            batch = ("up to " if row.thread else "") + "batch t" + (f"+{row.lead}" if row.lead else "")
            lag = "" if row.lag is None else f", reads the state of {row.lag} before"
            lines.append(f"  {row.name:<{wide}}  {batch:<{16}}  on {self.lanes[row.lane]}{lag}")
        return "\n".join(lines)


def ticks(
    stages: Sequence[BatchStage],
    fold: Fold | None,
    *,
    depth: int,
    threads: Sequence[bool],
    streamed: bool,
) -> TickPlan:
    """The plan of an overlap.

    ``threads`` has an entry for the source and for each stage. Where devices have streams (``streamed``), a stage with
    one is a lane of its own. What runs ahead comes first, the older batch before the newer, so that it is queued before
    the work of the step.

    Raises:
        PlanError: a lead is too large, or larger than that of the stage before.
    """
    leads = _leads(stages, depth)
    lanes: dict[str, int] = {}

    def row(name: str, lead: int, lane: str, thread: bool, lag: int | None = None) -> TickRow:
        return TickRow(name, lead, lanes.setdefault(lane, len(lanes)), thread, lag)

    rows = [row("source", leads[0] if leads else depth, "source" if threads[0] else "loop", threads[0])]
    for stage, lead, thread in zip(stages, leads, threads[1:], strict=True):
        lane = stage.name if thread else "loop"
        if streamed and stage.stream != "caller":
            lane = f"stream {stage.stream}" if isinstance(stage.stream, str) else stage.name
        rows.append(row(stage.name, lead, lane, thread, stage.lag))
    if fold:
        rows.append(row(fold.name, 0, "loop", thread=False))
    _check(rows)
    inline = [number for number, row in enumerate(rows) if not row.thread]
    inline.sort(key=lambda number: (rows[number].lead == 0, rows[number].lead))
    threaded = [number for number, row in enumerate(rows) if row.thread]
    return TickPlan(tuple(rows), (*threaded, *inline), tuple(lanes))


def _leads(stages: Sequence[BatchStage], depth: int) -> list[int]:
    """The leads of the stages: as asked for, else the depth in even steps down to the fold, or to the loop itself.

    No less than what a later stage asks for, and no more than an earlier one or the stage's own lag.
    """
    asked = [stage.lead for stage in stages]
    for stage in stages:
        if stage.lead is not None and stage.lead > depth > 0:
            raise PlanError(
                f"{stage.name!r} has lead={stage.lead}, more than depth={depth}; give overlap(depth={stage.lead})"
            )
    leads: list[int] = []
    limit = depth
    for number, stage in enumerate(stages):
        later = max((lead for lead in asked[number + 1 :] if lead is not None), default=0)
        even = max(later, -(-depth * (len(stages) - number) // len(stages)))
        lead = min(limit, even, depth if stage.lag is None else stage.lag) if stage.lead is None else stage.lead
        limit = min(limit, lead)
        leads.append(lead)
    return leads if depth else [0] * len(stages)


def _check(rows: Sequence[TickRow]) -> None:
    faults = [
        f"{row.name!r} (lead {row.lead}) would run on a batch before {before.name!r} (lead {before.lead}) has made it; "
        "leads fall from stage to stage"
        for before, row in pairwise(rows)
        if before.lead < row.lead
    ]
    raise_all("this plan of an overlap cannot run:", faults)
