"""Where a sequence is cut into slices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import sqrt

from funcpipe._src.core.errors import ScheduleError, raise_all
from funcpipe._src.schedules.counts import counted


def balanced_slices(length: int, num_slices: int, *, attention: float) -> tuple[int, ...]:
    """The lengths of slices that take equally long, where each attends to all that came before it.

    The last one costs most where all have one length, and a pipeline is as slow as its longest
    action. These get shorter and shorter, as Seq1F1B has them (arXiv 2406.03488):
    ``make_plan(slices=)`` cuts so, and ``Cost(slices=, attention=)`` knows what they take.

    >>> lengths = fp.schedules.balanced_slices(4096, 4, attention=0.5)
    >>> lengths, [round(time, 3) for time, _ in fp.Cost(slices=lengths, attention=0.5).slice_shares(4)]
    ((1499, 1032, 839, 726), [0.25, 0.25, 0.25, 0.25])

    Args:
        length: of the sequence.
        num_slices: how many slices.
        attention: which share of a stage's time attention takes for the whole sequence, as in
            `Cost`.

    Raises:
        ScheduleError: a count that is not positive, more slices than the sequence is long, or no
            share from 0 to 1.
    """
    faults: list[str] = []
    counts = counted({"length": length, "num_slices": num_slices}, faults)
    if not faults and counts["length"] < counts["num_slices"]:
        faults.append(f"length is at least num_slices; got {length} for {num_slices} slices")
    if not isinstance(attention, (int, float)) or not 0 <= attention <= 1:
        faults.append(f"attention is a share from 0 to 1; got {attention!r}")
    raise_all("no such slices:", faults, ScheduleError)
    linear = 1 - attention

    def end(done: float) -> float:
        """Up to where it takes this share of the time: ``linear x + attention x² = done``, solved
        without cancellation."""
        return 2 * done / (linear + sqrt(linear * linear + 4 * attention * done))

    ends = [0.0, *(end(number / num_slices) for number in range(1, num_slices + 1))]
    return whole_lengths(length, [after - before for before, after in pairwise(ends)])


def whole_lengths(length: int, shares: Sequence[float]) -> tuple[int, ...]:
    """A length in parts by shares, in any unit: whole numbers, none of them 0.

    >>> whole_lengths(8, (3, 1)), whole_lengths(4, (1, 1000, 1))
    ((6, 2), (1, 2, 1))
    """
    count = len(shares)
    ends = [round(length * end / sum(shares)) for end in accumulate(shares)]
    for number in range(count):  # none is empty: from the left, then from the right
        ends[number] = max(ends[number], number + 1)
    for number in reversed(range(count - 1)):
        ends[number] = min(ends[number], ends[number + 1] - 1)
    return tuple([end - start for start, end in pairwise((0, *ends))])
