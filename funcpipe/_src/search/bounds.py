"""Lower bounds by sums: work, chains of microbatches, and memory. For problems of any size.

Zero bubble (arXiv 2401.10241, appendix B) has the bound from the memory of the warmup. The others
follow from the dependencies. All hold for unequal stages and any placement. A bound is for the span
of a device; adding the least time before the device's first start gives a bound of the makespan.
`windows` looks at all actions of smaller problems, and gives larger bounds.

With unequal microbatches, work counts all of them, the way there and back the longest, a warmup the
longest that fit, and all other times and memory the smallest. That holds for any order of
microbatches.
"""

from __future__ import annotations

from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from funcpipe._src.search.problem import ROUNDING, Problem
from funcpipe._src.search.windows import windows_bound


class LowerBound(NamedTuple):
    """A time that no schedule can beat."""

    value: float  # the time, in the unit of the cost
    binds: str  # the reason for the bound, in words


def lower_bound(problem: Problem) -> LowerBound:
    """Return the largest bound. Of equal bounds the first wins: work before memory, simple
    first."""
    there_and_back = LowerBound(
        _way(problem), "the path of one microbatch through all stages and back"
    )
    problem = problem.computing
    heads = _heads(problem)
    bounds: list[LowerBound] = []
    for device, stages in enumerate(problem.local):
        if not stages:
            continue
        spans = [(problem.work[device], f"the work of device {device}"), _chains(problem, device)]
        if not problem.remat and not problem.offload:
            memory = f"the memory of device {device}"
            spans += [
                (_warm_up(problem, device), f"{memory}, until its first gradient comes"),
                (_area(problem, device), f"{memory}, while gradients are on their way"),
            ]
        head = heads[stages[0]] if problem.objective == "makespan" else 0.0
        bounds += [LowerBound(value + head, binds) for value, binds in spans]
    value, device = windows_bound(problem)
    bounds.append(
        LowerBound(value, f"the memory and the paths of microbatches, on device {device}")
    )
    if problem.objective == "makespan":
        bounds.append(there_and_back)
    return max(bounds, key=lambda bound: bound.value, default=LowerBound(0.0, "nothing"))


def _way(problem: Problem) -> float:
    """Return the time of the longest microbatch: an overlap does not make an action shorter."""
    waits = sum(problem.waits[0]) + sum(problem.waits[1])
    return problem.longest * (sum(problem.forward) + sum(problem.backward)) + waits


def _heads(problem: Problem) -> list[float]:
    """Return the earliest start of each stage's first forward."""
    hops = problem.waits[0]
    steps = [forward + hop for forward, hop in zip(problem.forward, hops, strict=True)]
    return [0.0, *accumulate(steps)][: problem.num_stages]


def _tails(problem: Problem) -> list[float]:
    """Return, for each stage, the least time from the end of its backward to the end of stage
    0's, without W."""
    steps = zip(problem.waits[1][1:], problem.backward, strict=False)
    return [0.0, *accumulate(hop + time for hop, time in steps)]


def _chains(problem: Problem, device: int) -> tuple[float, str]:
    """Return the bound of a device's span by the work of later devices, and its reason.

    Between the first forward and the last backward of the device, all microbatches pass through
    each later device. The first must get there, and the last must come back.
    """
    heads, tails, backward = _heads(problem), _tails(problem), problem.backward
    first = problem.local[device][0]
    split = problem.inward[first] + problem.weight[first]
    closing = min(split, problem.whole_backward[first]) - backward[first]
    chains = [(0.0, "")]
    for other, stages in enumerate(problem.local):
        beyond = [stage for stage in stages if stage >= first]
        if beyond:
            way = heads[beyond[0]] - heads[first]
            through = problem.total * sum(
                problem.forward[stage] + backward[stage] for stage in beyond
            )
            chains.append(
                (
                    way + through + tails[beyond[0]] - tails[first] + closing,
                    f"the work of device {other}, and the way there and back from device {device}",
                )
            )
    return max(chains, key=itemgetter(0))


def _warm_up(problem: Problem, device: int) -> float:
    """Return the bound of a device's span by the memory of the warmup.

    Before its first gradient arrives, a device can run only the forwards whose residuals fit.
    """
    limit, stages = problem.limits[device], problem.local[device]
    first, last = stages[0], stages[-1]
    room = limit
    forward_time = 0.0
    # Maximize the forward time: fill the memory with the stages that have the most time per memory.
    for stage in sorted(
        stages, key=lambda s: problem.residual[s] / max(problem.forward[s], 1e-300)
    ):
        size, fitting = problem.residual[stage], problem.num_microbatches
        if size:
            fitting = min(fitting, room / size * (1 + ROUNDING))
        if len(stages) == 1:
            fitting = int(fitting)
        forward_time += fitting * problem.forward[stage] * problem.longest
        room -= fitting * size
    return problem.work[device] + max(0.0, _round_trip(problem, first, last) - forward_time)


def _area(problem: Problem, device: int) -> float:
    """Return the bound of a device's span by its memory: each residual occupies memory for its
    round trip."""
    limit = problem.limits[device]
    if limit in (0.0, float("inf")):
        return 0.0
    total = sum(
        _lying(problem, stage, _round_trip(problem, stage, stage))
        for stage in problem.local[device]
    )
    return problem.num_microbatches * total / limit


def _lying(problem: Problem, stage: int, trip: float) -> float:
    """Return the least (memory x time) of a stage's residual with a given round trip."""
    residual, rest = problem.residual[stage], problem.rest[stage]
    split = residual * (trip + problem.inward[stage]) + rest * problem.weight[stage]
    return min(split, residual * (trip + problem.whole_backward[stage]))


def _round_trip(problem: Problem, first: int, last: int) -> float:
    """Return the least time from the start of F in one stage to the start of the backward in a
    later (or the same) stage."""
    heads, tails, backward = _heads(problem), _tails(problem), problem.backward
    end = problem.num_stages - 1
    turn = heads[end] + problem.forward[end] - heads[first]
    return turn if last == end else turn + backward[end] + tails[end] - tails[last] - backward[last]
