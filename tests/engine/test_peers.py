"""What peers get wrong, inverted: one test for each reproduced bug, with the row that it turns
around.

P<n>: row n of table 2.1 of the study of torch.distributed.pipelining, P2.2: its second table; G<n>:
the ten lines on torchgpipe; A<n>: the review's experiments. Those that other files invert already:
  P1 A1 G5      laws/test_deferred_state.py (counts once; two layers; unbiased, large means)
  P4 P7 A8      engine/test_losses.py (loss called M times; uneven rows; padded tokens; weight 0)
  P5            faults/test_stage_faults.py (the loss fails; exits; the next run is right)
  P6 P12        engine/test_optim.py (accumulation is exact; tied parameters step together)
  P13 P15 P16   engine/test_microbatch.py (dict and scalar outputs; rows must match; feeds missing)
  P14 G9        laws/test_any_tree.py (dict targets; anything beside an activation; popped but unused)
  P18 G1 A7     laws/test_hygiene.py (nothing lives on; residuals of 1F1B; slots)
  A13           laws/test_hygiene.py, laws/test_random_chains.py (in-place first)
  G2 A4         models/test_module.py (remat, inner checkpoint, weights of a bound copy)
  G7 A3         laws/test_context.py (contexts travel; transforms are refused)
  G8 A5 A9      laws/test_randomness.py (keyed draws, replayed in checkpoints, seed=None)
  G10 A11 A12   laws/test_failures.py (SystemExit, KeyboardInterrupt, joined lanes, types of exceptions)
  A2            laws/test_same_numbers.py (a schedule that does not ascend)
  A14           engine/test_losses.py (ties are replicas whose gradients are summed once, no skips)
  P2.2          schedules/test_check.py (duplicates and deadlocks are refused), view/test_simulate.py (every plan)
Not here: P11 (speed: tests/benchmarks), G6 (balancing) and Pipe (A6 in part), which do not exist
yet.
"""

import pickle
import threading
from contextvars import ContextVar

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import EXECUTORS, assert_same_result, cpu_plan, ids, one_of_each_kind, schedules
from small import row_mean
from torch.utils.checkpoint import checkpoint

import funcpipe as fp
from funcpipe._src.core import gradient_graph

TIMES = fp.stage(lambda p, x: x * p, name="times")


def ones(count, **options):
    return tuple(torch.ones((), **options) for _ in range(count))


def test_p2_switching_between_training_and_evaluation_costs_nothing():
    """Three times a step and an evaluation over 4 microbatches: 24 forwards, and 3 batches
    counted."""
    calls = []
    counted = fp.stage(lambda p, x: (calls.append(1), x)[1])
    part, params, state = fp.from_module(nn.BatchNorm1d(2))
    train = cpu_plan([counted, part], fp.schedules.one_f_one_b(2, 4), loss=row_mean)
    evaluate = fp.make_plan(
        [counted, part], fp.schedules.fill_drain(2, 4, backward=False), devices="cpu"
    )
    states = ((), state)
    for _ in range(3):
        states = fp.run(train, ((), params), (torch.randn(8, 2), None), state=states).state
        fp.run(evaluate, ((), params), torch.randn(8, 2), state=states)
    assert 24 == len(calls)
    assert 3 == int(states[1]["num_batches_tracked"])


@pytest.mark.parametrize("executor", EXECUTORS)
def test_p3_integer_ids_go_between_stages(executor):
    """A tokenizer stage before an embedding: every id is a real one, from the first step on."""
    seen = []
    embed = fp.stage(lambda p, x: (seen.append(x), F.embedding(x, p))[1], name="embed")
    plan = cpu_plan(
        [fp.stage(lambda p, x: x + 1, name="ids"), embed],
        fp.schedules.one_f_one_b(2, 3),
        loss=row_mean,
    )
    result = fp.run(plan, ((), torch.ones(9, 2)), (torch.arange(6), None), executor=executor)
    assert list(range(1, 7)) == torch.cat(seen).tolist()
    assert [False, *[True] * 6, False, False] == (result.grads[1][:, 0] > 0).tolist()


@pytest.mark.parametrize("executor", EXECUTORS)
def test_p8_batches_may_grow_and_shrink(executor):
    """One plan, other rows and widths in every step."""
    plan = cpu_plan([TIMES, TIMES], fp.schedules.one_f_one_b(2, 4))
    for rows, width in ((8, 3), (3, 3), (17, 3), (4, 5), (1, 1)):
        x, t = torch.randn(rows, width), torch.randn(rows, width)
        result = fp.run(plan, ones(2), (x, t), executor=executor)
        torch.testing.assert_close(result.loss, F.mse_loss(x, t))
        assert rows == result.weight


