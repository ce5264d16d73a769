"""What does not fit is refused on every rank, before anything has moved, with the rank, what
differs and both values."""

from dataclasses import replace

import pytest
import torch.nn.functional as F
from common import schedules
from lane_proof import prove
from rank_pool import Failed
from rank_tasks import everything

import funcpipe as fp
from funcpipe._src.processes.rank_lanes import Ranks

RIGHT = next(number for number, schedule in enumerate(schedules(4, 4)) if schedule.num_devices == 2)
"""A schedule for two ranks, whose run must be right after all."""


def refused(results, kind, *words):
    for result in results:
        assert isinstance(result, Failed), result
        assert result.is_a(kind), result.trace
        for word in words:
            assert word in result.text, result.text


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("plan", ("the plan", "rank 1 has")),
        ("lanes", ("the ranks of the lanes", "[0, 1, 1, 1]")),
    ],
)
def test_other_plans(pools, what, words):
    refused(pools(2).run("made_differently", what), fp.RanksError, *words)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("seed", ("seed: rank 1 has 2, rank 0 has 1",)),
        ("scale", ("loss_scale: rank 1 has 2.0, rank 0 has 1.0",)),
        ("rows", ("rows of the batch: rank 1 has 7, rank 0 has 8",)),
        ("no inputs", ("rank 0 has stage 0 and was given no inputs",)),
        ("plan", ("the plan: rank 1 has",)),
        ("batch", ("inputs of shape (8, 6) has other numbers on rank 1", "the same seed")),
    ],
)
def test_other_runs(pools, what, words):
    pool = pools(2)
    refused(pool.run("run_differently", what), fp.RanksError, *words)
    assert [[], []] == pool.all("bits", [RIGHT], [8])


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("params of others", fp.PlanError, ("which other ranks have", "fp.place")),
        ("no params", fp.PlanError, ("params has None for stages",)),
        ("other feeds", fp.BatchError, ("which no stage declares",)),
        ("vjp", fp.PlanError, ("fp.ranks(plan)",)),
        ("lanes", fp.PlanError, ("these ranks have 4 lanes, but the plan has 2",)),
        ("object between stages", fp.StageError, ("cannot go to another process",)),
    ],
)
def test_what_one_rank_refuses_reaches_the_other(pools, what, kind, words):
    """Rank 1 is given what does not fit and raises; rank 0 says so."""
    pool = pools(2)
    one, other = pool.run("given_wrongly", what)
    refused([other], kind, *words)
    refused([one], fp.PeerError, words[0])
    assert 1 == one.rank
    assert [[], []] == pool.all("bits", [RIGHT], [8])


def test_ranks_that_one_process_refuses(pools):
    assert [True] * 2 == pools(2).all("refused_here", 1, seconds=15)


def test_weights_that_no_rank_knows(pools):
    pool = pools(2)
    refused(pool.run("weighed", "inputs and target", "apart"), fp.RanksError, "no rank has both")
    assert [[], []] == pool.all("bits", [RIGHT], [8])


def test_closed_ranks(pools):
    refused(pools(2).run("after_the_end"), fp.FuncpipeError, "closed")


def test_without_processes():
    stages, *_ = everything()
    plan = fp.make_plan(stages, fp.schedules.one_f_one_b(4, 4), loss=F.mse_loss, devices="cpu")
    with pytest.raises(fp.RanksError, match="init_process_group"):
        fp.ranks(plan)
    with pytest.raises(fp.PlanError, match="takes a plan"):
        fp.ranks(stages)


@pytest.mark.parametrize(("what", "kind"), [("seed", fp.DrawError), ("state", fp.PlanError)])
def test_a_schedule_says_where_its_arguments_belong(pools, what, kind):
    outcomes = pools(2).run("forgotten_arguments", what)
    raised = [outcome for outcome in outcomes if outcome.is_a(kind)]
    assert raised
    for outcome in raised:
        assert f"give {what}= once, to ranks.schedule(params, {what}=...)" in outcome.trace


def test_programs_that_could_hang():
    """The program of a plan cannot; one whose order somebody turned could."""
    stages, *_ = everything()
    plan = fp.make_plan(stages, fp.schedules.one_f_one_b(4, 4), loss=F.mse_loss, devices="cpu")
    ranks = Ranks(plan, None, None, [[0, 1]], (0, 0), [0, 0, 1, 1], 1.0)
    ranks.check(plan)
    assert [0, 1] == [program.lane for program in ranks.programs(plan.program)]
    prove(plan.program)
    with pytest.raises(fp.PlanError, match="could wait for ever"):
        prove(replace(plan.program, order=plan.program.order[::-1]))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("three", "say which rank has which lane"),
        ("more ranks", "2 lanes and there are 3 ranks, so some would have no lane"),
        ("idle", "ranks [1] have no lane"),
        ("unknown", "[7] are not ranks"),
        ("few", "it has 2 entries"),
        ("mesh", "none of them is 'pp'"),
        ("no mesh", "mesh is a DeviceMesh"),
        ("timeout", "timeout is a number"),
        ("meta", "ranks run lanes on the CPU"),
    ],
)
def test_arguments(pools, what, words):
    refused(pools(3).run("arguments", what), fp.PlanError, words)
