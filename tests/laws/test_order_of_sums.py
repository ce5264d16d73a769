"""Law 1 where W does not follow I: sums grow in the order of the schedule's own backwards, in every
executor and the oracle."""

import functools

import pytest
import torch
from common import EXECUTORS, assert_same_result, cpu_plan, same
from hypothesis import given, settings
from hypothesis import strategies as st

import funcpipe as fp

WIDTH = 4


def plain(p, x):
    return torch.tanh(x @ p["w"] + p["b"])


def odd(p, x):
    """Of two rows no program can be made, of other numbers it can."""
    return x @ p["w"] * (1.0 if len(x) != 2 or x.sum().item() > 0 else 0.5) + p["b"]


@functools.cache
def kinds():
    """Stages of each kind, traced once for all schedules: eager, compiled, in part compiled."""
    part = [fp.compile_stage(fp.stage(odd), fuse=False, fallback=True) for _ in range(3)]
    made = [fp.compile_stage(fp.stage(plain), fuse=fuse) for fuse in (False, True, False)]
    return {"eager": [fp.stage(plain) for _ in range(3)], "compiled": made, "part": part}


@st.composite
def orders(draw):
    """Any legal schedule: actions that may come next, drawn one after the other."""
    stages, count = draw(st.integers(1, 3)), draw(st.integers(2, 5))
    device = [draw(st.integers(0, 1)) for _ in range(stages)]
    device = [sorted(set(device)).index(one) for one in device]
    cells = [(s, m) for s in range(stages) for m in range(count)]
    split = draw(st.sets(st.sampled_from(cells)))
    lanes, done, left = [[] for _ in {*device}], set(), {("F", 0, m) for m in range(count)}
    while left:
        kind, s, m = action = draw(st.sampled_from(sorted(left)))
        left.remove(action)
        done.add(action)
        lanes[device[s]].append(f"{s}{kind}{m}")
        if kind == "F" and s + 1 < stages:
            left.add(("F", s + 1, m))
        begins = s if kind == "F" and s + 1 == stages else s - 1 if kind in "BI" else -1
        if begins >= 0:
            left.add(("I" if (begins, m) in split else "B", begins, m))
        if kind == "I":
            left.add(("W", s, m))
    return fp.Schedule.parse("\n".join(map(" ".join, lanes)))


def data(stages, rows, dtype=torch.float32):
    g = torch.Generator().manual_seed(rows)
    make = lambda *shape: torch.randn(*shape, generator=g, dtype=dtype)
    return tuple({"w": make(WIDTH, WIDTH), "b": make(WIDTH)} for _ in range(stages)), (
        make(rows, WIDTH),
        make(rows, WIDTH),
    )


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_order_of_w(random):
    """Whatever stages are, and whichever way W goes, every executor has the oracle's bits."""
    schedule = random.draw(orders(), label="schedule")
    names = [random.draw(st.sampled_from(sorted(kinds()))) for _ in range(schedule.num_stages)]
    stages = [kinds()[name][number] for number, name in enumerate(names)]
    params, batch = data(len(stages), random.draw(st.integers(1, 12), label="rows"))
    plan = cpu_plan(stages, schedule)
    expected = fp.run_sequential(plan, params, batch, threads_per_lane=1)
    for executor in EXECUTORS:
        assert_same_result(
            expected, fp.run(plan, params, batch, executor=executor, threads_per_lane=1)
        )


FORWARD = "0F0 0F1 0F2"


@pytest.mark.parametrize(
    ("kind", "order", "follows"),
    [
        ("compiled", "0I0 0I1 0I2 0W2 0W1 0W0", "0B2 0B1 0B0"),
        ("eager", "0I0 0I1 0I2 0W2 0W1 0W0", "0B2 0B1 0B0"),
        ("compiled", "0I0 0B1 0I2 0W2 0W0", "0B1 0B2 0B0"),
        ("eager", "0I0 0B1 0I2 0W2 0W0", "0B1 0B2 0B0"),
        # Rows 3, 2, 2: the first microbatch is a program, the others are not.
        ("part", "0I0 0I1 0I2 0W2 0W0 0W1", "0B2 0B0 0B1"),
    ],
)
def test_which_order_that_is(kind, order, follows):
    """A stage adds at B and W. So the same sums are those of an order of whole backwards."""
    params, batch = data(1, 7)
    stages = [kinds()[kind][0]]
    found = {}
    for text in (
        order,
        "0B0 0B1 0B2",
        "0B0 0B2 0B1",
        "0B1 0B0 0B2",
        "0B1 0B2 0B0",
        "0B2 0B0 0B1",
        "0B2 0B1 0B0",
    ):
        plan = cpu_plan(stages, fp.Schedule.parse(f"{FORWARD} {text}"))
        found[text] = fp.run_sequential(plan, params, batch, threads_per_lane=1).grads
        assert same(
            found[text], fp.run(plan, params, batch, executor="serial", threads_per_lane=1).grads
        )
    assert same(found[order], found[follows])
    # Which of the first two was first does not matter: a + b is b + a.
    others = [one for text, one in found.items() if text != order and text[-3:] != follows[-3:]]
    assert not any(same(found[order], one) for one in others), (
        "choose numbers whose sums depend on the order"
    )


def test_whole_and_split_backwards_have_the_same_bits():
    """Schedules that ascend agree, whether programs are B, or I and W; fused sums, too."""
    params, batch = data(3, 11)
    for fuse in (False, True):
        stages = [fp.compile_stage(fp.stage(plain), fuse=fuse) for _ in range(3)]
        found = []
        for schedule in (
            fp.schedules.one_f_one_b(3, 4),
            fp.schedules.zero_bubble(3, 4),
            fp.schedules.delay(fp.schedules.fill_drain(3, 4), group=2),
        ):
            assert schedule.is_ascending
            plan = cpu_plan(stages, schedule)
            found.append(fp.run_sequential(plan, params, batch, threads_per_lane=1))
        for one in found[1:]:
            assert_same_result(found[0], one)


def test_the_oracle_works_off_backwards_as_they_come():
    """It keeps no more residuals than the order asks for, and says at which action it was."""
    seen = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append("F")
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            seen.append("B")
            if len(seen) == 8:
                raise RuntimeError("at the last")
            return g

    stage = fp.stage(lambda p, x: Seen.apply(x * p))
    schedule = fp.Schedule.parse("0F0 0F1 0B0 0F2 0I2 0F3 0I1 0W2 0B3 0W1")
    plan = cpu_plan([stage], schedule)
    with pytest.raises(RuntimeError, match="at the last") as raised:
        fp.run_sequential(plan, (torch.ones(3),), (torch.ones(8, 3), torch.zeros(8, 3)))
    assert "FBFFBFBB" == "".join(seen)
    assert "0W1" == raised.value.funcpipe.action
