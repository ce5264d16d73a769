"""What all ranks tell each other: here each rank is a thread."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from funcpipe.runtime.connection import LostError
from funcpipe.runtime.connector import Connector
from funcpipe.runtime.exchanges import Everyone


class Ring:
    """So many ranks, connected."""

    def __init__(self, size):
        store = dist.HashStore()
        self.pool, self.size = ThreadPoolExecutor(size), size
        self.connectors = [Connector(store, rank, lambda: False) for rank in range(size)]
        for connector in self.connectors:
            connector.where, connector.timeout = {"hostname": "127.0.0.1"}, 20.0
        self.ranks = self.all(lambda rank: Everyone(self.connectors[rank], size))

    def all(self, job, ranks=None):
        """What a job gives, done by all ranks at the same time."""
        return [*self.pool.map(job, range(self.size) if ranks is None else ranks)]

    def leave(self, rank):
        self.connectors[rank].cut()
        self.connectors[rank].close()


@pytest.fixture
def ring(request):
    made = Ring(request.param)
    yield made
    for rank in range(made.size):
        made.leave(rank)
    made.pool.shutdown()


@pytest.mark.parametrize("ring", [1, 2, 3, 4, 5, 8], indirect=True)
def test_everyone_has_what_everyone_gives(ring):
    """Of any length, none and more than the system keeps included; one exchange after the other, some ranks late."""
    for number in range(4):
        given = [bytes([rank, number]) * (number * rank * 1000) for rank in range(ring.size)]
        if number == 3:
            given = [bytes([rank]) * 6_000_000 for rank in range(ring.size)]

        def exchange(rank, given=given):
            time.sleep(0.01 * (rank % 3))
            return ring.ranks[rank].exchange(given[rank])

        assert ring.all(exchange) == [given] * ring.size


@pytest.mark.parametrize("ring", [4], indirect=True)
def test_tensors_that_several_hold(ring):
    """Some hold several, one holds none and does not take part; more than the system keeps; twice."""
    tensors = {0: torch.randn(2_000_000), 1: torch.arange(3), 2: torch.empty(0, 2), 3: torch.randn(2, 3).T.contiguous()}
    holders = [3, 0, 3, 1]

    def gather(rank):
        mine = {place: tensors[place] for place, holder in enumerate(holders) if holder == rank}
        return ring.ranks[rank].gather(mine, holders, lambda place: torch.empty_like(tensors[place]))

    for _ in range(2):
        for values in ring.all(gather, ranks=[0, 1, 3]):
            assert all(torch.equal(value, tensors[place]) for place, value in enumerate(values))


@pytest.mark.parametrize("ring", [3], indirect=True)
def test_who_leaves_says_so_and_who_is_lost_does_not(ring):
    """What was said before a rank left is there still."""
    heard = {}

    def guard(rank):
        try:
            ring.ranks[rank].guard()
            heard[rank] = None
        except LostError as error:
            heard[rank] = error.rank

    threads = [threading.Thread(target=guard, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    ring.ranks[1].say_farewell()
    ring.leave(1)
    threads[0].join(5)
    assert heard[0] is None
    threads[1].join(5)
    assert heard[1] == 2  # its own guard hears no more
    with pytest.raises(LostError):
        ring.ranks[0].exchange(b"is anybody there")
    ring.leave(0)
    threads[2].join(5)
    assert heard[2] == 0


@pytest.mark.parametrize("ring", [2], indirect=True)
def test_what_was_said_last_arrives_when_the_rank_is_gone(ring):
    said = b"x" * 100_000
    one = ring.pool.submit(ring.ranks[0].exchange, said)
    ring.ranks[1]._rounds[1][0].write([len(said).to_bytes(8, "little"), said], wait=True)  # and it hears nothing
    ring.ranks[1].say_farewell()
    ring.leave(1)
    assert len(one.result(5)) == 2
    ring.ranks[0].guard()


@pytest.mark.parametrize("ring", [2], indirect=True)
def test_a_long_word_to_who_goes_in_the_middle(ring):
    """Nobody hangs: the one who writes is told."""
    one = ring.pool.submit(ring.ranks[0].exchange, bytes(50_000_000))
    time.sleep(0.2)
    ring.leave(1)
    with pytest.raises(LostError) as caught:
        one.result(5)
    assert caught.value.rank == 1
