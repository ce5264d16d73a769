"""Our families and the tables of torch.distributed.pipelining, where those are right: the same word
for word."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs

from funcpipe._src.core.errors import ScheduleError
from funcpipe._src.data.schedule import Schedule
from funcpipe._src.schedules.families import (
    fill_drain,
    interleaved,
    looped_bfs,
    one_f_one_b,
    zero_bubble,
)
from funcpipe._src.schedules.legal import check


def torch_rows(cls: type, devices: int, chunks: int, microbatches: int) -> list[str]:
    """The order of every rank as text, computed by torch's own class without a process group."""
    made: Any = object.__new__(cls)
    made.pp_group_size, made.n_local_stages, made._n_microbatches = devices, chunks, microbatches
    made._stages, made._num_stages = [None] * chunks, devices * chunks
    made.number_of_rounds = max(1, microbatches // devices)
    made.microbatches_per_round = microbatches // made.number_of_rounds
    if issubclass(cls, theirs.PipelineScheduleSingle):
        rows: Iterable[Any] = made._get_pipeline_order().values()
    else:
        rows = [made._calculate_single_rank_operations(rank) for rank in range(devices)]
    return [
        " ".join(str(a) for a in row if a is not None and "REDUCE" not in str(a)) for row in rows
    ]


@pytest.mark.parametrize("devices", range(1, 7))
@pytest.mark.parametrize(
    ("cls", "family"),
    [
        (theirs.ScheduleInterleaved1F1B, interleaved),
        (theirs.ScheduleInterleavedZeroBubble, zero_bubble),
    ],
)
def test_looped_families_equal_torchs(
    cls: type, family: Callable[..., Schedule], devices: int
) -> None:
    """On the whole grid of counts that torch allows (its rounds must be even)."""
    for chunks in range(1, 5):
        for count in [m for m in range(1, 21) if m % max(1, m // devices) == 0]:
            ours = str(family(devices * chunks, count, num_devices=devices)).split("\n")
            assert torch_rows(cls, devices, chunks, count) == ours


@pytest.mark.parametrize("devices", range(1, 6))
def test_looped_bfs_equals_torchs_but_for_the_direction_of_the_backwards(devices: int) -> None:
    """Forwards are the same; backwards visit the same stages, each in ascending microbatch
    order."""
    for chunks in range(1, 4):
        for count in range(1, 7):
            schedule = looped_bfs(devices * chunks, count, num_devices=devices)
            for ours, text in zip(
                schedule.orders,
                torch_rows(theirs.ScheduleLoopedBFS, devices, chunks, count),
                strict=True,
            ):
                words = text.split()
                half = len(words) // 2
                turned = [words[at : at + count][::-1] for at in range(half, 2 * half, count)]
                assert words[:half] + [word for block in turned for word in block] == list(
                    map(str, ours)
                )


@pytest.mark.parametrize("stages", range(1, 6))
def test_fill_drain_equals_torchs_gpipe(stages: int) -> None:
    """All forwards, all backwards."""
    for count in range(1, 9):
        assert torch_rows(theirs.ScheduleGPipe, stages, 1, count) == str(
            fill_drain(stages, count)
        ).split("\n")


def test_torchs_printed_1f1b_is_wrong_on_the_last_rank_and_check_says_so() -> None:
    """The other ranks agree; the last has no 3F0 and a 3F8 that does not exist. Their runtime runs
    another order."""
    table, ours = torch_rows(theirs.Schedule1F1B, 4, 1, 8), str(one_f_one_b(4, 8)).split("\n")
    assert ours[:3] == table[:3]
    with pytest.raises(ScheduleError, match="3F0 is missing"):
        check(Schedule.parse("\n".join(table)))
