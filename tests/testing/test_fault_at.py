"""FaultAt strikes where it says, and changes nothing else."""

from __future__ import annotations

import functools
import gc
import random

import pytest
import torch
import torch.nn.functional as F
from common import EXECUTORS, assert_same_result, cpu_plan, ids, same, schedules
from faulty import P, X, plain
from nets import net
from watch import num_tensors

import funcpipe as fp
from funcpipe import schedules as S
from funcpipe._src.core.errors import Where
from funcpipe.testing import Fault, FaultAt


class Boom(Exception):
    pass


def attempt(stages, params, state, schedule, executor="serial", **options):
    plan = cpu_plan(stages, schedule)
    run = (
        fp.run_sequential
        if executor == "sequential"
        else functools.partial(fp.run, executor=executor)
    )
    return run(
        plan,
        params,
        (X, X.flip(0)),
        state=state,
        seed=0,
        trainable=True,
        threads_per_lane=1,
        **options,
    )


def composed():
    stages, params, state = net(4)
    return (
        [stages[0], fp.compose(stages[1], stages[2]), stages[3]],
        (params[0], params[1:3], params[3]),
        (state[0], ((), ()), state[3]),
    )


@pytest.mark.parametrize("schedule", schedules(3, 4)[::3], ids=ids)
def test_faults_strike_at_their_action(schedule):
    """Every kind of action, of function, composed and module stages with skips and state; nothing
    else changes. `tests/faults` has faults in all schedules."""
    stages, params, state = composed()
    expected = attempt(stages, params, state, schedule)
    actions = {action for order in schedule.orders for action in order}
    with fp.lanes(cpu_plan(stages, schedule)) as lanes:
        for kind in "FRBI":
            places = [a for a in actions if a.kind.value == kind]
            for action in (
                [min(places), max(places), *random.Random(0).sample(places, 1)] if places else []
            ):
                for executor in ("serial", lanes):
                    failing = FaultAt(action.stage, action.microbatch, kind, error=Boom)(stages)
                    with pytest.raises(Boom) as error:
                        attempt(failing, params, state, schedule, executor)
                    # All of the first stage's backward is in W: nobody waits for what I gives.
                    late = kind == "I" and action.stage == 0
                    assert (
                        str(action._replace(kind=fp.Kind.W) if late else action)
                        == error.value.funcpipe.action
                    )
    for kind in "FRBI":
        never = FaultAt(1, 99, kind)(FaultAt(0, 99, kind)(stages))
        assert_same_result(expected, attempt(never, params, state, schedule))


@pytest.mark.parametrize("executor", [*EXECUTORS, "sequential"])
def test_b_is_the_backward_also_where_it_is_split(executor):
    stages, params, state = net()
    split, whole = S.zero_bubble(3, 4), S.one_f_one_b(3, 4)
    failing = FaultAt(1, 2, fp.Kind.B)(stages)
    for schedule in (split, whole):
        with pytest.raises(Fault) as error:
            attempt(failing, params, state, schedule, executor)
        letter = "I" if schedule is split else "B"
        assert f"1{letter}2" == error.value.funcpipe.action
    only = FaultAt(1, 2, "I")(stages)
    attempt(only, params, state, whole, executor)


def test_coordinates_and_objects():
    """The error is the user's, with its coordinates; an instance arrives as itself, every time."""
    stages, params, state = net()
    schedule = S.one_f_one_b(3, 4)
    with pytest.raises(Fault) as error:
        attempt(FaultAt(2, 1, "B")(stages), params, state, schedule, "threads")
    assert Where(2, "last", 1, "2B1", "2 (cpu)") == error.value.funcpipe
    assert "raised by funcpipe.testing.FaultAt" == str(error.value)
    boom = Boom("mine")
    failing = FaultAt(0, 3, "F", error=boom)(stages)
    for executor in EXECUTORS:
        with pytest.raises(Boom) as error:
            attempt(failing, params, state, schedule, executor)
        assert boom is error.value.__cause__
    stop = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt) as error:
        attempt(FaultAt(0, 3, "F", error=stop)(stages), params, state, schedule)
    assert stop is error.value


