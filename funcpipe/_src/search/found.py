"""The result of a search: the best schedule, with a lower bound for all schedules."""

from __future__ import annotations

from dataclasses import dataclass

from funcpipe._src.core.progress import gap_words
from funcpipe._src.core.shown import guarded
from funcpipe._src.data.result import Timeline, shares
from funcpipe._src.data.schedule import Action, Schedule
from funcpipe._src.search.problem import Objective, gap_of


@dataclass(frozen=True)
class Found:
    """The result of `search`: the best schedule, and a lower bound for all schedules.

    Attributes:
        schedule: the schedule, to run, draw or write to a file.
        timeline: the simulation of the schedule with the costs of the search.
        objective: the minimized quantity, "makespan" or "span".
        lower_bound: no schedule for these costs and limits is shorter, with any of the placements
            that the search tried.
        binds: the reason for the lower bound: the work or the memory of a device, or the path
            between devices; "a proof by the solver" if the solver raised the bound.
        source: the origin of the schedule: the name of a family, "rules", "moves" or "exact".
        evaluations: the number of simulated schedules.
        ended: the reason for the end of the search: "evaluations"; "seconds", so that the same call
            may find another schedule; or "bound", because the schedule is as short as the bound.
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
        """The end of the last action of one isolated batch."""
        return self.timeline.makespan

    @property
    def span(self) -> float:
        """The longest time of a device from its first start to its last end."""
        return self.timeline.span

    @property
    def value(self) -> float:
        """The minimized quantity: the makespan or the span."""
        return self.makespan if self.objective == "makespan" else self.span

    @property
    def peak(self) -> tuple[float, ...]:
        """The most memory of each device at a time."""
        return self.timeline.peak

    @property
    def critical_path(self) -> tuple[Action, ...]:
        """The chain of actions that ends with the last action, each waiting for the one before."""
        return self.timeline.critical_path

    @property
    def gap(self) -> float:
        """The share by which the schedule is longer than the lower bound. 0: it is the shortest."""
        return gap_of(self.value, self.lower_bound)

    def __str__(self) -> str:
        head = f"{self.schedule.name}: {self.objective} {self.value:.6g}"
        return (
            f"{head}, {gap_words(self.gap)}; bound by {self.binds}; {shares(self.timeline)}; peak "
            f"{max(self.peak):.6g}; {self.evaluations} schedules timed, ended by {self.ended}"
        )

    @guarded
    def __repr__(self) -> str:
        return str(self)
