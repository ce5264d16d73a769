"""Search over microbatches in slices: legal, within its limits, never below its bound, shorter than
what is published."""

import pytest
from common import cpu_plan, search
from hypothesis import given, settings
from hypothesis import strategies as st

import funcpipe as fp
from funcpipe import schedules as S

TIMES = st.sampled_from([0.5, 1.0, 2.0, 3.0])


def row(draw, count):
    return draw(st.lists(TIMES, min_size=count, max_size=count))


@settings(max_examples=25)
@given(st.data())
def test_what_is_found_is_legal_and_within_the_limits(data):
    """Unequal stages, any placement, remat or offload or neither."""
    devices, slices = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 3))
    places = [*range(devices), *data.draw(st.lists(st.integers(0, devices - 1), max_size=2))]
    count = len(places)
    cost = fp.Cost(
        row(data.draw, count), row(data.draw, count), row(data.draw, count), comm=1, residual=1
    )
    one = max(places.count(device) for device in range(devices))  # what a microbatch needs
    limit = data.draw(st.sampled_from([None, one, one + 0.5]))
    found = search(
        cost,
        devices,
        data.draw(st.integers(1, 3)),
        num_slices=slices,
        placement=places,
        memory_limit=limit,
        remat=data.draw(st.booleans()),
        offload=data.draw(st.booleans()),
        evaluations=150,
        seconds=1000,
    )
    S.check(found.schedule)
    assert found.schedule.num_slices == slices
    assert found.schedule.device_of == tuple(places)
    assert found.makespan == pytest.approx(fp.simulate(found.schedule, cost).makespan)
    assert found.lower_bound <= found.makespan * (1 + 1e-9)
    assert limit is None or max(found.peak) <= limit * (1 + 1e-9)


@pytest.mark.parametrize(("devices", "slices"), [(4, 4), (8, 8), (8, 16)])
def test_slimpipe_is_beaten_in_its_memory(devices, slices):
    """With I and W apart nothing shorter exists, at a fifth less of memory than SlimPipe (arXiv
    2504.14519) needs."""
    cost = fp.Cost(0.5, 0.5, 0.5, residual=0.5, weight_residual=0.25)
    published = fp.simulate(
        S.interleaved(2 * devices, 4, num_devices=devices, num_slices=slices), cost
    )
    limit = 0.9 * max(published.peak)
    counts = {"num_stages": 2 * devices, "num_slices": slices}
    found = search(cost, devices, 4, **counts, memory_limit=limit, evaluations=300)
    assert found.gap == 0
    assert found.makespan < 0.97 * published.makespan
    assert max(found.peak) < 0.9 * max(published.peak)


def test_rules_find_what_no_family_is():
    """Unequal stages, the memory of 1F1B: shorter than every family that fits."""
    cost = fp.Cost([2, 3, 2, 4], [3, 2, 3, 2], [2, 3, 1, 2], comm=0.2)
    families = [
        family(4, 4, num_slices=3)
        for family in (S.one_f_one_b, S.zero_bubble, S.zb_h2, S.eager_one_f_one_b)
    ]
    timelines = [fp.simulate(schedule, cost) for schedule in families]
    limit = max(timelines[0].peak)
    found = search(cost, 4, 4, num_slices=3, memory_limit=limit, evaluations=1500)
    fitting = [timeline.makespan for timeline in timelines if max(timeline.peak) <= limit]
    assert found.source in ("rules", "moves")
    assert found.makespan < min(fitting)


def test_what_is_found_runs():
    """It is an ordinary schedule: the same numbers as any other with these slices."""
    import torch
    from causal import batch, chain

    found = search(fp.Cost([1, 2], [2, 1], [1, 1]), 2, 3, num_slices=2, evaluations=200)
    stages, params = chain(("attend", "recur"))
    results = [
        fp.run(cpu_plan(stages, schedule), params, batch(6, 8))
        for schedule in (found.schedule, S.one_f_one_b(2, 3, num_slices=2))
    ]
    torch.testing.assert_close(results[0].grads, results[1].grads, rtol=1e-12, atol=1e-12)


def test_what_is_refused():
    """A proof by the solver, and slices that do not take equally long."""
    counts = {"num_devices": 2, "num_microbatches": 2, "num_slices": 2, "evaluations": 10}
    with pytest.raises(fp.ScheduleError, match="exact=True proves schedules of whole microbatches"):
        fp.search(fp.Cost(), **counts, exact=True)
    with pytest.raises(
        fp.ScheduleError, match="these take 0.375, 0.625 of their microbatch"
    ) as error:
        fp.search(fp.Cost(attention=0.5), **counts)
    assert "balanced_slices" in str(error.value)
    with pytest.raises(fp.ScheduleError, match="num_slices must be positive"):
        fp.search(fp.Cost(), **{**counts, "num_slices": 0})
    lengths = S.balanced_slices(1000, 2, attention=0.5)
    assert fp.search(fp.Cost(attention=0.5, slices=lengths), **counts).schedule.num_slices == 2
