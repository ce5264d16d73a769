"""The plan of an overlap as plain data: which row works on which batch at a tick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from funcpipe.batches.stage import BatchStage, Fold
from funcpipe.core.errors import PlanError, raise_all
from funcpipe.core.result import Span, Timeline
from funcpipe.core.schedule import Action, Kind


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

    def simulate(
        self, num_batches: int | None = None, seconds: float | Sequence[float] | Mapping[str, float] = 1.0
    ) -> Timeline:
        """When the rows would work on which batch; the loop itself takes no time.

        Args:
            num_batches: how many; None: enough to see the steady state.
            seconds: that each row takes, in any unit: one number for all stages (the source then takes none), one for
                each row, or by name (0 for who is not named).

        Returns:
            A timeline in units, a lane for each of `lanes`; its "stages" are the rows, its "microbatches" the batches.
        """
        count = 3 * self.depth + 2 if num_batches is None else num_batches
        times = self._times(seconds)
        free = [0.0] * len(self.lanes)
        ends: dict[tuple[int, int], float] = {}
        spans: list[Span] = []
        sequence = self._sequence()
        for tick in range(-self.depth, count):
            handed = ends.get((len(self.rows) - 1, tick - 1), 0.0)
            for number in sequence:
                row, batch = self.rows[number], tick + self.rows[number].lead
                if 0 <= batch < count:
                    start = max(ends.get((number - 1, batch), 0.0), free[row.lane], handed)
                    ends[number, batch] = free[row.lane] = start + times[number]
                    if times[number]:
                        spans.append(Span(row.lane, start, free[row.lane], Action(Kind.F, number, batch)))
        spans.sort(key=lambda span: (span.start, span.device))
        return Timeline(tuple(spans), len(self.lanes), name="overlap", lanes=self.lanes)

    def _sequence(self) -> list[int]:
        """The rows of a tick, each after the one before it if that works on the same batch; the loop's in order."""
        rows, pending, sequence = self.rows, list(self.order), list[int]()
        while pending:
            inline = next((number for number in pending if not rows[number].thread), None)
            ready = (at for at in pending if at - 1 not in pending or rows[at - 1].lead > rows[at].lead)
            number = next(at for at in ready if rows[at].thread or at == inline)
            pending.remove(number)
            sequence.append(number)
        return sequence

    def _times(self, seconds: float | Sequence[float] | Mapping[str, float]) -> list[float]:
        names = [row.name for row in self.rows]
        if isinstance(seconds, Mapping):
            return [float(seconds.get(name, 0.0)) for name in names]
        if not isinstance(seconds, Sequence):
            return [0.0, *(float(seconds) for _ in names[1:])]
        if len(seconds) != len(names):
            raise PlanError(f"seconds has {len(seconds)} numbers for {len(names)} rows ({', '.join(names)})")
        return list(map(float, seconds))


def ticks(
    stages: Sequence[BatchStage],
    fold: Fold | None,
    *,
    depth: int,
    threads: Sequence[bool],
    streamed: bool,
    order: Sequence[int | str] | None = None,
) -> TickPlan:
    """The plan of an overlap.

    ``threads`` has an entry for the source and for each stage. Where devices have streams (``streamed``), a stage with
    one is a lane of its own. Without an order what runs ahead comes first, the older batch before the newer, so that it
    is queued before the work of the step.

    Raises:
        PlanError: the order runs a stage on a batch before the one that makes it, or leaves some out; a lead is too
            large, or larger than that of the stage before.
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
    numbers = _order(rows, order)
    _check(rows, numbers)
    return TickPlan(tuple(rows), numbers, tuple(lanes))


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


def _order(rows: Sequence[TickRow], order: Sequence[int | str] | None) -> tuple[int, ...]:
    inline = [number for number, row in enumerate(rows) if not row.thread]
    others = tuple(number for number, row in enumerate(rows) if row.thread)
    if order is None:
        return (*others, *sorted(inline, key=lambda number: (rows[number].lead == 0, rows[number].lead, number)))
    by_name = {row.name: number for number, row in enumerate(rows)}
    numbers: list[int] = []
    for entry in order:
        number = (
            by_name.get(entry) if isinstance(entry, str) else entry + 1 if type(entry) is int and entry >= 0 else None
        )
        if number is None or number >= len(rows):
            raise PlanError(f"order names {entry!r}, which is no stage; there are: {', '.join(map(repr, by_name))}")
        numbers.append(number)
    if 0 in inline and 0 not in numbers:  # the source is drawn for the first stage, unless it has a place of its own
        numbers.insert(numbers.index(1) if 1 in numbers else 0, 0)
    if sorted(numbers) != inline:
        names = ", ".join(repr(rows[number].name) for number in inline)
        raise PlanError(f"order names every stage of the loop's thread once: {names}; got {list(order)!r}")
    return (*others, *numbers)


def _check(rows: Sequence[TickRow], order: tuple[int, ...]) -> None:
    turns = {number: turn for turn, number in enumerate(order)}
    faults: list[str] = []
    for number, row in enumerate(rows):
        before = rows[number - 1]
        if number and before.lead < row.lead:
            faults.append(
                f"{row.name!r} (lead {row.lead}) would run on a batch before {before.name!r} (lead {before.lead}) has "
                "made it; leads fall from stage to stage"
            )
        # Also where stages with threads stand between the two: the loop would wait for its own later work.
        faults += [
            f"{row.name!r} stands before {earlier.name!r} in the order, and works on the same batch"
            for other, earlier in enumerate(rows[:number])
            if earlier.lead == row.lead and not (earlier.thread or row.thread) and turns[other] > turns[number]
        ]
    raise_all("this plan of an overlap cannot run:", faults)