@pytest.mark.parametrize("executor", EXECUTORS)
def test_functions_change_what_is_there(executor):
    """NaN in an activation or a gradient, a stage that takes long; None changes nothing."""
    stages, params, state = net()
    schedule = S.remat(S.one_f_one_b(3, 4))
    expected = attempt(stages, params, state, schedule)
    nan = lambda t: t * float("nan")
    result = attempt(FaultAt(1, 2, "F", error=nan)(stages), params, state, schedule, executor)
    assert [False, False, True, False] == [bool(loss.isnan()) for loss in result.losses]
    assert result.loss.isnan()
    result = attempt(FaultAt(1, 2, "B", error=nan)(stages), params, state, schedule, executor)
    assert torch.equal(expected.loss, result.loss)
    assert same(expected.grads[2], result.grads[2])
    assert result.grads[1]["weight"].isnan().all()
    assert result.grads[0]["w"].isnan().all()
    seen = []
    waits = FaultAt(1, 2, "R", error=lambda t: seen.append(tuple(t.shape)))(stages)
    assert_same_result(expected, attempt(waits, params, state, schedule, executor))
    assert [(1, 3)] == seen
    seen.clear()
    both = FaultAt(0, 0, "B", error=lambda t: seen.append(t.sum().item()))(stages)
    assert_same_result(expected, attempt(both, params, state, schedule, executor))
    assert 2 == len(seen)  # of the output and of the stash


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["F", "B"])
def test_nothing_of_a_failed_run_is_reachable(kind):
    """A fault that is a type keeps nothing."""
    stages, params, state = net()
    failing = FaultAt(1, 2, kind, error=Boom)(stages)
    schedule = S.one_f_one_b(3, 4)
    for executor in EXECUTORS:
        counted = []
        for _ in range(3):
            with pytest.raises(Boom):
                attempt(failing, params, state, schedule, executor)
            gc.collect()
            counted.append(num_tensors())
        assert counted[1] == counted[2]


def test_outside_of_a_run_nothing_strikes():
    stages, params, _ = net()
    failing = FaultAt(0, 0, "F")(FaultAt(0, 0, "B")(stages))
    made = failing[0](params[0], X)
    assert isinstance(made, fp.Out)
    row = torch.func.vmap(lambda x: failing[0](params[0], x).y, randomness="different")(X)
    assert row.shape == X.shape
    fp.apply(
        [failing[0], fp.stage(lambda p, x, *, skips: x, pop=["e"])], (params[0], ()), X, seed=0
    )
    grads = torch.func.grad(lambda p: failing[0](p, X).y.sum())(params[0])
    assert grads["w"].shape == (3,)


def test_a_composition_of_faulty_stages_still_fails():
    """The fault stays with its stage, whatever number that has then."""
    stages, params, state = net(4)
    failing = FaultAt(2, 1, "B")(stages)
    made = [failing[0], fp.compose(failing[1], failing[2]), failing[3]]
    with pytest.raises(Fault) as error:
        attempt(
            made,
            (params[0], params[1:3], params[3]),
            (state[0], ((), ()), state[3]),
            S.one_f_one_b(3, 4),
        )
    assert "1B1" == error.value.funcpipe.action


def test_a_tensor_that_stands_twice_stays_one():
    """Output and stash may be one tensor; values that carry no gradient are left alone."""

    def fn(p, x):
        h = x * p["w"]
        return fp.Out(
            {"h": h, "n": 3, "m": torch.ones(len(x), dtype=torch.bool), "c": torch.ones(len(x))},
            stash={"s": h},
        )

    use = fp.stage(lambda p, x, *, skips: x["h"] + 2 * skips["s"] + x["c"][:, None], pop=["s"])
    stages, seen = [fp.stage(fn, stash=["s"]), use], []
    plan = cpu_plan(stages, S.one_f_one_b(2, 2))
    expected = fp.run(plan, (P, ()), (X, X))
    made = FaultAt(0, 1, "B", error=lambda t: seen.append(t))(stages)
    again = cpu_plan(made, S.one_f_one_b(2, 2))
    assert_same_result(expected, fp.run(again, (P, ()), (X, X)))
    assert 1 == len(seen)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: FaultAt(0, 0, "W"),
            "W starts after the gradients of the outputs have arrived(.|\n)*use 'I'",
        ),
        (lambda: FaultAt(0, 0, "X"), "kind is F, B, I or R; got 'X'"),
        (
            lambda: FaultAt(-1, "a", "F", error=3),
            "stage must be an index from 0; got -1(.|\n)*microbatch(.|\n)*error is an",
        ),
        (lambda: FaultAt(3, 0, "F")([fp.stage(plain)]), "got 1 stages, so the last stage is 0"),
    ],
)
def test_no_such_fault(call, text):
    with pytest.raises(fp.PlanError, match=text):
        call()


def test_faults_are_data():
    assert FaultAt(1, 2, "F") == FaultAt(1, 2, fp.Kind.F)
    assert "FaultAt(stage=1, microbatch=2, kind=<Kind.F: 'F'>" in repr(FaultAt(1, 2, "F"))
    assert fp.Kind.F is FaultAt(1, 2, "F").kind


def test_a_changed_model_is_refused_beneath_a_fault():
    """As without one: stages compute with copies, which do not have the change."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5))
    stage, params, _ = fp.from_module(model, name="part")
    stages = FaultAt(0, 0, "R")([stage])  # the schedule has no R
    plan = fp.make_plan(stages, S.fill_drain(1, 2), loss=F.mse_loss)
    x = torch.randn(4, 3)
    fp.run(plan, (params,), (x, x), seed=0)
    model[1].p = 0.1
    with pytest.raises(fp.PlanError, match="attributes of this .* were changed"):
        fp.run(plan, (params,), (x, x), seed=0)
