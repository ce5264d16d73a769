"""Teams whose members are threads of this process, joined as processes are."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from funcpipe._src.processes.rendezvous import Rendezvous
from funcpipe._src.processes.team import Team

HOST = {"hostname": "127.0.0.1"}


def meeting(store, rank, size, seconds=20.0, goes_on=lambda: True):
    """One process's way to the others, who have said hello to each other."""
    made = Rendezvous(store, rank, [f"rank {rank}" for rank in range(size)], seconds, goes_on)
    made._where = HOST
    return made


class Teams:
    """So many members, connected; each does a job in a thread of its own."""

    def __init__(self, size, timeout=20.0):
        store = dist.HashStore()
        self.size, self.pool = size, ThreadPoolExecutor(size)
        self.marks = [0] * size
        self.members = [
            Team(
                rank,
                range(size),
                timeout,
                lambda rank=rank: (False, f"rests {rank}"),
                lambda rank=rank: self.marks[rank],
            )
            for rank in range(size)
        ]

        def join(rank):
            self.members[rank].start(lambda: None)
            meeting(store, rank, size).connect(self.members[rank].add)

        self.all(join)

    def all(self, job, ranks=None):
        """What a job gives, done by all ranks at the same time."""
        return [*self.pool.map(job, range(self.size) if ranks is None else ranks)]

    def close(self):
        threads = [
            threading.Thread(target=member.close, kwargs={"told": True}) for member in self.members
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.pool.shutdown()
