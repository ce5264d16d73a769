"""Whatever a process does, no other hangs: all raise soon, say whose fault it is, and the next run
is right."""

import signal
import time

import pytest
from rank_pool import Failed, within

import funcpipe as fp

SIZE = 4


@pytest.fixture
def pool(pools):
    """Four processes with ranks whose waits end after 5 s."""
    pool = pools(SIZE)
    assert [[]] * SIZE == pool.all("start", 5.0)
    yield pool
    if pool.whole:
        assert [[]] * SIZE == pool.all("stop")


def failed(pool, results, who):
    """Everyone failed within 2 s, and the others know who it was."""
    for rank, result in enumerate(results):
        assert isinstance(result, Failed), (rank, result)
        assert result.seconds < within(2)
        if rank != who:
            assert result.is_a(fp.PeerError), result.trace
            assert who == result.rank, result.trace
    for _ in range(2):
        assert [[]] * SIZE == pool.all("once")


@pytest.mark.parametrize(
    ("who", "place"), [(0, "F"), (3, "F"), (1, "B"), (3, "loss"), (2, "commit")]
)
@pytest.mark.parametrize("act", ["raise", "interrupt"])
def test_an_error_reaches_everyone(pool, who, place, act):
    results = pool.run("fails", who, place, act)
    failed(pool, results, who)
    own = "ValueError" if act == "raise" else "KeyboardInterrupt"
    assert own in results[who].kinds
    for rank in {0, 1, 2, 3} - {who}:
        assert own in results[rank].text
        assert f"rank {who}" in results[rank].text


def test_bad_input_of_one_rank_reaches_everyone(pool):
    results = pool.run("wrong_input", 2)
    failed(pool, results, 2)
    assert results[2].is_a(fp.PlanError)


@pytest.mark.parametrize("act", ["kill", "crash", "leave", "orphan"])
def test_a_process_that_ends_is_named(pools, act):
    pool = pools(SIZE)
    pool.all("start", 5.0)
    results = pool.run("fails", 2, "B", act, seconds=6)
    assert results[2] is None
    for rank in (0, 1, 3):
        assert results[rank].is_a(fp.PeerError), results[rank].trace
        assert results[rank].seconds < within(2)
        assert 2 == results[rank].rank, results[rank].trace
        if act == "kill":
            assert "start all ranks again, and load the last checkpoint" in results[rank].text


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("who", [0, 1])
def test_a_process_that_ends_in_the_middle_of_a_value_is_named(pools, tmp_path, who, number):
    """gloo does not wake who waits for the rest of a message."""
    results = pools(2).run("dies_in_between", who, number, str(tmp_path / "sent"), seconds=15)
    assert results[who] is None
    assert results[1 - who] is not None
    assert results[1 - who].is_a(fp.PeerError), results[1 - who].trace
    assert who == results[1 - who].rank, results[1 - who].trace
    assert results[1 - who].seconds < within(6)  # with what it takes to make and to send the values


@pytest.mark.slow
@pytest.mark.parametrize("act", ["stop", "forever"])
def test_a_process_that_hangs_is_named_with_what_all_do(pools, act):
    pool = pools(SIZE)
    pool.all("start", 5.0)
    began, seconds = time.monotonic(), within(8.5)
    results = pool.run("fails", 1, "F", act, seconds=seconds)
    assert time.monotonic() - began < seconds + 0.5
    for rank in (0, 2, 3):
        assert isinstance(results[rank], Failed)
        assert results[rank].is_a(fp.PeerError), results[rank].trace
        assert results[rank].seconds < within(7)
        assert 1 == results[rank].rank, results[rank].trace
        assert all(f"rank {other}:" in results[rank].text for other in range(SIZE)), results[
            rank
        ].text
    if act == "stop":
        assert "rank 1: does not answer" in results[0].text
        pool.signal(1, signal.SIGCONT)
        pool.whole = False
    else:
        assert results[1].is_a(fp.RunTimeout), results[1].trace
        pool.whole = False


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(pool):
    """It has left its ranks in order, so the others do not wait for the timeout."""
    results = pool.run("without", 3)
    for rank in (0, 1, 2):
        assert results[rank].is_a(fp.PeerError), results[rank].trace
        assert 3 == results[rank].rank
        assert results[rank].seconds < within(3)
    assert "left" in results[3]


@pytest.mark.slow
def test_a_rank_may_leave_before_all_know_of_the_end(pools):
    assert 1 == len({*pools(3).all("late_at_the_end")})


def test_other_calls_are_refused(pool):
    """One rank asks for the norm while the others begin a run."""
    for result in pool.run("other_calls"):
        assert result.is_a(fp.RanksError), result.trace
        assert "rank 0 is at" in result.text
    assert [[]] * SIZE == pool.all("once")


def test_a_rank_waits_for_as_long_as_others_get_on(pools):
    """The last rank waits for its first value, and the first for the end, for longer than the
    timeout."""
    assert [True] * SIZE == pools(SIZE).all("slow", 0.4, 6)


def test_replicas_that_train_other_leaves_are_refused(pools):
    for result in pools(2).run("other_leaves"):
        assert result.is_a(fp.RanksError), result.trace
        assert "trained leaves of rank 0" in result.text
