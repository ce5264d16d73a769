"""Spare slots: more values under way between lanes, the same numbers, and a clock that sees
them."""

import pytest
import torch
import torch.nn.functional as F
from lane_proof import prove

import funcpipe as fp
from funcpipe._src.data.program import CALLER


def plan_of(schedule, spare):
    stages = [fp.stage(lambda p, x: torch.tanh(x @ p))] * schedule.num_stages
    return fp.make_plan(stages, schedule, loss=F.mse_loss, devices="cpu", spare_slots=spare)


@pytest.mark.parametrize(
    "family", [fp.schedules.one_f_one_b, fp.schedules.interleaved, fp.schedules.zbv]
)
def test_pools_between_lanes_have_more(family):
    schedule = family(4, 6, num_devices=2)
    plain, roomy = plan_of(schedule, 0), plan_of(schedule, 2)
    for one, other in zip(plain.program.pools, roomy.program.pools, strict=True):
        assert other == one._replace(slots=one.slots + 2 * (one.source != CALLER))
    prove(roomy.program)
    assert plain.fingerprint != roomy.fingerprint


@pytest.mark.parametrize("executor", ["serial", "threads"])
@pytest.mark.parametrize("rows", [12, 5])
def test_the_numbers_are_the_same(executor, rows):
    schedule = fp.schedules.interleaved(4, 6, num_devices=2)
    g = torch.Generator().manual_seed(1)
    params = tuple(torch.randn(4, 4, generator=g, dtype=torch.float64) for _ in range(4))
    batch = tuple(torch.randn(rows, 4, generator=g, dtype=torch.float64) for _ in range(2))
    one, other = (
        fp.run(plan_of(schedule, spare), params, batch, executor=executor) for spare in (0, 3)
    )
    assert torch.equal(one.loss, other.loss)
    assert all(map(torch.equal, one.grads, other.grads))
    pools = plan_of(schedule, 3).program.pools
    assert all(most <= pool.slots for most, pool in zip(other.stats.slots, pools, strict=True))


def test_a_lane_waits_for_the_news_of_a_free_slot():
    """Gradients of fill-drain have one slot: each comes two hops after the one before was read."""
    schedule, cost = fp.schedules.fill_drain(2, 8), fp.Cost(comm=1.0)
    assert [46.0, 29.0, 29.0] == [
        fp.simulate(plan_of(schedule, spare), cost).makespan for spare in (0, 1, 2)
    ]
    assert 29.0 == fp.simulate(schedule, cost).makespan
    assert fp.simulate(plan_of(schedule, 0)) == fp.simulate(
        plan_of(schedule, 1)
    )  # without latency it is all the same


@pytest.mark.parametrize("spare", [-1, 1.5, True, None])
def test_wrong_numbers(spare):
    with pytest.raises(fp.PlanError, match="spare_slots= is the number of additional slots"):
        plan_of(fp.schedules.one_f_one_b(2, 2), spare)