def test_p9_the_places_of_crossing_values_do_not_grow_with_the_batch():
    """1F1B on 4 devices: as many slots for 64 microbatches as for 8."""
    pools = [
        fp.make_plan([TIMES] * 4, fp.schedules.one_f_one_b(4, m), loss=F.mse_loss).program.pools
        for m in (8, 64)
    ]
    assert [(p.role, p.source, p.lane, p.slots) for p in pools[0]] == [
        (p.role, p.source, p.lane, p.slots) for p in pools[1]
    ]
    assert max(p.slots for p in pools[1]) <= 4


@pytest.mark.parametrize("k", [1, 4])
def test_p10_zero_bubble_computes_a_checkpointed_block_twice(k):
    """Forward and recomputation: 2 calls per microbatch for any number of linear layers in the
    block."""
    calls = []

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(2, 2) for _ in range(k)])

        def forward(self, x):
            return checkpoint(
                lambda h: (calls.append(1), self.layers(h))[1], x, use_reentrant=False
            )

    stages, params, _ = zip(*[fp.from_module(Block(), name=f"b{i}") for i in range(2)], strict=True)
    plan = cpu_plan(stages, fp.schedules.zero_bubble(2, 4))
    fp.run(plan, params, (torch.randn(8, 2), torch.randn(8, 2)))
    assert 2 * 2 * 4 == len(calls)


def test_p11_the_two_halves_are_one_backward(monkeypatch):
    """Where nothing waits, I and W of an eager stage call autograd once per microbatch, as B
    does."""
    calls = []
    backward = gradient_graph.run_backward
    monkeypatch.setattr(
        gradient_graph, "run_backward", lambda *a, **k: (calls.append(1), backward(*a, **k))[1]
    )
    for schedule in (fp.schedules.one_f_one_b(2, 4), fp.schedules.zero_bubble(2, 4)):
        calls.clear()
        fp.run(cpu_plan([TIMES, TIMES], schedule), ones(2), (torch.randn(4, 1), torch.randn(4, 1)))
        assert 8 == len(calls)


def test_p17_schedules_pickle_and_print_what_they_are():
    """Through pickle and through text they are the same."""
    for schedule in schedules(4, 4):
        assert schedule == pickle.loads(pickle.dumps(schedule)) == fp.Schedule.parse(str(schedule))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("schedule", one_of_each_kind(schedules(4, 3)), ids=ids)
def test_p22_what_is_printed_is_what_runs(schedule, executor):
    """The measured timeline has, device by device, the very actions of the schedule in their
    order."""
    plan = cpu_plan([TIMES] * 4, schedule)
    timeline = fp.run(
        plan, ones(4), (torch.randn(3, 1), torch.randn(3, 1)), record=True, executor=executor
    ).timeline
    ran = [
        [s.action for s in timeline.spans if s.device == device]
        for device in range(schedule.num_devices)
    ]
    assert [list(order) for order in schedule.orders] == ran


@pytest.mark.parametrize("executor", EXECUTORS)
def test_g2_functional_call_with_remat_has_the_given_weights(executor):
    """A function stage around functional_call: recomputed with the run's parameters, not the
    module's own."""
    # A module each: functional_call puts tensors into the module, so two threads must not share
    # one.
    modules = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    bodies = [
        fp.stage(lambda p, x, m=m: torch.func.functional_call(m, p, x), name="body")
        for m in modules
    ]
    for schedule in (
        fp.schedules.fill_drain(2, 2),
        fp.schedules.remat(fp.schedules.fill_drain(2, 2)),
        fp.schedules.remat(fp.schedules.fill_drain(2, 2), keep=lambda a: a.microbatch == 1),
    ):
        plan = cpu_plan(bodies, schedule, loss=row_mean)
        params = ({"weight": torch.full((1, 1), 10.0)}, {"weight": torch.full((1, 1), 10.0)})
        grads = fp.run(plan, params, (torch.ones(2, 1), None), executor=executor).grads
        assert [10.0, 10.0] == [float(tree["weight"]) for tree in grads]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("wrap", [lambda s: s, fp.schedules.remat])
def test_g3_a_weight_that_changes_during_a_run_is_noticed(wrap, executor):
    """Between forward and backward, with or without remat: refused, by the parameter's name."""
    params = ({"w": torch.ones(1)}, {"w": torch.ones(1)})
    part = fp.stage(lambda p, x: torch.tanh(x) * p["w"], name="part")

    def loss(y, t):
        params[0]["w"].mul_(5)
        return y.sum() / len(y)

    plan = cpu_plan([part, part], wrap(fp.schedules.fill_drain(2, 2)), loss=loss)
    with pytest.raises(
        (fp.PlanError, RuntimeError), match=r"params\[0\]\['w'\]|modified by an inplace operation"
    ):
        fp.run(plan, params, (torch.ones(2, 1), None), executor=executor)


