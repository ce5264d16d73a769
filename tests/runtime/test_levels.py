"""Stages that run in several ways, each microbatch at its level: the bits of one way, and what each way does."""

from collections import Counter
from dataclasses import replace

import causal
import pytest
import torch
import torch.nn.functional as F
from common import EXECUTORS, assert_same_result, ids, leveled, same, schedules, snapshot
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcpipe as fp

STAGES, MICROBATCHES = 4, 4
GENERATOR = torch.Generator().manual_seed(1)
X, Y = (torch.randn(10, 6, generator=GENERATOR) for _ in range(2))


def layer(p, x):
    return x + torch.tanh(x @ p["a"]) @ p["b"]


def again(p, x):
    return checkpoint(layer, p, x, use_reentrant=False)


EAGER = fp.stage(layer)
CHECKPOINTED = fp.stage(again)
COMPILED = fp.compile_stage(EAGER, fuse=False)
RECOMPUTED = fp.compile_stage(EAGER, fuse=False, recompute=True)


def layers(count=STAGES):
    generator = torch.Generator().manual_seed(3)
    return tuple({name: torch.randn(6, 6, generator=generator) * 0.3 for name in "ab"} for _ in range(count))


def plan_of(stages, schedule, **options):
    return fp.make_plan(stages, schedule, **{"loss": F.mse_loss, "devices": "cpu"} | options)


@pytest.mark.parametrize("schedule", schedules(STAGES, MICROBATCHES), ids=ids)
def test_the_bits_are_those_of_one_way(schedule):
    """Every schedule, with ways that torch checkpoints and ways that are compiled; batches of other rows, too.

    Where backwards are split eager ways add their sums at I, and compiled ones at W, so both would be another order.
    """
    params = layers()
    split = any(action.kind is fp.Kind.I for order in schedule.orders for action in order)
    ways = [COMPILED, RECOMPUTED] if split else [EAGER, CHECKPOINTED, COMPILED, RECOMPUTED]
    alone = plan_of(ways[:1] * STAGES, schedule)
    plan = plan_of([fp.levels(*ways)] * STAGES, leveled(schedule, len(ways)))
    for rows in (10, 3):
        batch = X[:rows], Y[:rows]
        expected = fp.run_sequential(alone, params, batch)
        before = snapshot((params, batch))
        assert_same_result(expected, fp.run_sequential(plan, params, batch))
        for executor in EXECUTORS:
            assert_same_result(expected, fp.run(plan, params, batch, executor=executor))
        assert same(before, snapshot((params, batch)))


def test_eager_and_compiled_ways_of_split_backwards_are_those_of_the_oracle():
    schedule = fp.schedules.zero_bubble(STAGES, MICROBATCHES)
    plan = plan_of([fp.levels(EAGER, RECOMPUTED, CHECKPOINTED)] * STAGES, leveled(schedule, 3))
    expected = fp.run_sequential(plan, layers(), (X, Y))
    for executor in EXECUTORS:
        assert_same_result(expected, fp.run(plan, layers(), (X, Y), executor=executor))
    alone = fp.run(plan_of([EAGER] * STAGES, schedule), layers(), (X, Y))
    torch.testing.assert_close(expected.grads, alone.grads)


def test_each_microbatch_runs_as_its_level_says():
    """F, R and the backward of a microbatch are of one way, whatever the others are."""
    did = Counter()

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, level):
            ctx.level = level
            did["forward", level] += 1
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            did["backward", ctx.level] += 1
            return gradient, None

    ways = [fp.stage(lambda p, x, level=level: Noting.apply(x * p, level), name="way") for level in range(3)]
    schedule = fp.Schedule.parse("0F0@2 0F1 0R0 0B0 0F2@1 0F3@2 0B1 0B2 0R3 0B3")
    plan = plan_of(fp.levels(*ways), schedule)
    fp.run(plan, (torch.ones(6),), (X, Y))
    assert {
        ("forward", 0): 1,
        ("forward", 1): 1,
        ("forward", 2): 4,
        ("backward", 0): 1,
        ("backward", 1): 1,
        ("backward", 2): 2,
    } == did


def test_what_a_level_keeps():
    """The way that computes again keeps its input alone until its backward."""
    kept = {}

    def note(name, fn):
        def stage(p, x):
            sizes = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
                y = fn(p, x)
            kept.setdefault(name, []).append(sum(sizes))
            return y

        return fp.stage(stage, name="stage")

    both = fp.levels(note("keep", layer), note("again", again))
    plan = plan_of(both, fp.Schedule.parse("0F0 0F1@1 0B0 0B1"))
    fp.run(plan, layers(1), (X[:8], Y[:8]), executor="serial")
    assert (1, 1) == (len(kept["keep"]), len(kept["again"]))
    assert [4 * 6] == kept["again"]
    assert kept["keep"][0] > 4 * 4 * 6


