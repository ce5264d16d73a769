"""Group samples of unequal length into microbatches that cost alike, and order the microbatches.

Numbers only: `Microbatches` takes the tensors. Minimizing the largest sum is NP-hard, so the groups
come from the largest differencing method (Karmarkar and Karp 1982, for several groups as in Korf
2009), improved by moves and swaps of single samples. The result is deterministic.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, NamedTuple

from funcpipe._src.core.errors import BatchError, raise_all
from funcpipe._src.core.shown import guarded

_ROUNDS = 200
"""The most moves and swaps. Each makes the largest group smaller; most batches need fewer than 20."""
_ROUNDING = 1e-12  # relative tolerance: sums of costs that differ by less count as equal


@dataclass(frozen=True)
class Packing:
    """The samples of each microbatch, in the order of microbatches, and their costs.

    >>> packing = fp.batches.pack([5, 4, 3, 3, 3], 2, cost=float)
    >>> packing.groups, packing.largest, packing.bound
    (((0, 1), (2, 3, 4)), 9.0, 9.0)

    Attributes:
        groups: the indices of the samples of each microbatch, ascending.
        costs: the cost of each microbatch, in the unit of the samples' costs.
        factors: the costs as multiples of their mean, for ``fp.Cost(microbatches=)``.
        sizes: the sums of lengths as multiples of their mean, for ``fp.Cost(microbatch_sizes=)``.
        bound: no packing has a smaller largest cost: the larger of the mean cost of a microbatch
            and the largest cost of a sample.
    """

    groups: tuple[tuple[int, ...], ...]
    costs: tuple[float, ...]
    factors: tuple[float, ...]
    sizes: tuple[float, ...]
    bound: float

    @property
    def largest(self) -> float:
        """The largest cost of a microbatch."""
        return max(self.costs)

    @property
    def excess(self) -> float:
        """The share by which the largest cost exceeds the lower bound."""
        return self.largest / self.bound - 1

    @guarded
    def __repr__(self) -> str:
        samples = sum(map(len, self.groups))
        return (
            f"<Packing of {samples} samples in {len(self.groups)} microbatches: largest cost "
            f"{self.largest:.6g}, lower bound {self.bound:.6g}>"
        )


def pack(
    lengths: Sequence[float],
    num_microbatches: int,
    *,
    cost: Callable[[float], float] | None = None,
    attention: float = 0.0,
) -> Packing:
    """Group samples into microbatches that cost alike, and order them for a pipeline.

    A pipeline is about as slow as its largest microbatch. So the samples are grouped by the largest
    differencing method, improved by moves and swaps. In the order of microbatches the smallest are
    at both ends and the largest in the middle. In simulations of 1F1B and zero-bubble schedules
    this order is the shortest, because all devices wait for the first and the last microbatch.

    >>> packing = fp.batches.pack([900, 500, 400, 100, 80, 20], 3, attention=0.5)
    >>> packing.groups, [round(factor, 2) for factor in packing.factors]
    (((1,), (0,), (2, 3, 4, 5)), [0.69, 1.6, 0.71])
    >>> cost = fp.Cost(microbatches=packing.factors, microbatch_sizes=packing.sizes)
    >>> round(fp.simulate(fp.schedules.one_f_one_b(2, 3), cost).makespan, 2)
    12.18

    Args:
        lengths: the length of each sample, in tokens, rows or patches: positive numbers.
        num_microbatches: the number of microbatches, at most the number of samples.
        cost: the time of a sample of a length, in any unit. Costs of the samples of a microbatch
            add up. None: computed from ``attention``.
        attention: the share ``a`` of the longest sample's time that attention takes, from 0 to 1.
            The time of attention grows with the square of the length: a sample of the length x, as
            a share of the longest, costs ``(1 - a) x + a x²``. Default: 0, the length alone.

    Returns:
        A `Packing`. Cut the batch with ``fp.Microbatches([x[list(group)] for group in
        packing.groups])``.

    Raises:
        BatchError: a length or a cost is not a positive number, there are fewer samples than
            microbatches, or both ``cost`` and ``attention`` are given.
    """
    costs = _checked(lengths, num_microbatches, cost, attention)
    groups = _improved(_differenced(costs, num_microbatches), costs)
    groups = _small_ends(sorted(groups, key=lambda group: (group.cost, group.samples)))
    sums = [sum(lengths[sample] for sample in group.samples) for group in groups]
    totals = [group.cost for group in groups]
    mean, mean_length = (sum(values) / num_microbatches for values in (totals, sums))
    return Packing(
        tuple(tuple(group.samples) for group in groups),
        tuple(totals),
        tuple(total / mean for total in totals),
        tuple(length / mean_length for length in sums),
        max(mean, *costs),
    )


def _checked(lengths: Any, num_microbatches: Any, cost: Any, attention: Any) -> list[float]:
    """Return the cost of each sample. Raises BatchError with all faults of the arguments."""
    faults: list[str] = []
    if not isinstance(lengths, Sequence) or isinstance(lengths, (str, bytes)):
        hint = "; give lengths.tolist()" if hasattr(lengths, "tolist") else ""
        faults.append(
            "lengths must be a sequence with the length of each sample; got a "
            f"{type(lengths).__name__}{hint}"
        )
        lengths = ()
    faults += _wrong("length", lengths)
    if type(num_microbatches) is not int or num_microbatches < 1:
        faults.append(f"num_microbatches must be a positive integer; got {num_microbatches!r}")
    elif not faults and num_microbatches > len(lengths):
        faults.append(
            f"{len(lengths)} samples cannot fill {num_microbatches} microbatches; give "
            "num_microbatches= at most the number of samples"
        )
    if not isinstance(attention, (int, float)) or not 0 <= attention <= 1:
        faults.append(f"attention must be a share from 0 to 1; got {attention!r}")
    elif cost is not None and attention:
        faults.append("give either cost= or attention=, not both")
    if cost is not None and not callable(cost):
        faults.append(
            f"cost must be a function from a length to a time; got a {type(cost).__name__}"
        )
    raise_all("pack cannot use these arguments:", faults, BatchError)
    if cost is None:
        longest = max(lengths)
        shares = [length / longest for length in lengths]
        return [(1 - attention) * share + attention * share * share for share in shares]
    costs: list[Any] = [cost(length) for length in lengths]
    raise_all("pack cannot use these costs:", _wrong("cost", costs), BatchError)
    return costs


def _wrong(noun: str, values: Sequence[Any]) -> list[str]:
    """Return a fault for the first value that is not a positive, finite number."""
    for sample, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < inf:
            return [f"the {noun} of sample {sample} must be a positive number; got {value!r}"]
    return []


class _Group(NamedTuple):
    """The samples of a microbatch, and their cost."""

    cost: float
    samples: list[int]


def _differenced(costs: Sequence[float], count: int) -> list[_Group]:
    """Group samples by the largest differencing method.

    A partial solution has ``count`` groups, the most expensive first. The two partial solutions
    whose groups differ most are joined: the most expensive group of one with the cheapest of the
    other. No group stays empty, because a join keeps as many groups filled as it can.
    """
    empty = [_Group(0.0, [])] * (count - 1)
    # By falling difference; the number makes ties deterministic.
    queue = [(-cost, at, [_Group(cost, [at]), *empty]) for at, cost in enumerate(costs)]
    if count == 1:
        return [_Group(sum(costs), [*range(len(costs))])]
    heapify(queue)
    while len(queue) > 1:
        (_, number, first), (_, _, second) = heappop(queue), heappop(queue)
        joined = sorted(
            (
                _Group(one.cost + other.cost, one.samples + other.samples)
                for one, other in zip(first, reversed(second), strict=True)
            ),
            key=lambda group: -group.cost,
        )
        heappush(queue, (joined[-1].cost - joined[0].cost, number, joined))
    return queue[0][2]


def _improved(groups: Sequence[_Group], costs: Sequence[float]) -> list[_Group]:
    """Move a sample out of the most expensive group, or swap it, while that helps.

    Of all moves and swaps, takes the one after which the more expensive of its two groups is
    cheapest.
    """
    groups = [_Group(group.cost, sorted(group.samples)) for group in groups]
    for _ in range(_ROUNDS):
        top = max(range(len(groups)), key=lambda at: groups[at].cost)
        high = groups[top].cost
        best, change = high * (1 - _ROUNDING), None
        for at, (low, samples) in enumerate(groups):
            if at == top:
                continue
            partners = sorted(samples, key=costs.__getitem__)
            prices = [costs[sample] for sample in partners]
            for sample in groups[top].samples:
                # The best partner is half of the difference cheaper; the next cheaper one may fit.
                place = bisect_left(prices, costs[sample] - (high - low) / 2)
                swaps = [
                    (prices[i], partners[i]) for i in (place - 1, place) if 0 <= i < len(prices)
                ]
                moves = [(0.0, None)] if len(groups[top].samples) > 1 else []
                for price, partner in [*swaps, *moves]:
                    given = costs[sample] - price
                    larger = max(high - given, low + given)
                    if larger < best:
                        best, change = larger, (at, sample, partner)
        if change is None:
            break
        at, sample, partner = change
        for group, gone, new in ((top, sample, partner), (at, partner, sample)):
            kept = {*groups[group].samples, new} - {gone, None}
            members = sorted(member for member in kept if member is not None)
            groups[group] = _Group(sum(costs[member] for member in members), members)
    return groups


def _small_ends(groups: Sequence[_Group]) -> list[_Group]:
    """Order ascending groups so that the smallest are at both ends."""
    return [*groups[::2], *groups[1::2][::-1]]
