"""Seeds, the mode that keys draws, and the guard of torch's own generator."""

from functools import partial

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


@pytest.mark.parametrize("run", [fp.run_sequential, *(partial(fp.run, executor=e) for e in EXECUTORS)])
@pytest.mark.parametrize("wrap", [lambda schedule: schedule, fp.remat])
def test_a_draw_that_escaped_the_keys_makes_the_run_again(wrap, run):
    """A stage that draws only in some later microbatch, or later run, is exact all the same, with and without remat."""
    late = fp.stage(lambda p, x: x * p + (torch.rand(()) if x[0, 0] > 0 else 0.0), name="late")
    stages = [late, fp.stage(lambda p, x: x * p, name="b")]
    plan = fp.make_plan(stages, wrap(fp.fill_drain(2, 2)), loss=F.mse_loss, devices="cpu")
    quiet, loud = torch.tensor([[-1.0], [-1.0]]), torch.tensor([[-1.0], [1.0]])
    run(plan, ones(2), (quiet, torch.zeros(2, 1)), seed=0)
    before = torch.get_rng_state()
    first, again = (run(plan, ones(2), (loud, torch.zeros(2, 1)), seed=0) for _ in range(2))
    assert_same_result(first, again)
    assert not same(first.loss, run(plan, ones(2), (loud, torch.zeros(2, 1)), seed=1).loss)
    with pytest.raises(fp.StageError, match="no seed was given"):
        run(plan, ones(2), (loud, torch.zeros(2, 1)))
    assert same(before, torch.get_rng_state())


@pytest.mark.filterwarnings("ignore")
def test_a_draw_inside_of_a_conditional_is_refused():
    """Where the mode is off a draw would not be keyed; without one the conditional works."""
    from torch._higher_order_ops.cond import cond_op

    def make(fn):
        @fp.stage(name="cond")
        def stage(p, x):
            return cond_op(x.sum() > 0, fn, fn, (x,))

        return fp.make_plan([stage], fp.fill_drain(1, 1, backward=False), devices="cpu")

    x = torch.ones(2, 3)
    assert torch.equal(fp.run(make(lambda v: v + 1), ((),), x).outputs, x + 1)
    before = torch.get_rng_state()
    with pytest.raises(fp.DrawError, match="draws random numbers inside of cond"):
        fp.run(make(lambda v: v + torch.rand(3)), ((),), x, seed=0)
    assert torch.equal(before, torch.get_rng_state())