class Dropping(nn.Module):
    def __init__(self, again=False):
        super().__init__()
        self.inner, self.drop, self.again = nn.Linear(6, 6), nn.Dropout(0.4), again

    def forward(self, x):
        def body(x):
            return self.drop(torch.tanh(self.inner(x)))

        return checkpoint(body, x, use_reentrant=False) if self.again else body(x)


def modules(*, compiled):
    torch.manual_seed(0)
    whole, params, _ = fp.from_module(Dropping(), name="dropping")
    other = fp.compile_stage(whole, fuse=False) if compiled else fp.from_module(Dropping(again=True), name="other")[0]
    return [whole, other], params


def functions(*, compiled):
    def drop(p, x):
        return F.dropout(x * p, 0.4)

    def other(p, x):
        return checkpoint(drop, p, x, use_reentrant=False)

    first = fp.stage(drop, name="noise")
    return [first, fp.compile_stage(first, fuse=False) if compiled else fp.stage(other)], torch.ones(6)


def compositions(*, compiled):
    (one, other), p = functions(compiled=compiled)
    (first, second), q = modules(compiled=compiled)
    return [fp.compose(one, first), fp.compose(other, second)], (p, q)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("made", [modules, functions, compositions])
def test_ways_draw_the_same(made, compiled):
    """By the name and the layers of the first one."""
    ways, params = made(compiled=compiled)
    schedule = fp.schedules.one_f_one_b(1, 4)
    expected = fp.run(plan_of(ways[0], schedule), (params,), (X, Y), seed=3)
    for kind in (leveled(schedule), leveled(fp.schedules.remat(schedule))):
        assert_same_result(expected, fp.run(plan_of(fp.levels(*ways), kind), (params,), (X, Y), seed=3))


def test_state_is_committed_once():
    torch.manual_seed(0)
    stage, params, state = fp.from_module(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), name="normed")
    schedule = fp.schedules.one_f_one_b(1, 2)
    expected = fp.run(plan_of(stage, schedule), (params,), (X, Y), state=(state,))
    both = fp.levels(stage, fp.compile_stage(stage, fuse=False))
    assert_same_result(expected, fp.run(plan_of(both, leveled(schedule)), (params,), (X, Y), state=(state,)))


@pytest.mark.parametrize("check", ["finite", "finite-op"])
def test_what_is_not_finite_is_found_in_any_way(check):
    def bad(p, x):
        return layer(p, x).log()

    both = fp.levels(EAGER, fp.stage(bad))
    plan = plan_of(both, fp.Schedule.parse("0F0 0F1@1 0B0 0B1"))
    with pytest.raises(fp.NotFiniteError, match="0F1"):
        fp.run(plan, layers(1), (X, Y), check=check)  # pyright: ignore


def test_slices_hand_their_carry_from_way_to_way():
    stages, params = causal.chain(("attend", "recur"))
    schedule = fp.schedules.one_f_one_b(2, 2, num_slices=3)
    forwards = [action for order in schedule.orders for action in order if action.kind is fp.Kind.F]
    mixed = replace(schedule, levels={each: (each.microbatch + each.slice) % 2 for each in forwards})
    ways = [fp.levels(stage, fp.compile_stage(stage, fuse=False)) for stage in stages]
    batch = causal.batch(4, 9)
    expected = fp.run(plan_of(stages, schedule), params, batch)
    assert_same_result(expected, fp.run(plan_of(ways, mixed), params, batch))


def test_several_batches_and_the_step_in_the_schedule():
    """The sums of all ways are spent when the stage steps."""
    schedule = fp.schedules.step_params(fp.schedules.zero_bubble(2, 4))
    batches = [(X, Y), (Y, X), (X[:7], Y[:7])]

    def trained(stages, schedule):
        params = tuple({name: leaf.clone() for name, leaf in tree.items()} for tree in layers(2))
        plan = plan_of(stages, schedule)
        optimizer = torch.optim.AdamW(fp.leaves(params), lr=0.01)
        results = [fp.run_batches(plan, params, batches, optimizer=optimizer) for _ in range(2)]
        return [result.loss for row in results for result in row], params

    ways = [fp.levels(EAGER, CHECKPOINTED), fp.levels(COMPILED, RECOMPUTED)]
    assert same(trained([EAGER, COMPILED], schedule), trained(ways, leveled(schedule)))