def test_g4_a_partial_batch_keeps_its_features():
    """10 rows over 8: the last microbatch is the one that is kept, and batch norm commits."""
    norm, params, state = fp.from_module(nn.BatchNorm2d(2), name="norm")
    keep = fp.schedules.remat(
        fp.schedules.fill_drain(1, 8), keep=lambda action: action.microbatch == 7
    )
    plan = cpu_plan([norm], keep, loss=lambda y, t: y.square().mean())
    for rows, count in ((10, 8), (3, 3), (16, 8)):
        result = fp.run(
            plan, (params,), (torch.randn(rows, 2, 3, 3), None), state=(state,), record=True
        )
        actions = [str(span.action) for span in result.timeline.spans]
        assert count - (count == 8) == sum("R" in one for one in actions)
        assert 1 == int(result.state[0]["num_batches_tracked"])


def test_g10_a6_two_cpu_devices_are_two_threads():
    """Each lane has its own, for forward and a user's backward alike, and the caller's is neither;
    all see the caller's context variables."""
    threads, names = [set(), set()], set()
    name = ContextVar("name", default="nobody")

    def look(index):
        threads[index].add(threading.get_ident())
        names.add(name.get())

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, index):
            ctx.index = index
            look(index)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            look(ctx.index)
            return g * 2, None

    name.set("somebody")
    stages = [fp.stage(lambda p, x, i=i: Look.apply(x * p, i), name=str(i)) for i in range(2)]
    plan = cpu_plan(stages, fp.schedules.one_f_one_b(2, 4))
    fp.run(plan, ones(2), (torch.randn(4, 1), torch.randn(4, 1)), executor="threads")
    assert [1, 1] == [len(one) for one in threads]
    assert 3 == len(threads[0] | threads[1] | {threading.get_ident()})
    assert {"somebody"} == names


def test_a8_half_gradients_do_not_overflow_where_weights_are_known():
    """Divided first, a sum over 4000 rows of 100 fits into float16; divided last it would be
    infinite."""
    x = torch.full((4000, 1), 100.0, dtype=torch.float16)
    p = torch.ones((), dtype=torch.float16)
    loss = lambda y, t: ((y.float()).sum(), len(y))
    early = cpu_plan([TIMES], fp.schedules.fill_drain(1, 2), loss=loss, weight=len)
    result = fp.run(early, (p,), (x, x))
    assert 100.0 == pytest.approx(float(result.grads[0]), rel=1e-2)


@pytest.mark.parametrize(
    "form",
    [
        lambda h: h[:, ::2],
        lambda h: h.T.contiguous().T,
        lambda h: h[:, :1].expand(-1, 4),
        lambda h: h[1:].clone() if len(h) > 9 else h[:, 1:5],
    ],
)
def test_a10_layouts_do_not_depend_on_copies(form):
    """Slices, transposes and expands at a border: sums have the same bits on 1 device and on 2."""
    stages = (
        fp.stage(lambda p, x: form(torch.sin(x * p)), name="a"),
        fp.stage(lambda p, x: (x.sum(1) * x.mean() * p).cumsum(0), name="b"),
    )
    x = torch.randn(6, 8)
    results = [
        fp.run(
            cpu_plan(
                stages, fp.schedules.fill_drain(2, 2, num_devices=d), loss=row_mean, outputs=True
            ),
            ones(2),
            (x, None),
            executor=e,
            threads_per_lane=1,
        )
        for d in (1, 2)
        for e in EXECUTORS
    ]
    for result in results[1:]:
        assert_same_result(results[0], result)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a10_intra_op_threads_are_reported_and_restored(executor):
    """threads_per_lane is what stages see, and the caller's number is back afterwards."""
    seen, before = set(), torch.get_num_threads()
    plan = fp.make_plan(
        [fp.stage(lambda p, x: (seen.add(torch.get_num_threads()), x)[1])] * 2,
        fp.schedules.fill_drain(2, 2, backward=False),
        devices="cpu",
    )
    for count in (1, 3):
        seen.clear()
        assert (
            count
            == fp.run(
                plan, ((), ()), torch.ones(2), executor=executor, threads_per_lane=count
            ).stats.threads_per_lane
        )
        assert {count} == seen
        assert before == torch.get_num_threads()
