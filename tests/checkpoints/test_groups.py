"""What several processes save together, with threads in their place: each thread has stages and an
optimizer of its own."""

import threading
from contextlib import nullcontext

import pytest
import torch
import torch.nn as nn
from common import same

import funcpipe as fp

pytest.importorskip("safetensors")


class Member:
    """One of the threads that save together, as `fp.ranks` returns it for a process."""

    replica, replicas, members = 0, 1, ()

    def __init__(self, rank, stages, table, barrier):
        self.rank, self.stages, self.table, self.barrier = rank, stages, table, barrier

    def exchange(self, about, mine):
        self.table[self.rank] = mine
        self.barrier.wait(20)
        row = [self.table[rank] for rank in sorted(self.table)]
        self.barrier.wait(20)
        return row

    def telling(self):
        return nullcontext()

    def whole(self, tensor):
        return tensor


def together(call, size=2):
    """What ``call(member)`` returns or raises in each thread; each thread has one stage of as
    many."""
    table, barrier, outcomes = {}, threading.Barrier(size), {}

    def one(rank):
        try:
            outcomes[rank] = call(Member(rank, (rank,), table, barrier))
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[rank] for rank in range(size)]


def split_of():
    torch.manual_seed(0)
    return fp.split(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), 2)


def stepped(make, leaves):
    optimizer = make(leaves)
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf)
    optimizer.step()
    return optimizer


def saved(path, split, make):
    """Save by two threads, each with the optimizer that ``make(rank)`` makes of the parameters of
    its stage."""

    def call(member):
        optimizer = stepped(make(member.rank), fp.leaves(split.params[member.rank]))
        fp.save(path, split, split.params, optimizer=optimizer, ranks=member)

    return together(call)


def test_optimizers_of_all_are_joined(tmp_path):
    split = split_of()
    optimizers = [
        stepped(lambda leaves: torch.optim.AdamW(leaves, lr=0.1), fp.leaves(params))
        for params in split.params
    ]
    before = [
        dict(optimizers[stage].state[leaf])
        for stage in (0, 1)
        for leaf in fp.leaves(split.params[stage])
    ]
    save = lambda member: fp.save(
        tmp_path, split, split.params, optimizer=optimizers[member.rank], step=3, ranks=member
    )
    assert [None, None] == together(save)
    again = torch.optim.AdamW(fp.leaves(split.params))
    assert 3 == fp.load(tmp_path, split, optimizer=again).step
    assert same(before, [dict(again.state[leaf]) for leaf in fp.leaves(split.params)])
    assert 0.1 == again.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda leaves: torch.optim.AdamW(leaves, lr=0.2), "rank 1 has other options or groups"),
        (
            lambda leaves: torch.optim.AdamW(leaves, lr=torch.tensor(0.1)),
            "rank 1 has other options or groups",
        ),
        (
            lambda leaves: torch.optim.AdamW([{"params": [leaf]} for leaf in leaves], lr=0.1),
            "other options or groups",
        ),
        (lambda leaves: torch.optim.SGD(leaves, lr=0.1), "rank 1 has SGD"),
    ],
)
def test_optimizers_that_do_not_fit_are_refused_by_all(tmp_path, other, words):
    split = split_of()
    usual = lambda leaves: torch.optim.AdamW(leaves, lr=0.1)
    for error in saved(tmp_path / "new", split, lambda rank: other if rank else usual):
        assert isinstance(error, fp.RanksError)
        assert words in str(error)
    assert not (tmp_path / "new").exists()


def test_steps_that_differ_are_refused_by_all(tmp_path):
    split = split_of()
    errors = together(
        lambda member: fp.save(
            tmp_path / "new", split, split.params, step=7 + member.rank, ranks=member
        )
    )
    for error in errors:
        assert isinstance(error, fp.RanksError)
        assert "rank 0 saves 7, rank 1 saves 8" in str(error)
    assert not (tmp_path / "new").exists()


def test_a_group_without_parameters_here(tmp_path):
    """A rank whose groups are empty, or that has no optimizer, takes part."""
    split = split_of()
    leaves = [fp.leaves(params) for params in split.params]
    halves = [
        torch.optim.AdamW([{"params": leaves[0], "lr": 0.1}, {"params": [], "lr": 0.2}]),
        torch.optim.AdamW([{"params": [], "lr": 0.1}, {"params": leaves[1], "lr": 0.2}]),
    ]
    assert [None, None] == together(
        lambda member: fp.save(
            tmp_path, split, split.params, optimizer=halves[member.rank], ranks=member
        )
    )
    again = torch.optim.AdamW([{"params": leaves[0]}, {"params": leaves[1]}])
    fp.load(tmp_path, split, optimizer=again)
    assert [0.1, 0.2] == [group["lr"] for group in again.param_groups]
    assert [None, None] == together(
        lambda member: fp.save(
            tmp_path,
            split,
            split.params,
            optimizer=None if member.rank else halves[0],
            ranks=member,
        )
    )
    first = torch.optim.AdamW(leaves[0])
    fp.load(tmp_path, split, optimizer=first)
    assert 0.1 == first.param_groups[0]["lr"]