def test_a_way_that_runs_for_the_first_time_goes_alone():
    """Its parameters are copies then, which show whether it writes into them; the next batch begins with what was stepped."""
    schedule = fp.schedules.step_params(fp.schedules.one_f_one_b(2, 4))
    batches = [(X, Y), (Y, X), (X, Y)]
    stages = [fp.levels(fp.stage(layer), fp.stage(again)) for _ in range(2)]
    params = layers(2)
    fp.run(plan_of(stages, fp.schedules.one_f_one_b(2, 4)), params, (X, Y))  # level 0 alone
    plan = plan_of(stages, leveled(schedule))
    optimizer = torch.optim.SGD(fp.leaves(params), lr=0.5)
    with fp.lanes(plan) as lanes:
        losses = [one.loss for one in fp.run_batches(plan, params, batches, optimizer=optimizer, executor=lanes)]
    twins = layers(2)
    optimizer = torch.optim.SGD(fp.leaves(twins), lr=0.5)
    alone = plan_of([EAGER] * 2, schedule)
    assert same([one.loss for one in fp.run_batches(alone, twins, batches, optimizer=optimizer)], losses)
    assert same(twins, params)


def test_ways_that_lend_a_module_are_seen():
    """Functions of several lanes that put their parameters into one module would race."""
    module = nn.Linear(6, 6, bias=False)
    lent = fp.stage(lambda p, x: torch.func.functional_call(module, p, (x,)), name="lent")
    stages = [fp.levels(fp.stage(lambda p, x: x @ p["weight"].T, name="plain"), lent)] * 2
    plan = plan_of(stages, leveled(fp.schedules.one_f_one_b(2, 4)))
    params = tuple({"weight": torch.ones(6, 6)} for _ in range(2))
    with pytest.raises(fp.PlanError, match=r"the module 'module', which stages of lanes \[0, 1\] call"):
        fp.run(plan, params, (X, Y), executor="threads")
    fp.run(plan, params, (X, Y), executor="serial")


def test_ways_of_models_that_share_parameters():
    """Of two copies of a model, cut alike: what is shared is told by its name."""

    def model(wrap):
        torch.manual_seed(0)
        whole = nn.Sequential(nn.Linear(6, 6, bias=False), Dropping(wrap), nn.Linear(6, 6, bias=False)).eval()
        whole[2].weight = whole[0].weight
        return whole

    keep, other = fp.split(model(False), 3, loss=F.mse_loss), fp.split(model(True), 3, loss=F.mse_loss)
    ways = [fp.levels(*both) for both in zip(keep.stages, other.stages, strict=True)]
    schedule = fp.schedules.one_f_one_b(3, 4)
    expected = fp.run(plan_of(keep, schedule), keep.params, (X, Y), seed=0)
    result = fp.run(plan_of(ways, leveled(schedule)), keep.params, (X, Y), seed=0)
    assert_same_result(expected, result)


def test_one_way_of_two_stages():
    """A composition that is a way of both draws for each what its parts draw."""

    def drop(name):
        return fp.stage(lambda p, x: F.dropout(x * p, 0.4), name=name)

    firsts = [fp.compose(drop("a"), drop("b")), fp.compose(drop("c"), drop("d"))]
    other = fp.compose(drop("u"), drop("v"))
    params = tuple((torch.ones(6), torch.ones(6)) for _ in range(2))
    schedule = fp.schedules.one_f_one_b(2, 4)
    expected = fp.run(plan_of(firsts, schedule), params, (X, Y), seed=2)
    ways = [fp.levels(first, other) for first in firsts]
    assert_same_result(expected, fp.run(plan_of(ways, leveled(schedule)), params, (X, Y), seed=2))


def test_an_error_says_at_which_level_it_was():
    def fails(p, x):
        raise ValueError("no")

    plan = plan_of(fp.levels(EAGER, fp.stage(fails)), fp.Schedule.parse("0F0 0F1@1 0B0 0B1"))
    with pytest.raises(ValueError, match="in 0F1@1 of stage 0"):
        fp.run(plan, layers(1), (X, Y))


