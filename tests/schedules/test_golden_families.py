"""The families as text: tests/golden has one file per case, to be read by people.

To write them anew, after a deliberate change: ``FUNCPIPE_GOLDEN=write python -m pytest
tests/schedules``, then look at the diff. The variable is the only way; nothing is ever written
without it.
"""

import os
import re
from collections.abc import Callable
from inspect import signature
from pathlib import Path

import pytest
from common import ON_A_LINE, ON_A_V, ON_BLOCKS_OR_LOOPS

import funcpipe as fp
from funcpipe._src.cli.words import FAMILIES
from funcpipe._src.data.schedule import Schedule
from funcpipe._src.schedules.families import (
    eager_one_f_one_b,
    fill_drain,
    interleaved,
    looped_bfs,
    one_f_one_b,
    zb_h2,
    zero_bubble,
)
from funcpipe._src.schedules.legal import check
from funcpipe._src.schedules.transforms import remat
from funcpipe._src.schedules.v_shape import dualpipe_v, v_adaptive, v_half, v_min, zbv
from funcpipe._src.search.starting_points import PUBLISHED

FOLDER = Path(__file__).parents[1] / "golden"
ZOO = (Path(__file__).parents[2] / "docs" / "zoo.md").read_text()
WRITE = os.environ.get("FUNCPIPE_GOLDEN") == "write"

Sizes = tuple[int, ...]


def forward_only(
    num_stages: int, num_microbatches: int, *, num_devices: int | None = None
) -> Schedule:
    """Fill-drain for evaluation."""
    return fill_drain(num_stages, num_microbatches, num_devices=num_devices, backward=False)


def fill_drain_remat_except_last(
    num_stages: int, num_microbatches: int, *, num_devices: int | None = None
) -> Schedule:
    """GPipe with checkpoints as torchgpipe has them."""
    last = num_microbatches - 1
    schedule = fill_drain(num_stages, num_microbatches, num_devices=num_devices)
    return remat(schedule, keep=lambda action: action.microbatch == last)


def one_f_one_b_remat(
    num_stages: int, num_microbatches: int, *, num_devices: int | None = None
) -> Schedule:
    """1F1B that keeps nothing."""
    return remat(one_f_one_b(num_stages, num_microbatches, num_devices=num_devices))


def zero_bubble_remat(
    num_stages: int, num_microbatches: int, *, num_devices: int | None = None
) -> Schedule:
    """ZB-H1 that computes the residuals of every stage but the first again."""
    schedule = zero_bubble(num_stages, num_microbatches, num_devices=num_devices)
    return remat(schedule, keep=lambda action: action.stage == 0)


def interleaved_in_groups(num_stages: int, num_microbatches: int, *, num_devices: int) -> Schedule:
    """Rounds of half the devices."""
    return interleaved(
        num_stages, num_microbatches, num_devices=num_devices, group=(num_devices + 1) // 2
    )


def v_adaptive_middle(
    num_stages: int, num_microbatches: int, *, num_devices: int | None = None
) -> Schedule:
    """Halfway between V-Min and ZB-V."""
    residuals = num_stages // 2 + (num_stages // 2 + 4) // 3
    return v_adaptive(num_stages, num_microbatches, num_devices=num_devices, residuals=residuals)


CASES: dict[Callable[..., Schedule], list[Sizes]] = {
    fill_drain: [(1, 1), (3, 5), (5, 3, 2)],
    forward_only: [(1, 1), (3, 4), (5, 2, 2)],
    one_f_one_b: [(2, 3), (4, 8), (5, 6, 2)],
    looped_bfs: [(4, 2, 2), (6, 4, 2), (6, 5, 3)],
    interleaved: [(4, 2, 2), (8, 8, 4), (6, 7, 2)],
    zero_bubble: [(2, 3), (4, 8), (8, 6, 4)],
    eager_one_f_one_b: [(2, 3), (4, 8), (5, 6, 2)],
    zb_h2: [(2, 3), (4, 8), (5, 6, 2)],
    zbv: [(4, 3), (8, 8), (6, 2)],
    dualpipe_v: [(4, 4), (6, 7), (8, 10)],
    v_half: [(4, 3), (6, 6), (8, 8)],
    interleaved_in_groups: [(4, 3, 2), (6, 6, 3), (12, 5, 4)],
    v_adaptive_middle: [(4, 3), (6, 6), (8, 8)],
    v_min: [(4, 3), (6, 6), (8, 8)],
    fill_drain_remat_except_last: [(1, 3), (3, 4), (4, 2, 2)],
    one_f_one_b_remat: [(2, 3), (4, 6), (4, 3, 2)],
    zero_bubble_remat: [(2, 3), (4, 6), (4, 4, 2)],
}
ALL = [(family, sizes) for family in CASES for sizes in CASES[family]]


def file_of(family: Callable[..., Schedule], sizes: Sizes) -> Path:
    """``one_f_one_b_5x6x2.txt``: stages, microbatches, and devices where they are not the
    stages."""
    return FOLDER / f"{family.__name__}_{'x'.join(map(str, sizes))}.txt"


@pytest.mark.parametrize(("family", "sizes"), ALL, ids=[file_of(*case).stem for case in ALL])
def test_the_family_is_word_for_word_the_golden_text(
    family: Callable[..., Schedule], sizes: Sizes
) -> None:
    """What is printed runs, so a change in any order must show up as a change in a file."""
    file = file_of(family, sizes)
    schedule = family(sizes[0], sizes[1], num_devices=sizes[2] if len(sizes) > 2 else None)
    check(schedule)
    if WRITE:
        file.write_text(f"{schedule}\n")
    assert file.read_text() == f"{schedule}\n"


@pytest.mark.parametrize("family", CASES)
def test_every_family_has_three_golden_sizes(family: Callable[..., Schedule]) -> None:
    """One size shows a pattern, three show a rule."""
    expected = sorted(file_of(family, sizes) for sizes in CASES[family])
    assert (3, expected) == (len(expected), sorted(FOLDER.glob(f"{family.__name__}_[0-9]*.txt")))


def is_family(function: object) -> bool:
    """Does it make a schedule of counts alone."""
    if not callable(function):
        return False
    parameters = list(signature(function).parameters.values())
    names = [parameter.name for parameter in parameters[:2]]
    return names == ["num_stages", "num_microbatches"] and all(
        one.default is not one.empty for one in parameters[2:]
    )


def test_a_family_stands_in_every_list() -> None:
    """In those of people (command line, search) and of tests; CONTRIBUTING.md has what each is
    for."""
    families = {
        function
        for name, function in vars(fp.schedules).items()
        if name.islower() and is_family(function)
    }
    assert interleaved in families
    lists = {
        "FAMILIES in funcpipe/_src/cli/words.py": FAMILIES.values(),
        "PUBLISHED in funcpipe/_src/search/starting_points.py": PUBLISHED,
        "CASES in tests/schedules/test_golden_families.py": CASES,
        "docs/zoo.md": [
            getattr(fp.schedules, name)
            for name in re.findall(r"^show\(fp\.schedules\.(\w+)", ZOO, re.M)
        ],
        "ON_BLOCKS_OR_LOOPS, ON_A_LINE or ON_A_V in tests/common.py": [
            *ON_BLOCKS_OR_LOOPS,
            *ON_A_LINE,
            *ON_A_V,
        ],
    }
    missing = [
        f"{family.__name__}: {place}"
        for family in families
        for place, row in lists.items()
        if family not in row
    ]
    assert not missing
