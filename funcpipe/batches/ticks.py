"""The plan of an overlap as plain data: which row works on which batch at a tick."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from funcpipe.batches.stage import BatchStage, Fold
from funcpipe.core.errors import PlanError, bullets
from funcpipe.core.result import Span, Timeline
from funcpipe.core.schedule import Action, Kind


class TickRow(NamedTuple):
    """A row of the plan: the source, a stage or the fold.

    Attributes:
        name: of the stage.
        lead: at tick t it works on batch ``t + lead`` (in a thread: on batches up to that one).
        lane: which of `Ticks.lanes` does the work.
        thread: has it a thread of its own.
        lag: of the stage.
    """

    name: str
    lead: int
    lane: int
    thread: bool
    lag: int | None = None


@dataclass(frozen=True)
class Ticks:
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
        done: list[dict[int, float]] = [{} for _ in self.rows]
        spans: list[Span] = []
        for tick in range(-self.depth, count):
            gate = done[-1].get(tick - 1, 0.0)  # when the batch before was handed out
            pending = [number for number in self.order if 0 <= tick + self.rows[number].lead < count]
            while pending:
                number = self._next(pending, done, tick)
                pending.remove(number)
                row, batch = self.rows[number], tick + self.rows[number].lead
                start = max(done[number - 1][batch] if number else 0.0, free[row.lane], gate)
                end = start + times[number]
                done[number][batch] = free[row.lane] = end
                if times[number]:
                    spans.append(Span(row.lane, start, end, Action(Kind.F, number, batch)))
        spans.sort(key=lambda span: (span.start, span.device))
        return Timeline(tuple(spans), len(self.lanes), name="overlap", lanes=self.lanes)

    def _next(self, pending: list[int], done: list[dict[int, float]], tick: int) -> int:
        """The first row whose batch is there; those of the loop's thread keep their order."""
        own = next((number for number in pending if not self.rows[number].thread), None)
        for number in pending:
            batch = tick + self.rows[number].lead
            if (not number or batch in done[number - 1]) and (self.rows[number].thread or number == own):
                return number
        raise AssertionError("a checked plan always has a next row")

    def _times(self, seconds: float | Sequence[float] | Mapping[str, float]) -> list[float]:
        if isinstance(seconds, Mapping):
            return [float(seconds.get(row.name, 0.0)) for row in self.rows]
        if isinstance(seconds, Sequence):
            if len(seconds) != len(self.rows):
                raise PlanError(f"seconds has {len(seconds)} numbers for {len(self.rows)} rows ({', '.join(row.name for row in self.rows)})")  # fmt: skip
            return [float(one) for one in seconds]
        return [0.0, *(float(seconds) for _ in self.rows[1:])]


def ticks(
    stages: Sequence[BatchStage],
    fold: Fold | None,
    *,
    depth: int,
    threads: Sequence[bool],
    lanes: Sequence[str],
    order: Sequence[int | str] | None = None,
) -> Ticks:
    """The plan of an overlap.

    Args:
        stages, fold: with names.
        depth: how many batches ahead at most.
        threads: for the source and each stage, whether it has a thread.
        lanes: for the source, each stage and the fold, the name of what does its work.
        order: of the rows of the loop's thread, by number (0 is the first stage) or name; None: what runs ahead first, the
            older batch before the newer, so that it is queued before the work of the step.

    Raises:
        PlanError: the order runs a stage on a batch before the one that makes it, or leaves some out; a lead is too
            large, or larger than that of the stage before.
    """
    leads = _leads(stages, fold, depth)
    leads = [leads[0] if leads else depth, *leads, *([0] if fold else [])]
    names = ["source", *(one.name for one in stages), *([fold.name] if fold else [])]
    lags = [None, *(one.lag for one in stages), *([None] if fold else [])]
    hosts = [*threads, *([False] if fold else [])]
    shown = list(dict.fromkeys(lanes))
    rows = tuple(
        TickRow(name, lead, shown.index(lane), thread, lag)
        for name, lead, lane, thread, lag in zip(names, leads, lanes, hosts, lags, strict=True)
    )
    places = _order(rows, order)
    _check(rows, places)
    return Ticks(rows, places, tuple(shown))


def _leads(stages: Sequence[BatchStage], fold: Fold | None, depth: int) -> list[int]:
    """What is asked for, and else the depth in even steps down to the fold, or to the loop itself.

    No less than what a later stage asks for, and no more than an earlier one or the stage's own lag.
    """
    steps = max(1, len(stages))
    asked = [one.lead for one in stages]
    for one in stages:
        if one.lead is not None and one.lead > depth > 0:
            raise PlanError(f"{one.name!r} has lead={one.lead}, more than depth={depth}; give overlap(depth={one.lead})")  # fmt: skip
    if depth == 0:
        return [0] * len(stages)
    out: list[int] = []
    most = depth
    for at, one in enumerate(stages):
        later = max((lead for lead in asked[at + 1 :] if lead is not None), default=0)
        even = max(later, -(-depth * (steps - at) // steps))
        lead = min(most, even, depth if one.lag is None else one.lag) if one.lead is None else one.lead
        most = min(most, lead)
        out.append(lead)
    return out


def _order(rows: tuple[TickRow, ...], order: Sequence[int | str] | None) -> tuple[int, ...]:
    if order is None:

        def rank(at: int) -> tuple[bool, bool, int, int]:
            row = rows[at]
            return (False, False, 0, at) if row.thread else (True, row.lead == 0, row.lead, at)

        return tuple(sorted(range(len(rows)), key=rank))
    by_name = {row.name: at for at, row in enumerate(rows)}
    wanted: list[int] = []
    for one in order:
        at = by_name.get(one) if isinstance(one, str) else one + 1 if type(one) is int and one >= 0 else None
        if at is None or at >= len(rows):
            raise PlanError(f"order names {one!r}, which is no stage; there are: {', '.join(map(repr, by_name))}")
        wanted.append(at)
    own = [at for at, row in enumerate(rows) if not row.thread]
    if 0 in own and 0 not in wanted:  # the source is drawn for the first stage, unless it has a place of its own
        wanted.insert(wanted.index(1) if 1 in wanted else 0, 0)
    if sorted(wanted) != own:
        raise PlanError(f"order names every stage of the loop's thread once: {', '.join(repr(rows[at].name) for at in own)}; got {list(order)!r}")  # fmt: skip
    return (*(at for at, row in enumerate(rows) if row.thread), *wanted)


def _check(rows: tuple[TickRow, ...], order: tuple[int, ...]) -> None:
    place = {number: at for at, number in enumerate(order)}
    faults: list[str] = []
    for at, row in enumerate(rows):
        if at and rows[at - 1].lead < row.lead:
            faults.append(f"{row.name!r} (lead {row.lead}) would run on a batch before {rows[at - 1].name!r} (lead {rows[at - 1].lead}) has made it; leads fall from stage to stage")  # fmt: skip
        # Also where stages with threads stand between the two: the loop would wait for its own later work.
        own = [n for n in range(at) if rows[n].lead == row.lead and not (rows[n].thread or row.thread)]
        faults += [
            f"{row.name!r} stands before {rows[n].name!r} in the order, and works on the same batch"
            for n in own
            if place[n] > place[at]
        ]
    if faults:
        raise PlanError(bullets("this plan of an overlap cannot run:", faults))
