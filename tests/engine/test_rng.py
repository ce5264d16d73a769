"""Seeds, the mode that keys draws, and the guard of torch's own generator."""

import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from common import EXECUTORS, assert_same_result, cpu_plan, forward_plan, same

import funcpipe as fp
from funcpipe._src.core.torch_names import FakeTensorMode
from funcpipe._src.stages.drawing import _DRAW_NOTHING
from funcpipe._src.stages.rng import KeyedDraws, Keys


def ones(count):
    return tuple(torch.ones(()) for _ in range(count))


def test_fold_in_makes_new_seeds():
    """A hash: no collisions on a grid, ordered arguments, ints and names apart, 63 bits, any int,
    manual_seed takes it."""
    grid = [
        fp.fold_in(seed, data)
        for seed in range(-20, 20)
        for data in (*range(40), *map(str, range(40)))
    ]
    assert len(grid) == len(set(grid))
    assert fp.fold_in(1, 2) != fp.fold_in(2, 1)
    assert fp.fold_in(fp.fold_in(0, 1), 2) != fp.fold_in(fp.fold_in(0, 2), 1)
    assert all(0 <= one < 2**63 for one in (*grid, fp.fold_in(2**200, -1)))
    assert (
        fp.fold_in(7, "warmup")
        == fp.fold_in(7, "warmup")
        == torch.Generator().manual_seed(fp.fold_in(7, "warmup")).initial_seed()
    )


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_step_runs_once_whoever_draws_meanwhile(executor):
    """Another thread that moves torch's generator, or a stage that begins to draw late: every
    forward is called once."""
    calls, stop = [], threading.Event()

    @fp.stage
    def late(p, x):
        calls.append(float(x[0, 0]))
        return x * p + (torch.rand(()) if x[0, 0] > 1 else 0.0)

    def draw():
        while not stop.is_set():
            torch.rand(3)

    plan = cpu_plan([late, fp.stage(lambda p, x: x * p)], fp.schedules.fill_drain(2, 4))
    thread = threading.Thread(target=draw)
    thread.start()
    try:
        x = torch.arange(4.0)[:, None]
        results = [
            fp.run(plan, ones(2), (x, torch.zeros(4, 1)), seed=0, executor=executor)
            for _ in range(3)
        ]
    finally:
        stop.set()
        thread.join()
    assert calls == [0.0, 1.0, 2.0, 3.0] * 3
    for result in results[1:]:
        assert_same_result(results[0], result)


def test_what_another_thread_draws_is_not_keyed():
    """Catching is this thread's alone, also while an operation of it is under way."""
    seen, ready, go = [], threading.Event(), threading.Event()

    def other():
        ready.wait()
        torch.manual_seed(5)
        seen.append(torch.rand(3))
        go.set()

    @fp.stage(name="waits")
    def waits(p, x):
        drawn = torch.rand(x.shape)
        ready.set()
        assert go.wait(10)
        return x * p + drawn

    thread = threading.Thread(target=other)
    thread.start()
    plan = forward_plan([waits], 1)
    fp.run(plan, ones(1), torch.ones(2, 2), seed=0)
    thread.join()
    torch.manual_seed(5)
    assert same(seen[0], torch.rand(3))


@pytest.mark.parametrize(
    "run", [fp.run_sequential, *(partial(fp.run, executor=e) for e in EXECUTORS)]
)
@pytest.mark.parametrize("wrap", [lambda schedule: schedule, fp.schedules.remat])
def test_a_draw_that_comes_late_is_keyed(wrap, run):
    """A stage that draws only in some later microbatch, or later run, is exact all the same, with
    and without remat."""
    late = fp.stage(lambda p, x: x * p + (torch.rand(()) if x[0, 0] > 0 else 0.0), name="late")
    stages = [late, fp.stage(lambda p, x: x * p, name="b")]
    plan = cpu_plan(stages, wrap(fp.schedules.fill_drain(2, 2)))
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
def test_a_draw_inside_of_a_conditional_is_keyed():
    """A branch draws as the stage itself would; without a draw the conditional works too."""
    from torch._higher_order_ops.cond import cond_op

    def make(fn):
        @fp.stage(name="cond")
        def stage(p, x):
            return cond_op(x.sum() > 0, fn, fn, (x,))

        return forward_plan([stage], 1)

    x = torch.ones(2, 3)
    assert torch.equal(fp.run(make(lambda v: v + 1), ((),), x).outputs, x + 1)
    before = torch.get_rng_state()
    outside = fp.stage(lambda p, v: v + torch.rand(3), name="cond")
    expected = fp.run(forward_plan([outside], 1), ((),), x, seed=0)
    assert torch.equal(
        fp.run(make(lambda v: v + torch.rand(3)), ((),), x, seed=0).outputs, expected.outputs
    )
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", sorted(_DRAW_NOTHING))
def test_what_is_said_to_draw_and_does_not(name):
    """No kernel of ours stands before it: it chooses a kernel, or refuses dropout."""
    operation = getattr(torch.ops.aten, name.removeprefix("aten::")).default
    assert torch.Tag.nondeterministic_seeded in operation.tags
    q = torch.randn(1, 2, 4, 8)
    before = torch.get_rng_state()
    if "choice" in name:
        operation(q, q, q, None, 0.5, False)
    else:
        with pytest.raises(RuntimeError, match="dropout"):
            operation(q, q, q, 0.5, False)
        operation(q, q, q, 0.0, False)
    assert torch.equal(before, torch.get_rng_state())


def test_a_draw_that_ends_a_region_is_checked_all_the_same():
    """The dropout kernel saves what it drew while it is called, and with that a region has all that
    it wanted."""
    keys = Keys(0, [fp.stage(lambda p, x: x, name="other")])

    def enough(_):
        raise StopIteration

    x = torch.ones(4, requires_grad=True)
    with (
        pytest.raises(fp.DrawError, match="'other' draws random numbers in the backward"),
        KeyedDraws(keys, 0, {}, 0, {}),
        torch.autograd.graph.saved_tensors_hooks(enough, enough),
    ):
        torch.native_dropout(x, 0.5, True)


def test_checkpoint_leaves_generators_of_devices_alone(monkeypatch):
    """In lanes next to each other, whose draws are keyed, it asks for no state and sets none; else
    it does as ever."""
    with FakeTensorMode():
        elsewhere = torch.empty(2, device="cuda:77")
    asked = []

    def region(x, w):
        try:
            asked.append(torch.utils.checkpoint.get_device_states(elsewhere))
        except (AssertionError, AttributeError, RuntimeError):
            asked.append("of the device")
        return F.dropout(x * w)

    def stage(p, x):
        return torch.utils.checkpoint.checkpoint(region, x, p, use_reentrant=False)

    plan = cpu_plan([fp.stage(stage, name=name) for name in "ab"], fp.schedules.fill_drain(2, 1))
    x = torch.ones(4, 3)
    fp.run(plan, ones(2), (x, x), seed=0, executor="threads")
    assert [([], [])] * 4 == asked
    asked.clear()
    fp.run(plan, ones(2), (x, x), seed=0, executor="serial")
    assert ["of the device"] * 4 == asked
    ours, calls = torch.utils.checkpoint.get_device_states, []
    monkeypatch.setattr(
        torch.utils.checkpoint, "get_device_states", lambda *a: (calls.append(a), ours(*a))[1]
    )
    monkeypatch.setattr(torch.cpu, "_initialized", True, raising=False)
    fp.run(plan, ones(2), (x, x), seed=0, executor="threads")
    assert (
        len(calls) == 4 + 2
    )  # those of the region itself, and torch's, by the name that is replaced
