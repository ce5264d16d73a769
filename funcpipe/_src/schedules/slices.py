"""Choose the lengths of slices, and round lengths to whole numbers.

`Cost.slice_shares` computes the times of slices from their lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import sqrt

from funcpipe._src.core.errors import ScheduleError, raise_all
from funcpipe._src.schedules.counts import counted


def balanced_slices(length: int, num_slices: int, *, attention: float) -> tuple[int, ...]:
    """Return the lengths of slices that take equally long under causal attention.

    With equal lengths, the last slice takes longest, because it attends to all earlier slices. A
    pipeline is as slow as its longest action. So these slices get shorter and shorter, as in
    Seq1F1B (arXiv 2406.03488). Give the lengths to ``make_plan(slices=)``, and to ``Cost(slices=,
    attention=)`` for simulations.

    >>> lengths = fp.schedules.balanced_slices(4096, 4, attention=0.5)
    >>> lengths, [round(time, 3) for time, _ in fp.Cost(slices=lengths, attention=0.5).slice_shares(4)]
    ((1499, 1032, 839, 726), [0.25, 0.25, 0.25, 0.25])

    Args:
        length: the length of the sequence.
        num_slices: the number of slices.
        attention: the share of a stage's time that attention takes for the whole sequence, from 0
            to 1, as in `Cost`.

    Returns:
        The length of each slice: whole numbers, at least 1, which add up to ``length``.

    Raises:
        ScheduleError: a count is not positive, there are more slices than ``length``, or
            ``attention`` is not a share from 0 to 1.
    """
    faults: list[str] = []
    counts = counted({"length": length, "num_slices": num_slices}, faults)
    if not faults and counts["length"] < counts["num_slices"]:
        faults.append(f"length must be at least num_slices; got {length} for {num_slices} slices")
    if not isinstance(attention, (int, float)) or not 0 <= attention <= 1:
        faults.append(f"attention must be a share from 0 to 1; got {attention!r}")
    raise_all("no such slices:", faults, ScheduleError)
    linear = 1 - attention

    def end(done: float) -> float:
        """Solve ``linear x + attention x² = done`` for x, in the form without cancellation."""
        return 2 * done / (linear + sqrt(linear * linear + 4 * attention * done))

    ends = [0.0, *(end(number / num_slices) for number in range(1, num_slices + 1))]
    return whole_lengths(length, [after - before for before, after in pairwise(ends)])


def whole_lengths(length: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Divide a length in proportion to shares, into whole numbers of at least 1.

    >>> whole_lengths(8, (3, 1)), whole_lengths(4, (1, 1000, 1))
    ((6, 2), (1, 2, 1))
    """
    count = len(shares)
    ends = [round(length * end / sum(shares)) for end in accumulate(shares)]
    # No slice may be empty: push ends apart from the left, then from the right.
    for number in range(count):
        ends[number] = max(ends[number], number + 1)
    for number in reversed(range(count - 1)):
        ends[number] = min(ends[number], ends[number + 1] - 1)
    return tuple([end - start for start, end in pairwise((0, *ends))])
