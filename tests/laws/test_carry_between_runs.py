"""Sequences read in several runs, with the carry of each run given to the next one, give what one
forward of the whole sequences gives."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from causal import WIDTH, batch, chain, whole
from common import EXECUTORS, ids, same, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from random_plans import schedules as random_schedules

import funcpipe as fp
from funcpipe import schedules as S
from funcpipe.typing import Carry

CHAIN = ("attend", "recur", "point", "attend")
X = batch(7, 20)[0]


def expected_of(stages, params, x=X):
    """The outputs of the plain stages over whole sequences."""
    return whole(stages, params, x, torch.zeros_like(x))[2]


def in_parts(plans, params, parts, run=fp.run, **options):
    """The outputs of one run per part, and the last carry."""
    carry, outputs = None, []
    for plan, part in zip(plans, parts, strict=True):
        result = run(plan, params, part, carry=carry, **options)
        outputs.append(result.outputs)
        carry = result.carry
    return torch.cat(outputs, 1), carry


def plan_of(stages, schedule, **options):
    return fp.make_plan(stages, schedule.forwards(), carry=True, devices="cpu", **options)


SCHEDULES = [
    S.fill_drain(4, 3, num_slices=2),
    S.one_f_one_b(4, 3, num_slices=2),
    S.interleaved(4, 3, num_devices=2, num_slices=2),
    S.looped_bfs(4, 3, num_devices=2, num_slices=2),
    S.zero_bubble(4, 3, num_slices=2),
    S.one_f_one_b(4, 3),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=ids)
def test_a_prompt_in_three_runs_and_then_token_by_token(schedule):
    """Three chunks, most in two slices each; then one token per run, by a plan without slices."""
    stages, params = chain(CHAIN)
    prefill, decode = plan_of(stages, schedule), plan_of(stages, S.one_f_one_b(4, 3))
    parts, plans = X.split([6, 7, 4, 1, 1, 1], 1), [prefill] * 3 + [decode] * 3
    before = snapshot((params, X))
    wanted, last = in_parts(plans, params, parts, fp.run_sequential, threads_per_lane=1)
    torch.testing.assert_close(wanted, expected_of(stages, params), rtol=1e-10, atol=1e-10)
    for executor in EXECUTORS:
        got, carry = in_parts(plans, params, parts, executor=executor, threads_per_lane=1)
        assert same(wanted, got)
        assert same(last, carry)
    assert same(before, snapshot((params, X)))
    assert (last.rows, last.trees[2]) == ((3, 2, 2), None)
    assert [tree["key"].shape for tree in last.trees[0]] == [(n, 20, WIDTH) for n in (3, 2, 2)]
    assert [tree[1] for tree in last.trees[1]] == [20] * 3


def test_compiled_stages():
    """Each length of the carry is one more program, as each shape."""
    stages, params = chain(("attend", "point"))
    plan = plan_of([fp.compile_stage(stage) for stage in stages], S.one_f_one_b(2, 2, num_slices=2))
    parts = X[:4, :8].split(4, 1)
    wanted, last = in_parts([plan] * 2, params, parts, fp.run_sequential, threads_per_lane=1)
    torch.testing.assert_close(wanted, expected_of(stages, params, X[:4, :8]))
    for executor in EXECUTORS:
        options = {"executor": executor, "threads_per_lane": 1}
        assert same((wanted, last), in_parts([plan] * 2, params, parts, **options))


@settings(max_examples=30)
@given(random_schedules(), st.data())
def test_any_legal_schedule(schedule, data):
    """Random orders and placements; uneven slices; fewer rows than microbatches."""
    kinds = [data.draw(st.sampled_from(CHAIN[:3])) for _ in range(schedule.num_stages - 1)]
    stages, params = chain(("attend", *kinds), data.draw(st.integers(0, 9)))
    x = batch(data.draw(st.integers(1, 5)), 3 * schedule.num_slices)[0]
    plans = [plan_of(stages, schedule)] * 2
    parts = x.split([schedule.num_slices, 2 * schedule.num_slices], 1)
    wanted, _ = in_parts(plans, params, parts, fp.run_sequential, threads_per_lane=1)
    torch.testing.assert_close(wanted, expected_of(stages, params, x), rtol=1e-10, atol=1e-10)
    for executor in EXECUTORS:
        assert same(wanted, in_parts(plans, params, parts, executor=executor)[0])


def test_a_carry_can_be_used_again_and_changed():
    """A run does not write into its carry: three samples of one prompt, one of them cut short."""
    stages, params = chain(("attend", "attend"))
    plan = plan_of(stages, S.one_f_one_b(2, 2, num_slices=2))
    prompt, more, other = X[:, :8], X[:, 8:12], X[:, 12:16]
    carry = fp.run(plan, params, prompt).carry
    before = snapshot(carry)
    for part in (more, other, more):
        got = fp.run(plan, params, part, carry=carry).outputs
        wanted = expected_of(stages, params, torch.cat([prompt, part], 1))[:, 8:]
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    assert same(before, snapshot(carry))
    short = [
        tuple({name: value[:, :5] for name, value in tree.items()} for tree in row)
        for row in carry.trees
    ]
    got = fp.run(plan, params, other, carry=carry._replace(trees=tuple(short))).outputs
    wanted = expected_of(stages, params, torch.cat([prompt[:, :5], other], 1))[:, 5:]
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_losses_and_feeds_of_parts():
    """The loss of each part, weighed by its length, is the loss of the whole."""
    stages, params = chain(("attend", "recur"))
    x, target = batch(4, 12)
    plan = plan_of(stages, S.one_f_one_b(2, 2, num_slices=2), loss=F.mse_loss)
    carry, results = None, []
    for part in zip(x.split(4, 1), target.split(4, 1), strict=True):
        results.append(fp.run(plan, params, part, carry=carry, check="finite", record=True))
        carry = results[-1].carry
    wanted = whole(stages, params, x, target)[0]
    torch.testing.assert_close(sum(result.loss for result in results) / 3, wanted)
    assert "carry" in repr(results[0])
    assert fp.run(fp.make_plan(stages, plan.schedule), params, x).carry is None


def test_a_composition_keeps_the_carries_of_its_parts():
    stages, params = chain(CHAIN)
    joined, trees = [fp.compose(*stages[:2]), fp.compose(*stages[2:])], (params[:2], params[2:])
    plans = [plan_of(joined, S.one_f_one_b(2, 2, num_slices=2))] * 2
    got, _ = in_parts(plans, trees, X.split(10, 1))
    torch.testing.assert_close(got, expected_of(stages, params), rtol=1e-10, atol=1e-10)


def test_the_program_reads_and_writes_the_carry():
    stages, _ = chain(("attend",))
    text = str(plan_of(stages, S.fill_drain(1, 1, num_slices=2)).program.lane(0))
    assert "receive carry_in[0,0.0]@1 from caller" in text
    assert "0F0.0  reads input[0,0.0]@0 carry_in[0,0.0]@1  writes" in text
    assert text.index("carry[0,0.0]") < text.index("carry_out[0,0.1]")


PREFILL = S.one_f_one_b(2, 3, num_slices=2)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda carry: carry.trees, fp.PlanError, r"carry= is result.carry of .*; got a tuple"),
        (lambda carry: carry._replace(stages=("attend0", "other")), fp.PlanError, "same stages"),
        (lambda carry: carry._replace(rows=(3, 2)), fp.BatchError, r"of \[3, 2\] rows, .*3, 2, 2"),
        (lambda carry: carry._replace(rows=(2, 2, 2)), fp.BatchError, r"of \[2, 2, 2\] rows"),
        (lambda carry: carry._replace(trees=(carry.trees[0], None)), fp.PlanError, r"stages \[1\]"),
        (lambda carry: carry._replace(trees=(carry.trees[0], ())), fp.PlanError, r"stages \[1\]"),
        (lambda carry: carry._replace(trees=carry.trees[:1]), fp.PlanError, "same stages"),
    ],
)
def test_a_carry_that_does_not_fit_is_refused_before_anything_runs(change, error, message):
    stages, params = chain(("attend", "attend"))
    plan = plan_of(stages, PREFILL)
    carry = change(fp.run(plan, params, X[:, :4]).carry)
    with pytest.raises(error, match=message):
        fp.run(plan, params, X[:, 4:8], carry=carry, observe=lambda *_: pytest.fail("it ran"))


def test_a_carry_of_another_batch_or_plan_is_refused():
    stages, params = chain(("attend", "attend"))
    plan = plan_of(stages, PREFILL)
    carry = fp.run(plan, params, X[:, :4]).carry
    assert isinstance(carry, Carry)
    with pytest.raises(fp.BatchError, match=r"of \[3, 2, 2\] rows, .*cut into \[2, 2, 2\]"):
        fp.run(plan, params, X[1:, 4:8], carry=carry)
    with pytest.raises(fp.BatchError, match=r"cut into \[4, 3\]; continue with the same rows"):
        fp.run(plan_of(stages, S.one_f_one_b(2, 2)), params, X[:, 4:8], carry=carry)
    more, trees = chain(("attend", "attend", "recur"))
    with pytest.raises(fp.PlanError, match="of the stages attend0, attend1, and the plan has"):
        fp.run(plan_of(more, S.one_f_one_b(3, 3)), trees, X[:, 4:8], carry=carry)


@pytest.mark.parametrize("run", [fp.run, fp.run_sequential])
def test_plans_that_take_no_carry(run):
    """A plan with backwards, and one of forwards without carry=True."""
    stages, params = chain(("attend", "attend"))
    carry = fp.run(plan_of(stages, PREFILL), params, X[:, :4]).carry
    train = fp.make_plan(stages, PREFILL, loss=F.mse_loss, devices="cpu")
    for plan, given_batch in (
        (train, (X[:, :4], X[:, :4])),
        (fp.make_plan(stages, PREFILL.forwards(), devices="cpu"), X[:, :4]),
    ):
        with pytest.raises(fp.PlanError, match=r"takes no carry; .*\.forwards\(\), carry=True"):
            run(plan, params, given_batch, carry=carry)


@pytest.mark.parametrize(
    ("kind", "schedule", "carry", "message"),
    [
        ("attend", PREFILL, True, r"has backwards; give schedule\.forwards\(\)"),
        ("point", PREFILL.forwards(), True, "no stage has one"),
        ("attend", PREFILL.forwards(), 1, "carry= is True or False; got 1"),
    ],
)
def test_plans_that_cannot_keep_a_carry_are_refused(kind, schedule, carry, message):
    make = partial(fp.make_plan, chain((kind, kind))[0], schedule, carry=carry)
    with pytest.raises(fp.PlanError, match=message):
        make()
