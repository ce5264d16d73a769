"""Several processes give the bits of one: every schedule, everything that a stage can have, any
number of rows."""

import pytest
from common import schedules

ALL = schedules(4, 4)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_schedule(pools, size):
    """10 and 3 rows over 4 microbatches: unequal ones, and fewer. Where processes have several lanes,
    these are threads there."""
    numbers = [number for number, schedule in enumerate(ALL) if schedule.num_devices >= size]
    for wrong in pools(size).all("bits", numbers, [10, 3], seconds=110):
        assert [] == wrong


@pytest.mark.parametrize(
    ("size", "compiled"), [(2, False), pytest.param(2, True, marks=pytest.mark.slow), (4, False)]
)
def test_slices(pools, size, compiled):
    """Carries stay in their process; lengths are agreed on."""
    # Compiled stages are traced for each length, which takes a minute on a quiet machine.
    for wrong in pools(size).all("sliced", compiled, seconds=400 if compiled else 110):
        assert [] == wrong


@pytest.mark.parametrize("size", [2, 4])
def test_carries_stay_in_their_process_between_runs(pools, size):
    """Each rank gives back what it got; all of them give one, or none does."""
    for wrong in pools(size).all("carried", seconds=60):
        assert [] == wrong


def test_sequences_of_different_lengths(pools):
    """Before anything runs."""
    for wrong in pools(2).all("other_lengths"):
        assert [] == wrong


def test_observers_see_the_values_of_their_process(pools):
    """By `run(observe=)`, each rank for its own stages."""
    for wrong in pools(2).all("observed", seconds=60):
        assert [] == wrong
