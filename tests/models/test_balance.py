"""`balance` is exact: it is compared with every partition there is."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

import funcpipe as fp


def parts(count, num_parts):
    for cuts in combinations(range(1, count), num_parts - 1):
        yield list(zip((0, *cuts), (*cuts, count), strict=True))


def test_equals_brute_force():
    """On random vectors, zeros and giants included."""
    rng = random.Random(0)
    for _ in range(200):
        count = rng.randint(1, 10)
        costs = [rng.choice([0, 1, 2, 10**9, rng.randint(0, 50)]) for _ in range(count)]
        num_parts = rng.randint(1, count)
        found = fp.models.balance(costs, num_parts)
        assert count == sum(found)
        assert 1 <= min(found)
        best = min(max(sum(costs[a:b]) for a, b in one) for one in parts(count, num_parts))
        assert best == found.bottleneck == max(found.times)
        assert found.bound <= best


def test_equals_brute_force_with_everything():
    """Communication, unequal devices, limits and remat at once, against a formula written here."""
    rng = random.Random(1)
    refused = 0
    for _ in range(100):
        n = rng.randint(2, 7)
        k = rng.randint(1, min(n, 4))
        f, b, m = ([rng.randint(0, 9) for _ in range(n)] for _ in range(3))
        comm, fixed = (
            [rng.randint(0, 9) for _ in range(n - 1)],
            [rng.randint(0, 3) for _ in range(n)],
        )
        speeds, flying = [rng.choice([1, 2, 4]) for _ in range(k)], [k - s for s in range(k)]
        limit = [rng.randint(10, 40) for _ in range(k)]

        def time(s, i, j):
            border = (comm[i - 1] if i else 0) + (comm[j - 1] if j < n else 0)
            fits = [
                (sum(f[i:j]) * (1 + again) + sum(b[i:j]) + border) / speeds[s]
                for again in (0, 1)
                if sum(fixed[i:j]) + (1 if again else flying[s]) * sum(m[i:j]) <= limit[s]
            ]
            return min(fits, default=float("inf"))

        best = min(max(time(s, *ends) for s, ends in enumerate(one)) for one in parts(n, k))
        cost = fp.Cost(f, [0] * n, [0] * n, backward=b, residual=m)
        more = {"comm": comm, "fixed": fixed, "speeds": speeds, "in_flight": flying, "limit": limit}
        if best == float("inf"):
            refused += 1
            with pytest.raises(fp.PlanError, match="fit the memory limit"):
                fp.models.balance(cost, k, remat="auto", **more)
        else:
            found = fp.models.balance(cost, k, remat="auto", **more)
            assert best == found.bottleneck
            assert found.bound <= best
    assert 0 < refused < 100


@pytest.mark.parametrize(
    ("costs", "num_parts", "best", "theirs"),
    [
        ([1, 1, 1, 1, 3, 3], 5, 3, float("inf")),
        ([1, 1, 2, 2], 3, 2, 4),
        ([1] * 7, 4, 2, 4),
        ([4] + [10] * 32 + [35], 8, 50, 75),
        ([8, 8, 6, 6, 4, 4, 2, 2, 2, 2, 4, 4, 6, 6, 8, 8], 4, 22, 26),
        ([40, 36, 30, 28, 24, 20, 16, 12, 8, 6, 4, 2], 4, 68, 76),
        ([1] * 12 + [3], 4, 4, 6),
        ([30715, 29233, 29106, 29078, 28850, 28919, 28924, 41678], 4, 70602, 86693),
        ([5] * 7 + [6], 3, 15, 21),
        ([1, 1, 1, 2, 2], 4, 2, float("inf")),
        ([1, 1, 1, 1, 2, 2], 5, 2, float("inf")),
    ],
)
def test_never_worse_than_blockpartition(costs, num_parts, best, theirs):
    """What torchgpipe's finds; infinity where it never ends, or returns a part twice."""
    assert best == fp.models.balance(costs, num_parts).bottleneck <= theirs


@pytest.mark.parametrize("borders", [False, True])
def test_long_chains(borders):
    """Against a plain dynamic program, without borders and with them, where no shortcut applies."""
    rng = random.Random(3)
    costs, comm = [rng.randint(0, 20) for _ in range(120)], [rng.randint(0, 20) for _ in range(119)]
    border, total = [0, *comm, 0], [sum(costs[:i]) for i in range(121)]
    border = border if borders else [0] * 121
    best = [0, *[float("inf")] * 120]
    for _ in range(9):
        best = [
            min(
                (max(best[i], total[j] - total[i] + border[i] + border[j]) for i in range(j)),
                default=float("inf"),
            )
            for j in range(121)
        ]
    options = {"comm": comm} if borders else {}
    assert best[-1] == fp.models.balance(costs, 9, **options).bottleneck


@pytest.mark.slow
def test_many_layers_end():
    """More rows than one piece of the matrix has; the first parts have the most layers."""
    rng = random.Random(2)
    found = fp.models.balance([rng.random() for _ in range(1_000)], 64)
    assert (64, 1_000) == (len(found), sum(found))
    assert (*[16] * 62, 8) == fp.models.balance([1] * 1_000, 63)


def test_equal_cuts_put_the_most_layers_first():
    """Also where sums of floats round: three times .1 is more than .3."""
    assert (2, 1, 1) == fp.models.balance([0.1] * 4, 3)
    assert (3, 3, 3, 1) == fp.models.balance([0.1] * 10, 4)


def test_least_limit_would_do():
    with pytest.raises(fp.PlanError, match="limit=4;"):
        fp.models.balance([1] * 4, 2, memory=2, limit=3)
    assert (2, 2) == fp.models.balance([1] * 4, 2, memory=2, limit=4)
    with pytest.raises(
        fp.PlanError, match="limit=1234563;"
    ):  # all digits: a rounded limit would be refused again
        fp.models.balance([1] * 4, 2, memory=[1234562, 0, 0, 1234563], limit=3)
    assert fp.models.balance([1] * 4, 2, memory=[1234562, 0, 0, 1234563], limit=1234563)


@pytest.mark.parametrize("bad", [float("nan"), -1, float("inf"), "x"])
def test_bad_numbers_are_refused_together(bad):
    with pytest.raises(fp.PlanError, match=r"(?s)costs: numbers from 0; got .*comm has 3"):
        fp.models.balance([1, bad], 2, comm=[1, 2, 3])


@pytest.mark.parametrize("count", [0, 4, True, 1.5])
def test_parts_from_one_to_layers(count):
    with pytest.raises(fp.PlanError, match="num_parts is from 1"):
        fp.models.balance([1, 2, 3], count)
