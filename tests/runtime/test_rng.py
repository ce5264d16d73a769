"""Seeds, the mode that keys draws, and the guard of torch's own generator."""

import pytest
import torch
import torch.nn.functional as F
from common import EXECUTORS, assert_same_result, same

import funcpipe as fp
from funcpipe.runtime import rng


def ones(count):
    return tuple(torch.ones(()) for _ in range(count))


def test_fold_in_makes_new_seeds():
    """A hash: no collisions on a grid, ordered arguments, ints and names apart, 63 bits, any int, manual_seed takes it."""
    grid = [fp.fold_in(seed, data) for seed in range(-20, 20) for data in (*range(40), *map(str, range(40)))]
    assert len(grid) == len(set(grid))
    assert fp.fold_in(1, 2) != fp.fold_in(2, 1)
    assert fp.fold_in(fp.fold_in(0, 1), 2) != fp.fold_in(fp.fold_in(0, 2), 1)
    assert all(0 <= one < 2**63 for one in (*grid, fp.fold_in(2**200, -1)))
    assert (
        fp.fold_in(7, "warmup")
        == fp.fold_in(7, "warmup")
        == torch.Generator().manual_seed(fp.fold_in(7, "warmup")).initial_seed()
    )


def test_only_stages_that_draw_run_under_the_mode(monkeypatch):
    """The first forward of a stage tells: 1 entry for one that never draws, one per forward for one that does."""
    entries = []
    enter = rng.Keyed.__enter__
    monkeypatch.setattr(rng.Keyed, "__enter__", lambda self: (entries.append(self.stage), enter(self))[1])
    stages = fp.stage(lambda p, x: x * p, name="quiet"), fp.stage(lambda p, x: F.dropout(x * p, 0.5), name="loud")
    plan = fp.make_plan(stages, fp.remat(fp.one_f_one_b(2, 4)), loss=F.mse_loss, devices="cpu")
    for _ in range(3):
        fp.run(plan, ones(2), (torch.randn(4, 4), torch.zeros(4, 4)), seed=0, executor="serial")
    assert 1 == entries.count(0)
    assert 3 * 8 == entries.count(1)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_draw_that_nobody_keyed_warns(executor):
    """A stage that draws in some later microbatch only is noticed by torch's generator, and keyed from then on."""
    late = fp.stage(lambda p, x: x * p + (torch.rand(()) if x[0, 0] > 0 else 0.0), name="late")
    plan = fp.make_plan(
        [late, fp.stage(lambda p, x: x * p, name="b")], fp.fill_drain(2, 2), loss=F.mse_loss, devices="cpu"
    )
    batch = torch.tensor([[-1.0], [1.0]]), torch.zeros(2, 1)
    with pytest.warns(RuntimeWarning, match="global generator moved"):
        fp.run(plan, ones(2), batch, seed=0, executor=executor)
    before = torch.get_rng_state()
    first, again = (fp.run(plan, ones(2), batch, seed=0, executor=executor) for _ in range(2))
    assert_same_result(first, again)
    assert same(before, torch.get_rng_state())