def test_each_level_is_measured():
    """By the way of each; memory is of one level, so a schedule of several is refused."""
    stages = [fp.levels(EAGER, RECOMPUTED)] * 2
    options = {"params": layers(2), "repeats": 1, "warmup": 0}
    costs = [fp.models.profile(stages, X, level=level, **options) for level in range(2)]
    assert costs[1].residual == fp.models.profile([RECOMPUTED] * 2, X, **options).residual
    assert costs[0].residual == fp.models.profile([EAGER] * 2, X, **options).residual
    assert costs[0].residual != costs[1].residual
    memory = fp.models.memory(stages, X, params=layers(2), level=5)
    assert memory[0].activations == fp.models.memory([RECOMPUTED] * 2, X, params=layers(2))[0].activations
    with pytest.raises(fp.PlanError, match=r"is of one level, and the schedule '1F1B' has several; fp.simulate"):
        memory.peak(leveled(fp.schedules.one_f_one_b(2, 2)))
    with pytest.raises(fp.PlanError, match="level is an int from 0"):
        fp.models.profile(stages, X, level=-1, **options)


def test_the_two_halves_of_a_vjp():
    schedule = fp.schedules.fill_drain(2, 3)
    alone = plan_of([EAGER] * 2, schedule, loss=None)
    plan = plan_of([fp.levels(EAGER, RECOMPUTED)] * 2, leveled(schedule), loss=None)
    found = []
    for each in (alone, plan):
        result, pullback = fp.vjp(each, layers(2), X)
        found.append((result.outputs, pullback(torch.ones_like(result.outputs))))
    assert same(*found)


def test_warmup_makes_the_programs_of_all_ways():
    ways = [fp.compile_stage(EAGER), fp.compile_stage(EAGER, recompute=True)]
    plan = plan_of(fp.levels(*ways), fp.Schedule.parse("0F0 0F1@1 0F2 0B0 0B1 0B2"))
    assert 2 == fp.warmup(plan, layers(1), (X[:9], Y[:9]))
    fp.run(plan, layers(1), (X[:9], Y[:9]))
    assert [1, 1] == [way.program.made for way in ways]


def test_a_way_that_writes_into_its_parameters_is_refused():
    def writes(p, x):
        p["a"].data.add_(1)
        return layer(p, x)

    params = layers(1)
    before = snapshot(params)
    plan = plan_of(fp.levels(EAGER, fp.stage(writes)), fp.Schedule.parse("0F0 0F1@1 0B0 0B1"))
    with pytest.raises(fp.PlanError, match=r"(?s)a stage wrote into its parameters.*params\[0\]\['a'\]"):
        fp.run(plan, params, (X, Y))
    assert same(before, snapshot(params))


def test_without_levels_it_is_its_first_way():
    calls = Counter()

    def way(name):
        return fp.stage(lambda p, x: (calls.update([name]), x * p)[1], name="way")

    both = fp.levels(way("first"), way("second"))
    fp.run(plan_of(both, fp.schedules.one_f_one_b(1, 2)), (torch.ones(6),), (X, Y))
    both(torch.ones(6), X)
    assert {"first": 3} == calls
    assert "<Stage 'layer': layer; 2 levels>" == repr(fp.levels(EAGER, CHECKPOINTED))
    assert EAGER.fn is fp.levels(EAGER).fn


def test_a_plan_says_what_its_stages_lack():
    schedule = fp.Schedule.parse("0F0@2 0F1 0B0 0B1\n1F0@1 1F1@3 1B0 1B1")
    with pytest.raises(fp.PlanError) as caught:
        plan_of([fp.levels(EAGER, CHECKPOINTED), EAGER], schedule)
    assert "stage 0 ('layer') has 2 levels, and the schedule runs 0F0 at level 2" in str(caught.value)
    assert "stage 1 ('layer') has 1 level, and the schedule runs 1F1 at level 3; fp.levels(way," in str(caught.value)


@pytest.mark.parametrize(
    ("ways", "says"),
    [
        ([], "levels needs at least one way"),
        ([EAGER, nn.Linear(2, 2)], "levels takes stages, .*Linear"),
        ([EAGER, fp.levels(EAGER, CHECKPOINTED)], r"way 1 \('layer'\) has levels already"),
        ([EAGER, fp.Stage(layer, pop=("e",))], r"pop is \('e',\) in way 1, and \(\) in way 0"),
        ([EAGER, fp.Stage(layer, state=True)], "state is True in way 1, and False in way 0"),
        ([EAGER, fp.Stage(layer, commit=lambda state, stats: state)], "only one changes its state"),
    ],
)
def test_what_are_no_ways(ways, says):
    with pytest.raises(fp.PlanError, match=says):
        fp.levels(*ways)


def test_what_takes_no_levels():
    both = fp.levels(EAGER, CHECKPOINTED)
    with pytest.raises(fp.PlanError, match=r"fp.levels\(fp.compose"):
        fp.compose(both, EAGER)
    with pytest.raises(fp.PlanError, match="compile each way"):
        fp.compile_stage(both)
