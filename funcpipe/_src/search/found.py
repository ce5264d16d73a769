"""What a search found, with a bound that tells how far it is from the shortest."""

from __future__ import annotations

from dataclasses import dataclass

from funcpipe._src.core.shown import guarded
from funcpipe._src.data.result import Timeline, shares
from funcpipe._src.data.schedule import Action, Schedule
from funcpipe._src.search.problem import Objective, gap_of


@dataclass(frozen=True)
class Found:
    """The result of a search: a schedule, and a bound for all schedules.

    Attributes:
        schedule: an ordinary schedule, to run, draw or write to a file.
        timeline: its simulation under the costs of the search.
        objective: what was made short, "makespan" or "span".
        lower_bound: no schedule for these costs and limits takes less, with the stages placed in
            one of the ways that were tried.
        binds: what keeps a schedule from being shorter than the bound: the work or the memory of a
            device, or the way between devices; "a proof by the solver" where that raised it.
        source: the origin of the schedule: a family, "rules", "moves" or "exact".
        evaluations: how many schedules were timed.
        ended: what ended the search: "evaluations", "seconds" (then the same call may find another
            schedule), or "bound": nothing is left to find.
    """

    schedule: Schedule
    timeline: Timeline
    objective: Objective
    lower_bound: float
    binds: str
    source: str
    evaluations: int
    ended: str

    @property
    def makespan(self) -> float:
        """End of the last action of one isolated batch."""
        return self.timeline.makespan

    @property
    def span(self) -> float:
        """The longest time of a device from its first start to its last end."""
        return self.timeline.span

    @property
    def value(self) -> float:
        """What was made short: the makespan, or the span."""
        return self.makespan if self.objective == "makespan" else self.span

    @property
    def peak(self) -> tuple[float, ...]:
        """The most memory of each device."""
        return self.timeline.peak

    @property
    def critical_path(self) -> tuple[Action, ...]:
        """The chain of actions that ends with the last one."""
        return self.timeline.critical_path

    @property
    def gap(self) -> float:
        """How much longer than the lower bound it is, of 1; 0: nothing shorter exists."""
        return gap_of(self.value, self.lower_bound)

    def __str__(self) -> str:
        proof = (
            "nothing shorter exists"
            if not self.gap
            else f"at most {self.gap:.2%} above the shortest"
        )
        head = f"{self.schedule.name}: {self.objective} {self.value:.6g}"
        return (
            f"{head}, {proof}; bound by {self.binds}; {shares(self.timeline)}; peak "
            f"{max(self.peak):.6g}; {self.evaluations} schedules timed, ended by {self.ended}"
        )

    @guarded
    def __repr__(self) -> str:
        return str(self)
